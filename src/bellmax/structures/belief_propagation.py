"""Belief propagation on any pairwise graph, unrolled: a dynamic program on the computation trees of its nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.inputs import answers_near_misses, as_lengths, check_tensor
from bellmax.programs.values import reject_overflow
from bellmax.regularizers import Regularizer, resolve
from bellmax.tensors import Gamma, divide_by_gamma, multiply_by_gamma, promote_half
from bellmax.transforms import is_checked, is_readable


class _Routes(NamedTuple):
    """Messages: one each way along each edge, first all from its first node. A message is made of others."""

    source: Tensor
    target: Tensor
    message: Tensor
    other: Tensor

    def on(self, device: torch.device) -> _Routes:
        return _Routes(*(part.to(device) for part in self))


class BeliefPropagation:
    """Messages along the edges of a graph of V nodes, for a fixed number of iterations.

    On a tree the beliefs are the marginals, once there are as many iterations as edges between the two nodes that are
    furthest apart. On a graph with cycles they are an approximation. They are plain torch: derivatives, of any order,
    go through the iterations.

    Args:
        edges: (E, 2), two nodes an edge, each pair once, in either order.

    >>> import bellmax as bx
    >>> triangle = bx.BeliefPropagation([(0, 1), (1, 2), (2, 0)])
    >>> unary = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])          # node 0 likes state 0
    >>> agree = torch.tensor([[1.0, 0.0], [0.0, 1.0]])                      # neighbours like to agree
    >>> triangle(unary, agree, iterations=20).beliefs
    tensor([[0.7681, 0.2319],
            [0.6649, 0.3351],
            [0.6649, 0.3351]])
    """

    def __init__(self, edges: Tensor | Sequence[Sequence[int]]) -> None:
        ends = as_lengths("edges", edges, torch.device("cpu"))
        ends = ends if ends.numel() else ends.reshape(0, 2)
        _check_edges(ends)
        self._edges, self._nodes = len(ends), int(ends.max()) + 1 if len(ends) else 0
        self._routes = _routes(ends, self._nodes)

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
        """Return the beliefs after some iterations. They are computed now: later changes of the scores do not count.

        Args:
            unary: (..., V, K), the score of each state at each node; −∞ forbids a state.
            pairwise: (K, K) for all edges, or (..., E, K, K) ``[edge, state of its first node, state of its second]``.
            iterations: how often every message is renewed; messages begin at 0.
            damping: from 0 to below 1, the share of the old message that is kept. More than 0 helps where messages do
                not settle.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.
        """
        self._check(unary, pairwise, iterations, damping)
        omega = resolve(omega, gamma)
        by_edge = pairwise.expand(*unary.shape[:-2], self._edges, *pairwise.shape[-2:])
        nodes = divide_by_gamma(promote_half(unary), _with_dims(omega.gamma, 2))
        edges = divide_by_gamma(promote_half(torch.cat([by_edge, by_edge.mT], -3)), _with_dims(omega.gamma, 3))
        state = _State(self._routes.on(unary.device), nodes, edges, omega.at_unit_gamma())
        for _ in range(iterations):
            state.renew(damping)
        found = Beliefs(state, omega, unary.dtype)
        if is_checked(unary):
            reject_overflow(found.value.detach())
        return found

    def _check(self, unary: Tensor, pairwise: Tensor, iterations: int, damping: float) -> None:
        shape = check_tensor("unary", unary).shape
        if len(shape) < 2 or shape[-1] == 0 or shape[-2] < self._nodes:
            raise ValueError(f"unary must have shape (..., V >= {self._nodes}, K >= 1), got {tuple(shape)}")
        states, edges = shape[-1], self._edges
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


def _check_edges(ends: Tensor) -> None:
    if ends.ndim != 2 or ends.shape[1] != 2:
        raise ValueError(f"edges must have shape (E, 2), got {tuple(ends.shape)}")
    for number in (ends < 0).any(1).nonzero().flatten().tolist():
        raise ValueError(f"edges must hold nodes >= 0, got {int(ends[number].min())} in edge {number}")
    for number in (ends[:, 0] == ends[:, 1]).nonzero().flatten().tolist():
        raise ValueError(f"edges must join two nodes, got edge {number} from {int(ends[number, 0])} to itself")
    pairs, counts = ends.sort(1).values.unique(dim=0, return_counts=True)
    for a, b in pairs[counts > 1].tolist():
        raise ValueError(f"edges must name each pair of nodes once, got {a} and {b} more than once")


def _routes(ends: Tensor, nodes: int) -> _Routes:
    """A message is made of those that arrive at its source, but for the one from its target."""
    source, target = torch.cat([ends, ends.flip(1)]).T
    by_target, arriving = target.argsort(), target.bincount(minlength=nodes)
    first, count = (arriving.cumsum(0) - arriving)[source], arriving[source]
    message = torch.arange(len(source)).repeat_interleave(count)
    place = torch.arange(len(message)) - (count.cumsum(0) - count)[message]
    other = by_target[first[message] + place]
    kept = source[other] != target[message]
    return _Routes(source, target, message[kept], other[kept])


class _State:
    """The messages of a graph, at γ = 1."""

    def __init__(self, routes: _Routes, unary: Tensor, pairwise: Tensor, omega: Regularizer) -> None:
        self.routes, self.unary, self.pairwise, self.omega = routes, unary, pairwise, omega
        self.messages = unary.new_zeros(pairwise.shape[:-1])
        self.constants = unary.new_zeros(pairwise.shape[:-2])
        """(..., 2E), what was taken from each message: unscaled, they grow with the number of walks."""
        self.residual = unary.new_zeros(unary.shape[:-2])
        self._join()

    def _join(self) -> None:
        """(..., 2E, K, K) ``[state of the source, state of the target]``, of which messages are the smoothed max."""
        _, _, message, other = self.routes
        known = self.unary.index_select(-2, self.routes.source)
        known = known.index_add(-2, message, self.messages.index_select(-2, other))
        self.joint = self.pairwise + known.unsqueeze(-1)

    def renew(self, damping: float) -> None:
        self._join()
        _, _, message, other = self.routes
        new = self.omega.max(self.joint, dim=-2)
        top = new.detach().amax(-1)
        top = top.masked_fill(top == -math.inf, 0)
        constants = top.index_add(-1, message, self.constants.index_select(-1, other))
        old, self.messages = self.messages, _mixed(new - top.unsqueeze(-1), self.messages, damping)
        self.constants = _mixed(constants, self.constants, damping)
        if new.shape[-2]:
            change = (self.messages - old).detach().masked_fill(self.messages == old, 0)
            self.residual = change.abs().flatten(-2).amax(-1)


def _mixed(new: Tensor, old: Tensor, damping: float) -> Tensor:
    return (1 - damping) * new + damping * old if damping else new


def _with_dims(gamma: Gamma, dims: int) -> Gamma:
    """γ of the batch shape in one that broadcasts against ``dims`` more dimensions."""
    return gamma.reshape(*gamma.shape, *[1] * dims) if isinstance(gamma, Tensor) else gamma


class Beliefs:
    """What :class:`BeliefPropagation` arrives at.

    Node u believes in the solution of DP_Ω on its *computation tree*: all walks into u, as many steps long as there
    were iterations (without damping). For a sparse Ω, two nodes therefore speak of two programs.
    """

    def __init__(self, state: _State, omega: Regularizer, dtype: torch.dtype) -> None:
        self._state, self.omega, self._dtype = state, omega, dtype
        self._scores = state.unary.index_add(-2, state.routes.target, state.messages)

    @cached_property
    def beliefs(self) -> Tensor:
        """(..., V, K), the probability of each state at each node; 0 for all if no state is possible."""
        return self._state.omega.argmax(self._scores).to(self._dtype)

    @cached_property
    def edge_beliefs(self) -> Tensor:
        """(..., E, K, K), the probability of the states of both nodes, as the second node of each edge believes."""
        joint, target = self._state.joint, self._state.routes.target
        edges = len(target) // 2
        given = self._state.omega.argmax(joint.narrow(-3, 0, edges), dim=-2)
        return given.to(self._dtype) * self.beliefs.index_select(-2, target[:edges]).unsqueeze(-2)

    @cached_property
    def value(self) -> Tensor:
        """(..., V), DP_Ω on the computation tree of each node. Its gradient counts copies: it may exceed 1."""
        state = self._state
        constants = state.unary.new_zeros(state.unary.shape[:-1])
        constants = constants.index_add(-1, state.routes.target, state.constants)
        value = state.omega.max(self._scores) + constants
        return multiply_by_gamma(value, _with_dims(self.omega.gamma, 1))

    @property
    def residual(self) -> Tensor:
        """(...), the greatest change of a message in the last iteration, without gradient: small if they settled."""
        return self._state.residual

    def best_labels(self) -> Tensor:
        """(..., V) int64, the state that each node believes in most."""
        return self._scores.detach().argmax(-1)

    def __repr__(self) -> str:
        *batch, nodes, states = self._scores.shape
        return f"Beliefs(batch_shape={tuple(batch)}, nodes={nodes}, states={states}, omega={self.omega})"
