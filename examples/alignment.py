"""Draw a series, its warped and noisy copy, and their soft alignment under two regularizers."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bellmax as bx
from bellmax import plots

OMEGAS = {"negentropy": bx.Negentropy(0.1), "sparsemax": bx.Tsallis(2, gamma=0.1)}


def heartbeat(time: Tensor) -> Tensor:
    """Return the waves P, Q, R, S and T of an electrocardiogram at the given times in [0, 1]."""
    waves = torch.tensor(
        [(0.2, 0.04, 0.25), (0.35, 0.015, -0.3), (0.4, 0.02, 1.5), (0.46, 0.02, -0.5), (0.7, 0.07, 0.5)]
    )
    centre, width, height = waves.T
    return (height * (-((time[:, None] - centre) / width).square() / 2).exp()).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="output folder (default: demo)")
    output: Path = parser.parse_args().output
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x, y = heartbeat(torch.linspace(0, 1, 36)), heartbeat(torch.linspace(0, 1, 48) ** 1.3)
    x, y = x + 0.05 * torch.randn(36), y + 0.05 * torch.randn(48)

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for ax, (name, omega) in zip(figure.subplots(1, 2), OMEGAS.items(), strict=True):
        p = bx.DTW((x[:, None] - y).square(), omega=omega)
        plots.alignment(p, x, y, ax=ax).set_xlabel(name)
        shown = f"{int(p.expected_path.count_nonzero())} of {p.cost.numel()} cells have a probability above 0"
        print(f"{name:<10} value {p.value:7.3f}; {shown}")
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "alignment.png", dpi=120)
    print(f"Saved {output / 'alignment.png'}. Darker cells are more probable, cells with a border have positive")
    print("probability, and the yellow line is the best alignment.")


if __name__ == "__main__":
    main()
