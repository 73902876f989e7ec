"""The readers of ``apps/tests/fuzz_readers.py`` on a few bytes, always the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import bellmax_apps.ner.data as columns

from .readers import READERS, Folder


def changed(data: bytes, rng: random.Random) -> bytes:
    """The same part of a folder, cut short or with other bytes somewhere."""
    place = rng.randrange(1, len(data))
    if rng.random() < 0.2:
        return data[:place]
    return data[:place] + rng.randbytes(rng.randint(0, 2)) + data[place + rng.randint(0, 2) :]


@pytest.mark.parametrize("reader", READERS)
def test_readers_report_damage_in_one_sentence(tmp_path: Path, reader: str) -> None:
    folder, rng = Folder(reader, tmp_path), random.Random(0)
    said = [folder.check(changed(seed, rng)) for seed in folder.seeds for _ in range(45 // len(folder.seeds))]
    assert len(set(said)) > 5
    first = {seed[0]: seed for seed in reversed(folder.seeds)}
    assert not any(folder.check(seed) for seed in first.values())


def _raise_key_error(path: Path) -> None:
    raise KeyError("a")


def _warn(path: Path) -> None:
    warnings.warn("a", stacklevel=1)


def _name_no_file(path: Path) -> None:
    raise ValueError("it is wrong")


def _say_two_lines(path: Path) -> None:
    raise ValueError(f"{path} is\nwrong")


@pytest.mark.parametrize(
    ("errs", "message"),
    [
        (_raise_key_error, "'a'"),
        (_warn, "warned: UserWarning: a"),
        (_name_no_file, "not a sentence that names the file: ValueError: 'it is wrong'"),
        (_say_two_lines, "not a sentence that names the file: ValueError: '.*is.nwrong'"),
        (lambda path: print("a"), "printed: a"),
        (lambda path: path.with_suffix(".part").write_text("a"), "did: open .*part"),
        (lambda path: path.unlink(), "did: os.remove"),
    ],
)
def test_misbehaving_readers_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errs: Callable[[Path], object], message: str
) -> None:
    folder = Folder("columns", tmp_path)
    monkeypatch.setattr(columns, "read", lambda path, **options: errs(path))
    with pytest.raises((AssertionError, KeyError), match=message):
        folder.check(folder.seeds[0])
