"""Phrases that readers found hard to understand stay out of the code and the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "docs", "src", "tests", "examples", "benchmarks", "native"
ENDINGS = {".md", ".py", ".toml", ".cpp", ".h"}
UNCLEAR = (
    "not looked at",
    "say the same: give",
    "must leave one (start|{)",
    "the reference backend serves",
    "that backend is",
    "got another set",
    "Of the optimizer",
    "[Oo]f everything random",
    "[Nn]umbers a (word|letter)",
    "Of labels",
    "in two goes",
    "A run each",
    "Why to trust",
    r"that cannot be\*\*",
    "What lies past",
    "What the whole batch shares",
    "A set of cells that is an alignment",
    "no step that counts",
    "A step that is skipped adds no node",
)


def test_unclear_phrases_stay_out() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not run from a checkout")
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    unclear = re.compile("|".join(phrase.replace(" ", r"\s+") for phrase in UNCLEAR))
    found = []
    for path in sorted(paths):
        if path.suffix in ENDINGS and path.is_file() and path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            for match in unclear.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(match[0].split())}")
    assert not found, "say it plainly:\n" + "\n".join(found)
