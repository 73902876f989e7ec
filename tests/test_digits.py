"""examples/digits.py and examples/word_times.py on synthetic tones, one pitch per digit."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.tones import record
from torch import Tensor

pytest.importorskip("librosa")
pytest.importorskip("matplotlib")
progress = pytest.importorskip("rich.progress")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("digits")


def test_strings_keep_their_digits_and_boundaries(digits: ModuleType, tmp_path: Path) -> None:
    strings = digits.read_strings(record(tmp_path, range(4, 7)), takes=range(5, 1000), rounds=2, seed=0)
    assert 30 < sum(len(labels) for _, labels, _ in strings) <= 40
    for features, labels, joins in strings:
        assert 3 <= len(labels) <= 8
        ends = torch.tensor([0, *joins, len(features) * digits.HOP / digits.RATE])
        pieces = [features[int(100 * a) + 5 : int(100 * b) - 5] for a, b in pairwise(ends)]
        pitch = torch.stack([piece.mean(0) for piece in pieces]).argmax(-1)
        assert len(labels) == len(joins) + 1
        assert torch.equal(pitch.argsort(stable=True), labels.argsort(stable=True))


def test_pauses_move_the_joins(digits: ModuleType, tmp_path: Path) -> None:
    folder = record(tmp_path, range(4, 7))
    joined, paused = (digits.read_strings(folder, range(5, 1000), 2, 0, pause) for pause in (0.0, 0.4))
    for (features, labels, joins), (longer, others, later) in zip(joined, paused, strict=True):
        assert labels.equal(others)
        torch.testing.assert_close(later, joins + 0.4 * torch.arange(1, len(labels)))
        assert len(longer) == len(features) + 40 * (len(labels) - 1)
        silent = [longer[round(100 * end) - 30 : round(100 * end) - 10] for end in later.tolist()]
        assert torch.cat(silent).mean() < longer.mean() - 0.2


def test_a_boundary_is_between_two_digits(digits: ModuleType) -> None:
    path = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]])
    middle = torch.tensor([3.5 * digits.SECONDS])  # of frames 3 and 4, which are blank
    torch.testing.assert_close(digits.boundaries(path).float(), middle)
    soft = torch.tensor([[0.1, 0.9, 0.0], [0.2, 0.5, 0.3], [0.2, 0.2, 0.6], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(digits.boundaries(torch.stack([soft, soft]))[1].float(), torch.tensor([0.03]))


def test_errors_are_edits(digits: ModuleType) -> None:
    frames = [[1, 1, 0, 1, 2, 9], [0, 0, 0, 0, 0, 0], [3, 0, 4, 4, 0, 0]]
    labels = torch.tensor([[1, 1, 2], [5, 6, 7], [3, 5, 0]])
    batch = digits.Batch(torch.empty(0), labels, (torch.tensor([5, 6, 6]), torch.tensor([3, 3, 2])), [])
    assert digits.errors(torch.eye(11)[torch.tensor(frames)], batch) == 0 + 3 + 1


def test_a_blank_penalty_spreads_digits_over_their_sound(digits: ModuleType, tmp_path: Path) -> None:
    strings = digits.read_strings(record(tmp_path, range(5, 8)), takes=range(5, 1000), rounds=3, seed=0)
    options = Namespace(output=tmp_path, epochs=5, penalty_epochs=5, minutes=60.0, seed=0, resume=False)
    lengths = []
    for name in ("l2", "l2, blank penalty"):
        model, _ = digits.train(name, strings, options, progress.Progress(disable=True))
        lengths.append(float(digits.evaluate(digits.RUNS[name], model, strings)[5]))
    assert lengths[0] < 80  # ms, of 225
    assert lengths[1] > 160


def test_the_curve_under_negentropy_equals_torch(digits: ModuleType, tmp_path: Path) -> None:
    strings = digits.read_strings(record(tmp_path, range(5, 7)), takes=range(5, 1000), rounds=3, seed=0)
    strings = [(features.double(), *others) for features, *others in strings]
    options = Namespace(output=tmp_path, epochs=5, penalty_epochs=0, minutes=60.0, seed=0, resume=False)
    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = (
            [epoch["loss"] for epoch in digits.train(name, strings, options, progress.Progress(disable=True))[1]]
            for name in ("negentropy", digits.TORCH)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours[-1] < ours[0] / 2
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_an_interrupted_run_resumes(digits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, range(4, 6))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [str(tmp_path), "--epochs", "2", "--penalty-epochs", "1"]
    digits.main([*command, "--output", str(whole)])
    printed = capsys.readouterr().out
    digits.main([*command, "--output", str(parts), "--minutes", "0"])
    digits.main([*command, "--output", str(parts), "--resume"])
    rows = (whole / "digits.md").read_text(encoding="utf-8")
    assert rows in printed
    assert [row.split(" | ")[0][2:] for row in rows.splitlines()[2:9]] == list(digits.RUNS)
    assert all(float(apart) < 1e-3 for apart in rows.splitlines()[-1].split(": ")[1].split(", "))
    for name in digits.RUNS:
        saved = [torch.load(folder / f"{name}.pt", weights_only=True) for folder in (whole, parts)]
        assert len(saved[0]["history"]) == len(saved[1]["history"]) == 2
        assert all(torch.equal(saved[0]["model"][key], saved[1]["model"][key]) for key in saved[0]["model"])
    assert (whole / "digits.png").stat().st_size > 10_000


def test_a_folder_without_recordings_is_named(digits: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must hold"):
        digits.main([str(tmp_path), "--output", str(tmp_path / "out")])


# --- word_times.py


def test_times_of_words_are_measured_for_each_training(
    digits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = import_module("word_times")
    record(tmp_path, range(4, 6))
    example.main([str(tmp_path), "--output", str(tmp_path / "out"), "--epochs", "2"])
    text = (tmp_path / "out" / "word-times.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert re.match(r"\d+ strings with [34]\d words, 0\.\d minutes\n\n", text)
    _, *tables = text.split("| training | ")
    for table, (_, columns, _, _) in zip(tables, example.EXPERIMENTS, strict=True):
        header, line, *rows = (row.strip("| ").split(" | ") for row in table.split("\n\n")[0].splitlines())
        assert header == [str(column) for column in columns]
        assert [row[0] for row in rows] == list(example.RUNS)
        assert {len(row) for row in rows} == {len(header) + 1} == {line[0].count("-:") + 1}
    assert (tmp_path / "out" / "word-times.png").stat().st_size > 10_000


class Oracle(torch.nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return 12 * features[:, ::2]


def spoken(example: ModuleType, text: str, pause: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a string that has two frames for each letter, as features of :class:`Oracle`."""
    labels = [[example.VOCABULARY[letter] for letter in word] for word in text.split()]
    silence = [0] * round(pause / example.SECONDS)
    frames = [label for word in labels for label in [*silence, *np.repeat(word, 2)]][len(silence) :]
    features = torch.eye(len(example.VOCABULARY) + 1)[frames].repeat_interleave(2, 0)[:-1]
    starts = torch.tensor([2 * len(word) * example.SECONDS + pause for word in labels]).cumsum(0)
    digits = torch.tensor([example.DIGITS.index(word) + 1 for word in text.split()])
    return features, digits, starts[:-1] - example.SECONDS / 2


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_experiments_on_words_with_known_times(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    example = import_module("word_times")
    monkeypatch.setattr(example, "WINDOWS", (12, 30))
    texts = "one two six", "six one five", "five six one two"
    pauses, strings = ([spoken(example, text, pause) for text in texts] for pause in (0.4, 0.0))
    moved = [(features, labels, joins - late) for features, labels, joins in pauses]
    assert example.try_pauses(Oracle(), moved) == 2 * [f"{1000 * late:.0f}"]
    assert example.try_stars(Oracle(), strings)[:3] == ["20 / 20", "0 / 0", "0 / 0"]
    assert example.try_stars(Oracle(), pauses)[2] == "0 / 400"  # exact starts, but joins after the pauses as ends
    assert example.try_confidence(Oracle(), strings) == ["100.0 %"]
    assert example.try_windows(Oracle(), strings) == 2 * ["0 / 0.00"]
    assert [float(cell.strip("% ")) for cell in example.evaluate(Oracle(), strings)] == [*8 * [0], 100]
    assert "0 / 0.00" not in example.try_windows(lambda features: torch.randn_like(features[:, ::2]), strings)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_time_and_memory_are_measured_without_recordings(
    digits: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = import_module("word_times")
    monkeypatch.setattr(example, "SIZES", ((2000, 500),))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as stopped:
        example.main(["--performance"])
    *_, row = capsys.readouterr().out.splitlines()
    assert not stopped.value.code
    assert re.fullmatch(r"\| 2,000 \| 500 \|( [\d.e-]+ s, 0\.\d\d GB \|){3}", row)
    code = "import torch, word_times; print(word_times.time_and_memory(lambda: torch.zeros(40_000_000)))"
    folder = Path(example.__file__).parent  # another process: this one can keep freed memory
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-2]) == pytest.approx(0.16, abs=0.02)


def test_errors_of_times_are_signed_and_in_milliseconds(digits: ModuleType) -> None:
    example = import_module("word_times")
    words = [example.Word("one", 0.1, 0.5, 1.0), example.Word("two", 0.55, 0.8, 1.0)]
    string = torch.zeros(100, digits.BANDS), torch.tensor([2, 3]), torch.tensor([0.6])  # of 1 s
    torch.testing.assert_close(example.off(words, string), torch.tensor([[100.0, -100.0], [-50.0, -200.0]]))
    assert example.text_of(string[1]) == "one two"
    labels = [example.VOCABULARY[letter] for letter in "onetwo"]
    assert example.with_letters(string)[1].tolist() == labels
