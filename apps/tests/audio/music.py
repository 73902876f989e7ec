"""Toy scores, and recordings of them with a changing tempo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pretty_midi
import soundfile
from numpy.typing import NDArray

from bellmax_apps.audio.features import RATE
from bellmax_apps.audio.score import Score


def score(seed: int = 0, events: int = 8) -> Score:
    """A score of two voices. The lower one has a new note at every second event."""
    rng = np.random.default_rng(seed)
    onsets = np.concatenate([[0.5], 0.5 + np.cumsum(rng.choice([0.3, 0.45, 0.6], events))])
    high = 60 + np.resize(rng.permutation(19), events)
    notes = [(onsets[n], onsets[n + 1], int(high[n])) for n in range(events)]
    low = 36 + np.resize(rng.permutation(19), events // 2)
    notes += [(onsets[2 * n], onsets[2 * n + 2], int(low[n])) for n in range(events // 2)]
    return Score.of(notes)


def warp(written: Score, seed: int = 0) -> NDArray[np.float64]:
    """Times of the events and of the end in a recording whose tempo varies by a third."""
    rng = np.random.default_rng(100 + seed)
    durations = np.diff(written.onsets, append=written.end) * rng.uniform(0.75, 1.33, len(written))
    return 0.4 + np.concatenate([[0], np.cumsum(durations)])


def render(
    written: Score, times: NDArray[np.float64], *, cents: float = 0.0, noise: float = 1e-3
) -> NDArray[np.float32]:
    """Synthesise a recording that is ``cents`` too high: tones of five harmonics that start abruptly and fade."""
    audio = np.zeros(int((times[-1] + 0.5) * RATE))
    score_times = np.append(written.onsets, written.end)
    for start, end, pitch in written.notes:
        first, last = (int(RATE * np.interp(t, score_times, times)) for t in (start, end))
        t = np.arange(last - first) / RATE
        frequency = 440 * 2 ** ((pitch - 69 + cents / 100) / 12)
        tone = sum(np.sin(2 * np.pi * h * frequency * t) / h for h in range(1, 6))
        fade = np.minimum(1, (last - first - np.arange(last - first)) / 200)
        audio[first:last] += tone * np.exp(-1.5 * t) * fade
    hiss = np.random.default_rng(0).normal(0, noise, len(audio))
    return (0.2 * audio + hiss).astype(np.float32)


def write_midi(path: Path, written: Score) -> Path:
    """Write a score as a MIDI file."""
    midi = pretty_midi.PrettyMIDI()
    piano = pretty_midi.Instrument(0)
    piano.notes = [pretty_midi.Note(80, pitch, start, end) for start, end, pitch in written.notes]
    midi.instruments.append(piano)
    midi.write(str(path))
    return path


def write_piece(data: Path, name: str, seed: int) -> None:
    """Write the folder of a piece as in Bach10."""
    folder = data / name
    folder.mkdir(parents=True)
    written = score(seed)
    times = warp(written, seed)
    soundfile.write(folder / f"{name}.wav", render(written, times), RATE)
    write_midi(folder / f"{name}.mid", written)
    rows = [(1000 * time, 1000 * onset, 60, 1) for time, onset in zip(times, written.onsets, strict=False)]
    np.savetxt(folder / f"{name}.txt", rows, fmt="%d", delimiter="\t")
