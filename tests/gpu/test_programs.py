"""The checks of ``bellmax gpu`` on an emulated GPU: every program, Ω and dtype twice, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from bellmax.gpu_check import checks
from bellmax.gpu_check.problems import OMEGAS, PROBLEMS, Problem
from gpu.driver import emulated


@pytest.mark.slow_gpu
@pytest.mark.parametrize("dtype", checks.BOUNDS, ids=str)
@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_results_are_right_and_the_same_twice(
    problem: Problem, omega: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PROBLEMS", [problem])
    with emulated() as log:
        (check,) = checks.run(torch.device("cpu"), cases=[(omega, dtype)])
    assert check.is_right, check
    assert log
    assert not [launch.kernel for launch in log if launch.counts["words read back"]]
