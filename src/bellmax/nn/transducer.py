"""The RNN transducer loss as a module, under any Ω."""

from __future__ import annotations

from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_choice
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.structures.transducer import Transducer
from bellmax.tensors import Gamma

_REDUCTIONS = ("none", "mean", "sum")


class TransducerLoss(Smoothed):
    """RNN transducer loss (RNN-T) of target labels, for the logits (..., T, U + 1, V) of the joint network.

    A log-softmax turns the logits into log-probabilities. The loss is minus the value of the
    :class:`bellmax.Transducer` with these scores. Under negentropy with γ = 1, the loss is the usual −log p(targets |
    frames). Under every Ω of bellmax with γ ≤ 1, the loss is greater than or equal to −log p(targets | frames), and
    thus at least 0. Under negentropy with γ > 1, the loss can be negative.

    Args:
        blank: The class of the blank, default 0.
        reduction: The reduction over the batch: "none", "mean" (the default) or "sum".
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import torch, bellmax as bx
    >>> loss = bx.nn.TransducerLoss()
    >>> logits = torch.zeros(2, 4, 3, 5, requires_grad=True)        # (B, T, U + 1, V)
    >>> targets = torch.tensor([[3, 1], [2, 0]])
    >>> loss(logits, targets, lengths=([4, 3], [2, 1]))
    tensor(6.3466, grad_fn=...)
    """

    @answers_near_misses
    def __init__(
        self,
        blank: int = 0,
        reduction: str = "mean",
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        super().__init__(omega, gamma)
        check_choice("reduction", reduction, _REDUCTIONS)
        self.blank, self.reduction = blank, reduction

    @answers_near_misses
    def forward(self, logits: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """Return the loss: a scalar, or a tensor of the batch shape if ``reduction`` is "none".

        Args:
            logits: The output (..., T, U + 1, V) of the joint network, before log-softmax.
            targets: The target labels, integers (..., U) without the blank.
            lengths: A pair (numbers of frames, numbers of labels). Each of the two is a tensor of integers with the
                batch shape, or one number. By default T and U.

        """
        p = Transducer.from_logits(logits, targets, blank=self.blank, lengths=lengths, omega=self.omega)
        loss = -p.value
        if self.reduction == "none":
            return loss
        return loss.mean() if self.reduction == "mean" else loss.sum()

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        return f"blank={self.blank}, reduction={self.reduction!r}, {super().extra_repr()}"
