"""The sweeps of dynamic time warping: those of the DAG, on the grid of cells.

θ is the cost (B, N, M); a path is a monotone alignment from cell (0, 0) to the last one of its pair, and the program is
a min: its value is −DP_Ω of the graph whose edges into a cell all weigh minus its cost. ``index`` is the lengths (B, 2)
int64, the band (B,) float64, ∞ for none, and a bool tensor: (B, 1) if a tape is to be kept, (B, 0) if the value is all
that is wanted.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bellmax.backends.potentials import Tensors
from bellmax.backends.reference import dag
from bellmax.regularizers import Regularizer

if TYPE_CHECKING:
    from bellmax.dag import DAG

index_is_batched = True

DIAGONAL, UP, LEFT = range(3)


class Grid(NamedTuple):
    """The graph of N × M cells: node 0 leads into every cell of the first row, and every cell into the last node.

    The edges come in three parts: M from the start, those between cells, and N·M to the end.
    """

    dag: DAG
    cell: Tensor  # of each edge but those to the end: the cell it leads into, i·M + j
    kind: Tensor  # of the same edges: DIAGONAL, UP or LEFT; those from the start count as diagonal


@lru_cache(maxsize=8)
def grid(rows: int, columns: int, device: torch.device) -> Grid:
    with torch._C._DisableFuncTorch():  # the graph is the same whatever transforms its caller is under
        return _make_grid(rows, columns, device)


def _make_grid(rows: int, columns: int, device: torch.device) -> Grid:
    from bellmax.dag import DAG

    cell = torch.arange(rows * columns).reshape(rows, columns)
    into = cell[:1], cell[1:, 1:], cell[1:], cell[:, 1:]
    out_of = torch.full((1, columns), -1), cell[:-1, :-1], cell[:-1], cell[:, :-1]
    child, parent = (torch.cat([cells.flatten() for cells in part]) for part in (into, out_of))
    end = torch.full((rows * columns,), rows * columns)
    edges = torch.stack((torch.cat((parent, cell.flatten())), torch.cat((child, end))), 1) + 1
    kinds = (DIAGONAL, DIAGONAL, UP, LEFT)
    kind = torch.cat([torch.full((cells.numel(),), k) for cells, k in zip(into, kinds, strict=True)])
    return Grid(DAG(edges).to(device), child.to(device), kind.to(device))


def band_of(lengths: Tensor, band: Tensor, rows: int, columns: int) -> Tensor:
    """(..., N, M): the cells of each pair that are within its lengths (..., 2) and its band (...)."""
    i = torch.arange(rows, device=lengths.device).unsqueeze(-1)
    j = torch.arange(columns, device=lengths.device)
    own_rows, own_columns = lengths[..., None, None].unbind(-3)
    off_diagonal = (i * (own_columns - 1) - j * (own_rows - 1)).abs()
    reach = band[..., None, None].clamp(min=0.5) * (torch.maximum(own_rows, own_columns) - 1)
    near = (off_diagonal <= reach) | reach.isnan()  # ∞ · 0: a single cell, without a band
    return near & (i < own_rows) & (j < own_columns)


def is_end(lengths: Tensor, rows: int, columns: int) -> Tensor:
    """(..., N, M): the last cell of each pair."""
    i = torch.arange(rows, device=lengths.device).unsqueeze(-1)
    j = torch.arange(columns, device=lengths.device)
    own_rows, own_columns = lengths[..., None, None].unbind(-3)
    return (i == own_rows - 1) & (j == own_columns - 1)


def _graph(theta: Tensors, index: Tensors) -> tuple[Grid, Tensors]:
    """The grid, and the weights (B, E) of its edges."""
    (cost,) = theta
    rows, columns = cost.shape[1:]
    g = grid(rows, columns, cost.device)
    cells = -cost.masked_fill(~band_of(index[0], index[1], rows, columns), math.inf)
    ends = torch.zeros_like(cells).masked_fill(~is_end(index[0], rows, columns), -math.inf)
    weights = torch.cat((cells.flatten(1).index_select(1, g.cell[columns:]), ends.flatten(1)), 1)
    start = cells[:, 0].masked_fill(torch.arange(columns, device=cost.device) > 0, -math.inf)
    return g, [torch.cat((start, weights), 1)]


def _onto_cells(g: Grid, edges: Tensor, cost: Tensor) -> Tensor:
    """(B, E) summed over the edges into each cell: (B, N, M)."""
    cells = edges.new_zeros((cost.shape[0], cost.shape[1] * cost.shape[2]))
    return cells.index_add(1, g.cell, edges[:, : g.cell.shape[0]]).reshape(cost.shape)


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    batch, rows, columns = theta[0].shape
    return theta[0].new_empty((batch, index[2].shape[1] * (rows * columns + 2)), dtype=torch.float64)


def empty_paths(theta: Tensors, count: int) -> Tensor:
    """Room for paths (B, count, N + M − 1): the cells i·M + j from the first to the last, then −1."""
    batch, rows, columns = theta[0].shape
    return theta[0].new_empty((batch, count, rows + columns - 1), dtype=torch.int64)


def check_index(theta: Tensors, index: Tensors) -> None:
    lengths = index[0]
    if lengths.device.type != "cpu":
        return
    for side, (size, own) in enumerate(zip(theta[0].shape[1:], lengths.unbind(1), strict=True)):
        wrong = ((own < 1) | (own > size)).nonzero()
        if wrong.numel():
            batch = int(wrong[0])
            raise ValueError(
                f"lengths[{side}] must be from 1 to {size}, got {int(own[batch])} for batch element {batch} "
                "(batch flattened)"
            )


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    (cost,) = theta
    bad = ~(cost > -math.inf) & band_of(index[0], index[1], *cost.shape[1:])
    if cost.device.type != "cpu" or not bool(bad.any()):
        return
    batch, i, j = bad.nonzero()[0].tolist()
    raise ValueError(
        f"cost must be finite or +inf, got {cost[batch, i, j].item()} at cell {(i, j)} of batch element {batch} "
        "(batch flattened)"
    )


def forward(theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    g, weights = _graph(theta, index)
    value, tape = dag.forward(weights, g.dag._index, omega)
    # The graph has one more node than the grid, the end, with a single parent.
    vertex = omega.penalty(value.new_ones(1, dtype=torch.float64)).to(value.dtype)
    return -(value + vertex), tape if index[2].shape[1] else tape[:, :0].clone()


def backward(theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    g, weights = _graph(theta, index)
    (path,) = dag.backward(weights, tape, seed, g.dag._index, omega)
    return [_onto_cells(g, path, theta[0])]


def hessian(theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
    g, weights = _graph(theta, index)
    (cells,) = z
    along = cells.flatten(1).index_select(1, g.cell)
    along = torch.cat((along, along.new_zeros(cells.flatten(1).shape)), 1)
    (product,) = dag.hessian(weights, tape, seed, [along], g.dag._index, omega)
    return [-_onto_cells(g, product, theta[0])]


def sample(theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Paths drawn with ``uniforms`` (B, K, N + M − 2), one for each move back from the last cell."""
    g, weights = _graph(theta, index)
    (cost,) = theta
    batch, rows, columns = cost.shape
    inner_edges = g.cell.shape[0]
    (log_q,) = dag.log_transitions(weights, tape, g.dag._index, omega)
    q = log_q.new_zeros((batch, rows * columns, 3), dtype=torch.float64)
    q[:, g.cell, g.kind] = log_q[:, :inner_edges].double().exp()
    back = torch.tensor((columns + 1, columns, 1), device=cost.device)
    last = (index[0][:, 0] - 1) * columns + index[0][:, 1] - 1
    exists = log_q[:, inner_edges:].gather(1, last.unsqueeze(1)) > -math.inf
    cell = torch.where(exists, last.unsqueeze(1), -1).expand(uniforms.shape[:2])
    cells = [cell]
    for n in range(uniforms.shape[2]):
        here = q.gather(1, cell.clamp(min=0).unsqueeze(-1).expand(-1, -1, 3))
        cumulative = here.cumsum(-1)
        target = (uniforms[..., n] * cumulative[..., -1]).unsqueeze(-1)
        move = (cumulative <= target).sum(-1).clamp(max=2)
        cell = torch.where(cell > 0, cell - back[move], -1)
        cells.append(cell)
    return _in_order(torch.stack(cells, -1), rows * columns)


def _in_order(cells: Tensor, none: int) -> Tensor:
    """Cells along the last dimension from the first of a path to its last, then −1, which marks the missing ones."""
    ascending = torch.where(cells < 0, none, cells).sort(-1).values
    return torch.where(ascending == none, -1, ascending)
