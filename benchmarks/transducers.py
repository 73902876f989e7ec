"""Compare the loss of token-and-duration transducers (TDT) with transformers: value and gradient together.

All calls are interleaved in one process. A row gives the minimum and the median of its runs. If transformers is not
installed (`pip install bellmax[test]`), its column is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import (
    SECONDS,
    Row,
    Run,
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
from rivals import check_value, peer, versions
from torch import Tensor

import bellmax as bx

Shape = tuple[int, ...]  # batch, frames, labels, classes

SIZES = "(B,T,U,V)"
SHAPES: tuple[Shape, ...] = ((2, 40, 10, 32), (4, 150, 30, 128), (4, 300, 60, 128))
QUICK_SHAPES: tuple[Shape, ...] = ((2, 10, 4, 6),)
DURATIONS = (0, 1, 2, 3, 4)
COLUMNS = "transformers", "log_softmax"


def gradient(value: Callable[[], Tensor], *inputs: Tensor) -> Run:
    return lambda: torch.autograd.grad(value().sum(), inputs)


def runs(shape: Shape) -> dict[str, Run]:
    """The losses from logits, and a log_softmax of the token logits for comparison."""
    batch, frames, labels, classes = shape
    tokens = torch.randn(batch, frames, labels + 1, classes, requires_grad=True)
    times = torch.randn(batch, frames, labels + 1, len(DURATIONS), requires_grad=True)
    targets = torch.randint(1, classes, (batch, labels))
    lengths = torch.full((batch,), frames), torch.full((batch,), labels)
    criterion = bx.nn.TDTLoss(DURATIONS, reduction="none")
    ours = lambda: criterion(tokens, times, targets, lengths=lengths)  # noqa: E731
    named: dict[str, Run] = {
        "bellmax": gradient(ours, tokens, times),
        "log_softmax": gradient(lambda: tokens.log_softmax(-1)[..., 0], tokens),
    }
    if loss := peer("transformers.loss.loss_tdt", "tdt_loss"):
        theirs = lambda: loss(tokens, times, targets, *lengths, 0, list(DURATIONS), reduction="none")  # noqa: E731
        check_value("transformers", theirs(), ours())
        named["transformers"] = gradient(theirs, tokens, times)
        for one, other in zip(named["bellmax"](), named["transformers"](), strict=True):
            check_value("transformers", other, one)
    return named


def compare(shapes: tuple[Shape, ...], repeats: int) -> list[Row]:
    return [{"shape": shape, **measure(runs(shape), repeats, SECONDS)} for shape in shapes]


# --- the page


def markdown(results: dict) -> list[str]:
    lines = []
    for r in results["tdt"]:
        batch, frames, labels, _ = r["shape"]
        cells = batch * frames * (labels + 1)
        others = (f"{cell(r[c])} ({factor(ratio(r[c], r['bellmax']))})" if c in r else "–" for c in COLUMNS)
        lines.append([shown(r["shape"]), cell(r["bellmax"]), nanoseconds(r["bellmax"], cells), *others])
    return [
        *heading("transducers", results["machine"]),
        "",
        "A shape (B,T,U,V) is B sequences of T frames, U labels and V classes. The durations are 0 to 4. The table has",
        "the time to compute value and gradient of the loss together, from logits. bellmax uses `bellmax.nn.TDTLoss`,",
        "and transformers uses `tdt_loss`, which is written in PyTorch. Values and gradients of both agree. For",
        "comparison, the column *log_softmax* is the time of torch's `log_softmax` of the token logits and its",
        "gradient. A number in brackets is the time of a column divided by the time of bellmax (medians). A cell is a",
        "pair of a frame and a label position.",
        *table(" | ".join((SIZES, "bellmax:", "ns per cell:", *(f"{c}:" for c in COLUMNS))), lines),
        "",
        installed(results["peers"]),
    ]


def main() -> None:
    parser = command_line(__doc__, "transducers", repeats=20)
    parser.add_argument("--quick", action="store_true", help="one small shape and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes, repeats = (QUICK_SHAPES, 2) if args.quick else (SHAPES, args.repeats)
    tables = {"tdt": lambda: compare(shapes, repeats)}
    results = {"machine": machine(), "peers": versions(["transformers"]), **collect(tables)}
    report(args.output, "transducers", results, markdown(results))


if __name__ == "__main__":
    main()
