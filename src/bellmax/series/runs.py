"""Parts of collections: slices, runs of series that have similar lengths, and pairs of two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

CELLS = (
    2**20
)  # of the cost matrices of a batch: larger ones need fresh pages, and page faults cost more than the sweeps
_MAX_RATIO = 1.25  # between the longest and the shortest series of a run

Advance: TypeAlias = "Callable[[int], object]"
"""Moves a progress bar by a number of pairs or series."""


def slices(count: int, step: int) -> list[slice]:
    """Cut range(count) into slices of length ``step``; the last may be shorter."""
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def num_pairs(height: int, width: int, is_symmetric: bool) -> int:
    """The number of pairs in a matrix; in a symmetric one, of those on and above the diagonal."""
    return height * (height + 1) // 2 if is_symmetric else height * width


class Run(NamedTuple):
    """Series of a collection that have similar lengths."""

    positions: Tensor
    """The index of each series in the collection, (K,)."""
    series: Tensor
    """(K, N, D), zeros past the end of a series."""
    lengths: Tensor
    """(K,)."""


def runs_of(collection: Sequence[Tensor], max_cells: int) -> list[Run]:
    """Group a collection into runs, from short series to long ones.

    The cost matrices of all pairs of two runs have at most ``max_cells`` cells, unless a run is a single series.
    """
    runs: list[list[int]] = []
    for k in sorted(range(len(collection)), key=lambda k: len(collection[k])):
        length, features = collection[k].shape
        if runs:
            fits = (len(runs[-1]) + 1) * (length + features) <= math.isqrt(max_cells)
            if fits and length <= _MAX_RATIO * len(collection[runs[-1][0]]):
                runs[-1].append(k)
                continue
        runs.append([k])
    device = collection[0].device if collection else None
    return [
        Run(
            torch.tensor(run, device=device),
            pad_sequence([collection[k] for k in run], batch_first=True),
            torch.tensor([len(collection[k]) for k in run], device=device),
        )
        for run in runs
    ]


class Selection(NamedTuple):
    """Pairs out of two runs: series i[p] of the first with series j[p] of the second."""

    row: Run
    column: Run
    i: Tensor
    """(P,)."""
    j: Tensor
    """(P,)."""

    @property
    def positions(self) -> tuple[Tensor, Tensor]:
        """The indices of both series of each pair in their collections."""
        return self.row.positions[self.i], self.column.positions[self.j]


def all_pairs(rows: list[Run], columns: list[Run]) -> Iterator[Selection]:
    """All pairs of two collections; if ``rows is columns``, only one of the pairs (a, b) and (b, a)."""
    for r, row in enumerate(rows):
        for column in columns[r if rows is columns else 0 :]:
            every = torch.ones(len(row.lengths), len(column.lengths), device=row.lengths.device)
            i, j = every.nonzero().unbind(-1)
            once = i <= j if row is column else slice(None)
            yield Selection(row, column, i[once], j[once])


def self_pairs(run: Run) -> Selection:
    """Each series of a run with itself."""
    every = torch.arange(len(run.lengths), device=run.lengths.device)
    return Selection(run, run, every, every)
