"""Each kernel against plain torch in float64, and against itself: the same bits twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import bellmax as bx
from bellmax.gpu_check.problems import OMEGAS, PROBLEMS, Omega, Problem

BOUNDS = {torch.float32: 5e-6, torch.float64: 1e-10}


class Check(NamedTuple):
    """The largest errors of a program, relative to the largest number expected, or to 1 if that is less."""

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
"""For Triton's interpreter, which takes seconds for each."""


def count(cases: Sequence[Case] = CASES) -> int:
    """How many checks there are."""
    return len(PROBLEMS) * len(cases)


def run(device: torch.device, backend: str = "triton", cases: Sequence[Case] = CASES) -> Iterator[Check]:
    """Every program in each case, one by one."""
    for problem in PROBLEMS:
        scores = [score.to(device) for score in problem.scores(problem.small)]
        for omega, dtype in cases:
            yield _check(problem, backend, omega, [score.to(dtype) for score in scores])


def _check(problem: Problem, backend: str, name: str, scores: list[Tensor]) -> Check:
    dtype, omega = scores[0].dtype, OMEGAS[name]
    with bx.use_backend(backend):
        found, again = derivatives(problem, omega, scores), derivatives(problem, omega, scores)
    with bx.use_backend("reference"):
        expected = derivatives(problem, omega, [score.double() for score in scores])
    errors = [max(map(_error, part, true)) for part, true in zip(found, expected, strict=True)]
    same = all(
        torch.equal(a, b) for one, other in zip(found, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    is_right = same and max(errors) <= BOUNDS[dtype]
    value, gradient, hessian = errors
    return Check(problem.name, name, str(dtype).removeprefix("torch."), value, gradient, hessian, same, is_right)


def derivatives(
    problem: Problem, omega: Omega, scores: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The value, its gradient, and a product with its Hessian."""
    leaves = [score.detach().requires_grad_() for score in scores]
    value = problem.values(leaves, omega)
    gradient = torch.autograd.grad(value.sum(), leaves, create_graph=True)
    along = sum(((g * torch.ones_like(g).cumsum(-1).sin()).sum() for g in gradient), start=value.new_zeros(()))
    hessian = torch.autograd.grad(along, leaves, allow_unused=True, materialize_grads=True)
    return [value.detach()], [g.detach() for g in gradient], [h.detach() for h in hessian]


def _error(found: Tensor, expected: Tensor) -> float:
    """NaN counts as infinite."""
    difference = torch.where(found == expected, 0, (found - expected).abs())
    scale = torch.where(expected.isfinite(), expected.abs(), 0).amax().clamp(min=1)
    return float((difference.amax() / scale).nan_to_num(nan=torch.inf))
