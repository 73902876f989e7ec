"""The sweeps as opaque operators of torch, for torch.compile, torch.export and torch.func.

An operator has the name of its sweep. It has a rule for vmap, but no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bellmax.backends import BACKENDS
from bellmax.backends.protocol import CHECKED
from bellmax.modes import is_eager, is_plain, is_readable, once_dynamo_is_imported
from bellmax.programs import PROGRAMS
from bellmax.regularizers import Hard, Kernel, Regularizer, from_kernel

_PROGRAM = "str program, str backend, str omega, float[] parameters"
_OPERATORS = {
    "forward": "Tensor[] theta, Tensor[] index) -> (Tensor, Tensor)",
    "backward": "Tensor[] theta, Tensor tape, Tensor seed, Tensor[] index) -> Tensor[]",
    "hessian": "Tensor[] theta, Tensor tape, Tensor seed, Tensor[] z, Tensor[] index) -> Tensor[]",
    "log_transitions": "Tensor[] theta, Tensor tape, Tensor[] index) -> Tensor[]",
    "log_transitions_jvp": "Tensor[] theta, Tensor tape, Tensor[] z, Tensor[] index) -> Tensor[]",
    "log_transitions_vjp": "Tensor[] theta, Tensor tape, Tensor[] cotangent, Tensor[] index) -> Tensor[]",
    "sample": "Tensor[] theta, Tensor tape, Tensor uniforms, Tensor[] index) -> Tensor",
    "topk": "Tensor[] theta, int k, Tensor[] index) -> (Tensor, Tensor)",
    "node_values": "Tensor[] theta, Tensor[] index) -> Tensor",
    "max_marginals": "Tensor[] theta, Tensor[] index) -> Tensor",
}
_library = torch.library.Library("bellmax", "DEF")


class Route(NamedTuple):
    """The sweeps to run: the names of a program and a backend, and Ω at γ = 1.

    A :class:`Kernel` holds constants, which torch.compile can write into a graph. An Ω written in Python runs on the
    reference backend, without an operator.
    """

    program: str
    backend: str
    omega: Kernel | Regularizer

    @property
    def regularizer(self) -> Regularizer:
        return from_kernel(self.omega) if isinstance(self.omega, Kernel) else self.omega


def sweep(name: str, route: Route, *args: Any) -> Any:
    """Run a sweep: directly in eager mode on plain tensors, else as an operator."""
    if not isinstance(route.omega, Kernel):
        return _run_in_python(name, *route, *args)
    if not is_eager() or args[0][0].is_meta or not is_plain(args[0]):
        return getattr(torch.ops.bellmax, name)(*route[:2], *route.omega, *args)
    return run(name, *route[:2], from_kernel(route.omega), *args)


def run(name: str, program: str, backend: str, omega: Regularizer, *args: Any) -> Any:
    """Run a sweep directly. If the sweep needs it, the values are checked first."""
    if name == "hessian" and type(omega) is Hard:  # the Hessian of the hard max is 0
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in args[0]]
    if name in ("backward", "hessian") and not args[0][0].shape[0]:  # kernels would not write what the batch shares
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in args[0]]
    sweeps = BACKENDS[backend].sweeps(program)
    if name in CHECKED and sweeps.check is not None and is_readable(args[0][0]):
        sweeps.check(args[0], args[-1])
    return getattr(sweeps, name)(*args, omega)


def _run_in_python(*args: Any) -> Any:
    """Run a sweep under an Ω written in Python."""
    return run(*args)


def _keep_from_dynamo() -> None:
    """Keep Dynamo from tracing sweeps under an Ω written in Python, whose loops it would unroll."""
    # A Python Ω breaks the graph; keep Dynamo from compiling the sweep's frames.
    global _run_in_python
    _run_in_python = torch.compiler.disable(_run_in_python)


once_dynamo_is_imported(_keep_from_dynamo)


def _operator(name: str) -> Callable[..., Any]:
    """Return the implementation of an operator, which runs its sweep."""

    def operate(program: str, backend: str, omega: str, parameters: Sequence[float], *args: Any) -> Any:
        return run(name, program, backend, from_kernel(Kernel(omega, tuple(parameters))), *args)

    return operate


def _fake(name: str) -> Callable[..., Any]:
    """Return the shape rule of an operator, with which torch.compile traces it without running it."""

    def shapes(
        program: str, backend: str, omega: str, parameters: Sequence[float], theta: Sequence[Tensor], *args: Any
    ) -> Any:
        first = theta[0]
        if name == "forward":
            return first.new_empty(first.shape[0]), BACKENDS[backend].sweeps(program).empty_tape(theta, args[-1])
        if name == "sample":
            return PROGRAMS[program].empty_paths(theta, args[-1], args[1].shape[1])
        if name == "topk":
            return first.new_empty(first.shape[0], args[0]), PROGRAMS[program].empty_paths(theta, args[-1], args[0])
        if name == "node_values":
            return first.new_empty(first.shape[0], *PROGRAMS[program].node_shape(theta, args[-1]))
        if name == "max_marginals":
            return first.new_empty(first.shape[0], *PROGRAMS[program].event_shape(theta, args[-1]))
        return [t.new_empty(t.shape) for t in theta]

    return shapes


def _batched(name: str) -> Callable[..., Any]:
    """Return the vmap rule of an operator, which merges the mapped dimension into the batch."""

    def operate(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        route, theta, index = args[:4], args[4], args[-1]
        maps = info.batch_size

        def unmapped(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
            return tuple(size for d, size in enumerate(tensor.shape) if d != dim)

        batch = unmapped(theta[0], in_dims[4][0])[0]

        def merge(argument: Any, dim: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [merge(a, d) for a, d in zip(argument, dim, strict=True)]
            if not isinstance(argument, Tensor):
                return argument
            mapped = argument.expand(maps, *argument.shape) if dim is None else argument.movedim(dim, 0)
            return mapped.expand(maps, batch, *mapped.shape[2:]).flatten(0, 1)

        def split(result: Tensor) -> Tensor:
            return result.reshape(maps, batch, *result.shape[1:])

        merged = [merge(argument, dim) for argument, dim in zip(args[4:-1], in_dims[4:-1], strict=True)]
        if index and PROGRAMS[route[0]].index_dims is not None:
            index = merge(index, in_dims[-1])
        results = getattr(torch.ops.bellmax, name)(*route, *merged, index)
        if isinstance(results, Tensor):
            return split(results), 0
        results = [split(result) for result in results]
        if name not in ("forward", "topk"):
            # A shared tensor has batch size 1; the members' contributions are summed.
            shared = (unmapped(t, d)[0] != batch for t, d in zip(theta, in_dims[4], strict=True))
            results = [r.sum(1, keepdim=True) if s else r for r, s in zip(results, shared, strict=True)]
            return results, [0] * len(results)
        return tuple(results), (0,) * len(results)

    return operate


for _name, _schema in _OPERATORS.items():
    _library.define(f"{_name}({_PROGRAM}, {_schema}")
    _library.impl(_name, _operator(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"bellmax::{_name}", _fake(_name), lib=_library)
    torch.library.register_vmap(f"bellmax::{_name}", _batched(_name), lib=_library)
