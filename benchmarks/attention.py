"""Attention to segments against plain softmax attention of the same sizes: the step alone, and whole modules.

Everything runs in one process, interleaved; a row gives the minimum and the median of its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from measuring import (
    SECONDS,
    Row,
    Run,
    cell,
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
from torch import Tensor, nn

import bellmax as bx
from bellmax.nn import SegmentationAttention

SIZES = "(B,Q,K,D)"
SHAPES = ((64, 50, 50, 128), (64, 1, 50, 128), (16, 200, 200, 128))
QUICK_SHAPES = ((8, 10, 10, 16),)
TARGETS = {"negentropy": 3, "l2": 5}  # times softmax, of the step alone at the first shape
OMEGAS = {"negentropy": bx.Negentropy(2.0), "l2": bx.SquaredL2(10.0)}  # as in appendix C.3 of the paper


class SoftmaxAttention(nn.Module):
    """Softmax attention with the same bilinear form."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = queries @ self.weight @ keys.mT
        weights = of_softmax(scores, mask)
        return weights @ keys, weights


def of_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return scores.softmax(-1)


def forward_and_backward(layer: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[Run, Run]:
    z = torch.randn_like(layer())
    return torch.no_grad()(layer), lambda: torch.autograd.grad(layer(), inputs, grad_outputs=z)


def rows_of(layers: dict[str, tuple[Callable[[], Tensor], Sequence[Tensor]]], repeats: int) -> list[Row]:
    runs: dict[str, Run] = {}
    for name, (layer, inputs) in layers.items():
        runs[name], runs[f"{name} with backward"] = forward_and_backward(layer, inputs)
    times = measure(runs, repeats, SECONDS)
    return [{"layer": name, "forward": times[name], "both": times[f"{name} with backward"]} for name in layers]


def step(shape: Sequence[int], masked: bool, repeats: int) -> list[Row]:
    """From scores (B, Q, K) to weights, and back to the scores and the transitions."""
    batch, queries, keys, _ = shape
    scores = torch.randn(batch, queries, keys, requires_grad=True)
    mask = random_mask(batch, keys) if masked else None
    layers = {"softmax": (lambda: of_softmax(scores, mask), [scores])}
    for name, omega in OMEGAS.items():
        attention = SegmentationAttention(1, 1, omega=omega)
        nn.init.normal_(attention.transitions)
        layers[name] = (lambda a=attention: a._weights(scores, mask), [scores, attention.transitions])
    return [{"shape": shape, "masked": masked, **row} for row in rows_of(layers, repeats)]


def module(shape: Sequence[int], masked: bool, repeats: int) -> list[Row]:
    """From queries and keys to the context, and back to them and to the parameters."""
    batch, num_queries, num_keys, size = shape
    queries = torch.randn(batch, num_queries, size, requires_grad=True)
    keys = torch.randn(batch, num_keys, size, requires_grad=True)
    mask = random_mask(batch, num_keys) if masked else None
    plain = SoftmaxAttention(size)
    layers = {"softmax": (lambda: plain(queries, keys, mask)[0], [queries, keys, *plain.parameters()])}
    for name, omega in OMEGAS.items():
        attention = SegmentationAttention(size, size, omega=omega)
        run = lambda a=attention: a(queries, keys, mask=mask)[0]  # noqa: E731
        layers[name] = (run, [queries, keys, *attention.parameters()])
    return [{"shape": shape, "masked": masked, **row} for row in rows_of(layers, repeats)]


def random_mask(batch: int, keys: int) -> Tensor:
    """A padding mask: the first keys are kept, at least one."""
    return torch.arange(keys) < torch.randint(1, keys + 1, (batch, 1))


# --- the page


def markdown(results: dict) -> list[str]:
    first = [row for row in results["step"] if row["shape"] == results["step"][0]["shape"] and not row["masked"]]
    reached = ", ".join(
        f"{row['layer']} {factor(ratio(row['both'], first[0]['both']))} (target {TARGETS[row['layer']]}×)"
        for row in first[1:]
    )
    return [
        *heading("Attention to segments", results["machine"]),
        "",
        "Softmax attention of the same sizes is 1×; ratios are of medians. Masks are padding, half of the keys on",
        "average. Whole Python calls with fresh outputs.",
        "",
        "## The step alone",
        "",
        "From scores (B, Q, K) to weights, and back to the scores and the transitions.",
        f"Forward and backward at {shown(first[0]['shape'])}: {reached}.",
        *times_table(results["step"]),
        "",
        "## The whole module",
        "",
        "From queries (B, Q, D) and keys (B, K, D), by a bilinear form, to the context, and back.",
        *times_table(results["module"]),
    ]


def times_table(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row["layer"] == "softmax":
            plain = row
        times = (
            entry for what in ("forward", "both") for entry in (cell(row[what]), factor(ratio(row[what], plain[what])))
        )
        lines.append([shown(row["shape"]), "yes" if row["masked"] else "no", row["layer"], *times])
    return table(f"{SIZES} | mask | layer | forward: | to softmax: | with backward: | to softmax:", lines)


def main() -> None:
    parser = command_line(__doc__, "attention", repeats=50)
    parser.add_argument("--quick", action="store_true", help="one small shape and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes, repeats = (QUICK_SHAPES, 2) if args.quick else (SHAPES, args.repeats)
    cases = [(shape, masked) for shape in shapes for masked in (False, True)]
    results = {
        "machine": machine(),
        "step": [row for case in cases for row in step(*case, repeats)],
        "module": [row for case in cases for row in module(*case, repeats)],
    }
    report(args.output, "attention", results, markdown(results))


if __name__ == "__main__":
    main()
