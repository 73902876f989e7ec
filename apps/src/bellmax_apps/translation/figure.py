"""Attention weights of a translation as a figure, as in section 6 and appendix C.3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from bellmax_apps.figures import fonts


def draw(source: Sequence[str], maps: Sequence[tuple[str, Sequence[str], NDArray[np.float64]]]) -> Figure:
    """Draw attention maps side by side. A map is a title, the target words, and their weights (words, source).

    Darker is a greater weight; a border marks a weight above 0.
    """
    rows = max(len(words) for _, words, _ in maps)
    width, height = 0.34 * len(source) + 1.6, 0.28 * rows + 1.7
    figure = Figure(figsize=(width * len(maps), height), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for ax, (title, words, weights) in zip(axes, maps, strict=True):
        _map(ax, source, words, weights)
        ax.set_title(title, fontsize=9, parse_math=False)
    return figure


def _map(ax: Axes, source: Sequence[str], words: Sequence[str], weights: NDArray[np.float64]) -> None:
    """Draw one attention map."""
    ax.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(weights > 0), strict=True):
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="0.6", linewidth=0.6))
    ax.set_xticks(
        range(len(source)), source, rotation=60, ha="right", rotation_mode="anchor", fontsize=8,
        family=fonts(), parse_math=False,
    )  # fmt: skip
    ax.set_yticks(range(len(words)), words, fontsize=8, family=fonts(), parse_math=False)
    ax.tick_params(length=0)
