"""Connectionist temporal classification as a loss, under any Ω."""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_choice, check_tensor
from bellmax.losses.reductions import reduce_by_labels
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Negentropy, Regularizer
from bellmax.structures.ctc import CTC, concatenated, lattice_of
from bellmax.tensors import Gamma, divide_by_gamma, multiply_by_gamma, promote_half, without_rounding_below_zero
from bellmax.transforms import is_checked


class CTCLoss(Smoothed):
    """A loss for scores of labels at frames, given the sequence of labels: Σ_t max_Ω(θ_t) − DP_Ω(θ | target) ≥ 0.

    DP_Ω goes over the alignments of the target, see :class:`bellmax.CTC`. Under negentropy it is −log p(target) after
    ``log_softmax``, the usual CTC loss. Under a sparse Ω it is a loss of the same kind, whose gradient
    argmax_Ω(θ_t) − posterior is sparse at each frame. Scores need not be normalised: a constant that is added to a
    frame changes nothing.

    Args:
        blank: the class that stands for no label.
        reduction: "none" for the batch shape, "sum", or "mean": each loss is divided by the number of its labels, at
            least 1, and the mean is over the batch.
        zero_infinity: whether a target that its frames are too few for, or that has no alignment of a finite score, has
            loss 0 instead of +∞. Its gradient is 0 either way.
        omega: a :class:`~bellmax.Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". Under "l2",
            whose Ω is γ/2 at a vertex, the least loss is γ/2; under the others it is 0. A γ that is a parameter is
            learnt.
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.

    >>> from bellmax.nn import CTCLoss
    >>> scores = torch.tensor([[0.0, 2.0, 0.0], [1.5, 1.0, 0.0], [0.0, 0.0, 1.0]], requires_grad=True)  # (T, V)
    >>> targets = torch.tensor([1, 2])
    >>> CTCLoss()(scores, targets), CTCLoss(omega="entmax")(scores, targets)
    (tensor(0.3525, grad_fn=...), tensor(0.0498, grad_fn=...))
    """

    @answers_near_misses
    def __init__(
        self,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        super().__init__(omega, gamma)
        check_choice("reduction", reduction, ("none", "mean", "sum"))
        if blank < 0:
            raise ValueError(f"blank must be at least 0, got {blank}")
        lattice_of(blank)  # so that it is there for torch.compile
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    @answers_near_misses
    def distribution(self, scores: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> CTC:
        """The alignments of targets, for the scores less max_Ω of their frame: posteriors, best labels and so on."""
        if check_tensor("scores", scores).ndim < 2 or 0 in scores.shape[-2:] or not scores.is_floating_point():
            needed = "floating point of shape (..., T, V) with T, V >= 1"
            raise ValueError(f"scores must be {needed}, got {scores.dtype} of shape {tuple(scores.shape)}")
        members = scores.shape[:-2].numel()
        if check_tensor("targets", targets).ndim == 1 and members > 1:
            raise ValueError(concatenated(targets, members))
        p = CTC(scores, targets, lengths=lengths, blank=self.blank, omega=self.omega)
        if lengths is not None:
            past = torch.arange(scores.shape[-2], device=p.device) >= p.lengths[..., :1]
            scores = scores.masked_fill(past.unsqueeze(-1), 0)
        return p._with((_normalised(scores, p.omega).expand_as(p.log_probs), *p._scores[1:]), p.omega)

    @answers_near_misses
    def forward(self, scores: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """The loss of targets, >= 0.

        Args:
            scores: θ (..., T, V), of each label at each frame.
            targets: Integers (..., L), without the blank; (1, L) for one target that a batch shares.
            lengths: (frames, labels), integers of the batch shape or numbers, as in :class:`bellmax.CTC`.
        """
        p = self.distribution(scores, targets, lengths=lengths)
        loss = without_rounding_below_zero(-p.value)
        if self.zero_infinity:
            loss = loss.masked_fill(loss == math.inf, 0)
        return reduce_by_labels(loss, p.lengths[..., 1], self.reduction)

    def extra_repr(self) -> str:
        options = f"blank={self.blank}, reduction={self.reduction!r}, zero_infinity={self.zero_infinity}"
        return f"{super().extra_repr()}, {options}"


def _normalised(scores: Tensor, omega: Regularizer) -> Tensor:
    """θ_t − max_Ω(θ_t). Each path has one entry of a frame, so that DP_Ω is less by Σ_t max_Ω(θ_t)."""
    gamma = omega.gamma
    if isinstance(gamma, Tensor) and gamma.ndim:
        gamma = gamma.unsqueeze(-1)
    empty = scores.detach().amax(-1, keepdim=True) == -math.inf
    may_be_empty = not is_checked(empty) or bool(empty.any())
    scores = scores.masked_fill(empty, 0) if may_be_empty else scores
    if type(omega) is Negentropy:
        over = gamma.unsqueeze(-1) if isinstance(gamma, Tensor) else gamma
        normalised = multiply_by_gamma(divide_by_gamma(promote_half(scores), over).log_softmax(-1), over)
    else:
        omega = copy(omega)
        omega.gamma = gamma
        normalised = scores - omega.max(scores).unsqueeze(-1)
    return normalised.masked_fill(empty, -math.inf) if may_be_empty else normalised
