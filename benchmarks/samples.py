"""Measure drawing samples in the decoded form, their log-probabilities, and the gradient of the risk by samples.

The forward sweep of each distribution is done before the first call. A row gives the minimum and the median of its
runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import SECONDS, Row, cell, collect, command_line, factor, heading, machine, measure, ratio, report, table

import bellmax as bx

DRAWS = 64
OMEGAS = "negentropy", "sparsemax"
Make = Callable[[str], bx.PathDistribution]


def chain(*shape: int) -> Make:
    potentials = torch.randn(*shape, shape[-1], requires_grad=True)
    return lambda omega: bx.Chain(potentials, omega=omega)


def scores(*shape: int) -> Make:
    emissions = torch.randn(shape, requires_grad=True)
    transitions = torch.randn(shape[-1], shape[-1], requires_grad=True)
    return lambda omega: bx.Chain.from_scores(emissions, transitions, omega=omega)


def ctc(batch: int, frames: int, classes: int, labels: int) -> Make:
    log_probs = torch.randn(batch, frames, classes).log_softmax(-1).requires_grad_()
    targets = torch.randint(1, classes, (batch, labels))
    return lambda omega: bx.CTC(log_probs, targets, omega=omega)


def dtw(*shape: int) -> Make:
    cost = torch.rand(shape, requires_grad=True)
    return lambda omega: bx.DTW(cost, omega=omega)


STRUCTURES = {
    "chain (32,50,17)": (chain, (32, 50, 17)),
    "chain from scores (32,50,17)": (scores, (32, 50, 17)),
    "chain from scores (8,200,9)": (scores, (8, 200, 9)),
    "CTC (4,50,20), 10 labels": (ctc, (4, 50, 20, 10)),
    "CTC (8,200,30), 40 labels": (ctc, (8, 200, 30, 40)),
    "DTW (8,100,100)": (dtw, (8, 100, 100)),
}


def risk_gradient(p: bx.PathDistribution) -> None:
    """Compute the gradient of the risk of a cost that takes no time."""
    loss = bx.losses.risk(p, lambda paths: torch.zeros(DRAWS, *p.batch_shape), samples=DRAWS)
    torch.autograd.grad(loss, [score for score in p.scores.values() if score.requires_grad])


def compare(names: list[str], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        make, sizes = STRUCTURES[name]
        build = make(*sizes)
        for omega in OMEGAS:
            learned = build(omega)
            p = learned.detach()
            decoded = p.sample_decoded((DRAWS,))
            runs = {
                "draw": lambda p=p: p.sample_decoded((DRAWS,)),
                "score": lambda p=p, d=decoded: p.log_prob(d),
                "through events": lambda p=p, d=decoded: p.log_prob(p.encode(d)),
                "risk": lambda p=learned: risk_gradient(p),
            }
            rows.append({"name": name, "omega": omega, **measure(runs, repeats, SECONDS)})
    return rows


def markdown(results: Row) -> list[str]:
    lines = [
        [r["name"], r["omega"], cell(r["draw"])]
        + [f"{cell(r[task])} ({factor(ratio(r[task], r['draw']))})" for task in ("score", "through events", "risk")]
        for r in results["samples"]
    ]
    return [
        *heading("samples", results["machine"]),
        "",
        f"For each member of the batch, a call of `sample_decoded` draws {DRAWS} samples. A call of `log_prob`",
        "computes the log-probabilities of these samples. A shape is (B,T,S) for chains, (B,T,V) for CTC and (B,N,M)",
        "for DTW. The time of the forward sweep is not counted. A number in brackets is the median time of a column",
        "divided by the median time of `sample_decoded`.",
        "",
        "If a sample is in decoded form, `log_prob` reads one number for each edge of its path. If a sample is an",
        "event, `log_prob` reads all edges of the graph.",
        "",
        f"The last column is the time of `bx.losses.risk` with {DRAWS} samples and of its gradient. It includes the",
        "times of drawing the samples and of their log-probabilities. The cost function takes no time.",
        *table(
            "structure | Ω | `sample_decoded`: | `log_prob` of decoded forms: | `encode` and `log_prob` of events: | "
            "`risk` and gradient:",
            lines,
        ),
    ]


def main() -> None:
    parser = command_line(__doc__, "samples", repeats=20)
    parser.add_argument("--quick", action="store_true", help="one structure and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    names = list(STRUCTURES)[3:4] if args.quick else list(STRUCTURES)
    results = {"machine": machine(), **collect({"samples": lambda: compare(names, 2 if args.quick else args.repeats)})}
    report(args.output, "samples", results, markdown(results))


if __name__ == "__main__":
    main()
