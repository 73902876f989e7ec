"""The routes by which DTW of pairs of series is computed, and the table that chooses one of them.

``ROUTES`` is the only place where the choice is made. Each route names the requests that it can answer and its
conditions, in words and as a predicate. The first route whose conditions all hold is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bellmax.autograd import Shortcut
from bellmax.backends import BACKENDS
from bellmax.backends.fused import ShortPairs
from bellmax.regularizers import Kernel, with_gamma
from bellmax.series.costs import as_power, broadcast, pairwise, power_costs, power_gradients
from bellmax.series.long_pairs import long_pair_values
from bellmax.series.measure import Measure
from bellmax.series.runs import Advance, Selection, num_pairs, slices
from bellmax.series.search import can_search, concatenated, is_finite, search
from bellmax.tensors import Tensors, inner, multiply_by_gamma, read_gamma
from bellmax.transforms import is_transformed, needs_grad

_HARD = Kernel("hard")
_SHORT = 64  # steps up to which one pair in each lane is faster than strips of one pair
_FEW = 8  # pairs below which most lanes would be idle
_LONG = 2**18  # cells of a pair from which chunks are faster than the whole cost matrix
_LARGE = 2**22  # cells of a batch from which chunks are faster
_ROWS = 256  # of a tile that the search computes at a time


# --- requests


class Batch(NamedTuple):
    """Pairs of series (..., N, D) and (..., M, D), whose batch dimensions broadcast; of full length without lengths."""

    x: Tensor
    y: Tensor
    lengths_x: Tensor | None = None
    lengths_y: Tensor | None = None


class Tile(NamedTuple):
    """All pairs of two lists of series."""

    left: list[Tensor]
    right: list[Tensor]
    is_diagonal: bool
    """True if both lists are the same."""
    advance: Advance
    """Is called with the number of pairs that were computed."""


Request: TypeAlias = "Batch | Selection | Tile"


def values(measure: Measure, request: Batch | Selection) -> Tensor:
    """f of each pair: of the shape of the batch, or (P,) for the pairs of a selection."""
    route = route_of(measure, request)
    if route is not None:
        return route.compute(measure, request)
    assert isinstance(request, Selection)
    row, column, i, j = request
    return values(measure, Batch(row.series[i], column.series[j], row.lengths[i], column.lengths[j]))


def route_of(measure: Measure, request: Request) -> Route | None:
    """The route that answers a request; None if the request must be cut into simpler ones."""
    for route in _ROUTES_OF[type(request)]:
        for condition in route.conditions:
            if not condition.holds(measure, request):
                break
        else:
            return route
    return None


# --- conditions


class Condition(NamedTuple):
    """A condition of a route."""

    words: str
    holds: Callable[[Measure, Any], bool]


def _tensors(measure: Measure, request: Batch | Selection) -> Tensors:
    """The tensors in which f may have a gradient."""
    gamma = measure.omega.gamma
    x, y = request[:2] if isinstance(request, Batch) else (request.row.series, request.column.series)
    return (x, y, gamma) if isinstance(gamma, Tensor) else (x, y)


def _power(measure: Measure, request: Batch | Selection) -> int | None:
    return as_power(measure.cost, _tensors(measure, request)[0].shape[-1])


def _num_cells(batch: Batch) -> int:
    """The size of one cost matrix."""
    return batch.x.shape[-2] * batch.y.shape[-2]


def _is_large(measure: Measure, batch: Batch) -> bool:
    return broadcast(batch.x.shape[:-2], batch.y.shape[:-2]).numel() * _num_cells(batch) >= _LARGE


def _has_fixed_cost(measure: Measure, batch: Batch) -> bool:
    """True if the cost has no gradient of its own. Tries a cost function on the first elements."""
    if not callable(measure.cost):
        return True
    x, y = (series.detach()[..., :1, :] for series in batch[:2])
    costs = pairwise(x, y, measure.cost)
    return costs.dtype == x.dtype and not costs.requires_grad


def _has_chunks(measure: Measure, batch: Batch) -> bool:
    return measure.omega.kernel is not None and measure.fused_kernels(batch.x.device).long_pairs is not None


def _has_lanes(measure: Measure, selection: Selection) -> bool:
    problem, kernel = _short_pairs_problem(measure, selection), measure.fused_kernels(selection.i.device).short_pairs
    return problem is not None and kernel is not None and kernel.supports(problem)


_OF_POWERS = Condition(
    'cost is "sqeuclidean", "cityblock" or, for one feature, "euclidean"', lambda m, r: _power(m, r) is not None
)
_VALUE = Condition('divergence is None or "debiased"', lambda m, r: m.is_value)
_PLAIN_MOVES = Condition("no step weights or penalties, no open ends", lambda m, r: m.moves.are_plain)
_EAGER = Condition("no torch.compile, torch.func or forward mode", lambda m, r: not is_transformed(*_tensors(m, r)))
_GRADIENT = Condition("a gradient is recorded", lambda m, r: needs_grad(*_tensors(m, r)))
_NO_GRADIENT = Condition("no gradient is recorded", lambda m, r: not needs_grad(*_tensors(m, r)))
_NARROW_GAMMA = Condition(
    "gamma is a number, or a tensor of no wider dtype than the series", lambda m, r: m.keeps_dtype(_tensors(m, r)[0])
)


# --- routes


class Route(NamedTuple):
    """A way to compute f, and its conditions."""

    name: str
    request: type
    pairs: str
    """The kind of request, in words."""
    fused: str | None
    """The fused kernel that the backend must have, or None for the sweeps over cost matrices."""
    conditions: tuple[Condition, ...]
    """All must hold. Cheap conditions that often fail come first."""
    compute: Callable[[Measure, Any], Tensor]


def _search_tile(measure: Measure, tile: Tile) -> Tensor:
    """All pairs (K, L) by the search for nearest neighbours, with k = all."""
    left, right, is_diagonal, advance = tile
    distances = right[0].new_zeros(len(left), len(right))
    # If the lists are the same, a candidate that comes before the queries is skipped; small steps skip most of them.
    for rows in slices(len(left), _ROWS // 8 if is_diagonal else _ROWS):
        start = rows.start if is_diagonal else 0
        queries, candidates = left[rows], right[start:]
        excluded = torch.full((len(queries),), -1, device=distances.device)
        nearest = search(measure, concatenated(queries), concatenated(candidates), excluded, len(candidates))
        distances[rows, start:].scatter_(1, nearest.indices, nearest.distances)
        advance(num_pairs(len(queries), len(queries), is_diagonal) + len(queries) * (len(candidates) - len(queries)))
    if is_diagonal:
        distances.triu_()
        distances += distances.triu(1).mT
    return distances


def _short_pairs_problem(measure: Measure, selection: Selection) -> ShortPairs | None:
    row, column, i, j = selection
    power, omega = _power(measure, selection), measure.omega.kernel
    if power is None or omega is None:
        return None
    scale = 1 / read_gamma(measure.omega.gamma)
    return ShortPairs(row.series, column.series, (row.lengths, column.lengths), (i, j), power, scale, omega)


def _short_pairs(measure: Measure, selection: Selection) -> Tensor:
    """The values (P,) of pairs, one in each lane."""
    problem, kernel = _short_pairs_problem(measure, selection), measure.fused_kernels(selection.i.device).short_pairs
    assert problem is not None
    assert kernel is not None
    unit_values = kernel.run(problem)
    assert unit_values is not None
    return multiply_by_gamma(unit_values, read_gamma(measure.omega.gamma))


def _long_pairs(measure: Measure, batch: Batch) -> Tensor:
    return long_pair_values(measure, *batch)


def _one_node(measure: Measure, batch: Batch) -> Tensor:
    """The values as one node of the autograd graph, from the series to the value. It saves no costs but θ = C/γ."""
    x, y, lengths_x, lengths_y = batch
    power, gamma = _power(measure, batch), measure.omega.gamma
    assert power is not None
    learns_gamma = isinstance(gamma, Tensor) and gamma.requires_grad
    inputs = (x, y, gamma) if isinstance(gamma, Tensor) and learns_gamma else (x, y)
    if isinstance(gamma, Tensor):
        measure = measure.with_gamma(gamma.detach())
        measure = measure.with_number_gamma(x)
    p = measure.over(power_costs(x, y, power), lengths_x, lengths_y)
    (theta,), unit_value, tape = p._solver.eager_forward()
    solver, flat = p._solver.without_scores(), p._solver.batch
    pairs, cost, omega, needed = p.cost.shape[:-2], measure.cost, p.omega, (x.requires_grad, y.requires_grad)

    def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
        theta, tape, *unit_value = saved
        seed = flat.seed(grad, [theta])
        (path,) = flat.run("backward", [theta], tape, seed)
        gradients = power_gradients(inputs[0], inputs[1], path.reshape(*pairs, *path.shape[-2:]), power, needed)
        if learns_gamma:
            gradient = _gamma_gradient(unit_value[0], inner(path, theta, 2), seed)
            gradients.append(gradient.reshape(pairs).sum_to_size(inputs[2].shape).to(inputs[2].dtype))
        return gradients

    def general(inputs: Tensors, saved: Tensors) -> Tensor:
        costs = pairwise(inputs[0], inputs[1], cost)
        its_omega = with_gamma(omega, inputs[2]) if learns_gamma else omega
        return solver.with_scores((costs.expand(*pairs, *costs.shape[-2:]),), its_omega).value()

    is_scaled = isinstance(omega.gamma, Tensor) or omega.gamma != 1
    result = flat.rescale(unit_value if is_scaled else unit_value.clone(), omega.gamma)  # not a view of the tape
    saved = (theta, tape, unit_value) if learns_gamma else (theta, tape)
    return Shortcut(vjp, general).attach(result, inputs, saved)


def _gamma_gradient(unit_value: Tensor, paid: Tensor, seed: Tensor) -> Tensor:
    """∂(γ v(C/γ))/∂γ = v(C/γ) − ⟨E, C/γ⟩, times the seed (B,); 0 for pairs without an alignment.

    ``unit_value`` is v(C/γ), and ``paid`` is ⟨E, C/γ⟩ times the seed.
    """
    return torch.where(unit_value.isinf(), 0, seed * unit_value.masked_fill(unit_value.isinf(), 0) - paid)


def _distribution(measure: Measure, batch: Batch) -> Tensor:
    """The values, or the costs of expected alignments, by the verbs of :class:`DTW`."""
    alignments, cost = measure.alignments(*batch)
    if measure.is_value:
        return alignments.value
    expected = inner(alignments.expected_path, cost, 2)
    return expected.masked_fill(alignments.value == math.inf, math.inf)


ROUTES = (
    Route(
        "neighbour search",
        Tile,
        "all pairs of two collections",
        "neighbors",
        (
            Condition("Ω is hard", lambda m, t: m.omega.kernel == _HARD),
            Condition("divergence is None", lambda m, t: m.divergence is None),
            Condition(
                f"a band, or a series longer than {_SHORT} steps",
                lambda m, t: m.band is not None or max(map(len, (*t.left, *t.right))) > _SHORT,
            ),
            Condition(_OF_POWERS.words, lambda m, t: can_search(m, concatenated(t.right[:1]))),
            Condition("finite series", lambda m, t: all(is_finite(concatenated(side)) for side in t[:2])),
        ),
        _search_tile,
    ),
    Route(
        "short pairs",
        Selection,
        "pairs of two collections",
        "short_pairs",
        (
            Condition(
                f"at most {_SHORT} steps",
                lambda m, s: max(s.row.series.shape[1], s.column.series.shape[1]) <= _SHORT,
            ),
            Condition(f"at least {_FEW} pairs", lambda m, s: len(s.i) >= _FEW),
            Condition("no band", lambda m, s: m.band is None),
            _VALUE,
            _EAGER,
            _NO_GRADIENT,
            _NARROW_GAMMA,
            _OF_POWERS,
            Condition("float32 or float64, compiled Ω", _has_lanes),
            Condition(
                "finite series", lambda m, s: all(bool(t.isfinite().all()) for t in (s.row.series, s.column.series))
            ),
        ),
        _short_pairs,
    ),
    Route(
        "long pairs",
        Batch,
        "a batch of pairs",
        "long_pairs",
        (
            Condition(f"at least {_LONG:,} cells in each cost matrix", lambda m, b: _num_cells(b) >= _LONG),
            Condition(f"at least {_LARGE:,} cells in the batch", _is_large),
            _VALUE,
            _PLAIN_MOVES,
            _EAGER,
            _NARROW_GAMMA,
            Condition("compiled Ω", _has_chunks),
            Condition("cost is a name, or a function whose parameters need no gradient", _has_fixed_cost),
        ),
        _long_pairs,
    ),
    Route(
        "one node",
        Batch,
        "a batch of pairs",
        None,
        (_GRADIENT, _VALUE, _PLAIN_MOVES, _OF_POWERS, _EAGER, _NARROW_GAMMA),
        _one_node,
    ),
    Route("distribution", Batch, "a batch of pairs", None, (), _distribution),
)
"""All routes, in the order in which they are tried."""

_ROUTES_OF = {kind: [route for route in ROUTES if route.request is kind] for kind in (Batch, Selection, Tile)}


def describe_routes(backend: str) -> str:
    """The table of the routes that a backend has, in order, as text: the conditions follow the name of the route."""
    fused = BACKENDS[backend].fused
    routes = [route for route in ROUTES if route.fused is None or getattr(fused, route.fused) is not None]
    lines = []
    for number, route in enumerate(routes, 1):
        lines.append(f"{number}. {route.name}, for {route.pairs}{' if' if route.conditions else ' otherwise'}")
        lines += [f"   - {condition.words}" for condition in route.conditions]
    return "\n".join(lines)
