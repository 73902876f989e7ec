"""Launches in the driver's log: one per sweep, without host reads; and Triton is not imported without a
GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.inside import BACKENDS
from torch.utils._pytree import tree_map_only

import bellmax as bx
from bellmax.gpu_check.problems import PROBLEMS, Problem
from gpu.driver import Log, emulated, triton
from gpu.sweeps import SIZES, launches_by_sweep

every_problem = pytest.mark.parametrize(
    "problem", [pytest.param(p, id=p.name, marks=[pytest.mark.slow_gpu] * (n > 0)) for n, p in enumerate(PROBLEMS)]
)


@every_problem
def test_one_launch_per_sweep(problem: Problem) -> None:
    """Graphs need one launch per level, and one more for shared weights. A Hessian product needs two sweeps."""
    with emulated(executes=False) as log, bx.use_backend("triton"):
        by_sweep = launches_by_sweep(log, problem, 5, SIZES[problem.name])
    levels, sums = {"graph": (6, 0), "trees of words": (6, 1)}.get(problem.name, (1, 0))
    counts = {sweep: len(launches) for sweep, launches in by_sweep.items()}
    assert counts == {"value": levels, "forward": levels, "backward": levels + sums, "hessian": 2 * levels + sums}


@every_problem
def test_sizes_up_to_a_power_of_two_share_their_kernels(problem: Problem) -> None:
    with emulated(executes=False) as log, bx.use_backend("triton"):
        size = SIZES[problem.name]
        small, large = (
            launches_by_sweep(log, problem, 5, size),
            launches_by_sweep(log, problem, 7, triton.next_power_of_2(size) - 1),
        )
    for sweep, launches in small.items():
        assert {launch.compiled for launch in launches} <= {launch.compiled for launch in large[sweep]}


class Calls(list[tuple[str, tuple[Any, ...]]]):
    """Wrapper of sweeps that records their calls."""

    def __init__(self, sweeps: Any) -> None:
        super().__init__()
        self.sweeps = sweeps

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any) -> Any:
            self.append((name, args))
            return getattr(self.sweeps, name)(*args)

        return run


@every_problem
def test_the_host_reads_no_values(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps run on meta tensors, with their device as the current one at each launch."""
    if problem.name in ("graph", "trees of words"):
        pytest.skip("the host reads the integers of a graph, once")
    backend, made, guards = BACKENDS["triton"], [], []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        guards.append(device)
        yield
        guards.append(None)

    with emulated(executes=False) as log, bx.use_backend("triton"):
        plain = backend.sweeps
        monkeypatch.setattr(backend, "sweeps", lambda name: made.append(Calls(plain(name))) or made[-1])
        launches_by_sweep(log, problem, 5, SIZES[problem.name])
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=current))
        log.clear()
        asked = [(calls.sweeps, *call) for calls in made for call in calls]
        for sweeps, name, args in asked:
            getattr(sweeps, name)(*tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args))
    assert {name for _, name, _ in asked} >= {"forward", "backward", "hessian"}
    assert guards == [torch.device("meta"), None] * len(log)
    assert log


def test_longer_sequences_need_no_more_launches(launches: Log) -> None:
    for steps in (3, 9):
        emissions = torch.randn(3, steps, 17, requires_grad=True)
        bx.Chain.from_scores(emissions, torch.zeros(17, 17)).value.sum().backward()
    assert launches.kernels == 2 * ["chain_forward", "chain_backward"]


def test_an_empty_batch_launches_nothing(launches: Log) -> None:
    assert bx.Chain(torch.zeros(0, 3, 2, 2)).value.shape == (0,)
    assert not launches


@pytest.mark.parametrize(("has_float64", "backend"), [(True, "triton"), (False, "detour")])
def test_kernels_need_float64(has_float64: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPUs of Intel have no float64."""
    properties = SimpleNamespace(has_fp64=has_float64)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    assert bx.backend_info("xpu:0")["xpu:0"] == backend


def test_triton_is_not_imported_without_a_gpu() -> None:
    code = "import sys, torch, bellmax as bx; bx.Chain(torch.zeros(3, 2, 2)).value; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
