"""The readers of ``apps/tests/fuzz_readers.py`` on a few random bytes with a fixed seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import bellmax_apps.ner.data as columns

from .readers import READERS, Folder


def changed(data: bytes, rng: random.Random) -> bytes:
    """Cut bytes short, or change a few of them. The first byte, which selects a slot, stays."""
    position = rng.randrange(1, len(data))
    if rng.random() < 0.2:
        return data[:position]
    return data[:position] + rng.randbytes(rng.randint(0, 2)) + data[position + rng.randint(0, 2) :]


@pytest.mark.parametrize("reader", READERS)
def test_readers_report_damage_in_one_sentence(tmp_path: Path, reader: str) -> None:
    folder, rng = Folder(reader, tmp_path), random.Random(0)
    messages = [folder.check(changed(seed, rng)) for seed in folder.seeds for _ in range(45 // len(folder.seeds))]
    assert len(set(messages)) > 5
    first = {seed[0]: seed for seed in reversed(folder.seeds)}
    assert not any(folder.check(seed) for seed in first.values())


def _raise_key_error(path: Path) -> None:
    raise KeyError("a")


def _warn(path: Path) -> None:
    warnings.warn("a", stacklevel=1)


def _raise_without_the_file_name(path: Path) -> None:
    raise ValueError("it is wrong")


def _raise_two_lines(path: Path) -> None:
    raise ValueError(f"{path} is\nwrong")


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (_raise_key_error, "'a'"),
        (_warn, "warned: UserWarning: a"),
        (_raise_without_the_file_name, "not a sentence that names the file: ValueError: 'it is wrong'"),
        (_raise_two_lines, "not a sentence that names the file: ValueError: '.*is.nwrong'"),
        (lambda path: print("a"), "printed: a"),
        (lambda path: path.with_suffix(".part").write_text("a"), "did: open .*part"),
        (lambda path: path.unlink(), "did: os.remove"),
    ],
)
def test_misbehaving_readers_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], object], message: str
) -> None:
    folder = Folder("columns", tmp_path)
    monkeypatch.setattr(columns, "read", lambda path, **options: reader(path))
    with pytest.raises((AssertionError, KeyError), match=message):
        folder.check(folder.seeds[0])
