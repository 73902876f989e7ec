"""The documentation site: navigation, links, figures and the API reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import bellmax

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "apps/results"
HOME = "https://github.com/bellmax/bellmax/blob/main/"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="not run from a checkout")


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r"[-:] ([\w/-]+\.md)$", config, re.MULTILINE))
    files = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    included = {name for name in files if name.startswith("benchmarks/tables/")}
    assert pages - {"changelog.md"} == files - included | {f"results/{path.name}" for path in RESULTS.glob("*.md")}


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *RESULTS.glob("*.md")], ids=lambda page: page.name)
def test_relative_links_lead_to_files_of_the_repository(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (*DOCS.rglob("*.md"), *RESULTS.glob("*.md"))]
    unused = [path.name for path in (DOCS / "figures").iterdir() if not any(f"/{path.name})" in page for page in pages)]
    assert unused == []


def test_the_gallery_links_to_the_page_and_the_code_of_each_picture() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(figures/(.*?)\)\]\((.*?)\)\n.*\[\*code\*\]\((.*?)\)", text)
    assert len(shown) == text.count("![") > 10
    for picture, page, code in shown:
        path = RESULTS / page.removeprefix("results/") if page.startswith("results/") else DOCS / page
        path = path if path.is_file() else DOCS / page
        assert picture in path.read_text(encoding="utf-8"), page
        assert (ROOT / code.removeprefix(HOME)).is_file(), code


def public_names() -> set[str]:
    """Full names of the public classes and functions, of ``bellmax`` and of its modules."""
    compat = [f"compat.{name}" for name in importlib.import_module("bellmax.compat").__all__]
    modules = [name for name in bellmax.__all__ if inspect.ismodule(getattr(bellmax, name))]
    names = {f"bellmax.{name}" for name in bellmax.__all__ if name not in (*modules, "__version__")}
    for module in {*modules, *compat} - {"compat"}:
        names |= {f"bellmax.{module}.{name}" for name in importlib.import_module(f"bellmax.{module}").__all__}
    return names | {"bellmax.onnx.translations"}


def test_every_public_name_is_on_exactly_one_api_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md")]
    documented = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    assert len(documented) == len(set(documented))
    assert public_names() - set(documented) == set()
