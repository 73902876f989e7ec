"""Draw the figure of docs/guide/parsing.md: the parses of an ambiguous sentence under negentropy and sparsemax."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from saving import save
from torch import Tensor

import bellmax as bx

WORDS = ["she", "saw", "a", "star", "with", "telescopes"]
SPANS = {
    "a star": 1.6,
    "with telescopes": 1.4,
    "saw a star": 0.9,
    "saw a star with telescopes": 1.5,
    "a star with telescopes": 0.8,
    "she saw": 0.3,
}
NUM_SHOWN = 4  # trees in the row of negentropy


def scores() -> Tensor:
    """Return the scores of spans, (n, n) [first word, last word]."""
    by_span = torch.zeros(len(WORDS), len(WORDS))
    for text, score in SPANS.items():
        words = text.split()
        first = next(i for i in range(len(WORDS)) if WORDS[i : i + len(words)] == words)
        by_span[first, first + len(words) - 1] = score
    return by_span


def draw(ax: Axes, title: str, tree: Tensor) -> None:
    """Draw a tree, a 0/1 tensor (n, n), with its words below."""
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
    ax.set_ylim(-1.6, len(WORDS) - 0.6)

    def draw_span(first: int, last: int) -> tuple[float, float]:
        """Draw a span and the spans inside it. Return the position of its top."""
        if first == last:
            ax.text(first, -0.25, WORDS[first], ha="right", va="top", rotation=40, fontsize=8, rotation_mode="anchor")
            return float(first), 0.0
        split = next(k for k in range(first, last) if tree[first, k] and tree[k + 1, last])
        left, right = draw_span(first, split), draw_span(split + 1, last)
        x, y = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1
        ax.plot([left[0], x, right[0]], [left[1], y, right[1]], color="tab:blue", linewidth=1.2)
        return x, y

    draw_span(0, len(WORDS) - 1)


def figure() -> Figure:
    """Return the figure: a row of trees for each Ω."""
    drawn = Figure(figsize=(10, 5), layout="constrained")
    rows = drawn.subfigures(2, 1)
    dense, sparse = bx.SpanTrees(scores()), bx.SpanTrees(scores(), omega="sparsemax")
    all_trees, all_probabilities = dense.support_paths()
    few_trees, few_probabilities = sparse.support_paths()
    rest = float(all_probabilities[NUM_SHOWN:].sum())
    titles = (
        f"negentropy: the {NUM_SHOWN} most probable of {len(all_probabilities)} trees; the others share {rest:.0%}",
        f"sparsemax: the {len(few_trees)} trees that survive",
    )
    rows_of_trees = ((all_trees[:NUM_SHOWN], all_probabilities[:NUM_SHOWN]), (few_trees, few_probabilities))
    for row, title, (trees, probabilities) in zip(rows, titles, rows_of_trees, strict=True):
        row.suptitle(title, x=0.01, ha="left", fontsize=11)
        panels = row.subplots(1, max(NUM_SHOWN, len(few_trees)))
        for ax, tree, probability in zip(panels, trees, probabilities, strict=False):
            draw(ax, f"{float(probability):.2f}", tree)
        for ax in row.axes[len(trees) :]:
            ax.set_axis_off()
    return drawn


if __name__ == "__main__":
    save(__doc__, {"trees": figure})
