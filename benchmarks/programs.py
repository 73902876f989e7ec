"""Measure `bx.program`: tracing, value and gradient against PyTorch loops, the overhead of a call, and the cost of Ω.

All calls are interleaved in one process, on one thread. A row gives the minimum and the median of its runs. Peak memory
and torch.compile are measured in separate processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measuring import (
    SECONDS,
    Row,
    Run,
    Times,
    cell,
    collect,
    command_line,
    factor,
    forget_peak,
    heading,
    in_own_process,
    machine,
    measure,
    nanoseconds,
    peak,
    ratio,
    report,
    slower,
    table,
)
from omegas import OMEGAS
from overhead import CALLS, many, microseconds, with_gradient
from rivals import check_value
from torch import Tensor
from trees import ByWidth, inside

import bellmax as bx
from bellmax import lattice as L

Size = tuple[int, ...]
TRACED: dict[str, tuple[Size, ...]] = {
    "knapsack": ((1000, 52), (1000, 520)),
    "edit distance": ((180, 185), (570, 585)),
    "folding": ((80,), (185,)),
    "parsing": ((80,), (182,)),
}
SOLVED: dict[str, Size] = {"knapsack": (50, 500), "edit distance": (180, 185), "folding": (80,), "parsing": (80,)}
COMPILED: tuple[Size, ...] = ((5, 20), (10, 50), (20, 100), (50, 500))  # knapsack
REGULARIZED: Size = (1000, 520)  # knapsack
QUICK: dict[str, Size] = {"knapsack": (6, 12), "edit distance": (5, 7), "folding": (8,), "parsing": (8,)}
BATCHES, QUICK_BATCHES = (1, 8, 32), (1, 2)
TINY = {"sizes": (3, 4, 2, 5), "room": 9}
LIMIT = 60  # seconds of a process that compiles
NUM_SIZES = 15  # different sizes of items: a lattice with one more move has native kernels
COLUMNS = {
    "hypergraph": "`bx.Hypergraph`",
    "lattice": "`bx.Lattice`",
    "vectorized": "PyTorch, vectorized",
    "scalar": "PyTorch, scalar",
}


# --- the recursions, for any meaning of max or min


def pack(value: Any, sizes: Sequence[int], room: int, best_of: Callable[..., Any]) -> Any:
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        best = [best_of(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


def edit(cost: Any, best_of: Callable[..., Any]) -> Any:
    """Edit distance where an insertion and a deletion cost 1, and a substitution costs ``cost``."""
    rows, columns = cost.shape
    above = [float(j) for j in range(columns + 1)]
    for i in range(rows):
        row = [float(i + 1)]
        for j in range(columns):
            row.append(best_of(above[j] + cost[i, j], above[j + 1] + 1.0, row[j] + 1.0))
        above = row
    return above[-1]


def pair_bases(pair: Any, best_of: Callable[..., Any]) -> Any:
    """Nussinov's recursion. ``best[i, j]`` is for the bases i to j − 1."""
    bases = len(pair)
    best = {(i, j): 0.0 for i in range(bases + 1) for j in (i, i + 1)}
    for width in range(2, bases + 1):
        for i in range(bases - width + 1):
            j = i + width
            paired = [best[i + 1, k] + best[k + 1, j] + pair[i, k] for k in range(i + 1, j)]
            best[i, j] = best_of([best[i + 1, j], *paired])
    return best[0, bases]


def parse(span: Any, best_of: Callable[..., Any]) -> Any:
    """CKY. The weight of each edge is another sum of scores."""
    words = len(span)
    best = {(i, i): span[i, i] for i in range(words)}
    for width in range(1, words):
        for i in range(words - width):
            j = i + width
            splits = [best[i, k] + best[k + 1, j] for k in range(i, j)]
            best[i, j] = best_of(splits) + span[i, j]
    return best[0, words - 1]


@bx.program("item")
def knapsack(value: Any, *, sizes: tuple[int, ...], room: int) -> Any:
    return pack(value, sizes, room, bx.max)


