"""The nearest neighbors of each series in a collection."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bellmax.inputs import answers_near_misses
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection, Pairs, check_collections, progress_bar, single_gamma
from bellmax.series.costs import Cost
from bellmax.series.jobs import CELLS_OF_BLOCK, Block, Job, Results, check_client, mean_length, results_of
from bellmax.series.measure import Measure, measure_of
from bellmax.series.runs import Advance, slices
from bellmax.series.search import can_search, concatenated, is_finite, search
from bellmax.tensors import Gamma

_PAIRS = 2**22  # that a kernel compares, or a matrix holds, before an interrupt is handled
_QUERIES = 64  # in a block, at least: every block prepares all candidates


class Neighbors(NamedTuple):
    """The result of :func:`dtw_neighbors`."""

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
    """Return the k nearest neighbors of each series of ``xs`` among the series of ``ys``, under classical DTW or
    soft-DTW.

    The result is exact: you would get the same neighbors from the matrix of :func:`dtw_cdist` if you sorted each row.
    The default is classical DTW, ``omega="hard"``. Classical DTW has a fast search for the costs "sqeuclidean" and
    "cityblock", and for "euclidean" if the series have one feature. The fast search skips most pairs by lower bounds
    (LB_Kim, and LB_Keogh in both directions) and stops the computation of a pair early (early abandoning). A narrow
    ``band`` makes the search faster. With another cost, another Ω or a divergence, the DTW of all pairs is computed,
    but the matrix is not stored.

    Args:
        xs: K series, as in :func:`dtw_cdist`.
        ys: L series, in the formats of ``xs``, default ``xs``. If ``ys`` is not passed, the neighbors of a series are
            searched among the other series of ``xs``.
        k: The number of neighbors, from 1 to L, or to K − 1 without ``ys``.
        cost: The cost of matching two elements, as in :func:`dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`DTW`. Default None, no band.
        omega: The regularizer Ω: "hard" (the default), "negentropy", "sparsemax", "entmax", "l2", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        divergence: A divergence, as in :func:`dtw`. Default None.
        client: A client whose workers do the search, as in :func:`dtw_cdist`.
        checkpoint: A folder where finished parts of the search are stored. If a call is interrupted, repeat the call to
            resume.
        progress: If True, draw a progress bar on standard error, which needs ``pip install 'bellmax[progress]'``.
            Default False.

    Returns:
        The named tuple ``Neighbors`` with two tensors (K, k), nearest first. ``distances`` contains sums of costs
        without a square root, and has no gradient. ``indices`` (int64) contains the positions of the neighbors in
        ``ys``. If distances are equal, the lower index comes first.

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
    with torch.no_grad(), progress_bar(progress, len(job.left), "series") as advance:
        blocks = list(results_of(job, client, checkpoint, lambda block: False, advance))
        blocks.sort(key=lambda block_and_results: block_and_results[0].rows.start)
        return Neighbors(*map(torch.cat, zip(*(results for _, results in blocks), strict=True)))


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
    """The job of a call of :func:`dtw_neighbors`."""
    measure = single_gamma(measure_of(cost, band, resolve(omega, gamma), divergence))
    with torch.no_grad():
        lists = check_collections(xs=xs) if ys is None else check_collections(xs=xs, ys=ys)
    most = max(0, len(lists[-1]) - (ys is None))
    if not hasattr(k, "__index__") or not 1 <= k <= most:
        others = "the number of other series" if ys is None else "the number of series in ys"
        raise ValueError(f"k must be an integer from 1 to {others}, {most}, got {k!r}")
    return _NeighborsJob(measure, lists[0], lists[-1], int(k))


# Maps queries, and for each the index of a candidate that it must not find (or −1), to distances and indices (Q, k).
_Search = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]


class _NeighborsJob(Job):
    """Distances and indices of the nearest neighbors. A block is some queries and all candidates."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor], k: int) -> None:
        super().__init__(measure, left, right)
        self._k = k

    @property
    def options(self) -> tuple[Any, ...]:
        return (self._k, self.is_symmetric)

    def blocks(self) -> list[Block]:
        cells = len(self.right) * mean_length(self.left) * mean_length(self.right)
        candidates = slice(0, len(self.right))
        return [Block(rows, candidates) for rows in slices(len(self.left), max(_QUERIES, CELLS_OF_BLOCK // cells))]

    def shape(self, block: Block) -> tuple[int, int]:
        return len(self.left[block.rows]), self._k

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.value_dtype, torch.int64

    def size(self, block: Block) -> int:
        return len(self.left[block.rows])

    def compute(self, block: Block, advance: Advance = lambda done: None) -> Results:
        """Search for some queries at a time, in order of length, since queries of one length share their bounds."""
        find = _pruned_search(self.measure, self.right, self._k) or _full_search(self.measure, self.right, self._k)
        order = sorted(range(len(self.left))[block.rows], key=lambda q: len(self.left[q]))
        results, device = [], self.left[0].device
        for chunk in slices(len(order), max(1, _PAIRS // len(self.right))):
            queries = order[chunk]
            excluded = torch.tensor(queries if self.is_symmetric else [-1] * len(queries), device=device)
            results.append(find([self.left[q] for q in queries], excluded))
            advance(len(queries))
        original_order = torch.tensor(order, device=device).argsort()
        return tuple(torch.cat(chunks)[original_order] for chunks in zip(*results, strict=True))


def _pruned_search(measure: Measure, right: list[Tensor], k: int) -> _Search | None:
    """Search by the kernel for hard DTW; None if it cannot search these candidates."""
    candidates = concatenated(right)
    if not (can_search(measure, candidates) and is_finite(candidates)):
        return None

    def find(queries: list[Tensor], excluded: Tensor) -> tuple[Tensor, Tensor]:
        joined = concatenated(queries)
        if not is_finite(joined):
            return _full_search(measure, right, k)(queries, excluded)
        nearest = search(measure, joined, candidates, excluded, k)
        return nearest.distances, nearest.indices

    return find


def _full_search(measure: Measure, right: list[Tensor], k: int) -> _Search:
    """Search by computing all distances and sorting them."""

    def find(queries: list[Tensor], excluded: Tensor) -> tuple[Tensor, Tensor]:
        matrix = Pairs(measure, queries, right).all()
        rows = (excluded >= 0).nonzero().squeeze(1)
        matrix[rows, excluded[rows]] = math.nan  # sort puts NaN last
        distances, indices = matrix.sort(dim=1, stable=True)
        return distances[:, :k].clone(), indices[:, :k].clone()

    return find
