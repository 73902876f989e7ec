"""Lattices: nodes (i, j, state) of a grid, a table of moves between them, scores read by the cell where they arrive.

θ is the score tensors of the table. ``index`` is (lengths, band, *labels, *masks): lengths (B, 2) int64, the rows and
columns of each member's grid; the band (B,), ∞ for none; labels (B, L) int64; masks (B, …) bool. If the table has
neither labels nor masks, an empty ``index`` means whole grids without a band. A slot is a kind of score: of a node in a
state, of a move, of a start, of an end. Node (i, j, k) has number (i·M + j)·K + k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.programs.graph as graphs
from bellmax.modes import cached_when_eager, outside_modes
from bellmax.programs.checks import check_lengths
from bellmax.programs.program import Program, repeated
from bellmax.programs.table import PREFIX, Axis, Ends, Table, Term, from_name
from bellmax.tensors import Tensors, wide_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = list[Tensor | None]


class Graph(NamedTuple):
    """Nodes and edges of a grid that are on a path for some lengths. Node 0 is the start, the last node the end."""

    edges: Tensor  # (E, 2) [parent, child]
    levels: Tensor
    graph: tuple[Tensor, ...]  # the index of the graph engine, see bellmax.programs.graph
    slots: tuple[tuple[int, int, Tensor], ...]  # runs of edges: slot, state that they enter or −1, cells
    node: Tensor  # (E,): number of the node that an edge enters, −1 for the end
    move: Tensor  # (E,): number of the move, −1 for a start or an end
    has_paths: bool  # if False, the graph is one edge from start to end, of weight −∞


class LatticeProgram(Program):
    """The paths of all lattices with one table."""

    tape_is_large = True

    def __init__(self, table: Table, name: str) -> None:
        self.table, self.sense, self.name, self.paths = table, table.sense, name, name
        self.scores = table.scores
        masks = {term.score: len(term.axes) for _, term, is_mask in table.reads if is_mask}
        self.index_dims = (1, 0, *[1] * table.labels, *(masks.get(number, 1) for number in range(table.masks)))
        self.max_count = 1 if table.uses_entries_once(0) else math.inf
        self.is_move = [False] * table.states + [True] * len(table.moves) + [False] * (2 * table.states)
        self._reads = list(dict.fromkeys(_reads(table)))
        self._has_first_size = self._reads == [(True, (0, -2, 0), ()), (False, (0, -1, 0), ())]
        read = [(of_rows, first[:2], *(dim[:2] for dim in beside)) for of_rows, first, beside in self._reads]
        self.has_one_size = len(set(read)) == len(read)

    # --- sizes

    def size(self, theta: Tensors, index: Tensors) -> tuple[int, int]:
        """Rows and columns of the smallest grid that contains every cell where a term has an entry."""
        if self._has_first_size:
            _, rows, columns = theta[0].shape
            return rows or 1, columns or 1
        return self.size_of((*theta, *index[2:]))

    def size_of(self, tensors: Tensors) -> tuple[int, int]:
        """Return :meth:`size` from scores, labels and masks that may have any batch dimensions."""
        rows = columns = 1
        for of_rows, (number, dim, offset), beside in self._reads:
            size = tensors[number].shape[dim] - offset
            for other, dim_beside, offset_beside in beside:
                size = min(size, tensors[other].shape[dim_beside] - offset_beside)
            if of_rows:
                rows = max(rows, size)
            else:
                columns = max(columns, size)
        return rows, columns

    def least_size_of(self, tensors: Tensors) -> tuple[int, int]:
        """Rows and columns of the smallest grid in which every entry is read at least once.

        It is smaller than :meth:`size` if several moves read an entry at different offsets.
        """
        sizes: dict[tuple[Any, ...], int] = {}
        for of_rows, first, beside in self._reads:
            dims = (of_rows, *((number, dim) for number, dim, _ in (first, *beside)))
            size = min(tensors[number].shape[dim] - offset for number, dim, offset in (first, *beside))
            sizes[dims] = min(sizes.get(dims, size), size)
        rows, columns = (max((n for dims, n in sizes.items() if dims[0] == of), default=1) for of in (True, False))
        return rows, columns

    def _masks(self, index: Tensors) -> Tensors:
        return index[2 + self.table.labels :]

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return self.longest(theta, index) + 1

    def longest(self, theta: Tensors, index: Tensors) -> int:
        """Upper bound on the number of nodes of a path."""
        rows, columns = self.size(theta, index)
        return (rows + columns - 1) * self.table.states

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return (len(self.graph(theta, index).levels),)

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """Return an empty int64 tensor for walks, (B, count, longest, 2).

        A walk lists [node, move into it] from the first node, whose move is −1, and is padded with −1.
        """
        shape = theta[0].shape[0], count, self.longest(theta, index), 2
        return theta[0].new_empty(shape, dtype=torch.int64)

    # --- checks

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        if not index:
            return
        for side, (size, lengths) in enumerate(zip(self.size(theta, index), index[0].unbind(1), strict=True)):
            check_lengths(f"lengths[{side}]", lengths, 1, size)

    def check(self, theta: Tensors, index: Tensors) -> None:
        self.check_index(theta, index)
        if not theta[0].is_cpu:
            return
        for terms, array in zip(self.table.terms, self.slot_scores(theta, index), strict=True):
            if array is None or bool((self.sense * array < math.inf).all()):
                continue
            bad = ~(self.sense * array < math.inf) & self.inside(theta, index)
            if bool(bad.any()):
                batch, i, j = bad.nonzero()[0].tolist()
                names = " + ".join(self.table.scores[term.score] for term in terms)
                score = array.expand(bad.shape)[batch, i, j].item()
                raise ValueError(
                    f"{names} must be finite or {self.table.absent:+}, got {score} at cell {(i, j)} of batch element "
                    f"{batch} (counted over all batch dimensions)"
                )

    def lengths(self, theta: Tensors, index: Tensors) -> Tensor:
        """Rows and columns of each member's grid, (B, 2)."""
        if index:
            return index[0]
        return whole_lengths(self.size(theta, index), theta[0].shape[:1], theta[0].device)

    def inside(self, theta: Tensors, index: Tensors) -> Tensor:
        """True for the cells within the lengths and the band, (B, N, M)."""
        shape = theta[0].shape[0], *self.size(theta, index)
        return is_inside(theta[0].new_zeros(()).expand(shape), index[:2])

    # --- the scores of slots

    def slot_scores(self, theta: Tensors, index: Tensors) -> Arrays:
        """Return the score of each slot by cell, (B or 1, N or 1, M or 1); None if it is 0 everywhere.

        A move is forbidden where its mask is False or one of its scores has no entry. In other slots a missing entry
        counts as 0.
        """
        cells, masks, states = Cells(self.size(theta, index), index), self._masks(index), self.table.states
        scores = self._sum_terms(theta, cells, self.table.absent)
        for slot, move in enumerate(self.table.moves, states):
            if move.where is not None:
                allowed = _gather(move.where, masks[move.where.score], cells, False)
                score = scores[slot]
                score = theta[0].new_zeros((1, 1, 1)) if score is None else score
                scores[slot] = score.masked_fill(~allowed, self.table.absent)
        return scores

    def slot_tangents(self, z: Tensors, index: Tensors) -> Arrays:
        """Return the derivative of :meth:`slot_scores` along z; 0 at missing entries and forbidden moves."""
        return self._sum_terms(z, Cells(self.size(z, index), index), 0.0)

    def _sum_terms(self, theta: Tensors, cells: Cells, absent: float) -> Arrays:
        """Add up the terms of each slot by cell. A missing entry is ``absent`` in a move and 0 in other slots."""
        totals: Arrays = []
        for terms, is_move in zip(self.table.terms, self.is_move, strict=True):
            missing = absent if is_move else 0.0
            addends = [_gather(term, theta[term.score], cells, missing) for term in terms]
            totals.append(sum(addends[1:], start=addends[0]) if addends else None)
        return totals

    def slots_to_theta(self, gradients: Arrays, theta: Tensors, index: Tensors) -> list[Tensor]:
        """Apply the transpose of :meth:`slot_tangents`: gradients of slots become gradients in the shapes of θ."""
        cells = Cells(self.size(theta, index), index)
        totals: Arrays = [None] * len(theta)
        for terms, gradient in zip(self.table.terms, gradients, strict=True):
            if gradient is None:
                continue
            for term in terms:
                addend = _scatter(term, gradient, theta[term.score], cells)
                total = totals[term.score]
                totals[term.score] = addend if total is None else total + addend
        return [torch.zeros_like(t) if total is None else total for total, t in zip(totals, theta, strict=True)]

    # --- the lattice as a graph

    def graph(self, theta: Tensors, index: Tensors) -> Graph:
        return graph_of(self.table, *self.size(theta, index), theta[0].device)

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return self.graph(theta, index).graph

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        """Return the weight of each edge, (B, E); −∞ for an edge outside a member's lengths, band or masks."""
        arrays, is_end = self.slot_scores(theta, index), self.is_end(theta, index)
        for slot in range(len(arrays) - self.table.states, len(arrays)):
            end = arrays[slot]
            end = theta[0].new_zeros((1, 1, 1)) if end is None else end
            arrays[slot] = end.masked_fill(~is_end, self.table.absent)
        weights = self._by_edge(arrays, theta, index, ~self.inside(theta, index))
        return weights if self.graph(theta, index).has_paths else weights.fill_(-math.inf)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return self._by_edge(self.slot_tangents(z, index), z, index)

    def _by_edge(self, arrays: Arrays, theta: Tensors, index: Tensors, outside: Tensor | None = None) -> Tensor:
        """Numbers of edges (B, E) from numbers of slots: start, move or end, plus the node that the edge enters.

        Edges of cells where ``outside`` (B, N, M) is True become absent. Costs change their sign.
        """
        shape = theta[0].shape[0], *self.size(theta, index)
        runs = []
        for slot, state, cells in self.graph(theta, index).slots:
            addends = [a for a in (arrays[slot], arrays[state] if state >= 0 else None) if a is not None]
            total = sum(addends[1:], start=addends[0]) if addends else theta[0].new_zeros((1, 1, 1))
            total = total.expand(shape) if outside is None else total.masked_fill(outside, self.table.absent)
            runs.append(total.flatten(1).index_select(1, cells))
        return torch.cat(runs, 1) if self.sense > 0 else -torch.cat(runs, 1)

    def onto_slots(self, edges: Tensor, theta: Tensors, index: Tensors) -> Arrays:
        """Sum numbers of edges (B, E) over the edges that read each slot at each cell, (B, N, M) for each slot."""
        rows, columns = self.size(theta, index)
        totals: Arrays = [None] * len(self.table.terms)
        runs = self.graph(theta, index).slots
        for (slot, state, cells), run in zip(runs, edges.split([len(c) for _, _, c in runs], 1), strict=True):
            for n in {slot, state} - {-1}:
                total = totals[n]
                total = edges.new_zeros((edges.shape[0], rows * columns)) if total is None else total
                totals[n] = total.index_add(1, cells, run)
        return [None if total is None else total.unflatten(1, (rows, columns)) for total in totals]

    def is_end(self, theta: Tensors, index: Tensors) -> Tensor:
        """True at the cells where paths may end, (B, N, M)."""
        rows, columns = (torch.arange(n, device=theta[0].device) for n in self.size(theta, index))
        n, m = self.lengths(theta, index)[..., None, None].unbind(1)
        place, inside = self.table.end.place, self.inside(theta, index)
        if place in ("corner", "row"):
            inside = inside & (rows.unsqueeze(-1) == n - 1)
        if place in ("corner", "column"):
            inside = inside & (columns == m - 1)
        return inside

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        return self.slots_to_theta(self.onto_slots(self.sense * edges, theta, index), theta, index)

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        first, batch = theta[0], len(edges)
        best = edges.new_full((batch, first.shape[1:].numel()), -math.inf)
        if not best.numel():
            return best.reshape(first.shape)
        grid, cells = (batch, *self.size(theta, index)), Cells(self.size(theta, index), index)
        runs = self.graph(theta, index).slots
        for (slot, state, at), run in zip(runs, edges.split([len(c) for _, _, c in runs], 1), strict=True):
            terms = [*self.table.terms[slot], *(self.table.terms[state] if state >= 0 else ())]
            for term in terms:
                if term.score == 0 and term.coefficient:
                    offset, exists = (t.expand(grid).flatten(1)[:, at] for t in cells.offsets(term.axes, first))
                    best = best.scatter_reduce(1, offset, run.masked_fill(~exists, -math.inf), "amax")
        return best.reshape(first.shape)

    @cached_property
    def open_ended(self) -> LatticeProgram:
        """The program of the same scores and sizes whose paths may end at any node, so that no node is a dead end."""
        table = self.table._replace(end=Ends("anywhere", ((),) * self.table.states))
        other = LatticeProgram(table, table.name)
        other._reads, other._has_first_size = self._reads, self._has_first_size
        return other

    def node_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """(N, M), or (N, M, states) if there are several states."""
        states = self.table.states
        return (*self.size(theta, index), *((states,) if states > 1 else ()))

    def node_engine(self, theta: Tensors, index: Tensors) -> tuple[Tensor, Tensors]:
        return self.open_ended.weights(theta, index), self.open_ended.engine_index(theta, index)

    def by_node(self, values: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        shape = self.node_shape(theta, index)
        graph = self.open_ended.graph(theta, index)
        offset, _, edge = graph.graph[:3]
        node = graph.node[edge[offset[1:-2]]]  # of all nodes but the start, which is the first, and the end, the last
        flat = values.new_full((len(values), math.prod(shape)), -math.inf)
        return flat.index_copy(1, node, values[:, 1:-1]).reshape(len(values), *shape)

    def has_sink(self, theta: Tensors, index: Tensors) -> Tensor:
        """(B,): True if paths may end at more than one node, so that choosing the end is a decision with an Ω."""
        return self.is_end(theta, index).flatten(1).sum(1) * len(self.table.end.states) > 1

    def extra_nodes(self, theta: Tensors, index: Tensors) -> Tensor:
        """(B,): 1 if a lattice has a single end, because the graph still adds a node behind it, else 0."""
        return (~self.has_sink(theta, index)).to(theta[0].dtype)

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return paths (B, K, E) of the graph as walks, see :meth:`empty_paths`."""
        graph = self.graph(theta, index)
        nodes = len(graph.levels)
        level = torch.where(graph.node < 0, nodes, graph.levels[graph.edges[:, 1]])
        order = torch.where(edges > 0, level, nodes).sort(-1)
        longest = min(self.longest(theta, index), edges.shape[-1])
        taken = order.indices[..., :longest]
        walk = torch.stack((graph.node[taken], graph.move[taken]), -1)
        walk = walk.masked_fill((order.values[..., :longest] == nodes).unsqueeze(-1), -1)
        return pad(walk, (0, 0, 0, self.longest(theta, index) - longest), value=-1)

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        batch, count = paths.shape[:2]
        theta, index = repeated(theta, index, count, self.index_dims, first=False)
        counts = self.count_slots(paths.flatten(0, 1), theta, index)
        event = self.slots_to_theta(counts, theta, index)[0]
        return event.reshape(batch, count, *event.shape[1:])

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        return [self.lengths(theta, index), *index[2:]]

    def without_band(self, index: Tensors) -> Tensors:
        return (index[0], torch.full_like(index[1], math.inf), *index[2:]) if index else index

    def count_slots(self, walks: Tensor, theta: Tensors, index: Tensors) -> Arrays:
        """Number of times that walks (B, longest, 2) use each slot at each cell, (B, N, M).

        It is None for a slot that does not read the first score.
        """
        rows, columns = self.size(theta, index)
        states, moves = self.table.states, len(self.table.moves)
        node, move = walks.unbind(-1)
        exists, cell, state = node >= 0, node // self.table.states, node % self.table.states
        first, last = exists & (move < 0), exists & ~pad(exists[..., 1:], (0, 1))
        counts: Arrays = []
        for slot, terms in enumerate(self.table.terms):
            if all(term.score for term in terms):
                counts.append(None)
                continue
            if slot < states:
                used = exists & (state == slot)
            elif slot < states + moves:
                used = exists & (move == slot - states)
            else:
                used = (first if slot < 2 * states + moves else last) & (state == (slot - moves) % states)
            target = torch.where(used, cell, rows * columns)
            flat = theta[0].new_zeros((len(walks), rows * columns + 1))
            ones = flat.new_ones(()).expand(target.shape)
            counts.append(flat.scatter_add(1, target, ones)[:, :-1].unflatten(1, (rows, columns)))
        return counts

    def edge_numbers(self, node: Tensor, move: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return the numbers of the edges of paths, (..., L + 1): into each node, and to the end.

        Args:
            node: (..., L), the numbers of the nodes, −1 in the padding.
            move: (..., L), the number of the move into each node, −1 if the path starts there, −2 if there is none.
            theta: θ.
            index: The index of the program.

        The result is −1 in the padding, and −2 for a step without an edge. Edges are looked up by a key,
        (slot − states)·N·M + cell.
        """
        graph = self.graph(theta, index)
        states, moves = self.table.states, len(self.table.moves)
        rows, columns = self.size(theta, index)
        keys = torch.cat([(slot - states) * rows * columns + cells for slot, _, cells in graph.slots])
        number_of = torch.full(((moves + 2 * states) * rows * columns + 2,), -2, device=node.device)
        number_of[keys] = torch.arange(len(keys), device=node.device)
        number_of[-1], number_of[-2] = -1, -2  # in the padding, and without a move
        cell, state = (node // states, node % states) if states > 1 else (node, 0)
        into = torch.where(move == -1, (moves + state) * rows * columns, move * rows * columns) + cell
        into = into.masked_fill(move == -2, -2).masked_fill(node < 0, -1)
        out = (moves + states + state) * rows * columns + cell
        is_last = (node >= 0) & (pad(node, (0, 1), value=-1)[..., 1:] < 0)
        out = out.masked_fill(~is_last, -1).amax(-1, keepdim=True) if node.shape[-1] else node
        return number_of[torch.cat((into, out), -1)]


_Dim = tuple[int, int, int]


def _reads(table: Table) -> Iterator[tuple[bool, _Dim, tuple[_Dim, ...]]]:
    """Yield the dimensions from which the size of the grid follows, one row for each term and side.

    A row holds a flag, True along rows; the dimension; and the other dimensions that must have an entry there. A
    dimension is the number of a tensor among scores, labels and masks, an axis counted from the last, and the offset of
    the cell along this axis. The masks of free sides come last.
    """
    scores, masks = len(table.scores), len(table.scores) + table.labels
    for _, term, is_mask in table.reads:
        number = term.score + masks if is_mask else term.score
        axes = list(enumerate(term.axes, -len(term.axes)))
        for of_rows, kinds in ((True, "ix"), (False, "jy")):
            dims = [
                (scores + axis.place, -1, axis.offset) if axis.is_label else (number, dim, axis.offset)
                for dim, axis in axes
                if axis.kind in kinds
            ]
            if dims:
                yield of_rows, dims[0], tuple(dims[1:])
    for number, side in enumerate(table.free, masks + table.masks - len(table.free)):
        yield side == "i", (number, -1, 0), ()


# --- the region of a member: its lengths and its band


def is_inside(cells: Tensor, index: Tensors) -> Tensor:
    """True for the cells within the lengths (..., 2) and the band (...) of a grid, of the shape of ``cells``."""
    rows, columns = cells.shape[-2:]
    if not index:
        return torch.ones(cells.shape, dtype=torch.bool, device=cells.device)
    lengths, band = index
    i = torch.arange(rows, device=cells.device).unsqueeze(-1)
    j = torch.arange(columns, device=cells.device)
    n, m = lengths[..., None, None].unbind(-3)
    off_diagonal = (i * (m - 1) - j * (n - 1)).abs()
    reach = band[..., None, None].clamp(min=0.5) * (torch.maximum(n, m) - 1)
    near = (off_diagonal <= reach) | reach.isnan()  # NaN = ∞ · 0: no band, and a grid of one cell
    return near & (i < n) & (j < m)


def whole_lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    """Lengths of grids without padding, (*batch, 2)."""
    return _whole_lengths(size, batch, device).clone()  # the caller may modify it, and the original is cached


@cached_when_eager
def _whole_lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    return torch.tensor(size, device=device).expand(*batch, 2).contiguous()


def bands(band: float, batch: torch.Size, device: torch.device) -> Tensor:
    """The band of each grid, of the batch shape, in the wide dtype. Rounded up, so that no cell leaves the band."""
    return _bands(band, batch, wide_dtype(device), device)


@cached_when_eager
def _bands(band: float, batch: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a band for each member of a batch, rounded up so that float32 does not narrow it."""
    if dtype == torch.float32 and np.float32(band) < band:
        band = float(np.nextafter(np.float32(band), np.float32(math.inf)))
    return torch.full(batch, band, dtype=dtype, device=device)


# --- gathering scores by cell, and the transpose


class Cells:
    """The size of a grid and the labels of its rows and columns: all that the index of a term depends on."""

    def __init__(self, size: tuple[int, int], index: Tensors) -> None:
        self.size, self.labels = size, index[2:]

    def along(self, axis: Axis, device: torch.device) -> Tensor:
        """Index along one axis of a score by cell, (B or 1, N or 1, M or 1); out of range if there is no entry."""
        if axis.kind == "at":
            return torch.full((1, 1, 1), axis.place, device=device)
        dim = 1 if axis.follows_rows else 2
        if axis.is_label:
            labels = self.labels[axis.place]
            return _shift(labels.unsqueeze(3 - dim), dim, axis.offset, self.size[dim - 1], -1)
        at = torch.arange(self.size[dim - 1], device=device) + axis.offset
        return at.reshape((1, -1, 1) if dim == 1 else (1, 1, -1))

    def offsets(self, axes: tuple[Axis, ...], tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Offset of the entry of each cell in the flat score, clamped, and True if the score has this entry.

        Both are (B or 1, N or 1, M or 1).
        """
        offset = torch.zeros((1, 1, 1), dtype=torch.int64, device=tensor.device)
        exists = torch.ones((1, 1, 1), dtype=torch.bool, device=tensor.device)
        for axis, size in zip(axes, tensor.shape[1:], strict=True):
            at = self.along(axis, tensor.device)
            offset, exists = offset * size + at.clamp(0, size - 1), exists & (at >= 0) & (at < size)
        return offset, exists


def _gather(term: Term, tensor: Tensor, cells: Cells, missing: float | bool) -> Tensor:
    """Evaluate a term by cell: coefficient · score[axes], (B or 1, N or 1, M or 1).

    Cells without an entry get ``missing``. There are three routes: two lookups of rows if the score is indexed by a
    row and a column, one gather for other labels, and a shifted view if there are no labels.
    """
    for dim, axis in reversed(list(enumerate(term.axes, 1))):
        if axis.kind == "at":
            tensor = tensor.select(dim, axis.place)
    axes = _cell_axes(term)
    tensor = tensor * term.coefficient if term.coefficient != 1 else tensor
    if _is_indexed_by_pairs(axes):
        tensor = tensor.transpose(1, 2) if axes[0].follows_columns else tensor
        by_row, by_column = sorted(axes, key=lambda axis: axis.follows_columns)
        tensor = _take_rows(tensor.transpose(1, 2), cells.along(by_column, tensor.device).squeeze(1), missing)
        return _take_rows(tensor.transpose(1, 2), cells.along(by_row, tensor.device).squeeze(2), missing)
    if any(axis.is_label for axis in axes):
        offset, exists = cells.offsets(axes, tensor)
        flat = tensor.flatten(1)
        if not flat.shape[1]:
            return tensor.new_full((1, *offset.shape[1:]), missing)
        batch = max(len(flat), len(offset))
        entries = flat.expand(batch, -1).gather(1, offset.expand(batch, -1, -1).flatten(1))
        return entries.reshape(batch, *offset.shape[1:]).masked_fill(~exists, missing)
    grid_axes = _grid_axes(axes)
    for dim in (1, 2):
        tensor = tensor if dim in grid_axes else tensor.unsqueeze(dim)
    shifts = {dim: (axis.offset, cells.size[dim - 1]) for dim, axis in grid_axes.items()}
    return _shift_dims(tensor, shifts, missing)


def _take_rows(tensor: Tensor, at: Tensor, missing: float | bool) -> Tensor:
    """Look up rows of a tensor (B or 1, size, D) at integers (B or 1, L), ``missing`` if out of range."""
    size = tensor.shape[1]
    rows = pad(tensor, (0, 0, 0, 1), value=missing)
    at = torch.where((at >= 0) & (at < size), at, size)
    if len(rows) != 1:
        at = at + (size + 1) * torch.arange(len(rows), device=at.device).unsqueeze(1)
    picked = torch.empty_like(rows[:, :0]) if not at.numel() else rows.flatten(0, 1).index_select(0, at.flatten())
    return picked.reshape(*at.shape, rows.shape[2])


def _scatter(term: Term, gradient: Tensor, tensor: Tensor, cells: Cells) -> Tensor:
    """Apply the transpose of :func:`_gather`: add numbers of cells to the entries they read, in the score's shape."""
    axes = _cell_axes(term)
    grid_axes = _grid_axes(axes)
    shape = [gradient.shape[0], *(cells.size[d - 1] if d in grid_axes else gradient.shape[d] for d in (1, 2))]
    gradient = gradient.expand(shape)
    unread = [dim for dim in (1, 2) if dim not in grid_axes and shape[dim] > 1]
    gradient = gradient.sum(unread, keepdim=True) if unread else gradient
    gradient = gradient if term.coefficient == 1 else gradient * term.coefficient
    sizes = [size for size, axis in zip(tensor.shape[1:], term.axes, strict=True) if axis.kind != "at"]
    if any(axis.is_label for axis in axes):
        gradient = _scatter_by_label(axes, sizes, gradient, cells)
        gradient = gradient.sum(0, keepdim=True) if len(tensor) == 1 else gradient
    else:
        gradient = gradient.sum(0, keepdim=True) if len(tensor) == 1 and len(gradient) != 1 else gradient
        size_of = dict(zip(axes, sizes, strict=True))
        gradient = _shift_dims(gradient, {dim: (-axis.offset, size_of[axis]) for dim, axis in grid_axes.items()}, 0)
        for dim in (2, 1):
            gradient = gradient if dim in grid_axes else gradient.squeeze(dim)
    for dim, (axis, size) in enumerate(zip(term.axes, tensor.shape[1:], strict=True), 1):
        if axis.kind == "at":
            gradient = _shift(gradient.unsqueeze(dim), dim, -axis.place, size, 0)
    return gradient.expand(tensor.shape)


def _scatter_by_label(axes: tuple[Axis, ...], sizes: list[int], gradient: Tensor, cells: Cells) -> Tensor:
    """Add numbers of cells (B, N or 1, M or 1) to the entries that they read by label: (B, *sizes).

    For one index by row and one by column this is two products with one-hot matrices.
    """
    if _is_indexed_by_pairs(axes):
        at = [cells.along(axis, gradient.device).flatten(1).unsqueeze(-1) for axis in axes]
        hot = [(a == torch.arange(size, device=a.device)).to(gradient.dtype) for a, size in zip(at, sizes, strict=True)]
        gradient = gradient.transpose(1, 2) if axes[0].follows_columns else gradient
        return hot[0].transpose(1, 2).matmul(gradient.matmul(hot[1]))
    entries = gradient.new_zeros((len(gradient), *sizes))
    if not entries.numel():
        return entries
    offset, exists = cells.offsets(axes, entries)
    offset, gradient = torch.broadcast_tensors(offset, gradient.masked_fill(~exists, 0))
    return entries.flatten(1).scatter_add(1, offset.flatten(1), gradient.flatten(1)).reshape(entries.shape)


def _cell_axes(term: Term) -> tuple[Axis, ...]:
    """The axes of a score whose index depends on the cell."""
    return tuple(axis for axis in term.axes if axis.kind != "at")


def _is_indexed_by_pairs(axes: tuple[Axis, ...]) -> bool:
    """True if a score has one axis for rows and one for columns, and at least one of them is indexed by label."""
    is_read = any(axis.is_label for axis in axes) and len(axes) == 2
    return is_read and axes[0].follows_columns != axes[1].follows_columns


def _grid_axes(axes: tuple[Axis, ...]) -> dict[int, Axis]:
    """The axis of a score that follows each dimension of the grid, 1 for rows and 2 for columns, if there is one."""
    return {1 if axis.follows_rows else 2: axis for axis in axes}


def _shift(tensor: Tensor, dim: int, offset: int, size: int, missing: float | bool) -> Tensor:
    """Shift and resize one dimension: entry n < size is entry n + offset of the tensor, or ``missing``."""
    return _shift_dims(tensor, {dim: (offset, size)}, missing)


def _shift_dims(tensor: Tensor, shifts: dict[int, tuple[int, int]], missing: float | bool) -> Tensor:
    """Shift and resize several dimensions as :func:`_shift`, in at most one copy. ``shifts``: dim → (offset, size)."""
    widths = [0] * (2 * tensor.ndim)
    for dim, (offset, size) in shifts.items():
        length = tensor.shape[dim]
        if offset == 0 and length == size:
            continue
        first, last = max(offset, 0), min(offset + size, length)
        tensor = tensor.narrow(dim, first, max(last - first, 0))
        before, side = first - offset, 2 * (tensor.ndim - 1 - dim)
        widths[side : side + 2] = before, size - before - max(last - first, 0)
    return pad(tensor, widths, value=missing) if any(widths) else tensor


# --- the graph


@lru_cache(maxsize=8)
def graph_of(table: Table, rows: int, columns: int, device: torch.device) -> Graph:
    """Return the graph of a grid, cached because it depends on sizes only, not on lengths, bands or masks."""
    with outside_modes():
        return _make_graph(table, rows, columns, device)


class _Run(NamedTuple):
    """Edges that read the same slot, with their nodes: 0 is the start, then 1 + (i·M + j)·K + k, last the end."""

    slot: int
    state: int  # that they enter, −1 for the end
    cell: NDArray[np.int64]  # at which they read the slot
    parent: NDArray[np.int64]
    child: NDArray[np.int64]

    def select(self, mask: NDArray[np.bool_]) -> _Run:
        return _Run(self.slot, self.state, self.cell[mask], self.parent[mask], self.child[mask])


def _make_graph(table: Table, rows: int, columns: int, device: torch.device) -> Graph:
    """Build the graph: list all edges of the grid, drop those that are on no path, and number the nodes that remain."""
    states, moves = table.states, len(table.moves)
    end = 1 + rows * columns * states
    runs = _edge_runs(table, rows, columns, end)
    used = _on_paths(runs, end)
    has_paths = bool(used[0] and used[end])
    if not has_paths:
        one = np.zeros(1, dtype=np.int64)
        runs = [_Run(2 * states + moves + table.end.states[0], -1, one, one, one + end)]
        used = np.zeros(end + 1, dtype=bool)
        used[[0, end]] = True
    runs = [run.select(used[run.parent] & used[run.child]) for run in runs]
    number = np.cumsum(used) - 1
    children = np.concatenate([run.child for run in runs])
    pairs = np.stack((number[np.concatenate([run.parent for run in runs])], number[children]), 1)
    level = graphs.levels(pairs, int(used.sum()))
    move_of = [np.full(len(r.cell), r.slot - states if r.slot < states + moves else -1) for r in runs]
    on_device = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device)  # noqa: E731
    return Graph(
        on_device(pairs),
        on_device(level),
        tuple(map(on_device, graphs.sort(pairs[:, 1], pairs[:, 0], level))),
        tuple((run.slot, run.state, on_device(run.cell)) for run in runs),
        on_device(np.where(children == end, -1, children - 1)),
        on_device(np.concatenate(move_of)),
        has_paths,
    )


def _edge_runs(table: Table, rows: int, columns: int, end: int) -> list[_Run]:
    """All edges of a grid: starts, moves, ends. Kernels use the same order, in which ties go to the first edge."""
    states, moves = table.states, len(table.moves)
    cell = np.arange(rows * columns).reshape(rows, columns)
    runs = []
    for state in table.start.states:
        into = _start_cells(cell, table.start).ravel()
        runs.append(_Run(states + moves + state, state, into, np.zeros_like(into), 1 + into * states + state))
    for number, move in enumerate(table.moves, states):
        into = cell[move.di :, move.dj :].ravel()
        out_of = cell[: max(rows - move.di, 0), : max(columns - move.dj, 0)].ravel()
        parent, child = 1 + out_of * states + move.source, 1 + into * states + move.target
        runs.append(_Run(number, move.target, into, parent, child))
    for state in table.end.states:
        out_of = cell.ravel()
        parent = 1 + out_of * states + state
        runs.append(_Run(2 * states + moves + state, -1, out_of, parent, np.full_like(out_of, end)))
    return runs


def _start_cells(cell: NDArray[np.int64], ends: Ends) -> NDArray[np.int64]:
    """Select from the cells (N, M) of a grid those where a path may start."""
    return cell[: 1 if ends.place in ("corner", "row") else None, : 1 if ends.place in ("corner", "column") else None]


def _on_paths(runs: list[_Run], end: int) -> NDArray[np.bool_]:
    """(end + 1,): True for nodes on a path from node 0 to node ``end``.

    A node is if a sweep over the levels reaches it from the start, and a sweep in reverse order from the end.
    """
    pairs = np.concatenate([np.stack((run.parent, run.child), 1) for run in runs])
    level = graphs.levels(pairs, end + 1)
    by_level = np.argsort(level[pairs[:, 1]], kind="stable")
    bounds = np.flatnonzero(np.diff(level[pairs[by_level, 1]], prepend=-1, append=-2))
    from_start, to_end = np.zeros((2, end + 1), dtype=bool)
    from_start[0] = to_end[end] = True
    groups = [pairs[by_level[a:b]] for a, b in pairwise(bounds)]
    for group in groups:
        from_start[group[from_start[group[:, 0]], 1]] = True
    for group in reversed(groups):
        to_end[group[to_end[group[:, 1]], 0]] = True
    return from_start & to_end


def program_of(name: str) -> LatticeProgram:
    """Return the lattice program with this name."""
    if not name.startswith(PREFIX):
        raise KeyError(name)
    return LatticeProgram(from_name(name), name)
