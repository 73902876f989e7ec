"""The backends, which run the sweeps.

- ``native``: C++ kernels on the CPU;
- ``triton``: kernels for GPUs;
- ``detour``: the CPU fallback, which copies tensors of other devices to the CPU and runs the native kernels;
- ``reference``: plain torch, for any device, any Ω and any order of derivative.

To add a backend, write a module in this package and add a line below.
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
"""All backends by name, in order of preference. The last one serves every program."""
