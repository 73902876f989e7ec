"""Dynamic programs on a grid, declared by their moves: scores, moves, endpoints, Lattice and LatticePaths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

import bellmax.structures.sums as sums
from bellmax.decoded import DecodedForm, EdgeLists, EdgePaths, Fault
from bellmax.distribution import PathDistribution
from bellmax.inputs import answers_near_misses, as_lengths, as_pair, check_band, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs import PROGRAMS, LatticeProgram
from bellmax.programs.checks import batch_first_hint, check_lengths, of_sequence
from bellmax.programs.lattice import bands, graph_of, whole_lengths
from bellmax.programs.table import Axis, Ends, Step, Table, Term
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.dag import DAG
from bellmax.targets import Paths, Targets
from bellmax.tensors import Gamma

_ONE = "_1"  # the name of the constant score
_SIDES = {"_rows": "i", "_columns": "j"}
"""Masks that set the size of a side of the grid if no other tensor has this side, with their kinds of axes."""


# --- scores


@dataclass(frozen=True)
class _NamedTerm:
    """A term of a score: an entry of a named tensor, selected by the cell (i, j), times a coefficient."""

    name: str
    axes: tuple[Axis, ...]
    labels: tuple[str, ...]  # the names of the labels, in the order of the axes that read labels
    coefficient: float = 1.0

    @property
    def entry(self) -> str:
        """The entry as code, such as "change[a[i-1], b[j]]"."""
        labels, places = iter(self.labels), []
        for axis in self.axes:
            cell = ("i" if axis.follows_rows else "j") + (f"{axis.offset:+d}" if axis.offset else "")
            number = str(axis.place)
            places.append(number if axis.kind == "at" else f"{next(labels)}[{cell}]" if axis.is_label else cell)
        return f"{self.name}[{', '.join(places)}]" if places else self.name


@dataclass(frozen=True, repr=False)
class Score:
    """A formula for a score, which is evaluated in each cell (i, j) of the grid.

    The score can belong to a move, a node, a start or an end.

    To make a score, call :func:`cell`, :func:`row`, :func:`column`, :func:`scalar`, :func:`at_class`, :func:`gather`,
    :func:`cell_label`, :func:`cell_class` or :func:`pair`. You can add scores to each other and to numbers, and
    multiply them by numbers.

    >>> 2 * cell("cost", -1) - row("bonus") + 1
    2.0 * cost[i-1, j] - bonus[i] + 1.0
    """

    terms: tuple[_NamedTerm, ...]

    def __repr__(self) -> str:
        text = ""
        for term in self.terms:
            size, is_negative = abs(term.coefficient), term.coefficient < 0
            text += (" - " if is_negative else " + ") if text else "-" if is_negative else ""
            text += str(size) if term.name == _ONE else term.entry if size == 1 else f"{size} * {term.entry}"
        return text or "0.0"

    def __add__(self, other: ScoreLike) -> Score:
        return Score(self.terms + as_score(other).terms)

    __radd__ = __add__

    def __mul__(self, factor: float) -> Score:
        return Score(tuple(replace(term, coefficient=float(factor) * term.coefficient) for term in self.terms))

    __rmul__ = __mul__

    def __neg__(self) -> Score:
        return self * -1.0

    def __sub__(self, other: ScoreLike) -> Score:
        return self + -as_score(other)

    def __rsub__(self, other: ScoreLike) -> Score:
        return as_score(other) - self


ScoreLike: TypeAlias = "Score | str | float"


def as_score(score: ScoreLike | None) -> Score:
    """Return a score from a score, the name of a scalar, a number, or None for 0."""
    if score is None or (isinstance(score, int | float) and score == 0):
        return Score(())
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        return scalar(score)
    if isinstance(score, int | float):
        return Score((_NamedTerm(_ONE, (), (), float(score)),))
    raise ValueError(f"a score must be a Score, such as L.cell(name), a name or a number, got {score!r}")


def cell(name: str, rows: int = 0, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows, j + columns] of a tensor (..., N, M).

    Args:
        name: The name of the tensor, a key of the mapping that :meth:`bellmax.Lattice.paths` takes.
        rows: The offset of the row, default 0. It is often −1: if the grid begins with an additional row, row i of the
            grid belongs to element i − 1 of a sequence.
        columns: The offset of the column, default 0.

    >>> cell("cost", -1, -1)
    cost[i-1, j-1]
    """
    return Score((_NamedTerm(name, (Axis("i", rows), Axis("j", columns)), ()),))


def row(name: str, rows: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows] of a tensor (..., N).

    Args:
        name: The name of the tensor.
        rows: The offset of the row, default 0.

    >>> row("bonus", -1)
    bonus[i-1]
    """
    return Score((_NamedTerm(name, (Axis("i", rows),), ()),))


def column(name: str, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [j + columns] of a tensor (..., M).

    Args:
        name: The name of the tensor.
        columns: The offset of the column, default 0.

    >>> column("bonus", -1)
    bonus[j-1]
    """
    return Score((_NamedTerm(name, (Axis("j", columns),), ()),))


def scalar(name: str) -> Score:
    """Score that is the same in every cell. Its value is a number, or a tensor of the batch shape.

    Args:
        name: The name of the tensor.

    >>> -2 * scalar("gap")
    -2.0 * gap
    """
    return Score((_NamedTerm(name, (), ()),))


def _constant_axis(name: str, number: int) -> Axis:
    """Return the axis of a dimension where the tensor ``name`` is read at a constant index, such as a class."""
    if index(number) < 0:
        raise ValueError(f"the class of {name} must be at least 0, got {number}")
    return Axis("at", 0, index(number))


def at_class(name: str, *classes: int, rows: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows, class] of a tensor (..., N, V), where the class is constant.

    A tensor (..., N, U, V) has two dimensions after the rows, for example duration and class. For such a tensor, pass
    two indices.

    Args:
        name: The name of the tensor.
        classes: The index of the class. If there are several dimensions after the rows, one index for each of them.
        rows: The offset of the row, default 0.

    >>> at_class("log_probs", 0, rows=-1)  # class 0, such as the blank
    log_probs[i-1, 0]
    """
    return Score((_NamedTerm(name, (Axis("i", rows), *(_constant_axis(name, c) for c in classes)), ()),))


def gather(name: str, labels: str, rows: int = 0, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows, y[j + columns]] of a tensor (..., N, V).

    Here y are the labels of the columns.

    Args:
        name: The name of the tensor.
        labels: The name of the labels y, integers (..., M).
        rows: The offset of the row, default 0.
        columns: The offset of the column, default 0.

    >>> gather("log_probs", "targets", -1, -1)
    log_probs[i-1, targets[j-1]]
    """
    return Score((_NamedTerm(name, (Axis("i", rows), Axis("y", columns)), (labels,)),))


