"""Files that commands read and write. Every error is a ``ValueError`` with one sentence that names the file."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import IO, Any

import bellmax.files as files


@contextmanager
def reading(path: Path, what: str, why: str | None = None) -> Iterator[None]:
    """Turn any error of a reader into a ``ValueError`` with one sentence that names the file.

    Args:
        path: File that is read inside the ``with`` block.
        what: Expected content, such as "JSON".
        why: Reason to report, default the message of the error.

    >>> with reading(Path("no.json"), "JSON"):
    ...     json.loads(Path("no.json").read_text())
    Traceback (most recent call last):
    ...
    ValueError: no.json does not exist

    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        yield
    except BaseException as error:
        # Libraries written in Rust raise a PanicException, which is not an Exception. Interrupts must pass.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path} cannot be read as {what}: {why or _reason(error)}") from None


def _reason(error: BaseException) -> str:
    """The message of an error as one printable line of at most 200 characters, without its technical headline."""
    if isinstance(error, KeyError):
        return f"{str(error)[:200]} is missing"
    if isinstance(error, EOFError):
        return "it ends too early"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
    first = lines[0][:200] if lines else type(error).__name__
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in first)[:200]


EXPANDED, RATIO = 2**26, 100
"""A compressed file may expand to 2²⁶ bytes or to 100 times its size, the larger of the two."""
LINE = 2**24
"""Maximum number of characters in a line of text."""


def expansion_limit(path: Path) -> int:
    """Maximum number of bytes to which a compressed file may expand."""
    return max(EXPANDED, RATIO * path.stat().st_size)


def check_expansion(size: int, limit: float) -> None:
    """Raise ``ValueError`` if a compressed file expands to more bytes than its limit."""
    if size > limit:
        raise ValueError(f"it expands to more than {limit / 1e6:g} MB, the most for a compressed file of its size")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or gzipped.

    Raises ``ValueError`` if a line has more than 2²⁴ characters, or if the lines of a gzipped file have more characters
    than 100 times its bytes, and more than 2²⁶.
    """
    is_zipped = path.suffix == ".gz"
    with (
        reading(path, "UTF-8 text"),
        gzip.open(path, "rt", encoding="utf-8-sig") if is_zipped else path.open(encoding="utf-8-sig") as file,
    ):
        limit, size = expansion_limit(path) if is_zipped else math.inf, 0
        for number in count(1):
            line = file.readline(LINE + 1)
            if not line:
                break
            if len(line) > LINE:
                raise ValueError(f"line {number} has more than {LINE} characters")
            size += len(line)
            check_expansion(size, limit)
            yield line


def chunks(stream: IO[bytes]) -> Iterator[list[str]]:
    """Yield the lines of a UTF-8 stream in lists of all complete lines that have arrived.

    A command can thus process a file in batches, and still answer a person at the keyboard after each line.
    """
    number = 0
    unfinished: list[bytes] = []
    read: Callable[[int], bytes] = stream.read1  # type: ignore[attr-defined]  # returns what has arrived
    while data := read(2**16):
        *complete, last = data.split(b"\n")
        if complete:
            complete[0] = b"".join((*unfinished, complete[0]))
            unfinished = []
            yield from _decoded(complete, number)
            number += len(complete)
        unfinished.append(last)
    if any(unfinished):
        yield from _decoded([b"".join(unfinished)], number)


def _decoded(lines: list[bytes], before: int) -> Iterator[list[str]]:
    """Yield the lines before the first one that is not UTF-8, then raise ``ValueError`` with the number of that line.

    The stream has ``before`` earlier lines.
    """
    valid = list(takewhile(_is_text, lines))
    yield [line.decode("utf-8" if before + n else "utf-8-sig") for n, line in enumerate(valid)]
    if len(valid) < len(lines):
        wrong = lines[len(valid)]
        raise ValueError(f"standard input, line {before + len(valid) + 1}: must be UTF-8, got {wrong[:60]!r}")


def _is_text(line: bytes) -> bool:
    """True if the bytes are UTF-8."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def find_split(folder: Path, candidates: Sequence[Path], split: str, names: Mapping[str, Sequence[str]]) -> Path | None:
    """The file of a split: the only candidate whose name contains a name of the split. None if no candidate does.

    Names are tried in order. Raises ``ValueError`` if several candidates match the same name.

    >>> find_split(Path("data"), [Path("dev.tsv"), Path("train.tsv")], "dev", {"dev": ("valid", "dev")}).name
    'dev.tsv'
    """
    if split not in names:
        raise ValueError(f"split must be train, dev or test, got {split!r}")
    for name in names[split]:
        matches = [path for path in candidates if name in path.name.lower()]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ValueError(
                f"{folder} has {len(matches)} files for {split}: {', '.join(path.name for path in matches)}"
            )
    return None


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    with reading(path, "JSON"):
        return json.loads(path.read_text(encoding="utf-8"))


def texts(data: Any, name: str) -> list[str]:
    """The entry ``name`` of JSON data. Raises ``ValueError`` if it is not a list of valid text."""
    entry = data[name]
    if not isinstance(entry, list) or not all(isinstance(text, str) for text in entry):
        raise ValueError(f"{name} must be a list of strings")
    "".join(entry).encode()  # raises if a text is not valid Unicode
    return entry


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write in place of ``path``, as :func:`bellmax.files.replacing` does.

    Raises ``ValueError`` if the file cannot be written.
    """
    try:
        with files.replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise ValueError(str(error)) from None


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def fingerprint(paths: Iterable[Path]) -> str:
    """Digest of the contents of files, in this order."""
    digest = sha256()
    for path in paths:
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()
