"""Kernels of chains: one program a sequence, one launch a sweep.

The potential of a step is W[current, previous]: one tile for each step, or one for all, which stays in registers.
Chains from scores have emissions, start and end besides, which are None for others. Tiles lie as [previous, current]:
a thread has many previous states of a current one, if the compiler does not see that these are neighbours in memory.
``unit``, their distance, is 1, and not said to be.

Negentropy with one W for all steps has its exp in registers: an exp and a log for each state, none for an edge. Where
that could lose a digit, because W and the values differ by too much, a step is computed as for any other Ω.

The tape, (B, T + 1, S), has the values of the states before each step and after the last, less the greatest of them.
What was left out is summed in float64. From scores, there is no state before the first step: all its values are −∞.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bellmax.backends.triton.launching import launch, power_of_two, warps
from bellmax.backends.triton.omega import (
    CODES,
    L2,
    NEGENTROPY,
    exponential,
    jacobian_product,
    logarithm,
    smooth_argmax,
    smooth_max,
    smooth_max_and_argmax,
    sums_to_one,
)
from bellmax.backends.triton.sweeps import PartialSweeps
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MOST_STATES = 64
_LEAST_SUM = tl.constexpr(2.0**-64)  # of products in [0, 1], below which those that vanished might have counted
_SIZES = ["steps", "states", "unit", "w_batch", "start_batch", "end_batch"]


@triton.jit
def _length(lengths: tl.tensor, mask: tl.tensor, b: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Past which no step is kept."""
    if lengths is None or mask is not None:
        return steps
    else:
        return tl.minimum(tl.load(lengths + b), steps).to(tl.int32)


@triton.jit
def _is_kept(mask: tl.tensor, step: tl.tensor) -> tl.tensor:
    if mask is None:
        return True
    else:
        return tl.load(mask + step) != 0


@triton.jit
def _scores(pointer: tl.tensor, i: tl.tensor, states: tl.tensor) -> tl.tensor:
    return tl.load(pointer + i, mask=i < states, other=float("-inf"))


