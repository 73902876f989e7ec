"""Draw the figure of docs/guide/ctc.md: a word aligned with frames, the output of a network and the posteriors."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from saving import save
from torch import Tensor

import bellmax as bx

ALPHABET = "·ehlo"  # the blank is the first class
WORD = "hello"
FRAMES = 40
OMEGAS = {"negentropy": bx.Negentropy(), "entmax": bx.Tsallis(1.5)}


def network(frames: int = FRAMES) -> tuple[Tensor, Tensor]:
    """Return noisy scores (T, V), as from a network, and the labels of the word."""
    torch.manual_seed(1)
    targets = torch.tensor([ALPHABET.index(letter) for letter in WORD])
    scores = torch.randn(frames, len(ALPHABET))
    centres = torch.tensor([0.1, 0.3, 0.5, 0.68, 0.88]) * frames
    near = torch.exp(-((torch.arange(frames)[:, None] - centres) / 2.2).square() / 2)
    scores[:, 0] += 1.8 * (1 - near.sum(-1))
    scores.index_add_(1, targets, 3 * near)
    return scores, targets


def draw(ax: Axes, title: str, shares: Tensor, p: bx.CTC) -> None:
    """Draw the probabilities (T, V) of the labels at each frame, and the labels on the best path."""
    ax.imshow(shares.T.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="nearest")
    frame, label = (shares > 0).nonzero().T
    ax.scatter(frame.numpy(), label.numpy(), s=3, color="0.6")
    ax.plot(p.decode().numpy(), color="tab:orange", linewidth=1.2, drawstyle="steps-mid")
    ax.set_yticks(range(len(ALPHABET)), list(ALPHABET))
    nonzero = f"{int((shares > 0).sum())} of {shares.numel()} entries are not 0"
    ax.set_title(f"{title}, {nonzero}", loc="left", fontsize=10)


def figure() -> Figure:
    drawn = Figure(figsize=(9, 6.4), layout="constrained")
    scores, targets = network()
    axes = drawn.subplots(1 + len(OMEGAS), 1, sharex=True)
    first = bx.CTC(scores.log_softmax(-1), targets)
    draw(axes[0], "output of the network (softmax)", scores.softmax(-1), first)
    for ax, (name, omega) in zip(axes[1:], OMEGAS.items(), strict=True):
        p = bx.CTC(scores, targets, omega=omega)
        draw(ax, f"posterior given “{WORD}”, {name}", p.expected_path, p)
    axes[1].set_ylim(top=len(ALPHABET) + 0.2)
    for letter, (start, end), sure in zip(WORD, first.spans().tolist(), first.confidence.tolist(), strict=True):
        axes[1].annotate(f"{letter} {sure:.2f}", ((start + end - 1) / 2, len(ALPHABET) - 0.4), ha="center", fontsize=8)
    axes[-1].set_xlabel("frame")
    return drawn


if __name__ == "__main__":
    save(__doc__, {"ctc": figure})
