"""Sweeps of chains from scores. The kernels of chains read emissions, transitions, start and end scores directly."""

from __future__ import annotations

from bellmax.backends.triton.chain import Chain


class ScoredChain(Chain):
    """Sweeps of :mod:`bellmax.programs.scored_chain`."""

    order = (1, 0, 2, 3)  # for the kernels, transitions come before emissions
