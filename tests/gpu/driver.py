"""A Triton driver for an emulated GPU. Kernels are compiled as for a real GPU. :mod:`gpu.machine` executes their PTX
on the memory of CPU tensors. Specialization, cache and order of arguments are Triton's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.inside import BACKENDS, loading
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpu.machine import Machine
from gpu.memory import KernelError
from gpu.ptx import Module

triton = pytest.importorskip("triton", reason="Triton is not installed")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, with its grid and counts of instructions."""

    compiled: _Kernel
    grid: tuple[int, int, int]
    counts: Counter[str]

    @property
    def kernel(self) -> str:
        return str(self.compiled.metadata.name)

    @property
    def warps(self) -> int:
        return int(self.compiled.metadata.num_warps)


class Log(list[Launch]):
    """The launches so far."""

    @property
    def kernels(self) -> list[str]:
        return [launch.kernel for launch in self]


class _Unwritten(TorchFunctionMode):
    """Fills uninitialized memory with NaN, and records which of its bytes no kernel has written since."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, NDArray[np.bool_]]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _EMPTY and (storage := _storage(result)) is not None:
            if result.is_floating_point():
                result.fill_(torch.nan)
            self._known[storage.data_ptr()] = StorageWeakRef(storage), np.zeros(storage.nbytes(), bool)
        elif function.__name__ == "__setitem__" or re.fullmatch(r".*[^_]_", function.__name__):
            self.write(args[0] if args else kwargs["tensor"])  # the latter in torch.nn.init
        return result

    def write(self, tensor: Tensor) -> None:
        """Treat all bytes of a tensor as written."""
        if (storage := _storage(tensor)) is not None:
            self._known.pop(storage.data_ptr(), None)

    def written(self, tensor: Tensor) -> NDArray[np.bool_] | None:
        """Mask of the bytes of a tensor that were written; None if all were."""
        storage = tensor.untyped_storage()
        reference, written = self._known.get(storage.data_ptr(), (None, None))
        if reference is None or reference.expired() or reference.cdata != storage._cdata:
            return None
        start = tensor.storage_offset() * tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return written[start : start + span * tensor.element_size() * bool(tensor.numel())]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a CPU tensor; None for tensors without data on the CPU."""
    is_here = tensor.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.untyped_storage() if is_here else None


_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


class _NativeKernels:
    """The native kernels, wrapped so that the tensors they write count as written."""

    def __init__(self, kernels: Any, unwritten: _Unwritten) -> None:
        self._kernels, self._unwritten = kernels, unwritten

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)
        return partial(self._run, kernel) if callable(kernel) else kernel

    def _run(self, function: Any, *args: Any) -> Any:
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._unwritten.write(tensor)
        return function(*args)


def made(metadata: Any, stage: str) -> Path:
    """The file of a compilation stage of a kernel, from "ttir" to "cubin"."""
    cache = triton.runtime.cache.get_cache_manager(metadata.hash)
    names = metadata.name, f"@{metadata.name}"  # compiled from Python, or from "ttir"
    return next(Path(files[f"{name}.{stage}"]) for name in names if (files := cache.get_group(f"{name}.json")))


class _Kernel:
    """A compiled kernel that runs on the emulator."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata
        self.module = Module(made(metadata, "ptx").read_text())
        self.machine: Machine | None = None

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        if not x * y * z:
            return
        _stream, _function, _packed, _launch, _enter, _leave, *arguments = rest
        if not DRIVER.executes:
            DRIVER.log.append(Launch(self, (x, y, z), Counter()))
            return
        values = list(_handed_over(arguments, self.source.signature.values()))
        if self.machine is None or self.machine.grid != (x, y, z):
            self.machine = Machine(self.module, (x, y, z), 32 * self.metadata.num_warps, self.metadata.shared)
        DRIVER.launch(self, self.machine, values)


def _handed_over(arguments: Iterable[Any], kinds: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments that are not constants, also inside tuples."""
    for argument, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _handed_over(argument, kind)
        elif kind != "constexpr":
            yield argument


class Driver(triton.backends.driver.DriverBase):
    """Launches kernels on the emulator. Raises a :class:`gpu.memory.KernelError` for every fault that it detects."""

    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    launcher_cls = _Kernel

    def __init__(self) -> None:
        self.utils = _Utils()
        self.log = Log()
        self.executes = True
        self.unwritten = _Unwritten()

    def launch(self, kernel: _Kernel, machine: Machine, arguments: list[Any]) -> None:
        tensors = {i: argument for i, argument in enumerate(arguments) if isinstance(argument, Tensor)}
        written = {i: known for i, tensor in tensors.items() if (known := self.unwritten.written(tensor)) is not None}
        values = [tensors[i].detach().numpy() if i in tensors else argument for i, argument in enumerate(arguments)]
        report = machine.run(values, written)
        self.log.append(Launch(kernel, machine.grid, report.counts))
        if report.findings:
            faults = "\n".join(f"{count} × {what}" for what, count in report.findings.items())
            raise KernelError(f"{kernel.metadata.name}:\n{faults}")

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -1  # not a real stream

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


class _Utils:
    """An A100."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 166912, "multiprocessor_count": 108, "warpSize": 32}

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[Any, ...]:
        return object(), name, 0, 0, 1024


DRIVER = Driver()  # a single instance, because compiled kernels store their driver


@contextmanager
def emulated(executes: bool = True) -> Iterator[Log]:
    """Let the triton backend run on CPU tensors by emulation, or only compile. Yields the log of launches."""
    active, devices, native = triton.runtime.driver._active, _served_devices(), loading.kernels
    served = set(devices)
    DRIVER.log, DRIVER.executes = Log(), executes
    triton.runtime.driver.set_active(DRIVER)
    devices.add("cpu")
    loading.kernels = None if native is None else _NativeKernels(native, DRIVER.unwritten)
    try:
        with DRIVER.unwritten:
            yield DRIVER.log
    finally:
        triton.runtime.driver._active, loading.kernels = active, native
        devices.intersection_update(served)


def _served_devices() -> set[str]:
    backend: Any = BACKENDS.get("triton")
    return set() if backend is None else backend.devices
