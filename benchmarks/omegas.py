"""Measure the cost of each Ω: value and gradient of every structure, relative to negentropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from dag import layered
from measuring import SECONDS, Row, cell, collect, command_line, factor, heading, machine, measure, ratio, report, table

import bellmax as bx
from bellmax import lattice as L
from bellmax.nn import CTCLoss

OMEGAS: dict[str, str | bx.Regularizer] = {
    "negentropy": "negentropy",
    "sparsemax": "sparsemax",
    "l2": "l2",
    "entmax": "entmax",
    "Tsallis(1.3)": bx.Tsallis(1.3),
    "hard": "hard",
}
Omega = str | bx.Regularizer
Make = Callable[[Omega], torch.Tensor]
Problem = tuple[torch.Tensor, Make]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def chain(*shape: int) -> Problem:
    potentials = random(*shape, shape[-1])
    return potentials, lambda omega: bx.Chain(potentials, omega=omega).value


def scores(*shape: int) -> Problem:
    emissions, transitions = random(*shape), torch.randn(shape[-1], shape[-1])
    return emissions, lambda omega: bx.Chain.from_scores(emissions, transitions, omega=omega).value


def dtw(*shape: int) -> Problem:
    cost = torch.rand(shape, requires_grad=True)
    return cost, lambda omega: bx.DTW(cost, omega=omega).value


def ctc(batch: int, frames: int, classes: int, labels: int) -> Problem:
    log_probs = torch.randn(batch, frames, classes).log_softmax(-1).requires_grad_()
    targets = torch.randint(1, classes, (batch, labels))
    return log_probs, lambda omega: bx.CTC(log_probs, targets, omega=omega).value


def ctc_loss(batch: int, frames: int, classes: int, labels: int) -> Problem:
    logits, targets = random(batch, frames, classes), torch.randint(1, classes, (batch, labels))
    return logits, lambda omega: CTCLoss(omega=omega)(logits, targets)


def monotonic(*shape: int) -> Problem:
    tokens = random(*shape)
    return tokens, lambda omega: bx.MonotonicAlignment(tokens, omega=omega).value


def transducer(batch: int, frames: int, labels: int, classes: int) -> Problem:
    logits, targets = random(batch, frames, labels + 1, classes), torch.randint(1, classes, (batch, labels))
    return logits, lambda omega: bx.Transducer.from_logits(logits, targets, omega=omega).value


def alignment(*shape: int) -> Problem:
    pairs = random(*shape)
    return pairs, lambda omega: bx.SequenceAlignment(pairs, gap_open=-2.0, gap_extend=-0.5, omega=omega).value


def segments(batch: int, steps: int, durations: int, labels: int) -> Problem:
    emissions, rest = random(batch, steps, labels), (torch.randn(durations, labels), torch.randn(labels, labels))
    return emissions, lambda omega: bx.SemiMarkov.from_scores(emissions, *rest, omega=omega).value


def spans(batch: int, words: int) -> Problem:
    brackets = random(batch, words, words)
    return brackets, lambda omega: bx.SpanTrees(brackets, omega=omega).value


def heads(batch: int, words: int) -> Problem:
    arcs = random(batch, words + 1, words + 1)
    return arcs, lambda omega: bx.DependencyTrees(arcs, omega=omega).value


def graph(layers: int, width: int) -> Problem:
    dag = bx.DAG(layered(layers, width))
    weights = random(dag.num_edges)
    return weights, lambda omega: dag.paths(weights, omega=omega).value


def tree(batch: int, nodes: int, labels: int) -> Problem:
    model = bx.TreeModel([-1, *((node - 1) // 2 for node in range(1, nodes))])
    unary, pairwise = random(batch, nodes, labels), torch.randn(labels, labels)
    return unary, lambda omega: model.labels(unary, pairwise, omega=omega).value


def edit_distance(*shape: int) -> Problem:
    gap = -1.0
    moves = bx.Move(1, 1, score=L.cell("pair", -1, -1)), bx.Move(1, 0, score=gap), bx.Move(0, 1, score=gap)
    lattice, pair = bx.Lattice(moves), random(*shape)
    return pair, lambda omega: lattice.paths({"pair": pair}, omega=omega).value


def grammar(batch: int, words: int) -> Problem:
    """All ways to bracket a sentence, as a hypergraph."""
    spans = [(i, j) for size in range(1, words + 1) for i in range(words - size + 1) for j in [i + size]]
    edges: list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = [(s, ()) for s in spans if s[1] == s[0] + 1]
    edges += [((i, j), ((i, k), (k, j))) for i, j in spans for k in range(i + 1, j)]
    hypergraph = bx.Hypergraph(edges)
    weights = random(batch, len(edges))
    return weights, lambda omega: hypergraph.derivations(weights, omega=omega).value


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "`Chain.from_scores` (B,T,S) = (64,128,32)": lambda: scores(64, 128, 32),
    "`Chain` (B,T,S) = (64,128,32)": lambda: chain(64, 128, 32),
    "`DTW` (B,N,M) = (32,256,256)": lambda: dtw(32, 256, 256),
    "`CTC` (B,T,V,L) = (32,400,32,60)": lambda: ctc(32, 400, 32, 60),
    "`nn.CTCLoss` (B,T,V,L) = (32,400,32,60)": lambda: ctc_loss(32, 400, 32, 60),
    "`nn.CTCLoss` (B,T,V,L) = (32,400,128,60)": lambda: ctc_loss(32, 400, 128, 60),
    "`Transducer` (B,T,U,V) = (8,100,20,50)": lambda: transducer(8, 100, 20, 50),
    "`MonotonicAlignment` (B,T,J) = (16,800,200)": lambda: monotonic(16, 800, 200),
    "`SequenceAlignment` (B,N,M) = (16,200,200)": lambda: alignment(16, 200, 200),
    "`SemiMarkov` (B,T,D,K) = (16,200,20,8)": lambda: segments(16, 200, 20, 8),
    "`SpanTrees` (B,n) = (32,40)": lambda: spans(32, 40),
    "`DependencyTrees` (B,n) = (32,40)": lambda: heads(32, 40),
    "`TreeModel` (B,V,K) = (32,127,16)": lambda: tree(32, 127, 16),
    "`Lattice`, edit distance (B,N,M) = (16,200,200)": lambda: edit_distance(16, 200, 200),
    "`Hypergraph`, brackets (B,n) = (32,20)": lambda: grammar(32, 20),
    "`DAG`, 100 layers of 50 nodes": lambda: graph(100, 50),
}


def compare(names: list[str], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        scores, make = PROBLEMS[name]()

        def run(omega: Omega, scores: torch.Tensor = scores, make: Make = make) -> None:
            torch.autograd.grad(make(omega).sum(), scores)

        runs = {label: lambda omega=omega, run=run: run(omega) for label, omega in OMEGAS.items()}
        rows.append({"name": name, **measure(runs, repeats, SECONDS)})
    return rows


def markdown(results: Row) -> list[str]:
    others = [name for name in OMEGAS if name != "negentropy"]
    lines = [
        [row["name"], cell(row["negentropy"]), *(factor(ratio(row[name], row["negentropy"])) for name in others)]
        for row in results["omegas"]
    ]
    return [
        *heading("omegas", results["machine"]),
        "",
        "Each call computes the value and the gradient of random scores. Times include all Python code. The column",
        "*negentropy* is a time. Each other column is the time under its Ω divided by the time under negentropy",
        "(medians).",
        "",
        "<!-- --8<-- [start:table] -->",
        *table(" | ".join(["structure", "negentropy:", *(f"{name}:" for name in others)]), lines),
        "",
        "<!-- --8<-- [end:table] -->",
    ]


def main() -> None:
    parser = command_line(__doc__, "omegas", repeats=20)
    parser.add_argument("--quick", action="store_true", help="one structure and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    names = ["`DAG`, 100 layers of 50 nodes"] if args.quick else list(PROBLEMS)
    results = {"machine": machine(), **collect({"omegas": lambda: compare(names, 2 if args.quick else args.repeats)})}
    report(args.output, "omegas", results, markdown(results))


if __name__ == "__main__":
    main()
