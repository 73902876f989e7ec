"""Former names, names of other libraries, and the table of former names in the changelog."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from support.names import FOREIGN, RENAMED

import bellmax as bx
from bellmax import lattice as L

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
OLD = [(module, name, new) for module, names in RENAMED.items() for name, new in names.items()]
TRIED = [(module, name, new) for module, names in FOREIGN.items() for name, new in names.items()]


def find(dotted: str) -> object:
    """The object with a dotted name."""
    module, *attributes = dotted.split(".")
    found = importlib.import_module(module)
    for name in attributes:
        found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")
    return found


@pytest.mark.parametrize(("module", "name", "new"), OLD, ids=[name for _, name, _ in OLD])
def test_a_former_name_says_the_present_one(module: str, name: str, new: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{module}.{name} is now {new}")):
        getattr(importlib.import_module(module), name)
    line = f"| `{module}.{name}` | "
    assert line in CHANGELOG.read_text(encoding="utf-8")


@pytest.mark.parametrize(("module", "name", "new"), TRIED, ids=[f"{module}.{name}" for module, name, _ in TRIED])
def test_a_name_of_another_library_says_what_to_use(module: str, name: str, new: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute '{name}': use {new}")):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("text", [new for _, _, new in OLD + TRIED])
def test_what_the_tables_recommend_exists(text: str) -> None:
    names = re.findall(r"bellmax(?:\.\w+)+", text)
    assert names or text.startswith("bellmax_apps")
    for name in names:
        assert find(name) is not None


def test_other_names_raise_the_usual_error() -> None:
    for module in (bx, bx.nn):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'$"):
            _ = module.nothing
    assert not hasattr(bx, "__wrapped__")


def test_the_words_of_lattices_are_a_module() -> None:
    assert bx.lattice is L
    assert not set(L.__all__) & set(dir(bx))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bx.Lattice([bx.Move(1, 0)]).paths({}, lengths=(2, 1)), r"no argument 'lengths': use grid=\(rows, col"),
        (lambda: bx.sklearn.DTWKernel(gamma=2.0), r"no argument 'gamma': use length_scale=, the square root of gamma"),
        (lambda: bx.DTW(torch.zeros(2, 2), window=1), "no argument 'window': use band="),
        (lambda: bx.dtw(torch.zeros(2), torch.zeros(2), metric="euclidean"), "no argument 'metric': use cost="),
        (lambda: bx.Chain(torch.zeros(2, 2, 2), temperature=2.0), "no argument 'temperature': use gamma="),
    ],
)
def test_former_and_foreign_arguments_say_the_present_one(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
