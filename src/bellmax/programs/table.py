"""The table of a lattice: its states, its moves, and the terms by which nodes, moves, starts and ends read scores.

A table holds constants only. Its JSON text is the name of the lattice program, so an operator of torch, which can only
pass a name, can rebuild the table.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

PLACES = ("corner", "row", "column", "anywhere")
PREFIX = "lattice "


class Axis(NamedTuple):
    """The index along one dimension of a score as a function of the cell (i, j).

    ``kind`` is "i" for i + offset, "j" for j + offset, "at" for the constant ``place``, "x" for the label of i + offset
    and "y" for the label of j + offset. For "x" and "y", ``place`` is the number of the label tensor.
    """

    kind: str
    offset: int = 0
    place: int = 0

    @property
    def is_label(self) -> bool:
        return self.kind in ("x", "y")

    @property
    def follows_rows(self) -> bool:
        return self.kind in ("i", "x")

    @property
    def follows_columns(self) -> bool:
        return self.kind in ("j", "y")


class Term(NamedTuple):
    """The product ``coefficient`` · score[axes], where ``score`` is the number of a score or of a mask."""

    score: int
    coefficient: float
    axes: tuple[Axis, ...]


class Step(NamedTuple):
    """A move by (di, dj) from one state into another, with the terms of its score and the mask that allows it."""

    di: int
    dj: int
    source: int
    target: int
    terms: tuple[Term, ...]
    where: Term | None


class Ends(NamedTuple):
    """Nodes where paths start or end: one of ``PLACES``, and terms by state, None for a state that is not allowed."""

    place: str
    terms: tuple[tuple[Term, ...] | None, ...]

    @property
    def states(self) -> list[int]:
        return [state for state, terms in enumerate(self.terms) if terms is not None]


class Table(NamedTuple):
    """All constants of a lattice. Slots, numbered in the order of :attr:`terms`, are the kinds of scores."""

    states: int
    moves: tuple[Step, ...]
    nodes: tuple[tuple[Term, ...], ...]
    start: Ends
    end: Ends
    scores: tuple[str, ...]
    """The names of the scores, for messages."""
    labels: int
    masks: int
    sense: int = 1
    """1 for scores, −1 for costs, of which the value is a smoothed minimum."""
    free: str = ""
    """The sides, "i" and "j", that no score follows. The last masks, which no move reads, have their sizes."""

    @property
    def absent(self) -> float:
        """The score of a forbidden node or move: −∞, or ∞ for costs."""
        return -self.sense * math.inf

    @property
    def name(self) -> str:
        return PREFIX + json.dumps(self, separators=(",", ":"))

    @property
    def terms(self) -> list[tuple[Term, ...]]:
        """The terms of each slot: nodes by state, moves, starts by state, ends by state."""
        ends = [terms or () for side in (self.start, self.end) for terms in side.terms]
        return [*self.nodes, *(move.terms for move in self.moves), *ends]

    @property
    def reads(self) -> list[tuple[int, Term, bool]]:
        """Every read of a tensor: the slot, the term, and True if the term reads the mask of a move."""
        scores = [(slot, term, False) for slot, terms in enumerate(self.terms) for term in terms]
        moves = enumerate(self.moves, self.states)
        return scores + [(slot, move.where, True) for slot, move in moves if move.where is not None]

    def uses_entries_once(self, score: int) -> bool:
        """True if a path certainly uses each entry of a score 0 or 1 times, so that events are 0/1 tensors."""
        ends = zip(self.nodes, self.start.terms, self.end.terms, strict=True)
        for state, (node, start, end) in enumerate(ends):
            for into in (start or (), *(move.terms for move in self.moves if move.target == state)):
                if sum(term.score == score for term in (*node, *into, *(end or ()))) > 1:
                    return False
        # Now each node of a path reads the score at most once. Two nodes read different entries if every term is
        # indexed by a row, column or cell that a path visits only once.
        reads = [term for terms in self.terms for term in terms if term.score == score]
        indices = [{(axis.kind, axis.offset) for axis in term.axes if axis.kind in "ij"} for term in reads]
        kinds = {kind for kind, _ in set.intersection(*indices)} if reads else set("ij")
        is_distinct = (
            ("i" in kinds and all(move.di > 0 for move in self.moves))
            or ("j" in kinds and all(move.dj > 0 for move in self.moves))
            or (kinds == {"i", "j"} and all(move.di + move.dj > 0 for move in self.moves))
        )
        return is_distinct and all(term.coefficient == 1 for term in reads)


_CORNER = Ends("corner", ((),))
WARPING = Table(
    states=1,
    moves=tuple(Step(di, dj, 0, 0, (), None) for di, dj in ((1, 1), (1, 0), (0, 1))),
    nodes=((Term(0, 1.0, (Axis("i"), Axis("j"))),),),
    start=_CORNER,
    end=_CORNER,
    scores=("cost",),
    labels=0,
    masks=0,
    sense=-1,
)
"""The table of dynamic time warping, for which there are kernels of blocks and of many short pairs."""


def from_name(name: str) -> Table:
    """Parse the name of a lattice program, :attr:`Table.name`."""
    states, moves, nodes, start, end, scores, *numbers = json.loads(name.removeprefix(PREFIX))
    steps = tuple(Step(di, dj, a, b, _terms(terms), where and _term(where)) for di, dj, a, b, terms, where in moves)
    return Table(states, steps, tuple(map(_terms, nodes)), _ends(start), _ends(end), tuple(scores), *numbers)


def _term(values: Any) -> Term:
    """Convert the JSON form of a term, nested lists, to tuples, which are hashable."""
    score, coefficient, axes = values
    return Term(score, coefficient, tuple(Axis(*axis) for axis in axes))


def _terms(values: Any) -> tuple[Term, ...]:
    return tuple(map(_term, values))


def _ends(values: Any) -> Ends:
    place, terms = values
    return Ends(place, tuple(None if t is None else _terms(t) for t in terms))
