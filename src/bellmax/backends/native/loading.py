"""Import of the compiled kernels, and the calls to them."""

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
    """Run a kernel with the number of threads that torch uses."""
    kernel, threads = getattr(kernels, name), torch.get_num_threads()
    try:
        return kernel(*args, threads)
    except TypeError:
        return kernel(*map(_readable, args), threads)


def _readable(argument: Any) -> Any:
    """Replace each tensor, in nested lists too, by one that kernels can read."""
    if isinstance(argument, list):
        return [_readable(element) for element in argument]
    return _materialized(argument) if isinstance(argument, Tensor) else argument


def _materialized(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: kernels cannot read negative views or functorch wrappers."""
    tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor.detach().clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def contiguous(tensors: Tensors) -> list[Tensor]:
    """Return the tensors in the memory layout that kernels require."""
    return [t.contiguous() for t in tensors]


def padded(index: Tensors, size: int) -> list[Tensor | None]:
    """Return the index tensors of a structure, followed by None up to ``size`` entries."""
    return [*[t.contiguous() for t in index], *[None] * (size - len(index))]


def empty_like(tensors: Tensors) -> list[Tensor]:
    """Allocate contiguous outputs of the same shapes and dtypes."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
