"""Smoothed max operators (section 2 of the paper).

A regularizer Ω turns the max of a vector x into max_Ω(x) = max over q in the simplex of ⟨q, x⟩ − Ω(q). The maximiser
q = ∇max_Ω(x) is a probability vector. Since max_{γΩ}(x) = γ max_Ω(x/γ), the computations need γ = 1 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from bellmax.tensors import Gamma, divide_by_gamma, inner, multiply_by_gamma, promote_half
from bellmax.transforms import is_checked


class Kernel(NamedTuple):
    """A compiled Ω at γ = 1, as operators and backends know it: its name in :data:`KERNELS`, and numbers."""

    name: str
    parameters: tuple[float, ...] = ()


_NEGENTROPY, _SQUARED_L2, _HARD = (Kernel(name) for name in ("negentropy", "l2", "hard"))


def check_gamma(gamma: Gamma) -> None:
    if isinstance(gamma, Tensor):
        if not gamma.is_floating_point():
            raise ValueError(f"gamma must be a floating point tensor, got dtype {gamma.dtype}")
        if is_checked(gamma) and not bool(((gamma > 0) & gamma.isfinite()).all()):
            low, high = gamma.min().item(), gamma.max().item()
            raise ValueError(f"gamma must be finite and > 0, got a tensor from {low:g} to {high:g}")
    elif not (isinstance(gamma, int | float | np.number) and 0 < gamma < math.inf):
        raise ValueError(f"gamma must be a finite number > 0, got {gamma!r}")


def _check_floating(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got dtype {x.dtype}")
    return promote_half(x)


def _recentre(x: Tensor) -> tuple[Tensor, Tensor]:
    """x − max(x) along the last dimension, and max(x). A row of only −∞ becomes zeros, with maximum −∞."""
    top = x.amax(-1, keepdim=True)
    empty = top == -math.inf
    return (x - top.masked_fill(empty, 0)).masked_fill(empty, 0), top


class _Max(Function):
    """max_Ω at γ = 1 along the last dimension; its gradient is :class:`_Argmax`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, omega: Regularizer) -> Tensor:
        relative, top = _recentre(x)
        q = omega.project(relative)
        return top.squeeze(-1) + (inner(q, relative) - omega.penalty(q))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.omega = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * _Argmax.apply(x, ctx.omega), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return inner(_Argmax.apply(x, ctx.omega), tangent)


