"""Functions of ``torchaudio.functional``, for batches of any size and with right second derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bellmax.inputs import check_choice, check_tensor
from bellmax.structures.transducer import Transducer

__all__ = ["rnnt_loss"]


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
