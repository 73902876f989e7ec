from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pytest

import bellmax.files
from bellmax_apps import files
from bellmax_apps.files import (
    chunks,
    fingerprint,
    read_json,
    read_lines,
    reading,
    replacing,
    texts,
    write_json,
)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EOFError(), "it ends too early"),
        (KeyError("settings"), "'settings' is missing"),
        (PermissionError(13, "Permission denied", "x"), "Permission denied"),
        (RuntimeError("Error(s) in loading:\n\tsize mismatch for a\n\tsize mismatch for b"), "size mismatch for a"),
        (IndexError(), "IndexError"),
        (ValueError("\x1b" + 999 * "a"), r"\\x1ba{196}"),
        (ValueError(999 * "\x7f"), r"(\\x7f){50}"),
        (KeyError(999 * "a"), "'a{199} is missing"),
        (type("PanicException", (BaseException,), {})("out of range"), "out of range"),
    ],
)
def test_any_error_of_a_reader_becomes_one_sentence(tmp_path: Path, error: BaseException, why: str) -> None:
    path = tmp_path / "a.bin"
    path.touch()
    with pytest.raises(ValueError, match=rf"{path} cannot be read as music: {why}$"), reading(path, "music"):
        raise error


def test_interrupts_pass_through_readers() -> None:
    with pytest.raises(KeyboardInterrupt), reading(Path(__file__), "music"):
        raise KeyboardInterrupt


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json does not exist"):
        read_json(tmp_path / "none.json")


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{nothing")
    with pytest.raises(ValueError, match=r"a.json cannot be read as JSON: Expecting property name"):
        read_json(path)
    zipped = tmp_path / "a.txt.gz"
    zipped.write_bytes(gzip.compress(b"one\ntwo\n" * 1000)[:-20])
    with pytest.raises(ValueError, match=r"a.txt.gz cannot be read as UTF-8 text: "):
        list(read_lines(zipped))


def test_a_compressed_text_that_expands_too_far_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one two\n" * 10_000))
    assert len(list(read_lines(path))) == 10_000
    monkeypatch.setattr(files, "EXPANDED", 50_000)
    with pytest.raises(
        ValueError, match=r"a.txt.gz cannot be read as UTF-8 text: it expands to more than 0.05 MB, the most for "
    ):
        list(read_lines(path))
    monkeypatch.setattr(files, "RATIO", 1000)
    assert len(list(read_lines(path))) == 10_000


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_that_is_too_long_is_refused(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.txt{ending}"
    text = b"one\n" + 99 * b"a" + b"\n" + 100 * b"b"
    path.write_bytes(gzip.compress(text) if ending else text)
    monkeypatch.setattr(files, "LINE", 100)
    assert [len(line) for line in read_lines(path)] == [4, 100, 100]
    monkeypatch.setattr(files, "LINE", 99)
    with pytest.raises(ValueError, match=r"cannot be read as UTF-8 text: line 2 has more than 99 characters$"):
        list(read_lines(path))


@pytest.mark.parametrize("text", ["\ufeffone\ntwo\n", "one\ntwo\n"])
def test_a_byte_order_mark_is_removed(tmp_path: Path, text: str) -> None:
    plain, zipped = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_text(text, encoding="utf-8")
    zipped.write_bytes(gzip.compress(text.encode()))
    assert list(read_lines(plain)) == list(read_lines(zipped)) == ["one\n", "two\n"]


def test_texts_of_json() -> None:
    assert texts({"words": ["a", "é"]}, "words") == ["a", "é"]
    for wrong in ("ab", ["a", 1], {"a": 1}, None):
        with pytest.raises(ValueError, match=r"^words must be a list of strings$"):
            texts({"words": wrong}, "words")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        texts({"words": ["\ud800"]}, "words")


class Pipe(io.BytesIO):
    """A stream that returns the bytes of one write at a time, as a pipe does."""

    def __init__(self, *writes: bytes) -> None:
        super().__init__()
        self._writes = iter(writes)

    def read1(self, size: int | None = -1) -> bytes:
        return next(self._writes, b"")


def test_chunks_yields_complete_lines_as_they_arrive() -> None:
    assert list(chunks(Pipe(b"one\n", b"two\nth", b"r\xc3", b"\xa9\n", b"end"))) == [
        ["one"],
        ["two"],
        ["thré"],
        ["end"],
    ]
    assert list(chunks(Pipe(b"a\n\nb\n"))) == [["a", "", "b"]]
    assert list(chunks(Pipe())) == []


def test_chunks_yields_valid_lines_before_it_reports_an_invalid_one() -> None:
    lists = chunks(Pipe(b"one\n", b"two\nthr\xff\nfour\n"))
    assert next(lists) == ["one"]
    assert next(lists) == ["two"]
    with pytest.raises(ValueError, match=r"standard input, line 3: must be UTF-8, got b'thr\\xff'"):
        next(lists)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"a.json cannot be written: No space left on device"):
        write_json(path, [2])
    assert json.loads(path.read_text()) == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_files_with_similar_names_are_not_touched(tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("mine")
    (tmp_path / "thesis.part").write_text("mine too")
    (tmp_path / "run.part").symlink_to(letter)
    for name in ("thesis.json", "run.json", "run.pt"):
        write_json(tmp_path / name, [1])
        assert json.loads((tmp_path / name).read_text()) == [1]
        assert not (tmp_path / name).is_symlink()
    assert letter.read_text() == "mine"
    assert (tmp_path / "thesis.part").read_text() == "mine too"
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_an_interrupted_write_leaves_no_temporary_file(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == [1]


def test_fingerprints_depend_on_contents_and_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("one")
    b.write_text("two")
    assert fingerprint([a, b]) == fingerprint([a, b])
    assert len({fingerprint(files) for files in ([a], [b], [a, b], [b, a])}) == 4


@pytest.mark.parametrize("error", [RuntimeError("a bug"), FileNotFoundError(2, "No such file", "other")], ids=repr)
def test_unrelated_errors_pass_through_replacing(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, bellmax.files.replacing(tmp_path / "a.txt"):
        raise error
    assert caught.value is error
