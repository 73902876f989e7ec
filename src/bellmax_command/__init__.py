"""The command ``bellmax``. It is outside of the package ``bellmax``, so that its help does not import torch."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple


class Application(NamedTuple):
    help: str
    needs: tuple[str, ...]
    """Modules that its extra installs."""


APPLICATIONS = {
    "ner": Application(
        "Named entity recognition: train on columns of tokens and tags, and tag.",
        ("rich", "seqeval"),
    ),
    "audio": Application(
        "Audio-to-score alignment: find when a recording plays each note of a score.",
        ("rich", "librosa", "soundfile", "pretty_midi", "scipy"),
    ),
    "translation": Application(
        "Translation: train on parallel text, translate, and plot the attention.",
        ("rich", "sacremoses", "sacrebleu", "tokenizers"),
    ),
    "gpu": Application("Verify and benchmark the GPU kernels on this machine's GPU.", ("rich",)),
}


def main() -> None:
    """Run a command of an application. Only this application is imported."""
    try:
        import typer
    except ImportError:
        sys.exit("the bellmax command needs an extra: try pip install 'bellmax[ner]'")
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    app = typer.Typer(no_args_is_help=True, help="Applications of differentiable dynamic programming.")
    for name, (title, needs) in APPLICATIONS.items():
        missing = next((module for module in needs if find_spec(module) is None), None)
        if missing and name == wanted:
            sys.exit(f"{missing} is not installed: try pip install 'bellmax[{name}]'")
        is_used = not missing and (name == wanted or "_BELLMAX_COMPLETE" in os.environ)
        commands = import_module(f"bellmax.apps.{name}.commands").app if is_used else typer.Typer(callback=lambda: None)
        app.add_typer(commands, name=name, help=f"{title} (needs the extra {name})" if missing else title)
    app()
