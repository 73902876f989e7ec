"""Draw the figure of docs/guide/sklearn.md: three kinds of series, their DTW clusters and the barycenters."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from saving import save

from bellmax.sklearn import DTWKMeans

KINDS = {"box": "#0072b2", "rise": "#e69f00", "fall": "#009e73"}
EACH, LENGTH = 8, 48


def series(kind: str, rng: np.random.Generator) -> NDArray[Any]:
    """Return a noisy box, a ramp up with a sudden end, or a sudden start with a ramp down, at a random time."""
    begin, end = rng.integers(4, 18), rng.integers(27, 44)
    time = np.arange(LENGTH)
    height = {"box": 1.0, "rise": (time - begin) / (end - begin), "fall": (end - time) / (end - begin)}[kind]
    return np.where((begin <= time) & (time < end), height, 0) + rng.normal(0, 0.12, LENGTH)


def draw_cluster(ax: Axes, members: NDArray[Any], colours: list[str], center: NDArray[Any], title: str) -> None:
    for member, colour in zip(members, colours, strict=True):
        ax.plot(member, color=colour, linewidth=0.6, alpha=0.5)
    ax.plot(members.mean(0), color="0.2", linewidth=1.2, linestyle=":", label="mean")
    ax.plot(center, color="black", linewidth=2, label="barycenter")
    ax.set(title=title, ylim=(-0.5, 1.9), xlabel="time")


def figure() -> Figure:
    rng = np.random.default_rng(0)
    kinds = [*KINDS] * EACH
    X = np.stack([series(kind, rng) for kind in kinds])  # noqa: N806
    model = DTWKMeans(len(KINDS), gamma=0.1, n_init=3, random_state=0).fit(X)

    drawn = Figure(figsize=(11, 3.2), layout="constrained")
    *panels, whole = drawn.subplots(1, len(KINDS) + 1)
    order = np.argsort(model.labels_, kind="stable")
    for cluster, ax in enumerate(panels):
        places = np.flatnonzero(model.labels_ == cluster)
        colours = [KINDS[kinds[n]] for n in places]
        draw_cluster(
            ax, X[places], colours, model.cluster_centers_[cluster], f"cluster {cluster + 1}: {len(places)} series"
        )
    panels[0].legend(loc="upper left", frameon=False, fontsize=8)
    whole.imshow(X[order], aspect="auto", cmap="Greys", interpolation="nearest")
    for row, n in enumerate(order):
        whole.plot([-2], [row], marker="s", markersize=4, color=KINDS[kinds[n]], clip_on=False)
    for cluster in range(1, len(KINDS)):
        whole.axhline(np.searchsorted(model.labels_[order], cluster) - 0.5, color="black", linewidth=1)
    whole.set(title="all series, sorted by cluster", xlabel="time", yticks=[])
    return drawn


if __name__ == "__main__":
    save(__doc__, {"clusters": figure})
