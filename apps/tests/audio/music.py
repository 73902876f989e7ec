"""Toy scores, and recordings of them that do not keep the time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pretty_midi
import soundfile
from numpy.typing import NDArray

from bellmax_apps.audio.features import RATE
from bellmax_apps.audio.score import Score


def score(seed: int = 0, events: int = 8) -> Score:
    """Two voices; the lower one changes every other time."""
    rng = np.random.default_rng(seed)
    onsets = np.concatenate([[0.5], 0.5 + np.cumsum(rng.choice([0.3, 0.45, 0.6], events))])
    high = 60 + np.resize(rng.permutation(19), events)
    notes = [(onsets[n], onsets[n + 1], int(high[n])) for n in range(events)]
    low = 36 + np.resize(rng.permutation(19), events // 2)
    notes += [(onsets[2 * n], onsets[2 * n + 2], int(low[n])) for n in range(events // 2)]
    return Score.of(notes)


def warp(of: Score, seed: int = 0) -> NDArray[np.float64]:
    """When a recording has the events, and the end, of a score: the tempo goes up and down by a third."""
    rng = np.random.default_rng(100 + seed)
    lasting = np.diff(of.onsets, append=of.end) * rng.uniform(0.75, 1.33, len(of))
    return 0.4 + np.concatenate([[0], np.cumsum(lasting)])


def render(of: Score, times: NDArray[np.float64], *, cents: float = 0.0, noise: float = 1e-3) -> NDArray[np.float32]:
    """Tones of five harmonics that begin at once and fade, so many cents too high."""
    audio = np.zeros(int((times[-1] + 0.5) * RATE))
    place = np.append(of.onsets, of.end)
    for start, end, pitch in of.notes:
        first, last = (int(RATE * np.interp(t, place, times)) for t in (start, end))
        t = np.arange(last - first) / RATE
        frequency = 440 * 2 ** ((pitch - 69 + cents / 100) / 12)
        tone = sum(np.sin(2 * np.pi * h * frequency * t) / h for h in range(1, 6))
        fade = np.minimum(1, (last - first - np.arange(last - first)) / 200)
        audio[first:last] += tone * np.exp(-1.5 * t) * fade
    hiss = np.random.default_rng(0).normal(0, noise, len(audio))
    return (0.2 * audio + hiss).astype(np.float32)


def write_midi(path: Path, of: Score) -> Path:
    midi = pretty_midi.PrettyMIDI()
    piano = pretty_midi.Instrument(0)
    piano.notes = [pretty_midi.Note(80, pitch, start, end) for start, end, pitch in of.notes]
    midi.instruments.append(piano)
    midi.write(str(path))
    return path


def write_piece(data: Path, name: str, seed: int) -> None:
    """A folder as Bach10 has them."""
    folder = data / name
    folder.mkdir(parents=True)
    own = score(seed)
    times = warp(own, seed)
    soundfile.write(folder / f"{name}.wav", render(own, times), RATE)
    write_midi(folder / f"{name}.mid", own)
    rows = [(1000 * time, 1000 * onset, 60, 1) for time, onset in zip(times, own.onsets, strict=False)]
    np.savetxt(folder / f"{name}.txt", rows, fmt="%d", delimiter="\t")
