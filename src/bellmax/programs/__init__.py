"""Dynamic programs without their scores: what the sweeps and the distributions must know about each.

A program that has kernels of its own has a file here. One that runs on the graph engine alone may live beside its
structure, which calls :func:`register`.
"""

from __future__ import annotations

from bellmax.programs.chain import ChainProgram
from bellmax.programs.charts import ChartProgram
from bellmax.programs.graph import GraphProgram
from bellmax.programs.lattice import LatticeProgram, program_of
from bellmax.programs.program import Program
from bellmax.programs.scored_chain import ScoredChainProgram

__all__ = ["CHAIN", "GRAPH", "PROGRAMS", "SCORED_CHAIN", "LatticeProgram", "Program", "register"]


class _Programs(dict[str, Program]):
    """Programs by name. The name of a lattice is its table, from which its program is made."""

    def __missing__(self, name: str) -> Program:
        program = self[name] = program_of(name)
        return program


PROGRAMS = _Programs()


def register(program: Program) -> Program:
    """Let operators find a program by its name. Return the program."""
    program.paths = program.paths or program.name
    PROGRAMS[program.name] = program
    return program


GRAPH, CHAIN, SCORED_CHAIN = register(GraphProgram()), register(ChainProgram()), register(ScoredChainProgram())
for _name in ("spans", "arcs", "arcs_of_one_root"):
    register(ChartProgram(_name))
