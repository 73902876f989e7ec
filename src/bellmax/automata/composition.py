"""Composition of automata.

A state of the result is a pair of states and a filter. The filter gives each pair of paths exactly one path: between
two common symbols, arcs of the left side without an output come before arcs of the right side without a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bellmax.automata.matching import Failing, Groups, Matcher
from bellmax.automata.scores import Scores
from bellmax.automata.table import LABEL, OUTPUT, SOURCE, TARGET, UNKNOWN, Table, reachable

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Moves(NamedTuple):
    """Arcs of the result: the row of the source state, the target state, an arc of each side (−1: none), a score."""

    row: NDArray[np.int64]
    target: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    passed: NDArray[np.float64]


def compose(left: Table, right: Table | Failing) -> Table:
    """Return the automaton of pairs of paths with the outputs of ``left`` as the labels of ``right``."""
    product = _Product(left, right)
    states, moves = product.explore()
    pairs = np.stack((moves.row, np.searchsorted(states.sorted, moves.target)), 1)
    pairs[:, 1] = states.order[pairs[:, 1]]
    p, q, _ = product.split(states.codes)
    start, final = left.start.take(p), left.final.take(p)
    first = np.arange(len(p)) < states.num_starts
    start = start.plus(product.right.start.take(q)).plus(Scores(np.where(first, 0.0, -np.inf)))
    final = final.plus(product.right.final.take(q))
    return product.table(pairs, moves, start, final)


class _States(NamedTuple):
    """The states of a product in the order of the search, and sorted with their numbers."""

    codes: NDArray[np.int64]
    num_starts: int
    sorted: NDArray[np.int64]
    order: NDArray[np.int64]


class _Product:
    """A search through the pairs of states of two automata."""

    def __init__(self, left: Table, right: Table | Failing) -> None:
        self.left, self.right = left, right if isinstance(right, Table) else right.table
        self.matcher = Matcher(right)
        self.outgoing = Groups(left.arcs[:, SOURCE])
        self.is_alone = left.arcs[:, OUTPUT] < 0
        alone = np.flatnonzero(self.right.arcs[:, LABEL] < 0)
        self.right_alone = alone
        self.right_outgoing = Groups(self.right.arcs[alone, SOURCE])
        self.needs_filter = bool(self.is_alone.any()) and len(alone) > 0
        self.symbol = _symbols(left, self.right)

    def split(self, codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the two states and the filter of states of the product."""
        pair, blocked = np.divmod(codes, 2)
        p, q = np.divmod(pair, self.right.num_states)
        return p, q, blocked

    def code(
        self, p: NDArray[np.int64], q: NDArray[np.int64], blocked: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Return the states of the product of two states and the filter."""
        return (p * self.right.num_states + q) * 2 + blocked

    def explore(self) -> tuple[_States, _Moves]:
        """Return all states that the start states reach, in the order of a breadth-first search, and their arcs."""
        p, q = (states.ravel() for states in np.meshgrid(self.left.starts(), self.right.starts(), indexing="ij"))
        frontier = np.sort(self.code(p, q))
        known, found, moves, offset = frontier, [frontier], [], 0
        while len(frontier):
            step = self.step(frontier)
            moves.append(step._replace(row=step.row + offset))
            offset += len(frontier)
            target = np.unique(step.target)
            position = np.searchsorted(known, target)
            is_new = known[np.minimum(position, len(known) - 1)] != target
            frontier = target[is_new]
            known = np.insert(known, position[is_new], frontier)
            found.append(frontier)
        codes = np.concatenate(found)
        order = np.argsort(codes)
        all_moves = _Moves(*(np.concatenate(columns) for columns in zip(*moves, strict=True)))
        return _States(codes, len(found[0]), known, order), all_moves

    def step(self, codes: NDArray[np.int64]) -> _Moves:
        """Return the arcs that leave these states."""
        p, q, blocked = self.split(codes)
        row, arc = self.outgoing.find(p)
        is_alone, to = self.is_alone[arc], self.left.arcs[arc, TARGET]
        alone = np.flatnonzero(is_alone & (blocked[row] == 0))
        none = np.full(len(alone), -1)
        moves = [_Moves(row[alone], self.code(to[alone], q[row[alone]]), arc[alone], none, np.zeros(len(alone)))]
        paired = np.flatnonzero(~is_alone)
        query, other, passed = self.matcher.match(q[row[paired]], self.symbol[arc[paired]])
        chosen = paired[query]
        target = self.code(to[chosen], self.right.arcs[other, TARGET])
        moves.append(_Moves(row[chosen], target, arc[chosen], other, passed))
        if len(self.right_alone):
            row, group = self.right_outgoing.find(q)
            other = self.right_alone[group]
            target = self.code(p[row], self.right.arcs[other, TARGET], int(self.needs_filter))
            none = np.full(len(row), -1)
            moves.append(_Moves(row, target, none, other, np.zeros(len(row))))
        step = _Moves(*(np.concatenate(columns) for columns in zip(*moves, strict=True)))
        size = len(self.left.arcs)
        order = np.argsort(step.row * (size + 1) + np.where(step.left < 0, size, step.left), kind="stable")
        return _Moves(step.row[order], step.target[order], step.left[order], step.right[order], step.passed[order])

    def table(self, pairs: NDArray[np.int64], moves: _Moves, start: Scores, final: Scores) -> Table:
        """Return the result, without states that lead nowhere."""
        size = len(start)
        ends = np.flatnonzero(final.constant > -np.inf)
        is_useful = reachable(pairs[:, ::-1], ends, size)
        if not is_useful[start.constant > -np.inf].any():
            raise ValueError(self.empty())
        kept, number = np.flatnonzero(is_useful), np.cumsum(is_useful) - 1
        row = np.flatnonzero(is_useful[pairs].all(1))
        a, b = moves.left[row], moves.right[row]
        scores = self.left.scores.take(a).plus(self.right.scores.take(b)).plus(Scores(moves.passed[row]))
        is_acceptor = bool((self.right.arcs[:, LABEL] == self.right.arcs[:, OUTPUT]).all())
        outputs = self.left.arcs[a, OUTPUT] if is_acceptor else self.right.arcs[b, OUTPUT]
        outputs = np.where(a < 0 if is_acceptor else b < 0, -1, outputs)
        labels = np.where(a < 0, -1, self.left.arcs[a, LABEL])
        arcs = np.concatenate((number[pairs[row]], np.stack((labels, outputs), 1)), 1)
        names = self.left.output_names or self.right.label_names if is_acceptor else self.right.output_names
        states = range(len(kept))
        return Table(arcs, scores, start.take(kept), final.take(kept), states, self.left.label_names, names)

    def empty(self) -> str:
        """Return the message for a composition without paths."""
        outputs = self.left.arcs[~self.is_alone, OUTPUT]
        message = "the composition is empty: no output sequence of the left automaton is accepted by the right one"
        if len(outputs) and not np.isin(self.symbol[~self.is_alone], self.right.arcs[:, LABEL]).any():
            message += f", and no label of the right one is an output of the left one, such as {outputs.min()}"
        return message


def _symbols(left: Table, right: Table) -> NDArray[np.int64]:
    """Return the label of ``right`` for each arc of ``left``: its output, or the label with the name of the output."""
    outputs = left.arcs[:, OUTPUT]
    if left.output_names is None or right.label_names is None or left.output_names == right.label_names:
        return outputs
    number = {name: n for n, name in enumerate(right.label_names)}
    labels = np.full(len(left.output_names), -1)
    for output in np.unique(outputs[outputs >= 0]).tolist():
        if output >= len(left.output_names):
            raise ValueError(f"outputs of the left automaton must have names, but {output} has none")
        name = left.output_names[output]
        if name not in number and UNKNOWN not in number:
            raise ValueError(f"the right automaton must have all words of the left one, but it has no word {name!r}")
        labels[output] = number.get(name, number.get(UNKNOWN, -1))
    return np.where(outputs < 0, -1, labels[outputs])
