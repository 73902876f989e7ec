"""``bellmax translation …``."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

import bellmax_apps.training as training
import bellmax_apps.translation.translating as translating
from bellmax_apps.commands import (
    Decay,
    Dropout,
    Epochs,
    Force,
    Jobs,
    Minutes,
    Optimizer,
    Resume,
    Run,
    RunFolder,
    Seed,
    Seeds,
    Split,
    StepSize,
    TableFolder,
    given_options,
    seeded,
    train_into,
    train_table,
    with_means,
)
from bellmax_apps.files import chunks, read_json
from bellmax_apps.translation.data import SPLITS, find, read_pairs
from bellmax_apps.translation.model import ATTENTIONS
from bellmax_apps.translation.model import attention as attention_layer
from bellmax_command.errors import check_outputs, one_sentence

app = typer.Typer(no_args_is_help=True)

DEFAULT = translating.Config()
Data = Annotated[Path, typer.Argument(help="Folder of parallel text: train.fr, train.en, val.fr, …, or with .gz.")]
Source = Annotated[str, typer.Option(help="Source language: the file extension.")]
Target = Annotated[str, typer.Option(help="Target language: the file extension.")]
CoolDown = Annotated[
    int | None,
    typer.Option(
        help="Number of last epochs in which the learning rate decays nearly to 0. "
        f"Default {DEFAULT.settings.cool_down}, or all if they are fewer."
    ),
]
Size = Annotated[int, typer.Option(help="Size of the word embeddings and of the hidden states.")]
Tokens = Annotated[int, typer.Option(help="Maximum batch size in tokens, with padding.")]
Pieces = Annotated[int, typer.Option(help="BPE vocabulary size of each language; 0 for whole words.")]
GammaStart = Annotated[
    float, typer.Option(help="γ of the attention starts at this many times its usual value, and falls to it.")
]
Width = Annotated[int, typer.Option(help="Beam width; 1 for greedy search.")]


@app.command()
def train(
    data: Data,
    output: RunFolder,
    context: typer.Context,
    source: Source = DEFAULT.source,
    target: Target = DEFAULT.target,
    attention: Annotated[str, typer.Option(help=f"Attention: {', '.join(ATTENTIONS)}.")] = DEFAULT.attention,
    epochs: Epochs = DEFAULT.settings.epochs,
    minutes: Minutes = None,
    optimizer: Optimizer = DEFAULT.settings.optimizer,
    step_size: StepSize = DEFAULT.settings.step_size,
    decay: Decay = DEFAULT.settings.decay,
    cool_down: CoolDown = None,
    gamma_start: GammaStart = DEFAULT.gamma_start,
    size: Size = DEFAULT.size,
    tokens: Tokens = DEFAULT.tokens,
    dropout: Dropout = DEFAULT.dropout,
    smoothing: Annotated[float, typer.Option(help="Label smoothing.")] = DEFAULT.smoothing,
    pieces: Pieces = DEFAULT.pieces,
    longest: Annotated[
        int, typer.Option(help="Maximum tokens of a training sentence; longer pairs are skipped.")
    ] = DEFAULT.longest,
    seed: Seed = DEFAULT.settings.seed,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a translator. The best weights on dev, by BLEU, are kept.

    After Ctrl-C the run can be resumed. It can be used if an epoch is finished.
    """
    with one_sentence():
        if cool_down is None:
            cool_down = min(DEFAULT.settings.cool_down, max(epochs, 0))
        config = translating.Config(
            source=source,
            target=target,
            attention=attention,
            size=size,
            dropout=dropout,
            smoothing=smoothing,
            pieces=pieces,
            longest=longest,
            tokens=tokens,
            gamma_start=gamma_start,
            settings=training.Settings(epochs, minutes, optimizer, step_size, decay, cool_down, seed=seed),
        )
        given = given_options(context)
        uses = "bellmax translation evaluate RUN DATA", "bellmax translation translate RUN"
        train_into(output, data, config, translating.train, "BLEU", resume=resume, force=force, given=given, uses=uses)


@app.command()
def translate(run: Run, width: Width = 5) -> None:
    """Translate the standard input, line by line."""
    with one_sentence():
        model, source, target, _ = translating.load(run)
        for lines in chunks(sys.stdin.buffer):
            for text, _ in translating.translate(model, source, target, lines, width):
                typer.echo(text)


@app.command()
def evaluate(
    run: Run,
    data: Data,
    split: Split = "test",
    width: Width = 5,
) -> None:
    """Print the BLEU score with its sacreBLEU signature, and the mean number of source words attended to per word."""
    with one_sentence():
        if split not in SPLITS:
            raise ValueError(f"split must be train, dev or test, got {split!r}")
        model, source, target, config = translating.load(run)
        pairs = read_pairs(data, split, (config.source, config.target))
        found = translating.evaluate(model, source, target, pairs, width)
    typer.echo(f"BLEU            {found['bleu']:6.2f}   {found['signature']}")
    typer.echo(f"words attended  {found['attended']:6.2f}   with a weight above 0")
    typer.echo(f"                {found['clearly']:6.2f}   with a weight above 0.1")


