"""The sweeps of a graph or a hypergraph in plain torch, with node values in the wide dtype.

θ and ``index`` are described in :mod:`bellmax.programs.graph`: a slot is the position of an edge in the sorted order,
and the root is the last node. All nodes of a group have the same level and the same number of incoming edges. So the
edges of a group are a slice of the slots, which reshapes to (nodes, edges per node) without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.modes import is_readable
from bellmax.programs import GRAPH
from bellmax.programs.checks import reject_overflow
from bellmax.regularizers import Hard, Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen

__all__ = ["backward", "check", "empty_tape", "forward", "hessian", "log_transitions", "log_transitions_jvp"]
__all__ += ["log_transitions_vjp", "max_marginals", "node_values", "sample", "topk", "value"]

check = GRAPH.check


class Group(NamedTuple):
    """Nodes that are computed together: they have the same level and the same number of incoming edges."""

    nodes: slice
    edges: slice
    """Slots of the edges into the nodes."""
    degree: int
    """Number of edges into each node."""
    tail: Tensor
    """Tails of the edges, in the order of the slots."""
    owner: Tensor | None
    """For each tail, the position of its edge within the group, or None if each edge has one tail."""

    def sum_over_tails(self, node_values: Tensor) -> Tensor:
        """Return the sum over the tails of each edge: (..., N) → (..., edges)."""
        tail_values = node_values.index_select(-1, self.tail)
        if self.owner is None:
            return tail_values
        sums = tail_values.new_zeros((*tail_values.shape[:-1], self.edges.stop - self.edges.start))
        return sums.index_add(-1, self.owner, tail_values)

    def add_to_tails(self, edge_mass: Tensor, node_mass: Tensor) -> None:
        """Add the mass (..., edges) of each edge to each of its tails, in ``node_mass`` (..., N), in place."""
        tail_mass = edge_mass if self.owner is None else edge_mass.index_select(-1, self.owner)
        node_mass.index_add_(-1, self.tail, tail_mass)


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    return theta[0].new_empty((theta[0].shape[0], *GRAPH.nodes(theta, index)), dtype=wide_dtype(theta[0].device))


def _is_hypergraph(index: Tensors) -> bool:
    """True if the index has the offsets of tails, which only a hypergraph has."""
    return len(index) > 4


def _groups(index: Tensors) -> list[Group]:
    """Return the groups in topological order, without the start node of a graph, which has no edges."""
    offset, tail, _, group = index[:4]
    nodes, edges = group.tolist(), offset[group].tolist()
    bounds = list(zip(nodes[:-1], nodes[1:], edges[:-1], edges[1:], strict=True))
    if not _is_hypergraph(index):
        return [Group(slice(a, b), slice(e, f), (f - e) // (b - a), tail[e:f], None) for a, b, e, f in bounds[1:]]
    tail_offset = index[4].tolist()
    slot = torch.arange(len(tail_offset) - 1, device=tail.device)
    owner = slot.repeat_interleave(index[4].diff())
    groups = []
    for a, b, e, f in bounds:
        tails = slice(tail_offset[e], tail_offset[f])
        groups.append(Group(slice(a, b), slice(e, f), (f - e) // (b - a), tail[tails], owner[tails] - e))
    return groups


def _zeros(shape: Sequence[int], *like: Tensor) -> Tensor:
    """Return a buffer of zeros in the wide dtype, for results computed from the tensors ``like``.

    Under vmap, in-place writes need a buffer that is batched like the values, so it is derived from all of them.
    """
    dtype = wide_dtype(like[0].device)
    buffer = like[0].new_zeros(shape, dtype=dtype)
    for tensor in like[1:]:
        buffer = buffer + tensor.new_zeros(shape, dtype=dtype)
    return buffer


def _sort_by_slot(weights: Tensor, index: Tensors) -> Tensor:
    """Return the weight of each slot, (B, W) → (B, E), in the wide dtype."""
    return widen(weights.index_select(1, index[5] if len(index) > 5 else index[2]))


def _sum_onto_weights(slots: Tensor, index: Tensors, like: Tensor) -> Tensor:
    """Return the sum over the slots of each weight, (..., E) → (..., W): the transpose of :func:`_sort_by_slot`.

    The result has the dtype and the last dimension of ``like``.
    """
    if len(index) <= 5:
        return _sort_by_edge(slots, index).to(like.dtype)
    sums = slots.new_zeros((*slots.shape[:-1], like.shape[-1]))
    return sums.index_add(-1, index[5], slots).to(like.dtype)


def _sort_by_edge(slots: Tensor, index: Tensors) -> Tensor:
    """Return values of slots in the caller's order of edges, (..., E) → (..., E)."""
    return slots.index_select(-1, index[2].argsort())


