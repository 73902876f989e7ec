"""Reductions of a loss of the batch shape to one number."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from torch import Tensor

from bellmax.distribution import PathDistribution, check_distribution
from bellmax.inputs import check_choice
from bellmax.recursions.ragged import RaggedPaths
from bellmax.targets import Targets

_REDUCTIONS = ("none", "mean", "sum", "token_mean")
_F = TypeVar("_F", bound=Callable[..., Any])


def for_each_shape(loss: _F) -> _F:
    """Decorate a loss of (p, target or cost, …) so that p can be a :class:`RaggedPaths`, with a list of targets."""
    name = list(signature(loss).parameters)[1]

    @wraps(loss)
    def call(p: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
        if not isinstance(p, RaggedPaths):
            return cast(Tensor, loss(p, *args, reduction=reduction, **kwargs))
        check_ragged_reduction(reduction)
        targets, *rest = (kwargs.pop(name), *args) if name in kwargs else args
        if name == "target" and (kwargs.get("cost") is not None or any(isinstance(a, Tensor) for a in rest)):
            raise ValueError("cost and weight must be left out for problems of different sizes")
        losses = p.join_with(name, targets, lambda q, t: loss(q, t, *rest, reduction="none", **kwargs))
        return reduce_problems(losses, reduction)

    return cast(_F, call)


def check_ragged_reduction(reduction: str) -> None:
    """Raise an error if a :class:`RaggedPaths` does not support the reduction."""
    check_choice("reduction", reduction, _REDUCTIONS[:3])


def reduce_problems(losses: Tensor, reduction: str) -> Tensor:
    """Reduce the losses of problems of different sizes, (K,)."""
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def check_reduction(p: PathDistribution, reduction: str) -> None:
    """Raise an error if p is not a distribution, or does not support the reduction."""
    check_distribution(p)
    check_choice("reduction", reduction, _REDUCTIONS)
    if reduction == "token_mean" and not p._targets.has_steps:
        raise ValueError(f"reduction='token_mean' is only for chains, got a {type(p).__name__}")


def reduce(targets: Targets, loss: Tensor, reduction: str) -> Tensor:
    """Reduce a loss of the batch shape. Sequences whose steps are all masked do not count in means."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    steps = targets.num_steps
    if steps is None:
        if targets.has_steps and not loss.numel():
            return loss.sum()
        return loss.mean() if reduction == "mean" else loss.sum() / (loss.numel() * targets.event_shape[0])
    count = steps.sum() if reduction == "token_mean" else (steps > 0).sum()
    return loss.sum() / count.clamp(min=1)


def reduce_by_labels(loss: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Reduce a loss of the batch shape, with the number of labels of each sequence.

    For "mean", each loss is first divided by the number of its labels, or by 1 if it has no labels, as in torch's
    ``ctc_loss``. For "mean_volume", the sum is divided by the total number of labels. "mean_batch" is a plain mean.
    """
    if reduction == "none":
        return loss
    if reduction == "sum" or not loss.numel():
        return loss.sum()
    if reduction == "mean_volume":
        return loss.sum() / labels.sum().clamp(min=1)
    return (loss if reduction == "mean_batch" else loss / labels.clamp(min=1)).mean()
