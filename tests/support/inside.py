"""The private modules that tests look into or patch. They are named here alone: when one moves, so does its line."""

from __future__ import annotations

from bellmax.autograd import functions, operators
from bellmax.backends.native import blocks, loading, sweeps, two_states
from bellmax.series.blocks import value_in_blocks

__all__ = ["blocks", "functions", "loading", "operators", "sweeps", "two_states", "value_in_blocks"]