def cell_label(name: str, labels: str, rows: int = 0, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows, j + columns, y[j + columns]] of a tensor (..., N, M, V).

    Here y are the labels of the columns.

    Args:
        name: The name of the tensor.
        labels: The name of the labels y, integers (..., M).
        rows: The offset of the row, default 0.
        columns: The offset of the column, default 0.

    >>> cell_label("logits", "targets", columns=-1)
    logits[i, j-1, targets[j-1]]
    """
    return Score((_NamedTerm(name, (Axis("i", rows), Axis("j", columns), Axis("y", columns)), (labels,)),))


def cell_class(name: str, number: int, rows: int = 0, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [i + rows, j + columns, number] of a tensor (..., N, M, V), where the
    class ``number`` is constant.

    Args:
        name: The name of the tensor.
        number: The index of the class.
        rows: The offset of the row, default 0.
        columns: The offset of the column, default 0.

    >>> cell_class("logits", 0, rows=-1)
    logits[i-1, j, 0]
    """
    return Score((_NamedTerm(name, (Axis("i", rows), Axis("j", columns), _constant_axis(name, number)), ()),))


def pair(name: str, x: str, y: str, rows: int = 0, columns: int = 0) -> Score:
    """Score of cell (i, j) that is the entry [x[i + rows], y[j + columns]] of a matrix (..., A, B).

    Here x are the labels of the rows, and y are the labels of the columns.

    Args:
        name: The name of the matrix, such as a substitution matrix.
        x: The name of the labels of the rows, integers (..., N).
        y: The name of the labels of the columns, integers (..., M).
        rows: The offset of the row, default 0.
        columns: The offset of the column, default 0.

    >>> pair("matrix", "a", "b", -1, -1)
    matrix[a[i-1], b[j-1]]
    """
    return Score((_NamedTerm(name, (Axis("x", rows), Axis("y", columns)), (x, y)),))


# --- moves and ends


@dataclass(frozen=True)
class Move:
    """A move of a :class:`Lattice` from cell (i − di, j − dj) to cell (i, j).

    The move leaves the first cell in the state ``source`` and enters the second cell in the state ``target``.

    Args:
        di: The number of rows that the move advances, at least 0.
        dj: The number of columns that the move advances, at least 0. If ``di`` and ``dj`` are both 0, the state number
            ``target`` must be larger than the state number ``source``.
        source: The state that the move leaves, default 0. A tuple of states stands for several moves, one from each
            state of the tuple.
        target: The state that the move enters, default 0.
        score: The score of the move, default 0, for example ``cell("cost")``. The score is read at the cell (i, j)
            where the move arrives. If the score has no entry for a cell, the move into this cell does not exist.
        where: A mask: :func:`row`, :func:`column` or :func:`cell` with the name of a bool tensor. The move into a cell
            exists only if the mask is True at this cell. A string ``"name"`` is short for ``column("name")``. By
            default, the move is allowed everywhere.

    >>> Move(1, 1, score=cell("cost", -1, -1))
    Move(1, 1, score=cost[i-1, j-1])
    """

    di: int
    dj: int
    source: int | tuple[int, ...] = 0
    target: int = 0
    score: ScoreLike | None = None
    where: Score | str | None = None

    def __repr__(self) -> str:
        names = "source", "target", "score", "where"
        options = [(name, getattr(self, name)) for name in names]
        shown = "".join(f", {name}={value!r}" for name, value in options if value not in (0, None))
        return f"Move({self.di}, {self.dj}{shown})"


class _Endpoints(NamedTuple):
    """The cells where paths may start or end, as in :class:`Ends`, and the score of each state there."""

    cells: str
    scores: dict[int, ScoreLike | None]

    def __repr__(self) -> str:
        function = {"row": "along_row", "column": "along_column"}.get(self.cells, self.cells)
        has_scores = any(score is not None for score in self.scores.values())
        return f"{function}({self.scores if has_scores else ', '.join(map(str, self.scores))})"


States: TypeAlias = "int | Mapping[int, ScoreLike | None]"


def _endpoints(cells: str, states: tuple[States, ...]) -> _Endpoints:
    """Return the cells and states where paths start or end, with the score of each state."""
    scores: dict[int, ScoreLike | None] = {}
    for state in states or (0,):
        scores |= dict(state) if isinstance(state, Mapping) else {state: None}
    if not scores:
        raise ValueError("a start or an end must have at least one state, got none")
    return _Endpoints(cells, scores)


def corner(*states: States) -> _Endpoints:
    """Let paths start in the first cell, or end in the last cell.

    Pass the result as the argument ``start`` or ``end`` of :class:`bellmax.Lattice`.

    Args:
        states: The states where paths may start or end, default 0. If starting or ending in a state has a score, pass a
            mapping from states to scores. :func:`along_row`, :func:`along_column` and :func:`anywhere` accept such
            mappings, too.

    >>> corner(0, 1), corner({0: "begin", 1: row("late")})
    (corner(0, 1), corner({0: 'begin', 1: late[i]}))
    """
    return _endpoints("corner", states)


def along_row(*states: States) -> _Endpoints:
    """Let paths start in any cell of the first row, or end in any cell of the last row.

    Args:
        states: The states where paths may start or end, as in :func:`corner`.

    >>> along_row(0)
    along_row(0)
    """
    return _endpoints("row", states)


def along_column(*states: States) -> _Endpoints:
    """Let paths start in any cell of the first column, or end in any cell of the last column.

    Args:
        states: The states where paths may start or end, as in :func:`corner`.

    >>> along_column(0)
    along_column(0)
    """
    return _endpoints("column", states)


def anywhere(*states: States) -> _Endpoints:
    """Let paths start in any cell, or end in any cell.

    Args:
        states: The states where paths may start or end, as in :func:`corner`.

    >>> anywhere(0)
    anywhere(0)
    """
    return _endpoints("anywhere", states)


