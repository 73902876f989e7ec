"""Draw figures of pages in docs/guide: alignment.md, monotonic.md, transducer.md, semi-markov.md and program.md."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from saving import save
from torch import Tensor

import bellmax as bx

OMEGAS = {"negentropy": bx.Negentropy(), "entmax": bx.Tsallis(1.5)}


def heat(ax: Axes, shares: Tensor, title: str) -> None:
    """Draw probabilities (rows, columns). The title shows how many of them are not 0."""
    ax.imshow(shares.detach().numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    nonzero = f"{int((shares > 0).sum())} of {shares.numel()} entries are not 0"
    ax.set_title(f"{title}, {nonzero}", loc="left", fontsize=9)


def gaps() -> Figure:
    """Draw alignments of two protein sequences with gaps, under two regularizers."""
    first, second = "HEAGAWGHEE", "PAWHEAE"
    letters = sorted(set(first + second))
    a, b = (torch.tensor([letters.index(letter) for letter in text]) for text in (first, second))
    matrix = torch.full((len(letters), len(letters)), -1.0).fill_diagonal_(2.5)
    drawn = Figure(figsize=(8, 4.2), layout="constrained")
    for ax, (name, omega) in zip(drawn.subplots(1, 2, sharey=True), OMEGAS.items(), strict=True):
        p = bx.SequenceAlignment.from_sequences(matrix, a, b, gap_open=-2.0, gap_extend=-0.5, omega=omega)
        heat(ax, p.expected_path, name)
        pairs = p.decode()
        both = pairs[(pairs >= 0).all(-1)]
        ax.plot(both[:, 1].numpy(), both[:, 0].numpy(), "o-", color="tab:orange", linewidth=1, markersize=4)
        ax.set_xticks(range(len(second)), list(second))
        ax.set_yticks(range(len(first)), list(first))
    return drawn


def monotone() -> Figure:
    """Draw monotonic alignments of 38 frames with 6 tokens of different durations."""
    torch.manual_seed(0)
    durations = torch.tensor([7, 4, 10, 3, 8, 6])
    tokens = torch.arange(len(durations)).repeat_interleave(durations)
    scores = torch.randn(len(tokens), len(durations))
    scores[torch.arange(len(tokens)), tokens] += 1.2
    drawn = Figure(figsize=(8, 4), layout="constrained")
    axes = drawn.subplots(1 + len(OMEGAS), 1, sharex=True)
    heat(axes[0], scores.softmax(-1).T, "softmax of each frame")
    for ax, (name, omega) in zip(axes[1:], OMEGAS.items(), strict=True):
        p = bx.MonotonicAlignment(scores, omega=omega)
        heat(ax, p.expected_path.T, f"alignment under {name}")
        ax.plot(p.best_path().argmax(-1).numpy(), color="tab:orange", linewidth=1.2, drawstyle="steps-mid")
    for ax in axes:
        ax.set_ylabel("token")
    axes[-1].set_xlabel("frame")
    return drawn


def transducer() -> Figure:
    """Draw the probability that a transducer emits each label at each frame."""
    torch.manual_seed(3)
    frames, labels = 24, 6
    near = -((torch.arange(frames)[:, None] / frames * labels - torch.arange(labels) - 0.5).square())
    emit = (1.5 * near + 0.7 * torch.randn(frames, labels)).clamp(max=0.0)
    blank = torch.log1p(-0.9 * torch.nn.functional.pad(emit, (0, 1), value=-9.0).exp())
    drawn = Figure(figsize=(8, 3.6), layout="constrained")
    for ax, (name, omega) in zip(drawn.subplots(2, 1, sharex=True), OMEGAS.items(), strict=True):
        p = bx.Transducer(blank, emit, omega=omega)
        heat(ax, p.gradient["emit"].T, f"frames that emit each label, {name}")
        ax.plot(p.decode().numpy(), range(labels), "o-", color="tab:orange", linewidth=1, markersize=4)
        ax.set_ylabel("label")
    ax.set_xlabel("frame")
    return drawn


def segments() -> Figure:
    """Draw a noisy series at three levels, its best segments, and the marginals of the segment labels."""
    torch.manual_seed(1)
    levels = torch.tensor([-1.0, 0.0, 1.0])
    labels = torch.tensor([0, 2, 1, 2, 0]).repeat_interleave(torch.tensor([14, 9, 17, 8, 12]))
    series = levels[labels] + 0.7 * torch.randn(len(labels))
    emissions = -(series[:, None] - levels).square()
    durations = torch.full((20, 3), 0.0)
    durations[:5] = -3.0  # short segments are rare
    drawn = Figure(figsize=(8, 4.2), layout="constrained")
    axes = drawn.subplots(3, 1, sharex=True)
    p = bx.SemiMarkov.from_scores(emissions, durations, torch.full((3, 3), -1.0).fill_diagonal_(-torch.inf))
    axes[0].plot(series.numpy(), ".", color="0.5", markersize=4)
    for start, end, label in p.decode().tolist():
        if label >= 0:
            axes[0].hlines(float(levels[label]), start - 0.5, end - 0.5, color="tab:orange", linewidth=2.5)
    axes[0].set_title("series and its best segments", loc="left", fontsize=9)
    heat(axes[1], emissions.softmax(-1).T, "softmax of each step")
    heat(axes[2], p.marginals.T, "marginals of the segment labels under negentropy")
    for ax in axes[1:]:
        ax.set_ylabel("label")
    axes[-1].set_xlabel("step")
    return drawn


@bx.program("item")
def pack(value: Any, *, sizes: tuple[int, ...], room: int) -> Any:
    """Choose the most valuable set of items that fits into the room."""
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        best = [bx.max(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


def knapsack() -> Figure:
    """Draw the nodes and edges of a small knapsack problem."""
    p = pack(torch.tensor([2.0, 3.0, 1.0, 4.0]), sizes=(3, 4, 2, 5), room=9, omega="sparsemax", gamma=2.0)
    drawn = Figure(figsize=(10, 6), layout="constrained")
    bx.plots.program(p, ax=drawn.subplots())
    return drawn


if __name__ == "__main__":
    save(__doc__, {draw.__name__: draw for draw in (gaps, monotone, transducer, segments, knapsack)})
