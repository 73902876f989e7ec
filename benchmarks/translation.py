"""Measure a training step of the translator of section 6 of the paper with each attention.

The sentences are random, with 6 to 25 words on both sides, as in Multi30k. All calls are interleaved in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import Row, cell, command_line, heading, machine, measure, ratio, report, table
from training_step import training_step

from bellmax_apps.translation.data import END, Batch
from bellmax_apps.translation.model import Translator

ATTENTIONS = "dot-negentropy", "structured-negentropy", "structured-l2", "dot-sparsemax"
SIZES = 128, 256
SENTENCES, WORDS = 80, 7000
LONGEST = 25


def random_batch() -> Batch:
    def side() -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(6, LONGEST + 1, (SENTENCES,))
        words = torch.randint(END + 2, WORDS, (SENTENCES, LONGEST))
        return words.masked_fill(torch.arange(LONGEST) >= lengths.unsqueeze(1), 0), lengths

    source, lengths = side()
    return Batch(source[:, : int(lengths.max())], lengths, side()[0])


def step(model: Translator, batch: Batch) -> Callable[[], None]:
    return training_step(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))


def attention_alone(model: Translator, batch: Batch) -> Callable[[], None]:
    """All calls of attention in a step, one for each target word, with their gradients."""
    keys, mask, state = model.read(batch.source, batch.lengths)
    keys, queries = keys.detach().requires_grad_(), state.hidden.detach().unsqueeze(1).requires_grad_()
    inputs = [queries, keys, *model.attention.parameters()]

    def run() -> None:
        for _ in range(batch.target.shape[1] - 1):
            context, _ = model.attention(queries, keys, mask=mask)
            torch.autograd.grad(context.sum(), inputs)

    return run


def rows(size: int, repeats: int) -> list[Row]:
    batch = random_batch()
    models = {}
    for kind in ATTENTIONS:
        attention, omega = kind.split("-")
        models[kind] = Translator(WORDS, WORDS, attention=attention, omega=omega, size=size)
    runs = {(kind, "step"): step(model, batch) for kind, model in models.items()}
    runs |= {(kind, "alone"): attention_alone(model, batch) for kind, model in models.items()}
    times = measure(runs, repeats)
    return [
        {"size": size, "attention": kind, "step": times[kind, "step"], "alone": times[kind, "alone"]} for kind in models
    ]


def markdown(results: dict) -> list[str]:
    lines = []
    for row in results["rows"]:
        if row["attention"] == "dot-negentropy":
            softmax = row["step"]
        speed = f"{ratio(softmax, row['step']):.2f}×"
        share = f"{100 * ratio(row['alone'], row['step']):.0f} %"
        lines.append([str(row["size"]), row["attention"], cell(row["step"]), speed, cell(row["alone"]), share])
    return [
        *heading("translation", results["machine"]),
        "",
        f"Each row is one training step with AdamW (forward, backward, clipping, update). A batch has {SENTENCES}",
        f"pairs of sentences of at most {LONGEST} words. The vocabulary has {WORDS} words. *Speed* is the time of the",
        "step with softmax attention (`dot-negentropy`) divided by the time of the step in this row (medians). Below",
        "1×, the step is slower than with softmax attention. A step calls the attention once for each target word.",
        "*Attention only* is the total time of these calls and of their gradients.",
        *table("size | attention | step: | speed: | attention only: | share of the step:", lines),
    ]


def main() -> None:
    args = command_line(__doc__, "translation", repeats=12).parse_args()
    torch.manual_seed(0)
    results = {"machine": machine(), "rows": [row for size in SIZES for row in rows(size, args.repeats)]}
    report(args.output, "translation", results, markdown(results))


if __name__ == "__main__":
    main()
