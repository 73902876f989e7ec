"""A loss of the batch shape as one number."""

from __future__ import annotations

from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.inputs import check_choice
from bellmax.targets import check_distribution

_REDUCTIONS = ("none", "mean", "sum", "token_mean")


def check_reduction(p: PathDistribution, reduction: str) -> None:
    check_distribution(p)
    check_choice("reduction", reduction, _REDUCTIONS)
    if reduction == "token_mean" and not p._has_steps:
        raise ValueError(f"reduction='token_mean' is for chains, got a {type(p).__name__}")


def reduce(p: PathDistribution, loss: Tensor, reduction: str) -> Tensor:
    """A loss of the batch shape as ``reduction`` asks. Sequences of which no step is kept are left out of means."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = p._num_kept
    if kept is None:
        if p._has_steps and not loss.numel():
            return loss.sum()
        return loss.mean() if reduction == "mean" else loss.sum() / (loss.numel() * p.event_shape[0])
    count = kept.sum() if reduction == "token_mean" else (kept > 0).sum()
    return loss.sum() / count.clamp(min=1)


def reduce_by_labels(loss: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """A loss of the batch shape as ``reduction`` asks, where "mean" is that of the loss by label, as torch has it for
    CTC: each loss is divided by the number of its labels, at least 1."""
    if reduction == "none":
        return loss
    if reduction == "sum" or not loss.numel():
        return loss.sum()
    return (loss / labels.clamp(min=1)).mean()
