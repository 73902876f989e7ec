"""Replacements for functions of ``torchaudio.functional``, for batches of any size, with correct second derivatives.

As in torchaudio, wrong shapes, dtypes, lengths and blanks raise ``RuntimeError``. Wrong labels and options raise
``ValueError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bellmax.inputs import check_choice, check_tensor
from bellmax.modes import is_checked
from bellmax.programs.checks import check_lengths
from bellmax.structures.ctc import CTC
from bellmax.structures.transducer import Transducer

__all__ = ["RNNTLoss", "TokenSpan", "forced_align", "merge_tokens", "rnnt_loss"]


def forced_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    blank: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the best CTC alignment, with the arguments and results of ``torchaudio.functional.forced_align``.

    Differences from the original:

    - The batch may have any size, and sequences of different lengths. In the padding, labels are the blank and scores
      are 0.
    - The padding of targets is not checked.
    - If several alignments have the same score, the result can differ from torchaudio's.

    Args:
        log_probs: Log-probabilities (B, T, C).
        targets: Integers (B, L), without the blank.
        input_lengths: The number of frames (B,) of each sequence, default T.
        target_lengths: The number of labels (B,) of each sequence, default L.
        blank: The class of the blank, default 0.

    Returns:
        The label of each frame (B, T), of the targets' dtype, and its log-probability (B, T).

    >>> log_probs = torch.tensor([[[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]]]).log()
    >>> labels, scores = forced_align(log_probs, torch.tensor([[1, 2]]))
    >>> labels
    tensor([[1, 0, 2]])
    >>> merge_tokens(labels[0], scores[0].exp())
    [TokenSpan(token=1, start=0, end=1, score=0.8...), TokenSpan(token=2, start=2, end=3, score=0.69...)]
    """
    batch = log_probs.shape[0]
    _check(log_probs.ndim == 3, f"log_probs must have shape (B, T, C), got {tuple(log_probs.shape)}")
    _check(log_probs.is_floating_point(), f"log_probs must be floating point, got dtype {log_probs.dtype}")
    needed = f"targets must have shape (B, L) with B = {batch}, got {tuple(targets.shape)}"
    _check(targets.ndim == 2 and len(targets) == batch, needed)
    _check_integers("targets", targets, log_probs)
    classes = log_probs.shape[2]
    _check(0 <= blank < classes, f"blank must be from 0 to {classes - 1}, got {blank}")
    _check_lengths("input_lengths", input_lengths, log_probs, 1, log_probs.shape[1])
    _check_lengths("target_lengths", target_lengths, log_probs, 0, targets.shape[1])
    frames = log_probs.shape[1] if input_lengths is None else input_lengths
    count = targets.shape[1] if target_lengths is None else target_lengths
    p = CTC(log_probs, targets, lengths=(frames, count), blank=blank, omega="hard")
    labels = p.decode()
    if is_checked(labels) and bool((labels[:, :1] < 0).any()):
        sequence = int((labels[:, 0] < 0).nonzero()[0])
        frames, count = p.lengths[sequence].tolist()
        repeats = int((p.targets[sequence, :count].diff() == 0).sum())
        got = f"got {count} labels with {repeats} adjacent repeats for {frames} frames of sequence {sequence}"
        _check(count + repeats <= frames, f"targets length is too long for CTC: {got}")
        raise ValueError(f"targets must have an alignment of finite score, {got}")
    is_padding = labels < 0
    labels = labels.masked_fill(is_padding, blank)
    scores = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).masked_fill(is_padding, 0)
    return labels.to(targets.dtype), scores


@dataclass
class TokenSpan:
    """A token of an alignment, which :func:`merge_tokens` returns.

    The token has the frames from ``start`` to ``end`` − 1, and ``score`` is the mean score of these frames.

    >>> span = TokenSpan(token=1, start=2, end=5, score=0.5)
    >>> len(span)
    3
    """

    token: int
    start: int
    end: int
    score: float

    def __len__(self) -> int:
        return self.end - self.start