@bx.program("row column")
def edit_distance(cost: Any) -> Any:
    return edit(cost, bx.min)


@bx.program("base base")
def folding(pair: Any) -> Any:
    return pair_bases(pair, bx.max)


@bx.program("word word")
def parsing(span: Any) -> Any:
    return parse(span, bx.max)


def smooth_max(*options: Any) -> Tensor:
    """Log-sum-exp of numbers and of tensors of one shape, at least one tensor."""
    if len(options) == 1:
        (options,) = options
    some = next(option for option in options if isinstance(option, Tensor))
    tensors = [option if isinstance(option, Tensor) else torch.full_like(some, option) for option in options]
    return torch.logaddexp(*tensors) if len(tensors) == 2 else torch.stack(tensors).logsumexp(0)


def smooth_min(*options: Any) -> Tensor:
    return -smooth_max(*(-option for option in options))


def entries(scores: Tensor) -> Any:
    """Return an array of tensors (B,), one for each entry of scores (B, …)."""
    tensors = scores.flatten(1).unbind(1)
    return np.fromiter(tensors, dtype=object, count=len(tensors)).reshape(scores.shape[1:])


# --- the same recursions, many states at a time


def pack_rows(value: Tensor, sizes: Sequence[int], room: int) -> Tensor:
    """All amounts of room at a time."""
    best = value.new_zeros(len(value), room + 1)
    for v, size in zip(value.split(1, 1), sizes, strict=True):
        best = torch.cat((best[:, :size], torch.logaddexp(best[:, size:], best[:, :-size] + v)), 1)
    return best[:, room]


def edit_diagonals(cost: Tensor) -> Tensor:
    """One anti-diagonal of the table at a time. ``last`` and ``before`` are the previous two, (cells, B)."""
    batch, rows, columns = cost.shape
    diagonal_of = np.add.outer(np.arange(rows), np.arange(columns)).ravel()
    order = torch.from_numpy(diagonal_of.argsort(kind="stable"))
    scores = (-cost).flatten(1).T.index_select(0, order).split(np.bincount(diagonal_of).tolist())
    before, last = cost.new_zeros(1, batch), cost.new_full((2, batch), -1.0)
    for k, score in enumerate(scores, 2):
        row, size = max(1, k - columns), len(score)  # first row after the border
        up = row - 1 - max(0, k - 1 - columns)
        diagonal = row - 1 - max(0, k - 2 - columns)
        options = before[diagonal : diagonal + size] + score, last[up : up + size] - 1, last[up + 1 : up + 1 + size] - 1
        border = cost.new_full((1, batch), -float(k))
        inside = torch.stack(options).logsumexp(0)
        cells = [*([border] if k <= columns else []), inside, *([border] if k <= rows else [])]
        before, last = last, torch.cat(cells)
    return -last[0]


def pair_widths(pair: Tensor) -> Tensor:
    """All intervals of one width at a time."""
    batch, bases, _ = pair.shape
    first = torch.arange(bases)
    partner = (first + torch.arange(1, bases).unsqueeze(1)).clamp(max=bases - 1)
    scores = pair.permute(1, 2, 0)[first, partner]  # [k, i] is the pair of i and i + 1 + k
    empty = pair.new_zeros(1, bases + 1, batch)
    by_first, by_last = ByWidth(empty, by_last=False), ByWidth(empty, by_last=True)
    best = pair.new_zeros(bases, batch)  # intervals of the previous width
    for width in range(2, bases + 1):
        by_first.cut()
        by_last.cut()
        paired = by_first.items[:, 1:] + by_last.items[:, 1:] + scores[: width - 1, : bases - width + 1]
        new = torch.cat((best[1:].unsqueeze(0), paired)).logsumexp(0)
        by_first.add(best)
        by_last.add(best)
        best = new
    return best[0]


# --- problems


