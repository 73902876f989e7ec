"""Other libraries, if they are installed."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def without_numba(name: str) -> ModuleType:
    """Import a module with numba disabled: compiling takes longer than the tests, and loads a second OpenMP runtime."""
    reason = f"{name} is not installed: make bench does it"
    config = pytest.importorskip("numba", reason=reason).config
    compiles, config.DISABLE_JIT = config.DISABLE_JIT, 1
    try:
        pytest.importorskip(name.partition(".")[0], reason=reason)
        return importlib.import_module(name)
    finally:
        config.DISABLE_JIT = compiles
