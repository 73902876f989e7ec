"""Find the times of words in strings of spoken digits, with CTC networks trained with and without label priors.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset). Recordings of
one speaker are joined into strings of 3 to 8 words. The network learns the letters of each string, without their times.
The joins are the true times of the words. docs/guide/word-timestamps.md explains the methods and the results.

With ``--performance``, the script measures the time and memory of alignments instead. This does not need recordings.
"""

from __future__ import annotations

import argparse
import random
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase
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
STARS = (0.0, -0.5, -1.0, -2.0, -3.0)  # log-probabilities of the star
PAUSE = 0.4  # seconds between two words
WINDOWS = (1000, 2000, 5000)  # frames
SIZES = ((500, 100), (30_000, 1_500), (30_000, 9_000))  # frames and labels: 10 seconds and 10 minutes


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


def long_word_times(
    log_probs: Tensor, text: str, vocabulary: Mapping[str, int], seconds_per_frame: float, window: int = 15_000
) -> list[Word]:
    """Return the words of a long text with their times. Each window of frames has half of its words, and a star."""
    words, times, first = text.split(), [], 0
    while words:
        num_frames, count, star = len(log_probs) - first, len(words), []
        if num_frames > window:
            count, star = max(1, count * window // (2 * num_frames)), ["*"]
        piece = " ".join(words[:count] + star)
        found = word_times(log_probs[first : first + window], piece, vocabulary, 1.0)  # times in frames
        found = found[: len(found) - len(star)]
        for word, start, end, score in found:
            times.append(Word(word, (first + start) * seconds_per_frame, (first + end) * seconds_per_frame, score))
        first += int(found[-1].end) if found else 0
        words = words[count:]
    return times


def text_of(digits: Tensor) -> str:
    return " ".join(DIGITS[digit - 1] for digit in digits.tolist())


def labels_of(text: str) -> Tensor:
    return torch.tensor([VOCABULARY[letter] for letter in text.replace(" ", "")])


def with_letters(string: String) -> String:
    """Return a string that has letters instead of digits as its labels."""
    features, digits, joins = string
    return features, labels_of(text_of(digits)), joins


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


def align(log_probs: Tensor, text: str, star: float = -1.0) -> list[Word]:
    """Return the times of the words. Frames are centered at multiples of SECONDS, so they start half a frame before."""
    times = word_times(log_probs, text, VOCABULARY, SECONDS, star=star)
    return [Word(word, start - SECONDS / 2, end - SECONDS / 2, score) for word, start, end, score in times]


def off(words: Sequence[Word], string: String, pause: float = 0.0) -> Tensor:
    """Return the signed errors of the starts and ends (words, 2), in ms."""
    features, _, joins = string
    starts, ends = pad(joins, (1, 0)), pad(joins - pause, (0, 1), value=len(features) * HOP / RATE)
    found = torch.tensor([[word.start, word.end] for word in words])
    return 1000 * (found - torch.stack((starts, ends), -1))


class Case(NamedTuple):
    log_probs: Tensor  # (T, V)
    string: String
    text: str
    place: int  # index of a random word
    starred: str  # the text with a star at this place: the transcript lacks a word
    wrong: str  # the text with another word at this place


@torch.no_grad()
def cases(model: nn.Module, strings: Sequence[String]) -> Iterator[Case]:
    rng = random.Random(0)
    for string in strings:
        words = text_of(string[1]).split()
        place = rng.randrange(len(words))
        others = "*", rng.choice([word for word in DIGITS if word != words[place]])
        starred, wrong = (" ".join([*words[:place], other, *words[place + 1 :]]) for other in others)
        log_probs = model(string[0].unsqueeze(0))[0].log_softmax(-1)
        yield Case(log_probs, string, " ".join(words), place, starred, wrong)


def share_lower(wrong: Sequence[float], right: Sequence[float]) -> str:
    """Return the share of pairs of a wrong and a correct word in which the wrong word has the lower score."""
    return f"{100 * (torch.tensor(right).unsqueeze(-1) > torch.tensor(wrong)).double().mean():.1f} %"


@torch.no_grad()
def evaluate(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Return the cells of a table row: errors of letters and of times, then two experiments with wrong transcripts."""
    (batch,) = batches([with_letters(string) for string in strings], len(strings))
    cells = [f"{100 * errors(model(batch.features), batch) / int(batch.lengths[1].sum()):.1f} %"]
    right, wrong, exact, starred = [], [], [], []
    for case in cases(model, strings):
        exact.append(off(align(case.log_probs, case.text), case.string))
        off_by = off(align(case.log_probs, case.starred), case.string)
        starred.append(off_by[torch.arange(len(off_by)) != case.place])
        scores = [word.score for word in align(case.log_probs, case.wrong)]
        wrong.append(scores.pop(case.place))
        right += scores
    middle = torch.cat([(off_by[1:, 0] + off_by[:-1, 1]) / 2 for off_by in exact])  # between two words
    for side in (*torch.cat(exact).T, middle):
        cells += [f"{side.abs().median():.0f}", f"{side.median():+.0f}"]
    return [*cells, f"{torch.cat(starred).abs().median():.0f}", share_lower(wrong, right)]


def try_stars(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Return the errors of the end of the word before a star and of the start of the word after it, for each value."""
    cells = []
    for star in STARS:
        off_by = []
        for log_probs, string, _, place, starred, _ in cases(model, strings):
            times = off(align(log_probs, starred, star), string)
            off_by += [times[:place, 1][-1:], times[place + 1 :, 0][:1]]
        sizes = torch.cat(off_by).abs()
        cells.append(f"{sizes.median():.0f} / {sizes.quantile(0.9):.0f}")
    return cells


def try_pauses(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Return the errors of starts and ends in strings with pauses."""
    off_by = [off(align(case.log_probs, case.text), case.string, PAUSE) for case in cases(model, strings)]
    return [f"{side.abs().median():.0f}" for side in torch.cat(off_by).T]


def try_confidence(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Compare the mean confidence of the letters of wrong and correct words."""
    right, wrong = [], []
    for case in cases(model, strings):
        lengths = [len(word) for word in case.wrong.split()]
        letters = bx.CTC(case.log_probs, labels_of(case.wrong)).confidence.split(lengths)
        scores = [float(confidence.mean()) for confidence in letters]
        wrong.append(scores.pop(case.place))
        right += scores
    return [share_lower(wrong, right)]


def try_windows(model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Join the strings, and compare the times in frames with and without windows."""
    log_probs, _, texts, *_ = zip(*cases(model, strings), strict=True)
    recording = torch.cat(log_probs), " ".join(texts), VOCABULARY, 1.0
    whole, cells = word_times(*recording), []
    for window in WINDOWS:
        pairs = zip(long_word_times(*recording, window), whole, strict=True)
        apart = [max(abs(word.start - other.start), abs(word.end - other.end)) for word, other in pairs]
        cells.append(f"{sum(frames > 0 for frames in apart)} / {SECONDS * max(apart):.2f}")
    return cells


EXPERIMENTS = (  # title, columns, function, seconds of pauses
    (
        "Errors of letters, and of times in ms",
        ("letters", "start", "bias", "end", "bias", "middle", "bias", "star", "found"), evaluate, 0.0,
    ),
    ("Value of the star: median / 90th percentile of the errors next to a star, in ms", STARS, try_stars, 0.0),
    (f"Pauses of {PAUSE} s: median errors in ms", ("start", "end"), try_pauses, PAUSE),
    ("Confidence: share of pairs in which the wrong word has the lower confidence", ("found",), try_confidence, 0.0),
    ("Frames per window: words with other times / largest difference in s", WINDOWS, try_windows, 0.0),
)  # fmt: skip


def tables(models: Mapping[str, nn.Module], tests: Mapping[float, Sequence[String]]) -> str:
    """Return the tables of all experiments, with a row for each network. ``tests`` has the strings for each pause."""
    frames, words = (sum(len(string[part]) for string in tests[0.0]) for part in (0, 1))
    lines = [f"{len(tests[0.0])} strings with {words:,} words, {frames * HOP / RATE / 60:.1f} minutes", ""]
    for title, columns, cells, pause in EXPERIMENTS:
        lines += [title, "", f"| training | {' | '.join(map(str, columns))} |"]
        lines += ["|---" + len(columns) * "|---:" + "|"]
        lines += [f"| {' | '.join([name, *cells(model, tests[pause])])} |" for name, model in models.items()]
        lines += [""]
    return "\n".join(lines)


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
        for n, word in enumerate(align(log_probs, text_of(digits))):
            ax.plot((word.start, word.end), (1.12, 1.12), color=f"C{n % 10}", linewidth=6, solid_capstyle="butt")
            ax.text((word.start + word.end) / 2, 1.2, word.text, ha="center")
        ax.set(title=f"{name}: words, and the probability of a letter at each frame", ylim=(0, 1.45))
        ax.set(xlim=(0, seconds), yticks=(0, 0.5, 1))
    for ax in (top, *axes):
        ax.vlines(joins.numpy(), 0, 1, color="tab:red", linestyle="--")
    drawn.supxlabel("seconds")
    return drawn


def time_and_memory(run: Callable[[], object]) -> str:
    """Return the minimum time of three calls, and their peak memory in addition to the memory before. Linux only."""

    def peak() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    run()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of the first call
    before, seconds = peak(), []
    for _ in range(3):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return f"{min(seconds):.2g} s, {(peak() - before) / 1e9:.2f} GB"


def performance() -> str:
    """Return a table with the time and memory of alignments on one thread, for random log-probabilities."""
    torch.set_num_threads(1)
    rows = ["| frames | labels | spans | word_times | confidence |", "|" + 5 * "---:|"]
    vocabulary = {letter: label for label, letter in enumerate(ascii_lowercase + "|", 1)}
    for num_frames, num_labels in SIZES:
        log_probs = torch.randn(num_frames, 32).log_softmax(-1)
        text = "|".join("".join(random.choices(ascii_lowercase, k=5)) for _ in range(num_labels // 6))
        p = partial(bx.CTC, log_probs, torch.tensor([vocabulary[letter] for letter in text]))
        cells = [
            time_and_memory(lambda p=p: p().spans()),
            time_and_memory(partial(word_times, log_probs, text.replace("|", " "), vocabulary, SECONDS)),
            time_and_memory(lambda p=p: p().confidence),
        ]
        rows.append(f"| {num_frames:,} | {num_labels:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


class Performance(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(performance())
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, Path("build/word_times"))
    parser.add_argument("--alpha", type=float, default=0.3, help="power of the label priors")
    parser.add_argument(
        "--performance",
        action=Performance,
        nargs=0,
        default=argparse.SUPPRESS,
        help="measure time and memory instead; Linux only",
    )
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    tests = {pause: read_strings(options.folder, range(5), 4, options.seed + 1, pause) for pause in (0.0, PAUSE)}
    strings = [with_letters(string) for string in read_strings(options.folder, range(5, 1000), 3, options.seed)]
    with Progress() as bar:
        models = {name: train(name, strings, options, bar) for name in RUNS}
    print(text := tables(models, tests))
    (options.output / "word-times.md").write_text(text, encoding="utf-8")
    figure(models, tests[0.0][0]).savefig(options.output / "word-times.png", dpi=120)


if __name__ == "__main__":
    main()
