"""A small dynamic program under three regularizers: what its layers give, as a table and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

import bellmax as bx
from bellmax import plots

EDGES = [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 4), (2, 5), (3, 5), (0, 5), (4, 6), (5, 6), (5, 6)]
WEIGHTS = torch.tensor([2.0, 1.4, 0.3, 0.2, 1.4, 1.9, 0.7, 0.5, 1.8, 1.3, 1.1, 0.4])
OMEGAS = {"negentropy": bx.Negentropy(), "l2": bx.SquaredL2(), "hard": bx.Hard()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    output: Path = parser.parse_args().output
    dag = bx.DAG(EDGES)
    paths = {name: dag.paths(WEIGHTS, omega=omega) for name, omega in OMEGAS.items()}

    count = int(paths["hard"].num_paths)
    print(f"A graph of {dag.num_nodes} nodes and {dag.num_edges} edges; {count} paths lead from 0 to 6.")
    print("The best path is a hard choice. Smoothing the max by a regularizer turns it into an expected path,")
    print("which gradients flow through: every edge counts under negentropy, few do under l2.\n")
    print("edge     weight" + "".join(f"{name:>13}" for name in paths))
    for edge, ((parent, child), weight) in enumerate(zip(EDGES, WEIGHTS, strict=True)):
        cells = "".join(f"{p.expected_path[edge]:13.4f}" for p in paths.values())
        print(f"{parent} → {child}   {weight:7.2f}{cells}")
    for label, values in (
        ("value", [p.value for p in paths.values()]),
        ("entropy", [p.entropy() for p in paths.values()]),
        ("paths left", [len(p.support_paths()[1]) for p in paths.values()]),
    ):
        print(f"{label:<15}" + "".join(f"{float(value):13.4g}" for value in values))

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    for ax, (name, p) in zip(figure.subplots(1, 3), paths.items(), strict=True):
        plots.dag(p, ax=ax)
        ax.set_title(f"{name}: value {p.value:.3f}")
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "dag.png", dpi=120)
    print(f"\nDrawn to {output / 'dag.png'}: an arrow's width is its probability, dashed is exactly 0.")


if __name__ == "__main__":
    main()
