"""Value → expected path → Hessian product, wired into autograd once for every structure, backend and Ω.

The sweeps are opaque operators without derivatives of their own; the Functions below give them, for reverse and forward
mode and for vmap. A *program* says what to run: (structure, backend, α, Ω at a vertex), or (structure, Ω) for an Ω
written in Python, which the reference backend runs without an operator.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from bellmax.backends import sweeps
from bellmax.regularizers import Regularizer, from_kernel, inner

Program: TypeAlias = "tuple[str, str, float, float] | tuple[str, Regularizer]"

# --- operators: an operator's name is the sweep's name

_PROGRAM = "str structure, str backend, float alpha, float vertex"
_OPERATORS = {
    "forward": "Tensor theta, Tensor[] index) -> (Tensor, Tensor)",
    "backward": "Tensor theta, Tensor tape, Tensor[] index) -> Tensor",
    "hessian": "Tensor theta, Tensor tape, Tensor z, Tensor[] index) -> Tensor",
    "log_transitions": "Tensor theta, Tensor tape, Tensor[] index) -> Tensor",
    "log_transitions_jvp": "Tensor theta, Tensor tape, Tensor z, Tensor[] index) -> Tensor",
    "log_transitions_vjp": "Tensor theta, Tensor tape, Tensor cotangent, Tensor[] index) -> Tensor",
    "sample": "Tensor theta, Tensor tape, Tensor uniforms, Tensor[] index) -> Tensor",
}
_library = torch.library.Library("bellmax", "DEF")


def _sweep(name: str, structure: str, backend: str, omega: Regularizer, *args: Any) -> Any:
    module = sweeps(structure, backend)
    if name == "forward":
        module.check(*args)
    return getattr(module, name)(*args, omega)


def _operator(name: str) -> Callable[..., Any]:
    def run(structure: str, backend: str, alpha: float, vertex: float, *args: Any) -> Any:
        return _sweep(name, structure, backend, from_kernel(alpha, vertex), *args)

    return run


def _fake(name: str) -> Callable[..., Any]:
    def shapes(structure: str, backend: str, alpha: float, vertex: float, theta: Tensor, *args: Any) -> Any:
        if name == "forward":
            shape = sweeps(structure, backend).tape_shape(theta, args[-1], from_kernel(alpha, vertex))
            return theta.new_empty(theta.shape[0]), theta.new_empty(shape, dtype=torch.float64)
        if name == "sample":
            return theta.new_empty(args[1].shape[:1] + theta.shape)
        return theta.new_empty(theta.shape)

    return shapes


for _name, _schema in _OPERATORS.items():
    _library.define(f"{_name}({_PROGRAM}, {_schema}")
    _library.impl(_name, _operator(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"bellmax::{_name}", _fake(_name), lib=_library)


def _run(name: str, program: Program, *args: Any) -> Any:
    if len(program) == 2:
        structure, omega = program
        return _sweep(name, structure, "reference", omega, *args)
    return getattr(torch.ops.bellmax, name)(*program, *args)


# --- derivatives


def _fold(info: Any, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Merge the dimension that vmap maps over into the batch."""
    return [
        (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip(tensors, in_dims, strict=True)
    ]


def _unfold(info: Any, result: Tensor) -> Tensor:
    return result.unflatten(0, (info.batch_size, result.shape[0] // info.batch_size))


class _Value(Function):
    """(program, θ, *index) → DP_Ω(θ) and the tape."""

    @staticmethod
    def forward(program: Program, theta: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
        value, tape = _run("forward", program, theta, index)
        return value, tape

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.program, theta, *index = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(theta, output[1], *index)
        ctx.save_for_forward(theta, output[1], *index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        path = _Path.apply(ctx.program, theta, tape, *index)
        return None, path * grad.reshape(-1, *[1] * (theta.ndim - 1)), *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> tuple[Tensor, None]:
        theta, *rest = ctx.saved_tensors
        return inner(_Path.apply(ctx.program, theta, *rest), tangent, theta.ndim - 1), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, theta: Tensor, *index: Tensor) -> Any:
        results = _Value.apply(program, *_fold(info, in_dims[1:2], [theta]), *index)
        return tuple(_unfold(info, result) for result in results), (0, 0)


class _Path(Function):
    """(program, θ, tape, *index) → the expected path ∇DP_Ω(θ). Its derivative, both ways, is the Hessian product."""

    @staticmethod
    def forward(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
        path: Tensor = _run("backward", program, theta, tape, index)
        return path

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.program, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        product = _Last.apply("hessian", ctx.program, theta, tape, grad, *index)
        return None, product, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        theta, tape, *index = ctx.saved_tensors
        product: Tensor = _Last.apply("hessian", ctx.program, theta, tape, tangent, *index)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Any:
        return _unfold(info, _Path.apply(program, *_fold(info, in_dims[1:3], [theta, tape]), *index)), 0


class _LogTransitions(Function):
    """(program, θ, tape, *index) → log q of every edge."""

    @staticmethod
    def forward(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
        log_q: Tensor = _run("log_transitions", program, theta, tape, index)
        return log_q

    setup_context = staticmethod(_Path.setup_context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        product = _Last.apply("log_transitions_vjp", ctx.program, theta, tape, grad, *index)
        return None, product, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        theta, tape, *index = ctx.saved_tensors
        product: Tensor = _Last.apply("log_transitions_jvp", ctx.program, theta, tape, tangent, *index)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Any:
        return _unfold(info, _LogTransitions.apply(program, *_fold(info, in_dims[1:3], [theta, tape]), *index)), 0


def _from_theta(sweep: str, program: Program, index: Sequence[Tensor]) -> Callable[..., Tensor]:
    """A sweep as a function of θ (and more) in plain torch, which autograd differentiates as often as one likes."""
    omega = program[1] if len(program) == 2 else from_kernel(*program[2:])
    reference = sweeps(program[0], "reference")

    def run(theta: Tensor, *more: Tensor) -> Tensor:
        _, tape = reference.forward(theta, index, omega)
        result: Tensor = getattr(reference, sweep)(theta, tape, *more, index, omega)
        return result

    return run


class _Last(Function):
    """(sweep, program, θ, tape, z, *index) → a sweep whose own derivatives are left to the reference backend."""

    @staticmethod
    def forward(sweep: str, program: Program, theta: Tensor, tape: Tensor, z: Tensor, *index: Tensor) -> Tensor:
        product: Tensor = _run(sweep, program, theta, tape, z, index)
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sweep, ctx.program, theta, _, z, *index = inputs
        ctx.save_for_backward(theta, z, *index)
        ctx.save_for_forward(theta, z, *index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, z, *index = ctx.saved_tensors
        _, pull_back = torch.func.vjp(_from_theta(ctx.sweep, ctx.program, index), theta, z)
        theta_bar, z_bar = pull_back(grad)
        return None, None, theta_bar, None, z_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, theta_dot: Tensor, ___: None, z_dot: Tensor, *____: None) -> Tensor:
        theta, z, *index = ctx.saved_tensors
        tangents = tuple(torch.zeros_like(t) if d is None else d for t, d in ((theta, theta_dot), (z, z_dot)))
        product: Tensor = torch.func.jvp(_from_theta(ctx.sweep, ctx.program, index), (theta, z), tangents)[1]
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, sweep: str, program: Program, *tensors: Tensor) -> Any:
        folded = _fold(info, in_dims[2:5], tensors[:3])
        return _unfold(info, _Last.apply(sweep, program, *folded, *tensors[3:])), 0


# --- what the rest of the library calls


def value(program: Program, theta: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
    """DP_Ω(θ), (B,), and the tape."""
    result: tuple[Tensor, Tensor] = _Value.apply(program, theta, *index)
    return result


def expected_path(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
    """∇DP_Ω(θ), of θ's shape."""
    path: Tensor = _Path.apply(program, theta, tape, *index)
    return path


def hessian_product(program: Program, theta: Tensor, tape: Tensor, z: Tensor, *index: Tensor) -> Tensor:
    """∇²DP_Ω(θ) z, of θ's shape."""
    product: Tensor = _Last.apply("hessian", program, theta, tape, z, *index)
    return product


def log_transitions(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
    """log q of every edge, of θ's shape."""
    log_q: Tensor = _LogTransitions.apply(program, theta, tape, *index)
    return log_q


def sample(program: Program, theta: Tensor, tape: Tensor, uniforms: Tensor, *index: Tensor) -> Tensor:
    """Paths drawn with ``uniforms``: (K, *θ's shape), without gradient."""
    paths: Tensor = _run("sample", program, theta.detach(), tape, uniforms, index)
    return paths


# --- torch.compile


def _allow_in_graph() -> None:
    for function in (value, expected_path, hessian_product, log_transitions):
        torch.compiler.allow_in_graph(function)


class _OnceDynamoIsImported(importlib.abc.MetaPathFinder):
    """Marks the functions above for torch.compile when its front end is first imported, which costs seconds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: Any) -> None:
            execute(module)
            _allow_in_graph()

        spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


if "torch._dynamo" in sys.modules:
    _allow_in_graph()
else:
    sys.meta_path.insert(0, _OnceDynamoIsImported())
