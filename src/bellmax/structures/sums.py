"""A search that decides whether a target is the event of a path or derivation that can use an entry more than once.

An event counts how often a path uses each entry of the scores. The decision is NP-hard: if each entry stands for a
city, the counts 1, 1, …, 1 ask for a Hamiltonian path. So the search collects the counts that are possible at each
node, drops those that cannot be completed to the target, and gives up after a number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_WORK = 500_000  # numbers to compare, about half a second
_WORK_PER_EDGE = 16
_SLACK = 1e-5


class Edge(NamedTuple):
    """An edge from its tails to its head, and the number (K,) that it adds to each of the K counts."""

    head: int
    tails: Sequence[int]
    adds: NDArray[np.float64]


Bounds = dict[int, tuple["NDArray[np.float64]", "NDArray[np.float64]"]]
"""For each node, lower and upper bounds (K,) of the counts."""
Counts = dict[int, "NDArray[np.float64]"]
"""For each node, the possible counts, a row (K,) for each."""


def is_long(edges: int, entries: int) -> bool:
    """True if a graph with this number of edges and counts is too large for a search."""
    return edges * (entries + _WORK_PER_EDGE) > _MAX_WORK


def is_sum(edges: Sequence[Edge], goal: int, counts: NDArray[np.float64]) -> bool:
    """True if a derivation of the node ``goal`` has these counts (K,), or if the search gives up.

    The edges must be sorted: edges into the same node are adjacent, and come after all edges into their tails.
    """
    possible = _possible_counts(edges, goal, counts)
    return possible is None or goal in possible


def find(edges: Sequence[Edge], goal: int, counts: NDArray[np.float64]) -> list[int] | None:
    """Return the positions of the edges of a derivation with these counts; None if there is none or the search gives
    up. The edges must be sorted as for :func:`is_sum`."""
    possible = _possible_counts(edges, goal, counts)
    if not possible or goal not in possible:
        return None
    into: dict[int, list[int]] = {}
    for position, edge in enumerate(edges):
        into.setdefault(edge.head, []).append(position)
    found: list[int] = []
    open_nodes = [(goal, possible[goal][0])]
    while open_nodes:
        head, row = open_nodes.pop()
        position, rows = _first_match(edges, into[head], row, possible)
        found.append(position)
        open_nodes += zip(edges[position].tails, rows, strict=True)
    return found


def _first_match(
    edges: Sequence[Edge], positions: Sequence[int], row: NDArray[np.float64], possible: Counts
) -> tuple[int, Sequence[NDArray[np.float64]]]:
    """Return the first edge with which a node has the counts ``row`` (K,), and the counts of the edge's tails."""
    for position in positions:
        edge = edges[position]
        if all(tail in possible for tail in edge.tails):
            for rows in product(*(possible[tail] for tail in edge.tails)):
                if (np.abs(edge.adds + sum(rows) - row) <= _SLACK * (1 + np.abs(row))).all():
                    return position, rows
    raise AssertionError("no edge has the counts of its head")


def _possible_counts(edges: Sequence[Edge], goal: int, counts: NDArray[np.float64]) -> Counts | None:
    """Return the counts at each node that can be completed to ``counts`` (K,) at the goal; None if the search gives
    up."""
    if is_long(len(edges), len(counts)):
        return None
    inside = _inside_bounds(edges)
    if goal not in inside:
        return {}
    outside = _outside_bounds(edges, goal, inside)
    work, slack = 0, _SLACK * (1 + np.abs(counts))
    possible: Counts = {}
    for head, edges_into_head in groupby(edges, key=lambda edge: edge.head):
        if head not in outside:
            continue
        low, high = (counts - bound for bound in outside[head][::-1])
        candidates = []
        for edge in edges_into_head:
            if any(tail not in possible for tail in edge.tails):
                continue
            work += len(counts) * int(np.prod([len(possible[tail]) for tail in edge.tails]))
            if work > _MAX_WORK:
                return None
            rows = edge.adds[None]
            for tail in edge.tails:
                rows = (rows[:, None] + possible[tail]).reshape(-1, len(counts))
            candidates.append(rows[((rows >= low - slack) & (rows <= high + slack)).all(1)])
        rows = np.unique(np.concatenate(candidates), axis=0) if candidates else counts[None][:0]
        if len(rows):
            possible[head] = rows
    return possible


def _inside_bounds(edges: Sequence[Edge]) -> Bounds:
    """Return bounds of the counts of all derivations of each node, for the nodes that have one."""
    bounds: Bounds = {}
    for edge in edges:
        if all(tail in bounds for tail in edge.tails):
            _widen(bounds, edge.head, *(edge.adds + sum(bounds[tail][n] for tail in edge.tails) for n in (0, 1)))
    return bounds


def _outside_bounds(edges: Sequence[Edge], goal: int, inside: Bounds) -> Bounds:
    """Return, for each node, bounds of the counts that a derivation of the goal adds outside the node's derivation.

    Only nodes that can be part of a derivation of the goal have bounds.
    """
    zero = np.zeros_like(inside[goal][0])
    bounds: Bounds = {goal: (zero, zero)}
    for edge in reversed(edges):
        if edge.head in bounds and all(tail in inside for tail in edge.tails):
            total = [bounds[edge.head][n] + edge.adds + sum(inside[tail][n] for tail in edge.tails) for n in (0, 1)]
            for tail in edge.tails:
                _widen(bounds, tail, *(total[n] - inside[tail][n] for n in (0, 1)))
    return bounds


def _widen(bounds: Bounds, node: int, low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    """Widen the bounds of a node, in place, to include counts from ``low`` to ``high``."""
    if node in bounds:
        low, high = np.minimum(bounds[node][0], low), np.maximum(bounds[node][1], high)
    bounds[node] = low, high
