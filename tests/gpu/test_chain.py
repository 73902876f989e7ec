"""Dense chains by Triton kernels on an emulated GPU, against plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from gpu.comparing import assert_close, assert_sweeps
from gpu.driver import Log

FLOAT32, FLOAT64 = torch.float32, torch.float64
OMEGAS = {
    "negentropy": bx.Negentropy(),
    "l2": bx.SquaredL2(),
    "tsallis2": bx.Tsallis(2.0),
    "tsallis1.5": bx.Tsallis(1.5),
    "hard": bx.Hard(),
}
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
STEPS = {"all": (), "lengths": (torch.tensor([5, 3, 1, 0]),), "mask": (MASK.sum(1), MASK)}

slow = pytest.mark.slow_gpu
QUICK = ("negentropy", FLOAT32, "lengths", 17)
# Every Ω and dtype, lengths and masks, and every block size.
CASES = [
    *((omega, dtype, "mask", 5) for omega in OMEGAS for dtype in (FLOAT32, FLOAT64)),
    *(("l2", FLOAT32, padding, 3) for padding in ("all", "lengths")),
    *(
        (omega, dtype, "lengths", states)
        for states in (1, 2, 33)
        for omega, dtype in (("l2", FLOAT32), ("negentropy", FLOAT64))
    ),
    ("tsallis1.5", FLOAT64, "all", 17),
    ("hard", FLOAT64, "lengths", 64),
    ("negentropy", FLOAT32, "all", 64),
]


def step_mask(padding: str) -> Tensor:
    if padding == "mask":
        return MASK
    return torch.arange(5) < (STEPS[padding][0] if padding == "lengths" else torch.full((4,), 5)).unsqueeze(-1)


def potentials(padding: str, states: int, dtype: torch.dtype) -> Tensor:
    """Scores with NaN in the padding, missing edges, and from the third member on unreachable states."""
    theta = 2 * torch.randn(4, 5, states, states, dtype=dtype)
    theta[torch.rand(theta.shape) < 0.2] = -math.inf
    theta[:2, :, 0, 0] = 0.5
    return theta.masked_fill(~step_mask(padding)[..., None, None], math.nan)


@pytest.mark.parametrize(
    ("omega", "dtype", "padding", "states"), [QUICK, *(pytest.param(*c, marks=slow) for c in CASES)]
)
def test_sweeps(omega: str, dtype: torch.dtype, padding: str, states: int, launches: Log) -> None:
    assert_sweeps("chain", [potentials(padding, states, dtype)], STEPS[padding], OMEGAS[omega])
    assert launches.kernels == ["chain_forward", "chain_forward", "chain_backward", "chain_tangent", "chain_backward"]


@slow
def test_sequences_without_a_path(launches: Log) -> None:
    theta = torch.full((2, 3, 2, 2), -math.inf)
    theta[1, 0] = 0.0
    p = bx.Chain(theta.requires_grad_())
    (grad,) = torch.autograd.grad(p.value.sum(), theta)
    assert p.value.tolist() == [-math.inf, -math.inf]
    assert not grad.any()
    assert launches


@slow
def test_derivatives(launches: Log) -> None:
    theta = torch.randn(1, 3, 2, 2, dtype=FLOAT64, requires_grad=True)
    for omega in ("negentropy", bx.Tsallis(1.5)):
        assert gradcheck(lambda x, omega=omega: bx.Chain(x, omega=omega).value, theta)
        assert gradgradcheck(lambda x, omega=omega: bx.Chain(x, omega=omega).value, theta)
    assert {"chain_tangent", "chain_backward"} <= set(launches.kernels)


@slow
def test_vmap_and_second_derivatives(launches: Log) -> None:
    def curvature(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (torch.func.grad(lambda w: bx.Chain(w).value.sum())(y) ** 2).sum())(x)

    theta = torch.randn(3, 2, 4, 3, 3, dtype=FLOAT64)
    products, count = torch.func.vmap(curvature)(theta), len(launches)
    with bx.use_backend("reference"):
        assert_close(products, torch.stack([curvature(x) for x in theta]), FLOAT64)
    assert len(launches) == count == 4  # nested batches are flattened


@slow
def test_long_chains_lose_no_digits(launches: Log) -> None:
    theta = torch.randn(1, 120, 5, 5) + 3
    with bx.use_backend("reference"):
        wanted = bx.Chain(theta.double()).value
    assert_close(bx.Chain(theta).value, wanted, FLOAT32)
    assert launches.kernels == ["chain_forward"]


@slow
@pytest.mark.parametrize("omega", ["negentropy", "l2", "tsallis1.5"])
def test_long_chains_lose_no_mass(omega: str, launches: Log) -> None:
    theta = torch.randn(2, 300, 3, 3, requires_grad=True)
    (path,) = torch.autograd.grad(bx.Chain(theta, omega=OMEGAS[omega]).value.sum(), theta)
    torch.testing.assert_close(path.sum((2, 3)), torch.ones(2, 300), rtol=0, atol=4e-6)


def test_unsupported_chains_use_other_backends(launches: Log) -> None:
    """Programs without kernels: more than 64 states, another Ω, no steps; and verbs without kernels."""

    def answers(p: bx.Chain) -> list[Any]:
        torch.manual_seed(1)
        return [p.value, p.sample_sequences((3,)), *p.topk_sequences(2), p.entropy(), p.log_prob(p.sample())]

    theta, wide, none = torch.randn(2, 4, 3, 3), torch.randn(1, 2, 65, 65), torch.randn(2, 0, 3, 3)
    problems = (theta, bx.Negentropy()), (theta, bx.Tsallis(1.3)), (wide, bx.Negentropy()), (none, bx.Negentropy())
    results = [answers(bx.Chain(x, omega=omega)) for x, omega in problems[:1]]
    assert "chain_forward" in launches.kernels
    launches.clear()
    results += [answers(bx.Chain(x, omega=omega)) for x, omega in problems[1:]]
    assert not launches
    with bx.use_backend("reference"):
        wanted = [answers(bx.Chain(x, omega=omega)) for x, omega in problems]
    torch.testing.assert_close(results, wanted)


@slow
def test_gradients_of_many_states_use_another_backend(launches: Log) -> None:
    theta = torch.randn(1, 2, 65, 65, requires_grad=True)
    bx.Chain(theta).value.sum().backward()
    assert theta.grad is not None
    assert not launches
