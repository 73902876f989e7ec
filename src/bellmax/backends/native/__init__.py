"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch  # noqa: F401  the kernels share the OpenMP runtime that torch loads: torch must come first


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("bellmax._native")
    except ImportError:
        return None


kernels = _load()


def available() -> bool:
    """Whether the compiled kernels were installed."""
    return kernels is not None


def instructions() -> str:
    """The instruction set the kernels chose on this processor."""
    return str(kernels.instructions()) if kernels is not None else "none"
