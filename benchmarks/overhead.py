"""Measure the overhead of calls: tiny programs, CRF losses from tiny to large, distance matrices of short series.

All calls are interleaved in one process. Tiny programs are timed in loops of 100 calls, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    heading,
    machine,
    measure,
    ratio,
    report,
    shown,
    table,
)
from rivals import collected_series
from torch import Tensor

import bellmax as bx

CALLS = 100  # in one run
TAGGERS = ((1, 4, 3), (2, 8, 5), (8, 20, 9), (32, 50, 17), (64, 128, 32), (16, 512, 64))
COLLECTIONS = ((500, 8), (500, 24), (300, 64))
EMPTY = "an empty autograd.Function"


class Empty(torch.autograd.Function):
    """An autograd.Function without work, whose time is the minimum for any Function."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.new_zeros(2)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.new_zeros(2, 4)


def many(run: Run) -> Run:
    def repeat() -> None:
        for _ in range(CALLS):
            run()

    return repeat


def with_gradient(value: Callable[..., Tensor], *inputs: Tensor) -> Run:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]

    def run() -> None:
        value(*leaves).sum().backward()

    return run


def programs() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Programs whose kernels take almost no time."""
    dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    crf, tags = bx.nn.CRF(3), torch.randint(3, (2, 4))
    return {
        EMPTY: (Empty.apply, [torch.randn(2, 4)]),
        "Chain": (lambda t: bx.Chain(t).value, [torch.randn(2, 4, 3, 3)]),
        "Chain.from_scores": (
            lambda e, t: bx.Chain.from_scores(e, t).value,
            [torch.randn(2, 4, 3), torch.randn(3, 3)],
        ),
        "DAG.paths": (lambda w: dag.paths(w).value, [torch.randn(2, 4)]),
        "DTW": (lambda c: bx.DTW(c).value, [torch.rand(2, 4, 4)]),
        "dtw": (lambda x, y: bx.dtw(x, y), [torch.randn(2, 4, 1), torch.randn(2, 4, 1)]),
        "nn.CRF": (lambda e: crf(e, tags), [torch.randn(2, 4, 3)]),
    }


def calls(repeats: int) -> list[Row]:
    runs: dict[str, Run] = {}
    for name, (value, inputs) in programs().items():
        runs[f"{name} value"] = many(torch.no_grad()(lambda value=value, inputs=inputs: value(*inputs)))
        runs[f"{name} both"] = many(with_gradient(value, *inputs))
    times = measure(runs, repeats, 3 * SECONDS)
    each = {name: {key: 1e3 * ms / CALLS for key, ms in t.items()} for name, t in times.items()}
    return [{"call": name, "value": each[f"{name} value"], "both": each[f"{name} both"]} for name in programs()]


def tagger(shape: Sequence[int], masked: bool, repeats: int) -> Row:
    """The negative log-likelihood of a CRF and its gradient with respect to all scores."""
    from torchcrf import CRF

    batch, steps, states = shape
    ours, theirs = bx.nn.CRF(states), CRF(states, batch_first=True)
    emissions = torch.randn(batch, steps, states, requires_grad=True)
    tags = torch.randint(states, (batch, steps))
    lengths = torch.randint(1, steps + 1, (batch, 1)) if masked else torch.full((batch, 1), steps)
    mask = torch.arange(steps) < lengths
    options = {"mask": mask} if masked else {}
    runs = {
        "bellmax": lambda: ours(emissions, tags, **options).backward(),
        "pytorch-crf": lambda: theirs(emissions, tags, reduction="mean", **options).backward(),
    }
    return {"shape": shape, "masked": masked, **measure(runs, repeats, SECONDS)}


def collection(shape: Sequence[int], repeats: int) -> Row:
    """Distance matrix of K series of one length under hard DTW."""
    return {"shape": shape, **measure(collected_series(shape, parallel=True), repeats, SECONDS)}


# --- the page


def microseconds(times: Times) -> str:
    return f"{times['min']:.0f} / {times['median']:.0f}"


def markdown(results: dict) -> list[str]:
    rows = [
        [r["call"] if r["call"] == EMPTY else f"`bx.{r['call']}`", microseconds(r["value"]), microseconds(r["both"])]
        for r in results["calls"]
    ]
    taggers = [
        [shown(r["shape"]), "yes" if r["masked"] else "no", cell(r["bellmax"]), cell(r["pytorch-crf"]),
         factor(ratio(r["pytorch-crf"], r["bellmax"]))]
        for r in results["taggers"]
    ]  # fmt: skip
    pairs = [
        [shown(r["shape"]), cell(r["bellmax"]), cell(r["dtaidistance"]), factor(ratio(r["dtaidistance"], r["bellmax"])),
         f"{1e3 * r['bellmax']['median'] / (r['shape'][0] * (r['shape'][0] - 1) / 2):.2f}"]
        for r in results["collections"]
    ]  # fmt: skip
    return [
        *heading("overhead", results["machine"]),
        "",
        "### Tiny programs",
        "",
        "The programs are so small that nearly all of the time is overhead: a batch of two, four steps and three",
        f"states. Times are in microseconds per call, over loops of {CALLS} calls. The value is computed under",
        "`no_grad`. For the gradient, we call `backward()` on the sum of the values.",
        *table("call | value, µs: | value and gradient, µs:", rows),
        "",
        "### Loss of a CRF",
        "",
        "This table compares the negative log-likelihood of `nn.CRF` with the loss of pytorch-crf, both with",
        "gradients. A shape (B,T,S) is B sequences of T steps with S tags. The ratio is the time of pytorch-crf",
        "divided by the time of bellmax (medians). In whole training steps, the gain is much smaller: see *Training a",
        "tagger*.",
        *table("(B,T,S) | mask | bellmax: | pytorch-crf: | ratio:", taggers),
        "",
        "### Distance matrices of short series",
        "",
        "This table compares `bx.dtw_cdist` under hard DTW with `distance_matrix_fast` of dtaidistance, which",
        "computes in float64. The K series have equal lengths. In both libraries, threads share the pairs. The ratio",
        "is the time of dtaidistance divided by the time of bellmax (medians).",
        *table("(K,length) | bellmax: | dtaidistance: | ratio: | bellmax, µs per pair:", pairs),
    ]


def main() -> None:
    parser = command_line(__doc__, "overhead", repeats=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    tables = {
        "calls": lambda: calls(args.repeats),
        "taggers": lambda: [tagger(shape, masked, args.repeats) for shape in TAGGERS for masked in (False, True)],
        "collections": lambda: [collection(shape, args.repeats) for shape in COLLECTIONS],
    }
    results = {"machine": machine(), **collect(tables)}
    report(args.output, "overhead", results, markdown(results))


if __name__ == "__main__":
    main()
