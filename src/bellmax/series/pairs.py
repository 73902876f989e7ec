"""The warped distance of two series, or of a batch of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import bellmax.series.blocks as blocks
from bellmax.autograd import Shortcut
from bellmax.inputs import (
    Lengths,
    Numbers,
    answers_near_misses,
    as_floating,
    as_lengths,
    as_pair,
    as_series,
    check_band,
    check_choice,
)
from bellmax.programs.values import check_lengths
from bellmax.regularizers import Negentropy, Regularizer, resolve
from bellmax.series.costs import COSTS, Cost, as_power, broadcast, pairwise, power_costs, power_gradients
from bellmax.structures.dtw import DTW, StepWeights
from bellmax.tensors import Gamma, Tensors, inner, promote_half
from bellmax.transforms import is_transformed, needs_grad

_SMALL = 2**12  # cells of a pair that no kernel takes by blocks
_DIVERGENCES = ("debiased", "sharp", "mean_cost")
_NORMALIZATIONS = ("path", "length")
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": Tensor.mean, "sum": Tensor.sum}


@answers_near_misses
def dtw(
    x: Numbers,
    y: Numbers,
    *,
    cost: Cost = "sqeuclidean",
    lengths: tuple[Lengths, Lengths] | None = None,
    band: float | None = None,
    step_weights: StepWeights | None = None,
    step_penalties: StepWeights | None = None,
    open_begin: bool = False,
    open_end: bool = False,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    normalize: str | None = None,
    reduction: str = "none",
) -> Tensor:
    """Smoothed dynamic time warping of series x and y, or a divergence made of it; twice differentiable in both.

    The value DTW_Ω(x, y) is biased: it is not least at x = y, and may be negative. The divergences subtract the bias,
    f(x, y) − f(x, x)/2 − f(y, y)/2, and are exactly 0 at x = y:

    - "debiased": f is DTW_Ω, the value;
    - "sharp": f is the cost ⟨E, C⟩ of the expected alignment E = ∇DTW_Ω(C), without what Ω adds;
    - "mean_cost": f is the mean cost of all alignments, to which "sharp" tends under negentropy as γ → ∞.

    "debiased" is never negative under negentropy with γ = 1, the cost "log_sqeuclidean" and no band (Blondel, Mensch,
    Vert, 2021): exp(−DTW_Ω) is then a positive definite kernel. For another γ, divide the series by √γ and multiply the
    result by γ. There is no proof for other costs, and a sparse Ω does go below 0, as in the last example.

    Args:
        x: (..., N, D), or (N,) for one series of numbers: a tensor, an array, a list, a pandas row. A matrix is one
            series (N, D); for a batch of univariate series (B, N), pass ``x.unsqueeze(-1)``. Lists are read as NumPy
            reads them, and integers take the floating point type of the other series.
        y: (..., M, D) or (M,) likewise. Batch dimensions broadcast.
        cost: what a match of two elements costs: "sqeuclidean" ‖x − y‖²; "euclidean" ‖x − y‖; "cityblock" ‖x − y‖₁;
            "cosine" 1 − cos(x, y), that is ½‖x/‖x‖ − y/‖y‖‖², where 0/‖0‖ is 0; "log_sqeuclidean" δ + log(2 − e^−δ)
            with δ = ½‖x − y‖²; or a function of (..., N, D) and (..., M, D) that gives (..., N, M). Where a distance
            has a kink, at equal points, its gradient is 0.
        lengths: (lengths of x, lengths of y), each integers that broadcast with the batch, or a number, from 1 to N and
            to M. Padding past the end may hold NaN, and gets no gradient.
        band: as in :class:`DTW`, for every term of a divergence.
        step_weights: as in :class:`DTW`: factors of the cost for moves along the diagonal, along x and along y.
        step_penalties: as in :class:`DTW`: terms for each of these moves.
        open_begin: whether x may be matched with a part of y that begins anywhere.
        open_end: whether that part may end anywhere.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default. A tensor broadcasts with the batch.
        divergence: None for the value, "debiased", "sharp" or "mean_cost".
        normalize: None for the sum along the alignment, which grows with the series; "path" to divide the result by the
            expected number of matches of x with y; "length" to divide it by N + M, the lengths of the two.
        reduction: over the batch: "none", "mean" or "sum".

    Returns:
        Of the batch shape, or a number, in the widest type given.

    >>> import bellmax as bx
    >>> bx.dtw([0, 1, 2], [0, 2, 2], omega="hard")                # the lists of a first try
    tensor(1.)
    >>> x = torch.tensor([[1.495], [0.787], [0.23], [-0.123], [1.089]])
    >>> y = torch.tensor([[1.513], [0.835], [0.246], [-0.106], [1.102]])
    >>> bx.dtw(x, y), bx.dtw(x, x), bx.dtw(x, x, divergence="debiased")
    (tensor(-3.7042), tensor(-3.7066), tensor(0.))
    >>> bx.dtw(x, y, divergence="debiased", cost="log_sqeuclidean")
    tensor(0.0021)
    >>> bx.dtw(x, y, divergence="debiased", omega="l2")
    tensor(-0.0004)
    """
    moves = Moves(step_weights, step_penalties, open_begin, open_end)
    measure = measure_of(cost, band, resolve(omega, gamma), divergence, moves)
    check_options(normalize, reduction)
    x, y, of_x, of_y = check_pair(x, y, lengths, measure.gamma_shape)
    value = measure(x, y, of_x, of_y)
    if divergence is not None:
        value = value - measure(x, x, of_x, of_x) / 2 - measure(y, y, of_y, of_y) / 2
    if normalize == "path":
        value = value / measure.matches(x, y, of_x, of_y)
    elif normalize == "length":
        value = value / ((x.shape[-2] if of_x is None else of_x) + (y.shape[-2] if of_y is None else of_y))
    return _REDUCTIONS[reduction](value)


def check_options(normalize: str | None, reduction: str) -> None:
    check_choice("reduction", reduction, _REDUCTIONS)
    if normalize is not None:
        check_choice("normalize", normalize, _NORMALIZATIONS, "None or ")


def check_pair(
    x: Numbers, y: Numbers, lengths: tuple[Lengths, Lengths] | None, gamma_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Series (..., N, D) and (..., M, D) of one dtype, cut to a length that is the same for all, and the lengths that
    remain."""
    a, b = (promote_half(series) for series in as_floating([as_series("x", x), as_series("y", y)]))
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"x and y must have the same number of features, got {a.shape[-1]} in x of shape {tuple(a.shape)} and "
            f"{b.shape[-1]} in y of shape {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"y must be on the device of x, {a.device}, got {b.device}")
    given = (None, None) if lengths is None else as_pair(lengths)
    a, of_a = _cut("lengths[0]", a, given[0])
    b, of_b = _cut("lengths[1]", b, given[1])
    shapes = {"x": a.shape[:-2], "y": b.shape[:-2], "gamma": gamma_shape}
    shapes |= {f"lengths[{side}]": own.shape for side, own in enumerate((of_a, of_b)) if own is not None}
    try:
        broadcast(*shapes.values())
    except RuntimeError:
        each = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items() if shape)
        raise ValueError(f"batch shapes must broadcast, got {each}") from None
    return _zeros_past_end(a, of_a), _zeros_past_end(b, of_b), of_a, of_b


