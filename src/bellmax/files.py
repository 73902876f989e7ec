"""Write files atomically, verify them by a digest, and lock them against other processes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO
from uuid import uuid4

_SEAL = b"bellmax 1 "
_LOCKED_BYTE = 2**30  # Windows forbids reading locked bytes, so lock one beyond the end of the file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path`` to write to. At the end, the temporary file replaces ``path``.

    After an error or an interrupt, the temporary file is removed and ``path`` is unchanged. Raises ``OSError`` with a
    message of one sentence if the file cannot be written.
    """
    with _temporary(path) as temporary:
        yield temporary
        os.replace(temporary, path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a unique path in the folder of ``path``, and remove its file at the end.

    Errors of writing become an ``OSError`` that names ``path`` instead of the temporary file.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}")  # unique: another process may write the same file
    try:
        yield temporary
    except OSError as error:
        if error.filename not in (None, str(temporary)):  # the error is about another file
            raise
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # the file in which torch.save reports a full disk
            raise
        free = shutil.disk_usage(path.parent).free / 1e6
        raise OSError(f"{path} cannot be written: its disk has {free:.1f} MB left") from error
    finally:
        temporary.unlink(missing_ok=True)


def create(path: Path, content: bytes) -> None:
    """Write a file that does not exist. If another process creates it first, keep the other process's file."""
    with _temporary(path) as temporary:
        temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # the file system has no hard links
            os.replace(temporary, path)


# --- digests


def write_sealed(path: Path, content: bytes, owner: str) -> None:
    """Write a file whose first line is a digest of ``owner`` and ``content``."""
    with replacing(path) as temporary:
        temporary.write_bytes(_seal(content, owner) + content)


def read_sealed(path: Path, owner: str) -> bytes:
    """Return the content that :func:`write_sealed` wrote for the same ``owner``.

    Raises ``ValueError`` if a bit of the file has changed, or if another owner or an older version wrote it.
    """
    digest, newline, content = path.read_bytes().partition(b"\n")
    if digest + newline != _seal(content, owner):
        raise ValueError(f"{path} is damaged")
    return content


def _seal(content: bytes, owner: str) -> bytes:
    """Return the first line of a sealed file: the version of the format and a digest."""
    return _SEAL + sha256(owner.encode() + b"\n" + content).hexdigest().encode() + b"\n"


# --- locks


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The file is created if it does not exist.

    The operating system releases the lock if the process ends. Raises ``BlockingIOError`` if another process or thread
    holds the lock. On file systems without locks, this is a no-op.
    """
    with path.open("ab") as file:
        try:
            _lock(file)
            has_lock = True
        except (BlockingIOError, PermissionError):
            raise BlockingIOError(f"{path} is in use") from None
        except OSError:
            has_lock = False
        try:
            yield
        finally:
            if has_lock:
                _unlock(file)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        """Lock an open file without waiting. Raises ``OSError`` if another process or thread holds the lock."""
        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: IO[bytes]) -> None:
        """Release the lock of an open file."""
        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        """Lock an open file without waiting. Raises ``OSError`` if another process or thread holds the lock."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[bytes]) -> None:
        """Release the lock of an open file."""
        fcntl.flock(file, fcntl.LOCK_UN)  # explicit: forked processes may still hold copies of the open file
