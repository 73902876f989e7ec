"""What the commands of all applications have in common."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import bellmax.apps.training as training
from bellmax.apps.runs import train_all

Run = Annotated[Path, typer.Argument(help="What 'train' wrote.")]
RunFolder = Annotated[Path, typer.Option(help="The folder to write the run to.")]
TableFolder = Annotated[Path, typer.Option(help="A folder for the runs, table.md and table.json.")]
Epochs = Annotated[int, typer.Option(help="How many epochs at most.")]
Minutes = Annotated[float | None, typer.Option(help="No epoch begins after so many minutes of training.")]
Optimizer = Annotated[str, typer.Option(help="sgd or adamw.")]
StepSize = Annotated[float, typer.Option(help="Of the optimizer.")]
Decay = Annotated[float, typer.Option(help="What the step is multiplied by after an epoch that was not the best.")]
CoolDown = Annotated[int, typer.Option(help="In how many of the last epochs the step goes down nearly to 0.")]
Dropout = Annotated[float, typer.Option(help="Share of features left out in training.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
Resume = Annotated[bool, typer.Option(help="Go on from where the run was left.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time.")]


@contextmanager
def one_sentence() -> Iterator[None]:
    """What is wrong with the input is said in a sentence, without a traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, FloatingPointError, RuntimeError, OSError) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


def train_into(output: Path, resume: bool, train: Callable[[Console | None], training.State], metric: str) -> None:
    """Call ``train`` with what it may say things to, unless another run is in the way; Ctrl-C is explained."""
    if training.is_begun(output) and not resume:
        raise ValueError(f"{output} holds a run already: add --resume to go on with it, or name another folder")
    console = Console() if os.environ.get("RANK", "0") == "0" else None
    try:
        state = train(console)
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted: {output} can be used as it is, or resumed with --resume", err=True)
        raise typer.Exit(130) from None
    if console is not None:
        console.print(f"{output}: dev {metric} {state.best:.2f} after {len(state.history)} epochs", highlight=False)


def train_table(
    output: Path,
    trained: Mapping[Path, tuple[Sequence[str], Mapping[str, object]]],
    jobs: int,
    metric: str,
    measure: Callable[[Path], dict[str, Any]],
    markdown: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Train each run by the command that it has, with its options; then measure, write and print the table."""
    console = Console()

    def tell(line: str) -> None:
        console.print(line, highlight=False)

    commands = {
        run: [*command, "--resume", "--output", str(run), *_written(options)]
        for run, (command, options) in trained.items()
    }
    train_all(commands, jobs, metric, tell)
    rows = []
    for run in trained:
        tell(f"{run}: test data")
        rows.append(measure(run))
    text = markdown(rows)
    (output / "table.md").write_text(f"{origin()} {jobs} runs at a time.\n\n{text}", encoding="utf-8")
    training.write_json(output / "table.json", rows)
    tell(text)


def _written(options: Mapping[str, object]) -> Iterator[str]:
    """As on a command line, without those that are None."""
    for name, given in options.items():
        if given is not None:
            yield from (f"--{name.replace('_', '-')}", str(given))


def origin() -> str:
    """How a result came about: the command, the commit where there is one, the machine."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        commit = f"commit {told.stdout.strip()}; "
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    machine = f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}"
    return f"    bellmax {shlex.join(sys.argv[1:])}\n\n{commit}{machine}."


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
