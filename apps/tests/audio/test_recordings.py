"""``examples/recordings.py`` with synthetic tones in place of instruments."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pretty_midi
import pytest

from . import music

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    module = import_module("recordings")
    monkeypatch.setattr(module, "by_synctoolbox", lambda recording: None)
    return module


def tones(midi: pretty_midi.PrettyMIDI) -> np.ndarray:
    """Samples at 44.1 kHz: rendered an octave lower and at half speed at 22.05 kHz, which sounds the same."""
    score = music.Score.of([(2 * n.start, 2 * n.end, n.pitch - 12) for i in midi.instruments for n in i.notes])
    return music.render(score, np.append(score.onsets, score.end))


@pytest.mark.parametrize("condition", ["its instruments", "60 cents sharp", "all of it"])
def test_true_times_are_recovered(recordings: ModuleType, tmp_path: Path, condition: str) -> None:
    path = music.write_midi(tmp_path / "a.mid", music.score(2, 24))
    errors = dict(recordings.errors(path, condition, tones, seconds=7.0))
    assert list(errors) == ["both", "harmonic", "chroma"]
    assert 8 < len(errors["both"]) < 24
    assert np.median(errors["both"]) < 0.05
    assert recordings.table({(condition, name): [error] for name, error in errors.items()}).count("|") > 8


def test_conditions_change_the_recording(recordings: ModuleType) -> None:
    audio = music.render(music.score(), music.warp(music.score()))
    rng = np.random.default_rng(0)
    plain, _ = recordings.recorded(audio, recordings.Condition(), rng)
    fast, faster = recordings.recorded(audio, recordings.Condition(cents=1200), rng)
    assert (faster, len(fast)) == (2, pytest.approx(len(plain) / 2, abs=2))
    noisy, _ = recordings.recorded(audio, recordings.Condition(signal_to_noise=0), rng)
    room, _ = recordings.recorded(audio, recordings.Condition(reverberation=2.0), rng)
    quiet = slice(0, 3000)  # before the first note
    assert noisy[quiet].std() > 10 * plain[quiet].std()
    assert np.abs(room[-2000:]).mean() > 3 * np.abs(plain[-2000:]).mean()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("scores", "must hold MIDI files"),
        ("fluidsynth", "FluidSynth must be installed"),
        ("sounds", "name a soundfont with --sounds"),
    ],
)
def test_missing_files_and_programs_are_reported(
    recordings: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    message: str,
) -> None:
    monkeypatch.setattr(recordings.shutil, "which", lambda name: None if missing == name else name)
    if missing != "scores":
        music.write_midi(tmp_path / "a.mid", music.score())
    with pytest.raises(SystemExit):
        recordings.main([str(tmp_path), "--sounds", str(tmp_path / "no.sf2")])
    assert message in capsys.readouterr().err
