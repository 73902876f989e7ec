"""Options and helpers shared by the commands of all applications."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import bellmax_apps.training as training
from bellmax_apps.files import write_json
from bellmax_apps.runs import train_all

Run = Annotated[Path, typer.Argument(help="The folder that 'train' wrote.")]
RunFolder = Annotated[Path, typer.Option(help="Folder to write the run to.")]
TableFolder = Annotated[Path, typer.Option(help="Folder for the runs, table.md and table.json.")]
Epochs = Annotated[int, typer.Option(help="Maximum number of epochs.")]
Minutes = Annotated[float | None, typer.Option(help="Start no new epoch after this many minutes of training.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer: sgd or adamw.")]
StepSize = Annotated[float, typer.Option(help="Learning rate.")]
Decay = Annotated[float, typer.Option(help="Factor for the learning rate after an epoch without a new best score.")]
CoolDown = Annotated[int, typer.Option(help="Number of last epochs in which the learning rate decays nearly to 0.")]
Dropout = Annotated[float, typer.Option(help="Dropout probability.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Random seed, repeatable. Default 0.")]
Resume = Annotated[
    bool, typer.Option(help="Resume the run from its last epoch. Only epochs and minutes may differ from before.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace what was written before.")]
Split = Annotated[str, typer.Option(help="train, dev or test.")]
Jobs = Annotated[int, typer.Option(help="Number of runs in parallel.")]


_COMMAND = "    bellmax "  # as a page of results begins


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def train_into(
    output: Path,
    data: Path,
    config: training.Config,
    train: Callable[..., training.State],
    metric: str,
    *,
    resume: bool,
    force: bool,
    given: Collection[str],
    uses: Sequence[str],
) -> None:
    """Train on a folder of data into a folder that holds no run, or one to go on with or to replace; handle Ctrl-C.

    Options that are not in ``given`` are taken from the run to resume. ``uses`` lists commands to show at the end, with
    RUN and DATA in place of the folders.
    """
    if resume and force:
        raise ValueError("either --resume or --force may be given: one goes on with a run, the other replaces it")
    if output.resolve() == data.resolve():
        raise ValueError(f"output must be another folder than that of the data, got {output}")
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and not (resume or force or training.is_empty(output)):
        raise ValueError(
            f"{output} holds a run already: add --resume to go on with it or --force to replace it, or name another "
            "folder"
        )
    if resume and training.is_begun(output):
        config = config.filled(output, given)
    console = Console() if is_first else None
    try:
        state = train(data, output, config, resume=resume, console=console)
    except KeyboardInterrupt:
        if training.is_usable(output):
            what = f"interrupted: {output} can be used as it is, or resumed with --resume"
        elif training.is_begun(output):
            what = f"interrupted: {output}: no epoch was finished; continue with --resume"
        else:
            what = "interrupted before the training began: run the same command again"
        typer.echo(f"\n{what}", err=True)
        raise typer.Exit(130) from None
    if console is not None:
        best = f"dev {metric} {state.best:.2f} after {len(state.history)} epochs"
        folders = {"RUN": shlex.quote(str(output)), "DATA": shlex.quote(str(data))}
        commands = (" ".join(folders.get(word, word) for word in use.split()) for use in uses)
        for line in (f"{output}: {best}", f"next: {', or '.join(commands)}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def train_table(
    output: Path,
    trained: Mapping[Path, tuple[Sequence[str], Mapping[str, object]]],
    jobs: int,
    metric: str,
    measure: Callable[[Path], dict[str, Any]],
    markdown: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Train each run by its command and options; then measure all runs, write the table and print it."""
    console = Console()
    page, numbers = output / "table.md", output / "table.json"
    check_results(page, numbers)

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
    page.write_text(f"{origin()} {jobs} runs at a time.\n\n{text}", encoding="utf-8")
    write_json(numbers, rows)
    tell(text)


def check_results(page: Path, *others: Path) -> None:
    """Check that a page of results, which begins with its command, and what is beside it may be written anew."""
    first = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    for path in (page, *others):
        if path.exists() and not first.startswith(_COMMAND):
            raise ValueError(f"{path} is not of this command: move it, or name another folder with --output")


def seeded(name: str, seed: int, seeds: Sequence[int]) -> str:
    """The folder name of a run: with its seed if there are several.

    >>> seeded("l2", 1, [1]), seeded("l2", 1, [0, 1])
    ('l2', 'l2-1')
    """
    return name if len(seeds) == 1 else f"{name}-{seed}"


def with_means(rows: Sequence[dict[str, Any]], *by: str) -> list[dict[str, Any]]:
    """The rows; after several that share the entries ``by``, a row of the means of their numbers, with seed "mean".

    >>> with_means([{"omega": "l2", "seed": 0, "f1": 3.0}, {"omega": "l2", "seed": 1, "f1": 4.0}], "omega")[2:]
    [{'omega': 'l2', 'seed': 'mean', 'f1': 3.5}]
    """
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in by) == key]
        found += own
        if len(own) > 1:
            means = {name: fmean(row[name] for row in own) for name, first in own[0].items() if _is_number(first)}
            found.append(own[0] | means | {"seed": "mean"})
    return found


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float))


def _written(options: Mapping[str, object]) -> Iterator[str]:
    """Options as command-line arguments; those that are None are left out."""
    for name, given in options.items():
        if given is not None:
            yield from (f"--{name.replace('_', '-')}", str(given))


def origin() -> str:
    """The command, the commit (if in a repository) and the machine that gave a result."""
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
    return f"{_COMMAND}{shlex.join(sys.argv[1:])}\n\n{commit}{machine}."


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
