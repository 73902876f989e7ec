"""Dynamic programs on a grid, declared by their moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

import bellmax.structures.sums as sums
from bellmax.inputs import answers_near_misses, as_lengths, as_pair, check_band, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs import PROGRAMS, LatticeProgram
from bellmax.programs.checks import batch_first_hint, check_lengths, of_sequence
from bellmax.programs.graph import is_flow
from bellmax.programs.lattice import bands, graph_of, whole_lengths
from bellmax.programs.table import Axis, Ends, Step, Table, Term
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.dag import DAG
from bellmax.structures.named import NamedScores
from bellmax.targets import Paths, Targets
from bellmax.tensors import Gamma

_ONE = "_1"  # the name of the constant score
_SIDES = {"_rows": "i", "_columns": "j"}  # the names of masks for sides that no tensor has, by kind of axis


# --- scores


@dataclass(frozen=True)
class _Part:
    """A named tensor read by the cell, times a number."""

    name: str
    axes: tuple[Axis, ...]
    labels: tuple[str, ...]  # names, in the order of the axes that are labels
    coefficient: float = 1.0


@dataclass(frozen=True)
class Score:
    """What a move, a node, a start or an end is worth: a sum of tensors, each read by the cell (i, j).

    Made by :func:`cell`, :func:`row`, :func:`column`, :func:`scalar`, :func:`one_of`, :func:`gather`, :func:`joint`
    and :func:`pair`. Scores are added to each other and to numbers, and multiplied by numbers.
    """

    parts: tuple[_Part, ...]

    def __add__(self, other: ScoreLike) -> Score:
        return Score(self.parts + as_score(other).parts)

    __radd__ = __add__

    def __mul__(self, factor: float) -> Score:
        return Score(tuple(_Part(p.name, p.axes, p.labels, float(factor) * p.coefficient) for p in self.parts))

    __rmul__ = __mul__

    def __neg__(self) -> Score:
        return self * -1.0

    def __sub__(self, other: ScoreLike) -> Score:
        return self + -as_score(other)

    def __rsub__(self, other: ScoreLike) -> Score:
        return as_score(other) - self


ScoreLike: TypeAlias = "Score | str | float"


def as_score(given: ScoreLike | None) -> Score:
    """A score: a name stands for a scalar, a number for itself, None for 0."""
    if given is None or (isinstance(given, int | float) and given == 0):
        return Score(())
    if isinstance(given, Score):
        return given
    if isinstance(given, str):
        return scalar(given)
    if isinstance(given, int | float):
        return Score((_Part(_ONE, (), (), float(given)),))
    raise ValueError(f"a score must be made by bx.cell and the like, a name or a number, got {given!r}")


def cell(name: str, rows: int = 0, columns: int = 0) -> Score:
    """The entry [i + rows, j + columns] of a tensor (..., N, M)."""
    return Score((_Part(name, (Axis("i", rows), Axis("j", columns)), ()),))


def row(name: str, rows: int = 0) -> Score:
    """The entry [i + rows] of a tensor (..., N)."""
    return Score((_Part(name, (Axis("i", rows),), ()),))


def column(name: str, columns: int = 0) -> Score:
    """The entry [j + columns] of a tensor (..., M)."""
    return Score((_Part(name, (Axis("j", columns),), ()),))


def scalar(name: str) -> Score:
    """A tensor (...): the same number everywhere."""
    return Score((_Part(name, (), ()),))


def _at(name: str, place: int) -> Axis:
    if index(place) < 0:
        raise ValueError(f"the class of {name} must be at least 0, got {place}")
    return Axis("at", 0, index(place))


def one_of(name: str, *places: int, rows: int = 0) -> Score:
    """The entry [i + rows, *places] of a tensor (..., N, V) or (..., N, U, V): of one class, or duration and class."""
    return Score((_Part(name, (Axis("i", rows), *(_at(name, place) for place in places)), ()),))


def gather(name: str, labels: str, rows: int = 0, columns: int = 0) -> Score:
    """The entry [i + rows, y[j + columns]] of a tensor (..., N, V), for labels y (..., M) of the columns."""
    return Score((_Part(name, (Axis("i", rows), Axis("y", columns)), (labels,)),))


def joint(name: str, label: str | int, rows: int = 0, columns: int = 0) -> Score:
    """The entry [i + rows, j + columns, y[j + columns]] of a tensor (..., N, M, V), for labels y (..., M) of the
    columns, or its entry [i + rows, j + columns, label] for one class."""
    last = Axis("y", columns) if isinstance(label, str) else _at(name, label)
    labels = (label,) if isinstance(label, str) else ()
    return Score((_Part(name, (Axis("i", rows), Axis("j", columns), last), labels),))


def pair(name: str, x: str, y: str, rows: int = 0, columns: int = 0) -> Score:
    """The entry [x[i + rows], y[j + columns]] of a matrix (..., A, B), with labels x of rows and y of columns."""
    return Score((_Part(name, (Axis("x", rows), Axis("y", columns)), (x, y)),))


# --- moves and ends


@dataclass(frozen=True)
class Move:
    """A move by (di, dj) between states: from (i − di, j − dj, source) to (i, j, target).

    Args:
        di: rows, at least 0.
        dj: columns, at least 0. A move that stays in its cell must lead to a higher state.
        source: a state, or several: a move from each.
        target: the state it leads into.
        score: read at the cell (i, j) where the move arrives. The move is absent where the score has no entry.
        where: the name of a mask, or :func:`row`, :func:`column` or :func:`cell` of one: bool, True where the move is
            allowed. A name stands for a mask of columns.

    """

    di: int
    dj: int
    source: int | tuple[int, ...] = 0
    target: int = 0
    score: ScoreLike | None = None
    where: Score | str | None = None


class _Place(NamedTuple):
    place: str
    scores: dict[int, ScoreLike | None]


States: TypeAlias = "int | Mapping[int, ScoreLike | None]"


def _place(name: str, states: tuple[States, ...]) -> _Place:
    scores: dict[int, ScoreLike | None] = {}
    for given in states or (0,):
        scores |= dict(given) if isinstance(given, Mapping) else {given: None}
    if not scores:
        raise ValueError("a start or an end must have at least one state, got none")
    return _Place(name, scores)


def corner(*states: States) -> _Place:
    """Paths start in the first cell, or end in the last, in one of these states.

    As for the other places, a state may come with a score: ``corner({0: "begin", 1: row("late")})``.
    """
    return _place("corner", states)


def along_row(*states: States) -> _Place:
    """Paths start anywhere in the first row, or end anywhere in the last."""
    return _place("row", states)


def along_column(*states: States) -> _Place:
    """Paths start anywhere in the first column, or end anywhere in the last."""
    return _place("column", states)


def anywhere(*states: States) -> _Place:
    """Paths start, or end, in any cell."""
    return _place("anywhere", states)


class Lattice:
    """A dynamic program on a grid of N × M cells with a few states each, declared by its moves.

    v(i, j, b) = node score + max_Ω over the moves into (i, j, b) of v(source) + score of the move, and over the start
    if a path may start there; the value is v at the end, or max_Ω over the ends if there are several.

    Args:
        moves: a :class:`Move` each.
        states: how many states a cell has.
        node: the score of a node by its state, or of all nodes if there is one state; 0 by default. A node outside of
            a tensor has score 0.
        start: :func:`corner`, :func:`along_row`, :func:`along_column` or :func:`anywhere` of some states.
        end: the same, from the last cell.

    Edit distance, with costs instead of scores:

    >>> import bellmax as bx
    >>> edit = bx.Lattice([bx.Move(1, 1, score=bx.pair("change", "a", "b", -1, -1)),
    ...                    bx.Move(1, 0, score=1.0), bx.Move(0, 1, score=1.0)])
    >>> a, b = (torch.tensor([ord(c) for c in word]) - 97 for word in ("kitten", "sitting"))
    >>> p = edit.paths({"change": 1.0 - torch.eye(26), "a": a, "b": b}, lengths=(7, 8), omega="hard", minimize=True)
    >>> p.value
    tensor(3.)
    """

    def __init__(
        self,
        moves: Sequence[Move],
        *,
        states: int = 1,
        node: ScoreLike | Mapping[int, ScoreLike] | None = None,
        start: _Place | None = None,
        end: _Place | None = None,
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
        self._sign = signs.pop() if len(signs) == 1 else 0  # of all coefficients of the first score
        self._programs = {sense: PROGRAMS[self._table._replace(sense=sense).name] for sense in (1, -1)}

    def _declare(self) -> Table:
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
            Ends(e.place, tuple(self._names.terms(e.scores[s]) if s in e.scores else None for s in range(self.states)))
            for e in (self._start, self._end)
        )
        _check_reachable(steps, start.states, end.states)
        names = self._names
        if not names.scores:
            names.terms(0.0 * scalar(_ONE))
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
        lengths: Any | None = None,
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> LatticePaths:
        """The distribution over the paths of the lattice, given its scores, labels and masks.

        Args:
            tensors: every score, label and mask of the declaration, by its name: scores (..., *own) are tensors or
                numbers, labels int64, masks bool. One without batch dimensions is shared by the batch. A label that is
                no index of its score is padding: what is read by it is missing.
            lengths: (rows, columns) of each member's own grid, integers of the batch shape; by default the grid that
                every entry has a place in. They must be given where entries have several. A side that no tensor has is
                as long as the longest member, or 1 without lengths. Under ``torch.compile`` and ``vmap`` give it as a
                Python number.
            band: how far cells may be from the diagonal, in steps; see :class:`DTW`.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.
            minimize: whether scores are costs: then the value is a smoothed least cost.

        """
        return LatticePaths(self, tensors, lengths=lengths, band=band, omega=omega, gamma=gamma, minimize=minimize)

    def dag(self, rows: int, columns: int) -> DAG:
        """The graph of this lattice with so many rows and columns: node 0 is the start, the last one the end.

        It has an edge from the start for each node where a path may start, one for each move, and one to the end for
        each node where a path may end, for grids of any size up to this one. Nodes that are on no path are left out.
        """
        graph = graph_of(self._table, rows, columns, torch.device("cpu"))
        return DAG._of_sorted(graph.edges, graph.levels, graph.graph)

    def __repr__(self) -> str:
        return f"Lattice(states={self.states}, moves={len(self._table.moves)}, scores={list(self.scores)})"


class _Names:
    """The names of a declaration, numbered as they first appear, each with its form."""

    def __init__(self) -> None:
        self.scores: dict[str, tuple[Axis, ...]] = {}
        self.labels: dict[str, int] = {}
        self.masks: dict[str, tuple[Axis, ...]] = {}

    def terms(self, given: ScoreLike | None) -> tuple[Term, ...]:
        return tuple(self._term(part, self.scores) for part in as_score(given).parts if part.coefficient)

    def mask(self, given: Score | str | None) -> Term | None:
        if given is None:
            return None
        parts = (column(given) if isinstance(given, str) else as_score(given)).parts
        if len(parts) != 1 or parts[0].coefficient != 1 or parts[0].labels:
            raise ValueError("where must be the name of a mask, or row, column or cell of one")
        return self._term(parts[0], self.masks)

    def _term(self, part: _Part, known: dict[str, tuple[Axis, ...]]) -> Term:
        labels = iter(part.labels)
        axes = tuple(
            axis._replace(place=self.labels.setdefault(next(labels), len(self.labels))) if axis.is_label else axis
            for axis in part.axes
        )
        form = known.setdefault(part.name, axes)
        if len(form) != len(axes):
            raise ValueError(
                f"{part.name!r} is read with {len(form)} dimensions in one place and {len(axes)} in another"
            )
        return Term(list(known).index(part.name), part.coefficient, axes)


def _check_reachable(steps: Sequence[Step], start: Sequence[int], end: Sequence[int]) -> None:
    reached, frontier = set(start), list(start)
    while frontier:
        state = frontier.pop()
        new = {step.target for step in steps if step.source == state} - reached
        reached |= new
        frontier += new
    for state in end:
        if state not in reached:
            raise ValueError(f"end must be reached by moves, but none leads from the start into state {state}")


class LatticeTargets(Targets):
    """Targets of a lattice: the number of times that a path uses each entry, or sets of entries that it may use."""

    def __init__(self, p: Paths) -> None:
        super().__init__(p)
        self.lattice = cast("LatticePaths", p).lattice

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
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
                raise ValueError(f"{name} must hold how often a path uses each entry, got counts of none{member}")
        return allowed

    def restrict(self, allowed: Tensor) -> Paths:
        if not self.lattice._sign:
            name = self.lattice.scores[0]
            raise ValueError(f"a target needs coefficients of one sign wherever {name!r} is read, got both")
        first, *rest = self.solver.scores
        closed = first.masked_fill(~allowed, -self.p.sense * self.lattice._sign * math.inf)
        return self.p._with((closed, *rest), self.p.omega)

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        if self.solver.program.max_count == 1 or not is_checked(allowed):
            return super().check_one_path(name, allowed)
        p, within = cast("LatticePaths", self.p), self.restrict(allowed)
        path = self.lattice._sign * allowed.to(torch.promote_types(p.dtype, torch.float32))
        is_once = p._is_longest(path)[0]  # then every path with all of these entries has each once
        is_only = is_once | (within.num_paths == 1)
        if not bool(is_only.all()):
            member = of_sequence((~is_only).nonzero()[0].tolist())
            raise ValueError(f"{name} must have the entries of a single path, got those of several or none{member}")
        is_once = is_once.reshape(*self.batch_shape, *[1] * len(self.event_shape))
        return torch.where(is_once, path, within.best_path().to(path.dtype))


class LatticePaths(NamedScores):
    """The paths of a :class:`Lattice`. An event counts how often a path uses each entry of the first score.

    Where a path can use an entry twice (a matrix read by labels, a row, a scalar), ``support.check`` searches for a
    path with these counts. That is hard in general: on a large grid it gives up after half a second an event, and then
    accepts counts whose entries are on a path and whose sum is not too large, though no path may have them. Losses take
    a target with such counts for the set of all paths that use no other entries.

    ``gradient`` has the same for every score, by name. A walk is the nodes of a path with the moves into them.
    """

    _target_kind = LatticeTargets
    _has_unique_paths: ClassVar[bool] = False
    """True if an event determines its path, so that :meth:`log_prob` takes events."""

    def __init__(
        self,
        lattice: Lattice,
        tensors: Mapping[str, Any],
        *,
        lengths: Any | None = None,
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
        pair = () if lengths is None else as_pair(lengths)
        sides = [as_lengths(f"lengths[{n}]", side, device) for n, side in enumerate(pair)]
        labels, masks = self._read_labels(dict(tensors) | self._free_sides(pair, sides, device))
        integers = labels | masks
        batch = common_batch(scores | integers | {f"lengths[{n}]": (side, 0) for n, side in enumerate(sides)})
        first, (tensor, dims) = next(iter(scores.items()))
        event = tensor.shape[tensor.ndim - dims :]
        scores[first] = _expand(tensor, batch, dims), dims
        for name, (tensor, _) in integers.items():
            if tensor.device != device:
                raise ValueError(f"{name} must be on the potentials' device {device}, got {tensor.device}")
        expanded = [_expand(tensor, batch, dims) for tensor, dims in integers.values()]
        self._size = self._read_size([tensor for tensor, _ in scores.values()] + expanded, program, lengths is None)
        if sides:
            grid = torch.stack([side.expand(batch) for side in sides], -1)
        else:
            grid = whole_lengths(self._size, batch, device)
        region = grid, bands(self.band, batch.numel(), device).reshape(batch)
        super().__init__(program, scores, (*region, *expanded), batch, event, omega, gamma, minimize)

    def _read_size(self, tensors: Sequence[Tensor], program: LatticeProgram, is_unknown: bool) -> tuple[int, int]:
        """Return the rows and columns of the grid; raise a ValueError if they must be known and are not."""
        size = program.size_of(tensors)
        if is_unknown and not program.has_one_size:
            least = program.least_size_of(tensors)
            if least != size:
                sizes = " to ".join("{} × {}".format(*size) for size in (least, size))
                raise ValueError(
                    f"lengths must be given, since a tensor is read at several places: {sizes} cells fit it"
                )
        return size

    def _free_sides(self, pair: Sequence[Any], lengths: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        """Masks as long as the sides that no tensor has."""
        masks = {}
        for n, name in enumerate(_SIDES):
            if name not in self.lattice._names.masks:
                continue
            size = 1
            if pair and isinstance(pair[n], int):
                size = pair[n]
            elif pair and not is_readable(lengths[n]):
                raise ValueError(
                    f"lengths[{n}] must be a Python number: no tensor has the number of {name[1:]}, "
                    "and values of tensors are not known under torch.compile and vmap"
                )
            elif pair and lengths[n].numel():
                size = int(lengths[n].max())
            masks[name] = torch.ones(max(size, 1), dtype=torch.bool, device=device)
        return masks

    def _read_scores(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
        lattice, scores = self.lattice, {}
        if tensors.keys() != lattice._needed:
            unknown, missing = [*tensors.keys() - lattice._needed], [*lattice._needed - tensors.keys()]
            needed = f"tensors must be {', '.join(sorted(lattice._needed))}"
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
        named = list(scores.items())
        for score, dim, number in self.lattice._classes:
            name, (tensor, dims) = named[score]
            if number >= tensor.shape[tensor.ndim - dims + dim]:
                raise ValueError(f"{name} must have more than {number} classes, got shape {tuple(tensor.shape)}")

    def _read_labels(
        self, tensors: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[Tensor, int]], dict[str, tuple[Tensor, int]]]:
        labels, masks = {}, {}
        for name in self.lattice.labels:
            label = check_tensor(name, tensors[name])
            if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool or label.ndim < 1:
                raise ValueError(f"{name} must hold integers (..., L), got {label.dtype} of shape {tuple(label.shape)}")
            labels[name] = label.to(torch.int64), 1
        for name, axes in self.lattice._names.masks.items():
            mask = check_tensor(name, tensors[name])
            if mask.dtype != torch.bool or mask.ndim < len(axes):
                needed = f"bool of at least {len(axes)} dimensions"
                raise ValueError(f"{name} must be {needed}, got {mask.dtype} of shape {tuple(mask.shape)}")
            masks[name] = mask, len(axes)
        return labels, masks

    @property
    def _program(self) -> LatticeProgram:
        program = self._solver.program
        assert isinstance(program, LatticeProgram)
        return program

    @property
    def _lengths(self) -> Tensor:
        """(..., 2) int64: the rows and columns of each member's grid."""
        return self._solver.integers[0]

    def __repr__(self) -> str:
        rows, columns = self._size
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        grid = f"{rows} rows × {columns} columns × {self.lattice.states} states"
        return f"{type(self).__name__}({shapes}, grid={grid}, omega={self.omega})"

    # --- walks

    def best_walk(self) -> Tensor:
        """The nodes of the best path, (..., L, 4) int64 [i, j, state, move], padded with −1; the first has move −1."""
        return self._under(Hard()).sample_walks()

    def sample_walks(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Nodes of paths drawn from the distribution, (*sample_shape, ..., L, 4), as in :meth:`best_walk`."""
        (_, columns), states = self._size, self.lattice.states
        node, move = self._sample_compact(sample_shape).unbind(-1)
        nodes = torch.stack((node // states // columns, node // states % columns, node % states, move), -1)
        return torch.where(node.unsqueeze(-1) < 0, -1, nodes)

    def _edges_of(self, path: Tensor) -> Tensor:
        """Take a walk (..., L, 4), as :meth:`sample_walks` returns them, or an event if it determines the path."""
        is_event = check_tensor("path", path).shape[-len(self.event_shape) :] == self.event_shape
        if self._has_unique_paths and (path.is_floating_point() or is_event):
            return super()._edges_of(path)
        if path.shape[-1:] != (4,) or path.is_floating_point():
            raise ValueError(f"path must be a walk, int64 (..., L, 4), got {path.dtype} of shape {tuple(path.shape)}")
        return self._edges_of_walk(path, must_exist=is_readable(path))

    def _edges_of_walk(self, walks: Tensor, must_exist: bool = False) -> Tensor:
        """Return walks (..., L, 4) as paths (..., E) of the expansion."""
        (_, columns), states, solver = self._size, self.lattice.states, self._solver
        i, j, state, move = walks.unbind(-1)
        self._check_walks(i, j, state, move)
        walks = torch.stack((torch.where(i < 0, -1, (i * columns + j) * states + state), move), -1)
        shape = torch.broadcast_shapes(walks.shape[:-2], self.batch_shape)
        walks = walks.expand(*shape, *walks.shape[-2:])
        extra = shape[: len(shape) - len(self.batch_shape)]
        flat = walks.reshape(extra.numel(), self.batch_shape.numel(), *walks.shape[-2:]).transpose(0, 1)
        theta, index = solver.batch.unscaled(solver.detached()), solver.batch.index
        edges = self._program.edges_of_walks(flat, theta, index)  # (B, K, E)
        if must_exist and not bool(is_flow(edges, self._program.engine_index(theta, index)).all()):
            raise ValueError("path must hold walks of the lattice, got nodes that no path visits in this order")
        return edges.transpose(0, 1).reshape(*shape, edges.shape[-1]).to(torch.promote_types(self.dtype, torch.float32))

    def _check_walks(self, i: Tensor, j: Tensor, state: Tensor, move: Tensor) -> None:
        if not is_readable(i):
            return
        (rows, columns), targets = self._size, [step.target for step in self.lattice._table.moves]
        into = torch.tensor([*targets, 0], device=move.device)[move.clamp(-1, len(targets) - 1)]
        wrong = (i >= rows) | (j < 0) | (j >= columns) | (state < 0) | (state >= self.lattice.states)
        wrong |= (move >= len(targets)) | ((move >= 0) & (state != into))
        if bool((wrong & (i >= 0)).any()):
            raise ValueError("path must hold walks of the lattice, got a node that it does not have, or another move's")

    # --- events that use an entry more than once

    def _is_path(self, value: Tensor) -> Tensor:
        if self._program.max_count == 1:
            return super()._is_path(value)
        batch = torch.broadcast_shapes(value.shape[: value.ndim - len(self.event_shape)], self.batch_shape)
        if batch != self.batch_shape:
            return self.expand(batch)._is_path(value)
        value = value.expand(batch + self.event_shape)
        is_path, is_open = self._is_longest(value)
        if is_readable(value):
            is_path = is_path.clone()
            for member in map(tuple, is_open.nonzero().tolist()):
                is_path[member] = (self[member] if batch else self)._is_sum(value[member])
        return is_path

    def _is_longest(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """True if the path that uses most of these entries has these counts; and True if only another one may."""
        sign = self.lattice._sign
        if not sign:
            none = torch.zeros(self.batch_shape, dtype=torch.bool, device=self.device)
            return none, ~none
        first = torch.where(sign * value > 0, self.sense * sign * 1.0, -self.sense * sign * math.inf)
        best = self._with((first.to(value.dtype), *self._free_rest()), Hard())
        most, wanted = (sign * t.reshape(*self.batch_shape, -1) for t in (best.expected_path, value))
        exists = best.value.isfinite()
        is_one = exists & (most == wanted).all(-1)
        is_count = (wanted >= 0) & ((wanted == wanted.round()) | (not self.lattice._is_whole))
        fits = exists & (wanted.sum(-1) <= most.sum(-1) * (1 + 1e-6)) & is_count.all(-1)
        return is_one, fits & ~is_one

    def _is_sum(self, value: Tensor) -> bool:
        """True if a path of one lattice has these counts, or if the search for one is given up."""
        free = self._with((torch.zeros_like(value), *self._free_rest()), Hard())
        solver, program = free._solver, self._program
        theta, index = solver.batch.unscaled(solver.detached()), solver.batch.index
        zeros = [torch.zeros_like(t) for t in theta[1:]]

        def uses(entries: Tensor) -> Tensor:
            """(E,): the amount that each edge adds to a combination of entries of the first score."""
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
            one = value.new_zeros(value.numel()).index_fill(0, entry, 1)
            row.copy_(uses(one.reshape(value.shape))[edges])
        rows = zip(children[order].tolist(), parents[order].tolist(), adds.T[order].double().cpu().numpy(), strict=True)
        listed = [sums.Edge(child, (parent,) if parent else (), row) for child, parent, row in rows]
        return sums.is_sum(listed, len(graph.levels) - 1, value.flatten()[entries].double().cpu().numpy())

    def _free_rest(self) -> list[Tensor]:
        """The scores but the first, 0 if they are finite."""
        return [torch.where(s.isinf(), s, 0) for s in self._solver.detached()[1:]]


def common_batch(named: Mapping[str, tuple[Tensor, int]]) -> torch.Size:
    """The batch shape of tensors, each with its number of dimensions of its own."""
    shapes = [t.shape[: t.ndim - own] for t, own in named.values() if t.ndim > own]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0] if shapes else torch.Size()
    try:
        shape: torch.Size = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        shown = {name: entry for name, entry in named.items() if not name.startswith("_")}
        got = {name: tuple(t.shape) for name, (t, _) in shown.items()}
        (name, (first, own)), *others = shown.items()
        batches = [t.shape[: t.ndim - own] for _, (t, own) in others if t.ndim > own]
        is_swapped = own > 1 and first.ndim == own + 1 and all(batch == first.shape[1:2] for batch in batches)
        hint = batch_first_hint(name, is_swapped)
        raise ValueError(f"the batch dimensions of tensors and lengths must broadcast, got {got}{hint}") from None
    return shape


def _expand(tensor: Tensor, batch: torch.Size, dims: int) -> Tensor:
    """Expand a tensor to (*batch, *own), without a node in the autograd graph if it has this shape already."""
    shape = batch + tensor.shape[tensor.ndim - dims :]
    return tensor if tensor.shape == shape else tensor.expand(shape)


def read_lengths(
    name: str, scores: tuple[Tensor, int], lengths: Any | None, least: tuple[int, int], most: tuple[int, int]
) -> Any:
    """The pair (rows, columns) as int64 tensors, each within its bounds; None for None.

    ``scores`` is a tensor and its number of event dimensions. If it looks time-first, the error has a hint.
    """
    if lengths is None:
        return None
    tensor, dims = scores
    pair = tuple(as_lengths(f"lengths[{n}]", part, tensor.device) for n, part in enumerate(as_pair(lengths)))
    for n, own in enumerate(pair):
        if is_checked(own) and own.numel():
            is_swapped = n == 0 and tensor.ndim == dims + 1 and own.numel() in (1, most[0])
            hint = batch_first_hint(name, is_swapped and int(own.max()) <= len(tensor))
            check_lengths(f"lengths[{n}]", own.reshape(-1), least[n], most[n], hint)
    return pair


def check_labels(name: str, labels: Tensor, length: Tensor | None, classes: int) -> None:
    """Raise a ValueError for a label (..., L) within its length that is none of the classes."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.ndim < 1:
        raise ValueError(f"{name} must hold integers (..., L), got {labels.dtype} of shape {tuple(labels.shape)}")
    if not is_checked(labels):
        return
    within = torch.arange(labels.shape[-1]) < (labels.shape[-1] if length is None else length.unsqueeze(-1))
    bad = ((labels < 0) | (labels >= classes)) & within
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        found = int(labels.expand(bad.shape)[place])
        raise ValueError(f"{name} must hold labels from 0 to {classes - 1}, got {found} at {place}")
