"""Graphs as integers: nodes sorted by level, then by number of parents.

θ is the weights (B, E) of the edges. ``index`` is (offset, parent, edge, group), int32:

- offset (N + 1): the edges into node i are the slots offset[i] … offset[i + 1] − 1, in the caller's order;
- parent (E): the parent at the other side of a slot;
- edge (E): the caller's number of a slot's edge;
- group (G + 1): bounds of the runs of nodes with equal level and number of parents. The first is the start alone.
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


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    return (index[0].shape[0] - 1,)


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for indicators (B, count, E)."""
    (weights,) = theta
    return weights.new_empty(weights.shape[0], count, weights.shape[1])


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


def sort(pairs: NDArray[np.int64], level: NDArray[np.int64]) -> tuple[NDArray[np.int32], ...]:
    """(offset, parent, edge, group) of edges (E, 2) ``[parent, child]``, by the levels of their nodes."""
    degree = np.bincount(pairs[:, 1], minlength=len(level))
    order = np.lexsort((degree, level))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    edge = np.argsort(number[pairs[:, 1]], kind="stable")
    offset = np.concatenate(([0], np.cumsum(degree[order])))
    changes = (np.diff(level[order]) != 0) | (np.diff(degree[order]) != 0)
    group = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(level)]))
    return tuple(part.astype(np.int32) for part in (offset, number[pairs[edge, 0]], edge, group))
