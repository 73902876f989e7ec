"""What the figures of all applications share."""

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
"""Endings of the files that a figure can be written to."""


def useful(paths: Iterable[str]) -> list[str]:
    """The font files that have letters of Chinese, Japanese and Korean, or emoji. Matplotlib cannot draw coloured ones.

    >>> useful(["NotoSerif-Regular.ttf", "NotoColorEmoji-Regular.ttf", "NotoSansCJK-Regular.ttc"])
    ['NotoSansCJK-Regular.ttc']
    """
    return sorted(path for path in paths if re.search("(CJK|(?<!Color)Emoji).*Regular|Symbola", Path(path).name))


@cache
def fonts() -> list[str]:
    """For text of any language: a letter is drawn in the first that has it, and as a box if none has."""
    found = ["DejaVu Sans"]
    for path in useful(findSystemFonts()):
        before = len(fontManager.ttflist)
        with suppress(Exception):  # a damaged font
            fontManager.addfont(path)  # matplotlib remembers those of its first day
            found.append(fontManager.ttflist[before].name)
    return found


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure. Letters that no font has are named in one sentence."""
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
