"""The command line of the examples that draw figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure


def save(description: str | None, figures: dict[str, Callable[[], Figure]]) -> None:
    """Draw each figure, save it as NAME.png in the output folder, and print its path."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=Path("docs/figures"), help="default: docs/figures")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        draw().savefig(output / f"{name}.png", dpi=120)
        print(output / f"{name}.png")
