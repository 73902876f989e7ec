"""Which counts are those of a path, or a derivation, that can use an entry more than once.

That is hard in general: where an entry stands for a city, the counts 1, 1, …, 1 ask for a way through all cities. So
the search adds up counts node by node, leaves out those from which the wanted ones are out of reach, and gives up
past a number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_WORK = 500_000  # numbers looked at: about half a second
_WORK_OF_AN_EDGE = 16


class Edge(NamedTuple):
    """An edge from its tails to its head, and what it adds to each of the wanted counts, (K,)."""

    head: int
    tails: Sequence[int]
    adds: NDArray[np.float64]


Bounds = dict[int, tuple["NDArray[np.float64]", "NDArray[np.float64]"]]


def is_long(edges: int, entries: int) -> bool:
    """Whether so many edges are too many for a search."""
    return edges * (entries + _WORK_OF_AN_EDGE) > _MOST_WORK


def is_sum(edges: Sequence[Edge], goal: int, wanted: NDArray[np.float64]) -> bool:
    """Whether a derivation of the goal adds up to the wanted counts; True as well where that is too long to find out.

    Edges are in order: those into a node come together, and after those into their tails.
    """
    if is_long(len(edges), len(wanted)):
        return True
    inside = _inside(edges)
    if goal not in inside or not len(wanted):
        return goal in inside
    outside = _outside(edges, goal, inside)
    work, slack = 0, 1e-5 * (1 + np.abs(wanted))
    sums: dict[int, NDArray[np.float64]] = {}
    for head, into in groupby(edges, key=lambda edge: edge.head):
        if head not in outside:
            continue
        low, high = (wanted - bound for bound in outside[head][::-1])
        found = []
        for edge in into:
            if any(tail not in sums for tail in edge.tails):
                continue
            work += len(wanted) * int(np.prod([len(sums[tail]) for tail in edge.tails]))
            if work > _MOST_WORK:
                return True
            rows = edge.adds[None]
            for tail in edge.tails:
                rows = (rows[:, None] + sums[tail]).reshape(-1, len(wanted))
            found.append(rows[((rows >= low - slack) & (rows <= high + slack)).all(1)])
        rows = np.unique(np.concatenate(found), axis=0) if found else wanted[None][:0]
        if len(rows):
            sums[head] = rows
    return goal in sums


def _inside(edges: Sequence[Edge]) -> Bounds:
    """The least and the greatest counts of the derivations of each node that has any, entry by entry."""
    bounds: Bounds = {}
    for edge in edges:
        if all(tail in bounds for tail in edge.tails):
            _widen(bounds, edge.head, *(edge.adds + sum(bounds[tail][n] for tail in edge.tails) for n in (0, 1)))
    return bounds


def _outside(edges: Sequence[Edge], goal: int, inside: Bounds) -> Bounds:
    """The same of what a derivation of the goal has beside that of a node, for each node that is part of one."""
    zero = np.zeros_like(inside[goal][0])
    bounds: Bounds = {goal: (zero, zero)}
    for edge in reversed(edges):
        if edge.head in bounds and all(tail in inside for tail in edge.tails):
            whole = [bounds[edge.head][n] + edge.adds + sum(inside[tail][n] for tail in edge.tails) for n in (0, 1)]
            for tail in edge.tails:
                _widen(bounds, tail, *(whole[n] - inside[tail][n] for n in (0, 1)))
    return bounds


def _widen(bounds: Bounds, node: int, low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    if node in bounds:
        low, high = np.minimum(bounds[node][0], low), np.maximum(bounds[node][1], high)
    bounds[node] = low, high
