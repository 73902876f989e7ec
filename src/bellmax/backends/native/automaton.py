"""Sweeps of automata over frames, frame by frame, without a number for each arc and frame."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.backends.native.loading import call
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs.automaton import AutomatonProgram
from bellmax.programs.checks import overflow_error
from bellmax.regularizers import Hard, Regularizer
from bellmax.tensors import Tensors

_MOST_NUMBERS = 1 << 19  # on the tape of a member with a row for each frame


class NativeAutomaton(Expanded):
    """Sweeps with memory O(√T·S) for each member, or O(T·S) if that is small.

    Values of nodes and max-marginals come from the graph engine.
    """

    program: AutomatonProgram

    @property
    def check(self) -> None:
        """None: the kernels check scores while they read them."""
        return None

    def _call(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Tensor) -> bool:
        """Call a kernel with contiguous tensors, which include its outputs. A seed may have any stride."""
        kernel = omega.kernel
        assert kernel is not None
        lengths, arcs = index
        once = arcs[:1] if arcs.stride(0) == 0 else arcs
        readable = [t if t.ndim == 1 else t.contiguous() for t in (*theta, *args)]
        try:
            return bool(call(f"automaton_{name}", *readable, lengths.contiguous(), once.contiguous(), *kernel))
        except ValueError:
            self.program.check_index(theta, index)  # raises a message with the argument and the value
            raise

    def _like_theta(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Tensor) -> Tensors:
        """Call a kernel whose outputs have the shapes of θ. Return them, summed over the batch for shared scores."""
        batch = theta[0].shape[0]
        results = [t.new_empty((batch, *t.shape[1:])) for t in theta]
        self._call(name, theta, index, omega, *args, *results)
        pairs = zip(results, theta, strict=True)
        return [r.sum(0, keepdim=True) if t.shape[0] != batch else r for r, t in pairs]

    def _forward(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *tape: Tensor) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0])
        if not self._call(name, theta, index, omega, value, *tape):
            self.program.check(theta, index)
            raise overflow_error(value.dtype)  # all scores were valid, so a sum of scores overflowed
        return value

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        (batch, steps, _), width = theta[0].shape, 2 * theta[2].shape[1] + 2
        rows = steps + 1
        if rows * width > _MOST_NUMBERS:
            rows = math.isqrt(rows) + 1
        return theta[0].new_empty((batch, rows * width), dtype=torch.float64)

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward("value", theta, index, omega)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward("forward", theta, index, omega, tape), tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("backward", theta, index, omega, tape, seed)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("hessian", theta, index, omega, tape, seed, *z)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._call("sample", theta, index, omega, tape, uniforms, paths)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        batch = theta[0].shape[0]
        if k == 1:  # the only path of the hard program
            value, tape = self.forward(theta, index, Hard())
            uniforms = value.new_zeros((batch, 1, self.program.num_choices(theta, index)), dtype=torch.float64)
            return value.unsqueeze(1), self.sample(theta, tape, uniforms, index, Hard())
        scores, paths = theta[0].new_empty(batch, k), self.program.empty_paths(theta, index, k)
        if not self._call("topk", theta, index, omega, scores, paths):
            self.program.check(theta, index)
            raise overflow_error(scores.dtype)  # all scores were valid, so a sum of scores overflowed
        return scores, paths
