"""Which backend runs: the one that was asked for, or the first that serves."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from bellmax.backends import BACKENDS
from bellmax.backends.native import instructions
from bellmax.inputs import check_choice
from bellmax.regularizers import Kernel


def _check_name(name: str, source: str) -> str:
    check_choice(source, name, BACKENDS)
    if BACKENDS[name].status != "available":
        raise ValueError(f"backend {name!r} is not available: {BACKENDS[name].status}")
    return name


_default: str | None = os.environ.get("BELLMAX_BACKEND", "").strip() or None
if _default is not None:
    _check_name(_default, "the environment variable BELLMAX_BACKEND")


class _Choice(threading.local):
    """The backend that was asked for, in this thread. (torch.compile cannot trace a ContextVar.)"""

    def __init__(self) -> None:
        self.name = _default


_choice = _Choice()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run everything built inside the ``with`` on one backend. A structure keeps the backend it was built with.

    >>> import bellmax as bx
    >>> with bx.use_backend("reference"):
    ...     p = bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2))
    >>> p.backend
    'reference'
    """
    previous, _choice.name = _choice.name, _check_name(name, "name")
    try:
        yield
    finally:
        _choice.name = previous


def requested_backend() -> str | None:
    """The backend that :func:`use_backend` or the environment asks for in this thread."""
    return _choice.name


@lru_cache
def _warn_slow() -> None:
    warnings.warn(
        f"bellmax runs without its compiled kernels ({BACKENDS['native'].status}): "
        "using the reference backend: same results, but tens to hundreds of times slower",
        RuntimeWarning,
        stacklevel=2,
    )


def _first_to_serve(structure: str, device: torch.device, kernel: Kernel | None) -> str:
    chosen = _choice.name
    if chosen is not None and BACKENDS[chosen].serves(structure, device, kernel):
        return chosen
    if chosen == "native" and device.type != "cpu":
        raise ValueError(f"the native backend runs on the CPU, got tensors on {device}")
    if chosen == "triton" and not BACKENDS[chosen].serves("chain", device, Kernel("hard")):
        raise ValueError(f"the triton backend runs on GPUs, got tensors on {device}")
    return next(name for name, backend in BACKENDS.items() if backend.serves(structure, device, kernel))


def backend_for(structure: str, device: torch.device, kernel: Kernel | None) -> str:
    """The backend of a structure that is built now on ``device``, under a compiled Ω or one written in Python."""
    name = _first_to_serve(structure, device, kernel)
    if device.type == "cpu" and BACKENDS["native"].status != "available" and not torch.compiler.is_compiling():
        _warn_slow()
    return name


def backend_info(device: str | torch.device = "cpu") -> dict[str, str]:
    """Which backend runs on a device here, under an Ω that ships with bellmax, and why.

    ``native`` are compiled kernels on the CPU; ``triton`` are kernels for GPUs; ``detour`` are those of the CPU, for
    tensors elsewhere: those are copied to the CPU, and the results back; ``reference`` is plain torch, on the device.

    >>> import bellmax as bx
    >>> sorted(bx.backend_info())
    ['cpu', 'instructions', 'native', 'threads', 'triton']
    >>> bx.backend_info("meta")["meta"]
    'reference'
    """
    device = torch.device(device)
    return {
        str(device): _first_to_serve("chain", device, Kernel("hard")),
        "native": BACKENDS["native"].status,
        "triton": BACKENDS["triton"].status,
        "instructions": instructions(),
        "threads": str(torch.get_num_threads()),
    }
