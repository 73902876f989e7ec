"""Alignments: the cells of a grid, those within the lengths and the band, and the moves between them as a graph.

θ is the cost (B, N, M). ``index`` is () for whole matrices without a band, else (lengths, band): lengths (B, 2) int64,
and the band (B,), ∞ for none. The program is a min: its value is −DP_Ω of the graph, where every edge into a cell
weighs minus its cost.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.programs.graph as graph
from bellmax.programs.program import Program
from bellmax.programs.values import check_lengths
from bellmax.tensors import Tensors, wide_dtype
from bellmax.transforms import kept

index_dims = (1, 0)
engine = "dag"
sense = -1

DIAGONAL, UP, LEFT = range(3)


class Grid(NamedTuple):
    """The graph of N × M cells: node 0 leads into every cell of the first row, and every cell into the last node.

    The edges come in three parts: M from the start, those between cells, and N·M to the end.
    """

    edges: Tensor  # (E, 2) [parent, child]; node 0 is the start, cell (i, j) is 1 + i·M + j, the end is last
    levels: Tensor  # of the nodes: number of edges on the longest path from the start
    graph: tuple[Tensor, ...]  # its integers, as in bellmax.programs.graph
    cell: Tensor  # of each edge but those to the end: the cell it leads into, i·M + j
    kind: Tensor  # of the same edges: DIAGONAL, UP or LEFT; those from the start count as diagonal


@lru_cache(maxsize=8)
def grid(rows: int, columns: int, device: torch.device) -> Grid:
    # The graph is the same whatever transforms, and default device, its caller is under.
    with torch._C._DisableFuncTorch(), torch.device("cpu"):
        return _make_grid(rows, columns, device)


def _make_grid(rows: int, columns: int, device: torch.device) -> Grid:
    cell = torch.arange(rows * columns).reshape(rows, columns)
    into = cell[:1], cell[1:, 1:], cell[1:], cell[:, 1:]
    out_of = torch.full((1, columns), -1), cell[:-1, :-1], cell[:-1], cell[:, :-1]
    child, parent = (torch.cat([cells.flatten() for cells in part]) for part in (into, out_of))
    end = torch.full((rows * columns,), rows * columns)
    edges = torch.stack((torch.cat((parent, cell.flatten())), torch.cat((child, end))), 1) + 1
    kinds = (DIAGONAL, DIAGONAL, UP, LEFT)
    kind = torch.cat([torch.full((cells.numel(),), k) for cells, k in zip(into, kinds, strict=True)])
    by_cell = torch.arange(rows).unsqueeze(-1) + torch.arange(columns) + 1
    level = torch.cat((torch.zeros(1, dtype=torch.int64), by_cell.flatten(), torch.tensor([rows + columns])))
    head, tail = edges[:, 1].numpy(), edges[:, 0].numpy()
    index = (torch.from_numpy(array).to(device) for array in graph.sort(head, tail, level.numpy()))
    return Grid(edges.to(device), level.to(device), tuple(index), child.to(device), kind.to(device))


# --- what every backend shares


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    _, rows, columns = theta[0].shape
    return (rows * columns + 2,)


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for paths (B, count, N + M − 1): the cells i·M + j from the first to the last, then −1."""
    batch, rows, columns = theta[0].shape
    return theta[0].new_empty((batch, count, rows + columns - 1), dtype=torch.int64)


def check_index(theta: Tensors, index: Tensors) -> None:
    if index:
        for side, (size, own) in enumerate(zip(theta[0].shape[1:], index[0].unbind(1), strict=True)):
            check_lengths(f"lengths[{side}]", own, 1, size)


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    cost = theta[0].detach()
    if cost.device.type != "cpu" or cost.numel() == 0 or bool(cost.amin() > -math.inf):
        return
    bad = ~(cost > -math.inf) & is_inside(cost, index)  # the padding may hold anything
    if not bool(bad.any()):
        return
    batch, i, j = bad.nonzero()[0].tolist()
    raise ValueError(
        f"cost must be finite or +inf, got {cost[batch, i, j].item()} at cell {(i, j)} of batch element {batch} "
        "(batch flattened)"
    )


