"""The loss of a transducer."""

from __future__ import annotations

from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_choice
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.structures.transducer import Transducer
from bellmax.tensors import Gamma

_REDUCTIONS = ("none", "mean", "sum")


class TransducerLoss(Smoothed):
    """−DP_Ω of the normalised scores of a transducer: −log p(targets | frames) under negentropy, the usual loss.

    Under another Ω that ships with bellmax and γ ≤ 1 it is an upper bound of −log p, and so at least 0: each smoothed
    max is at most the log-sum-exp. Under negentropy with γ > 1 it can be negative. The loss of CTC for any convex Ω has
    a proof of its own, which does not cover transducers.

    Args:
        blank: the class of the blank.
        reduction: over the batch: "none", "mean" or "sum".
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

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
        """The loss of targets (..., U) for logits (..., T, U + 1, V), as in :meth:`bellmax.Transducer.from_logits`.

        ``lengths`` is (frames, labels). A scalar, or of the batch shape.
        """
        p = Transducer.from_logits(logits, targets, blank=self.blank, lengths=lengths, omega=self.omega)
        loss = -p.value
        if self.reduction == "none":
            return loss
        return loss.mean() if self.reduction == "mean" else loss.sum()

    def extra_repr(self) -> str:
        return f"blank={self.blank}, reduction={self.reduction!r}, {super().extra_repr()}"
