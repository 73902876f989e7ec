"""Ω at γ = 1 along one axis of a tile: the functions of :mod:`bellmax.regularizers` for Triton kernels.

x may contain −∞, but not NaN or +∞. For a tile with one axis, AXIS is 0 and results are scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bellmax.regularizers import Kernel

NEGENTROPY = tl.constexpr(0)
TSALLIS15 = tl.constexpr(1)
L2 = tl.constexpr(2)
TSALLIS2 = tl.constexpr(3)  # L2, shifted to 0 at the vertices
HARD = tl.constexpr(4)

CODES: dict[Kernel, int] = {
    Kernel("negentropy"): NEGENTROPY.value,
    Kernel("tsallis", (1.5,)): TSALLIS15.value,
    Kernel("l2"): L2.value,
    Kernel("tsallis", (2.0,)): TSALLIS2.value,
    Kernel("hard"): HARD.value,
}
"""The argument OMEGA of kernels, for each compiled Ω."""

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
    """Add the pairs (a, b) and (c, d), for ``tl.reduce``."""
    return a + c, b + d


@triton.jit
def _sums(a: tl.tensor, b: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the sums of a and of b along AXIS, of size 1. One reduction for both needs one barrier instead of two."""
    a, b = tl.reduce((a, b), AXIS, _add_pairs)
    return tl.expand_dims(a, AXIS), tl.expand_dims(b, AXIS)


@triton.jit
def _sparsemax_threshold(r: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return τ with Σ (r − τ)₊ = 1 along AXIS, for r with maximum 0.

    Newton's method from −1 increases τ. Each step removes entries from the support, so it ends after finitely many.
    """
    tau = tl.expand_dims(tl.max(r, AXIS) * 0 - 1, AXIS)
    if r.shape[AXIS] <= 4:
        for _ in tl.static_range(r.shape[AXIS] - 1):
            tau = _raise_threshold(r, tau, AXIS)
    else:
        has_changed = 1
        while has_changed > 0:
            raised = _raise_threshold(r, tau, AXIS)
            has_changed = tl.max((raised > tau).to(tl.int32))
            tau = raised
    return tau


@triton.jit
def _raise_threshold(r: tl.tensor, tau: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the τ that is right if the support is {r > τ}: one step of Newton's method."""
    inside = r > tau
    count, total = _sums(inside.to(r.dtype), tl.where(inside, r, 0.0), AXIS)
    return tl.maximum((total - 1) / count, tau)


@triton.jit
def _entmax15_threshold(r: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return τ with Σ (r − τ)₊² = 1 along AXIS, for r with maximum 0.

    Newton's method from −1, on the square root of the sum, increases monotonically to the solution.
    """
    tau = tl.expand_dims(tl.max(r, AXIS) * 0 - 1, AXIS)
    for _ in range(5 if r.shape[AXIS] <= 4 else 8):  # enough for float64
        excess = tl.maximum(r - tau, 0.0)
        square, total = _sums(excess * excess, excess, AXIS)
        tau += (square - tl.sqrt(square)) / total
    return tau


@triton.jit
def smooth_max_and_argmax(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """Return max_Ω(x) along AXIS and its gradient q, of x's shape. If all entries are −∞, they are −∞ and 0."""
    top = tl.max(x, AXIS)
    empty = top == float("-inf")
    r = tl.where(tl.expand_dims(empty, AXIS), 0.0, x - tl.expand_dims(tl.where(empty, 0.0, top), AXIS))
    if OMEGA == NEGENTROPY:
        e = exponential(r)
        total = tl.sum(e, AXIS)
        gain = logarithm(total)
        q = e * tl.expand_dims(1 / total, AXIS)
    elif OMEGA == TSALLIS15:
        half = tl.maximum(r * 0.5, -2.0)  # entries below −1 have probability 0
        root = tl.maximum(half - _entmax15_threshold(half, AXIS), 0.0)
        q = root * root
        gain = tl.sum(q * (half * 2 - root * (4 / 3)), AXIS) + 4 / 3
    elif OMEGA == HARD:
        first = tl.expand_dims(tl.argmax(x, AXIS, tie_break_left=True), AXIS)
        q = (_positions(x, AXIS) == first).to(x.dtype)
        gain = top * 0
    else:
        r = tl.maximum(r, -2.0)
        q = tl.maximum(r - _sparsemax_threshold(r, AXIS), 0.0)
        gain = tl.sum(q * (r - q * 0.5), AXIS)
        if OMEGA == TSALLIS2:
            gain += 0.5
    return tl.where(empty, float("-inf"), top + gain), tl.where(tl.expand_dims(empty, AXIS), 0.0, q)


@triton.jit
def _positions(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return 0, 1, … along AXIS, in a shape that broadcasts against x."""
    positions = tl.arange(0, x.shape[AXIS])
    for axis in tl.static_range(len(x.shape)):
        if axis != AXIS:
            positions = tl.expand_dims(positions, axis)
    return positions


@triton.jit
def smooth_max(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """Return max_Ω(x) along AXIS."""
    value, _ = smooth_max_and_argmax(x, OMEGA, AXIS)
    return value


@triton.jit
def smooth_argmax(x: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """Return ∇max_Ω(x) along AXIS, of x's shape. For the hard max, it is one-hot at the first maximum."""
    _, q = smooth_max_and_argmax(x, OMEGA, AXIS)
    return q


@triton.jit
def sums_to_one(q: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Correct the rounding error of Σ q = 1 along AXIS, so that no mass is lost over many steps. Zeros stay zero."""
    return q * tl.expand_dims(2 - tl.sum(q, AXIS), AXIS)


@triton.jit
def jacobian_product(q: tl.tensor, y: tl.tensor, OMEGA: tl.constexpr, AXIS: tl.constexpr) -> tl.tensor:
    """Return J_Ω(q) y along AXIS, for q from ``smooth_argmax``. Where q = 0, y is ignored and may be NaN."""
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
    total, product = _sums(s, s * y, AXIS)
    return s * (y - product / tl.where(total == 0, 1.0, total))
