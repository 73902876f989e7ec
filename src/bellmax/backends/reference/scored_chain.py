"""log q of a chain given by scores, with transitions by sequence and step."""

from __future__ import annotations

from torch import Tensor

from bellmax.backends.protocol import EdgeSweeps
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs import SCORED_CHAIN
from bellmax.programs.scored_chain import dense, from_edges, onto_edges
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors


class LogTransitions:
    """The sweeps of a dense chain, in θ's shapes: an edge's log q is in the transitions, or in start for a first one.

    The edges into the end node count as edges of the last step.
    """

    chain: EdgeSweeps

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Potentials of a dense chain, and its tape."""
        raise NotImplementedError

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        (log_q,) = self.chain.log_transitions([weights], tape, index, omega)
        return from_edges(log_q, theta, index)

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        along = dense(z, index).to(weights.dtype)
        (product,) = self.chain.log_transitions_jvp([weights], tape, [along], index, omega)
        return from_edges(product, theta, index)

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        weights, tape = self._dense(theta, tape, index, omega)
        _, transitions, start, _ = cotangent
        edges = onto_edges(transitions, start, theta[0], index).to(weights.dtype)
        (product,) = self.chain.log_transitions_vjp([weights], tape, [edges], index, omega)
        return [
            part.to(t.dtype) for part, t in zip(SCORED_CHAIN.onto_scores(product, theta, index), theta, strict=True)
        ]


class ExpandedScoredChain(LogTransitions, Expanded):
    """The sweeps of a dense chain whose potentials are the sums of the scores."""

    def __init__(self, chain: EdgeSweeps) -> None:
        Expanded.__init__(self, SCORED_CHAIN, chain)
        self.chain = chain

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        return dense(theta, index), tape
