"""Shared by all benchmarks: interleaved timing, peak memory, the machine, tables, the command line.

Importable without torch, for peers in a separate environment. Importing it keeps freed memory in the process, for all
alike: a virtual machine may give large blocks back to its host, and then a gradient of 134 MB takes nine times as long.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], object]
Times = dict[str, float]
Row = dict[str, Any]
SECONDS = 1.0  # for the repeats of each run
MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**28}  # glibc's M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in MALLOPT.items():
            mallopt(parameter, value)


if "--memory" not in sys.argv:  # where peaks are measured
    keep_memory()


def measure(runs: dict[str, Run], repeats: int, seconds: float = math.inf) -> dict[str, Times]:
    """Milliseconds of each run: minimum and median over interleaved repeats, after one warm-up.

    A run is repeated at least twice, and no longer once its repeats have taken ``seconds``.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            if len(times[name]) > 2 and sum(times[name][1:]) > 1e3 * seconds:
                continue
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"min": min(t[1:]), "median": statistics.median(t[1:])} for name, t in times.items()}


def ratio(slow: Times, fast: Times) -> float:
    """The ratio of medians."""
    return slow["median"] / fast["median"]


def forget_peak() -> int:
    """Resident memory now, in KB; :func:`peak` counts from here on. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Peak resident memory since :func:`forget_peak`, in KB. Linux only."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def in_own_process(script: str | Path, *arguments: str, python: str | Path = sys.executable) -> str:
    """The output of ``script`` run with these arguments."""
    done = subprocess.run([python, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def collect(tables: dict[str, Callable[[], object]]) -> dict[str, object]:
    """Make the tables one by one, and print their names."""
    results = {}
    for name, make in tables.items():
        print(f"{name} …", file=sys.stderr)
        results[name] = make()
    return results


def random_series(shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Two families of series, (R, N) and (C, M) with R · C = B, the same in every process."""
    batch, *lengths = shape
    rows = next(rows for rows in range(math.isqrt(batch), 0, -1) if batch % rows == 0)
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(size) for size in zip((rows, batch // rows), lengths, strict=True))
    return x, y


def machine() -> dict[str, object]:
    import torch

    import bellmax as bx

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return {"processor": model, "python": platform.python_version(), "torch": torch.__version__, **bx.backend_info()}


def heading(title: str, m: dict[str, object]) -> list[str]:
    """The first lines of a page of results."""
    return [
        f"# {title}",
        "",
        f"{m['processor']}, {m['threads']} threads, {m['instructions']}; Python {m['python']}, torch {m['torch']}.",
        "float32; milliseconds, minimum / median. Made by `make bench`, with freed memory kept.",
    ]


def cell(times: Times) -> str:
    return f"{times['min']:.2f} / {times['median']:.2f}"


def shown(shape: Sequence[int]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def factor(number: float) -> str:
    return f"{number:.{0 if number >= 10 else 1 if number >= 2 else 2}f}×"


def nanoseconds(times: Times, count: int) -> str:
    """The median per item, for ``count`` items."""
    return f"{times['median'] * 1e6 / count:.2f}"


def slower(row: Row, name: str, peers: dict[str, str | None], than: str = "bellmax") -> str:
    """The times of a peer, and how many times slower it is."""
    if name in row:
        return f"{cell(row[name])} ({factor(ratio(row[name], row[than]))})"
    return "not installed" if name in peers and peers[name] is None else "–"


def against(rows: list[Row], sizes: str, columns: Sequence[str], peers: dict[str, str | None]) -> list[str]:
    """A table of bellmax and its rivals; ``sizes`` says what a shape is made of."""
    header = " | ".join((sizes, "task", "bellmax:", *(f"{name}:" for name in columns)))
    lines = [
        [shown(r["shape"]), r["task"], cell(r["bellmax"]), *(slower(r, name, peers) for name in columns)] for r in rows
    ]
    return table(header, lines)


def table(columns: str, rows: list[list[str]]) -> list[str]:
    """A Markdown table; ``columns`` are separated by "|", and those that end in ":" are aligned to the right."""
    names = [name.strip() for name in columns.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    cells = [[name.removesuffix(":") for name in names], *rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return ["", lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def command_line(description: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/benchmarks"), help=f"folder for {name}.json and {name}.md"
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"runs of each task after the first (default: {repeats})"
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)  # the case for in_own_process
    return parser


def report(output: Path, name: str, results: dict[str, object], page: list[str]) -> None:
    """Write the results as JSON and as a page, and print the page."""
    text = "\n".join(page) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / f"{name}.md").write_text(text)
    print(text)
