"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

from typing import Any

import torch

from bellmax.backends.native import blocks, labels, loading, short_pairs, two_states
from bellmax.backends.native.sweeps import STRUCTURES, NativeSweeps
from bellmax.backends.protocol import Sweeps
from bellmax.regularizers import Kernel

_SHORTCUTS: dict[str, Any] = {
    "scored_chain.labels": labels.LabelScores(),
    "scored_chain.marginals": two_states.Marginals(),
    "attention.weights": two_states.Weights(),
    "dtw.blocks": blocks.Blocks(),
    "dtw.short_pairs": short_pairs.ShortPairs(),
}


def instructions() -> str:
    """The instruction set the kernels chose on this processor."""
    return str(loading.kernels.instructions) if loading.kernels is not None else "none"


class Native:
    """Kernels near the limit of the machine."""

    name = "native"
    status = loading.status

    def __init__(self) -> None:
        self._sweeps = {structure: NativeSweeps(structure) for structure in STRUCTURES}

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        is_here = loading.kernels is not None and device.type == "cpu"
        return is_here and kernel is not None and structure in self._sweeps

    def sweeps(self, structure: str) -> Sweeps:
        return self._sweeps[structure]

    def shortcut(self, name: str) -> Any | None:
        return _SHORTCUTS.get(name)
