"""Whether there are compiled kernels, and whether they ran."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

import bellmax as bx

MODULE = "bellmax._native"  # kernels are looked up here, by name, at every call

needs_kernels = pytest.mark.skipif(
    bx.backend_info()["native"] != "available", reason="the native kernels are not compiled"
)


class Call(NamedTuple):
    args: tuple[Any, ...]
    result: Any


@contextmanager
def took(name: str, times: int | None = None) -> Iterator[list[Call]]:
    """The calls of a kernel inside the ``with``, which must be so many, or at least one.

    A kernel that answers False has declined, and the general sweeps did its work: that does not count.
    """
    kernels = importlib.import_module(MODULE)
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
