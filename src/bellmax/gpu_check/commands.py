"""``bellmax gpu``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import bellmax.gpu_check.checks as checking
import bellmax.gpu_check.times as timing
from bellmax.backends import BACKENDS
from bellmax.backends.triton import Triton
from bellmax.gpu_check.report import as_json, as_markdown, versions
from bellmax_command.errors import check_outputs, one_sentence

app = typer.Typer()

_Result = TypeVar("_Result", checking.Check, timing.Time)


@app.callback(invoke_without_command=True)
def gpu(
    output: Annotated[Path, typer.Option(help="Report to write as JSON; the same as Markdown goes beside it.")] = Path(
        "gpu.json"
    ),
    force: Annotated[bool, typer.Option(help="Write over an older report.")] = False,
    times: Annotated[bool, typer.Option(help="Time the kernels as well.")] = True,
) -> None:
    """Check every kernel against plain torch in float64, twice; time it; write a report to paste into an issue.

    Without a GPU some of the checks run in Triton's interpreter, on the CPU, and nothing is timed.
    """
    with one_sentence():
        markdown = output.with_suffix(".md")
        check_outputs({"--output": output, "--output, as Markdown": markdown}, [], force=force)
        if find_spec("triton") is None:
            raise ValueError("triton is not installed: try pip install triton")
        console = Console()
        device = _device(console)
        cases = checking.FEW if device.type == "cpu" else checking.CASES
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy, ∞ − ∞ as well
            checks = list(_shown(checking.run(device, cases=cases), "checks", checking.count(cases), console))
        measured: list[timing.Time] = []
        if times and device.type != "cpu":
            measured = list(_shown(timing.run(device), "times", timing.count(), console))
        found = versions(device), checks, measured, [] if device.type == "cpu" else timing.compiled()
        output.write_text(json.dumps(as_json(*found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        markdown.write_text(as_markdown(*found), encoding="utf-8")
        console.print(as_markdown(*found), highlight=False, markup=False)
        console.print(f"written to {output} and {markdown}", highlight=False)
        if not all(check.is_right for check in checks):
            raise typer.Exit(1)


def _shown(results: Iterator[_Result], what: str, total: int, console: Console) -> Iterator[_Result]:
    """The results, counted in a progress bar, or line by line if the output is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        for number, result in enumerate(results, 1):
            yield result
            progress.update(task, advance=1, description=f"{what}: {result.program}")
            if not console.is_terminal:
                console.print(f"{what}: {number} of {total} ({result.program})", highlight=False)


def _device(console: Console) -> torch.device:
    """The GPU, or the CPU with Triton's interpreter in its place."""
    for name in ("cuda", "xpu"):
        if torch.get_device_module(name).is_available():
            return torch.device(name, torch.get_device_module(name).current_device())
    console.print(
        "There is no GPU here: the kernels run in Triton's interpreter, on the CPU, under two Ω. Nothing is timed."
    )
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when the kernels are imported, which is later
    triton = BACKENDS["triton"]
    assert isinstance(triton, Triton)
    triton.devices.add("cpu")
    return torch.device("cpu")
