"""The old place of :mod:`bellmax.structures.chain`."""

from bellmax.structures.chain import Chain, ScoredChain, viterbi

__all__ = ["Chain", "ScoredChain", "viterbi"]
