"""Choosing a backend, and installing without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.inside import BACKENDS, scores, with_scores

import bellmax as bx

ROOT = Path(__file__).parents[2]


def python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_use_backend_nests_and_is_fixed_at_construction() -> None:
    dag, theta = bx.DAG([(0, 1), (0, 1)]), torch.zeros(2)
    with bx.use_backend("reference"):
        p = dag.paths(theta)
        assert bx.backend_info()["cpu"] == "reference"
    assert p.backend == "reference"
    assert p.value == pytest.approx(torch.tensor(2.0).log())
    assert with_scores(p, (theta,), p.omega).backend == "reference"


def test_use_backend_is_undone_by_an_exception() -> None:
    before = bx.backend_info()["cpu"]
    with pytest.raises(KeyError), bx.use_backend("reference"):
        raise KeyError
    assert bx.backend_info()["cpu"] == before


def test_use_backend_in_one_thread_leaves_the_others_alone() -> None:
    before = bx.backend_info()["cpu"]
    with bx.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: bx.backend_info()["cpu"]).result() == before


def test_unknown_backend() -> None:
    with (
        pytest.raises(ValueError, match="name must be one of 'native', 'triton', 'detour', 'reference', got 'cuda'"),
        bx.use_backend("cuda"),
    ):
        pass


def test_the_kernels_for_gpus_do_not_run_on_the_cpu() -> None:
    pytest.importorskip("triton")
    with (
        bx.use_backend("triton"),
        pytest.raises(ValueError, match="the triton backend runs on GPUs, got tensors on cpu"),
    ):
        bx.DTW(torch.ones(2, 3))


def test_an_unsupported_omega_runs_on_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["native"], "serves", lambda structure, device, kernel: kernel == ("hard", ()))
    monkeypatch.setattr(BACKENDS["detour"], "serves", lambda structure, device, kernel: kernel is not None)
    p = bx.DTW(torch.ones(2, 3), omega="hard")
    assert p.backend == "native"
    assert with_scores(p, scores(p), bx.Negentropy()).backend == "detour"


@pytest.mark.slow
def test_environment_variable() -> None:
    code = """
import os, torch
for name in ("reference", "fast"):
    os.environ["BELLMAX_BACKEND"] = name
    if os.fork() == 0:
        import bellmax
        print(bellmax.backend_info()["cpu"])
        break
    os.wait()
"""
    told = python(code)
    assert told.stdout == "reference\n"
    assert (
        "the environment variable BELLMAX_BACKEND must be one of 'native', 'triton', 'detour', 'reference', got 'fast'"
        in told.stderr
    )


@pytest.mark.slow
def test_an_empty_environment_variable_is_ignored() -> None:
    told = python('import os; os.environ["BELLMAX_BACKEND"] = ""; import bellmax; print(bellmax.backend_info()["cpu"])')
    assert told.stdout == "native\n", told.stderr


def test_installs_and_runs_without_a_compiler(tmp_path: Path) -> None:
    install = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
         "--target", str(tmp_path), "-C", f"build-dir={tmp_path / 'build'}", str(ROOT)],
        capture_output=True, text=True, env={**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
    )  # fmt: skip
    assert install.returncode == 0, install.stdout + install.stderr
    assert not list(tmp_path.glob("bellmax/_native*"))
    code = f"""
import sys, warnings
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(torch.__file__).parents[1])!r}]  # not the editable install
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bellmax as bx
    for _ in range(3):
        value = bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2)).value
print(bx.__file__, bx.backend_info()["native"], [str(w.message)[:57] for w in caught], round(float(value), 4))
try:
    bx.use_backend("native").__enter__()
except ValueError as error:
    print(error)
"""
    result = python(code, "-S")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == (
        f"{tmp_path}/bellmax/__init__.py not compiled "
        "['bellmax runs without its compiled kernels (not compiled):'] 0.6931"
    )
    assert second == "backend 'native' is not available: not compiled"


def test_a_backend_runs_the_structures_that_it_supports() -> None:
    """A preferred backend that supports only chains under negentropy; other programs fall back."""
    chains = type("Chains", (), {})()
    chains.name, chains.status = "chains", "available"
    reference = BACKENDS["reference"]
    asked = []
    chains.serves = lambda structure, device, kernel: structure == "chain" and kernel == bx.Negentropy().kernel
    chains.sweeps = lambda structure: asked.append(structure) or reference.sweeps(structure)
    chains.fused = reference.fused
    others = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"chains": chains} | others)
    try:
        p = bx.Chain(torch.zeros(3, 2, 2))
        assert p.backend == "chains"
        assert p.value.exp().round() == 8
        assert asked == ["chain"]
        fallback = next(name for name, backend in others.items() if backend.status == "available")
        assert bx.Chain(torch.zeros(3, 2, 2), omega="l2").backend == fallback
        assert bx.DTW(torch.zeros(2, 2)).backend == fallback
        assert p.best_path().sum() == 3  # under another Ω
    finally:
        BACKENDS.clear()
        BACKENDS.update(others)


def test_an_omega_written_in_python_runs_on_the_reference() -> None:
    class Custom(bx.Negentropy):
        pass

    p = bx.Chain(torch.zeros(3, 2, 2), omega=Custom())
    assert p.backend == "reference"
    assert p.value.exp().round() == 8
