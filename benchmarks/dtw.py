"""Compare DTW with PyTorch code and other libraries: time, accuracy, growth with the lengths, memory.

All calls are interleaved in one process, except aeon, which needs a separate environment. A row gives the minimum and
the median of its runs. Libraries that are not installed (`make bench` installs them) are left out.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measuring import (
    SECONDS,
    Row,
    Run,
    against,
    cell,
    collect,
    command_line,
    factor,
    forget_peak,
    heading,
    in_own_process,
    installed,
    label,
    machine,
    measure,
    nanoseconds,
    peak,
    ratio,
    report,
    shown,
    slower,
    table,
)
from rivals import (
    DTW_PEERS,
    NEGENTROPY,
    TASKS,
    Rival,
    Shape,
    aligned_series,
    all_pairs,
    check_value,
    collected_series,
    compare,
    our_dtw,
    random_cost,
    soft_aligned,
    soft_dtws,
    sparse_aligned,
    versions,
)
from torch import Tensor

import bellmax as bx

HERE = Path(__file__).parent
AEON = HERE.parent / "build/peers/bin/python"
SIZES = "(B,N,M)"
SHAPES = ((32, 64, 64), (32, 256, 256), (8, 1024, 1024), (1, 4096, 4096))
QUICK_SHAPES = ((32, 64, 64), (8, 50, 40))
COLLECTIONS = ((128, 8), (128, 24), (128, 128))  # series, length
ORDERS = TASKS[:3]  # all but decoding
OMEGAS = ("bellmax", NEGENTROPY)  # the former is l2
ACCURACY = (256, 512, 1024, 2048, 4096)
PEERS_ACCURACY = 1024  # the longest for peers
GROWTH = (128, 256, 512, 1024, 2048, 4096)
GROWTH_BATCH = 4
MEMORY = (  # form, length of both series, band, task
    ("costs", 16384, None, "value and gradient"),
    ("series", 16384, None, "value and gradient"),
    ("series", 100_000, 500, "value"),
)
QUICK_MEMORY = (("costs", 1024, None, "value and gradient"), ("series", 4096, 50, "value"))


def from_series(rivals: Callable[..., dict[str, Run]], shapes: Sequence[Shape], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for shape in shapes:
            runs = rivals(shape, parallel=threads > 1)
            rows.append({"threads": threads, "shape": shape, **measure(runs, repeats, SECONDS)})
    return rows


def aeon(shapes: Sequence[Shape], repeats: int) -> Row:
    """Version and times of aeon."""
    if not AEON.exists():
        return {"version": None, "rows": []}
    measured = json.loads(in_own_process(HERE / "aeon_alone.py", json.dumps((shapes, repeats, SECONDS)), python=AEON))
    for row in measured["rows"]:
        check_value("aeon", torch.tensor(row.pop("values")), bx.dtw(*all_pairs(row["shape"])).abs())
    return measured


def hessian_errors() -> dict[str, float]:
    """Relative error of Hessian products with respect to a series, by implementation."""
    x, y = torch.randn(4, 12, 2, requires_grad=True), torch.randn(4, 10, 2)
    z = torch.randn_like(x)

    def product(soft_dtw: Callable[[Tensor], Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(soft_dtw(squared_distances(x, y)).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient, x, grad_outputs=z)[0]

    products = {name: product(soft_dtw) for name, soft_dtw in soft_dtws().items()}
    exact = products["anti-diagonals"]
    return {name: ((computed - exact).norm() / exact.norm()).item() for name, computed in products.items()}


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def accuracy(sizes: Sequence[int]) -> list[Row]:
    """Errors of float32 against bellmax in float64. At small sizes, float64 is checked against PyTorch code."""
    return [accuracy_at(n, soft_dtws() if n <= PEERS_ACCURACY else {"bellmax": soft_dtws()["bellmax"]}) for n in sizes]


def accuracy_at(n: int, rivals: dict[str, Callable[[Tensor], Tensor]]) -> Row:
    cost = squared_distances(*torch.randn(2, 1, n, 2)).requires_grad_()
    exact = value_and_path(rivals["bellmax"], cost.double())
    if "anti-diagonals" in rivals:
        torch.testing.assert_close(exact, value_and_path(rivals["anti-diagonals"], cost.double()), rtol=1e-9, atol=1e-9)
    row: Row = {"length": n}
    for name, soft_dtw in rivals.items():
        (value, path), (exact_value, exact_path) = value_and_path(soft_dtw, cost), exact
        row[name] = {
            "path": (path - exact_path).abs().max().item(),
            "value": ((value - exact_value) / exact_value).abs().max().item(),
        }
    return row


def value_and_path(soft_dtw: Callable[[Tensor], Tensor], cost: Tensor) -> tuple[Tensor, Tensor]:
    value = soft_dtw(cost)
    return value.detach(), torch.autograd.grad(value.sum(), cost)[0]


def growth(sizes: Sequence[int], repeats: int) -> list[Row]:
    rows = []
    for n in sizes:
        shape = (GROWTH_BATCH, n, n)
        rows.append({"shape": shape, **measure(our_dtw(random_cost(shape), "negentropy").runs(), repeats, SECONDS)})
    return rows


def memory(form: str, length: int, band: int | None, task: str) -> Row:
    """Measure memory in a separate process, which fails if it runs out of memory."""
    case = {"form": form, "length": length, "band": band, "task": task}
    try:
        return case | json.loads(in_own_process(__file__, "--memory", json.dumps(list(case.values()))))
    except subprocess.CalledProcessError:
        return case


def print_memory(form: str, length: int, band: int | None, task: str) -> None:
    """Print the MB of the cost matrix (built or not), inputs, outputs and the peak, and the seconds."""
    run = Rival.gradient if task == "value and gradient" else torch.no_grad()(lambda rival: [rival.value()])
    rival = make_ours(form, length, band)
    run(make_ours(form, 8, band))
    before = forget_peak() / 1024
    start = time.perf_counter()
    result = run(rival)
    seconds = time.perf_counter() - start
    whole = peak() / 1024
    inputs, outputs = (sum(x.nbytes for x in tensors) / 2**20 for tensors in (rival.inputs, result))
    beyond, costs = whole - before - outputs, 4 * length**2 / 2**20
    sizes = {"costs": costs, "inputs": inputs, "outputs": outputs, "beyond": beyond, "multiple": beyond / costs}
    print(json.dumps({**sizes, "whole": whole, "seconds": seconds}))


def make_ours(form: str, length: int, band: int | None) -> Rival:
    if form == "costs":
        return our_dtw(random_cost((1, length, length)), "negentropy")
    x, y = (torch.randn(1, length, 2, requires_grad=True) for _ in range(2))
    return Rival([x, y], lambda: bx.dtw(x, y, band=band))


# --- the page


def markdown(results: dict) -> list[str]:
    peers = {**results["peers"], "aeon": results["aeon"]["version"]}
    return [
        *heading("dtw", results["machine"]),
        installed(peers),
        "",
        "A shape (B,N,M) is B pairs of series of lengths N and M. A number in brackets is the time of the other",
        "implementation divided by the time of bellmax (medians). Above 1×, bellmax is faster. Times include all",
        "Python code and the allocation of outputs. The smoothing strength γ is 1. The time of a Hessian product",
        "includes the time of the gradient. A dash means that the task is not supported, was too slow, or needed too",
        "much memory.",
        "",
        "### From costs, negentropy",
        "",
        "*PyTorch, anti-diagonals* computes one anti-diagonal of the whole batch at a time. The column *tslearn* is",
        "`tslearn.metrics.SoftDTWLossPyTorch`.",
        "",
        "tslearn and pysdtw do not support second derivatives. If you differentiate twice with respect to costs,",
        "autograd raises an error. If you differentiate twice with respect to series, autograd returns a wrong",
        "Hessian product without an error message. Compared with the norm of the correct product, the norm of the",
        f"difference is {errors(results['hessian_errors'])}.",
        *against(results["costs"], SIZES, ("anti-diagonals", "tslearn", "pysdtw"), peers),
        "",
        "### From series to values",
        "",
        "Each row computes the values of all pairs of a few series, B pairs in total. The other libraries compute in",
        "float64. tslearn (`soft_dtw`), aeon and librosa take one pair per call. dtaidistance is written in C and",
        "takes all pairs in one call. Its threads share the pairs. A number in brackets compares soft DTW with soft",
        "DTW, or hard DTW with hard DTW. The last column compares different programs: it is the time of hard DTW in",
        "dtaidistance divided by the time of soft DTW in bellmax.",
        *series_table(results["series"], results["aeon"]["rows"], peers),
        "",
        "### Distance matrix of a collection of series",
        "",
        "This table compares `bx.dtw_cdist` under hard DTW with `distance_matrix_fast` of dtaidistance, which",
        "computes in float64. The K series have equal lengths.",
        *collections_table(results["collections"], peers),
        "",
        "### Sparse alignments: l2 against negentropy",
        *omegas_table(results["omegas"]),
        "",
        "For each Ω, the next table shows the time of a Hessian product divided by the time of value and gradient.",
        *hessian_table(results["omegas"]),
        "",
        "### Accuracy of float32",
        "",
        "Each row is one pair of random series of length N with two features, drawn from a standard normal",
        "distribution. A cell has two errors of float32. The first number is the largest difference between an entry",
        "of the expected path in float32 and the same entry in float64. The second number is the relative difference",
        "between the value in float32 and the value in float64.",
        *accuracy_table(results["accuracy"]),
        "",
        "### Growth",
        "",
        "The inputs are costs, and Ω is negentropy. The time per cell of the cost matrices is computed from the",
        "median.",
        *growth_table(results["growth"]),
        "",
        "### Memory",
        "",
        "The table shows the memory of a process that computes DTW for one pair of series, in MB. *Workspace* is the",
        "peak memory minus the memory of inputs and outputs. If the inputs are series, bellmax does not build the cost",
        "matrix. For series, the column *cost matrix* is the size that the matrix would have. The series have two",
        "features.",
        *memory_table(results["memory"]),
    ]


def errors(relative: dict[str, float]) -> str:
    return " and ".join(f"{error:.0%} for {name}" for name, error in relative.items() if error > 1e-3)


def series_table(rows: list[Row], aeon_rows: list[Row], peers: dict[str, str | None]) -> list[str]:
    of_aeon = {tuple(r["shape"]): {"aeon": r["aeon"]} for r in aeon_rows}
    lines = []
    for r in rows:
        row = {**r, **(of_aeon.get(tuple(r["shape"]), {}) if r["threads"] == 1 else {})}
        lines.append(
            [
                str(r["threads"]),
                shown(r["shape"]),
                cell(r["bellmax, soft"]),
                *(slower(row, name, peers, "bellmax, soft") for name in ("tslearn", "aeon")),
                cell(r["bellmax, hard"]),
                *(slower(row, name, peers, "bellmax, hard") for name in ("dtaidistance", "librosa")),
                factor(ratio(r["dtaidistance"], r["bellmax, soft"])) if "dtaidistance" in r else "–",
            ]
        )
    columns = "bellmax, soft: | tslearn, soft: | aeon, soft: | bellmax, hard: | dtaidistance, hard: | librosa, hard:"
    return table(f"threads | {SIZES} | {columns} | dtaidistance (hard) / bellmax (soft):", lines)


def collections_table(rows: list[Row], peers: dict[str, str | None]) -> list[str]:
    lines = [[str(r["threads"]), shown(r["shape"]), cell(r["bellmax"]), slower(r, "dtaidistance", peers)] for r in rows]
    return table("threads | (K,length) | bellmax: | dtaidistance:", lines)


def omegas_table(rows: list[Row]) -> list[str]:
    lines = [
        [
            shown(r["shape"]),
            r["task"],
            cell(r["bellmax"]),
            cell(r[NEGENTROPY]),
            factor(ratio(r["bellmax"], r[NEGENTROPY])),
        ]
        for r in rows
    ]
    return table(f"{SIZES} | task | l2: | negentropy: | l2 / negentropy:", lines)


def hessian_table(rows: list[Row]) -> list[str]:
    _, gradients, hessians = ([r for r in rows if r["task"] == task] for task in ORDERS)
    lines = [
        [shown(h["shape"]), *(factor(ratio(h[name], g[name])) for name in OMEGAS)]
        for g, h in zip(gradients, hessians, strict=True)
    ]
    return table(f"{SIZES} | l2: | negentropy:", lines)


def accuracy_table(rows: list[Row]) -> list[str]:
    names = [name for name in rows[0] if name != "length"]
    lines = [
        [
            f"{r['length']}",
            *(f"{r[name]['path']:.0e} / {r[name]['value']:.0e}" if name in r else "–" for name in names),
        ]
        for r in rows
    ]
    return table(" | ".join(("N", *(f"{label(name)}:" for name in names))), lines)


def growth_table(rows: list[Row]) -> list[str]:
    lines = [
        [
            shown(r["shape"]),
            *(entry for task in ORDERS for entry in (cell(r[task]), nanoseconds(r[task], math.prod(r["shape"])))),
        ]
        for r in rows
    ]
    return table(" | ".join((SIZES, *(f"{task}: | ns per cell:" for task in ORDERS))), lines)


def memory_table(rows: list[Row]) -> list[str]:
    digits = {"costs": 0, "inputs": 0, "outputs": 0, "beyond": 0, "multiple": 3, "whole": 0, "seconds": 2}
    lines = [
        [
            r["form"],
            str(r["length"]),
            str(r["band"] or "–"),
            r["task"],
            *(f"{r[what]:.{places}f}" if what in r else "–" for what, places in digits.items()),
        ]
        for r in rows
    ]
    sizes = "cost matrix: | inputs: | outputs: | workspace: | workspace / cost matrix: | whole process:"
    return table(f"from | N = M: | band: | task | {sizes} | seconds:", lines)


def main() -> None:
    parser = command_line(__doc__, "dtw", repeats=20)
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.memory:
        print_memory(*json.loads(args.memory))
        return
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    shapes = QUICK_SHAPES if quick else SHAPES
    tables = {
        "memory": lambda: [memory(*case) for case in (QUICK_MEMORY if quick else MEMORY)],
        "costs": lambda: compare(soft_aligned, shapes, repeats, ORDERS),
        "hessian_errors": hessian_errors,
        "series": lambda: from_series(aligned_series, shapes, repeats),
        "collections": lambda: from_series(collected_series, COLLECTIONS[:1] if quick else COLLECTIONS, repeats),
        "aeon": lambda: aeon(shapes, repeats),
        "omegas": lambda: compare(sparse_aligned, shapes, repeats, ORDERS),
        "accuracy": lambda: accuracy(ACCURACY[:1] if quick else ACCURACY),
        "growth": lambda: growth(GROWTH[:2] if quick else GROWTH, repeats),
    }
    results = {"machine": machine(), "peers": versions(DTW_PEERS), **collect(tables)}
    report(args.output, "dtw", results, markdown(results))


if __name__ == "__main__":
    main()