class _Argmax(Function):
    """∇max_Ω at γ = 1 along the last dimension; its derivative, both ways, is the symmetric J_Ω."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, omega: Regularizer) -> Tensor:
        relative, top = _recentre(x)
        return omega.project(relative).masked_fill(top == -math.inf, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.omega = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (q,) = ctx.saved_tensors
        return ctx.omega.jacobian_product(q, grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (q,) = ctx.saved_tensors
        product: Tensor = ctx.omega.jacobian_product(q, tangent)
        return product


class Regularizer:
    """A strongly convex Ω on the simplex, scaled by γ > 0.

    For a custom Ω, subclass it and write three methods *for γ = 1, along the last dimension*:

    - ``penalty(q)``: Ω(q), from (..., D) to (...);
    - ``project(x)``: the maximiser q of ⟨q, x⟩ − Ω(q), of x's shape (..., D); x comes with maximum 0 and may hold −∞;
    - ``jacobian_product(q, y)``: J_Ω(q) y, the derivative of ``project`` at the x whose projection is q, applied to y.

    Everything else follows: max, argmax, min, argmin and their derivatives of any order, γ as a number or a tensor, and
    every dynamic program of this library (on its reference backend). :func:`bellmax.check_regularizer` tests them.

    Two regularizers are equal if they have the same class and equal parameters; a tensor equals only itself.

    Args:
        gamma: strength of the smoothing, > 0. A tensor may be learnt, and broadcasts against the batch: the shape of x
            without its ``dim``, or the batch shape of a dynamic program.

    For example, the Gini entropy of sparsemax:

    >>> class Gini(Regularizer):
    ...     def penalty(self, q):
    ...         return (q.square().sum(-1) - 1) / 2
    ...     def project(self, x):
    ...         top = x.clamp(min=-2).sort(-1, descending=True).values
    ...         size = torch.arange(1, x.shape[-1] + 1)
    ...         taken = (1 + size * top > top.cumsum(-1)).sum(-1, keepdim=True)
    ...         return (x - (top.cumsum(-1).gather(-1, taken - 1) - 1) / taken).clamp(min=0)
    ...     def jacobian_product(self, q, y):
    ...         s = (q > 0).to(q)
    ...         return s * (y - (s * y).sum(-1, keepdim=True) / s.sum(-1, keepdim=True).clamp(min=1))
    >>> Gini(gamma=2.0).argmax(torch.tensor([1.0, 0.0, -3.0]))
    tensor([0.7500, 0.2500, 0.0000])

    """

    def __init__(self, gamma: Gamma = 1.0) -> None:
        check_gamma(gamma)
        self.gamma = gamma

    def penalty(self, q: Tensor) -> Tensor:
        """Ω(q) for γ = 1: (..., D) → (...)."""
        raise NotImplementedError(f"{type(self).__name__} must define penalty(q), which is Ω(q) at γ = 1")

    def project(self, x: Tensor) -> Tensor:
        """∇max_Ω(x) for γ = 1 and max(x) = 0: (..., D) → (..., D)."""
        raise NotImplementedError(f"{type(self).__name__} must define project(x), which is ∇max_Ω(x) at γ = 1")

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        """J_Ω(q) y for γ = 1: (..., D), (..., D) → (..., D)."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} must define jacobian_product(q, y), the derivative of project along y")

    @property
    def kernel(self) -> Kernel | None:
        """The compiled Ω at γ = 1 that this one is; None for one that is written in Python alone."""
        return None

    def max(self, x: Tensor, dim: int = -1) -> Tensor:
        """max_Ω(x) along ``dim``. Entries of −∞ are ignored; a row of only −∞ gives −∞.

        >>> Negentropy().max(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor(0.6931)
        """
        value: Tensor = _Max.apply(self._scaled(x, dim), self)
        return multiply_by_gamma(value, self.gamma)

    def argmax(self, x: Tensor, dim: int = -1) -> Tensor:
        """∇max_Ω(x) along ``dim``: a probability vector, or zeros for a row of only −∞.

        >>> SquaredL2().argmax(torch.tensor([1.5, 1.0, 0.0]))
        tensor([0.7500, 0.2500, 0.0000])
        """
        q: Tensor = _Argmax.apply(self._scaled(x, dim), self)
        return q.movedim(-1, dim).to(x.dtype)

    def min(self, x: Tensor, dim: int = -1) -> Tensor:
        """min_Ω(x) = −max_Ω(−x) along ``dim``. Entries of +∞ are ignored."""
        return -self.max(-x, dim)

    def argmin(self, x: Tensor, dim: int = -1) -> Tensor:
        """∇min_Ω(x) = ∇max_Ω(−x) along ``dim``."""
        return self.argmax(-x, dim)

    def hessian_product(self, q: Tensor, z: Tensor, dim: int = -1) -> Tensor:
        """∇²max_Ω(x) z along ``dim``, from q = ∇max_Ω(x). For min_Ω it is the negative.

        >>> q = Negentropy().argmax(torch.zeros(2))
        >>> Negentropy().hessian_product(q, torch.tensor([1.0, 0.0]))
        tensor([ 0.2500, -0.2500])
        """
        q, z = q.movedim(dim, -1), z.movedim(dim, -1)
        product = self.jacobian_product(q, z.masked_fill(q == 0, 0)) / self._gamma_column()
        return product.movedim(-1, dim)

    def log_argmax(self, x: Tensor) -> Tensor:
        """log ∇max_Ω(x) for γ = 1 along the last dimension."""
        q: Tensor = _Argmax.apply(x, self)
        outside = q == 0
        return q.masked_fill(outside, 1).log().masked_fill(outside, -math.inf)

    def log_argmax_jvp(self, q: Tensor, y: Tensor) -> Tensor:
        """(J_Ω(q) y)/q for γ = 1 along the last dimension: the derivative of :meth:`log_argmax` applied to y."""
        outside = q == 0
        return (self.jacobian_product(q, y) / q.masked_fill(outside, 1)).masked_fill(outside, 0)

    def log_argmax_vjp(self, q: Tensor, y: Tensor) -> Tensor:
        """J_Ω(q) (y/q) for γ = 1 along the last dimension: the transposed derivative of :meth:`log_argmax`."""
        outside = q == 0
        return self.jacobian_product(q, (y / q.masked_fill(outside, 1)).masked_fill(outside, 0))

    def at_unit_gamma(self) -> Regularizer:
        """The same Ω with γ = 1."""
        unit = copy(self)
        unit.gamma = 1.0
        return unit

    def _scaled(self, x: Tensor, dim: int) -> Tensor:
        """x/γ, with ``dim`` as the last dimension."""
        if x.ndim and not x.shape[dim]:
            raise ValueError(f"x must have an entry along dim {dim}, got shape {tuple(x.shape)}")
        return divide_by_gamma(_check_floating(x).movedim(dim, -1), self._gamma_column())

    def _gamma_column(self) -> Gamma:
        """γ in a shape that broadcasts against vectors in the last dimension."""
        return self.gamma.unsqueeze(-1) if isinstance(self.gamma, Tensor) else self.gamma

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return mine.keys() == theirs.keys() and all(_same(value, theirs[name]) for name, value in mine.items())

    def __hash__(self) -> int:
        return hash((type(self), id(self.gamma) if isinstance(self.gamma, Tensor) else self.gamma))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(gamma={self.gamma})"


