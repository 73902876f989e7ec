"""Ω on tiles against :mod:`bellmax.regularizers` on rows."""

from __future__ import annotations

import math

import pytest
import torch
from support.inside import Kernel, from_kernel, triton_module

from gpu.comparing import assert_close
from gpu.driver import Log, triton

tl = triton.language
omegas = triton_module("omega")


@triton.jit
def _operate(
    x, y, value, q, product, rows, columns, OMEGA: tl.constexpr, AXIS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    i, j = tl.arange(0, R), tl.arange(0, C)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    cell = i[:, None] * columns + j[None, :]
    maximum, p = omegas.smooth_max_and_argmax(tl.load(x + cell, mask=inside, other=float("-inf")), OMEGA, AXIS)
    if AXIS == 0:
        tl.store(value + j, maximum, mask=j < columns)
    else:
        tl.store(value + i, maximum, mask=i < rows)
    tl.store(q + cell, p, mask=inside)
    tl.store(product + cell, omegas.jacobian_product(p, tl.load(y + cell, mask=inside), OMEGA, AXIS), mask=inside)


@triton.jit
def _operate_on_vector(x, value, q, OMEGA: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(value, omegas.smooth_max(tl.load(x + i), OMEGA, 0))
    tl.store(q + i, omegas.smooth_argmax(tl.load(x + i), OMEGA, 0))


@pytest.mark.parametrize(
    ("kernel", "dtype", "size"),
    [
        (Kernel("tsallis", (1.5,)), torch.float32, 20),
        *(
            pytest.param(kernel, dtype, size, marks=pytest.mark.slow_gpu)
            for kernel in omegas.CODES
            for dtype in (torch.float32, torch.float64)
            for size in (2, 3, 20)
        ),
    ],
)
def test_tiles(kernel: Kernel, dtype: torch.dtype, size: int, launches: Log) -> None:
    """Both axes, wide and narrow rows, ties, one or no candidate, and arbitrary y where q is 0."""
    omega, code = from_kernel(kernel), omegas.CODES[kernel]
    x = torch.randn(6, size, dtype=dtype) * torch.tensor([0.1, 1.0, 3.0, 100.0, 1.0, 1.0], dtype=dtype)[:, None]
    x[1, torch.rand(size) < 0.4] = -math.inf
    x[2, :2] = 9.0
    x[4] = -math.inf
    x[5, 1:] = -math.inf
    for axis in (0, 1):
        tile = x if axis else x.T.contiguous()
        q = omega.argmax(tile.double(), axis)
        y = torch.randn_like(tile).masked_fill(q == 0, math.nan)
        value, q_tile, product = tile.new_empty(6), torch.empty_like(tile), torch.empty_like(tile)
        blocks = {name: triton.next_power_of_2(n) for name, n in zip("RC", tile.shape, strict=True)}
        _operate[(1,)](tile, y, value, q_tile, product, *tile.shape, OMEGA=code, AXIS=axis, **blocks, num_warps=2)
        assert_close(value, omega.max(tile.double(), axis), dtype)
        assert_close(q_tile, q, dtype)
        assert_close(product, omega.hessian_product(q, y.double(), axis), dtype)
    assert len(launches) == 2


def test_the_first_of_equal_maxima(launches: Log) -> None:
    x = torch.tensor([0.0, 2.0, 2.0, -math.inf])
    value, q = x.new_empty(1), torch.empty_like(x)
    _operate_on_vector[(1,)](x, value, q, OMEGA=omegas.CODES[Kernel("hard")], SIZE=4)
    assert (value.item(), q.tolist()) == (2.0, [0.0, 1.0, 0.0, 0.0])


def test_every_vector_converges_within_the_rounds(launches: Log) -> None:
    """The worst case: each candidate is just outside the support of those before, so each round removes one."""
    x = -torch.tensor([2.0**-n for n in range(15, -1, -1)]).cumsum(0)
    for kernel in (Kernel("l2"), Kernel("tsallis", (1.5,))):
        value, q = x.new_empty(1), torch.empty_like(x)
        _operate_on_vector[(1,)](x, value, q, OMEGA=omegas.CODES[kernel], SIZE=16)
        assert_close(q, from_kernel(kernel).argmax(x.double()), torch.float32)
        assert_close(value[0], from_kernel(kernel).max(x.double()), torch.float32)
