"""Pages of the site that are outside docs/: the results of the applications, in apps/results."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path(__file__).parent / "apps/results"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add apps/results/NAME.md as results/NAME.md."""
    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links between docs/ and apps/results, which are relative to the repository, to links of the site."""
    return markdown.replace("(../../docs/", "(../").replace("(../apps/results/", "(results/")
