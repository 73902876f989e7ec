"""Recordings of digits as tones, one pitch per digit, for the examples on speech."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")


def record(folder: Path, takes: Iterable[int]) -> Path:
    rng = np.random.default_rng(0)
    for digit in range(10):
        for take in takes:
            time = np.arange(rng.integers(1200, 2400)) / 8000
            tone = np.sin(2 * np.pi * (300 + 300 * digit) * time) * np.hanning(len(time))
            soundfile.write(folder / f"{digit}_ann_{take}.wav", 0.5 * tone + 0.005 * rng.normal(size=len(time)), 8000)
    return folder
