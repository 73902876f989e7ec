"""Compare CTC with torch's ctc_loss and a PyTorch loop: time, other Ω, growth with the shape, accuracy in float32.

All calls are interleaved in one process. A row gives the minimum and the median of its runs. All implementations start
from log-probabilities, so the log_softmax is not timed.
"""

from __future__ import annotations

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
    machine,
    measure,
    nanoseconds,
    ratio,
    report,
    shown,
    table,
)
from rivals import TASKS, Rival, compare
from torch import Tensor
from torch.nn.functional import ctc_loss

import bellmax as bx

Shape = tuple[int, ...]  # batch, frames, classes, labels

SIZES = "(B,T,V,L)"
SHAPES = ((32, 400, 32, 60), (16, 1000, 64, 120), (8, 200, 1000, 40))
QUICK_SHAPES = ((4, 50, 8, 10),)
SLOW = SHAPES[1:]  # for a loop
OMEGAS = {"negentropy": bx.Negentropy(), "l2": bx.SquaredL2(), "sparsemax": bx.Tsallis(2), "entmax": bx.Tsallis(1.5)}
GROWTH = (8, 100, 32, 25)
DIGITS = ((4, 200, 32, 30), (4, 800, 32, 120), (4, 3200, 32, 480))


def problem(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T, V) and targets (B, L), without padding."""
    batch, frames, classes, labels = shape
    log_probs = torch.randn(batch, frames, classes, dtype=dtype).log_softmax(-1)
    return log_probs.requires_grad_(), torch.randint(1, classes, (batch, labels))


def ours(log_probs: Tensor, targets: Tensor, omega: str | bx.Regularizer = "negentropy") -> Rival:
    return Rival(
        [log_probs],
        lambda: bx.CTC(log_probs, targets, omega=omega).value,
        lambda: [bx.CTC(log_probs, targets, omega=omega).expected_path],
        lambda: bx.CTC(log_probs, targets).decode(),
    )


def torchs(log_probs: Tensor, targets: Tensor) -> Rival:
    """torch's ctc_loss: its gradient is right only after a log_softmax, and it has no second derivative."""
    (batch, frames, _), labels = log_probs.shape, targets.shape[1]
    lengths = (frames,) * batch, (labels,) * batch
    value = lambda: -ctc_loss(log_probs.transpose(0, 1), targets, *lengths, reduction="none")  # noqa: E731
    return Rival([log_probs], value, skips=("Hessian product",))


def loop(log_probs: Tensor, targets: Tensor) -> Rival:
    """The recursion over 2L + 1 positions with one logsumexp per frame; autograd computes the derivatives."""
    batch, _, _ = log_probs.shape
    places = torch.zeros(batch, 2 * targets.shape[1] + 1, dtype=torch.int64)
    places[:, 1::2] = targets
    low = -1e30  # −∞ would give NaN
    skips = torch.full(places.shape, low)
    skips[:, 2:].masked_fill_((places[:, 2:] != 0) & (places[:, 2:] != places[:, :-2]), 0)

    def value() -> Tensor:
        rows = log_probs.gather(-1, places.unsqueeze(1).expand(-1, log_probs.shape[1], -1)).unbind(1)
        v = torch.cat((rows[0][:, :2], torch.full_like(rows[0][:, 2:], low)), 1)
        for row in rows[1:]:
            one, two = (torch.nn.functional.pad(v, (n, 0), value=low)[:, : v.shape[1]] for n in (1, 2))
            v = row + torch.stack((v, one, two + skips)).logsumexp(0)
        return v[:, -2:].logsumexp(-1)

    return Rival([log_probs], value)


def rivals(shape: Shape) -> dict[str, Rival]:
    inputs = problem(shape)
    implementations = {"bellmax": ours(*inputs), "torch": torchs(*inputs)}
    return implementations if shape in SLOW else {**implementations, "good loop": loop(*inputs)}


