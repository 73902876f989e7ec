"""Who runs the sweeps: ``native`` (C++ on the CPU), ``triton`` (kernels for GPUs), ``detour`` (those of the CPU, by
copies, for tensors elsewhere) or ``reference`` (plain torch: any device, Ω, order of derivative).

A new backend is a module beside these and a line below.
"""

from __future__ import annotations

from bellmax.backends.detour import Detour
from bellmax.backends.native import Native
from bellmax.backends.protocol import Backend
from bellmax.backends.reference import Reference
from bellmax.backends.triton import Triton

_native, _reference = Native(), Reference()
_detour = Detour(_native)
_triton = Triton((_native, _detour, _reference))
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (_native, _triton, _detour, _reference)}
"""In order of preference; the last serves everything."""
