"""Train CTC under three Ω on strings of spoken digits, and measure how well it locates their boundaries.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset). Recordings of
one speaker are joined into strings of 3 to 8 digits. The network learns from the digits of each string, without their
boundaries. The joins are the true boundaries, and serve to measure the alignments. The results are in
docs/results/digits.md.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import librosa
import numpy as np
import soundfile
import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, pad
from torch.nn.utils.rnn import pad_sequence

import bellmax as bx
from bellmax.nn import CTCLoss

RATE, HOP, BANDS = 8000, 80, 40  # samples per second, samples per frame, mel bands
STRIDE, SECONDS = 2, 2 * HOP / RATE  # the network scores every second frame; seconds between scores
BATCH = 16  # strings per step
OMEGAS = {"negentropy": bx.Negentropy(), "Tsallis 1.5": bx.Tsallis(1.5), "l2": bx.SquaredL2()}
TORCH, PENALTY = "F.ctc_loss", ", blank penalty"
RUNS = {TORCH: bx.Negentropy(), **OMEGAS, **{name + PENALTY: omega for name, omega in OMEGAS.items()}}

String = tuple[Tensor, Tensor, Tensor]  # features (frames, BANDS), labels (digits,), times of joins (digits − 1,)
Trained = tuple[nn.Module, list[dict[str, float]]]  # a network, and the loss and seconds of each epoch


class Batch(NamedTuple):
    features: Tensor  # (strings, frames, BANDS)
    labels: Tensor  # (strings, digits), from 1 to 10; 0 is the blank
    lengths: tuple[Tensor, Tensor]  # numbers of scores and digits of each string
    joins: Sequence[Tensor]


def read_recordings(folder: Path, takes: range) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Return the digits and the waves of each speaker."""
    speakers: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in sorted(folder.glob("*_*_*.wav")):
        digit, speaker, take = path.stem.split("_")
        if int(take) in takes:
            speakers.setdefault(speaker, []).append((int(digit), soundfile.read(path, dtype="float32")[0]))
    return speakers


def read_strings(folder: Path, takes: range, rounds: int, seed: int, pause: float = 0.0) -> list[String]:
    """Join the takes of each speaker in random order into strings, and repeat this ``rounds`` times.

    A pause of quiet noise, in seconds, is inserted before each join.
    """
    rng, strings = random.Random(seed), []
    noise = np.random.default_rng(seed).normal(0, 0.003, round(pause * RATE)).astype(np.float32)
    speakers = read_recordings(folder, takes)
    for recordings in rounds * list(speakers.values()):
        order = rng.sample(recordings, len(recordings))
        while len(order) >= 3:
            digits, waves = zip(*(order.pop() for _ in range(min(rng.randint(3, 8), len(order)))), strict=True)
            joins = torch.tensor([len(wave) + len(noise) for wave in waves[:-1]]).cumsum(0) / RATE
            wave = np.concatenate([waves[0], *(part for wave in waves[1:] for part in (noise, wave))])
            strings.append((log_mel(wave), torch.tensor(digits) + 1, joins))
    if not strings:
        raise SystemExit(f"{folder} must hold {{digit}}_{{speaker}}_{{take}}.wav with takes below 5 and from 5 on")
    return strings


def log_mel(wave: np.ndarray) -> Tensor:
    """Return the log-mel spectrogram (frames, BANDS), normalized by band. Frame t is centered at sample t · HOP."""
    level = librosa.util.normalize(wave)
    mel = librosa.feature.melspectrogram(y=level, sr=RATE, n_fft=256, hop_length=HOP, n_mels=BANDS)
    features = torch.from_numpy(np.log(mel + 1e-5)).T
    return (features - features.mean(0)) / features.std(0).clamp(min=1e-3)


