"""Type checkers see every public name, and report names and arguments that do not exist."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bellmax as bx

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "typing" / "public_names.py"
MODULES = [
    *("bellmax" + name for name in ("", ".nn", ".losses", ".lattice", ".sklearn", ".plots", ".cluster", ".compat")),
    *(f"bellmax.compat.{name}" for name in bx.compat.__all__),
]
pytestmark = pytest.mark.skipif(not (ROOT / "src").exists(), reason="not run from a checkout")


def mypy(path: Path) -> str:
    """Check a script as users do, with ``--strict`` and without the configuration of this repository."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    cache = ROOT / ".mypy_cache" / "public_names"
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, f"--cache-dir={cache}", str(path)], capture_output=True, text=True, env=environment, cwd=path.parent
    )
    return done.stdout + done.stderr


def dotted_names(tree: ast.Module) -> set[str]:
    """Names of attributes in a script, such as bellmax.nn.CRF for nn.CRF."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = set()
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name) and node.id in modules:
            names.add(".".join((modules[node.id], *attributes)))
    return names


@pytest.mark.parametrize("module", MODULES)
def test_the_script_has_every_public_name(module: str) -> None:
    names = dotted_names(ast.parse(SCRIPT.read_text(encoding="utf-8")))
    public = importlib.import_module(module).__all__
    assert public
    assert [name for name in public if not any(f"{n}.".startswith(f"{module}.{name}.") for n in names)] == []


def test_the_script_runs() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    subprocess.run([sys.executable, SCRIPT], check=True)


def test_mypy_accepts_every_public_name() -> None:
    assert mypy(SCRIPT).startswith("Success: no issues found in 1 source file")


def test_mypy_reports_names_and_arguments_that_do_not_exist(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    lines = [
        "import torch, bellmax as bx",
        "bx.Chian",
        "bx.nn.CFR",
        "bx.losses.crf",
        "bx.compat.torchcfr",
        "bx.lattice.one_of",
        "bx.Chain(torch.zeros(2, 2, 2), lenghts=2)",
        "text: str = bx.DTW(torch.zeros(2, 2)).value",
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    output = mypy(script)
    assert [n for n in range(1, len(lines) + 1) if f"wrong.py:{n}: error" in output] == list(range(2, len(lines) + 1))
