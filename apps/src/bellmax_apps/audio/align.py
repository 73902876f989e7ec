"""Alignment of a recording with a score: the pitch of the recording, the time of each note, and a CSV file of times."""

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
"""Maximum frames × columns of one alignment. Longer recordings are aligned coarsely first, then in sections."""
COARSER = 8
"""Factor between the frames of a coarse alignment and the frames of the recording."""
GROUP, MARGIN = 80, 12  # events of a section, and of its overlap with the sections before and after
NEAR = 2
"""Tolerance of the confidence, in frames."""
ROUGH = 2000
"""Maximum frames of the alignments that compare transpositions."""
MODELS = {"both": Both, "harmonic": Harmonic, "chroma": Chroma}
"""Models by the names of their features."""


@dataclass(frozen=True)
class Alignment:
    """The events of a score in a recording.

    Args:
        frames: First frame of each event, shape (M,).
        confidence: Share of the soft alignment within 2 frames of this frame, shape (M,).
        soft: Probability of each event in each frame, shape (N, M).

    """

    frames: NDArray[np.int64]
    confidence: NDArray[np.float64]
    soft: NDArray[np.float32]

    @property
    def times(self) -> NDArray[np.float64]:
        """Time of each event in seconds, shape (M,)."""
        return np.asarray(features.seconds(self.frames))


def trained(path: Path | str | None = None) -> Tensor:
    """Weights of :class:`Harmonic` from a file of 'bellmax audio train'. Default: the weights learned on Bach10."""
    with resources.as_file(resources.files("bellmax_apps.audio") / "bach10.json") as bach10:
        path = Path(path or bach10)
        data = read_json(path)
        with reading(path, "weights of 'bellmax audio train'"):
            weights = torch.tensor(data["weights"], dtype=torch.float64)
    if weights.shape != (Harmonic().size(),) or not weights.isfinite().all():
        raise ValueError(f"{path} must hold {Harmonic().size()} finite weights, got {weights.numel()} numbers")
    return weights


