"""The command ``bellmax`` and its subcommands, which other distributions can add through entry points.

This package is not part of ``bellmax``, because importing ``bellmax`` imports torch and ``bellmax --help`` should be
fast.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import typer

ENTRY_POINTS = "bellmax.commands"
"""Group of entry points. Each one has the name of a subcommand and refers to a :class:`Subcommand`."""


class Subcommand(NamedTuple):
    """A subcommand of ``bellmax``, in a module that is fast to import, because ``bellmax --help`` loads all of them."""

    help: str
    """Description in ``bellmax --help``."""
    commands: str
    """A :class:`typer.Typer` as ``"module:attribute"``, which is imported if the subcommand runs."""
    needs: tuple[str, ...]
    """Modules that must be installed."""
    install: str
    """Arguments of ``pip install`` that install these modules."""


GPU = Subcommand(
    "Verify and benchmark the GPU kernels on this machine's GPU.",
    "bellmax.gpu_check.commands:app",
    ("rich",),
    "'bellmax[gpu]'",
)
APPLICATIONS = ("ner", "audio", "translation")
"""Subcommands of the distribution bellmax-apps."""
_INSTALL_APPLICATIONS = "pip install bellmax-apps (in a clone: pip install ./apps)"


def main() -> None:
    """Run the subcommand on the command line. Other subcommands are not imported."""
    try:
        import typer
    except ImportError:
        sys.exit("typer is not installed: try pip install 'bellmax[gpu]'")
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    subcommands = _find(wanted)
    if wanted in APPLICATIONS and wanted not in subcommands:
        sys.exit(f"bellmax {wanted} is not installed: try {_INSTALL_APPLICATIONS}")
    is_complete = subcommands.keys() >= set(APPLICATIONS)
    app = typer.Typer(
        no_args_is_help=True,
        help="Applications of differentiable dynamic programming.",
        epilog=None if is_complete else f"For {', '.join(APPLICATIONS)}: {_INSTALL_APPLICATIONS}.",
    )
    for entry in subcommands.values():
        _add(app, entry, wanted)
    app()


def _find(wanted: str | None) -> dict[str, EntryPoint]:
    """Subcommands by name.

    If ``wanted`` is built in, no installed entry point is read, so that a damaged distribution cannot break it.
    """
    built_in = {"gpu": EntryPoint("gpu", f"{__name__}:GPU", ENTRY_POINTS)}
    installed = () if wanted in built_in else entry_points(group=ENTRY_POINTS)
    return {entry.name: entry for entry in installed} | built_in


def _add(app: typer.Typer, entry: EntryPoint, wanted: str | None) -> None:
    """Add a subcommand to ``app``, and import its commands if it is the wanted one or the shell completes a line.

    If the subcommand is broken, exit if it is the wanted one; otherwise its help is the reason.
    """
    is_used = entry.name == wanted or "_BELLMAX_COMPLETE" in os.environ
    commands = _placeholder()
    try:
        subcommand = _load(entry)
        title = subcommand.help
        if is_used:
            commands = resolve_name(subcommand.commands)
    except Exception as error:
        if entry.name != wanted:
            reason = str(error).replace("[", r"\[") if find_spec("rich") else str(error)  # typer reads Rich markup
            title = f"Cannot be loaded: {reason}"
        elif isinstance(error, ImportError | AttributeError):
            sys.exit(f"bellmax {entry.name} cannot be loaded: {error}")
        else:
            raise
    app.add_typer(commands, name=entry.name, help=title)


def _load(entry: EntryPoint) -> Subcommand:
    """Load an entry point. Raises ``ModuleNotFoundError`` if the subcommand needs a module that is not installed."""
    subcommand: Subcommand = entry.load()
    missing = next((module for module in subcommand.needs if find_spec(module) is None), None)
    if missing is not None:
        raise ModuleNotFoundError(f"{missing} is not installed: try pip install {subcommand.install}")
    return subcommand


def _placeholder() -> typer.Typer:
    """Empty commands, for a subcommand of which only the name and the help are shown."""
    import typer

    return typer.Typer(callback=lambda: None)
