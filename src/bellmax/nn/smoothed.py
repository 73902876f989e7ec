"""Base class of modules with an Ω, which may have a learnable γ."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bellmax.regularizers import Regularizer, check_gamma, resolve
from bellmax.tensors import Gamma


class Smoothed(nn.Module):
    """A module with an Ω. If γ is a tensor, it is a buffer of the module. If γ is an ``nn.Parameter``, it is learned.

    If an optimizer moves γ below 0, the next use raises ``ValueError``. To keep γ above 0, learn its logarithm: use
    ``torch.nn.utils.parametrize`` with a module that takes the exponential.

    Args:
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import torch, bellmax as bx
    >>> layer = bx.nn.SmoothedMax(bx.Negentropy(nn.Parameter(torch.tensor(2.0))))
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
            self._initial_gamma = None if gamma.is_meta else gamma.detach().clone().cpu()
            if isinstance(gamma, nn.Parameter):
                self.register_parameter("gamma", gamma)
            else:
                self.register_buffer("gamma", gamma.detach().clone())

    def reset_parameters(self) -> None:
        """Reset γ to its initial value.

        Raises ``ValueError`` if γ was created on the meta device, because it then has no initial value.
        """
        if not self._has_gamma:
            return
        if self._initial_gamma is None:
            raise ValueError(
                "gamma must have an initial value, got a tensor that was made on the meta device: "
                "make it with device='cpu'"
            )
        leaf, initial = self.gamma, self._initial_gamma
        if parametrize.is_parametrized(self, "gamma"):
            parametrizations: Any = self.parametrizations
            leaf = parametrizations.gamma.original
            for step in reversed(parametrizations.gamma):
                initial = step.right_inverse(initial)
        # transformers turns torch.nn.init into a no-op for weights loaded from a checkpoint. Those do not become NaN.
        nn.init.constant_(leaf, math.nan)
        if not leaf.is_meta and bool(leaf.isnan().all()):
            with torch.no_grad():
                leaf.copy_(initial)

    @property
    def omega(self) -> Regularizer:
        """The regularizer, with the current value of γ."""
        if not self._has_gamma:
            return self._omega
        omega = copy(self._omega)
        omega.gamma = self.gamma
        if self.gamma.device.type == "cpu":
            check_gamma(self.gamma)
        return omega

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        return f"omega={self.omega}"
