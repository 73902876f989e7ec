"""Figures. Needs the extra ``bellmax[plots]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bellmax.dag import DAGPaths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


def dag(p: DAGPaths, *, ax: Axes | None = None, labels: list[str] | None = None) -> Axes:
    """Draw a graph with the probability of each edge under ``p``: wider is likelier, dashed is exactly 0.

    Args:
        p: a distribution with an empty batch shape.
        ax: where to draw; a new figure by default.
        labels: names of the nodes; their numbers by default.

    >>> import torch, bellmax as bx
    >>> p = bx.DAG([(0, 1), (0, 2), (1, 2)]).paths(torch.zeros(3), omega="l2")
    >>> len(dag(p).patches)  # an arrow for each edge
    3

    """
    from matplotlib.figure import Figure

    if len(p.batch_shape):
        raise ValueError(f"p must have an empty batch shape, got {tuple(p.batch_shape)}")
    ax = ax or Figure().subplots()
    place = _layout(p.dag.levels)
    seen: dict[tuple[int, int], int] = {}
    for (parent, child), probability in zip(p.dag.edges.tolist(), p.expected_path.tolist(), strict=True):
        twin = seen[parent, child] = seen.get((parent, child), -1) + 1
        # Edges that skip levels, and all but the first of parallel ones, bend away from the middle.
        bend = 0.3 * twin + 0.15 * (p.dag.levels[child] - p.dag.levels[parent] - 1).item()
        outwards = -1 if place[parent, 1] + place[child, 1] >= 0 else 1
        _draw_edge(ax, place[parent], place[child], probability, outwards * bend)
    for node, (x, y) in enumerate(place):
        ax.text(x, y, labels[node] if labels else str(node), ha="center", va="center", zorder=3,
                bbox={"boxstyle": "circle,pad=0.35", "fc": "white", "ec": "black"})  # fmt: skip
    ax.set_xlim(place[:, 0].min() - 0.4, place[:, 0].max() + 0.4)
    ax.set_ylim(place[:, 1].min() - 0.8, place[:, 1].max() + 0.8)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _layout(levels: Tensor) -> NDArray[np.float64]:
    """Level to the right, the nodes of a level one above the other: (N, 2)."""
    place = np.empty((len(levels), 2))
    for level in levels.unique():
        nodes = (levels == level).nonzero()[:, 0].numpy()
        place[nodes, 0] = 1.6 * float(level)
        place[nodes, 1] = 1.4 * (np.arange(len(nodes))[::-1] - (len(nodes) - 1) / 2)
    return place


def _draw_edge(
    ax: Axes, start: NDArray[np.float64], stop: NDArray[np.float64], probability: float, bend: float
) -> None:
    from matplotlib.patches import FancyArrowPatch

    dead = probability == 0
    colour = "0.7" if dead else "tab:blue"
    ax.add_patch(
        FancyArrowPatch(
            (start[0], start[1]), (stop[0], stop[1]), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>",
            mutation_scale=12, shrinkA=14, shrinkB=14, color=colour, lw=1 if dead else 0.8 + 3 * probability,
            linestyle="--" if dead else "-",
        )
    )  # fmt: skip
    along = stop - start
    control = (start + stop) / 2 + bend * np.array((along[1], -along[0]))
    x, y = 0.38 * start + 0.48 * control + 0.14 * stop  # nearer to the parent: crossing edges keep their labels apart
    ax.text(x, y, "0" if dead else f"{probability:.2f}", color="0.5" if dead else "black", fontsize=8, ha="center",
            va="center", bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"})  # fmt: skip
