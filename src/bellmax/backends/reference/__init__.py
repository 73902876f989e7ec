"""Plain torch: any device, any Ω, derivatives of any order by autograd. Right before fast.

It computes in float64, or in float32 on a device that has no other.
"""

from __future__ import annotations

import torch

from bellmax.backends.fused import FusedKernels
from bellmax.backends.protocol import Sweeps
from bellmax.backends.reference import chain, graph
from bellmax.backends.reference.expanded import Expanded
from bellmax.backends.reference.scored_chain import ExpandedScoredChain
from bellmax.programs import PROGRAMS
from bellmax.regularizers import Kernel

_ENGINES: dict[str, Sweeps] = {"dag": graph, "chain": chain}


class Reference:
    """The definition of every structure."""

    name = "reference"
    status = "available"
    fused = FusedKernels()

    def __init__(self) -> None:
        self._sweeps: dict[str, Sweeps] = {**_ENGINES, "scored_chain": ExpandedScoredChain(chain)}

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        return True

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            program = PROGRAMS[structure]
            self._sweeps[structure] = Expanded(program, _ENGINES[program.engine])
        return self._sweeps[structure]
