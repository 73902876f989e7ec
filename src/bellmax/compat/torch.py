"""A replacement for torch's own CTC loss: ``torch.nn.functional.ctc_loss`` and ``torch.nn.CTCLoss``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bellmax.inputs import as_lengths, check_choice, check_tensor
from bellmax.losses.reductions import reduce_by_labels
from bellmax.programs.values import check_lengths
from bellmax.structures.ctc import CTC
from bellmax.transforms import is_checked

_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int] | int,
    target_lengths: Tensor | Sequence[int] | int,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """−log p(targets), with the arguments and results of ``torch.nn.functional.ctc_loss``.

    Differences: the gradient is that of the loss in ``log_probs`` itself, whether or not they come from
    ``log_softmax``, where it is the same as torch's. (torch adds exp(log_probs), which only a ``log_softmax`` takes
    away again.) It is differentiable to any order, and by forward mode. −∞ is a log-probability like any other, and a
    target without an alignment has loss +∞ and gradient 0, not NaN. A blank or a label out of range in the targets is a
    ``ValueError``. Half precision gives float32. ``targets`` may be padded with anything.

    Args:
        log_probs: (T, N, C), or (T, C) for one sequence.
        targets: (N, S) padded, or all sequences one after another, (sum of target_lengths,).
        input_lengths: the frames of each sequence, (N,): a tensor, a list or a tuple; a number for one sequence.
        target_lengths: the labels of each sequence, likewise.
        blank: the class that stands for no label.
        reduction: "none" for (N,), "sum", or "mean": each loss is divided by the number of its labels, at least 1, and
            the mean is over the batch.
        zero_infinity: whether an infinite loss is 0 instead.

    >>> log_probs = torch.zeros(4, 2, 3).log_softmax(-1).requires_grad_()  # four frames, two sequences
    >>> ctc_loss(log_probs, torch.tensor([1, 2, 2]), (4, 3), (2, 1), reduction="none")
    tensor([1.6864, 1.5041], grad_fn=...)
    """
    check_choice("reduction", reduction, _REDUCTIONS)
    if check_tensor("log_probs", log_probs).ndim not in (2, 3):
        raise ValueError(f"log_probs must have shape (T, N, C) or (T, C), got {tuple(log_probs.shape)}")
    scores = log_probs.unsqueeze(0) if log_probs.ndim == 2 else log_probs.transpose(0, 1)
    frames = _lengths("input_lengths", input_lengths, scores)
    labels = _lengths("target_lengths", target_lengths, scores)
    targets = _padded(targets, labels)
    for name, own, most in (("input_lengths", frames, scores), ("target_lengths", labels, targets)):
        if is_checked(own):
            check_lengths(name, own, 0, most.shape[1])
    loss = _losses(scores, targets, frames, labels, blank)
    if zero_infinity:
        loss = loss.masked_fill(loss == math.inf, 0)
    loss = reduce_by_labels(loss, labels, reduction)
    return loss.squeeze(0) if reduction == "none" and log_probs.ndim == 2 else loss


class CTCLoss(nn.Module):
    """:func:`ctc_loss` as a module, with the arguments of ``torch.nn.CTCLoss``.

    >>> loss = CTCLoss(blank=2, reduction="sum")
    >>> loss(torch.zeros(4, 3).log_softmax(-1), torch.tensor([[0, 1]]), (4,), (2,))
    tensor(1.6864)
    """

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__()
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    def forward(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int] | int,
        target_lengths: Tensor | Sequence[int] | int,
    ) -> Tensor:
        """The loss; arguments as in :func:`ctc_loss`."""
        options = self.blank, self.reduction, self.zero_infinity
        return ctc_loss(log_probs, targets, input_lengths, target_lengths, *options)


def _losses(scores: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """−log p(targets), (N,). A sequence without frames has the empty target alone."""
    is_empty = frames == 0
    if is_checked(is_empty) and not bool(is_empty.any()):
        return -CTC(scores, targets, lengths=(frames, labels), blank=blank).value
    scores = scores.masked_fill(is_empty[:, None, None], 0)
    loss = -CTC(scores, targets, lengths=(frames + is_empty, labels), blank=blank).value
    return torch.where(is_empty, torch.where(labels == 0, 0.0, math.inf).to(loss.dtype), loss)


def _lengths(name: str, given: Tensor | Sequence[int] | int, scores: Tensor) -> Tensor:
    """(N,), on the device of scores (N, T, C); torch takes lengths on the CPU too."""
    lengths = as_lengths(name, given.to(scores.device) if isinstance(given, Tensor) else given, scores.device)
    if lengths.numel() != len(scores):
        raise ValueError(f"{name} must be {len(scores)} numbers, one for each sequence, got {lengths.numel()}")
    return lengths.reshape(-1)


def _padded(targets: Tensor, labels: Tensor) -> Tensor:
    """(N, S), from targets in this form or one after another."""
    targets = check_tensor("targets", targets).to(device=labels.device, dtype=torch.int64)
    if targets.ndim == 2 and len(targets) == len(labels):
        return targets
    total = int(labels.sum())
    if targets.shape != (total,):
        forms = f"({len(labels)}, S), or ({total},), the sum of target_lengths"
        raise ValueError(f"targets must have shape {forms}, got {tuple(targets.shape)}")
    most = int(labels.max()) if total else 0
    places = (labels.cumsum(0) - labels).unsqueeze(1) + torch.arange(most, device=labels.device)
    return targets[places.clamp(max=max(total - 1, 0))]
