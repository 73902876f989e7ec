"""The figure of appendix C.1 of the paper: words, tags, and their probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray


def draw(
    tokens: Sequence[str],
    labels: Sequence[str],
    panels: Sequence[tuple[str, NDArray[np.float64]]],
    truth: Sequence[str] | None = None,
) -> Figure:
    """Draw a panel for each title and probabilities (T, S): words on the x axis, tags on the y axis.

    Darker is more probable. A grey border marks a probability above 0, a red dot the true tag, given as labels. Tags
    that are improbable everywhere and never true are left out.
    """
    most = np.max([p.max(0) for _, p in panels], axis=0)
    rows = [n for n, label in enumerate(labels) if most[n] > 0.005 or (truth and label in truth)]
    height = 0.26 * len(rows) + 1.6
    figure = Figure(figsize=(max(4.0, 0.5 * len(tokens) + 1.4), height * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, (title, p) in zip(axes, panels, strict=True):
        _panel(ax, tokens, [labels[n] for n in rows], p[:, rows].T, truth)
        ax.set_title(title, fontsize=9, loc="left")
    return figure


def _panel(
    ax: Axes, tokens: Sequence[str], labels: list[str], cells: NDArray[np.float64], truth: Sequence[str] | None
) -> None:
    ax.imshow(cells, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for row, column in zip(*np.nonzero(cells > 0), strict=True):
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="0.6", linewidth=0.8))
    if truth:
        ax.plot(range(len(tokens)), [labels.index(tag) for tag in truth], "o", color="tab:red", markersize=4)
    ax.set_xticks(range(len(tokens)), tokens, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.set_xlim(-0.5, len(tokens) - 0.5)
    ax.tick_params(length=0)
