"""A call as blocks of pairs, which this process or the workers of a client compute, and a folder in which they stay."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bellmax.backends.choice import requested_backend, use_backend
from bellmax.files import create, read_sealed, write_sealed
from bellmax.series.pairs import Measure

Tensors: TypeAlias = "tuple[Tensor, ...]"
Advance: TypeAlias = "Callable[[int], object]"
Found: TypeAlias = "Iterator[tuple[Block, Tensors]]"

CELLS_OF_BLOCK = 2**34  # seconds of work: what an interruption loses, and what a worker does at a time
_AHEAD = 4  # blocks for each worker that are computed or wait
_ATTEMPTS = 3  # to send the series anew, if all workers that held them are gone
_BEGINNING = 64  # steps


class Block(NamedTuple):
    """Some series of each side."""

    rows: slice
    columns: slice

    def __str__(self) -> str:
        rows, columns = (f"{side.start}–{side.stop - 1}" for side in self)
        return f"rows {rows} against columns {columns}"


def parts(count: int, step: int) -> list[slice]:
    """The numbers from 0 to ``count``, ``step`` at a time."""
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def mean_length(series: list[Tensor]) -> int:
    return max(1, sum(map(len, series)) // max(1, len(series)))


class Job(ABC):
    """What a call computes of the pairs of two collections, which may be one; it can be pickled."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor]) -> None:
        self.measure, self.left, self.right = measure, left, right
        self._backend = requested_backend()  # workers are other threads or processes

    @property
    def is_symmetric(self) -> bool:
        return self.left is self.right

    def on_its_backend(self) -> AbstractContextManager[None]:
        """The backend that was asked for where the job was made."""
        return nullcontext() if self._backend is None else use_backend(self._backend)

    @abstractmethod
    def blocks(self) -> list[Block]: ...

    @abstractmethod
    def compute(self, block: Block, advance: Advance = lambda done: None) -> Tensors:
        """What is found in a block; ``advance`` is called with how much of it was done."""

    @abstractmethod
    def size(self, block: Block) -> int:
        """What the calls of ``advance`` sum up to."""

    @abstractmethod
    def shape(self, block: Block) -> tuple[int, int]:
        """The shape of all tensors that are found in a block."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each tensor that is found in a block."""

    @cached_property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the distances, which a cost or γ may widen."""
        with torch.no_grad():
            return self.measure(self.left[0][None, :1], self.right[0][None, :1]).dtype

    @property
    def options(self) -> tuple[Any, ...]:
        """What tells the job from others of the same measure and series."""
        return ()

    def fingerprint(self) -> str:
        """Tells jobs apart: by their series and how they are compared."""
        measure = self.measure
        cost = getattr(measure.cost, "__qualname__", type(measure.cost)) if callable(measure.cost) else measure.cost
        band = None if measure.band is None else float(measure.band)
        sizes = len(self.left), None if self.is_symmetric else len(self.right)
        kept = (type(self).__name__, cost, band, measure.omega, measure.divergence, sizes, *self.options)
        found = sha256(repr(kept).encode())
        for tensor in (*self.left, *([] if self.is_symmetric else self.right), *self._of_cost()):
            found.update(repr((tensor.dtype, tensor.shape)).encode())
            found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def _of_cost(self) -> Tensors:
        """What tells a cost that is a function from others of its name: its costs of the beginnings of two series."""
        if not (callable(self.measure.cost) and self.left and self.right):
            return ()
        with torch.no_grad(), self.on_its_backend():
            return (self.measure.cost(*(side[None, :_BEGINNING] for side in (self.left[0], self.right[-1]))),)

    def __getstate__(self) -> dict[str, Any]:
        right = None if self.is_symmetric else _packed(self.right)
        return {**vars(self), "left": _packed(self.left), "right": right}

    def __setstate__(self, state: dict[str, Any]) -> None:
        left, right = (side and list(side[0].split(side[1])) for side in (state["left"], state["right"]))
        vars(self).update(state, left=left, right=left if right is None else right)


def _packed(collection: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Two objects in place of thousands. Both sides of a job have series, or it has no blocks."""
    return torch.cat([series.detach() for series in collection]), list(map(len, collection))


# --- where blocks are computed


def check_client(client: Any) -> None:
    if client is not None and not callable(getattr(client, "submit", None)):
        raise ValueError(
            "client must have a method submit(function, *arguments), such as a dask.distributed.Client or a "
            f"concurrent.futures.Executor, got a {type(client).__name__}"
        )
    if getattr(client, "status", None) in ("closing", "closed"):  # of Dask
        raise ValueError(f"client must be open, got a {type(client).__name__} that is closed: make a new one")


def found_in(
    job: Job, client: Any, checkpoint: str | os.PathLike[str] | None, is_done: Callable[[Block], bool], advance: Advance
) -> Found:
    """The blocks that are not done, and what is found in them: first those of the folder, then the others."""
    folder = None if checkpoint is None else Folder(Path(checkpoint), job.fingerprint())
    missing = []
    for block in job.blocks():
        if is_done(block):
            advance(job.size(block))
        elif folder is not None and folder.has(block):
            advance(job.size(block))
            yield block, folder.read(block, job)
        else:
            missing.append(block)
    found = ((block, job.compute(block, advance)) for block in missing)
    for block, tensors in found if client is None else _by_client(job, missing, client, advance):
        if folder is not None:
            folder.write(block, tensors)
        yield block, tensors


def computed(job: Job, block: Block) -> Tensors:
    """What a worker does."""
    with torch.no_grad(), job.on_its_backend():
        return tuple(tensor.cpu() for tensor in job.compute(block))


