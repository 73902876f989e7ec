"""What the figures of all applications share."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import typer
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager

PICTURES = ".png", ".svg", ".pdf", ".jpg"
"""Endings of the files that a figure can be written to."""
FONTS = ["DejaVu Sans"]
"""For text of any language: a letter is drawn in the first that has it, and as a box if none has."""
for _path in sorted(path for path in findSystemFonts() if re.search("(CJK|Emoji).*Regular|Symbola", Path(path).name)):
    fontManager.addfont(_path)  # matplotlib remembers those of its first day
    FONTS.append(fontManager.ttflist[-1].name)


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure. Letters that no font has are named in one sentence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(path, dpi=dpi)
    missing = dict.fromkeys(
        chr(int(found[1])) for warning in caught if (found := re.match(r"Glyph (\d+) ", str(warning.message)))
    )
    if missing:
        typer.secho(
            f"{path}: no font here has {' '.join(missing)}, so boxes are drawn. Install one, such as Noto Sans CJK for "
            "Chinese, Japanese and Korean, or Symbola for emoji.",
            fg="yellow",
            err=True,
        )
