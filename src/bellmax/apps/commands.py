"""What the commands of all applications have in common."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import bellmax.apps.training as training

Run = Annotated[Path, typer.Argument(help="What 'train' wrote.")]
RunFolder = Annotated[Path, typer.Option(help="The folder to write the run to.")]
TableFolder = Annotated[Path, typer.Option(help="A folder for the runs, table.md and table.json.")]
Epochs = Annotated[int, typer.Option(help="How many epochs at most.")]
Minutes = Annotated[float | None, typer.Option(help="No epoch begins after so many minutes of training.")]
Optimizer = Annotated[str, typer.Option(help="sgd or adamw.")]
StepSize = Annotated[float, typer.Option(help="Of the optimizer.")]
Decay = Annotated[float, typer.Option(help="What the step is multiplied by after an epoch that was not the best.")]
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
