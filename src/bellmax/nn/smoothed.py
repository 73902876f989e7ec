"""The base class of modules with an Ω."""

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
    """A module with an Ω. A γ that is a tensor is saved and moved with it and, if it is a parameter, learnt.

    An optimizer may take γ below 0, which is a ValueError at the next use. To keep it above 0, learn its logarithm:
    ``torch.nn.utils.parametrize`` with a module that takes the exponential.

    Args:
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.

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
