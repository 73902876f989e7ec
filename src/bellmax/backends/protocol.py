"""The interface of a backend: sweeps over structures, and fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from bellmax.backends.fused import FusedKernels
from bellmax.regularizers import Kernel, Regularizer
from bellmax.tensors import Tensors

CHECKED = "forward", "max_marginals", "node_values", "topk", "value"
"""The sweeps before which values are checked."""


class Sweeps(Protocol):
    """The loops over a structure, on a flat batch and at γ = 1.

    ``theta`` is one or more tensors, batch first. The first tensor has the size of the batch; a tensor of batch size 1
    is shared by all members. ``index`` holds integer tensors: see :mod:`bellmax.programs`. ``tape``
    is what ``forward`` saves for the other sweeps: batch first, in a format of the backend's choice. A result that has
    the shape of a shared tensor is summed over the batch.
    """

    @property
    def check(self) -> Callable[[Tensors, Tensors], None] | None:
        """A function that raises ``ValueError`` for invalid θ and index; None if the sweeps check their arguments."""
        ...

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        """Allocate the tape."""
        ...

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Value (B,) without a tape, if no other sweep will follow."""
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
        """K sampled paths, in the format of ``Program.empty_paths``. The n-th choice along a path consumes the n-th of
        its ``uniforms`` (B, K, choices)."""
        ...

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Scores (B, k) of the best paths, descending, and the paths in the format of ``Program.empty_paths``."""
        ...

    def node_values(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Value of each node, (B, *nodes), in the shape of ``Program.node_shape``; −∞ if no path reaches the node."""
        ...

    def max_marginals(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Score of the best path that uses each entry of an event, (B, *event), whatever Ω; −∞ if there is none."""
        ...


class EdgeSweeps(Sweeps, Protocol):
    """The sweeps of a structure whose θ has one weight for each edge, which also give log q."""

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
        """ "available", or the reason why the backend cannot be used."""
        ...

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        """True if the backend sweeps a structure on a device under a compiled Ω; None is an Ω written in Python."""
        ...

    def sweeps(self, structure: str) -> Sweeps:
        """The sweeps of a structure that the backend serves."""
        ...

    @property
    def fused(self) -> FusedKernels:
        """The fused kernels of the backend."""
        ...
