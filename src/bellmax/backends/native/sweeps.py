"""Sweeps of chains, chains of scores and graphs by the native kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, empty_like, padded
from bellmax.programs import PROGRAMS
from bellmax.programs.checks import overflow_error, reject_overflow
from bellmax.regularizers import Negentropy, Regularizer
from bellmax.tensors import Tensors

_INDEX_SIZE = {"chain": 2, "scored_chain": 2, "dag": 9}
STRUCTURES = tuple(_INDEX_SIZE)


class NativeSweeps:
    """Sweeps that each call one kernel, named after the program and the sweep.

    The kernels check scores while they read them. If a kernel reports an error, the program finds the entry and raises.
    """

    check = None

    def __init__(self, structure: str) -> None:
        self.structure = structure
        self.program = PROGRAMS[structure]
        self.prefix, self.index_size = f"{structure}_", _INDEX_SIZE[structure]

    def _call(self, name: str, tensors: Tensors, index: Tensors, omega: Regularizer) -> Any:
        """Call a kernel with contiguous tensors, which include its outputs. Return what it returns.

        Vectors, such as a seed, may have any stride.
        """
        kernel = omega.kernel
        assert kernel is not None
        readable = [t if t.ndim == 1 else t.contiguous() for t in tensors]
        try:
            return call(self.prefix + name, *readable, *padded(index, self.index_size), *kernel)
        except ValueError:
            self.program.check_index(tensors, index)  # raises a message with the argument and the value
            raise

    def _like_theta(self, name: str, theta: Tensors, more: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
        """Call a kernel whose outputs have the shapes of θ. Return the outputs."""
        results = empty_like(theta)
        self._call(name, (*theta, *more, *results), index, omega)
        return results

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        first = theta[0]
        nodes = self.program.nodes(theta, index)
        if self.structure == "dag":  # values and thresholds; padded, so that a vector fits behind the last
            return first.new_empty((first.shape[0], 2, nodes[0] + 3), dtype=torch.float64)
        # Values, relative to the maximum of their step, and thresholds.
        return first.new_empty((first.shape[0], 2, *nodes))

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        """Compute the value (B,) and fill the tape, unless the tape is empty. Raises ValueError for invalid scores."""
        value = theta[0].new_empty(theta[0].shape[0])
        if not self._call("forward", (*theta, value, tape), index, omega):
            self.program.check(theta, index)
            if self.structure == "dag":  # all weights were valid, so a sum of weights overflowed
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
            if self.structure == "dag":  # all scores were valid, so a weight that is a sum of scores overflowed
                raise overflow_error(scores.dtype)
        return scores, paths

    def node_values(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        if self.structure == "dag":  # the first numbers on its tape
            tape, size = self.forward(theta, index, omega)[1], self.program.node_shape(theta, index)[0]
            return (tape[:, 0, :size] / unit_of(omega)).to(theta[0].dtype)
        return self._by_kernel("node_values", theta, self.program.node_shape(theta, index), index, omega)

    def max_marginals(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._by_kernel("max_marginals", theta, self.program.event_shape(theta, index), index, omega)

    def _by_kernel(
        self, name: str, theta: Tensors, shape: tuple[int, ...], index: Tensors, omega: Regularizer
    ) -> Tensor:
        """Call a kernel whose output is (B, *shape). Return the output. Raises ``ValueError`` for invalid scores."""
        result = theta[0].new_empty((theta[0].shape[0], *shape))
        if not self._call(name, (*theta, result), index, omega):
            self.program.check(theta, index)
            raise overflow_error(result.dtype)  # all scores were valid, so a sum of scores overflowed
        return result


def unit_of(omega: Regularizer) -> float:
    """Return the factor by which kernels multiply the values of nodes: under negentropy they are in units of log 2."""
    return math.log2(math.e) if isinstance(omega, Negentropy) else 1.0
