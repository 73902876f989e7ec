"""Names of :mod:`bellmax.structures.chain`, for code that imports them from here."""

from bellmax.structures.chain import Chain, ScoredChain, viterbi

__all__ = ["Chain", "ScoredChain", "viterbi"]
