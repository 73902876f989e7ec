"""The reference backend: plain torch for any device and any Ω, written for clarity instead of speed.

It computes in float64, or in float32 on a device without float64.
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
    """The sweeps of every structure in plain torch. Other backends are tested against them."""

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
