"""Other libraries, where they are installed."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def without_numba(name: str) -> ModuleType:
    """A module as plain Python: numba would compile for longer than tests run, and bring a second OpenMP runtime."""
    reason = f"{name} is not installed: make bench does it"
    config = pytest.importorskip("numba", reason=reason).config
    compiles, config.DISABLE_JIT = config.DISABLE_JIT, 1
    try:
        pytest.importorskip(name.partition(".")[0], reason=reason)
        return importlib.import_module(name)
    finally:
        config.DISABLE_JIT = compiles
