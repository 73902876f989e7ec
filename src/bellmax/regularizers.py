"""Smoothed max operators (section 2 of the paper).

A regularizer Ω turns the max of a vector x into max_Ω(x) = max over q in the simplex of ⟨q, x⟩ − Ω(q). The maximizer
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

from bellmax.modes import is_checked
from bellmax.names import answers_near_misses
from bellmax.tensors import Gamma, divide_by_gamma, inner, multiply_by_gamma, promote_half


class Kernel(NamedTuple):
    """Identifier of a compiled Ω at γ = 1, hashable: operators and backends use it instead of a Regularizer.

    ``name`` is a key of :data:`KERNELS`, and ``parameters`` are the arguments of that constructor.
    """

    name: str
    parameters: tuple[float, ...] = ()


_NEGENTROPY, _SQUARED_L2, _HARD = (Kernel(name) for name in ("negentropy", "l2", "hard"))


def check_gamma(gamma: Gamma) -> None:
    """Raise ``ValueError`` unless γ is a finite number > 0, or a floating point tensor of such numbers."""
    if type(gamma) is float and 0 < gamma < math.inf:
        return
    if isinstance(gamma, Tensor):
        if not gamma.is_floating_point():
            raise ValueError(f"gamma must be a floating point tensor, got dtype {gamma.dtype}")
        if is_checked(gamma) and not bool(((gamma > 0) & gamma.isfinite()).all()):
            low, high = gamma.min().item(), gamma.max().item()
            raise ValueError(f"gamma must be finite and > 0, got a tensor from {low:g} to {high:g}")
    elif not (isinstance(gamma, int | float | np.number) and 0 < gamma < math.inf):
        raise ValueError(f"gamma must be a finite number > 0, got {gamma!r}")


def _floating_scores(x: Tensor) -> Tensor:
    """Return x with half precision converted to float32. Raises ``ValueError`` if x is not floating point."""
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got dtype {x.dtype}")
    return promote_half(x)


def _subtract_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x − max(x) along the last dimension, and max(x) of shape (..., 1).

    ``Regularizer.project`` needs vectors with maximum 0. A row that is all −∞ becomes zeros, with maximum −∞.
    """
    maximum = x.amax(-1, keepdim=True)
    is_empty = maximum == -math.inf
    return (x - maximum.masked_fill(is_empty, 0)).masked_fill(is_empty, 0), maximum


