"""Modules that ``import bellmax`` loads, lazy attributes, and the version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bellmax as bx


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout


def test_import_needs_only_torch_and_numpy_and_loads_the_rest_lazily() -> None:
    code = """
import sys, torch, numpy
before = set(sys.modules)
import bellmax as bx
print({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
assert not {"bellmax.nn", "bellmax.plots", "bellmax.compat", "bellmax.sklearn"} & sys.modules.keys()
assert not {"sklearn", "pandas", "torch._dynamo"} & sys.modules.keys()
assert bx.__version__.split(".")[0].isdigit()
assert "matplotlib" not in sys.modules
print(bx.nn.CRF(3), bx.compat.torchcrf.CRF(3), bx.plots.alignment.__name__)
"""
    brought, modules = in_a_new_process(code).splitlines()
    assert ast.literal_eval(brought) <= {"bellmax", "torch", "numpy", "_bellmax_editable"}
    assert modules.startswith("CRF(3, omega=Negentropy(gamma=1.0), loss='surrogate') CRF(num_tags=3)")


def test_missing_attributes_raise() -> None:
    with pytest.raises(AttributeError, match="module 'bellmax' has no attribute 'crf'"):
        _ = bx.crf
    with pytest.raises(AttributeError, match=r"module 'bellmax.compat' has no attribute 'sktime'"):
        _ = bx.compat.sktime
    assert set(bx.__all__) == set(dir(bx))
    assert all(hasattr(bx, name) for name in bx.__all__)


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("not run from a checkout")
    version = re.escape(bx.__version__)
    for name, line in (
        ("pyproject.toml", rf'^version = "{version}"$'),
        ("apps/pyproject.toml", rf'^version = "{version}"$'),
        ("apps/pyproject.toml", rf'^    "bellmax=={version}",$'),
        ("CITATION.cff", rf"^version: {version}$"),
        ("conda/recipe.yaml", rf'^  version: "{version}"$'),
        ("CHANGELOG.md", rf"^## {version}$"),
    ):
        assert re.search(line, (root / name).read_text(encoding="utf-8"), re.MULTILINE), name
