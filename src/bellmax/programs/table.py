"""What a lattice is made of: a table of moves, and where each score is read.

A table is constants. As text it is the name of its structure, so that whoever knows the name has the table.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

PLACES = ("corner", "row", "column", "anywhere")
PREFIX = "lattice "


class Axis(NamedTuple):
    """How the index along one dimension of a score follows from the cell (i, j).

    ``kind`` is "i" for i + offset, "j" for j + offset, "at" for the constant ``place``, "x" for the label of i + offset
    and "y" for the label of j + offset, both out of the labels number ``place``.
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
    """``coefficient`` · score[axes], of the score, or the mask, of that number."""

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
    """Where paths start or end: a place, and the terms of each state's score, None for a state that is none."""

    place: str
    terms: tuple[tuple[Term, ...] | None, ...]

    @property
    def states(self) -> list[int]:
        return [state for state, terms in enumerate(self.terms) if terms is not None]


class Table(NamedTuple):
    states: int
    moves: tuple[Step, ...]
    nodes: tuple[tuple[Term, ...], ...]
    start: Ends
    end: Ends
    scores: tuple[str, ...]
    """Names, for messages."""
    labels: int
    masks: int
    sense: int = 1
    """1, or −1 if scores are costs, and the value is a smoothed least one."""
    free: str = ""
    """The sides, "i" and "j", that no tensor has. Their sizes are those of the last masks, which no move reads."""

    @property
    def absent(self) -> float:
        """The score of what does not exist."""
        return -self.sense * math.inf

    @property
    def name(self) -> str:
        return PREFIX + json.dumps(self, separators=(",", ":"))

    @property
    def terms(self) -> list[tuple[Term, ...]]:
        """The terms of each slot: nodes by state, moves, starts by state, ends by state."""
        ends = [terms or () for part in (self.start, self.end) for terms in part.terms]
        return [*self.nodes, *(move.terms for move in self.moves), *ends]

    @property
    def reads(self) -> list[tuple[int, Term, bool]]:
        """Every place where a tensor is read: the slot, the term, and whether that is the mask of a move."""
        scores = [(slot, term, False) for slot, terms in enumerate(self.terms) for term in terms]
        moves = enumerate(self.moves, self.states)
        return scores + [(slot, move.where, True) for slot, move in moves if move.where is not None]

    def uses_once(self, score: int) -> bool:
        """Whether it is plain that a path reads no entry of a score twice, and counts each that it reads as 1."""
        ends = zip(self.nodes, self.start.terms, self.end.terms, strict=True)
        for state, (node, start, end) in enumerate(ends):
            for into in (start or (), *(move.terms for move in self.moves if move.target == state)):
                if sum(term.score == score for term in (*node, *into, *(end or ()))) > 1:
                    return False
        # Otherwise a path reads once at a node, and it is so if it has one node in a row, column or cell, and that
        # tells the entry.
        reads = [term for terms in self.terms for term in terms if term.score == score]
        places = [{(axis.kind, axis.offset) for axis in term.axes if axis.kind in "ij"} for term in reads]
        kinds = {kind for kind, _ in set.intersection(*places)} if reads else set("ij")
        is_told = (
            ("i" in kinds and all(move.di > 0 for move in self.moves))
            or ("j" in kinds and all(move.dj > 0 for move in self.moves))
            or (kinds == {"i", "j"} and all(move.di + move.dj > 0 for move in self.moves))
        )
        return is_told and all(term.coefficient == 1 for term in reads)


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
    states, moves, nodes, start, end, scores, *numbers = json.loads(name.removeprefix(PREFIX))
    steps = tuple(Step(di, dj, a, b, _terms(terms), where and _term(where)) for di, dj, a, b, terms, where in moves)
    return Table(states, steps, tuple(map(_terms, nodes)), _ends(start), _ends(end), tuple(scores), *numbers)


def _term(given: Any) -> Term:
    score, coefficient, axes = given
    return Term(score, coefficient, tuple(Axis(*axis) for axis in axes))


def _terms(given: Any) -> tuple[Term, ...]:
    return tuple(map(_term, given))


def _ends(given: Any) -> Ends:
    place, terms = given
    return Ends(place, tuple(None if t is None else _terms(t) for t in terms))
