"""A replacement for ``entmax`` 1.3: its maps onto the simplex."""

from __future__ import annotations

from torch import Tensor, nn

from bellmax.regularizers import SquaredL2, Tsallis


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:  # noqa: N803  the original's names
    """The projection of X on the simplex along ``dim``, of X's shape.

    Differences, here and below: a row of only −∞ gives zeros, where the original crashes or gives NaN; second
    derivatives, ``torch.func`` and forward mode work.

    Args:
        X: any shape, floating point.
        dim: the dimension to normalise.
        k: ignored; the original's guess at the size of the support, which does not change the result.

    >>> import torch
    >>> sparsemax(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return SquaredL2().argmax(X, dim)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:  # noqa: N803
    """1.5-entmax of X along ``dim``, of X's shape. Arguments as in :func:`sparsemax`.

    >>> import torch
    >>> entmax15(torch.tensor([1.0, 0.0, -4.0]))
    tensor([0.8307, 0.1693, 0.0000])
    """
    return Tsallis(1.5).argmax(X, dim)


def entmax_bisect(
    X: Tensor,  # noqa: N803
    alpha: float = 1.5,
    dim: int = -1,
    n_iter: int = 50,
    ensure_sum_one: bool = True,
) -> Tensor:
    """α-entmax of X along ``dim``, of X's shape, to the precision of its dtype.

    Differences from the original: ``alpha`` is a number with 1 < α ≤ 2, shared by all rows; a tensor with one value per
    row, or one to be learnt, is a ``ValueError``.

    Args:
        X: any shape, floating point.
        alpha: 1 < α ≤ 2; 2 is sparsemax.
        dim: the dimension to normalise.
        n_iter: ignored: α = 1.5 and 2 are solved exactly, others to the precision of the dtype.
        ensure_sum_one: ignored: the result always sums to 1.

    >>> import torch
    >>> entmax_bisect(torch.tensor([1.0, 0.0, -4.0]), alpha=1.3)
    tensor([0.7855, 0.2145, 0.0000])
    """
    return Tsallis(_check_alpha(alpha)).argmax(X, dim)


def _check_alpha(alpha: float) -> float:
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1 or alpha.requires_grad:
            kind = "one that requires a gradient" if alpha.requires_grad else f"shape {tuple(alpha.shape)}"
            raise ValueError(f"alpha must be a number, or a tensor of one without gradient, got {kind}")
        return float(alpha)
    return alpha


class Sparsemax(nn.Module):
    """:func:`sparsemax` as a module.

    >>> import torch
    >>> Sparsemax(dim=0)(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__()
        self.dim, self.k = dim, k

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        return sparsemax(X, self.dim, self.k)


class Entmax15(nn.Module):
    """:func:`entmax15` as a module.

    >>> import torch
    >>> Entmax15()(torch.tensor([1.0, 0.0, -4.0]))
    tensor([0.8307, 0.1693, 0.0000])
    """

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__()
        self.dim, self.k = dim, k

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        return entmax15(X, self.dim, self.k)


class EntmaxBisect(nn.Module):
    """:func:`entmax_bisect` as a module.

    >>> import torch
    >>> EntmaxBisect(alpha=2)(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, alpha: float = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        return entmax_bisect(X, self.alpha, self.dim, self.n_iter)
