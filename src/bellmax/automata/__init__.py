"""Weighted finite automata over frames."""

from bellmax.automata.automaton import Automaton, AutomatonBatch

__all__ = ["Automaton", "AutomatonBatch"]
