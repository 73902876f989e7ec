"""A score as a sequence of events, and their times in a recording."""

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
    """A sequence of M events: at each, notes begin, and all that sound last until the next.

    Args:
        notes: (start, end, pitch), in seconds and as MIDI numbers.
        onsets: (M,) seconds, ascending.
        sounding: the pitches that sound at each event: those that begin and those held over.
        beginning: the pitches that begin at each event.

    """

    notes: tuple[tuple[float, float, int], ...]
    onsets: NDArray[np.float64]
    sounding: tuple[frozenset[int], ...]
    beginning: tuple[frozenset[int], ...]

    @property
    def end(self) -> float:
        """The end of the last note, in seconds."""
        return max(end for _, end, _ in self.notes)

    def __len__(self) -> int:
        return len(self.onsets)

    def transposed(self, by: int) -> Score:
        """The same score, so many semitones higher."""
        return Score.of([(start, end, pitch + by) for start, end, pitch in self.notes])

    @classmethod
    def of(cls, notes: Sequence[tuple[float, float, int]]) -> Score:
        """The score of notes (start, end, pitch).

        >>> score = Score.of([(0.0, 2.0, 60), (1.0, 2.0, 64), (1.0, 1.5, 67)])
        >>> score.onsets.tolist(), [sorted(pitches) for pitches in score.sounding]
        ([0.0, 1.0], [[60], [60, 64, 67]])
        """
        if not notes:
            raise ValueError("a score must have at least one note, got none")
        ordered = sorted(notes)
        begins = [start for start, _, _ in ordered]
        onsets = begins[:1] + [start for before, start in pairwise(begins) if start - before > TOGETHER]
        at = np.array(onsets)
        sounding: list[set[int]] = [set() for _ in onsets]
        beginning: list[set[int]] = [set() for _ in onsets]
        done: dict[int, int] = {}  # by pitch: the events before this one are known
        for start, end, pitch in ordered:
            first = int(np.searchsorted(at, start, side="right")) - 1
            beginning[first].add(pitch)
            last = max(int(np.searchsorted(at, end - TOGETHER)), first + 1)
            for event in range(max(first, done.get(pitch, 0)), last):
                sounding[event].add(pitch)
            done[pitch] = max(last, done.get(pitch, 0))
        return cls(tuple(ordered), at, tuple(map(frozenset, sounding)), tuple(map(frozenset, beginning)))


def read_midi(path: Path | str) -> Score:
    """Read the score of a MIDI file, without drums."""
    import pretty_midi

    path = Path(path)
    with reading(path, "MIDI"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pretty_midi, on files that it reads as meant
        midi = pretty_midi.PrettyMIDI(str(path))
    notes = [(n.start, n.end, n.pitch) for i in midi.instruments if not i.is_drum for n in i.notes]
    if not notes:
        raise ValueError(f"{path} has no notes")
    return Score.of(notes)


def read_truth(path: Path | str, score: Score) -> NDArray[np.float64]:
    """Read the true time of each event in a recording, (M,) seconds, from a file as in Bach10.

    A line is a note: its onset in the recording and in the score, in milliseconds, its pitch and its channel. The onset
    of an event is the median over its notes.
    """
    path = Path(path)
    with reading(path, "lines of four numbers"), warnings.catch_warnings():
        warnings.simplefilter("error")  # of numpy, on a file without a line
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


# --- as rows and columns of an alignment


def true_alignment(starts: NDArray[np.int64], frames: int) -> Tensor:
    """Index pairs (L, 2) of frames and columns, where column j begins in frame starts[j]; the first in frame 0.

    >>> true_alignment(np.array([0, 2, 2]), 4).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 2], [3, 2]]
    """
    cells = []
    begins = np.maximum.accumulate(np.clip(starts, 0, frames - 1))
    begins[0] = 0
    for column, start in enumerate(begins):
        last = column + 1 == len(begins)
        stop = frames if last else max(int(begins[column + 1]), int(start) + 1)
        cells += [(frame, column) for frame in range(int(start), stop)]
    return torch.tensor(cells)


def first_frames(path: Tensor) -> Tensor:
    """The first frame (columns,) of each column of an alignment (frames, columns).

    >>> first_frames(torch.tensor([[1, 0], [0, 1], [0, 1]])).tolist()
    [0, 1]
    """
    return path.to(torch.uint8).argmax(0)
