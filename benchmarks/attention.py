"""Compare structured attention (attention to segments) with softmax attention of the same sizes.

The first table times the step from scores to weights, the second table whole modules. All calls are interleaved in one
process. A row gives the minimum and the median of its runs.
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
OMEGAS = {"negentropy": bx.Negentropy(2.0), "l2": bx.SquaredL2(10.0)}  # as in appendix C.3 of the paper


class SoftmaxAttention(nn.Module):
    """Softmax attention with the bilinear form of SegmentationAttention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = queries @ self.weight @ keys.mT
        weights = of_softmax(scores, None if mask is None else mask.unsqueeze(-2))
        return weights @ keys, weights


def of_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
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
    """Time the step from scores (B, Q, K) to weights, and its gradients."""
    batch, queries, keys, _ = shape
    scores = torch.randn(batch, queries, keys, requires_grad=True)
    mask = random_mask(batch, keys).unsqueeze(-2) if masked else None
    layers = {"softmax": (lambda: of_softmax(scores, mask), [scores])}
    for name, omega in OMEGAS.items():
        attention = SegmentationAttention(1, 1, omega=omega)
        nn.init.normal_(attention.transitions)
        layers[name] = (lambda a=attention: a._weights(scores, mask), [scores, attention.transitions])
    return [{"shape": shape, "masked": masked, **row} for row in rows_of(layers, repeats)]


def module(shape: Sequence[int], masked: bool, repeats: int) -> list[Row]:
    """Time whole modules, from queries and keys to the context, and their gradients."""
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
    """A padding mask that keeps a random number of first keys, at least one."""
    return torch.arange(keys) < torch.randint(1, keys + 1, (batch, 1))


# --- the page


def markdown(results: dict) -> list[str]:
    return [
        *heading("attention", results["machine"]),
        "",
        "This benchmark compares `nn.SegmentationAttention` (rows *negentropy* and *l2*) with softmax attention (rows",
        "*softmax*). A shape (B,Q,K,D) is a batch of B members, with Q queries, K keys and D features. A ratio is the",
        "median time of a row divided by the median time of softmax attention. In the rows with a mask, half of the",
        "keys are padding on average. Times include all Python code and",
        "the allocation of outputs.",
        "",
        "### From scores to weights",
        "",
        "The forward pass computes the attention weights from scores (B, Q, K). The backward pass computes the",
        "gradients with respect to the scores and the transitions.",
        *times_table(results["step"]),
        "",
        "### Whole module",
        "",
        "The forward pass computes scores from queries (B, Q, D) and keys (B, K, D) with a bilinear form. Then it",
        "computes the attention weights from the scores, and the context from the weights. The backward pass computes",
        "the gradients with respect to queries, keys and parameters.",
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
    return table(f"{SIZES} | mask | layer | forward: | ratio: | forward and backward: | ratio:", lines)


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
