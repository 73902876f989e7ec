"""Alignments of two sequences with gaps: Needleman and Wunsch, Smith and Waterman, Gotoh, under any Ω."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.inputs import Lengths, answers_near_misses, check_choice, check_tensor
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    LatticeTargets,
    Move,
    anywhere,
    cell,
    check_labels,
    column,
    common_batch,
    corner,
    pair,
    read_lengths,
    row,
    scalar,
)
from bellmax.tensors import Gamma, inner, promote_half, widen
from bellmax.transforms import is_readable

Gap = float | Tensor
Gaps = tuple[Gap, Gap]

MODES = ("global", "local", "semiglobal")
_MATCH, _ROW, _COLUMN = range(3)  # states: a pair, a row without a partner, a column without one
_MOVES = ((0, 3, 5), (1, 4, 6), (2, -1, 7))  # [from, to], by the order of the table


def _declare(mode: str, by_row: bool, by_column: bool, by_labels: bool) -> Lattice:
    """No move leads from a column without a partner to such a row: an alignment is one path.

    On N + 1 rows and M + 1 columns, which count what has been read, or for local ones on N rows and M columns.
    """
    off = 0 if mode == "local" else -1
    score = cell("scores", off, off)
    match = score + pair("matrix", "a", "b", off, off) if by_labels else score
    gap = scalar("gap_open"), scalar("gap_extend")
    row_open, row_extend = (row("row_open", off), row("row_extend", off)) if by_row else gap
    column_open, column_extend = (column("column_open", off), column("column_extend", off)) if by_column else gap
    is_free = mode == "semiglobal"
    across = column("_inner_columns") if is_free else None
    along = row("_inner_rows") if is_free else None
    moves = [
        Move(1, 1, (_MATCH, _ROW, _COLUMN), _MATCH),
        Move(1, 0, _MATCH, _ROW, row_open, across),
        Move(1, 0, _ROW, _ROW, row_extend, across),
        Move(0, 1, (_MATCH, _ROW), _COLUMN, column_open, along),
        Move(0, 1, _COLUMN, _COLUMN, column_extend, along),
    ]
    if mode == "global":
        start, end = corner(_MATCH), corner(_MATCH, _ROW, _COLUMN)
    elif mode == "local":
        start = end = anywhere(_MATCH)
    else:
        start = anywhere({_MATCH: cell("_not_first", -1, -1)})
        end = anywhere({state: cell("_not_last") for state in (_MATCH, _ROW, _COLUMN)})
    return Lattice(moves, states=3, node={_MATCH: match}, start=start, end=end)


# By mode, and whether gaps are by row, by column, and scores by letters.
_LATTICES = {
    (mode, *given): _declare(mode, *given)
    for mode in MODES
    for given in product((False, True), (False, True), (False, True))
}


class AlignmentTargets(LatticeTargets):
    """Targets of an alignment: pairs (..., N, M)."""

    def restricted_value(self, allowed: Tensor) -> Tensor:
        """DP_Ω over one alignment if the allowed pairs are one, else over all alignments within them."""
        p = cast("Alignment", self.p)
        path = allowed.to(torch.promote_types(p.dtype, torch.float32))
        is_path = p._is_path(path)
        fine = self.solver.expanded()
        edges = p._edges_of_walk(p._walk_of(torch.where(is_path[..., None, None], path, 0), is_path))
        score = widen(inner(edges, promote_half(fine.edge_weights()), 1))
        batch = self.solver.batch
        has_sink = p._program.has_sink(batch.unscaled(self.solver.detached()), batch.index).reshape(self.batch_shape)
        alone = self.value_of_one_path(score, edges.sum(-1) - 1 + has_sink.long())
        if is_readable(is_path) and bool(is_path.all()):
            return alone
        return torch.where(is_path, alone, super().restricted_value(allowed))


class Alignment(LatticePaths):
    """A distribution over the alignments of two sequences of N and M elements, given the score of each pair.

    An alignment pairs elements in order; the others stand in gaps. It scores Σ ``scores`` over its pairs, and for each
    gap of L elements ``gap_open`` + (L − 1) · ``gap_extend``, as in parasail and Biopython. (BLAST's costs of existence
    e and extension x are ``gap_open=-(e + x)``, ``gap_extend=-x``.) Where a gap of rows meets one of columns, the rows
    come first, so that an alignment is one path. As an event it is the 0/1 tensor (N, M) of its pairs, and
    ``expected_path`` (..., N, M) the probability that two elements are a pair, differentiable.

    Under :class:`SquaredL2` every element of a path adds −γ/2, which favours few gaps; ``"sparsemax"`` is the same
    without that.

    Args:
        scores: (..., N, M); −∞ forbids a pair.
        gap_open: Score of the first element of a gap, a number ≤ 0 or a tensor that broadcasts to the batch shape. It
            is added, so a penalty is negative. A tensor, which may be learnt, may be positive.
        gap_extend: Score of each additional gap element, a number ≤ 0 or a tensor.
        row_gaps: (open, extend) by row: each a number or (..., N), the score of row i as the first or as a further
            element of a gap. Instead of ``gap_open`` and ``gap_extend`` for gaps of rows.
        column_gaps: the same by column, each a number or (..., M).
        mode: "global" for all of both sequences; "local" for the best part of each, from a first pair to a last one;
            "semiglobal" for all of both, where rows or columns before the start and behind the end cost nothing. Where
            both sequences have some there, one of them is paid for; these alignments are more than one path.
        lengths: (rows, columns), each integers of the batch shape or a number. The rest is padding: it is ignored, may
            hold NaN and gets no gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    A local alignment has at least one pair, even where no score is positive. ``gradient`` has the expected number of
    uses of each score: "scores", "matrix", "gap_open", "gap_extend", "row_open", "row_extend", "column_open",
    "column_extend", as far as they were given.

    >>> import bellmax as bx
    >>> a, b = "GATTACA", "GCATGCA"
    >>> same = torch.tensor([[float(x == y) for y in b] for x in a])
    >>> p = bx.Alignment(2 * same - 1, gap_open=-1.0, gap_extend=-0.5)
    >>> pairs = p.best_alignment().tolist()
    >>> for side, text in enumerate((a, b)):
    ...     print("".join("-" if row[side] < 0 else text[row[side]] for row in pairs if max(row) >= 0))
    G-ATTACA
    GCA-TGCA
    >>> p.expected_path.diagonal()[:3]
    tensor([0.8150, 0.1617, 0.0968])
    """

    _target_kind = AlignmentTargets
    _mode: str

    @answers_near_misses
    def __init__(
        self,
        scores: Tensor,
        *,
        gap_open: Gap = -11.0,
        gap_extend: Gap = -1.0,
        row_gaps: Gaps | None = None,
        column_gaps: Gaps | None = None,
        mode: str = "global",
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("scores", scores).shape
        if len(shape) < 2 or 0 in shape[-2:]:
            raise ValueError(f"scores must have shape (..., N, M) with N, M >= 1, got {tuple(shape)}")
        gaps = gap_open, gap_extend, row_gaps, column_gaps
        self._align({"scores": scores}, mode, gaps, lengths, omega, gamma)

    @classmethod
    @answers_near_misses
    def from_sequences(
        cls,
        matrix: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        gap_open: Gap = -11.0,
        gap_extend: Gap = -1.0,
        row_gaps: Gaps | None = None,
        column_gaps: Gaps | None = None,
        mode: str = "global",
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Alignment:
        """Alignments of sequences a (..., N) and b (..., M) of letters, given the score of each pair of letters.

        Args:
            matrix: (A, A), or (..., A, A), [letter of a, letter of b]: BLOSUM62, or learnt. Gradients reach it, and
                ``p.gradient["matrix"]`` is the expected number of each pair of letters.
            a: integers from 0 to A − 1; past its length anything.
            b: the same.
            gap_open: as in :class:`Alignment`, like the other arguments.
            gap_extend: see there.
            row_gaps: see there.
            column_gaps: see there.
            mode: see there.
            lengths: see there.
            omega: see there.
            gamma: see there.

        Events, ``expected_path`` and ``gradient["scores"]`` are (..., N, M) as for scores of pairs.

        >>> import bellmax as bx
        >>> p = bx.Alignment.from_sequences(torch.eye(4), torch.tensor([0, 2, 3]), torch.tensor([0, 3]), gap_open=-1.0)
        >>> p.best_path()
        tensor([[1., 0.],
                [0., 0.],
                [0., 1.]])
        """
        if check_tensor("matrix", matrix).ndim < 2 or 0 in matrix.shape[-2:]:
            raise ValueError(f"matrix must have shape (..., A, A), got {tuple(matrix.shape)}")
        for name, labels in (("a", a), ("b", b)):
            if check_tensor(name, labels).ndim < 1 or not labels.shape[-1]:
                raise ValueError(f"{name} must have shape (..., L) with L >= 1, got {tuple(labels.shape)}")
        batch = common_batch({"matrix": (matrix, 2), "a": (a, 1), "b": (b, 1)})
        p = object.__new__(cls)
        scores = matrix.new_zeros(()).expand(*batch, a.shape[-1], b.shape[-1])
        tensors = {"scores": scores, "matrix": matrix, "a": a, "b": b}
        p._align(tensors, mode, (gap_open, gap_extend, row_gaps, column_gaps), lengths, omega, gamma)
        return p

    def _align(
        self,
        tensors: dict[str, Any],
        mode: str,
        gaps: tuple[Gap, Gap, Gaps | None, Gaps | None],
        lengths: Any | None,
        omega: str | Regularizer,
        gamma: Gamma | None,
    ) -> None:
        check_choice("mode", mode, MODES)
        self._mode = mode
        scores = tensors["scores"]
        rows, columns = scores.shape[-2:]
        own = read_lengths("scores", (scores, 2), lengths, (1, 1) if mode == "local" else (0, 0), (rows, columns))
        common_batch({"scores": (scores, 2)} | {f"lengths[{n}]": (part, 0) for n, part in enumerate(own or ())})
        if "matrix" in tensors:
            for side, name in enumerate("ab"):
                of_side = None if own is None else own[side]
                check_labels(name, tensors[name], of_side, tensors["matrix"].shape[side - 2])
        tensors |= _read_gaps(gaps, scores)
        if mode == "semiglobal":
            tensors |= _borders(scores, own)
        lattice = _LATTICES[mode, gaps[2] is not None, gaps[3] is not None, "matrix" in tensors]
        counted = own if own is None or mode == "local" else (own[0] + 1, own[1] + 1)
        super().__init__(lattice, tensors, lengths=counted, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """(..., 2) int64: how many rows and columns of each pair are aligned."""
        return self._lengths if self._mode == "local" else self._lengths - 1

    # --- alignments

    def best_alignment(self) -> Tensor:
        """The pairs (i, j) of the best alignment in order, (..., N + M, 2) int64.

        −1 in one place stands for a gap, and (−1, −1) is padding. What a local or semi-global alignment leaves out
        before its start and behind its end is not listed.
        """
        return self._pairs_of(self.best_walk())

    def sample_alignments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Alignments drawn from the distribution, (*sample_shape, ..., N + M, 2), as in :meth:`best_alignment`."""
        return self._pairs_of(self.sample_walks(sample_shape))

    def _pairs_of(self, walks: Tensor) -> Tensor:
        most = sum(self.event_shape)
        off = 0 if self._mode == "local" else 1  # the first node is the start, before any element
        walks = walks[..., off : most + off, :]
        i, j, state, _ = pad(walks, (0, 0, 0, most - walks.shape[-2]), value=-1).unbind(-1)
        return torch.stack(
            (
                torch.where((i < 0) | (state == _COLUMN), -1, i - off),
                torch.where((i < 0) | (state == _ROW), -1, j - off),
            ),
            -1,
        )

    def _edges_of(self, path: Tensor) -> Tensor:
        """Take the pairs of an alignment, a 0/1 tensor (..., N, M), or a walk, int64 (..., L, 4).

        A semi-global alignment must begin in the first row or column and end in the last: other pairs do not say which
        of its elements are free.
        """
        if check_tensor("path", path).is_floating_point():
            path = self._walk_of(self._check_path(path))
        return super()._edges_of(path)

    def _walk_of(self, path: Tensor, is_path: Tensor | None = None) -> Tensor:
        """The walk (..., L, 4) of pairs (..., N, M) that are an alignment; any where ``is_path`` denies it."""
        order, state, exists, last = self._elements(path)
        first = torch.zeros((*order.shape[:-1], 2), dtype=torch.int64, device=self.device)
        if self._mode != "global":
            before, after = exists & (order < 2), exists & (order >= 3 * last)
            if self._mode == "semiglobal":
                self._check_free(before, after, is_path)
            first = torch.stack([(before & (state == kind)).sum(-1) for kind in (_ROW, _COLUMN)], -1)
            exists = exists & ~before & ~after
        place = torch.where(exists, order, 3 * order.shape[-1]).argsort(dim=-1, stable=True)
        state, exists = state.gather(-1, place), exists.gather(-1, place)
        i, j = ((exists & (state != other)).cumsum(-1) + first[..., n, None] for n, other in enumerate((_COLUMN, _ROW)))
        came_from = torch.cat((torch.full_like(state[..., :1], _MATCH), state[..., :-1]), -1)
        move = torch.tensor(_MOVES, device=self.device)[came_from, state]
        walk = torch.where(exists.unsqueeze(-1), torch.stack((i, j, state, move), -1), -1)
        if self._mode != "local":
            return torch.cat((pad(pad(first, (0, 1), value=_MATCH), (0, 1), value=-1).unsqueeze(-2), walk), -2)
        i, j, state, move = walk.unbind(-1)
        is_first = torch.arange(walk.shape[-2], device=self.device) == 0
        return torch.stack(((i - 1).clamp(min=-1), (j - 1).clamp(min=-1), state, move.masked_fill(is_first, -1)), -1)

    def _elements(self, path: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the rows and then the columns (..., N + M): their order in the alignment, 3 · (pairs before) + 0 for a row
        without a partner, 1 for such a column, 2 for a pair; their states; whether they exist; and how many pairs
        there are. A pair is listed by its row."""
        batch = torch.broadcast_shapes(path.shape[:-2], self.batch_shape)
        matched = path.expand(batch + self.event_shape) > 0
        of_row, of_column = matched.any(-1), matched.any(-2)
        before_row, before_column = (m.cumsum(-1) - m.long() for m in (of_row, of_column))
        order = torch.cat((3 * before_row + 2 * of_row.long(), 3 * before_column + 1), -1)
        state = torch.cat((torch.where(of_row, _MATCH, _ROW), torch.full_like(before_column, _COLUMN)), -1)
        rows, columns = (
            torch.arange(size, device=self.device) < own.unsqueeze(-1)
            for size, own in zip(self.event_shape, self.lengths.expand(*batch, 2).unbind(-1), strict=True)
        )
        return order, state, torch.cat((rows, columns & ~of_column), -1), of_row.sum(-1, keepdim=True)

    def _check_free(self, before: Tensor, after: Tensor, is_path: Tensor | None) -> None:
        rows = self.event_shape[0]
        for part in (before, after):
            both = part[..., :rows].any(-1) & part[..., rows:].any(-1)
            both = both if is_path is None else both & is_path
            if is_readable(both) and bool(both.any()):
                raise ValueError(
                    "path must begin in the first row or column and end in the last, since other pairs do not tell "
                    "which elements are free; for the log-probability of a sample, pass a walk from sample_walks()"
                )


def _read_gaps(gaps: tuple[Gap, Gap, Gaps | None, Gaps | None], scores: Tensor) -> dict[str, Any]:
    """The gap scores by name; each is checked against the batch shape, or the batch shape with the positions."""
    found: dict[str, Any] = {}
    opening, extending, *by_position = gaps
    batch = scores.shape[:-2]
    if None in by_position:
        for name, given in (("gap_open", opening), ("gap_extend", extending)):
            advice = "row_gaps and column_gaps take a score for each position"
            _check_gap(name, given, batch, f"a number or broadcast to the batch shape {tuple(batch)}; {advice}")
            found[name] = given
    for side, size, of_side in zip(("row", "column"), scores.shape[-2:], by_position, strict=True):
        if of_side is None:
            continue
        if not isinstance(of_side, tuple | list) or len(of_side) != 2:
            raise ValueError(f"{side}_gaps must be a pair (open, extend), got {type(of_side).__name__}")
        for name, given in zip(("open", "extend"), of_side, strict=True):
            needed = (*batch, size)
            message = f"a number or broadcast to {needed}"
            _check_gap(f"{side}_gaps, {name},", given, torch.Size(needed), message, size)
            is_number = not isinstance(given, Tensor)
            found[f"{side}_{name}"] = scores.new_full((size,), float(given)) if is_number else given
    return found


def _check_gap(name: str, given: Gap, shape: torch.Size, needed: str, size: int | None = None) -> None:
    if isinstance(given, int | float):
        if given > 0:
            hint = f"gap scores are added, so penalties are negative: pass {-given}"
            raise ValueError(f"{name} must not be positive, got {given}: {hint}. A tensor may be positive")
        return
    got = check_tensor(name, given).shape
    try:
        fits = torch.broadcast_shapes(got, shape) == shape
    except RuntimeError:
        fits = False
    if not fits or (size is not None and got[-1:] != (size,)):
        raise ValueError(f"{name} must be {needed}, got shape {tuple(got)}")


def _borders(scores: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Mapping[str, Tensor]:
    """Where semi-global alignments start and end, and where gaps are: not along the border, which is free."""
    sizes, device = scores.shape[-2:], scores.device
    own = [torch.tensor(n, device=device) for n in sizes] if lengths is None else lengths
    at = [torch.arange(n + 1, device=device) for n in sizes]
    before = [a < n.unsqueeze(-1) for a, n in zip(at, own, strict=True)]
    inner_rows, inner_columns = (b & (a > 0) for a, b in zip(at, before, strict=True))
    both = before[0][..., :-1].unsqueeze(-1) & before[1][..., :-1].unsqueeze(-2)
    closed = scores.new_zeros(()).expand(both.shape).masked_fill(both, -math.inf)
    return {
        "_not_first": scores.new_full((), -math.inf).expand(sizes),
        "_not_last": closed,
        "_inner_rows": inner_rows,
        "_inner_columns": inner_columns,
    }
