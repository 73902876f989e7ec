"""The figure of docs/guide/parsing.md: the parses of an ambiguous sentence, under negentropy and under sparsemax."""

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
SHOWN = 4


def scores() -> Tensor:
    """(n, n), of spans."""
    found = torch.zeros(len(WORDS), len(WORDS))
    for text, score in SPANS.items():
        words = text.split()
        first = next(i for i in range(len(WORDS)) if WORDS[i : i + len(words)] == words)
        found[first, first + len(words) - 1] = score
    return found


def draw(ax: Axes, title: str, tree: Tensor) -> None:
    """A tree (n, n) of 0 and 1, its words below."""
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
    ax.set_ylim(-1.6, len(WORDS) - 0.6)

    def place(first: int, last: int) -> tuple[float, float]:
        if first == last:
            ax.text(first, -0.25, WORDS[first], ha="right", va="top", rotation=40, fontsize=8, rotation_mode="anchor")
            return float(first), 0.0
        split = next(k for k in range(first, last) if tree[first, k] and tree[k + 1, last])
        left, right = place(first, split), place(split + 1, last)
        x, y = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1
        ax.plot([left[0], x, right[0]], [left[1], y, right[1]], color="tab:blue", linewidth=1.2)
        return x, y

    place(0, len(WORDS) - 1)


def figure() -> Figure:
    drawn = Figure(figsize=(10, 5), layout="constrained")
    rows = drawn.subfigures(2, 1)
    dense, sparse = bx.SpanTrees(scores()), bx.SpanTrees(scores(), omega="sparsemax")
    all_trees, shares = dense.support_paths()
    few, few_shares = sparse.support_paths()
    rest = float(shares[SHOWN:].sum())
    titles = (
        f"negentropy: the {SHOWN} most probable of {len(shares)} trees; the others share {rest:.0%}",
        f"sparsemax: the {len(few)} trees that survive",
    )
    parts = ((all_trees[:SHOWN], shares[:SHOWN]), (few, few_shares))
    for row, title, (trees, probabilities) in zip(rows, titles, parts, strict=True):
        row.suptitle(title, x=0.01, ha="left", fontsize=11)
        for ax, tree, share in zip(row.subplots(1, max(SHOWN, len(few))), trees, probabilities, strict=False):
            draw(ax, f"{float(share):.2f}", tree)
        for ax in row.axes[len(trees) :]:
            ax.set_axis_off()
    return drawn


if __name__ == "__main__":
    save(__doc__, {"trees": figure})
