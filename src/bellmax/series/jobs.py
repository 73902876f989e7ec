"""Jobs: calls that are computed block by block, by this process or by the workers of a client, with checkpoints."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cached_property, partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bellmax.files import create, read_sealed, write_sealed
from bellmax.series.measure import Measure
from bellmax.series.routes import Batch, values
from bellmax.series.runs import Advance

Results: TypeAlias = "tuple[Tensor, ...]"
"""The tensors that a job computes of one block."""

CELLS_OF_BLOCK = 2**34  # seconds of work: the most that an interruption loses, and the size of a task for a worker
_AHEAD = 4  # blocks that are computed or wait, for each worker
_ATTEMPTS = 3  # to send the series again, if all workers that held them are gone
_PROBE = 64  # steps of two series that identify a cost function


class Block(NamedTuple):
    """The pairs of some series of each side."""

    rows: slice
    columns: slice

    def __str__(self) -> str:
        rows, columns = (f"{side.start}–{side.stop - 1}" for side in self)
        return f"rows {rows} against columns {columns}"


def mean_length(series: list[Tensor]) -> int:
    """The mean length of some series, rounded down, but at least 1."""
    return max(1, sum(map(len, series)) // max(1, len(series)))


class Job(ABC):
    """A computation over all pairs of two collections, or of one with itself, without gradients. It can be pickled."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor]) -> None:
        with torch.no_grad():
            self.measure = measure.with_number_gamma(left[0]) if left else measure
        self.left, self.right = left, right

    @property
    def is_symmetric(self) -> bool:
        """True if a collection is compared with itself."""
        return self.left is self.right

    @abstractmethod
    def blocks(self) -> list[Block]:
        """The blocks that cover all pairs."""

    @abstractmethod
    def compute(self, block: Block, advance: Advance = lambda done: None) -> Results:
        """Compute a block; ``advance`` is called with the amount of work that was done since the last call."""

    @abstractmethod
    def size(self, block: Block) -> int:
        """The amount of work in a block: the sum over all calls of ``advance``."""

    @abstractmethod
    def shape(self, block: Block) -> tuple[int, int]:
        """The shape of each result of a block."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each result of a block."""

    @cached_property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the distances, which may be wider than the series because of the cost or γ."""
        with torch.no_grad():
            return values(self.measure, Batch(self.left[0][None, :1], self.right[0][None, :1])).dtype

    @property
    def options(self) -> tuple[Any, ...]:
        """Arguments of the job that belong in its fingerprint, in addition to the measure and the series."""
        return ()

    def fingerprint(self) -> str:
        """A digest of the series and of all options that change the result."""
        measure = self.measure
        cost = getattr(measure.cost, "__qualname__", type(measure.cost)) if callable(measure.cost) else measure.cost
        band = None if measure.band is None else float(measure.band)
        sizes = len(self.left), None if self.is_symmetric else len(self.right)
        options = (type(self).__name__, cost, band, _describe(measure), measure.divergence, sizes, *self.options)
        digest = sha256(repr(options).encode())
        for tensor in (*self.left, *([] if self.is_symmetric else self.right), *self._probe_cost()):
            digest.update(repr((tensor.dtype, tensor.shape)).encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _probe_cost(self) -> Results:
        """The values of a cost function on the first steps of two series, which tell it from others of its name."""
        if not (callable(self.measure.cost) and self.left and self.right):
            return ()
        with torch.no_grad(), self.measure.on_its_backend():
            return (self.measure.cost(*(side[None, :_PROBE] for side in (self.left[0], self.right[-1]))),)

    def __getstate__(self) -> dict[str, Any]:
        right = None if self.is_symmetric else _packed(self.right)
        return {**vars(self), "left": _packed(self.left), "right": right}

    def __setstate__(self, state: dict[str, Any]) -> None:
        left, right = (side and list(side[0].split(side[1])) for side in (state["left"], state["right"]))
        vars(self).update(state, left=left, right=left if right is None else right)


def _describe(measure: Measure) -> object:
    """Ω and γ for a fingerprint. The repr of a tensor would round γ to four digits."""
    gamma = measure.omega.gamma
    if not isinstance(gamma, Tensor):
        return measure.omega
    return measure.omega.at_unit_gamma(), gamma.dtype, gamma.tolist()


def _packed(collection: list[Tensor]) -> tuple[Tensor, list[int]]:
    """A collection as one tensor and the lengths, which pickles much faster. The collection must not be empty."""
    return torch.cat([series.detach() for series in collection]), list(map(len, collection))


# --- computing blocks


def check_client(client: Any) -> None:
    """Raise ``ValueError`` if the client cannot submit tasks."""
    if client is not None and not callable(getattr(client, "submit", None)):
        raise ValueError(
            "client must have a method submit(function, *arguments), such as a dask.distributed.Client or a "
            f"concurrent.futures.Executor, got a {type(client).__name__}"
        )
    if getattr(client, "status", None) in ("closing", "closed"):  # of Dask
        raise ValueError(f"client must be open, got a {type(client).__name__} that is closed: make a new one")


def results_of(
    job: Job, client: Any, checkpoint: str | os.PathLike[str] | None, is_done: Callable[[Block], bool], advance: Advance
) -> Iterator[tuple[Block, Results]]:
    """Yield each block that is not done, with its results: first the blocks in the folder, then all others."""
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
    computed = ((block, job.compute(block, advance)) for block in missing)
    for block, results in computed if client is None else _by_client(job, missing, client, advance):
        if folder is not None:
            folder.write(block, results)
        yield block, results


def compute_on_worker(job: Job, block: Block) -> Results:
    """Compute a block in another thread or process, on the backend that the caller requested."""
    with torch.no_grad(), job.measure.on_its_backend():
        return tuple(tensor.cpu() for tensor in job.compute(block))


class _Submitter:
    """Sends a job to the workers of a client: once, if the client can scatter it as Dask does, or with each block."""

    def __init__(self, job: Job, client: Any) -> None:
        self._job = job
        self._scatter = getattr(client, "scatter", None)
        self._threads = getattr(client, "nthreads", None)
        self._submit = client.submit if self._scatter is None else partial(client.submit, pure=False)
        self.attempts, self.is_lost = 0, True

    def submit(self, block: Block) -> Any:
        """Submit a block, after sending the job if no worker has it, and return the future."""
        if self.is_lost:
            self._remote = self._job if self._scatter is None else self._scatter(self._job, broadcast=True, hash=False)
            self.attempts, self.is_lost = self.attempts + 1, False
        return self._submit(compute_on_worker, self._remote, block)

    @property
    def max_pending(self) -> int:
        """The number of blocks to submit at a time, in proportion to the workers, whose number may change."""
        threads = (os.cpu_count() or 1) if self._threads is None else sum(self._threads().values())
        return _AHEAD * max(1, threads)


class _Pending:
    """Submitted blocks. They are returned as they finish, or in order if futures do not report when they do."""

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

    def wait(self) -> tuple[Block, int, Results, Exception | None]:
        """Wait for a block: its attempt, its results and its error. Drops the future, so that workers forget it."""
        number = self._finished.get()
        block, future, attempt = self._submitted[number]
        results, error = _result(future)
        del self._submitted[number]
        return block, attempt, results, error

    def cancel(self) -> None:
        for _, future, _ in self._submitted.values():
            with suppress(Exception):  # of a client that is closed
                future.cancel()


def _by_client(job: Job, blocks: list[Block], client: Any, advance: Advance) -> Iterator[tuple[Block, Results]]:
    """Yield blocks as they finish. If one fails, yield all that were submitted before raising its error."""
    if not blocks:
        return
    submitter, waiting, pending = _Submitter(job, client), deque(blocks), _Pending()
    failure: tuple[Block, Exception] | None = None
    try:
        while pending or (waiting and failure is None):
            while waiting and failure is None:
                block = waiting[0]
                try:
                    if len(pending) >= submitter.max_pending:  # asks the client, and may fail too
                        break
                    pending.add(waiting.popleft(), submitter.submit(block), submitter.attempts)
                except Exception as closed:  # or broken
                    failure = block, closed
            if not pending:
                break
            block, attempt, results, error = pending.wait()
            if error is None:
                advance(job.size(block))
                yield block, results
            elif failure is None and isinstance(error, CancelledError) and attempt < _ATTEMPTS:
                submitter.is_lost |= attempt == submitter.attempts  # no worker has the series
                waiting.appendleft(block)
            else:
                failure = failure or (block, error)
    finally:
        pending.cancel()
    if failure is not None:
        raise RuntimeError(describe_failure(*failure)) from failure[1]


def _result(future: Any) -> tuple[Results, Exception | None]:
    """The results of a future, or none and its error."""
    try:
        return future.result(), None
    except Exception as error:
        return (), error


def describe_failure(block: Block, error: BaseException) -> str:
    """An error message with the block that failed, and the first sentence of its error."""
    cause = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return f"{block} could not be computed: {type(error).__name__}{': ' if cause else ''}{cause}"


# --- checkpoints


class Folder:
    """A folder of finished blocks: one file for each block, and the fingerprint of the job.

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
                raise ValueError(
                    f"checkpoint must be a new or empty folder, or the checkpoint of an equal call, got {path}"
                )
            create(mark, fingerprint.encode())
        if mark.read_bytes() != fingerprint.encode():
            raise ValueError(
                f"checkpoint must be the folder of a call with the same series and options, got {path}, which holds "
                "blocks of another call: remove the folder, or pass another"
            )

    def _file(self, block: Block) -> Path:
        rows, columns = block
        return self.path / f"rows-{rows.start}-{rows.stop}-columns-{columns.start}-{columns.stop}.block"

    def _owner(self, block: Block) -> str:
        """The text that the digest of a file covers in addition to its content."""
        return f"{self._fingerprint} {self._file(block).name}"

    def has(self, block: Block) -> bool:
        return self._file(block).exists()

    def read(self, block: Block, job: Job) -> Results:
        """Read the results of a block. Raises ``ValueError`` if they are damaged or belong to another job."""
        file = self._file(block)
        expected = [(torch.strided, dtype, job.shape(block)) for dtype in job.dtypes]
        try:
            results: Results = torch.load(BytesIO(read_sealed(file, self._owner(block))), weights_only=True)
            is_whole = [(tensor.layout, tensor.dtype, tensor.shape) for tensor in results] == expected
        except Exception:
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{file} is damaged, or another call or version wrote it: remove it and repeat the call to compute "
                "the block again"
            )
        return results

    def write(self, block: Block, results: Results) -> None:
        content = BytesIO()
        torch.save(results, content)
        write_sealed(self._file(block), content.getvalue(), self._owner(block))
