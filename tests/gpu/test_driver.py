"""Kernels launched by Triton, and faults that do not show in the results."""

from __future__ import annotations

import pytest
import torch
from support.inside import BACKENDS
from torch import Tensor

from gpu.driver import emulated, triton
from gpu.memory import KernelError

tl = triton.language


@triton.jit
def sums(x, out, length, BLOCK: tl.constexpr):
    """Cumulative sums of each row of x."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * length + i, mask=i < length, other=0.0)
    tl.store(out + row * length + i, tl.cumsum(numbers, 0), mask=i < length)


@triton.jit
def by_way_of_memory(table, steps, columns, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Each row is the row before, shifted by one column, plus 1."""
    j = tl.arange(0, BLOCK)
    for step in range(1, steps):
        left = tl.load(table + (step - 1) * columns + j - 1, mask=(j > 0) & (j < columns), other=0.0)
        tl.store(table + step * columns + j, left + 1, mask=j < columns)
        if BARRIER:
            tl.debug_barrier()


def run_sums(x: Tensor, length: int | None = None) -> Tensor:
    out = torch.empty_like(x)
    sums[(len(x),)](x, out, length or x.shape[1], BLOCK=64, num_warps=2)
    return out


def test_a_kernel_runs_and_is_counted() -> None:
    x = torch.randn(3, 50)
    with emulated() as log:
        torch.testing.assert_close(run_sums(x), x.cumsum(1))
    (launch,) = log
    assert (launch.kernel, launch.grid, launch.warps) == ("sums", (3, 1, 1), 2)
    assert launch.counts["instructions"] > 50
    assert launch.counts["sectors read"] in range(3 * 7, 3 * 9)  # 200 bytes per row
    with emulated() as log:
        assert not log


def test_a_length_past_the_end_is_detected() -> None:
    with emulated(), pytest.raises(KernelError, match=r"out of bounds.*ld.global.*test_driver.py"):
        run_sums(torch.randn(1, 50), 51)


def test_a_missing_barrier_is_detected_even_if_the_values_are_right() -> None:
    def table() -> Tensor:
        return torch.cat([torch.arange(60.0)[None], torch.empty(5, 60)])

    with emulated() as log:
        right, wrong = table(), table()
        by_way_of_memory[(1,)](right, 6, 60, BLOCK=64, BARRIER=True, num_warps=2)
        assert log[0].counts["words read back"] == 4 * 59
        with pytest.raises(KernelError, match="race between warps in global memory, read after write"):
            by_way_of_memory[(1,)](wrong, 6, 60, BLOCK=64, BARRIER=False, num_warps=2)
    torch.testing.assert_close(right[5, 5:], torch.arange(55.0) + 5)
    assert torch.equal(right, wrong)


def test_an_uninitialised_tape_is_detected() -> None:
    with emulated():
        tape = torch.empty(2, 50)
        with pytest.raises(KernelError, match="unwritten global memory is read"):
            run_sums(tape)
        tape.copy_(torch.ones(2, 50))
        run_sums(tape)
        run_sums(run_sums(tape))  # a kernel initialized it
        half = torch.empty(2, 50)
        sums[(1,)](tape, half, 50, BLOCK=64)
        run_sums(half[:1])
        with pytest.raises(KernelError, match="unwritten"):
            run_sums(half)


def test_an_empty_grid_launches_nothing() -> None:
    with emulated() as log:
        run_sums(torch.empty(0, 50))
    assert not log


def test_the_emulator_restores_the_driver_after_an_error() -> None:
    backend = BACKENDS["triton"]
    before = triton.runtime.driver._active, set(backend.devices)
    with pytest.raises(KernelError), emulated():
        run_sums(torch.empty(1, 50))
    assert (triton.runtime.driver._active, backend.devices) == before
