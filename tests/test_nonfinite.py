"""NaN, infinities and overflow in every structure give an error or a correct result, and no kernel hangs."""

from __future__ import annotations

import faulthandler
import math
from collections.abc import Iterator

import pytest
import torch
from support.kernels import needs_kernels
from support.structures import STRUCTURES, Structure
from torch import Tensor

import bellmax as bx

of_all = pytest.mark.parametrize("name", STRUCTURES)


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """End the process if a kernel does not return; a hanging kernel would ignore signals."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def omegas(gamma: float | Tensor) -> list[bx.Regularizer]:
    smooth = [bx.Negentropy(gamma), bx.SquaredL2(gamma), bx.Tsallis(2.0, gamma), bx.Tsallis(1.5, gamma)]
    return [*smooth, bx.Tsallis(1.3, gamma)]


def scores(structure: Structure, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(structure.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def value_and_gradient(structure: Structure, x: Tensor, omega: bx.Regularizer) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = structure.make(x, omega=omega).value
    return value.detach(), torch.autograd.grad(value, x)[0]


def assert_refused_or_unused(structure: Structure, x: Tensor, entry: int, bad: float, omega: bx.Regularizer) -> bool:
    """True if a bad number is refused, as it must be if a path may use it; otherwise it must have no effect."""
    spoilt, other = x.clone(), x.clone()
    spoilt.view(-1)[entry], other.view(-1)[entry] = bad, 1.75
    try:
        value, gradient = value_and_gradient(structure, spoilt, omega)
    except ValueError as error:
        assert "must be finite" in str(error)  # noqa: PT017
        return True
    assert torch.equal(value, structure.make(other, omega=omega).value), f"{bad} at {entry} under {omega}"
    assert not gradient.isnan().any()
    return False


@needs_kernels
@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
def test_bad_numbers_are_refused_wherever_a_path_may_use_them(name: str, dtype: torch.dtype, is_tensor: bool) -> None:
    structure = STRUCTURES[name]
    x, refused = scores(structure, dtype), []
    for omega in omegas(torch.tensor(0.7, dtype=dtype) if is_tensor else 0.7) + ([] if is_tensor else [bx.Hard()]):
        for entry in range(x.numel()):
            refused += [
                assert_refused_or_unused(structure, x, entry, bad, omega) for bad in (math.nan, -structure.absent)
            ]
    assert sum(refused) > 0.5 * len(refused)


@needs_kernels
@of_all
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bad_numbers_are_refused_in_half_precision(name: str, dtype: torch.dtype) -> None:
    structure = STRUCTURES[name]
    x, refused = scores(structure, dtype), []
    for omega in (bx.Negentropy(), bx.SquaredL2()):
        for entry in range(x.numel()):
            refused += [
                assert_refused_or_unused(structure, x, entry, bad, omega) for bad in (math.nan, -structure.absent)
            ]
    assert sum(refused) > 0.5 * len(refused)


@of_all
def test_an_absent_edge_gives_no_nan(name: str) -> None:
    structure = STRUCTURES[name]
    x = scores(structure, torch.float64)
    for omega in [*omegas(0.7), bx.Hard()]:
        for entry in range(x.numel()):
            y = x.clone()
            y.view(-1)[entry] = structure.absent
            value, gradient = value_and_gradient(structure, y, omega)
            assert not value.isnan()
            assert gradient.isfinite().all()
            assert gradient.view(-1)[entry] == 0
            many = y.view(-1).masked_fill(torch.arange(x.numel()) % 3 == entry % 3, structure.absent).view(x.shape)
            value, gradient = value_and_gradient(structure, many, omega)
            assert not value.isnan()
            assert gradient.isfinite().all()


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_scores_that_overflow_are_refused_or_solved(name: str, dtype: torch.dtype, backend: str) -> None:
    structure, generator = STRUCTURES[name], torch.Generator().manual_seed(1)
    limits, large = torch.finfo(dtype), 1e200 if dtype == torch.float64 else 1e30

    def some(x: Tensor, share: float) -> Tensor:
        return torch.rand(x.shape, generator=generator) < share

    refused = 0
    for index, omega in enumerate([*omegas(0.7), bx.Hard()]):
        x = scores(structure, dtype, index)
        highest, lowest = x.masked_fill(some(x, 0.4), limits.max), x.masked_fill(some(x, 0.6), limits.min)
        cases = [(highest, omega), (lowest, omega), (highest.masked_fill(some(x, 0.3), limits.min), omega)]
        if not isinstance(omega, bx.Hard):
            cases.append((x * large, omegas(1 / large)[index]))
        for spoilt, under in cases:
            try:
                value, gradient = value_and_gradient(structure, spoilt, under)
            except ValueError as error:
                refused += 1
                assert "must " in str(error)  # noqa: PT017
                continue
            assert not value.isnan()
            assert structure.sense * value < math.inf
            assert not gradient.isnan().any()
    assert refused


@needs_kernels
def test_diverging_training_raises() -> None:
    """The step is far too long: the scores double until they overflow."""
    scores = torch.randn(2, 6, 4, requires_grad=True)
    targets = torch.tensor([[1, 2], [3, 3]])
    with pytest.raises(ValueError, match="must "):  # noqa: PT012
        for _ in range(400):
            (gradient,) = torch.autograd.grad(bx.CTC(scores, targets, omega="l2").value.sum(), scores)
            with torch.no_grad():
                scores.add_(scores.abs() * gradient.sign() + gradient)


@needs_kernels
@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_mixture_of_bad_numbers_makes_a_kernel_hang(name: str, dtype: torch.dtype) -> None:
    structure, generator = STRUCTURES[name], torch.Generator().manual_seed(2)
    numbers = torch.tensor([math.nan, math.inf, math.inf, -math.inf, -math.inf, 0.0, 1.0, -2.0], dtype=dtype)
    for _ in range(12):
        x = numbers[torch.randint(len(numbers), structure.shape, generator=generator)]
        for omega in (bx.SquaredL2(), bx.Tsallis(2.0), bx.Tsallis(1.5)):
            try:
                value, gradient = value_and_gradient(structure, x, omega)
            except ValueError:
                continue
            assert not value.isnan()
            assert not gradient.isnan().any()


@pytest.mark.parametrize("gamma", [1e-40, 1e-300])
def test_a_gamma_that_float32_rounds_to_0_gives_no_nan(gamma: float) -> None:
    cost = torch.full((2, 2), 1e-3)
    if gamma == 1e-40:  # costs / γ are finite
        torch.testing.assert_close(bx.DTW(cost, gamma=gamma).value, torch.tensor(2e-3), rtol=1e-3, atol=0)
    else:
        assert bx.DTW(cost, gamma=gamma).value == math.inf


@pytest.mark.parametrize("omega", ["negentropy", "l2", "hard"])
def test_a_sum_that_overflows_in_the_middle_of_a_graph_is_refused(omega: str, backend: str) -> None:
    """The last edges are absent or negative, so the overflow does not show in the value."""
    high = torch.finfo(torch.float64).max
    dag = bx.DAG([(0, 1), (1, 2), (2, 3), (0, 3)])
    for last in (-math.inf, -high):
        with pytest.raises(ValueError, match="they overflow"):
            _ = dag.paths(torch.tensor([high, high, last, 0.0], dtype=torch.float64), omega=omega).value
