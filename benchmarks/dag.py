"""Measure paths of a DAG: time and memory against the number of edges, and the native against the reference backend.

All calls are interleaved in one process. A row gives the minimum and the median of its runs.
"""

from __future__ import annotations

import time

import torch
from measuring import (
    Run,
    cell,
    command_line,
    forget_peak,
    heading,
    in_own_process,
    machine,
    measure,
    peak,
    ratio,
    report,
    table,
)

import bellmax as bx

WIDTH = 10
GROWTH = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
OMEGAS = {"negentropy": bx.Negentropy(), "l2": bx.SquaredL2(), "Tsallis 1.5": bx.Tsallis(1.5), "hard": bx.Hard()}


def layered(layers: int, width: int) -> torch.Tensor:
    """Edges of a deep graph: a source, ``layers`` fully connected layers of ``width`` nodes, and a sink."""
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


def tasks(dag: bx.DAG, theta: torch.Tensor, z: torch.Tensor, omega: bx.Regularizer) -> dict[str, Run]:
    def value() -> object:
        with torch.no_grad():
            return dag.paths(theta, omega=omega).value

    def gradient() -> object:
        return torch.autograd.grad(dag.paths(theta, omega=omega).value.sum(), theta)

    def hessian() -> object:
        path = dag.paths(theta, omega=omega).expected_path
        return torch.autograd.grad((path * z).sum(), theta)

    return {"value": value, "gradient": gradient, "Hessian product": hessian}


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
    """Peak MB above the graph and its weights during value, gradient and Hessian product, in a separate process."""
    return float(in_own_process(__file__, "--memory", str(edges)))


def print_memory(edges: int) -> None:
    dag = bx.DAG(layered(edges // WIDTH**2, WIDTH))
    theta, z = torch.randn(dag.num_edges, requires_grad=True), torch.randn(dag.num_edges)
    small = bx.DAG(layered(2, 2))
    for run in tasks(small, torch.zeros(8, requires_grad=True), torch.zeros(8), bx.Negentropy()).values():
        run()
    before = forget_peak()
    for run in tasks(dag, theta, z, bx.Negentropy()).values():
        run()
    print((peak() - before) / 1024)


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
            rows.append(
                {
                    "omega": name,
                    "batch": batch,
                    "task": task,
                    "native": native,
                    "reference": reference,
                    "ratio": ratio(reference, native),
                }
            )
    return rows


def on_backend(backend: str, run: Run) -> Run:
    def wrapped() -> object:
        with bx.use_backend(backend):
            return run()

    return wrapped


def markdown(results: dict) -> list[str]:
    growth = [
        [
            f"{r['nodes']}",
            f"{r['edges']}",
            f"{r['build']:.1f}",
            *(cell(r[task]) for task in ("value", "gradient", "Hessian product")),
            f"{r['gradient']['median'] * 1e6 / r['edges']:.1f}",
            f"{r['memory']:.0f}",
        ]
        for r in results["growth"]
    ]
    against_reference = [
        [r["omega"], f"{r['batch']}", r["task"], cell(r["native"]), cell(r["reference"]), f"{r['ratio']:.0f}×"]
        for r in results["against_reference"]
    ]
    return [
        *heading("dag", results["machine"]),
        "",
        "### Time against the number of edges",
        "",
        f"A graph consists of layers of {WIDTH} nodes. Each node is connected to all nodes of the next layer. The",
        "kernels are native, Ω is negentropy, and the batch has one member. *Build* is the time to construct the",
        "`bx.DAG`. The time per edge is computed from the median time of the gradient. *Memory* is the peak memory",
        "minus the memory of the graph and its weights.",
        *table("nodes: | edges: | build: | value: | gradient: | Hessian product: | ns per edge: | memory, MB:", growth),
        "",
        "### Native kernels against the reference backend",
        "",
        "The graph has 2000 layers of 4 nodes (8 002 nodes, 31 992 edges). The reference backend is written in PyTorch",
        "and runs if bellmax was installed without a compiler. The ratio is the time of the reference backend divided",
        "by the time of the native kernels (medians).",
        *table("Ω | batch: | task | native: | reference: | ratio:", against_reference),
    ]


def main() -> None:
    args = command_line(__doc__, "dag", repeats=5).parse_args()
    if args.memory:
        print_memory(int(args.memory))
        return
    torch.manual_seed(0)
    results = {"machine": machine(), "growth": growth(args.repeats)}
    results["against_reference"] = against_reference(args.repeats, 1) + against_reference(args.repeats, 16)
    report(args.output, "dag", results, markdown(results))


if __name__ == "__main__":
    main()
