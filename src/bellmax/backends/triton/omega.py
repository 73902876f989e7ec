"""Ω at γ = 1 on the tiles of Triton kernels: what :mod:`bellmax.regularizers` says of a vector, along one axis.

x may hold −∞, never NaN or +∞. A tile with one axis is a vector; its AXIS is 0, and its results are scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bellmax.regularizers import Kernel

NEGENTROPY = tl.constexpr(0)
TSALLIS15 = tl.constexpr(1)
L2 = tl.constexpr(2)
TSALLIS2 = tl.constexpr(3)  # l2, shifted to 0 at the vertices
HARD = tl.constexpr(4)

CODES: dict[Kernel, int] = {
    Kernel("negentropy"): NEGENTROPY.value,
    Kernel("tsallis", (1.5,)): TSALLIS15.value,
    Kernel("l2"): L2.value,
    Kernel("tsallis", (2.0,)): TSALLIS2.value,
    Kernel("hard"): HARD.value,
}
"""OMEGA, as kernels know an Ω."""

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(x: tl.tensor) -> tl.tensor:
    return tl.exp2(x * _LOG2E)


@triton.jit
def logarithm(x: tl.tensor) -> tl.tensor:
    return tl.log2(x) * _LN2


@triton.jit
def _add_pairs(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    return a + c, b + d


@triton.jit
def _sums(a: tl.tensor, b: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Two sums at once: threads that share a tile wait for each other once."""
    a, b = tl.reduce((a, b), AXIS, _add_pairs)
    return tl.expand_dims(a, AXIS), tl.expand_dims(b, AXIS)


@triton.jit
def _threshold_l2(r: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """τ with Σ (r − τ)₊ = 1, where max(r) = 0: from −1 it rises, and each step takes entries out of the support."""
    tau = tl.expand_dims(tl.max(r, AXIS) * 0 - 1, AXIS)
    if r.shape[AXIS] <= 4:
        for _ in tl.static_range(r.shape[AXIS] - 1):
            tau = _raised(r, tau, AXIS)
    else:
        rising = 1
        while rising > 0:
            raised = _raised(r, tau, AXIS)
            rising = tl.max((raised > tau).to(tl.int32))
            tau = raised
    return tau


@triton.jit
def _raised(r: tl.tensor, tau: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    inside = r > tau
    count, total = _sums(inside.to(r.dtype), tl.where(inside, r, 0.0), AXIS)
    return tl.maximum((total - 1) / count, tau)


@triton.jit
def _threshold_root(r: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """τ with Σ (r − τ)₊² = 1, where max(r) = 0: Newton's method on the root of the sum, from −1, never passes it."""
    tau = tl.expand_dims(tl.max(r, AXIS) * 0 - 1, AXIS)
    for _ in range(5 if r.shape[AXIS] <= 4 else 8):  # enough for float64
        above = tl.maximum(r - tau, 0.0)
        square, total = _sums(above * above, above, AXIS)
        tau += (square - tl.sqrt(square)) / total
    return tau


@triton.jit
def smooth_max_and_argmax(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """max_Ω(x) and its gradient q; −∞ and zeros where there is nothing but −∞."""
    top = tl.max(x, AXIS)
    empty = top == float("-inf")
    r = tl.where(tl.expand_dims(empty, AXIS), 0.0, x - tl.expand_dims(tl.where(empty, 0.0, top), AXIS))
    if OMEGA == NEGENTROPY:
        e = exponential(r)
        total = tl.sum(e, AXIS)
        gain = logarithm(total)
        q = e * tl.expand_dims(1 / total, AXIS)
    elif OMEGA == TSALLIS15:
        half = tl.maximum(r * 0.5, -2.0)  # below −1 there is no probability
        root = tl.maximum(half - _threshold_root(half, AXIS), 0.0)
        q = root * root
        gain = tl.sum(q * (half * 2 - root * (4 / 3)), AXIS) + 4 / 3
    elif OMEGA == HARD:
        place = tl.expand_dims(tl.argmax(x, AXIS, tie_break_left=True), AXIS)
        q = (_places(x, AXIS) == place).to(x.dtype)
        gain = top * 0
    else:
        r = tl.maximum(r, -2.0)
        q = tl.maximum(r - _threshold_l2(r, AXIS), 0.0)
        gain = tl.sum(q * (r - q * 0.5), AXIS)
        if OMEGA == TSALLIS2:
            gain += 0.5
    return tl.where(empty, float("-inf"), top + gain), tl.where(tl.expand_dims(empty, AXIS), 0.0, q)


@triton.jit
def _places(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """0, 1, … along AXIS, in a shape that broadcasts against x."""
    places = tl.arange(0, x.shape[AXIS])
    for axis in tl.static_range(len(x.shape)):
        if axis != AXIS:
            places = tl.expand_dims(places, axis)
    return places


@triton.jit
def smooth_max(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """max_Ω(x) along AXIS."""
    value, _ = smooth_max_and_argmax(x, OMEGA, AXIS)
    return value


@triton.jit
def smooth_argmax(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """∇max_Ω(x) along AXIS, of x's shape; of Ω = 0, one-hot at the first maximum."""
    _, q = smooth_max_and_argmax(x, OMEGA, AXIS)
    return q


@triton.jit
def sums_to_one(q: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """q along AXIS, its sum 1 to the last digit, so that mass is kept over many steps; zeros stay zeros."""
    return q * tl.expand_dims(2 - tl.sum(q, AXIS), AXIS)


@triton.jit
def jacobian_product(q: tl.tensor, y: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """J_Ω(q) y along AXIS, where q is a ``smooth_argmax``; where q = 0, y may hold anything."""
    if OMEGA == HARD:
        return q * 0
    inside = q > 0
    if OMEGA == NEGENTROPY:
        s = q
    elif OMEGA == TSALLIS15:
        s = tl.sqrt(q)
    else:
        s = inside.to(q.dtype)
    y = tl.where(inside, y, 0.0)
    total, along = _sums(s, s * y, AXIS)
    return s * (y - along / tl.where(total == 0, 1.0, total))