@dataclass
class Problem:
    """A program with its size. The functions have the arguments ``scores``, (B, …), and return values (B,)."""

    program: Any
    shape: Size  # of the scores without the batch
    size: str
    static: dict[str, Any]
    scalar: Callable[[Tensor], Tensor]
    vectorized: Callable[[Tensor], Tensor]
    lattice: Callable[[Tensor], Tensor] | None
    minimize: bool = False

    def graph(self) -> bx.Hypergraph:
        return self.program.graph(self.shape, **self.static)

    def trace(self) -> bx.Hypergraph:
        self.program.clear_cache()
        return self.graph()

    def of_graph(self, graph: bx.Hypergraph) -> Callable[[Tensor], Tensor]:
        """Return the value of a hypergraph as a function of its weights."""
        return lambda weights: graph.derivations(weights, minimize=self.minimize).value

    def value(self, scores: Tensor, omega: str | bx.Regularizer = "negentropy") -> Tensor:
        return self.program(scores, omega=omega, **self.static).value


def knapsack_problem(items: int, room: int) -> Problem:
    numbers = random.Random(0)
    largest = max(2, room // 10)
    different = numbers.sample(range(1, largest + 1), min(NUM_SIZES, largest))
    sizes = tuple(numbers.choices(different, k=items))
    moves = [
        bx.Move(1, 0),
        *(bx.Move(1, s, score=L.row("value", -1), where=L.row(f"has size {s}", -1)) for s in different),
    ]
    lattice = bx.Lattice(moves, end=L.along_row())
    masks = {f"has size {s}": torch.tensor(sizes) == s for s in different}
    return Problem(
        knapsack,
        (items,),
        f"{items} items, room {room}",
        {"sizes": sizes, "room": room},
        lambda scores: pack(scores.unbind(1), sizes, room, smooth_max),
        lambda scores: pack_rows(scores, sizes, room),
        lambda scores: lattice.paths({"value": scores, **masks}, grid=(items + 1, room + 1)).value,
    )


def edit_problem(rows: int, columns: int) -> Problem:
    moves = bx.Move(1, 1, score=L.cell("cost", -1, -1)), bx.Move(1, 0, score=1.0), bx.Move(0, 1, score=1.0)
    lattice = bx.Lattice(moves)
    return Problem(
        edit_distance,
        (rows, columns),
        f"{rows} × {columns}",
        {},
        lambda scores: edit(entries(scores), smooth_min),
        edit_diagonals,
        lambda scores: lattice.paths({"cost": scores}, minimize=True).value,
        minimize=True,
    )


def folding_problem(bases: int) -> Problem:
    return Problem(
        folding,
        (bases, bases),
        f"{bases} bases",
        {},
        lambda scores: pair_bases(entries(scores), smooth_max),
        pair_widths,
        None,
    )


def parsing_problem(words: int) -> Problem:
    return Problem(
        parsing,
        (words, words),
        f"{words} words",
        {},
        lambda scores: parse(entries(scores), smooth_max),
        inside,
        None,
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "knapsack": knapsack_problem,
    "edit distance": edit_problem,
    "folding": folding_problem,
    "parsing": parsing_problem,
}


# --- tracing


def tracing(sizes: dict[str, tuple[Size, ...]], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for name, each in sizes.items():
        for size in each:
            problem = PROBLEMS[name](*size)
            times = measure({"trace": problem.trace}, repeats, SECONDS)
            graph, memory = problem.graph(), in_own_process(__file__, "--memory", json.dumps([name, size]))
            rows.append({
                "program": name, "size": problem.size, "nodes": graph.num_nodes, "edges": graph.num_edges,
                **times, "memory": json.loads(memory),
            })  # fmt: skip
            problem.program.clear_cache()
    return rows


def print_memory(name: str, size: Size) -> None:
    """Print the peak memory of a trace minus the memory before it, in KB."""
    PROBLEMS[name](*QUICK[name]).trace()  # the first trace loads libraries, whose memory is not counted
    problem = PROBLEMS[name](*size)
    before = forget_peak()
    problem.trace()
    print(peak() - before)


# --- value and gradient


def with_edge_weights(problem: Problem, scores: Tensor) -> tuple[bx.Hypergraph, Tensor]:
    """Return the hypergraph of a program with a weight for each edge, and these weights (B, E)."""
    p = problem.program(scores, **problem.static)
    graph = problem.graph().by_edge
    edges = p.derivation_edges(tuple(range(graph.num_edges)))
    terms = [
        (n, int(np.ravel_multi_index(index, problem.shape)), coefficient)
        for n, edge in enumerate(edges)
        for _, index, coefficient in edge.scores
    ]
    number, entry, coefficient = (torch.tensor(column) for column in zip(*terms, strict=True))
    constants = torch.tensor([edge.constant for edge in edges]).expand(len(scores), -1)
    return graph, constants.index_add(1, number, scores.flatten(1)[:, entry] * coefficient)


def gradient(value: Callable[[Tensor], Tensor], scores: Tensor) -> Run:
    return lambda: torch.autograd.grad(value(scores).sum(), scores)


def solving(sizes: dict[str, Size], batches: Sequence[int], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for name, size in sizes.items():
        problem = PROBLEMS[name](*size)
        for batch in batches:
            scores = torch.randn(batch, *problem.shape)
            graph, weights = with_edge_weights(problem, scores)
            values: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
                "bellmax": (problem.value, scores.requires_grad_()),
                "hypergraph": (problem.of_graph(graph), weights.requires_grad_()),
                "vectorized": (problem.vectorized, scores),
                "scalar": (problem.scalar, scores),
            }
            if problem.lattice is not None:
                values["lattice"] = problem.lattice, scores
            for other, (value, inputs) in values.items():
                check_value(other, value(inputs), problem.value(scores))
            runs = {other: gradient(*pair) for other, pair in values.items()}
            times = measure(runs, repeats, SECONDS)
            rows.append({
                "program": name, "size": problem.size, "batch": batch, "edges": graph.num_edges, **times
            })  # fmt: skip
    return rows


# --- torch.compile


def compiling(sizes: Sequence[Size]) -> list[Row]:
    """Compile the scalar loop in new processes. After a process that fails or takes too long, larger sizes are skipped.

    ``why`` says what happened: "failed", "too long" or "skipped".
    """
    rows: list[Row] = []
    why = ""
    for size in sizes:
        problem = knapsack_problem(*size)
        row: Row = {"size": problem.size, "edges": problem.graph().num_edges}
        result = "skipped" if why else in_process_with_limit(size)
        if isinstance(result, str):
            why = result
            rows.append({**row, "why": why})
        else:
            rows.append({**row, **result})
    return rows


def in_process_with_limit(size: Size) -> Row | str:
    """Return what :func:`print_compiled` prints in a new process, or why there is no result."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--compile", json.dumps(size)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the C++ compiler as well
            process.communicate()
            return "too long"
    if process.returncode:
        print(errors[-2000:], file=sys.stderr)
        return "failed"
    return json.loads(output.splitlines()[-1])


def print_compiled(*size: int) -> None:
    """Print the seconds of the first compiled call, and times of value and gradient."""
    problem = knapsack_problem(*size)
    scores = torch.randn(1, *problem.shape, requires_grad=True)
    compiled = torch.compile(problem.scalar, dynamic=False)
    run = gradient(compiled, scores)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    check_value("torch.compile", compiled(scores), problem.value(scores))
    runs = {
        "bellmax": gradient(problem.value, scores),
        "torch.compile": run,
        "scalar": gradient(problem.scalar, scores),
    }
    print(json.dumps({"compile": seconds, **measure(runs, 20, SECONDS)}))


# --- overhead and Ω


def calls(repeats: int) -> dict[str, dict[str, Times]]:
    """Microseconds of one call, for the program and for its hypergraph."""
    values = torch.randn(len(TINY["sizes"]))
    graph = knapsack.graph(values.shape, **TINY)
    inputs: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "program": (lambda values: knapsack(values, **TINY).value, values),
        "hypergraph": (lambda weights: graph.derivations(weights).value, torch.randn(graph.num_weights)),
    }
    runs: dict[str, Run] = {}
    for name, (value, tensor) in inputs.items():
        runs[f"{name} value"] = many(torch.no_grad()(lambda value=value, tensor=tensor: value(tensor)))
        runs[f"{name} both"] = many(with_gradient(value, tensor))
    times = measure(runs, repeats, 3 * SECONDS)
    each = {name: {key: 1e3 * ms / CALLS for key, ms in t.items()} for name, t in times.items()}
    return {name: {task: each[f"{name} {task}"] for task in ("value", "both")} for name in inputs}


def regularized(size: Size, repeats: int) -> Row:
    problem = knapsack_problem(*size)
    scores = torch.randn(problem.shape, requires_grad=True)
    runs = {
        name: gradient(lambda scores, omega=omega: problem.value(scores, omega), scores)
        for name, omega in OMEGAS.items()
    }
    times = measure(runs, repeats, SECONDS)
    return {"size": problem.size, "edges": problem.graph().num_edges, "times": times}


# --- the page


def seconds(times: Times) -> str:
    return f"{times['min'] / 1e3:.3f} / {times['median'] / 1e3:.3f}"


def traced_table(rows: list[Row]) -> list[str]:
    return table(
        "program | size | nodes: | edges: | tracing, s: | µs per edge: | memory, MB:",
        [
            [
                r["program"], r["size"], f"{r['nodes']}", f"{r['edges']}", seconds(r["trace"]),
                f"{1e3 * r['trace']['median'] / r['edges']:.2f}", f"{r['memory'] / 1024:.0f}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def solved_table(rows: list[Row]) -> list[str]:
    return table(
        " | ".join(("program", "size", "batch:", "`bx.program`:", *(f"{title}:" for title in COLUMNS.values()))),
        [
            [r["program"], r["size"], f"{r['batch']}", cell(r["bellmax"]), *(slower(r, name, {}) for name in COLUMNS)]
            for r in rows
        ],
    )


def compiled_table(rows: list[Row]) -> list[str]:
    notes = {"failed": "– (failed)", "too long": f"– (more than {LIMIT} s)", "skipped": "– (skipped)"}
    return table(
        "size | edges: | compilation, s: | `bx.program`: | torch.compile: | PyTorch, scalar:",
        [
            [
                r["size"],
                f"{r['edges']}",
                *(
                    [notes[r["why"]], "–", "–", "–"]
                    if "why" in r
                    else [
                        f"{r['compile']:.1f}",
                        cell(r["bellmax"]),
                        slower(r, "torch.compile", {}),
                        slower(r, "scalar", {}),
                    ]
                ),
            ]
            for r in rows
        ],
    )


def calls_table(times: dict[str, dict[str, Times]]) -> list[str]:
    names = {"program": "`knapsack(values, …).value`", "hypergraph": "`hypergraph.derivations(weights).value`"}
    lines = [[title, *(microseconds(times[name][task]) for task in ("value", "both"))] for name, title in names.items()]
    medians = {task: [times[name][task]["median"] for name in names] for task in ("value", "both")}
    lines.append(["difference of the medians", *(f"{medians[task][0] - medians[task][1]:.0f}" for task in medians)])
    return table("call | value, µs: | value and gradient, µs:", lines)


def omegas_table(row: Row) -> list[str]:
    times = row["times"]
    return table(
        "Ω | value and gradient: | ns per edge: | relative to negentropy:",
        [
            [name, cell(t), nanoseconds(t, row["edges"]), factor(ratio(t, times["negentropy"]))]
            for name, t in times.items()
        ],
    )


def markdown(results: dict) -> list[str]:
    return [
        *heading("programs", results["machine"]),
        "",
        "The programs are functions that are decorated with `bx.program`: the knapsack problem, the edit distance with",
        "a matrix of substitution costs, the folding of an RNA sequence (Nussinov), and parsing (CKY). In CKY, the",
        "weight of each edge is a different sum of scores, so it takes longer to trace. All scores are random. The",
        "regularizer is negentropy, unless a table says otherwise. Times include all Python code.",
        "",
        "### Tracing",
        "",
        "The first call of a program runs the function on symbols and builds a hypergraph. Later calls with the same",
        "shapes and options use the saved hypergraph. *Tracing* is the time of the first call, without solving the",
        "problem, in seconds. The time per edge is computed from the median. *Memory* is the peak memory of a process",
        "during tracing minus its memory before, in MB.",
        *traced_table(results["tracing"]),
        "",
        "### Value and gradient",
        "",
        "A call computes the values of a batch and their gradients with respect to the scores. The trace of the",
        "program is saved from an earlier call. A number in brackets is the time of the other implementation divided",
        "by the time of the program (medians). Above 1×, the program is faster. All implementations compute the same",
        "values.",
        "",
        "- *`bx.Hypergraph`* is the hypergraph of the program, with a weight for each edge. The time does not include",
        "  the computation of these weights from the scores. The gradient is with respect to the weights.",
        "- *`bx.Lattice`* is the same problem, declared by the moves on a grid. A dash means that the problem is not a",
        "  recursion on a grid with few moves.",
        "- *PyTorch, vectorized* is a loop that we rewrote for tensors. Each step computes all amounts of room, all",
        "  cells of an anti-diagonal, or all intervals of the same length.",
        "- *PyTorch, scalar* is the function of the program, called with a tensor of shape (batch,) for each score.",
        "  Instead of `bx.max`, it calls `torch.logaddexp` or `torch.logsumexp`.",
        *solved_table(results["solving"]),
        "",
        "### torch.compile",
        "",
        "This table measures the scalar loop of the knapsack problem under torch.compile, for a batch of one. Each row",
        "is measured in a new process without cached code. *Compilation* is the time of the first call of the compiled",
        "function, with its gradient, in seconds. The other columns are times of value and gradient, as in the",
        f"previous table. A process is stopped after {LIMIT} seconds. Then larger sizes are skipped.",
        *compiled_table(results["compiling"]),
        "",
        "### Overhead of a call",
        "",
        "The knapsack problem with four items is so small that nearly all of the time is overhead. The second row",
        "solves the hypergraph of the program with random weights. Times are in microseconds per call, over loops of",
        f"{CALLS} calls. The value is computed under `no_grad`. For the gradient, we call `backward()` on the value.",
        *calls_table(results["calls"]),
        "",
        "### Cost of each Ω",
        "",
        f"The table shows the knapsack problem ({results['omegas']['size']}) without a batch. The program has",
        f"{results['omegas']['edges']} edges. The time per edge is computed from the median. The last column is the",
        "time divided by the time under negentropy (medians).",
        *omegas_table(results["omegas"]),
    ]


def main() -> None:
    parser = command_line(__doc__, "programs", repeats=20)
    parser.add_argument("--quick", action="store_true", help="small problems and few repeats, to see that it works")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if args.memory:
        print_memory(*json.loads(args.memory))
        return
    if args.compile:
        print_compiled(*json.loads(args.compile))
        return
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    traced = {name: (size,) for name, size in QUICK.items()} if quick else TRACED
    tables = {
        "tracing": lambda: tracing(traced, repeats),
        "solving": lambda: solving(QUICK if quick else SOLVED, QUICK_BATCHES if quick else BATCHES, repeats),
        "calls": lambda: calls(repeats),
        "omegas": lambda: regularized(QUICK["knapsack"] if quick else REGULARIZED, repeats),
        "compiling": lambda: compiling(COMPILED[:1] if quick else COMPILED),
    }
    results = {"machine": machine(), **collect(tables)}
    report(args.output, "programs", results, markdown(results))


if __name__ == "__main__":
    main()
