"""The CPU fallback: native kernels for tensors on other devices. Arguments are copied to the CPU, and results back.

Copies are synchronous, because kernels read their arguments immediately and the output buffers are reused right after a
call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from bellmax.backends.fused import DifferentiableKernel, FusedKernel, FusedKernels
from bellmax.backends.protocol import CHECKED, Backend, Sweeps
from bellmax.programs import PROGRAMS, Program
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_CPU = torch.device("cpu")
_Problem = TypeVar("_Problem")
_Result = TypeVar("_Result")
_Saved = TypeVar("_Saved")


class Detour:
    """Everything that the native backend serves, on any other device whose tensors hold values."""

    name = "detour"

    def __init__(self, native: Backend) -> None:
        self.status, self._native = native.status, native
        self._sweeps: dict[str, Sweeps] = {}
        self.fused = _fused_on_cpu(native.fused)

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        return device.type not in ("cpu", "meta") and self._native.serves(structure, _CPU, kernel)

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            self._sweeps[structure] = cast("Sweeps", _Sweeps(PROGRAMS[structure], self._native.sweeps(structure)))
        return self._sweeps[structure]


def _fused_on_cpu(native: FusedKernels) -> FusedKernels:
    """Wrap the fused kernels that move less data than the sweeps.

    Three are left out. For ``label_scores``, the device can pick a few scores without a copy. The costs of
    ``long_pairs`` come from a function of the caller, which may hold tensors on the device. The device computes
    ``pair_costs`` itself.
    """
    return FusedKernels(
        chain_marginals=native.chain_marginals and _DifferentiableOnCpu(native.chain_marginals),
        attention_weights=native.attention_weights and _DifferentiableOnCpu(native.attention_weights),
        short_pairs=native.short_pairs and _FusedOnCpu(native.short_pairs),
        neighbors=native.neighbors and _FusedOnCpu(native.neighbors),
    )


class _Sweeps:
    """The native sweeps of one structure. The tape stays on the CPU."""

    check = None  # the native sweeps check the copies

    def __init__(self, program: Program, kernels: Sweeps) -> None:
        self._program, self._kernels = program, kernels

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return self._kernels.empty_tape([t.new_empty(t.shape, device=_CPU) for t in theta], index)

    def __getattr__(self, name: str) -> Any:
        return partial(self._run, name)

    def _run(self, name: str, theta: Tensors, *args: Any) -> Any:
        """Copy the arguments to the CPU, run a sweep of the native backend there, and copy the result back."""
        _warn()
        *arguments, index, omega = args
        # The first sweep copies θ even if a copy is saved, since the caller may have modified θ; later sweeps reuse it.
        copy = _save_copy if name == "forward" else _copy if name in CHECKED else _saved_copy
        scores, arguments = _to_cpu(theta, copy), _to_cpu(arguments)
        index = [_in_double(i) for i in _to_cpu(index, _saved_copy if self._program.index_dims is None else copy)]
        if name == "sample":
            arguments[-1] = _in_double(arguments[-1])
        if name in CHECKED and self._kernels.check is not None:
            self._kernels.check(scores, index)
        result = getattr(self._kernels, name)(scores, *arguments, index, omega)
        if name == "forward":
            value, tape = result
            return _to_device(value, theta[0].device), tape
        return _to_device(result, theta[0].device)


class _FusedOnCpu(Generic[_Problem, _Result]):
    """A fused kernel on copies of its problem."""

    def __init__(self, kernel: FusedKernel[_Problem, _Result]) -> None:
        self._kernel = kernel

    def supports(self, problem: _Problem) -> bool:
        return self._kernel.supports(problem)

    def run(self, problem: _Problem) -> _Result | None:
        _warn()
        result: _Result | None = _to_device(self._kernel.run(_on_cpu(problem)), _device_of(problem))
        return result


class _DifferentiableOnCpu(_FusedOnCpu[_Problem, _Result], Generic[_Problem, _Result, _Saved]):
    def __init__(self, kernel: DifferentiableKernel[_Problem, _Result, _Saved]) -> None:
        super().__init__(kernel)
        self._vjp = kernel.vjp

    def vjp(self, problem: _Problem, saved: _Saved, grad: Tensor) -> Tensors:
        gradients: Tensors = _to_device(self._vjp(_on_cpu(problem), _on_cpu(saved), _copy(grad)), grad.device)
        return gradients


@lru_cache
def _warn() -> None:
    """Warn about the copies, once per process."""
    warnings.warn(
        "bellmax has no kernels for this device and uses the CPU fallback: it copies the tensors to the CPU, runs its "
        "CPU kernels, and copies the results back. To avoid the copies, move the tensors with tensor.cpu(). To stay on "
        'the device in plain torch, which is slower, use bx.use_backend("reference")',
        RuntimeWarning,
        stacklevel=2,
    )


_copies = WeakTensorKeyDictionary()
"""For each tensor that is alive, its version when it was copied, and the copy."""


def _saved_copy(tensor: Tensor) -> Tensor:
    """The saved copy of a tensor, or a new one if the tensor was modified since."""
    version, copy = _copies.get(tensor, (None, None))
    return copy if version == _version(tensor) else _save_copy(tensor)


def _save_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, and save the copy for later sweeps."""
    copy = _copy(tensor)
    _copies[tensor] = _version(tensor), copy
    return copy


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU. Broadcast dimensions are transferred once."""
    small = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            small = small.narrow(dim, 0, 1)
    return small.to(_CPU).expand(tensor.shape)


def _to_cpu(argument: Any, copy: Callable[[Tensor], Tensor] = _copy) -> Any:
    """Copy the tensors of nested lists to the CPU."""
    if isinstance(argument, list | tuple):
        return [_to_cpu(element, copy) for element in argument]
    return copy(argument) if isinstance(argument, Tensor) and not argument.is_cpu else argument


def _on_cpu(argument: _Problem) -> _Problem:
    """Copy the tensors of nested named tuples to the CPU."""
    moved: _Problem = tree_map_only(Tensor, _to_cpu, argument)
    return moved


def _device_of(problem: object) -> torch.device:
    (device,) = {leaf.device for leaf in tree_leaves(problem) if isinstance(leaf, Tensor)}
    return device


def _in_double(tensor: Tensor) -> Tensor:
    """Convert numbers to float64, as kernels require; the device of the caller may not have float64."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _to_device(result: Any, device: torch.device) -> Any:
    """Copy the tensors of nested lists, tuples and named tuples to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), result)
