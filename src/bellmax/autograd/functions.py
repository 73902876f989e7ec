"""Derivatives of the sweeps, for every program, backend and Ω: value → expected path → Hessian product.

Each sweep is the derivative of another one. The autograd Functions here say so, for reverse and forward mode. Read them
in this order: ValueFunction, GradientFunction, LinearSweep; JvpFunction and NestedJvp are for forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bellmax.autograd.lean import LeanFunction
from bellmax.autograd.operators import Route, run, sweep
from bellmax.modes import is_checked, is_eager, needs_grad, once_dynamo_is_imported
from bellmax.tensors import inner


@dataclass(frozen=True)
class SweepRunner:
    """A route as one argument of a Function, since vmap would take a tuple apart, and the number of tensors in θ."""

    route: Route
    count: int

    def __call__(self, name: str, *args: Any) -> Any:
        return sweep(name, self.route, *args)

    def in_plain_torch(self, name: str, index: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """Return a sweep of the reference backend as a function of (*θ, …), differentiable to any order."""

        def by_reference(name: str, *args: Any) -> Any:
            return run(name, self.route.program, "reference", self.route.regularizer, *args)

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            theta, more = tensors[: self.count], tensors[self.count :]
            value, tape = by_reference("forward", theta, index)
            if name == "forward":
                return (value,)
            return tuple(by_reference(name, theta, tape, *_grouped(name, more), index))

        return of_tensors


def _grouped(name: str, more: Sequence[Tensor]) -> tuple[Any, ...]:
    """Group the arguments of a sweep after the tape: a seed, a direction shaped like θ, or both."""
    if name == "backward":
        return (more[0],)
    return (more[0], more[1:]) if name == "hessian" else (more,)


# --- derivatives


class SweepFunction(LeanFunction):
    """A Function with arguments (…, run, *θ, …), where θ has ``run.count`` tensors."""

    generate_vmap_rule = True


def _split(run: SweepRunner, tensors: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Split the arguments of a Function, which torch passes as one sequence, into θ, the tape, groups of these sizes,
    and the index."""
    groups = []
    for size in (run.count, 1, *sizes):
        groups.append(tensors[:size])
        tensors = tensors[size:]
    return [*groups, tensors]


def _zeros_for_none(tangents: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if d is None else d for d, t in zip(tangents, like, strict=True)]


