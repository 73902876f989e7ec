"""Helpers of all benchmarks: interleaved timing, peak memory, the machine, tables, the command line.

The module can be imported without torch, for libraries in a separate environment. Importing it tells glibc to keep
freed memory in the process, for all libraries. Otherwise a virtual machine may return large blocks to its host, and a
gradient of 134 MB takes nine times as long.
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
UNITS = "Times are in milliseconds: the minimum / the median over repeated calls. Inputs are float32."
LABELS = {
    "good loop": "PyTorch loop",
    "plain loop": "PyTorch loop, indexed",
    "anti-diagonals": "PyTorch, anti-diagonals",
    "torch": "torch ctc_loss",
    "entmax": "PyTorch loop with entmax",
    "reference": "reference backend",
    "softmax": "softmax attention",
}
MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**28}  # glibc's M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in MALLOPT.items():
            mallopt(parameter, value)


if "--memory" not in sys.argv:  # a process that measures peak memory must return freed memory
    keep_memory()


def measure(runs: dict[str, Run], repeats: int, seconds: float = math.inf) -> dict[str, Times]:
    """Milliseconds of each run: minimum and median over interleaved repeats, after one warm-up.

    A run is repeated at least twice. It is not repeated again once its repeats have taken ``seconds``.
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
    """Ratio of medians."""
    return slow["median"] / fast["median"]


def forget_peak() -> int:
    """Reset the peak that :func:`peak` returns, and return the resident memory in KB. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Peak resident memory since :func:`forget_peak`, in KB. Linux only."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def in_own_process(script: str | Path, *arguments: str, python: str | Path = sys.executable) -> str:
    """Run ``script`` with these arguments in a new process, and return its output."""
    done = subprocess.run([python, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def collect(tables: dict[str, Callable[[], object]]) -> dict[str, object]:
    """Call the functions one by one, print their names, and return their results."""
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
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"processor": model, **versions, **bx.backend_info(), "keeps_memory": sys.platform == "linux"}


def heading(name: str, m: dict[str, object], arguments: str = "", units: str = UNITS) -> list[str]:
    """First lines of a table: the command that reproduces it, the machine, the units."""
    lines = [f"Reproduce with `python benchmarks/{name}.py{arguments}`. Machine: {described(m)}.", "", units]
    if not m.get("keeps_memory", True):
        lines.append("In this benchmark, the process returned freed memory to the system. In the other benchmarks, the")
        lines.append("process keeps freed memory. So calls with large outputs can take longer in this benchmark.")
    return lines


def described(m: dict[str, object]) -> str:
    """The machine and the main versions, in one line."""
    threads = f"{m['threads']} thread{'' if m['threads'] == '1' else 's'}"
    return f"{m['processor']}, {threads}, {m['instructions']}, Python {m['python']}, torch {m['torch']}"


def installed(peers: dict[str, str | None]) -> str:
    """Names and versions of the other libraries, in one sentence."""
    return "Versions: " + ", ".join(f"{name} {version or 'not installed'}" for name, version in peers.items()) + "."


def cell(times: Times) -> str:
    return f"{times['min']:.2f} / {times['median']:.2f}"


def shown(shape: Sequence[int]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def factor(number: float) -> str:
    return f"{number:.{0 if number >= 10 else 1 if number >= 2 else 2}f}×"


def nanoseconds(times: Times, count: int) -> str:
    """Median time per item in nanoseconds, for ``count`` items."""
    return f"{times['median'] * 1e6 / count:.2f}"


def slower(row: Row, name: str, peers: dict[str, str | None], than: str = "bellmax") -> str:
    """Times of another library, and its time divided by the time of bellmax."""
    if name in row:
        return f"{cell(row[name])} ({factor(ratio(row[name], row[than]))})"
    return "not installed" if name in peers and peers[name] is None else "–"


def against(rows: list[Row], sizes: str, columns: Sequence[str], peers: dict[str, str | None]) -> list[str]:
    """A table of bellmax and other implementations; ``sizes`` names the entries of a shape."""
    header = " | ".join((sizes, "task", "bellmax:", *(f"{label(name)}:" for name in columns)))
    lines = [
        [shown(r["shape"]), r["task"], cell(r["bellmax"]), *(slower(r, name, peers) for name in columns)] for r in rows
    ]
    return table(header, lines)


def label(name: str) -> str:
    """The name of another implementation, as tables and figures show it."""
    return LABELS.get(name, name)


def table(columns: str, rows: list[list[str]]) -> list[str]:
    """A Markdown table. ``columns`` are separated by "|"; a column that ends in ":" is aligned to the right."""
    names = [name.strip() for name in columns.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    cells = [[name.removesuffix(":") for name in names], *rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return ["", lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def command_line(description: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/benchmarks"), help=f"folder for {name}.json and tables/{name}.md"
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"runs of each task after the first (default: {repeats})"
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)  # the case for in_own_process
    return parser


def report(output: Path, name: str, results: dict[str, object], page: list[str]) -> None:
    """Write the results to NAME.json and the table to tables/NAME.md, and print the table."""
    text = "\n".join(page) + "\n"
    (output / "tables").mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / "tables" / f"{name}.md").write_text(text)
    print(text)
