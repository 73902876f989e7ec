"""Skips for missing kernels, and counts of kernel calls."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import bellmax as bx

MODULE = "bellmax._native"  # the library looks kernels up in this module, by name, at every call

COMPILED = bx.backend_info()["native"] == "available"

needs_kernels = pytest.mark.skipif(not COMPILED, reason="the native kernels are not compiled")


class Call(NamedTuple):
    args: tuple[Any, ...]
    result: Any


def hessians(omega: bx.Regularizer, times: int | None = None) -> int | None:
    """Number of Hessian sweeps to expect in :func:`took`: 0 for Hard, whose Hessian is 0, else ``times``."""
    return 0 if isinstance(omega, bx.Hard) else times


@contextmanager
def took(name: str, times: int | None = None) -> Iterator[list[Call]]:
    """Record the calls of a kernel inside the ``with``, and assert that there are ``times``, or at least one.

    A call that returns False does not count: the kernel declined, and the general sweeps did the work.
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
    """True for each pair that a backward kernel of DTW swept with a float and an integer per cell.

    Other pairs were swept with values in float64. The first entry of the tape, the only real matrix among the
    arguments, tells which.
    """
    tape = next(arg for arg in call.args if isinstance(arg, Tensor) and arg.ndim == 2 and arg.is_floating_point())
    return np.asarray(tape[:, 0].numpy() == 1)
