"""A loss of the batch shape as one number."""

from __future__ import annotations

from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.inputs import check_choice

_REDUCTIONS = ("none", "mean", "sum", "token_mean")


def check_reduction(p: PathDistribution, reduction: str) -> None:
    check_choice("reduction", reduction, _REDUCTIONS)
    if reduction == "token_mean" and p._num_kept is None:
        raise ValueError(f"reduction='token_mean' is for chains, got a {type(p).__name__}")


def reduce(p: PathDistribution, loss: Tensor, reduction: str) -> Tensor:
    """A loss of the batch shape as ``reduction`` asks. Sequences of which no step is kept are left out of means."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if p._num_kept is None or p._keeps_all:
        return loss.mean() if reduction == "mean" else loss.sum() / max(1, loss.numel() * p.event_shape[0])
    count = p._num_kept.sum() if reduction == "token_mean" else (p._num_kept > 0).sum()
    return loss.sum() / count.clamp(min=1)
