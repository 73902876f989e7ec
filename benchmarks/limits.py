"""How near to the machine: what a value and its gradient must read, write and exponentiate, and the time they take.

A floor is the time of the bytes alone (inputs read once, gradients written once into new memory) or of the
exponentials alone, whichever is longer, at rates measured here with plain torch on the same threads. Our exponentials
are faster than torch's, so that some rows are below it. "After a pause" is the same call after 6 ms in which nothing
was computed: a thread sleeps, and caches are cold. That is how a call in a training loop, or beside a peer in the
other benchmarks, finds the machine.
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
    """Bytes a nanosecond read, and written into new memory; exponentials a nanosecond."""
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
    """Milliseconds of a run after a pause in which this thread computed nothing."""

    def wait() -> None:
        end = time.perf_counter() + PAUSE
        while time.perf_counter() < end:
            pass

    return measure({"": wait, "run": run}, repeats, SECONDS)["run"]


def problems() -> dict[str, tuple[Run, int, int, int]]:
    """By name and shape: the run, bytes that it must read and write, and exponentials."""
    found: dict[str, tuple[Run, int, int, int]] = {}
    for shape in DENSE:
        edges = math.prod(shape) * shape[-1]
        found[f"dense chain {shown(shape)}"] = (
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
        found[f"chain from scores {shown(shape)}"] = (
            run,
            size,
            size,
            math.prod(shape),
        )  # in exp space the rest are products
    for shape in ALIGNED:
        cells = math.prod(shape)
        found[f"DTW {shown(shape)}"] = (
            our_dtw(random_cost(shape), "negentropy").runs()[TASK],
            4 * cells,
            4 * cells,
            2 * cells,
        )
    for shape in LABELLED:
        batch, frames, classes, labels = shape
        used, all_of_them = 4 * batch * frames * (labels + 1), 4 * batch * frames * classes
        exponentials = 3 * batch * frames * labels  # one less than the moves into a blank, and into a label
        found[f"CTC {shown(shape)}"] = our_ctc(*problem(shape)).runs()[TASK], used, all_of_them, exponentials
    scores = torch.randn(FRAMES)
    size = 4 * scores.numel()
    found[f"best path of frames and tokens {shown(FRAMES)}"] = (
        lambda: bx.MonotonicAlignment(scores).best_path(),
        size,
        size,
        0,
    )
    dag = bx.DAG(layered(*GRAPH))
    theta = torch.randn(dag.num_edges, requires_grad=True)
    run = lambda: torch.autograd.grad(dag.paths(theta).value, theta)  # noqa: E731
    found[f"graph of {dag.num_edges} edges"] = run, 8 * dag.num_edges, 4 * dag.num_edges, dag.num_edges
    return found


def near(repeats: int, rate: Callable[[], dict[str, float]]) -> list[Row]:
    found, rows = rate(), []
    for name, (run, read, written, exponentials) in problems().items():
        bytes_alone = (read / found["read"] + written / found["write"]) / 1e6
        exponentials_alone = exponentials / found["exp"] / 1e6
        rows.append({
            "name": name, "bytes": bytes_alone, "exponentials": exponentials_alone,
            "again": measure({"run": run}, repeats, SECONDS)["run"], "paused": paused(run, repeats),
        })  # fmt: skip
    return rows


def markdown(results: dict[str, object]) -> list[str]:
    found, rows = results["rates"], results["near"]
    lines = [
        [
            row["name"], f"{row['bytes']:.2f}", f"{row['exponentials']:.2f}", cell(row["again"]),
            factor(row["again"]["min"] / max(row["bytes"], row["exponentials"])), cell(row["paused"]),
        ]
        for row in rows
    ]  # fmt: skip
    return [
        *heading("How near to the machine", results["machine"]),
        *(__doc__ or "").split("\n", 1)[1].splitlines(),
        "",
        f"Measured: {found['read']:.1f} bytes a nanosecond read, {found['write']:.1f} written into new memory,"
        f" {found['exp']:.1f} exponentials a nanosecond.",
        *table(
            "value and gradient | bytes: | exponentials: | again and again: | over the floor: | after a pause:", lines
        ),
    ]


def main() -> None:
    parser = command_line(__doc__, "limits", 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, float] = {}

    def rate() -> dict[str, float]:
        found.update(rates(args.repeats))
        return found

    results = collect({"machine": machine, "near": lambda: near(args.repeats, rate), "rates": lambda: found})
    report(args.output, "limits", results, markdown(results))


if __name__ == "__main__":
    main()
