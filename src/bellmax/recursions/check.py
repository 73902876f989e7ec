"""The function check_program, which compares a program with its function, run on numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bellmax.inputs import check_tensor
from bellmax.recursions.choices import interpreted
from bellmax.recursions.definition import Recursion, object_array
from bellmax.recursions.paths import ProgramPaths
from bellmax.regularizers import Negentropy, Regularizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOLERANCE = 1e-8
_ROUNDING = 1e-11
_MAX_LISTED = 10_000
_MANY_TIMES = 10_000


@dataclass(frozen=True)
class ProgramReport:
    """The result of :func:`check_program`. The attribute ``ok`` is True if nothing differs."""

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
    num_unused: dict[str, int]
    """The number of entries of each score that no derivation uses."""
    num_counts: int | None
    """The number of derivations with different counts of score entries or constants; None if too many to enumerate."""
    large_constant: float | None
    """The largest constant of the program, if it is finite and much larger than the scores."""

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
                *self._notes(),
            )
        )

    def _notes(self) -> Iterator[str]:
        """Lines about properties that are allowed, but are often mistakes."""
        for name, n in self.num_unused.items():
            if n:
                yield f"{f'{n} entries' if n > 1 else '1 entry'} of {name} {'are' if n > 1 else 'is'} in no derivation"
        if self.num_counts is not None and self.num_counts < self.num_paths[0]:
            yield f"different counts: {self.num_counts}, fewer than derivations: is a solution reached in several ways?"
        if self.large_constant is not None:
            infinity = "-inf" if self.large_constant < 0 else "inf"
            yield f"large constant: {self.large_constant:g}, to forbid an option, use float('{infinity}')"


def check_program(program: Recursion, *scores: Tensor, **static: Any) -> ProgramReport:
    """Compare a program with its function, and return a report.

    The function is run in three other ways: on numbers, on tensors with logsumexp in place of max, and as an
    enumeration of all derivations. The report compares the optimum, the value and its gradient under negentropy, and
    the number of derivations. Results can differ if the function depends on anything but its arguments, such as a
    global variable or random numbers. The report also notes unused score entries, derivations with equal counts, and
    very large constants.

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
    for name in ("omega", "gamma"):
        if name in static:
            raise ValueError(f"{name} must be left out: the check uses the optimum, and negentropy with gamma=1")
    program._check_count(scores)
    named = zip(program.inputs, scores, strict=True)
    tensors = [check_tensor(name, score).detach().double().requires_grad_() for name, score in named]
    p = program(*tensors, **static)
    if not isinstance(p, ProgramPaths) or p.batch_shape:
        raise ValueError("scores must have no batch dimensions: check one problem")
    soft, other = p.value, smoothed(program, tensors, static, Negentropy())
    gradients = [torch.autograd.grad(v, tensors, allow_unused=True) if v.requires_grad else () for v in (soft, other)]
    numbers = [tensor.detach().cpu().numpy().copy() for tensor in tensors]  # the function may write into its arguments
    listed = list_derivations(program, tensors, static)
    return ProgramReport(
        hard=(program(*tensors, omega="hard", **static).value.item(), float(program.function(*numbers, **static))),
        soft=(soft.item(), other.item()),
        gradient_error=_largest_difference(*gradients),
        num_paths=(p.num_paths.item(), None if listed is None else len(listed)),
        num_nodes=p.hypergraph.num_nodes,
        num_edges=p.hypergraph.num_edges,
        num_unused=p._traced.num_unused(),
        num_counts=None if listed is None else _num_counts(program, p, tensors, static),
        large_constant=_large_constant(p, tensors),
    )


def _num_counts(program: Recursion, p: ProgramPaths, scores: Sequence[Tensor], static: Mapping[str, Any]) -> int | None:
    """Return the number of different totals of the derivations, if finite scores are replaced by random numbers."""
    sizes = [score.numel() for score in scores]
    draws = p._traced.random(torch.float64, torch.device("cpu")).split(sizes)
    pairs = [(score.detach().cpu(), draw) for score, draw in zip(scores, draws, strict=True)]
    totals = list_derivations(program, [draw.view_as(s).where(s.isfinite(), s) for s, draw in pairs], static)
    if totals is None:
        return None
    return min(len(totals), 1 + int((np.diff(np.sort(totals)) > _ROUNDING).sum()))


def _large_constant(p: ProgramPaths, scores: Sequence[Tensor]) -> float | None:
    """Return the largest constant in the weight of an edge, if it is much larger than all finite scores."""
    largest = max(p._traced.constants(), key=abs, default=0.0)
    bound = max((float(s.detach()[s.isfinite()].abs().max()) for s in scores if s.isfinite().any()), default=0.0)
    return largest if abs(largest) > _MANY_TIMES * max(1.0, bound) else None


