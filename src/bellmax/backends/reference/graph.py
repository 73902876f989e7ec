"""The sweeps of a graph, or a hypergraph, in plain torch, node values in the wide dtype.

θ and ``index`` are as in :mod:`bellmax.programs.graph`. The nodes of a group share their level and their number of
edges, so a group's edges are a slice that reshapes to (nodes, edges of each) without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.programs import GRAPH
from bellmax.programs.values import reject_overflow
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen
from bellmax.transforms import is_readable

__all__ = ["backward", "check", "empty_tape", "forward", "hessian", "log_transitions", "log_transitions_jvp"]
__all__ += ["log_transitions_vjp", "sample", "topk", "value"]

check = GRAPH.check


class Group(NamedTuple):
    """Nodes, their edges, how many each of them has, and the tails of these edges."""

    nodes: slice
    edges: slice
    degree: int
    tail: Tensor
    owner: Tensor | None
    """Of each tail, which of the group's edges it belongs to; None if each edge has one."""

    def at_tails(self, of_nodes: Tensor) -> Tensor:
        """What the tails of each edge have together: (..., N) as (..., edges)."""
        parts = of_nodes.index_select(-1, self.tail)
        if self.owner is None:
            return parts
        sums = parts.new_zeros((*parts.shape[:-1], self.edges.stop - self.edges.start))
        return sums.index_add(-1, self.owner, parts)

    def spread(self, of_edges: Tensor, of_nodes: Tensor) -> None:
        """Add what an edge has to each of its tails."""
        of_nodes.index_add_(-1, self.tail, of_edges if self.owner is None else of_edges.index_select(-1, self.owner))


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    return theta[0].new_empty((theta[0].shape[0], *GRAPH.nodes(theta, index)), dtype=wide_dtype(theta[0].device))


def _is_hypergraph(index: Tensors) -> bool:
    return len(index) > 4


