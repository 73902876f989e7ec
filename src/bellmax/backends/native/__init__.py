"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

from typing import Any

import torch

from bellmax.backends.native import blocks, labels, loading, neighbors, short_pairs, two_states
from bellmax.backends.native.charts import NativeCharts
from bellmax.backends.native.lattices import NativeLattice, NativeRows
from bellmax.backends.native.scored_chain import NativeScoredChain
from bellmax.backends.native.sweeps import STRUCTURES, NativeSweeps
from bellmax.backends.protocol import Sweeps
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs import PROGRAMS
from bellmax.programs.charts import ChartProgram
from bellmax.programs.lattice import LatticeProgram
from bellmax.regularizers import Kernel

_SHORTCUTS: dict[str, Any] = {
    "scored_chain.labels": labels.LabelScores(),
    "scored_chain.marginals": two_states.Marginals(),
    "attention.weights": two_states.Weights(),
    "dtw.blocks": blocks.Blocks(),
    "dtw.short_pairs": short_pairs.ShortPairs(),
    "dtw.neighbors": neighbors.Neighbors(),
}


def instructions() -> str:
    """The instruction set the kernels chose on this processor."""
    return str(loading.kernels.instructions) if loading.kernels is not None else "none"


class Native:
    """Kernels near the limit of the machine."""

    name = "native"
    status = loading.status

    def __init__(self) -> None:
        chain = NativeSweeps("chain")
        self._sweeps: dict[str, Sweeps] = {structure: NativeSweeps(structure) for structure in STRUCTURES}
        self._sweeps |= {"chain": chain, "scored_chain": NativeScoredChain(chain)}

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        return loading.kernels is not None and device.type == "cpu" and kernel is not None

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            self._sweeps[structure] = self._by_other_kernels(structure)
        return self._sweeps[structure]

    def _by_other_kernels(self, structure: str) -> Sweeps:
        program = PROGRAMS[structure]
        if isinstance(program, LatticeProgram):
            for kernels in (NativeRows, NativeLattice):
                if kernels.serves(program):
                    return kernels(program)
        kind = NativeCharts if isinstance(program, ChartProgram) else Expanded
        return kind(program, self._sweeps[program.engine])

    def shortcut(self, name: str) -> Any | None:
        return _SHORTCUTS.get(name)
