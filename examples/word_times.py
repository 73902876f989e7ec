"""Find the times of words in strings of spoken digits, with CTC networks trained with and without label priors.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset). Recordings of
one speaker are joined into strings of 3 to 8 words. The network learns the letters of each string, without their times.
The joins are the true times of the words. docs/guide/word-timestamps.md explains :func:`word_times` and the results.
"""

from __future__ import annotations

import argparse
import random
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from digits import BATCH, HOP, RATE, SECONDS, Network, String, batches, command_line, errors, read_strings
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import pad

import bellmax as bx

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOCABULARY = {letter: n for n, letter in enumerate(sorted(set("".join(DIGITS))), 1)}  # 0 is the blank
RUNS = {"CTC": 1.0, "CTC, then label priors": 0.8, "label priors": 0.0}  # share of the epochs without label priors


class Word(NamedTuple):
    text: str
    start: float  # seconds
    end: float  # seconds
    score: float  # geometric mean of the probabilities of its frames, from 0 to 1


def spell(word: str, vocabulary: Mapping[str, int], blank: int, star: int) -> list[int]:
    """Return the labels of a word, with the star for "*" and for letters and digits without a label."""
    labels: list[int] = []
    for letter in unicodedata.normalize("NFC", word.casefold().replace("’", "'")):
        plain = letter if letter in vocabulary else unicodedata.normalize("NFKD", letter)[0]
        label = vocabulary.get(plain, blank)
        if label != blank:
            labels.append(label)
        elif (plain.isalnum() or plain == "*") and labels[-1:] != [star]:
            labels.append(star)
    return labels


def word_times(
    log_probs: Tensor,
    text: str,
    vocabulary: Mapping[str, int],
    seconds_per_frame: float,
    blank: int = 0,
    separator: str = "|",
    star: float = -1.0,
) -> list[Word]:
    """Return the words of a text with their times, for the log-probabilities (T, V) of a CTC network."""
    labels, words = [], []
    for word in text.split():
        if spelled := spell(word, vocabulary, blank, star=log_probs.shape[-1]):
            labels += [vocabulary[separator]] if labels and separator in vocabulary else []
            words.append((word, len(labels), len(labels) + len(spelled) - 1))
            labels += spelled
    scores = pad(log_probs.float().cpu(), (0, 1), value=star)  # the last class
    p = bx.CTC(scores, torch.tensor(labels, dtype=torch.int64), blank=blank)
    if p.value == -torch.inf:
        raise ValueError(f"text must fit into {len(scores)} frames, got {len(labels)} labels: {text!r}")
    spans, frame_scores = p.spans().tolist(), scores.gather(-1, p.decode().unsqueeze(-1))
    times = []
    for word, first, last in words:
        start, end = spans[first][0], spans[last][1]
        score = frame_scores[start:end].mean().exp().item()
        times.append(Word(word, start * seconds_per_frame, end * seconds_per_frame, score))
    return times


def text_of(digits: Tensor) -> str:
    return " ".join(DIGITS[digit - 1] for digit in digits.tolist())


def with_letters(string: String) -> String:
    """Return a string that has letters instead of digits as its labels."""
    features, digits, joins = string
    return features, torch.tensor([VOCABULARY[letter] for letter in text_of(digits).replace(" ", "")]), joins


