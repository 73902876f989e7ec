import numpy as np
import pytest
import torch

from bellmax_apps.audio import align as aligning
from bellmax_apps.audio import evaluation
from bellmax_apps.audio.features import HOP, RATE, load
from bellmax_apps.audio.model import Both, Chroma, Harmonic
from bellmax_apps.audio.score import read_midi, read_truth

from . import music


@pytest.mark.parametrize("seed", [0, 1])
def test_a_known_tempo_change_is_aligned_within_a_frame(seed):
    score = music.score(seed, 12)
    times = music.warp(score, seed)
    alignment = aligning.align(Harmonic().features(music.render(score, times)), score, Harmonic())
    assert np.abs(alignment.times - times[:-1]).max() <= 1.01 * HOP / RATE
    assert alignment.confidence.min() > 0
    assert alignment.confidence.max() <= 1 + 1e-6
    assert alignment.soft.shape[1] == 12
    assert alignment.soft.sum(1).max() <= 1 + 1e-5


def test_chroma_needs_no_weights():
    score = music.score(2, 12)
    times = music.warp(score, 2)
    model = Chroma()
    alignment = aligning.align(model.features(music.render(score, times)), score, model, torch.empty(0))
    assert np.median(np.abs(alignment.times - times[:-1])) <= 3 * HOP / RATE


@pytest.mark.parametrize(("semitones", "cents"), [(0, 0), (2, 0), (-3, 20), (5, -40), (-6, 10)])
def test_transposition_and_tuning_are_estimated(semitones, cents):
    score = music.score(4, 16)
    times = music.warp(score, 4)
    messages = []
    audio = music.render(score.transposed(semitones), times, cents=cents)
    alignment, pitch = aligning.align_recording(audio, score, report=messages.append)
    assert pitch.semitones == semitones
    assert pitch.tuned == pytest.approx(cents / 100, abs=0.06)
    assert messages == ([f"the recording is {pitch}"] if semitones or cents else [])
    error = np.abs(alignment.times - times[:-1])
    assert np.median(error) <= HOP / RATE
    assert error.max() <= 3 * HOP / RATE


def test_noise_barely_changes_the_alignment():
    score = music.score(5, 16)
    times = music.warp(score, 5)
    alignment, pitch = aligning.align_recording(music.render(score, times, noise=0.05), score)
    assert pitch.semitones == 0
    assert np.median(np.abs(alignment.times - times[:-1])) <= 1.5 * HOP / RATE


def test_a_transposition_must_reduce_the_cost():
    """All transpositions of a chromatic scale have the same tones."""
    notes = [(0.3 * n, 0.3 * n + 0.3, 48 + n % 12) for n in range(48)]
    score = music.Score.of(notes)
    everything = music.Score.of([(start, end, pitch + k) for start, end, pitch in notes for k in range(12)])
    audio = music.render(everything, np.append(score.onsets, score.end) + 0.3)
    assert aligning.Pitch.of(audio, score).semitones == 0


def test_sections_agree_with_the_whole_alignment(monkeypatch):
    score = music.score(3, 60 * 4)
    times = music.warp(score, 3)
    sound = Both().features(music.render(score, times))
    whole = aligning.align(sound, score)
    messages = []
    monkeypatch.setattr(aligning, "CELLS", 1000)
    sections = aligning.align(sound, score, report=messages.append)
    assert "a coarse alignment first, then 3 parts of it" in messages[0]
    assert (whole.frames == sections.frames).mean() > 0.97
    assert np.abs(whole.frames - sections.frames).max() < 20
    np.testing.assert_allclose(np.median(sections.confidence), np.median(whole.confidence), atol=0.05)


def test_very_different_durations_are_refused():
    score = music.score()
    with pytest.raises(ValueError, match=r"the recording lasts 23.2 s and the score 3.\d s: one is more than 5 times"):
        aligning.align(torch.zeros(1000, 88, 20), score)


def test_weights_of_a_wrong_size_are_refused(tmp_path):
    score = music.score()
    sound = Both().features(music.render(score, music.warp(score)))
    with pytest.raises(ValueError, match=r"weights must have shape \(44,\), got \(5,\)"):
        aligning.align(sound, score, weights=torch.ones(5))
    path = tmp_path / "w.json"
    path.write_text('{"weights": [1, 2]}')
    with pytest.raises(ValueError, match=r"w.json must hold 44 finite weights, got 2 numbers"):
        aligning.trained(path)
    for text, why in (("[]", "list indices"), ("{}", "'weights' is missing"), ('{"weights": ["x"]}', "")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"w.json cannot be read as weights of 'bellmax audio train': .*{why}"):
            aligning.trained(path)


def test_paths_may_be_strings(tmp_path):
    music.write_piece(tmp_path, "piece", 0)
    recording, midi, truth = (str(tmp_path / "piece" / f"piece.{ending}") for ending in ("wav", "mid", "txt"))
    score = read_midi(midi)
    alignment, _ = aligning.align_recording(load(recording), score, Chroma(), torch.empty(0))
    assert np.median(np.abs(alignment.times - read_truth(truth, score))) <= 3 * HOP / RATE
    aligning.write_csv(str(tmp_path / "a.csv"), alignment, score)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(score)
    with pytest.raises(ValueError, match="does not exist"):
        aligning.trained(str(tmp_path / "none.json"))
    assert [piece.name for piece in evaluation.read(str(tmp_path))] == ["piece"]
