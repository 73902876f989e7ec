"""A replacement for the CTC loss of torch: ``torch.nn.functional.ctc_loss`` and ``torch.nn.CTCLoss``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bellmax.inputs import as_lengths, check_choice, check_tensor
from bellmax.losses.reductions import reduce_by_labels
from bellmax.modes import is_checked
from bellmax.programs.checks import check_lengths
from bellmax.structures.ctc import CTC

__all__ = ["CTCLoss", "ctc_loss"]

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
    """Return −log p(targets), with the arguments and results of ``torch.nn.functional.ctc_loss``.

    Differences from torch:

    - The gradient is the derivative of the loss with respect to ``log_probs``. torch adds exp(log_probs) to this
      derivative. If ``log_probs`` is the output of ``log_softmax``, the term that torch adds has no effect on the
      gradient of the logits.
    - The loss is differentiable to any order, and by forward mode.
    - Log-probabilities may be −∞. A target without an alignment has loss +∞ and gradient 0, not NaN.
    - A blank, or a label out of range, in the targets raises ``ValueError``. Padding is not checked.
    - Half precision gives float32.

    Args:
        log_probs: Log-probabilities (T, N, C), or (T, C) for one sequence.
        targets: Padded labels (N, S), or the labels of all sequences concatenated, (sum of target_lengths,).
        input_lengths: The number of frames of each sequence, (N,), as a tensor, a list or a tuple, or one number for
            one sequence.
        target_lengths: The number of labels of each sequence, (N,), or one number for one sequence.
        blank: The class of the blank, default 0.
        reduction: "none" for the shape (N,), "sum", or "mean" (the default): each loss is divided by the number of
            labels of its target (by 1 if the target is empty), and the results are averaged over the batch.
        zero_infinity: If True, replace infinite losses by 0. Default False.

    >>> log_probs = torch.zeros(4, 2, 3).log_softmax(-1).requires_grad_()  # four frames, two sequences
    >>> ctc_loss(log_probs, torch.tensor([1, 2, 2]), (4, 3), (2, 1), reduction="none")
    tensor([1.6864, 1.5041], grad_fn=...)
    """
    check_choice("reduction", reduction, _REDUCTIONS)
    if check_tensor("log_probs", log_probs).ndim not in (2, 3):
        raise ValueError(f"log_probs must have shape (T, N, C) or (T, C), got {tuple(log_probs.shape)}")
    scores = log_probs.unsqueeze(0) if log_probs.ndim == 2 else log_probs.transpose(0, 1)
    frames = _as_lengths("input_lengths", input_lengths, scores)
    labels = _as_lengths("target_lengths", target_lengths, scores)
    targets = _as_padded(targets, labels)
    for name, lengths, padded in (("input_lengths", frames, scores), ("target_lengths", labels, targets)):
        if is_checked(lengths):
            check_lengths(name, lengths, 0, padded.shape[1])
    loss = _negative_log_likelihood(scores, targets, frames, labels, blank)
    if zero_infinity:
        loss = loss.masked_fill(loss == math.inf, 0)
    loss = reduce_by_labels(loss, labels, reduction)
    return loss.squeeze(0) if reduction == "none" and log_probs.ndim == 2 else loss


class CTCLoss(nn.Module):
    """CTC loss as a module, with the arguments of ``torch.nn.CTCLoss``.

    It calls :func:`ctc_loss`, which lists the differences from torch.

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
        """Return the loss. See :func:`ctc_loss` for the arguments."""
        options = self.blank, self.reduction, self.zero_infinity
        return ctc_loss(log_probs, targets, input_lengths, target_lengths, *options)


def _negative_log_likelihood(scores: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """Return −log p(targets), (N,), for scores (N, T, C) and targets (N, S).

    :class:`CTC` needs a frame. A sequence without frames has loss 0 for an empty target and +∞ for any other target.
    """
    is_empty = frames == 0
    if is_checked(is_empty) and not bool(is_empty.any()):
        return -CTC(scores, targets, lengths=(frames, labels), blank=blank).value
    scores = scores.masked_fill(is_empty[:, None, None], 0)
    loss = -CTC(scores, targets, lengths=(frames + is_empty, labels), blank=blank).value
    return torch.where(is_empty, torch.where(labels == 0, 0.0, math.inf).to(loss.dtype), loss)


def _as_lengths(name: str, lengths: Tensor | Sequence[int] | int, scores: Tensor) -> Tensor:
    """Return lengths (N,) on the device of scores (N, T, C). As in torch, the argument may be on the CPU."""
    lengths = lengths.to(scores.device) if isinstance(lengths, Tensor) else lengths
    tensor = as_lengths(name, lengths, scores.device)
    if tensor.numel() != len(scores):
        raise ValueError(f"{name} must be {len(scores)} numbers, one for each sequence, got {tensor.numel()}")
    return tensor.reshape(-1)


def _as_padded(targets: Tensor, labels: Tensor) -> Tensor:
    """Return targets padded to (N, S), from padded targets or from the concatenation of all targets."""
    targets = check_tensor("targets", targets).to(device=labels.device, dtype=torch.int64)
    if targets.ndim == 2 and len(targets) == len(labels):
        return targets
    total = int(labels.sum())
    if targets.shape != (total,):
        forms = f"({len(labels)}, S), or ({total},), the sum of target_lengths"
        raise ValueError(f"targets must have shape {forms}, got {tuple(targets.shape)}")
    max_labels = int(labels.max()) if total else 0
    positions = (labels.cumsum(0) - labels).unsqueeze(1) + torch.arange(max_labels, device=labels.device)
    return targets[positions.clamp(max=max(total - 1, 0))]
