"""Find the time in a recording at which each note of a score is played."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bellmax_apps.audio.features as features
from bellmax.regularizers import Negentropy
from bellmax.structures.dtw import DTW
from bellmax_apps.audio.model import Both, Chroma, Columns, Harmonic, Model, onset_frames
from bellmax_apps.audio.score import Score
from bellmax_apps.files import read_json, reading

CELLS = 6_000_000
"""Maximum frames × columns of one alignment. Above that, a coarse alignment comes first, then its parts."""
COARSER = 8
GROUP, MARGIN = 80, 12  # events of a part, and of the overlap on both sides
NEAR = 2
"""Tolerance of the confidence, in frames."""
ROUGH = 2000
"""Maximum frames of the alignments that compare transpositions."""
MODELS = {"both": Both, "harmonic": Harmonic, "chroma": Chroma}
"""By the name of their features."""


@dataclass(frozen=True)
class Alignment:
    """Events of a score in a recording.

    Args:
        frames: (M,), the first frame of each event.
        confidence: (M,), the share of the soft alignment within 2 frames of it.
        soft: (N, M), the probability of each event in each frame.

    """

    frames: NDArray[np.int64]
    confidence: NDArray[np.float64]
    soft: NDArray[np.float32]

    @property
    def times(self) -> NDArray[np.float64]:
        """(M,) seconds."""
        return np.asarray(features.seconds(self.frames))


def trained(path: Path | str | None = None) -> Tensor:
    """Weights for :class:`Harmonic`: from a file that 'bellmax audio train' wrote, or those learnt on Bach10."""
    with resources.as_file(resources.files("bellmax_apps.audio") / "bach10.json") as own:
        path = Path(path or own)
        given = read_json(path)
        with reading(path, "weights of 'bellmax audio train'"):
            weights = torch.tensor(given["weights"], dtype=torch.float64)
    if weights.shape != (Harmonic().size(),) or not weights.isfinite().all():
        raise ValueError(f"{path} must hold {Harmonic().size()} finite weights, got {weights.numel()} numbers")
    return weights


@dataclass(frozen=True)
class Pitch:
    """How a recording's pitch differs from that of its score: whole semitones, and the rest of its tuning.

    >>> str(Pitch(-3, 0.14)), str(Pitch(1, 0.0)), str(Pitch(0, -0.2)), str(Pitch(0, 0.04))
    ('3 semitones below the score, 14 cents sharp', '1 semitone above the score', '20 cents flat', '')
    """

    semitones: int
    tuned: float

    def __str__(self) -> str:
        told = []
        if self.semitones:
            plural = "" if abs(self.semitones) == 1 else "s"
            told.append(
                f"{abs(self.semitones)} semitone{plural} {'above' if self.semitones > 0 else 'below'} the score"
            )
        if abs(self.tuned) >= 0.1:
            told.append(f"{100 * abs(self.tuned):.0f} cents {'sharp' if self.tuned > 0 else 'flat'}")
        return ", ".join(told)

    @classmethod
    def of(cls, audio: NDArray[np.float32], score: Score) -> Pitch:
        """Estimate the tuning, then compare the twelve transpositions of the score by rough alignments of their tones.

        Octaves are not told apart: 7 semitones above are 5 below. A transposition that costs hardly less than the score
        as it is written is not taken.
        """
        tuned = features.tuning(audio)
        heard = features.chroma(audio, tuned).float()
        most = max(1, min(ROUGH, CELLS // (2 * len(score) + 2)))
        heard = torch.nn.functional.normalize(_coarser(heard, max(COARSER, -(-len(heard) // most))))
        tones, silence = Chroma().columns(score, len(heard)).keys.float().split((12, 1))
        costs = {}
        for by in range(-6, 6):
            keys = torch.cat((tones.roll(by, 0), silence))
            costs[by] = float(DTW(1 - heard @ keys, omega="hard").value)
        best = min(costs, key=lambda by: costs[by])
        return cls(best if costs[best] < 0.97 * costs[0] else 0, tuned)


def align_recording(
    audio: NDArray[np.float32],
    score: Score,
    model: Harmonic | None = None,
    weights: Tensor | None = None,
    *,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[Alignment, Pitch]:
    """Align a recording, whatever its pitch, with a score. ``told`` gets what is noticed on the way."""
    model = model or Both()
    _check_durations(1 + len(audio) // features.HOP, score)
    pitch = Pitch.of(audio, score)
    if str(pitch):
        told(f"the recording is {pitch}")
    heard = model.features(audio, pitch.tuned)
    return align(heard, score.transposed(pitch.semitones), model, weights, told=told), pitch


def align(
    heard: Tensor,
    score: Score,
    model: Harmonic | None = None,
    weights: Tensor | None = None,
    *,
    told: Callable[[str], None] = lambda line: None,
) -> Alignment:
    """Align the model's features of a recording with a score. ``told`` gets a message if it is done in parts.

    Without ``weights`` they are those learnt on Bach10; :class:`Chroma` needs none.
    """
    model = model or Both()
    weights = trained() if weights is None else weights
    if model.size() and weights.shape != (model.size(),):
        raise ValueError(f"weights must have shape ({model.size()},), got {tuple(weights.shape)}")
    _check_durations(len(heard), score)
    columns = model.columns(score, len(heard))
    if len(heard) * columns.keys.shape[1] <= CELLS:
        return _align(model, weights, heard, columns)
    told(
        f"{len(heard)} frames by {len(score)} events are many: a coarse alignment first, "
        f"then {-(-len(score) // GROUP)} parts of it"
    )
    return _in_parts(model, weights, heard, score)


def _check_durations(frames: int, score: Score) -> None:
    recorded, written = float(features.seconds(frames)), score.end - score.onsets[0]
    if not 1 / 5 <= recorded / max(written, 1e-9) <= 5:
        raise ValueError(
            f"the recording lasts {recorded:.1f} s and the score {written:.1f} s: one is more than 5 times the other"
        )


def _align(model: Model, weights: Tensor, heard: Tensor, columns: Columns) -> Alignment:
    theta = model.costs(weights, heard, columns.keys)
    begins = onset_frames(theta, columns)
    soft = DTW(theta, omega=Negentropy()).expected_path
    onset = soft[:, columns.onsets]
    near = (torch.arange(len(heard)).unsqueeze(-1) - begins).abs() <= NEAR
    confidence = (onset * near).sum(0) / onset.sum(0)
    # Silence at both ends belongs to no event.
    event = torch.bucketize(torch.arange(columns.keys.shape[1] - 1), columns.onsets, right=True)
    by_event = torch.zeros(len(heard), len(columns.onsets) + 1, dtype=soft.dtype).index_add_(1, event, soft[:, :-1])
    probable = by_event[:, 1:] / soft.sum(1, keepdim=True)
    return Alignment(begins.numpy(), confidence.numpy(), probable.float().numpy())


def _in_parts(model: Harmonic, weights: Tensor, heard: Tensor, score: Score) -> Alignment:
    rough = _coarser(heard, COARSER)
    columns = model.columns(score, len(rough))
    coarse = onset_frames(model.costs(weights, rough, columns.keys).float(), columns) * COARSER
    frames = np.zeros(len(score), np.int64)
    confidence = np.zeros(len(score))
    soft = np.zeros((len(heard), len(score)), np.float32)
    for start in range(0, len(score), GROUP):
        stop = min(start + GROUP, len(score))
        first, last = max(0, start - MARGIN), min(len(score), stop + MARGIN)
        begin = 0 if first == 0 else max(0, int(coarse[first]) - COARSER)
        end = len(heard) if last == len(score) else max(int(coarse[last]), begin + 2 * (last - first) + 2)
        part = heard[begin:end]
        found = _align(model, weights, part, model.columns(_part(score, first, last), len(part)))
        own = slice(start - first, stop - first)
        frames[start:stop] = begin + found.frames[own]
        confidence[start:stop] = found.confidence[own]
        soft[begin : begin + len(part), start:stop] = found.soft[:, own]
    return Alignment(np.maximum.accumulate(frames), confidence, soft)


def _coarser(heard: Tensor, times: int) -> Tensor:
    """Means of so many frames; those left over at the end are dropped, unless they are all."""
    times = min(times, len(heard))
    means: Tensor = heard[: len(heard) // times * times].unflatten(0, (-1, times)).mean(1)
    return means


def _part(score: Score, first: int, last: int) -> Score:
    """A range of events of a score; the last one lasts until the next begins."""
    end = score.onsets[last] if last < len(score) else score.end
    onsets = score.onsets[first:last]
    notes = ((onsets[0], float(end), 60),)  # only their end is used by columns
    return replace(
        score, notes=notes, onsets=onsets, sounding=score.sounding[first:last], beginning=score.beginning[first:last]
    )


# --- output


def rows(found: Alignment, score: Score) -> Iterator[dict[str, str]]:
    """One row per event."""
    import pretty_midi

    for time, heard, sure, pitches in zip(score.onsets, found.times, found.confidence, score.beginning, strict=True):
        yield {
            "score_time": f"{time:.3f}",
            "audio_time": f"{heard:.3f}",
            "confidence": f"{sure:.3f}",
            "notes": " ".join(pretty_midi.note_number_to_name(pitch) for pitch in sorted(pitches)),
        }


def write_csv(path: Path | str, found: Alignment, score: Score) -> None:
    """Write, for each event, its seconds in score and recording, a confidence from 0 to 1, and the notes that begin."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["score_time", "audio_time", "confidence", "notes"])
        writer.writeheader()
        writer.writerows(rows(found, score))


def model_named(name: str) -> Harmonic:
    """The model for "both", "harmonic" or "chroma" features."""
    if name not in MODELS:
        raise ValueError(f"features must be one of {', '.join(map(repr, MODELS))}, got {name!r}")
    return MODELS[name]()
