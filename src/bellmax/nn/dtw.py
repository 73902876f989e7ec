"""Dynamic time warping (DTW) as a loss and as a layer."""

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
    """Base class of the modules that align two series. A cost that is a module becomes a submodule."""

    def __init__(self, omega: str | Regularizer, gamma: Gamma | None, cost: Cost, band: float | None) -> None:
        super().__init__(omega, gamma)
        measure_of(cost, band, self.omega, None)  # raises ValueError for invalid options
        self.cost, self.band = cost, band

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        name = self.cost if isinstance(self.cost, str) else getattr(self.cost, "__name__", type(self.cost).__name__)
        cost = "" if isinstance(self.cost, torch.nn.Module) else f", cost={name!r}"
        return f"{super().extra_repr()}{cost}, band={self.band}"


class DTWLoss(_Warping):
    """Soft-DTW loss of two batches of series, or a divergence based on it: :func:`bellmax.dtw` as a module.

    Args:
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`: a name, a function or a module. Default
            "sqeuclidean".
        divergence: None (the default) for the value of soft-DTW, or a divergence: "debiased", "sharp" or "mean_cost",
            as in :func:`bellmax.dtw`. The value can be negative, and x = y does not minimize it. A divergence is 0 at x
            = y.
        band: The half-width of a Sakoe–Chiba band around the diagonal, as in :class:`bellmax.DTW`. Default None, no
            band.
        reduction: The reduction over the batch: "none", "mean" (the default) or "sum".
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        normalize: "path" or "length", as in :func:`bellmax.dtw`. Without normalization (None, the default), long series
            have larger losses than short series and dominate the mean over a batch.
        step_weights: Factors that multiply the cost, one for each kind of move, as in :class:`bellmax.DTW`.
        step_penalties: Terms that are added to the cost, one for each kind of move, as in :class:`bellmax.DTW`. An
            ``nn.Parameter`` is learned.
        open_begin: If True, x may be matched with a section of y that begins at any element of y. Default False.
        open_end: If True, x may be matched with a section of y that ends at any element of y. Default False.

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
        """Return the loss: a scalar, or a tensor of the batch shape if ``reduction`` is "none".

        Raises ``ValueError`` if x and y are matrices with several columns. Such matrices could be batches of univariate
        series, or one pair of multivariate series. Raises ``ValueError``, too, if all series of a batch have one step
        and several features and ``lengths`` is not passed, since the layout is probably (batch, channels, time).

        Args:
            x: The first series, (..., N, D). For univariate series (B, N), pass ``x.unsqueeze(-1)``. For one
                multivariate series (N, D), pass ``x.unsqueeze(0)``.
            y: The second series, (..., M, D).
            lengths: A pair of the lengths of x and of y, as in :func:`bellmax.dtw`. By default N and M.

        """
        x, y = as_series("x", x), as_series("y", y)
        if x.ndim == y.ndim == 2 and max(x.shape[1], y.shape[1]) > 1:
            raise ValueError(
                f"x and y must have shape (batch, length, features), got {tuple(x.shape)} and {tuple(y.shape)}. For "
                "univariate series (batch, length), pass x.unsqueeze(-1) and y.unsqueeze(-1); for one pair of series "
                "(length, features), pass x.unsqueeze(0) and y.unsqueeze(0)"
            )
        if lengths is None and min(x.ndim, y.ndim) > 2 and x.shape[-2] == y.shape[-2] == 1 < x.shape[-1]:
            raise ValueError(
                f"x and y must have shape (batch, length, features), got {tuple(x.shape)} and {tuple(y.shape)}, series "
                "of one step: for (batch, channels, time), pass x.mT and y.mT; for one step, pass lengths=(1, 1)"
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
        """Return the options of the module as text, for ``print(module)``."""
        options = f"divergence={self.divergence!r}, normalize={self.normalize!r}, reduction={self.reduction!r}"
        return f"{super().extra_repr()}, {options}"


class DTWAlignment(_Warping):
    """A layer that computes the expected DTW alignment of two series: the probability that each pair of elements is
    matched.

    Args:
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`: a name, a function or a module. Default
            "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band around the diagonal, as in :class:`bellmax.DTW`. Default None, no
            band.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> align = DTWAlignment("sparsemax")
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
        """Return the expected alignment (..., N, M), 0 in the padding. Differentiable in x and y.

        Args:
            x: The first series, (..., N, D).
            y: The second series, (..., M, D).
            lengths: A pair of the lengths of x and of y, as in :func:`bellmax.dtw`. By default N and M.

        """
        measure = measure_of(self.cost, self.band, self.omega, None)
        x, y = as_floating([as_series("x", x), as_series("y", y)])
        if lengths is not None:  # as tensors: check_pair would truncate the series to lengths that are ints
            lengths_x, lengths_y = as_pair(lengths)
            lengths = as_lengths("lengths[0]", lengths_x, x.device), as_lengths("lengths[1]", lengths_y, x.device)
        alignments, _ = measure.alignments(*check_pair(x, y, lengths, measure.gamma_shape))
        return alignments.expected_path.to(x.dtype)
