"""Sweeps of structures whose edge weights are a linear function of the scores, computed by the engine's sweeps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from bellmax.backends.protocol import Sweeps
from bellmax.programs import Program
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen


class Expanded:
    """Sweeps that expand the scores to edge weights, run the engine, and sum its results back onto the scores.

    Every sweep builds the edge weights. A backend with kernels for the structure does not need this class.
    """

    def __init__(self, program: Program, engine: Sweeps) -> None:
        self.program, self.engine = program, engine

    @property
    def check(self) -> Callable[[Tensors, Tensors], None] | None:
        return self.program.check

    def _graph(self, theta: Tensors, index: Tensors) -> tuple[Tensors, Tensors]:
        """Return the engine's θ, which is one tensor of edge weights, and the engine's index."""
        return [self.program.weights(theta, index)], self.program.engine_index(theta, index)

    def _sum_onto_scores(self, edges: Tensors, theta: Tensors, index: Tensors) -> Tensors:
        """Return edge gradients of the engine as gradients of the scores, negated if the scores are costs."""
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
        weights, engine_index = self._graph(theta, index)
        value, tape = self.engine.forward(weights, engine_index, omega)
        value = without_extra_nodes(value, self.program.extra_nodes(theta, index), omega)
        return value if self.program.sense > 0 else -value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        weights, engine_index = self._graph(theta, index)
        return self._sum_onto_scores(self.engine.backward(weights, tape, seed, engine_index, omega), theta, index)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, engine_index = self._graph(theta, index)
        directions = [self.program.along(z, index)]
        products = self.engine.hessian(weights, tape, seed, directions, engine_index, omega)
        return self._sum_onto_scores(products, theta, index)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        weights, engine_index = self._graph(theta, index)
        uniforms = with_extra_nodes(uniforms, self.program.extra_nodes(theta, index))
        paths = self.engine.sample(weights, tape, uniforms, engine_index, omega)
        return self.program.compact_paths(paths, theta, index)

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        weights, engine_index = self._graph(theta, index)
        scores, paths = self.engine.topk(weights, k, engine_index, omega)
        return self.program.sense * scores, self.program.compact_paths(paths, theta, index)

    def node_values(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        weights, engine_index = self.program.node_engine(theta, index)
        values = self.engine.node_values([weights], engine_index, omega)
        return self.program.sense * self.program.by_node(values, theta, index)

    def max_marginals(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        if self.check is None:  # the kernels of a subclass check scores, but they do not run here
            self.program.check(theta, index)
        weights, engine_index = self._graph(theta, index)
        edges = self.engine.max_marginals(weights, engine_index, omega)
        return self.program.sense * self.program.best_by_entry(edges, theta, index)


def without_extra_nodes(value: Tensor, extra: int | Tensor, omega: Regularizer) -> Tensor:
    """Return the value (B,) of the program from the value of the engine, whose graph has ``extra`` more nodes.

    Each of these nodes has one parent, which costs Ω(1).
    """
    if isinstance(extra, int) and not extra:
        return value
    return value + extra * omega.penalty(widen(value.new_ones(1))).to(value.dtype)


def with_extra_nodes(uniforms: Tensor, extra: int | Tensor) -> Tensor:
    """Return uniforms for the engine from the uniforms (B, K, choices) of the program.

    The extra nodes and the first node use up a uniform without choosing.
    """
    return pad(uniforms, (extra, 1), value=0.5) if isinstance(extra, int) and extra else uniforms
