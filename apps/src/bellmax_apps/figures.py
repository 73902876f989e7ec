"""Fonts for text in any language, and writing of figures."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import typer
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager

PICTURES = ".png", ".svg", ".pdf", ".jpg"
"""File name extensions of figures."""


def useful(paths: Iterable[str]) -> list[str]:
    """Select the font files with Chinese, Japanese and Korean characters, or with emoji.

    Color fonts are left out, since matplotlib cannot draw them.

    >>> useful(["NotoSerif-Regular.ttf", "NotoColorEmoji-Regular.ttf", "NotoSansCJK-Regular.ttc"])
    ['NotoSansCJK-Regular.ttc']
    """
    return sorted(path for path in paths if re.search("(CJK|(?<!Color)Emoji).*Regular|Symbola", Path(path).name))


@cache
def fonts() -> list[str]:
    """Font families for text in any language. Matplotlib draws each character in the first family that has it."""
    families = ["DejaVu Sans"]
    for path in useful(findSystemFonts()):
        count = len(fontManager.ttflist)
        with suppress(Exception):  # a damaged font
            fontManager.addfont(path)  # matplotlib caches the fonts that were installed when it first ran
            families.append(fontManager.ttflist[count].name)
    return families


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure, and report the characters that no font has in a single line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(path, dpi=dpi)
    missing = {}
    for warning in caught:
        glyph = re.match(r"Glyph (\d+) ", str(warning.message))
        if glyph:
            missing[chr(int(glyph[1]))] = True
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if missing:
        typer.secho(
            f"{path}: no font here has {' '.join(missing)}, so boxes are drawn. Install one, such as Noto Sans CJK for "
            "Chinese, Japanese and Korean, or Symbola for emoji.",
            fg="yellow",
            err=True,
        )
