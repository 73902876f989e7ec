"""Subcommands of ``bellmax translation``: train, translate, evaluate, attention and table."""

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
    Tokens,
    options_on_command_line,
    seeded,
    train_into,
    train_table,
    with_means,
)
from bellmax_apps.files import chunks, read_json
from bellmax_apps.translation.data import SPLITS, find, read_pairs
from bellmax_apps.translation.model import FORMER, OMEGAS, check_attention
from bellmax_command.errors import check_outputs, report_errors

app = typer.Typer(no_args_is_help=True)

DEFAULT = translating.Config()
IN_TABLE = "dot-negentropy", "structured-negentropy", "structured-l2", "dot-sparsemax"
"""Attention and Ω of the rows of a table, by default."""

Data = Annotated[
    Path, typer.Argument(help="Folder of parallel text with files such as train.fr, train.en, val.fr or train.fr.gz.")
]
Source = Annotated[str, typer.Option(help="Source language, as in the file names.")]
Target = Annotated[str, typer.Option(help="Target language, as in the file names.")]
CoolDown = Annotated[
    int | None,
    typer.Option(
        help="Number of final epochs in which the learning rate decays to nearly 0. "
        f"Default {DEFAULT.settings.cool_down}, or all if they are fewer."
    ),
]
Size = Annotated[int, typer.Option(help="Size of the word embeddings and of the hidden states.")]
Pieces = Annotated[int, typer.Option(help="Size of the BPE vocabulary of each language. 0 stands for whole words.")]
GammaStart = Annotated[
    float,
    typer.Option(
        help="Start training with γ of the attention multiplied by this factor, and anneal it to its final value."
    ),
]
Width = Annotated[int, typer.Option(help="Beam width. 1 stands for greedy search.")]


