"""Compare chains with PyTorch loops and other libraries: time, growth with the shape, memory.

All calls are interleaved in one process. A row gives the minimum and the median of its runs. Libraries that are not
installed (`pip install bellmax[bench]`) are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

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
    CHAIN_PEERS,
    NEGENTROPY,
    TASKS,
    Rival,
    Shape,
    compare,
    dense,
    our_scores,
    ours,
    random_potentials,
    scored,
    sparse,
    versions,
)

import bellmax as bx

SIZES = "(B,T,S)"
SHAPES = ((32, 50, 17), (64, 128, 32), (16, 512, 64), (8, 64, 256), (1, 4096, 32), (3200, 50, 2))
SLOW = {  # torch.compile takes a minute at T = 50, and torch-struct time and memory of O(TS³)
    (32, 50, 17): ("torch.compile", "torch-struct"),
    (64, 128, 32): ("torch-struct",),
    (3200, 50, 2): ("torch-struct",),
}
SPARSE = (SHAPES[0], SHAPES[1], SHAPES[3])
SPREAD = 25.0
SPREAD_SHAPES = SHAPES[:2]
ATTENTION = (3200, 50, 2)
GROWTH = (8, 128, 32)
MEMORY = (("dense", 16, 512, 64), ("scores", 64, 512, 64), ("scores", 1, 1_000_000, 8), ("dense", 1, 1_000_000, 8))
QUICK_SHAPES = ((32, 50, 17), (8, 20, 5))


def attention(shape: Shape, repeats: int) -> list[Row]:
    batch, steps, states = shape
    theta, x = random_potentials(shape), torch.randn(batch, steps * states**2, requires_grad=True)
    emissions, transitions = torch.randn(shape, requires_grad=True), torch.randn(states, states, requires_grad=True)
    layers = {
        "softmax": ([x], lambda: x.softmax(-1)),
        "dense": ([theta], lambda: bx.Chain(theta).marginals),
        "scores": ([emissions, transitions], lambda: bx.Chain.from_scores(emissions, transitions).marginals),
    }
    runs = {}
    for name, (inputs, layer) in layers.items():
        runs[name] = torch.no_grad()(layer)
        runs[f"{name} with backward"] = with_backward(inputs, layer)
    times = measure(runs, repeats, SECONDS)
    return [{"layer": name, "forward": times[name], "both": times[f"{name} with backward"]} for name in layers]


def with_backward(inputs: Sequence[torch.Tensor], layer: Callable[[], torch.Tensor]) -> Run:
    z = torch.randn_like(layer())
    return lambda: torch.autograd.grad(layer(), inputs, grad_outputs=z)


def growth(doublings: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for axis, name in ((1, "T"), (2, "S"), (0, "B")):
        for power in range(doublings + 1):
            shape = tuple(size * (2**power if i == axis else 1) for i, size in enumerate(GROWTH))
            runs = {form: make_ours(form, shape).gradient for form in ("dense", "scores")}
            edges = shape[0] * shape[1] * shape[2] ** 2
            rows.append({"axis": name, "shape": shape, "edges": edges, **measure(runs, repeats, SECONDS)})
    return rows


def make_ours(form: str, shape: Sequence[int]) -> Rival:
    batch, steps, states = shape
    if form == "dense":
        return ours(random_potentials((batch, steps, states)), "negentropy")
    scores = (torch.randn(*size, requires_grad=True) for size in (shape, (states, states), (states,), (states,)))
    return our_scores(*scores)


def memory(form: str, *shape: int) -> Row:
    """Measured in a separate process."""
    return json.loads(in_own_process(__file__, "--memory", json.dumps((form, *shape))))


def print_memory(form: str, *shape: int) -> None:
    """Print the MB of inputs, outputs, one float per node, the peak without inputs and outputs, and the peak."""
    rival = make_ours(form, shape)
    make_ours(form, (2, 3, 4)).gradient()
    before = forget_peak() / 1024
    gradients = rival.gradient()
    whole = peak() / 1024
    inputs, outputs = (sum(x.nbytes for x in tensors) / 2**20 for tensors in (rival.inputs, gradients))
    sizes = {"inputs": inputs, "outputs": outputs, "nodes": 4 * math.prod(shape) / 2**20}
    print(json.dumps({"form": form, "shape": shape, **sizes, "beyond": whole - before - outputs, "whole": whole}))


def torch_operators(repeats: int) -> list[Row]:
    """Must be called before the first call of a bellmax kernel."""
    square, wide = torch.randn(512, 512), torch.randn(3200, 200)
    operators = {"matmul": lambda: square @ square, "softmax": lambda: wide.softmax(-1)}
    alone = measure(operators, 5 * repeats, SECONDS)
    mixed = {}
    for name, run in operators.items():
        mixed[name] = run
        mixed[f"{name}, bellmax"] = make_ours("dense", SHAPES[0]).gradient
    among = measure(mixed, 5 * repeats, SECONDS)
    return [{"operator": name, "alone": alone[name], "among": among[name]} for name in operators]


# --- the page


def markdown(results: dict) -> list[str]:
    peers = results["peers"]
    return [
        *heading("chain", results["machine"]),
        installed(peers),
        "",
        "A shape (B,T,S) is B sequences of T steps with S states. A number in brackets is the time of the other",
        "implementation divided by the time of bellmax (medians). Above 1×, bellmax is faster. Times include all",
        "Python code and the allocation of outputs. The time of a Hessian product includes the time of the gradient.",
        "A dash means that the task was too slow, needed too much memory, or is not supported.",
        "",
        "### Dense potentials, negentropy",
        "",
        "*PyTorch loop* is a loop over the steps, which reads the potentials with `theta.unbind(1)`. This function",
        "has a cheap gradient. *PyTorch loop, indexed* reads the potentials of step t with `theta[:, t]`.",
        "*torch.compile* is the first loop after compilation. The time of compilation is not counted. torch-struct is",
        "written for GPUs. Its parallel scan does more arithmetic than a loop over the steps. The column *jax* is a",
        "`lax.scan` of logsumexp",
        "under `jit`.",
        *against(results["dense"], SIZES, ("good loop", "plain loop", "torch.compile", "torch-struct", "jax"), peers),
        "",
        "### Dense potentials, l2",
        "",
        "The last column is the PyTorch loop with `sparsemax` of the entmax package.",
        *l2_table(results["l2"], peers),
        "",
        "### From emissions and transitions, negentropy",
        "",
        "The value is the log-partition function. The public losses of pytorch-crf and TorchCRF also compute the",
        "score of the correct tags. To measure the log-partition function alone, we call a private method of these",
        "libraries. The tab *Call overhead* compares the loss of pytorch-crf with the loss of bellmax. The tab",
        "*Training a tagger* compares whole training steps. Gradients are with respect to emissions, transitions,",
        "start scores and end scores.",
        *against(results["scores"], SIZES, ("pytorch-crf", "TorchCRF", "jax"), peers),
        "",
        f"In the next table, the transition scores have standard deviation {SPREAD:.0f}. They differ by more than 100.",
        *against(results["spread"], SIZES, ("pytorch-crf", "TorchCRF"), peers),
        "",
        "### Marginals as attention weights",
        "",
        f"This table compares the `marginals` of a chain, {SIZES} = {shown(ATTENTION)}, with a softmax. The row",
        "*dense* is `bx.Chain`, and the row *scores* is `bx.Chain.from_scores`. The softmax has as many inputs as the",
        "dense potentials. A ratio is the time of a row divided by the time of the softmax.",
        *attention_table(results["attention"]),
        "",
        "### Growth",
        "",
        "The table shows the time to compute value and gradient together. The first row of each group is",
        f"{shown(GROWTH)}. From row to row, T, S or B is doubled. A step has S² edges, one for each pair of the",
        "previous and the current state. The time per edge is the median divided by the B · T · S² edges.",
        *growth_table(results["growth"]),
        "",
        "### Memory",
        "",
        "The table shows the memory of a process that computes value and gradient once, in MB. *Workspace* is the peak",
        "memory minus the memory of inputs and outputs. For comparison, *one float per node* is the size of B · T · S",
        "float32 numbers.",
        *memory_table(results["memory"]),
        "",
        "### torch operators in the same process",
        "",
        "This table tests whether bellmax slows down torch operators in the same process. *Before bellmax* is the time",
        "of an operator before the first call of bellmax. *Interleaved* is its time between calls of bellmax.",
        *operators_table(results["torch_operators"]),
    ]


def l2_table(rows: list[Row], peers: dict[str, str | None]) -> list[str]:
    lines = [
        [
            shown(r["shape"]),
            r["task"],
            cell(r["bellmax"]),
            cell(r[NEGENTROPY]),
            factor(ratio(r["bellmax"], r[NEGENTROPY])),
            slower(r, "entmax", peers),
        ]
        for r in rows
    ]
    return table(
        f"{SIZES} | task | bellmax, l2: | bellmax, negentropy: | l2 / negentropy: | PyTorch loop with entmax:", lines
    )


def attention_table(rows: list[Row]) -> list[str]:
    plain = rows[0]
    lines = [
        [
            r["layer"],
            *(entry for work in ("forward", "both") for entry in (cell(r[work]), factor(ratio(r[work], plain[work])))),
        ]
        for r in rows
    ]
    return table("layer | forward: | ratio: | forward and backward: | ratio:", lines)


def growth_table(rows: list[Row]) -> list[str]:
    lines = [
        [
            r["axis"],
            shown(r["shape"]),
            *(entry for form in ("dense", "scores") for entry in (cell(r[form]), nanoseconds(r[form], r["edges"]))),
        ]
        for r in rows
    ]
    return table(f"doubled size | {SIZES} | dense: | ns per edge: | from scores: | ns per edge:", lines)


def memory_table(rows: list[Row]) -> list[str]:
    lines = [
        [
            r["form"],
            shown(r["shape"]),
            *(f"{r[what]:.0f}" for what in ("inputs", "outputs", "nodes", "beyond", "whole")),
        ]
        for r in rows
    ]
    return table(f"form | {SIZES} | inputs: | outputs: | one float per node: | workspace: | whole process:", lines)


def operators_table(rows: list[Row]) -> list[str]:
    lines = [[r["operator"], cell(r["alone"]), cell(r["among"]), factor(ratio(r["among"], r["alone"]))] for r in rows]
    return table("operator | before bellmax: | interleaved: | ratio:", lines)


def main() -> None:
    parser = command_line(__doc__, "chain", repeats=20)
    parser.add_argument("--quick", action="store_true", help="two shapes and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.memory:
        print_memory(*json.loads(args.memory))
        return
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    shapes = QUICK_SHAPES if quick else SHAPES
    slow = {QUICK_SHAPES[0]: ("torch-struct",)} if quick else SLOW
    tables = {
        "torch_operators": lambda: torch_operators(repeats),  # before any call of bellmax
        "dense": lambda: compare(lambda shape: dense(shape, slow=slow.get(shape, ())), shapes, repeats),
        "l2": lambda: compare(sparse, SPARSE[:1] if quick else SPARSE, repeats, TASKS[:3]),
        "scores": lambda: compare(scored, shapes, repeats),
        "spread": lambda: compare(
            lambda shape: scored(shape, spread=SPREAD), SPREAD_SHAPES[:1] if quick else SPREAD_SHAPES, repeats
        ),
        "attention": lambda: attention(ATTENTION, repeats),
        "growth": lambda: growth(1 if quick else 4, repeats),
        "memory": lambda: [memory(*case) for case in (MEMORY[:1] if quick else MEMORY)],
    }
    results = {"machine": machine(), "peers": versions(CHAIN_PEERS), **collect(tables)}
    report(args.output, "chain", results, markdown(results))


if __name__ == "__main__":
    main()
