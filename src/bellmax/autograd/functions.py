"""Value → expected path → Hessian product, wired into autograd once for every structure, backend and Ω.

The sweeps know no derivatives; the Functions here give them, for reverse and forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bellmax.autograd.lean import LeanFunction
from bellmax.autograd.operators import Program, run, sweep
from bellmax.tensors import inner
from bellmax.transforms import is_checked, is_eager, needs_grad, once_dynamo_is_imported


@dataclass(frozen=True)
class _Runner:
    """A program as one argument of a Function (vmap would take a tuple apart), and how many tensors θ consists of."""

    program: Program
    parts: int

    def __call__(self, name: str, *args: Any) -> Any:
        return sweep(name, self.program, *args)

    def in_plain_torch(self, name: str, index: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """A sweep as a function of (*θ, …) that autograd differentiates as often as one likes."""

        def by_reference(name: str, *args: Any) -> Any:
            return run(name, self.program.structure, "reference", self.program.regularizer, *args)

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            theta, more = tensors[: self.parts], tensors[self.parts :]
            value, tape = by_reference("forward", theta, index)
            if name == "forward":
                return (value,)
            return tuple(by_reference(name, theta, tape, *_grouped(name, more), index))

        return of_tensors


def _grouped(name: str, more: Sequence[Tensor]) -> tuple[Any, ...]:
    """The arguments of a sweep after the tape: a seed, or the direction it is applied to, or both."""
    if name == "backward":
        return (more[0],)
    return (more[0], more[1:]) if name == "hessian" else (more,)


# --- derivatives


class _Sweep(LeanFunction):
    """Arguments (…, run, *θ, …), where θ is ``run.parts`` tensors."""

    generate_vmap_rule = True


def _split(run: _Runner, tensors: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """θ, the tape, pieces of the given sizes, and the index."""
    pieces = []
    for size in (run.parts, 1, *sizes):
        pieces.append(tensors[:size])
        tensors = tensors[size:]
    return [*pieces, tensors]


def _zeros_for_none(tangents: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if d is None else d for d, t in zip(tangents, like, strict=True)]


def _slopes(
    run: _Runner, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> Tensor:
    """⟨∇DP_Ω(θ), z⟩ for each member of the batch, each with its own copy of what the batch shares."""
    batch = theta[0].shape[0]
    own = [t.expand(batch, *t.shape[1:]) for t in theta]
    path = _Gradient.apply(run, *own, tape, theta[0].new_ones(batch), *index)
    terms = [inner(e, d.expand(e.shape), e.ndim - 1) for e, d in zip(path, z, strict=True)]
    return sum(terms[1:], start=terms[0])


class _Value(_Sweep):
    """(run, value, *θ, tape, *index) → the value DP_Ω(θ), which the forward sweep has found, as a function of θ."""

    @staticmethod
    def forward(run: _Runner, value: Tensor, *tensors: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.run, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, (tape,), index = _split(ctx.run, ctx.saved_tensors)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            gradient = _Gradient.apply(ctx.run, *theta, tape, grad, *index)
        else:
            gradient = ctx.run("backward", theta, tape, grad, index)
        return None, None, *gradient, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensor:
        theta, (tape,), index = _split(ctx.run, ctx.saved_tensors)
        z = _zeros_for_none(tangents[: ctx.run.parts], theta)
        slopes: Tensor = _Pushed.apply(_Plain(ctx.run, "forward"), tape, *theta, *z, *index)[0]
        return slopes


class _Gradient(_Sweep):
    """(run, *θ, tape, seed, *index) → seed · ∇DP_Ω(θ), summed over the batch for what it shares.

    Its derivative in θ, both ways, is the Hessian product.
    """

    @staticmethod
    def forward(run: _Runner, *tensors: Tensor) -> tuple[Tensor, ...]:
        theta, tape, seed, index = _split(run, tensors, 1)
        return tuple(run("backward", theta, *tape, *seed, index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        theta, (tape,), (seed,), index = _split(ctx.run, ctx.saved_tensors, 1)
        products = _Last.apply("hessian", ctx.run, *theta, tape, seed, *grads, *index)
        needs_seed = ctx.needs_input_grad[1 + ctx.run.parts + 1]
        seed_bar = _slopes(ctx.run, theta, tape, grads, index) if needs_seed else None
        return None, *products, None, seed_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, (tape,), seed, index = _split(ctx.run, ctx.saved_tensors, 1)
        theta_dot, _tape_dot, seed_dot, _index_dot = _split(ctx.run, tangents, 1)
        directions = _zeros_for_none((*theta_dot, *seed_dot), (*theta, *seed))
        products: tuple[Tensor, ...] = _Pushed.apply(
            _Plain(ctx.run, "backward"), tape, *theta, *seed, *directions, *index
        )
        return products


class _LogTransitions(_Sweep):
    """(run, *θ, tape, *index) → log q of every edge."""

    @staticmethod
    def forward(run: _Runner, *tensors: Tensor) -> tuple[Tensor, ...]:
        theta, tape, index = _split(run, tensors)
        return tuple(run("log_transitions", theta, *tape, index))

    setup_context = staticmethod(_Gradient.setup_context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        theta, tape, index = _split(ctx.run, ctx.saved_tensors)
        products = _Last.apply("log_transitions_vjp", ctx.run, *theta, *tape, *grads, *index)
        return None, *products, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, tape, index = _split(ctx.run, ctx.saved_tensors)
        z = _zeros_for_none(tangents[: ctx.run.parts], theta)
        products: tuple[Tensor, ...] = _Last.apply("log_transitions_jvp", ctx.run, *theta, *tape, *z, *index)
        return products


# Each is linear in what it is applied to.
_TRANSPOSED = {
    "hessian": "hessian",
    "log_transitions_jvp": "log_transitions_vjp",
    "log_transitions_vjp": "log_transitions_jvp",
}


class _Last(_Sweep):
    """(sweep, run, *θ, tape, …, *index) → a sweep whose own derivatives are left to the reference backend."""

    @staticmethod
    def _split(sweep: str, run: _Runner, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        return _split(run, tensors, run.parts + (sweep == "hessian"))

    @staticmethod
    def forward(sweep: str, run: _Runner, *tensors: Tensor) -> tuple[Tensor, ...]:
        theta, tape, more, index = _Last._split(sweep, run, tensors)
        return tuple(run(sweep, theta, *tape, *_grouped(sweep, more), index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sweep, ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        run, parts = ctx.run, ctx.run.parts
        theta, tape, more, index = _Last._split(ctx.sweep, run, ctx.saved_tensors)
        given = len(more) - parts  # the seed, which comes before z
        wanted = ctx.needs_input_grad[2 : 2 + parts] + ctx.needs_input_grad[3 + parts : 3 + parts + given]
        bars: Sequence[Tensor | None] = (None,) * (parts + given)
        if any(wanted):
            of_theta = run.in_plain_torch(ctx.sweep, index)
            rest = more[given:]
            bars = torch.func.vjp(lambda *t: of_theta(*t, *rest), *theta, *more[:given])[1](grads)
        z_bar: Sequence[Tensor | None] = (None,) * parts
        if any(ctx.needs_input_grad[3 + parts + given : 3 + 2 * parts + given]):
            z_bar = _Last.apply(_TRANSPOSED[ctx.sweep], run, *theta, *tape, *more[:given], *grads, *index)
        return None, None, *bars[:parts], None, *bars[parts:], *z_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, (tape,), more, index = _Last._split(ctx.sweep, ctx.run, ctx.saved_tensors)
        theta_dot, _tape_dot, more_dot, _index_dot = _Last._split(ctx.sweep, ctx.run, tangents)
        directions = _zeros_for_none((*theta_dot, *more_dot), (*theta, *more))
        product: tuple[Tensor, ...] = _Pushed.apply(
            _Plain(ctx.run, ctx.sweep), tape, *theta, *more, *directions, *index
        )
        return product


@dataclass(frozen=True)
class _Plain:
    """A sweep in plain torch as a function of (*θ, …), or its directional derivative as one of that and a direction,
    and so on ``depth`` times."""

    run: _Runner
    sweep: str
    depth: int = 0

    @property
    def size(self) -> int:
        """How many tensors it is a function of."""
        more = {"forward": 0, "backward": 1, "hessian": 1 + self.run.parts}.get(self.sweep, self.run.parts)
        return (self.run.parts + more) << self.depth

    def __call__(self, index: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        function = self.run.in_plain_torch(self.sweep, index)
        for _ in range(self.depth):
            function = _pushed(function)
        return function

    @property
    def derivative(self) -> _Plain:
        return _Plain(self.run, self.sweep, self.depth + 1)


def _pushed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The directional derivative of a function. Forward mode does not nest; transposing twice does."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        primals, tangents = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        results, pull_back = torch.func.vjp(function, *primals)[:2]
        zeros = tuple(torch.zeros_like(result) for result in results)
        product: tuple[Tensor, ...] = torch.func.vjp(pull_back, zeros)[1](tangents)[0]
        return product

    return run


class _Pushed(_Sweep):
    """(plain, tape, *primals, *tangents, *index) → the directional derivative of a sweep.

    It is a Function because torch silently drops what arithmetic in a jvp would add to an outer forward mode.
    """

    @staticmethod
    def forward(plain: _Plain, tape: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        size, run = plain.size, plain.run
        primals, tangents, index = tensors[:size], tensors[size : 2 * size], tensors[2 * size :]
        if plain.depth == 0 and plain.sweep == "forward":
            return (_slopes(run, primals, tape, tangents, index),)
        if plain.depth == 0 and plain.sweep == "backward":
            (*theta, seed), (*z, seed_dot) = primals, tangents
            products = run("hessian", theta, tape, seed, z, index)
            if is_checked(seed_dot) and not bool(seed_dot.any()):
                return tuple(products)
            more = run("backward", theta, tape, seed_dot, index)
            return tuple(a + b for a, b in zip(products, more, strict=True))
        return tuple(plain.derivative(index)(*primals, *tangents))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _tape, *tensors = ctx.saved_tensors
        size = 2 * ctx.plain.size
        of_tensors = ctx.plain.derivative(tensors[size:])
        bars = torch.func.vjp(of_tensors, *tensors[:size])[1](grads)
        return None, None, *bars, *[None] * (len(tensors) - size)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        tape, *tensors = ctx.saved_tensors
        size = 2 * ctx.plain.size
        directions = _zeros_for_none(tangents[:size], tensors[:size])
        product: tuple[Tensor, ...] = _Pushed.apply(
            ctx.plain.derivative, tape, *tensors[:size], *directions, *tensors[size:]
        )
        return product


# --- what the rest of the library calls


def forward(program: Program, theta: Sequence[Tensor], index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """DP_Ω(θ), (B,), and the tape, without a graph."""
    with torch.no_grad():
        value, tape = sweep("forward", program, [t.detach() for t in theta], index)
    return value, tape


def value(program: Program, theta: Sequence[Tensor], value: Tensor, tape: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The value DP_Ω(θ), (B,), that :func:`forward` found, as a function of θ."""
    result: Tensor = _Value.apply(_Runner(program, len(theta)), value, *theta, tape, *index)
    return result


