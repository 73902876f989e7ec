"""The sweeps of a structure whose edges' weights are a linear function of its scores, by those of its engine."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from bellmax.backends.protocol import Sweeps
from bellmax.programs import Program
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen


class Expanded:
    """Weights are built for every sweep; backends with kernels of their own do without."""

    def __init__(self, program: Program, engine: Sweeps) -> None:
        self.program, self.engine = program, engine

    @property
    def check(self) -> Callable[[Tensors, Tensors], None] | None:
        return self.program.check

    def _graph(self, theta: Tensors, index: Tensors) -> tuple[Tensors, Tensors]:
        return [self.program.weights(theta, index)], self.program.engine_index(theta, index)

    def _onto(self, edges: Tensors, theta: Tensors, index: Tensors) -> Tensors:
        scores = self.program.onto_scores(edges[0], theta, index)
        return scores if self.program.sense > 0 else [-score for score in scores]

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        if self.program.engine == "dag":
            weights, (nodes,) = theta[0].new_empty((theta[0].shape[0], 0)), self.program.nodes(theta, index)
            return self.engine.empty_tape([weights], [weights.new_empty(nodes + 1)])
        return theta[0].new_empty(
            (theta[0].shape[0], *self.program.nodes(theta, index)), dtype=wide_dtype(theta[0].device)
        )

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self.forward(theta, index, omega)[0]

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        weights, inner = self._graph(theta, index)
        value, tape = self.engine.forward(weights, inner, omega)
        extra = self.program.extra_nodes(theta, index)
        if isinstance(extra, Tensor) or extra:
            at_vertex = omega.penalty(widen(value.new_ones(1))).to(value.dtype)
            value = value + extra * at_vertex
        return value if self.program.sense > 0 else -value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        weights, inner = self._graph(theta, index)
        return self._onto(self.engine.backward(weights, tape, seed, inner, omega), theta, index)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, inner = self._graph(theta, index)
        along = [self.program.along(z, index)]
        return self._onto(self.engine.hessian(weights, tape, seed, along, inner, omega), theta, index)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        weights, inner = self._graph(theta, index)
        extra = self.program.extra_nodes(theta, index)
        if isinstance(extra, int) and extra:  # whose choice, and that of the first node, is none
            uniforms = pad(uniforms, (extra, 1), value=0.5)
        return self.program.compact_paths(self.engine.sample(weights, tape, uniforms, inner, omega), theta, index)

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        weights, inner = self._graph(theta, index)
        scores, found = self.engine.topk(weights, k, inner, omega)
        return self.program.sense * scores, self.program.compact_paths(found, theta, index)
