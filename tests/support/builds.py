"""Kernels built from a changed copy of ``native/``, and processes that use them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bellmax as bx

ROOT = Path(__file__).parents[2]

_MISSING = [name for name in ("cmake", "ninja") if importlib.util.find_spec(name) is None]
_MISSING += [] if shutil.which(os.environ.get("CXX", "c++")) else ["a C++ compiler"]

needs_compiler = pytest.mark.skipif(bool(_MISSING), reason=f"building kernels needs {', '.join(_MISSING)}")

_LOAD = """
import importlib.util, sys
import pytest, torch  # torch before the kernels, which use its threads
spec = importlib.util.spec_from_file_location("bellmax._native", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
sys.exit(pytest.main(sys.argv[2:]))
"""


def copy_native(folder: Path) -> Path:
    """Copy the native code to a folder, to be compiled quickly instead of for speed."""
    copy = folder / "native"
    shutil.copytree(ROOT / "native", copy)
    lists = copy / "CMakeLists.txt"
    lists.write_text(re.sub("-O[123]", "-O0", lists.read_text()))
    return copy


def build(native: Path) -> Path:
    """Build the kernels in a folder of native code, for the instructions of this processor only."""
    target = native.parent / "build"
    other = "BASELINE" if bx.backend_info()["instructions"] == "avx2" else "AVX2"
    options = [f"-DBELLMAX_{other}=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    _run("-m", "cmake", "-G", "Ninja", "-S", str(native), "-B", str(target), *options)
    _run("-m", "cmake", "--build", str(target))
    return target / "_native.abi3.so"


def run_tests(kernels: Path, tests: Path) -> None:
    """Run a file of tests in a new process with these kernels. Raises ``AssertionError`` if a test fails."""
    _run("-c", _LOAD, str(kernels), "-q", "-p", "no:cacheprovider", str(tests))


def _run(*arguments: str) -> None:
    ran = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
