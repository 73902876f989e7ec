"""Kernels of chains: one program per sequence, one launch per sweep.

The potentials of a step are a tile W[current, previous]: one tile for each step (VARYING), or one for all steps, which
stays in registers. Chains from scores also have emissions, start and end scores, which are None for other chains. In
registers, tiles are [previous, current], so that a thread reduces over the previous states. The compiler would choose
another layout if it could see that they are contiguous in memory. So ``unit``, their stride, is an argument that is not
specialized, although it is always 1.

Under negentropy with one W for all steps, exp(W) stays in registers: a step needs an exp and a log for each state, not
for each edge. If that could underflow, because W and the values differ by too much, the step is computed as for any
other Ω.

The tape, (B, T + 1, S), contains the values of the states before each step and after the last one, minus their maximum.
The maxima are summed in float64. For chains from scores, all values before the first step are −∞.
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

_MAX_STATES = 64
_MIN_SUM = tl.constexpr(2.0**-64)  # in a smaller sum of products, the terms that underflowed could matter
_SIZES = ["steps", "states", "unit", "w_batch", "start_batch", "end_batch"]


@triton.jit
def _num_steps(lengths: tl.tensor, mask: tl.tensor, b: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """Return the number of steps of sequence b. With a mask, it is the number of all steps."""
    if lengths is None or mask is not None:
        return steps
    else:
        return tl.minimum(tl.load(lengths + b), steps).to(tl.int32)


@triton.jit
def _is_kept(mask: tl.tensor, step: tl.tensor) -> tl.tensor:
    """True if a step is not masked. ``step`` is its offset in the mask."""
    if mask is None:
        return True
    else:
        return tl.load(mask + step) != 0


@triton.jit
def _load_states(pointer: tl.tensor, i: tl.tensor, states: tl.tensor) -> tl.tensor:
    """Load one number per state, −∞ for i ≥ states."""
    return tl.load(pointer + i, mask=i < states, other=float("-inf"))


@triton.jit
def _load_tile(
    w: tl.tensor, t: tl.tensor, length: tl.tensor, states: tl.tensor, unit: tl.tensor,
    LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load W of step t as a tile [previous, current], −∞ outside the states and outside the steps.

    LAG is 1 for chains from scores, whose transitions start at the second step, and 0 for other chains.
    """
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
    """Store a tile of step t where :func:`_load_tile` loads it."""
    i = tl.arange(0, SIZE)
    path += tl.cast(t - LAG, tl.int64) * states * states
    inside = (i[:, None] < tl.where(t >= LAG, states, 0)) & (i[None, :] < states)
    tl.store(path + i[:, None] * unit + i[None, :] * states, flow, mask=inside)