def batches(strings: Sequence[String], size: int, rng: random.Random | None = None) -> Iterator[Batch]:
    """Yield batches of strings of similar lengths, in random order if ``rng`` is given."""
    order = sorted(strings, key=lambda string: len(string[0]) + (rng.uniform(0, 30) if rng else 0))
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    for group in rng.sample(groups, len(groups)) if rng else groups:
        features, labels, joins = zip(*group, strict=True)
        lengths = torch.tensor([-(-len(x) // STRIDE) for x in features]), torch.tensor([len(y) for y in labels])
        yield Batch(pad_sequence(features, batch_first=True), pad_sequence(labels, batch_first=True), lengths, joins)


class Network(nn.Module):
    """Four convolutions with a receptive field of half a second."""

    def __init__(self, size: int = 96) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, size, 5, stride=STRIDE, padding=2)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv1d(size, size, 5, padding=2 * d, dilation=d) for d in (1, 2, 2))
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(size, 11)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores of the blank and of the ten digits, (strings, scores, 11)."""
        hidden = self.first(features.mT).relu()
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = hidden + self.dropout(convolution(norm(hidden.mT).mT).relu())
        return self.last(hidden.mT)


def loss_of(name: str, scores: Tensor, batch: Batch, penalty: bool) -> Tensor:
    """Return the CTC loss of a run. With a penalty, each blank of an alignment costs 1 more."""
    if name == TORCH:
        return ctc_loss(scores.log_softmax(-1).transpose(0, 1), batch.labels, *batch.lengths)
    criterion = CTCLoss(omega=RUNS[name])
    if not penalty:
        return criterion(scores, batch.labels, lengths=batch.lengths)
    normalised = criterion.distribution(scores, batch.labels, lengths=batch.lengths).log_probs
    p = bx.CTC(normalised - (torch.arange(11) == 0).float(), batch.labels, lengths=batch.lengths, omega=RUNS[name])
    return -(p.value / batch.lengths[1]).mean()


def train(name: str, strings: Sequence[String], options: argparse.Namespace, bar: Progress) -> Trained:
    """Train a network and save a checkpoint after each epoch. With ``--resume``, start from the checkpoint."""
    file, until = options.output / f"{name}.pt", time.monotonic() + 60 * options.minutes / len(RUNS)
    torch.manual_seed(options.seed)
    model, history = Network(), []
    optimizer = torch.optim.AdamW(model.parameters())
    if options.resume and file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        history = saved["history"]
    steps = -(-len(strings) // BATCH)
    task = bar.add_task(name, total=options.epochs * steps, completed=len(history) * steps)
    for epoch in range(len(history), options.epochs):
        if history and time.monotonic() > until:
            break
        begun, total = time.monotonic(), 0.0
        torch.manual_seed(options.seed + epoch)
        penalty = name.endswith(PENALTY) and epoch < options.penalty_epochs
        for step, batch in enumerate(batches(strings, BATCH, random.Random(options.seed + epoch)), 1):
            done = (epoch + step / steps) / options.epochs  # the learning rate rises, stays constant, and falls to 0
            optimizer.param_groups[0]["lr"] = 0.002 * min(1, 7 * done, 1.5 * (1 - done))
            optimizer.zero_grad()
            loss = loss_of(name, model(batch.features), batch, penalty)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
            bar.advance(task)
        history.append({"loss": total / steps, "seconds": time.monotonic() - begun})
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}, file)
        print(f"{name}: epoch {epoch + 1} of {options.epochs}, loss {total / steps:.4f}", flush=True)
    return model.eval(), history


def align(omega: bx.Regularizer, scores: Tensor, batch: Batch) -> bx.CTC:
    """Align the true digits. Each position of a string is a separate class, which distinguishes equal digits."""
    classes = pad(batch.labels, (1, 0)).unsqueeze(1).expand(-1, scores.shape[1], -1)
    places = torch.arange(1, classes.shape[-1]).expand_as(batch.labels)
    return bx.CTC(scores.gather(-1, classes), places, lengths=batch.lengths, omega=omega)


def boundaries(path: Tensor) -> Tensor:
    """Return the times (..., L − 1) of the boundaries between the L digits of a path (..., T, 1 + L), in seconds.

    A boundary is the cut that leaves the least probability of its two digits on the wrong side. If several cuts are
    equally good, for example in blanks between the digits, the boundary is halfway between the first and the last.
    """
    wrong = pad((path[..., 2:] - path[..., 1:-1]).double().cumsum(-2), (0, 0, 1, 0))  # up to a constant
    least = (wrong <= wrong.amin(-2, keepdim=True) + 1e-9).long()
    middle = (least.argmax(-2) + least.shape[-2] - 1 - least.flip(-2).argmax(-2)) / 2
    return (middle - 0.5) * SECONDS


def errors(scores: Tensor, batch: Batch) -> int:
    """Return the edit distance between the digits and the best label of each frame, without repeats and blanks."""
    best = [own[:size].unique_consecutive() for own, size in zip(scores.argmax(-1), batch.lengths[0], strict=True)]
    return int(edit_distance([labels[labels > 0] for labels in best], batch).sum())


def edit_distance(heard: Sequence[Tensor], batch: Batch) -> Tensor:
    """Return the edit distance between recognized labels and the labels of each string."""
    differ = pad(pad_sequence(heard, batch_first=True), (0, 1)).unsqueeze(-1) != batch.labels.unsqueeze(-2)
    lengths = [len(labels) for labels in heard], batch.lengths[1]
    return -bx.SequenceAlignment(-differ.float(), gap_open=-1, gap_extend=-1, lengths=lengths, omega="hard").value


@torch.no_grad()
def evaluate(omega: bx.Regularizer, model: nn.Module, strings: Sequence[String]) -> list[str]:
    """Return the cells of a table row: the error rate, then measures of the alignments with the true digits."""
    (batch,) = batches(strings, len(strings))
    scores = model(batch.features)
    p = align(omega, scores, batch)
    frames, digits = (int(own.sum()) for own in batch.lengths)
    cells = [f"{100 * errors(scores, batch) / digits:.1f} %"]
    for path in (p.best_path(), p.expected_path):
        found = zip(boundaries(path), batch.joins, strict=True)
        off = 1000 * torch.cat([own[: len(joins)] - joins for own, joins in found])
        cells += [f"{off.abs().median():.0f}", f"{off.median():+.0f}"]
    spoken, above = (p.decode() > 0).sum(), (p.expected_path > 0).sum()
    return [*cells, f"{1000 * SECONDS * spoken / digits:.0f}", f"{above / frames:.2f}"]


def table(runs: dict[str, Trained], strings: Sequence[String]) -> str:
    lines = ["| Ω | errors | best | bias | expected | bias | length | labels | seconds |", "|---" + 8 * "|---:" + "|"]
    for name, (model, history) in runs.items():
        seconds = np.median([epoch["seconds"] for epoch in history])
        lines.append("| " + " | ".join([name, *evaluate(RUNS[name], model, strings), f"{seconds:.1f}"]) + " |")
    pairs = zip(runs[TORCH][1], runs["negentropy"][1], strict=False)
    apart = ", ".join(f"{abs(ours['loss'] / theirs['loss'] - 1):.0e}" for theirs, ours in pairs)
    lines += ["", f"Loss under negentropy to that of {TORCH}, relative difference by epoch: {apart}"]
    return "\n".join(lines)


@torch.no_grad()
def figure(runs: dict[str, Trained], string: String) -> Figure:
    """Draw a spectrogram, and the posteriors of its digits under two Ω, without and with the penalty."""
    features, labels, joins = string
    (batch,) = batches([string], 1)
    drawn = Figure(figsize=(10, 8.5), layout="constrained")
    top, *axes = drawn.subplots(5, 1, sharex=True)
    ends = [0, *joins.tolist(), len(features) * HOP / RATE]
    top.imshow(features.T.numpy(), origin="lower", aspect="auto", extent=(0, ends[-1], 0, 1), cmap="magma")
    top.set(title="log-mel spectrogram; dashed: true boundaries; black: those of the best alignment", yticks=[])
    for ax, (name, start) in zip(axes, product(("negentropy", "l2"), ("", PENALTY)), strict=True):
        p = align(RUNS[name], runs[name + start][0](batch.features), batch)
        for place, label in enumerate(labels.tolist(), 1):
            share = p.expected_path[0, :, place].numpy()
            ax.fill_between(SECONDS * np.arange(len(share)), share, step="mid", color=f"C{label - 1}", alpha=0.7)
            ax.text(sum(ends[place - 1 : place + 1]) / 2, 1.06, label - 1, ha="center")
        ax.vlines(boundaries(p.best_path())[0].numpy(), 0, 1, color="black")
        ax.set(title=f"posteriors: {name}{start}", ylim=(0, 1.3))
    for ax in (top, *axes):
        ax.vlines(joins.numpy(), 0, 1, color="tab:red", linestyle="--")
    drawn.supxlabel("seconds")
    return drawn


def command_line(description: str | None, output: Path) -> argparse.ArgumentParser:
    """Return a parser for the options of all examples on these recordings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="recordings {digit}_{speaker}_{take}.wav at 8 kHz; takes 0 to 4 are the test set")
    add("--output", type=Path, default=output, help="folder for the table, the figure and checkpoints")
    add("--epochs", type=int, default=10, help="epochs of each run")
    add("--seed", type=int, default=0, help="seed of the weights, the strings and their order")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, Path("build/digits"))
    parser.add_argument("--minutes", type=float, default=30, help="training time, divided among the runs")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    text = "number of first epochs in which each blank costs 1 more"
    parser.add_argument("--penalty-epochs", type=int, default=3, help=text)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    tests = read_strings(options.folder, range(5), 4, options.seed + 1)
    strings = read_strings(options.folder, range(5, 1000), 3, options.seed)
    with Progress() as bar:
        runs = {name: train(name, strings, options, bar) for name in RUNS}
    print(text := table(runs, tests))
    (options.output / "digits.md").write_text(text + "\n", encoding="utf-8")
    figure(runs, tests[0]).savefig(options.output / "digits.png", dpi=120)


if __name__ == "__main__":
    main()
