"""Several training runs, each in a separate process, a few at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bellmax_apps.files import read_json

Running = tuple[Path, "subprocess.Popen[bytes]", int]
"""A run folder, its process, and the number of its epochs that are reported."""


def train_all(commands: Mapping[Path, Sequence[str]], jobs: int, metric: str, report: Callable[[str], None]) -> None:
    """Run ``bellmax`` with these arguments for each run folder, and report each epoch as a line of text.

    The commands should resume. Then this function can be called again after an interrupt, and each command checks that
    a finished run has the same settings and data.
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
                report(f"{run}: begun")
            time.sleep(0.2)
            running = list(_poll(running, metric, report))
    finally:
        for _, process, _ in running:
            process.terminate()
            process.wait()


def _poll(running: Sequence[Running], metric: str, report: Callable[[str], None]) -> Iterator[Running]:
    """Report new epochs, and yield the runs whose process has not ended.

    Raises ``RuntimeError`` with the last line of the log if a run has failed.
    """
    for run, process, reported in running:
        history = run / "history.json"
        records = read_json(history) if history.exists() else []
        if len(records) > reported:
            last = records[-1]
            report(f"{run}: epoch {len(records)}, dev {metric} {last[metric]:.2f}, loss {last['loss']:.3f}")
        status = process.poll()
        if status is None:
            yield run, process, len(records)
        elif status != 0:
            lines = (run / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"{run} failed (see log.txt there): {' '.join(lines[-1:])}")
