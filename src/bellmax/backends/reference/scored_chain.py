"""Sweeps of a chain from scores: emissions, transitions, start and end scores, by way of a dense chain.

A dense chain has one potential for each step and pair of states.
"""

from __future__ import annotations

from torch import Tensor

from bellmax.backends.protocol import EdgeSweeps
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs import SCORED_CHAIN
from bellmax.programs.scored_chain import dense, from_edges, onto_edges
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors


class LogTransitions:
    """log q and its derivatives in the shapes of θ, computed by the sweeps of a dense chain.

    log q of an edge is stored in the entry of its transition, and for the first step in the start scores. The edges
    into the end node count as edges of the last step. Emissions and end scores are 0.
    """

    chain: EdgeSweeps

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Return the potentials (B, T, S, S) of the dense chain, and the tape of its forward sweep."""
        raise NotImplementedError

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        (log_q,) = self.chain.log_transitions([weights], tape, index, omega)
        return from_edges(log_q, theta, index)

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        direction = dense(z, index).to(weights.dtype)
        (product,) = self.chain.log_transitions_jvp([weights], tape, [direction], index, omega)
        return from_edges(product, theta, index)

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        _, transitions, start, _ = cotangent
        edges = onto_edges(transitions, start, theta[0], index).to(weights.dtype)
        (product,) = self.chain.log_transitions_vjp([weights], tape, [edges], index, omega)
        gradients = SCORED_CHAIN.onto_scores(product, theta, index)
        return [gradient.to(scores.dtype) for gradient, scores in zip(gradients, theta, strict=True)]


class ExpandedScoredChain(LogTransitions, Expanded):
    """Sweeps of a chain from scores that build the potentials of the dense chain each time."""

    def __init__(self, chain: EdgeSweeps) -> None:
        Expanded.__init__(self, SCORED_CHAIN, chain)
        self.chain = chain

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        return dense(theta, index), tape
