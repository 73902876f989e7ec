"""The leave-one-out experiment of section 5.3 of the paper: train on all pieces but one, align that one."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bellmax.apps.audio.features as features
from bellmax.apps.audio.model import Harmonic, Linear, Model, Piece, area, batch, cost_of_classes, learn, onset_frames
from bellmax.apps.audio.score import Score, read_midi, read_truth
from bellmax.regularizers import Negentropy, Regularizer, SquaredL2

# Ω of each training stage: a smooth one first, for roughly right alignments, then one close to the hard max, which is
# used for evaluation.
LINEAR: dict[str, tuple[Regularizer, ...]] = {
    "negentropy": (Negentropy(1.0), Negentropy(0.2)),
    "l2": (SquaredL2(3.0), SquaredL2(0.6)),
}
HARMONIC: dict[str, tuple[Regularizer, ...]] = {"negentropy": (Negentropy(),), "l2": (SquaredL2(),)}


@dataclass(frozen=True)
class Recording:
    """A piece of the dataset."""

    name: str
    audio: NDArray[np.float32]
    score: Score
    truth: NDArray[np.float64]


def read(data: Path) -> Iterator[Recording]:
    """Read a folder laid out as Bach10: one folder per piece, with a .wav, a .mid and a .txt of the same name."""
    folders = sorted(path for path in data.iterdir() if path.is_dir()) if data.is_dir() else []
    if not folders:
        raise ValueError(f"{data} must hold a folder for each piece, got none")
    for folder in folders:
        paths = [folder / f"{folder.name}{ending}" for ending in (".wav", ".mid", ".txt")]
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise ValueError(f"{missing[0]} does not exist")
        score = read_midi(paths[1])
        yield Recording(folder.name, features.load(paths[0]), score, read_truth(paths[2], score))


@dataclass(frozen=True)
class Heard:
    """A recording and its features."""

    recording: Recording
    heard: Tensor

    def piece(self, model: Model) -> Piece:
        columns = model.columns(self.recording.score, len(self.heard))
        return Piece(self.heard, columns, self.recording.truth)


# --- measures

MEASURES = "events", "frames", "ms", "within_50", "within_100"


def measure(piece: Piece, begins: NDArray[np.float64]) -> dict[str, float]:
    """Errors of onsets (M,), in seconds, against the truth.

    ``events``: the deviation of the paper, the mean error over frames, in events; ``frames`` and ``ms``: the mean error
    of the onsets; ``within_50`` and ``within_100``: the shares of onsets within 50 and 100 ms.
    """
    time = features.seconds(np.arange(piece.frames))
    at, true = (np.searchsorted(onsets, time, side="right") for onsets in (begins, piece.truth))
    error = 1000 * np.abs(begins - piece.truth)
    return {
        "events": float(np.abs(at - true).mean()),
        "frames": float(error.mean() / 1000 * features.RATE / features.HOP),
        "ms": float(error.mean()),
        "within_50": float((error <= 50).mean()),
        "within_100": float((error <= 100).mean()),
    }


def aligned(model: Model, weights: Tensor, piece: Piece) -> NDArray[np.float64]:
    """The onsets (M,) in seconds, by the alignment of least cost."""
    return by_costs(model.costs(weights, piece.heard, piece.columns.keys), piece)


def by_costs(theta: Tensor, piece: Piece) -> NDArray[np.float64]:
    return np.asarray(features.seconds(onset_frames(theta, piece.columns).numpy()))


# --- the experiment


@dataclass(frozen=True)
class Row:
    """A method, and its measures by fold: the mean over the training pieces, and the piece left out."""

    name: str
    train: list[dict[str, float]]
    test: list[dict[str, float]]


def learnt(model: Model, pieces: Sequence[Heard]) -> Iterator[tuple[str, Tensor]]:
    """Weights of the pretrained classifier, then those trained end to end from there under each Ω."""
    of = batch([heard.piece(model) for heard in pieces])
    begin = torch.zeros(model.size(), dtype=torch.float64)
    first = learn(model, lambda weights: cost_of_classes(model, weights, of), begin)
    yield "pretrained", first
    stages, iterations = (LINEAR, 70) if isinstance(model, Linear) else (HARMONIC, 40)
    for name, omegas in stages.items():
        weights = first
        for omega in omegas:
            loss = partial(area, model, of=of, omega=omega)
            weights = learn(model, loss, weights, iterations=iterations)
        yield f"end-to-end, {name}", weights


def highest_pitches(pieces: Sequence[Heard]) -> set[int]:
    return {max(sounding) for heard in pieces for sounding in heard.recording.score.sounding}


def experiment(data: Path, told: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    """All folds of all methods, and the data for a figure of the first fold. ``told`` gets a message per step."""
    recordings = []
    heard_by: tuple[list[Heard], list[Heard]] = [], []
    for recording in read(data):
        told(f"listening to {recording.name}")
        recordings.append(recording)
        for every, listen in zip(heard_by, (features.of_paper, features.harmonic), strict=True):
            every.append(Heard(recording, listen(recording.audio)))
    found: dict[str, Row] = {}
    figure: dict[str, Any] = {}
    for fold, left_out in enumerate(recordings):
        for title, every in zip(("the paper's features", "harmonic features"), heard_by, strict=True):
            others = [heard for heard in every if heard.recording is not left_out]
            # The harmonic model is trained with few columns, and evaluated with columns that follow the score's tempo.
            is_harmonic = every is heard_by[1]
            model: Model = Harmonic(share=0) if is_harmonic else Linear(highest_pitches(others))
            using: Model = Harmonic() if is_harmonic else model
            pieces = [heard.piece(using) for heard in every]
            for name, weights in learnt(model, others):
                told(f"{left_out.name}: {title}, {name}")
                onsets = [aligned(using, weights, piece) for piece in pieces]
                _note(found, f"{title}: {name}", pieces, onsets, fold)
                if fold == 0:
                    figure[f"{title}: {name}"] = onsets[0]
            if not is_harmonic:
                torch.manual_seed(fold)
                onsets = [by_costs(torch.randn(p.frames, p.columns.keys.shape[1]).double(), p) for p in pieces]
                _note(found, "random θ", pieces, onsets, fold)
        told(f"{left_out.name}: synctoolbox")
        peer = by_synctoolbox(left_out)
        if peer is not None:
            piece = heard_by[1][fold].piece(Harmonic(share=0))
            found.setdefault("synctoolbox", Row("synctoolbox", [], [])).test.append(measure(piece, peer))
    figure["truth"] = recordings[0].truth
    return list(found.values()), figure


def _note(
    found: dict[str, Row], name: str, pieces: Sequence[Piece], onsets: Sequence[NDArray[np.float64]], fold: int
) -> None:
    row = found.setdefault(name, Row(name, [], []))
    measured = [measure(piece, own) for piece, own in zip(pieces, onsets, strict=True)]
    row.test.append(measured.pop(fold))
    row.train.append({name: float(np.mean([m[name] for m in measured])) for name in MEASURES})


def by_synctoolbox(recording: Recording) -> NDArray[np.float64] | None:
    """The onsets (M,) by chroma, onset features and multi-scale DTW of synctoolbox; None where it is not installed."""
    try:
        import pandas
        from synctoolbox.dtw.mrmsdtw import sync_via_mrmsdtw
        from synctoolbox.dtw.utils import make_path_strictly_monotonic
        from synctoolbox.feature.chroma import pitch_to_chroma, quantize_chroma
        from synctoolbox.feature.csv_tools import df_to_pitch_features, df_to_pitch_onset_features
        from synctoolbox.feature.dlnco import pitch_onset_features_to_DLNCO
        from synctoolbox.feature.pitch import audio_to_pitch_features
        from synctoolbox.feature.pitch_onset import audio_to_pitch_onset_features
    except ImportError:
        return None
    rate = 50
    notes = pandas.DataFrame(
        [(start, end - start, pitch, 0.5, "") for start, end, pitch in recording.score.notes],
        columns=["start", "duration", "pitch", "velocity", "instrument"],
    )
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pitches = audio_to_pitch_features(recording.audio, Fs=features.RATE, feature_rate=rate)
        tones = [quantize_chroma(pitch_to_chroma(p)) for p in (pitches, df_to_pitch_features(notes, feature_rate=rate))]
        peaks = audio_to_pitch_onset_features(recording.audio, Fs=features.RATE), df_to_pitch_onset_features(notes)
        onsets = [
            pitch_onset_features_to_DLNCO(own, feature_sequence_length=tone.shape[1], feature_rate=rate)
            for own, tone in zip(peaks, tones, strict=True)
        ]
        path = sync_via_mrmsdtw(
            *tones, *onsets, input_feature_rate=rate, step_weights=np.array([1.5, 1.5, 2.0]), threshold_rec=10**6
        )
    audio, score = make_path_strictly_monotonic(path) / rate
    return np.asarray(np.interp(recording.score.onsets, score, audio))


# --- the page


def markdown(rows: Sequence[Row]) -> str:
    """A table; ± is the standard deviation over folds."""
    lines = [
        "| | events, train | events, test | frames, test | ms, test | within 50 ms | within 100 ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [_mean(row.train, "events", 2), _mean(row.test, "events", 2), _mean(row.test, "frames", 1)]
        cells += [_mean(row.test, "ms", 0)]
        cells += [f"{100 * np.mean([m[name] for m in row.test]):.0f} %" for name in ("within_50", "within_100")]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(measured: Sequence[dict[str, float]], name: str, digits: int) -> str:
    values = [m[name] for m in measured]
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}" if values else "–"
