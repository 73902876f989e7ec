"""Replacement of the processes that ``bellmax NAME table`` starts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from bellmax_apps import runs


def train_in_this_process(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Let ``bellmax NAME table`` call ``run`` with the arguments after the name, instead of starting a process."""

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            run(*command[4:])

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=None))
