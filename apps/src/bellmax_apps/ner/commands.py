"""Subcommands of ``bellmax ner``: train, evaluate, tag, plot and table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

import bellmax_apps.ner.table as tables
import bellmax_apps.ner.tagging as tagging
import bellmax_apps.training as training
from bellmax_apps.commands import (
    CoolDown,
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
    train_into,
    train_table,
)
from bellmax_apps.files import chunks
from bellmax_apps.ner.data import SPLITS, Corpus, Sentence, find, tokens_of
from bellmax_apps.ner.schemes import Entity
from bellmax_command.errors import check_outputs, report_errors

app = typer.Typer(no_args_is_help=True)

DEFAULT = tagging.Config()
Data = Annotated[
    Path, typer.Argument(help="Folder with files for train, dev and test, with one token and its tag per line.")
]
Embeddings = Annotated[
    Path | None, typer.Option(help="File of pretrained word vectors: .vec or .txt (fastText, GloVe) or .npz.")
]
Sentences = Annotated[int, typer.Option(help="Batch size, in sentences.")]
WarmUp = Annotated[
    int,
    typer.Option(help="Number of first epochs with the surrogate loss, for --loss relaxed with a sparse regularizer."),
]
WordSize = Annotated[int, typer.Option(help="Size of the word embeddings. Ignored with --embeddings.")]
TokenColumn = Annotated[int, typer.Option(help="Column of the tokens, counted from 0.")]
TagColumn = Annotated[int, typer.Option(help="Column of the tags, counted from 0. The last column is -1.")]


@app.command()
def train(
    data: Data,
    output: RunFolder,
    context: typer.Context,
    omega: Annotated[str, typer.Option(help=f"Regularizer Ω: {', '.join(tagging.OMEGAS)}.")] = DEFAULT.omega,
    gamma: Annotated[float, typer.Option(help="Smoothing strength γ of the regularizer.")] = DEFAULT.gamma,
    loss: Annotated[str, typer.Option(help="Loss: surrogate or relaxed.")] = DEFAULT.loss,
    warm_up: WarmUp = DEFAULT.warm_up,
    embeddings: Embeddings = None,
    epochs: Epochs = DEFAULT.settings.epochs,
    minutes: Minutes = None,
    optimizer: Optimizer = DEFAULT.settings.optimizer,
    step_size: StepSize = DEFAULT.settings.step_size,
    decay: Decay = DEFAULT.settings.decay,
    cool_down: CoolDown = DEFAULT.settings.cool_down,
    sentences: Sentences = DEFAULT.sentences,
    tokens: Tokens = DEFAULT.tokens,
    dropout: Dropout = DEFAULT.dropout,
    word_size: WordSize = DEFAULT.word_size,
    token_column: TokenColumn = DEFAULT.token_column,
    tag_column: TagColumn = DEFAULT.tag_column,
    seed: Seed = DEFAULT.settings.seed,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a tagger, and keep the weights with the best F1 on dev.

    After Ctrl-C, continue with --resume. The run can be used once an epoch is finished.
    """
    with report_errors():
        config = tagging.Config(
            omega=omega,
            gamma=gamma,
            loss=loss,
            warm_up=warm_up,
            word_size=word_size,
            embeddings=None if embeddings is None else str(embeddings.resolve()),
            dropout=dropout,
            sentences=sentences,
            tokens=tokens,
            token_column=token_column,
            tag_column=tag_column,
            settings=training.Settings(epochs, minutes, optimizer, step_size, decay, cool_down, seed=seed),
        )
        explicit = options_on_command_line(context)
        if embeddings is not None:
            explicit.discard("word_size")  # the vectors determine the size
        uses = "bellmax ner evaluate RUN DATA", "bellmax ner tag RUN"
        train_into(output, data, config, tagging.train, "F1", resume=resume, force=force, explicit=explicit, uses=uses)


