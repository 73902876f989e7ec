"""Checks of each kernel: agreement with plain torch in float64, and the same bits in two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import bellmax as bx
from bellmax.gpu_check.problems import OMEGAS, PROBLEMS, Omega, Problem

BOUNDS = {torch.float32: 5e-6, torch.float64: 1e-10}
"""Maximum errors."""


class Check(NamedTuple):
    """Largest errors of a program, relative to the largest expected number, or to 1 if this number is smaller."""

    program: str
    omega: str
    dtype: str
    value: float
    gradient: float
    hessian: float
    same_twice: bool
    is_right: bool


Case = tuple[str, torch.dtype]
CASES: list[Case] = [(omega, dtype) for omega in OMEGAS for dtype in BOUNDS]
FEW: list[Case] = [("negentropy", torch.float32), ("l2", torch.float64)]
"""Cases for Triton's interpreter, in which each one takes seconds."""


def count(cases: Sequence[Case] = CASES) -> int:
    """Number of checks that :func:`run` yields."""
    return len(PROBLEMS) * len(cases)


def run(device: torch.device, backend: str = "triton", cases: Sequence[Case] = CASES) -> Iterator[Check]:
    """Check every program in each case."""
    for problem in PROBLEMS:
        scores = [score.to(device) for score in problem.scores(problem.small)]
        for omega, dtype in cases:
            yield _check(problem, backend, omega, [score.to(dtype) for score in scores])


def _check(problem: Problem, backend: str, name: str, scores: list[Tensor]) -> Check:
    """Run a program twice on a backend, and once in float64 on the reference backend."""
    dtype, omega = scores[0].dtype, OMEGAS[name]
    with bx.use_backend(backend):
        results, again = derivatives(problem, omega, scores), derivatives(problem, omega, scores)
    with bx.use_backend("reference"):
        expected = derivatives(problem, omega, [score.double() for score in scores])
    errors = [max(map(_error, *pair)) for pair in zip(results, expected, strict=True)]
    same = all(all(map(torch.equal, *pair)) for pair in zip(results, again, strict=True))
    is_right = same and max(errors) <= BOUNDS[dtype]
    value, gradient, hessian = errors
    return Check(problem.name, name, str(dtype).removeprefix("torch."), value, gradient, hessian, same, is_right)


def derivatives(
    problem: Problem, omega: Omega, scores: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Values of a program, the gradient of their sum, and a Hessian product."""
    leaves = [score.detach().requires_grad_() for score in scores]
    value = problem.values(leaves, omega)
    gradient = torch.autograd.grad(value.sum(), leaves, create_graph=True)
    along = sum(((g * torch.ones_like(g).cumsum(-1).sin()).sum() for g in gradient), start=value.new_zeros(()))
    hessian = torch.autograd.grad(along, leaves, allow_unused=True, materialize_grads=True)
    return [value.detach()], [g.detach() for g in gradient], [h.detach() for h in hessian]


def _error(result: Tensor, expected: Tensor) -> float:
    """Largest relative error, as :class:`Check` defines it. Equal infinities have error 0, and NaN counts as ∞."""
    difference = torch.where(result == expected, 0, (result - expected).abs())
    scale = torch.where(expected.isfinite(), expected.abs(), 0).amax().clamp(min=1)
    return float((difference.amax() / scale).nan_to_num(nan=torch.inf))
