"""Who runs the sweeps: ``native`` (C++ on the CPU), ``detour`` (the same by copies, for tensors elsewhere) or
``reference`` (plain torch: any device, Ω, order of derivative).

A new backend is a module beside these and a line below.
"""

from __future__ import annotations

from bellmax.backends.detour import Detour
from bellmax.backends.native import Native
from bellmax.backends.protocol import Backend
from bellmax.backends.reference import Reference

_native = Native()
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (_native, Detour(_native), Reference())}
"""In order of preference; the last serves everything."""