@triton.jit
def _exponentials(w: tl.tensor) -> tl.tensor:
    """Return exp(W − maximum), where the maximum is over the previous states, and the maxima (0 instead of −∞)."""
    top = tl.max(w, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return exponential(w - top[None, :]), top


@triton.jit
def _max_over_previous(
    w: tl.tensor, powers: tl.tensor, tops: tl.tensor, v: tl.tensor, states: tl.tensor,
    OMEGA: tl.constexpr, VARYING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return max_Ω(W + v) over the previous states, and its gradient, a tile.

    ``powers`` and ``tops`` are the results of ``_exponentials(w)``. Where v is −∞, W is ignored and may be NaN.
    """
    if OMEGA != NEGENTROPY or VARYING:
        return smooth_max_and_argmax(_add_values(w, v), OMEGA, 0)
    else:
        before = exponential(v)[:, None]
        products = tl.where(before > 0, powers * before, 0.0)
        total = tl.sum(products, 0)
        value = logarithm(total) + tops
        q = products * (1 / tl.where(total > 0, total, 1.0))[None, :]
        if tl.min(tl.where(tl.arange(0, v.shape[0]) < states, total, 1.0), 0) < _MIN_SUM:
            value, q = smooth_max_and_argmax(_add_values(w, v), OMEGA, 0)
        return value, q


@triton.jit
def _add_values(w: tl.tensor, v: tl.tensor) -> tl.tensor:
    """Return W + v of the previous states, −∞ where v is −∞, even if W is NaN."""
    return tl.where(v[:, None] == float("-inf"), float("-inf"), w + v[:, None])


@triton.jit(do_not_specialize=_SIZES)
def chain_forward(
    w: tl.tensor, emissions: tl.tensor, start: tl.tensor, end: tl.tensor, lengths: tl.tensor, mask: tl.tensor,
    value: tl.tensor, tape: tl.tensor,
    steps: tl.tensor, states: tl.tensor, unit: tl.tensor,
    w_batch: tl.tensor, start_batch: tl.tensor, end_batch: tl.tensor,
    OMEGA: tl.constexpr, LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the value of each sequence and, unless it is None, the tape."""
    b = tl.program_id(0).to(tl.int64)
    length = _num_steps(lengths, mask, b, steps)
    i = tl.arange(0, SIZE)
    dtype = w.dtype.element_ty
    w += b * w_batch
    w_next = _load_tile(w, 0, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _exponentials(w_next)
    if emissions is None:
        v = tl.where(i == 0, 0.0, float("-inf")).to(dtype)
    else:
        v = tl.full((SIZE,), float("-inf"), dtype)
        first = _load_states(start + b * start_batch, i, states)
        if OMEGA == L2:
            first -= 0.5  # Ω at a vertex
        e_next = _load_states(emissions + b * steps * states, i, states)
    offset = tl.full((), 0.0, tl.float64)
    has_started = 0
    for t in range(length):
        if tape is not None:
            tl.store(tape + (b * (steps + 1) + t) * states + i, v, mask=i < states)
        new, _ = _max_over_previous(w_next, powers, tops, v, states, OMEGA, VARYING)
        if VARYING:
            w_next = _load_tile(w, t + 1, length, states, unit, LAG, VARYING, SIZE)
        if emissions is not None:
            new = tl.where(has_started > 0, new, first) + e_next
            e_next = _load_states(emissions + (b * steps + t + 1) * states, i, tl.where(t + 1 < length, states, 0))
        top = tl.max(new, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        is_kept = _is_kept(mask, b * steps + t)
        has_started = tl.where(is_kept, 1, has_started)
        offset += tl.where(is_kept, top, 0.0).to(tl.float64)
        v = tl.where(is_kept, new - top, v).to(dtype)
    if tape is not None:
        tl.store(tape + (b * (steps + 1) + length) * states + i, v, mask=i < states)
    if emissions is not None:
        v += _load_states(end + b * end_batch, i, states)
    total = offset + smooth_max(v, OMEGA, 0).to(tl.float64)
    tl.store(value + b, tl.where(has_started > 0, total, 0.0).to(dtype))


@triton.jit(do_not_specialize=_SIZES)
def chain_tangent(
    w: tl.tensor, emissions: tl.tensor, start: tl.tensor, end: tl.tensor, lengths: tl.tensor, mask: tl.tensor,
    tape: tl.tensor, z_w: tl.tensor, z_e: tl.tensor, z_start: tl.tensor, tangents: tl.tensor,
    steps: tl.tensor, states: tl.tensor, unit: tl.tensor,
    w_batch: tl.tensor, start_batch: tl.tensor, end_batch: tl.tensor,
    OMEGA: tl.constexpr, LAG: tl.constexpr, VARYING: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the derivative of the tape along z: as the tape is relative to its maximum, so are the derivatives.

    They are 0 at states with the value −∞.
    """
    b = tl.program_id(0).to(tl.int64)
    length = _num_steps(lengths, mask, b, steps)
    i = tl.arange(0, SIZE)
    dtype = w.dtype.element_ty
    w += b * w_batch
    z_w += b * w_batch
    w_tile = _load_tile(w, 0, length, states, unit, LAG, VARYING, SIZE)
    z_tile = _load_tile(z_w, 0, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _exponentials(w_tile)
    v_dot = tl.zeros((SIZE,), dtype)
    has_started = 0
    for t in range(length + 1):
        row = (b * (steps + 1) + t) * states
        v = _load_states(tape + row, i, states)
        at_maximum = tl.max(tl.where(v == 0, v_dot, float("-inf")), 0)
        v_dot = tl.where(v == float("-inf"), 0.0, v_dot - at_maximum).to(dtype)
        tl.store(tangents + row + i, v_dot, mask=i < states)
        if VARYING:
            w_tile = _load_tile(w, t, length, states, unit, LAG, VARYING, SIZE)
            z_tile = _load_tile(z_w, t, length, states, unit, LAG, VARYING, SIZE)
        _, q = _max_over_previous(w_tile, powers, tops, v, states, OMEGA, VARYING)
        new = tl.sum(tl.where(q > 0, q * (z_tile + v_dot[:, None]), 0.0), 0)
        if emissions is not None:
            new = tl.where(has_started > 0, new, _load_states(z_start + b * start_batch, i, states))
            new += _load_states(z_e + (b * steps + t) * states, i, tl.where(t < length, states, 0))
        is_kept = _is_kept(mask, b * steps + tl.minimum(t, length - 1))
        has_started = tl.where(is_kept, 1, has_started)
        v_dot = tl.where(is_kept, new, v_dot).to(dtype)


@triton.jit
def _end_probabilities(
    end: tl.tensor, tape: tl.tensor, tangents: tl.tensor, z_end: tl.tensor, row: tl.tensor, end_row: tl.tensor,
    states: tl.tensor, OMEGA: tl.constexpr, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return q of the edges into the end node, and its derivative. Without tangents, return q twice.

    ``row`` is the offset of the last row of the tape, ``end_row`` the offset of the end scores.
    """
    i = tl.arange(0, SIZE)
    v = _load_states(tape + row, i, states)
    if end is not None:
        v += _load_states(end + end_row, i, states)
    q = sums_to_one(smooth_argmax(v, OMEGA, 0), 0)
    if tangents is None:
        return q, q
    else:
        y = _load_states(tangents + row, i, states)
        if end is not None:
            y += _load_states(z_end + end_row, i, states)
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
    """Write the expected path times the seed or, with ``tangents`` of the tape along z, the Hessian product.

    ``node`` is the mass of the states, or its derivative. ``mass`` is always the mass. If the batch shares a tensor,
    each program writes a separate result, and the caller adds them.
    """
    b = tl.program_id(0).to(tl.int64)
    length, row = _num_steps(lengths, mask, b, steps), b * (steps + 1)
    i = tl.arange(0, SIZE)
    j = i[None, :]
    mass, node = _end_probabilities(
        end, tape, tangents, z_end, (row + length) * states, b * end_batch, states, OMEGA, SIZE
    )
    scale = tl.load(seed + b)
    mass, node = (mass * scale)[None, :], (node * scale)[None, :]  # as rows, each thread has only a few entries
    if emissions is not None:
        tl.store(end_path + b * states + j, node, mask=j < states)
    w += b * w_batch
    w_path += b * (steps - LAG if VARYING else 1) * states * states
    w_next = _load_tile(w, length - 1, length, states, unit, LAG, VARYING, SIZE)
    powers, tops = _exponentials(w_next)
    v_next = _load_states(tape + (row + tl.maximum(length - 1, 0)) * states, i, states)
    first, total = tl.zeros_like(node), tl.zeros_like(w_next)
    for n in range(length):
        t = length - 1 - n
        if tangents is not None:
            # Registers are too few to prefetch. The stride, always 1, depends on t, so that the compiler recomputes
            # addresses in each step instead of keeping them in registers.
            stride = unit + t * (unit - 1)
            w_next = _load_tile(w, t, length, states, stride, LAG, VARYING, SIZE)
            v_next = _load_states(tape + (row + t) * states, i, states)
        _, q = _max_over_previous(w_next, powers, tops, v_next, states, OMEGA, VARYING)
        q = sums_to_one(q, 0)
        if tangents is None:
            if VARYING:
                w_next = _load_tile(w, t - 1, length, states, unit, LAG, VARYING, SIZE)
            v_next = _load_states(tape + (row + tl.maximum(t - 1, 0)) * states, i, states)
        is_kept = _is_kept(mask, b * steps + t)
        flow = q * node
        if tangents is not None:
            y = _load_tile(z_w + b * w_batch, t, length, states, stride, LAG, VARYING, SIZE)
            y += _load_states(tangents + (row + t) * states, i, states)[:, None]
            flow += tl.where(mass != 0, jacobian_product(q, y, OMEGA, 0) * mass, 0.0)
            mass = tl.where(is_kept, tl.sum(q * mass, 1)[None, :], mass)
        flow = tl.where(is_kept, flow, 0.0)
        if VARYING:
            _store_tile(w_path, t, flow, states, unit, LAG, SIZE)
        else:
            total += flow
        if emissions is not None:
            tl.store(e_path + (b * steps + t) * states + j, tl.where(is_kept, node, 0.0), mask=j < states)
            first = tl.where(is_kept, node, first)
        node = tl.where(is_kept, tl.sum(flow, 1)[None, :], node)
    if emissions is not None:
        tl.store(start_path + b * states + j, first, mask=j < states)
    if not VARYING:
        _store_tile(w_path, LAG, total, states, unit, LAG, SIZE)
    for t in range(length, steps):
        if VARYING:
            _store_tile(w_path, t, tl.zeros_like(total), states, unit, LAG, SIZE)
        if emissions is not None:
            tl.store(e_path + (b * steps + t) * states + j, tl.zeros_like(first), mask=j < states)


class KernelTensors(NamedTuple):
    """The tensors of a chain in the order of the kernels' arguments."""

    w: Tensor
    emissions: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None


class Chain(PartialSweeps):
    """Sweeps of chains of up to 64 states."""

    order: tuple[int, ...] = (0,)
    """The index in θ of each tensor of :class:`KernelTensors`. The permutation is its own inverse."""

    def takes(self, theta: Tensors) -> bool:
        return theta[0].numel() > 0 and theta[0].shape[-1] <= _MAX_STATES

    def _kernel_tensors(self, theta: Tensors) -> KernelTensors:
        """Return the tensors of θ, contiguous, in the order of the kernels' arguments."""
        return KernelTensors(*(theta[n].contiguous() for n in self.order))

    def _launch(self, kernel: Any, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> None:
        """Launch a kernel for each sequence. ``args`` are its arguments between the mask and the sizes."""
        batch, steps, states = theta[0].shape[:3]
        tensors, size = self._kernel_tensors(theta), power_of_two(states)
        lengths, mask = (*(tensor.contiguous() for tensor in index), None, None)[:2]
        assert omega.kernel is not None
        launch(
            kernel,
            batch,
            *tensors,
            lengths,
            mask,
            *args,
            steps,
            states,
            1,
            *(
                0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
                for tensor in (tensors.w, tensors.start, tensors.end)
            ),
            OMEGA=CODES[omega.kernel],
            LAG=int(tensors.emissions is not None),
            VARYING=tensors.w.ndim == 4,
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
        return self._launch_backward(theta, tape, seed, (None, None, None), index, omega)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Launch the tangent kernel, then the backward kernel, which reads the tangents.

        Two launches are needed: within one launch, threads could read tangents before other threads write them.
        """
        tape, tangents = tape.contiguous(), self._empty_tape(theta, index)
        z_w, z_e, z_start, z_end = self._kernel_tensors(z)
        self._launch(chain_tangent, theta, index, omega, tape, z_w, z_e, z_start, tangents)
        return self._launch_backward(theta, tape, seed, (tangents, z_w, z_end), index, omega)

    def _launch_backward(
        self, theta: Tensors, tape: Tensor, seed: Tensor, tangents: Any, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Launch the backward kernel, and sum its results over the batch for tensors that the batch shares.

        ``tangents`` are the kernel's arguments tangents, z_w and z_end, None for the expected path.
        """
        batch = theta[0].shape[0]
        paths = [theta[n].new_empty((batch, *theta[n].shape[1:])) for n in self.order]
        args = tape.contiguous(), seed.contiguous(), *tangents, *KernelTensors(*paths)
        self._launch(chain_backward, theta, index, omega, *args)
        is_shared = (theta[n].shape[0] < batch for n in self.order)
        sums = [path.sum(0, keepdim=True) if shared else path for path, shared in zip(paths, is_shared, strict=True)]
        return [sums[n] for n in self.order]