@app.command("eval", hidden=True)
@app.command()
def evaluate(run: Run, data: Data, split: Split = "test") -> None:
    """Print precision, recall and F1 of all entities and of each type, as CoNLL defines them."""
    with report_errors():
        model, vocabulary, config = tagging.load(run)
        path = find(data, split)
        result = tagging.guess(model, Corpus(config.read(data, split, vocabulary.kinds), vocabulary))
        total = tagging.entity_scores(result.truth, result.guesses)
        by_type = tagging.scores_by_type(result.truth, result.guesses)
    total["entities"] = sum(scores["entities"] for scores in by_type.values())
    typer.echo(f"{path}: {len(result.truth)} sentences, {result.tags_per_word:.2f} tags per word")
    typer.echo(f"{'':14}precision  recall      F1  entities")
    for name, scores in {**by_type, "all": total}.items():
        cells = (f"{scores[score]:{width}.2f}" for score, width in (("precision", 9), ("recall", 8), ("f1", 8)))
        typer.echo(f"{name:14}{''.join(cells)}{scores['entities']:10.0f}")


@app.command()
def tag(
    run: Run,
    most: Annotated[int, typer.Option(help="Number of tag sequences to list if there are too many to list all.")] = 5,
) -> None:
    """Tag the sentences of the standard input, one per line, with tokens separated by spaces.

    For each token, print its tag and the probability of the tag.
    Lines that begin with # list the most probable tag sequences of a sentence.
    With a sparse regularizer, they list all sequences of positive probability.
    """
    with report_errors():
        model, vocabulary, _ = tagging.load(run)
        for lines in chunks(sys.stdin.buffer):
            for tagged in tagging.tag(model, vocabulary, [tokens_of(line) for line in lines], most):
                typer.echo("".join(f"{line}\n" for line in _lines(tagged)))


def _lines(tagged: tagging.Tagged) -> Iterator[str]:
    """Output for a sentence: a line for each token, then a line for each reading, and "# …" if there are more."""
    for token, label, probability in zip(tagged.tokens, tagged.tags, tagged.confidence, strict=True):
        yield f"{token}\t{label}\t{probability:.4f}"
    for reading in tagged.readings:
        yield f"# {reading.probability:.4f}\t{_bracketed(tagged.tokens, reading.entities)}"
    if tagged.tokens and not tagged.is_all:
        yield "# …"


def _bracketed(tokens: list[str], entities: list[Entity]) -> str:
    """A sentence with its entities in brackets: "in [LOC San Juan]"."""
    words = list(tokens)
    for kind, start, stop in entities:
        words[start] = f"[{kind} {words[start]}"
        words[stop - 1] += "]"
    return " ".join(words)


@app.command()
def plot(
    run: Run,
    sentence: Annotated[str, typer.Argument(help="Tokens separated by spaces. With --data, the index of a sentence.")],
    output: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")] = Path("tags.png"),
    data: Annotated[
        Path | None,
        typer.Option(help="Data folder. If given, SENTENCE is the index of a dev sentence, counted from 0."),
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run, drawn below. Repeat the option for several runs.")
    ] = None,
    force: Force = False,
) -> None:
    """Plot the probability of each tag for each word: gray borders mark positive values, red dots the true tags."""
    from bellmax_apps.figures import PICTURES, save
    from bellmax_apps.ner.figure import draw

    with report_errors():
        check_outputs({"--output": output}, [], force=force, endings={"--output": PICTURES})
        runs = [(path, *tagging.load(path)) for path in (run, *(beside or []))]
        tokens, truth = _sentence(sentence, data, runs[0][3])
        panels = []
        for path, model, vocabulary, config in runs:
            if vocabulary.labels != runs[0][2].labels:
                raise ValueError(f"runs must have the same labels, but the labels of {path} differ")
            with torch.no_grad():
                p = model.distribution(Corpus([Sentence(tokens, [])], vocabulary).batch([0]))
            panels.append((f"{config.omega}, {config.loss} ({path.name})", p.marginals[0].double().numpy()))
        save(draw(tokens, vocabulary.labels, panels, truth), output)
    typer.echo(f"{output}: {' '.join(tokens)}")


