"""examples/digit_grammar.py on synthetic tones, one pitch per digit."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.data import folder as data_folder
from support.tones import record

import bellmax as bx

pytest.importorskip("librosa")
pytest.importorskip("matplotlib")
pytest.importorskip("rich.progress")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("digit_grammar")


def test_the_grammar_accepts_the_dates(example: ModuleType) -> None:
    dates = example.all_dates()
    texts = [f"{day:02}{month:02}87" for month, last in enumerate(example.DAYS, 1) for day in range(1, last + 1)]
    digits = torch.tensor([[int(digit) for digit in text] for text in texts])
    only = torch.full((366, 6, 10), -math.inf).scatter(-1, digits.unsqueeze(-1), 0.0)
    assert dates.paths(only).value.eq(0).all()
    assert dates.paths(torch.zeros(6, 10)).num_paths == 366 * 100
    assert all(dates.paths(torch.zeros(length, 10)).num_paths == 0 for length in (4, 5, 7))


def test_random_dates_are_dates(example: ModuleType) -> None:
    dates = example.random_dates(200, seed=0)
    only = torch.full((200, 6, 10), -math.inf).scatter(-1, torch.tensor(dates).unsqueeze(-1), 0.0)
    assert example.all_dates().paths(only).value.eq(0).all()
    assert dates != example.random_dates(200, seed=1000)


def test_the_bigram_counts_pairs(example: ModuleType) -> None:
    bigram = example.bigram([[3, 1], [3], [1]])
    only = torch.full((2, 10), -math.inf)
    only[0, 3] = only[1, 1] = 0
    expected = math.log(3 / 14 * 11) + math.log(2 / 13 * 11) + math.log(3 / 13 * 11)  # one is added to 11 counts
    assert bigram.paths(only).value.item() == pytest.approx(expected)


@pytest.mark.parametrize("labels", ["digits", "letters"])
def test_spelled_digits_are_decoded(example: ModuleType, labels: str) -> None:
    spelling = list(example.SPELLINGS[labels].values())
    digits = [3, 1, 1, 2, 8, 7]
    frames = [label for digit in digits for letter in spelling[digit] for label in (letter, letter, 0)]
    scores = 9 * torch.eye(1 + max(map(max, spelling)))[[*frames, *frames[:2]]].unsqueeze(0)
    lengths = torch.tensor([len(frames)])
    assert example.greedy(labels, scores, lengths)[0].tolist() == digits
    for grammar in (example.any_digits(), example.bigram([digits]), example.all_dates()):
        assert example.decode(example.graph_of(labels, grammar), scores, lengths)[0].tolist() == digits


def test_the_loss_is_the_probability_among_all_texts(example: ModuleType) -> None:
    scores = torch.randn(1, 5, 1 + len(example.VOCABULARY), generator=torch.Generator().manual_seed(0))
    texts = [torch.tensor([], dtype=torch.long), *map(torch.tensor, example.LETTERS.values())]
    fitting = [bx.CTC(scores[0], text).value for text in texts if len(text) <= 5]  # two digits do not fit
    batch = example.Batch(scores, texts[2][None], (torch.tensor([5]), torch.tensor([3])), [])
    loss = example.lf_mmi(example.graph_of("letters", example.any_digits()))(scores, batch)
    torch.testing.assert_close(3 * loss, torch.stack(fitting).logsumexp(0) - bx.CTC(scores[0], texts[2]).value)


def test_errors_are_counted_by_digit_and_by_date(example: ModuleType) -> None:
    batch = example.Batch(torch.empty(0), torch.tensor([[1, 2], [3, 4]]), (None, torch.tensor([2, 2])), [])
    assert example.errors([torch.tensor([0, 1]), torch.tensor([2])], batch) == (25.0, 50.0)


def test_the_table_has_a_row_of_each_decoding(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, (0, 10))
    output = tmp_path / "out"
    options = ["--output", str(output), "--seeds", "2", "--epochs", "1", "--dates", "3"]
    example.main([str(tmp_path), *options])
    rows = (output / "digit-grammar.md").read_text(encoding="utf-8")
    assert rows in capsys.readouterr().out
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()[2:]]
    decodings = [example.GREEDY, "any digits", "bigram", "dates"]
    assert [row[:3] for row in cells] == [
        [*network, decoding]
        for network in (("digits", "CTC"), ("letters", "CTC"), ("letters", "LF-MMI"))
        for decoding in decodings
    ]
    assert (output / "digit-grammar.png").stat().st_size > 10_000


def test_recordings_of_a_speaker_are_joined_to_dates(example: ModuleType) -> None:
    strings = example.speak(data_folder("fsdd"), range(1), [[2, 4, 1, 2, 8, 7]], seed=0)
    ((features, labels, joins),) = strings
    assert labels.tolist() == [3, 5, 2, 3, 9, 8]
    assert len(joins) == 5
    assert joins[-1] < len(features) * example.HOP / example.RATE


def test_missing_recordings_and_wrong_options_are_named(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="for all ten digits, with takes from 0 to 4"):
        example.main([str(tmp_path), "--output", str(tmp_path / "out")])
    record(tmp_path, (0, 10))
    (tmp_path / "3_ann_10.wav").unlink()
    with pytest.raises(SystemExit, match="for all ten digits of ann, with takes from 10 to 49"):
        example.main([str(tmp_path), "--output", str(tmp_path / "out")])
    for option, message in (("--dates=0", "--dates must be at least 1, got 0"), ("--noise=-1", "--noise must be")):
        with pytest.raises(SystemExit):
            example.main([str(tmp_path), option])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
