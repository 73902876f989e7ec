"""Tag probabilities of a sentence as a figure, as in appendix C.1 of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from bellmax_apps.figures import fonts

WIDE = 24
"""Maximum number of words in a row."""
LONG = 20
"""Maximum number of letters of a word."""


def draw(
    tokens: Sequence[str],
    labels: Sequence[str],
    panels: Sequence[tuple[str, NDArray[np.float64]]],
    truth: Sequence[str] | None = None,
) -> Figure:
    """Draw a panel for each title and probabilities (T, S): words on the x axis, tags on the y axis.

    Darker is more probable. A gray border marks a probability above 0, and a red dot marks the true tag. Tags that are
    improbable everywhere and never true are left out. A panel of a long sentence has several rows.
    """
    largest = np.max([p.max(0) for _, p in panels], axis=0)
    shown = [n for n, label in enumerate(labels) if largest[n] > 0.005 or (truth and label in truth)]
    names = [labels[n] for n in shown]
    words = [token if len(token) <= LONG else f"{token[: LONG - 1]}…" for token in tokens]
    count = -(-len(words) // WIDE)
    width = -(-len(words) // count)
    size = max(4.0, 0.5 * width + 1.4), (0.26 * len(names) + 1.6) * count * len(panels)
    figure = Figure(figsize=size, layout="constrained")
    axes = iter(figure.subplots(len(panels) * count, squeeze=False)[:, 0])
    for title, p in panels:
        for start in range(0, len(words), width):
            ax, row = next(axes), slice(start, start + width)
            _draw_row(ax, words[row], names, p[row, shown].T, truth[row] if truth else None)
            ax.set_xlim(-0.5, width - 0.5)
            if start == 0:
                ax.set_title(title, fontsize=9, loc="left", family=fonts(), parse_math=False)
    return figure


def _draw_row(
    ax: Axes, words: Sequence[str], labels: list[str], cells: NDArray[np.float64], truth: Sequence[str] | None
) -> None:
    """Draw the probabilities (labels, words) of a row of words."""
    ax.imshow(cells, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for row, column in zip(*np.nonzero(cells > 0), strict=True):
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="0.6", linewidth=0.8))
    if truth:
        ax.plot(range(len(words)), [labels.index(tag) for tag in truth], "o", color="tab:red", markersize=4)
    ax.set_xticks(
        range(len(words)), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=8,
        family=fonts(), parse_math=False,
    )  # fmt: skip
    ax.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    ax.tick_params(length=0)
