"""Compare trees with torch-struct and PyTorch loops: time, other Ω, growth with the length, stored hypergraphs.

All calls are interleaved in one process. A row gives the minimum and the median of its runs.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from measuring import (
    SECONDS,
    Row,
    against,
    cell,
    collect,
    command_line,
    factor,
    heading,
    installed,
    machine,
    measure,
    nanoseconds,
    ratio,
    report,
    shown,
    table,
)
from rivals import TASKS, Rival, compare, peer, versions
from torch import Tensor

import bellmax as bx

Shape = tuple[int, ...]  # batch, words

SIZES = "(B,n)"
SHAPES = ((32, 20), (32, 40), (8, 80))
QUICK_SHAPES = ((4, 8),)
GROWTH, QUICK_GROWTH = (10, 20, 40, 80, 160), (5, 10)
GROWTH_BATCH = 8
OMEGAS = {"negentropy": bx.Negentropy(), "l2": bx.SquaredL2(), "sparsemax": bx.Tsallis(2), "entmax": bx.Tsallis(1.5)}
STORED, QUICK_STORED = (40, 85, 182), (12,)  # words: 10 thousand, a hundred thousand and a million edges
LOW = -1e30  # score of an impossible item: −∞ would give NaN
PEERS = ("torch-struct",)
KINDS = {"spans": "constituency", "arcs": "dependency"}


def scores_of(shape: Shape, root: int = 0) -> Tensor:
    batch, words = shape
    return torch.randn(batch, words + root, words + root, requires_grad=True)


# --- spans


def our_spans(scores: Tensor, omega: str | bx.Regularizer = "negentropy") -> Rival:
    return Rival(
        [scores],
        lambda: bx.SpanTrees(scores, omega=omega).value,
        lambda: [bx.SpanTrees(scores, omega=omega).expected_path],
        lambda: bx.SpanTrees(scores).decode(),
    )


def spans(shape: Shape) -> dict[str, Rival]:
    scores = scores_of(shape)
    rivals = {"bellmax": our_spans(scores), "good loop": Rival([scores], lambda: inside(scores))}
    if crf := peer("torch_struct", "TreeCRF"):
        theta = scores.detach().unsqueeze(-1).clone().requires_grad_()
        rivals["torch-struct"] = Rival(
            [theta], lambda: crf(theta).partition, lambda: [crf(theta).marginals], lambda: crf(theta).argmax
        )
    return rivals


class ByWidth:
    """Items of one kind, shape (widths, positions, B), by the first or by the last position of the item.

    By first position, the widest items are at the end. By last position, the widest are at the beginning. So the items
    of both sides of all splits can be added without flipping.
    """

    def __init__(self, items: Tensor, by_last: bool) -> None:
        self.items, self.by_last = items, by_last

    def cut(self) -> None:
        """Drop the position that items of the next width cannot have."""
        self.items = self.items[:, 1:] if self.by_last else self.items[:, :-1]

    def add(self, items: Tensor) -> None:
        parts = (items.unsqueeze(0), self.items) if self.by_last else (self.items, items.unsqueeze(0))
        self.items = torch.cat(parts)


def inside(scores: Tensor) -> Tensor:
    """Inside algorithm of spans, all spans of one width at a time."""
    by_place = scores.permute(1, 2, 0)
    words = by_place.diagonal().T
    first, last = ByWidth(words.unsqueeze(0), by_last=False), ByWidth(words.unsqueeze(0), by_last=True)
    spans = words
    for width in range(1, len(by_place)):
        first.cut()
        last.cut()
        spans = (first.items + last.items).logsumexp(0) + by_place.diagonal(width).T
        first.add(spans)
        last.add(spans)
    return spans[0]


# --- arcs


def our_arcs(arcs: Tensor, omega: str | bx.Regularizer = "negentropy") -> Rival:
    return Rival(
        [arcs],
        lambda: bx.DependencyTrees(arcs, omega=omega).value,
        lambda: [bx.DependencyTrees(arcs, omega=omega).expected_path],
        lambda: bx.DependencyTrees(arcs).decode(),
    )


def arcs(shape: Shape) -> dict[str, Rival]:
    scores = scores_of(shape, root=1)
    rivals = {"bellmax": our_arcs(scores), "good loop": Rival([scores], lambda: eisner(scores))}
    if crf := peer("torch_struct", "DependencyCRF"):
        theta = scores.detach()[:, 1:, 1:].clone()
        theta.diagonal(dim1=1, dim2=2).copy_(scores.detach()[:, 0, 1:])
        theta.requires_grad_()
        trees = lambda: crf(theta, multiroot=False)  # noqa: E731
        rivals["torch-struct"] = Rival(
            [theta], lambda: trees().partition, lambda: [trees().marginals], lambda: trees().argmax
        )
    return rivals


def eisner(arcs: Tensor) -> Tensor:
    """Eisner's algorithm for a single root, all items of one width at a time."""
    by_place = arcs.permute(1, 2, 0)
    places = len(by_place)
    zeros, root = torch.zeros_like(by_place[:1]), torch.zeros(places, 1)
    root[0] = LOW  # the root is not a modifier and has only one
    right, right_by_last = ByWidth(zeros, by_last=False), ByWidth(zeros, by_last=True)
    left, left_by_last = ByWidth(zeros, by_last=False), ByWidth(zeros, by_last=True)
    forth, back = ByWidth(zeros[:0], by_last=False), ByWidth(zeros[:0], by_last=True)
    new_right = zeros[0]
    for width in range(1, places):
        for kind in (right, right_by_last, left, left_by_last, forth, back):
            kind.cut()
        halves = (right.items + left_by_last.items).logsumexp(0)
        forth.add(halves + by_place.diagonal(width).T)
        back.add(halves + by_place.diagonal(-width).T + root[: places - width])
        new_right = (forth.items + right_by_last.items).logsumexp(0)
        new_left = (left.items + back.items).logsumexp(0)
        if width < places - 1:
            new_right = new_right + root[: places - width]
        for kind, items in ((right, new_right), (right_by_last, new_right), (left, new_left), (left_by_last, new_left)):
            kind.add(items)
    return new_right[0]


