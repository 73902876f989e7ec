"""Graphs: the program with one weight for each edge, and the integers that describe a graph.

Nodes are sorted by level, then by the number of edges into them.

An edge leads from its tails to its head: from one node in a graph, from any number of them in a hypergraph. θ is the
weights (B, E) of the edges. ``index`` is (offset, tail, edge, group), int32:

- offset (N + 1): the edges into node i are the slots offset[i] … offset[i + 1] − 1, in the caller's order;
- tail (E): the node at the other side of a slot. Node 0 is the start, whose value is 0;
- edge (E): the caller's number of a slot's edge;
- group (G + 1): bounds of the runs of nodes with equal level and number of edges. The first is the start alone.

A hypergraph has no start. Its index has one or two more tensors:

- tail_offset (E + 1): the tails of a slot are tail[tail_offset[slot]] … tail[tail_offset[slot + 1] − 1];
- weight (E), if edges share weights (B, W): the number of a slot's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bellmax.programs.program import Program
from bellmax.tensors import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray


class GraphProgram(Program):
    """The paths of a graph, or the derivations of a hypergraph, with one weight for each edge.

    If edges share weights, an event counts the uses of each weight, and the expansion has a weight for each edge.
    """

    name = "dag"
    scores: Sequence[str] = ("weights",)
    paths = "dag"
    index_dims = None

    def __init__(self, longest_path: Callable[[], int] | None = None, max_count: float = 1) -> None:
        self._longest_path, self.max_count = longest_path, max_count

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        assert self._longest_path is not None
        return self._longest_path()

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return (index[0].shape[0] - 1,)

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """(B, count, E): the number of times that a path takes each edge."""
        return theta[0].new_empty(theta[0].shape[0], count, index[2].shape[0])

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return edges

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return sum_by_weight(paths, index, theta[0].shape[-1])

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return index[:5]

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        (weights,) = theta
        if len(index) <= 5:
            return weights
        weight_of_edge = index[5].long().index_select(0, index[2].argsort())
        return weights.index_select(-1, weight_of_edge)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return self.weights(z, index)

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        return [sum_by_weight(edges, index, theta[0].shape[-1])]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return edges

    def node_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return self.nodes(theta, index)

    def by_edge(
        self, scores: Tensors, dims: Sequence[int], batch_shape: Sequence[int], index: Tensors
    ) -> tuple[Tensors, tuple[int, ...]] | None:
        return (scores, (1,)) if len(index) <= 5 else None

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return event if len(index) <= 5 else None

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return is_flow(event, index) if len(index) <= 5 else None


def sum_by_weight(edges: Tensor, index: Tensors, num_weights: int) -> Tensor:
    """Sum numbers of edges (..., E) over the edges that share a weight, (..., W)."""
    if len(index) <= 5:
        return edges
    totals = edges.new_zeros((*edges.shape[:-1], num_weights))
    return totals.index_add(-1, index[5].long(), edges.index_select(-1, index[2].long()))


def node_numbers(index: Tensors, head: Tensor, level: Tensor) -> Tensor:
    """(N,) int64: the number of each node in the order of the sweeps, −1 if the node is pruned.

    Args:
        index: The index of the graph.
        head: (E,), the node that each edge enters.
        level: (N,), the level of each node, −1 if it is pruned.

    """
    offset, _, edge = (part.long() for part in index[:3])
    sorted_head = torch.arange(len(offset) - 1, device=head.device).repeat_interleave(offset.diff())
    # The start of a graph keeps 0. Pruned edges enter an extra node, which comes before all other nodes with edges.
    number = torch.zeros_like(level).scatter_reduce(0, head[edge], sorted_head, "amax")
    return number.masked_fill(level < 0, -1)


def is_flow(counts: Tensor, index: Tensors) -> Tensor:
    """(...): True if the counts (..., E) of edges are a path from start to end, or a derivation of the goal.

    They are if they are whole numbers and each node has as many edges out of it as into it; the last node has one more
    into it, and the start of a graph one less. An edge that was pruned leads to a node that no edge leaves.
    """
    offset, tail, edge = (part.long() for part in index[:3])
    num_nodes, device = len(offset) - 1, counts.device
    by_slot = counts.index_select(-1, edge)
    head = torch.arange(num_nodes, device=device).repeat_interleave(offset.diff())
    excess = torch.zeros(num_nodes, dtype=counts.dtype, device=device).expand(*counts.shape[:-1], num_nodes)
    excess = excess.index_add(-1, head, by_slot)
    expected = (torch.arange(num_nodes, device=device) == num_nodes - 1).to(counts.dtype)
    if len(index) > 4:
        owner = torch.arange(len(edge), device=device).repeat_interleave(index[4].long().diff())
        by_slot = by_slot.index_select(-1, owner)
    else:
        expected[0] -= 1
    excess = excess.index_add(-1, tail, by_slot, alpha=-1)
    is_whole = (counts >= 0) & (counts == counts.round())
    return (excess == expected).all(-1) & is_whole.all(-1)


def levels(pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Number of edges on the longest path to each node; −1 for nodes on a cycle or behind one."""
    order = np.argsort(pairs[:, 0], kind="stable")
    children = pairs[order, 1]
    start = np.searchsorted(pairs[order, 0], np.arange(num_nodes + 1))
    waiting = np.bincount(pairs[:, 1], minlength=num_nodes)
    level = np.full(num_nodes, -1)
    frontier = np.flatnonzero(waiting == 0)
    depth = 0
    while frontier.size:
        level[frontier] = depth
        reached = np.concatenate([children[start[node] : start[node + 1]] for node in frontier])
        touched, count = np.unique(reached, return_counts=True)
        waiting[touched] -= count
        frontier = touched[waiting[touched] == 0]
        depth += 1
    return level


