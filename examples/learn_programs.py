"""Learn the scores of two dynamic programs from optimal or random solutions, and draw the figures of the guide.

Knapsack: items have features, and a linear function of the features gives their values. Only the chosen sets are
observed. Folding: helices are planted in random sequences of the letters ACGU, and base pairs are sampled from a model
with known scores. Only the base pairs are observed. Both experiments print a table of held-out results. The tables and
the figures are in docs/guide/program-learning.md.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import bellmax as bx

COLORS = {
    "negentropy": "tab:blue",
    "entmax": "tab:green",
    "sparsemax": "tab:olive",
    "perceptron": "tab:red",
    "averaged perceptron": "tab:orange",
    "logistic regression": "tab:gray",
}
Model = tuple[Tensor, Tensor]  # knapsack: weights of the features and level; folding: scores of pairs and of stacks


def minimize(loss: Callable[[Tensor, Tensor], Tensor], start: Model, steps: int, rate: float) -> tuple[Model, Model]:
    """Minimize a loss with Adam. Return the last parameters, and their average over all steps."""
    parameters = [tensor.clone().requires_grad_() for tensor in start]
    averages = [torch.zeros_like(tensor) for tensor in start]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(*parameters).backward()
        optimizer.step()
        schedule.step()
        for average, parameter in zip(averages, parameters, strict=True):
            average += parameter.detach() / steps
    first, second = (parameter.detach() for parameter in parameters)
    return (first, second), (averages[0], averages[1])


def named(omega: str, last: Model, average: Model) -> dict[str, Model]:
    """Return the models by the name of their method. The perceptron has two models."""
    return {"perceptron": last, "averaged perceptron": average} if omega == "hard" else {omega: last}


# --- knapsack


@bx.program("item")
def knapsack(value, *, sizes, room):
    """Choose the most valuable set of items that fits into the room."""
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        best = [bx.max(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


WEIGHTS = torch.tensor([1.0, -0.8, 0.6, -0.4, 0.0, 0.7])  # the last feature is the size of the item
LEVEL = 1.0  # the value of an item whose features are all 0
NOISES = {"exact": 0.0, "noisy": 1.0}


class Choices(NamedTuple):
    """Problems with the same sizes and room, and the set that was chosen in each."""

    features: Tensor  # (problems, items, 6)
    values: Tensor  # (problems, items), not observed
    taken: Tensor  # (problems, items), 0 or 1
    options: dict[str, Any]  # sizes and room

    def best(self, values: Tensor) -> Tensor:
        """Return the best sets for the given values, (problems, items)."""
        return knapsack(values, **self.options, omega="hard").best_path()


def choices(problems: int, kinds: int, noise: float, seed: int) -> list[Choices]:
    """Draw choices for several kinds of problems with different sizes and rooms.

    With noise, whoever chooses adds logistic noise of this scale to the value of each item.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(kinds):
        count = int(torch.randint(8, 15, (), generator=generator))
        sizes = torch.randint(1, 8, (count,), generator=generator)
        features = torch.randn(problems // kinds, count, len(WEIGHTS), generator=generator)
        features[..., -1] = sizes - 1.0
        values = features @ WEIGHTS + LEVEL
        noisy = values + noise * torch.rand(values.shape, generator=generator, dtype=torch.float64).logit().float()
        options = {"sizes": tuple(sizes.tolist()), "room": int(0.4 * sizes.sum())}
        taken = knapsack(noisy, **options, omega="hard").best_path()
        drawn.append(Choices(features, values, taken, options))
    return drawn


def fit_values(data: Sequence[Choices], omega: str, steps: int) -> tuple[Model, Model]:
    """Learn a linear model from the chosen sets, and return its weights (6,) and its level as :func:`minimize` does.

    If ``omega`` is "logistic regression", the model predicts for each item if it was taken, and ignores the room.
    """
    count = sum(len(kind.taken) for kind in data)

    def loss(weights: Tensor, level: Tensor) -> Tensor:
        total = torch.zeros(())
        for kind in data:
            values = kind.features @ weights + level
            if omega == "logistic regression":
                total = total + binary_cross_entropy_with_logits(values, kind.taken, reduction="sum")
            else:
                p = knapsack(values, **kind.options, omega=omega)
                total = total + bx.losses.surrogate(p, kind.taken, reduction="sum")
        return total / count

    return minimize(loss, (torch.zeros(len(WEIGHTS)), torch.zeros(())), steps, 0.3)


def evaluate_values(data: Sequence[Choices], weights: Tensor, level: Tensor) -> dict[str, float]:
    """Return the percentage of optimal sets, the mean regret in percent, and the correlation with the true values."""
    exact, regrets, values = [], [], []
    for kind in data:
        learned = kind.features @ weights + level
        best, chosen = kind.best(kind.values), kind.best(learned)
        optimum = (kind.values * best).sum(-1)
        exact.append((best == chosen).all(-1).float())
        regrets.append((1 - (kind.values * chosen).sum(-1) / optimum)[optimum > 0])
        values.append(torch.stack([kind.values.flatten(), learned.flatten()]))
    return {
        "optimal sets (%)": 100 * torch.cat(exact).mean().item(),
        "regret (%)": 100 * torch.cat(regrets).mean().item(),
        "correlation": torch.corrcoef(torch.cat(values, -1))[0, 1].item() if weights.any() else math.nan,
        "weight of size": (weights[-1] / weights[0]).item() if weights[0] else math.nan,
    }


# --- folding


@bx.program("i j, ")
def fold(pair, stack, *, loop=3):
    """Pair letters without crossings, at least `loop` letters apart. Neighboring pairs (i, j), (i + 1, j − 1) stack.

    `closed[i][j]` is the best structure of the letters i to j − 1 in which the first is paired with the last.
    `split[i][j]` is the best structure in which they are not paired, and `best[i][j]` is the better of the two.
    """
    n = len(pair)
    best, split = ([[0.0] * (n + 1) for _ in range(n + 1)] for _ in range(2))
    closed = [[-math.inf] * (n + 1) for _ in range(n + 1)]
    for width in range(loop + 2, n + 1):
        for i in range(n - width + 1):
            j = i + width
            splits = [closed[i][k] + best[k][j] for k in range(i + loop + 2, j)]
            split[i][j] = bx.max(best[i + 1][j], *splits)
            closed[i][j] = pair[i, j - 1] + bx.max(split[i + 1][j - 1], closed[i + 1][j - 1] + stack)
            best[i][j] = bx.max(split[i][j], closed[i][j])
    return best[0][n]


LETTERS = "ACGU"
TYPES = {"CG": 2.5, "AU": 1.0, "GU": -0.5}  # true scores
OTHER, STACK = -4.0, 2.0  # true scores of the other pairs, and of two stacked pairs


class Folds(NamedTuple):
    """Sequences of different lengths, and the base pairs of each as a 0/1 matrix."""

    sequences: list[Tensor]  # of int64
    pairs: list[Tensor]

    def distribution(self, table: Tensor, stack: Tensor, omega: str = "negentropy") -> Any:
        """Return the distribution over the structures of each sequence, for scores of pairs (4, 4)."""
        symmetric = (table + table.T) / 2
        return fold([symmetric[s[:, None], s] for s in self.sequences], stack, omega=omega)


def table_of(scores: dict[str, float], other: float) -> Tensor:
    """Return the symmetric table (4, 4) of scores of pairs."""
    table = torch.full((4, 4), other)
    for (a, b), score in scores.items():
        i, j = LETTERS.index(a), LETTERS.index(b)
        table[i, j] = table[j, i] = score
    return table


TRUE = table_of(TYPES, OTHER), torch.tensor(STACK)
MOST_PAIRS = table_of(dict.fromkeys(TYPES, 1.0), -9.0), torch.tensor(0.0)  # as many pairs as possible


def folds(count: int, seed: int, lengths: Sequence[int] = (20, 24, 28, 32)) -> Folds:
    """Plant two helices in each of several random sequences, and sample structures under the true scores."""
    rng, sequences = random.Random(seed), []
    for _ in range(count):
        letters = rng.choices(LETTERS, k=rng.choice(lengths))
        for _ in range(2):
            size = rng.randint(3, 5)
            start = rng.randrange(len(letters) - 2 * size - 3)
            end = rng.randint(start + 2 * size + 3, len(letters))
            for k in range(size):
                letters[end - 1 - k] = LETTERS[3 - LETTERS.index(letters[start + k])]  # A with U, C with G
        sequences.append(torch.tensor([LETTERS.index(letter) for letter in letters]))
    torch.manual_seed(seed)
    return Folds(sequences, Folds(sequences, []).distribution(*TRUE).listed(lambda p: p.sample()))


def fit_folds(data: Folds, omega: str, steps: int) -> tuple[Model, Model]:
    """Learn the scores of pairs (4, 4) and of stacks from the base pairs, and return them as :func:`minimize` does."""
    targets = [{"pair": pairs, "stack": (pairs[:-1, 1:] * pairs[1:, :-1]).sum()} for pairs in data.pairs]

    def loss(table: Tensor, stack: Tensor) -> Tensor:
        return bx.losses.surrogate(data.distribution(table, stack, omega), targets)

    return minimize(loss, (torch.zeros(4, 4), torch.zeros(())), steps, 0.5)


def evaluate_folds(data: Folds, table: Tensor, stack: Tensor) -> dict[str, float]:
    """Return F1 of the base pairs of the best structures over all sequences, and the scores."""
    table = (table + table.T) / 2
    best = data.distribution(table, stack, "hard").best_path()
    common = sum(float((a * b).sum()) for a, b in zip(best, data.pairs, strict=True))
    total = sum(float(a.sum() + b.sum()) for a, b in zip(best, data.pairs, strict=True))
    scores = {a + b: float(table[LETTERS.index(a), LETTERS.index(b)]) for a, b in (*TYPES, "AC")}
    return {"F1": 2 * common / total, **scores, "stack": float(stack)}


# --- tables and figures

Results = dict[tuple[Any, ...], list[dict[str, float]]]  # by setting and method: the measures of each repetition


def mean_and_deviation(results: Sequence[dict[str, float]], measure: str) -> tuple[float, float]:
    numbers = torch.tensor([result[measure] for result in results], dtype=torch.float64)
    return numbers.mean().item(), numbers.std().item() if len(numbers) > 1 else 0.0


def table(results: Results, titles: Sequence[str], digits: dict[str, int]) -> str:
    """Return a table in Markdown: means ± standard deviations over the repetitions."""
    rows = [[*titles, *digits], [*("---" for _ in titles), *("---:" for _ in digits)]]
    for setting, repeated in results.items():
        cells = []
        for measure, places in digits.items():
            mean, deviation = mean_and_deviation(repeated, measure)
            spread = f" ± {deviation:.{places}f}" if deviation else ""
            cells.append("" if math.isnan(mean) else f"{mean:.{places}f}{spread}")
        rows.append([*map(str, setting), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def curves(ax: Axes, results: Results, measure: str) -> None:
    """Draw a measure against the number of training problems, with bars of one standard deviation."""
    for n, (method, color) in enumerate(COLORS.items()):
        own = {count: mean_and_deviation(v, measure) for (count, name), v in results.items() if name == method}
        if own:
            means, deviations = zip(*own.values(), strict=True)
            beside = [count * 1.05 ** (n - 2) for count in own]
            ax.errorbar(beside, means, deviations, marker="o", markersize=4, capsize=2, color=color, label=method)
    counts = sorted({count for count, _ in results})
    ax.set_xscale("log")
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.minorticks_off()


def draw_knapsack(results: Results, test: Sequence[Choices], fitted: dict[str, Model]) -> Figure:
    """Draw learned against true values, and the number of optimal sets against the number of training problems."""
    figure = Figure(figsize=(8, 6.8), layout="constrained")
    axes = figure.subplots(2, 2)
    for ax, (method, (weights, level)) in zip(axes[0], fitted.items(), strict=True):
        true = torch.cat([kind.values.flatten() for kind in test])
        learned = torch.cat([(kind.features @ weights + level).flatten() for kind in test])
        learned = (learned - learned.mean()) / learned.std() * true.std() + true.mean()
        taken = torch.cat([kind.taken.flatten() for kind in test]) > 0
        for group, color, label in ((taken, "tab:blue", "in the optimal set"), (~taken, "tab:orange", "not in it")):
            ax.plot(true[group].numpy(), learned[group].numpy(), ".", color=color, markersize=3, label=label)
        ax.axline((0, 0), slope=1, color="black", linewidth=0.8)
        ax.set(xlabel="true value of an item", ylabel="learned value (rescaled)")
        ax.set_title(f"Held-out items: {method}", fontsize=11)
    axes[0, 0].legend(markerscale=4)
    for ax, noise in zip(axes[1], NOISES, strict=True):
        own = {key[1:]: result for key, result in results.items() if key[0] == noise}
        curves(ax, own, "optimal sets (%)")
        ax.set_title(f"Held-out problems: {noise} choices in training", fontsize=11)
        ax.set(ylim=(0, 100), xlabel="training problems", ylabel="optimal sets found (%)")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def arcs(ax: Axes, pairs: Tensor, color: str, up: bool) -> None:
    """Draw base pairs as arcs above or below a sequence."""
    for i, j in pairs.nonzero().tolist():
        middle, width = (i + j) / 2, j - i
        angles = (0, 180) if up else (180, 360)
        ax.add_patch(Arc((middle, 0.9 if up else -0.9), width, width, theta1=angles[0], theta2=angles[1], color=color))


def draw_folding(results: Results, reference: dict[str, float], sequence: Folds, learned: Model) -> Figure:
    """Draw pair probabilities and base pairs of one sequence, F1 of all, and learned against true scores."""
    figure = Figure(figsize=(8, 7.2), layout="constrained")
    (matrix, curve), (arc, scores) = figure.subplots(2, 2)
    true, letters = sequence.pairs[0], [LETTERS[n] for n in sequence.sequences[0]]
    p = sequence.distribution(*learned)[0]
    shares = p.expected_path + sequence.distribution(*TRUE)[0].expected_path.T
    image = matrix.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    i, j = true.nonzero().T.numpy()
    matrix.plot([*j, *i], [*i, *j], "s", markersize=8, fillstyle="none", color="tab:red", label="true pair")
    matrix.axline((0, 0), slope=1, color="black", linewidth=0.5)
    matrix.set_xticks(range(len(letters)), letters, fontsize=7)
    matrix.set_yticks(range(len(letters)), letters, fontsize=7)
    matrix.set(xlabel="below the diagonal: true scores", ylabel="above the diagonal: learned scores")
    matrix.set_title("Pair probabilities, held-out sequence", fontsize=11)
    matrix.legend(loc="upper left", fontsize=9)
    figure.colorbar(image, ax=matrix, shrink=0.7)
    curves(curve, results, "F1")
    curve.set_title("F1 of base pairs, held-out sequences", fontsize=11)
    for (name, mean), style in zip(reference.items(), ("--", ":"), strict=True):
        curve.axhline(mean, color="black", linestyle=style, linewidth=1, label=name)
    curve.set(xlabel="training sequences", ylabel="F1", ylim=(0.1, 0.8))
    curve.legend(fontsize=9, ncols=2, loc="lower center")
    arcs(arc, true, "tab:red", up=True)
    arcs(arc, p.best_path(), "tab:blue", up=False)
    for n, letter in enumerate(letters):
        arc.text(n, 0, letter, ha="center", va="center", fontsize=7.5)
    half = len(letters) / 2
    arc.set(xlim=(-1, len(letters)), ylim=(-half - 1, half + 1), aspect="equal")
    arc.set_axis_off()
    arc.set_title("True pairs (red), best structure (blue)", fontsize=11)
    true_scores = {**TYPES, "stack": STACK}
    largest = max(count for count, _ in results)
    for method, place in (("negentropy", (-6, 5)), ("entmax", (6, -12))):
        for name, x in true_scores.items():
            mean, deviation = mean_and_deviation(results[largest, method], name)
            label = method if name == "stack" else None
            scores.errorbar(x, mean, deviation, marker="o", capsize=2, color=COLORS[method], label=label)
            side = "right" if method == "negentropy" else "left"
            scores.annotate(name, (x, mean), xytext=place, textcoords="offset points", ha=side, fontsize=9)
    scores.axline((0, 0), slope=1, color="black", linewidth=0.8)
    scores.margins(0.2)
    scores.set(xlabel="true score", ylabel="learned score")
    scores.set_title("Scores of pairs and of stacking", fontsize=11)
    scores.legend(loc="lower right", fontsize=9)
    return figure


# --- experiments


def learn_knapsack(
    counts: Sequence[int], seeds: Sequence[int], tests: int = 200, steps: int = 80
) -> tuple[str, Figure]:
    """Return the table and the figure of the knapsack experiment."""
    results: Results = {}
    fitted: dict[str, Model] = {}
    test = {seed: choices(tests, 10, 0.0, seed=1000 + seed) for seed in seeds}
    plan = list(product(NOISES, counts, ("negentropy", "entmax", "sparsemax", "hard", "logistic regression"), seeds))
    for noise, count, omega, seed in track(plan, "knapsack", console=Console(stderr=True), transient=True):
        data = choices(count, 4, NOISES[noise], seed)
        for method, model in named(omega, *fit_values(data, omega, steps)).items():
            results.setdefault((noise, count, method), []).append(evaluate_values(test[seed], *model))
            if (noise, count) == ("exact", counts[-1]) and method in ("negentropy", "logistic regression"):
                fitted[method] = model
    equal = torch.zeros(len(WEIGHTS)), torch.tensor(1.0)
    rows: Results = {("", "", "all items worth 1"): [evaluate_values(test[seed], *equal) for seed in seeds]}
    rows |= {key: result for key, result in results.items() if key[1] == counts[-1]}
    digits = {"optimal sets (%)": 0, "regret (%)": 2, "correlation": 3, "weight of size": 2}
    return table(rows, ("choices", "problems", "scores"), digits), draw_knapsack(results, test[seeds[-1]], fitted)


def learn_folding(counts: Sequence[int], seeds: Sequence[int], tests: int = 200, steps: int = 80) -> tuple[str, Figure]:
    """Return the table and the figure of the folding experiment."""
    results: Results = {}
    test = {seed: folds(tests, seed=1000 + seed) for seed in seeds}
    plan = list(product(counts, ("negentropy", "entmax", "hard"), seeds))
    for count, omega, seed in track(plan, "folding", console=Console(stderr=True), transient=True):
        for method, model in named(omega, *fit_folds(folds(count, seed), omega, steps)).items():
            results.setdefault((count, method), []).append(evaluate_folds(test[seed], *model))
            if (count, method) == (counts[-1], "negentropy"):
                learned = model
    models = {"true scores": TRUE, "most pairs": MOST_PAIRS}
    fixed: Results = {
        ("", name): [evaluate_folds(test[seed], *model) for seed in seeds] for name, model in models.items()
    }
    reference = {name: mean_and_deviation(result, "F1")[0] for (_, name), result in fixed.items()}
    shown = table(fixed | results, ("sequences", "scores"), dict.fromkeys(("F1", *TYPES, "stack", "AC"), 2))
    one = Folds(*(column[:1] for column in test[seeds[-1]]))
    return shown, draw_folding(results, reference, one, learned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("docs/figures"), help="folder for the figures")
    add("--seed", type=int, default=0, help="seed of the first repetition")
    add("--repetitions", type=int, default=3, help="number of repetitions, each with other data")
    add("--problems", type=int, nargs="+", default=[8, 40, 200], help="numbers of training problems (knapsack)")
    add("--sequences", type=int, nargs="+", default=[5, 20, 80], help="numbers of training sequences (folding)")
    add("--threads", type=int, default=1, help="number of threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.repetitions)
    runs = {"knapsack": (learn_knapsack, options.problems), "folding": (learn_folding, options.sequences)}
    for name, (learn, counts) in runs.items():
        text, figure = learn(counts, seeds)
        figure.savefig(options.output / f"learn-{name}.png", dpi=100)
        print(f"{text}\n\n{options.output / f'learn-{name}.png'}\n")


if __name__ == "__main__":
    main()
