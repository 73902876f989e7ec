"""Compare grid recursions with other libraries: sequence alignment, RNN-T, monotonic alignment, semi-Markov, DTW.

All calls are interleaved in one process. A row gives the minimum and the median of its runs. Libraries that are not
installed (`pip install bellmax[bench]`) are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from measuring import (
    SECONDS,
    Row,
    Run,
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
    shown,
    table,
)
from rivals import check_value, peer
from torch import Tensor

import bellmax as bx

Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, ...]] = {
    "gaps": ((16, 300, 300), (8, 1000, 1000)),
    "transducer": ((8, 150, 30, 128),),
    "monotone": ((16, 800, 200), (32, 500, 100)),
    "segments": ((4, 100, 8, 8), (4, 500, 30, 24), (1, 10_000, 1000, 8)),
    "warping": ((8, 512, 512), (8, 1024, 1024)),
}
QUICK: dict[str, tuple[Shape, ...]] = {
    "gaps": ((2, 20, 30),),
    "transducer": ((2, 10, 4, 6),),
    "monotone": ((2, 20, 6),),
    "segments": ((2, 10, 3, 2),),
    "warping": ((2, 20, 30),),
}


def gradient(value: Callable[[], Tensor], *inputs: Tensor) -> Run:
    return lambda: torch.autograd.grad(value().sum(), inputs)


def without_graph(value: Callable[[], Tensor]) -> Run:
    return torch.no_grad()(value)


def gaps(shape: Shape) -> dict[str, dict[str, Run]]:
    """Global alignments with affine gaps, from a (20, 20) matrix. parasail computes the hard score in integers."""
    batch, rows, columns = shape
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 20, (batch, size), generator=random) for size in (rows, columns))
    matrix = torch.randint(-4, 6, (20, 20), generator=random).float()
    matrix = ((matrix + matrix.T) / 2).round().requires_grad_()
    scores = matrix.detach()[a.unsqueeze(-1), b.unsqueeze(-2)].contiguous().requires_grad_()

    def value(omega: str) -> Tensor:
        return bx.SequenceAlignment(scores, gap_open=-11.0, gap_extend=-1.0, omega=omega).value

    tasks: dict[str, dict[str, Run]] = {
        "hard value": {"bellmax": without_graph(lambda: value("hard"))},
        "soft value": {"bellmax": without_graph(lambda: value("negentropy"))},
        "soft value and gradient": {"bellmax": gradient(lambda: value("negentropy"), scores)},
        "l2 value and gradient": {"bellmax": gradient(lambda: value("l2"), scores)},
    }
    if parasail := peer("parasail", "nw_striped_16"):
        tasks["hard value"]["parasail"] = lambda: aligned_by(parasail, matrix.detach(), a, b)
        check_value("parasail", tasks["hard value"]["parasail"](), tasks["hard value"]["bellmax"]())
    return tasks


def aligned_by(parasail: Any, matrix: Tensor, a: Tensor, b: Tensor) -> Tensor:
    letters = "ARNDCQEGHILKMFPSTWYV"
    create = peer("parasail", "matrix_create")
    costs = create(letters, 0, 0)
    for i, row in enumerate(matrix.tolist()):
        for j, score in enumerate(row):
            costs[i, j] = int(score)
    texts = (["".join(letters[i] for i in row) for row in side.tolist()] for side in (a, b))
    return torch.tensor([float(parasail(x, y, 11, 1, costs).score) for x, y in zip(*texts, strict=True)])


def transducer(shape: Shape) -> dict[str, dict[str, Run]]:
    """The loss from logits (B, T, U + 1, V), and a log_softmax of the logits for comparison."""
    batch, frames, labels, classes = shape
    logits = torch.randn(batch, frames, labels + 1, classes, requires_grad=True)
    targets = torch.randint(1, classes, (batch, labels))
    runs: dict[str, Run] = {
        "bellmax": gradient(lambda: bx.Transducer.from_logits(logits, targets).value, logits),
        "log_softmax": gradient(lambda: logits.log_softmax(-1)[..., 0], logits),
    }
    if loss := peer("warprnnt_numba", "RNNTLossNumba"):
        criterion = loss(blank=0, reduction="none")
        lengths = torch.full((batch,), frames, dtype=torch.int32), torch.full((batch,), labels, dtype=torch.int32)

        def numba_loss() -> Tensor:
            return criterion(logits.log_softmax(-1), targets.int(), *lengths)

        check_value("warprnnt_numba", -numba_loss(), bx.Transducer.from_logits(logits, targets).value)
        runs["warprnnt_numba"] = gradient(numba_loss, logits)
    return {"value and gradient": runs}


def monotone(shape: Shape) -> dict[str, dict[str, Run]]:
    """Scores (B, frames, tokens). monotonic_alignment_search has the tokens first."""
    scores = torch.randn(shape, requires_grad=True)
    tasks: dict[str, dict[str, Run]] = {
        "best path": {"bellmax": lambda: bx.MonotonicAlignment(scores.detach()).best_path()},
        "forward sum and gradient": {"bellmax": gradient(lambda: bx.MonotonicAlignment(scores).value, scores)},
    }
    if maximum_path := peer("monotonic_alignment_search", "maximum_path"):
        value = scores.detach().mT.contiguous()
        mask = torch.ones_like(value)
        tasks["best path"]["monotonic_alignment_search"] = lambda: maximum_path(value, mask)
        path = maximum_path(value, mask).mT
        check_value(
            "monotonic_alignment_search",
            (path * scores).sum((1, 2)),
            (bx.MonotonicAlignment(scores).best_path() * scores).sum((1, 2)),
        )
    return tasks


def segments(shape: Shape) -> dict[str, dict[str, Run]]:
    """Segments from scores of steps and durations, and from one score per segment unless this takes too much memory.

    torch-struct describes the model with one tensor of potentials (B, T, D, K, K).
    """
    batch, steps, durations, labels = shape
    transitions = torch.randn(labels, labels, requires_grad=True)
    inputs = [torch.randn(*size, labels, requires_grad=True) for size in ((batch, steps), (durations,))]
    value_from_scores = lambda: bx.SemiMarkov.from_scores(*inputs, transitions).value  # noqa: E731
    tasks = {"value and gradient, from scores": {"bellmax": gradient(value_from_scores, *inputs, transitions)}}
    if math.prod(shape) > 10**7:
        return tasks
    scores = torch.randn(batch, steps, durations, labels, requires_grad=True)
    value = lambda: bx.SemiMarkov(scores, transitions).value  # noqa: E731
    runs: dict[str, Run] = {"bellmax": gradient(value, scores, transitions)}
    crf = peer("torch_struct", "SemiMarkovCRF")
    if crf and math.prod(shape) * labels < 10**6:
        potentials = torch.randn(batch, steps, durations, labels, labels, requires_grad=True)
        runs["torch-struct"] = gradient(lambda: crf(potentials).partition, potentials)
    return {"value and gradient": runs, **tasks}


def warping(shape: Shape) -> dict[str, dict[str, Run]]:
    cost = torch.randn(shape).square_().requires_grad_()
    value = lambda **options: bx.DTW(cost, **options).value  # noqa: E731
    runs = {
        "bellmax": gradient(value, cost),
        "with penalties": gradient(lambda: value(step_penalties=(0.5, 0.0, 0.5)), cost),
        "with open ends": gradient(lambda: value(open_begin=True, open_end=True), cost),
    }
    return {"value and gradient": runs}


PROGRAMS = {"gaps": gaps, "transducer": transducer, "monotone": monotone, "segments": segments, "warping": warping}
SECTIONS = {
    "gaps": (
        "Sequence alignment",
        [
            "A shape (B,N,M) is B pairs of sequences of lengths N and M. bellmax uses `bx.SequenceAlignment` with",
            "affine gaps. *Hard value* is the score of the best alignment. *Soft value* is its smoothed score under",
            "negentropy. parasail is written in C with SIMD instructions. It computes only the hard value, in",
            "integers. A cell is a pair of a position in the first sequence and a position in the second sequence.",
        ],
        "(B,N,M)",
        ("parasail",),
    ),
    "transducer": (
        "RNN transducer",
        [
            "A shape (B,T,U,V) is B sequences of T frames, U labels and V classes. bellmax uses",
            "`bx.Transducer.from_logits`. For comparison, the column *log_softmax* is the time of torch's",
            "`log_softmax` of the logits and its gradient. warprnnt_numba is a Numba port of the warp-transducer",
            "loss, meant for experiments. A cell is a pair of a frame and a label.",
        ],
        "(B,T,U,V)",
        ("log_softmax", "warprnnt_numba"),
    ),
    "monotone": (
        "Monotonic alignment",
        [
            "A shape (B,T,J) is B sequences of T frames and J tokens. bellmax uses `bx.MonotonicAlignment`. The",
            "library monotonic_alignment_search computes only the best path. A cell is a pair of a frame and a token.",
        ],
        "(B,T,J)",
        ("monotonic_alignment_search",),
    ),
    "segments": (
        "Semi-Markov chain",
        [
            "A shape (B,T,D,K) is B sequences of T steps with K labels and segments of at most D steps. bellmax uses",
            "`bx.SemiMarkov`. torch-struct is written for GPUs. Its parallel scan does more arithmetic than a loop",
            "over the steps. A cell is a pair of a step and a duration.",
        ],
        "(B,T,D,K)",
        ("torch-struct",),
    ),
    "warping": (
        "DTW with penalties and open ends",
        [
            "The column *bellmax* is `bx.DTW` without options. The next columns are `bx.DTW` with step penalties and",
            "with open ends. A number in brackets is the time with the option divided by the time without options.",
        ],
        "(B,N,M)",
        ("with penalties", "with open ends"),
    ),
}


def compare(name: str, shapes: tuple[Shape, ...], repeats: int) -> list[Row]:
    return [
        {"shape": shape, "task": task, **measure(runs, repeats, SECONDS)}
        for shape in shapes
        for task, runs in PROGRAMS[name](shape).items()
    ]


# --- memory of the transducer


def memory(shape: Shape) -> Row:
    """Peak memory of value and gradient without the logits and their gradient, measured in a new process."""
    return json.loads(in_own_process(__file__, "--memory", json.dumps(shape)))


def print_memory(*shape: int) -> None:
    batch, frames, labels, classes = shape
    logits = torch.randn(batch, frames, labels + 1, classes, requires_grad=True)
    targets = torch.randint(1, classes, (batch, labels))
    small = bx.Transducer.from_logits(logits[:1, :3], targets[:1])
    small.value.backward()  # the first call loads libraries, whose memory is not counted
    logits.grad = None
    before = forget_peak()
    bx.Transducer.from_logits(logits, targets).value.sum().backward()
    used, joint = peak() - before, logits.numel() * 4 // 1024
    nodes = batch * frames * (labels + 1)
    print(json.dumps({"shape": shape, "joint": joint, "beyond": used - joint, "nodes": nodes}))


# --- the page


def markdown(results: dict) -> list[str]:
    page = [
        *heading("lattices", results["machine"]),
        "",
        "A number in brackets is the time of the other library divided by the time of bellmax (medians). Above 1×,",
        "bellmax is faster. Times include all Python code and the allocation of outputs. The time per cell is",
        "computed from the median of bellmax. A dash means that the task is not supported or needs too much memory.",
    ]
    for name, (title, text, sizes, columns) in SECTIONS.items():
        page += ["", f"### {title}", "", *text, *program_table(results[name], sizes, columns)]
    page += [
        "",
        "### Memory of an RNN transducer",
        "",
        "*Workspace* is the peak memory of value and gradient minus the memory of the logits and their gradient. At",
        "each frame, 0 to U labels have been output so far. So each frame has U + 1 nodes.",
        *table(
            "(B,T,U,V) | logits, MB: | workspace, MB: | workspace per node, bytes:",
            [
                [
                    shown(r["shape"]),
                    f"{r['joint'] / 1024:.0f}",
                    f"{r['beyond'] / 1024:.1f}",
                    f"{r['beyond'] * 1024 / r['nodes']:.0f}",
                ]
                for r in results["memory"]
            ],
        ),
    ]
    return page


def program_table(rows: list[Row], sizes: str, columns: tuple[str, ...]) -> list[str]:
    lines = []
    for r in rows:
        cells = math.prod(r["shape"][:3])
        others = (f"{cell(r[c])} ({factor(ratio(r[c], r['bellmax']))})" if c in r else "–" for c in columns)
        lines.append([shown(r["shape"]), r["task"], cell(r["bellmax"]), nanoseconds(r["bellmax"], cells), *others])
    header = " | ".join((sizes, "task", "bellmax:", "ns per cell:", *(f"{c}:" for c in columns)))
    return table(header, lines)


def main() -> None:
    parser = command_line(__doc__, "lattices", repeats=20)
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.memory:
        print_memory(*json.loads(args.memory))
        return
    shapes, repeats = (QUICK, 2) if args.quick else (SHAPES, args.repeats)
    tables: dict[str, Callable[[], object]] = {
        name: lambda name=name: compare(name, shapes[name], repeats) for name in PROGRAMS
    }
    tables["memory"] = lambda: [memory(shape) for shape in shapes["transducer"]]
    results = {"machine": machine(), **collect(tables)}
    report(args.output, "lattices", results, markdown(results))


if __name__ == "__main__":
    main()
