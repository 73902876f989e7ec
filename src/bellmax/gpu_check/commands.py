"""The subcommand ``bellmax gpu``."""

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
from bellmax_command.errors import check_outputs, report_errors

app = typer.Typer()

_Result = TypeVar("_Result", checking.Check, timing.Time)


@app.callback(invoke_without_command=True)
def gpu(
    output: Annotated[
        Path,
        typer.Option(help="Report to write, in JSON. A second file with the ending .md has the same results as text."),
    ] = Path("gpu.json"),
    force: Annotated[bool, typer.Option(help="Replace an older report.")] = False,
    times: Annotated[bool, typer.Option(help="Time the kernels as well.")] = True,
) -> None:
    """Check and time every GPU kernel, and write a report to paste into an issue.

    The reference is plain torch in float64.
    Without a GPU, some checks run in Triton's interpreter on the CPU, and nothing is timed.
    """
    with report_errors():
        markdown = output.with_suffix(".md")
        check_outputs({"--output": output, "--output, as Markdown": markdown}, [], force=force)
        if find_spec("triton") is None:
            raise ValueError("triton is not installed: try pip install triton")
        console = Console()
        device = _device(console)
        cases = checking.FEW if device.type == "cpu" else checking.CASES
        with np.errstate(all="ignore"):  # the interpreter computes ∞ − ∞ with NumPy
            checks = list(_shown(checking.run(device, cases=cases), "checks", checking.count(cases), console))
        measured: list[timing.Time] = []
        if times and device.type != "cpu":
            measured = list(_shown(timing.run(device), "times", timing.count(), console))
        results = versions(device), checks, measured, [] if device.type == "cpu" else timing.compiled()
        output.write_text(json.dumps(as_json(*results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        markdown.write_text(as_markdown(*results), encoding="utf-8")
        console.print(as_markdown(*results), highlight=False, markup=False)
        console.print(f"written to {output} and {markdown}", highlight=False)
        if not all(check.is_right for check in checks):
            raise typer.Exit(1)


def _shown(results: Iterator[_Result], what: str, total: int, console: Console) -> Iterator[_Result]:
    """Yield the results, and count them in a progress bar, or in lines if the output is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        for number, result in enumerate(results, 1):
            yield result
            progress.update(task, advance=1, description=f"{what}: {result.program}")
            if not console.is_terminal:
                console.print(f"{what}: {number} of {total} ({result.program})", highlight=False)


def _device(console: Console) -> torch.device:
    """The GPU. If there is none, the CPU, on which the triton backend then runs in Triton's interpreter."""
    for name in ("cuda", "xpu"):
        if torch.get_device_module(name).is_available():
            return torch.device(name, torch.get_device_module(name).current_device())
    console.print(
        "There is no GPU here: the kernels run in Triton's interpreter, on the CPU, under two Ω. Nothing is timed."
    )
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when the kernels are imported, which happens later
    triton = BACKENDS["triton"]
    assert isinstance(triton, Triton)
    triton.devices.add("cpu")
    return torch.device("cpu")
