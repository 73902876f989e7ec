from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from bellmax_apps.audio import features

from . import music


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    score = music.score()
    return music.render(score, music.warp(score))


def test_shapes_and_scales(audio):
    frames = 1 + len(audio) // features.HOP
    paper, chroma, harmonic = features.of_paper(audio), features.chroma(audio, 0.0), features.harmonic(audio, 0.0)
    assert paper.shape == (frames, 8)
    assert chroma.shape == (frames, 13)
    assert harmonic.shape == (frames, features.KEYS, 20)
    torch.testing.assert_close(paper.median(0).values.abs() < 0.05, torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(paper.std(0), torch.ones(8).double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(chroma.norm(dim=1), torch.ones(frames).double())
    for rows in (paper, chroma, harmonic):
        assert rows.isfinite().all()
    assert harmonic.min() >= 0
    assert harmonic.max() < 1.5


def test_harmonic_features_locate_key_and_onset():
    time = np.arange(2 * features.RATE) / features.RATE
    silence = np.zeros(features.RATE // 2)
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)  # A4, 69
    loudness = features.harmonic(np.concatenate([silence, tone]).astype(np.float32), 0.0)
    assert loudness[60, :, 0].argmax() == 69 - features.LOWEST
    onset = len(silence) / features.HOP
    assert abs(int(loudness[:, 69 - features.LOWEST, 10].argmax()) - onset) <= 2


@pytest.mark.parametrize("cents", [-40, 0, 25])
def test_tuning_is_estimated(cents):
    score = music.score()
    tuned = features.tuning(music.render(score, music.warp(score), cents=cents))
    assert tuned == pytest.approx(cents / 100, abs=0.05)


def test_the_right_tuning_concentrates_a_tone_in_one_bin():
    time = np.arange(2 * features.RATE) / features.RATE
    tone = np.sin(2 * np.pi * 440 * 2 ** (0.4 / 12) * time).astype(np.float32)
    loudness = {tuned: np.sort(features.constant_q(tone, tuned)[40])[::-1] for tuned in (0.0, 0.4)}
    assert loudness[0.4][0] - loudness[0.4][1] > loudness[0.0][0] - loudness[0.0][1] + 0.1


def test_chroma_ignores_noise():
    noise = np.random.default_rng(0).normal(0, 0.1, 2 * features.RATE).astype(np.float32)
    time = np.arange(2 * features.RATE) / features.RATE
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    loudness = features.chroma(np.concatenate([noise, noise + tone]), 0.0)
    assert loudness[100:160].argmax(1).unique().tolist() == [9]  # A
    assert loudness[20:70, 9].mean() < 0.5 * loudness[100:160, 9].mean()


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg"])
def test_loads_audio_formats(tmp_path: Path, audio, ending: str):
    path = tmp_path / f"a.{ending}"
    soundfile.write(path, np.stack([audio, audio], 1), features.RATE)
    assert len(features.load(path)) == pytest.approx(len(audio), abs=10)


def test_unusable_recordings_are_reported(tmp_path: Path):
    path = tmp_path / "a.wav"
    with pytest.raises(ValueError, match=r"a.wav does not exist"):
        features.load(path)
    path.write_bytes(b"not audio")
    with pytest.raises(ValueError, match=r"a.wav cannot be read as audio"):
        features.load(path)
    soundfile.write(path, np.zeros(100), features.RATE)
    with pytest.raises(ValueError, match=r"a.wav must last at least 0.09 s, got 0.00 s"):
        features.load(path)
    soundfile.write(path, np.zeros(features.RATE), features.RATE)
    with pytest.raises(ValueError, match=r"a.wav is silent"):
        features.load(path)
    samples = np.full(features.RATE, 0.1)
    samples[features.RATE // 2 :] = np.nan
    soundfile.write(path, samples, features.RATE, subtype="FLOAT")
    with pytest.raises(ValueError, match=r"a.wav must hold finite samples below 1e10, got 11025 others, from 0.50 s"):
        features.load(path)
    soundfile.write(path, np.full((features.RATE, 2), 1e30), features.RATE, subtype="FLOAT")
    with pytest.raises(ValueError, match=r"a.wav must hold finite samples below 1e10, got 22050 others, from 0.00 s"):
        features.load(path)
    soundfile.write(path, np.full(features.RATE, 0.1), 1)
    with pytest.raises(ValueError, match=r"a.wav must have at least 1000 samples a second, got 1$"):
        features.load(path)
