"""A replacement for ``soft_dtw_cuda``, the module of Maghoumi's pytorch-softdtw-cuda."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bellmax.dtw import DTW
from bellmax.regularizers import Negentropy
from bellmax.series import dtw

__all__ = ["SoftDTW"]

DistFunc = Callable[[Tensor, Tensor], Tensor]


class SoftDTW(nn.Module):
    """Soft-DTW of two batches of series, with the arguments and results of Maghoumi's ``SoftDTW``.

    Differences from the original:

    - The computation runs on the device of the tensors, without a limit of 1024 steps, and prints nothing.
    - float64 is computed in float64, and second derivatives are correct.
    - ``normalize`` accepts series of unequal lengths.
    - An infinite distance forbids its cell and does not give NaN. If the band allows no path, the value is +∞ and the
      gradients are 0.
    - Where the original fails an assertion, this class raises ``ValueError``.

    Args:
        use_cuda: Ignored.
        gamma: The smoothing strength, > 0, default 1.
        normalize: If True, return the debiased divergence sdtw(x, y) − ½ (sdtw(x, x) + sdtw(y, y)). Default False.
        bandwidth: The largest allowed distance \\|i − j\\| of a cell (i, j) from the diagonal, even if the series have
            unequal lengths. None (the default) or 0 allows all cells.
        dist_func: A function from series (B, N, D) and (B, M, D) to distances (B, N, M), default squared Euclidean.

    >>> x, y = torch.tensor([[[0.0], [1.0], [2.0]]]), torch.tensor([[[0.0], [2.0]]])
    >>> SoftDTW(use_cuda=False, gamma=0.1)(x, y)
    tensor([0.9307])
    """

    def __init__(
        self,
        use_cuda: bool,
        gamma: float = 1.0,
        normalize: bool = False,
        bandwidth: float | None = None,
        dist_func: DistFunc | None = None,
    ) -> None:
        super().__init__()
        self.use_cuda = use_cuda
        self.gamma = gamma
        self.normalize = normalize
        self.bandwidth = 0.0 if bandwidth is None else float(bandwidth)
        self.dist_func = squared_euclidean if dist_func is None else dist_func

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:  # noqa: N803  the original's names
        """Return the values (B,) for X (B, N, D) and Y (B, M, D)."""
        return soft_dtw(X, Y, self.gamma, self.normalize, self.dist_func, self._band_mask, ("X", "Y"))

    def _band_mask(self, rows: int, columns: int) -> Tensor | None:
        """Return the mask (rows, columns) of the cells within the band, or None if there is no band."""
        if self.bandwidth <= 0:
            return None
        return (torch.arange(rows).unsqueeze(1) - torch.arange(columns)).abs() <= self.bandwidth


def squared_euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Return squared distances (B, N, M) of x (B, N, D) and y (B, M, D), the default of both replaced libraries."""
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)


def soft_dtw(
    x: Tensor,
    y: Tensor,
    gamma: float,
    normalize: bool,
    dist_func: DistFunc,
    cell_mask: Callable[[int, int], Tensor | None],
    names: tuple[str, str],
) -> Tensor:
    """Return the soft-DTW (B,) of x (B, N, D) and y (B, M, D).

    ``cell_mask(N, M)`` returns a mask (N, M) of the allowed cells, or None if all are allowed. ``names`` are the names
    of x and y in error messages.
    """
    omega = Negentropy(gamma)
    if x.dim() != 3 or y.dim() != 3 or x.shape[0] != y.shape[0] or x.shape[2] != y.shape[2]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have shapes (B, N, D) and (B, M, D), "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    dtype = torch.result_type(x, y)
    x, y = x.to(dtype), y.to(dtype)

    def value(a: Tensor, b: Tensor) -> Tensor:
        """Return the soft-DTW of two batches. Without a mask and a custom distance, it needs no cost matrix."""
        mask = cell_mask(a.shape[1], b.shape[1])
        if dist_func is squared_euclidean and mask is None:
            return dtw(a, b, omega=omega)
        cost = dist_func(a, b)
        if cost.shape != (a.shape[0], a.shape[1], b.shape[1]):
            needed = (a.shape[0], a.shape[1], b.shape[1])
            raise ValueError(f"dist_func must return a tensor of shape {needed}, got {tuple(cost.shape)}")
        if mask is not None:
            cost = cost.masked_fill(~mask.to(cost.device), torch.inf)
        return DTW(cost, omega=omega).value

    if not normalize:
        return value(x, y)
    return value(x, y) - (value(x, x) + value(y, y)) / 2
