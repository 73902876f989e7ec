"""The compiled kernels, if they were installed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch  # the kernels run on the threads of the OpenMP runtime that torch has loaded: torch must come first
from torch import Tensor

from bellmax.tensors import Tensors

kernels: ModuleType | None = None
status = "available"
try:
    kernels = importlib.import_module("bellmax._native")
except ModuleNotFoundError:
    status = "not compiled"
except ImportError as error:
    status = f"not loadable: {error}"


def call(name: str, *args: Any) -> Any:
    """Run a kernel; the number of threads comes last."""
    kernel, threads = getattr(kernels, name), torch.get_num_threads()
    try:
        return kernel(*args, threads)
    except TypeError:
        return kernel(*map(_plain, args), threads)


def _plain(argument: Any) -> Any:
    """Tensors, in lists too, as kernels can read them."""
    if isinstance(argument, list):
        return [_plain(part) for part in argument]
    return _with_numbers(argument) if isinstance(argument, Tensor) else argument


def _with_numbers(tensor: Tensor) -> Tensor:
    """A tensor that has its numbers at its address: no wrapper of a transform that has ended, no negative view."""
    tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor.detach().clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def contiguous(tensors: Tensors) -> list[Tensor]:
    """Tensors as kernels take them."""
    return [t.contiguous() for t in tensors]


def padded(index: Tensors, size: int) -> list[Tensor | None]:
    """The integers of a structure, with None for those that were left out."""
    return [*contiguous(index), *[None] * (size - len(index))]


def empty_like(tensors: Tensors) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
