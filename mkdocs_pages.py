"""Hooks of the site: pages outside docs/, formulas as MathML, summary tables of the API pages."""

from __future__ import annotations

import html
import importlib
import inspect
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
RESULTS = ROOT / "apps/results"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
OBJECT = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add apps/results/NAME.md as results/NAME.md, and the changelog."""
    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links between docs/ and apps/results to links of the site, and insert the summary of an API page."""
    markdown = markdown.replace("(../../docs/", "(../")
    markdown = re.sub(r"\(((?:\.\./)*)\.\./apps/results/", r"(\1results/", markdown)
    return markdown.replace("<!-- summary -->", summary(OBJECT.findall(markdown)))


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas to MathML, which browsers render without a script."""
    return FORMULA.sub(lambda m: convert(html.unescape(m[3]), "block" if m[2] == "[" else "inline"), content)


def summary(names: list[str]) -> str:
    """A table of objects, each with a link and the first sentence of its docstring."""
    rows = [f"| [`{name.removeprefix('bellmax.')}`][{name}] | {first_sentence(name)} |" for name in names]
    return "\n".join(["| Name | Description |", "| --- | --- |", *rows])


def first_sentence(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("|", "\\|")
    return re.split(r"(?<=\.)\s", text)[0].rstrip(":")
