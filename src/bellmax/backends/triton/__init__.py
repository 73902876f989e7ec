"""Triton kernels for GPUs, for float32 and float64, and for five Ω. Not yet run on GPU hardware: see docs/guide/gpu.md.

Only the modules of kernels import triton. They are imported when a tensor on a GPU first needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from bellmax.backends.fused import FusedKernels
from bellmax.backends.protocol import Backend, Sweeps
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs import PROGRAMS
from bellmax.programs.lattice import LatticeProgram
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors, wide_dtype

KERNELS = tuple(
    Kernel(*parts) for parts in (("negentropy",), ("l2",), ("hard",), ("tsallis", (1.5,)), ("tsallis", (2.0,)))
)
_SWEEPS = {"scored_chain": "scores.ScoredChain", "chain": "chain.Chain", "dag": "graph.Graph"}
_LATTICE = "lattices.Lattice"
_MAX_STATES, _MAX_MOVES = 8, 16


class Triton:
    """The backend for GPUs. Each launch has one Triton program for each member of the batch."""

    name = "triton"
    fused = FusedKernels()

    def __init__(self, others: Sequence[Backend]) -> None:
        self.devices = {"cuda", "xpu"}  # PyTorch calls ROCm devices "cuda", too
        self._others = others
        self._sweeps: dict[str, Sweeps] = {}

    @cached_property
    def status(self) -> str:
        return "available" if find_spec("triton") is not None else "triton is not installed"

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        is_supported = device.type in self.devices and kernel in KERNELS and self.status == "available"
        is_supported = is_supported and wide_dtype(device) == torch.float64  # kernels accumulate in float64
        return is_supported and _fits_kernels(structure)

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            self._sweeps[structure] = self._make_sweeps(structure)
        return self._sweeps[structure]

    def _make_sweeps(self, structure: str) -> Sweeps:
        """Import the kernels of a program, or expand it to its engine if it has none."""
        program = PROGRAMS[structure]
        if not (isinstance(program, LatticeProgram) or structure in _SWEEPS):
            return Expanded(program, self.sweeps(program.engine))
        module, _, name = _SWEEPS.get(structure, _LATTICE).partition(".")
        sweeps_class = getattr(import_module(f"bellmax.backends.triton.{module}"), name)
        return cast("Sweeps", sweeps_class(program, _FallbackSweeps(structure, self._others)))


def _fits_kernels(structure: str) -> bool:
    """True unless the program is a lattice with more states or moves than the kernels take."""
    program = PROGRAMS[structure]
    if not isinstance(program, LatticeProgram):
        return True
    return program.table.states <= _MAX_STATES and len(program.table.moves) <= _MAX_MOVES


class _FallbackSweeps:
    """Sweeps for calls that the kernels do not support, by the first backend that serves the device of θ."""

    def __init__(self, structure: str, backends: Sequence[Backend]) -> None:
        self._structure, self._backends = structure, backends

    def _sweeps_for(self, theta: Tensors, kernel: Kernel | None) -> Sweeps:
        """Return the sweeps of the first backend that serves this Ω on the device of θ."""
        device = theta[0].device
        served = (b for b in self._backends if b.serves(self._structure, device, kernel))
        return next(served).sweeps(self._structure)

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return self._sweeps_for(theta, KERNELS[0]).empty_tape(theta, index)

    def __getattr__(self, name: str) -> Any:
        def run(theta: Tensors, *args: Any) -> Any:
            return getattr(self._sweeps_for(theta, args[-1].kernel), name)(theta, *args)

        return run