def _same(a: object, b: object) -> bool:
    """Whether two parameters are equal; a tensor equals only itself."""
    if a is b:
        return True
    return not (isinstance(a, Tensor) or isinstance(b, Tensor)) and np.array_equal(a, b)  # type: ignore[arg-type]


def _powered_jacobian_product(q: Tensor, y: Tensor, exponent: float) -> Tensor:
    """(s∘y − s⟨s, y⟩/Σs) with s = q^exponent on the support of q; 0 for an empty support."""
    inside = q > 0
    s = q.masked_fill(~inside, 1).pow(exponent).masked_fill(~inside, 0)
    total = s.sum(-1, keepdim=True)
    sy = s * y
    return sy - s * (sy.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1))


class Negentropy(Regularizer):
    """Ω(q) = γ Σ q log q: max_Ω is γ log Σ exp(x/γ), its gradient the softmax.

    >>> Negentropy(gamma=0.5).max(torch.tensor([1.0, 1.0]))
    tensor(1.3466)
    """

    def penalty(self, q: Tensor) -> Tensor:
        return torch.xlogy(q, q).sum(-1)

    def project(self, x: Tensor) -> Tensor:
        e = x.exp()
        return e / e.sum(-1, keepdim=True)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return _powered_jacobian_product(q, y, 1.0)

    def log_argmax(self, x: Tensor) -> Tensor:
        v: Tensor = _Max.apply(x, self)
        log_q: Tensor = x - v.masked_fill(v == -math.inf, 0).unsqueeze(-1)
        return log_q

    def log_argmax_jvp(self, q: Tensor, y: Tensor) -> Tensor:
        return y - (q * y).sum(-1, keepdim=True)

    def log_argmax_vjp(self, q: Tensor, y: Tensor) -> Tensor:
        return y - q * y.sum(-1, keepdim=True)

    @property
    def kernel(self) -> Kernel | None:
        return _NEGENTROPY if type(self) is Negentropy else None