def _slopes(
    run: SweepRunner, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> Tensor:
    """⟨∇DP_Ω(θ), z⟩ for each member of the batch. Shared scores are expanded, since their gradients are summed."""
    batch = theta[0].shape[0]
    expanded = [t.expand(batch, *t.shape[1:]) for t in theta]
    path = GradientFunction.apply(run, *expanded, tape, theta[0].new_ones(batch), *index)
    terms = [inner(e, d.expand(e.shape), e.ndim - 1) for e, d in zip(path, z, strict=True)]
    return sum(terms[1:], start=terms[0])


class ValueFunction(SweepFunction):
    """(run, value, *θ, tape, *index) → the value DP_Ω(θ) of the forward sweep, as a function of θ."""

    @staticmethod
    def forward(run: SweepRunner, value: Tensor, *tensors: Tensor) -> Tensor:
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
            gradient = GradientFunction.apply(ctx.run, *theta, tape, grad, *index)
        else:
            gradient = ctx.run("backward", theta, tape, grad, index)
        return None, None, *gradient, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensor:
        theta, (tape,), index = _split(ctx.run, ctx.saved_tensors)
        z = _zeros_for_none(tangents[: ctx.run.count], theta)
        slopes: Tensor = JvpFunction.apply(NestedJvp(ctx.run, "forward"), tape, *theta, *z, *index)[0]
        return slopes


class GradientFunction(SweepFunction):
    """(run, *θ, tape, seed, *index) → seed · ∇DP_Ω(θ), summed over the batch for a score that it shares.

    Its derivative in θ and the transpose of that are the Hessian product.
    """

    @staticmethod
    def forward(run: SweepRunner, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        products = LinearSweep.apply("hessian", ctx.run, *theta, tape, seed, *grads, *index)
        needs_seed = ctx.needs_input_grad[1 + ctx.run.count + 1]
        seed_bar = _slopes(ctx.run, theta, tape, grads, index) if needs_seed else None
        return None, *products, None, seed_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, (tape,), seed, index = _split(ctx.run, ctx.saved_tensors, 1)
        theta_dot, _tape_dot, seed_dot, _index_dot = _split(ctx.run, tangents, 1)
        directions = _zeros_for_none((*theta_dot, *seed_dot), (*theta, *seed))
        products: tuple[Tensor, ...] = JvpFunction.apply(
            NestedJvp(ctx.run, "backward"), tape, *theta, *seed, *directions, *index
        )
        return products


class LogTransitionsFunction(SweepFunction):
    """(run, *θ, tape, *index) → log q of every edge."""

    @staticmethod
    def forward(run: SweepRunner, *tensors: Tensor) -> tuple[Tensor, ...]:
        theta, tape, index = _split(run, tensors)
        return tuple(run("log_transitions", theta, *tape, index))

    setup_context = staticmethod(GradientFunction.setup_context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        theta, tape, index = _split(ctx.run, ctx.saved_tensors)
        products = LinearSweep.apply("log_transitions_vjp", ctx.run, *theta, *tape, *grads, *index)
        return None, *products, None, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, tape, index = _split(ctx.run, ctx.saved_tensors)
        z = _zeros_for_none(tangents[: ctx.run.count], theta)
        products: tuple[Tensor, ...] = LinearSweep.apply("log_transitions_jvp", ctx.run, *theta, *tape, *z, *index)
        return products


# The transpose of each linear sweep.
_TRANSPOSED = {
    "hessian": "hessian",
    "log_transitions_jvp": "log_transitions_vjp",
    "log_transitions_vjp": "log_transitions_jvp",
}


class LinearSweep(SweepFunction):
    """(sweep, run, *θ, tape, …, *index) → a sweep that is linear in its direction.

    Its derivatives in θ come from the reference backend.
    """

    @staticmethod
    def _split(sweep: str, run: SweepRunner, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        return _split(run, tensors, run.count + (sweep == "hessian"))

    @staticmethod
    def forward(sweep: str, run: SweepRunner, *tensors: Tensor) -> tuple[Tensor, ...]:
        theta, tape, more, index = LinearSweep._split(sweep, run, tensors)
        return tuple(run(sweep, theta, *tape, *_grouped(sweep, more), index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sweep, ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        run, count = ctx.run, ctx.run.count
        theta, tape, more, index = LinearSweep._split(ctx.sweep, run, ctx.saved_tensors)
        seeds = len(more) - count  # 1 for a sweep that takes a seed before the direction
        wanted = ctx.needs_input_grad[2 : 2 + count] + ctx.needs_input_grad[3 + count : 3 + count + seeds]
        bars: Sequence[Tensor | None] = (None,) * (count + seeds)
        if any(wanted):
            of_theta = run.in_plain_torch(ctx.sweep, index)
            direction = more[seeds:]
            bars = torch.func.vjp(lambda *t: of_theta(*t, *direction), *theta, *more[:seeds])[1](grads)
        z_bar: Sequence[Tensor | None] = (None,) * count
        if any(ctx.needs_input_grad[3 + count + seeds : 3 + 2 * count + seeds]):
            z_bar = LinearSweep.apply(_TRANSPOSED[ctx.sweep], run, *theta, *tape, *more[:seeds], *grads, *index)
        return None, None, *bars[:count], None, *bars[count:], *z_bar, *[None] * len(index)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        theta, (tape,), more, index = LinearSweep._split(ctx.sweep, ctx.run, ctx.saved_tensors)
        theta_dot, _tape_dot, more_dot, _index_dot = LinearSweep._split(ctx.sweep, ctx.run, tangents)
        directions = _zeros_for_none((*theta_dot, *more_dot), (*theta, *more))
        product: tuple[Tensor, ...] = JvpFunction.apply(
            NestedJvp(ctx.run, ctx.sweep), tape, *theta, *more, *directions, *index
        )
        return product


@dataclass(frozen=True)
class NestedJvp:
    """The directional derivative, taken ``depth`` times, of a sweep in plain torch as a function of (*θ, …)."""

    run: SweepRunner
    sweep: str
    depth: int = 0

    @property
    def size(self) -> int:
        """The number of tensors that it is a function of."""
        more = {"forward": 0, "backward": 1, "hessian": 1 + self.run.count}.get(self.sweep, self.run.count)
        return (self.run.count + more) << self.depth

    def __call__(self, index: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        function = self.run.in_plain_torch(self.sweep, index)
        for _ in range(self.depth):
            function = _directional(function)
        return function

    @property
    def derivative(self) -> NestedJvp:
        return NestedJvp(self.run, self.sweep, self.depth + 1)


def _directional(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the directional derivative of a function, by transposing it twice, since forward mode does not nest."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        primals, tangents = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        results, pull_back = torch.func.vjp(function, *primals)[:2]
        zeros = tuple(torch.zeros_like(result) for result in results)
        product: tuple[Tensor, ...] = torch.func.vjp(pull_back, zeros)[1](tangents)[0]
        return product

    return run


class JvpFunction(SweepFunction):
    """(plain, tape, *primals, *tangents, *index) → the directional derivative of a sweep.

    It is a Function, because torch silently drops the tangents of an outer forward mode from arithmetic in a jvp.
    """

    @staticmethod
    def forward(plain: NestedJvp, tape: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        product: tuple[Tensor, ...] = JvpFunction.apply(
            ctx.plain.derivative, tape, *tensors[:size], *directions, *tensors[size:]
        )
        return product


# --- the sweeps as differentiable functions


def forward(route: Route, theta: Sequence[Tensor], index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """DP_Ω(θ), (B,), and the tape, without a graph."""
    with torch.no_grad():
        value, tape = sweep("forward", route, [t.detach() for t in theta], index)
    return value, tape


def value(route: Route, theta: Sequence[Tensor], value: Tensor, tape: Tensor, index: Sequence[Tensor]) -> Tensor:
    """DP_Ω(θ), (B,), computed by :func:`forward`, as a function of θ."""
    result: Tensor = ValueFunction.apply(SweepRunner(route, len(theta)), value, *theta, tape, *index)
    return result


def expected_path(route: Route, theta: Sequence[Tensor], tape: Tensor, index: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """∇DP_Ω(θ), of θ's shapes."""
    ones = theta[0].new_ones(theta[0].shape[0])
    if _is_plain_call(theta):
        return tuple(sweep("backward", route, theta, tape, ones, index))
    path: tuple[Tensor, ...] = GradientFunction.apply(SweepRunner(route, len(theta)), *theta, tape, ones, *index)
    return path


def directional_derivative(
    route: Route, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> Tensor:
    """⟨∇DP_Ω(θ), z⟩, (B,)."""
    return _slopes(SweepRunner(route, len(theta)), theta, tape, z, index)


def hessian_product(
    route: Route, theta: Sequence[Tensor], tape: Tensor, z: Sequence[Tensor], index: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """∇²DP_Ω(θ) z, of θ's shapes."""
    ones = theta[0].new_ones(theta[0].shape[0])
    if _is_plain_call((*theta, *z)):
        return tuple(sweep("hessian", route, theta, tape, ones, z, index))
    run = SweepRunner(route, len(theta))
    product: tuple[Tensor, ...] = LinearSweep.apply("hessian", run, *theta, tape, ones, *z, *index)
    return product


def log_transitions(route: Route, theta: Sequence[Tensor], tape: Tensor, index: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """log q of every edge, of θ's shapes."""
    if _is_plain_call(theta):
        return tuple(sweep("log_transitions", route, theta, tape, index))
    log_q: tuple[Tensor, ...] = LogTransitionsFunction.apply(SweepRunner(route, len(theta)), *theta, tape, *index)
    return log_q


def sample(route: Route, theta: Sequence[Tensor], tape: Tensor, uniforms: Tensor, index: Sequence[Tensor]) -> Tensor:
    """K paths drawn with ``uniforms`` (B, K, choices), in the compact form, without gradient."""
    paths: Tensor = sweep("sample", route, [t.detach() for t in theta], tape, uniforms, index)
    return paths


def topk(route: Route, theta: Sequence[Tensor], k: int, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (B, k) of the best paths, descending, and the paths, in the compact form, without gradient."""
    result: tuple[Tensor, Tensor] = sweep("topk", route, [t.detach() for t in theta], k, index)
    return result


def node_values(route: Route, theta: Sequence[Tensor], index: Sequence[Tensor]) -> Tensor:
    """Value of each node, (B, *nodes), without gradient."""
    values: Tensor = sweep("node_values", route, [t.detach() for t in theta], index)
    return values


def max_marginals(route: Route, theta: Sequence[Tensor], index: Sequence[Tensor]) -> Tensor:
    """Score of the best path that uses each entry of an event, (B, *event), without gradient."""
    scores: Tensor = sweep("max_marginals", route, [t.detach() for t in theta], index)
    return scores


def _is_plain_call(tensors: Sequence[Tensor]) -> bool:
    """True if no gradient, tracing or forward mode is active, so no autograd.Function is needed."""
    return is_eager() and forward_ad._current_level < 0 and not needs_grad(*tensors)


# --- torch.compile


def _allow_in_graph() -> None:
    """Make Dynamo record each of these functions as one node, so that it does not trace the Functions inside."""
    # A Python Ω breaks the graph; keep Dynamo from compiling these frames.
    LeanFunction.apply = classmethod(  # type: ignore[assignment]
        torch.compiler.disable(LeanFunction.apply.__func__)  # type: ignore[attr-defined]
    )
    for function in (forward, value, expected_path, directional_derivative, hessian_product, log_transitions):
        torch.compiler.allow_in_graph(function)


once_dynamo_is_imported(_allow_in_graph)