@dataclass(frozen=True)
class Pitch:
    """Difference between the pitch of a recording and of its score: whole semitones, and tuning.

    As text, it completes the sentence "The recording is …".

    >>> str(Pitch(-3, 0.14)), str(Pitch(1, 0.0)), str(Pitch(0, -0.2)), str(Pitch(0, 0.04))
    ('3 semitones below the score, 14 cents sharp', '1 semitone above the score', '20 cents flat', '')
    """

    semitones: int
    tuned: float

    def __str__(self) -> str:
        differences = []
        if self.semitones:
            plural = "" if abs(self.semitones) == 1 else "s"
            differences.append(
                f"{abs(self.semitones)} semitone{plural} {'above' if self.semitones > 0 else 'below'} the score"
            )
        if abs(self.tuned) >= 0.1:
            differences.append(f"{100 * abs(self.tuned):.0f} cents {'sharp' if self.tuned > 0 else 'flat'}")
        return ", ".join(differences)

    @classmethod
    def of(cls, audio: NDArray[np.float32], score: Score) -> Pitch:
        """Estimate the tuning, then compare the twelve transpositions of the score by coarse alignments of their tones.

        Tones have no octave, so that 7 semitones above the score are reported as 5 below. A transposition must cost 3 %
        less than the untransposed score.
        """
        tuned = features.tuning(audio)
        sound = features.chroma(audio, tuned).float()
        limit = max(1, min(ROUGH, CELLS // (2 * len(score) + 2)))
        sound = torch.nn.functional.normalize(_coarser(sound, max(COARSER, -(-len(sound) // limit))))
        tones, silence = Chroma().columns(score, len(sound)).keys.float().split((12, 1))
        costs = {}
        for by in range(-6, 6):
            keys = torch.cat((tones.roll(by, 0), silence))
            costs[by] = float(DTW(1 - sound @ keys, omega="hard").value)
        best = min(costs, key=lambda by: costs[by])
        return cls(best if costs[best] < 0.97 * costs[0] else 0, tuned)


def align_recording(
    audio: NDArray[np.float32],
    score: Score,
    model: Harmonic | None = None,
    weights: Tensor | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Alignment, Pitch]:
    """Align a recording with a score, which is first transposed to the pitch of the recording.

    Args:
        audio: Samples of the recording, shape (samples,).
        score: The score.
        model: Model of the costs, default :class:`Both`.
        weights: Weights of the model, default the weights learned on Bach10.
        report: Function that receives messages, such as the pitch of the recording.

    """
    model = model or Both()
    _check_durations(1 + len(audio) // features.HOP, score)
    pitch = Pitch.of(audio, score)
    if str(pitch):
        report(f"the recording is {pitch}")
    sound = model.features(audio, pitch.tuned)
    return align(sound, score.transposed(pitch.semitones), model, weights, report=report), pitch


def align(
    sound: Tensor,
    score: Score,
    model: Harmonic | None = None,
    weights: Tensor | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> Alignment:
    """Align features of a recording with a score.

    Args:
        sound: Features of the model, shape (frames, ...).
        score: The score, at the pitch of the recording.
        model: Model of the costs, default :class:`Both`.
        weights: Weights of the model, default the weights learned on Bach10.
        report: Function that receives a message if a long recording is aligned in sections.

    """
    model = model or Both()
    weights = trained() if weights is None else weights
    if model.size() and weights.shape != (model.size(),):
        raise ValueError(f"weights must have shape ({model.size()},), got {tuple(weights.shape)}")
    _check_durations(len(sound), score)
    columns = model.columns(score, len(sound))
    if len(sound) * columns.keys.shape[1] <= CELLS:
        return _align(model, weights, sound, columns)
    report(
        f"{len(sound)} frames by {len(score)} events are many: a coarse alignment first, "
        f"then {-(-len(score) // GROUP)} parts of it"
    )
    return _in_sections(model, weights, sound, score)


def _check_durations(frames: int, score: Score) -> None:
    """Raise ``ValueError`` if the durations of recording and score differ too much to be the same piece."""
    recorded, written = float(features.seconds(frames)), score.end - score.onsets[0]
    if not 1 / 5 <= recorded / max(written, 1e-9) <= 5:
        raise ValueError(
            f"the recording lasts {recorded:.1f} s and the score {written:.1f} s: one is more than 5 times the other"
        )


def _align(model: Model, weights: Tensor, sound: Tensor, columns: Columns) -> Alignment:
    """Align at full resolution, in one piece."""
    theta = model.costs(weights, sound, columns.keys)
    frames = onset_frames(theta, columns)
    soft = DTW(theta, omega=Negentropy()).expected_path
    onset = soft[:, columns.onsets]
    near = (torch.arange(len(sound)).unsqueeze(-1) - frames).abs() <= NEAR
    confidence = (onset * near).sum(0) / onset.sum(0)
    # Sum over the columns of each event. Silence at both ends belongs to no event.
    event = torch.bucketize(torch.arange(columns.keys.shape[1] - 1), columns.onsets, right=True)
    by_event = torch.zeros(len(sound), len(columns.onsets) + 1, dtype=soft.dtype).index_add_(1, event, soft[:, :-1])
    probabilities = by_event[:, 1:] / soft.sum(1, keepdim=True)
    return Alignment(frames.numpy(), confidence.numpy(), probabilities.float().numpy())


def _in_sections(model: Harmonic, weights: Tensor, sound: Tensor, score: Score) -> Alignment:
    """Align coarsely, then align sections of the score with the frames around their coarse position.

    Sections overlap, and the overlap is discarded, because an alignment is unreliable at its ends.
    """
    coarse_sound = _coarser(sound, COARSER)
    columns = model.columns(score, len(coarse_sound))
    coarse = onset_frames(model.costs(weights, coarse_sound, columns.keys).float(), columns) * COARSER
    frames = np.zeros(len(score), np.int64)
    confidence = np.zeros(len(score))
    soft = np.zeros((len(sound), len(score)), np.float32)
    for start in range(0, len(score), GROUP):
        stop = min(start + GROUP, len(score))
        first, last = max(0, start - MARGIN), min(len(score), stop + MARGIN)
        begin = 0 if first == 0 else max(0, int(coarse[first]) - COARSER)
        end = len(sound) if last == len(score) else max(int(coarse[last]), begin + 2 * (last - first) + 2)
        section = sound[begin:end]
        alignment = _align(model, weights, section, model.columns(_section(score, first, last), len(section)))
        without_overlap = slice(start - first, stop - first)
        frames[start:stop] = begin + alignment.frames[without_overlap]
        confidence[start:stop] = alignment.confidence[without_overlap]
        soft[begin : begin + len(section), start:stop] = alignment.soft[:, without_overlap]
    return Alignment(np.maximum.accumulate(frames), confidence, soft)


def _coarser(sound: Tensor, times: int) -> Tensor:
    """Means of ``times`` consecutive frames. Remaining frames at the end are dropped, unless there are no others."""
    times = min(times, len(sound))
    means: Tensor = sound[: len(sound) // times * times].unflatten(0, (-1, times)).mean(1)
    return means


def _section(score: Score, first: int, last: int) -> Score:
    """Events ``first`` to ``last`` − 1 of a score. The last one lasts until the next event of the score."""
    end = score.onsets[last] if last < len(score) else score.end
    onsets = score.onsets[first:last]
    notes = ((onsets[0], float(end), 60),)  # a placeholder: columns of a score depend only on the end of its notes
    return replace(
        score, notes=notes, onsets=onsets, sounding=score.sounding[first:last], beginning=score.beginning[first:last]
    )


# --- output


def rows(alignment: Alignment, score: Score) -> Iterator[dict[str, str]]:
    """Rows of the CSV file, one per event."""
    import pretty_midi

    for score_time, audio_time, confidence, pitches in zip(
        score.onsets, alignment.times, alignment.confidence, score.beginning, strict=True
    ):
        yield {
            "score_time": f"{score_time:.3f}",
            "audio_time": f"{audio_time:.3f}",
            "confidence": f"{confidence:.3f}",
            "notes": " ".join(pretty_midi.note_number_to_name(pitch) for pitch in sorted(pitches)),
        }


def write_csv(path: Path | str, alignment: Alignment, score: Score) -> None:
    """Write the times of each event in score and recording, a confidence from 0 to 1, and the notes that begin."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["score_time", "audio_time", "confidence", "notes"])
        writer.writeheader()
        writer.writerows(rows(alignment, score))


def model_named(name: str) -> Harmonic:
    """Create the model for "both", "harmonic" or "chroma" features."""
    if name not in MODELS:
        raise ValueError(f"features must be one of {', '.join(map(repr, MODELS))}, got {name!r}")
    return MODELS[name]()
