"""The sweeps of each structure, run by its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, empty_like, padded
from bellmax.programs import PROGRAMS
from bellmax.programs.checks import overflow_error, reject_overflow
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_INDEX_SIZE = {"chain": 2, "scored_chain": 2, "dag": 6}
STRUCTURES = tuple(_INDEX_SIZE)


class NativeSweeps:
    """The kernels look at the values as they read them, and the program says what is wrong with them."""

    check = None

    def __init__(self, structure: str) -> None:
        self.structure = structure
        self.program = PROGRAMS[structure]
        self.prefix, self.index_size = f"{structure}_", _INDEX_SIZE[structure]

    def _call(self, name: str, tensors: Tensors, index: Tensors, omega: Regularizer) -> Any:
        kernel = omega.kernel
        assert kernel is not None
        try:
            return call(
                self.prefix + name, *[t.contiguous() for t in tensors], *padded(index, self.index_size), *kernel
            )
        except ValueError:
            self.program.check_index(tensors, index)  # names the argument and the value
            raise

    def _like_theta(self, name: str, theta: Tensors, more: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
        results = empty_like(theta)
        self._call(name, (*theta, *more, *results), index, omega)
        return results

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        first = theta[0]
        nodes = self.program.nodes(theta, index)
        if self.structure == "dag":  # values and thresholds, and room for a vector behind the last
            return first.new_empty((first.shape[0], 2, nodes[0] + 3), dtype=torch.float64)
        # Values, relative to the greatest of their step, and thresholds.
        return first.new_empty((first.shape[0], 2, *nodes))

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0])
        if not self._call("forward", (*theta, value, tape), index, omega):
            self.program.check(theta, index)
            if self.structure == "dag":  # all of its weights are used: the sum at a node overflows
                raise overflow_error(value.dtype)
            reject_overflow(value, self.program.sense)
        return value

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        first = theta[0]
        if self.structure in ("chain", "scored_chain"):
            return self._forward(theta, first.new_empty((first.shape[0], 2, 0, first.shape[-1])), index, omega)
        return self.forward(theta, index, omega)[0]

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward(theta, tape, index, omega), tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("backward", theta, (tape, seed), index, omega)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("hessian", theta, (tape, seed, *z), index, omega)

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("log_transitions", theta, (tape,), index, omega)

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("log_transitions_jvp", theta, (tape, *z), index, omega)

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("log_transitions_vjp", theta, (tape, *cotangent), index, omega)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._call("sample", (*theta, tape, uniforms, paths), index, omega)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        scores, paths = theta[0].new_empty(theta[0].shape[0], k), self.program.empty_paths(theta, index, k)
        if not self._call("topk", (*theta, scores, paths), index, omega):
            self.program.check(theta, index)
        return scores, paths
