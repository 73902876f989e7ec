"""The leave-one-out experiment of section 5.3 of the paper, with its baselines, measures and table of results.

Each piece is aligned by models that were trained on the other pieces.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bellmax_apps.audio.features as features
from bellmax.regularizers import Negentropy, Regularizer, SquaredL2
from bellmax.structures.dtw import DTW
from bellmax_apps.audio.model import (
    Both,
    Chroma,
    Harmonic,
    Linear,
    Model,
    Piece,
    area,
    cost_of_classes,
    learn,
    onset_frames,
    to_batch,
)
from bellmax_apps.audio.score import Score, read_midi, read_truth
from bellmax_apps.files import fingerprint, read_json, reading, write_json

NEGENTROPY = Negentropy()
OMEGAS: dict[str, Regularizer] = {"negentropy": NEGENTROPY, "l2": SquaredL2()}
HARD, OVERLAP = "hard DTW of θ", "most expected overlap"
PAPER = {
    ("constant θ", HARD): ("14.64 ± 2.63", "14.64 ± 0.29"),
    ("the paper's features: pretrained", HARD): ("1.80 ± 0.14", "3.69 ± 2.85"),
    ("the paper's features: end-to-end, negentropy", HARD): ("0.17 ± 0.01", "1.07 ± 0.61"),
}
"""Train and test errors in table 2 of the paper. Its "Random θ" seems to be a constant θ."""


@dataclass(frozen=True)
class Recording:
    """A recording of a piece, its score, and the true onsets (M,) in seconds."""

    name: str
    audio: NDArray[np.float32]
    score: Score
    truth: NDArray[np.float64]


def read(data: Path | str) -> Iterator[Recording]:
    """Read a folder like Bach10: one folder per piece, with a .wav, a .mid and a .txt of the same name."""
    data = Path(data)
    folders = sorted(path for path in data.iterdir() if path.is_dir()) if data.is_dir() else []
    if not folders:
        raise ValueError(f"{data} must hold a folder for each piece, got none")
    for folder in folders:
        paths = files_of(folder)
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise ValueError(f"{missing[0]} does not exist")
        score = read_midi(paths[1])
        yield Recording(folder.name, features.load(paths[0]), score, read_truth(paths[2], score))


def files_of(folder: Path) -> list[Path]:
    """Files of a piece: the recording, the score and the true onsets."""
    return [folder / f"{folder.name}{ending}" for ending in (".wav", ".mid", ".txt")]


@dataclass(frozen=True)
class Example:
    """A recording and its features."""

    recording: Recording
    sound: Tensor

    def piece(self, model: Model) -> Piece:
        """Training example of a model, with its columns of the score."""
        columns = model.columns(self.recording.score, len(self.sound))
        return Piece(self.sound, columns, self.recording.truth)


# --- measures

Onsets = NDArray[np.float64]


def measure(truth: Onsets, estimate: Onsets) -> dict[str, float]:
    """Errors of estimated onsets (M,).

    - ``seconds``: Mean error over the columns of the score: the events, and a silence whose error is 0.
    - ``median``: Median error of the events, in seconds.
    - ``within_50`` and ``within_100``: Share of the events with an error of at most 50 and 100 ms.

    >>> measure(np.array([1.0]), np.array([1.0625]))
    {'seconds': 0.03125, 'median': 0.0625, 'within_50': 0.0, 'within_100': 1.0}
    """
    error = np.abs(estimate - truth)
    return {
        "seconds": float(error.sum() / (len(error) + 1)),
        "median": float(np.median(error)),
        "within_50": float((error <= 0.05).mean()),
        "within_100": float((error <= 0.1).mean()),
    }


# --- alignments


def by_costs(theta: Tensor, piece: Piece) -> Onsets:
    """Onsets (M,) in seconds of the alignment of least cost."""
    return np.asarray(features.seconds(onset_frames(theta, piece.columns).numpy()))


def by_overlap(theta: Tensor, piece: Piece, omega: Regularizer = NEGENTROPY) -> Onsets:
    """Onsets (M,) of the alignment whose cells have the largest sum in the soft alignment ∇DTW_Ω(θ)."""
    return by_costs(-DTW(theta, omega=omega).expected_path, piece)


def straight_line(piece: Piece) -> Onsets:
    """Onsets (M,) if all columns have the same duration."""
    columns = len(piece.truth) + 1
    return np.asarray(features.seconds(np.arange(1.0, columns) * (piece.frames / columns)))


def constant_costs(piece: Piece) -> Onsets:
    """Onsets (M,) of an alignment with constant costs, in which each column except the last has one frame.

    All alignments that pass each frame once have the same cost. Hard DTW returns this one if, from the end, ties are
    resolved in favor of the same column in the previous frame.
    """
    return np.asarray(features.seconds(np.arange(1, len(piece.truth) + 1)))


# --- methods


class Result(NamedTuple):
    """Onsets by a method in each piece. None marks a piece that the method was not applied to."""

    name: str
    decoding: str
    onsets: Sequence[Onsets | None]


def learnt(
    model: Model, examples: Sequence[Example], *, iterations: int = 40, from_zeros: int = 0
) -> Iterator[tuple[str, Tensor, Regularizer]]:
    """Train a model, and yield the name of each training method, the weights, and Ω.

    The first method trains the classifier alone. The others train end to end, starting from the weights of the
    classifier and, if ``from_zeros`` > 0, also from 0 with this number of iterations.
    """
    batch = to_batch([example.piece(model) for example in examples])
    zeros = torch.zeros(model.size(), dtype=torch.float64)
    first = learn(model, partial(cost_of_classes, model, batch=batch), zeros)
    yield "pretrained", first, NEGENTROPY
    for name, omega in OMEGAS.items():
        loss = partial(area, model, batch=batch, omega=omega)
        yield f"end-to-end, {name}", learn(model, loss, first, iterations=iterations), omega
        if from_zeros:
            yield f"end-to-end from zeros, {name}", learn(model, loss, zeros, iterations=from_zeros), omega


def baselines(examples: Sequence[Example], seed: int) -> Iterator[Result]:
    """Methods without learning."""
    pieces = [example.piece(Linear()) for example in examples]
    yield Result("straight line", "–", [straight_line(piece) for piece in pieces])
    yield Result("constant θ", HARD, [constant_costs(piece) for piece in pieces])
    yield Result("constant θ", OVERLAP, [by_overlap(torch.zeros(piece.shape).double(), piece) for piece in pieces])
    generator = torch.Generator().manual_seed(seed)
    costs = [torch.randn(piece.shape, generator=generator).double() for piece in pieces]
    yield Result("random θ", HARD, list(map(by_costs, costs, pieces)))
    yield Result("random θ", OVERLAP, list(map(by_overlap, costs, pieces)))


def with_features_of_paper(examples: Sequence[Example], left_out: int) -> Iterator[Result]:
    """The classifier of the paper, trained on the other pieces."""
    others = _without(examples, left_out)
    model = Linear(min(pitches) for example in others for pitches in example.recording.score.sounding)
    pieces = [example.piece(model) for example in examples]
    for name, weights, omega in learnt(model, others, iterations=300, from_zeros=100):
        costs = [model.costs(weights, piece.sound, piece.columns.keys) for piece in pieces]
        yield Result(f"the paper's features: {name}", HARD, list(map(by_costs, costs, pieces)))
        onsets = [by_overlap(theta, piece, omega) for theta, piece in zip(costs, pieces, strict=True)]
        yield Result(f"the paper's features: {name}", OVERLAP, onsets)


def with_harmonic_features(examples: Sequence[Example], left_out: int) -> Iterator[Result]:
    """The harmonic model, trained with few columns, and evaluated with columns that follow the tempo of the score.

    The examples have the features of :class:`Both`. This model is evaluated, too, with the weights of the harmonic one.
    """
    harmonic, tones = (
        [Example(example.recording, Both.split(example.sound)[side]) for example in examples] for side in (0, 1)
    )
    for name, weights, _ in learnt(Harmonic(share=0), _without(harmonic, left_out)):
        yield Result(f"harmonic features: {name}", HARD, _by_model(Harmonic(), weights, harmonic))
    yield Result("chroma features", HARD, _by_model(Chroma(), weights, tones))
    yield Result(f"harmonic and chroma features: {name}", HARD, _by_model(Both(), weights, examples))


def _by_model(model: Model, weights: Tensor, examples: Sequence[Example]) -> list[Onsets]:
    """Onsets in each example, by hard DTW of the costs of a model."""
    pieces = (example.piece(model) for example in examples)
    return [by_costs(model.costs(weights, piece.sound, piece.columns.keys), piece) for piece in pieces]


def _without(examples: Sequence[Example], left_out: int) -> list[Example]:
    """The training data of a fold: all examples except one."""
    return [example for number, example in enumerate(examples) if number != left_out]


def with_synctoolbox(examples: Sequence[Example], left_out: int) -> Iterator[Result]:
    """The library synctoolbox, which needs no training, if it is installed."""
    onsets = by_synctoolbox(examples[left_out].recording)
    if onsets is not None:
        yield Result("synctoolbox", "–", [onsets if n == left_out else None for n in range(len(examples))])


def by_synctoolbox(recording: Recording) -> NDArray[np.float64] | None:
    """Onsets (M,) by synctoolbox: tuned chroma, onset features and multi-scale DTW. None if it is not installed."""
    try:
        import pandas
        from synctoolbox.dtw.mrmsdtw import sync_via_mrmsdtw
        from synctoolbox.dtw.utils import make_path_strictly_monotonic
        from synctoolbox.feature.chroma import pitch_to_chroma, quantize_chroma
        from synctoolbox.feature.csv_tools import df_to_pitch_features, df_to_pitch_onset_features
        from synctoolbox.feature.dlnco import pitch_onset_features_to_DLNCO
        from synctoolbox.feature.pitch import audio_to_pitch_features
        from synctoolbox.feature.pitch_onset import audio_to_pitch_onset_features
        from synctoolbox.feature.utils import estimate_tuning
    except ImportError:
        return None
    rate = 50
    notes = pandas.DataFrame(
        [(start, end - start, pitch, 0.5, "") for start, end, pitch in recording.score.notes],
        columns=["start", "duration", "pitch", "velocity", "instrument"],
    )
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        audio_arguments = {"f_audio": recording.audio, "Fs": features.RATE}
        audio_arguments["tuning_offset"] = estimate_tuning(recording.audio, features.RATE)
        pitches = audio_to_pitch_features(**audio_arguments, feature_rate=rate)
        tones = [quantize_chroma(pitch_to_chroma(p)) for p in (pitches, df_to_pitch_features(notes, feature_rate=rate))]
        peaks = audio_to_pitch_onset_features(**audio_arguments), df_to_pitch_onset_features(notes)
        onsets = [
            pitch_onset_features_to_DLNCO(peak, feature_sequence_length=tone.shape[1], feature_rate=rate)
            for peak, tone in zip(peaks, tones, strict=True)
        ]
        path = sync_via_mrmsdtw(
            *tones, *onsets, input_feature_rate=rate, step_weights=np.array([1.5, 1.5, 2.0]), threshold_rec=10**6
        )
    audio, score = make_path_strictly_monotonic(path) / rate
    return np.asarray(np.interp(recording.score.onsets, score, audio))


# --- the experiment

STEPS = 22
"""Number of messages per piece: one for its features, and one for each row of the table."""


def experiment(data: Path | str, output: Path | str, report: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """Apply all methods to all folds. A finished fold is written to ``output``, and is not computed again.

    ``report`` receives messages, each with the number of steps that it completes.
    """
    data, output = Path(data), Path(output)
    recordings = list(read(data))
    if len(recordings) < 2:
        raise ValueError(f"{data} must hold at least two pieces, got one")
    paths = [output / f"{recording.name}.json" for recording in recordings]
    pieces = fingerprint(file for recording in recordings for file in files_of(data / recording.name))
    _read_folds([path for path in paths if path.exists()], pieces)
    output.mkdir(parents=True, exist_ok=True)
    linear, tuned = [], []
    if not all(path.exists() for path in paths):
        for recording in recordings:
            linear.append(Example(recording, features.of_paper(recording.audio)))
            tuned.append(Example(recording, Both().features(recording.audio, features.tuning(recording.audio))))
            report(f"listening to {recording.name}", 1)
    for number, path in enumerate(paths):
        if path.exists():
            report(f"{path} exists already", STEPS - 1)
        else:
            write_json(path, {"pieces": pieces, **fold(linear, tuned, number, report)})
    return _read_folds(paths, pieces)


def _read_folds(paths: Sequence[Path], pieces: str) -> list[dict[str, Any]]:
    """Read finished folds. Raises ``ValueError`` if one has other pieces (by fingerprint) or other methods."""
    folds: list[dict[str, Any]] = []
    for path in paths:
        folds.append(read_json(path))
        with reading(path, "a piece of this experiment (delete it, and run the command again)"):
            if folds[-1]["pieces"] != pieces:
                raise ValueError("its recordings differ from the recordings in the data folder")
            if _methods(folds[-1]) != _methods(folds[0]):
                raise ValueError(f"its methods differ from the methods in {paths[0]}")
    return folds


def _methods(fold: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and decoding of each method in a fold."""
    return [(row["name"], row["decoding"]) for row in fold["rows"]]