def is_inside(cost: Tensor, index: Tensors) -> Tensor:
    """(..., N, M): the cells within the lengths (..., 2) and the band (...) of their pair."""
    rows, columns = cost.shape[-2:]
    if not index:
        return torch.ones(cost.shape, dtype=torch.bool, device=cost.device)
    lengths, band = index
    i = torch.arange(rows, device=cost.device).unsqueeze(-1)
    j = torch.arange(columns, device=cost.device)
    own_rows, own_columns = lengths[..., None, None].unbind(-3)
    off_diagonal = (i * (own_columns - 1) - j * (own_rows - 1)).abs()
    reach = band[..., None, None].clamp(min=0.5) * (torch.maximum(own_rows, own_columns) - 1)
    near = (off_diagonal <= reach) | reach.isnan()  # ∞ · 0: a single cell, without a band
    return near & (i < own_rows) & (j < own_columns)


def whole_lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    """(*batch, 2): the lengths of grids without padding."""
    return _lengths(size, batch, device).clone()  # the caller's own


@kept
def _lengths(size: tuple[int, int], batch: torch.Size, device: torch.device) -> Tensor:
    return torch.tensor(size, device=device).expand(*batch, 2).contiguous()


def bands(band: float, count: int, device: torch.device) -> Tensor:
    """(count,) in the wide dtype, rounded up: what is on the edge of a band stays inside."""
    return _bands(band, count, wide_dtype(device), device)


