"""Value → expected path → Hessian product, wired into autograd once for every structure, backend and Ω.

The sweeps are opaque operators that know vmap but no derivatives; the Functions below give them, for reverse and
forward mode.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from bellmax.backends import sweeps
from bellmax.regularizers import Regularizer, from_kernel, inner, is_readable

# What to run: (structure, backend, α, Ω at a vertex), constants that torch.compile can write into a graph,
# or (structure, Ω) for an Ω written in Python, which the reference backend runs without an operator.
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
    "topk": "Tensor theta, int k, Tensor[] index) -> (Tensor, Tensor)",
}
_library = torch.library.Library("bellmax", "DEF")


def _sweep(name: str, structure: str, backend: str, omega: Regularizer, *args: Any) -> Any:
    module = sweeps(structure, backend)
    if name in ("forward", "topk") and is_readable(args[0]):
        module.check(args[0], args[-1])
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
            return sweeps(structure, backend).empty_paths(theta, args[1].shape[1])
        if name == "topk":
            return theta.new_empty(theta.shape[0], args[0]), sweeps(structure, backend).empty_paths(theta, args[0])
        return theta.new_empty(theta.shape)

    return shapes


def _batched(name: str) -> Callable[..., Any]:
    """The rule of vmap: the dimension it maps over is merged into the batch, which comes first."""

    def merge(info: Any, dim: int | None, tensor: Tensor) -> Tensor:
        mapped = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return mapped.flatten(0, 1)

    def split(info: Any, result: Tensor) -> Tensor:
        batch = result.shape[0] // info.batch_size
        return result.reshape(info.batch_size, batch, *result.shape[1:])

    def run(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        program, tensors, index = args[:4], args[4:-1], args[-1]
        pairs = zip(tensors, in_dims[4:-1], strict=True)
        merged = [merge(info, d, t) if isinstance(t, Tensor) else t for t, d in pairs]
        if sweeps(*program[:2]).index_is_batched:
            index = [merge(info, d, t) for t, d in zip(index, in_dims[-1], strict=True)]
        results = getattr(torch.ops.bellmax, name)(*program, *merged, index)
        if isinstance(results, Tensor):
            return split(info, results), 0
        return tuple(split(info, result) for result in results), (0,) * len(results)

    return run


for _name, _schema in _OPERATORS.items():
    _library.define(f"{_name}({_PROGRAM}, {_schema}")
    _library.impl(_name, _operator(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"bellmax::{_name}", _fake(_name), lib=_library)
    torch.library.register_vmap(f"bellmax::{_name}", _batched(_name), lib=_library)


@dataclass(frozen=True)
class _Runner:
    """A program as one argument of a Function: vmap would take a tuple apart."""

    program: Program

    def __call__(self, name: str, *args: Any) -> Any:
        if len(self.program) == 2:
            structure, omega = self.program
            return _sweep(name, structure, "reference", omega, *args)
        return getattr(torch.ops.bellmax, name)(*self.program, *args)

    def in_plain_torch(self, name: str, index: Sequence[Tensor]) -> Callable[..., Tensor]:
        """A sweep as a function of θ (and more) that autograd differentiates as often as one likes."""
        omega = self.program[1] if len(self.program) == 2 else from_kernel(*self.program[2:])
        reference = sweeps(self.program[0], "reference")

        def run(theta: Tensor, *more: Tensor) -> Tensor:
            _, tape = reference.forward(theta, index, omega)
            result: Tensor = getattr(reference, name)(theta, tape, *more, index, omega)
            return result

        return run


# --- derivatives


class _Sweep(Function):
    generate_vmap_rule = True

    def __init_subclass__(cls) -> None:
        # torch asks for the signature of forward at every call; to find it anew costs more than a small sweep.
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]


class _Value(_Sweep):
    """(run, θ, *index) → DP_Ω(θ) and the tape."""

    @staticmethod
    def forward(run: _Runner, theta: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
        value, tape = run("forward", theta, index)
        return value, tape

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.run, theta, *index = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(theta, output[1], *index)
        ctx.save_for_forward(theta, output[1], *index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        path = _Path.apply(ctx.run, theta, tape, *index)
        return None, path * grad.reshape(-1, *[1] * (theta.ndim - 1)), *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> tuple[Tensor, None]:
        theta, *rest = ctx.saved_tensors
        return inner(_Path.apply(ctx.run, theta, *rest), tangent, theta.ndim - 1), None


class _Path(_Sweep):
    """(run, θ, tape, *index) → the expected path ∇DP_Ω(θ). Its derivative, both ways, is the Hessian product."""

    @staticmethod
    def forward(run: _Runner, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
        path: Tensor = run("backward", theta, tape, index)
        return path

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        product = _Last.apply("hessian", ctx.run, theta, tape, grad, *index)
        return None, product, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        theta, tape, *index = ctx.saved_tensors
        product: Tensor = _Last.apply("hessian", ctx.run, theta, tape, tangent, *index)
        return product


class _LogTransitions(_Sweep):
    """(run, θ, tape, *index) → log q of every edge."""

    @staticmethod
    def forward(run: _Runner, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
        log_q: Tensor = run("log_transitions", theta, tape, index)
        return log_q

    setup_context = staticmethod(_Path.setup_context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, tape, *index = ctx.saved_tensors
        product = _Last.apply("log_transitions_vjp", ctx.run, theta, tape, grad, *index)
        return None, product, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        theta, tape, *index = ctx.saved_tensors
        product: Tensor = _Last.apply("log_transitions_jvp", ctx.run, theta, tape, tangent, *index)
        return product


# Each is linear in its last argument.
_TRANSPOSED = {
    "hessian": "hessian",
    "log_transitions_jvp": "log_transitions_vjp",
    "log_transitions_vjp": "log_transitions_jvp",
}


class _Last(_Sweep):
    """(sweep, run, θ, tape, z, *index) → a sweep whose own derivatives are left to the reference backend."""

    @staticmethod
    def forward(sweep: str, run: _Runner, theta: Tensor, tape: Tensor, z: Tensor, *index: Tensor) -> Tensor:
        product: Tensor = run(sweep, theta, tape, z, index)
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sweep, ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, tape, z, *index = ctx.saved_tensors
        theta_bar = z_bar = None
        if ctx.needs_input_grad[2]:
            of_theta = ctx.run.in_plain_torch(ctx.sweep, index)
            (theta_bar,) = torch.func.vjp(lambda t: of_theta(t, z), theta)[1](grad)
        if ctx.needs_input_grad[4]:
            z_bar = _Last.apply(_TRANSPOSED[ctx.sweep], ctx.run, theta, tape, grad, *index)
        return None, None, theta_bar, None, z_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, theta_dot: Tensor, ___: None, z_dot: Tensor, *____: None) -> Tensor:
        theta, _tape, z, *index = ctx.saved_tensors
        tangents = tuple(torch.zeros_like(t) if d is None else d for t, d in ((theta, theta_dot), (z, z_dot)))
        # Forward mode does not nest; the transpose of the transpose is the derivative, too.
        pull_back = torch.func.vjp(ctx.run.in_plain_torch(ctx.sweep, index), theta, z)[1]
        product: Tensor = torch.func.vjp(pull_back, torch.zeros_like(theta))[1](tangents)[0]
        return product


# --- what the rest of the library calls


def value(program: Program, theta: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
    """DP_Ω(θ), (B,), and the tape."""
    result: tuple[Tensor, Tensor] = _Value.apply(_Runner(program), theta, *index)
    return result


def expected_path(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
    """∇DP_Ω(θ), of θ's shape."""
    path: Tensor = _Path.apply(_Runner(program), theta, tape, *index)
    return path


