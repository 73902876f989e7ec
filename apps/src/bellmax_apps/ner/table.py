"""A table that compares all losses and regularizers on several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bellmax_apps.commands import seeded, with_means
from bellmax_apps.files import read_json
from bellmax_apps.ner.data import Corpus
from bellmax_apps.ner.tagging import evaluate, load

LOSSES = "surrogate", "relaxed"
PAPER = {
    ("conll2002_es", "negentropy", "surrogate"): 86.68,
    ("conll2002_es", "negentropy", "relaxed"): 86.20,
    ("conll2002_es", "l2", "surrogate"): 85.51,
    ("conll2002_es", "l2", "relaxed"): 84.07,
    ("conll2002_nl", "negentropy", "surrogate"): 87.56,
    ("conll2002_nl", "negentropy", "relaxed"): 87.37,
    ("conll2002_nl", "l2", "surrogate"): 86.58,
    ("conll2002_nl", "l2", "relaxed"): 85.90,
}
"""F1 in the paper, with fastText embeddings of size 300."""


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    data: Path
    omega: str
    loss: str
    seed: int
    run: Path


def cells(data: Sequence[Path], omegas: Sequence[str], seeds: Sequence[int], output: Path) -> list[Cell]:
    """Runs of the table: each dataset with each regularizer, loss and seed."""
    names = [folder.resolve().name for folder in data]
    if len(set(names)) < len(names):
        raise ValueError(f"folders of data must have different names, got {names}")
    return [
        Cell(folder, omega, loss, seed, output / name / seeded(f"{omega}-{loss}", seed, seeds))
        for (folder, name), omega, loss, seed in product(zip(data, names, strict=True), omegas, LOSSES, seeds)
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Evaluate a finished run on the test data, with its best weights on the development data."""
    model, vocabulary, config = load(cell.run)
    history = read_json(cell.run / "history.json")
    best = max(history, key=lambda record: record["f1"])
    test = evaluate(model, Corpus(config.read(cell.data, "test"), vocabulary))
    return {
        "data": cell.data.resolve().name,
        "omega": cell.omega,
        "gamma": config.gamma,
        "loss": cell.loss,
        "seed": config.settings.seed,
        "epochs": len(history),
        "best_epoch": int(best["epoch"]),
        "dev_f1": best["f1"],
        "test_f1": test["f1"],
        "tags_per_word": test["tags_per_word"],
        "seconds_per_epoch": sorted(record["seconds"] for record in history)[len(history) // 2],
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table per dataset."""
    lines: list[str] = []
    for name in dict.fromkeys(row["data"] for row in rows):
        runs = with_means([row for row in rows if row["data"] == name], "omega", "loss")
        means = [row for row in runs if row["seed"] == "mean"]
        best = max(row["test_f1"] for row in means or runs)
        lines += [
            f"## {name}",
            "",
            "| Ω | γ | loss | seed | test F1 | paper | dev F1 | best epoch | tags per word | s per epoch |",
            "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in runs:
            test = f"{row['test_f1']:.2f}"
            test = f"**{test}**" if row["test_f1"] == best else test
            published = PAPER.get((name, row["omega"], row["loss"]))
            paper = "" if published is None else f"{published:.2f}"
            lines.append(
                f"| {row['omega']} | {row['gamma']:g} | {row['loss']} | {row['seed']} | {test} "
                f"| {paper} | {row['dev_f1']:.2f} | {row['best_epoch']:g} of {row['epochs']:g} "
                f"| {row['tags_per_word']:.2f} | {row['seconds_per_epoch']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)
