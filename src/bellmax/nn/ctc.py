"""The loss of connectionist temporal classification (CTC) as a module, under any Ω."""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_choice, check_tensor
from bellmax.losses.reductions import reduce_by_labels
from bellmax.modes import is_checked
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Negentropy, Regularizer
from bellmax.structures.ctc import CTC, concatenated, lattice_of
from bellmax.tensors import Gamma, divide_by_gamma, multiply_by_gamma, promote_half, without_rounding_below_zero


class CTCLoss(Smoothed):
    """CTC loss of target labels, for the score (..., T, V) of each label at each frame.

    Unlike in ``torch.nn.CTCLoss``, the batch is the first dimension, and the scores need no log-softmax. Under
    negentropy with γ = 1, the loss is the usual CTC loss −log p(target).

    For any Ω, the loss is Σ_t max_Ω(θ_t) − DP_Ω(θ | target) ≥ 0. Here θ_t are the scores of frame t, and max_Ω(θ_t) is
    their smoothed max. DP_Ω(θ | target) is the smoothed max of the scores of all alignments of the target, see
    :class:`bellmax.CTC`. If you add a constant to all scores of a frame, the loss does not change. Under a sparse Ω,
    many entries of the gradient are 0.

    Args:
        blank: The class of the blank, default 0.
        reduction: "none" for one loss per sequence, "sum", or "mean" (the default). For "mean", each loss is divided by
            the number of labels of its target (by 1 if the target is empty). These quotients are averaged over the
            batch.
        zero_infinity: If True, replace infinite losses by 0. The loss is infinite if the target needs more frames than
            the sequence has, or if all its alignments have score −∞. The gradient of an infinite loss is always 0,
            whether it is replaced or not. Default False.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`~bellmax.Regularizer`. Under "l2", the loss of a target is never less than γ/2. If γ of the
            regularizer is an ``nn.Parameter``, it is learned.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

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
        lattice_of(blank)  # fill the cache: torch.compile cannot trace the construction
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    @answers_near_misses
    def distribution(self, scores: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> CTC:
        """Return the distribution over alignments, a :class:`bellmax.CTC`, for example to decode or to sample.

        Its scores are normalized: from the scores of each frame, their smoothed max is subtracted. See :meth:`forward`
        for the arguments.
        """
        if check_tensor("scores", scores).ndim < 2 or 0 in scores.shape[-2:] or not scores.is_floating_point():
            needed = "floating point of shape (..., T, V) with T, V >= 1"
            raise ValueError(f"scores must be {needed}, got {scores.dtype} of shape {tuple(scores.shape)}")
        batch_size = scores.shape[:-2].numel()
        if check_tensor("targets", targets).ndim == 1 and batch_size > 1:
            raise ValueError(concatenated(targets, batch_size))
        p = CTC(scores, targets, lengths=lengths, blank=self.blank, omega=self.omega)
        if lengths is not None:
            is_padding = torch.arange(scores.shape[-2], device=p.device) >= p.lengths[..., :1]
            scores = scores.masked_fill(is_padding.unsqueeze(-1), 0)
        return p._with((_normalised(scores, p.omega).expand_as(p.log_probs), *p._scores[1:]), p.omega)

    @answers_near_misses
    def forward(self, scores: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """Return the loss, which is at least 0.

        Args:
            scores: The score θ (..., T, V) of each label at each frame. Pass logits. A log-softmax is not necessary.
            targets: The target labels, integers (..., L) without the blank. Pass (1, L) to use one target for the whole
                batch.
            lengths: A pair (numbers of frames, numbers of labels). Each of the two is a tensor of integers with the
                batch shape, or one number. By default T and L.
        """
        p = self.distribution(scores, targets, lengths=lengths)
        loss = without_rounding_below_zero(-p.value)
        if self.zero_infinity:
            loss = loss.masked_fill(loss == math.inf, 0)
        return reduce_by_labels(loss, p.lengths[..., 1], self.reduction)

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        options = f"blank={self.blank}, reduction={self.reduction!r}, zero_infinity={self.zero_infinity}"
        return f"{super().extra_repr()}, {options}"


def _normalised(scores: Tensor, omega: Regularizer) -> Tensor:
    """Return θ_t − max_Ω(θ_t), (..., T, V), with −∞ for frames that are all −∞.

    Each path has one entry per frame, so this subtracts Σ_t max_Ω(θ_t) from DP_Ω.
    """
    gamma = omega.gamma
    if isinstance(gamma, Tensor) and gamma.ndim:
        gamma = gamma.unsqueeze(-1)
    is_empty = scores.detach().amax(-1, keepdim=True) == -math.inf
    may_be_empty = not is_checked(is_empty) or bool(is_empty.any())
    scores = scores.masked_fill(is_empty, 0) if may_be_empty else scores
    if type(omega) is Negentropy:  # log_softmax is one fused kernel
        gamma = gamma.unsqueeze(-1) if isinstance(gamma, Tensor) else gamma
        normalised = multiply_by_gamma(divide_by_gamma(promote_half(scores), gamma).log_softmax(-1), gamma)
    else:
        omega = copy(omega)
        omega.gamma = gamma
        normalised = scores - omega.max(scores).unsqueeze(-1)
    return normalised.masked_fill(is_empty, -math.inf) if may_be_empty else normalised