def _sentence(argument: str, data: Path | None, config: tagging.Config) -> Sentence:
    """The sentence to plot: the argument itself or, with a folder of data, the dev sentence of this number."""
    if data is None:
        if not tokens_of(argument):
            raise ValueError("sentence must hold at least one token, got none")
        return Sentence(tokens_of(argument), [])
    sentences = config.read(data, "dev")
    if not argument.isdecimal() or int(argument) >= len(sentences):
        raise ValueError(f"with --data, sentence must be a number from 0 to {len(sentences) - 1}, got {argument!r}")
    return sentences[int(argument)]


@app.command()
def table(
    data: Annotated[list[Path], typer.Argument(help="One or more data folders, as for 'train'.")],
    output: TableFolder,
    epochs: Epochs = DEFAULT.settings.epochs,
    minutes: Minutes = None,
    embeddings: Annotated[
        list[str] | None, typer.Option(help="FOLDER=FILE: a file of word vectors for a data folder. Can be repeated.")
    ] = None,
    omega: Annotated[
        list[str] | None,
        typer.Option(help="Regularizer, as NAME or NAME=γ. Can be repeated. Default: negentropy, l2=10."),
    ] = None,
    optimizer: Optimizer = DEFAULT.settings.optimizer,
    step_size: StepSize = DEFAULT.settings.step_size,
    decay: Decay = DEFAULT.settings.decay,
    cool_down: CoolDown = DEFAULT.settings.cool_down,
    sentences: Sentences = DEFAULT.sentences,
    dropout: Dropout = DEFAULT.dropout,
    word_size: WordSize = DEFAULT.word_size,
    warm_up: WarmUp = 3,
    seed: Seeds = None,
    jobs: Jobs = 1,
) -> None:
    """Train with every loss and regularizer for the same number of epochs, and write a table. To resume, run it again.

    The folder of a run is OUTPUT/DATA/OMEGA-LOSS or, with several seeds, OUTPUT/DATA/OMEGA-LOSS-SEED.
    """
    with report_errors():
        gammas = dict(map(_name_and_gamma, omega or ("negentropy", "l2=10")))
        vectors = _vector_files(embeddings or (), data)
        for folder, split in product(data, SPLITS):
            find(folder, split)
        shared: dict[str, object] = {
            "epochs": epochs, "minutes": minutes, "optimizer": optimizer, "step_size": step_size,
            "decay": decay, "cool_down": cool_down, "sentences": sentences, "dropout": dropout,
            "word_size": word_size,
        }  # fmt: skip
        cells = {cell.run: cell for cell in tables.cells(data, list(gammas), seed or [0], output)}
        runs = {}
        for run, cell in cells.items():
            options = {
                "omega": cell.omega,
                "gamma": gammas[cell.omega],
                "loss": cell.loss,
                "seed": cell.seed,
                "warm_up": None if cell.omega in ("negentropy", "softmax") else warm_up,
                "embeddings": vectors.get(cell.data.resolve().name),
            }
            runs[run] = ["ner", "train", str(cell.data)], shared | options
        train_table(output, runs, jobs, "f1", lambda run: tables.measure(cells[run]), tables.markdown)


def _name_and_gamma(option: str) -> tuple[str, float]:
    """Parse NAME or NAME=γ. Raises ``ValueError`` if there is no such regularizer."""
    name, _, number = option.partition("=")
    try:
        gamma = float(number or 1)
    except ValueError:
        raise ValueError(f"--omega must be NAME or NAME=γ, such as l2=10, got {option!r}") from None
    tagging.Config(omega=name, gamma=gamma).regularizer()
    return name, gamma


def _vector_files(options: Sequence[str], data: Sequence[Path]) -> dict[str, str]:
    """Parse FOLDER=FILE: the file of word vectors for each data folder, by the name of the folder."""
    names = [folder.resolve().name for folder in data]
    files = {}
    for option in options:
        name, _, file = option.partition("=")
        if name not in names or not Path(file).is_file():
            raise ValueError(
                f"--embeddings must be FOLDER=FILE, with a FOLDER among {', '.join(names)} and a FILE that exists, "
                f"got {option!r}"
            )
        files[name] = file
    return files
