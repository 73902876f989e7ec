"""The routes by which DTW of pairs of series is computed, and the table that chooses one of them.

``ROUTES`` is the only place where the choice is made. Each route names the requests that it can answer and its
conditions, in words and as a predicate. The first route whose conditions all hold is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from bellmax.backends import BACKENDS
from bellmax.modes import is_transformed, needs_grad
from bellmax.regularizers import Kernel
from bellmax.series.costs import as_power, broadcast, pairwise
from bellmax.series.long_pairs import has_long_pairs_kernel, long_pair_values
from bellmax.series.measure import Measure
from bellmax.series.one_node import one_node_values
from bellmax.series.runs import Advance, Selection
from bellmax.series.search import can_search, concatenated, is_finite, search_all
from bellmax.series.short_pairs import has_short_pairs_kernel, short_pair_values
from bellmax.tensors import Tensors, inner

_HARD = Kernel("hard")
_SHORT = 64  # steps up to which one pair in each lane is faster than strips of one pair
_FEW = 8  # pairs below which most lanes would be idle
_LONG = 2**18  # cells of a pair from which chunks are faster than the whole cost matrix
_LARGE = 2**22  # cells of a batch from which chunks are faster


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


def _num_cells(batch: Batch) -> int:
    """The size of one cost matrix."""
    return batch.x.shape[-2] * batch.y.shape[-2]


def _is_large(measure: Measure, batch: Batch) -> bool:
    return broadcast(batch.x.shape[:-2], batch.y.shape[:-2]).numel() * _num_cells(batch) >= _LARGE


def _has_fixed_cost(measure: Measure, batch: Batch) -> bool:
    """True if the cost has a gradient in the series only. Tries a cost function on the first elements."""
    if not callable(measure.cost):
        return True
    x, y = (series.detach()[..., :1, :] for series in batch[:2])
    costs = pairwise(x, y, measure.cost)
    return costs.dtype == x.dtype and not costs.requires_grad


_OF_POWERS = Condition(
    'cost is "sqeuclidean", "cityblock" or, for one feature, "euclidean"',
    lambda m, r: as_power(m.cost, _tensors(m, r)[0].shape[-1]) is not None,
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


def _values_of_distribution(measure: Measure, batch: Batch) -> Tensor:
    """The values, or the costs of expected alignments, by the verbs of :class:`DTW`."""
    alignments, cost = measure.alignments(*batch)
    if measure.is_value:
        return alignments.value
    expected = inner(alignments.expected_path, cost, 2)
    return expected.masked_fill(alignments.value == math.inf, math.inf)


ROUTES = (
    Route(
        "neighbor search",
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
        lambda m, t: search_all(m, *t),
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
            Condition("float32 or float64, compiled Ω", has_short_pairs_kernel),
            Condition(
                "finite series", lambda m, s: all(bool(t.isfinite().all()) for t in (s.row.series, s.column.series))
            ),
        ),
        short_pair_values,
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
            Condition("float32 or float64, compiled Ω", lambda m, b: has_long_pairs_kernel(m, b.x, b.y)),
            Condition("cost is a name, or a function whose parameters need no gradient", _has_fixed_cost),
        ),
        lambda m, b: long_pair_values(m, *b),
    ),
    Route(
        "one node",
        Batch,
        "a batch of pairs",
        None,
        (_GRADIENT, _VALUE, _PLAIN_MOVES, _OF_POWERS, _EAGER, _NARROW_GAMMA),
        lambda m, b: one_node_values(m, *b),
    ),
    Route("distribution", Batch, "a batch of pairs", None, (), _values_of_distribution),
)
"""All routes, in the order in which they are tried."""

_ROUTES_OF = {kind: [route for route in ROUTES if route.request is kind] for kind in (Batch, Selection, Tile)}


def describe_routes(backend: str) -> str:
    """The routes that a backend has, as text: each name is followed by the conditions, one on each line."""
    fused = BACKENDS[backend].fused
    routes = [route for route in ROUTES if route.fused is None or getattr(fused, route.fused) is not None]
    lines = []
    for number, route in enumerate(routes, 1):
        lines.append(f"{number}. {route.name}, for {route.pairs}{' if' if route.conditions else ' otherwise'}")
        lines += [f"   - {condition.words}" for condition in route.conditions]
    return "\n".join(lines)
