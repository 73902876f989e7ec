"""Who runs the sweeps: ``reference`` (pure torch, any device, any order of derivative) or ``native`` (C++ on the CPU).

For each structure a backend has the functions of :class:`Sweeps`.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from bellmax.backends import native
from bellmax.backends.potentials import Tensors
from bellmax.regularizers import Regularizer

NAMES = ("reference", "native")


class Sweeps(Protocol):
    """What a backend does for a structure, on a flat batch and at γ = 1.

    ``theta`` is one or more tensors, batch first; the size of the batch is the first one's, and another may have a
    batch of one, which all members share. ``index`` are the structure's integer tensors, batch first where
    ``index_is_batched``; ``tape`` is what ``forward`` keeps for the rest: batch first, and otherwise the backend's own
    business. What is of θ's shapes is summed over the batch where that shares a tensor.
    """

    index_is_batched: bool

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        """Room for the tape."""
        ...

    def empty_paths(self, theta: Tensors, count: int) -> Tensor:
        """Room for (B, count) paths in the form that ``sample`` and ``topk`` give them."""
        ...

    def check(self, theta: Tensors, index: Tensors) -> None:
        """Raise a ValueError for values that no sweep can take."""
        ...

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Value (B,) and tape."""
        ...

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        """The expected path times ``seed`` (B,), of θ's shapes."""
        ...

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Hessian product ∇²DP_Ω(θ) z times ``seed``, of θ's shapes: the tangent sweeps, forward then backward."""
        ...

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        """log q of every edge, of θ's shapes."""
        ...

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """The derivative of ``log_transitions`` applied to z, of θ's shapes."""
        ...

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """The transposed derivative of ``log_transitions`` applied to ``cotangent``, of θ's shapes."""
        ...

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        """K paths, as in ``empty_paths``, drawn with ``uniforms`` (B, K, choices)."""
        ...

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Scores (B, k) of the best paths, descending, and the paths as in ``empty_paths``."""
        ...


@lru_cache
def sweeps(structure: str, backend: str) -> Sweeps:
    reference = importlib.import_module(f"bellmax.backends.reference.{structure}")
    return native.NativeSweeps(structure, reference) if backend == "native" else cast(Sweeps, reference)


def _check_name(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if name == "native" and not native.available():
        raise ValueError(f"{source} is 'native', but that backend is {native.status}")
    return name


_default: str | None = os.environ.get("BELLMAX_BACKEND")
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


@lru_cache
def _warn_reference_serves() -> None:
    warnings.warn(
        f"bellmax runs without its compiled kernels ({native.status}): "
        "the reference backend serves, which is right but slow",
        RuntimeWarning,
        stacklevel=2,
    )


def backend_for(device: torch.device) -> str:
    """The backend of a structure that is built now on ``device``."""
    chosen = _choice.name
    if device.type != "cpu":
        if chosen == "native":
            raise ValueError(f"the native backend runs on the CPU, got tensors on {device}")
        return "reference"
    if chosen is not None:
        return chosen
    if native.available():
        return "native"
    if not torch.compiler.is_compiling():
        _warn_reference_serves()
    return "reference"


def backend_info() -> dict[str, str]:
    """What runs on the CPU here, and why.

    >>> import bellmax as bx
    >>> sorted(bx.backend_info())
    ['cpu', 'instructions', 'native', 'threads']
    """
    return {
        "cpu": _choice.name or ("native" if native.available() else "reference"),
        "native": native.status,
        "instructions": native.instructions(),
        "threads": str(torch.get_num_threads()),
    }
