"""One launch a sweep, from the driver's log; and who never asks for a GPU does not pay for Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import bellmax as bx
from bellmax.apps.gpu.problems import PROBLEMS, Problem
from gpu.driver import Log, emulated
from gpu.sweeps import launches_by_sweep


@pytest.mark.parametrize(
    "problem", [pytest.param(p, id=p.name, marks=[pytest.mark.slow_gpu] * (n > 0)) for n, p in enumerate(PROBLEMS)]
)
def test_one_launch_a_sweep(problem: Problem) -> None:
    """Or one a level of a graph. A Hessian product is two sweeps, forward and back."""
    with emulated(executes=False) as log, bx.use_backend("triton"):
        found = launches_by_sweep(log, problem, 5, 17)
    each = 6 if problem.name == "graph" else 1
    counts = {sweep: len(launches) for sweep, launches in found.items()}
    assert counts == {"value": each, "forward": each, "backward": each, "hessian": 2 * each}


def test_longer_sequences_need_no_more_launches(launches: Log) -> None:
    for steps in (3, 9):
        emissions = torch.randn(3, steps, 17, requires_grad=True)
        bx.Chain.from_scores(emissions, torch.zeros(17, 17)).value.sum().backward()
    assert launches.kernels == 2 * ["chain_forward", "chain_backward"]


def test_an_empty_batch_launches_nothing(launches: Log) -> None:
    assert bx.Chain(torch.zeros(0, 3, 2, 2)).value.shape == (0,)
    assert not launches


def test_who_has_no_gpu_does_not_import_triton() -> None:
    code = "import sys, torch, bellmax as bx; bx.Chain(torch.zeros(3, 2, 2)).value; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
