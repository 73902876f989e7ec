"""Pooling by a smoothed max."""

from __future__ import annotations

from torch import Tensor

from bellmax.inputs import answers_near_misses
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.tensors import Gamma


class SmoothedMax(Smoothed):
    """max_Ω over a dimension: pooling between the max (γ → 0) and, up to a constant, the mean.

    The gradient is spread over the entries near the maximum: all of them under negentropy, few under a sparse Ω.
    Entries of −∞ are ignored. Under negentropy n equal entries give their value plus γ log n.

    Args:
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        dim: the dimension to pool over.
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.

    >>> import torch
    >>> pool = SmoothedMax("l2", dim=-2)
    >>> x = torch.tensor([[1.5, 0.0], [1.0, 4.0], [-torch.inf, 0.0]], requires_grad=True)
    >>> pool(x)
    tensor([1.0625, 3.5000], grad_fn=...)
    >>> torch.autograd.grad(pool(x).sum(), x)[0]
    tensor([[0.7500, 0.0000],
            [0.2500, 1.0000],
            [0.0000, 0.0000]])
    """

    @answers_near_misses
    def __init__(self, omega: str | Regularizer = "negentropy", dim: int = -1, *, gamma: Gamma | None = None) -> None:
        super().__init__(omega, gamma)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Pool x over ``dim``, which is removed; half precision gives float32."""
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(f"x must have a dimension {self.dim}, got shape {tuple(x.shape)}")
        return self.omega.max(x, self.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"