def fold(
    linear: Sequence[Example], tuned: Sequence[Example], left_out: int, report: Callable[[str, int], None]
) -> dict[str, Any]:
    """Apply all methods, trained on the other pieces.

    Returns the true onsets of the piece that is left out and, for each method, its onsets in this piece and its errors
    in this piece (``test``) and in the others (``train``).
    """
    truths = [example.recording.truth for example in linear]
    rows = []
    for result in chain(
        baselines(linear, left_out),
        with_features_of_paper(linear, left_out),
        with_harmonic_features(tuned, left_out),
        with_synctoolbox(linear, left_out),
    ):
        report(f"{linear[left_out].recording.name}: {result.name}, {result.decoding}", 1)
        pairs = zip(truths, result.onsets, strict=True)
        errors = [None if onsets is None else measure(truth, onsets) for truth, onsets in pairs]
        test, others = errors.pop(left_out), [error for error in errors if error is not None]
        train = {name: float(np.mean([error[name] for error in others])) for name in others[0]} if others else None
        onsets = np.asarray(result.onsets[left_out]).tolist()
        rows.append({"name": result.name, "decoding": result.decoding, "train": train, "test": test, "onsets": onsets})
    return {"truth": truths[left_out].tolist(), "rows": rows}


def maps(fold: dict[str, Any]) -> dict[str, Onsets]:
    """Onsets to draw for a fold: by hard DTW, before and after end-to-end training."""
    return {
        row["name"]: np.array(row["onsets"])
        for row in fold["rows"]
        if row["decoding"] == HARD and row["name"].endswith((": pretrained", ": end-to-end, negentropy"))
    }


# --- the page


def markdown(folds: Sequence[dict[str, Any]]) -> str:
    """Table of all methods. ± is the standard deviation over folds."""
    lines = [
        "| | decoded by | train, s | test, s | paper: train | test | median, s | within 50 ms | within 100 ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rows in zip(*(fold["rows"] for fold in folds), strict=True):
        name, decoding = rows[0]["name"], rows[0]["decoding"]
        cells = [name, decoding, _mean([row["train"] for row in rows]), _mean([row["test"] for row in rows])]
        cells += PAPER.get((name, decoding), ("", ""))
        cells.append(f"{np.mean([row['test']['median'] for row in rows]):.3f}")
        cells += [f"{100 * np.mean([row['test'][m] for row in rows]):.0f} %" for m in ("within_50", "within_100")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(errors: Sequence[dict[str, float] | None]) -> str:
    """Mean and standard deviation of the seconds, with three digits if they are small, or a dash without values."""
    values = [error["seconds"] for error in errors if error is not None]
    if not values:
        return "–"
    digits = 2 if np.mean(values) > 0.15 else 3
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
