import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from support.inside import long_pair_value, measure_of, pairwise, set_limit
from support.kernels import in_two_numbers, needs_kernels, took

import bellmax as bx

pytestmark = needs_kernels

SQUARED = partial(pairwise, cost="sqeuclidean")


@pytest.fixture
def small_chunks(monkeypatch):
    set_limit(monkeypatch, "cells in a chunk of a long pair", 2**13)


def by_chunks(x, y, cost, band, omega):
    return long_pair_value(measure_of(cost, band, omega, None), x, y, omega.gamma)


def series(rows, columns, dtype=torch.float64):
    torch.manual_seed(rows + columns)
    return [torch.randn(length, 2, dtype=dtype, requires_grad=True) for length in (rows, columns)]


@pytest.mark.parametrize("omega", [bx.Negentropy(), bx.SquaredL2(0.5), bx.Tsallis(1.5), bx.Hard()], ids=repr)
@pytest.mark.parametrize(
    ("rows", "columns", "band"),
    [(300, 200, None), (65, 130, None), (300, 260, 10), (130, 300, 3), (200, 1, None), (1, 200, 2), (513, 500, 0)],
)
def test_chunks_equal_the_whole_matrix(small_chunks, rows, columns, band, omega):
    x, y = series(rows, columns)
    with took("dtw_forward_block") as forward, took("dtw_backward_block") as backward:
        value = by_chunks(x, y, SQUARED, band, omega)
        of_value = torch.autograd.grad(value, (x, y))
    assert len(forward) == 2 * len(backward)
    assert (len(backward) > 1) == (min(rows, columns) > 1)
    with took("lattice_forward", times=1), took("lattice_backward", times=1):
        expected = bx.DTW(SQUARED(x, y), band=band, omega=omega).value
        of_expected = torch.autograd.grad(expected, (x, y))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(of_value, of_expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("gamma", "fits"), [(1.0, True), (1e-8, False)])  # values may be too large for products
def test_chunks_in_single_precision(small_chunks, gamma, fits):
    x, y = series(300, 200, torch.float32)
    omega = bx.Negentropy(gamma)
    with took("dtw_backward_block", times=5) as chunks:
        value = by_chunks(x, y, SQUARED, None, omega)
        of_value = torch.autograd.grad(value, (x, y))
    assert all(in_two_numbers(chunk).all() == fits for chunk in chunks)
    with took("lattice_backward", times=1) as matrix:
        expected = bx.DTW(SQUARED(x, y).double(), omega=omega).value
        of_expected = torch.autograd.grad(expected, (x, y))
    assert not in_two_numbers(matrix[0]).any()
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(of_value, of_expected, rtol=1e-4, atol=1e-4)


def test_second_derivative(small_chunks):
    x, y = series(70, 66)
    products = []
    for value in (by_chunks(x, y, SQUARED, None, bx.Negentropy()), bx.DTW(SQUARED(x, y)).value):
        of_x, _ = torch.autograd.grad(value, (x, y), create_graph=True)
        products.append(torch.autograd.grad(of_x.square().sum(), y)[0])
    torch.testing.assert_close(*products)


def test_second_derivatives_keep_the_backend_of_the_value(small_chunks):
    x, y = series(70, 66)
    value = by_chunks(x, y, SQUARED, None, bx.Negentropy())
    with bx.use_backend("reference"), took("lattice_forward", times=1):
        torch.autograd.grad(value, x, create_graph=True)


def test_a_constant_series_gets_no_gradient(small_chunks):
    x, y = series(130, 140)
    by_chunks(x, y.detach(), SQUARED, None, bx.Negentropy()).backward()
    assert x.grad is not None
    assert y.grad is None


def test_forbidden_and_bad_cells(small_chunks):
    x, y = series(200, 150)

    def costs(value, a, b):
        cost = SQUARED(a, b)
        return torch.where(a[:, :1] > x.detach()[:, 0].max() - 1e-12, value, cost)

    nowhere = by_chunks(x, y, partial(costs, torch.inf), None, bx.Negentropy())
    assert nowhere == torch.inf
    assert all((g == 0).all() for g in torch.autograd.grad(nowhere, (x, y)))
    with pytest.raises(ValueError, match=r"cost must be finite or \+inf, got nan at cell \(\d+, 0\)"):
        by_chunks(x, y, partial(costs, torch.nan), None, bx.Negentropy())


def test_dtw_takes_chunks_for_large_pairs(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(2, 150, 2, requires_grad=True), torch.randn(170, 2, requires_grad=True)
    lengths = torch.tensor([150, 90]), 160
    results = []
    for large, kernel in ((2**62, "lattice_{}"), (1, "dtw_{}_block")):
        set_limit(monkeypatch, "cells of a long pair", large)
        set_limit(monkeypatch, "cells of a batch of long pairs", large)
        with took(kernel.format("forward")), took(kernel.format("backward")):
            value = bx.dtw(x, y, lengths=lengths, band=20, divergence="debiased")
            results.append((value, *torch.autograd.grad(value.sum(), (x, y))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"lengths\[0\] must be from 1 to 150, got 151"):
        bx.dtw(x, y, lengths=(torch.tensor([151, 90]), 160))


MEMORY = """
import torch, bellmax as bx
from pathlib import Path

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) / 1024

works = {
    "series": lambda n: bx.dtw(*(torch.randn(n, 2, requires_grad=True) for _ in range(2))).backward(),
    "banded": lambda n: bx.dtw(torch.randn(6 * n, 1), torch.randn(6 * n, 1), band=500),
    "matrix": lambda n: bx.DTW(torch.rand(n // 2, n // 2, requires_grad=True)).value.backward(),
    "value": lambda n: bx.DTW(torch.rand(n // 2, n // 2)).value,
}
for name, work in works.items():
    work(2200)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = peak()
    work(8192)
    print(name, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured in Linux's units")
def test_memory():
    """Megabytes that a large pair needs at its peak, beyond what a small one of its kind has left."""
    alone = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed goes back, so the peak is what is in use
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=alone)
    needed = {name: float(megabytes) for name, megabytes in map(str.split, run.stdout.splitlines())}
    matrix = 64
    assert needed["series"] < 40
    assert needed["banded"] < 40
    assert needed["matrix"] < 2.5 * matrix + 30
    assert needed["value"] < matrix + 30
