"""Recognize spoken dates with automata: a lexicon of digits, a bigram, and a grammar of the valid dates.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset), with noise on
the features. Networks learn on random strings of digits, as in digits.py: one with a label for each digit, one with a
label for each letter, and one with letters and the loss LF-MMI. The test strings are dates, such as 241287. A graph
then gives the best alignment among all strings of digits, among all strings with the scores of a bigram, or among all
dates. The results are in docs/guide/speech-automata.md.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from digits import (
    HOP,
    RATE,
    SECONDS,
    Batch,
    Network,
    String,
    batches,
    edit_distance,
    log_mel,
    loss_of,
    read_recordings,
    read_strings,
)
from matplotlib.figure import Figure
from minimum_risk import TEST, TRAINING, train, with_noise
from rich.progress import Progress
from torch import Tensor, nn
from word_times import DIGITS, VOCABULARY, with_letters

import bellmax as bx

DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # of each month
LETTERS = {word: [VOCABULARY[letter] for letter in word] for word in DIGITS}
SPELLINGS = {"digits": {word: [n] for n, word in enumerate(DIGITS, 1)}, "letters": LETTERS}
GREEDY = "best label of each frame"
Loss = Callable[[Tensor, Batch], Tensor]


class Errors(NamedTuple):
    """Errors in percent."""

    digits: float  # the edit distance to the true digits, in percent of the number of digits
    dates: float  # dates with at least one wrong digit


# --- automata


def any_digits() -> bx.Automaton:
    """Return the automaton that accepts any string of digits."""
    return bx.Automaton([(0, 0, digit) for digit in range(10)], final={0: 0.0})


def all_dates() -> bx.Automaton:
    """Return the automaton that accepts all dates: two digits for the day, two for the month, two for the year."""
    arcs = [("day", day // 10, day // 10) for day in range(0, 40, 10)]
    for day in range(1, 32):
        arcs.append((day // 10, ("month", day), day % 10))
        months = [month for month, last in enumerate(DAYS, 1) if day <= last]
        arcs += [(("month", day), (day, tens), tens) for tens in sorted({month // 10 for month in months})]
        arcs += [((day, month // 10), "year", month % 10) for month in months]
    arcs += [(source, target, digit) for source, target in (("year", "last"), ("last", "end")) for digit in range(10)]
    return bx.Automaton(arcs)


def bigram(strings: Sequence[Sequence[int]]) -> bx.Automaton:
    """Return the bigram of strings of digits, with one added to each count. A state is the previous digit.

    A score is the log-probability of a digit given the previous digit, minus the log-probability under which all digits
    are equally likely. The network has learned on such digits, so its scores contain the second term already.
    """
    begin, end = 10, 10
    counts = np.ones((11, 11))
    for string in strings:
        np.add.at(counts, ([begin, *string], [*string, end]), 1)
    scores = np.log(counts / counts.sum(1, keepdims=True)) + np.log(11)
    arcs = [(source, target, target) for source in range(11) for target in range(10)]
    final = dict(enumerate(scores[:, end]))
    return bx.Automaton(arcs, scores=scores[:, :10].ravel(), start={begin: 0.0}, final=final)


def graph_of(labels: str, grammar: bx.Automaton) -> bx.Automaton:
    """Return the automaton from the labels of frames to digits."""
    spelling = SPELLINGS[labels]
    vocab = 1 + max(max(spelled) for spelled in spelling.values())
    return bx.Automaton.ctc(vocab=vocab) @ bx.Automaton.lexicon(spelling) @ grammar


# --- strings


def random_dates(count: int, seed: int) -> list[list[int]]:
    """Return the digits of random dates."""
    rng, dates = random.Random(seed), []
    for _ in range(count):
        month = rng.randint(1, 12)
        text = f"{rng.randint(1, DAYS[month - 1]):02}{month:02}{rng.randint(0, 99):02}"
        dates.append([int(digit) for digit in text])
    return dates


def speak(folder: Path, takes: range, sequences: Sequence[Sequence[int]], seed: int) -> list[String]:
    """Join random recordings of a random speaker for each sequence of digits."""
    speakers, rng, strings = read_recordings(folder, takes), random.Random(seed), []
    for digits in sequences:
        recordings = rng.choice(list(speakers.values()))
        waves = [rng.choice([wave for digit, wave in recordings if digit == wanted]) for wanted in digits]
        joins = torch.tensor([len(wave) for wave in waves[:-1]]).cumsum(0) / RATE
        strings.append((log_mel(np.concatenate(waves)), torch.tensor(digits) + 1, joins))
    return strings


# --- training


def ctc(scores: Tensor, batch: Batch) -> Tensor:
    return loss_of("negentropy", scores, batch, penalty=False)


def lf_mmi(graph: bx.Automaton) -> Loss:
    """Return the loss LF-MMI: minus the log-probability of the true text among all texts that ``graph`` accepts."""

    def loss(scores: Tensor, batch: Batch) -> Tensor:
        frames, sizes = batch.lengths
        targets = [labels[:size] for labels, size in zip(batch.labels, sizes.tolist(), strict=True)]
        each = bx.Automaton.stack([bx.Automaton.ctc(target) for target in targets])
        value = graph.paths(scores, lengths=frames).value - each.paths(scores, lengths=frames).value
        return (value / sizes).mean()

    return loss


def networks(seed: int, options: argparse.Namespace, bar: Progress) -> dict[tuple[str, str], Network]:
    """Train the three networks, by their labels and losses."""
    digits = read_strings(options.folder, TRAINING, 1, seed)
    strings = {"digits": digits, "letters": [with_letters(string) for string in digits]}
    runs = {
        ("digits", "CTC"): ctc,
        ("letters", "CTC"): ctc,
        ("letters", "LF-MMI"): lf_mmi(graph_of("letters", any_digits())),
    }
    task = bar.add_task(f"seed {seed}", total=len(runs) * options.epochs)
    models = {}
    for (labels, name), loss in runs.items():
        torch.manual_seed(seed)
        model, own = Network(), strings[labels]
        model.last = nn.Linear(model.last.in_features, 1 + int(max(target.max() for _, target, _ in own)))
        epochs, advance = range(options.epochs), lambda: bar.advance(task)
        models[labels, name] = train(model, own, loss, 0.002, epochs, seed, options.noise, advance)
    return models


# --- measurements


def greedy(labels: str, scores: Tensor, frames: Tensor) -> list[Tensor]:
    """Return the digits that the best labels of frames spell, without repeats and blanks."""
    pattern = "|".join("".join(chr(96 + label) for label in spelled) for spelled in SPELLINGS[labels].values())
    words = {match: digit for digit, match in enumerate(pattern.split("|"))}
    heard = []
    for best, size in zip(scores.argmax(-1), frames, strict=True):
        text = "".join(chr(96 + label) for label in best[:size].unique_consecutive().tolist() if label)
        heard.append(torch.tensor([words[word] for word in re.findall(pattern, text)], dtype=torch.long))
    return heard


def decode(graph: bx.Automaton, scores: Tensor, frames: Tensor) -> list[Tensor]:
    """Return the digits of the best alignments."""
    p = graph.paths(scores.log_softmax(-1), lengths=frames, omega="hard")
    return [outputs[outputs >= 0] for outputs in p.outputs(p.decode())]


def errors(heard: Sequence[Tensor], batch: Batch) -> Errors:
    distance = edit_distance([digits + 1 for digits in heard], batch)
    wrong = distance.sum() / batch.lengths[1].sum(), (distance > 0).float().mean()
    return Errors(*(100 * float(share) for share in wrong))


@torch.no_grad()
def evaluate(
    models: dict[tuple[str, str], Network], grammars: dict[str, bx.Automaton], batch: Batch
) -> dict[tuple[str, str, str], Errors]:
    """Return the errors by labels, loss and decoding."""
    results = {}
    for (labels, name), model in models.items():
        scores = model(batch.features)
        results[labels, name, GREEDY] = errors(greedy(labels, scores, batch.lengths[0]), batch)
        for decoding, grammar in grammars.items():
            heard = decode(graph_of(labels, grammar), scores, batch.lengths[0])
            results[labels, name, decoding] = errors(heard, batch)
    return results


def table(results: Sequence[dict[tuple[str, str, str], Errors]]) -> str:
    """Return the means and standard deviations over the seeds."""
    lines = ["| labels | training | decoding | wrong digits | wrong dates |", "|---|---|---|---:|---:|"]
    for key in results[0]:
        columns = zip(*(result[key] for result in results), strict=True)
        lines.append("| " + " | ".join([*key, *(f"{np.mean(c):.1f} ± {np.std(c):.1f}" for c in columns)]) + " |")
    return "\n".join(lines)


@torch.no_grad()
def figure(model: Network, strings: Sequence[String]) -> Figure:
    """Draw a date that only the grammar recognizes, with the posteriors of its digits."""
    graph, wrong = graph_of("digits", all_dates()), []
    for string in strings:
        (batch,) = batches([string], 1)
        scores, truth = model(batch.features).log_softmax(-1), (string[1] - 1).tolist()
        found = [x[0].tolist() for x in (greedy("digits", scores, batch.lengths[0]), decode(graph, scores, None))]
        wrong.append((found[1] == truth, len(found[0]) == len(truth), found[0] != truth))
    features, labels, joins = strings[max(range(len(strings)), key=wrong.__getitem__)]
    (batch,) = batches([(features, labels, joins)], 1)
    scores = model(batch.features).log_softmax(-1)
    read = [x[0].tolist() for x in (greedy("digits", scores, batch.lengths[0]), decode(graph, scores, None))]
    drawn = Figure(figsize=(10, 6), layout="constrained")
    top, *axes = drawn.subplots(3, 1, sharex=True)
    end = len(features) * HOP / RATE
    top.imshow(features.T.numpy(), origin="lower", aspect="auto", extent=(0, end, 0, 1), cmap="magma")
    top.set(title="log-mel spectrogram with noise: " + shown(labels - 1), yticks=[])
    panels = (
        ("output of the network", scores.exp()[0]),
        ("posteriors among all dates", graph.paths(scores[0]).marginals),
    )
    for ax, (title, share), heard in zip(axes, panels, read, strict=True):
        times, values = SECONDS * np.arange(len(share)), share[:, 1:].numpy()
        for digit in range(10):
            ax.fill_between(times, values[:, digit], step="mid", color=f"C{digit}", alpha=0.7)
        for begin, stop in pairwise([0.0, *joins.tolist(), end]):
            spoken = np.where((times >= begin) & (times < stop), values.T, 0.0)
            digit, frame = np.unravel_index(spoken.argmax(), spoken.shape)
            ax.text(times[frame], 1.06, digit, ha="center", color=f"C{digit}")
        ax.set(title=f"{title}, read as {shown(heard)}", ylim=(0, 1.3), yticks=(0, 0.5, 1))
    for ax in (top, *axes):
        ax.vlines(joins.numpy(), 0, 1, color="tab:red", linestyle="--")
    drawn.supxlabel("seconds")
    return drawn


def shown(digits: Sequence[int] | Tensor) -> str:
    return " ".join(str(int(digit)) for digit in digits)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="recordings {digit}_{speaker}_{take}.wav at 8 kHz; takes 0 to 4 are the test set")
    add("--output", type=Path, default=Path("build/digit-grammar"), help="folder for the table and the figure")
    add("--seeds", type=int, default=4, help="number of seeds, of the weights, the strings and the noise")
    add("--epochs", type=int, default=14, help="epochs of each network")
    add("--dates", type=int, default=300, help="test dates of each seed")
    add("--noise", type=float, default=1.2, help="standard deviation of the noise on the normalized features")
    options = parser.parse_args(arguments)
    for name in ("seeds", "epochs", "dates"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.noise < 0:
        parser.error(f"--noise must be at least 0, got {options.noise}")
    for takes in (TEST, TRAINING):
        for speaker, recordings in (read_recordings(options.folder, takes) or {"": []}).items():
            if len({digit for digit, _ in recordings}) < 10:
                named = f" of {speaker}" if speaker else ""
                raise SystemExit(
                    f"{options.folder} must hold {{digit}}_{{speaker}}_{{take}}.wav for all ten digits{named}, with "
                    f"takes from {takes[0]} to {takes[-1]}"
                )
    options.output.mkdir(parents=True, exist_ok=True)
    grammars = {"any digits": any_digits(), "bigram": bigram(random_dates(1000, seed=1000)), "dates": all_dates()}
    results = []
    with Progress() as bar:
        for seed in range(options.seeds):
            models = networks(seed, options, bar)
            clean = speak(options.folder, TEST, random_dates(options.dates, seed), seed)
            strings = with_noise(clean, options.noise, 1000 * seed + 999)
            (batch,) = batches(strings, len(strings))
            results.append(evaluate(models, grammars, batch))
            if seed == 0:
                drawn = figure(models["digits", "CTC"], strings[:50])
    print(text := table(results))
    (options.output / "digit-grammar.md").write_text(text + "\n", encoding="utf-8")
    drawn.savefig(options.output / "digit-grammar.png", dpi=120)


if __name__ == "__main__":
    main()
