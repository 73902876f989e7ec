"""Errors of subcommands: messages without a traceback, and checks of output files before any work starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn errors about the input into one line, without a traceback."""
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
    """Check the files that options name, before the work that they are to hold.

    Args:
        outputs: by option; None is not asked for.
        inputs: files that are read, and never written to.
        force: whether files may be replaced.
        endings: by option, the endings that a name may have.

    """
    taken: dict[Path, str] = {path.resolve(): "an input" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        allowed = (endings or {}).get(option)
        if allowed is not None and path.suffix.lower() not in allowed:
            raise ValueError(f"{option} must end in {', '.join(sorted(allowed))}, got {path}")
        same = next((what for other, what in taken.items() if other == path.resolve() or _is_same(other, path)), None)
        if same is not None:
            raise ValueError(f"{option} must name a file of its own, got {path}, which is {same}")
        taken[path.resolve()] = f"that of {option}"
        if not path.parent.is_dir():
            raise ValueError(f"{option} must be in a folder that exists, got {path}")
        if path.is_dir():
            raise ValueError(f"{option} must name a file, got the folder {path}")
        if path.exists() and not force:
            raise ValueError(f"{path} exists: add --force to replace it, or name another file with {option}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{option} must name a file that can be written, got {path}")


def _is_same(path: Path, other: Path) -> bool:
    """Whether they are one file under two names."""
    return path.exists() and other.exists() and path.samefile(other)