def _cut(name: str, series: Tensor, length: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """The series up to a length that is the same for all, or the lengths of each."""
    steps = series.shape[-2]
    if length is None:
        return series, None
    if isinstance(length, int):
        if not 1 <= length <= steps:
            raise ValueError(f"{name} must be from 1 to {steps}, got {length}")
        return series[..., :length, :], None
    return series, as_lengths(name, length, series.device)


def _zeros_past_end(series: Tensor, lengths: Tensor | None) -> Tensor:
    """The series with zeros past the end."""
    if lengths is None:
        return series
    past = torch.arange(series.shape[-2], device=series.device) >= lengths.unsqueeze(-1)
    return series.masked_fill(past.unsqueeze(-1), 0)


class Moves(NamedTuple):
    """What :class:`DTW` takes beside costs, lengths and band."""

    step_weights: StepWeights | None = None
    step_penalties: StepWeights | None = None
    open_begin: bool = False
    open_end: bool = False

    @property
    def are_plain(self) -> bool:
        return all(part is None or part is False for part in self)


@dataclass(frozen=True)
class Measure:
    """The f of a divergence, and the value where there is none."""

    cost: Cost
    band: float | None
    omega: Regularizer
    divergence: str | None
    moves: Moves

    @property
    def gamma_shape(self) -> torch.Size:
        return self.omega.gamma.shape if isinstance(self.omega.gamma, Tensor) else torch.Size()

    @property
    def may_require_grad(self) -> bool:
        """Whether something other than the series may ask for a gradient: γ, or the parameters of a function."""
        tensors = (self.omega.gamma, *self.moves)
        return callable(self.cost) or any(isinstance(t, Tensor) and t.requires_grad for t in tensors)

    def __call__(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None = None, lengths_y: Tensor | None = None
    ) -> Tensor:
        """f of each pair of series (..., N, D) and (..., M, D), of the whole of them where no lengths are given."""
        if self._is_by_blocks(x, y):
            return self._by_blocks(x, y, lengths_x, lengths_y)
        power = as_power(self.cost, x.shape[-1])
        is_value = self.divergence not in ("sharp", "mean_cost")
        is_plain = self.moves.are_plain and not (isinstance(self.omega.gamma, Tensor) or is_transformed(x, y))
        if is_value and is_plain and power is not None and needs_grad(x, y):
            return self._from_series(x, y, lengths_x, lengths_y, power)
        alignments, cost = self.alignments(x, y, lengths_x, lengths_y)
        if is_value:
            return alignments.value
        expected = inner(alignments.expected_path, cost, 2)
        return expected.masked_fill(alignments.value == math.inf, math.inf)

    def _from_series(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None, power: int
    ) -> Tensor:
        """The value as one node of the graph: from the series to the cost, and from there."""
        p = self._over(power_costs(x, y, power), lengths_x, lengths_y)
        solver, pairs = p._solver.without_scores(), p.cost.shape[:-2]
        (theta,), value, tape = p._solver.eager_forward()
        batch, needed = p._solver.batch, (x.requires_grad, y.requires_grad)

        def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
            (path,) = batch.run("backward", saved[:1], saved[1], batch.seed(grad, saved[:1]))
            return power_gradients(inputs[0], inputs[1], path.reshape(*pairs, *path.shape[-2:]), power, needed)

        def general(inputs: Tensors, saved: Tensors) -> Tensor:
            cost = pairwise(inputs[0], inputs[1], self.cost)
            return solver.with_inputs((cost.expand(*pairs, *cost.shape[-2:]),)).value()

        result = batch.rescale(value.clone() if batch.gamma == 1 else value, self.omega.gamma)
        return Shortcut(vjp, general).attach(result, (x, y), (theta, tape))

    def matches(self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> Tensor:
        """The expected number of cells of an alignment of each pair; 1 where there is none."""
        alignments, _ = self.alignments(x, y, lengths_x, lengths_y)
        expected = alignments.expected_path.flatten(-2).sum(-1)
        return expected.masked_fill(expected == 0, 1)

    def alignments(
        self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None
    ) -> tuple[DTW, Tensor]:
        """The distribution over alignments, and the cost of a match of each two elements (..., N, M)."""
        p = self._over(pairwise(x, y, self.cost), lengths_x, lengths_y)
        if self.divergence != "mean_cost":
            return p, p.cost
        free = torch.zeros_like(p.cost).masked_fill(p.cost.detach() == math.inf, math.inf)
        return p._with((free,), Negentropy()), p.cost

    def _over(self, cost: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> DTW:
        """The distribution over alignments, given costs (..., N, M)."""
        given = [own.shape for own in (lengths_x, lengths_y) if own is not None]
        batch = broadcast(cost.shape[:-2], self.gamma_shape, *given)
        cost = cost.expand(*batch, *cost.shape[-2:])
        lengths = None
        if given:
            lengths = (
                cost.shape[-2] if lengths_x is None else lengths_x.expand(batch),
                cost.shape[-1] if lengths_y is None else lengths_y.expand(batch),
            )
        return DTW(cost, lengths=lengths, band=self.band, omega=self.omega, **self.moves._asdict())

    def _is_by_blocks(self, x: Tensor, y: Tensor) -> bool:
        if (
            not self.moves.are_plain
            or x.shape[-2] * y.shape[-2] < _SMALL
            or self.divergence in ("sharp", "mean_cost")
            or is_transformed(x, y)
        ):
            return False
        batch = broadcast(x.shape[:-2], y.shape[:-2]).numel()
        return blocks.serves(batch, x.shape[-2], y.shape[-2], x.device, self.omega)

    def _by_blocks(self, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None) -> Tensor:
        """The values of pairs that are so large that their cost matrices had better not exist."""
        sides = ((x, lengths_x), (y, lengths_y))
        shapes = [series.shape[:-2] for series, _ in sides]
        batch = broadcast(*shapes, *(own.shape for _, own in sides if own is not None))
        flat = []
        for side, (series, own) in enumerate(sides):
            every = series.expand(*batch, *series.shape[-2:]).reshape(-1, *series.shape[-2:]).unbind()
            if own is None:
                flat.append(every)
                continue
            each = own.expand(batch).reshape(-1)
            check_lengths(f"lengths[{side}]", each, 1, series.shape[-2])
            flat.append(tuple(s[:n] for s, n in zip(every, each.tolist(), strict=True)))
        costs = partial(pairwise, cost=self.cost)
        values = [blocks.value_in_blocks(a, b, costs, self.band, self.omega) for a, b in zip(*flat, strict=True)]
        return torch.stack(values).reshape(batch)


def measure_of(
    cost: Cost, band: float | None, omega: Regularizer, divergence: str | None, moves: Moves | None = None
) -> Measure:
    if not callable(cost):
        check_choice("cost", cost, COSTS, "a function or ")
    if divergence is not None:
        check_choice("divergence", divergence, _DIVERGENCES, "None or ")
    check_band(band)
    return Measure(cost, band, omega, divergence, moves or Moves())
