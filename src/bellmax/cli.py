"""The command ``bellmax``: its subcommands depend on the extras that are installed."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

APPLICATIONS = {
    "ner": "named entity recognition",
    "audio": "audio-to-score alignment",
    "translation": "translation with structured attention",
    "gpu": "kernels for GPUs, checked and timed",
}


def main() -> None:
    """Run a command of an application."""
    try:
        import typer
    except ImportError:
        sys.exit("the bellmax command needs an extra: try pip install 'bellmax[ner]'")
    app = typer.Typer(no_args_is_help=True, help="Applications of differentiable dynamic programming.")
    for name, title in APPLICATIONS.items():
        app.add_typer(_commands(name, title), name=name)
    app()


def _commands(name: str, title: str) -> typer.Typer:
    """The commands of an application, or an error message if its extra is not installed."""
    import typer

    try:
        commands: typer.Typer = importlib.import_module(f"bellmax.apps.{name}.commands").app
    except ImportError as error:
        commands = typer.Typer(invoke_without_command=True, help=f"{title} (needs bellmax[{name}])")
        message = f"{error.name} is not installed: try pip install 'bellmax[{name}]'"
        commands.callback()(lambda: sys.exit(message))
    return commands
