"""Recordings, and features of their frames: the features of the paper, harmonics of piano keys, and chroma."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax_apps.files import reading

RATE = 22050  # samples per second
HOP = 512  # samples per frame
LOWEST, HIGHEST = 21, 108  # the keys of a piano, as MIDI numbers
KEYS = HIGHEST - LOWEST + 1
TONES = 13  # the twelve tones of an octave, and silence
BINS = 100  # semitones from the lowest key up to 8.5 kHz
PARTIALS = (0, 12, 19, 24, 28, 31, 36)
"""Semitones from a key to its harmonics."""
NEIGHBOURS = (-12, -1, 1)
"""Semitones from a key to pitches whose loudness shows that another key sounds instead."""


def seconds(frames: float | NDArray[np.int64] | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """Time at which a frame begins."""
    return frames * HOP / RATE


def load(path: Path | str) -> NDArray[np.float32]:
    """Read a recording as mono samples (samples,) at 22.05 kHz."""
    import librosa
    import soundfile

    path = Path(path)
    with reading(path, "audio"):
        channels, rate = soundfile.read(path, dtype="float32", always_2d=True)
    if rate < 1000:
        raise ValueError(f"{path} must have at least 1000 samples a second, got {rate}")
    wrong = ~(np.abs(channels) < 1e10).all(1)  # squares must be finite, too
    if wrong.any():
        first = wrong.argmax() / rate
        raise ValueError(f"{path} must hold finite samples below 1e10, got {wrong.sum()} others, from {first:.2f} s on")
    audio = librosa.resample(channels.mean(1), orig_sr=rate, target_sr=RATE) if len(channels) else channels[:, 0]
    if len(audio) < 4 * HOP:
        raise ValueError(f"{path} must last at least {4 * HOP / RATE:.2f} s, got {len(audio) / RATE:.2f} s")
    if not np.abs(audio).max() > 1e-4:
        raise ValueError(f"{path} is silent")
    return np.asarray(audio, np.float32)


def of_paper(audio: NDArray[np.float32]) -> Tensor:
    """Features (N, 8) of appendix C.2 of the paper.

    These are energy, spectral centroid, spectral bandwidth and five MFCC. Their median is subtracted, and they are
    divided by their standard deviation.
    """
    import librosa

    spectrum = np.abs(librosa.stft(audio, n_fft=2048, hop_length=HOP))
    rows = [
        librosa.feature.rms(S=spectrum, frame_length=2048),
        librosa.feature.spectral_centroid(S=spectrum, sr=RATE),
        librosa.feature.spectral_bandwidth(S=spectrum, sr=RATE),
        librosa.feature.mfcc(S=librosa.power_to_db(librosa.feature.melspectrogram(S=spectrum**2, sr=RATE)), n_mfcc=5),
    ]
    raw = np.concatenate(rows).T
    deviation = raw.std(0)
    return torch.from_numpy((raw - np.median(raw, 0)) / np.where(deviation > 0, deviation, 1)).double()


def tuning(audio: NDArray[np.float32]) -> float:
    """Estimate the tuning of a recording: semitones above A4 = 440 Hz, from −0.5 to 0.5."""
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # librosa warns of recordings without tones
        return float(librosa.estimate_tuning(y=audio, sr=RATE))


def constant_q(audio: NDArray[np.float32], tuned: float, window: float = 1.0) -> NDArray[np.float32]:
    """Loudness (N, 100) of the semitones from A0 on a logarithmic scale. Loud tones are about 1.

    Args:
        audio: Samples of the recording.
        tuned: Tuning of the recording in semitones, as :func:`tuning` estimates it.
        window: Relative length of the window. A short window resolves time better, and pitch worse.

    """
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # librosa warns of short recordings
        magnitude = np.abs(
            librosa.cqt(
                audio,
                sr=RATE,
                hop_length=HOP,
                fmin=librosa.midi_to_hz(LOWEST),
                n_bins=BINS,
                filter_scale=window,
                tuning=tuned,
            )
        )
    loud = np.quantile(magnitude.max(0), 0.9)
    compressed: NDArray[np.float32] = np.log1p(100 * magnitude.T / max(loud, 1e-9)) / np.log1p(100)
    return compressed


def harmonic(audio: NDArray[np.float32], tuned: float) -> Tensor:
    """Features (N, keys, 2 · (harmonics + neighbors)) of each piano key.

    The first half is the loudness at the harmonics and neighbors of the key. The second half is its growth over the
    last frames.
    """
    loudness = torch.from_numpy(constant_q(audio, tuned, window=0.5)).double()
    short = torch.from_numpy(constant_q(audio, tuned, window=0.2)).double()
    growth = (_later(short, 1) - _later(short, -1)).clamp(min=0)
    return torch.cat([_around_keys(loudness), _around_keys(growth)], -1)


def chroma(audio: NDArray[np.float32], tuned: float) -> Tensor:
    """Loudness (N, 13) of the twelve tones from C and of silence, with norm 1 in each frame.

    The median over the tones of a frame is taken as noise, and subtracted.
    """
    loudness = torch.from_numpy(constant_q(audio, tuned)).double()
    tones = torch.zeros(len(loudness), 12, dtype=torch.float64)
    tones.index_add_(1, (torch.arange(BINS) + LOWEST) % 12, loudness.square())
    above_noise = (tones - tones.median(1, keepdim=True).values).clamp(min=0)
    return torch.nn.functional.normalize(torch.nn.functional.pad(above_noise, (0, 1), value=0.05))


def _later(rows: Tensor, by: int) -> Tensor:
    """Row n of the result is row n + ``by``. Beyond the border, the first or last row is repeated."""
    return rows[(torch.arange(len(rows)) + by).clamp(0, len(rows) - 1)]


def _around_keys(loudness: Tensor) -> Tensor:
    """Loudness at the harmonics and neighbors of each key, shape (N, keys, harmonics + neighbors)."""
    low, high = -min(NEIGHBOURS), PARTIALS[-1]
    padded = torch.nn.functional.pad(loudness, (low, max(0, KEYS + high - loudness.shape[1])))
    return torch.stack([padded[:, low + h : low + h + KEYS] for h in (*PARTIALS, *NEIGHBOURS)], -1)
