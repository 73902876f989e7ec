"""Pooling by a smoothed max, and the base class of modules with an Ω."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bellmax.inputs import answers_near_misses
from bellmax.regularizers import Gamma, Regularizer, check_gamma, resolve


class Smoothed(nn.Module):
    """A module with an Ω. A γ that is a tensor is saved and moved with it and, if it is a parameter, learnt.

    An optimizer may take γ below 0, which is a ValueError at the next use. To keep it above 0, learn its logarithm:
    ``torch.nn.utils.parametrize`` with a module that takes the exponential.

    Args:
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.

    >>> import torch, bellmax as bx
    >>> layer = SmoothedMax(bx.Negentropy(nn.Parameter(torch.tensor(2.0))))
    >>> dict(layer.state_dict())
    {'gamma': tensor(2.)}
    """

    gamma: Tensor

    def __init__(self, omega: str | Regularizer = "negentropy", gamma: Gamma | None = None) -> None:
        super().__init__()
        self._omega = resolve(omega, gamma)
        gamma = self._omega.gamma
        self._has_gamma = isinstance(gamma, Tensor)
        if isinstance(gamma, Tensor):
            self._omega = self._omega.at_unit_gamma()
            self._first_gamma = None if gamma.is_meta else gamma.detach().clone().cpu()
            if isinstance(gamma, nn.Parameter):
                self.register_parameter("gamma", gamma)
            else:
                self.register_buffer("gamma", gamma.detach().clone())

    def reset_parameters(self) -> None:
        """Reset γ to its first value."""
        if not self._has_gamma:
            return
        if self._first_gamma is None:
            raise ValueError(
                "gamma must have an initial value, got a tensor that was made on the meta device: "
                "make it with device='cpu'"
            )
        leaf, first = self.gamma, self._first_gamma
        if parametrize.is_parametrized(self, "gamma"):
            parametrizations: Any = self.parametrizations
            leaf = parametrizations.gamma.original
            for step in reversed(parametrizations.gamma):
                first = step.right_inverse(first)
        # transformers disables torch.nn.init for weights that were loaded from a checkpoint: those do not become NaN.
        nn.init.constant_(leaf, math.nan)
        if not leaf.is_meta and bool(leaf.isnan().all()):
            with torch.no_grad():
                leaf.copy_(first)

    @property
    def omega(self) -> Regularizer:
        """Ω with the current γ."""
        if not self._has_gamma:
            return self._omega
        omega = copy(self._omega)
        omega.gamma = self.gamma
        if self.gamma.device.type == "cpu":
            check_gamma(self.gamma)
        return omega

    def extra_repr(self) -> str:
        return f"omega={self.omega}"


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
