"""compat.soft_dtw_cuda and compat.tslearn against plain recursions in float64, and against tslearn 0.10."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.inside import allowed_cells
from support.peers import without_numba
from torch import Tensor

from bellmax.compat.soft_dtw_cuda import SoftDTW
from bellmax.compat.tslearn import SoftDTWLossPyTorch

SIZES = [(1, 1), (1, 4), (4, 4), (3, 6), (6, 3)]


@pytest.fixture(scope="module")
def tslearn() -> ModuleType:
    return without_numba("tslearn.metrics")


def series(n: int, m: int, dims: int = 2) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, n, dims, dtype=torch.float64), torch.randn(2, m, dims, dtype=torch.float64)
    return x.requires_grad_(), y.requires_grad_()


def cityblock(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(2) - y.unsqueeze(1)).abs().sum(3)


def squares(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)


def plain(cost: Tensor, gamma: float, allowed: Callable[[int, int], bool]) -> Tensor:
    """The recursion cell by cell, with i, j from 1."""
    inf = cost.new_full((cost.shape[0],), math.inf)
    value = {(0, 0): torch.zeros_like(inf)}
    for i in range(1, cost.shape[1] + 1):
        for j in range(1, cost.shape[2] + 1):
            before = [value[p] for p in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if p in value]
            if allowed(i, j) and before:
                value[i, j] = cost[:, i - 1, j - 1] - gamma * torch.logsumexp(-torch.stack(before) / gamma, 0)
        if i == 1:
            del value[0, 0]
    return value.get((cost.shape[1], cost.shape[2]), inf)


def assert_same(actual: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    weights = torch.arange(1.0, 1 + len(actual), dtype=actual.dtype)
    ours, theirs = (torch.autograd.grad((value * weights).sum(), inputs) for value in (actual, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("normalize", "dist_func"), [(False, None), (True, None), (True, cityblock)])
@pytest.mark.parametrize("bandwidth", [None, 0, 1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_soft_dtw_cuda(
    sizes: tuple[int, int],
    bandwidth: float | None,
    normalize: bool,
    dist_func: Callable[[Tensor, Tensor], Tensor] | None,
) -> None:
    x, y = series(*sizes)
    gamma = 0.7

    def value(a: Tensor, b: Tensor) -> Tensor:
        return plain((dist_func or squares)(a, b), gamma, lambda i, j: not bandwidth or abs(i - j) <= bandwidth)

    expected = value(x, y) - (value(x, x) + value(y, y)) / 2 if normalize else value(x, y)
    actual = SoftDTW(False, gamma, normalize, bandwidth, dist_func)(x, y)
    assert actual.dtype == torch.float64
    if expected.isinf().any():  # no path within the band
        assert torch.equal(actual, expected)
        assert not any(g.isnan().any() for g in torch.autograd.grad(actual.sum(), (x, y)))
    else:
        assert_same(actual, expected, (x, y))


def test_use_cuda_is_ignored_and_attributes_equal_the_original() -> None:
    x, y = series(3, 4)
    module = SoftDTW(use_cuda=True, gamma=0.5)
    assert torch.equal(module(x, y), SoftDTW(use_cuda=False, gamma=0.5)(x, y))
    assert (module.gamma, module.normalize, module.bandwidth) == (0.5, False, 0)
    torch.testing.assert_close(module.dist_func(x, y), squares(x, y))


@pytest.mark.parametrize("module", [SoftDTW(False), SoftDTWLossPyTorch()], ids=["soft_dtw_cuda", "tslearn"])
def test_second_derivatives_and_infinite_distances(backend: str, module: torch.nn.Module) -> None:
    x, y = series(3, 4)
    assert torch.autograd.gradgradcheck(module, (x, y), fast_mode=backend == "reference")

    def forbids(a: Tensor, b: Tensor) -> Tensor:
        return squares(a, b).masked_fill(torch.eye(3, 4).bool() & (torch.arange(4) == 1), math.inf)

    value = type(module)(*[False] * isinstance(module, SoftDTW), dist_func=forbids)(x, y)
    assert value.isfinite().all()
    assert not any(g.isnan().any() for g in torch.autograd.grad(value.sum(), (x, y)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, 3, 1), torch.zeros(1, 3, 1)), r"got \(2, 3, 1\) and \(1, 3, 1\)"),
        (lambda m: m(torch.zeros(2, 3, 1), torch.zeros(2, 3, 2)), r"must have shapes \(B, N, D\) and \(B, M, D\)"),
        (lambda m: m(torch.zeros(3, 1), torch.zeros(3, 1)), r"got \(3, 1\) and \(3, 1\)"),
    ],
)
@pytest.mark.parametrize("module", [SoftDTW(False), SoftDTWLossPyTorch()], ids=["soft_dtw_cuda", "tslearn"])
def test_shapes(module: torch.nn.Module, call: Callable[[torch.nn.Module], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(module)


def test_bad_arguments() -> None:
    x = torch.zeros(1, 3, 1)
    with pytest.raises(ValueError, match=r"gamma must be a finite number > 0, got 0"):
        SoftDTW(False, gamma=0)(x, x)
    with pytest.raises(ValueError, match=r"dist_func must return a tensor of shape \(1, 3, 3\), got \(1, 3, 1\)"):
        SoftDTW(False, dist_func=lambda a, b: a)(x, x)
    with pytest.raises(ValueError, match="global_constraint must be 'sakoe_chiba', 'itakura' or None, got 'band'"):
        SoftDTWLossPyTorch(global_constraint="band")
    with pytest.raises(ValueError, match="global_constraint must be 'sakoe_chiba' or 'itakura' when"):
        SoftDTWLossPyTorch(sakoe_chiba_radius=1, itakura_max_slope=2.0)
    with pytest.raises(ValueError, match=r"sakoe_chiba_radius must be a whole number, at least 0, got 1\.5"):
        SoftDTWLossPyTorch(sakoe_chiba_radius=1.5)
    with pytest.raises(ValueError, match=r"itakura_max_slope must leave a path for lengths 3 and 30, got 1.01"):
        SoftDTWLossPyTorch(itakura_max_slope=1.01)(x, torch.zeros(1, 30, 1))


CONSTRAINTS = {
    "none": {},
    "radius": {"sakoe_chiba_radius": 2},
    "sakoe_chiba": {"global_constraint": "sakoe_chiba"},
    "slope": {"itakura_max_slope": 1.7},
    "itakura": {"global_constraint": "itakura"},
    "both": {"global_constraint": "sakoe_chiba", "sakoe_chiba_radius": 0, "itakura_max_slope": 2.0},
}


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
@pytest.mark.parametrize("dist_func", [None, cityblock], ids=["squares", "cityblock"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:tslearn")
def test_tslearn(
    tslearn: ModuleType, normalize: bool, dist_func: Callable[[Tensor, Tensor], Tensor] | None, constraint: str
) -> None:
    for sizes in ((5, 5), (4, 6), (6, 4)):
        x, y = series(*sizes)
        arguments = {"gamma": 0.5, "normalize": normalize, "dist_func": dist_func, **CONSTRAINTS[constraint]}
        actual = SoftDTWLossPyTorch(**arguments)(x, y)
        theirs = tslearn.SoftDTWLossPyTorch(**arguments)
        # float32: the original truncates its tables
        assert_same(actual, theirs(x, y), (x, y), tolerance=1e-5)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_cells_that_tslearn_keeps(tslearn: ModuleType, constraint: str) -> None:
    from tslearn.metrics import compute_mask

    for rows in range(1, 14):
        for columns in range(1, 14):
            arguments = dict(CONSTRAINTS[constraint])
            named = {None: 0, "itakura": 1, "sakoe_chiba": 2}[arguments.pop("global_constraint", None)]
            ours = SoftDTWLossPyTorch(**CONSTRAINTS[constraint])
            try:
                expected = torch.from_numpy(compute_mask(rows, columns, named, **arguments))
            except RuntimeWarning:
                with pytest.raises(ValueError, match="itakura_max_slope must leave a path"):
                    allowed_cells(ours, rows, columns)
                continue
            mask = allowed_cells(ours, rows, columns)
            assert torch.equal(torch.ones_like(expected) if mask is None else mask, expected)


def test_float64_values_equal_tslearn_in_float64(tslearn: ModuleType) -> None:
    x, y = series(7, 9)
    actual = SoftDTWLossPyTorch(gamma=0.3)(x, y).detach()
    for b in range(2):
        expected = tslearn.soft_dtw(x[b].detach().numpy(), y[b].detach().numpy(), gamma=0.3)
        torch.testing.assert_close(actual[b].item(), float(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bandwidth", [None, 2])
def test_integers_are_promoted(bandwidth):
    x, y = torch.rand(2, 4, 2), torch.randint(0, 3, (2, 4, 2))
    loss = SoftDTW(False, normalize=True, bandwidth=bandwidth)
    torch.testing.assert_close(loss(x, y), loss(x, y.float()))
