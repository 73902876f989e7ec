"""Learn the costs of map cells from shortest paths, through smoothed, perturbed and other layers.

Each map is a picture of four kinds of terrain with noisy colors. A small network predicts the cost of each cell from
the colors. Only the shortest paths from the top left to the bottom right are observed, never the costs. A path moves
right, down or diagonally. The table of held-out results and the figure are in docs/guide/perturbed.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from learn_programs import Results, mean_and_deviation, table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, mse_loss, softplus

import bellmax as bx

TERRAIN = {  # cost of a cell, and its color
    "water": (8.0, (0.20, 0.40, 0.80)),
    "forest": (4.0, (0.10, 0.45, 0.20)),
    "grass": (2.0, (0.60, 0.75, 0.35)),
    "sand": (1.0, (0.85, 0.75, 0.60)),
}
COSTS = torch.tensor([cost for cost, _ in TERRAIN.values()])
COLORS = torch.tensor([color for _, color in TERRAIN.values()])
LEVELS = torch.tensor([-0.8, 0.2, 0.9])  # heights between two kinds of terrain
WALKERS = {"exact": 0.0, "noisy": 0.5}  # relative error of the costs that the observed walkers minimize
SIZE = 16


class Maps(NamedTuple):
    """Pictures of terrain, and a path through each."""

    colors: Tensor  # (maps, 3, size, size)
    costs: Tensor  # (maps, size, size), not observed
    paths: Tensor  # (maps, size, size), 1 on the path


def shortest(costs: Tensor) -> bx.PathDistribution:
    """Return the shortest paths, from the top left to the bottom right."""
    return bx.DTW(costs, omega="hard")


def draw_maps(count: int, seed: int, error: float = 0.0, size: int = SIZE) -> Maps:
    """Draw smooth maps. Each path is the shortest after the costs are multiplied by 1 + error · normal noise."""
    generator = torch.Generator().manual_seed(seed)
    height = torch.randn(count, 1, size + 6, size + 6, generator=generator)
    for width in (3, 5):
        height = avg_pool2d(height, width, stride=1)
    height = height[:, 0] / height.std()
    kinds = torch.bucketize(height, LEVELS)
    colors = COLORS[kinds].movedim(-1, 1) + 0.15 * torch.randn(count, 3, size, size, generator=generator)
    costs = COSTS[kinds]
    felt = costs * (1 + error * torch.randn(costs.shape, generator=generator)).clamp(min=0.1)
    return Maps(colors, costs, shortest(felt).best_path())


# --- losses of predicted costs, given observed paths


class IMLE(torch.autograd.Function):
    """Implicit maximum likelihood estimation (Niepert et al., 2021) with one sample of Gumbel noise.

    The gradient compares the path with the shortest path after the costs move by λ times the gradient of the loss.
    """

    @staticmethod
    def forward(ctx: Any, costs: Tensor, scale: float) -> Tensor:
        noisy = costs + torch.empty_like(costs).exponential_().log()  # a minimum: subtract Gumbel noise
        path = shortest(noisy).best_path()
        ctx.save_for_backward(noisy, path)
        ctx.scale = scale
        return path

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        noisy, path = ctx.saved_tensors
        return (shortest(noisy + ctx.scale * grad).best_path() - path) / ctx.scale, None


def hamming(path: Tensor, target: Tensor) -> Tensor:
    """Return the mean number of cells in which two paths differ, or its expected value for an expected path."""
    return (path + target - 2 * path * target).sum((-2, -1)).mean()


def fenchel_young(noise: str) -> Callable[[Tensor, Tensor], Tensor]:
    layer = bx.nn.Perturbed(shortest, noise)
    return lambda costs, target: ((costs * target).sum((-2, -1)) - layer(costs).value).mean()


def perturbed_hamming(noise: str) -> Callable[[Tensor, Tensor], Tensor]:
    layer = bx.nn.Perturbed(shortest, noise)
    return lambda costs, target: hamming(layer(costs).expected_path, target)


def surrogate(omega: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda costs, target: bx.losses.surrogate(bx.DTW(costs, omega=omega), target)


METHODS: dict[tuple[str, str], Callable[[Tensor, Tensor], Tensor]] = {  # by loss and layer
    ("Fenchel–Young", "negentropy"): surrogate("negentropy"),
    ("Fenchel–Young", "sparsemax"): surrogate("sparsemax"),
    ("Fenchel–Young", "Gumbel noise"): fenchel_young("gumbel"),
    ("Fenchel–Young", "normal noise"): fenchel_young("normal"),
    ("Fenchel–Young", "hard (perceptron)"): surrogate("hard"),
    ("Hamming", "negentropy"): lambda costs, target: hamming(bx.DTW(costs).expected_path, target),
    ("Hamming", "straight-through"): lambda costs, target: hamming(bx.DTW(costs).sample_straight_through(), target),
    ("Hamming", "Gumbel noise"): perturbed_hamming("gumbel"),
    ("Hamming", "I-MLE, λ = 1"): lambda costs, target: hamming(IMLE.apply(costs, 1.0), target),
    ("Hamming", "I-MLE, λ = 10"): lambda costs, target: hamming(IMLE.apply(costs, 10.0), target),
}


# --- training and evaluation


class CostNetwork(nn.Module):
    """Predict a positive cost for each cell from the colors of the cell and its eight neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))

    def forward(self, colors: Tensor) -> Tensor:
        return softplus(self.layers(colors - 0.5)).squeeze(1)