def expected_path(
    program: Program, theta: Sequence[Tensor], tape: Tensor, index: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """∇DP_Ω(θ), of θ's shapes."""
    ones = theta[0].new_ones(theta[0].shape[0])
    if _is_unseen(theta):
        return tuple(sweep("backward", program, theta, tape, ones, index))
    path: tuple[Tensor, ...] = _Gradient.apply(_Runner(program, len(theta)), *theta, tape, ones, *index)
    return path


def directional_derivative(
    program: Program, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> Tensor:
    """⟨∇DP_Ω(θ), z⟩, (B,)."""
    return _slopes(_Runner(program, len(theta)), theta, tape, z, index)


def hessian_product(
    program: Program, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """∇²DP_Ω(θ) z, of θ's shapes."""
    ones = theta[0].new_ones(theta[0].shape[0])
    if _is_unseen((*theta, *z)):
        return tuple(sweep("hessian", program, theta, tape, ones, z, index))
    run = _Runner(program, len(theta))
    product: tuple[Tensor, ...] = _Last.apply("hessian", run, *theta, tape, ones, *z, *index)
    return product


def log_transitions(
    program: Program, theta: Sequence[Tensor], tape: Tensor, index: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """log q of every edge, of θ's shapes."""
    if _is_unseen(theta):
        return tuple(sweep("log_transitions", program, theta, tape, index))
    log_q: tuple[Tensor, ...] = _LogTransitions.apply(_Runner(program, len(theta)), *theta, tape, *index)
    return log_q


def sample(
    program: Program, theta: Sequence[Tensor], tape: Tensor, uniforms: Tensor, index: Sequence[Tensor]
) -> Tensor:
    """K paths drawn with ``uniforms`` (B, K, choices), in the structure's own form, without gradient."""
    paths: Tensor = sweep("sample", program, [t.detach() for t in theta], tape, uniforms, index)
    return paths


def topk(program: Program, theta: Sequence[Tensor], k: int, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (B, k) of the best paths, descending, and the paths, in the structure's own form, without gradient."""
    result: tuple[Tensor, Tensor] = sweep("topk", program, [t.detach() for t in theta], k, index)
    return result


def _is_unseen(tensors: Sequence[Tensor]) -> bool:
    """Whether nobody differentiates or traces: then a sweep needs no Function."""
    return is_eager() and forward_ad._current_level < 0 and not needs_grad(*tensors)


# --- torch.compile


def _allow_in_graph() -> None:
    # An Ω written in Python runs eagerly where the graph breaks, and these are no frames to be compiled then.
    LeanFunction.apply = classmethod(  # type: ignore[assignment]
        torch.compiler.disable(LeanFunction.apply.__func__)  # type: ignore[attr-defined]
    )
    for function in (forward, value, expected_path, directional_derivative, hessian_product, log_transitions):
        torch.compiler.allow_in_graph(function)


once_dynamo_is_imported(_allow_in_graph)
