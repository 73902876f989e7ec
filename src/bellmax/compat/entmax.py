"""A replacement for ``entmax`` 1.3: sparsemax, 1.5-entmax and α-entmax.

Differences from ``entmax``: if all entries of a row are −∞, the result is 0. In this case, ``entmax`` crashes or gives
NaN. Second derivatives, ``torch.func`` and forward mode work.
"""

from __future__ import annotations

from torch import Tensor, nn

from bellmax.regularizers import SquaredL2, Tsallis

__all__ = ["Entmax15", "EntmaxBisect", "Sparsemax", "entmax15", "entmax_bisect", "sparsemax"]


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:  # noqa: N803  the original's names
    """Return sparsemax of X along ``dim``, of X's shape: the projection of X on the simplex.

    If all entries of a row are −∞, the result is 0, unlike in ``entmax``. Second derivatives, ``torch.func`` and
    forward mode work.

    Args:
        X: A floating point tensor of any shape.
        dim: The dimension to normalize, default the last.
        k: Ignored. ``entmax`` uses it as a guess of the number of nonzero entries, which does not change the result.

    >>> import torch
    >>> sparsemax(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return SquaredL2().argmax(X, dim)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:  # noqa: N803
    """Return 1.5-entmax of X along ``dim``, of X's shape. See :func:`sparsemax` for the arguments.

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
    """Return α-entmax of X along ``dim``, of X's shape, to the precision of its dtype.

    Unlike in ``entmax``, all rows have the same α. Raises ``ValueError`` if ``alpha`` is a tensor with several values,
    or a tensor that requires a gradient.

    Args:
        X: A floating point tensor of any shape.
        alpha: The number α with 1 < α ≤ 2, default 1.5. The value 2 is sparsemax.
        dim: The dimension to normalize, default the last.
        n_iter: Ignored. For α = 1.5 and 2, the solution is exact. For other α, it has the precision of the dtype.
        ensure_sum_one: Ignored. The result always sums to 1.

    >>> import torch
    >>> entmax_bisect(torch.tensor([1.0, 0.0, -4.0]), alpha=1.3)
    tensor([0.7855, 0.2145, 0.0000])
    """
    return Tsallis(_check_alpha(alpha)).argmax(X, dim)


def _check_alpha(alpha: float) -> float:
    """Return α as a float. Raises ``ValueError`` for a tensor with several values or one that requires a gradient."""
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1 or alpha.requires_grad:
            got = "a tensor that requires a gradient" if alpha.requires_grad else f"shape {tuple(alpha.shape)}"
            raise ValueError(f"alpha must be a number, or a tensor of one number without gradient, got {got}")
        return float(alpha)
    return alpha


class Sparsemax(nn.Module):
    """Module that computes :func:`sparsemax` along a dimension.

    >>> import torch
    >>> Sparsemax(dim=0)(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__()
        self.dim, self.k = dim, k

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        """Return sparsemax of X along ``dim``, of X's shape."""
        return sparsemax(X, self.dim, self.k)


class Entmax15(nn.Module):
    """Module that computes :func:`entmax15` along a dimension.

    >>> import torch
    >>> Entmax15()(torch.tensor([1.0, 0.0, -4.0]))
    tensor([0.8307, 0.1693, 0.0000])
    """

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__()
        self.dim, self.k = dim, k

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        """Return 1.5-entmax of X along ``dim``, of X's shape."""
        return entmax15(X, self.dim, self.k)


class EntmaxBisect(nn.Module):
    """Module that computes :func:`entmax_bisect` along a dimension.

    >>> import torch
    >>> EntmaxBisect(alpha=2)(torch.tensor([1.5, 1.0, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, alpha: float = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        """Return α-entmax of X along ``dim``, of X's shape."""
        return entmax_bisect(X, self.alpha, self.dim, self.n_iter)