def _are_close(a: float, b: float) -> bool:
    return a == b or abs(a - b) < _TOLERANCE * (1 + abs(b))


def _largest_difference(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Return the largest difference of two lists of gradients, where None is 0."""
    if len(a) != len(b):
        return math.inf if any(g is not None and bool(g.any()) for g in (*a, *b)) else 0.0
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
    differences = [(0 if x is None else x) - (0 if y is None else y) for x, y in pairs]
    return max((float(d.abs().max()) for d in differences if isinstance(d, Tensor) and d.numel()), default=0.0)


class Value:
    """A value of a program that runs under another meaning of max and min: a number with the operations of symbols."""

    def plus(self, other: Any) -> Value:
        """Return the sum with a value or a number."""
        raise NotImplementedError

    def times(self, factor: float) -> Value:
        """Return the product with a number."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else self.plus(other)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> Any:
        return NotImplemented if isinstance(factor, np.ndarray) else self.times(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Any:
        return self.times(1 / divisor)

    def __neg__(self) -> Any:
        return self.times(-1.0)

    def __pos__(self) -> Any:
        return self

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else self.plus(-other)

    def __rsub__(self, other: Any) -> Any:
        return self.times(-1.0).plus(other)


class Smooth(Value):
    """A tensor without dimensions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def plus(self, other: Any) -> Smooth:
        term = _tensor_of(other)
        return Smooth(term if bool(term.detach().isinf()) else self.tensor + term)  # as a trace drops what is infinite

    def times(self, factor: float) -> Smooth:
        return Smooth(self.tensor * float(factor))


class _Smoothing:
    """The meaning of max and min on tensors: the smoothed maximum of a regularizer."""

    def __init__(self, omega: Regularizer) -> None:
        self.omega = omega

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        tensors = [_tensor_of(option) for option in options]
        finite = [tensor for tensor in tensors if float(tensor.detach()) != -sense * math.inf]
        if len(finite) < 2:
            return Smooth(finite[0]) if finite else -sense * math.inf
        return Smooth(sense * self.omega.max(sense * torch.stack(finite)))


def _tensor_of(value: Any) -> Tensor:
    return value.tensor if isinstance(value, Smooth) else torch.tensor(float(value), dtype=torch.float64)


def smoothed(program: Recursion, scores: Sequence[Tensor], static: Mapping[str, Any], omega: Regularizer) -> Tensor:
    """Run the function with the smoothed max of a regularizer in place of max. Differentiable.

    Args:
        program: The program.
        scores: Its scores, without batch dimensions, in float64.
        static: The keyword arguments of the function.
        omega: The regularizer.

    """
    arrays = [object_array(tuple(s.shape), [Smooth(entry) for entry in s.flatten().unbind()]) for s in scores]
    with interpreted(_Smoothing(omega)):
        return _tensor_of(program.function(*arrays, **static))


class _TooManyError(Exception):
    """There are too many derivations to list."""


class _Derivations(Value):
    """The scores of all derivations of a value, as an array (K,)."""

    def __init__(self, scores: NDArray[np.float64]) -> None:
        if len(scores) > _MAX_LISTED:
            raise _TooManyError
        self.scores = scores

    def plus(self, other: Any) -> _Derivations:
        others = _derivations_of(other).scores
        if len(self.scores) * len(others) > _MAX_LISTED:
            raise _TooManyError
        return _Derivations((self.scores[:, None] + others).ravel())

    def times(self, factor: float) -> _Derivations:
        return _Derivations(float(factor) * self.scores)


class _Enumeration:
    """The meaning of max and min on derivations: their union."""

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        scores = [_derivations_of(option).scores for option in options]
        return _Derivations(np.concatenate([s[s != -sense * math.inf] for s in scores] or [np.empty(0)]))


def _derivations_of(value: Any) -> _Derivations:
    return value if isinstance(value, _Derivations) else _Derivations(np.array([float(value)]))


def list_derivations(
    program: Recursion, scores: Sequence[Tensor], static: Mapping[str, Any]
) -> NDArray[np.float64] | None:
    """Return the scores of all derivations, (K,), by running the function on lists; None if there are too many."""
    arrays = [
        object_array(tuple(s.shape), [_Derivations(np.array([score])) for score in s.flatten().tolist()])
        for s in scores
    ]
    try:
        with interpreted(_Enumeration()):
            scores_of_result = _derivations_of(program.function(*arrays, **static)).scores
    except _TooManyError:
        return None
    return scores_of_result[np.isfinite(scores_of_result)]
