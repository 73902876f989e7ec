"""The private modules that tests look into or patch. They are named here alone: when one moves, so does its line."""

from __future__ import annotations

from bellmax import autograd, binary, fused
from bellmax.backends import native, sweeps

__all__ = ["autograd", "binary", "fused", "native", "sweeps"]
