"""Several training runs, each in a separate process, a few in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bellmax_apps.files import read_json

Running = tuple[Path, "subprocess.Popen[bytes]", int]


def train_all(commands: Mapping[Path, Sequence[str]], jobs: int, metric: str, told: Callable[[str], None]) -> None:
    """Run ``bellmax`` with the given arguments for each run folder; report each epoch to ``told``.

    The commands should resume: then it can be called again after an interrupt, and they check that finished runs have
    the same settings and data.
    """
    waiting = list(commands)
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                run.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "bellmax", *commands[run]]
                with (run / "log.txt").open("ab") as log:
                    process = subprocess.Popen(
                        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
                    )
                running.append((run, process, 0))
                told(f"{run}: begun")
            time.sleep(0.2)
            running = list(_going_on(running, metric, told))
    finally:
        for _, process, _ in running:
            process.terminate()
            process.wait()


def _going_on(running: Sequence[Running], metric: str, told: Callable[[str], None]) -> Iterator[Running]:
    """The runs that are still running. Reports finished epochs; raises if a run has failed."""
    for run, process, seen in running:
        history = run / "history.json"
        records = read_json(history) if history.exists() else []
        if len(records) > seen:
            last = records[-1]
            told(f"{run}: epoch {len(records)}, dev {metric} {last[metric]:.2f}, loss {last['loss']:.3f}")
        status = process.poll()
        if status is None:
            yield run, process, len(records)
        elif status != 0:
            lines = (run / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"{run} failed (see log.txt there): {' '.join(lines[-1:])}")
