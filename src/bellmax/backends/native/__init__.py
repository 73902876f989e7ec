"""The native backend: C++ kernels on the CPU, for float32 and float64 and every Ω that ships with bellmax."""

from __future__ import annotations

import torch

import bellmax.backends.native.loading as loading
from bellmax.backends.fused import FusedKernels
from bellmax.backends.native.automaton import NativeAutomaton
from bellmax.backends.native.charts import NativeCharts
from bellmax.backends.native.labels import NativeLabelScores
from bellmax.backends.native.lattices import NativeLattice
from bellmax.backends.native.linear import NativeLinear
from bellmax.backends.native.long_pairs import NativeLongPairs
from bellmax.backends.native.neighbors import NativeNeighbors
from bellmax.backends.native.pair_costs import NativePairCosts
from bellmax.backends.native.scored_chain import NativeScoredChain
from bellmax.backends.native.segments import NativeSegments
from bellmax.backends.native.short_pairs import NativeShortPairs
from bellmax.backends.native.sweeps import STRUCTURES, NativeSweeps
from bellmax.backends.native.two_states import NativeMarginals, NativeWeights
from bellmax.backends.protocol import Sweeps
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs import PROGRAMS, LatticeProgram, LinearGraphProgram
from bellmax.programs.automaton import AutomatonProgram
from bellmax.programs.charts import ChartProgram
from bellmax.programs.segments import ScoredSegmentProgram
from bellmax.regularizers import Kernel


def instructions() -> str:
    """The instruction set for which the kernels were compiled and that this processor has, such as "avx2"."""
    return str(loading.kernels.instructions) if loading.kernels is not None else "none"


_CPU = torch.device("cpu")


class Native:
    """Compiled sweeps for every structure, and all fused kernels."""

    name = "native"
    status = loading.status
    fused = FusedKernels(
        label_scores=NativeLabelScores(),
        chain_marginals=NativeMarginals(),
        attention_weights=NativeWeights(),
        long_pairs=NativeLongPairs(),
        short_pairs=NativeShortPairs(),
        pair_costs=NativePairCosts(),
        neighbors=NativeNeighbors(),
    )

    def __init__(self) -> None:
        chain = NativeSweeps("chain")
        self._sweeps: dict[str, Sweeps] = {structure: NativeSweeps(structure) for structure in STRUCTURES}
        self._sweeps |= {"chain": chain, "scored_chain": NativeScoredChain(chain)}

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        is_cpu = device == _CPU or device.type == "cpu"  # the type is a new string, which takes longer
        return is_cpu and loading.kernels is not None and kernel is not None

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            self._sweeps[structure] = self._make_sweeps(structure)
        return self._sweeps[structure]

    def _make_sweeps(self, structure: str) -> Sweeps:
        """The fastest sweeps of a structure that has no entry in ``STRUCTURES``."""
        program = PROGRAMS[structure]
        if isinstance(program, LatticeProgram) and NativeLattice.serves(program):
            return NativeLattice(program)
        if isinstance(program, LinearGraphProgram):
            return NativeLinear(program)
        engine = self._sweeps[program.engine]
        if isinstance(program, ChartProgram):
            return NativeCharts(program, engine)
        if isinstance(program, AutomatonProgram):
            return NativeAutomaton(program, engine)
        return (NativeSegments if isinstance(program, ScoredSegmentProgram) else Expanded)(program, engine)