def train(name: str, strings: Sequence[String], options: argparse.Namespace, bar: Progress) -> nn.Module:
    """Train a network. After a share of the epochs, divide the probabilities by the label priors to the power alpha."""
    torch.manual_seed(options.seed)
    model, num_labels = Network(), 1 + len(VOCABULARY)
    model.last = nn.Linear(model.last.in_features, num_labels)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = -(-len(strings) // BATCH)
    task, log_priors = bar.add_task(name, total=options.epochs * steps), torch.zeros(num_labels)
    for epoch in range(options.epochs):
        alpha = options.alpha if epoch >= RUNS[name] * options.epochs else 0.0
        expected_counts = torch.zeros(num_labels)
        for step, batch in enumerate(batches(strings, BATCH, random.Random(options.seed + epoch)), 1):
            done = (epoch + step / steps) / options.epochs  # the learning rate rises, stays constant, and falls to 0
            optimizer.param_groups[0]["lr"] = 0.002 * min(1, 7 * done, 1.5 * (1 - done))
            log_probs = model(batch.features).log_softmax(-1)
            p = bx.CTC(log_probs - alpha * log_priors, batch.labels, lengths=batch.lengths)
            optimizer.zero_grad()
            (-p.value / batch.lengths[1]).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            is_frame = torch.arange(log_probs.shape[1]) < batch.lengths[0].unsqueeze(-1)
            expected_counts += log_probs.detach().exp()[is_frame].sum(0)
            bar.advance(task)
        log_priors = (expected_counts / expected_counts.sum()).log()
    return model.eval()


def align(model: nn.Module, features: Tensor, text: str) -> list[Word]:
    """Return the times of the words. Frames are centered at multiples of SECONDS, so they start half a frame before."""
    times = word_times(model(features.unsqueeze(0))[0].log_softmax(-1), text, VOCABULARY, SECONDS)
    return [Word(word, start - SECONDS / 2, end - SECONDS / 2, score) for word, start, end, score in times]


def off(words: Sequence[Word], string: String) -> Tensor:
    """Return the signed errors of the starts and ends (words, 2), in ms."""
    features, _, joins = string
    bounds = torch.tensor([0.0, *joins.tolist(), len(features) * HOP / RATE])
    found = torch.tensor([[word.start, word.end] for word in words])
    return 1000 * (found - torch.stack((bounds[:-1], bounds[1:]), -1))


@torch.no_grad()
def evaluate(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Return the cells of a table row: errors of letters and of times, then two experiments with wrong transcripts."""
    (batch,) = batches([with_letters(string) for string in strings], len(strings))
    cells = [f"{100 * errors(model(batch.features), batch) / int(batch.lengths[1].sum()):.1f} %"]
    rng, right, wrong, exact, starred = random.Random(0), [], [], [], []
    for string in strings:
        features, words = string[0], text_of(string[1]).split()
        exact.append(off(align(model, features, " ".join(words)), string))
        place = rng.randrange(len(words))
        others = [*words[:place], "*", *words[place + 1 :]]  # the transcript lacks a word
        starred.append(off(align(model, features, " ".join(others)), string)[torch.arange(len(words)) != place])
        others[place] = rng.choice([word for word in DIGITS if word != words[place]])  # the transcript has a wrong word
        scores = [word.score for word in align(model, features, " ".join(others))]
        wrong.append(scores.pop(place))
        right += scores
    middle = torch.cat([(off_by[1:, 0] + off_by[:-1, 1]) / 2 for off_by in exact])  # between two words
    for side in (*torch.cat(exact).T, middle):
        cells += [f"{side.abs().median():.0f}", f"{side.median():+.0f}"]
    found = (torch.tensor(right).unsqueeze(-1) > torch.tensor(wrong)).double().mean()
    return [*cells, f"{torch.cat(starred).abs().median():.0f}", f"{100 * found:.1f} %"]


@torch.no_grad()
def figure(models: Mapping[str, nn.Module], string: String) -> Figure:
    """Draw a spectrogram, and for each network the words and the probability that a frame has a letter."""
    features, digits, joins = string
    drawn = Figure(figsize=(10, 6.5), layout="constrained")
    top, *axes = drawn.subplots(3, 1, sharex=True)
    seconds = len(features) * HOP / RATE
    top.imshow(features.T.numpy(), origin="lower", aspect="auto", extent=(0, seconds, 0, 1), cmap="magma")
    top.set(title="log-mel spectrogram; dashed: true boundaries of the words", yticks=[])
    for ax, name in zip(axes, ("CTC", "label priors"), strict=True):
        log_probs = models[name](features.unsqueeze(0))[0].log_softmax(-1)
        letter = 1 - bx.CTC(log_probs, with_letters(string)[1]).expected_path[:, 0]
        ax.fill_between(SECONDS * np.arange(len(letter)), letter.numpy(), step="mid", color="0.75")
        for n, word in enumerate(align(models[name], features, text_of(digits))):
            ax.plot((word.start, word.end), (1.12, 1.12), color=f"C{n % 10}", linewidth=6, solid_capstyle="butt")
            ax.text((word.start + word.end) / 2, 1.2, word.text, ha="center")
        ax.set(title=f"{name}: words, and the probability of a letter at each frame", ylim=(0, 1.45))
        ax.set(xlim=(0, seconds), yticks=(0, 0.5, 1))
    for ax in (top, *axes):
        ax.vlines(joins.numpy(), 0, 1, color="tab:red", linestyle="--")
    drawn.supxlabel("seconds")
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, Path("build/word_times"))
    parser.add_argument("--alpha", type=float, default=0.3, help="power of the label priors")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    tests = read_strings(options.folder, range(5), 4, options.seed + 1)
    strings = [with_letters(string) for string in read_strings(options.folder, range(5, 1000), 3, options.seed)]
    with Progress() as bar:
        models = {name: train(name, strings, options, bar) for name in RUNS}
    rows = [
        "| training | letters | start | bias | end | bias | middle | bias | star | found |",
        "|---" + 9 * "|---:" + "|",
    ]
    rows += ["| " + " | ".join([name, *evaluate(model, tests)]) + " |" for name, model in models.items()]
    print(text := "\n".join(rows))
    (options.output / "word-times.md").write_text(text + "\n", encoding="utf-8")
    figure(models, tests[0]).savefig(options.output / "word-times.png", dpi=120)


if __name__ == "__main__":
    main()
