"""Base class of sweeps that Triton kernels run for some sizes, and another backend for the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bellmax.backends.protocol import Sweeps
from bellmax.programs import Program
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

BY_KERNELS = "empty_tape", "value", "forward", "backward", "hessian"
"""The sweeps that kernels can run."""
WITHOUT_TAPE = "max_marginals", "node_values", "topk"
"""The other sweeps that need no tape."""


class PartialSweeps:
    """Sweeps by kernels, if ``takes(theta)``, or by the sweeps ``others`` of another backend.

    A subclass defines ``takes`` and the sweeps of ``BY_KERNELS``, each with a leading "_". ``takes`` may only depend on
    the shape of θ, so that all sweeps of one θ use the same kind of tape. The remaining sweeps run on the other backend
    and compute its tape first.
    """

    def __init__(self, program: Program, others: Sweeps) -> None:
        self.program, self.others = program, others

    def takes(self, theta: Tensors) -> bool:
        """True if the kernels support a θ of this shape."""
        raise NotImplementedError

    def check(self, theta: Tensors, index: Tensors) -> None:
        if theta[0].device.type == "cpu":  # on a GPU, reading values would synchronize with the device
            self.program.check(theta, index)

    def __getattr__(self, name: str) -> Any:
        def run(theta: Tensors, *args: Any) -> Any:
            if not self.takes(theta) or name in WITHOUT_TAPE:
                return getattr(self.others, name)(theta, *args)
            if name in BY_KERNELS:
                return getattr(self, f"_{name}")(theta, *args)
            tape = self._tape_of_others(theta, args[-2], args[-1])
            return getattr(self.others, name)(theta, tape, *args[1:])

        return run

    def _tape_of_others(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Return the tape of the other backend, for the sweeps that have no kernel."""
        return self.others.forward(theta, index, omega)[1]
