"""The leave-one-out experiment of section 5.3 of the paper: train on all pieces but one, align that one."""

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
    batch,
    cost_of_classes,
    learn,
    onset_frames,
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
"""Table 2 of the paper, train and test. Its "Random θ" is beside a constant θ, which it seems to be."""


@dataclass(frozen=True)
class Recording:
    """A piece of the dataset."""

    name: str
    audio: NDArray[np.float32]
    score: Score
    truth: NDArray[np.float64]


def read(data: Path | str) -> Iterator[Recording]:
    """Read a folder laid out as Bach10: one folder per piece, with a .wav, a .mid and a .txt of the same name."""
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
    """The recording, the score and the true onsets of a piece."""
    return [folder / f"{folder.name}{ending}" for ending in (".wav", ".mid", ".txt")]


@dataclass(frozen=True)
class Heard:
    """A recording and its features."""

    recording: Recording
    heard: Tensor

    def piece(self, model: Model) -> Piece:
        columns = model.columns(self.recording.score, len(self.heard))
        return Piece(self.heard, columns, self.recording.truth)


# --- measures

Onsets = NDArray[np.float64]


def measure(truth: Onsets, found: Onsets) -> dict[str, float]:
    """Errors of onsets (M,), in seconds.

    ``seconds``: the mean over the columns of the score, which are a silence that begins at 0, and the events;
    ``median``: that of the events; ``within_50`` and ``within_100``: the shares of events within 50 and 100 ms.

    >>> measure(np.array([1.0]), np.array([1.0625]))
    {'seconds': 0.03125, 'median': 0.0625, 'within_50': 0.0, 'within_100': 1.0}
    """
    error = np.abs(found - truth)
    return {
        "seconds": float(error.sum() / (len(error) + 1)),
        "median": float(np.median(error)),
        "within_50": float((error <= 0.05).mean()),
        "within_100": float((error <= 0.1).mean()),
    }


# --- alignments


def by_costs(theta: Tensor, piece: Piece) -> Onsets:
    """The onsets (M,) in seconds, by the alignment of least cost."""
    return np.asarray(features.seconds(onset_frames(theta, piece.columns).numpy()))


def by_overlap(theta: Tensor, piece: Piece, omega: Regularizer = NEGENTROPY) -> Onsets:
    """The onsets (M,) by the alignment whose cells have the largest sum in ∇DTW_Ω(θ)."""
    return by_costs(-DTW(theta, omega=omega).expected_path, piece)


def straight_line(piece: Piece) -> Onsets:
    """The onsets (M,) if all columns last equally long."""
    columns = len(piece.truth) + 1
    return np.asarray(features.seconds(np.arange(1.0, columns) * (piece.frames / columns)))


def constant_costs(piece: Piece) -> Onsets:
    """The onsets (M,) by a constant θ, where ties go to the frame before in the same column, from the end.

    All alignments that pass a frame only once cost the same. In this one each column but the last has one frame.
    """
    return np.asarray(features.seconds(np.arange(1, len(piece.truth) + 1)))


# --- methods


class Found(NamedTuple):
    """The onsets that a method found in each piece; None where it was not used."""

    name: str
    decoding: str
    onsets: Sequence[Onsets | None]


def learnt(
    model: Model, pieces: Sequence[Heard], *, iterations: int = 40, from_zeros: int = 0
) -> Iterator[tuple[str, Tensor, Regularizer]]:
    """Weights of the pretrained classifier, then those trained end to end, by name, with their Ω.

    End-to-end training starts from the pretrained weights and, with ``from_zeros`` iterations, also from 0.
    """
    of = batch([heard.piece(model) for heard in pieces])
    zeros = torch.zeros(model.size(), dtype=torch.float64)
    first = learn(model, partial(cost_of_classes, model, of=of), zeros)
    yield "pretrained", first, NEGENTROPY
    for name, omega in OMEGAS.items():
        loss = partial(area, model, of=of, omega=omega)
        yield f"end-to-end, {name}", learn(model, loss, first, iterations=iterations), omega
        if from_zeros:
            yield f"end-to-end from zeros, {name}", learn(model, loss, zeros, iterations=from_zeros), omega