def hessian_product(program: Program, theta: Tensor, tape: Tensor, z: Tensor, *index: Tensor) -> Tensor:
    """∇²DP_Ω(θ) z, of θ's shape."""
    product: Tensor = _Last.apply("hessian", _Runner(program), theta, tape, z, *index)
    return product


def log_transitions(program: Program, theta: Tensor, tape: Tensor, *index: Tensor) -> Tensor:
    """log q of every edge, of θ's shape."""
    log_q: Tensor = _LogTransitions.apply(_Runner(program), theta, tape, *index)
    return log_q


def sample(program: Program, theta: Tensor, tape: Tensor, uniforms: Tensor, *index: Tensor) -> Tensor:
    """K paths drawn with ``uniforms`` (B, K, choices), in the structure's own form, without gradient."""
    paths: Tensor = _Runner(program)("sample", theta.detach(), tape, uniforms, index)
    return paths


def topk(program: Program, theta: Tensor, k: int, *index: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B, k) of the best paths, descending, and the paths, in the structure's own form, without gradient."""
    result: tuple[Tensor, Tensor] = _Runner(program)("topk", theta.detach(), k, index)
    return result


# --- torch.compile


def _allow_in_graph() -> None:
    for function in (value, expected_path, hessian_product, log_transitions):
        torch.compiler.allow_in_graph(function)


class _OnceDynamoIsImported(importlib.abc.MetaPathFinder):
    """Marks the functions above for torch.compile when its front end is first imported, which costs seconds."""

    asking = False  # for the finders that come after this one

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo" or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            _allow_in_graph()

        spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


if "torch._dynamo" in sys.modules:
    _allow_in_graph()
else:
    sys.meta_path.insert(0, _OnceDynamoIsImported())