@triton.jit
def _tile(
    w: tl.tensor, t: tl.tensor, length: tl.tensor, states: tl.tensor, unit: tl.tensor,
    LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """W before step t, LAG steps behind where steps have their own; −∞ where there is none."""
    i = tl.arange(0, SIZE)
    previous = states
    if VARYING:
        w += tl.cast(t - LAG, tl.int64) * states * states
        previous = tl.where((t >= LAG) & (t < length), states, 0)
    inside = (i[:, None] < previous) & (i[None, :] < states)
    return tl.load(w + i[:, None] * unit + i[None, :] * states, mask=inside, other=float("-inf"))


@triton.jit
def _store_tile(
    path: tl.tensor, t: tl.tensor, flow: tl.tensor, states: tl.tensor, unit: tl.tensor,
    LAG: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """As :func:`_tile` loads."""
    i = tl.arange(0, SIZE)
    path += tl.cast(t - LAG, tl.int64) * states * states
    inside = (i[:, None] < tl.where(t >= LAG, states, 0)) & (i[None, :] < states)
    tl.store(path + i[:, None] * unit + i[None, :] * states, flow, mask=inside)


@triton.jit
def _powers(w: tl.tensor) -> tl.tensor:
    """exp(W − the greatest of a current state), and those."""
    top = tl.max(w, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return exponential(w - top[None, :]), top


@triton.jit
def _arrive(
    w: tl.tensor, powers: tl.tensor, tops: tl.tensor, v: tl.tensor, states: tl.tensor,
    OMEGA: tl.constexpr, VARYING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """max_Ω(W + v) over the previous states and its gradient, where W may hold anything beside an impossible state."""
    if OMEGA != NEGENTROPY or VARYING:
        return smooth_max_and_argmax(_sum(w, v), OMEGA, 0)
    else:
        before = exponential(v)[:, None]
        products = tl.where(before > 0, powers * before, 0.0)
        total = tl.sum(products, 0)
        value = logarithm(total) + tops
        q = products * (1 / tl.where(total > 0, total, 1.0))[None, :]
        if tl.min(tl.where(tl.arange(0, v.shape[0]) < states, total, 1.0), 0) < _LEAST_SUM:
            value, q = smooth_max_and_argmax(_sum(w, v), OMEGA, 0)
        return value, q


@triton.jit
def _sum(w: tl.tensor, v: tl.tensor) -> tl.tensor:
    return tl.where(v[:, None] == float("-inf"), float("-inf"), w + v[:, None])


@triton.jit(do_not_specialize=_SIZES)
def chain_forward(
    w: tl.tensor, emissions: tl.tensor, start: tl.tensor, end: tl.tensor, lengths: tl.tensor, mask: tl.tensor,
    value: tl.tensor, tape: tl.tensor,
    steps: tl.tensor, states: tl.tensor, unit: tl.tensor,
    w_batch: tl.tensor, start_batch: tl.tensor, end_batch: tl.tensor,
    OMEGA: tl.constexpr, LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Value and, unless it is None, the tape."""
    b = tl.program_id(0).to(tl.int64)
    length = _length(lengths, mask, b, steps)
    i = tl.arange(0, SIZE)
    dtype = w.dtype.element_ty
    w += b * w_batch
    w_next = _tile(w, 0, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _powers(w_next)
    if emissions is None:
        v = tl.where(i == 0, 0.0, float("-inf")).to(dtype)
    else:
        v = tl.full((SIZE,), float("-inf"), dtype)
        first = _scores(start + b * start_batch, i, states)
        if OMEGA == L2:
            first -= 0.5  # Ω at a vertex
        e_next = _scores(emissions + b * steps * states, i, states)
    offset = tl.full((), 0.0, tl.float64)
    started = 0
    for t in range(length):
        if tape is not None:
            tl.store(tape + (b * (steps + 1) + t) * states + i, v, mask=i < states)
        new, _ = _arrive(w_next, powers, tops, v, states, OMEGA, VARYING)
        if VARYING:
            w_next = _tile(w, t + 1, length, states, unit, LAG, VARYING, SIZE)
        if emissions is not None:
            new = tl.where(started > 0, new, first) + e_next
            e_next = _scores(emissions + (b * steps + t + 1) * states, i, tl.where(t + 1 < length, states, 0))
        top = tl.max(new, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        kept = _is_kept(mask, b * steps + t)
        started = tl.where(kept, 1, started)
        offset += tl.where(kept, top, 0.0).to(tl.float64)
        v = tl.where(kept, new - top, v).to(dtype)
    if tape is not None:
        tl.store(tape + (b * (steps + 1) + length) * states + i, v, mask=i < states)
    if emissions is not None:
        v += _scores(end + b * end_batch, i, states)
    total = offset + smooth_max(v, OMEGA, 0).to(tl.float64)
    tl.store(value + b, tl.where(started > 0, total, 0.0).to(dtype))


@triton.jit(do_not_specialize=_SIZES)
def chain_tangent(
    w: tl.tensor, emissions: tl.tensor, start: tl.tensor, end: tl.tensor, lengths: tl.tensor, mask: tl.tensor,
    tape: tl.tensor, z_w: tl.tensor, z_e: tl.tensor, z_start: tl.tensor, tangents: tl.tensor,
    steps: tl.tensor, states: tl.tensor, unit: tl.tensor,
    w_batch: tl.tensor, start_batch: tl.tensor, end_batch: tl.tensor,
    OMEGA: tl.constexpr, LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """The derivative of the tape along z, less that of one of the greatest values; 0 at impossible states."""
    b = tl.program_id(0).to(tl.int64)
    length = _length(lengths, mask, b, steps)
    i = tl.arange(0, SIZE)
    dtype = w.dtype.element_ty
    w += b * w_batch
    z_w += b * w_batch
    w_here = _tile(w, 0, length, states, unit, LAG, VARYING, SIZE)
    z_here = _tile(z_w, 0, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _powers(w_here)
    v_dot = tl.zeros((SIZE,), dtype)
    started = 0
    for t in range(length + 1):
        at = (b * (steps + 1) + t) * states
        v = _scores(tape + at, i, states)
        anchor = tl.max(tl.where(v == 0, v_dot, float("-inf")), 0)
        v_dot = tl.where(v == float("-inf"), 0.0, v_dot - anchor).to(dtype)
        tl.store(tangents + at + i, v_dot, mask=i < states)
        if VARYING:
            w_here = _tile(w, t, length, states, unit, LAG, VARYING, SIZE)
            z_here = _tile(z_w, t, length, states, unit, LAG, VARYING, SIZE)
        _, q = _arrive(w_here, powers, tops, v, states, OMEGA, VARYING)
        new = tl.sum(tl.where(q > 0, q * (z_here + v_dot[:, None]), 0.0), 0)
        if emissions is not None:
            new = tl.where(started > 0, new, _scores(z_start + b * start_batch, i, states))
            new += _scores(z_e + (b * steps + t) * states, i, tl.where(t < length, states, 0))
        kept = _is_kept(mask, b * steps + tl.minimum(t, length - 1))
        started = tl.where(kept, 1, started)
        v_dot = tl.where(kept, new, v_dot).to(dtype)


@triton.jit
def _into_end(
    end: tl.tensor, tape: tl.tensor, tangents: tl.tensor, z_end: tl.tensor, at: tl.tensor, end_at: tl.tensor,
    states: tl.tensor, OMEGA: tl.constexpr, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """q of the edges into the end, and its derivative if there are tangents, or itself again."""
    i = tl.arange(0, SIZE)
    v = _scores(tape + at, i, states)
    if end is not None:
        v += _scores(end + end_at, i, states)
    q = sums_to_one(smooth_argmax(v, OMEGA, 0), 0)
    if tangents is None:
        return q, q
    else:
        y = _scores(tangents + at, i, states)
        if end is not None:
            y += _scores(z_end + end_at, i, states)
        return q, jacobian_product(q, y, OMEGA, 0)


@triton.jit(do_not_specialize=_SIZES)
def chain_backward(
    w: tl.tensor, emissions: tl.tensor, start: tl.tensor, end: tl.tensor, lengths: tl.tensor, mask: tl.tensor,
    tape: tl.tensor, seed: tl.tensor, tangents: tl.tensor, z_w: tl.tensor, z_end: tl.tensor,
    w_path: tl.tensor, e_path: tl.tensor, start_path: tl.tensor, end_path: tl.tensor,
    steps: tl.tensor, states: tl.tensor, unit: tl.tensor,
    w_batch: tl.tensor, start_batch: tl.tensor, end_batch: tl.tensor,
    OMEGA: tl.constexpr, LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """The expected path times the seed or, with ``tangents`` of the tape along z, its derivative: the Hessian product.

    Each program has paths of its own for what the batch shares.
    """
    b = tl.program_id(0).to(tl.int64)
    length, row = _length(lengths, mask, b, steps), b * (steps + 1)
    i = tl.arange(0, SIZE)
    j = i[None, :]
    mass, node = _into_end(end, tape, tangents, z_end, (row + length) * states, b * end_batch, states, OMEGA, SIZE)
    scale = tl.load(seed + b)
    mass, node = (mass * scale)[None, :], (node * scale)[None, :]  # rows: a thread has few entries of those
    if emissions is not None:
        tl.store(end_path + b * states + j, node, mask=j < states)
    w += b * w_batch
    w_path += b * (steps - LAG if VARYING else 1) * states * states
    w_next = _tile(w, length - 1, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _powers(w_next)
    v_next = _scores(tape + (row + tl.maximum(length - 1, 0)) * states, i, states)
    first, every = tl.zeros_like(node), tl.zeros_like(w_next)
    for n in range(length):
        t = length - 1 - n
        if tangents is not None:  # there are too few registers to have these before, or their addresses all the time
            one = unit + t * (unit - 1)
            w_next = _tile(w, t, length, states, one, LAG, VARYING, SIZE)
            v_next = _scores(tape + (row + t) * states, i, states)
        _, q = _arrive(w_next, powers, tops, v_next, states, OMEGA, VARYING)
        q = sums_to_one(q, 0)
        if tangents is None:
            if VARYING:
                w_next = _tile(w, t - 1, length, states, unit, LAG, VARYING, SIZE)
            v_next = _scores(tape + (row + tl.maximum(t - 1, 0)) * states, i, states)
        kept = _is_kept(mask, b * steps + t)
        flow = q * node
        if tangents is not None:
            y = _tile(z_w + b * w_batch, t, length, states, one, LAG, VARYING, SIZE)
            y += _scores(tangents + (row + t) * states, i, states)[:, None]
            flow += tl.where(mass != 0, jacobian_product(q, y, OMEGA, 0) * mass, 0.0)
            mass = tl.where(kept, tl.sum(q * mass, 1)[None, :], mass)
        flow = tl.where(kept, flow, 0.0)
        if VARYING:
            _store_tile(w_path, t, flow, states, unit, LAG, SIZE)
        else:
            every += flow
        if emissions is not None:
            tl.store(e_path + (b * steps + t) * states + j, tl.where(kept, node, 0.0), mask=j < states)
            first = tl.where(kept, node, first)
        node = tl.where(kept, tl.sum(flow, 1)[None, :], node)
    if emissions is not None:
        tl.store(start_path + b * states + j, first, mask=j < states)
    if not VARYING:
        _store_tile(w_path, LAG, every, states, unit, LAG, SIZE)
    for t in range(length, steps):
        if VARYING:
            _store_tile(w_path, t, tl.zeros_like(every), states, unit, LAG, SIZE)
        if emissions is not None:
            tl.store(e_path + (b * steps + t) * states + j, tl.zeros_like(first), mask=j < states)


class Parts(NamedTuple):
    """The tensors of a chain, as kernels take them."""

    w: Tensor
    emissions: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None


class Chain(PartialSweeps):
    """Sweeps of chains of up to 64 states."""

    order: tuple[int, ...] = (0,)
    """Of θ's tensors among the parts, and the other way round."""

    def takes(self, theta: Tensors) -> bool:
        return theta[0].numel() > 0 and theta[0].shape[-1] <= _MOST_STATES

    def _parts(self, theta: Tensors) -> Parts:
        return Parts(*(theta[place].contiguous() for place in self.order))

    def _launch(self, kernel: Any, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> None:
        batch, steps, states = theta[0].shape[:3]
        parts, size = self._parts(theta), power_of_two(states)
        lengths, mask = (*(part.contiguous() for part in index), None, None)[:2]
        assert omega.kernel is not None
        launch(
            kernel,
            batch,
            *parts,
            lengths,
            mask,
            *args,
            steps,
            states,
            1,
            *(
                0 if part is None or part.shape[0] == 1 else part.stride(0)
                for part in (parts.w, parts.start, parts.end)
            ),
            OMEGA=CODES[omega.kernel],
            LAG=int(parts.emissions is not None),
            VARYING=parts.w.ndim == 4,
            SIZE=size,
            num_warps=warps(size * size),
        )

    def _empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        batch, steps, states = theta[0].shape[:3]
        return theta[0].new_empty((batch, steps + 1, states))

    def _value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0])
        self._launch(chain_forward, theta, index, omega, value, None)
        return value

    def _forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        value, tape = theta[0].new_empty(theta[0].shape[0]), self._empty_tape(theta, index)
        self._launch(chain_forward, theta, index, omega, value, tape)
        return value, tape

    def _backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._walk_back(theta, tape, seed, (None, None, None), index, omega)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Two launches: the second reads what the first wrote, and nothing orders that within one."""
        tape, tangents = tape.contiguous(), self._empty_tape(theta, index)
        z_w, z_e, z_start, z_end = self._parts(z)
        self._launch(chain_tangent, theta, index, omega, tape, z_w, z_e, z_start, tangents)
        return self._walk_back(theta, tape, seed, (tangents, z_w, z_end), index, omega)

    def _walk_back(
        self, theta: Tensors, tape: Tensor, seed: Tensor, along: Any, index: Tensors, omega: Regularizer
    ) -> Tensors:
        batch = theta[0].shape[0]
        paths = [theta[place].new_empty((batch, *theta[place].shape[1:])) for place in self.order]
        given = tape.contiguous(), seed.contiguous(), *along, *Parts(*paths)
        self._launch(chain_backward, theta, index, omega, *given)
        shared = (theta[place].shape[0] < batch for place in self.order)
        sums = [path.sum(0, keepdim=True) if one else path for path, one in zip(paths, shared, strict=True)]
        return [sums[place] for place in self.order]