def fit(data: Maps, loss: Callable[[Tensor, Tensor], Tensor], steps: int, seed: int) -> CostNetwork:
    """Train a network on batches of 20 maps."""
    torch.manual_seed(seed)
    network = CostNetwork()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        members = torch.randint(len(data.colors), (20,))
        optimizer.zero_grad()
        loss(network(data.colors[members]), data.paths[members]).backward()
        optimizer.step()
        schedule.step()
    return network


def evaluate(data: Maps, costs: Tensor) -> dict[str, float]:
    """Return the percentage of optimal paths, the mean regret in percent, and the correlation with the true costs."""
    found = shortest(costs).best_path()
    regret = (data.costs * found).sum((-2, -1)) / shortest(data.costs).value - 1
    both = torch.stack([costs.flatten(), data.costs.flatten()])
    return {
        "optimal paths (%)": 100 * (regret < 1e-5).double().mean().item(),
        "regret (%)": 100 * regret.mean().item(),
        "correlation": torch.corrcoef(both)[0, 1].item() if costs.std() > 0 else torch.nan,
    }


def learn(seeds: Sequence[int], maps: int = 100, tests: int = 200, steps: int = 200) -> tuple[str, Figure]:
    """Return the table and the figure of the experiment."""
    results: Results = {}
    test = {seed: draw_maps(tests, seed=1000 + seed) for seed in seeds}
    networks = {}
    plan = list(product(WALKERS, METHODS, seeds))
    for walkers, method, seed in track(plan, "maps", console=Console(stderr=True), transient=True):
        data = draw_maps(maps, seed, WALKERS[walkers])
        start = time.process_time()
        network = fit(data, METHODS[method], steps, seed)
        seconds = time.process_time() - start
        with torch.no_grad():
            measures = evaluate(test[seed], network(test[seed].colors))
        results.setdefault((walkers, *method), []).append({**measures, "training (s)": seconds})
        if seed == seeds[0]:
            networks[(walkers, *method)] = network
    fixed: Results = {}
    for seed, data in test.items():
        drawn = draw_maps(maps, seed)
        supervised = fit(drawn._replace(paths=drawn.costs), mse_loss, steps, seed)
        with torch.no_grad():
            references = {"equal costs": torch.ones_like(data.costs), "true costs observed": supervised(data.colors)}
        for name, costs in references.items():
            fixed.setdefault(("", "", name), []).append({**evaluate(data, costs), "training (s)": torch.nan})
    digits = {"optimal paths (%)": 0, "regret (%)": 1, "correlation": 2, "training (s)": 1}
    text = table(fixed | results, ("walkers", "loss", "layer"), digits)
    data = test[seeds[0]]
    straight = data.costs.diagonal(dim1=-2, dim2=-1).sum(-1) / shortest(data.costs).value
    member = int(straight.argmax())  # a map with a winding path
    one = Maps(*(column[member : member + 1] for column in data))
    ceiling = mean_and_deviation(fixed["", "", "true costs observed"], "regret (%)")[0]
    return text, draw(one, networks["noisy", "Fenchel–Young", "Gumbel noise"], results, ceiling)