class Lattice:
    """A dynamic program on a grid of cells, declared by the moves from cell to cell.

    Each cell has one or more states. A node is a cell (i, j) together with a state b, and a move leads from a source
    node to another node. Each move into a node has a sum: the value of its source node plus the score of the move. The
    value v of a node is the smoothed max of these sums, plus the score of the node: v(i, j, b) = node score + max_Ω
    (v(source) + move score). If paths may start in the node, the smoothed max has one more entry: the score of starting
    there, default 0. If paths may end in one node only, the value of the program is v at this node. If paths may end in
    several nodes, the value of the program is the max_Ω over these nodes.

    Args:
        moves: The moves, a sequence of :class:`Move`.
        states: The number of states of a cell, default 1.
        node: The score of each node, default 0. If there are several states, pass a mapping from states to scores. If
            the tensor of a node score has no entry for a cell, the score of this cell is 0.
        start: The cells and states where paths start: :func:`corner` (the default), :func:`along_row`,
            :func:`along_column` or :func:`anywhere`.
        end: The cells and states where paths end: :func:`corner` (the default), :func:`along_row`,
            :func:`along_column` or :func:`anywhere`.

    The edit distance is the least cost of changing one word into another. Row i and column j of the grid mean that i
    letters of the first word have become j letters of the second. For words of n and m letters, the grid has n + 1 rows
    and m + 1 columns:

    >>> import bellmax as bx
    >>> from bellmax import lattice as L
    >>> edit = bx.Lattice([bx.Move(1, 1, score=L.pair("change", "a", "b", -1, -1)),
    ...                    bx.Move(1, 0, score=1.0), bx.Move(0, 1, score=1.0)])
    >>> a, b = (torch.tensor([ord(c) for c in word]) - 97 for word in ("kitten", "sitting"))
    >>> p = edit.paths({"change": 1.0 - torch.eye(26), "a": a, "b": b}, grid=(7, 8), omega="hard", minimize=True)
    >>> p.value
    tensor(3.)
    """

    @answers_near_misses
    def __init__(
        self,
        moves: Sequence[Move],
        *,
        states: int = 1,
        node: ScoreLike | Mapping[int, ScoreLike] | None = None,
        start: _Endpoints | None = None,
        end: _Endpoints | None = None,
    ) -> None:
        if states < 1:
            raise ValueError(f"states must be at least 1, got {states}")
        self.states, self.moves = states, tuple(moves)
        self._nodes = dict(node) if isinstance(node, Mapping) else {0: node}
        self._start, self._end = start or corner(0), end or corner(0)
        self._names = _Names()
        self._table = self._declare()
        self.scores = tuple(self._names.scores)
        self._dims = tuple(map(len, self._names.scores.values()))
        self.labels = tuple(self._names.labels)
        self.masks = tuple(name for name in self._names.masks if name not in _SIDES)
        self._needed = {*self.scores, *self.labels, *self.masks} - {_ONE}
        axes = [(term.score, dim, axis) for _, term, _ in self._table.reads for dim, axis in enumerate(term.axes)]
        self._classes = {(score, dim, axis.place) for score, dim, axis in axes if axis.kind == "at"}
        coefficients = [term.coefficient for terms in self._table.terms for term in terms if term.score == 0]
        self._is_whole = all(c % 1 == 0 for c in coefficients)
        signs = {1 if c > 0 else -1 for c in coefficients if c}
        self._sign = signs.pop() if len(signs) == 1 else 0  # the sign of the first score's coefficients; 0 if mixed
        self._programs = {sense: PROGRAMS[self._table._replace(sense=sense).name] for sense in (1, -1)}

    def _declare(self) -> Table:
        """Check the declaration, number its names, and return its table."""
        for state in (*self._nodes, *self._start.scores, *self._end.scores):
            if not 0 <= state < self.states:
                raise ValueError(f"a state must be from 0 to {self.states - 1}, got {state}")
        nodes = tuple(self._names.terms(self._nodes.get(state)) for state in range(self.states))
        steps = []
        for number, move in enumerate(self.moves):
            for source in move.source if isinstance(move.source, tuple) else (move.source,):
                self._check_move(number, move, source)
                terms, where = self._names.terms(move.score), self._names.mask(move.where)
                steps.append(Step(move.di, move.dj, source, move.target, terms, where))
        start, end = (
            Ends(e.cells, tuple(self._names.terms(e.scores[s]) if s in e.scores else None for s in range(self.states)))
            for e in (self._start, self._end)
        )
        _check_reachable(steps, start.states, end.states)
        names = self._names
        if not names.scores:
            names.scores[_ONE] = ()
        sizes = len(names.labels), len(names.masks)
        table = Table(self.states, tuple(steps), nodes, start, end, tuple(names.scores), *sizes)
        axes = [axis for _, term, _ in table.reads for axis in term.axes]
        if not any(axis.follows_rows for axis in axes):
            names.masks["_rows"] = (Axis("i"),)
        if not any(axis.follows_columns for axis in axes):
            names.masks["_columns"] = (Axis("j"),)
        free = "".join(_SIDES[name] for name in names.masks if name in _SIDES)
        return table._replace(masks=len(names.masks), free=free)

    def _check_move(self, number: int, move: Move, source: int) -> None:
        """Raise ``ValueError`` if a move goes back, has an unknown state, or could be part of a cycle."""
        name = f"move {number}, ({move.di}, {move.dj}) from state {source} to {move.target},"
        if move.di < 0 or move.dj < 0:
            raise ValueError(f"{name} must not go back")
        for state in (source, move.target):
            if not 0 <= state < self.states:
                raise ValueError(f"{name} must be between states from 0 to {self.states - 1}")
        if move.di == move.dj == 0 and source >= move.target:
            raise ValueError(f"{name} stays in its cell and must lead to a higher state")

    @answers_near_misses
    def paths(
        self,
        tensors: Mapping[str, Any],
        *,
        grid: Any | None = None,
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> LatticePaths:
        """Return the distribution over the paths of the lattice, given its scores, labels and masks.

        Args:
            tensors: A mapping with an entry for each name that the declaration of the lattice uses. The name of a score
                maps to a tensor or a number. The name of labels, such as the letters of a word, maps to an integer
                tensor. The name of a mask maps to a bool tensor. A tensor without batch dimensions is shared by the
                batch. A label that is out of range marks padding. If the score of a move would be read at such a label,
                the move does not exist.
            grid: A pair (rows, columns): the number of rows and the number of columns of the grid of each batch member,
                integers of the batch shape. For example, if cell (i, j) reads two sequences at i − 1 and j − 1, each of
                these numbers is the length of a sequence plus 1. By default, the size of the grid is inferred from the
                tensors, such that every entry of the tensors is read. If several sizes would read every entry, ``grid``
                is required. If no tensor has a dimension for the rows, the largest number of rows in ``grid`` is used,
                or 1 if ``grid`` is not passed. Under ``torch.compile`` and ``vmap``, this number of rows must then be a
                Python number, not a tensor. If no tensor has a dimension for the columns, the two preceding rules apply
                to the number of columns.
            band: The half-width of a Sakoe–Chiba band around the diagonal, in steps, as in :class:`DTW`. Cells outside
                of the band are forbidden. By default, there is no band.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
            minimize: If True, treat scores as costs: ``value`` is a smoothed minimum. Default False.

        >>> import bellmax as bx
        >>> moves = [Move(1, 0), Move(0, 1)]
        >>> p = Lattice(moves, node=cell("gold")).paths({"gold": torch.tensor([[0.0, 3.0], [1.0, 0.0]])}, omega="hard")
        >>> p.value
        tensor(3.)
        """
        return LatticePaths(self, tensors, grid=grid, band=band, omega=omega, gamma=gamma, minimize=minimize)

    def dag(self, rows: int, columns: int) -> DAG:
        """Convert this lattice to one :class:`DAG` for grids of every size up to ``rows`` × ``columns``.

        The graph has a node for each state of each cell, and two more nodes: node 0 is the start, and the last node is
        the end. For each move from a node to another node, the graph has an edge. The graph has an edge from the start
        to each node where paths may start. If paths may end in a node for at least one grid size, the graph has an edge
        from this node to the end. Nodes that are on no path are left out.

        Args:
            rows: The maximum number of rows.
            columns: The maximum number of columns.

        >>> Lattice([Move(1, 0), Move(0, 1)]).dag(2, 2).num_nodes  # four cells, the start and the end
        6
        """
        graph = graph_of(self._table, rows, columns, torch.device("cpu"))
        return DAG._of_sorted(graph.edges, graph.levels, graph.graph)

    def __repr__(self) -> str:
        names = [name for name in self.scores if not name.startswith("_")]
        return f"Lattice(states={self.states}, moves={len(self._table.moves)}, scores={names})"


class _Names:
    """The names of scores, labels and masks in a declaration, numbered in the order of their first appearance.

    Scores and masks come with the axes of their first use.
    """

    def __init__(self) -> None:
        self.scores: dict[str, tuple[Axis, ...]] = {}
        self.labels: dict[str, int] = {}
        self.masks: dict[str, tuple[Axis, ...]] = {}

    def terms(self, score: ScoreLike | None) -> tuple[Term, ...]:
        """Return the terms of a score with numbers instead of names."""
        return tuple(self._number(term, self.scores) for term in as_score(score).terms if term.coefficient)

    def mask(self, where: Score | str | None) -> Term | None:
        """Return the mask of a move as a term with numbers instead of names."""
        if where is None:
            return None
        terms = (column(where) if isinstance(where, str) else as_score(where)).terms
        if len(terms) != 1 or terms[0].coefficient != 1 or terms[0].labels:
            raise ValueError("where must be the name of a mask, or L.row(name), L.column(name) or L.cell(name)")
        return self._number(terms[0], self.masks)

    def _number(self, term: _NamedTerm, numbered: dict[str, tuple[Axis, ...]]) -> Term:
        """Number the names of a term. Raises ``ValueError`` if its tensor has another number of dimensions elsewhere.

        ``numbered`` holds the names so far, either of scores or of masks.
        """
        labels = iter(term.labels)
        axes = tuple(
            axis._replace(place=self.labels.setdefault(next(labels), len(self.labels))) if axis.is_label else axis
            for axis in term.axes
        )
        first_axes = numbered.setdefault(term.name, axes)
        if len(first_axes) != len(axes):
            raise ValueError(
                f"{term.name!r} is declared with {len(first_axes)} dimensions in one score and {len(axes)} in another: "
                "use different names for different tensors"
            )
        return Term(list(numbered).index(term.name), term.coefficient, axes)


def _check_reachable(steps: Sequence[Step], start: Sequence[int], end: Sequence[int]) -> None:
    """Raise ``ValueError`` if the moves do not lead from a start state to each end state."""
    reached, frontier = set(start), list(start)
    while frontier:
        state = frontier.pop()
        new = {step.target for step in steps if step.source == state} - reached
        reached |= new
        frontier += new
    for state in end:
        if state not in reached:
            raise ValueError(f"end must be reached by moves, but no moves lead from the start to state {state}")


class LatticeTargets(Targets):
    """Targets of a lattice: the number of times that a path uses each entry, or sets of entries that it may use."""

    def __init__(self, p: Paths) -> None:
        super().__init__(p)
        self.lattice = cast("LatticePaths", p).lattice
        self.reads_integers = cast("LatticePaths", p)._has_unique_paths

    def forms(self) -> list[str]:
        return [*super().forms(), *([self.p._form.description] if self.reads_integers else [])]

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if self.reads_integers and self.p._form.matches(target):
            decoded = self.read_decoded(name, target)
            self.p._form.check(name, decoded)
            return self.p._form.events(decoded) > 0
        if target.dtype == torch.bool or self.solver.program.max_count == 1:
            return super().allowed(name, target, ignore_index)
        sign = self.lattice._sign
        allowed = super().allowed(name, target.abs() if sign < 0 else target, ignore_index)
        counts = target.to(torch.promote_types(self.p.dtype, torch.float32)).expand(allowed.shape)
        if sign and is_checked(counts):
            has_counts = (counts.abs() > 1).reshape(*self.batch_shape, -1).any(-1)
            bad = has_counts & ~self.p._is_path(sign * counts.abs())
            if bool(bad.any()):
                member = of_sequence(bad.nonzero()[0].tolist())
                raise ValueError(
                    f"{name} must hold the number of times that a path uses each entry, got counts of no path{member}"
                )
        return allowed

    def restrict(self, allowed: Tensor) -> Paths:
        if not self.lattice._sign:
            name = self.lattice.scores[0]
            raise ValueError(
                f"losses with a target need a score {name!r} with coefficients of one sign, got both signs"
            )
        first, *rest = self.solver.scores
        closed = first.masked_fill(~allowed, -self.p.sense * self.lattice._sign * math.inf)
        return self.p._with((closed, *rest), self.p.omega)

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        if self.solver.program.max_count == 1 or not is_checked(allowed):
            return super().check_one_path(name, allowed)
        p, within = cast("LatticePaths", self.p), self.restrict(allowed)
        path = self.lattice._sign * allowed.to(torch.promote_types(p.dtype, torch.float32))
        # If the path that uses most of these entries uses each once, so does every path that uses all of them.
        is_once = p._matches_longest(path)[0]
        is_only = is_once | (within.num_paths == 1)
        if not bool(is_only.all()):
            member = of_sequence((~is_only).nonzero()[0].tolist())
            raise ValueError(f"{name} must have the entries of a single path, got several paths or none{member}")
        is_once = is_once.reshape(*self.batch_shape, *[1] * len(self.event_shape))
        return torch.where(is_once, path, within.best_path().to(path.dtype))


class WalkForm(DecodedForm):
    """Walks (..., L, 4) int64, see :meth:`LatticePaths.best_walk`.

    A subclass for another form converts it from walks and to nodes.
    """

    p: LatticePaths
    is_complete: ClassVar[bool] = False
    """True if :meth:`nodes` checks the first and the last node, lengths and masks, so that only moves are left."""

    @property
    def own_shape(self) -> Sequence[int | str]:
        return "L", 4

    def matches(self, value: object) -> bool:
        """True for integers, unless they cannot be walks. Then they are counts of entries."""
        is_walk = isinstance(value, Tensor) and value.shape[-1:] == (4,)
        return super().matches(value) and (is_walk or tuple(self.own_shape) != ("L", 4))

    def of_compact(self, paths: Tensor) -> Tensor:
        return self.of_walks(self.p._walks_of(paths))

    def of_walks(self, walks: Tensor) -> Tensor:
        """Convert walks (..., *batch, L, 4) to the decoded form."""
        return walks

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the nodes of paths, (..., *batch, L), −1 in the padding.

        A bool tensor (..., *batch) comes with them. It is False if a decoded form is certainly not a path.
        """
        i, j, state, _ = decoded.unbind(-1)
        nodes, is_inside = self.number(i, j, state)
        return nodes, is_inside & ((i >= 0) | (decoded == -1).all(-1)).all(-1)

    def moves(self, decoded: Tensor, nodes: Tensor) -> Tensor:
        """Return the numbers of the moves into nodes (..., L): −1 into the first node, −2 if there is no move."""
        if decoded.ndim == nodes.ndim or decoded.shape[-1] != 4:
            return self._moves_between(nodes)
        move = decoded[..., 3]
        deltas, sources = self._steps()
        step = move[..., 1:].clamp(0, max(len(deltas) - 1, 0))
        is_move = (move[..., 1:] >= 0) & (move[..., 1:] < len(deltas))
        if len(deltas):
            is_move &= (deltas[step] == nodes.diff(dim=-1)) & (sources[step] == nodes[..., :-1] % self.p.lattice.states)
        return torch.cat((torch.where(move[..., :1] == -1, -1, -2), torch.where(is_move, move[..., 1:], -2)), -1)

    def _moves_between(self, nodes: Tensor) -> Tensor:
        """Return :meth:`moves` of a form without moves, whose lattice has at most one move between two nodes."""
        states, (rows, columns) = self.p.lattice.states, self.p._size
        deltas, sources = self._steps()
        table = self.p.lattice._table.moves
        fits = [n for n, move in enumerate(table) if move.di < rows and move.dj < columns]
        largest = int(deltas.max()) if len(deltas) else 0
        by_step = torch.full(((largest + 2) * states,), -2, device=nodes.device)
        by_step[deltas[fits] * states + sources[fits]] = torch.tensor(fits, dtype=torch.int64, device=nodes.device)
        delta = nodes.diff(dim=-1)
        step = torch.where((delta < 0) | (delta > largest), largest + 1, delta) * states
        move = by_step[step + nodes[..., :-1] % states] if states > 1 else by_step[step]
        return torch.cat((torch.full_like(nodes[..., :1], -1), move), -1)

    def _steps(self) -> tuple[Tensor, Tensor]:
        """For each move, the difference of the numbers of its nodes, and the state that it leaves."""
        states, columns, device = self.p.lattice.states, self.p._size[1], self.p.device
        table = self.p.lattice._table.moves
        deltas = [(move.di * columns + move.dj) * states + move.target - move.source for move in table]
        sources = [move.source for move in table]
        return tuple(torch.tensor(n, dtype=torch.int64, device=device) for n in (deltas, sources))  # type: ignore[return-value]

    def number(self, i: Tensor, j: Tensor, state: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return the numbers of nodes (..., L), −1 if i is negative, and (...), False if one is outside of the grid."""
        (rows, columns), states = self.p._size, self.p.lattice.states
        exists = i >= 0
        is_node = (i < rows) & (j >= 0) & (j < columns)
        if isinstance(state, Tensor):
            is_node &= (state >= 0) & (state < states)
        is_inside = (is_node | ~exists).all(-1)
        node = (i * columns + j) * states + state
        return node.masked_fill(~(exists & is_inside.unsqueeze(-1)), -1), is_inside

    def edges(self, decoded: Tensor) -> EdgeLists:
        nodes, moves, is_path = self._steps_of(decoded)
        numbers = self.p._program.edge_numbers(nodes, moves, *self.p._flat_inputs())
        return EdgeLists(numbers.clamp(min=-1), is_path & (numbers > -2).all(-1))

    def _steps_of(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes of paths and the moves into them, (..., L), and (...), True if each node has a move."""
        nodes, may_be_path = self.nodes(decoded)
        nodes = nodes.masked_fill(~may_be_path.unsqueeze(-1), -1)
        exists, moves = nodes >= 0, self.moves(decoded, nodes)
        is_path = may_be_path & exists[..., :1].any(-1) & (exists[..., :-1] | ~exists[..., 1:]).all(-1)
        return nodes, moves, is_path & ((moves > -2) | ~exists).all(-1)

    def is_path(self, decoded: Tensor) -> Tensor:
        return self._steps_of(decoded)[2] if self.is_complete else super().is_path(decoded)

    def _events_of_cells(self, decoded: Tensor) -> Tensor:
        """Return events (..., *batch, N, M) of the cells that paths visit, for a lattice of one state."""
        nodes, _ = self.nodes(decoded)
        size = self.p.event_shape.numel()
        dtype = torch.promote_types(self.p.dtype, torch.float32)
        cells = torch.zeros((*nodes.shape[:-1], size + 1), dtype=dtype, device=nodes.device)
        cells = cells.scatter(-1, torch.where(nodes < 0, size, nodes), 1)[..., :-1]
        return cells.reshape(*nodes.shape[:-1], *self.p.event_shape)

    def is_open(self, edges: EdgePaths) -> Tensor:
        """(...): False if an edge is outside of the lengths, or closed by a mask."""
        theta, index = self.p._flat_inputs()
        program = self.p._program
        free = [t if name.startswith("_") else torch.zeros_like(t) for name, t in self.solver._named(theta)]
        is_closed = program.weights(free, program.without_band(index)) == -math.inf
        return edges.sum_of(is_closed.long().reshape(*self.p.batch_shape, is_closed.shape[-1])) == 0

    def fault(self, decoded: Tensor) -> Fault:
        rows, columns = self.p._size
        for n, (i, j, state, move) in enumerate(decoded.tolist()):
            is_node = 0 <= i < rows and 0 <= j < columns and 0 <= state < self.p.lattice.states
            if not is_node and (i, j, state, move) != (-1, -1, -1, -1):
                return Fault((n,), f"must be a node of the grid, or -1 everywhere, got {[i, j, state, move]}")
        nodes, _ = self.nodes(decoded)
        numbers = self.p._program.edge_numbers(nodes, self.moves(decoded, nodes), *self.p._flat_inputs())
        missing = (numbers == -2).nonzero().flatten().tolist()
        if missing and missing[0] < len(nodes):
            return Fault((missing[0],), f"is not reached by its move, number {int(decoded[missing[0], 3])}")
        return Fault((), "is not a walk from the start to the end of the lattice within its lengths and masks")


class LatticePaths(PathDistribution):
    """The distribution over the paths of a :class:`Lattice`, which :meth:`Lattice.paths` returns.

    The event of a path counts how often the path uses each entry of the first score. ``gradient`` maps the name of each
    score to the expected counts of its entries. The decoded form is a walk: the nodes of the path and the moves into
    them, see :meth:`best_walk`.

    If a matrix is read by labels, a path can use an entry more than once. In this case, ``support.check`` searches for
    a path that uses each entry as often as the event states. The search takes at most about half a second per event. If
    the search finds no answer in this time, ``support.check`` accepts the event under two conditions. A path exists
    that uses no other entries, and the counts add up to at most the largest sum of such a path. The losses read such an
    event as the set of all paths that use no other entries.

    >>> import bellmax as bx
    >>> lattice = bx.Lattice([bx.Move(1, 0), bx.Move(0, 1)], node=cell("score"))
    >>> p = lattice.paths({"score": torch.tensor([[0.0, 1.0], [2.0, 0.0]])})
    >>> p.best_walk()  # row, column, state, number of the move
    tensor([[ 0,  0,  0, -1],
            [ 1,  0,  0,  0],
            [ 1,  1,  0,  1]])
    """

    _target_kind = LatticeTargets
    _form_kind: ClassVar[type[DecodedForm]] = WalkForm
    _size_argument: ClassVar[str] = "grid"
    """The argument of the user that the size of the grid comes from, for messages."""
    _has_unique_paths: ClassVar[bool] = False
    """True if an event determines its path, so that :meth:`log_prob` takes events."""

    def __init__(
        self,
        lattice: Lattice,
        tensors: Mapping[str, Any],
        *,
        grid: Any | None = None,
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> None:
        self.lattice = lattice
        program = lattice._programs[-1 if minimize else 1]
        assert isinstance(program, LatticeProgram)
        check_band(band)
        self.band = math.inf if band is None else float(band)
        scores = self._read_scores(tensors)
        self._check_classes(scores)
        device = next(iter(scores.values()))[0].device
        pair = () if grid is None else as_pair(grid, self._size_argument, "(rows, columns)")
        sides = [as_lengths(f"{self._size_argument}[{n}]", side, device) for n, side in enumerate(pair)]
        labels, masks = self._read_labels(dict(tensors) | self._free_sides(pair, sides, device))
        integers = labels | masks
        batch = common_batch(
            scores | integers | {f"{self._size_argument}[{n}]": (side, 0) for n, side in enumerate(sides)}
        )
        first, (tensor, dims) = next(iter(scores.items()))
        event = tensor.shape[tensor.ndim - dims :]
        scores[first] = _expand(tensor, batch, dims), dims
        for name, (tensor, _) in integers.items():
            if tensor.device != device:
                raise ValueError(f"{name} must be on the potentials' device {device}, got {tensor.device}")
        expanded = [_expand(tensor, batch, dims) for tensor, dims in integers.values()]
        self._size = self._read_size([tensor for tensor, _ in scores.values()] + expanded, program, grid is None)
        if self._size_argument == "grid":
            for n, side in enumerate(sides):
                if is_checked(side):
                    check_lengths(f"grid[{n}]", side.reshape(-1), 1, self._size[n])
        if sides:
            sizes = torch.stack([side.expand(batch) for side in sides], -1)
        else:
            sizes = whole_lengths(self._size, batch, device)
        region = sizes, bands(self.band, batch, device)
        super().__init__(program, scores, (*region, *expanded), batch, event, omega, gamma, minimize)

    def _read_size(self, tensors: Sequence[Tensor], program: LatticeProgram, is_unknown: bool) -> tuple[int, int]:
        """Return the numbers of rows and columns of the grid that fits the tensors.

        Raises ``ValueError`` if several sizes fit, unless the grid is known.
        """
        size = program.size_of(tensors)
        if is_unknown and not program.has_one_size:
            least = program.least_size_of(tensors)
            if least != size:
                sizes = " to ".join("{} × {}".format(*size) for size in (least, size))
                raise ValueError(
                    f"pass grid=(rows, columns): a tensor is read with several offsets, so {sizes} cells fit it"
                )
        return size

    def _free_sides(self, pair: Sequence[Any], lengths: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return a mask of ones for each side of the grid that no tensor of the user has, which sets its size.

        ``pair`` is the argument ``grid``, or empty, and ``lengths`` are its tensors.
        """
        masks = {}
        for n, name in enumerate(_SIDES):
            if name not in self.lattice._names.masks:
                continue
            size = 1
            if pair and isinstance(pair[n], int):
                size = pair[n]
            elif pair and not is_readable(lengths[n]):
                raise ValueError(
                    f"{self._size_argument}[{n}] must be a Python number: no tensor has the number of {name[1:]}, "
                    "and values of tensors are not known under torch.compile and vmap"
                )
            elif pair and lengths[n].numel():
                size = int(lengths[n].max())
            masks[name] = torch.ones(max(size, 1), dtype=torch.bool, device=device)
        return masks

    def _read_scores(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
        """Return the scores by name, each with its number of event dimensions."""
        lattice, scores = self.lattice, {}
        if tensors.keys() != lattice._needed:
            unknown, missing = [*tensors.keys() - lattice._needed], [*lattice._needed - tensors.keys()]
            needed = f"tensors must have the keys {', '.join(sorted(lattice._needed))}"
            raise ValueError(f"{needed}; " + (f"{missing[0]!r} is missing" if missing else f"got {unknown[0]!r}"))
        like = next((t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point()), torch.empty(0))
        for name, axes in lattice._names.scores.items():
            score = 1.0 if name == _ONE else tensors[name]
            if isinstance(score, int | float):
                score = torch.tensor(float(score), dtype=like.dtype, device=like.device)
            if check_tensor(name, score).ndim < len(axes):
                raise ValueError(f"{name} must have at least {len(axes)} dimensions, got shape {tuple(score.shape)}")
            scores[name] = score, len(axes)
        return scores

    def _check_classes(self, scores: Mapping[str, tuple[Tensor, int]]) -> None:
        """Raise ``ValueError`` if a score has too few entries along a dimension that is read at a constant index."""
        named = list(scores.items())
        for score, dim, number in self.lattice._classes:
            name, (tensor, dims) = named[score]
            if number >= tensor.shape[tensor.ndim - dims + dim]:
                raise ValueError(f"{name} must have more than {number} classes, got shape {tuple(tensor.shape)}")

    def _read_labels(
        self, tensors: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[Tensor, int]], dict[str, tuple[Tensor, int]]]:
        """Return the labels and the masks by name, each with its number of event dimensions."""
        labels, masks = {}, {}
        for name in self.lattice.labels:
            label = check_tensor(name, tensors[name])
            if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool or label.ndim < 1:
                raise ValueError(f"{name} must hold integers (..., L), got {label.dtype} of shape {tuple(label.shape)}")
            labels[name] = label.to(torch.int64, copy=True), 1  # the caller may modify it after the tape is made
        for name, axes in self.lattice._names.masks.items():
            mask = check_tensor(name, tensors[name])
            if mask.dtype != torch.bool or mask.ndim < len(axes):
                needed = f"bool of at least {len(axes)} dimensions"
                raise ValueError(f"{name} must be {needed}, got {mask.dtype} of shape {tuple(mask.shape)}")
            masks[name] = mask.clone(), len(axes)
        return labels, masks

    @property
    def _program(self) -> LatticeProgram:
        program = self._solver.program
        assert isinstance(program, LatticeProgram)
        return program

    @property
    def _lengths(self) -> Tensor:
        """The numbers of rows and columns of each grid, (..., 2) int64."""
        return self._solver.integers[0]

    def __repr__(self) -> str:
        if self._size_argument != "grid":
            return super().__repr__()
        rows, columns = self._size
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        states = self.lattice.states
        grid = f"{rows} rows × {columns} columns" + (f" × {states} states" if states > 1 else "")
        options = "".join(f", {name}={value!r}" for name, value in self._shown_options().items())
        return f"{type(self).__name__}({shapes}, grid={grid}{options}, omega={self.omega})"

    def _shown_options(self) -> dict[str, object]:
        options: dict[str, object] = {} if math.isinf(self.band) else {"band": self.band}
        return options | ({"minimize": True} if self.sense < 0 else {})

    # --- walks

    def best_walk(self) -> Tensor:
        """Return the nodes of the best path in order, (..., L, 4) int64 [i, j, state, move], padded with −1.

        ``move`` is the number of the move into the node. It is −1 for the first node.
        """
        return self._under(Hard()).sample_walks()

    def sample_walks(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random paths as nodes, (*sample_shape, ..., L, 4) int64 [i, j, state, move], padded with −1."""
        return self._walks_of(self._sample_compact(sample_shape))

    def _walks_of(self, paths: Tensor) -> Tensor:
        """Return paths of the sweeps, (..., L, 2), as walks (..., L, 4)."""
        (_, columns), states = self._size, self.lattice.states
        node, move = paths.unbind(-1)
        nodes = torch.stack((node // states // columns, node // states % columns, node % states, move), -1)
        return torch.where(node.unsqueeze(-1) < 0, -1, nodes)

    @property
    def marginals(self) -> Tensor:
        """Probability that a path visits each node, (..., N, M), or (..., N, M, states) for several states.

        Differentiable.
        """
        (rows, columns), states = self._size, self.lattice.states
        edges, node = self._solver.expanded().expected_edges(), self._program.graph(*self._flat_inputs()).node
        size = rows * columns * states
        visits = edges.new_zeros((*edges.shape[:-1], size + 1)).index_add(-1, torch.where(node < 0, size, node), edges)
        visits = visits[..., :-1].reshape(*self.batch_shape, rows, columns, states).to(self.dtype)
        return visits if states > 1 else visits.squeeze(-1)

    def _edges_of(self, path: Tensor) -> Tensor:
        """Take events, if an event determines its path."""
        if self._has_unique_paths:
            return super()._edges_of(path)
        raise ValueError(
            f"path must be a walk, int64 (..., L, 4), such as decode() returns, got {path.dtype} of shape "
            f"{tuple(path.shape)}. An event does not determine its path here, since a path can use an entry twice"
        )

    def _most_accurate(self) -> Tensor:
        if self._form_kind is not WalkForm:
            return super()._most_accurate()
        is_row_of_walk = self._program.graph(*self._flat_inputs()).node >= 0
        return self._most_accurate_by_edge(is_row_of_walk)

    # --- events that use an entry more than once

    def _is_path(self, value: Tensor) -> Tensor:
        if self._program.max_count == 1:
            return super()._is_path(value)
        batch = torch.broadcast_shapes(value.shape[: value.ndim - len(self.event_shape)], self.batch_shape)
        if batch != self.batch_shape:
            return self.expand(batch)._is_path(value)
        value = value.expand(batch + self.event_shape)
        is_path, may_be_path = self._matches_longest(value)
        if is_readable(value):
            is_path = is_path.clone()
            for member in map(tuple, may_be_path.nonzero().tolist()):
                is_path[member] = (self[member] if batch else self)._is_sum(value[member])
        return is_path

    def _matches_longest(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compare counts with the path that uses most of their entries, which decides most cases without a search.

        Returns two bool tensors of the batch shape: True if this path has the counts, and True if it has not but
        another path may.
        """
        sign = self.lattice._sign
        if not sign:
            never = torch.zeros(self.batch_shape, dtype=torch.bool, device=self.device)
            return never, ~never
        first = torch.where(sign * value > 0, self.sense * sign * 1.0, -self.sense * sign * math.inf)
        best = self._with((first.to(value.dtype), *self._free_rest()), Hard())
        most, counts = (sign * t.reshape(*self.batch_shape, -1) for t in (best.expected_path, value))
        exists = best.value.isfinite()
        is_longest = exists & (most == counts).all(-1)
        is_count = (counts >= 0) & ((counts == counts.round()) | (not self.lattice._is_whole))
        fits = exists & (counts.sum(-1) <= most.sum(-1) * (1 + 1e-6)) & is_count.all(-1)
        return is_longest, fits & ~is_longest

    def _is_sum(self, value: Tensor) -> bool:
        """True if a path has these counts, without batch dimensions, or if the search is too long."""
        free = self._with((torch.zeros_like(value), *self._free_rest()), Hard())
        solver, program = free._solver, self._program
        theta, index = solver.batch.unscaled(solver.detached()), solver.batch.index
        zeros = [torch.zeros_like(t) for t in theta[1:]]

        def uses(entries: Tensor) -> Tensor:
            """(E,): the number of times that each edge uses these entries of the first score, as weights."""
            return self.sense * program.along([entries.unsqueeze(0), *zeros], index)[0]

        exists = solver.expanded().edge_weights() > -math.inf
        entries = torch.arange(value.numel(), device=self.device)
        if self.lattice._sign:
            exists &= uses((value == 0).to(value.dtype)) == 0
            entries = value.flatten().nonzero().squeeze(1)
        edges = exists.nonzero().squeeze(1)
        if sums.is_long(len(edges), len(entries)):
            return True
        graph = program.graph(theta, index)
        parents, children = graph.edges[edges].unbind(1)
        order = (graph.levels[children] * len(graph.levels) + children).argsort()
        adds = value.new_zeros((len(entries), len(edges)))
        for row, entry in zip(adds, entries, strict=True):
            indicator = value.new_zeros(value.numel()).index_fill(0, entry, 1)
            row.copy_(uses(indicator.reshape(value.shape))[edges])
        rows = zip(children[order].tolist(), parents[order].tolist(), adds.T[order].double().cpu().numpy(), strict=True)
        listed = [sums.Edge(child, (parent,) if parent else (), row) for child, parent, row in rows]
        return sums.is_sum(listed, len(graph.levels) - 1, value.flatten()[entries].double().cpu().numpy())

    def _free_rest(self) -> list[Tensor]:
        """Return all scores except the first, with 0 for finite entries: they only forbid moves."""
        return [torch.where(s.isinf(), s, 0) for s in self._solver.detached()[1:]]


def common_batch(named: Mapping[str, tuple[Tensor, int]]) -> torch.Size:
    """Return the batch shape to which tensors broadcast. Each comes with its number of event dimensions.

    Raises ``ValueError`` if they do not broadcast, with a hint if the first tensor looks time-first.
    """
    shapes = [t.shape[: t.ndim - dims] for t, dims in named.values() if t.ndim > dims]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0] if shapes else torch.Size()
    try:
        shape: torch.Size = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        shown = {name: entry for name, entry in named.items() if not name.startswith("_")}
        got = {name: tuple(t.shape) for name, (t, _) in shown.items()}
        (name, (first, first_dims)), *others = shown.items()
        batches = [t.shape[: t.ndim - dims] for _, (t, dims) in others if t.ndim > dims]
        is_swapped = (
            first_dims > 1 and first.ndim == first_dims + 1 and all(batch == first.shape[1:2] for batch in batches)
        )
        hint = batch_first_hint(name, is_swapped)
        raise ValueError(
            f"the batch dimensions of tensors and lengths must broadcast, got shapes {got}{hint}"
        ) from None
    return shape


def _expand(tensor: Tensor, batch: torch.Size, dims: int) -> Tensor:
    """Expand the batch dimensions of a tensor, without a node in the autograd graph if nothing changes."""
    shape = batch + tensor.shape[tensor.ndim - dims :]
    return tensor if tensor.shape == shape else tensor.expand(shape)


def read_lengths(
    name: str, scores: tuple[Tensor, int], lengths: Any | None, least: tuple[int, int], most: tuple[int, int]
) -> Any:
    """Return the argument ``lengths`` as two int64 tensors, or None if it is None.

    Raises ``ValueError`` if a length is below ``least`` or above ``most``. ``scores`` is the tensor ``name`` and its
    number of event dimensions. If it looks time-first, the error has a hint.
    """
    if lengths is None:
        return None
    tensor, dims = scores
    sides = tuple(as_lengths(f"lengths[{n}]", side, tensor.device) for n, side in enumerate(as_pair(lengths)))
    for n, side in enumerate(sides):
        if is_checked(side) and side.numel():
            is_swapped = n == 0 and tensor.ndim == dims + 1 and side.numel() in (1, most[0])
            hint = batch_first_hint(name, is_swapped and int(side.max()) <= len(tensor))
            check_lengths(f"lengths[{n}]", side.reshape(-1), least[n], most[n], hint)
    return sides


def check_labels(name: str, labels: Tensor, length: Tensor | None, classes: int) -> None:
    """Raise ``ValueError`` if labels (..., L) within their lengths are not integers from 0 to ``classes`` − 1."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.ndim < 1:
        raise ValueError(f"{name} must hold integers (..., L), got {labels.dtype} of shape {tuple(labels.shape)}")
    if not is_checked(labels):
        return
    within = torch.arange(labels.shape[-1]) < (labels.shape[-1] if length is None else length.unsqueeze(-1))
    bad = ((labels < 0) | (labels >= classes)) & within
    if bool(bad.any()):
        position = tuple(bad.nonzero()[0].tolist())
        label = int(labels.expand(bad.shape)[position])
        raise ValueError(f"{name} must hold labels from 0 to {classes - 1}, got {label} at {position}")
