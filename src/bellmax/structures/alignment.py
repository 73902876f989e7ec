"""Alignments of two sequences with affine gaps (Needleman–Wunsch, Smith–Waterman, Gotoh) under any Ω."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import EdgePaths, Fault
from bellmax.inputs import Lengths, answers_near_misses, check_choice, check_tensor
from bellmax.modes import is_readable
from bellmax.programs.checks import subscript
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    LatticeTargets,
    Move,
    WalkForm,
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
from bellmax.targets import PathTargets
from bellmax.tensors import Gamma

Gap = float | Tensor
Gaps = tuple[Gap, Gap]

MODES = ("global", "local", "semiglobal")
_MATCH, _ROW, _COLUMN = range(3)  # states: a pair, a row in a gap, a column in a gap
_MOVES = ((0, 3, 5), (1, 4, 6), (2, -1, 7))  # index of the move [from state, to state] in the lattice


def _declare(mode: str, by_row: bool, by_column: bool, by_labels: bool) -> Lattice:
    """Return the lattice of a mode, with gap scores by row or by column, and pair scores by labels, if True.

    The lattice of global and semiglobal alignments has N + 1 rows and M + 1 columns: node (i, j) has read i rows and j
    columns. The lattice of local alignments has N rows and M columns. No move leads from a column in a gap to a row in
    a gap, so each alignment is one path.
    """
    offset = 0 if mode == "local" else -1
    score = cell("scores", offset, offset)
    match = score + pair("matrix", "a", "b", offset, offset) if by_labels else score
    gap = scalar("gap_open"), scalar("gap_extend")
    row_open, row_extend = (row("row_open", offset), row("row_extend", offset)) if by_row else gap
    column_open, column_extend = gap
    if by_column:
        column_open, column_extend = column("column_open", offset), column("column_extend", offset)
    has_free_ends = mode == "semiglobal"
    is_inner_column = column("_inner_columns") if has_free_ends else None
    is_inner_row = row("_inner_rows") if has_free_ends else None
    moves = [
        Move(1, 1, (_MATCH, _ROW, _COLUMN), _MATCH),
        Move(1, 0, _MATCH, _ROW, row_open, is_inner_column),
        Move(1, 0, _ROW, _ROW, row_extend, is_inner_column),
        Move(0, 1, (_MATCH, _ROW), _COLUMN, column_open, is_inner_row),
        Move(0, 1, _COLUMN, _COLUMN, column_extend, is_inner_row),
    ]
    if mode == "global":
        start, end = corner(_MATCH), corner(_MATCH, _ROW, _COLUMN)
    elif mode == "local":
        start = end = anywhere(_MATCH)
    else:
        start = anywhere({_MATCH: cell("_not_first", -1, -1)})
        end = anywhere({state: cell("_not_last") for state in (_MATCH, _ROW, _COLUMN)})
    return Lattice(moves, states=3, node={_MATCH: match}, start=start, end=end)


# The keys are the arguments of _declare.
_LATTICES = {
    (mode, *options): _declare(mode, *options)
    for mode in MODES
    for options in product((False, True), (False, True), (False, True))
}


class AlignmentTargets(LatticeTargets):
    """Targets of an alignment: pairs (..., N, M)."""

    def restricted_value(self, allowed: Tensor) -> Tensor:
        """DP_Ω over one alignment if the allowed pairs are one, else over all alignments within them."""
        p = cast("SequenceAlignment", self.p)
        path = allowed.to(torch.promote_types(p.dtype, torch.float32))
        is_path = p._is_path(path)
        walks = p._walk_of(torch.where(is_path[..., None, None], path, 0), is_path)
        alone = PathTargets(p, walks, p._form.edges(walks)).restricted_value(allowed)
        if is_readable(is_path) and bool(is_path.all()):
            return alone
        return torch.where(is_path, alone, super().restricted_value(allowed))

    def edges_within(self, allowed: Tensor) -> Tensor:
        """True at the edges of one alignment if the allowed pairs are one, else at all edges within them."""
        p = cast("SequenceAlignment", self.p)
        path = allowed.to(torch.promote_types(p.dtype, torch.float32))
        is_path = p._is_path(path)
        walks = p._walk_of(torch.where(is_path[..., None, None], path, 0), is_path)
        counts = p._form.edges(walks).counts(self.solver.edge_shape.numel())
        return torch.where(is_path.unsqueeze(-1), counts > 0, super().edges_within(allowed))


class AlignmentForm(WalkForm):
    """Pairs (..., L, 2) int64, see :meth:`SequenceAlignment.best_alignment`. Walks (..., L, 4) are taken as well."""

    p: SequenceAlignment
    is_walk = False

    @property
    def own_shape(self) -> Sequence[int | str]:
        return "L", 4 if self.is_walk else 2

    def read(self, name: str, decoded: Any) -> Tensor:
        self.is_walk = isinstance(decoded, Tensor) and decoded.shape[-1:] == (4,)
        return super().read(name, decoded)

    def of_walks(self, walks: Tensor) -> Tensor:
        return self.p._pairs_of(walks)

    def edges_of_compact(self, paths: Tensor) -> EdgePaths:
        return self.edges(self.p._walks_of(paths))  # pairs may not determine the path

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        if decoded.shape[-1] == 4:
            return super().nodes(decoded)
        has_row, has_column = (decoded >= 0).unbind(-1)
        exists = has_row | has_column
        start = self._start(decoded, has_row, has_column)
        uses = torch.stack((has_row, has_column), -1)
        cells = start.unsqueeze(-2) + uses.cumsum(-2)
        may_be_path = ((decoded == cells - 1) | ~uses).flatten(-2).all(-1) & (decoded >= -1).flatten(-2).all(-1)
        state = torch.where(has_row, torch.where(has_column, _MATCH, _ROW), _COLUMN)
        i, j = (cells - 1 if self.p._mode == "local" else cells).masked_fill(~exists.unsqueeze(-1), -1).unbind(-1)
        if self.p._mode != "local":
            i, j = (torch.cat((start[..., n, None], cell), -1) for n, cell in enumerate((i, j)))
            state = pad(state, (1, 0), value=_MATCH)
        nodes, is_inside = self.number(i, j, state)
        return nodes, is_inside & may_be_path

    def _start(self, pairs: Tensor, has_row: Tensor, has_column: Tensor) -> Tensor:
        """Return the numbers of rows and columns before the first element of pairs (..., L, 2), (..., 2) int64.

        If a semiglobal alignment lists no row or no column, several paths have these pairs. It is one of them.
        """
        zeros = pairs.new_zeros((*pairs.shape[:-2], 2))
        if self.p._mode == "global" or not pairs.shape[-2]:
            return zeros
        lists_row, lists_column = has_row.any(-1), has_column.any(-1)
        at = torch.stack([mask.long().argmax(-1) for mask in (has_row, has_column)], -1).unsqueeze(-2)
        first = pairs.gather(-2, at).squeeze(-2)
        row = torch.where(lists_row, first[..., 0], torch.where(lists_column, 1, self.p.lengths[..., 0]))
        return torch.stack((row, torch.where(lists_column, first[..., 1], lists_row.long())), -1)

    def check_unique(self, name: str, decoded: Tensor) -> None:
        if decoded.shape[-1] == 2 and self.p._mode == "semiglobal" and is_readable(decoded):
            is_ambiguous = ~(decoded >= 0).any(-2).all(-1)
            if bool(is_ambiguous.any()):
                first = subscript(is_ambiguous.nonzero()[0].tolist())
                raise ValueError(
                    f"{name}{first} must list a row and a column: other pairs do not determine where the alignment "
                    "is. Pass a walk from sample_walks()"
                )

    def fault(self, decoded: Tensor) -> Fault:
        rows, columns = self.p.lengths.tolist()
        order = "elements must be in order, rows of a gap before columns"
        return Fault((), f"is not a {self.p._mode} alignment of {rows} rows and {columns} columns: {order}")


class SequenceAlignment(LatticePaths):
    """A distribution over sequence alignments with affine gaps, as in Needleman–Wunsch, Smith–Waterman and Gotoh.

    An alignment pairs elements of two sequences in order. Elements without a partner are in gaps. The score of an
    alignment is the sum of ``scores`` over its pairs, plus a score for each gap. A gap of L elements has the score
    ``gap_open`` + (L − 1) · ``gap_extend``, as in parasail and Biopython. BLAST instead has an existence cost e and an
    extension cost x. To use its costs, pass ``gap_open=-(e + x)`` and ``gap_extend=-x``.

    The event of an alignment is the 0/1 tensor (N, M) of its pairs. Its decoded form is index pairs (..., L, 2). For an
    element in a gap, the other index of the pair is −1. See :meth:`best_alignment`. ``expected_path`` (..., N, M) is
    the probability of each pair. It is differentiable.

    A gap of rows contains elements of the first sequence, and a gap of columns contains elements of the second
    sequence. If a gap of rows and a gap of columns are adjacent, the gap of rows must come first. Because of this rule,
    no global or local alignment is counted twice.

    If you want a sparse Ω, prefer "sparsemax" to "l2". Under "l2", each pair and each element in a gap lowers the score
    of an alignment, which favors alignments with few elements in gaps.

    Args:
        scores: The score (..., N, M) of each pair. −∞ forbids a pair.
        gap_open: Score of the first element of a gap, default −11. The score is added, so a penalty is negative. Pass a
            number ≤ 0, or a tensor that broadcasts to the batch shape. A tensor can be learned, and its values may be
            positive.
        gap_extend: Score of each further element of a gap, default −1. Pass a number ≤ 0 or a tensor, as for
            ``gap_open``.
        row_gaps: A pair (open, extend) of scores that replaces ``gap_open`` and ``gap_extend`` in gaps of rows. Each of
            the two is a number or a tensor (..., N). ``open[i]`` is the score of row i as the first element of a gap.
            ``extend[i]`` is the score of row i as a further element of a gap.
        column_gaps: A pair (open, extend) of scores for gaps of columns, as ``row_gaps``. Each of the two is a number
            or a tensor (..., M).
        mode: "global" (the default) aligns all of both sequences. "local" aligns one section of each sequence. Both
            sections begin and end with a pair. "semiglobal" aligns all of both sequences, but a gap at the beginning or
            at the end has score 0. If both sequences have a gap at the same end, only one of these two gaps has score
            0. Such an alignment is counted more than once, since either gap can be the one with score 0.
        lengths: A pair (lengths of the first sequences, lengths of the second sequences). Each of the two is a tensor
            of integers with the batch shape, or one number. By default N and M. Entries beyond the lengths are padding:
            they are ignored, may contain NaN and get no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    A local alignment has at least one pair, even if no score is positive. ``gradient`` is a mapping with one tensor for
    each score that the program uses. For each entry of the score, the tensor contains the expected number of times that
    an alignment uses this entry. The keys of the mapping are some of "scores", "matrix", "gap_open", "gap_extend",
    "row_open", "row_extend", "column_open" and "column_extend".

    >>> import bellmax as bx
    >>> a, b = "GATTACA", "GCATGCA"
    >>> same = torch.tensor([[float(x == y) for y in b] for x in a])
    >>> p = bx.SequenceAlignment(2 * same - 1, gap_open=-1.0, gap_extend=-0.5)
    >>> pairs = p.best_alignment().tolist()
    >>> for side, text in enumerate((a, b)):
    ...     print("".join("-" if row[side] < 0 else text[row[side]] for row in pairs if max(row) >= 0))
    G-ATTACA
    GCA-TGCA
    >>> p.expected_path.diagonal()[:3]
    tensor([0.8150, 0.1617, 0.0968])
    """

    _target_kind = AlignmentTargets
    _form_kind = AlignmentForm
    _size_argument = "lengths"
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
    ) -> SequenceAlignment:
        """Return the distribution over alignments of two sequences of letters, scored by a substitution matrix.

        Events, ``expected_path`` and ``gradient["scores"]`` have shape (..., N, M).

        Args:
            matrix: The substitution matrix (A, A) or (..., A, A) ``[letter of a, letter of b]``, such as BLOSUM62. It
                can be learned. If ``p`` is the result, ``p.gradient["matrix"]`` is the expected number of times that
                each pair of letters is aligned.
            a: The first sequence (..., N), integers from 0 to A − 1. The values in the padding are ignored.
            b: The second sequence (..., M), integers from 0 to A − 1. The values in the padding are ignored.
            gap_open: Score of the first element of a gap, default −11.
            gap_extend: Score of each additional gap element, default −1.
            row_gaps: A pair (open, extend) of scores for gaps of rows, as in :class:`SequenceAlignment`.
            column_gaps: A pair (open, extend) of scores for gaps of columns, as in :class:`SequenceAlignment`.
            mode: "global" (the default), "local" or "semiglobal", as in :class:`SequenceAlignment`.
            lengths: A pair (rows, columns) of integers, each of the batch shape or one number. By default N and M.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        >>> import bellmax as bx
        >>> a, b = torch.tensor([0, 2, 3]), torch.tensor([0, 3])
        >>> p = bx.SequenceAlignment.from_sequences(torch.eye(4), a, b, gap_open=-1.0)
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
        """Initialize from the scores by name, for both constructors. The gap scores are in the constructors' order."""
        check_choice("mode", mode, MODES)
        self._mode = mode
        scores = tensors["scores"]
        rows, columns = scores.shape[-2:]
        minimum = (1, 1) if mode == "local" else (0, 0)
        sizes = read_lengths("scores", (scores, 2), lengths, minimum, (rows, columns))
        common_batch({"scores": (scores, 2)} | {f"lengths[{n}]": (size, 0) for n, size in enumerate(sizes or ())})
        if "matrix" in tensors:
            for side, name in enumerate("ab"):
                size = None if sizes is None else sizes[side]
                check_labels(name, tensors[name], size, tensors["matrix"].shape[side - 2])
        tensors |= _read_gaps(gaps, scores)
        if mode == "semiglobal":
            tensors |= _free_end_tensors(scores, sizes)
        lattice = _LATTICES[mode, gaps[2] is not None, gaps[3] is not None, "matrix" in tensors]
        node_counts = sizes if sizes is None or mode == "local" else (sizes[0] + 1, sizes[1] + 1)
        super().__init__(lattice, tensors, grid=node_counts, omega=omega, gamma=gamma)

    def __repr__(self) -> str:
        rows, columns = self.event_shape
        sizes = f"batch_shape={tuple(self.batch_shape)}, rows={rows}, columns={columns}"
        return f"SequenceAlignment({sizes}, mode={self._mode!r}, omega={self.omega})"

    @property
    def lengths(self) -> Tensor:
        """The lengths of both sequences of each pair, (..., 2) int64."""
        return self._lengths if self._mode == "local" else self._lengths - 1

    # --- alignments

    def best_alignment(self) -> Tensor:
        """Return the index pairs (i, j) of the best alignment in order, (..., N + M, 2) int64.

        :meth:`decode` returns the same tensor.

        If one index of a pair is −1, the element at the other index is in a gap. (−1, −1) is padding. In the mode
        "local", elements outside the aligned sections are not listed. In the mode "semiglobal", the gaps with score 0
        at the ends are not listed.
        """
        return self.decode()

    def sample_alignments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random alignments as index pairs, (*sample_shape, ..., N + M, 2) int64, padded with −1."""
        return self.sample_decoded(sample_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability of each pair, (..., N, M). Differentiable."""
        return self.expected_path

    @property
    def _form(self) -> AlignmentForm:
        return AlignmentForm(self)

    def _pairs_of(self, walks: Tensor) -> Tensor:
        """Convert walks (..., L, 4) of the lattice to pairs (..., N + M, 2), see :meth:`best_alignment`."""
        max_pairs = sum(self.event_shape)
        offset = 0 if self._mode == "local" else 1  # the first node is the start, before any element
        walks = walks[..., offset : max_pairs + offset, :]
        i, j, state, _ = pad(walks, (0, 0, 0, max_pairs - walks.shape[-2]), value=-1).unbind(-1)
        i, j = (
            torch.where((i < 0) | (state == _COLUMN), -1, i - offset),
            torch.where((i < 0) | (state == _ROW), -1, j - offset),
        )
        return torch.stack((i, j), -1)

    def _edges_of(self, path: Tensor) -> Tensor:
        """Take the pairs of an alignment, a 0/1 tensor (..., N, M).

        A semi-global alignment must begin in the first row or column and end in the last: other pairs do not say which
        of its elements are free.
        """
        event = self._check_path(path)
        walks = self._walk_of(event)
        edges = self._form.edges(walks)
        return edges.counts(self._solver.edge_shape.numel()).to(event.dtype)

    def _walk_of(self, path: Tensor, is_path: Tensor | None = None) -> Tensor:
        """Convert pairs (..., N, M) to walks (..., L, 4) int64 of the lattice: row, column, state and move.

        If ``is_path`` is False for a batch element, its walk is unspecified.
        """
        order, state, exists, num_pairs = self._elements(path)
        start = torch.zeros((*order.shape[:-1], 2), dtype=torch.int64, device=self.device)
        if self._mode != "global":
            is_before, is_after = exists & (order < 2), exists & (order >= 3 * num_pairs)
            if self._mode == "semiglobal":
                self._check_free_ends(is_before, is_after, is_path)
            start = torch.stack([(is_before & (state == gap)).sum(-1) for gap in (_ROW, _COLUMN)], -1)
            exists = exists & ~is_before & ~is_after
        by_order = torch.where(exists, order, 3 * order.shape[-1]).argsort(dim=-1, stable=True)
        state, exists = state.gather(-1, by_order), exists.gather(-1, by_order)
        i = (exists & (state != _COLUMN)).cumsum(-1) + start[..., 0, None]
        j = (exists & (state != _ROW)).cumsum(-1) + start[..., 1, None]
        previous_state = torch.cat((torch.full_like(state[..., :1], _MATCH), state[..., :-1]), -1)
        move = torch.tensor(_MOVES, device=self.device)[previous_state, state]
        walk = torch.where(exists.unsqueeze(-1), torch.stack((i, j, state, move), -1), -1)
        if self._mode != "local":
            return torch.cat((pad(pad(start, (0, 1), value=_MATCH), (0, 1), value=-1).unsqueeze(-2), walk), -2)
        i, j, state, move = walk.unbind(-1)
        is_first = torch.arange(walk.shape[-2], device=self.device) == 0
        return torch.stack(((i - 1).clamp(min=-1), (j - 1).clamp(min=-1), state, move.masked_fill(is_first, -1)), -1)

    def _elements(self, path: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the elements of alignments (..., N, M): first the rows, then the columns, (..., N + M).

        Returns:
            order: The sort key of each element: 3 · (number of pairs before it), plus 0 for a row in a gap, 1 for a
                column in a gap, 2 for a pair.
            state: The state of each element.
            exists: False for padding, and for the column of a pair, since its row stands for the pair.
            num_pairs: The number of pairs, (..., 1).

        """
        batch = torch.broadcast_shapes(path.shape[:-2], self.batch_shape)
        is_pair = path.expand(batch + self.event_shape) > 0
        row_has_pair, column_has_pair = is_pair.any(-1), is_pair.any(-2)
        pairs_before_row, pairs_before_column = (m.cumsum(-1) - m.long() for m in (row_has_pair, column_has_pair))
        order = torch.cat((3 * pairs_before_row + 2 * row_has_pair.long(), 3 * pairs_before_column + 1), -1)
        state = torch.cat((torch.where(row_has_pair, _MATCH, _ROW), torch.full_like(pairs_before_column, _COLUMN)), -1)
        is_row, is_column = (
            torch.arange(size, device=self.device) < length.unsqueeze(-1)
            for size, length in zip(self.event_shape, self.lengths.expand(*batch, 2).unbind(-1), strict=True)
        )
        exists = torch.cat((is_row, is_column & ~column_has_pair), -1)
        return order, state, exists, row_has_pair.sum(-1, keepdim=True)

    def _check_free_ends(self, is_before: Tensor, is_after: Tensor, is_path: Tensor | None) -> None:
        """Raise ``ValueError`` if both rows and columns are in a gap at one end of a semiglobal alignment.

        Then the pairs do not determine which of the two gaps is free. The masks (..., N + M) mark the elements before
        the first and after the last pair.
        """
        rows = self.event_shape[0]
        for is_outside in (is_before, is_after):
            is_ambiguous = is_outside[..., :rows].any(-1) & is_outside[..., rows:].any(-1)
            is_ambiguous = is_ambiguous if is_path is None else is_ambiguous & is_path
            if is_readable(is_ambiguous) and bool(is_ambiguous.any()):
                raise ValueError(
                    "the pairs of a semi-global alignment must begin in the first row or column and end in the last: "
                    "others do not determine which elements are free. Pass pairs from decode() or sample_decoded()"
                )


def _read_gaps(gaps: tuple[Gap, Gap, Gaps | None, Gaps | None], scores: Tensor) -> dict[str, Any]:
    """Return the gap scores by their names in the lattice.

    ``gaps`` are the arguments gap_open, gap_extend, row_gaps and column_gaps. Raises ``ValueError`` if one is positive,
    or does not broadcast to the batch shape (and the positions).
    """
    by_name: dict[str, Any] = {}
    gap_open, gap_extend, *by_position = gaps
    batch = scores.shape[:-2]
    if None in by_position:
        for name, gap in (("gap_open", gap_open), ("gap_extend", gap_extend)):
            advice = "row_gaps and column_gaps take a score for each position"
            _check_gap(name, gap, batch, f"a number or broadcast to the batch shape {tuple(batch)}; {advice}")
            by_name[name] = gap
    for side, size, pair_of_gaps in zip(("row", "column"), scores.shape[-2:], by_position, strict=True):
        if pair_of_gaps is None:
            continue
        if not isinstance(pair_of_gaps, tuple | list) or len(pair_of_gaps) != 2:
            raise ValueError(f"{side}_gaps must be a pair (open, extend), got {type(pair_of_gaps).__name__}")
        for name, gap in zip(("open", "extend"), pair_of_gaps, strict=True):
            needed = (*batch, size)
            message = f"a number or broadcast to {needed}"
            _check_gap(f"{side}_gaps, {name},", gap, torch.Size(needed), message, size)
            is_number = not isinstance(gap, Tensor)
            by_name[f"{side}_{name}"] = scores.new_full((size,), float(gap)) if is_number else gap
    return by_name


def _check_gap(name: str, gap: Gap, shape: torch.Size, needed: str, size: int | None = None) -> None:
    """Raise ``ValueError`` if a gap score is a positive number, or a tensor that does not broadcast to ``shape``.

    ``needed`` describes the valid values for the message. If ``size`` is passed, it must be the last dimension.
    """
    if isinstance(gap, int | float):
        if gap > 0:
            hint = f"gap scores are added, so penalties are negative: pass {-gap}"
            raise ValueError(f"{name} must not be positive, got {gap}: {hint}. A tensor may be positive")
        return
    gap_shape = check_tensor(name, gap).shape
    try:
        broadcasts = torch.broadcast_shapes(gap_shape, shape) == shape
    except RuntimeError:
        broadcasts = False
    if not broadcasts or (size is not None and gap_shape[-1:] != (size,)):
        raise ValueError(f"{name} must be {needed}, got shape {tuple(gap_shape)}")


def _free_end_tensors(scores: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Mapping[str, Tensor]:
    """Return the tensors that make gaps at the ends of a semiglobal alignment free.

    Paths may start only in the first row or column and end only in the last, so the two "_not_..." tensors are −∞
    elsewhere. Along these borders, the two "_inner_..." masks forbid gaps: a path starts later or ends earlier instead.
    """
    sizes, device = scores.shape[-2:], scores.device
    lengths_or_sizes = [torch.tensor(n, device=device) for n in sizes] if lengths is None else lengths
    positions = [torch.arange(n + 1, device=device) for n in sizes]
    is_before_last = [p < n.unsqueeze(-1) for p, n in zip(positions, lengths_or_sizes, strict=True)]
    inner_rows, inner_columns = (before & (p > 0) for p, before in zip(positions, is_before_last, strict=True))
    is_inside = is_before_last[0][..., :-1].unsqueeze(-1) & is_before_last[1][..., :-1].unsqueeze(-2)
    return {
        "_not_first": scores.new_full((), -math.inf).expand(sizes),
        "_not_last": scores.new_zeros(()).expand(is_inside.shape).masked_fill(is_inside, -math.inf),
        "_inner_rows": inner_rows,
        "_inner_columns": inner_columns,
    }
