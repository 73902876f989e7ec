"""examples/minimum_risk.py on synthetic tones, one pitch per digit."""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.tones import record

pytest.importorskip("librosa")
pytest.importorskip("matplotlib")
pytest.importorskip("rich.progress")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("minimum_risk")


def distance(a: list[int], b: list[int]) -> int:
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
        above = row
    return above[-1]


def test_edits_equal_a_plain_recursion(example: ModuleType) -> None:
    frames, targets = torch.randint(4, (5, 7, 12)), torch.randint(1, 4, (7, 5))
    frames[:, 1, 6:], frames[:, 2], targets[3, 2:], targets[4] = -1, 0, 0, 0
    found = example.edits(frames, targets)
    for k in range(5):
        for b in range(7):
            labels = [label for label, _ in groupby(frames[k, b].tolist()) if label > 0]
            assert found[k, b] == distance(labels, [label for label in targets[b].tolist() if label])


def test_the_risk_falls_in_training(example: ModuleType, tmp_path: Path) -> None:
    strings = example.read_strings(record(tmp_path, range(10, 13)), example.TRAINING, 2, 0)
    options = {"seed": 0, "noise": 0.5, "advance": lambda: None}
    first = example.train(example.Network(), strings, example.ctc, 0.004, range(25), **options)
    before = example.rates(first, strings)
    by_samples, by_paths = (
        example.train(example.deepcopy(first), strings, loss, 0.001, range(25, 45), **options)
        for loss in (example.risk_of(samples=32), example.risk_of(topk=8))
    )
    assert example.rates(by_samples, strings).random < before.random / 2
    assert example.rates(by_paths, strings).greedy < before.greedy


def test_the_table_has_a_row_of_each_method(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, (4, 5, 10))
    example.main([str(tmp_path), "--seeds", "2", "--epochs", "1", "--more-epochs", "1", "--samples", "2"])
    *_, first, last = rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert [row.split(" | ")[0][2:] for row in rows[2:]] == ["before", "CTC", "risk, samples", "risk, k best paths"]
    assert all(row.count("±") == 4 for row in (first, last))


@pytest.mark.parametrize("option", [("--seeds", "0"), ("--samples", "1"), ("--paths", "0"), ("--noise", "nan")])
def test_options_are_checked_before_training(
    example: ModuleType, option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main([str(tmp_path), *option])
    assert f"{option[0]} must be at least" in capsys.readouterr().err


def test_rates_are_chosen_on_development_strings(example: ModuleType) -> None:
    def run(rate: float, development: float, test: float) -> tuple[object, ...]:
        return example.Run("CTC", rate, example.Rates(development, 0.0), example.Rates(test, 1.0))

    runs = [run(1e-4, 9.0, 1.0), run(1e-4, 7.0, 1.0), run(1e-3, 6.0, 3.0), run(1e-3, 8.0, 5.0)]
    assert example.table(runs).splitlines()[-1] == "| CTC | 0.001 | 7.0 ± 1.0 | 4.0 ± 1.0 | 0.0 ± 0.0 | 1.0 ± 0.0 |"
