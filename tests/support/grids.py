"""DTW alignments as the paths of an explicit graph."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import bellmax as bx
from support.problems import Enumerated

MOVES = (1, 1), (1, 0), (0, 1)  # (di, dj) of the moves into a cell: diagonal, up, left
START, END = 3, 4  # kinds of the remaining edges


class Grid(NamedTuple):
    """A pair's alignments as the paths of a graph: node 0, then the cells row by row, then an end if it is open."""

    edges: list[tuple[int, int]]
    cell: Tensor  # the cell that each edge leads into; the number of cells for the end
    kind: Tensor
    shape: tuple[int, int]

    def on_edges(self, cells: Tensor, factors: Tensor | None = None) -> Tensor:
        """Gather costs (n, m) into a cost for each edge, with a factor for each of the three kinds of move."""
        flat = torch.cat((cells.flatten(), cells.new_zeros(1)))[self.cell]
        return flat if factors is None else flat * torch.cat((factors, factors.new_ones(2)))[self.kind]

    def on_cells(self, edges: Tensor, shape: tuple[int, int]) -> Tensor:
        """Sum numbers of edges (..., E) into their cells, padded with zeros to (..., *shape)."""
        n, m = self.shape
        cells = edges.new_zeros((*edges.shape[:-1], n * m + 1)).index_add(-1, self.cell, edges)[..., :-1]
        padding = (0, shape[1] - m, 0, shape[0] - n)
        return torch.nn.functional.pad(cells.reshape(*edges.shape[:-1], n, m), padding)


@lru_cache
def grid(n: int, m: int, open_begin: bool = False, open_end: bool = False) -> Grid:
    edges, cell, kind = [], [], []
    for i in range(n):
        for j in range(m):
            into = [(0, START)] if i == 0 and (j == 0 or open_begin) else []
            for move, (a, b) in enumerate(MOVES):
                if i >= a and j >= b:
                    into.append((1 + (i - a) * m + j - b, move))
            edges += [(parent, 1 + i * m + j) for parent, _ in into]
            cell += [i * m + j] * len(into)
            kind += [move for _, move in into]
    if open_end:
        edges += [(1 + (n - 1) * m + j, 1 + n * m) for j in range(m)]
        cell += [n * m] * m
        kind += [END] * m
    return Grid(edges, torch.tensor(cell), torch.tensor(kind), (n, m))


def enumerated(cost: Tensor, omega: bx.Regularizer) -> Enumerated:
    """All alignments of one pair with costs (n, m)."""
    g = grid(*cost.shape)
    return Enumerated(g.edges, cost.numel() + 1, (-g.on_edges(cost)).tolist(), omega)
