"""The choice of a backend: the one that was requested, or the first that serves the program."""

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
    """Return the name of a backend. Raises ``ValueError``, which names the source of the name, if it cannot be used."""
    check_choice(source, name, BACKENDS)
    if BACKENDS[name].status != "available":
        raise ValueError(f"backend {name!r} is not available: {BACKENDS[name].status}")
    return name


_default: str | None = os.environ.get("BELLMAX_BACKEND", "").strip() or None
if _default is not None:
    _check_name(_default, "the environment variable BELLMAX_BACKEND")


class _Request(threading.local):
    """The name of the backend that this thread requests, or None. (torch.compile cannot trace a ContextVar.)"""

    def __init__(self) -> None:
        self.name = _default


_request = _Request()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Return a context manager that selects the backend of all structures that are built inside the ``with`` block.

    A structure keeps its backend after the block. If the selected backend does not support a structure or its Ω, the
    structure uses another backend. If "native" is selected for tensors on a GPU, or "triton" for tensors on the CPU,
    building a structure raises ``ValueError``.

    Args:
        name: The name of a backend: "native", "triton", "detour" or "reference". See :func:`bellmax.backend_info`.

    >>> import bellmax as bx
    >>> with bx.use_backend("reference"):
    ...     p = bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2))
    >>> p.backend
    'reference'
    """
    with restored_request(_check_name(name, "name")):
        yield


def requested_backend() -> str | None:
    """The backend that :func:`use_backend` or the environment requests in this thread; None if neither does."""
    return _request.name


@contextmanager
def restored_request(name: str | None) -> Iterator[None]:
    """Request the backend that :func:`requested_backend` returned elsewhere, even if it was None.

    Work that runs later or elsewhere than the call that it belongs to runs inside this context: tasks of a client,
    checkpoints and higher derivatives, which autograd may compute in another thread.
    """
    previous, _request.name = _request.name, _default if name is None else _check_name(name, "name")
    try:
        yield
    finally:
        _request.name = previous


@lru_cache
def _warn_slow() -> None:
    """Warn that the kernels are missing, once per process."""
    warnings.warn(
        f"bellmax runs without its compiled kernels ({BACKENDS['native'].status}): it uses the reference backend, with "
        "the same results, but tens to thousands of times slower. Install GCC 11 or later, or clang, and install "
        "bellmax again",
        RuntimeWarning,
        stacklevel=2,
    )


def choose_backend(structure: str, device: torch.device, kernel: Kernel | None) -> str:
    """The requested backend if it serves the structure under this Ω, or else the first that does.

    Raises ``ValueError`` if the requested backend does not run on the device.
    """
    requested = _request.name
    if requested is not None and BACKENDS[requested].serves(structure, device, kernel):
        return requested
    if requested == "native" and device.type != "cpu":
        raise ValueError(f"the native backend runs on the CPU, got tensors on {device}")
    if requested == "triton" and not BACKENDS[requested].serves("chain", device, Kernel("hard")):
        raise ValueError(f"the triton backend runs on GPUs, got tensors on {device}")
    for name, backend in BACKENDS.items():
        if backend.serves(structure, device, kernel):
            return name
    raise AssertionError("the reference backend serves every structure")


def backend_states(device: torch.device) -> dict[str, str]:
    """The backend that runs on a device under an Ω that ships with bellmax, and the state of the compiled ones."""
    return {
        str(device): choose_backend("chain", device, Kernel("hard")),
        "native": BACKENDS["native"].status,
        "triton": BACKENDS["triton"].status,
        "instructions": instructions(),
        "threads": str(torch.get_num_threads()),
    }


def backend_for(structure: str, device: torch.device, kernel: Kernel | None) -> str:
    """As :func:`choose_backend`, for a structure that is built now; warns if the kernels are not compiled."""
    name = choose_backend(structure, device, kernel)
    if BACKENDS["native"].status != "available" and device.type == "cpu" and not torch.compiler.is_compiling():
        _warn_slow()
    return name
