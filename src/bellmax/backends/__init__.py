"""Who runs the sweeps: ``native`` (C++ on the CPU) or ``reference`` (plain torch: any device, Ω, order of derivative).

A new backend is a package beside these two and a line below.
"""

from __future__ import annotations

from bellmax.backends.native import Native
from bellmax.backends.protocol import Backend
from bellmax.backends.reference import Reference

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Native(), Reference())}
"""In order of preference; the last serves everything."""
