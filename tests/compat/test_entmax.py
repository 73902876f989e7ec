"""compat.entmax against entmax 1.3, argument by argument, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import bellmax.compat.entmax as ours

original = pytest.importorskip("entmax", reason="entmax is not installed")

CALLS = {
    "sparsemax": ("sparsemax", {}),
    "sparsemax_k": ("sparsemax", {"k": 2}),
    "entmax15": ("entmax15", {}),
    "entmax15_k": ("entmax15", {"k": 2}),
    "bisect": ("entmax_bisect", {}),
    "bisect_1.3": ("entmax_bisect", {"alpha": 1.3, "n_iter": 60}),
    "bisect_2": ("entmax_bisect", {"alpha": 2, "ensure_sum_one": False}),
    "bisect_scalar": ("entmax_bisect", {"alpha": torch.tensor(1.7, dtype=torch.float64)}),
}
MODULES = {
    "sparsemax": ("Sparsemax", {"k": 3}),
    "entmax15": ("Entmax15", {}),
    "bisect": ("EntmaxBisect", {"alpha": 1.4, "n_iter": 60}),
}


def assert_same(actual: Tensor, expected: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    z = torch.randn_like(x)
    a, b = (torch.autograd.grad(value, x, z)[0] for value in (actual, expected))
    # Bisection of the original is inexact (√ε) at the edge of the support.
    torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str, dim: int) -> None:
    function, arguments = CALLS[name]
    x = (2 * torch.randn(4, 5, 6, dtype=torch.float64)).requires_grad_()
    x.data[1, 2, 3] = -math.inf
    actual, expected = (getattr(module, function)(x, dim=dim, **arguments) for module in (ours, original))
    assert_same(actual, expected, x)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module, arguments = MODULES[name]
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    a, b = (getattr(library, module)(dim=0, **arguments) for library in (ours, original))
    assert_same(a(x), b(x), x)
    assert {n: v for n, v in vars(b).items() if not n.startswith("_")}.items() <= vars(a).items()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax_bisect"])
def test_where_the_original_fails(name: str) -> None:
    function = getattr(ours, name)
    assert torch.equal(function(torch.full((2, 3), -math.inf)), torch.zeros(2, 3))
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(function, x)
    assert torch.func.vmap(function)(x.detach().expand(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("alpha", [torch.tensor([1.2, 1.5]), torch.tensor(1.5, requires_grad=True)])
def test_alpha_is_a_number(alpha: Tensor) -> None:
    with pytest.raises(ValueError, match="alpha must be a number, or a tensor of one number without gradient, got"):
        ours.entmax_bisect(torch.zeros(2, 2), alpha)
    with pytest.raises(ValueError, match="alpha must satisfy 1 < alpha <= 2, got 3"):
        ours.entmax_bisect(torch.zeros(2, 2), 3)
