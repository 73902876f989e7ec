"""The content of an automaton: arcs, scores and names. Operations and builders make tables."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import bellmax.backends.native.sorting as sorting
from bellmax.automata.scores import Scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

Names = tuple[str, ...]
SOURCE, TARGET, LABEL, OUTPUT = range(4)  # columns of arcs
UNKNOWN = "<unk>"  # the name of the label that stands for all other words


@dataclass(frozen=True)
class Table:
    """Arcs (A, 4) [source, target, label, output] with scores (A,), and scores (S,) of start and final states."""

    arcs: NDArray[np.int64]
    scores: Scores
    start: Scores
    final: Scores
    states: Sequence[Hashable]
    label_names: Names | None = None
    output_names: Names | None = None

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.states)

    def starts(self) -> NDArray[np.int64]:
        """Return the start states."""
        return np.flatnonzero(self.start.constant > -np.inf)

    def finals(self) -> NDArray[np.int64]:
        """Return the final states."""
        return np.flatnonzero(self.final.constant > -np.inf)

    def useful(self) -> NDArray[np.bool_]:
        """Return (S,), True for each state on a path from a start state to a final state."""
        pairs = self.arcs[:, :2]
        return reachable(pairs, self.starts(), self.num_states) & reachable(
            pairs[:, ::-1], self.finals(), self.num_states
        )

    def trimmed(self) -> Table:
        """Return the table without the states and arcs that are on no path from a start state to a final state."""
        is_useful = self.useful()
        if is_useful.all():
            return self
        number = np.cumsum(is_useful) - 1
        is_kept = is_useful[self.arcs[:, SOURCE]] & is_useful[self.arcs[:, TARGET]]
        arcs = self.arcs[is_kept]
        arcs[:, :2] = number[arcs[:, :2]]
        kept = np.flatnonzero(is_useful)
        has_names = not isinstance(self.states, range)
        states = [self.states[state] for state in kept.tolist()] if has_names else range(len(kept))
        scores = self.scores.take(np.flatnonzero(is_kept))
        start, final = self.start.take(kept), self.final.take(kept)
        return replace(self, arcs=arcs, scores=scores, start=start, final=final, states=states)


def reachable(pairs: NDArray[np.int64], states: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return (size,), True for each state that arcs [source, target] reach from one of the states."""
    root = np.stack((np.full(len(states), size), states), 1)
    return sorting.is_reachable(size, np.concatenate((pairs, root)), size + 1)[:size]
