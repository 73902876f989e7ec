"""Draw the figures of docs/start/idea.md: smoothed maxima, their gradients, and paths through a graph."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

import bellmax as bx
from bellmax import plots

OMEGAS = {"hard": bx.Hard(), "negentropy": bx.Negentropy(), "sparsemax": bx.Tsallis(2)}
COLOURS = {"hard": "0.55", "negentropy": "tab:blue", "sparsemax": "tab:orange"}
EDGES = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (2, 5), (3, 5), (4, 6), (5, 6)]
WEIGHTS = torch.tensor([1.0, 0.8, 0.0, 0.9, 0.7, 0.4, 0.2, 0.5, 0.6])


def smoothed_max() -> Figure:
    """Plot max_Ω(x, 0) and its derivative with respect to x."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-3, 3, 601)
    both = torch.stack((x, torch.zeros_like(x)), -1)
    for name, omega in OMEGAS.items():
        left.plot(x, omega.max(both), color=COLOURS[name], label=name)
        right.plot(x, omega.argmax(both)[:, 0], color=COLOURS[name], label=name)
    left.set_title("max$_Ω$(x, 0)", loc="left", fontsize=10)
    right.set_title("its derivative: how probable x is", loc="left", fontsize=10)
    for ax in (left, right):
        ax.set_xlabel("x")
        ax.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    return figure


def graph() -> Figure:
    """Plot one graph under three Ω."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    dag = bx.DAG(EDGES)
    for ax, (name, omega) in zip(figure.subplots(1, 3), OMEGAS.items(), strict=True):
        p = dag.paths(WEIGHTS, omega=omega)
        plots.dag(p, ax=ax).set_title(f"{name}: value {p.value:.2f}", fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/figures"), help="folder (default: docs/figures)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in {"idea-max": smoothed_max(), "idea-graph": graph()}.items():
        figure.savefig(output / f"{name}.png", dpi=120)
        print(output / f"{name}.png")


if __name__ == "__main__":
    main()
