"""Dynamic time warping as a loss and as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.dtw import DTW
from bellmax.nn.pooling import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.series import (
    _REDUCTIONS,
    Cost,
    _broadcast,
    _check_lengths,
    _check_series,
    _listed,
    _measure,
    _trim,
    pairwise,
)
from bellmax.series import dtw as dtw_of_series

Lengths = tuple[Tensor | int, Tensor | int]


class _Warping(Smoothed):
    """A module of two series. A cost that is a module, which may be learnt, is part of it."""

    def __init__(self, omega: str | Regularizer, cost: Cost, band: float | None) -> None:
        super().__init__(omega)
        _measure(cost, band, self.omega, None)
        if band is not None and not band >= 0:
            raise ValueError(f"band must be at least 0, got {band}")
        self.cost, self.band = cost, band

    def extra_repr(self) -> str:
        cost = "" if isinstance(self.cost, torch.nn.Module) else f", cost={self.cost!r}"
        return f"{super().extra_repr()}{cost}, band={self.band}"


class DTWLoss(_Warping):
    """Smoothed dynamic time warping of two series, or a divergence made of it: :func:`bellmax.dtw` as a module.

    Args:
        omega: a :class:`Regularizer`, or "negentropy", "l2", "hard".
        cost: of a match, as in :func:`bellmax.dtw`: a name, a function or a module.
        divergence: None for the value, which may be negative and is not least at x = y; or "debiased", "sharp",
            "mean_cost", which are 0 there.
        band: half the width of a band around the diagonal, as in :class:`bellmax.DTW`; None for none.
        reduction: over the batch: "none", "mean" or "sum".

    >>> import bellmax as bx
    >>> loss = DTWLoss(bx.Negentropy(0.1), divergence="debiased")
    >>> x = torch.tensor([0.0, 0.0, 1.0, 0.0]).unsqueeze(-1)
    >>> y = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(-1)
    >>> loss(x, x), loss(x, y)
    (tensor(0.), tensor(0.0549))
    """

    def __init__(
        self,
        omega: str | Regularizer = "negentropy",
        cost: Cost = "sqeuclidean",
        divergence: str | None = None,
        band: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(omega, cost, band)
        _measure(cost, band, self.omega, divergence)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_listed(_REDUCTIONS)}, got {reduction!r}")
        self.divergence, self.reduction = divergence, reduction

    def forward(self, x: Tensor, y: Tensor, *, lengths: Lengths | None = None) -> Tensor:
        """The loss of series x (..., N, D) and y (..., M, D): a number, or of the batch shape.

        ``lengths`` is a pair, the lengths of x and of y, as in :func:`bellmax.dtw`.
        """
        return dtw_of_series(
            x,
            y,
            cost=self.cost,
            lengths=lengths,
            band=self.band,
            omega=self.omega,
            divergence=self.divergence,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, divergence={self.divergence!r}, reduction={self.reduction!r}"


class SoftAlignment(_Warping):
    """The expected alignment of two series, ∇DTW_Ω, as a layer: the probability that two elements are matched.

    Args:
        omega: a :class:`Regularizer`, or "negentropy", "l2", "hard".
        cost: of a match, as in :func:`bellmax.dtw`: a name, a function or a module.
        band: half the width of a band around the diagonal, as in :class:`bellmax.DTW`; None for none.

    >>> align = SoftAlignment("l2")
    >>> align(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.0000, 1.0000]])
    """

    def __init__(
        self, omega: str | Regularizer = "negentropy", cost: Cost = "sqeuclidean", band: float | None = None
    ) -> None:
        super().__init__(omega, cost, band)

    def forward(self, x: Tensor, y: Tensor, *, lengths: Lengths | None = None) -> Tensor:
        """The expected alignment (..., N, M) of series x (..., N, D) and y (..., M, D), 0 past their ends.

        ``lengths`` is a pair, the lengths of x and of y, each int64 that broadcasts with the batch or a number. What
        lies past the end may hold NaN, and gets no gradient. Differentiable in x and y.
        """
        dtype = torch.promote_types(x.dtype, y.dtype)
        sides = []
        for name, series, own in zip(("x", "y"), (x, y), _check_lengths(lengths), strict=True):
            if isinstance(own, int):
                own = torch.tensor(own, device=series.device)
            sides.append(_trim(f"lengths of {name}", _check_series(name, series), own))
        (x, of_x), (y, of_y) = sides
        if x.device != y.device:
            raise ValueError(f"y must be on {x.device}, as x is, got {y.device}")
        x, y = x.to(dtype), y.to(dtype)
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"x and y must have the same number of features, got {x.shape[-1]} in x of shape {tuple(x.shape)} and "
                f"{y.shape[-1]} in y of shape {tuple(y.shape)}"
            )
        omega = self.omega
        shapes = {"x": x.shape[:-2], "y": y.shape[:-2]}
        shapes |= {f"lengths of {name}": own.shape for name, own in (("x", of_x), ("y", of_y)) if own is not None}
        if isinstance(omega.gamma, Tensor):
            shapes["gamma"] = omega.gamma.shape
        try:
            batch = _broadcast(*shapes.values())
        except RuntimeError:
            each = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items() if shape)
            raise ValueError(f"batch shapes must broadcast, got {each}") from None
        costs = pairwise(x, y, self.cost)
        whole = costs.shape[-2:]
        of_both = [n if own is None else own.expand(batch) for n, own in zip(whole, (of_x, of_y), strict=True)]
        alignments = DTW(costs.expand(*batch, *whole), lengths=(of_both[0], of_both[1]), band=self.band, omega=omega)
        return alignments.expected_path.to(dtype)