@app.command()
def train(
    data: Data,
    output: RunFolder,
    context: typer.Context,
    source: Source = DEFAULT.source,
    target: Target = DEFAULT.target,
    attention: Annotated[
        str, typer.Option(help="Attention: dot (dot-product attention) or structured (attention to segments).")
    ] = DEFAULT.attention,
    omega: Annotated[
        str, typer.Option(help=f"Regularizer of the attention: {', '.join(OMEGAS)}. All but the first two are sparse.")
    ] = DEFAULT.omega,
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
    smoothing: Annotated[
        float, typer.Option(help="Strength of the label smoothing, from 0 to below 1.")
    ] = DEFAULT.smoothing,
    pieces: Pieces = DEFAULT.pieces,
    longest: Annotated[
        int, typer.Option(help="Maximum number of tokens of a training sentence. Longer pairs are skipped.")
    ] = DEFAULT.longest,
    seed: Seed = DEFAULT.settings.seed,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a translator, and keep the weights with the best BLEU on dev.

    After Ctrl-C, continue with --resume. The run can be used once an epoch is finished.
    """
    with report_errors():
        if cool_down is None:
            cool_down = min(DEFAULT.settings.cool_down, max(epochs, 0))
        config = translating.Config(
            source=source,
            target=target,
            attention=attention,
            omega=omega,
            size=size,
            dropout=dropout,
            smoothing=smoothing,
            pieces=pieces,
            longest=longest,
            tokens=tokens,
            gamma_start=gamma_start,
            settings=training.Settings(epochs, minutes, optimizer, step_size, decay, cool_down, seed=seed),
        )
        explicit = options_on_command_line(context)
        uses = "bellmax translation evaluate RUN DATA", "bellmax translation translate RUN"
        train_into(
            output, data, config, translating.train, "BLEU", resume=resume, force=force, explicit=explicit, uses=uses
        )


@app.command()
def translate(run: Run, width: Width = 5) -> None:
    """Translate the sentences of the standard input, one per line."""
    with report_errors():
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
    """Print the BLEU score with its signature, and how many source words the target words attend to.

    The last line is the share of target words that attend to nothing, which a sparse Ω makes possible.
    """
    with report_errors():
        model, source, target, config = translating.load(run)
        pairs = read_pairs(data, split, (config.source, config.target))
        scores = translating.evaluate(model, source, target, pairs, width)
    typer.echo(f"BLEU            {scores['bleu']:6.2f}   {scores['signature']}")
    typer.echo(f"words attended  {scores['attended']:6.2f}   with a weight above 0")
    typer.echo(f"                {scores['clearly']:6.2f}   with a weight above 0.1")
    typer.echo(f"no word         {100 * scores['nothing']:6.2f} % of the target words have no weight above 0")


@app.command()
def attention(
    run: Run,
    sentence: Annotated[str, typer.Argument(help="A sentence to translate.")],
    output: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")] = Path("attention.png"),
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run, drawn on the right. Repeat the option for several runs.")
    ] = None,
    width: Width = 5,
    force: Force = False,
) -> None:
    """Translate a sentence, and plot the attention weights between source words and target words."""
    from bellmax_apps.figures import PICTURES, save
    from bellmax_apps.translation.figure import draw

    with report_errors():
        check_outputs({"--output": output}, [], force=force, endings={"--output": PICTURES})
        maps = []
        for path in (run, *(beside or [])):
            model, source, target, config = translating.load(path)
            ((text, translation),) = translating.translate(model, source, target, [sentence], width)
            if not translation.words:
                raise ValueError(f"sentence must give a translation with words, got none from {path}")
            title = f"{config.attention}, {config.omega}"
            title += "" if path.name == f"{config.attention}-{config.omega}" else f" ({path.name})"
            maps.append((title, target.shown(translation.words), translation.weights.double().numpy()))
            typer.echo(f"{path}: {text}")
        save(draw([*source.tokens(sentence), "</s>"], maps), output)
    typer.echo(str(output))


@app.command()
def table(
    data: Data,
    output: TableFolder,
    pairs: Annotated[
        list[str] | None, typer.Option(help="Languages, as SOURCE-TARGET. Can be repeated. Default: fr-en and en-fr.")
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help=f"Options of 'train', as ATTENTION-OMEGA. Can be repeated. Default: {', '.join(IN_TABLE)}."),
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
    """Train with each attention for the same number of epochs, and write a table. To resume, run it again.

    The folder of a run is OUTPUT/PAIR/ATTENTION-OMEGA or, with several seeds, in OUTPUT/PAIR/ATTENTION-OMEGA-SEED.
    """
    with report_errors():
        shared: dict[str, object] = {
            "epochs": epochs, "minutes": minutes, "optimizer": optimizer, "step_size": step_size,
            "decay": decay, "cool_down": cool_down, "gamma_start": gamma_start, "size": size, "tokens": tokens,
            "dropout": dropout, "pieces": pieces,
        }  # fmt: skip
        seeds, runs = seed or [0], {}
        for pair, kind, run_seed in product(pairs or ("fr-en", "en-fr"), attention or IN_TABLE, seeds):
            source, _, target = pair.partition("-")
            if not (source and target):
                raise ValueError(f"pairs must be SOURCE-TARGET, such as fr-en, got {pair!r}")
            name, omega = _attention_and_omega(kind)
            for split, language in product(SPLITS, (source, target)):
                find(data, split, language)
            options = {"source": source, "target": target, "attention": name, "omega": omega, "seed": run_seed}
            run = output / pair / seeded(kind, run_seed, seeds)
            runs[run] = ["translation", "train", str(data)], shared | options
        train_table(output, runs, jobs, "bleu", lambda run: _measure(data, run, width), _markdown)


def _attention_and_omega(option: str) -> tuple[str, str]:
    """Attention and Ω of an option ATTENTION-OMEGA. Raises ``ValueError`` if there is no such attention or Ω.

    >>> _attention_and_omega("structured-l2")
    ('structured', 'l2')
    """
    attention, hyphen, omega = option.partition("-")
    if not hyphen:
        hint = f": write {'-'.join(FORMER[option])}" if option in FORMER else ""
        raise ValueError(f"attention must be ATTENTION-OMEGA, such as structured-l2, got {option!r}{hint}")
    check_attention(attention, omega)
    return attention, omega


def _measure(data: Path, run: Path, width: int) -> dict[str, Any]:
    """Evaluate a finished run on the test data, with its best weights on the development data."""
    model, source, target, config = translating.load(run)
    history = read_json(run / "history.json")
    pairs = read_pairs(data, "test", (config.source, config.target))
    scores = translating.evaluate(model, source, target, pairs, width)
    speed = sorted(record["tokens_per_second"] for record in history)[len(history) // 2]
    best = max(history, key=lambda record: record["bleu"])
    return {
        "pair": f"{config.source}-{config.target}",
        "attention": f"{config.attention}-{config.omega}",
        "seed": config.settings.seed,
        **scores,
        "dev_bleu": best["bleu"],
        "best_epoch": best["epoch"],
        "epochs": len(history),
        "tokens_per_second": speed,
    }


PAPER = {
    "fr-en": {"dot-negentropy": 27.96, "structured-negentropy": 27.96, "structured-l2": 27.21},
    "en-fr": {"dot-negentropy": 28.08, "structured-negentropy": 27.98, "structured-l2": 27.28},
}
"""BLEU in the paper, on other data: newstest2014, after training on WMT14."""


def _markdown(rows: list[dict[str, Any]]) -> str:
    """One table per language pair. The first attention is the baseline of the others."""
    lines = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        runs = with_means([row for row in rows if row["pair"] == pair], "attention")
        baselines = {row["seed"]: row for row in runs if row["attention"] == runs[0]["attention"]}
        lines += [
            f"## {pair.replace('-', ' → ')}",
            "",
            "| attention | seed | test BLEU | to first | paper, WMT14 | dev BLEU | best epoch | tokens/s "
            "| to first | attended | > 0.1 |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in runs:
            baseline, speed = baselines[row["seed"]], row["tokens_per_second"]
            lines.append(
                f"| {row['attention']} | {row['seed']} | {row['bleu']:.2f} | {row['bleu'] - baseline['bleu']:+.2f} "
                f"| {PAPER.get(pair, {}).get(row['attention'], '')} "
                f"| {row['dev_bleu']:.2f} | {row['best_epoch']:g} of {row['epochs']:g} "
                f"| {speed:.0f} | {speed / baseline['tokens_per_second']:.2f}× | {row['attended']:.2f} "
                f"| {row['clearly']:.2f} |"
            )
        lines += ["", f"{runs[0]['signature']}", ""]
    return "\n".join(lines)
