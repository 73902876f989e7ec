"""Functions of ``torchaudio.functional``, for batches of any size and with right second derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bellmax.inputs import check_choice, check_tensor
from bellmax.layouts.values import check_lengths
from bellmax.structures.ctc import CTC
from bellmax.structures.transducer import Transducer
from bellmax.transforms import is_checked

__all__ = ["TokenSpan", "forced_align", "merge_tokens", "rnnt_loss"]


def forced_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    blank: int = 0,
) -> tuple[Tensor, Tensor]:
    """The best alignment of CTC, with the arguments and results of ``torchaudio.functional.forced_align``.

    Differences: B may be any number, with lengths that differ. Past the frames of a sequence labels are the blank, and
    scores 0. Padding of targets may hold anything. Among alignments with the same score another one may be chosen.

    Args:
        log_probs: (B, T, C).
        targets: integers (B, L), without the blank.
        input_lengths: (B,), the frames of each sequence; T by default.
        target_lengths: (B,), the labels of each sequence; L by default.
        blank: the class that stands for no label.

    Returns:
        The label of each frame (B, T), of the targets' dtype, and its log-probability (B, T).

    >>> log_probs = torch.tensor([[[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]]]).log()
    >>> labels, scores = forced_align(log_probs, torch.tensor([[1, 2]]))
    >>> labels
    tensor([[1, 0, 2]])
    >>> merge_tokens(labels[0], scores[0].exp())
    [TokenSpan(token=1, start=0, end=1, score=0.8...), TokenSpan(token=2, start=2, end=3, score=0.69...)]
    """
    if log_probs.ndim != 3 or targets.ndim != 2:
        got = f"{tuple(log_probs.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"log_probs and targets must have shapes (B, T, C) and (B, L), got {got}")
    for name, own, most in (("input_lengths", input_lengths, log_probs), ("target_lengths", target_lengths, targets)):
        if own is not None and is_checked(own):
            check_lengths(name, own, int(most is log_probs), most.shape[1])
    frames = log_probs.shape[1] if input_lengths is None else input_lengths
    count = targets.shape[1] if target_lengths is None else target_lengths
    p = CTC(log_probs, targets, lengths=(frames, count), blank=blank, omega="hard")
    labels = p.best_labels()
    if is_checked(labels) and bool((labels[:, :1] < 0).any()):
        where = int((labels[:, 0] < 0).nonzero()[0])
        frames, count = p.lengths[where].tolist()
        given = p.targets[where, :count]
        raise ValueError(
            f"targets must have an alignment of finite score, got {count} labels, {int((given.diff() == 0).sum())} of "
            f"them equal to the one before, for {frames} frames of sequence {where}"
        )
    past = labels < 0
    labels = labels.masked_fill(past, blank)
    scores = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).masked_fill(past, 0)
    return labels.to(targets.dtype), scores


@dataclass
class TokenSpan:
    """The frames start ≤ t < end of a token, and the mean of their scores."""

    token: int
    start: int
    end: int
    score: float

    def __len__(self) -> int:
        return self.end - self.start


def merge_tokens(tokens: Tensor, scores: Tensor, blank: int = 0) -> list[TokenSpan]:
    """The tokens of an alignment with their frames, as ``torchaudio.functional.merge_tokens`` gives them.

    Args:
        tokens: (T,), the label of each frame, as from :func:`forced_align` for one sequence.
        scores: (T,), of each frame: log-probabilities, or probabilities.
        blank: the class that stands for no label.

    """
    if tokens.ndim != 1 or scores.shape != tokens.shape:
        got = f"{tuple(tokens.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"tokens and scores must have one shape (T,), got {got}")
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
    """The loss of a transducer, −log p(targets), as ``torchaudio.functional.rnnt_loss``.

    Unlike there, second derivatives are right, integers may have any integer type, and on the CPU values are checked.

    Args:
        logits: (B, T, U + 1, V), the output of the joint network.
        targets: integers (B, U), without the blank; past their length anything.
        logit_lengths: integers (B,), the frames of each sequence.
        target_lengths: integers (B,), the labels of each sequence.
        blank: the class of the blank; a negative one counts from the last, so that −1 is V − 1.
        clamp: the gradient of each sequence's loss is cut to [−clamp, clamp], if above 0; there is no second derivative
            then.
        reduction: "none", "mean" or "sum" over the batch.
        fused_log_softmax: whether logits are normalised here; if not, they are log-probabilities already.

    >>> logits = torch.zeros(1, 4, 3, 5, requires_grad=True)
    >>> targets, frames, labels = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    >>> rnnt_loss(logits, targets, frames, labels)
    tensor(7.3540, grad_fn=...)
    """
    check_choice("reduction", reduction, ("none", "mean", "sum"))
    if check_tensor("logits", logits).ndim != 4 or 0 in logits.shape[1:]:
        raise ValueError(f"logits must have shape (B, T, U + 1, V), got {tuple(logits.shape)}")
    classes = logits.shape[-1]
    if not -classes <= blank < classes:
        raise ValueError(f"blank must be from {-classes} to {classes - 1}, got {blank}")

    def costs(logits: Tensor) -> Tensor:
        options: Any = {"blank": blank % classes, "normalized": not fused_log_softmax}
        return -Transducer.from_logits(logits, targets, lengths=(logit_lengths, target_lengths), **options).value

    loss = _Clamped.apply(logits, costs, clamp) if clamp > 0 else costs(logits)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


class _Clamped(torch.autograd.Function):
    """Costs (B,) of logits, whose gradients are cut before they are weighted."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, costs: Any, clamp: float) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            found: Tensor = costs(leaf)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
        ctx.save_for_backward(gradient.clamp_(-clamp, clamp))
        return found.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None, None].to(gradient.dtype), None, None