def baselines(every: Sequence[Heard], seed: int) -> Iterator[Found]:
    """Methods that learn nothing."""
    pieces = [heard.piece(Linear()) for heard in every]
    yield Found("straight line", "–", [straight_line(piece) for piece in pieces])
    yield Found("constant θ", HARD, [constant_costs(piece) for piece in pieces])
    yield Found("constant θ", OVERLAP, [by_overlap(torch.zeros(piece.shape).double(), piece) for piece in pieces])
    generator = torch.Generator().manual_seed(seed)
    costs = [torch.randn(piece.shape, generator=generator).double() for piece in pieces]
    yield Found("random θ", HARD, list(map(by_costs, costs, pieces)))
    yield Found("random θ", OVERLAP, list(map(by_overlap, costs, pieces)))


def with_features_of_paper(every: Sequence[Heard], left_out: int) -> Iterator[Found]:
    """The classifier of the paper, trained on the other pieces."""
    others = _without(every, left_out)
    model = Linear(min(sounding) for heard in others for sounding in heard.recording.score.sounding)
    pieces = [heard.piece(model) for heard in every]
    for name, weights, omega in learnt(model, others, iterations=300, from_zeros=100):
        costs = [model.costs(weights, piece.heard, piece.columns.keys) for piece in pieces]
        yield Found(f"the paper's features: {name}", HARD, list(map(by_costs, costs, pieces)))
        soft = [by_overlap(theta, piece, omega) for theta, piece in zip(costs, pieces, strict=True)]
        yield Found(f"the paper's features: {name}", OVERLAP, soft)


def with_harmonic_features(every: Sequence[Heard], left_out: int) -> Iterator[Found]:
    """The harmonic model, trained with few columns, and evaluated with columns that follow the score's tempo.

    ``every`` has the features of :class:`Both`, which is evaluated too, with the weights of the harmonic model.
    """
    harmonic, tones = ([Heard(heard.recording, Both.split(heard.heard)[side]) for heard in every] for side in (0, 1))
    for name, weights, _ in learnt(Harmonic(share=0), _without(harmonic, left_out)):
        yield Found(f"harmonic features: {name}", HARD, _by_model(Harmonic(), weights, harmonic))
    yield Found("chroma features", HARD, _by_model(Chroma(), weights, tones))
    yield Found(f"harmonic and chroma features: {name}", HARD, _by_model(Both(), weights, every))


def _by_model(model: Model, weights: Tensor, every: Sequence[Heard]) -> list[Onsets]:
    pieces = (heard.piece(model) for heard in every)
    return [by_costs(model.costs(weights, piece.heard, piece.columns.keys), piece) for piece in pieces]


def _without(every: Sequence[Heard], left_out: int) -> list[Heard]:
    return [heard for number, heard in enumerate(every) if number != left_out]


def with_synctoolbox(every: Sequence[Heard], left_out: int) -> Iterator[Found]:
    """A peer that is not trained, if it is installed."""
    onsets = by_synctoolbox(every[left_out].recording)
    if onsets is not None:
        yield Found("synctoolbox", "–", [onsets if n == left_out else None for n in range(len(every))])


def by_synctoolbox(recording: Recording) -> NDArray[np.float64] | None:
    """The onsets (M,) by tuned chroma, onset features and multi-scale DTW of synctoolbox, where it is installed."""
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
        heard = {"f_audio": recording.audio, "Fs": features.RATE}
        heard["tuning_offset"] = estimate_tuning(recording.audio, features.RATE)
        pitches = audio_to_pitch_features(**heard, feature_rate=rate)
        tones = [quantize_chroma(pitch_to_chroma(p)) for p in (pitches, df_to_pitch_features(notes, feature_rate=rate))]
        peaks = audio_to_pitch_onset_features(**heard), df_to_pitch_onset_features(notes)
        onsets = [
            pitch_onset_features_to_DLNCO(own, feature_sequence_length=tone.shape[1], feature_rate=rate)
            for own, tone in zip(peaks, tones, strict=True)
        ]
        path = sync_via_mrmsdtw(
            *tones, *onsets, input_feature_rate=rate, step_weights=np.array([1.5, 1.5, 2.0]), threshold_rec=10**6
        )
    audio, score = make_path_strictly_monotonic(path) / rate
    return np.asarray(np.interp(recording.score.onsets, score, audio))


# --- the experiment

STEPS = 22
"""Number of messages per piece: one row of the table each, and one for listening."""


