"""The values of many pairs of short series, without their cost matrices: a pair in each lane of a vector."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_SHORT = 64  # elements up to which pairs side by side are faster than strips of one pair
_FEW = 8  # pairs below which most lanes would be idle


class ShortPairs:
    """DTW_Ω at γ = 1 of pairs out of two collections; a match costs ``scale`` · Σ |x − y|^power."""

    def serves(self, kernel: Kernel | None, x: Tensor, y: Tensor, pairs: int) -> bool:
        is_kind = x.dtype == y.dtype and x.dtype in (torch.float32, torch.float64)
        return kernel is not None and is_kind and pairs >= _FEW and max(x.shape[1], y.shape[1]) <= _SHORT

    def run(
        self, kernel: Kernel, x: Tensor, y: Tensor, lengths: Tensors, pairs: Tensors, power: int, scale: float
    ) -> Tensor | None:
        """(P,), for series x (K, N, D) and y (L, M, D), their lengths, and the members of each pair; None if a series
        holds infinity or NaN."""
        if not (bool(x.isfinite().all()) and bool(y.isfinite().all())):
            return None
        values = x.new_empty(pairs[0].shape)
        given = contiguous((x, lengths[0], y, lengths[1], *pairs, values))
        call("dtw_short_pairs", *given, power, scale, *kernel)
        return values