class _Max(Function):
    """max_Ω at γ = 1 along the last dimension. Its gradient is :class:`_Argmax`, so it is twice differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, omega: Regularizer) -> Tensor:
        relative, maximum = _subtract_max(x)
        q = omega.project(relative)
        return maximum.squeeze(-1) + (inner(q, relative) - omega.penalty(q))

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
    """∇max_Ω at γ = 1 along the last dimension. Its Jacobian J_Ω is symmetric, so one product serves vjp and jvp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, omega: Regularizer) -> Tensor:
        relative, maximum = _subtract_max(x)
        return omega.project(relative).masked_fill(maximum == -math.inf, 0)

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
    """Base class of the regularizers Ω.

    A regularizer is a function of a probability vector q that smooths the max: max_Ω(x) is the maximum over q of ⟨q, x⟩
    − Ω(q).

    To write your own Ω, subclass :class:`Regularizer`. Your Ω must be strongly convex. Define these three methods for γ
    = 1. Each method works along the last dimension:

    - ``penalty(q)`` returns Ω(q). If q has shape (..., D), the result has shape (...).
    - ``project(x)`` returns the q that maximizes ⟨q, x⟩ − Ω(q). Both x and q have shape (..., D). The base class shifts
      x before the call, so the maximum of x is 0. Some entries of x may be −∞.
    - ``jacobian_product(q, y)`` returns the derivative of ``project`` in the direction y, of shape (..., D). The
      derivative is taken at a point x for which ``project(x)`` returned q.

    The base class derives the other methods: ``max``, ``argmax``, ``min``, ``argmin`` and their derivatives of any
    order. Every dynamic program of bellmax accepts your Ω. It then runs in plain torch, on the reference backend.
    Test the three methods with :func:`bellmax.check_regularizer`.

    Two regularizers are equal if they have the same class and equal parameters. If γ is a tensor, both regularizers
    must hold the same tensor object.

    Args:
        gamma: The smoothing strength γ > 0, default 1. A tensor can be learned. A tensor must broadcast to the shape
            that the result has: the shape of x without the dimension ``dim``, or the batch shape of a dynamic program.

    This example defines the Ω of sparsemax, the negative Gini entropy:

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

    @answers_near_misses
    def __init__(self, gamma: Gamma = 1.0) -> None:
        check_gamma(gamma)
        self.gamma = gamma

    def penalty(self, q: Tensor) -> Tensor:
        """Return the penalty Ω(q) at γ = 1 of each probability vector q.

        The vectors lie along the last dimension: if q has the shape (..., D), the result has the shape (...).
        """
        raise NotImplementedError(f"{type(self).__name__} must define penalty(q), which is Ω(q) at γ = 1")

    def project(self, x: Tensor) -> Tensor:
        """Return the gradient ∇max_Ω(x) at γ = 1 along the last dimension, given an x with maximum 0.

        The gradient is the probability vector q that maximizes ⟨q, x⟩ − Ω(q). It has the shape of x, (..., D).
        """
        raise NotImplementedError(f"{type(self).__name__} must define project(x), which is ∇max_Ω(x) at γ = 1")

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of :meth:`project` in the direction y, at the point where its result is q.

        The derivative is the product J_Ω(q) y, where J_Ω(q) is the Jacobian of :meth:`project` at γ = 1. The vectors q
        and y and the result have the shape (..., D).
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} must define jacobian_product(q, y), the derivative of project along y")

    @property
    def kernel(self) -> Kernel | None:
        """An identifier of the compiled code for this Ω, or None if this Ω is only written in Python."""
        return None

    def max(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the smoothed max, max_Ω(x), along ``dim``.

        Entries of −∞ are ignored. If all entries are −∞, the result is −∞.

        >>> Negentropy().max(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor(0.6931)
        """
        value: Tensor = _Max.apply(self._scaled(x, dim), self)
        return multiply_by_gamma(value, self.gamma)

    def argmax(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the gradient of the smoothed max of x along ``dim``.

        The gradient is a probability vector. If all entries of x are −∞, it is 0.

        >>> SquaredL2().argmax(torch.tensor([1.5, 1.0, 0.0]))
        tensor([0.7500, 0.2500, 0.0000])
        """
        q: Tensor = _Argmax.apply(self._scaled(x, dim), self)
        return q.movedim(-1, dim).to(x.dtype)

    def min(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the smoothed min, min_Ω(x) = −max_Ω(−x), along ``dim``. Entries of +∞ are ignored."""
        return -self.max(-x, dim)

    def argmin(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the gradient of the smoothed min of x along ``dim``. It equals ``argmax(-x, dim)``."""
        return self.argmax(-x, dim)

    def hessian_product(self, q: Tensor, z: Tensor, dim: int = -1) -> Tensor:
        """Return the Hessian of the smoothed max of x times z, along ``dim``.

        Instead of x, pass q, the result of ``argmax(x)``. For the smoothed min, pass the result of ``argmin(x)``, and
        negate the result.

        >>> q = Negentropy().argmax(torch.zeros(2))
        >>> Negentropy().hessian_product(q, torch.tensor([1.0, 0.0]))
        tensor([ 0.2500, -0.2500])
        """
        q, z = q.movedim(dim, -1), z.movedim(dim, -1)
        product = self.jacobian_product(q, z.masked_fill(q == 0, 0)) / self._gamma_column()
        return product.movedim(-1, dim)

    def log_argmax(self, x: Tensor) -> Tensor:
        """Return the logarithm of the gradient ∇max_Ω(x) at γ = 1 along the last dimension.

        If an entry of the gradient is 0, its logarithm is −∞.
        """
        q: Tensor = _Argmax.apply(x, self)
        is_zero = q == 0
        return q.masked_fill(is_zero, 1).log().masked_fill(is_zero, -math.inf)

    def log_argmax_jvp(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the directional derivative of :meth:`log_argmax` along y, for γ = 1.

        ``q`` is the argmax. If all entries of q are positive, the result is J_Ω(q) y, divided by q.
        :meth:`jacobian_product` computes J_Ω(q) y.
        """
        is_zero = q == 0
        return (self.jacobian_product(q, y) / q.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)

    def log_argmax_vjp(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the vector–Jacobian product of :meth:`log_argmax` with y, for γ = 1.

        ``q`` is the argmax. If all entries of q are positive, the result is J_Ω(q) applied to y/q.
        :meth:`jacobian_product` applies J_Ω(q).
        """
        is_zero = q == 0
        return self.jacobian_product(q, (y / q.masked_fill(is_zero, 1)).masked_fill(is_zero, 0))

    def at_unit_gamma(self) -> Regularizer:
        """Return a copy of this Ω with γ = 1."""
        unit = copy(self)
        unit.gamma = 1.0
        return unit

    def _scaled(self, x: Tensor, dim: int) -> Tensor:
        """Return x/γ with ``dim`` moved to the end: the input of the functions that work at γ = 1."""
        if x.ndim and not x.shape[dim]:
            raise ValueError(f"x must have at least one entry along dim {dim}, got shape {tuple(x.shape)}")
        return divide_by_gamma(_floating_scores(x).movedim(dim, -1), self._gamma_column())

    def _gamma_column(self) -> Gamma:
        """Return γ, with a new last dimension if it is a tensor, to broadcast against vectors of shape (..., D)."""
        return self.gamma.unsqueeze(-1) if isinstance(self.gamma, Tensor) else self.gamma

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        a, b = vars(self), vars(other)
        return a.keys() == b.keys() and all(_are_equal(value, b[name]) for name, value in a.items())

    def __hash__(self) -> int:
        return hash((type(self), id(self.gamma) if isinstance(self.gamma, Tensor) else self.gamma))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(gamma={_shown_gamma(self.gamma)})"


def _shown_gamma(gamma: Gamma) -> str:
    """Return γ on one line: the number of a scalar tensor, or the shape of a tensor of several numbers."""
    if not isinstance(gamma, Tensor):
        return str(gamma)
    kind = "Parameter" if isinstance(gamma, torch.nn.Parameter) else "tensor"
    if gamma.ndim == 0 and is_checked(gamma):
        return f"{kind}({float(f'{gamma.item():.4g}')})"
    return f"{kind} of shape {tuple(gamma.shape)}"


def _are_equal(a: object, b: object) -> bool:
    """True if two parameters of a regularizer are equal. Tensors are compared by identity, without reading them."""
    if a is b:
        return True
    return not (isinstance(a, Tensor) or isinstance(b, Tensor)) and np.array_equal(a, b)  # type: ignore[arg-type]


def _power_jacobian_product(q: Tensor, y: Tensor, exponent: float) -> Tensor:
    """Return J_Ω(q) y = s∘y − s⟨s, y⟩/Σs, where s = q^exponent on the support of q and 0 outside.

    This is the Jacobian of every Tsallis Ω, with exponent 2 − α. It is 0 if the support is empty.
    """
    is_outside = ~(q > 0)
    s = q.masked_fill(is_outside, 1).pow(exponent).masked_fill(is_outside, 0)
    total = s.sum(-1, keepdim=True)
    sy = s * y
    return sy - s * (sy.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1))


class Negentropy(Regularizer):
    """The negative entropy Ω(q) = γ Σ q log q, whose smoothed max is the log-sum-exp.

    The formula of the smoothed max is max_Ω(x) = γ log Σ exp(x/γ), and its gradient with respect to x is the softmax of
    x/γ. To select this Ω by name, pass ``omega="negentropy"``.

    >>> Negentropy(gamma=0.5).max(torch.tensor([1.0, 1.0]))
    tensor(1.3466)
    """

    def penalty(self, q: Tensor) -> Tensor:
        return torch.xlogy(q, q).sum(-1)

    def project(self, x: Tensor) -> Tensor:
        e = x.exp()
        return e / e.sum(-1, keepdim=True)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return _power_jacobian_product(q, y, 1.0)

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
    """The Tsallis regularizer with exponent 1 < α ≤ 2.

    Its argmax is the function α-entmax, which can set entries to exactly 0.

    Its formula is Ω(q) = γ (Σ q^α − 1)/(α(α − 1)). If one entry of q is 1 and the others are 0, Ω(q) is 0. The name
    "entmax" stands for α = 1.5, and "sparsemax" for α = 2. As α → 1, Ω tends to :class:`Negentropy`. For α = 2, Ω is
    :class:`SquaredL2` minus γ/2.

    Args:
        alpha: The exponent α, default 1.5. With a smaller α, more entries of the argmax are nonzero.
        gamma: The smoothing strength γ > 0, default 1.

    >>> Tsallis(alpha=1.5).argmax(torch.tensor([1.0, 0.0, -4.0]))
    tensor([0.8307, 0.1693, 0.0000])

    """

    @answers_near_misses
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
            return (x - _sparsemax_threshold(x)).clamp(min=0)
        if self.alpha == 1.5:
            return (x - _entmax15_threshold(x)).clamp(min=0).square()
        q = (x - _newton_threshold(x, 1 / (self.alpha - 1))).clamp(min=0).pow(1 / (self.alpha - 1))
        return q / q.sum(-1, keepdim=True)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return _power_jacobian_product(q, y, 2 - self.alpha)

    @property
    def kernel(self) -> Kernel | None:
        return Kernel("tsallis", (self.alpha,)) if type(self) is Tsallis else None

    def __repr__(self) -> str:
        return f"Tsallis(alpha={self.alpha}, gamma={_shown_gamma(self.gamma)})"


class SquaredL2(Tsallis):
    """The regularizer Ω(q) = γ/2 ‖q‖², which gives sparse probabilities and also penalizes long paths.

    The name "l2" stands for this Ω. It is the sparse regularizer of Mensch and Blondel (2018). In new code, prefer
    "sparsemax", which is ``Tsallis(2)``. The Ω of ``Tsallis(2)`` is the Ω of ``SquaredL2`` minus γ/2. The two
    regularizers have the same argmax.

    The difference γ/2 matters in a dynamic program. If one entry of q is 1 and the others are 0, ``SquaredL2`` is γ/2,
    and ``Tsallis(2)`` is 0. Under ``SquaredL2``, each node of a path therefore subtracts γ/2 from the score of the
    path, which lowers the score of a long path more.

    >>> SquaredL2().max(torch.tensor([1.0, 0.0])), Tsallis(2).max(torch.tensor([1.0, 0.0]))
    (tensor(0.5000), tensor(1.))
    """

    @answers_near_misses
    def __init__(self, gamma: Gamma = 1.0) -> None:
        super().__init__(2.0, gamma)

    def penalty(self, q: Tensor) -> Tensor:
        return q.square().sum(-1) / 2

    @property
    def kernel(self) -> Kernel | None:
        return _SQUARED_L2 if type(self) is SquaredL2 else None

    def __repr__(self) -> str:
        return f"SquaredL2(gamma={_shown_gamma(self.gamma)})"


class Hard(Regularizer):
    """No regularization: the ordinary max, as in the Viterbi algorithm.

    Ω is 0. The gradient of the max is 1 at the first largest entry and 0 at all other entries. The Hessian of the max
    is 0. To select this Ω by name, pass ``omega="hard"``.

    >>> Hard().argmax(torch.tensor([1.0, 3.0, 3.0]))
    tensor([0., 1., 0.])
    """

    @answers_near_misses
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


def _sparsemax_threshold(x: Tensor) -> Tensor:
    """Return τ (..., 1) with Σ (x − τ)₊ = 1, by sorting: the threshold of α-entmax for α = 2."""
    descending = x.sort(-1, descending=True).values
    excess = descending.cumsum(-1) - 1
    size = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    support_size = (size * descending > excess).sum(-1, keepdim=True)
    return excess.gather(-1, (support_size - 1).clamp(min=0)) / support_size  # NaN: the support is empty


def _entmax15_threshold(x: Tensor) -> Tensor:
    """Return τ (..., 1) with Σ (x − τ)₊² = 1, by sorting: the threshold of α-entmax for α = 1.5.

    If the support consists of the k largest entries, τ is the smaller root of k τ² − 2τ Σx + Σx² = 1 over them.
    """
    descending = x.sort(-1, descending=True).values
    size = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    mean = descending.cumsum(-1) / size
    variance = (descending.square().cumsum(-1) / size - mean.square()).clamp(min=0)
    tau = mean - (1 / size - variance).clamp(min=0).sqrt()
    support_size = (tau <= descending).sum(-1, keepdim=True)
    return tau.gather(-1, (support_size - 1).clamp(min=0))


def _newton_threshold(x: Tensor, power: float) -> Tensor:
    """Return τ (..., 1) with Σ (x − τ)₊^power = 1, to the precision of the dtype, for x with maximum 0.

    The norm ‖(x − τ)₊‖_power is convex in τ and at least 1 at τ = −1. So Newton's method from −1 increases
    monotonically to the root. Eight steps are enough for a thousand entries and every power.
    """
    tau = torch.full_like(x[..., :1], -1.0)
    for _ in range(12):
        excess = (x - tau).clamp(min=0)
        largest = excess.amax(-1, keepdim=True)
        ratios = excess / largest  # the powers of these cannot overflow
        slopes = ratios.pow(power - 1)
        total = (slopes * ratios).sum(-1, keepdim=True)
        tau = tau + (largest * total.pow(1 / power) - 1) * total.pow(1 - 1 / power) / slopes.sum(-1, keepdim=True)
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
    """Return the regularizer for the public arguments ``omega``, an instance or a name, and ``gamma``.

    Raises ``ValueError`` if ``gamma`` is passed with an instance, or with "hard".

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
    """Return the regularizer at γ = 1 whose :attr:`Regularizer.kernel` is ``kernel``."""
    return KERNELS[kernel.name](*kernel.parameters)


@lru_cache
def penalty_at_vertex(kernel: Kernel) -> float:
    """Return Ω of the vector (1,) at γ = 1: the amount that a node with one parent subtracts from a path's score."""
    return float(from_kernel(kernel).penalty(torch.ones(1, dtype=torch.float64, device="cpu")))