def sparse(shapes: tuple[Shape, ...], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for shape in shapes:
        inputs = problem(shape)
        runs = {name: ours(*inputs, omega).runs() for name, omega in OMEGAS.items()}
        for task in TASKS[:3]:
            now = {name: run[task] for name, run in runs.items()}
            rows.append({"shape": shape, "task": task, **measure(now, repeats, SECONDS)})
    return rows


def growth(doublings: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for axis, name in ((1, "T"), (3, "L"), (2, "V"), (0, "B")):
        for power in range(doublings + 1):
            shape = tuple(size * (2**power if i == axis else 1) for i, size in enumerate(GROWTH))
            if shape[1] < 2 * shape[3]:
                continue
            nodes = shape[0] * shape[1] * (2 * shape[3] + 1)
            runs = {"bellmax": ours(*problem(shape)).gradient}
            rows.append({"axis": name, "shape": shape, "nodes": nodes, **measure(runs, repeats, SECONDS)})
    return rows


def digits(shapes: tuple[Shape, ...]) -> list[Row]:
    """Largest error of the gradient after log_softmax in float32, relative to its largest entry."""
    rows: list[Row] = []
    for shape in shapes:
        log_probs, targets = problem(shape, torch.float64)
        logits = log_probs.detach()
        gradients = {}
        for make, dtype in ((ours, torch.float64), (ours, torch.float32), (torchs, torch.float32)):
            x = logits.to(dtype, copy=True).requires_grad_()
            gradients[make, dtype] = torch.autograd.grad(make(x.log_softmax(-1), targets).value().sum(), x)[0].double()
        exact = gradients.pop((ours, torch.float64))
        names = {ours: "bellmax", torchs: "torch"}
        errors = {names[make]: float((g - exact).abs().max() / exact.abs().max()) for (make, _), g in gradients.items()}
        rows.append({"shape": shape, **errors})
    return rows


# --- the page


def markdown(results: dict) -> list[str]:
    return [
        *heading("ctc", results["machine"]),
        "",
        "A shape (B,T,V,L) is B sequences of T frames, V classes and L labels, without padding. All implementations",
        "start from log-probabilities. A number in brackets is the time of the other implementation divided by the",
        "time of bellmax (medians). Above 1×, bellmax is faster. Times include all Python code and the allocation of",
        "outputs.",
        "",
        "torch's `ctc_loss` has no second derivative. Its gradient is correct only if the log-probabilities come",
        "directly from `log_softmax`. *Decoding* is forced alignment: the best path of a given target. The time of a",
        "Hessian product includes the time of the gradient. A dash means that the task was too slow or is not",
        "supported.",
        *against(results["torch"], SIZES, ("torch", "good loop"), {}),
        "",
        "### Other Ω",
        "",
        "A number in brackets is the time under the Ω divided by the time under negentropy (medians).",
        *sparse_table(results["sparse"]),
        "",
        "### Growth",
        "",
        "The table shows the time to compute value and gradient together. The first row of each group is",
        f"{shown(GROWTH)}. From row to row, T, L, V or B is doubled. Each frame has 2L + 1 nodes: one for each of the",
        "L labels, and one for each of the L + 1 blanks around the labels. The time per node is computed from the",
        "median.",
        *table(
            f"doubled size | {SIZES} | bellmax: | ns per node:",
            [
                [r["axis"], shown(r["shape"]), cell(r["bellmax"]), nanoseconds(r["bellmax"], r["nodes"])]
                for r in results["growth"]
            ],
        ),
        "",
        "### Accuracy of float32",
        "",
        "The gradient of the loss with respect to the logits is computed in float32 and in float64. The table shows",
        "the largest difference between the two gradients, divided by the largest entry of the gradient in float64.",
        *table(
            f"{SIZES} | bellmax: | torch ctc_loss:",
            [[shown(r["shape"]), f"{r['bellmax']:.0e}", f"{r['torch']:.0e}"] for r in results["digits"]],
        ),
    ]


def sparse_table(rows: list[Row]) -> list[str]:
    first, *others = OMEGAS
    lines = [
        [
            shown(r["shape"]),
            r["task"],
            cell(r[first]),
            *(f"{cell(r[name])} ({factor(ratio(r[name], r[first]))})" for name in others),
        ]
        for r in rows
    ]
    return table(" | ".join((SIZES, "task", *(f"{name}:" for name in OMEGAS))), lines)


def main() -> None:
    parser = command_line(__doc__, "ctc", repeats=20)
    parser.add_argument("--quick", action="store_true", help="one small shape and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    shapes = QUICK_SHAPES if quick else SHAPES
    tables = {
        "torch": lambda: compare(rivals, shapes, repeats),
        "sparse": lambda: sparse(shapes, repeats),
        "growth": lambda: growth(1 if quick else 4, repeats),
        "digits": lambda: digits(DIGITS[:1] if quick else DIGITS),
    }
    results = {"machine": machine(), **collect(tables)}
    report(args.output, "ctc", results, markdown(results))


if __name__ == "__main__":
    main()
