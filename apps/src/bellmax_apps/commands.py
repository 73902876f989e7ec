"""Options of several commands, training of a run or of a table of runs, and the origin of a result."""

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

Run = Annotated[Path, typer.Argument(help="Folder of a run, which 'train' wrote.")]
RunFolder = Annotated[Path, typer.Option(help="Folder to write the run to.")]
TableFolder = Annotated[Path, typer.Option(help="Folder for the runs, table.md and table.json.")]
Epochs = Annotated[int, typer.Option(help="Maximum number of epochs (passes over the training data).")]
Minutes = Annotated[float | None, typer.Option(help="Start no new epoch after this many minutes of training.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer: sgd or adamw.")]
StepSize = Annotated[float, typer.Option(help="Learning rate.")]
Decay = Annotated[
    float, typer.Option(help="Factor by which the learning rate decays after an epoch without a new best score.")
]
CoolDown = Annotated[int, typer.Option(help="Number of final epochs in which the learning rate decays to nearly 0.")]
Tokens = Annotated[int, typer.Option(help="Maximum batch size in tokens, with padding.")]
Dropout = Annotated[float, typer.Option(help="Dropout probability.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", help="Random seed, default 0. Repeat the option for several seeds.")
]
Resume = Annotated[
    bool, typer.Option(help="Resume the run after its last finished epoch. Only --epochs and --minutes may change.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output of an earlier command.")]
Split = Annotated[str, typer.Option(help="Part of the data: train, dev or test.")]
Jobs = Annotated[int, typer.Option(help="Number of runs to train in parallel.")]


_COMMAND = "    bellmax "
"""First characters of a page of results: the command that wrote it."""


def options_on_command_line(context: typer.Context) -> set[str]:
    """Names of the options that the user has set."""
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
    explicit: Collection[str],
    uses: Sequence[str],
) -> None:
    """Train a model, start or resume its run folder, and print the next steps. Ctrl-C keeps finished epochs.

    Args:
        output: Folder of the run.
        data: Folder of the data.
        config: Configuration of the run.
        train: Function that trains from ``data`` into ``output`` with ``config``.
        metric: Name of the score on dev.
        resume: If True, continue the run in ``output``.
        force: If True, replace the run in ``output``.
        explicit: Options that the user has set. Other options of a resumed run stay as they were.
        uses: Commands to print at the end. The words RUN and DATA stand for the two folders.

    """
    if resume and force:
        raise ValueError("--resume and --force exclude each other: --resume continues a run, --force replaces it")
    if output.resolve() == data.resolve():
        raise ValueError(f"--output must not be the folder of the data, got {output}")
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and not (resume or force or training.is_empty(output)):
        raise ValueError(
            f"{output} already holds a run: add --resume to continue it or --force to replace it, or choose another "
            "folder"
        )
    if resume and training.is_begun(output):
        config = config.completed_from(output, explicit)
    console = Console() if is_first else None
    try:
        state = train(data, output, config, resume=resume, console=console)
    except KeyboardInterrupt:
        typer.echo(f"\n{_after_interrupt(output)}", err=True)
        raise typer.Exit(130) from None
    if console is not None:
        best = f"dev {metric} {state.best:.2f} after {len(state.history)} epochs"
        folders = {"RUN": shlex.quote(str(output)), "DATA": shlex.quote(str(data))}
        commands = (" ".join(folders.get(word, word) for word in use.split()) for use in uses)
        for line in (f"{output}: {best}", f"next: {', or '.join(commands)}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _after_interrupt(run: Path) -> str:
    """Advice on an interrupted run, which depends on how far it got."""
    if training.is_usable(run):
        return f"interrupted: {run} can be used now, or continued with --resume"
    if training.is_begun(run):
        return f"interrupted: {run} has no finished epoch yet; continue with --resume"
    return "interrupted before the training began: run the same command again"


def train_table(
    output: Path,
    runs: Mapping[Path, tuple[Sequence[str], Mapping[str, object]]],
    jobs: int,
    metric: str,
    measure: Callable[[Path], dict[str, Any]],
    markdown: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Train several runs, measure them, and write and print a table with a row for each.

    Args:
        output: Folder of the table.
        runs: Command and options that train each run folder.
        jobs: Number of runs in parallel.
        metric: Entry of the history to report after each epoch.
        measure: Function from a run folder to a row of the table.
        markdown: Function from all rows to the page.

    """
    console = Console()
    page, numbers = output / "table.md", output / "table.json"
    check_results(page, numbers)

    def report(line: str) -> None:
        console.print(line, highlight=False)

    commands = {
        run: [*command, "--resume", "--output", str(run), *_arguments(options)]
        for run, (command, options) in runs.items()
    }
    train_all(commands, jobs, metric, report)
    rows = []
    for run in runs:
        report(f"{run}: test data")
        rows.append(measure(run))
    text = markdown(rows)
    page.write_text(f"{origin()} {jobs} runs at a time.\n\n{text}", encoding="utf-8")
    write_json(numbers, rows)
    report(text)


def _arguments(options: Mapping[str, object]) -> Iterator[str]:
    """Options as command-line arguments. Options that are None are left out."""
    for name, value in options.items():
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))


def check_results(page: Path, *others: Path) -> None:
    """Raise ``ValueError`` if a file of results exists that no command has written.

    Args:
        page: Page of results. A page that a command has written begins with this command.
        others: Files that the command writes together with the page.

    """
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    for path in (page, *others):
        if path.exists() and not text.startswith(_COMMAND):
            raise ValueError(
                f"{path} was not written by this command. Move it, or choose another folder with --output."
            )


def seeded(name: str, seed: int, seeds: Sequence[int]) -> str:
    """Folder name of a run. It contains the seed only if there are several seeds.

    >>> seeded("l2", 1, [1]), seeded("l2", 1, [0, 1])
    ('l2', 'l2-1')
    """
    return name if len(seeds) == 1 else f"{name}-{seed}"


def with_means(rows: Sequence[dict[str, Any]], *by: str) -> list[dict[str, Any]]:
    """Group rows by the entries ``by``, and append a row with the means of each group of several rows.

    The seed of such a row is "mean".

    >>> with_means([{"omega": "l2", "seed": 0, "f1": 3.0}, {"omega": "l2", "seed": 1, "f1": 4.0}], "omega")[2:]
    [{'omega': 'l2', 'seed': 'mean', 'f1': 3.5}]
    """
    grouped = []
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in by) == key]
        grouped += group
        if len(group) > 1:
            numbers = [name for name, entry in group[0].items() if isinstance(entry, int | float)]
            means = {name: fmean(row[name] for row in group) for name in numbers}
            grouped.append(group[0] | means | {"seed": "mean"})
    return grouped


def origin() -> str:
    """The command line, the commit (in a clone of the repository) and the machine, to put above a result."""
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        commit = f"commit {revision.stdout.strip()}; "
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    machine = f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}"
    return f"{_COMMAND}{shlex.join(sys.argv[1:])}\n\n{commit}{machine}."


def _processor() -> str:
    """Return the name of the processor for the record of a run: the model on Linux, the architecture elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
