"""Whether there are compiled kernels, and whether they ran."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import bellmax as bx

MODULE = "bellmax._native"  # kernels are looked up here, by name, at every call

COMPILED = bx.backend_info()["native"] == "available"

needs_kernels = pytest.mark.skipif(not COMPILED, reason="the native kernels are not compiled")


class Call(NamedTuple):
    args: tuple[Any, ...]
    result: Any


def hessians(omega: bx.Regularizer, times: int | None = None) -> int | None:
    """How many sweeps of Hessian products :func:`took` may see: none where they are 0."""
    return 0 if isinstance(omega, bx.Hard) else times


@contextmanager
def took(name: str, times: int | None = None) -> Iterator[list[Call]]:
    """The calls of a kernel inside the ``with``, which must be so many, or at least one.

    A kernel that answers False has declined, and the general sweeps did its work: that does not count.
    """
    kernels = importlib.import_module(MODULE) if COMPILED else SimpleNamespace(**{name: None})
    run, calls = getattr(kernels, name), []

    def counted(*args: Any) -> Any:
        result = run(*args)
        if result is not False:
            calls.append(Call(args, result))
        return result

    setattr(kernels, name, counted)
    try:
        yield calls
    finally:
        setattr(kernels, name, run)
    wanted = "at least once" if times is None else f"{times} times"
    if (not calls) if times is None else (len(calls) != times):
        raise AssertionError(f"the kernel {name} must run {wanted}, and ran {len(calls)} times")


def in_two_numbers(call: Call) -> NDArray[np.bool_]:
    """True for the pairs of a call of ``lattice_backward`` or ``dtw_backward_block`` that were swept by a float and an
    integer for each cell.

    The others were swept by values in double. The tape, which is the second argument, says so in its first entry.
    """
    return np.asarray(call.args[1][:, 0].numpy() == 1)
