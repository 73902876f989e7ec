"""Unrolled belief propagation on any graph with pairwise scores.

It is a dynamic program on the computation tree of each node: the tree of all walks into the node that
never return over the edge by which they came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.inputs import answers_near_misses, as_lengths, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import reject_overflow
from bellmax.regularizers import Regularizer, resolve
from bellmax.tensors import Gamma, divide_by_gamma, multiply_by_gamma, promote_half


class _MessageGraph(NamedTuple):
    """The 2E messages of a graph with E edges, and the messages that each one depends on.

    Message e < E goes from the first to the second node of edge e, message E + e the other way. A message depends on
    all messages that arrive at its source, except for the one from its target.
    """

    source: Tensor
    """The node (2E,) that sends each message."""
    target: Tensor
    """The node (2E,) that receives each message."""
    message: Tensor
    """The indices (P,) of messages, one for each pair of a message and a message that it depends on."""
    dependency: Tensor
    """The indices (P,) of the messages that they depend on."""

    def to(self, device: torch.device) -> _MessageGraph:
        """Return a copy on a device."""
        return _MessageGraph(*(indices.to(device) for indices in self))


class BeliefPropagation:
    """Loopy belief propagation on a graph of V nodes, for a fixed number of iterations.

    To get the beliefs, call the object with a score for each state of each node and for each pair of states of
    neighbors. The beliefs approximate the marginal probabilities of the states of each node. If the graph is a tree,
    the beliefs are exact after enough iterations: as many as the longest path in the tree has edges. The iterations are
    plain torch operations, which autograd can differentiate to any order.

    Args:
        edges: The two nodes of each edge, integers (E, 2). List each edge only once, with its two nodes in either
            order.

    >>> import bellmax as bx
    >>> triangle = bx.BeliefPropagation([(0, 1), (1, 2), (2, 0)])
    >>> unary = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])          # node 0 prefers state 0
    >>> agree = torch.tensor([[1.0, 0.0], [0.0, 1.0]])                      # neighbors prefer equal states
    >>> triangle(unary, agree, iterations=20).beliefs
    tensor([[0.7681, 0.2319],
            [0.6649, 0.3351],
            [0.6649, 0.3351]])
    """

    @answers_near_misses
    def __init__(self, edges: Tensor | Sequence[Sequence[int]]) -> None:
        pairs = as_lengths("edges", edges, torch.device("cpu"))
        pairs = pairs if pairs.numel() else pairs.reshape(0, 2)
        _check_edges(pairs)
        self._num_edges, self._num_nodes = len(pairs), int(pairs.max()) + 1 if len(pairs) else 0
        self._graph = _message_graph(pairs, self._num_nodes)

    def __repr__(self) -> str:
        return f"BeliefPropagation(num_nodes={self._num_nodes}, num_edges={self._num_edges})"

    @answers_near_misses
    def __call__(
        self,
        unary: Tensor,
        pairwise: Tensor,
        *,
        iterations: int = 10,
        damping: float = 0.0,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Beliefs:
        """Return the :class:`Beliefs` after ``iterations`` updates of all messages.

        The beliefs are computed at once, so later in-place changes of the scores have no effect.

        Args:
            unary: The score (..., V, K) of each state at each node. −∞ forbids a state.
            pairwise: The scores (K, K) ``[state of the first node, state of the second node]`` of all edges, or
                (..., E, K, K) with different scores for each edge.
            iterations: The number of updates of each message, default 10. Messages start at 0.
            damping: The weight of the old message in an update, 0 ≤ damping < 1, default 0. Positive values help if
                messages do not converge.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        """
        self._check(unary, pairwise, iterations, damping)
        omega = resolve(omega, gamma)
        by_edge = pairwise.expand(*unary.shape[:-2], self._num_edges, *pairwise.shape[-2:])
        by_message = torch.cat([by_edge, by_edge.mT], -3)
        node_scores = divide_by_gamma(promote_half(unary), _unsqueeze_gamma(omega.gamma, 2))
        edge_scores = divide_by_gamma(promote_half(by_message), _unsqueeze_gamma(omega.gamma, 3))
        messages = _Messages(self._graph.to(unary.device), node_scores, edge_scores, omega.at_unit_gamma())
        for _ in range(iterations):
            messages.update(damping)
        beliefs = Beliefs(messages, omega, unary.dtype)
        if is_checked(unary):
            reject_overflow(beliefs.value.detach())
        return beliefs

    def _check(self, unary: Tensor, pairwise: Tensor, iterations: int, damping: float) -> None:
        """Raise ``ValueError`` if a shape, a dtype, a device, a score or an option is invalid."""
        shape = check_tensor("unary", unary).shape
        if len(shape) < 2 or shape[-1] == 0 or shape[-2] < self._num_nodes:
            raise ValueError(f"unary must have shape (..., V >= {self._num_nodes}, K >= 1), got {tuple(shape)}")
        states, edges = shape[-1], self._num_edges
        needed = (states, states), (*shape[:-2], edges, states, states)
        if check_tensor("pairwise", pairwise).shape not in needed:
            raise ValueError(f"pairwise must have shape {needed[0]} or {needed[1]}, got {tuple(pairwise.shape)}")
        if unary.device != pairwise.device:
            raise ValueError(f"pairwise must be on the device of unary, {unary.device}, got {pairwise.device}")
        for name, scores in (("unary", unary), ("pairwise", pairwise)):
            if not scores.is_floating_point():
                raise ValueError(f"{name} must be floating point, got dtype {scores.dtype}")
            if is_readable(scores) and not bool((scores < math.inf).all()):
                raise ValueError(f"{name} must hold finite scores or -inf, got nan or +inf")
        if not isinstance(iterations, int) or iterations < 0:
            raise ValueError(f"iterations must be an integer >= 0, got {iterations!r}")
        if not 0 <= damping < 1:
            raise ValueError(f"damping must be a number from 0 to below 1, got {damping!r}")


def _check_edges(pairs: Tensor) -> None:
    """Raise ``ValueError`` for a wrong shape, a negative node, a self-loop or a repeated edge."""
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"edges must have shape (E, 2), got {tuple(pairs.shape)}")
    for edge in (pairs < 0).any(1).nonzero().flatten().tolist():
        raise ValueError(f"edges must hold nodes >= 0, got {int(pairs[edge].min())} in edge {edge}")
    for edge in (pairs[:, 0] == pairs[:, 1]).nonzero().flatten().tolist():
        raise ValueError(f"edges must join two nodes, got edge {edge} from {int(pairs[edge, 0])} to itself")
    distinct, counts = pairs.sort(1).values.unique(dim=0, return_counts=True)
    for a, b in distinct[counts > 1].tolist():
        raise ValueError(f"edges must name each pair of nodes once, got {a} and {b} more than once")


def _message_graph(pairs: Tensor, num_nodes: int) -> _MessageGraph:
    """Return the messages along the edges (E, 2), and their dependencies."""
    source, target = torch.cat([pairs, pairs.flip(1)]).T
    by_target, num_arriving = target.argsort(), target.bincount(minlength=num_nodes)
    first, count = (num_arriving.cumsum(0) - num_arriving)[source], num_arriving[source]
    message = torch.arange(len(source)).repeat_interleave(count)
    nth = torch.arange(len(message)) - (count.cumsum(0) - count)[message]
    dependency = by_target[first[message] + nth]
    is_other_edge = source[dependency] != target[message]
    return _MessageGraph(source, target, message[is_other_edge], dependency[is_other_edge])


class _Messages:
    """The messages (..., 2E, K) of belief propagation, at γ = 1. Each update shifts their maximum to 0."""

    def __init__(self, graph: _MessageGraph, unary: Tensor, pairwise: Tensor, omega: Regularizer) -> None:
        self.graph, self.unary, self.pairwise, self.omega = graph, unary, pairwise, omega
        self.messages = unary.new_zeros(pairwise.shape[:-1])
        self.constants = unary.new_zeros(pairwise.shape[:-2])
        """(..., 2E), subtracted from the messages, which would otherwise grow with the number of walks."""
        self.residual = unary.new_zeros(unary.shape[:-2])
        self._update_joint()

    def _update_joint(self) -> None:
        """Set ``joint``, (..., 2E, K, K) ``[state of the source, state of the target]``.

        A new message is the smoothed max of its joint over the states of the source.
        """
        at_source = self.unary.index_select(-2, self.graph.source)
        arriving = self.messages.index_select(-2, self.graph.dependency)
        self.joint = self.pairwise + at_source.index_add(-2, self.graph.message, arriving).unsqueeze(-1)

    def update(self, damping: float) -> None:
        """Update all messages at once, and set ``residual`` to their largest change, (...)."""
        self._update_joint()
        new = self.omega.max(self.joint, dim=-2)
        maximum = new.detach().amax(-1)
        maximum = maximum.masked_fill(maximum == -math.inf, 0)
        earlier = self.constants.index_select(-1, self.graph.dependency)
        constants = maximum.index_add(-1, self.graph.message, earlier)
        old, self.messages = self.messages, _damp(new - maximum.unsqueeze(-1), self.messages, damping)
        self.constants = _damp(constants, self.constants, damping)
        if new.shape[-2]:
            change = (self.messages - old).detach().masked_fill(self.messages == old, 0)
            self.residual = change.abs().flatten(-2).amax(-1)


def _damp(new: Tensor, old: Tensor, damping: float) -> Tensor:
    """Return the weighted mean of new and old values. Without damping, infinite old values must not give NaN."""
    return (1 - damping) * new + damping * old if damping else new


def _unsqueeze_gamma(gamma: Gamma, dims: int) -> Gamma:
    """Append ``dims`` dimensions of size 1 to a tensor γ, to broadcast against scores. Return a number unchanged."""
    return gamma.reshape(*gamma.shape, *[1] * dims) if isinstance(gamma, Tensor) else gamma


class Beliefs:
    """The approximate marginals that :class:`BeliefPropagation` returns.

    The beliefs of node u are the marginals of u in its *computation tree*. Without damping, this tree consists of all
    walks through the graph that end in u, never return over the edge by which they came, and have as many steps as
    there were iterations. Different nodes have different trees. So under a sparse Ω, the beliefs of two nodes can be
    inconsistent.

    >>> import bellmax as bx
    >>> edge = bx.BeliefPropagation([(0, 1)])
    >>> edge(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2, 2)).beliefs
    tensor([[0.7311, 0.2689],
            [0.5000, 0.5000]])
    """

    def __init__(self, messages: _Messages, omega: Regularizer, dtype: torch.dtype) -> None:
        self._messages, self.omega, self._dtype = messages, omega, dtype
        self._scores = messages.unary.index_add(-2, messages.graph.target, messages.messages)

    @cached_property
    def beliefs(self) -> Tensor:
        """The probability of each state at each node, (..., V, K), all 0 if every state of the node is forbidden."""
        return self._messages.omega.argmax(self._scores).to(self._dtype)

    @cached_property
    def edge_beliefs(self) -> Tensor:
        """The joint probability of the states of both nodes of each edge, (..., E, K, K).

        The probability is computed on the computation tree of the second node. So its sums over the states of the first
        node are the beliefs of the second node.
        """
        joint, target = self._messages.joint, self._messages.graph.target
        edges = len(target) // 2
        conditional = self._messages.omega.argmax(joint.narrow(-3, 0, edges), dim=-2)
        return conditional.to(self._dtype) * self.beliefs.index_select(-2, target[:edges]).unsqueeze(-2)

    @cached_property
    def value(self) -> Tensor:
        """DP_Ω on the computation tree of each node, (..., V).

        On a graph with cycles, a computation tree contains several copies of a node. The gradient is summed over these
        copies, so it can exceed 1.
        """
        messages = self._messages
        constants = messages.unary.new_zeros(messages.unary.shape[:-1])
        constants = constants.index_add(-1, messages.graph.target, messages.constants)
        value = messages.omega.max(self._scores) + constants
        return multiply_by_gamma(value, _unsqueeze_gamma(self.omega.gamma, 1))

    @property
    def residual(self) -> Tensor:
        """The largest change of a message in the last iteration, (...), without gradient.

        The residual is small if the messages have converged.
        """
        return self._messages.residual

    def best_labels(self) -> Tensor:
        """Return the most probable state of each node, (..., V) int64."""
        return self._scores.detach().argmax(-1)

    def __repr__(self) -> str:
        *batch, nodes, states = self._scores.shape
        return f"Beliefs(batch_shape={tuple(batch)}, nodes={nodes}, states={states}, omega={self.omega})"
