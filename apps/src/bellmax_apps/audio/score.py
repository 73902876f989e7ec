"""Scores as sequences of events, their true times in a recording, and alignments as index pairs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax_apps.files import reading

TOGETHER = 0.01
"""Notes that begin within this many seconds of each other form one event."""


@dataclass(frozen=True)
class Score:
    """A score as a sequence of M events. At each event notes begin, and an event lasts until the next one.

    Args:
        notes: Start, end and pitch of each note, in seconds and as MIDI numbers.
        onsets: Start of each event in seconds, ascending, shape (M,).
        sounding: Pitches that sound at each event, including those that began before.
        beginning: Pitches that begin at each event.

    """

    notes: tuple[tuple[float, float, int], ...]
    onsets: NDArray[np.float64]
    sounding: tuple[frozenset[int], ...]
    beginning: tuple[frozenset[int], ...]

    @property
    def end(self) -> float:
        """End of the last note, in seconds."""
        return max(end for _, end, _ in self.notes)

    def __len__(self) -> int:
        return len(self.onsets)

    def transposed(self, by: int) -> Score:
        """Transpose the score up by this many semitones."""
        return Score.of([(start, end, pitch + by) for start, end, pitch in self.notes])

    @classmethod
    def of(cls, notes: Sequence[tuple[float, float, int]]) -> Score:
        """Score of notes (start, end, pitch).

        >>> score = Score.of([(0.0, 2.0, 60), (1.0, 2.0, 64), (1.0, 1.5, 67)])
        >>> score.onsets.tolist(), [sorted(pitches) for pitches in score.sounding]
        ([0.0, 1.0], [[60], [60, 64, 67]])
        """
        if not notes:
            raise ValueError("a score must have at least one note, got none")
        ordered = sorted(notes)
        starts = [start for start, _, _ in ordered]
        onsets = np.array(starts[:1] + [start for before, start in pairwise(starts) if start - before > TOGETHER])
        sounding: list[set[int]] = [set() for _ in onsets]
        beginning: list[set[int]] = [set() for _ in onsets]
        next_event: dict[int, int] = {}  # first event of a pitch that is not filled in; avoids quadratic time
        for start, end, pitch in ordered:
            first = int(np.searchsorted(onsets, start, side="right")) - 1
            beginning[first].add(pitch)
            stop = max(int(np.searchsorted(onsets, end - TOGETHER)), first + 1)
            for event in range(max(first, next_event.get(pitch, 0)), stop):
                sounding[event].add(pitch)
            next_event[pitch] = max(stop, next_event.get(pitch, 0))
        return cls(tuple(ordered), onsets, tuple(map(frozenset, sounding)), tuple(map(frozenset, beginning)))


def read_midi(path: Path | str) -> Score:
    """Read the score of a MIDI file, without drums."""
    import pretty_midi

    path = Path(path)
    with reading(path, "MIDI"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pretty_midi warns of unusual files, which it reads correctly
        midi = pretty_midi.PrettyMIDI(str(path))
    notes = [(n.start, n.end, n.pitch) for i in midi.instruments if not i.is_drum for n in i.notes]
    if not notes:
        raise ValueError(f"{path} has no notes")
    return Score.of(notes)


def read_truth(path: Path | str, score: Score) -> NDArray[np.float64]:
    """Read the true time of each event in a recording, in seconds, shape (M,), from a file as in Bach10.

    A line is a note: its onset in the recording and in the score, in milliseconds, its pitch and its channel. The true
    time of an event is the median over its notes.
    """
    path = Path(path)
    with reading(path, "lines of four numbers"), warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns of an empty file
        rows = np.loadtxt(path, ndmin=2) / 1000
    if rows.shape[1] < 2:
        raise ValueError(f"{path} must hold lines of four numbers, got {rows.shape[1]} on a line")
    if not np.isfinite(rows).all():
        wrong = int((~np.isfinite(rows)).any(1).argmax()) + 1
        raise ValueError(f"{path} must hold finite numbers, got others in row {wrong}")
    nearest = np.abs(rows[:, 1:2] - score.onsets).argmin(1)
    if set(nearest.tolist()) != set(range(len(score))):
        missing = min(set(range(len(score))) - set(nearest.tolist()))
        raise ValueError(f"{path} has no note at {score.onsets[missing]:.3f} s of the score")
    return np.array([np.median(rows[nearest == event, 0]) for event in range(len(score))])


# --- alignments


def true_alignment(starts: NDArray[np.int64], frames: int) -> Tensor:
    """Alignment as index pairs (L, 2) of frames and columns. Column j begins in frame starts[j], column 0 in frame 0.

    >>> true_alignment(np.array([0, 2, 2]), 4).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 2], [3, 2]]
    """
    cells = []
    begins = np.maximum.accumulate(np.clip(starts, 0, frames - 1))
    begins[0] = 0
    for column, start in enumerate(begins):
        is_last = column + 1 == len(begins)
        stop = frames if is_last else max(int(begins[column + 1]), int(start) + 1)
        cells += [(frame, column) for frame in range(int(start), stop)]
    return torch.tensor(cells)


def first_frames(path: Tensor) -> Tensor:
    """First frame of each column of an alignment (frames, columns), shape (columns,).

    >>> first_frames(torch.tensor([[1, 0], [0, 1], [0, 1]])).tolist()
    [0, 1]
    """
    return path.to(torch.uint8).argmax(0)
