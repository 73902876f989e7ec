"""Draw the figure of docs/guide/belief-propagation.md: remove the noise from the image of a word.

Belief propagation on a grid of pixels gives the probability of black at each pixel. Its four scores are learned end to
end.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from saving import save
from torch import Tensor, nn

import bellmax as bx

NOISE = 1.0  # standard deviation; clean pixels are −1 or 1
OMEGAS = {"negentropy": bx.Negentropy(), "sparse: entmax": bx.Tsallis(1.5)}


@lru_cache
def grid(height: int, width: int) -> bx.BeliefPropagation:
    """Return the graph of a grid of pixels: first the edges to the right, then the edges down."""
    pixel = torch.arange(height * width).reshape(height, width)
    right = torch.stack([pixel[:, :-1], pixel[:, 1:]], -1).reshape(-1, 2)
    down = torch.stack([pixel[:-1], pixel[1:]], -1).reshape(-1, 2)
    return bx.BeliefPropagation(torch.cat([right, down]))


def picture(word: str, height: int, width: int) -> Tensor:
    """Return the image of a word, (height, width) int64: 1 is black, 0 is white."""
    canvas = FigureCanvasAgg(Figure(figsize=(width / 100, height / 100), dpi=100))
    canvas.figure.text(0.5, 0.5, word, ha="center", va="center", fontsize=0.5 * height, weight="bold")
    canvas.draw()
    return (torch.tensor(np.asarray(canvas.buffer_rgba()))[..., 0] < 128).long()


class Denoiser(nn.Module):
    """A grid model with four numbers: the weight of a pixel, a bias for black, and two scores of equal neighbors."""

    def __init__(self, omega: bx.Regularizer, iterations: int = 10) -> None:
        super().__init__()
        self.omega, self.iterations = omega, iterations
        self.weight, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))
        self.across, self.down = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(0.1))

    def forward(self, noisy: Tensor) -> Tensor:
        """Return the probability of black at each pixel of an image (H, W)."""
        height, width = noisy.shape
        black = self.weight * noisy.flatten() + self.bias
        unary = torch.stack([torch.zeros_like(black), black], -1)
        right, down = height * (width - 1), (height - 1) * width
        agree = torch.cat([self.across.expand(right), self.down.expand(down)])[:, None, None] * torch.eye(2)
        b = grid(height, width)(unary, agree, iterations=self.iterations, omega=self.omega)
        return b.beliefs[:, 1].reshape(height, width)


def with_noise(clean: Tensor, seed: int) -> Tensor:
    """Return an image with pixels −1 and 1 plus Gaussian noise."""
    return 2 * clean - 1 + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))


def train(omega: bx.Regularizer, words: tuple[str, ...] = ("dynamic", "program"), steps: int = 60) -> Denoiser:
    """Return a model that minimizes the squared error of the probabilities on words in noise."""
    model = Denoiser(omega)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pictures = [picture(word, 24, 90) for word in words]
    for step in range(steps):
        optimizer.zero_grad()
        clean = pictures[step % len(pictures)]
        (model(with_noise(clean, seed=step)) - clean).square().mean().backward()
        optimizer.step()
    return model


def figure(steps: int = 60) -> Figure:
    """Return the figure: the noisy image, and the cleaned images for each Ω."""
    clean = picture("bellmax", 36, 140)
    noisy = with_noise(clean, seed=1000)
    panels = [("the word in noise", noisy, (noisy > 0) != clean)]
    for name, omega in OMEGAS.items():
        black = train(omega, steps=steps)(noisy).detach()
        unsure = int(((black > 0) & (black < 1)).sum())
        panels.append((f"{name}, {unsure} of {black.numel()} pixels not 0 or 1", black, (black > 0.5) != clean))
    drawn = Figure(figsize=(8, 6.6), layout="constrained")
    for ax, (title, shown, wrong) in zip(drawn.subplots(len(panels), 1), panels, strict=True):
        ax.imshow(shown.numpy(), cmap="Greys", interpolation="nearest")
        ax.set_title(f"{title}: {wrong.double().mean():.1%} wrong", loc="left", fontsize=10)
        ax.set_axis_off()
    return drawn


if __name__ == "__main__":
    save(__doc__, {"denoise": figure})