def _groups(index: Tensors) -> list[Group]:
    """In topological order, without the start of a graph."""
    offset, tail, _, group = index[:4]
    nodes, edges = group.tolist(), offset[group].tolist()
    bounds = list(zip(nodes[:-1], nodes[1:], edges[:-1], edges[1:], strict=True))
    if not _is_hypergraph(index):
        return [Group(slice(a, b), slice(e, f), (f - e) // (b - a), tail[e:f], None) for a, b, e, f in bounds[1:]]
    first = index[4].tolist()
    slot = torch.arange(len(first) - 1, device=tail.device)
    owner = slot.repeat_interleave(index[4].diff())
    return [
        Group(slice(a, b), slice(e, f), (f - e) // (b - a), tail[first[e] : first[f]], owner[first[e] : first[f]] - e)
        for a, b, e, f in bounds
    ]


def _zeros(shape: Sequence[int], *like: Tensor) -> Tensor:
    """A wide buffer that may be written with values computed from ``like``, under vmap too."""
    dtype = wide_dtype(like[0].device)
    total = like[0].new_zeros(shape, dtype=dtype)
    for tensor in like[1:]:
        total = total + tensor.new_zeros(shape, dtype=dtype)
    return total


def _by_slot(values: Tensor, index: Tensors) -> Tensor:
    """What weights have, for each slot."""
    return widen(values.index_select(1, index[5] if len(index) > 5 else index[2]))


def _onto_weights(slots: Tensor, index: Tensors, like: Tensor) -> Tensor:
    """The transpose: what slots have, for each weight."""
    if len(index) <= 5:
        return _onto_edges(slots, index).to(like.dtype)
    sums = slots.new_zeros((*slots.shape[:-1], like.shape[-1]))
    return sums.index_add(-1, index[5], slots).to(like.dtype)


def _onto_edges(slots: Tensor, index: Tensors) -> Tensor:
    """What slots have, for each edge, by the caller's number."""
    return slots.index_select(-1, index[2].argsort())


def _local_scores(theta: Tensor, v: Tensor, group: Group) -> Tensor:
    """θ_e + Σ v at its tails for the edges of a group's nodes: (B, nodes, degree)."""
    scores: Tensor = (theta[:, group.edges] + group.at_tails(v)).unflatten(1, (-1, group.degree))
    return scores


def forward(inputs: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    sorted_theta = _by_slot(theta, index)
    v = _zeros((theta.shape[0], index[0].shape[0] - 1), theta)
    for group in _groups(index):
        v[:, group.nodes] = omega.max(_local_scores(sorted_theta, v, group))
    value = v[:, -1].to(theta.dtype, copy=True)
    reject_overflow(value)
    return value, v


def value(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[0]


def _walk_back(mass: Tensor, index: Tensors, theta: Tensor, edge_mass: Callable[[Group, Tensor], Tensor]) -> Tensor:
    """Run mass from the root to the tails. ``edge_mass`` spreads what a group's nodes hold over their edges."""
    parts = []
    for group in reversed(_groups(index)):
        part = edge_mass(group, mass[..., group.nodes].clone()).flatten(-2)
        group.spread(part, mass)
        parts.append(part)
    return _onto_weights(torch.cat(parts[::-1], -1), index, theta)


def _at_root(shape: Sequence[int], *like: Tensor) -> Tensor:
    mass = _zeros(shape, *like)
    mass[..., -1] = 1
    return mass


def backward(inputs: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _by_slot(theta, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        return omega.argmax(_local_scores(sorted_theta, tape, group)) * mass.unsqueeze(-1)

    return [_walk_back(_at_root(tape.shape, theta, tape), index, theta, spread) * seed.unsqueeze(-1)]


def hessian(
    inputs: Tensors, tape: Tensor, seed: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _by_slot(theta, index), _by_slot(z, index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    q, q_dot = {}, {}
    for group in _groups(index):
        nodes = group.nodes.start
        q[nodes] = omega.argmax(_local_scores(sorted_theta, tape, group))
        y = _local_scores(sorted_z, v_dot, group).masked_fill(q[nodes] == 0, 0)
        v_dot[:, group.nodes] = (q[nodes] * y).sum(-1)
        q_dot[nodes] = omega.jacobian_product(q[nodes], y)

    # Mass and its tangent run back together: Algorithm 2 of the paper.
    def spread(group: Group, mass: Tensor) -> Tensor:
        e, e_dot = mass.unsqueeze(-1)
        start = group.nodes.start
        source = q_dot[start].masked_fill(e == 0, 0) * e
        return torch.stack((q[start] * e, source + q[start] * e_dot))

    masses = torch.stack((_at_root(tape.shape, theta, tape, z), _zeros(tape.shape, theta, tape, z)))
    return [_walk_back(masses, index, theta, spread)[1] * seed.unsqueeze(-1)]


# --- log q, where no weights are shared


def log_transitions(inputs: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _by_slot(theta, index)
    parts = [omega.log_argmax(_local_scores(sorted_theta, tape, group)).flatten(1) for group in _groups(index)]
    return [_onto_edges(torch.cat(parts, -1), index).to(theta.dtype)]


def log_transitions_jvp(
    inputs: Tensors, tape: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _by_slot(theta, index), _by_slot(z, index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    parts = []
    for group in _groups(index):
        x = _local_scores(sorted_theta, tape, group)
        q = omega.argmax(x)
        y = _local_scores(sorted_z, v_dot, group).masked_fill(x == -math.inf, 0)
        v_dot[:, group.nodes] = (q * y).sum(-1)
        parts.append(omega.log_argmax_jvp(q, y).masked_fill(x == -math.inf, 0).flatten(1))
    return [_onto_edges(torch.cat(parts, -1), index).to(theta.dtype)]


def log_transitions_vjp(
    inputs: Tensors, tape: Tensor, cotangents: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (cotangent,) = inputs, cotangents
    sorted_theta, sorted_cotangent = _by_slot(theta, index), _by_slot(cotangent, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        x = _local_scores(sorted_theta, tape, group)
        local = sorted_cotangent[:, group.edges].unflatten(1, (-1, group.degree)).masked_fill(x == -math.inf, 0)
        q = omega.argmax(x)
        return omega.log_argmax_vjp(q, local) + q * mass.unsqueeze(-1)

    return [_walk_back(_zeros(tape.shape, theta, tape, cotangent), index, theta, spread)]


# --- single derivations


def _tails(index: Tensors) -> tuple[Tensor, Tensor]:
    """Of each slot, the place of its first tail, and how many are derived in turn: the start of a graph is not."""
    if _is_hypergraph(index):
        return index[4][:-1], index[4].diff()
    return torch.arange(len(index[1]), device=index[1].device), (index[1] > 0).int()


Choose = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def _count_edges(index: Tensors, start: Tensor, k: int, choose: Choose, steps: float) -> tuple[Tensor, Tensor]:
    """How often derivations have each edge, (B, K, E), and how many of their nodes are left after so many steps.

    A derivation of a node has the code node · k + its rank; ``start`` (B, K) are those of the root, −1 for none.
    choose(step, code) is the slot of its edge, (B, K), and the ranks of the edge's tails, (B, K, tails) or one for all.
    It is depth first, and first tails come first.
    """
    first, count = _tails(index)
    most, tail, num_edges = int(count.max()), index[1], index[2].shape[0]
    root = (index[0].shape[0] - 2) * k
    # What waits at any time: later tails of the nodes above, of which there is one at each level.
    room = 1 + max(0, most - 1) * (index[3].shape[0] - 1)
    waiting = start.unsqueeze(-1) * start.new_ones(room + 1)
    height = (start >= 0).long()
    nth = torch.arange(max(most, 1), device=start.device)
    chosen: list[Tensor] = []
    while len(chosen) < steps and not (is_readable(height) and not bool(height.any())):
        code = waiting.gather(-1, (height - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        slot, ranks = choose(len(chosen), torch.where(height > 0, code, root))
        chosen.append(slot.masked_fill(height == 0, num_edges))
        pushed = count[slot].masked_fill(height == 0, 0).unsqueeze(-1)
        height = (height - 1).clamp(min=0).unsqueeze(-1)
        place = torch.where(nth < pushed, height + pushed - 1 - nth, room)
        at = (first[slot].unsqueeze(-1) + nth).clamp(max=max(len(tail) - 1, 0))
        waiting = waiting.scatter(-1, place, tail[at].long() * k + ranks) if len(tail) else waiting
        height = (height + pushed).squeeze(-1).long()
    counts = torch.zeros((*start.shape, num_edges + 1), dtype=wide_dtype(start.device), device=start.device)
    if chosen:
        slots = torch.stack(chosen, -1)
        counts = counts.scatter_add(-1, slots, counts.new_ones(()).expand(slots.shape))
    return _onto_edges(counts[..., :-1], index), height


def sample(inputs: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Derivations drawn with ``uniforms`` (B, K, choices): the n-th choice, from the root, takes the n-th."""
    (theta,) = inputs
    sorted_theta, offset = _by_slot(theta, index), index[0].long()
    q = [omega.argmax(_local_scores(sorted_theta, tape, group)) for group in _groups(index)]
    below = torch.cat([each.cumsum(-1).flatten(1) for each in q], -1).unsqueeze(1)  # of the edges up to each one
    within = torch.arange(int(offset.diff().max()), device=theta.device)

    def choose(step: int, node: Tensor) -> tuple[Tensor, Tensor]:
        begin, last = offset[node].unsqueeze(-1), offset[node + 1].unsqueeze(-1) - 1
        slots = (begin + within).minimum(last)
        sums = below.expand(-1, node.shape[1], -1).gather(-1, slots)
        is_lower = sums <= uniforms[..., step : step + 1] * sums[..., -1:]
        return (begin + (is_lower & (begin + within < last)).sum(-1, keepdim=True)).squeeze(-1), node.new_zeros(1)

    root = tape.shape[1] - 1
    start = torch.where(tape[:, -1:] > -math.inf, root, -1).expand(uniforms.shape[:2])
    counts, left = _count_edges(index, start, 1, choose, uniforms.shape[2])
    if is_readable(left) and bool(left.any()):
        raise ValueError("a path has more choices than there are uniforms")
    return counts.to(theta.dtype)


def topk(inputs: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    batch, num_nodes = theta.shape[0], index[0].shape[0] - 1
    sorted_theta = _by_slot(theta, index)
    most = max(1, int(_tails(index)[1].max()))
    scores = sorted_theta.new_full((batch, num_nodes, k), -math.inf)
    scores[:, 0, 0] = 0  # of the start; a hypergraph has another node there, which is written below
    slot = index[0].new_zeros((batch, num_nodes, k), dtype=torch.int64)
    ranks = slot.new_zeros((batch, num_nodes, k, most))
    for group in _groups(index):
        own, own_ranks = _best_of_edges(sorted_theta, scores, index, group, most)
        size = group.nodes.stop - group.nodes.start
        best = own.reshape(batch, size, group.degree * k).sort(dim=-1, descending=True, stable=True)
        way = best.indices[..., :k]
        begin = torch.arange(group.edges.start, group.edges.stop, group.degree, device=theta.device)
        scores[:, group.nodes] = best.values[..., :k]
        slot[:, group.nodes] = begin.unsqueeze(-1) + way // k
        by_node = own_ranks.reshape(batch, size, group.degree * k, most)
        ranks[:, group.nodes] = by_node.gather(2, way.unsqueeze(-1).expand(*way.shape, most))

    def choose(step: int, code: Tensor) -> tuple[Tensor, Tensor]:
        wide = code.unsqueeze(-1).expand(*code.shape, most)
        return slot.flatten(1).gather(1, code), ranks.flatten(1, 2).gather(1, wide)

    codes = (num_nodes - 1) * k + torch.arange(k, device=theta.device)
    start = torch.where(scores[:, -1] > -math.inf, codes, -1)
    counts, _ = _count_edges(index, start, k, choose, math.inf)
    return scores[:, -1].to(theta.dtype).contiguous(), counts.to(theta.dtype)


def _best_of_edges(theta: Tensor, scores: Tensor, index: Tensors, group: Group, most: int) -> tuple[Tensor, Tensor]:
    """The best derivations by each edge of a group: scores (B, edges, k), ranks of the tails (B, edges, k, most)."""
    batch, _, k = scores.shape
    weights = theta[:, group.edges, None]
    if group.owner is None:
        ranks = torch.arange(k, device=theta.device).reshape(1, 1, k, 1)
        return weights + scores.index_select(1, group.tail), ranks.expand(batch, weights.shape[1], k, most)
    first, count = (part[group.edges] for part in _tails(index))
    best = torch.cat((weights, weights.new_full((*weights.shape[:2], k - 1), -math.inf)), -1)
    ranks = torch.zeros((*best.shape, most), dtype=torch.int64, device=theta.device)
    for nth in range(int(count.max())):
        edges = (count > nth).nonzero().squeeze(-1)
        pairs = best[:, edges].unsqueeze(-1) + scores.index_select(1, index[1][first[edges] + nth]).unsqueeze(-2)
        found = pairs.flatten(-2).sort(dim=-1, descending=True, stable=True)
        before, own = found.indices[..., :k] // k, found.indices[..., :k] % k
        best[:, edges] = found.values[..., :k]
        ranks[:, edges] = ranks[:, edges].gather(2, before.unsqueeze(-1).expand(*before.shape, most))
        ranks[:, edges, :, nth] = own
    return best, ranks
