"""Chains from scores by Triton kernels on an emulated GPU, against plain torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from gpu.comparing import assert_close, assert_sweeps
from gpu.driver import Log
from gpu.test_chain import FLOAT32, FLOAT64, OMEGAS, STEPS, slow, step_mask

SHARED = {"transitions": (1,), "per sequence": (4,), "by step": (1, 4), "per sequence and step": (4, 4)}
QUICK = ("l2", FLOAT32, "mask", "transitions", 3)
# Every Ω and dtype, every kind of transitions, lengths and masks, and every block size.
CASES = [
    *((omega, dtype, "lengths", "transitions", 5) for omega in OMEGAS for dtype in (FLOAT32, FLOAT64)),
    *(("negentropy", FLOAT32, "mask", kind, 5) for kind in SHARED),
    ("l2", FLOAT64, "all", "per sequence and step", 3),
    *(
        (omega, dtype, "mask", "transitions", states)
        for states in (1, 2, 17, 33)
        for omega, dtype in (("l2", FLOAT64), ("negentropy", FLOAT32))
    ),
    ("tsallis1.5", FLOAT32, "all", "transitions", 17),
    ("tsallis1.5", FLOAT64, "lengths", "transitions", 64),
    ("negentropy", FLOAT32, "all", "transitions", 64),
]


def scores(padding: str, kind: str, states: int, dtype: torch.dtype) -> list[Tensor]:
    """Scores with NaN in unused entries, missing transitions and states, and a sequence without a path."""
    transitions = 2 * torch.randn(*SHARED[kind], states, states, dtype=dtype)
    transitions[torch.rand(transitions.shape) < 0.2] = -math.inf
    emissions = 2 * torch.randn(states, 5, 4, dtype=dtype).movedim(0, -1).transpose(0, 1)  # not contiguous
    emissions[2] = -math.inf
    start, end = torch.randn(1, states, dtype=dtype), torch.randn(4, states, dtype=dtype)
    end[0, 1:] = -math.inf
    return [emissions.masked_fill(~step_mask(padding).unsqueeze(-1), math.nan), transitions, start, end]


@pytest.mark.parametrize(
    ("omega", "dtype", "padding", "kind", "states"), [QUICK, *(pytest.param(*case, marks=slow) for case in CASES)]
)
def test_sweeps(omega: str, dtype: torch.dtype, padding: str, kind: str, states: int, launches: Log) -> None:
    assert_sweeps("scored_chain", scores(padding, kind, states, dtype), STEPS[padding], OMEGAS[omega])
    assert launches.kernels == ["chain_forward", "chain_forward", "chain_backward", "chain_tangent", "chain_backward"]


@pytest.mark.parametrize("omega", ["negentropy", pytest.param("l2", marks=slow)])
def test_wide_ranges(omega: str, launches: Log) -> None:
    """Scores whose exponentials underflow in float32, and forbidden transitions that are finite but very low."""
    emissions, transitions = 200 * torch.randn(3, 5, 6), 200 * torch.randn(6, 6)
    transitions[2] = -1e4
    transitions[:, 3] = -1e4
    emissions[1] /= 200
    with bx.use_backend("reference"):
        right = bx.Chain.from_scores(emissions.double(), transitions.double(), omega=omega)
        value, marginals = right.value, right.marginals
    p = bx.Chain.from_scores(emissions, transitions, omega=omega)
    assert_close(p.value, value, FLOAT32)
    torch.testing.assert_close(p.marginals.double(), marginals, rtol=0, atol=1e-3)  # of differences of 1e3 in float32
    assert launches


@slow
def test_unused_transitions_may_hold_any_number(launches: Log) -> None:
    emissions = torch.randn(2, 1, 3, requires_grad=True)
    transitions = torch.full((3, 3), math.nan)
    p = bx.Chain.from_scores(emissions, transitions)
    p.value.sum().backward()
    torch.testing.assert_close(p.value, emissions.logsumexp(-1).squeeze(-1))
    torch.testing.assert_close(emissions.grad, emissions.softmax(-1))
    assert launches.kernels == ["chain_forward", "chain_backward"]


@slow
def test_decoding(launches: Log) -> None:
    emissions, transitions = torch.randn(3, 5, 17), torch.randn(17, 17)
    p = bx.Chain.from_scores(emissions, transitions, lengths=torch.tensor([5, 2, 4]), omega="hard")
    marginals = p.marginals
    assert set(launches.kernels) == {"chain_forward", "chain_backward"}
    with bx.use_backend("reference"):
        q = bx.Chain.from_scores(emissions, transitions, lengths=torch.tensor([5, 2, 4]), omega="hard")
        torch.testing.assert_close(marginals, q.marginals)
        assert torch.equal(p.best_sequence(), q.best_sequence())


@slow
def test_derivatives(launches: Log) -> None:
    shapes = (2, 3, 2), (2, 2), (2,), (2,)
    inputs = [torch.randn(shape, dtype=FLOAT64, requires_grad=True) for shape in shapes]
    for omega in ("negentropy", bx.Tsallis(1.5)):

        def value(*parts: Tensor, omega: str | bx.Regularizer = omega) -> Tensor:
            emissions, transitions, start, end = parts
            return bx.Chain.from_scores(emissions, transitions, start=start, end=end, omega=omega).value

        assert gradcheck(value, inputs)
        assert gradgradcheck(value, inputs)
    assert {"chain_tangent", "chain_backward"} <= set(launches.kernels)


@slow
def test_vmap_over_transitions(launches: Log) -> None:
    emissions, transitions = torch.randn(2, 4, 3), torch.randn(3, 3, 3)

    def gradient(w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: bx.Chain.from_scores(emissions, w).value.sum())(w)

    gradients = torch.func.vmap(gradient)(transitions)
    assert launches.kernels == ["chain_forward", "chain_backward"]
    with bx.use_backend("reference"):
        torch.testing.assert_close(gradients, torch.stack([gradient(w) for w in transitions]))
