"""Pooling by a smoothed max."""

from __future__ import annotations

from torch import Tensor

from bellmax.inputs import answers_near_misses
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.tensors import Gamma


class SmoothedMax(Smoothed):
    """Smoothed max pooling over a dimension, such as log-sum-exp pooling.

    If γ is small, the result is close to the max. If γ is large, the result is close to the mean of the entries plus a
    number that does not depend on them. Under negentropy, this number is γ log n for n entries. Under negentropy, all
    entries get a gradient. Under a sparse Ω, only entries near the maximum get a gradient. Entries of −∞ are ignored.

    Args:
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        dim: The dimension to pool over, default the last.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import torch
    >>> pool = SmoothedMax("sparsemax", dim=-2)
    >>> x = torch.tensor([[1.5, 0.0], [1.0, 4.0], [-torch.inf, 0.0]], requires_grad=True)
    >>> pool(x)
    tensor([1.5625, 4.0000], grad_fn=...)
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
        """Return the smoothed max of x over ``dim``, without this dimension.

        If x has half precision, the result is float32.
        """
        if not -x.ndim <= self.dim < x.ndim:
            raise ValueError(f"x must have a dimension {self.dim}, got shape {tuple(x.shape)}")
        return self.omega.max(x, self.dim)

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        return f"{super().extra_repr()}, dim={self.dim}"