# --- other tables


def sparse(shapes: tuple[Shape, ...], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for kind, make, root in (("spans", our_spans, 0), ("arcs", our_arcs, 1)):
        for shape in shapes:
            scores = scores_of(shape, root)
            runs = {name: make(scores, omega).runs() for name, omega in OMEGAS.items()}
            for task in TASKS[:3]:
                now = {name: run[task] for name, run in runs.items()}
                rows.append({"kind": kind, "shape": shape, "task": task, **measure(now, repeats, SECONDS)})
    return rows


def growth(sizes: tuple[int, ...], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for kind, make, root in (("spans", our_spans, 0), ("arcs", our_arcs, 1)):
        for words in sizes:
            runs = {"bellmax": make(scores_of((GROWTH_BATCH, words), root)).gradient}
            places = words + root
            splits = GROWTH_BATCH * (places**3 - places) // 6
            rows.append({"kind": kind, "words": words, "splits": splits, **measure(runs, repeats, SECONDS)})
    return rows


def stored(sizes: tuple[int, ...], repeats: int) -> list[Row]:
    """All binary trees of a sentence as a stored `bx.Hypergraph`, with a weight for each edge."""
    rows: list[Row] = []
    for words in sizes:
        edges = bracketings(words)
        start = time.perf_counter()
        graph = bx.Hypergraph(torch.from_numpy(edges))
        build = 1e3 * (time.perf_counter() - start)
        weights = torch.randn(len(edges), requires_grad=True)
        runs = of_graph(graph, weights).runs()
        times = measure({task: runs[task] for task in TASKS[:3]}, repeats, SECONDS)
        rows.append({"edges": len(edges), "tails": int((edges[:, 1:] >= 0).sum()), "build": build, **times})
    return rows


def of_graph(graph: bx.Hypergraph, weights: Tensor) -> Rival:
    return Rival(
        [weights],
        lambda: graph.derivations(weights).value,
        lambda: [graph.derivations(weights).expected_path],
    )


def bracketings(words: int) -> np.ndarray:
    """Rows (span, left part, right part) for spans of several words, and (word, −1, −1) for words."""
    number = np.zeros((words, words), dtype=np.int64)
    number[np.triu_indices(words)] = np.arange(words * (words + 1) // 2)
    i, k, j = np.ogrid[:words, :words, :words]
    first, split, last = np.nonzero((i <= k) & (k < j))
    spans = np.stack((number[first, last], number[first, split], number[split + 1, last]), 1)
    single = number.diagonal()
    return np.concatenate((np.stack((single, np.full(words, -1), np.full(words, -1)), 1), spans))


# --- the page


def markdown(results: dict) -> list[str]:
    return [
        *heading("trees", results["machine"]),
        installed(results["peers"]),
        "",
        "A shape (B,n) is B sentences of n words, without padding. A number in brackets is the time of the other",
        "implementation divided by the time of bellmax (medians). Above 1×, bellmax is faster. Times include all",
        "Python code and the allocation of outputs. At each step, the PyTorch loop computes all spans with the same",
        "number of words, in log space. Its derivatives are computed by autograd. torch-struct is written for GPUs.",
        "The time of a Hessian product includes the time of the gradient. A dash means that the task is not supported.",
        "",
        "### Constituency trees",
        "",
        "bellmax uses `bx.SpanTrees`.",
        *against(results["spans"], SIZES, ("good loop", "torch-struct"), results["peers"]),
        "",
        "### Dependency trees",
        "",
        "bellmax uses `bx.DependencyTrees` with a single root.",
        *against(results["arcs"], SIZES, ("good loop", "torch-struct"), results["peers"]),
        "",
        "### Other Ω",
        "",
        "A number in brackets is the time under this Ω divided by the time under negentropy (medians). Under",
        "negentropy, the kernels compute with the exponentials of the scores. Under another Ω, the kernels compute on",
        "a stored hypergraph.",
        *sparse_table(results["sparse"]),
        "",
        "### Growth",
        "",
        f"The table shows the time to compute value and gradient together, for {GROWTH_BATCH} sentences. A split is a",
        "way to divide a span into two. The time per split is computed from the median.",
        *table(
            "trees | words: | bellmax: | ns per split:",
            [
                [KINDS[r["kind"]], f"{r['words']}", cell(r["bellmax"]), nanoseconds(r["bellmax"], r["splits"])]
                for r in results["growth"]
            ],
        ),
        "",
        "### Stored hypergraphs",
        "",
        "A `bx.Hypergraph` represents all binary trees of one sentence, with a weight for each edge. An edge joins",
        "two smaller spans, its tails, into a larger span. *Build* is the time to construct the hypergraph. The time",
        "per tail is computed from the median time of value and gradient.",
        *table(
            "edges: | tails: | build: | value: | value and gradient: | Hessian product: | ns per tail:",
            [
                [
                    f"{r['edges']}",
                    f"{r['tails']}",
                    f"{r['build']:.1f}",
                    *(cell(r[task]) for task in TASKS[:3]),
                    nanoseconds(r[TASKS[1]], r["tails"]),
                ]
                for r in results["stored"]
            ],
        ),
    ]


def sparse_table(rows: list[Row]) -> list[str]:
    first, *others = OMEGAS
    lines = [
        [
            KINDS[r["kind"]],
            shown(r["shape"]),
            r["task"],
            cell(r[first]),
            *(f"{cell(r[name])} ({factor(ratio(r[name], r[first]))})" for name in others),
        ]
        for r in rows
    ]
    return table(" | ".join(("trees", SIZES, "task", *(f"{name}:" for name in OMEGAS))), lines)


def main() -> None:
    parser = command_line(__doc__, "trees", repeats=20)
    parser.add_argument("--quick", action="store_true", help="one small shape and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    shapes = QUICK_SHAPES if quick else SHAPES
    tables = {
        "spans": lambda: compare(spans, shapes, repeats),
        "arcs": lambda: compare(arcs, shapes, repeats),
        "sparse": lambda: sparse(shapes[:2], repeats),
        "growth": lambda: growth(QUICK_GROWTH if quick else GROWTH, repeats),
        "stored": lambda: stored(QUICK_STORED if quick else STORED, repeats),
    }
    results = {"machine": machine(), "peers": versions(PEERS), **collect(tables)}
    report(args.output, "trees", results, markdown(results))


if __name__ == "__main__":
    main()