class Tsallis(Regularizer):
    """Ω(q) = γ (Σ q^α − 1)/(α(α − 1)) with 1 < α ≤ 2: its gradient is α-entmax, sparse.

    It is 0 at the vertices, tends to :class:`Negentropy` as α → 1, and is :class:`SquaredL2` minus γ/2 for α = 2.

    >>> Tsallis(alpha=1.5).argmax(torch.tensor([1.0, 0.0, -4.0]))
    tensor([0.8307, 0.1693, 0.0000])
    """

    def __init__(self, alpha: float = 1.5, gamma: Gamma = 1.0) -> None:
        super().__init__(gamma)
        if not 1 < alpha <= 2:
            raise ValueError(f"alpha must satisfy 1 < alpha <= 2, got {alpha!r} (alpha = 1 is Negentropy)")
        self.alpha = float(alpha)

    def penalty(self, q: Tensor) -> Tensor:
        return (q.pow(self.alpha).sum(-1) - 1) / (self.alpha * (self.alpha - 1))

    def project(self, x: Tensor) -> Tensor:
        # q = ((α−1)x − τ)₊^(1/(α−1)) with τ in [−1, 0): entries below −1 have probability 0, so −2 can replace −∞.
        x = (x * (self.alpha - 1)).clamp(min=-2)
        if self.alpha == 2:
            return (x - _threshold_l2(x)).clamp(min=0)
        if self.alpha == 1.5:
            return (x - _threshold_root(x)).clamp(min=0).square()
        q = (x - _threshold_newton(x, 1 / (self.alpha - 1))).clamp(min=0).pow(1 / (self.alpha - 1))
        return q / q.sum(-1, keepdim=True)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return _powered_jacobian_product(q, y, 2 - self.alpha)

    @property
    def kernel(self) -> Kernel | None:
        return Kernel("tsallis", (self.alpha,)) if type(self) is Tsallis else None

    def __repr__(self) -> str:
        return f"Tsallis(alpha={self.alpha}, gamma={self.gamma})"


class SquaredL2(Tsallis):
    """Ω(q) = γ/2 ‖q‖²: its gradient is the projection of x/γ on the simplex (sparsemax), sparse.

    Ω is γ/2 at a vertex, so a node with a single parent adds −γ/2 to the score of a path: longer paths lose more.
    ``Tsallis(2)`` is the same function shifted to 0 at the vertices.

    >>> SquaredL2().max(torch.tensor([1.0, 0.0])), Tsallis(2).max(torch.tensor([1.0, 0.0]))
    (tensor(0.5000), tensor(1.))
    """

    def __init__(self, gamma: Gamma = 1.0) -> None:
        super().__init__(2.0, gamma)

    def penalty(self, q: Tensor) -> Tensor:
        return q.square().sum(-1) / 2

    @property
    def kernel(self) -> Kernel | None:
        return _SQUARED_L2 if type(self) is SquaredL2 else None

    def __repr__(self) -> str:
        return f"SquaredL2(gamma={self.gamma})"


class Hard(Regularizer):
    """Ω = 0: the ordinary max. Its gradient is one-hot at the first maximum, its Hessian 0.

    >>> Hard().argmax(torch.tensor([1.0, 3.0, 3.0]))
    tensor([0., 1., 0.])
    """

    def __init__(self) -> None:
        super().__init__()

    def penalty(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q[..., 0])

    def project(self, x: Tensor) -> Tensor:
        first = x.argmax(-1, keepdim=True)
        return (torch.arange(x.shape[-1], device=x.device) == first).to(x.dtype)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    @property
    def kernel(self) -> Kernel | None:
        return _HARD if type(self) is Hard else None

    def __repr__(self) -> str:
        return "Hard()"


def _threshold_l2(x: Tensor) -> Tensor:
    """τ with Σ (x − τ)₊ = 1, by sorting."""
    top = x.sort(-1, descending=True).values
    excess = top.cumsum(-1) - 1
    size = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    support = (size * top > excess).sum(-1, keepdim=True)
    return excess.gather(-1, (support - 1).clamp(min=0)) / support  # of NaN, no entry is in the support


