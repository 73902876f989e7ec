"""A replacement for ``tslearn.metrics.SoftDTWLossPyTorch``, the only PyTorch module of tslearn 0.10."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bellmax.compat.soft_dtw_cuda import DistFunc, soft_dtw, squared_euclidean

__all__ = ["SoftDTWLossPyTorch"]


class SoftDTWLossPyTorch(nn.Module):
    """Soft-DTW of two batches of series, with the arguments and results of tslearn's ``SoftDTWLossPyTorch``.

    Differences from the original:

    - float64 is computed in float64, and second derivatives are correct.
    - If infinite distances forbid all paths, the value is +∞, not NaN.
    - The matrix that ``dist_func`` returns is not modified.
    - Where the original fails an assertion or raises ``RuntimeWarning``, this class raises ``ValueError``.
    - numba is not needed.

    Args:
        gamma: The smoothing strength, > 0, default 1.
        normalize: If True, return the debiased divergence sdtw(x, y) − ½ (sdtw(x, x) + sdtw(y, y)). Default False.
        dist_func: A function from series (B, N, D) and (B, M, D) to distances (B, N, M), default squared Euclidean.
        global_constraint: "sakoe_chiba", "itakura" or None. If None (the default), the next two arguments determine the
            constraint.
        sakoe_chiba_radius: The largest allowed distance of a cell from the diagonal, default 1 for "sakoe_chiba". The
            band is wider by \\|N − M\\| on the side of the longer series.
        itakura_max_slope: The largest slope of the Itakura parallelogram, default 2 for "itakura".

    >>> x, y = torch.zeros(4, 3, 2, requires_grad=True), torch.arange(24).reshape(4, 3, 2)
    >>> SoftDTWLossPyTorch(gamma=0.1)(x, y).mean()
    tensor(1081., grad_fn=<MeanBackward0>)
    """

    def __init__(
        self,
        gamma: float = 1.0,
        normalize: bool = False,
        dist_func: DistFunc | None = None,
        global_constraint: str | None = None,
        sakoe_chiba_radius: int | None = None,
        itakura_max_slope: float | None = None,
    ) -> None:
        super().__init__()
        if global_constraint not in (None, "", "itakura", "sakoe_chiba"):
            raise ValueError(f"global_constraint must be 'sakoe_chiba', 'itakura' or None, got {global_constraint!r}")
        if not global_constraint and sakoe_chiba_radius is not None and itakura_max_slope is not None:
            raise ValueError(
                "global_constraint must be 'sakoe_chiba' or 'itakura' when sakoe_chiba_radius and itakura_max_slope "
                "are both given, got None"
            )
        if sakoe_chiba_radius is not None and not (sakoe_chiba_radius >= 0 and sakoe_chiba_radius % 1 == 0):
            raise ValueError(f"sakoe_chiba_radius must be a whole number, at least 0, got {sakoe_chiba_radius}")
        self.gamma = gamma
        self.normalize = normalize
        self.dist_func = squared_euclidean if dist_func is None else dist_func
        self.global_constraint = global_constraint
        self.sakoe_chiba_radius = sakoe_chiba_radius
        self.itakura_max_slope = itakura_max_slope

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the values (B,) for x (B, N, D) and y (B, M, D)."""
        return soft_dtw(x, y, self.gamma, self.normalize, self.dist_func, self._cell_mask, ("x", "y"))

    def _cell_mask(self, rows: int, columns: int) -> Tensor | None:
        """Return the mask (rows, columns) of the cells that the constraint allows, or None without a constraint."""
        radius, slope, constraint = self.sakoe_chiba_radius, self.itakura_max_slope, self.global_constraint
        if constraint == "sakoe_chiba" or (not constraint and radius is not None):
            return _sakoe_chiba_mask(rows, columns, 1 if radius is None else radius)
        if constraint == "itakura" or slope is not None:
            return _itakura_mask(rows, columns, 2.0 if slope is None else slope)
        return None


def _sakoe_chiba_mask(rows: int, columns: int, radius: int) -> Tensor:
    """Return the mask (rows, columns) of tslearn's Sakoe–Chiba band."""
    offset = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    return (offset >= min(columns - rows, 0) - radius) & (offset <= max(columns - rows, 0) + radius)


def _itakura_mask(rows: int, columns: int, max_slope: float) -> Tensor:
    """Return the mask (rows, columns) of tslearn's Itakura parallelogram.

    Its sides are the lines of slopes 1/max_slope and max_slope through the first and through the last cell. As in
    tslearn, they are rounded to two decimals.
    """
    row, column = np.arange(rows)[:, None], np.arange(columns)
    steep, flat = max_slope * (rows / columns), 1 / max_slope * (rows / columns)
    from_start = np.round(flat * column, 2), np.round(steep * column, 2)
    to_end = (
        np.round(rows - 1 - steep * (columns - 1) + steep * column, 2),
        np.round(rows - 1 - flat * (columns - 1) + flat * column, 2),
    )
    lower, upper = np.maximum(from_start[0], to_end[0]), np.minimum(from_start[1], to_end[1])
    mask = (row >= np.ceil(lower)) & (row <= np.floor(upper))
    if not (mask.any(0).all() and mask.any(1).all()):
        raise ValueError(f"itakura_max_slope must leave a path for lengths {rows} and {columns}, got {max_slope}")
    return torch.from_numpy(mask)
