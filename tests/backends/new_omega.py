"""Programs under an Ω with new kernels, against the reference. ``test_new_omega.py`` runs this file in a process that
has these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.cubic import Cubic
from support.problems import diamond
from torch import Tensor

import bellmax as bx

OMEGA = Cubic(0.7, gamma=0.8)
Build = Callable[[torch.dtype], tuple[bx.PathDistribution, list[Tensor]]]


def scores(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def chain(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta = scores(dtype, 3, 3, 30, 30)
    theta[0, 1, :, 3:9] = -math.inf
    theta[1] *= 1e4  # thresholds that are stored relative to the maximum
    theta.requires_grad_()
    return bx.Chain(theta, lengths=torch.tensor([3, 3, 2]), omega=OMEGA), [theta]


def scored_chain(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta = [scores(dtype, *shape).requires_grad_() for shape in ((9, 4, 3), (3, 3), (3,), (3,))]
    emissions, transitions, start, end = theta
    return bx.Chain.from_scores(emissions, transitions, start=start, end=end, omega=OMEGA), theta


def graph(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta = scores(dtype, 2, 10)
    theta[0, 3] = -math.inf
    theta.requires_grad_()
    return diamond().paths(theta, omega=OMEGA), [theta]


def warping(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    cost = scores(dtype, 2, 5, 6).abs().requires_grad_()
    lengths = torch.tensor([5, 3]), torch.tensor([6, 2])
    return bx.DTW(cost, lengths=lengths, band=1.3, omega=OMEGA), [cost]


def alignment(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta, opened = scores(dtype, 2, 3, 4).requires_grad_(), (-scores(dtype, 2).abs()).requires_grad_()
    return bx.SequenceAlignment(theta, gap_open=opened, mode="local", omega=OMEGA), [theta, opened]


def ctc(dtype: torch.dtype) -> tuple[bx.PathDistribution, list[Tensor]]:
    emissions = scores(dtype, 2, 5, 4).requires_grad_()
    lengths = torch.tensor([5, 4]), torch.tensor([2, 1])
    return bx.CTC(emissions, torch.tensor([[1, 1], [3, 0]]), lengths=lengths, omega=OMEGA), [emissions]


def results(build: Build, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    with bx.use_backend(backend):
        p, theta = build(dtype)
    assert p.backend == backend
    gradients = torch.autograd.grad(p.value.sum(), theta, create_graph=True)
    z = [scores(dtype, *t.shape, seed=1) for t in theta]
    slope = sum((g * y).sum() for g, y in zip(gradients, z, strict=True))
    products = torch.autograd.grad(slope, theta)
    named = {"value": p.value, "entropy": p.entropy()}
    named |= {f"gradient {n}": g for n, g in enumerate(gradients)}
    return named | {f"Hessian product {n}": g for n, g in enumerate(products)}


@pytest.mark.parametrize("build", [chain, scored_chain, graph, warping, alignment, ctc])
def test_results_equal_the_reference(build: Build) -> None:
    reference = results(build, torch.float64, "reference")
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-9)):
        native = results(build, dtype, "native")
        for name, expected in reference.items():
            message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(native[name].double(), expected, rtol=tolerance, atol=tolerance, msg=message)


def test_pairs_of_short_series_equal_the_reference() -> None:
    x, y = scores(torch.float32, 3, 4, 1), scores(torch.float32, 2, 5, 1, seed=1)
    distances = bx.dtw_cdist(x, y, omega=OMEGA)
    with bx.use_backend("reference"):
        torch.testing.assert_close(distances, bx.dtw_cdist(x, y, omega=OMEGA), rtol=2e-5, atol=2e-5)
