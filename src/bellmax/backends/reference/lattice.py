"""The sweeps of a lattice, by those of its graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.backends.protocol import Sweeps
from bellmax.layouts.lattice import LatticeLayout
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen


class LatticeSweeps:
    """The graph is made once for each size, its weights for every sweep; backends with kernels do without."""

    def __init__(self, layout: LatticeLayout, engine: Sweeps) -> None:
        self.layout, self.engine = layout, engine
        self.check = layout.check

    def _graph(self, theta: Tensors, index: Tensors) -> tuple[Tensors, Tensors]:
        return [self.layout.weights(theta, index)], self.layout.graph(theta, index).graph

    def _onto(self, edges: Tensors, theta: Tensors, index: Tensors) -> Tensors:
        return self.layout.onto_scores(self.layout.onto_slots(edges[0], theta, index), theta, index)

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return theta[0].new_empty(
            (theta[0].shape[0], *self.layout.nodes(theta, index)), dtype=wide_dtype(theta[0].device)
        )

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self.forward(theta, index, omega)[0]

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        weights, inner = self._graph(theta, index)
        value, tape = self.engine.forward(weights, inner, omega)
        # The graph has one more node than a lattice with a single end.
        at_vertex = omega.penalty(widen(value.new_ones(1))).to(value.dtype)
        return torch.where(self.layout.has_sink(theta, index), value, value + at_vertex), tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        weights, inner = self._graph(theta, index)
        return self._onto(self.engine.backward(weights, tape, seed, inner, omega), theta, index)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, inner = self._graph(theta, index)
        along = [self.layout.along(z, index)]
        return self._onto(self.engine.hessian(weights, tape, seed, along, inner, omega), theta, index)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        weights, inner = self._graph(theta, index)
        depth = int(self.layout.graph(theta, index).levels.max())
        uniforms = pad(uniforms, (0, max(0, depth - uniforms.shape[-1])), value=0.5)
        return self.layout.walks(self.engine.sample(weights, tape, uniforms, inner, omega), theta, index)

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        weights, inner = self._graph(theta, index)
        scores, found = self.engine.topk(weights, k, inner, omega)
        return scores, self.layout.walks(found, theta, index)
