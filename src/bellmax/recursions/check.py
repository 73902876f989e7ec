"""The function check_program, which compares a program with its function, run on numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bellmax.recursions.choices import interpreted
from bellmax.recursions.definition import Recursion
from bellmax.recursions.paths import ProgramPaths
from bellmax.regularizers import Regularizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOLERANCE = 1e-8
_MAX_LISTED = 10_000


@dataclass(frozen=True)
class ProgramReport:
    """What :func:`check_program` found. The attribute ``ok`` is True if nothing differs."""

    hard: tuple[float, float]
    """The optimum: of the distribution, and of the function on numbers."""
    soft: tuple[float, float]
    """The value under negentropy: of the distribution, and of the function on tensors with logsumexp."""
    gradient_error: float
    """The largest difference between the gradients of the two values under negentropy."""
    num_paths: tuple[float, int | None]
    """The number of derivations: of the distribution, and by enumeration; None if there are too many to enumerate."""
    num_nodes: int
    num_edges: int

    @property
    def ok(self) -> bool:
        """True if all comparisons agree."""
        counts = self.num_paths[1] is None or self.num_paths[0] == self.num_paths[1]
        return _are_close(*self.hard) and _are_close(*self.soft) and self.gradient_error < _TOLERANCE and counts

    def __str__(self) -> str:
        count, listed = self.num_paths
        shown = "too many to enumerate" if listed is None else f"{listed} by enumeration"
        return "\n".join(
            (
                f"{'agrees' if self.ok else 'DIFFERS'}: {self.num_nodes} nodes, {self.num_edges} edges",
                f"optimum: {self.hard[0]:.10g}, function on numbers: {self.hard[1]:.10g}",
                f"value under negentropy: {self.soft[0]:.10g}, function with logsumexp: {self.soft[1]:.10g}",
                f"largest difference of their gradients: {self.gradient_error:.2g}",
                f"derivations: {count:.10g}, {shown}",
            )
        )


def check_program(program: Recursion, *scores: Tensor, **static: Any) -> ProgramReport:
    """Compare a program with its function, and return a report.

    The function is run in three other ways: on numbers, on tensors with logsumexp in place of max, and as an
    enumeration of all derivations. The report compares the optimum, the value and its gradient under negentropy, and
    the number of derivations. Results can differ if the function depends on anything but its arguments, such as a
    global variable or random numbers.

    Args:
        program: The program, as :func:`bellmax.program` returns it.
        scores: The scores of one problem, without batch dimensions, at least one finite derivation. They are converted
            to float64.
        static: The keyword arguments of the function.

    >>> import torch, bellmax as bx
    >>> @bx.program("step")
    ... def stairs(cost):
    ...     total = [0.0, cost[0]]
    ...     for c in cost[1:]:
    ...         total.append(bx.min(total[-1], total[-2]) + c)
    ...     return total[-1]
    >>> report = bx.check_program(stairs, torch.tensor([1.0, 4.0, 2.0, 1.0]))
    >>> report.ok
    True
    >>> print(report)
    agrees: 4 nodes, 7 edges
    optimum: 4, function on numbers: 4
    value under negentropy: 3.548085604, function with logsumexp: 3.548085604
    largest difference of their gradients: ...
    derivations: 5, 5 by enumeration
    """
    if not isinstance(program, Recursion):
        raise ValueError(f"program must be made by bx.program, got {type(program).__name__}")
    tensors = [score.detach().double().requires_grad_() for score in scores]
    p = program(*tensors, **static)
    if not isinstance(p, ProgramPaths) or p.batch_shape:
        raise ValueError("scores must have no batch dimensions: check one problem")
    soft = p.value
    with interpreted(Smoothed()):
        other = torch.as_tensor(program.function(*tensors, **static), dtype=torch.float64)
    gradients = [torch.autograd.grad(v, tensors, allow_unused=True) if v.requires_grad else () for v in (soft, other)]
    numbers = [tensor.detach().cpu().numpy() for tensor in tensors]
    listed = _list_derivations(program, numbers, static)
    return ProgramReport(
        hard=(program(*tensors, omega="hard", **static).value.item(), float(program.function(*numbers, **static))),
        soft=(soft.item(), other.item()),
        gradient_error=_largest_difference(*gradients),
        num_paths=(p.num_paths.item(), None if listed is None else len(listed.scores)),
        num_nodes=p.hypergraph.num_nodes,
        num_edges=p.hypergraph.num_edges,
    )


def _are_close(a: float, b: float) -> bool:
    return a == b or abs(a - b) < _TOLERANCE * (1 + abs(b))


def _largest_difference(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Return the largest difference of two lists of gradients, where None is 0."""
    if len(a) != len(b):
        return math.inf if any(g is not None and bool(g.any()) for g in (*a, *b)) else 0.0
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
    differences = [(0 if x is None else x) - (0 if y is None else y) for x, y in pairs]
    return max((float(d.abs().max()) for d in differences if isinstance(d, Tensor) and d.numel()), default=0.0)


def _list_derivations(program: Recursion, scores: Sequence[NDArray[np.float64]], static: Any) -> _Derivations | None:
    """Run the function on lists of derivations. Return the derivations of the result; None if there are too many."""
    proxies = []
    for array in scores:
        proxy = np.empty(array.shape, dtype=object)
        for index in np.ndindex(array.shape):
            proxy[index] = _Derivations(array[index].reshape(1))
        proxies.append(proxy if array.shape else proxy[()])
    try:
        with interpreted(_Enumeration()):
            return _as_derivations(program.function(*proxies, **static))
    except _TooManyError:
        return None


class Smoothed:
    """The meaning of max and min on tensors: the smoothed maximum of a regularizer, by default logsumexp."""

    def __init__(self, omega: Regularizer | None = None) -> None:
        self.omega = omega

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        tensors = [torch.as_tensor(option, dtype=torch.float64) for option in options]
        finite = [tensor for tensor in tensors if float(tensor.detach()) != -sense * math.inf]
        if len(finite) < 2:
            return finite[0] if finite else -sense * math.inf
        x = sense * torch.stack(finite)
        return sense * (x.logsumexp(0) if self.omega is None else self.omega.max(x))


class _TooManyError(Exception):
    """There are too many derivations to list."""


class _Derivations:
    """The scores of all derivations of a value, as an array (K,)."""

    __array_ufunc__ = None

    def __init__(self, scores: NDArray[np.float64]) -> None:
        if len(scores) > _MAX_LISTED:
            raise _TooManyError
        self.scores = scores

    def __add__(self, other: Any) -> _Derivations:
        others = _as_derivations(other).scores
        if len(self.scores) * len(others) > _MAX_LISTED:
            raise _TooManyError
        return _Derivations((self.scores[:, None] + others).ravel())

    __radd__ = __add__

    def __mul__(self, factor: float) -> _Derivations:
        return _Derivations(factor * self.scores)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> _Derivations:
        return self.__mul__(1 / divisor)

    def __neg__(self) -> _Derivations:
        return self.__mul__(-1.0)

    def __sub__(self, other: Any) -> _Derivations:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> _Derivations:
        return (-self).__add__(other)


def _as_derivations(value: Any) -> _Derivations:
    return value if isinstance(value, _Derivations) else _Derivations(np.array([float(value)]))


class _Enumeration:
    """The meaning of max and min on derivations: their union."""

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        scores = [_as_derivations(option).scores for option in options]
        finite = [s[s != -sense * math.inf] for s in scores]
        return _Derivations(np.concatenate(finite)) if finite else _Derivations(np.empty(0))
