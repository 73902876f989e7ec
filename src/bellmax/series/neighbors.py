"""The nearest series of a collection."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bellmax.inputs import answers_near_misses
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import (
    Collection,
    Pairs,
    bar,
    check_collections,
    check_single_gamma,
    joined,
    neighbors_kernel,
)
from bellmax.series.costs import Cost
from bellmax.series.jobs import (
    CELLS_OF_BLOCK,
    Advance,
    Block,
    Job,
    Tensors,
    check_client,
    found_in,
    mean_length,
    parts,
)
from bellmax.series.pairs import Measure, measure_of
from bellmax.tensors import Gamma

_PAIRS = 2**22  # that a kernel goes through, or a matrix holds, before others may interrupt
_QUERIES = 64  # at least, for which the others are laid out


class Neighbors(NamedTuple):
    """What :func:`dtw_neighbors` finds."""

    distances: Tensor  # (K, k)
    indices: Tensor  # (K, k)


@answers_near_misses
def dtw_neighbors(
    xs: Collection,
    ys: Collection | None = None,
    *,
    k: int,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "hard",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    client: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Neighbors:
    """The k series of ``ys`` that are nearest to each series of ``xs``, by DTW or a smoothed form of it.

    The result is exact: that of :func:`dtw_cdist` and a stable sort. Classical DTW (``omega="hard"``, the default here)
    by "sqeuclidean", "cityblock" or, for one feature, "euclidean" costs is searched with lower bounds (Kim's; Keogh's
    both ways) and sweeps that stop as soon as a series is too far: it takes a small part of the time of all pairs, and
    a narrow ``band`` less still. For other costs, another Ω and divergences no bound would help much (that of soft-DTW,
    hard − γ log(number of alignments), is far below it): all pairs are computed, without a matrix of all of them in
    memory.

    Args:
        xs: K series, as in :func:`dtw_cdist`.
        ys: L series likewise. By default ``xs``, where no series is a neighbour of itself.
        k: how many, from 1 to L, or to K − 1 without ``ys``.
        cost: as in :func:`dtw`.
        band: as in :class:`DTW`.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.
        divergence: as in :func:`dtw`.
        client: searches for some series at a time, as in :func:`dtw_cdist`.
        checkpoint: a folder in which what was found stays: the same call goes on from there.
        progress: whether to draw a bar on standard error, which needs ``pip install 'bellmax[progress]'``.

    Returns:
        ``distances`` (K, k), without gradient, as :func:`dtw` gives them (no square root), nearest first, and
        ``indices`` (K, k) int64 into ``ys``, the lower first where distances are equal.

    >>> import bellmax as bx
    >>> xs = [[0, 1, 2, 1], [0, 0, 1, 2, 1], [5, 5], [4, 6, 5]]
    >>> distances, indices = bx.dtw_neighbors(xs, k=1)
    >>> indices.squeeze(1)                                       # the nearest other series of each
    tensor([1, 0, 3, 2])
    >>> bx.dtw_neighbors([[0, 2]], xs, k=2)
    Neighbors(distances=tensor([[2., 2.]]), indices=tensor([[0, 1]]))
    """
    check_client(client)
    job = neighbors_job(xs, ys, k=k, cost=cost, band=band, omega=omega, gamma=gamma, divergence=divergence)
    if not job.left:
        return Neighbors(job.right[0].new_empty(0, k), torch.empty(0, k, dtype=torch.int64))
    with torch.no_grad(), bar(progress, len(job.left), "series") as advance:
        found = list(found_in(job, client, checkpoint, lambda block: False, advance))
        found.sort(key=lambda each: each[0].rows.start)
        return Neighbors(*map(torch.cat, zip(*(tensors for _, tensors in found), strict=True)))


def neighbors_job(
    xs: Collection,
    ys: Collection | None = None,
    *,
    k: int,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "hard",
    gamma: Gamma | None = None,
    divergence: str | None = None,
) -> Job:
    """What :func:`dtw_neighbors` computes."""
    measure = measure_of(cost, band, resolve(omega, gamma), divergence)
    check_single_gamma(measure)
    with torch.no_grad():
        lists = check_collections(xs=xs) if ys is None else check_collections(xs=xs, ys=ys)
    most = max(0, len(lists[-1]) - (ys is None))
    if not hasattr(k, "__index__") or not 1 <= k <= most:
        others = "the number of other series" if ys is None else "the number of series in ys"
        raise ValueError(f"k must be an integer from 1 to {others}, {most}, got {k!r}")
    return _Nearest(measure, lists[0], lists[-1], int(k))


# Series and, for each, the index that is not to be found, or −1 → distances and indices.
_Search = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]


class _Nearest(Job):
    """Distances and indices of the nearest, for some series at a time."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor], k: int) -> None:
        super().__init__(measure, left, right)
        self._k = k

    @property
    def options(self) -> tuple[Any, ...]:
        return (self._k, self.is_symmetric)

    def blocks(self) -> list[Block]:
        cells = len(self.right) * mean_length(self.left) * mean_length(self.right)
        every = slice(0, len(self.right))
        return [Block(rows, every) for rows in parts(len(self.left), max(_QUERIES, CELLS_OF_BLOCK // cells))]

    def shape(self, block: Block) -> tuple[int, int]:
        return len(self.left[block.rows]), self._k

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.value_dtype, torch.int64

    def size(self, block: Block) -> int:
        return len(self.left[block.rows])

    def compute(self, block: Block, advance: Advance = lambda done: None) -> Tensors:
        """Some queries at a time, those of one length together."""
        search = _by_bounds(self.measure, self.right, self._k) or _by_all_pairs(self.measure, self.right, self._k)
        order = sorted(range(len(self.left))[block.rows], key=lambda q: len(self.left[q]))
        found, device = [], self.left[0].device
        for part in parts(len(order), max(1, _PAIRS // len(self.right))):
            queries = order[part]
            itself = torch.tensor(queries if self.is_symmetric else [-1] * len(queries), device=device)
            found.append(search([self.left[q] for q in queries], itself))
            advance(len(queries))
        back = torch.tensor(order, device=device).argsort()
        return tuple(torch.cat(each)[back] for each in zip(*found, strict=True))


def _by_bounds(measure: Measure, right: list[Tensor], k: int) -> _Search | None:
    """By the kernel for hard DTW, if it serves these."""
    run = neighbors_kernel(measure, right)
    if run is None:
        return None
    candidates = joined(right)
    if not bool(candidates[0].isfinite().all()):
        return None

    def search(queries: list[Tensor], without: Tensor) -> tuple[Tensor, Tensor]:
        given = joined(queries)
        if not bool(given[0].isfinite().all()):
            return _by_all_pairs(measure, right, k)(queries, without)
        distances, indices, _ = run(given, candidates, without, k)
        return distances, indices

    return search


def _by_all_pairs(measure: Measure, right: list[Tensor], k: int) -> _Search:
    def search(queries: list[Tensor], without: Tensor) -> tuple[Tensor, Tensor]:
        values = Pairs(measure, queries, right).all()
        rows = (without >= 0).nonzero().squeeze(1)
        values[rows, without[rows]] = math.nan  # a sort puts it last
        distances, indices = values.sort(dim=1, stable=True)
        return distances[:, :k].clone(), indices[:, :k].clone()

    return search
