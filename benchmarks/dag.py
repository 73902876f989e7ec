"""The DAG engine: cost against the number of edges, memory, and native against reference on a deep graph.

Every comparison runs in one process, interleaved; a row gives the minimum and the median of its runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import bellmax as bx

WIDTH = 10
GROWTH = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
OMEGAS = {"negentropy": bx.Negentropy(), "l2": bx.SquaredL2(), "Tsallis 1.5": bx.Tsallis(1.5), "hard": bx.Hard()}


def layered(layers: int, width: int) -> torch.Tensor:
    """A source, ``layers`` fully linked layers of ``width`` nodes, a sink: as deep as a graph of its size gets."""
    column = torch.arange(width)
    between = torch.cartesian_prod(column, column)
    first = 1 + width * torch.arange(layers - 1).reshape(-1, 1, 1)
    last = 1 + width * (layers - 1)
    return torch.cat(
        (
            torch.stack((torch.zeros_like(column), 1 + column), 1),
            (between + torch.tensor([0, width]) + first).reshape(-1, 2),
            torch.stack((last + column, torch.full_like(column, last + width)), 1),
        )
    )


def tasks(dag: bx.DAG, theta: torch.Tensor, z: torch.Tensor, omega: bx.Regularizer) -> dict[str, Callable[[], object]]:
    def value() -> object:
        with torch.no_grad():
            return dag.paths(theta, omega=omega).value

    def gradient() -> object:
        return torch.autograd.grad(dag.paths(theta, omega=omega).value.sum(), theta)

    def hessian() -> object:
        path = dag.paths(theta, omega=omega).expected_path
        return torch.autograd.grad((path * z).sum(), theta)

    return {"value": value, "gradient": gradient, "Hessian product": hessian}


def measure(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each run: minimum and median over interleaved repeats, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"min": min(t[1:]), "median": statistics.median(t[1:])} for name, t in times.items()}


def growth(repeats: int) -> list[dict[str, object]]:
    rows = []
    for edges in GROWTH:
        start = time.perf_counter()
        dag = bx.DAG(layered(edges // WIDTH**2, WIDTH))
        build = 1e3 * (time.perf_counter() - start)
        theta, z = torch.randn(dag.num_edges, requires_grad=True), torch.randn(dag.num_edges)
        times = measure(tasks(dag, theta, z, bx.Negentropy()), repeats)
        rows.append({"nodes": dag.num_nodes, "edges": dag.num_edges, "build": build, **times, "memory": memory(edges)})
    return rows


def memory(edges: int) -> float:
    """Peak MB above the graph and its weights during value, gradient and Hessian product, in a process of its own.

    Linux only.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--memory", str(edges)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def print_memory(edges: int) -> None:
    dag = bx.DAG(layered(edges // WIDTH**2, WIDTH))
    theta, z = torch.randn(dag.num_edges, requires_grad=True), torch.randn(dag.num_edges)
    small = bx.DAG(layered(2, 2))
    for run in tasks(small, torch.zeros(8, requires_grad=True), torch.zeros(8), bx.Negentropy()).values():
        run()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = peak()
    for run in tasks(dag, theta, z, bx.Negentropy()).values():
        run()
    print((peak() - before) / 1024)


def peak() -> int:
    """Greatest resident memory since the peak was last forgotten, in KB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def against_reference(repeats: int, batch: int) -> list[dict[str, object]]:
    dag = bx.DAG(layered(2000, 4))
    theta, z = torch.randn(batch, dag.num_edges, requires_grad=True), torch.randn(batch, dag.num_edges)
    rows = []
    for name, omega in OMEGAS.items():
        runs = {}
        for backend in ("native", "reference"):
            for task, run in tasks(dag, theta, z, omega).items():
                runs[f"{backend} {task}"] = on_backend(backend, run)
        times = measure(runs, repeats)
        for task in ("value", "gradient", "Hessian product"):
            native, reference = times[f"native {task}"], times[f"reference {task}"]
            ratio = reference["median"] / native["median"]
            rows.append(
                {"omega": name, "batch": batch, "task": task, "native": native, "reference": reference, "ratio": ratio}
            )
    return rows


def on_backend(backend: str, run: Callable[[], object]) -> Callable[[], object]:
    def wrapped() -> object:
        with bx.use_backend(backend):
            return run()

    return wrapped


def machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return {"processor": model, "python": platform.python_version(), "torch": torch.__version__, **bx.backend_info()}


def cell(times: dict[str, float]) -> str:
    return f"{times['min']:.2f} / {times['median']:.2f}"


def markdown(results: dict) -> str:
    m = results["machine"]
    lines = [
        "# DAG engine",
        "",
        f"{m['processor']}, {m['threads']} threads, {m['instructions']}; Python {m['python']}, torch {m['torch']}.",
        "float32; milliseconds, minimum / median. Made by `make bench`.",
        "",
        "## Cost against the number of edges",
        "",
        f"Layers of {WIDTH} nodes, one after the other; negentropy; native; batch of one.",
        "`ns/edge` is of the gradient's median; memory is the peak above the graph and its weights.",
        "",
        "| nodes | edges | build | value | gradient | Hessian product | ns/edge | memory, MB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results["growth"]:
        each = r["gradient"]["median"] * 1e6 / r["edges"]
        lines.append(
            f"| {r['nodes']} | {r['edges']} | {r['build']:.1f} | {cell(r['value'])} | {cell(r['gradient'])} "
            f"| {cell(r['Hessian product'])} | {each:.1f} | {r['memory']:.0f} |"
        )
    lines += [
        "",
        "## Native against reference on a deep graph",
        "",
        "2000 layers of 4 nodes (8 002 nodes, 31 992 edges).",
        "",
        "| Ω | batch | task | native | reference | ratio of medians |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for r in results["against_reference"]:
        lines.append(
            f"| {r['omega']} | {r['batch']} | {r['task']} | {cell(r['native'])} | {cell(r['reference'])} "
            f"| {r['ratio']:.0f}× |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder for dag.json and dag.md"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each task after the first (default: 5)")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print_memory(args.memory)
        return
    torch.manual_seed(0)
    results = {"machine": machine(), "growth": growth(args.repeats)}
    results["against_reference"] = against_reference(args.repeats, 1) + against_reference(args.repeats, 16)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "dag.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.output / "dag.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
