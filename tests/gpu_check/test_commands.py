"""``bellmax gpu`` without a GPU: checks of other backends, times by the clock of the CPU, and the report."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.inside import check_on, relative_error, set_limit
from support.kernels import needs_kernels
from typer.testing import CliRunner

from bellmax.gpu_check import checks, report, times
from bellmax.gpu_check.commands import app
from bellmax.gpu_check.problems import PROBLEMS

CPU = torch.device("cpu")


@needs_kernels
def test_all_checks_pass_on_the_native_backend() -> None:
    results = list(checks.run(CPU, "native"))
    assert len(results) == checks.count() == 4 * 2 * len(PROBLEMS)
    assert [check for check in results if not check.is_right] == []
    assert {check.program for check in results} == {problem.name for problem in PROBLEMS}


def test_a_wrong_gradient_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    derivatives = checks.derivatives
    calls = []

    def wrong(*args: object) -> object:
        calls.append(args)
        value, gradient, hessian = derivatives(*args)  # type: ignore[arg-type]
        error = 1e-3 if len(calls) % 3 == 1 else 0.0  # only in the first of two runs, not in the reference
        return value, [gradient[0] + error, *gradient[1:]], hessian

    monkeypatch.setattr(checks, "derivatives", wrong)
    first = next(checks.run(CPU, "reference"))
    assert (first.is_right, first.same_twice) == (False, False)
    assert first.gradient == pytest.approx(1e-3, rel=0.1)
    assert first.value < 5e-6
    page = report.as_markdown({"device": "none"}, [first], [], [])
    assert "0 of 1 checks passed" in page
    assert "| chain from scores | negentropy | float32 |" in page


@pytest.mark.parametrize(("result", "expected", "error"), [(math.nan, 1.0, math.inf), (-math.inf, -math.inf, 0.0)])
def test_errors_of_nonfinite_numbers(result: float, expected: float, error: float) -> None:
    assert relative_error(torch.tensor([result]), torch.tensor([expected])) == error


class Event:
    """Replacement of the events of a GPU, with the clock of the CPU."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def test_every_program_and_peer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Event=Event, synchronize=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(times, "BACKENDS", ("reference",))
    set_limit(monkeypatch, "timed runs of the check of a GPU", 2)
    set_limit(monkeypatch, "warm-up runs of the check of a GPU", 1)
    monkeypatch.setattr(times, "PROBLEMS", [problem._replace(large=problem.small) for problem in PROBLEMS])
    results = list(times.run(CPU))
    assert [t.program for t in results if t.who == "reference"] == [problem.name for problem in PROBLEMS]
    assert {"pytorch-crf", "torch ctc_loss"} <= {t.who for t in results}
    assert all(t.milliseconds > 0 for t in results)
    assert times.count() == len(PROBLEMS)
    lines = report.as_markdown({"device": "none"}, [], results, [times.Compiled("walk", 40, 0, 512)]).splitlines()
    assert "1 variants of kernels: at most 40 registers, 0 spills." in lines
    assert sum(line.startswith("| CTC |") for line in lines) == 2


def test_an_older_report_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "gpu.md").write_text("mine")
    result = CliRunner().invoke(app, ["--output", str(tmp_path / "gpu.json")])
    assert result.exit_code == 2
    assert "gpu.md exists: add --force" in result.output
    assert (tmp_path / "gpu.md").read_text() == "mine"


def test_without_a_gpu_each_check_is_reported_without_numpy_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter computes −∞ − (−∞) with NumPy, which warns of it."""
    pytest.importorskip("triton")

    def run(device: torch.device, cases: object) -> Iterator[checks.Check]:
        for program in ("first", "second"):
            assert np.isnan(np.float64(-math.inf) - np.float64(-math.inf))
            yield checks.Check(program, "l2", "float64", 0.0, 0.0, 0.0, True, True)

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.setattr(checks, "count", lambda cases: 2)
    check_on(monkeypatch, CPU)
    result = CliRunner().invoke(app, ["--output", str(tmp_path / "gpu.json")])
    assert result.exit_code == 0, result.output
    assert "checks: 1 of 2 (first)" in result.output
    assert "checks: 2 of 2 (second)" in result.output
    assert "- runtime: Triton's interpreter, on the CPU" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow_gpu
def test_without_a_gpu_the_checks_run_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, "-m", "bellmax", "gpu", "--output", "gpu.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There is no GPU here" in done.stdout
    assert f"checks: {2 * len(PROBLEMS)} of {2 * len(PROBLEMS)}" in done.stdout
    assert "Warning" not in done.stderr
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert len(data["checks"]) == checks.count(checks.FEW) == 2 * len(PROBLEMS)
    assert data["times"] == data["kernels"] == []
    assert f"{2 * len(PROBLEMS)} of {2 * len(PROBLEMS)} checks passed" in (tmp_path / "gpu.md").read_text()
