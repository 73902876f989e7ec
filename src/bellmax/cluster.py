"""Split the computation of a distance matrix or of nearest neighbors into tasks, for schedulers such as Slurm job
arrays or joblib.

If you have a Dask client or a ``concurrent.futures`` executor, pass it as ``client`` to ``bx.dtw_cdist`` or
``bx.dtw_neighbors``. For all other schedulers, :func:`plan` splits a call into tasks.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bellmax.files import read_sealed, write_sealed
from bellmax.series.collections import dtw_cdist, pairs_job
from bellmax.series.jobs import Block, Folder, Job, compute_on_worker, describe_failure
from bellmax.series.neighbors import dtw_neighbors, neighbors_job

__all__ = ["Task", "plan"]

_JOBS: dict[Any, Callable[..., Job]] = {dtw_cdist: pairs_job, dtw_neighbors: neighbors_job}


@dataclass(frozen=True)
class Task:
    """One block of a call that :func:`plan` splits into tasks.

    A task is small and can be pickled, since the series are in the folder ``checkpoint``.

    >>> import tempfile, bellmax as bx
    >>> tasks = bx.cluster.plan(bx.dtw_cdist, [[0, 1], [0, 2]], checkpoint=tempfile.mkdtemp())
    >>> isinstance(tasks[0], Task)
    True
    >>> tasks[0].run()
    """

    checkpoint: Path
    fingerprint: str
    block: Block

    def run(self) -> None:
        """Compute the block and write it to the folder. If the folder already contains the block, do nothing."""
        folder = Folder(self.checkpoint, self.fingerprint)
        if folder.has(self.block):
            return
        job = _load(self.checkpoint, self.fingerprint)
        try:
            results = compute_on_worker(job, self.block)
        except Exception as error:
            raise RuntimeError(describe_failure(self.block, error)) from error
        folder.write(self.block, results)


@lru_cache(maxsize=1)
def _load(checkpoint: Path, fingerprint: str) -> Job:
    """Read the job of a folder, once for all tasks of a process. Raises ``ValueError`` if it is damaged."""
    path = checkpoint / "job.pickle"
    try:
        job: Job = pickle.loads(read_sealed(path, fingerprint))
        is_right = job.fingerprint() == fingerprint
    except (FileNotFoundError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"{path} is missing or damaged, or another call or version wrote it: remove it, and call plan again"
        )
    return job


def plan(function: Callable[..., Any], *args: Any, checkpoint: str | os.PathLike[str], **options: Any) -> list[Task]:
    """Split a call of ``bx.dtw_cdist`` or ``bx.dtw_neighbors`` into tasks for a cluster.

    Run all tasks. To collect the result, call ``function`` with the same arguments and the same ``checkpoint``.

    Args:
        function: ``bx.dtw_cdist`` or ``bx.dtw_neighbors``.
        args: The positional arguments of the call.
        checkpoint: A folder that all tasks can access. The series are stored there as a pickle, so other people must
            not be able to write to the folder.
        options: The keyword arguments of the call, except ``out``, ``client`` and ``progress``.

    Returns:
        A list of :class:`Task`. Equal calls return equal lists. If the folder already contains the block of a task, the
        task does nothing.

    >>> import tempfile
    >>> import bellmax as bx
    >>> folder = tempfile.mkdtemp()
    >>> xs = [[0, 1, 2, 1], [0, 0, 1, 2, 1], [5, 5], [4, 6, 5]]
    >>> tasks = bx.cluster.plan(bx.dtw_neighbors, xs, k=1, checkpoint=folder)
    >>> for task in tasks:                                       # anywhere, in any order
    ...     task.run()
    >>> bx.dtw_neighbors(xs, k=1, checkpoint=folder).indices.squeeze(1)
    tensor([1, 0, 3, 2])
    """
    if not callable(function) or function not in _JOBS:
        raise ValueError(f"function must be bx.dtw_cdist or bx.dtw_neighbors, got {function!r}")
    for name in {"out", "client", "progress"} & options.keys():
        raise ValueError(f"plan takes no {name}: pass {name} to the call that collects the blocks")
    job = _JOBS[function](*args, **options)
    path, fingerprint = Path(checkpoint).absolute(), job.fingerprint()
    Folder(path, fingerprint)
    blocks, saved = job.blocks(), path / "job.pickle"
    if blocks and not saved.exists():
        _save(saved, job, fingerprint)
    return [Task(path, fingerprint, block) for block in blocks]


def _save(path: Path, job: Job, fingerprint: str) -> None:
    """Write the job to a file. Raises ``ValueError`` if its cost cannot be pickled."""
    try:
        content = pickle.dumps(job)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(f"cost must be picklable, such as a function defined in a module: {error}") from error
    write_sealed(path, content, fingerprint)
