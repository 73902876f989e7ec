"""The nearest series of each under hard DTW, by lower bounds and sweeps that stop early."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors


class Neighbors:
    """The k nearest series of a collection; a match costs Σ |x − y|^power."""

    def serves(self, kernel: Kernel | None, x: Tensor) -> bool:
        return kernel == Kernel("hard") and x.dtype in (torch.float32, torch.float64)

    def run(
        self, kernel: Kernel, x: Tensors, y: Tensors, without: Tensor, k: int, power: int, band: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Distances (Q, k), indices (Q, k) and the number of cells computed (Q,).

        Collections x and y are the elements of all series, (elements, D), finite, and where each series begins, with
        the end of the last: (Q + 1,). Series of x with equal lengths had better be neighbours. ``without`` (Q,) is an
        index that is not to be found, or −1.
        """
        numbers, queries = x[0], len(x[1]) - 1
        distances = numbers.new_empty(queries, k)
        indices, cells = without.new_empty(queries, k), without.new_empty(queries)
        given = contiguous((*x, *y, without, distances, indices, cells))
        call("dtw_neighbors", numbers.shape[1], *given, power, band)
        return distances, indices, cells