def is_reachable(source: int, pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.bool_]:
    """(N,): True for the source, and for each node that edges (E, 2) [from, to] lead to from it."""
    order = np.argsort(pairs[:, 0], kind="stable")
    first = np.searchsorted(pairs[order, 0], np.arange(num_nodes + 1)).tolist()
    neighbours = pairs[order, 1].tolist()
    seen, stack = {source}, [source]
    while stack:
        node = stack.pop()
        for other in neighbours[first[node] : first[node + 1]]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    reachable = np.zeros(num_nodes, dtype=bool)
    reachable[list(seen)] = True
    return reachable


def sort(
    head: NDArray[np.int64], tail: NDArray[np.int64], level: NDArray[np.int64], arity: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int32], ...]:
    """Sort nodes and edges for the sweeps. Return the index that the module describes.

    Args:
        head: (E,), the node that each edge enters.
        tail: The tails of all edges in order: (E,) for a graph, (arity.sum(),) for a hypergraph.
        level: (N,), the level of each node.
        arity: (E,), the number of tails of each edge of a hypergraph; None for a graph.

    """
    degree = np.bincount(head, minlength=len(level))
    order = np.lexsort((degree, level))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    edge = np.argsort(number[head], kind="stable")
    offset = np.concatenate(([0], np.cumsum(degree[order])))
    changes = (np.diff(level[order]) != 0) | (np.diff(degree[order]) != 0)
    group = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(level)]))
    if arity is None:
        index = [offset, number[tail[edge]], edge, group]
    else:
        tail_offset = np.concatenate(([0], np.cumsum(arity[edge])))
        first = np.cumsum(arity) - arity
        position = np.arange(len(tail)) + np.repeat(first[edge] - tail_offset[:-1], arity[edge])
        index = [offset, number[tail[position]], edge, group, tail_offset]
    return tuple(integers.astype(np.int32) for integers in index)


def prune(
    head: NDArray[np.int64],
    tail: NDArray[np.int64],
    level: NDArray[np.int64],
    mask: NDArray[np.bool_],
    arity: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the arguments of :func:`sort` without nodes of negative level and edges where ``mask`` (E,) is False.

    The shape of the weights stays (E,): pruned edges lead to an extra node that no edge leaves, so no path has them.
    """
    is_live = level >= 0
    number, extra, level = np.cumsum(is_live) - 1, int(is_live.sum()), level[is_live]
    head = np.where(mask, number[head], extra)
    if arity is None:
        tail = np.where(mask, number[tail], level.argmin())
        level, extra_level = level + (level > 0), 1
    else:
        tail, arity = number[tail[np.repeat(mask, arity)]], np.where(mask, arity, 0)
        level, extra_level = level + 1, 0
    return head, tail, level if mask.all() else np.append(level, extra_level), arity
