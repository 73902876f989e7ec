"""Fused kernel: DTW of many pairs of short series without cost matrices, one pair in each lane of a vector."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.fused import ShortPairs
from bellmax.backends.native.loading import call, contiguous


class NativeShortPairs:
    """DTW_Ω at γ = 1 of pairs out of two collections."""

    def supports(self, problem: ShortPairs) -> bool:
        dtype = problem.x.dtype
        return dtype == problem.y.dtype and dtype in (torch.float32, torch.float64)

    def run(self, problem: ShortPairs) -> Tensor:
        x, y, lengths, pairs, power, scale, omega = problem
        values = x.new_empty(pairs[0].shape)
        tensors = contiguous((x, lengths[0], y, lengths[1], *pairs, values))
        call("dtw_short_pairs", *tensors, power, scale, *omega)
        return values
