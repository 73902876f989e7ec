"""Layers of the package: modules import only lower layers, including lazy and type-checking imports."""

from __future__ import annotations

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bellmax

SOURCE = Path(bellmax.__file__).parent

# A module may import modules of the same floor and of lower floors.
FLOORS = (
    ("tensors", "modes", "files", "names"),
    ("regularizers",),
    ("programs", "inputs"),
    ("backends",),
    ("autograd",),
    ("solver",),
    ("decoded",),
    ("targets",),
    ("distribution",),
    ("structures",),
    ("recursions", "automata"),
    ("losses", "series", "markov", "checking", "lattice"),
    ("nn", "plots", "info", "onnx", "sklearn", "cluster", "compat", "chain", "dag", "dtw"),
    ("apps", "gpu_check", "__main__", ""),
)


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    trees = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return trees


MODULES = modules()


def imported(name: str, tree: ast.Module) -> set[str]:
    """Names that a module imports anywhere in its code: modules, and members of modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


IMPORTS = {name: (imported(name, tree) & MODULES.keys()) - {name} for name, tree in MODULES.items()}


def floor(name: str) -> int:
    room = [*name.split("."), ""][1]
    return next(n for n, rooms in enumerate(FLOORS) if room in rooms)


def test_there_are_no_import_cycles() -> None:
    assert len(IMPORTS) > 60
    order = list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert order.index("bellmax.tensors") < order.index("bellmax.distribution")


def test_modules_import_only_lower_floors() -> None:
    up = [(name, other) for name, others in IMPORTS.items() for other in others if floor(other) > floor(name)]
    assert not up


def test_the_library_imports_no_application() -> None:
    for name, tree in MODULES.items():
        assert not [other for other in imported(name, tree) if other.startswith("bellmax_apps")], name


def test_backends_are_imported_through_their_registry() -> None:
    outside = {name for name in MODULES if not name.startswith("bellmax.backends")}
    assert not [name for name in outside for other in IMPORTS[name] if other.startswith("bellmax.backends.reference")]
    inside = {other for name in outside for other in IMPORTS[name] if other.startswith("bellmax.backends.native")}
    assert inside <= {"bellmax.backends.native.sorting"}


@pytest.mark.parametrize("room", ["losses", "nn"])
def test_losses_and_layers_do_not_check_for_structures(room: str) -> None:
    structures = {"PathDistribution"}
    for name, tree in MODULES.items():
        if name.startswith("bellmax.structures"):
            structures |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert {"Chain", "ScoredChain", "DAGPaths", "DTW", "SequencePaths"} <= structures
    asked = re.compile(rf"isinstance\([^()]*\b({'|'.join(structures)})\b")
    assert asked.search("isinstance(p, DTW)")
    paths = list((SOURCE / room).rglob("*.py"))
    assert paths
    assert not [str(path) for path in paths if asked.search(path.read_text())]


def test_old_module_paths_still_import() -> None:
    import bellmax.chain
    import bellmax.dag
    import bellmax.dtw as module_or_function

    assert bellmax.chain.Chain is bellmax.Chain
    assert bellmax.dag.DAG is bellmax.DAG
    from bellmax.dtw import DTW

    assert DTW is bellmax.DTW
    assert bellmax.dtw is module_or_function
    assert callable(bellmax.dtw)


# --- what the tests may use

TESTS = Path(__file__).parent
PUBLIC_FLOOR = floor("bellmax.losses")


def private_names() -> set[str]:
    """Every name in the package that starts with one underscore, but for the method of a NamedTuple."""
    names = {"_native"}
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if re.match("_[a-zA-Z]", name)} - {"_replace"}


PRIVATE_NAMES = private_names()


def private_uses(code: str) -> list[str]:
    """Private attributes and modules of the package in the code of a test, in strings too, but for ``self._x``."""
    attributes = re.findall(r"(?<!\bself)(?<!\bcls)[.\"'](_[a-zA-Z]\w*)", code)
    modules = re.findall(r"(?:from|import) (bellmax\.[\w.]+)", code)
    modules += [f"bellmax.{name}" for name in re.findall(r"\bbx\.(\w+)\.", code)]
    for names in re.findall(r"from bellmax import (.+)", code):
        modules += [f"bellmax.{name}" for name in names.split(", ")]
    return sorted({*attributes} & PRIVATE_NAMES) + [name for name in modules if is_private(name)]


def is_private(module: str) -> bool:
    """True if a module is below the public ones, or in ``bellmax.series``, whose functions ``bellmax`` has."""
    return module in MODULES and (floor(module) < PUBLIC_FLOOR or module.startswith("bellmax.series"))


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("p._scores[0] + self._scores + torch._dynamo", ["_scores"]),
        ("p.dag()._index", ["_index"]),
        ('monkeypatch.setattr(collections, "_TILE", 3)', ["_TILE"]),
        ("from bellmax.backends import BACKENDS", ["bellmax.backends"]),
        ("from bellmax import cluster, files", ["bellmax.files"]),
        ("bx.regularizers.resolve(omega)", ["bellmax.regularizers"]),
        ("from bellmax.series import pairwise", ["bellmax.series"]),
        ("import bellmax.losses as losses\nfrom bellmax.nn import CRF", []),
    ],
)
def test_private_uses_are_detected(code: str, uses: list[str]) -> None:
    assert private_uses(code) == uses


def test_only_the_support_of_the_tests_uses_private_names() -> None:
    """Private names of the library are used in ``support/`` only. (The tests of the applications are separate.)"""
    code = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}
    code = {name: text for name, text in code.items() if not re.match(r"(support|apps)\b", name)}
    assert len(code) > 100
    assert not {name: uses for name, text in code.items() if (uses := private_uses(text))}


def test_the_old_name_of_the_applications_says_the_new_one() -> None:
    with pytest.raises(ImportError, match="import bellmax_apps"):
        importlib.import_module("bellmax.apps")
