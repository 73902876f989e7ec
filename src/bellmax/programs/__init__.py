"""Dynamic programs without their scores, and the registry in which operators look them up by name.

A program with dedicated kernels has a file here. A program that only uses the graph engine may be defined in the file
of its structure, which calls :func:`register`.
"""

from __future__ import annotations

from bellmax.programs.automaton import AUTOMATON
from bellmax.programs.chain import ChainProgram
from bellmax.programs.charts import ChartProgram
from bellmax.programs.graph import GraphProgram
from bellmax.programs.lattice import LatticeProgram, program_of
from bellmax.programs.linear import PREFIX as _LINEAR
from bellmax.programs.linear import LinearGraphProgram, linear_program_of
from bellmax.programs.program import Program
from bellmax.programs.scored_chain import ScoredChainProgram
from bellmax.programs.segments import SEGMENTS, ScoredSegmentProgram

__all__ = [
    "AUTOMATON",
    "CHAIN",
    "GRAPH",
    "PROGRAMS",
    "SCORED_CHAIN",
    "SCORED_SEGMENTS",
    "SCORED_SEGMENTS_WITH_LAST",
    "SEGMENTS",
    "LatticeProgram",
    "LinearGraphProgram",
    "Program",
    "register",
]


class _Programs(dict[str, Program]):
    """Programs by name. Some are created on first use: the name of a lattice program contains its table, and the name
    of a linear graph program contains the names of its scores."""

    def __missing__(self, name: str) -> Program:
        program = self[name] = (linear_program_of if name.startswith(_LINEAR) else program_of)(name)
        return program


PROGRAMS = _Programs()


def register(program: Program) -> Program:
    """Let operators find a program by its name. Return the program."""
    program.paths = program.paths or program.name
    PROGRAMS[program.name] = program
    return program


GRAPH, CHAIN, SCORED_CHAIN = register(GraphProgram()), register(ChainProgram()), register(ScoredChainProgram())
register(SEGMENTS)
register(AUTOMATON)
SCORED_SEGMENTS, SCORED_SEGMENTS_WITH_LAST = (register(ScoredSegmentProgram(has_last)) for has_last in (False, True))
for _name in ("spans", "arcs", "arcs_of_one_root"):
    register(ChartProgram(_name))
