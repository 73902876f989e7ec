"""Patches for commands that start other processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from bellmax_apps import runs


def start_none(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Let ``bellmax NAME table`` train in this process: by ``run``, which gets the arguments after the name."""

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            run(*command[4:])

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=None))