# --- figure


def show_path(ax: Axes, path: Tensor, color: str, shift: float, label: str) -> None:
    rows, columns = path.nonzero().T
    ax.plot((columns + shift).numpy(), (rows - shift).numpy(), color=color, linewidth=2, label=label)


def draw(one: Maps, network: CostNetwork, results: Results, ceiling: float) -> Figure:
    """Draw a held-out map, its true and learned costs with paths, and the regret of all methods."""
    figure = Figure(figsize=(8.4, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.25))
    with torch.no_grad():
        learned = network(one.colors)
    torch.manual_seed(0)
    mean = bx.nn.Perturbed(shortest, samples=200)(learned).expected_path[0]
    images: Iterable[tuple[str, Tensor, dict[str, Any]]] = (
        ("What the network sees", one.colors[0].movedim(0, -1).clamp(0, 1), {}),
        ("True costs", one.costs[0], {"cmap": "Greys"}),
        ("Costs learned from noisy walkers", learned[0], {"cmap": "Greys"}),
    )
    for n, (title, image, options) in enumerate(images):
        ax = figure.add_subplot(grid[0, n])
        ax.imshow(image.numpy(), **options)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(title, fontsize=11)
        if n:
            show_path(ax, one.paths[0], "tab:red", 0.12, "shortest path, true costs")
            show_path(ax, shortest(learned).best_path()[0], "tab:blue", -0.12, "shortest path, learned costs")
        if n == 2:
            i, j = (mean > 0.02).nonzero().T
            sizes = 40 * mean[i, j].numpy()
            ax.scatter(j.numpy(), i.numpy(), s=sizes, color="tab:orange", alpha=0.7, label="mean path under noise")
            handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
    bars = figure.add_subplot(grid[1, :])
    for n, (walkers, color) in enumerate(zip(WALKERS, ("tab:green", "tab:purple"), strict=True)):
        for m, method in enumerate(METHODS):
            average, deviation = mean_and_deviation(results[(walkers, *method)], "regret (%)")
            label = f"{walkers} walkers in training" if m == 0 else None
            place = m + 0.38 * (n - 0.5)
            bars.bar(place, average, 0.36, yerr=deviation, capsize=2, color=color, alpha=0.75, label=label)
    bars.set_xticks(range(len(METHODS)), [f"{loss}:\n{layer}" for loss, layer in METHODS], fontsize=8, rotation=40)
    for tick in bars.get_xticklabels():
        tick.set(ha="right", rotation_mode="anchor")
    bars.axhline(ceiling, color="black", linestyle="--", linewidth=1, label="true costs observed in training")
    bars.set(ylabel="regret on held-out maps (%)", yscale="log", ylim=(1, None))
    bars.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    bars.minorticks_off()
    bars.legend(fontsize=9)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("docs/figures"), help="folder for the figure")
    add("--seed", type=int, default=0, help="seed of the first repetition")
    add("--repetitions", type=int, default=5, help="number of repetitions, each with other maps")
    add("--maps", type=int, default=100, help="number of training maps")
    add("--steps", type=int, default=200, help="number of training steps")
    add("--threads", type=int, default=1, help="number of threads")
    options = parser.parse_args(arguments)
    for name in ("repetitions", "maps", "steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.repetitions)
    text, figure = learn(seeds, options.maps, steps=options.steps)
    path = options.output / "learn-maps.png"
    figure.savefig(path, dpi=100)
    print(f"{text}\n\n{path}")


if __name__ == "__main__":
    main()
