"""The private modules that tests look into or patch. They are named here alone: when one moves, so does its line."""

from __future__ import annotations

from bellmax.autograd import functions
from bellmax.backends import BACKENDS, detour
from bellmax.backends.native import blocks, loading, short_pairs, two_states
from bellmax.backends.triton import KERNELS
from bellmax.programs.table import WARPING
from bellmax.series import collections, jobs, neighbors
from bellmax.series.blocks import value_in_blocks
from bellmax.tensors import WITHOUT_FLOAT64

__all__ = ["BACKENDS", "KERNELS", "WARPING", "WITHOUT_FLOAT64", "blocks", "collections", "detour", "functions", "jobs"]
__all__ += ["loading", "neighbors", "short_pairs", "two_states", "value_in_blocks"]
