"""All subcommands of ``bellmax audio`` on toy recordings."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pretty_midi
import pytest
import soundfile
from typer.testing import CliRunner

from bellmax_apps.audio import align as aligning
from bellmax_apps.audio import evaluation
from bellmax_apps.audio.commands import app
from bellmax_apps.audio.features import RATE

from . import music


def run(*args: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("one", "two")):
        music.write_piece(folder, name, seed)
    return folder


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the iterations, which is enough for toy recordings."""
    learn = evaluation.learn
    monkeypatch.setattr(evaluation, "learn", lambda *args, iterations=300: learn(*args, iterations=iterations // 10))


def test_aligns(data: Path, tmp_path: Path) -> None:
    table, picture, clicks = (tmp_path / name for name in ("a.csv", "a.png", "a.wav"))
    options = ["--output", table, "--plot", picture, "--audio-clicks", clicks]
    output = run("align", data / "one/one.wav", data / "one/one.mid", *options)
    assert "8 events, from 0.39 s" in output
    assert "confidence is low" not in output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    score = music.score(0)
    assert [float(row["score_time"]) for row in rows] == pytest.approx(score.onsets, abs=2e-3)
    errors = np.abs([float(row["audio_time"]) for row in rows] - music.warp(score)[:-1])
    assert np.median(errors) < 0.03
    assert all(0 <= float(row["confidence"]) <= 1 for row in rows)
    assert all(row["notes"] for row in rows)
    assert matplotlib.image.imread(picture).std() > 0
    audio, rate = soundfile.read(clicks)
    assert rate == RATE
    assert np.abs(audio).max() <= 1


@pytest.mark.usefixtures("few_steps")
def test_align_uses_trained_weights(data: Path, tmp_path: Path) -> None:
    assert "44 weights learned on 2 pieces" in run("train", data, "--output", tmp_path / "w.json")
    piece = data / "two/two"
    options = ["--weights", tmp_path / "w.json", "--out", tmp_path / "a.csv"]
    assert "8 events" in run("align", f"{piece}.wav", f"{piece}.mid", *options)


@pytest.mark.usefixtures("few_steps")
def test_evaluates_and_resumes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run("evaluate", data, "--output", tmp_path)
    assert "two: harmonic features: end-to-end, l2, hard DTW of θ" in output
    text = (tmp_path / "audio.md").read_text()
    assert "| the paper's features: end-to-end from zeros, l2 | most expected overlap |" in text
    assert "| constant θ | hard DTW of θ | 1.85 ± 0.15 | 1.85 ± 0.15 | 14.64 ± 2.63 | 14.64 ± 0.29 |" in text
    results = {
        (row["name"], row["decoding"]): row for row in json.loads((tmp_path / "pieces/one.json").read_text())["rows"]
    }
    hard = {name: row for (name, decoding), row in results.items() if decoding == "hard DTW of θ"}
    assert hard["harmonic features: end-to-end, l2"]["test"]["seconds"] < 0.1 < hard["random θ"]["test"]["seconds"]
    name = "the paper's features: end-to-end, l2"
    assert results[name, evaluation.HARD]["onsets"] != results[name, evaluation.OVERLAP]["onsets"]
    assert matplotlib.image.imread(tmp_path / "audio-maps.png").std() > 0

    computed = []
    fold = evaluation.fold
    monkeypatch.setattr(evaluation, "fold", lambda *args: computed.append(args[2]) or fold(*args))
    (tmp_path / "pieces/two.json").unlink()
    run("evaluate", data, "--output", tmp_path)
    assert computed == [1]
    assert (tmp_path / "audio.md").read_text() == text

    two = json.loads((tmp_path / "pieces/two.json").read_text())
    (tmp_path / "pieces/one.json").unlink()
    for changed, why in (
        ({"rows": two["rows"]}, "'pieces' is missing"),
        (two | {"pieces": "others"}, "its recordings differ from the recordings in the data folder"),
    ):
        (tmp_path / "pieces/two.json").write_text(json.dumps(changed))
        output = " ".join(run("evaluate", data, "--output", tmp_path, status=2).split())
        assert "two.json cannot be read as a piece of this experiment" in output
        assert why in output
    assert computed == [1]
    (tmp_path / "pieces/one.json").write_text(json.dumps(two | {"rows": two["rows"][1:]}))
    (tmp_path / "pieces/two.json").write_text(json.dumps(two))
    assert "two.json cannot be read" in run("evaluate", data, "--output", tmp_path, status=2)
    (tmp_path / "audio.md").write_text("mine")
    assert "audio.md was not written by this command" in run("evaluate", data, "--output", tmp_path, status=2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["align", "nowhere.wav", "MIDI"], "nowhere.wav does not exist"),
        (["align", "WAV", "nowhere.mid"], "nowhere.mid does not exist"),
        (["align", "MIDI", "WAV"], "one.wav is a WAV file: did you swap the recording and the score?"),
        (["align", "MIDI", "MIDI"], "one.mid is a MIDI file: did you swap the recording and the score?"),
        (["align", "WAV", "WAV"], "one.wav is a WAV file: did you swap the recording and the score?"),
        (["align", "WAV", "MIDI", "--features", "mfcc"], "features must be one of 'both', 'harmonic', 'chroma', got"),
        (["evaluate", "nowhere"], "nowhere must hold a folder for each piece, got none"),
        (["evaluate", "ONE"], "ONE must hold at least two pieces, got one"),
        (["train", "TMP"], "does not exist"),
        (["align", "WAV", "MIDI", "--weights", "MIDI"], "one.mid cannot be read as JSON"),
        (
            ["align", "WAV", "MIDI", "--weights", "MIDI", "--features", "chroma"],
            "--weights cannot be used with --features chroma, which has no weights",
        ),
        (
            ["align", "WAV", "MIDI", "--output", "no/such/x.csv"],
            "--output must be in a folder that exists, got no/such",
        ),
        (["align", "WAV", "MIDI", "--plot", "a.pgn"], "--plot must end in .jpg, .pdf, .png, .svg, got a.pgn"),
        (["align", "WAV", "MIDI", "--audio-clicks", "a.txt"], "--audio-clicks must end in "),
        (["align", "WAV", "MIDI", "--output", "WAV", "--force"], "one.wav, which is an input"),
        (["align", "WAV", "MIDI", "--out", "MIDI", "--force"], "one.mid, which is an input"),
        (["align", "WAV", "MIDI", "--audio-clicks", "WAV", "--force"], "one.wav, which is an input"),
    ],
)
def test_errors_are_one_sentence(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aligning, "align_recording", None)  # fails if the alignment starts before the error
    before = {path: path.read_bytes() for path in (data / "one").iterdir()}
    (tmp_path / "piece").mkdir()
    music.write_piece(tmp_path / "ONE", "piece", 0)
    paths = {"ONE": tmp_path / "ONE", "WAV": data / "one/one.wav", "MIDI": data / "one/one.mid", "TMP": tmp_path}
    output = run(*(paths.get(arg, arg) for arg in args), status=2)
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert before == {path: path.read_bytes() for path in (data / "one").iterdir()}