@app.command()
def attention(
    run: Run,
    sentence: Annotated[str, typer.Argument(help="A sentence to translate.")],
    output: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")] = Path("attention.png"),
    beside: Annotated[list[Path] | None, typer.Option(help="Another run to draw beside it. May be repeated.")] = None,
    width: Width = 5,
    force: Force = False,
) -> None:
    """Plot the attention weights of a translation: source words by target words."""
    from bellmax_apps.figures import PICTURES, save
    from bellmax_apps.translation.figure import draw

    with one_sentence():
        check_outputs({"--output": output}, [], force=force, endings={"--output": PICTURES})
        maps = []
        for path in (run, *(beside or [])):
            model, source, target, config = translating.load(path)
            ((text, found),) = translating.translate(model, source, target, [sentence], width)
            if not found.words:
                raise ValueError(f"sentence must give a translation with words, got none from {path}")
            kind = config.attention
            title = kind if kind in ("softmax", "sparsemax") else f"structured, {kind}"
            title += "" if path.name == kind else f" ({path.name})"
            maps.append((title, target.shown(found.words), found.weights.double().numpy()))
            typer.echo(f"{path}: {text}")
        save(draw([*source.tokens(sentence), "</s>"], maps), output)
    typer.echo(str(output))


@app.command()
def table(
    data: Data,
    output: TableFolder,
    pairs: Annotated[list[str] | None, typer.Option(help="SOURCE-TARGET, repeatable. Default fr-en and en-fr.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help=f"Attention, repeatable. Default {', '.join(ATTENTIONS)}.")
    ] = None,
    epochs: Epochs = DEFAULT.settings.epochs,
    minutes: Minutes = None,
    optimizer: Optimizer = DEFAULT.settings.optimizer,
    step_size: StepSize = DEFAULT.settings.step_size,
    decay: Decay = DEFAULT.settings.decay,
    cool_down: CoolDown = None,
    gamma_start: GammaStart = DEFAULT.gamma_start,
    size: Size = DEFAULT.size,
    tokens: Tokens = DEFAULT.tokens,
    dropout: Dropout = DEFAULT.dropout,
    pieces: Pieces = DEFAULT.pieces,
    seed: Seeds = None,
    jobs: Jobs = 1,
    width: Width = 5,
) -> None:
    """Train with each attention at the same budget, and write a table. Run it again to resume.

    Runs are in OUTPUT/PAIR/ATTENTION or, with several seeds, in OUTPUT/PAIR/ATTENTION-SEED.
    """
    with one_sentence():
        shared: dict[str, object] = {
            "epochs": epochs, "minutes": minutes, "optimizer": optimizer, "step_size": step_size,
            "decay": decay, "cool_down": cool_down, "gamma_start": gamma_start, "size": size, "tokens": tokens,
            "dropout": dropout, "pieces": pieces,
        }  # fmt: skip
        seeds, trained = seed or [0], {}
        for pair, kind, own_seed in product(pairs or ("fr-en", "en-fr"), attention or ATTENTIONS, seeds):
            source, _, target = pair.partition("-")
            if not (source and target):
                raise ValueError(f"pairs must be SOURCE-TARGET, such as fr-en, got {pair!r}")
            attention_layer(kind, size)  # or the sentence that there is none
            for split, language in product(SPLITS, (source, target)):
                find(data, split, language)
            own = {"source": source, "target": target, "attention": kind, "seed": own_seed}
            run = output / pair / seeded(kind, own_seed, seeds)
            trained[run] = ["translation", "train", str(data)], shared | own
        train_table(output, trained, jobs, "bleu", lambda run: _measure(data, run, width), _markdown)


def _measure(data: Path, run: Path, width: int) -> dict[str, Any]:
    model, source, target, config = translating.load(run)
    history = read_json(run / "history.json")
    found = translating.evaluate(model, source, target, read_pairs(data, "test", (config.source, config.target)), width)
    speed = sorted(record["tokens_per_second"] for record in history)[len(history) // 2]
    best = max(history, key=lambda record: record["bleu"])
    return {
        "pair": f"{config.source}-{config.target}",
        "attention": config.attention,
        "seed": config.settings.seed,
        **found,
        "dev_bleu": best["bleu"],
        "best_epoch": best["epoch"],
        "epochs": len(history),
        "tokens_per_second": speed,
    }


PAPER = {
    "fr-en": {"softmax": 27.96, "negentropy": 27.96, "l2": 27.21},
    "en-fr": {"softmax": 28.08, "negentropy": 27.98, "l2": 27.28},
}
"""BLEU of the paper, on other data: newstest2014, after training on WMT14."""


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = with_means([row for row in rows if row["pair"] == pair], "attention")
        first = own[0]["attention"]
        beside = {row["seed"]: row for row in own if row["attention"] == first}
        lines += [
            f"## {pair.replace('-', ' → ')}",
            "",
            f"| attention | seed | test BLEU | to {first} | paper, WMT14 | dev BLEU | best epoch | tokens/s "
            f"| to {first} | attended | > 0.1 |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in own:
            other, speed = beside[row["seed"]], row["tokens_per_second"]
            lines.append(
                f"| {row['attention']} | {row['seed']} | {row['bleu']:.2f} | {row['bleu'] - other['bleu']:+.2f} "
                f"| {PAPER.get(pair, {}).get(row['attention'], '')} "
                f"| {row['dev_bleu']:.2f} | {row['best_epoch']:g} of {row['epochs']:g} "
                f"| {speed:.0f} | {speed / other['tokens_per_second']:.2f}× | {row['attended']:.2f} "
                f"| {row['clearly']:.2f} |"
            )
        lines += ["", f"{own[0]['signature']}", ""]
    return "\n".join(lines)
