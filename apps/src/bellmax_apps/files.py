"""Files that commands read and write. What is wrong with a file is said in one sentence that names it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import IO, Any

import bellmax.files as files


@contextmanager
def reading(path: Path, what: str, why: str | None = None) -> Iterator[None]:
    """Turn whatever a reader raises into a ValueError that names the file, what it should be, and why it is not.

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
        # A panic of a library in Rust is no Exception, and neither is an interrupt.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path} cannot be read as {what}: {why or _reason(error)}") from None


def _reason(error: BaseException) -> str:
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
"""A compressed file may expand to this many bytes or to this many times its size, whichever is more."""
LINE = 2**24
"""Characters that a line of text may have."""


def most_expanded(path: Path) -> int:
    """Bytes to which a compressed file may expand."""
    return max(EXPANDED, RATIO * path.stat().st_size)


def check_expansion(size: int, most: float) -> None:
    if size > most:
        raise ValueError(f"it expands to more than {most / 1e6:g} MB, the most for a compressed file of its size")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, plain or gzipped.

    Raises ``ValueError`` if a line has more than 2²⁴ characters, or if the lines of a gzipped file have more characters
    than 100 times its bytes, and more than 2²⁶.
    """
    is_zipped = path.suffix == ".gz"
    with (
        reading(path, "UTF-8 text"),
        gzip.open(path, "rt", encoding="utf-8-sig") if is_zipped else path.open(encoding="utf-8-sig") as file,
    ):
        most, size = most_expanded(path) if is_zipped else math.inf, 0
        for number in count(1):
            line = file.readline(LINE + 1)
            if not line:
                break
            if len(line) > LINE:
                raise ValueError(f"line {number} has more than {LINE} characters")
            size += len(line)
            check_expansion(size, most)
            yield line


def chunks(stream: IO[bytes]) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, as many at a time as are there: all that a person or a program waits for."""
    number = 0
    parts: list[bytes] = []
    read: Callable[[int], bytes] = stream.read1  # type: ignore[attr-defined]  # no more than is there
    while data := read(2**16):
        *whole, last = data.split(b"\n")
        if whole:
            whole[0] = b"".join((*parts, whole[0]))
            parts = []
            yield from _decoded(whole, number)
            number += len(whole)
        parts.append(last)
    if any(parts):
        yield from _decoded([b"".join(parts)], number)


def _decoded(lines: list[bytes], before: int) -> Iterator[list[str]]:
    """The lines up to the first that is not UTF-8, which is then a ValueError that names it."""
    whole = list(takewhile(_is_text, lines))
    yield [line.decode("utf-8" if before + n else "utf-8-sig") for n, line in enumerate(whole)]
    if len(whole) < len(lines):
        wrong = lines[len(whole)]
        raise ValueError(f"standard input, line {before + len(whole) + 1}: must be UTF-8, got {wrong[:60]!r}")


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_json(path: Path) -> Any:
    with reading(path, "JSON"):
        return json.loads(path.read_text(encoding="utf-8"))


def texts(given: Any, name: str) -> list[str]:
    """The texts that JSON holds under this name."""
    found = given[name]
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} must be a list of texts")
    "".join(found).encode()  # raises if one is not valid Unicode
    return found


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


def write_json(path: Path, what: Any) -> None:
    """Write JSON atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(what, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def fingerprint(paths: Iterable[Path]) -> str:
    """Tells these files from others, by what they hold."""
    found = sha256()
    for path in paths:
        found.update(sha256(path.read_bytes()).digest())
    return found.hexdigest()
