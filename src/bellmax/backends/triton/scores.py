"""Chains from scores, by the kernels of chains: emissions, transitions, start and end are handed over as they are."""

from __future__ import annotations

from bellmax.backends.triton.chain import Chain


class ScoredChain(Chain):
    """Sweeps of :mod:`bellmax.programs.scored_chain`."""

    order = (1, 0, 2, 3)  # the kernels' first is W, the transitions
