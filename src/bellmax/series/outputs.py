"""Destinations of a distance matrix: a new tensor, an array of the caller, or a path that later calls can resume."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax.files import locked
from bellmax.series.jobs import Block

Out: TypeAlias = "Tensor | NDArray[Any] | os.PathLike[str] | str | Any"


class Output(Protocol):
    """A matrix (K, L) that is written block by block."""

    @property
    def matrix(self) -> Any:
        """The object that is returned to the caller."""
        ...

    def has(self, block: Block) -> bool:
        """True if an earlier call wrote the block."""
        ...

    def write(self, block: Block, values: Tensor, mirrored: bool) -> None:
        """Write the values of a block and, if ``mirrored``, of its mirror image."""
        ...


def _assign(matrix: Any, block: Block, values: Any, mirrored: bool) -> None:
    """Write a block of distances to the matrix, and its transpose to the mirrored block."""
    matrix[block.rows, block.columns] = values
    if mirrored:
        matrix[block.columns, block.rows] = values.T


class Fresh:
    """A new tensor, of the dtype and on the device of the first block."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.matrix = torch.zeros(0)
        self._shape = shape
        if 0 in shape:
            self.matrix = torch.zeros(shape)

    def has(self, block: Block) -> bool:
        return False

    def write(self, block: Block, values: Tensor, mirrored: bool) -> None:
        if self.matrix.shape != self._shape:
            self.matrix = values.new_empty(self._shape)
        _assign(self.matrix, block, values, mirrored)


class Given:
    """A tensor or array of the caller, or another object of that shape whose blocks can be assigned."""

    def __init__(self, matrix: Any, shape: tuple[int, int]) -> None:
        got = tuple(getattr(matrix, "shape", ()))
        if got != shape or not hasattr(matrix, "__setitem__"):
            raise ValueError(
                f"out must be a path or an array of shape {shape}, got a {type(matrix).__name__} of shape {got}"
            )
        is_tensor = isinstance(matrix, Tensor)
        if not (matrix.dtype.is_floating_point if is_tensor else np.dtype(matrix.dtype).kind == "f"):
            raise ValueError(f"out must hold floating point numbers, got dtype {matrix.dtype}")
        self.matrix = matrix

    def has(self, block: Block) -> bool:
        return False

    def write(self, block: Block, values: Tensor, mirrored: bool) -> None:
        _assign(self.matrix, block, values if isinstance(self.matrix, Tensor) else values.cpu().numpy(), mirrored)


class AtPath(Given):
    """A file or folder, and next to it a list of the finished blocks.

    The list begins with the fingerprint of the job, so that another job can neither add to the matrix nor overwrite it.
    """

    def __init__(self, path: Path, shape: tuple[int, int], dtype: np.dtype[Any], fingerprint: str) -> None:
        self._list = _list_of(path)
        text = self._list.read_text(errors="replace") or f"{fingerprint}\n"
        first, *blocks = [line for line in text.splitlines(keepends=True) if line.endswith("\n")] or [""]
        if blocks and not path.exists():
            raise ValueError(
                f"{path} is missing, but its list of finished blocks exists: remove {self._list} to start again"
            )
        if first != f"{fingerprint}\n":
            raise ValueError(
                f"out must be the path of a call with the same series and options, got {path}, which holds the result "
                f"of another call: remove it and {self._list.name}, or pass another path"
            )
        self._list.write_text("".join([first, *blocks]))  # drops a line that was cut off
        self._finished = set(blocks)
        super().__init__(_open(path, shape, dtype, is_new=not blocks), shape)

    @staticmethod
    def _line(block: Block) -> str:
        return f"{block.rows.start}:{block.rows.stop} {block.columns.start}:{block.columns.stop}\n"

    def has(self, block: Block) -> bool:
        return self._line(block) in self._finished

    def write(self, block: Block, values: Tensor, mirrored: bool) -> None:
        super().write(block, values, mirrored)
        if isinstance(self.matrix, np.memmap):
            self.matrix.flush()
        with self._list.open("a") as file:
            file.write(self._line(block))


def _open(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], is_new: bool) -> Any:
    """Create or open the memory map or zarr array at a path."""
    if path.suffix == ".npy":
        matrix: Any = np.lib.format.open_memmap(path, "w+" if is_new else "r+", dtype, shape)
        if is_new and hasattr(os, "posix_fallocate"):  # a full disk raises an error now, not a bus error later
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, path.stat().st_size))
        return matrix
    try:
        import zarr
    except ImportError as error:
        raise ImportError(f"out={str(path)!r} needs zarr: pip install zarr") from error
    if not is_new:
        return zarr.open_array(str(path), mode="r+")
    options: dict[str, Any] = {"shape": shape, "dtype": dtype, "chunks": (1024, 1024), "fill_value": math.nan}
    return zarr.open_array(str(path), mode="w", **options)


def _list_of(path: Path) -> Path:
    """The file that lists the finished blocks of the matrix at a path."""
    return path.with_name(path.name + ".blocks")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the list of blocks of a path, which is created if it does not exist."""
    if path.exists() and not _list_of(path).exists():
        raise ValueError(f"out must be a new path, or the path of an equal call, got {path}, which exists")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(_list_of(path)))
        except BlockingIOError:
            raise ValueError(
                f"out must be a path that no other call writes to, got {path}: wait for the other call, or pass "
                "another path"
            ) from None
        yield


@contextmanager
def output(out: Out | None, shape: tuple[int, int], like: Tensor | None, fingerprint: Any) -> Iterator[Output]:
    """Yield the output to write to; a path is locked until the end. ``fingerprint()`` identifies the pairs."""
    if out is None:
        yield Fresh(shape)
        return
    if not isinstance(out, str | os.PathLike):
        yield Given(out, shape)
        return
    path = Path(out)
    if path.suffix not in (".npy", ".zarr"):
        raise ValueError(f"out must be a path that ends with '.npy' or '.zarr', got {str(path)!r}")
    dtype = np.dtype(np.float64 if like is not None and like.dtype == torch.float64 else np.float32)
    with _locked(path):
        yield AtPath(path, shape, dtype, fingerprint())
