"""The launches of each sweep of the programs that have kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bellmax.gpu_check.problems import OMEGAS, PROBLEMS, Problem
from gpu.driver import Launch, Log

BATCH = 2
BY_NAME = {problem.name: problem for problem in PROBLEMS}
SIZES = dict.fromkeys(BY_NAME, 40) | {
    "chain from scores": 17,
    "chain of two states": 2,
    "dense chain": 17,
    "graph": 5,
}
"""Usual ones, so that most tests share their kernels."""


def launches_by_sweep(
    log: Log,
    problem: Problem,
    steps: int,
    size: int,
    omega: str = "negentropy",
    dtype: torch.dtype = torch.float32,
) -> dict[str, list[Launch]]:
    """Launches of a value without and with gradient, of the gradient, and of a Hessian product, by sweep."""
    shape = BATCH, steps, *[size] * (problem.sizes.count(",") - 1)
    scores = [score.to(dtype).requires_grad_() for score in problem.scores(shape)]
    launches: dict[str, list[Launch]] = {}
    with torch.no_grad(), _noting(log, launches, "value"):
        problem.values(scores, OMEGAS[omega])
    with _noting(log, launches, "forward"):
        value = problem.values(scores, OMEGAS[omega])
    with _noting(log, launches, "backward"):
        path = torch.autograd.grad(value.sum(), scores, create_graph=True)
    with _noting(log, launches, "hessian"):
        torch.autograd.grad([(p * p.detach()).sum() for p in path], scores, materialize_grads=True)
    return launches


@contextmanager
def _noting(log: Log, launches: dict[str, list[Launch]], sweep: str) -> Iterator[None]:
    before = len(log)
    yield
    launches[sweep] = log[before:]
