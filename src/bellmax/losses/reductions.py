"""Reductions of a loss of the batch shape to one number."""

from __future__ import annotations

from torch import Tensor

from bellmax.distribution import PathDistribution, check_distribution
from bellmax.inputs import check_choice
from bellmax.targets import Targets

_REDUCTIONS = ("none", "mean", "sum", "token_mean")


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
    """Reduce a loss of the batch shape as torch's ``ctc_loss`` does.

    For "mean", each loss is first divided by the number of its labels, or by 1 if it has no labels.
    """
    if reduction == "none":
        return loss
    if reduction == "sum" or not loss.numel():
        return loss.sum()
    return (loss / labels.clamp(min=1)).mean()
