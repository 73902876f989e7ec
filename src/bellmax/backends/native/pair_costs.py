"""Fused kernel: costs of the elements of small pairs of series, where a call takes longer than the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.fused import PairCosts
from bellmax.backends.native.loading import call, contiguous, empty_like

_MAX_DIFFERENCES = 2**14  # beyond it, the operators of torch are faster


class NativePairCosts:
    """Σ_d |x_id − y_jd|^power, (B, N, M)."""

    def supports(self, problem: PairCosts) -> bool:
        x, y, _ = problem
        is_small = x.numel() * y.shape[1] <= _MAX_DIFFERENCES
        return (
            is_small and x.shape[0] == y.shape[0] and x.dtype == y.dtype and x.dtype in (torch.float32, torch.float64)
        )

    def run(self, problem: PairCosts) -> Tensor:
        x, y, power = problem
        costs = x.new_empty((x.shape[0], x.shape[1], y.shape[1]))
        call("series_costs", *contiguous((x, y)), power, costs)
        return costs

    def vjp(self, problem: PairCosts, saved: None, grad: Tensor) -> list[Tensor]:
        x, y, power = problem
        gradients = empty_like((x, y))
        call("series_costs_vjp", *contiguous((x, y)), power, grad.contiguous(), *gradients)
        return gradients