def merge_tokens(tokens: Tensor, scores: Tensor, blank: int = 0) -> list[TokenSpan]:
    """Return the tokens of an alignment with their frames, after merging repeats and removing blanks.

    The arguments and results are the same as for ``torchaudio.functional.merge_tokens``.

    Args:
        tokens: The label (T,) of each frame, such as the result of :func:`forced_align` for one sequence.
        scores: The log-probability or probability (T,) of each frame.
        blank: The class of the blank, default 0.

    >>> merge_tokens(torch.tensor([0, 1, 1, 0, 2]), torch.tensor([0.5, 0.25, 0.75, 1.0, 0.5]))
    [TokenSpan(token=1, start=1, end=3, score=0.5), TokenSpan(token=2, start=4, end=5, score=0.5)]
    """
    if tokens.ndim != 1 or scores.shape != tokens.shape:
        got = f"{tuple(tokens.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"tokens and scores must both have shape (T,), got {got}")
    if not len(tokens):
        return []
    values, counts = torch.unique_consecutive(tokens, return_counts=True)
    ends = counts.cumsum(0)
    runs = zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return [TokenSpan(token, a, b, scores[a:b].mean().item()) for token, a, b in runs if token != blank]


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
) -> Tensor:
    """Return the RNN transducer loss −log p(targets), with the arguments of ``torchaudio.functional.rnnt_loss``.

    The loss has the dtype of the logits. Differences from torchaudio: second derivatives are correct, integers may have
    any integer type, and labels are checked on the CPU.

    Args:
        logits: The output (B, T, U + 1, V) of the joint network.
        targets: Integers (B, U), without the blank. The padding may have any values.
        logit_lengths: The number of frames of each sequence, integers (B,).
        target_lengths: The number of labels of each sequence, integers (B,).
        blank: The class of the blank. A negative value counts from the end, so the default −1 is V − 1.
        clamp: If positive, each entry of the gradient of the loss of each sequence is clamped to the interval [−clamp,
            clamp], and second derivatives are not available. Default −1, no clamping.
        reduction: The reduction over the batch: "none", "mean" (the default) or "sum".
        fused_log_softmax: If True (the default), normalize the logits by a log-softmax. If False, the logits must be
            log-probabilities.

    >>> logits = torch.zeros(1, 4, 3, 5, requires_grad=True)
    >>> targets, frames, labels = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    >>> rnnt_loss(logits, targets, frames, labels)
    tensor(7.3540, grad_fn=...)
    """
    check_choice("reduction", reduction, ("none", "mean", "sum"))
    is_shape = check_tensor("logits", logits).ndim == 4 and 0 not in logits.shape[1:]
    _check(is_shape, f"logits must have shape (B, T, U + 1, V), got {tuple(logits.shape)}")
    _check(logits.is_floating_point(), f"logits must be floating point, got dtype {logits.dtype}")
    batch, frames, labels, classes = logits.shape
    needed = f"targets must have shape (B, U) = {(batch, labels - 1)}, got {tuple(targets.shape)}"
    _check(targets.shape == (batch, labels - 1), needed)
    _check_integers("targets", targets, logits)
    _check_lengths("logit_lengths", logit_lengths, logits, 1, frames)
    _check_lengths("target_lengths", target_lengths, logits, 0, labels - 1)
    _check(-classes <= blank < classes, f"blank must be from {-classes} to {classes - 1}, got {blank}")

    def costs(logits: Tensor) -> Tensor:
        options: Any = {"blank": blank % classes, "normalized": not fused_log_softmax}
        return -Transducer.from_logits(logits, targets, lengths=(logit_lengths, target_lengths), **options).value

    loss = _ClampedGradient.apply(logits, costs, clamp) if clamp > 0 else costs(logits)
    if reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum()
    return loss.to(logits.dtype)


class RNNTLoss(nn.Module):
    """RNN transducer loss as a module, with the arguments of ``torchaudio.transforms.RNNTLoss``.

    It calls :func:`rnnt_loss`, which lists the differences from torchaudio.

    >>> logits = torch.zeros(1, 4, 3, 5, requires_grad=True)
    >>> RNNTLoss()(logits, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))
    tensor(7.3540, grad_fn=...)
    """

    def __init__(
        self, blank: int = -1, clamp: float = -1.0, reduction: str = "mean", fused_log_softmax: bool = True
    ) -> None:
        super().__init__()
        self.blank, self.clamp, self.reduction, self.fused_log_softmax = blank, clamp, reduction, fused_log_softmax

    def forward(self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """Return the loss of targets (B, U) for logits (B, T, U + 1, V), with lengths (B,), see :func:`rnnt_loss`."""
        options = self.blank, self.clamp, self.reduction, self.fused_log_softmax
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, *options)


def _check(condition: bool, message: str) -> None:
    """Raise ``RuntimeError``, as torchaudio does, if the condition is False."""
    if not condition:
        raise RuntimeError(message)


def _check_integers(name: str, tensor: Tensor, scores: Tensor) -> None:
    """Raise ``RuntimeError`` if a tensor is not of an integer type, or not on the device of the scores."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    _check(is_integer, f"{name} must hold integers, got dtype {tensor.dtype}")
    device = scores.device
    _check(tensor.device == device, f"{name} must be on the device of the scores, {device}, got {tensor.device}")


def _check_lengths(name: str, lengths: Tensor | None, scores: Tensor, minimum: int, maximum: int) -> None:
    """Raise ``RuntimeError`` if lengths are not integers (B,) from ``minimum`` to ``maximum``."""
    if lengths is None:
        return
    batch = len(scores)
    _check(lengths.shape == (batch,), f"{name} must have shape (B,) with B = {batch}, got {tuple(lengths.shape)}")
    _check_integers(name, lengths, scores)
    if is_checked(lengths):
        try:
            check_lengths(name, lengths, minimum, maximum)
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class _ClampedGradient(torch.autograd.Function):
    """Costs (B,) of logits, with gradients clamped before they are multiplied by the incoming gradient.

    Autograd could only clamp the product. The forward pass computes the gradient, so it is once differentiable.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, costs: Any, clamp: float) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            values: Tensor = costs(leaf)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        ctx.save_for_backward(gradient.clamp_(-clamp, clamp))
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None, None].to(gradient.dtype), None, None
