"""Errors of subcommands: messages without a traceback, and checks of output files before any work starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors about the user's input as one line without a traceback, and exit with status 2."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except (ValueError, FloatingPointError, RuntimeError, OSError) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Collection[Path],
    *,
    force: bool,
    endings: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Raise ``ValueError`` if an output file cannot or must not be written. Call this before a long computation.

    Args:
        outputs: File of each option, or None if the option is not used.
        inputs: Files that the command reads. They are never replaced.
        force: If True, existing outputs may be replaced.
        endings: Allowed file name extensions of an option, default any.

    """
    uses: dict[Path, str] = {path.resolve(): "an input" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        allowed = (endings or {}).get(option)
        if allowed is not None and path.suffix.lower() not in allowed:
            raise ValueError(f"{option} must end in {', '.join(sorted(allowed))}, got {path}")
        use = next((use for other, use in uses.items() if other == path.resolve() or _is_same(other, path)), None)
        if use is not None:
            raise ValueError(f"{option} must name another file, got {path}, which is {use}")
        uses[path.resolve()] = f"the file of {option}"
        if not path.parent.is_dir():
            raise ValueError(f"{option} must be in a folder that exists, got {path}")
        if path.is_dir():
            raise ValueError(f"{option} must name a file, got the folder {path}")
        if path.exists() and not force:
            raise ValueError(f"{path} exists: add --force to replace it, or choose another file with {option}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{option} must name a file that can be written, got {path}")


def _is_same(path: Path, other: Path) -> bool:
    """True if both paths are names of one existing file, such as hard links."""
    return path.exists() and other.exists() and path.samefile(other)