class _Sent:
    """A job, sent to workers: once, if the client can scatter it as Dask does, or else with each block."""

    def __init__(self, job: Job, client: Any) -> None:
        self._job = job
        self._scatter = getattr(client, "scatter", None)
        self._threads = getattr(client, "nthreads", None)
        self._submit = client.submit if self._scatter is None else partial(client.submit, pure=False)
        self.attempts, self.is_lost = 0, True

    def submit(self, block: Block) -> Any:
        if self.is_lost:
            self._there = self._job if self._scatter is None else self._scatter(self._job, broadcast=True, hash=False)
            self.attempts, self.is_lost = self.attempts + 1, False
        return self._submit(computed, self._there, block)

    @property
    def most(self) -> int:
        """How many blocks to have submitted: some for each worker, whose number may change."""
        threads = (os.cpu_count() or 1) if self._threads is None else sum(self._threads().values())
        return _AHEAD * max(1, threads)


class _Flying:
    """Blocks that were submitted. They come back as they finish, or in order if the client does not say when."""

    def __init__(self) -> None:
        self._finished: SimpleQueue[int] = SimpleQueue()
        self._submitted: dict[int, tuple[Block, Any, int]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._submitted)

    def add(self, block: Block, future: Any, attempt: int) -> None:
        number = next(self._numbers)
        if hasattr(future, "add_done_callback"):
            future.add_done_callback(lambda _: self._finished.put(number))
        else:
            self._finished.put(number)
        self._submitted[number] = block, future, attempt

    def wait(self) -> tuple[Block, int, Tensors, Exception | None]:
        """A block that is finished, and what was found in it or the error. Its future is let go: workers forget it."""
        number = self._finished.get()
        block, future, attempt = self._submitted[number]
        found, error = _result(future)
        del self._submitted[number]
        return block, attempt, found, error

    def cancel(self) -> None:
        for _, future, _ in self._submitted.values():
            with suppress(Exception):  # of a client that is closed
                future.cancel()


def _by_client(job: Job, blocks: list[Block], client: Any, advance: Advance) -> Found:
    """Blocks as they finish. If one fails, those that were submitted come first, then the error."""
    if not blocks:
        return
    sent, waiting, flying = _Sent(job, client), deque(blocks), _Flying()
    failure: tuple[Block, Exception] | None = None
    try:
        while flying or (waiting and failure is None):
            while waiting and failure is None:
                block = waiting[0]
                try:
                    if len(flying) >= sent.most:  # which asks the client, too
                        break
                    flying.add(waiting.popleft(), sent.submit(block), sent.attempts)
                except Exception as closed:  # or broken: the client's own error
                    failure = block, closed
            if not flying:
                break
            block, attempt, found, error = flying.wait()
            if error is None:
                advance(job.size(block))
                yield block, found
            elif (
                failure is None and isinstance(error, CancelledError) and attempt < _ATTEMPTS
            ):  # no worker has the series
                sent.is_lost |= attempt == sent.attempts
                waiting.appendleft(block)
            else:
                failure = failure or (block, error)
    finally:
        flying.cancel()
    if failure is not None:
        raise RuntimeError(sentence(*failure)) from failure[1]


def _result(future: Any) -> tuple[Tensors, Exception | None]:
    try:
        return future.result(), None
    except Exception as error:
        return (), error


def sentence(block: Block, error: BaseException) -> str:
    """What failed, and the first sentence of why."""
    cause = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return f"{block} could not be computed: {type(error).__name__}{': ' if cause else ''}{cause}"


# --- where they stay


class Folder:
    """A folder of finished blocks, a file for each, and a fingerprint of the job they belong to.

    The first line of a file is a digest of the fingerprint, of the block and of the rest of the file.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self._fingerprint, mark = path, fingerprint, path / "fingerprint"
        if path.exists() and not path.is_dir():
            raise ValueError(f"checkpoint must be a folder, got the file {path}")
        path.mkdir(parents=True, exist_ok=True)
        is_used = any(not entry.name.startswith(mark.name) for entry in path.iterdir())
        if not mark.exists():
            if is_used:
                raise ValueError(f"checkpoint must be a new or empty folder, or what the same call left, got {path}")
            create(mark, fingerprint.encode())
        if mark.read_bytes() != fingerprint.encode():
            raise ValueError(
                f"checkpoint must be the folder of the same series and options, got {path}, which holds blocks of "
                "others: remove it, or give another"
            )

    def _file(self, block: Block) -> Path:
        rows, columns = block
        return self.path / f"rows-{rows.start}-{rows.stop}-columns-{columns.start}-{columns.stop}.block"

    def _owner(self, block: Block) -> str:
        return f"{self._fingerprint} {self._file(block).name}"

    def has(self, block: Block) -> bool:
        return self._file(block).exists()

    def read(self, block: Block, job: Job) -> Tensors:
        file = self._file(block)
        wanted = [(torch.strided, dtype, job.shape(block)) for dtype in job.dtypes]
        try:
            found: Tensors = torch.load(BytesIO(read_sealed(file, self._owner(block))), weights_only=True)
            is_whole = [(tensor.layout, tensor.dtype, tensor.shape) for tensor in found] == wanted
        except Exception:
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{file} is damaged, or another call or version wrote it: remove it, and its block is computed again"
            )
        return found

    def write(self, block: Block, found: Tensors) -> None:
        content = BytesIO()
        torch.save(found, content)
        write_sealed(self._file(block), content.getvalue(), self._owner(block))
