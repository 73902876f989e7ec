"""Dynamic time warping as a loss and as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.inputs import Lengths, Numbers, answers_near_misses, as_floating, as_lengths, as_pair, as_series
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.series.costs import Cost
from bellmax.series.measure import measure_of
from bellmax.series.pairs import check_options, check_pair
from bellmax.series.pairs import dtw as dtw_of_series
from bellmax.structures.dtw import StepWeights
from bellmax.tensors import Gamma


class _Warping(Smoothed):
    """Base of the modules for two series. A cost that is a module is registered, and may be learnt."""

    def __init__(self, omega: str | Regularizer, gamma: Gamma | None, cost: Cost, band: float | None) -> None:
        super().__init__(omega, gamma)
        measure_of(cost, band, self.omega, None)
        self.cost, self.band = cost, band

    def extra_repr(self) -> str:
        cost = "" if isinstance(self.cost, torch.nn.Module) else f", cost={self.cost!r}"
        return f"{super().extra_repr()}{cost}, band={self.band}"


class DTWLoss(_Warping):
    """Smoothed dynamic time warping of two series, or a divergence based on it: :func:`bellmax.dtw` as a module.

    Args:
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        cost: of a match, as in :func:`bellmax.dtw`: a name, a function or a module.
        divergence: None for the value, which may be negative and whose minimum is not at x = y; or "debiased", "sharp",
            "mean_cost", which are 0 there.
        band: half the width of a band around the diagonal, as in :class:`bellmax.DTW`; None for no band.
        reduction: over the batch: "none", "mean" or "sum".
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.
        normalize: "path" or "length", as in :func:`bellmax.dtw`, so that long and short series have the same weight in
            the mean of a batch; None for sums.
        step_weights: factors of the cost by the kind of the move, as in :class:`bellmax.DTW`.
        step_penalties: terms by the kind of the move, as in :class:`bellmax.DTW`; a parameter may be learnt.
        open_begin: whether x may be matched with a part of y that begins anywhere.
        open_end: whether that part may end anywhere.

    >>> loss = DTWLoss(gamma=0.1, divergence="debiased")
    >>> x = torch.tensor([0.0, 0.0, 1.0, 0.0]).unsqueeze(-1)
    >>> y = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(-1)
    >>> loss(x, x), loss(x, y)
    (tensor(0.), tensor(0.0549))
    """

    @answers_near_misses
    def __init__(
        self,
        omega: str | Regularizer = "negentropy",
        cost: Cost = "sqeuclidean",
        divergence: str | None = None,
        band: float | None = None,
        reduction: str = "mean",
        *,
        gamma: Gamma | None = None,
        normalize: str | None = None,
        step_weights: StepWeights | None = None,
        step_penalties: StepWeights | None = None,
        open_begin: bool = False,
        open_end: bool = False,
    ) -> None:
        super().__init__(omega, gamma, cost, band)
        measure_of(cost, band, self.omega, divergence)
        check_options(normalize, reduction)
        self.divergence, self.normalize, self.reduction = divergence, normalize, reduction
        self.step_weights, self.step_penalties = step_weights, step_penalties
        self.open_begin, self.open_end = open_begin, open_end

    @answers_near_misses
    def forward(self, x: Numbers, y: Numbers, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """The loss of series x (..., N, D) and y (..., M, D): a scalar, or of the batch shape.

        For univariate series (B, N), pass ``x.unsqueeze(-1)``. For one pair of multivariate series (N, D), pass
        ``x.unsqueeze(0)``: two matrices with several columns are refused, since either may be meant. ``lengths`` is a
        pair, the lengths of x and of y, as in :func:`bellmax.dtw`.
        """
        x, y = as_series("x", x), as_series("y", y)
        if x.ndim == y.ndim == 2 and max(x.shape[1], y.shape[1]) > 1:
            raise ValueError(
                f"x and y must have shape (batch, length, features), got {tuple(x.shape)} and {tuple(y.shape)}. For "
                "univariate series (batch, length), pass x.unsqueeze(-1) and y.unsqueeze(-1); for one pair of series "
                "(length, features), pass x.unsqueeze(0) and y.unsqueeze(0)"
            )
        return dtw_of_series(
            x,
            y,
            cost=self.cost,
            lengths=lengths,
            band=self.band,
            omega=self.omega,
            divergence=self.divergence,
            normalize=self.normalize,
            reduction=self.reduction,
            step_weights=self.step_weights,
            step_penalties=self.step_penalties,
            open_begin=self.open_begin,
            open_end=self.open_end,
        )

    def extra_repr(self) -> str:
        options = f"divergence={self.divergence!r}, normalize={self.normalize!r}, reduction={self.reduction!r}"
        return f"{super().extra_repr()}, {options}"


class SoftAlignment(_Warping):
    """The expected alignment of two series, ∇DTW_Ω, as a layer: the probability that two elements are matched.

    Args:
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        cost: of a match, as in :func:`bellmax.dtw`: a name, a function or a module.
        band: half the width of a band around the diagonal, as in :class:`bellmax.DTW`; None for no band.
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.

    >>> align = SoftAlignment("l2")
    >>> align(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.0000, 1.0000]])
    """

    @answers_near_misses
    def __init__(
        self,
        omega: str | Regularizer = "negentropy",
        cost: Cost = "sqeuclidean",
        band: float | None = None,
        *,
        gamma: Gamma | None = None,
    ) -> None:
        super().__init__(omega, gamma, cost, band)

    @answers_near_misses
    def forward(self, x: Numbers, y: Numbers, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """The expected alignment (..., N, M) of series x (..., N, D) and y (..., M, D), 0 past their ends.

        ``lengths`` is a pair, the lengths of x and of y, as in :func:`bellmax.dtw`. Differentiable in x and y.
        """
        measure = measure_of(self.cost, self.band, self.omega, None)
        x, y = as_floating([as_series("x", x), as_series("y", y)])
        if lengths is not None:  # an int would cut the series
            of_x, of_y = (as_lengths(f"lengths[{n}]", own, x.device) for n, own in enumerate(as_pair(lengths)))
            lengths = of_x, of_y
        alignments, _ = measure.alignments(*check_pair(x, y, lengths, measure.gamma_shape))
        return alignments.expected_path.to(x.dtype)
