"""The nearest series of a collection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for
from bellmax.inputs import answers_near_misses
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection, all_pairs, bar, check_collections, check_single_gamma
from bellmax.series.costs import Cost, as_power
from bellmax.series.pairs import Measure, measure_of
from bellmax.tensors import Gamma

_PAIRS = 2**22  # that a kernel goes through, or a matrix holds, before others may interrupt


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
    measure = measure_of(cost, band, resolve(omega, gamma), divergence)
    check_single_gamma(measure)
    with torch.no_grad():
        lists = check_collections(xs=xs) if ys is None else check_collections(xs=xs, ys=ys)
        left, right = lists[0], lists[-1]
        most = len(right) - (ys is None)
        if not 1 <= k <= most:
            others = "the number of other series" if ys is None else "the number of series in ys"
            raise ValueError(f"k must be from 1 to {others}, {most}, got {k}")
        if not left:
            return Neighbors(right[0].new_empty(0, k), torch.empty(0, k, dtype=torch.int64))
        search = _by_bounds(measure, right, k) or _by_all_pairs(measure, right, k)
        return _search(search, left, len(right), ys is None, progress)


# Series and, for each, the index that is not to be found, or −1 → distances and indices.
_Search = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]


def _search(search: _Search, left: list[Tensor], others: int, alone: bool, progress: bool) -> Neighbors:
    """Some queries at a time, those of one length together."""
    order = sorted(range(len(left)), key=lambda q: len(left[q]))
    step = max(1, _PAIRS // others)
    parts = []
    with bar(progress, len(left), "series") as advance:
        for start in range(0, len(left), step):
            queries = order[start : start + step]
            itself = torch.tensor(queries if alone else [-1] * len(queries), device=left[0].device)
            parts.append(search([left[q] for q in queries], itself))
            advance(len(queries))
    back = torch.tensor(order, device=left[0].device).argsort()
    distances, indices = (torch.cat(found)[back] for found in zip(*parts, strict=True))
    return Neighbors(distances, indices)


def _by_bounds(measure: Measure, right: list[Tensor], k: int) -> _Search | None:
    """By the kernel for hard DTW, if it serves these."""
    power = as_power(measure.cost, right[0].shape[1])
    shortcut = BACKENDS[backend_for("dtw", right[0].device, measure.omega.kernel)].shortcut("dtw.neighbors")
    if shortcut is None or power is None or measure.divergence is not None:
        return None
    if not shortcut.serves(measure.omega.kernel, right[0]):
        return None
    candidates, band = _joined(right), math.inf if measure.band is None else float(measure.band)
    if not bool(candidates[0].isfinite().all()):
        return None

    def search(queries: list[Tensor], without: Tensor) -> tuple[Tensor, Tensor]:
        joined = _joined(queries)
        if not bool(joined[0].isfinite().all()):
            return _by_all_pairs(measure, right, k)(queries, without)
        distances, indices, _ = shortcut.run(measure.omega.kernel, joined, candidates, without, k, power, band)
        return distances, indices

    return search


def _joined(collection: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All elements, and where each series begins, with the end of the last."""
    lengths = torch.tensor([0, *map(len, collection)], device=collection[0].device)
    return torch.cat(list(collection)), lengths.cumsum(0)


def _by_all_pairs(measure: Measure, right: list[Tensor], k: int) -> _Search:
    def search(queries: list[Tensor], without: Tensor) -> tuple[Tensor, Tensor]:
        values = all_pairs(measure, queries, right)
        rows = (without >= 0).nonzero().squeeze(1)
        values[rows, without[rows]] = math.nan  # a sort puts it last
        distances, indices = values.sort(dim=1, stable=True)
        return distances[:, :k].clone(), indices[:, :k].clone()

    return search
