"""Lattices: nodes (i, j, state) of a grid, a table of moves between them, scores read by the cell where they arrive.

θ is the score tensors of the table. ``index`` is (lengths, band, *labels, *masks): lengths (B, 2) int64, the rows and
columns of each member's own grid; the band (B,), ∞ for none; labels (B, L) int64; masks (B, …) bool. If the table has
neither labels nor masks, an empty ``index`` means whole grids without a band. A slot is a kind of score: of a node in a
state, of a move, of a start, of an end. Node (i, j, k) has number (i·M + j)·K + k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.programs.graph as graphs
from bellmax.modes import cached_when_eager
from bellmax.programs.checks import check_lengths
from bellmax.programs.program import Program, repeated
from bellmax.programs.table import PREFIX, Axis, Ends, Table, Term, from_name
from bellmax.tensors import Tensors, wide_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = list[Tensor | None]


class Graph(NamedTuple):
    """The graph of all nodes that lie on a path of some lengths: node 0 is the start, the last node the end."""

    edges: Tensor  # (E, 2) [parent, child]
    levels: Tensor
    graph: tuple[Tensor, ...]  # its integers, as in bellmax.programs.graph
    slots: tuple[tuple[int, int, Tensor], ...]  # of edges in order: slot, state they lead into or −1, their cells
    node: Tensor  # (E,): the number of the node an edge leads into, −1 for the end
    move: Tensor  # (E,): the number of the move, −1 for a start or an end
    has_paths: bool  # if not, there is one edge of no weight


class LatticeProgram(Program):
    """The paths of all lattices with one table."""

    tape_is_large = True

    def __init__(self, table: Table, name: str) -> None:
        self.table, self.sense, self.name, self.paths = table, table.sense, name, name
        self.scores = table.scores
        masks = {term.score: len(term.axes) for _, term, is_mask in table.reads if is_mask}
        self.index_dims = (1, 0, *[1] * table.labels, *(masks.get(number, 1) for number in range(table.masks)))
        self.max_count = 1 if table.uses_once(0) else math.inf
        self.is_move = [False] * table.states + [True] * len(table.moves) + [False] * (2 * table.states)
        self._reads = list(dict.fromkeys(_reads(table)))
        self._has_first_size = self._reads == [(True, (0, -2, 0), ()), (False, (0, -1, 0), ())]
        read = [(of_rows, first[:2], *(dim[:2] for dim in beside)) for of_rows, first, beside in self._reads]
        self.has_one_size = len(set(read)) == len(read)
        masked = [False] * table.states + [move.where is not None for move in table.moves] + [False] * 2 * table.states
        self.windows = [None if hidden else _window(t) for t, hidden in zip(table.terms, masked, strict=True)]

    # --- sizes

    def size(self, theta: Tensors, index: Tensors) -> tuple[int, int]:
        """Rows and columns of the grid: all that is read of a score, label or mask has its place in it."""
        if self._has_first_size:
            _, rows, columns = theta[0].shape
            return rows or 1, columns or 1
        return self.size_of((*theta, *index[2:]))

    def size_of(self, tensors: Tensors) -> tuple[int, int]:
        """The same from scores, labels and masks with any batch dimensions."""
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
        """The same where one place is enough for an entry that is read at several."""
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
        """How many nodes a path can have."""
        rows, columns = self.size(theta, index)
        return (rows + columns - 1) * self.table.states

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return (len(self.graph(theta, index).levels),)

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """Room for paths (B, count, longest, 2): nodes, from the first on, each with the move into it, −1 for the
        first; then −1."""
        shape = theta[0].shape[0], count, self.longest(theta, index), 2
        return theta[0].new_empty(shape, dtype=torch.int64)

    # --- checks

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        if not index:
            return
        for side, (size, own) in enumerate(zip(self.size(theta, index), index[0].unbind(1), strict=True)):
            check_lengths(f"lengths[{side}]", own, 1, size)

    def check(self, theta: Tensors, index: Tensors) -> None:
        self.check_index(theta, index)
        if theta[0].device.type != "cpu":
            return
        for terms, array in zip(self.table.terms, self.arrays(theta, index), strict=True):
            if array is None or bool((self.sense * array < math.inf).all()):
                continue
            bad = ~(self.sense * array < math.inf) & self.inside(theta, index)
            if bool(bad.any()):
                batch, i, j = bad.nonzero()[0].tolist()
                names = " + ".join(self.table.scores[term.score] for term in terms)
                found = array.expand(bad.shape)[batch, i, j].item()
                raise ValueError(
                    f"{names} must be finite or {self.table.absent:+}, got {found} at cell {(i, j)} of batch element "
                    f"{batch} (batch flattened)"
                )

    def lengths(self, theta: Tensors, index: Tensors) -> Tensor:
        """The rows and columns of each member's grid, (B, 2)."""
        if index:
            return index[0]
        return whole_lengths(self.size(theta, index), theta[0].shape[:1], theta[0].device)

    def inside(self, theta: Tensors, index: Tensors) -> Tensor:
        """True for the cells within the lengths and the band, (B, N, M)."""
        shape = theta[0].shape[0], *self.size(theta, index)
        return is_inside(theta[0].new_zeros(()).expand(shape), index[:2])

    # --- the scores of slots

    def arrays(self, theta: Tensors, index: Tensors, in_windows: bool = False) -> Arrays:
        """The score of each slot, (B or 1, N or 1, M or 1); None is 0. ``in_windows``, as it is if it has a window.

        A move is absent where it is masked or a score of it has no entry; elsewhere a missing entry is 0.
        """
        cells, masks, states = Cells(self.size(theta, index), index), self._masks(index), self.table.states
        found = self._sums(theta, cells, self.table.absent, in_windows)
        for slot, move in enumerate(self.table.moves, states):
            if move.where is not None:
                allowed = _read(move.where, masks[move.where.score], cells, False)
                own = found[slot]
                own = theta[0].new_zeros((1, 1, 1)) if own is None else own
                found[slot] = own.masked_fill(~allowed, self.table.absent)
        return found

    def changes(self, z: Tensors, index: Tensors, in_windows: bool = False) -> Arrays:
        """The change of :meth:`arrays` for a change of the scores; 0 where there is none."""
        return self._sums(z, Cells(self.size(z, index), index), 0.0, in_windows)

    def _sums(self, theta: Tensors, cells: Cells, absent: float, in_windows: bool) -> Arrays:
        found: Arrays = []
        for terms, is_move, window in zip(self.table.terms, self.is_move, self.windows, strict=True):
            if in_windows and window is not None:
                found.append(theta[terms[0].score])
                continue
            missing = absent if is_move else 0.0
            parts = [_read(term, theta[term.score], cells, missing) for term in terms]
            found.append(sum(parts[1:], start=parts[0]) if parts else None)
        return found

    def onto_tensors(self, gradients: Arrays, theta: Tensors, index: Tensors, in_windows: bool = False) -> list[Tensor]:
        """The transpose of :meth:`changes`, of θ's shapes."""
        cells = Cells(self.size(theta, index), index)
        totals: Arrays = [None] * len(theta)
        for terms, gradient, window in zip(self.table.terms, gradients, self.windows, strict=True):
            if gradient is None:
                continue
            for term in terms:
                is_there = in_windows and window is not None
                part = gradient if is_there else _spread(term, gradient, theta[term.score], cells)
                total = totals[term.score]
                totals[term.score] = part if total is None else total + part
        return [torch.zeros_like(t) if total is None else total for total, t in zip(totals, theta, strict=True)]

    # --- the lattice as a graph

    def graph(self, theta: Tensors, index: Tensors) -> Graph:
        return graph_of(self.table, *self.size(theta, index), theta[0].device)

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return self.graph(theta, index).graph

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        """(B, E); −∞ where there is no edge."""
        arrays, is_end = self.arrays(theta, index), self.is_end(theta, index)
        for slot in range(len(arrays) - self.table.states, len(arrays)):
            end = arrays[slot]
            end = theta[0].new_zeros((1, 1, 1)) if end is None else end
            arrays[slot] = end.masked_fill(~is_end, self.table.absent)
        found = self._by_edge(arrays, theta, index, ~self.inside(theta, index))
        return found if self.graph(theta, index).has_paths else found.fill_(-math.inf)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        """The change of the weights for a change of the scores."""
        return self._by_edge(self.changes(z, index), z, index)

    def _by_edge(self, arrays: Arrays, theta: Tensors, index: Tensors, outside: Tensor | None = None) -> Tensor:
        shape = theta[0].shape[0], *self.size(theta, index)
        parts = []
        for slot, state, cells in self.graph(theta, index).slots:
            both = [a for a in (arrays[slot], arrays[state] if state >= 0 else None) if a is not None]
            total = sum(both[1:], start=both[0]) if both else theta[0].new_zeros((1, 1, 1))
            total = total.expand(shape) if outside is None else total.masked_fill(outside, self.table.absent)
            parts.append(total.flatten(1).index_select(1, cells))
        return torch.cat(parts, 1) if self.sense > 0 else -torch.cat(parts, 1)

    def onto_slots(self, edges: Tensor, theta: Tensors, index: Tensors) -> Arrays:
        """Numbers of edges (B, E), summed over the slots that their weights are made of, (B, N, M) each."""
        rows, columns = self.size(theta, index)
        found: Arrays = [None] * len(self.table.terms)
        parts = self.graph(theta, index).slots
        for (slot, state, cells), own in zip(parts, edges.split([len(c) for _, _, c in parts], 1), strict=True):
            for place in {slot, state} - {-1}:
                total = found[place]
                total = edges.new_zeros((edges.shape[0], rows * columns)) if total is None else total
                found[place] = total.index_add(1, cells, own)
        return [None if total is None else total.unflatten(1, (rows, columns)) for total in found]

    def is_end(self, theta: Tensors, index: Tensors) -> Tensor:
        """(B, N, M): the cells where paths may end."""
        rows, columns = (torch.arange(n, device=theta[0].device) for n in self.size(theta, index))
        n, m = self.lengths(theta, index)[..., None, None].unbind(1)
        place, inside = self.table.end.place, self.inside(theta, index)
        if place in ("corner", "row"):
            inside = inside & (rows.unsqueeze(-1) == n - 1)
        if place in ("corner", "column"):
            inside = inside & (columns == m - 1)
        return inside

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        """The transpose of :meth:`along`."""
        return self.onto_tensors(self.onto_slots(self.sense * edges, theta, index), theta, index)

    def has_sink(self, theta: Tensors, index: Tensors) -> Tensor:
        """(B,): whether paths may end at more than one node."""
        return self.is_end(theta, index).flatten(1).sum(1) * len(self.table.end.states) > 1

    def extra_nodes(self, theta: Tensors, index: Tensors) -> Tensor:
        """The graph's sink, where a lattice has a single end."""
        return (~self.has_sink(theta, index)).to(theta[0].dtype)

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Paths (B, K, E) of the graph in the form of :meth:`empty_paths`."""
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
        counts = self.slots_of_walks(paths.flatten(0, 1), theta, index)
        event = self.onto_tensors(counts, theta, index)[0]
        return event.reshape(batch, count, *event.shape[1:])

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        return [self.lengths(theta, index), *index[2:]]

    def without_band(self, index: Tensors) -> Tensors:
        return (index[0], torch.full_like(index[1], math.inf), *index[2:]) if index else index

    def slots_of_walks(self, walks: Tensor, theta: Tensors, index: Tensors) -> Arrays:
        """How often walks (B, longest, 2) pay each slot that has a score, (B, N, M)."""
        rows, columns = self.size(theta, index)
        states, moves = self.table.states, len(self.table.moves)
        node, move = walks.unbind(-1)
        exists, cell, state = node >= 0, node // self.table.states, node % self.table.states
        first, last = exists & (move < 0), exists & ~pad(exists[..., 1:], (0, 1))
        found: Arrays = []
        for slot, terms in enumerate(self.table.terms):
            if slot < states:
                paid = exists & (state == slot)
            elif slot < states + moves:
                paid = exists & (move == slot - states)
            else:
                paid = (first if slot < 2 * states + moves else last) & (state == (slot - moves) % states)
            place = torch.where(paid, cell, rows * columns)
            flat = theta[0].new_zeros((len(walks), rows * columns + 1))
            ones = flat.new_ones(()).expand(place.shape)
            found.append(flat.scatter_add(1, place, ones)[:, :-1].unflatten(1, (rows, columns)) if terms else None)
        return found

    def from_walks(self, walks: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Walks (B, K, longest, 2) as 0/1 tensors (B, K, E) over the edges of the graph."""
        graph = self.graph(theta, index)
        states, moves = self.table.states, len(self.table.moves)
        rows, columns = self.size(theta, index)
        node, move = walks.unbind(-1)
        state = node % states
        exists = node >= 0
        last = exists & ~pad(exists[..., 1:], (0, 1))
        kind = torch.where(move >= 0, move, moves + state)
        into = torch.where(exists, node // states + kind * rows * columns, -1)
        out = torch.where(last, node // states + (moves + states + state) * rows * columns, -1)
        keys = torch.cat([(slot - states) * rows * columns + cells for slot, _, cells in graph.slots])
        order = keys.argsort()
        wanted = torch.cat((into, out), -1)
        place = torch.searchsorted(keys[order], wanted).clamp(max=len(keys) - 1)
        is_edge = keys[order][place] == wanted
        flat = torch.zeros((*walks.shape[:2], len(keys) + 1), device=walks.device, dtype=wide_dtype(walks.device))
        return flat.scatter(-1, torch.where(is_edge, order[place], len(keys)), 1)[..., :-1]


def _window(terms: tuple[Term, ...]) -> tuple[int, int] | None:
    """The first cell of a slot whose score is one tensor by cell, as it is."""
    if len(terms) != 1 or terms[0].coefficient != 1 or [axis.kind for axis in terms[0].axes] != ["i", "j"]:
        return None
    i, j = terms[0].axes
    return -i.offset, -j.offset


_Dim = tuple[int, int, int]


def _reads(table: Table) -> Iterator[tuple[bool, _Dim, tuple[_Dim, ...]]]:
    """Yield the dimensions from which the size of the grid follows, one row for each place where a tensor is read.

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
    near = (off_diagonal <= reach) | reach.isnan()  # ∞ · 0: a single cell, without a band
    return near & (i < n) & (j < m)


def whole_lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    """Lengths of grids without padding, (*batch, 2)."""
    return _whole_lengths(size, batch, device).clone()  # the caller may change it


@cached_when_eager
def _whole_lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    return torch.tensor(size, device=device).expand(*batch, 2).contiguous()


def bands(band: float, count: int, device: torch.device) -> Tensor:
    """The band of each of ``count`` grids, in the wide dtype, rounded up: a cell on the edge stays inside."""
    return _bands(band, count, wide_dtype(device), device)


@cached_when_eager
def _bands(band: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.float32 and np.float32(band) < band:
        band = float(np.nextafter(np.float32(band), np.float32(math.inf)))
    return torch.full((count,), band, dtype=dtype, device=device)


# --- reading a score by cell


class Cells:
    """The cells of a grid, and the labels of its rows and columns."""

    def __init__(self, size: tuple[int, int], index: Tensors) -> None:
        self.size, self.labels = size, index[2:]

    def along(self, axis: Axis, device: torch.device) -> Tensor:
        """The index along a dimension of a score, (B or 1, N or 1, M or 1); negative where there is none."""
        dim = 1 if axis.follows_rows else 2
        if axis.is_label:
            labels = self.labels[axis.place]
            return _shifted(labels.unsqueeze(3 - dim), dim, axis.offset, self.size[dim - 1], -1)
        at = torch.arange(self.size[dim - 1], device=device) + axis.offset
        return at.reshape((1, -1, 1) if dim == 1 else (1, 1, -1))

    def places(self, axes: tuple[Axis, ...], tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the flat score each cell reads, (B or 1, N or 1, M or 1), and whether it does."""
        place = torch.zeros((1, 1, 1), dtype=torch.int64, device=tensor.device)
        exists = torch.ones((1, 1, 1), dtype=torch.bool, device=tensor.device)
        for axis, own in zip(axes, tensor.shape[1:], strict=True):
            at = self.along(axis, tensor.device)
            place, exists = place * own + at.clamp(0, own - 1), exists & (at >= 0) & (at < own)
        return place, exists


def _read(term: Term, tensor: Tensor, cells: Cells, missing: float | bool) -> Tensor:
    """coefficient · score[axes] by cell, (B or 1, N or 1, M or 1), and ``missing`` where there is no entry."""
    for dim, axis in reversed(list(enumerate(term.axes, 1))):
        if axis.kind == "at":
            tensor = tensor.select(dim, axis.place)
    axes = _moving(term)
    tensor = tensor * term.coefficient if term.coefficient != 1 else tensor
    if _is_of_pairs(axes):
        tensor = tensor.transpose(1, 2) if axes[0].follows_columns else tensor
        by_row, by_column = sorted(axes, key=lambda axis: axis.follows_columns)
        tensor = _picked(tensor.transpose(1, 2), cells.along(by_column, tensor.device).squeeze(1), missing)
        return _picked(tensor.transpose(1, 2), cells.along(by_row, tensor.device).squeeze(2), missing)
    if any(axis.is_label for axis in axes):
        place, exists = cells.places(axes, tensor)
        flat = tensor.flatten(1)
        if not flat.shape[1]:
            return tensor.new_full((1, *place.shape[1:]), missing)
        batch = max(len(flat), len(place))
        entries = flat.expand(batch, -1).gather(1, place.expand(batch, -1, -1).flatten(1))
        return entries.reshape(batch, *place.shape[1:]).masked_fill(~exists, missing)
    kept = _grid_axes(axes)
    for dim in (1, 2):
        tensor = tensor if dim in kept else tensor.unsqueeze(dim)
    shifts = {dim: (axis.offset, cells.size[dim - 1]) for dim, axis in kept.items()}
    return _all_shifted(tensor, shifts, missing)


def _picked(tensor: Tensor, at: Tensor, missing: float | bool) -> Tensor:
    """The rows of a tensor (B or 1, size, …) at integers (B or 1, L), ``missing`` where those are out of range."""
    size = tensor.shape[1]
    rows = pad(tensor, (0, 0, 0, 1), value=missing)
    at = torch.where((at >= 0) & (at < size), at, size)
    if len(rows) != 1:
        at = at + (size + 1) * torch.arange(len(rows), device=at.device).unsqueeze(1)
    found = torch.empty_like(rows[:, :0]) if not at.numel() else rows.flatten(0, 1).index_select(0, at.flatten())
    return found.reshape(*at.shape, rows.shape[2])


def _spread(term: Term, gradient: Tensor, tensor: Tensor, cells: Cells) -> Tensor:
    """The transpose of :func:`_read`: numbers of cells, summed over the cells that read an entry."""
    axes = _moving(term)
    kept = _grid_axes(axes)
    shape = [gradient.shape[0], *(cells.size[d - 1] if d in kept else gradient.shape[d] for d in (1, 2))]
    gradient = gradient.expand(shape)
    unread = [dim for dim in (1, 2) if dim not in kept and shape[dim] > 1]
    gradient = gradient.sum(unread, keepdim=True) if unread else gradient
    gradient = gradient if term.coefficient == 1 else gradient * term.coefficient
    sizes = [own for own, axis in zip(tensor.shape[1:], term.axes, strict=True) if axis.kind != "at"]
    if any(axis.is_label for axis in axes):
        gradient = _onto_entries(axes, sizes, gradient, cells)
        gradient = gradient.sum(0, keepdim=True) if len(tensor) == 1 else gradient
    else:
        gradient = gradient.sum(0, keepdim=True) if len(tensor) == 1 and len(gradient) != 1 else gradient
        own = dict(zip(axes, sizes, strict=True))
        gradient = _all_shifted(gradient, {dim: (-axis.offset, own[axis]) for dim, axis in kept.items()}, 0)
        for dim in (2, 1):
            gradient = gradient if dim in kept else gradient.squeeze(dim)
    for dim, (axis, size) in enumerate(zip(term.axes, tensor.shape[1:], strict=True), 1):
        if axis.kind == "at":
            gradient = _shifted(gradient.unsqueeze(dim), dim, -axis.place, size, 0)
    return gradient.expand(tensor.shape)


def _onto_entries(axes: tuple[Axis, ...], sizes: list[int], gradient: Tensor, cells: Cells) -> Tensor:
    """Numbers of cells (B, N or 1, M or 1), summed over those that read an entry by its labels: (B, *sizes)."""
    if _is_of_pairs(axes):
        at = [cells.along(axis, gradient.device).flatten(1).unsqueeze(-1) for axis in axes]
        hot = [(a == torch.arange(size, device=a.device)).to(gradient.dtype) for a, size in zip(at, sizes, strict=True)]
        gradient = gradient.transpose(1, 2) if axes[0].follows_columns else gradient
        return hot[0].transpose(1, 2).matmul(gradient.matmul(hot[1]))
    entries = gradient.new_zeros((len(gradient), *sizes))
    if not entries.numel():
        return entries
    place, exists = cells.places(axes, entries)
    place, gradient = torch.broadcast_tensors(place, gradient.masked_fill(~exists, 0))
    return entries.flatten(1).scatter_add(1, place.flatten(1), gradient.flatten(1)).reshape(entries.shape)


def _moving(term: Term) -> tuple[Axis, ...]:
    """The axes along which the place of a score changes with the cell."""
    return tuple(axis for axis in term.axes if axis.kind != "at")


def _is_of_pairs(axes: tuple[Axis, ...]) -> bool:
    """Whether a score is read by one label, or number, of the row and one of the column."""
    is_read = any(axis.is_label for axis in axes) and len(axes) == 2
    return is_read and axes[0].follows_columns != axes[1].follows_columns


def _grid_axes(axes: tuple[Axis, ...]) -> dict[int, Axis]:
    """The dimensions of the grid, 1 for rows and 2 for columns, that a score depends on, and how."""
    return {1 if axis.follows_rows else 2: axis for axis in axes}


def _shifted(tensor: Tensor, dim: int, offset: int, size: int, missing: float | bool) -> Tensor:
    """Entry n of ``size`` along a dimension is entry n + offset of the tensor, ``missing`` where it has none."""
    return _all_shifted(tensor, {dim: (offset, size)}, missing)


def _all_shifted(tensor: Tensor, shifts: dict[int, tuple[int, int]], missing: float | bool) -> Tensor:
    """The same along several dimensions, by their offsets and sizes, in at most one copy."""
    widths = [0] * (2 * tensor.ndim)
    for dim, (offset, size) in shifts.items():
        own = tensor.shape[dim]
        if offset == 0 and own == size:
            continue
        first, last = max(offset, 0), min(offset + size, own)
        tensor = tensor.narrow(dim, first, max(last - first, 0))
        before, place = first - offset, 2 * (tensor.ndim - 1 - dim)
        widths[place : place + 2] = before, size - before - max(last - first, 0)
    return pad(tensor, widths, value=missing) if any(widths) else tensor


# --- the graph


@lru_cache(maxsize=8)
def graph_of(table: Table, rows: int, columns: int, device: torch.device) -> Graph:
    # The graph is the same whatever transforms, tracer, and default device, its caller is under.
    with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch(), torch.device("cpu"):
        return _make_graph(table, rows, columns, device)


def _make_graph(table: Table, rows: int, columns: int, device: torch.device) -> Graph:
    states, moves = table.states, len(table.moves)
    cell = np.arange(rows * columns).reshape(rows, columns)
    end = 1 + rows * columns * states
    parts: list[tuple[int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    for state in table.start.states:  # before the moves, as in the kernels: ties go to the first edge
        into = _at(cell, table.start).ravel()
        parts.append((states + moves + state, state, into, np.zeros_like(into), 1 + into * states + state))
    for number, move in enumerate(table.moves):
        into = cell[move.di :, move.dj :].ravel()
        out_of = cell[: max(rows - move.di, 0), : max(columns - move.dj, 0)].ravel()
        parents, children = 1 + out_of * states + move.source, 1 + into * states + move.target
        parts.append((states + number, move.target, into, parents, children))
    for state in table.end.states:
        out_of = cell.ravel()
        parts.append((2 * states + moves + state, -1, out_of, 1 + out_of * states + state, np.full_like(out_of, end)))
    used = _on_paths(parts, end)
    has_paths = bool(used[0] and used[end])
    if not has_paths:
        one = np.zeros(1, dtype=np.int64)
        parts, used = (
            [(2 * states + moves + table.end.states[0], -1, one, one, one + end)],
            np.zeros(end + 1, dtype=bool),
        )
        used[[0, end]] = True
    number_of = np.cumsum(used) - 1
    kept = [used[parents] & used[children] for *_, parents, children in parts]
    pairs = np.concatenate(
        [np.stack((number_of[p[k]], number_of[c[k]]), 1) for (*_, p, c), k in zip(parts, kept, strict=True)]
    )
    children = np.concatenate([c[k] for (*_, c), k in zip(parts, kept, strict=True)])
    level = graphs.levels(pairs, int(used.sum()))
    slots = [(slot, state, into[k]) for (slot, state, into, _, _), k in zip(parts, kept, strict=True)]
    move_of = [np.full(len(c), s - states if s < states + moves else -1) for s, _, c in slots]
    on_device = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device)  # noqa: E731
    return Graph(
        on_device(pairs),
        on_device(level),
        tuple(map(on_device, graphs.sort(pairs[:, 1], pairs[:, 0], level))),
        tuple((slot, state, on_device(cells)) for slot, state, cells in slots),
        on_device(np.where(children == end, -1, children - 1)),
        on_device(np.concatenate(move_of)),
        has_paths,
    )


def _at(cell: NDArray[np.int64], ends: Ends) -> NDArray[np.int64]:
    """The cells of a place at the start."""
    return cell[: 1 if ends.place in ("corner", "row") else None, : 1 if ends.place in ("corner", "column") else None]


def _on_paths(
    parts: list[tuple[int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]], end: int
) -> NDArray[np.bool_]:
    """Which of the nodes 0 … end lie on a path from the first to the last."""
    pairs = np.concatenate([np.stack((parents, children), 1) for *_, parents, children in parts])
    level = graphs.levels(pairs, end + 1)
    by_level = np.argsort(level[pairs[:, 1]], kind="stable")
    bounds = np.flatnonzero(np.diff(level[pairs[by_level, 1]], prepend=-1, append=-2))
    reached, useful = np.zeros((2, end + 1), dtype=bool)
    reached[0] = useful[end] = True
    groups = [pairs[by_level[a:b]] for a, b in pairwise(bounds)]
    for group in groups:
        reached[group[reached[group[:, 0]], 1]] = True
    for group in reversed(groups):
        useful[group[useful[group[:, 1]], 0]] = True
    return reached & useful


def program_of(name: str) -> LatticeProgram:
    """Return the lattice program with this name."""
    if not name.startswith(PREFIX):
        raise KeyError(name)
    return LatticeProgram(from_name(name), name)
