"""Roofline: compare the time of value and gradient with the time of its memory traffic and of its exponentials.

The rates of memory and of exponentials are measured with torch operators on the same threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from ctc import ours as our_ctc
from ctc import problem
from dag import layered
from measuring import (
    SECONDS,
    Row,
    Run,
    Times,
    cell,
    collect,
    command_line,
    factor,
    heading,
    machine,
    measure,
    report,
    shown,
    table,
)
from rivals import our_dtw, our_scores, ours, random_cost, random_potentials

import bellmax as bx

PAUSE = 0.006  # seconds
MEGABYTES = 64
TASK = "value and gradient"
DENSE = ((32, 50, 17), (64, 128, 32), (16, 512, 64), (8, 64, 256))
SCORES = ((32, 50, 17), (64, 128, 32), (3200, 50, 2))
ALIGNED = ((32, 256, 256), (8, 1024, 1024))
LABELLED = ((32, 400, 32, 60), (16, 1000, 64, 120), (8, 200, 1000, 40))
FRAMES = (16, 800, 200)
GRAPH = (200, 100)


def rates(repeats: int) -> dict[str, float]:
    """Bytes read, bytes written to new memory, and exponentials, all per nanosecond."""
    count = MEGABYTES * 2**20 // 4
    x, small = torch.rand(count), torch.rand(2**16)
    out = torch.empty_like(small)
    times = measure(
        {"read": x.sum, "write": lambda: torch.empty(count).fill_(0.0), "exp": lambda: torch.exp(small, out=out)},
        repeats,
    )
    counts = {"read": 4 * count, "write": 4 * count, "exp": small.numel()}
    return {name: counts[name] / times[name]["min"] / 1e6 for name in times}


def paused(run: Run, repeats: int) -> Times:
    """Milliseconds of a run after a pause without computation."""

    def wait() -> None:
        end = time.perf_counter() + PAUSE
        while time.perf_counter() < end:
            pass

    return measure({"": wait, "run": run}, repeats, SECONDS)["run"]


def problems() -> dict[str, tuple[Run, int, int, int]]:
    """By name and shape: the run, the bytes it must read, the bytes it must write, and its exponentials."""
    cases: dict[str, tuple[Run, int, int, int]] = {}
    for shape in DENSE:
        edges = math.prod(shape) * shape[-1]
        cases[f"dense chain {shown(shape)}"] = (
            ours(random_potentials(shape), "negentropy").runs()[TASK],
            4 * edges,
            4 * edges,
            edges,
        )
    for shape in SCORES:
        batch, steps, states = shape
        parts = (batch, steps, states), (states, states), (states,), (states,)
        run = our_scores(*(torch.randn(part, requires_grad=True) for part in parts)).runs()[TASK]
        size = 4 * math.prod(shape)
        cases[f"chain from scores {shown(shape)}"] = (
            run,
            size,
            size,
            math.prod(shape),
        )  # the sweep itself multiplies exponentiated scores
    for shape in ALIGNED:
        cells = math.prod(shape)
        cases[f"DTW {shown(shape)}"] = (
            our_dtw(random_cost(shape), "negentropy").runs()[TASK],
            4 * cells,
            4 * cells,
            2 * cells,
        )
    for shape in LABELLED:
        batch, frames, classes, labels = shape
        used, written = 4 * batch * frames * (labels + 1), 4 * batch * frames * classes
        exponentials = 3 * batch * frames * labels  # 1 of 2 moves into a blank, 2 of 3 moves into a label
        cases[f"CTC {shown(shape)}"] = our_ctc(*problem(shape)).runs()[TASK], used, written, exponentials
    scores = torch.randn(FRAMES)
    size = 4 * scores.numel()
    cases[f"best path of a monotonic alignment {shown(FRAMES)}"] = (
        lambda: bx.MonotonicAlignment(scores).best_path(),
        size,
        size,
        0,
    )
    dag = bx.DAG(layered(*GRAPH))
    theta = torch.randn(dag.num_edges, requires_grad=True)
    run = lambda: torch.autograd.grad(dag.paths(theta).value, theta)  # noqa: E731
    cases[f"DAG with {dag.num_edges} edges"] = run, 8 * dag.num_edges, 4 * dag.num_edges, dag.num_edges
    return cases


def near(repeats: int, rate: Callable[[], dict[str, float]]) -> list[Row]:
    """Times of all cases, and the times of their bytes and exponentials at the measured rates."""
    per_ns, rows = rate(), []
    for name, (run, read, written, exponentials) in problems().items():
        bytes_alone = (read / per_ns["read"] + written / per_ns["write"]) / 1e6
        exponentials_alone = exponentials / per_ns["exp"] / 1e6
        rows.append({
            "name": name, "bytes": bytes_alone, "exponentials": exponentials_alone,
            "again": measure({"run": run}, repeats, SECONDS)["run"], "paused": paused(run, repeats),
        })  # fmt: skip
    return rows


def markdown(results: dict[str, object]) -> list[str]:
    per_ns, rows = results["rates"], results["near"]
    lines = [
        [
            row["name"], f"{row['bytes']:.2f}", f"{row['exponentials']:.2f}", cell(row["again"]),
            factor(row["again"]["min"] / max(row["bytes"], row["exponentials"])), cell(row["paused"]),
        ]
        for row in rows
    ]  # fmt: skip
    return [
        *heading("limits", results["machine"]),
        "",
        "This benchmark compares the time of bellmax with a bound: the time that memory traffic or exponentials alone",
        "would need. Each case computes the value and the gradient, except for the best path.",
        "",
        "The column *memory* is the time to read the inputs once and to write the gradients once to new memory. The",
        "column *exponentials* is the time to compute all exponentials that the algorithm needs. The bound is the",
        "longer of these two times. We computed both times from the rates of torch operators with the same number of",
        "threads:",
        f"{per_ns['read']:.1f} bytes read per ns, {per_ns['write']:.1f} bytes written per ns,"
        f" {per_ns['exp']:.1f} exponentials per ns.",
        "bellmax computes exponentials faster than torch, so some times of bellmax are shorter than the bound.",
        "",
        "*Repeated* is the time of a call if the calls follow each other directly. *After a pause* is the time of a",
        "call if there is no computation in the 6 ms before it, so that threads sleep and caches are cold. Calls in a",
        "training loop are closer to *after a pause*. *Repeated / bound* is the minimum time of *repeated* divided by",
        "the bound.",
        *table("case | memory: | exponentials: | repeated: | repeated / bound: | after a pause:", lines),
    ]


def main() -> None:
    parser = command_line(__doc__, "limits", 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    measured: dict[str, float] = {}

    def rate() -> dict[str, float]:
        measured.update(rates(args.repeats))
        return measured

    results = collect({"machine": machine, "near": lambda: near(args.repeats, rate), "rates": lambda: measured})
    report(args.output, "limits", results, markdown(results))


if __name__ == "__main__":
    main()
