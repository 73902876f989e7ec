"""Labellings of a tree: messages from a node to the states of its parent, as a hypergraph.

θ is unary (B, V, K) and pairwise (B or 1, V or 1, K, K) ``[node, parent's state, own state]``, or (B or 1, K, K) where
all nodes share it. ``index`` is that of the hypergraph (offset, tail, edge, group, tail_offset), as in
:mod:`bellmax.layouts.graph`, and ``order`` (V,), int64: the nodes that have a parent, and then the root.

The message (u, s) of a node u is what the tree below u is worth if u's parent is in state s. It has an edge for each
state t of u, of weight unary[u, t] + pairwise[u, s, t], whose tails are the messages (c, t) of u's children c. The goal
has an edge for each state of the root. So edges are (V − 1, K, K) in the order of nodes, and then K.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

import bellmax.layouts.graph as graph
from bellmax.layouts.values import reject
from bellmax.tensors import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

index_is_batched = False
engine = "dag"
sense = 1


class TreeGraph(NamedTuple):
    """The hypergraph of the messages."""

    head: NDArray[np.int64]
    tail: NDArray[np.int64]
    arity: NDArray[np.int64]
    level: NDArray[np.int64]
    integers: tuple[NDArray[np.int32], ...]
    order: NDArray[np.int64]


def make_graph(parents: NDArray[np.int64], height: NDArray[np.int64], states: int) -> TreeGraph:
    """``parents`` (V,), −1 for the root; ``height`` (V,), the number of edges to the lowest leaf below."""
    root = int(parents.argmin())
    others = np.flatnonzero(parents >= 0)
    order = np.append(others, root)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    children = others[np.argsort(parents[others], kind="stable")]
    count = np.bincount(parents[others], minlength=len(parents))
    first = np.cumsum(count) - count

    head = np.append(np.repeat(np.arange(len(others) * states), states), np.full(states, len(others) * states))
    node = np.append(np.repeat(others, states * states), np.full(states, root))  # of an edge, and the state it is in
    state = np.tile(np.arange(states), len(others) * states + 1)
    arity = count[node]
    owner = np.repeat(np.arange(len(head)), arity)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(arity) - arity, arity)
    tail = place[children[first[node[owner]] + nth]] * states + state[owner]
    level = np.append(np.repeat(height[others], states), height[root])
    return TreeGraph(head, tail, arity, level, graph.sort(head, tail, level, arity), order)


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    _, size, states = theta[0].shape
    return ((size - 1) * states + 1,)


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for labels (B, count, V) of the nodes in ``order``, −1 where there is no labelling."""
    batch, size, _ = theta[0].shape
    return theta[0].new_empty((batch, count, size), dtype=torch.int64)


def check_index(theta: Tensors, index: Tensors) -> None:
    """A tree is checked when it is made."""


def check(theta: Tensors, index: Tensors) -> None:
    unary, pairwise = theta
    reject("unary", unary, ~(unary < math.inf))
    bad = ~(pairwise < math.inf)
    if pairwise.ndim == 4 and pairwise.shape[1] == unary.shape[1]:
        bad = bad.index_fill(1, index[5][-1:], False)
    reject("pairwise", pairwise, bad & (unary.shape[1] > 1))


# --- the hypergraph


def extra_nodes(theta: Tensors, index: Tensors) -> int:
    return 0


def engine_index(theta: Tensors, index: Tensors) -> Tensors:
    return index[:5]


def weights(theta: Tensors, index: Tensors) -> Tensor:
    unary, pairwise = theta
    order = index[5]
    own = unary.index_select(1, order)
    pairs = pairwise if pairwise.ndim == 4 else pairwise.unsqueeze(1)
    if pairs.shape[1] == unary.shape[1]:
        pairs = pairs.index_select(1, order[:-1])
    edges = own[:, :-1].unsqueeze(2) + pairs
    return torch.cat((edges.flatten(1), own[:, -1]), 1)


along = weights


def by_node(edges: Tensor, size: int, states: int) -> tuple[Tensor, Tensor]:
    """Numbers of edges (..., E) by pairs of states, (..., V − 1, K, K), and by states, (..., V, K), nodes in order."""
    pairs = edges[..., :-states].reshape(*edges.shape[:-1], size - 1, states, states)
    return pairs, torch.cat((pairs.sum(-2), edges[..., -states:].unsqueeze(-2)), -2)


def onto_nodes(edges: Tensor, index: Tensors, states: int) -> tuple[Tensor, Tensor]:
    """The same for the nodes as they are numbered, with 0 for the pairs of the root, which has no parent."""
    place = index[5].argsort()
    pairs, own = by_node(edges, len(place), states)
    pairs = torch.cat((pairs, pairs.new_zeros((*edges.shape[:-1], 1, states, states))), -3)
    return pairs.index_select(-3, place), own.index_select(-2, place)


def onto_scores(edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
    """The transpose of :func:`along`."""
    unary, pairwise = theta
    pairs, own = onto_nodes(edges, index, unary.shape[-1])
    if pairwise.ndim == 3:
        pairs = pairs.sum(1)
    return [own, pairs.sum_to_size(pairwise.shape).contiguous()]


def from_labels(path: Tensor, index: Tensors, parents: Tensor) -> Tensor:
    """Numbers of labellings (..., V, K), 0 and 1, as those of edges (..., E): what both ends of each have."""
    order = index[5]
    own, above = path.index_select(-2, order), path.index_select(-2, parents[order[:-1]])
    edges = own[..., :-1, :].unsqueeze(-2) * above.unsqueeze(-1)
    return torch.cat((edges.flatten(-3), own[..., -1, :]), -1)


def found_paths(found: Tensor, theta: Tensors, index: Tensors) -> Tensor:
    _, own = by_node(found, *theta[0].shape[1:])
    return torch.where(own.any(-1), own.argmax(-1), -1)
