"""A replacement for ``soft_dtw_cuda``, the module of Maghoumi's pytorch-softdtw-cuda."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bellmax.dtw import DTW
from bellmax.regularizers import Negentropy
from bellmax.series import dtw

DistFunc = Callable[[Tensor, Tensor], Tensor]


class SoftDTW(nn.Module):
    """Soft-DTW of two batches of series, with the arguments and results of Maghoumi's ``SoftDTW``.

    Differences: the device is that of the tensors, and there is no limit of 1024 steps; float64 is computed in float64;
    second derivatives are right; ``normalize`` takes series of unequal lengths; infinite distances forbid a cell and
    give no NaN; a band that leaves no path gives +∞ with zero gradients; failed assertions of the original are a
    ``ValueError``. Nothing is printed.

    Args:
        use_cuda: ignored.
        gamma: the smoothing, > 0.
        normalize: whether to take the debiased divergence, sdtw(x, y) − ½ (sdtw(x, x) + sdtw(y, y)).
        bandwidth: cells with \\|i − j\\| > bandwidth are pruned, also for unequal lengths. None or 0 prunes nothing.
        dist_func: from series (B, N, D) and (B, M, D) to distances (B, N, M); squared Euclidean by default.

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
        """The values (B,) for X (B, N, D) and Y (B, M, D)."""
        return soft_dtw(X, Y, self.gamma, self.normalize, self.dist_func, self._allowed, ("X", "Y"))

    def _allowed(self, rows: int, columns: int) -> Tensor | None:
        if self.bandwidth <= 0:
            return None
        return (torch.arange(rows).unsqueeze(1) - torch.arange(columns)).abs() <= self.bandwidth


def squared_euclidean(x: Tensor, y: Tensor) -> Tensor:
    """The default distances of both originals: (B, N, M), from x (B, N, D) and y (B, M, D)."""
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)


def soft_dtw(
    x: Tensor,
    y: Tensor,
    gamma: float,
    normalize: bool,
    dist_func: DistFunc,
    allowed: Callable[[int, int], Tensor | None],
    names: tuple[str, str],
) -> Tensor:
    """Soft-DTW (B,) of x (B, N, D) and y (B, M, D) on the cells that ``allowed(N, M)`` keeps; None keeps all."""
    omega = Negentropy(gamma)
    if x.dim() != 3 or y.dim() != 3 or x.shape[0] != y.shape[0] or x.shape[2] != y.shape[2]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have shapes (B, N, D) and (B, M, D), "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    dtype = torch.result_type(x, y)
    x, y = x.to(dtype), y.to(dtype)

    def value(a: Tensor, b: Tensor) -> Tensor:
        kept = allowed(a.shape[1], b.shape[1])
        if dist_func is squared_euclidean and kept is None:
            return dtw(a, b, omega=omega)
        cost = dist_func(a, b)
        if cost.shape != (a.shape[0], a.shape[1], b.shape[1]):
            needed = (a.shape[0], a.shape[1], b.shape[1])
            raise ValueError(f"dist_func must return a tensor of shape {needed}, got {tuple(cost.shape)}")
        if kept is not None:
            cost = cost.masked_fill(~kept.to(cost.device), torch.inf)
        return DTW(cost, omega=omega).value

    if not normalize:
        return value(x, y)
    return value(x, y) - (value(x, x) + value(y, y)) / 2
