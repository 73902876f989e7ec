"""The kernels of the CPU for tensors elsewhere: what a sweep needs is copied there, and what it finds is copied back.

Copies wait for the device: a kernel reads what it was given at once, and what goes back lies in memory that is soon
used for something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from bellmax.backends.protocol import CHECKED, Backend, Sweeps
from bellmax.programs import PROGRAMS, Program
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_CPU = torch.device("cpu")

# Those that take and give tensors, fewer than the sweeps do. The others stay away: labels pick a few scores, which the
# device can do itself, and the costs of a block are found by a function of the caller's, which may hold tensors there.
_SHORTCUTS = "scored_chain.marginals", "attention.weights", "dtw.short_pairs", "dtw.neighbors"


class Detour:
    """All that the kernels serve, on any other device that holds numbers."""

    name = "detour"

    def __init__(self, native: Backend) -> None:
        self.status, self._native = native.status, native
        self._sweeps: dict[str, Sweeps] = {}

    def serves(self, structure: str, device: torch.device, kernel: Kernel | None) -> bool:
        return device.type not in ("cpu", "meta") and self._native.serves(structure, _CPU, kernel)

    def sweeps(self, structure: str) -> Sweeps:
        if structure not in self._sweeps:
            self._sweeps[structure] = cast("Sweeps", _Sweeps(PROGRAMS[structure], self._native.sweeps(structure)))
        return self._sweeps[structure]

    def shortcut(self, name: str) -> Any | None:
        return _Shortcut(self._native.shortcut(name)) if name in _SHORTCUTS else None


class _Sweeps:
    """Every sweep is the one of that name on the CPU, where the tape stays."""

    check = None  # that of the kernels sees the copies

    def __init__(self, program: Program, kernels: Sweeps) -> None:
        self._program, self._kernels = program, kernels

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return self._kernels.empty_tape([t.new_empty(t.shape, device=_CPU) for t in theta], index)

    def __getattr__(self, name: str) -> Any:
        return partial(self._run, name)

    def _run(self, name: str, theta: Tensors, *args: Any) -> Any:
        _warn()
        *given, index, omega = args
        # A first sweep reads its tensors as they are now, whoever has changed them; the later ones want the same.
        copy = _keep if name == "forward" else _copy if name in CHECKED else _kept
        scores, given = _here(theta, copy), _here(given)
        index = [_precise(part) for part in _here(index, _kept if self._program.index_dims is None else copy)]
        if name == "sample":
            given[-1] = _precise(given[-1])
        if name in CHECKED and self._kernels.check is not None:
            self._kernels.check(scores, index)
        found = getattr(self._kernels, name)(scores, *given, index, omega)
        if name == "forward":
            value, tape = found
            return _there(value, theta[0].device), tape
        return _there(found, theta[0].device)


class _Shortcut:
    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.serves = kernels.serves

    def run(self, kernel: Kernel, *args: Any) -> Any:
        return self._run("run", kernel, args)

    def vjp(self, kernel: Kernel, *args: Any) -> Any:
        return self._run("vjp", kernel, args)

    def _run(self, name: str, kernel: Kernel, args: Any) -> Any:
        _warn()
        (device,) = {tensor.device for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        return _there(getattr(self._kernels, name)(kernel, *_here(args)), device)


@lru_cache
def _warn() -> None:
    warnings.warn(
        "bellmax has no kernels for this device: tensors are copied to the CPU, swept by its kernels, and the results "
        'copied back. To save the copies move tensors with tensor.cpu(); bx.use_backend("reference") stays on the '
        "device, in plain torch",
        RuntimeWarning,
        stacklevel=2,
    )


_copies = WeakTensorKeyDictionary()
"""Copies of tensors for as long as those live, and the versions they were made of."""


def _kept(tensor: Tensor) -> Tensor:
    """The copy that was kept, unless the tensor has changed since."""
    version, copy = _copies.get(tensor, (None, None))
    return copy if version == _version(tensor) else _keep(tensor)


def _keep(tensor: Tensor) -> Tensor:
    copy = _copy(tensor)
    _copies[tensor] = _version(tensor), copy
    return copy


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensor: Tensor) -> Tensor:
    """What is expanded crosses once."""
    small = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            small = small.narrow(dim, 0, 1)
    return small.to(_CPU).expand(tensor.shape)


def _here(argument: Any, copy: Callable[[Tensor], Tensor] = _copy) -> Any:
    """Tensors, in lists too, on the CPU."""
    if isinstance(argument, list | tuple):
        return [_here(part, copy) for part in argument]
    return copy(argument) if isinstance(argument, Tensor) and argument.device.type != "cpu" else argument


def _precise(tensor: Tensor) -> Tensor:
    """Numbers that kernels take in float64, which a device may not have."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _there(found: Any, device: torch.device) -> Any:
    """Tensors, in lists too, on a device."""
    if isinstance(found, list | tuple):
        return type(found)(_there(part, device) for part in found)
    return found.to(device) if isinstance(found, Tensor) else found