def experiment(data: Path | str, output: Path | str, told: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """All folds of all methods. ``told`` gets a message and the number of steps that are done with it.

    A finished fold is written to ``output``, and is not computed again.
    """
    data, output = Path(data), Path(output)
    recordings = list(read(data))
    if len(recordings) < 2:
        raise ValueError(f"{data} must hold at least two pieces, got one")
    paths = [output / f"{recording.name}.json" for recording in recordings]
    pieces = fingerprint(file for recording in recordings for file in files_of(data / recording.name))
    _same_folds([path for path in paths if path.exists()], pieces)
    output.mkdir(parents=True, exist_ok=True)
    linear, tuned = [], []
    if not all(path.exists() for path in paths):
        for recording in recordings:
            linear.append(Heard(recording, features.of_paper(recording.audio)))
            tuned.append(Heard(recording, Both().features(recording.audio, features.tuning(recording.audio))))
            told(f"listening to {recording.name}", 1)
    for number, path in enumerate(paths):
        if path.exists():
            told(f"{path} is there already", STEPS - 1)
        else:
            write_json(path, {"pieces": pieces, **fold(linear, tuned, number, told)})
    return _same_folds(paths, pieces)


def _same_folds(paths: Sequence[Path], pieces: str) -> list[dict[str, Any]]:
    """The folds in these files, if all are of the same pieces and methods."""
    folds: list[dict[str, Any]] = []
    for path in paths:
        folds.append(read_json(path))
        with reading(path, "a piece of this experiment (delete it, and run the command again)"):
            if folds[-1]["pieces"] != pieces:
                raise ValueError("it is of other recordings than those of the data")
            if _methods(folds[-1]) != _methods(folds[0]):
                raise ValueError(f"it has other methods than {paths[0]}")
    return folds


def _methods(of: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["name"], row["decoding"]) for row in of["rows"]]


def fold(
    linear: Sequence[Heard], tuned: Sequence[Heard], left_out: int, told: Callable[[str, int], None]
) -> dict[str, Any]:
    """The true onsets of a piece, and a row for each method: its onsets there, and its measures there and elsewhere."""
    truths = [heard.recording.truth for heard in linear]
    rows = []
    for found in chain(
        baselines(linear, left_out),
        with_features_of_paper(linear, left_out),
        with_harmonic_features(tuned, left_out),
        with_synctoolbox(linear, left_out),
    ):
        told(f"{linear[left_out].recording.name}: {found.name}, {found.decoding}", 1)
        both = zip(truths, found.onsets, strict=True)
        measured = [None if own is None else measure(truth, own) for truth, own in both]
        test, others = measured.pop(left_out), [own for own in measured if own is not None]
        train = {name: float(np.mean([own[name] for own in others])) for name in others[0]} if others else None
        onsets = np.asarray(found.onsets[left_out]).tolist()
        rows.append({"name": found.name, "decoding": found.decoding, "train": train, "test": test, "onsets": onsets})
    return {"truth": truths[left_out].tolist(), "rows": rows}


def maps(of: dict[str, Any]) -> dict[str, Onsets]:
    """The onsets of a fold to draw: by hard DTW, before and after end-to-end training."""
    return {
        row["name"]: np.array(row["onsets"])
        for row in of["rows"]
        if row["decoding"] == HARD and row["name"].endswith((": pretrained", ": end-to-end, negentropy"))
    }


# --- the page


def markdown(folds: Sequence[dict[str, Any]]) -> str:
    """A table; ± is the standard deviation over folds."""
    lines = [
        "| | decoded by | train, s | test, s | paper: train | test | median, s | within 50 ms | within 100 ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rows in zip(*(of["rows"] for of in folds), strict=True):
        name, decoding = rows[0]["name"], rows[0]["decoding"]
        cells = [name, decoding, _mean([row["train"] for row in rows]), _mean([row["test"] for row in rows])]
        cells += PAPER.get((name, decoding), ("", ""))
        cells.append(f"{np.mean([row['test']['median'] for row in rows]):.3f}")
        cells += [f"{100 * np.mean([row['test'][m] for row in rows]):.0f} %" for m in ("within_50", "within_100")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(measured: Sequence[dict[str, float] | None]) -> str:
    values = [own["seconds"] for own in measured if own is not None]
    if not values:
        return "–"
    digits = 2 if np.mean(values) > 0.15 else 3
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
