"""Sweeps of graphs whose edge weights are linear functions of the scores, by the kernels of graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bellmax.backends.native.sweeps import NativeSweeps
from bellmax.backends.reference.expanded import with_extra_nodes, without_extra_nodes
from bellmax.programs import LinearGraphProgram
from bellmax.programs.linear import entries_of, num_entries, scores_of
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors


class NativeLinear(NativeSweeps):
    """Sweeps by the kernels of graphs, which compute the weight of an edge from its form where they read it.

    For the kernels, θ is the entries of all scores, (B, entries), and so are their results.
    """

    program: LinearGraphProgram

    def __init__(self, program: LinearGraphProgram) -> None:
        super().__init__("dag")
        self.program = program

    def _call(self, name: str, tensors: Tensors, index: Tensors, omega: Regularizer) -> Any:
        count = len(self.program.scores)
        theta, more = tensors[:count], tensors[count:]
        return super()._call(name, (entries_of(theta), *more), index[:9], omega)  # without the forms in edge order

    def _like_theta(self, name: str, theta: Tensors, more: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
        result = theta[0].new_empty((theta[0].shape[0], num_entries(theta)))
        self._call(name, (*theta, *more, result), index, omega)
        return scores_of(result, theta)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        value, tape = super().forward(theta, index, omega)
        return without_extra_nodes(value, self.program.extra_nodes(theta, index), omega), tape

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("hessian", theta, (tape, seed, entries_of(z)), index, omega)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        uniforms = with_extra_nodes(uniforms, self.program.extra_nodes(theta, index))
        return super().sample(theta, tape, uniforms, index, omega)

    def max_marginals(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        entries = self._by_kernel("max_marginals", theta, (num_entries(theta),), index, omega)
        first = theta[0]
        return entries[:, : first.shape[1:].numel()].contiguous().reshape(first.shape)
