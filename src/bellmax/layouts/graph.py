"""Graphs as integers: nodes sorted by level, then by number of edges into them.

An edge leads from its tails to its head: from one node in a graph, from any number of them in a hypergraph. θ is the
weights (B, E) of the edges. ``index`` is (offset, tail, edge, group), int32:

- offset (N + 1): the edges into node i are the slots offset[i] … offset[i + 1] − 1, in the caller's order;
- tail (E): the node at the other side of a slot. Node 0 is the start, whose value is 0;
- edge (E): the caller's number of a slot's edge;
- group (G + 1): bounds of the runs of nodes with equal level and number of edges. The first is the start alone.

A hypergraph has no start. Its index goes on with

- tail_offset (E + 1): the tails of a slot are tail[tail_offset[slot]] … tail[tail_offset[slot + 1] − 1];
- weight (E), if edges share weights (B, W): the number of a slot's weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bellmax.layouts.values import reject
from bellmax.tensors import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

index_is_batched = False
sense = 1


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    return (index[0].shape[0] - 1,)


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for indicators (B, count, E): how often each edge is taken."""
    (weights,) = theta
    return weights.new_empty(weights.shape[0], count, index[2].shape[0])


def check_index(theta: Tensors, index: Tensors) -> None:
    """A graph is checked when it is made."""


def check(theta: Tensors, index: Tensors) -> None:
    (weights,) = theta
    reject("weights", weights, ~(weights < math.inf))


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


def sort(
    head: NDArray[np.int64], tail: NDArray[np.int64], level: NDArray[np.int64], arity: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int32], ...]:
    """The integers of edges, by the levels of their nodes: of a hypergraph if the edges' numbers of tails are given."""
    degree = np.bincount(head, minlength=len(level))
    order = np.lexsort((degree, level))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    edge = np.argsort(number[head], kind="stable")
    offset = np.concatenate(([0], np.cumsum(degree[order])))
    changes = (np.diff(level[order]) != 0) | (np.diff(degree[order]) != 0)
    group = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(level)]))
    if arity is None:
        parts = [offset, number[tail[edge]], edge, group]
    else:
        tail_offset = np.concatenate(([0], np.cumsum(arity[edge])))
        first = np.cumsum(arity) - arity
        place = np.arange(len(tail)) + np.repeat(first[edge] - tail_offset[:-1], arity[edge])
        parts = [offset, number[tail[place]], edge, group, tail_offset]
    return tuple(part.astype(np.int32) for part in parts)


def sort_kept(
    head: NDArray[np.int64],
    tail: NDArray[np.int64],
    level: NDArray[np.int64],
    kept: NDArray[np.bool_],
    arity: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int32], ...]:
    """As :func:`sort`, for those edges that are kept, between nodes of level ≥ 0. The slots of the other edges lead to
    an extra node, which no edge leaves: so these edges have weights, and are on no path."""
    is_live = level >= 0
    number, extra, level = np.cumsum(is_live) - 1, int(is_live.sum()), level[is_live]
    head = np.where(kept, number[head], extra)
    if arity is None:
        tail = np.where(kept, number[tail], level.argmin())
        level, extra_level = level + (level > 0), 1
    else:
        tail, arity = number[tail[np.repeat(kept, arity)]], np.where(kept, arity, 0)
        level, extra_level = level + 1, 0
    return sort(head, tail, level if kept.all() else np.append(level, extra_level), arity)
