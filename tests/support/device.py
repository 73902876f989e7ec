"""A device written in Python. It uses the memory of the host, and only copies may mix it with the CPU.

It is registered as PrivateUse1 for the rest of the process, so use a separate process. Every operation checks that all
its tensors are on this device, and then runs the CPU's kernel on a view of the same memory.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "elsewhere"
DEVICE = torch.device("privateuseone", 0)  # the name before it is registered
_ON_CPU, _HERE = 1, 12  # device types of DLPack: the CPU, and an extension device

copies: list[tuple[str, tuple[int, ...], torch.dtype]] = []
"""The target device, shape and dtype of each copied tensor."""
_refused: set[torch.dtype] = set()


class _Layout(ctypes.Structure):
    """The first two fields of DLPack's DLTensor, with which a DLManagedTensor begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32))


_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _relabelled(tensor: Tensor, device: int) -> Tensor:
    """A view of the same memory on another device."""
    capsule = to_dlpack(tensor.detach())
    _Layout.from_address(_address(capsule, b"dltensor")).device = device
    return from_dlpack(capsule)


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def _to_host(tensor: Tensor) -> Tensor:
    return _relabelled(tensor, _ON_CPU) if _is_here(tensor) else tensor


def _from_host(tensor: Tensor) -> Tensor:
    if tensor.dtype in _refused:
        raise TypeError(f"the device {NAME} has no {tensor.dtype}")
    return _relabelled(tensor, _HERE)


def _check_one_device(op: Any, tensors: list[Tensor]) -> None:
    if any(not _is_here(tensor) and tensor.ndim for tensor in tensors):  # a scalar may be a 0-dimensional CPU tensor
        devices = [str(tensor.device) for tensor in tensors]
        raise RuntimeError(f"{op} expected all tensors to be on the same device, got {', '.join(devices)}")


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, form = tree_flatten((args, kwargs))
    inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    _check_one_device(op, list(inputs.values()))
    on_host = {key: _to_host(tensor) for key, tensor in inputs.items()}
    back = {id(host): inputs[key] for key, host in on_host.items()}

    def host(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return on_host[id(leaf)]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_unflatten([host(leaf) for leaf in leaves], form)
    results = op(*args, **kwargs)
    if any(isinstance(leaf, torch.device) and leaf.type == "cpu" for leaf in leaves):
        return results
    return tree_map_only(Tensor, lambda t: back[id(t)] if id(t) in back else _from_host(t), results)


def _as_strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    return torch.ops.aten.alias(x).as_strided_(size, stride, storage_offset)


def _view(x: Tensor, size: Any) -> Tensor:
    view = _to_host(x).view(size)
    return _as_strided(x, view.shape, view.stride(), x.storage_offset())


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if source.device != target.device:
        copies.append((target.device.type, tuple(target.shape), target.dtype))
    _to_host(target).copy_(_to_host(source))
    return target


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_from(source, target)


def _composites() -> Iterator[Any]:
    """Operations that torch composes from others, some by resizing, which borrowed memory cannot do."""
    for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            namespace, _, function = name.partition("::")
            packet, _, overload = function.partition(".")
            if namespace == "aten" and packet != "_to_copy":
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                if not any(result.alias_info for result in op._schema.returns):
                    yield op


_libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_OVERRIDES = {"as_strided": _as_strided, "view": _view, "_copy_from": _copy_from, "copy_": _copy}


def register() -> None:
    """Register the device with torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME)
    _libraries[0].fallback(_run, "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some replace a kernel that torch has for every device
        for op, function in (*_OVERRIDES.items(), *((op, partial(_run, op)) for op in _composites())):
            _libraries[1].impl(op, function, "PrivateUse1")


@contextmanager
def without(dtype: torch.dtype) -> Iterator[None]:
    """Make the device refuse a dtype within the ``with``."""
    _refused.add(dtype)
    try:
        yield
    finally:
        _refused.remove(dtype)
