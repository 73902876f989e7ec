"""The documentation site: every page is in the navigation, and every picture in the gallery with its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "apps/results"
HOME = "https://github.com/bellmax/bellmax/blob/main/"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="not run from a checkout")


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r": ([\w/-]+\.md)$", config, re.MULTILINE))
    assert pages == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | {
        f"results/{path.name}" for path in RESULTS.glob("*.md")
    }


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *RESULTS.glob("*.md")], ids=lambda page: page.name)
def test_relative_links_lead_to_files_of_the_repository(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_every_picture_is_in_the_gallery_with_its_code() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(figures/(.*?)\)\]\((.*?)\)\n.*\[\*code\*\]\((.*?)\)", text)
    assert {picture for picture, _, _ in shown} == {path.name for path in (DOCS / "figures").glob("*.png")}
    for picture, page, code in shown:
        assert picture in (DOCS / page).read_text(encoding="utf-8"), page
        assert (ROOT / code.removeprefix(HOME)).is_file(), code


def test_the_first_page_has_the_cells_of_the_readme() -> None:
    readme, page = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", DOCS / "index.md"))
    for title in re.findall(r"^\*\*([^*]+)\*\*", readme, re.MULTILINE)[1:]:
        assert f"**{title}**" in page
