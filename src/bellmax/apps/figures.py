"""What the figures of all applications share."""

from __future__ import annotations

import warnings
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

PICTURES = ".png", ".svg", ".pdf", ".jpg"
"""Endings of the files that a figure can be written to."""
FONTS = ["DejaVu Sans", *sorted({font.name for font in fontManager.ttflist if "CJK" in font.name})]
"""For text of any language: a letter is drawn in the first that has it, and as a box if none has."""


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure, without a warning for each letter that no font has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(path, dpi=dpi)
