"""Fused kernel: nearest neighbors under hard DTW, by lower bounds and sweeps that stop early."""

from __future__ import annotations

import torch

from bellmax.backends.fused import Nearest, NeighborSearch
from bellmax.backends.native.loading import call, contiguous
from bellmax.modes import is_transformed
from bellmax.regularizers import Kernel


class NativeNeighbors:
    """The k nearest series of a collection."""

    def supports(self, problem: NeighborSearch) -> bool:
        queries, candidates = problem.queries.elements, problem.candidates.elements
        has_kernel = problem.omega == Kernel("hard") and queries.dtype in (torch.float32, torch.float64)
        return has_kernel and not is_transformed(queries, candidates)

    def run(self, problem: NeighborSearch) -> Nearest:
        elements, excluded, k = problem.queries.elements, problem.excluded, problem.k
        num_queries = len(excluded)
        nearest = Nearest(
            elements.new_empty(num_queries, k),
            excluded.new_empty(num_queries, k),
            excluded.new_empty(num_queries),
        )
        tensors = contiguous((*problem.queries, *problem.candidates, excluded, *nearest))
        call("dtw_neighbors", elements.shape[1], *tensors, problem.power, problem.band)
        return nearest
