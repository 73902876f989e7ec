"""The README: each cell runs alone and prints its output, and links work on a package index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CELLS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
HOME = "https://github.com/bellmax/bellmax/"
SITE = "https://bellmax.github.io/bellmax/"
DEMO = f"{SITE}demo/"  # made by make docs


@pytest.mark.parametrize("cell", CELLS, ids=range(len(CELLS)))
def test_each_cell_runs_alone_and_prints_its_output(cell: str, tmp_path: Path) -> None:
    said = re.findall(r"^print\(.*\)  # (.*)$", cell, re.MULTILINE)
    assert said
    (tmp_path / "cell.py").write_text(cell, encoding="utf-8")
    done = subprocess.run([sys.executable, "cell.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == said
    assert done.stderr == ""


def test_has_four_short_cells() -> None:
    assert len(CELLS) == 4
    for cell in CELLS:
        code = [line for line in cell.splitlines() if line and not line.startswith(("import", "from"))]
        assert len(code) <= 10


def test_links_work_on_a_package_index() -> None:
    assert 'readme = "README.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)|^\[[\w-]+\]: (.*)$", README, re.MULTILINE)
    links = [inline or listed for inline, listed in links]
    assert len(links) > 20
    for link in links:
        assert link.startswith("https://")
        if link.startswith(HOME):
            path = re.sub(r"^(blob|raw)/main/", "", link.removeprefix(HOME))
            assert (ROOT / path).is_file(), link
        if link.startswith(SITE) and link != DEMO:
            path = link.removeprefix(SITE).rstrip("/")
            assert (ROOT / f"docs/{path}.md").is_file() or (ROOT / f"docs/{path}/index.md").is_file(), link
    assert set(re.findall(r"\]\[([\w-]+)\]", README)) == set(re.findall(r"^\[([\w-]+)\]: ", README, re.MULTILINE))


def test_imports_of_the_table_exist() -> None:
    lines = re.findall(r"\| `(from bellmax\.compat\..*)` \|", README)
    assert len(lines) == 8
    for line in lines:
        exec(line, {})
