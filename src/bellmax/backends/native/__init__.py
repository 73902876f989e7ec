"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

from types import ModuleType

import torch  # noqa: F401  the kernels share the OpenMP runtime that torch loads: torch must come first

kernels: ModuleType | None
try:
    from bellmax import _native as kernels
except ImportError:
    kernels = None


def available() -> bool:
    """Whether the compiled kernels were installed."""
    return kernels is not None


def instructions() -> str:
    """The instruction set the kernels chose on this processor."""
    return str(kernels.instructions()) if kernels is not None else "none"
