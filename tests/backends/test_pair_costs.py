"""The fused kernel of costs of small pairs of series."""

from __future__ import annotations

import pytest
import torch
from support.inside import BACKENDS, PairCosts
from support.kernels import needs_kernels, took

import bellmax as bx

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [1, 2])
def test_costs_and_their_gradients(power: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, n, 2, generator=generator, dtype=dtype, requires_grad=True) for n in (4, 5))
    kernel = BACKENDS["native"].fused.pair_costs
    problem = PairCosts(x.detach(), y.detach(), power)
    assert kernel is not None
    assert kernel.supports(problem)
    costs = (x.unsqueeze(2) - y.unsqueeze(1)).abs().pow(power).sum(-1)
    torch.testing.assert_close(kernel.run(problem), costs.detach())
    grad = torch.randn(costs.shape, generator=generator, dtype=dtype)
    for got, wanted in zip(kernel.vjp(problem, None, grad), torch.autograd.grad(costs, (x, y), grad), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shapes", [((4, 2), (5, 2)), ((3, 4, 2), (3, 5, 2)), ((1, 1, 1), (1, 1, 1))])
@pytest.mark.parametrize("learned", [(True, False), (False, True), (True, True)])
def test_dtw_of_small_pairs(shapes: tuple[tuple[int, ...], ...], learned: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    series = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    series = [s.requires_grad_(is_learned) for s, is_learned in zip(series, learned, strict=True)]
    leaves = [s for s in series if s.requires_grad]
    results = []
    for backend, times in (("native", 1), ("reference", 0)):
        with bx.use_backend(backend), took("series_costs", times), took("series_costs_vjp", times):
            value = bx.dtw(*series, gamma=0.7)
            results.append([value, *torch.autograd.grad(value.sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_large_pairs_use_the_operators_of_torch() -> None:
    x, y = torch.zeros(200, 2, requires_grad=True), torch.ones(200, 2)
    with took("series_costs", times=0):
        bx.dtw(x, y).backward()
