"""Threads of the kernels after a fork, and with an OpenMP runtime of another name."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.kernels import needs_kernels
from support.problems import potentials

import bellmax as bx

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def values() -> list[torch.Tensor]:
    """Programs of each family of kernels, large enough for several threads."""
    theta = potentials(16, 30, 9, 9)
    with torch.no_grad():
        return [
            bx.Chain(theta).value,
            bx.Chain.from_scores(theta[:, :, 0], theta[0, 0]).value,
            bx.DTW(potentials(4, 90, 80).square()).value,
            bx.DAG([(0, 1)] * 900).paths(potentials(64, 900)).value,
        ]


def compute(queue: multiprocessing.Queue) -> None:
    queue.put([v.tolist() for v in values()])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_forked_processes_work_after_several_threads() -> None:
    """The child must not wait for threads, which exist only in the parent."""
    expected = [v.tolist() for v in values()]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=compute, args=(queue,))
    child.start()
    got = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert got == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_first_calls_from_several_threads_do_not_wait_for_each_other() -> None:
    """A static object that reads Python attributes when it is first used would deadlock with the GIL."""
    script = Path(__file__).parents[1] / "support" / "first_calls.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
