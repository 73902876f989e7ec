"""The search for nearest neighbors under hard DTW, which computes few cells and no cost matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.backends.fused import Concatenated, Nearest, NeighborSearch
from bellmax.series.costs import as_power
from bellmax.series.measure import Measure
from bellmax.series.runs import Advance, num_pairs, slices

_ROWS = 256  # of a matrix of all pairs that one search computes


def concatenated(collection: Sequence[Tensor]) -> Concatenated:
    """Join the series of a collection in one tensor."""
    lengths = torch.tensor([0, *map(len, collection)], device=collection[0].device)
    return Concatenated(torch.cat(list(collection)), lengths.cumsum(0))


def is_finite(collection: Concatenated) -> bool:
    """True if no element is infinite or NaN, as the kernel requires."""
    return bool(collection.elements.isfinite().all())


def can_search(measure: Measure, collection: Concatenated) -> bool:
    """True if a kernel can search finite series of this dtype by this measure."""
    kernel = measure.fused_kernels(collection.elements.device).neighbors
    if kernel is None or measure.divergence is not None:
        return False
    problem = _problem(measure, collection, collection, collection.offsets, k=1)
    return problem is not None and kernel.supports(problem)


def search(measure: Measure, queries: Concatenated, candidates: Concatenated, excluded: Tensor, k: int) -> Nearest:
    """The k nearest candidates of each query, if :func:`can_search` and all series are finite.

    ``excluded`` (Q,) is the index of a candidate that a query must not find, or −1.
    """
    kernel = measure.fused_kernels(queries.elements.device).neighbors
    problem = _problem(measure, queries, candidates, excluded, k)
    assert kernel is not None
    assert problem is not None
    nearest = kernel.run(problem)
    assert nearest is not None
    return nearest


def search_all(
    measure: Measure, left: list[Tensor], right: list[Tensor], is_diagonal: bool, advance: Advance
) -> Tensor:
    """The distances (K, L) of all pairs, by a search with k = all; ``is_diagonal`` if both lists are the same."""
    distances = right[0].new_zeros(len(left), len(right))
    # A symmetric matrix is computed above the diagonal, and in squares on it: narrow slices of rows make these small.
    for rows in slices(len(left), _ROWS // 8 if is_diagonal else _ROWS):
        start = rows.start if is_diagonal else 0
        queries, candidates = left[rows], right[start:]
        excluded = torch.full((len(queries),), -1, device=distances.device)
        nearest = search(measure, concatenated(queries), concatenated(candidates), excluded, len(candidates))
        distances[rows, start:].scatter_(1, nearest.indices, nearest.distances)
        advance(num_pairs(len(queries), len(queries), is_diagonal) + len(queries) * (len(candidates) - len(queries)))
    if is_diagonal:
        distances.triu_()
        distances += distances.triu(1).mT
    return distances


def _problem(
    measure: Measure, queries: Concatenated, candidates: Concatenated, excluded: Tensor, k: int
) -> NeighborSearch | None:
    """The problem for the kernel; None if the cost is not a power of the distance, or Ω is written in Python."""
    power, omega = as_power(measure.cost, queries.elements.shape[1]), measure.omega.kernel
    if power is None or omega is None:
        return None
    band = math.inf if measure.band is None else float(measure.band)
    return NeighborSearch(queries, candidates, excluded, k, power, band, omega)
