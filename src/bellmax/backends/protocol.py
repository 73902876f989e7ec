"""The interface of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from bellmax.regularizers import Kernel, Regularizer
from bellmax.tensors import Tensors

CHECKED = "forward", "topk", "value"
"""The sweeps before which values are checked."""


class Sweeps(Protocol):
    """The loops over a structure, on a flat batch and at γ = 1.

    ``theta`` is one or more tensors, batch first; the size of the batch is the first one's, and another may have batch
    size 1, which all members share. ``index`` are integer tensors: see :mod:`bellmax.programs`. ``tape``
    is kept by ``forward`` for the rest: batch first, and otherwise the backend's own business. Results of θ's shapes
    are summed over the batch where it shares a tensor.
    """

    @property
    def check(self) -> Callable[[Tensors, Tensors], None] | None:
        """Raises a ValueError for values that no sweep can take; None if the sweeps themselves do."""
        ...

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        """Room for the tape."""
        ...

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Value (B,) alone, where nobody will ask for more."""
        ...

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Value (B,) and tape."""
        ...

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        """The expected path times ``seed`` (B,), of θ's shapes."""
        ...

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Hessian product ∇²DP_Ω(θ) z times ``seed``, of θ's shapes: the tangent sweeps, forward then backward."""
        ...

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        """K paths, as in ``Program.empty_paths``, drawn with ``uniforms`` (B, K, choices): the n-th choice of a walk
        takes the n-th."""
        ...

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Scores (B, k) of the best paths, descending, and the paths as in ``Program.empty_paths``."""
        ...


class EdgeSweeps(Sweeps, Protocol):
    """The sweeps of a structure whose θ is one weight for each edge. Others expand to one of these for log q."""

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        """log q of every edge, of θ's shapes."""
        ...

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """The derivative of ``log_transitions`` applied to z, of θ's shapes."""
        ...

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """The transposed derivative of ``log_transitions`` applied to ``cotangent``, of θ's shapes."""
        ...


class Backend(Protocol):
    """Sweeps for some structures, devices and Ω."""

    name: str

    @property
    def status(self) -> str:
        """ "available", or why it is not."""
        ...

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        """Whether it sweeps a structure on a device under a compiled Ω; None is an Ω written in Python."""
        ...

    def sweeps(self, structure: str) -> Sweeps:
        """The sweeps of a structure that it serves."""
        ...

    def shortcut(self, name: str) -> Any | None:
        """Kernels that do a job in one go, by name; None where there are none, and the sweeps do it."""
        ...
