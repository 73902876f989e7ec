"""All losses and Ω on several sets of data, at one budget."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import bellmax.apps.training as training
from bellmax.apps.ner.data import Corpus
from bellmax.apps.ner.tagging import evaluate, load

LOSSES = "surrogate", "relaxed"


@dataclass(frozen=True)
class Cell:
    """A run of the table."""

    data: Path
    omega: str
    loss: str
    run: Path

    def is_trained(self) -> bool:
        return (self.run / "done").exists()


def cells(data: Sequence[Path], omegas: Sequence[str], output: Path) -> list[Cell]:
    names = [folder.resolve().name for folder in data]
    if len(set(names)) < len(names):
        raise ValueError(f"folders of data must have different names, got {names}")
    return [
        Cell(folder, omega, loss, output / name / f"{omega}-{loss}")
        for (folder, name), omega, loss in product(zip(data, names, strict=True), omegas, LOSSES)
    ]


def train_all(of: Sequence[Cell], options: Callable[[Cell], list[str]], jobs: int, told: Callable[[str], None]) -> None:
    """Train what is not trained yet, each in a process of its own, ``jobs`` at a time; interrupted, it can resume."""
    waiting = [cell for cell in of if not cell.is_trained()]
    running: list[tuple[Cell, subprocess.Popen[bytes], int]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                cell.run.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "bellmax", "ner", "train", str(cell.data), *options(cell)]
                with (cell.run / "log.txt").open("ab") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                running.append((cell, process, 0))
                told(f"{cell.run}: begun")
            time.sleep(0.2)
            running = list(_going_on(running, told))
    finally:
        for _, process, _ in running:
            process.terminate()


def _going_on(
    running: Sequence[tuple[Cell, subprocess.Popen[bytes], int]], told: Callable[[str], None]
) -> Iterator[tuple[Cell, subprocess.Popen[bytes], int]]:
    """Those that still run; says which epochs are over, and fails where one has."""
    for cell, process, seen in running:
        history = cell.run / "history.json"
        records = training.read_json(history) if history.exists() else []
        if len(records) > seen:
            told(f"{cell.run}: epoch {len(records)}, dev F1 {records[-1]['f1']:.2f}, loss {records[-1]['loss']:.3f}")
        status = process.poll()
        if status is None:
            yield cell, process, len(records)
        elif status == 0:
            (cell.run / "done").touch()
        else:
            last = (cell.run / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{cell.run} failed (see log.txt there): {' '.join(last)}")


def measure(cell: Cell) -> dict[str, Any]:
    """A finished run on the test data, by its best weights on the development data."""
    model, vocabulary, config = load(cell.run)
    history = training.read_json(cell.run / "history.json")
    best = max(history, key=lambda record: record["f1"])
    test = evaluate(model, Corpus(config.read(cell.data, "test"), vocabulary))
    return {
        "data": cell.data.resolve().name,
        "omega": cell.omega,
        "gamma": config.gamma,
        "loss": cell.loss,
        "epochs": len(history),
        "best_epoch": int(best["epoch"]),
        "dev_f1": best["f1"],
        "test_f1": test["f1"],
        "tags_per_word": test["tags_per_word"],
        "seconds_per_epoch": sorted(record["seconds"] for record in history)[len(history) // 2],
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each set of data."""
    lines: list[str] = []
    for name in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == name]
        best = max(row["test_f1"] for row in own)
        lines += [
            f"## {name}",
            "",
            "| Ω | γ | loss | test F1 | dev F1 | best epoch | tags a word | s an epoch |",
            "|---|---:|---|---:|---:|---:|---:|---:|",
        ]
        for row in own:
            test = f"{row['test_f1']:.2f}"
            test = f"**{test}**" if row["test_f1"] == best else test
            lines.append(
                f"| {row['omega']} | {row['gamma']:g} | {row['loss']} | {test} "
                f"| {row['dev_f1']:.2f} | {row['best_epoch']} of {row['epochs']} | {row['tags_per_word']:.2f} "
                f"| {row['seconds_per_epoch']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)