def _local_scores(theta: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return θ_e + Σ v over the tails of e, for the edges e of each node of the group: (B, nodes, degree)."""
    scores: Tensor = (theta[:, group.edges] + group.sum_over_tails(v)).unflatten(1, (-1, group.degree))
    return scores


def forward(inputs: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    sorted_theta = _sort_by_slot(theta, index)
    v = _zeros((theta.shape[0], index[0].shape[0] - 1), theta)
    for group in _groups(index):
        v[:, group.nodes] = omega.max(_local_scores(sorted_theta, v, group))
    value = v[:, -1].to(theta.dtype, copy=True)
    reject_overflow(value)
    return value, v


def value(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[0]


def _propagate_back(
    mass: Tensor, index: Tensors, theta: Tensor, edge_mass: Callable[[Group, Tensor], Tensor]
) -> Tensor:
    """Propagate ``mass`` (..., N) from the root to the leaves, in place, and return the mass of each weight.

    ``edge_mass(group, node_mass)`` distributes the mass (..., nodes) of a group's nodes over their edges,
    (..., nodes, degree).
    """
    masses = []
    for group in reversed(_groups(index)):
        masses.append(edge_mass(group, mass[..., group.nodes].clone()).flatten(-2))
        group.add_to_tails(masses[-1], mass)
    return _sum_onto_weights(torch.cat(masses[::-1], -1), index, theta)


def _unit_mass_at_root(shape: Sequence[int], *like: Tensor) -> Tensor:
    """Return node masses of this shape: 1 at the root, 0 elsewhere. ``like`` is as for :func:`_zeros`."""
    mass = _zeros(shape, *like)
    mass[..., -1] = 1
    return mass


def backward(inputs: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _sort_by_slot(theta, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        return omega.argmax(_local_scores(sorted_theta, tape, group)) * mass.unsqueeze(-1)

    return [_propagate_back(_unit_mass_at_root(tape.shape, theta, tape), index, theta, spread) * seed.unsqueeze(-1)]


def hessian(
    inputs: Tensors, tape: Tensor, seed: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _sort_by_slot(theta, index), _sort_by_slot(z, index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    q, q_dot = {}, {}
    for group in _groups(index):
        nodes = group.nodes.start
        q[nodes] = omega.argmax(_local_scores(sorted_theta, tape, group))
        y = _local_scores(sorted_z, v_dot, group).masked_fill(q[nodes] == 0, 0)
        v_dot[:, group.nodes] = (q[nodes] * y).sum(-1)
        q_dot[nodes] = omega.jacobian_product(q[nodes], y)

    # Algorithm 2 of the paper propagates the mass and its tangent together.
    def spread(group: Group, mass: Tensor) -> Tensor:
        e, e_dot = mass.unsqueeze(-1)
        start = group.nodes.start
        source = q_dot[start].masked_fill(e == 0, 0) * e
        return torch.stack((q[start] * e, source + q[start] * e_dot))

    masses = torch.stack((_unit_mass_at_root(tape.shape, theta, tape, z), _zeros(tape.shape, theta, tape, z)))
    return [_propagate_back(masses, index, theta, spread)[1] * seed.unsqueeze(-1)]


# --- log q, only for graphs whose edges do not share weights


def log_transitions(inputs: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _sort_by_slot(theta, index)
    log_q = [omega.log_argmax(_local_scores(sorted_theta, tape, group)).flatten(1) for group in _groups(index)]
    return [_sort_by_edge(torch.cat(log_q, -1), index).to(theta.dtype)]


def log_transitions_jvp(
    inputs: Tensors, tape: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _sort_by_slot(theta, index), _sort_by_slot(z, index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    log_q_dot = []
    for group in _groups(index):
        x = _local_scores(sorted_theta, tape, group)
        q = omega.argmax(x)
        y = _local_scores(sorted_z, v_dot, group).masked_fill(x == -math.inf, 0)
        v_dot[:, group.nodes] = (q * y).sum(-1)
        log_q_dot.append(omega.log_argmax_jvp(q, y).masked_fill(x == -math.inf, 0).flatten(1))
    return [_sort_by_edge(torch.cat(log_q_dot, -1), index).to(theta.dtype)]


def log_transitions_vjp(
    inputs: Tensors, tape: Tensor, cotangents: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (cotangent,) = inputs, cotangents
    sorted_theta, sorted_cotangent = _sort_by_slot(theta, index), _sort_by_slot(cotangent, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        x = _local_scores(sorted_theta, tape, group)
        local_cotangent = sorted_cotangent[:, group.edges].unflatten(1, (-1, group.degree))
        local_cotangent = local_cotangent.masked_fill(x == -math.inf, 0)
        q = omega.argmax(x)
        return omega.log_argmax_vjp(q, local_cotangent) + q * mass.unsqueeze(-1)

    return [_propagate_back(_zeros(tape.shape, theta, tape, cotangent), index, theta, spread)]


# --- single derivations: samples and the k best
#
# A derivation of the root is a path of a graph, or a tree of a hypergraph: each node has one edge, and each tail of
# the edge is derived in turn.


def _tails_of_slots(index: Tensors) -> tuple[Tensor, Tensor]:
    """Return, for each slot, the index of its first tail and the number of its tails that need an edge.

    The start of a graph needs none.
    """
    if _is_hypergraph(index):
        return index[4][:-1], index[4].diff()
    return torch.arange(len(index[1]), device=index[1].device), (index[1] > 0).int()


Choose = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""A function that chooses edges, for :func:`_count_edges`."""


def _count_edges(index: Tensors, start: Tensor, k: int, choose: Choose, steps: float) -> tuple[Tensor, Tensor]:
    """Follow K derivations per graph from the root, and count their edges.

    The traversal is depth first, with the first tail of an edge first, and ends after ``steps`` edges. All derivations
    advance together: each has a stack of nodes that still need an edge.

    Args:
        index: The index of the graph.
        start: The codes (B, K) of the derivations of the root, −1 for none. The derivation of a node with rank r (0 for
            the best one) has the code node · k + r.
        k: The number of ranks.
        choose: A function ``choose(step, code)`` that returns, for codes (B, K), the slots (B, K) of their edges and
            the ranks of the edges' tails, (B, K, tails) or (1,).
        steps: The maximum number of edges of a derivation.

    Returns:
        The number of times that each derivation uses each edge, (B, K, E), and the size of its stack at the end,
        (B, K), which is 0 if the derivation is complete.

    """
    first, count = _tails_of_slots(index)
    max_tails, tail, num_edges = int(count.max()), index[1], index[2].shape[0]
    root = (index[0].shape[0] - 2) * k
    # Each level adds at most one node's tails, and the first of them is popped before the next level.
    capacity = 1 + max(0, max_tails - 1) * (index[3].shape[0] - 1)
    stack = start.unsqueeze(-1) * start.new_ones(capacity + 1)  # the last entry absorbs writes of absent tails
    height = (start >= 0).long()
    nth = torch.arange(max(max_tails, 1), device=start.device)
    chosen: list[Tensor] = []
    while len(chosen) < steps and not (is_readable(height) and not bool(height.any())):
        code = stack.gather(-1, (height - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        slot, ranks = choose(len(chosen), torch.where(height > 0, code, root))
        chosen.append(slot.masked_fill(height == 0, num_edges))
        num_pushed = count[slot].masked_fill(height == 0, 0).unsqueeze(-1)
        height = (height - 1).clamp(min=0).unsqueeze(-1)
        position = torch.where(nth < num_pushed, height + num_pushed - 1 - nth, capacity)
        tail_index = (first[slot].unsqueeze(-1) + nth).clamp(max=max(len(tail) - 1, 0))
        stack = stack.scatter(-1, position, tail[tail_index].long() * k + ranks) if len(tail) else stack
        height = (height + num_pushed).squeeze(-1).long()
    counts = torch.zeros((*start.shape, num_edges + 1), dtype=wide_dtype(start.device), device=start.device)
    if chosen:
        slots = torch.stack(chosen, -1)
        counts = counts.scatter_add(-1, slots, counts.new_ones(()).expand(slots.shape))
    return _sort_by_edge(counts[..., :-1], index), height


def sample(inputs: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Return derivations as counts of edges (B, K, E). The n-th choice from the root uses ``uniforms[..., n]``."""
    (theta,) = inputs
    sorted_theta, offset = _sort_by_slot(theta, index), index[0].long()
    probabilities = [omega.argmax(_local_scores(sorted_theta, tape, group)) for group in _groups(index)]
    cumulative = torch.cat([q.cumsum(-1).flatten(1) for q in probabilities], -1).unsqueeze(1)
    nth = torch.arange(int(offset.diff().max()), device=theta.device)

    def choose(step: int, node: Tensor) -> tuple[Tensor, Tensor]:
        begin, last = offset[node].unsqueeze(-1), offset[node + 1].unsqueeze(-1) - 1
        slots = (begin + nth).minimum(last)
        sums = cumulative.expand(-1, node.shape[1], -1).gather(-1, slots)
        is_lower = sums <= uniforms[..., step : step + 1] * sums[..., -1:]
        return (begin + (is_lower & (begin + nth < last)).sum(-1, keepdim=True)).squeeze(-1), node.new_zeros(1)

    root = tape.shape[1] - 1
    start = torch.where(tape[:, -1:] > -math.inf, root, -1).expand(uniforms.shape[:2])
    counts, stack_sizes = _count_edges(index, start, 1, choose, uniforms.shape[2])
    if is_readable(stack_sizes) and bool(stack_sizes.any()):
        raise ValueError("a path has more choices than there are uniforms")
    return counts.to(theta.dtype)


def topk(inputs: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    """Return scores (B, k) of the best derivations, descending, and their counts of edges (B, k, E)."""
    (theta,) = inputs
    batch, num_nodes = theta.shape[0], index[0].shape[0] - 1
    sorted_theta = _sort_by_slot(theta, index)
    max_tails = max(1, int(_tails_of_slots(index)[1].max()))
    scores = sorted_theta.new_full((batch, num_nodes, k), -math.inf)
    scores[:, 0, 0] = 0  # the start of a graph; in a hypergraph, node 0 is overwritten below
    slot = index[0].new_zeros((batch, num_nodes, k), dtype=torch.int64)
    ranks = slot.new_zeros((batch, num_nodes, k, max_tails))
    for group in _groups(index):
        edge_scores, edge_ranks = _best_derivations(sorted_theta, scores, index, group, max_tails)
        size = group.nodes.stop - group.nodes.start
        best = edge_scores.reshape(batch, size, group.degree * k).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[..., :k]  # edge · k + rank among the derivations of the edge
        begin = torch.arange(group.edges.start, group.edges.stop, group.degree, device=theta.device)
        scores[:, group.nodes] = best.values[..., :k]
        slot[:, group.nodes] = begin.unsqueeze(-1) + chosen // k
        by_node = edge_ranks.reshape(batch, size, group.degree * k, max_tails)
        ranks[:, group.nodes] = by_node.gather(2, chosen.unsqueeze(-1).expand(*chosen.shape, max_tails))

    def choose(step: int, code: Tensor) -> tuple[Tensor, Tensor]:
        wide_code = code.unsqueeze(-1).expand(*code.shape, max_tails)
        return slot.flatten(1).gather(1, code), ranks.flatten(1, 2).gather(1, wide_code)

    codes = (num_nodes - 1) * k + torch.arange(k, device=theta.device)
    start = torch.where(scores[:, -1] > -math.inf, codes, -1)
    counts, _ = _count_edges(index, start, k, choose, math.inf)
    return scores[:, -1].to(theta.dtype).contiguous(), counts.to(theta.dtype)


def _best_derivations(
    theta: Tensor, scores: Tensor, index: Tensors, group: Group, max_tails: int
) -> tuple[Tensor, Tensor]:
    """Return the k best derivations that use each edge of a group, from the ``scores`` (B, N, k) of earlier nodes.

    The results are scores (B, edges, k) and the rank of each tail's derivation, (B, edges, k, max_tails).
    """
    batch, _, k = scores.shape
    weights = theta[:, group.edges, None]
    if group.owner is None:
        ranks = torch.arange(k, device=theta.device).reshape(1, 1, k, 1)
        return weights + scores.index_select(1, group.tail), ranks.expand(batch, weights.shape[1], k, max_tails)
    first, count = (tails[group.edges] for tails in _tails_of_slots(index))
    best = torch.cat((weights, weights.new_full((*weights.shape[:2], k - 1), -math.inf)), -1)
    ranks = torch.zeros((*best.shape, max_tails), dtype=torch.int64, device=theta.device)
    for nth in range(int(count.max())):
        edges = (count > nth).nonzero().squeeze(-1)
        sums = best[:, edges].unsqueeze(-1) + scores.index_select(1, index[1][first[edges] + nth]).unsqueeze(-2)
        candidates = sums.flatten(-2).sort(dim=-1, descending=True, stable=True)
        previous_rank, tail_rank = candidates.indices[..., :k] // k, candidates.indices[..., :k] % k
        best[:, edges] = candidates.values[..., :k]
        ranks[:, edges] = ranks[:, edges].gather(2, previous_rank.unsqueeze(-1).expand(*previous_rank.shape, max_tails))
        ranks[:, edges, :, nth] = tail_rank
    return best, ranks


# --- values of nodes, and the best derivation that uses each weight


def node_values(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[1].to(inputs[0].dtype)


def max_marginals(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    """Sweep back from the root: the outside value of a node is the best score of a derivation without this node."""
    (theta,) = inputs
    sorted_theta, inside = _sort_by_slot(theta, index), forward(inputs, index, Hard())[1]
    outside = torch.full_like(inside, -math.inf)
    outside[:, -1] = 0
    best = torch.full_like(sorted_theta, -math.inf)
    for group in reversed(_groups(index)):
        above = sorted_theta[:, group.edges] + outside[:, group.nodes].repeat_interleave(group.degree, 1)
        best[:, group.edges] = above + group.sum_over_tails(inside)
        if group.owner is not None:
            above = above.index_select(1, group.owner) + _sum_over_other_tails(inside, index, group)
        outside.scatter_reduce_(1, group.tail.long().expand_as(above), above, "amax")
    weight = index[5 if len(index) > 5 else 2].long().expand_as(best)
    by_weight = torch.full_like(theta, -math.inf, dtype=best.dtype)
    return by_weight.scatter_reduce(1, weight, best, "amax").to(theta.dtype)


def _sum_over_other_tails(v: Tensor, index: Tensors, group: Group) -> Tensor:
    """Return, for each tail of a group's edges, the sum of ``v`` (B, N) over the other tails of its edge, (B, tails).

    It is the sum of the tails before and of the tails after: v may be −∞, so no term can be subtracted.
    """
    values = v.index_select(1, group.tail)
    first, count = (tails[group.edges].long() for tails in _tails_of_slots(index))
    first, nth_tails, others = first - first[:1], range(int(count.max())), torch.zeros_like(values)
    for order in (nth_tails, reversed(nth_tails)):
        sums = values.new_zeros((len(v), len(count)))
        for nth in order:
            edges = (count > nth).nonzero().squeeze(-1)
            position = first[edges] + nth
            others[:, position] += sums[:, edges]
            sums[:, edges] += values[:, position]
    return others