def _threshold_root(x: Tensor) -> Tensor:
    """τ with Σ (x − τ)₊² = 1, by sorting: the smaller root of k τ² − 2τ Σx + Σx² = 1 over the k largest."""
    top = x.sort(-1, descending=True).values
    size = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    mean = top.cumsum(-1) / size
    spread = (top.square().cumsum(-1) / size - mean.square()).clamp(min=0)
    tau = mean - (1 / size - spread).clamp(min=0).sqrt()
    support = (tau <= top).sum(-1, keepdim=True)
    return tau.gather(-1, (support - 1).clamp(min=0))


def _threshold_newton(x: Tensor, power: float) -> Tensor:
    """τ with Σ (x − τ)₊^power = 1, where max(x) = 0, to the precision of the dtype.

    ‖(x − τ)₊‖_power is convex in τ and at least 1 at τ = −1: Newton's method approaches the root from the left and
    never passes it. Eight steps are enough for a thousand entries and every power.
    """
    tau = torch.full_like(x[..., :1], -1.0)
    for _ in range(12):
        above = (x - tau).clamp(min=0)
        top = above.amax(-1, keepdim=True)
        share = above / top
        slopes = share.pow(power - 1)
        total = (slopes * share).sum(-1, keepdim=True)
        tau = tau + (top * total.pow(1 / power) - 1) * total.pow(1 - 1 / power) / slopes.sum(-1, keepdim=True)
    return tau


_BY_NAME: dict[str, Callable[..., Regularizer]] = {
    "negentropy": Negentropy,
    "softmax": Negentropy,
    "l2": SquaredL2,
    "sparsemax": partial(Tsallis, 2.0),
    "entmax": partial(Tsallis, 1.5),
    "hard": Hard,
}


def resolve(omega: str | Regularizer, gamma: Gamma | None = None) -> Regularizer:
    """The regularizer that ``omega`` is or names; ``gamma`` is for a name, 1 by default.

    >>> resolve("softmax", 0.5), resolve("sparsemax"), resolve(Tsallis(1.5, gamma=2.0))
    (Negentropy(gamma=0.5), Tsallis(alpha=2.0, gamma=1.0), Tsallis(alpha=1.5, gamma=2.0))
    """
    if isinstance(omega, Regularizer):
        if gamma is not None:
            raise ValueError(f"gamma must be left out if omega is a Regularizer, got gamma={gamma} and omega={omega}")
        return omega
    if not isinstance(omega, str) or omega not in _BY_NAME:
        hint = ""
        if isinstance(omega, int | float | Tensor):
            hint = f"; for the strength of the smoothing, write gamma={omega}"
        elif isinstance(omega, type) and issubclass(omega, Regularizer):
            hint = f"; write {omega.__name__}(), an instance"
        raise ValueError(f"omega must be a Regularizer or one of {', '.join(map(repr, _BY_NAME))}, got {omega!r}{hint}")
    if gamma is None:
        return _BY_NAME[omega]()
    if omega == "hard":
        raise ValueError(f"gamma must be left out with omega='hard', which does not smooth, got {gamma}")
    return _BY_NAME[omega](gamma=gamma)


KERNELS: dict[str, Callable[..., Regularizer]] = {
    "negentropy": Negentropy,
    "tsallis": Tsallis,
    "l2": SquaredL2,
    "hard": Hard,
}


def with_gamma(omega: Regularizer, gamma: Gamma) -> Regularizer:
    """The same Ω with another γ, which must be valid."""
    changed = copy(omega)
    changed.gamma = gamma
    return changed


@lru_cache
def from_kernel(kernel: Kernel) -> Regularizer:
    """The regularizer at γ = 1 whose :attr:`Regularizer.kernel` it is."""
    return KERNELS[kernel.name](*kernel.parameters)


@lru_cache
def penalty_at_vertex(kernel: Kernel) -> float:
    """Ω of a vector with a single entry, at γ = 1: what a node with one parent takes off the score of a path."""
    return float(from_kernel(kernel).penalty(torch.ones(1, dtype=torch.float64, device="cpu")))
