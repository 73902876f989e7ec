"""Weighted finite automata over frames."""

from bellmax.automata.automaton import Automaton, AutomatonBatch
from bellmax.automata.decoder import CTCDecoder, CTCText, CTCWord

__all__ = ["Automaton", "AutomatonBatch", "CTCDecoder", "CTCText", "CTCWord"]
