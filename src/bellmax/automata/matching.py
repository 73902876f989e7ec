"""Arcs of the right side of a composition, looked up by state and label, with failure arcs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bellmax.automata.scores import Scores
from bellmax.automata.table import LABEL, SOURCE, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_RESOLVED = 5 * 10**7  # arcs


class Matches(NamedTuple):
    """Pairs of a query and an arc, and the sum of the failure scores between them."""

    query: NDArray[np.int64]
    arc: NDArray[np.int64]
    passed: NDArray[np.float64]


@dataclass(frozen=True)
class Failing:
    """A table with failure arcs: a state without an arc for a label continues at another state, or nowhere (−1).

    The final scores of the table include the scores of failure arcs.
    """

    table: Table
    failure: NDArray[np.int64]
    failure_score: NDArray[np.float64]

    def resolved(self) -> Table:
        """Return the table without failure arcs: each state has the arcs that it can reach by failures."""
        labels = np.unique(self.table.arcs[:, LABEL])
        size = self.table.num_states
        if size * len(labels) > _MAX_RESOLVED:
            raise ValueError(
                f"an n-gram of {size} states and {len(labels)} words has too many arcs on its own: "
                "compose an automaton with it"
            )
        state, label = np.repeat(np.arange(size), len(labels)), np.tile(labels, size)
        query, arc, passed = Matcher(self).match(state, label)
        arcs = self.table.arcs[arc]
        arcs[:, SOURCE] = state[query]
        return replace(self.table, arcs=arcs, scores=self.table.scores.take(arc).plus(Scores(passed)))


class Groups:
    """The arcs of a table, grouped by a key of each arc."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]

    def find(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return pairs of a query and an arc with its key, by query and then in the order of the arcs."""
        first, last = np.searchsorted(self.keys, keys, "left"), np.searchsorted(self.keys, keys, "right")
        counts = last - first
        query = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        return query, self.order[first[query] + within]


class Matcher:
    """Looks up the arcs of an automaton by state and label."""

    def __init__(self, side: Table | Failing) -> None:
        table = side if isinstance(side, Table) else side.table
        self.failing = None if isinstance(side, Table) else side
        self.num_labels = int(table.arcs[:, LABEL].max(initial=-1)) + 2
        self.groups = Groups(table.arcs[:, SOURCE] * self.num_labels + table.arcs[:, LABEL] + 1)

    def match(self, state: NDArray[np.int64], label: NDArray[np.int64]) -> Matches:
        """Return the arcs with these labels at these states, or after the fewest failures."""
        query, arc = self._find(state, label)
        passed = np.zeros(len(query))
        if self.failing is None:
            return Matches(query, arc, passed)
        results = [Matches(query, arc, passed)]
        waiting, total = np.arange(len(state)), np.zeros(len(state))
        while True:
            is_unmatched = np.ones(len(waiting), bool)
            is_unmatched[query] = False
            at = state[waiting]
            is_unmatched &= self.failing.failure[at] >= 0
            if not is_unmatched.any():
                break
            total = total[is_unmatched] + self.failing.failure_score[at[is_unmatched]]
            waiting = waiting[is_unmatched]
            state = state.copy()
            state[waiting] = self.failing.failure[at[is_unmatched]]
            query, arc = self._find(state[waiting], label[waiting])
            results.append(Matches(waiting[query], arc, total[query]))
        query, arc, passed = (np.concatenate(columns) for columns in zip(*results, strict=True))
        order = np.argsort(query, kind="stable")
        return Matches(query[order], arc[order], passed[order])

    def _find(self, state: NDArray[np.int64], label: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_known = (label >= 0) & (label < self.num_labels - 1)
        return self.groups.find(np.where(is_known, state * self.num_labels + label + 1, -1))