@kept
def _bands(band: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.float32 and np.float32(band) < band:
        band = float(np.nextafter(np.float32(band), np.float32(math.inf)))
    return torch.full((count,), band, dtype=dtype, device=device)


def is_end(cost: Tensor, index: Tensors) -> Tensor:
    """(..., N, M): the last cell of each pair."""
    rows, columns = cost.shape[-2:]
    i = torch.arange(rows, device=cost.device).unsqueeze(-1)
    j = torch.arange(columns, device=cost.device)
    if not index:
        return ((i == rows - 1) & (j == columns - 1)).expand(cost.shape)
    own_rows, own_columns = index[0][..., None, None].unbind(-3)
    return (i == own_rows - 1) & (j == own_columns - 1)


# --- the grid as a graph


def extra_nodes(theta: Tensors, index: Tensors) -> int:
    """The end, behind the last cell of each pair."""
    return 1


def engine_index(theta: Tensors, index: Tensors) -> Tensors:
    return grid(*theta[0].shape[1:], theta[0].device).graph


def weights(theta: Tensors, index: Tensors) -> Tensor:
    (cost,) = theta
    return edge_weights(payments(cost.masked_fill(~is_inside(cost, index), math.inf)), is_end(cost, index))


def along(z: Tensors, index: Tensors) -> Tensor:
    """The change of the weights for a change of the cost."""
    (cells,) = z
    return -payments(cells)


def onto_scores(edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
    """The transpose of :func:`along`."""
    return [-onto_cells(edges, *theta[0].shape[1:])]


def found_paths(found: Tensor, theta: Tensors, index: Tensors) -> Tensor:
    rows, columns = theta[0].shape[1:]
    return to_cells(onto_cells(found, rows, columns))


def payments(cells: Tensor, factors: Tensor | None = None, terms: Tensor | None = None) -> Tensor:
    """The cost of each edge, (..., E), for costs of cells (..., N, M): 0 towards the end.

    ``factors`` (..., 3) multiply the cost of a cell by the kind of the move into it, ``terms`` (..., 3) are added to
    it. Edges from the start have neither.
    """
    rows, columns = cells.shape[-2:]
    g = grid(rows, columns, cells.device)
    paid = cells.flatten(-2).index_select(-1, g.cell)
    first, rest = paid[..., :columns], paid[..., columns:]
    kind = g.kind[columns:]
    if factors is not None:
        infinite = rest == math.inf
        rest = torch.where(infinite, rest, rest.masked_fill(infinite, 0) * factors.index_select(-1, kind))
    if terms is not None:
        rest = rest + terms.index_select(-1, kind)
    first = first.expand(*rest.shape[:-1], columns)
    return torch.cat((first, rest, rest.new_zeros((*rest.shape[:-1], rows * columns))), -1)


def edge_weights(paid: Tensor, ends: Tensor, open_begin: bool = False) -> Tensor:
    """The weights (..., E) of the edges: minus what they pay, for paths that may end at ``ends`` (..., N, M) alone."""
    columns, cells = ends.shape[-1], ends.shape[-1] * ends.shape[-2]
    if not open_begin:
        closed = torch.arange(paid.shape[-1], device=paid.device)
        paid = paid.masked_fill((closed > 0) & (closed < columns), math.inf)
    into_end = paid[..., -cells:].masked_fill(~ends.flatten(-2), -math.inf)
    return torch.cat((-paid[..., :-cells], into_end), -1)


def onto_cells(edges: Tensor, rows: int, columns: int) -> Tensor:
    """(..., E) summed over the edges into each cell, (..., N, M)."""
    g = grid(rows, columns, edges.device)
    cells = edges.new_zeros((*edges.shape[:-1], rows * columns))
    summed = cells.index_add(-1, g.cell, edges[..., : g.cell.shape[0]])
    return summed.reshape(*edges.shape[:-1], rows, columns)


def from_cells(path: Tensor) -> Tensor:
    """The edges (..., E) that a path (..., N, M) takes, as a 0/1 tensor."""
    before = pad(path, (1, 0, 1, 0))
    up, left = before[..., :-1, 1:] * path, before[..., 1:, :-1] * path
    diagonal = path - up - left  # the start counts as one
    g = grid(path.shape[-2], path.shape[-1], path.device)
    kinds = torch.stack((diagonal, up, left), -1).flatten(-3)
    moves = kinds.index_select(-1, 3 * g.cell + g.kind)
    later = pad(path, (0, 1, 0, 1))
    ends = path - torch.maximum(torch.maximum(later[..., 1:, :-1], later[..., :-1, 1:]), later[..., 1:, 1:]) * path
    return torch.cat((moves, ends.flatten(-2)), -1)


def to_cells(path: Tensor) -> Tensor:
    """The cells i·M + j of a path (..., N, M), from the first to the last, then −1: (..., N + M − 1)."""
    rows, columns = path.shape[-2:]
    count = rows * columns
    cells = torch.where(path.flatten(-2) > 0, torch.arange(count, device=path.device), count)
    cells = cells.sort(-1).values[..., : rows + columns - 1]
    return torch.where(cells == count, -1, cells)


class GridProgram(Program):
    """The alignments of two series."""

    name = "dtw"
    scores = ("cost",)
    sense = -1
    index_dims = (1, 0)
    tape_is_large = True
    nodes = staticmethod(nodes)
    empty_paths = staticmethod(empty_paths)
    check_index = staticmethod(check_index)
    check = staticmethod(check)
    extra_nodes = staticmethod(extra_nodes)
    engine_index = staticmethod(engine_index)
    weights = staticmethod(weights)
    along = staticmethod(along)
    onto_scores = staticmethod(onto_scores)
    compact_paths = staticmethod(found_paths)

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return theta[0].shape[1] + theta[0].shape[2] - 2

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        return [is_inside(theta[0], index)]

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        rows, columns = theta[0].shape[1:]
        flat = theta[0].new_zeros((*paths.shape[:-1], rows * columns + 1))
        cells = torch.where(paths < 0, rows * columns, paths)
        return flat.scatter(-1, cells, 1)[..., :-1].reshape(*paths.shape[:-1], rows, columns)

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return from_cells(event)

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        return index[:1]
