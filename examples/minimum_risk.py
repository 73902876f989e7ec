"""Continue CTC training on noisy spoken digits with minimum risk, the expected number of wrong digits.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset), joined into
strings of 3 to 8 digits as in digits.py, with noise on the features. A network first learns with CTC. Then three copies
of it learn for the same number of further epochs: with CTC, with the risk by samples, and with the risk by the k best
paths. The learning rates are chosen on development strings. The results are in docs/guide/minimum-risk.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from digits import BATCH, Batch, Network, String, batches, errors, loss_of, read_strings
from rich.progress import Progress
from torch import Tensor, nn

import bellmax as bx

RATES = (1e-4, 3e-4, 1e-3, 3e-3)  # learning rates of the further epochs
TEST, DEVELOPMENT, TRAINING = range(5), range(5, 10), range(10, 50)  # takes of each digit by each speaker
Loss = Callable[[Tensor, Batch], Tensor]


class Rates(NamedTuple):
    """The edit distance to the true digits, in percent of the number of digits."""

    greedy: float  # of the best label of each frame
    random: float  # of random labels


class Run(NamedTuple):
    method: str
    rate: float
    development: Rates
    test: Rates


def edits(frames: Tensor, targets: Tensor) -> Tensor:
    """Return the edit distance between the labels of frames, without repeats and blanks, and the targets.

    Args:
        frames: The label of each frame (..., T), 0 for the blank and −1 for padding.
        targets: The true labels (..., U), padded with 0. The leading dimensions broadcast.

    """
    changes = frames.diff(dim=-1, prepend=torch.zeros_like(frames[..., :1])) != 0
    is_label = changes & (frames > 0)
    sizes = is_label.sum(-1, keepdim=True)
    order = is_label.sort(descending=True, stable=True).indices[..., : max(1, int(sizes.max()))]
    labels, start = frames.gather(-1, order), torch.arange(order.shape[-1] + 1)
    distance = start.expand(*sizes.shape[:-1], -1)  # to the empty target, from each beginning of the labels
    for target in targets.unsqueeze(-1).unbind(-2):
        replaced = distance[..., :-1] + (labels != target)
        least = torch.cat((distance[..., :1] + 1, torch.minimum(distance[..., 1:] + 1, replaced)), -1)
        inserted = (least - start).cummin(-1).values + start
        distance = torch.where(target > 0, inserted, distance)
    return distance.gather(-1, sizes).squeeze(-1)


def risk_of(**options: int) -> Loss:
    """Return the risk of the labels that frames have independently of each other, as a chain without transitions."""

    def loss(scores: Tensor, batch: Batch) -> Tensor:
        p = bx.Chain.from_scores(scores, scores.new_zeros(11, 11), lengths=batch.lengths[0])
        return bx.losses.risk(p, lambda frames: edits(frames, batch.labels), **options)

    return loss


def ctc(scores: Tensor, batch: Batch) -> Tensor:
    return loss_of("negentropy", scores, batch, penalty=False)


def with_noise(strings: Sequence[String], noise: float, seed: int) -> list[String]:
    """Add noise to the normalized log-mel features of strings."""
    generator = torch.Generator().manual_seed(seed)
    return [(x + noise * torch.randn(x.shape, generator=generator), *others) for x, *others in strings]


def train(
    model: Network,
    strings: Sequence[String],
    loss: Loss,
    rate: float,
    epochs: range,
    seed: int,
    noise: float,
    advance: Callable[[], None],
) -> Network:
    """Train a network with new noise in each epoch. The learning rate falls to 0."""
    torch.manual_seed(seed)
    optimizer, steps = torch.optim.AdamW(model.parameters()), len(epochs) * -(-len(strings) // BATCH)
    schedule = (rate * min(1, 10 * (step + 1) / steps, 1.5 * (1 - step / steps)) for step in range(steps))
    model.train()
    for epoch in epochs:
        noisy = with_noise(strings, noise, 1000 * seed + epoch)
        for batch in batches(noisy, BATCH, random.Random(1000 * seed + epoch)):
            optimizer.param_groups[0]["lr"] = next(schedule)
            optimizer.zero_grad()
            loss(model(batch.features), batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        advance()
    return model.eval()


@torch.no_grad()
def rates(model: Network, strings: Sequence[String]) -> Rates:
    (batch,) = batches(strings, len(strings))
    scores, digits = model(batch.features), int(batch.lengths[1].sum())
    torch.manual_seed(0)
    random_output = risk_of(samples=32)(scores, batch) * len(strings)
    return Rates(100 * errors(scores, batch) / digits, 100 * float(random_output) / digits)


def runs_of(seed: int, options: argparse.Namespace, bar: Progress) -> list[Run]:
    """Train a network with CTC, and a copy of it with each loss and each learning rate."""
    strings = read_strings(options.folder, TRAINING, 1, seed)
    development, test = (
        with_noise(read_strings(options.folder, takes, 2, seed), options.noise, 1000 * seed + 999)
        for takes in (DEVELOPMENT, TEST)
    )
    task = bar.add_task(f"seed {seed}", total=options.epochs + len(RATES) * 3 * options.more_epochs)
    learn = partial(train, strings=strings, seed=seed, noise=options.noise, advance=lambda: bar.advance(task))
    torch.manual_seed(seed)
    first = learn(Network(), loss=ctc, rate=0.002, epochs=range(options.epochs))
    more_epochs = range(options.epochs, options.epochs + options.more_epochs)
    runs = [Run("before", 0.002, rates(first, development), rates(first, test))]
    by_samples, by_paths = risk_of(samples=options.samples), risk_of(topk=options.paths)
    for method, loss in {"CTC": ctc, "risk, samples": by_samples, "risk, k best paths": by_paths}.items():
        for rate in RATES:
            model = learn(deepcopy(first), loss=loss, rate=rate, epochs=more_epochs)
            runs.append(Run(method, rate, rates(model, development), rates(model, test)))
    return runs


def table(runs: Sequence[Run]) -> str:
    """Return a row for each method, with the learning rate of the fewest errors on the development strings."""
    best: dict[str, list[Run]] = {}
    for run in runs:
        group = [r for r in runs if (r.method, r.rate) == (run.method, run.rate)]
        least = min(best.get(run.method, group), group, key=lambda g: sum(r.development.greedy for r in g))
        best[run.method] = least
    lines = [
        "| training | learning rate | development | test | test, more than CTC | test, random output |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, group in best.items():
        more = [run.test.greedy - other.test.greedy for run, other in zip(group, best["CTC"], strict=True)]
        greedy = [run.development.greedy for run in group], [run.test.greedy for run in group]
        cells = (*greedy, more, [run.test.random for run in group])
        shown = [f"{np.mean(cell):.1f} ± {np.std(cell):.1f}" for cell in cells]
        lines.append("| " + " | ".join([method, f"{group[0].rate:g}", *shown]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="recordings {digit}_{speaker}_{take}.wav at 8 kHz; takes 0 to 4 are the test set")
    add("--seeds", type=int, default=4, help="number of seeds, of the weights, the strings and the noise")
    add("--epochs", type=int, default=14, help="first epochs, with CTC")
    add("--more-epochs", type=int, default=4, help="further epochs of each method")
    add("--samples", type=int, default=64, help="random paths of each string")
    add("--paths", type=int, default=16, help="most probable paths of each string")
    add("--noise", type=float, default=1.2, help="standard deviation of the noise on the normalized features")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 1), ("epochs", 0), ("more_epochs", 0), ("samples", 2), ("paths", 1), ("noise", 0)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    with Progress() as bar:
        runs = [run for seed in range(options.seeds) for run in runs_of(seed, options, bar)]
    print(table(runs))


if __name__ == "__main__":
    main()
