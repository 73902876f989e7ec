"""Sweeps of which kernels run some, for some sizes, and another backend runs the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bellmax.backends.protocol import Sweeps
from bellmax.programs import Program
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

BY_KERNELS = "empty_tape", "value", "forward", "backward", "hessian"


class PartialSweeps:
    """A subclass has the sweeps that kernels run, each named with a "_" before it, and says by shape which θ they take.

    The sizes alone decide, so that all the sweeps of one θ agree about its tape.
    """

    def __init__(self, program: Program, others: Sweeps) -> None:
        self.program, self.others = program, others

    def takes(self, theta: Tensors) -> bool:
        """Whether kernels take θ."""
        raise NotImplementedError

    def check(self, theta: Tensors, index: Tensors) -> None:
        if theta[0].device.type == "cpu":  # reading values elsewhere would make the host wait
            self.program.check(theta, index)

    def __getattr__(self, name: str) -> Any:
        def run(theta: Tensors, *args: Any) -> Any:
            if not self.takes(theta) or name == "topk":
                return getattr(self.others, name)(theta, *args)
            if name in BY_KERNELS:
                return getattr(self, f"_{name}")(theta, *args)
            tape = self._tape_of_others(theta, args[-2], args[-1])
            return getattr(self.others, name)(theta, tape, *args[1:])

        return run

    def _tape_of_others(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self.others.forward(theta, index, omega)[1]
