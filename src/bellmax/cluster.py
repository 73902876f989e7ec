"""Calls on more than one machine, as tasks for whatever runs them.

``bx.dtw_cdist`` and ``bx.dtw_neighbors`` take a client of Dask's, or any executor, themselves: ``client=``. For all
else, such as arrays of jobs under Slurm or joblib, :func:`plan` cuts a call into tasks.
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
from bellmax.series.jobs import Block, Folder, Job, computed, sentence
from bellmax.series.neighbors import dtw_neighbors, neighbors_job

__all__ = ["Task", "plan"]

_JOBS: dict[Any, Callable[..., Job]] = {dtw_cdist: pairs_job, dtw_neighbors: neighbors_job}


@dataclass(frozen=True)
class Task:
    """A block of a call. It is small and can be pickled: the series are in the folder."""

    checkpoint: Path
    fingerprint: str
    block: Block

    def run(self) -> None:
        """Compute the block, unless it is there, and leave it in the folder."""
        folder = Folder(self.checkpoint, self.fingerprint)
        if folder.has(self.block):
            return
        job = _load(self.checkpoint, self.fingerprint)
        try:
            found = computed(job, self.block)
        except Exception as error:
            raise RuntimeError(sentence(self.block, error)) from error
        folder.write(self.block, found)


@lru_cache(maxsize=1)
def _load(checkpoint: Path, fingerprint: str) -> Job:
    path = checkpoint / "job.pickle"
    try:
        job: Job = pickle.loads(read_sealed(path, fingerprint))
        is_right = job.fingerprint() == fingerprint
    except (FileNotFoundError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"{path} is missing or damaged, or another call or version wrote it: remove it, and make the plan again"
        )
    return job


def plan(function: Callable[..., Any], *args: Any, checkpoint: str | os.PathLike[str], **options: Any) -> list[Task]:
    """The tasks of a call of ``bx.dtw_cdist`` or ``bx.dtw_neighbors``, which collects them by ``checkpoint=``.

    Args:
        function: ``bx.dtw_cdist`` or ``bx.dtw_neighbors``.
        args: its arguments.
        checkpoint: a folder that all tasks can reach. The series are pickled there: give no folder that someone else
            may write to.
        options: options of the function that say what to compute: all but ``out``, ``client`` and ``progress``.

    Returns:
        A list that is the same each time. A task whose block is in the folder does nothing.

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
        raise ValueError(f"{name} must be given to the call that collects the blocks, not to plan")
    job = _JOBS[function](*args, **options)
    path, fingerprint = Path(checkpoint).absolute(), job.fingerprint()
    Folder(path, fingerprint)
    blocks, saved = job.blocks(), path / "job.pickle"
    if blocks and not saved.exists():
        _save(saved, job, fingerprint)
    return [Task(path, fingerprint, block) for block in blocks]


def _save(path: Path, job: Job, fingerprint: str) -> None:
    try:
        content = pickle.dumps(job)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(f"cost must be a function that can be pickled, such as one of a module: {error}") from error
    write_sealed(path, content, fingerprint)
