"""The private modules that tests look into or patch. They are named here alone: when one moves, so does its line."""

from __future__ import annotations

from bellmax.autograd import functions
from bellmax.backends import BACKENDS
from bellmax.backends.native import blocks, loading, short_pairs, two_states
from bellmax.series.blocks import value_in_blocks

__all__ = ["BACKENDS", "blocks", "functions", "loading", "short_pairs", "two_states", "value_in_blocks"]
