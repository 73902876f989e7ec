"""Measure a training step of the tagger of section 5.2 of the paper, with bellmax and with pytorch-crf.

The sentences are random: 12 to 52 tokens, words of 2 to 12 letters, four types of entities. All calls are interleaved
in one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import torch
import torchcrf
from measuring import SECONDS, Row, cell, command_line, factor, heading, machine, measure, ratio, report, table
from torch import Tensor
from training_step import training_step

from bellmax_apps.ner.data import Batch, Corpus, Sentence, Vocabulary, as_iobes
from bellmax_apps.ner.model import Tagger

SIZES = 8, 32
LOSSES = "surrogate", "relaxed"
OMEGAS = "negentropy", "l2"


class WithPytorchCRF(Tagger):
    """The tagger with the loss of pytorch-crf."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, sparse=True)
        self.crf = torchcrf.CRF(len(vocabulary.labels), batch_first=True)

    def forward(self, batch: Batch) -> Tensor:
        mask = batch.tags >= 0
        return -self.crf(self.emissions(batch), batch.tags.clamp(min=0), mask)


def sentences(count: int) -> list[Sentence]:
    rng = random.Random(0)
    made = []
    for _ in range(count):
        length = rng.randint(12, 52)
        tokens = ["".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(2, 12))) for _ in range(length)]
        tags = [f"B-{rng.choice('ABCD')}" if rng.random() < 0.1 else "O" for _ in range(length)]
        made.append(Sentence(tokens, tags))
    return as_iobes(made)


def step(model: Tagger, batch: Batch) -> Callable[[], None]:
    return training_step(model, batch, torch.optim.SGD(model.parameters(), lr=0.01))


def loss_alone(model: Tagger, batch: Batch) -> Callable[[], None]:
    """The loss from given emissions, and its gradients with respect to emissions and transitions."""
    emissions = model.emissions(batch).detach().requires_grad_()

    def run() -> None:
        loss = model.crf(emissions, batch.tags, lengths=batch.lengths, reduction="sum")
        torch.autograd.grad(loss, [emissions, *model.crf.parameters()])

    return run


def rows(size: int, repeats: int) -> list[Row]:
    made = sentences(size)
    vocabulary = Vocabulary.of(made)
    batch = Corpus(made, vocabulary).batch(range(size))
    runs = {("pytorch-crf", "", "step"): step(WithPytorchCRF(vocabulary), batch)}
    for omega, loss in product(OMEGAS, LOSSES):
        model = Tagger(vocabulary, omega=omega, loss=loss, sparse=True)
        runs[omega, loss, "step"] = step(model, batch)
        runs[omega, loss, "crf"] = loss_alone(model, batch)
    times = measure(runs, repeats, SECONDS)
    measured = [
        {"size": size, "crf": "pytorch-crf", "loss": "log-likelihood", "step": times["pytorch-crf", "", "step"]}
    ]
    for omega, loss in product(OMEGAS, LOSSES):
        own = {"step": times[omega, loss, "step"], "alone": times[omega, loss, "crf"]}
        measured.append({"size": size, "crf": f"bellmax, {omega}", "loss": loss, **own})
    return measured


def markdown(results: dict) -> list[str]:
    lines = []
    for row in results["rows"]:
        if row["crf"] == "pytorch-crf":
            peer = row["step"]
        alone = row.get("alone")
        share = [cell(alone), f"{100 * ratio(alone, row['step']):.1f} %"] if alone else ["–", "–"]
        to_peer = factor(ratio(peer, row["step"]))
        lines.append([str(row["size"]), row["crf"], row["loss"], cell(row["step"]), to_peer, *share])
    return [
        *heading("ner", results["machine"]),
        "",
        "Each row is one training step with SGD (forward, backward, clipping, update). The tagger has LSTMs over",
        "letters and words, and a CRF. *pytorch-crf / bellmax* is the time of the step with pytorch-crf divided by",
        "the time of the step with bellmax (medians). *CRF only* is the time of the loss and its gradients, without",
        "the LSTMs that compute the emissions. The last column is *CRF only* divided by *step*. With bellmax, the CRF",
        "is only a small share of the step. So compared with pytorch-crf, a whole step is at",
        "most 1.2 times faster.",
        *table("sentences | CRF | loss | step: | pytorch-crf / bellmax: | CRF only: | share of the step:", lines),
    ]


def main() -> None:
    parser = command_line(__doc__, "ner", repeats=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = {"machine": machine(), "rows": [row for size in SIZES for row in rows(size, args.repeats)]}
    report(args.output, "ner", results, markdown(results))


if __name__ == "__main__":
    main()