@pytest.mark.parametrize(("features", "advice"), [("both", "chroma"), ("harmonic", "chroma"), ("chroma", "both")])
def test_low_confidence_is_reported_and_outputs_are_not_replaced(tmp_path: Path, features: str, advice: str) -> None:
    score, other = music.score(0, events=24), music.score(15, events=30)
    recording, table = tmp_path / "a.wav", tmp_path / "a.csv"
    soundfile.write(recording, music.render(score, music.warp(score)), RATE)
    options = [music.write_midi(tmp_path / "wrong.mid", other), "--features", features]
    output = run("align", recording, *options, "--out", table)  # the old name of --output
    assert (
        f"The confidence is low. Listen to the file of --audio-clicks, or try --features {advice}. The score" in output
    )
    before = table.read_bytes()
    assert f"{table} exists: add --force" in run("align", recording, *options, "--output", table, status=2)
    assert table.read_bytes() == before
    right = music.write_midi(tmp_path / "right.mid", score)
    assert "The confidence" not in run("align", recording, right, *options[1:], "--output", table, "--force")
    assert table.read_bytes() != before


def test_aligns_a_transposed_recording(tmp_path: Path) -> None:
    score = music.score(1, events=16)
    soundfile.write(tmp_path / "a.wav", music.render(score.transposed(-3), music.warp(score), cents=15), RATE)
    midi = music.write_midi(tmp_path / "a.mid", score)
    output = run("align", tmp_path / "a.wav", midi, "--output", tmp_path / "a.csv", "--plot", tmp_path / "a.png")
    assert "the recording is 3 semitones below the score, 1" in output
    assert " cents sharp" in output
    assert "confidence is low" not in output
    row = next(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert set(row["notes"].split()) == {pretty_midi.note_number_to_name(pitch) for pitch in score.beginning[0]}
