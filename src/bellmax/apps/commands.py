"""What the commands of all applications have in common."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer


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
