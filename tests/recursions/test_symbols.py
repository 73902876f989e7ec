"""Wrong programs give one sentence that names the line; right ones may use sums, numbers and arrays freely."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bellmax as bx

VALUES = torch.tensor([2.0, 3.0, 1.0, 4.0], dtype=torch.float64)


def branches(value: Any) -> Any:
    best = 0.0
    for v in value:
        if best + v > 0:  # here
            best = best + v
    return best


def takes_python_max(value: Any) -> Any:
    return max(value[0], value[1])  # here


def sorts(value: Any) -> Any:
    return sum(sorted(value))  # here


def compares(value: Any) -> Any:
    return value[0] if value[0] == value[1] else value[2]  # here


def takes_numpy_max(value: Any) -> Any:
    return np.max(value)  # here


def mixes(value: Any) -> Any:
    return bx.min(bx.max(value[0], value[1]), 1.0)  # here


def multiplies_a_node(value: Any) -> Any:
    return 2 * bx.max(value[0], value[1])  # here


def negates_a_node(value: Any) -> Any:
    return -bx.max(value[0], value[1])  # here


def subtracts_a_node(value: Any) -> Any:
    return value[2] - bx.max(value[0], value[1])  # here


def multiplies_scores(value: Any) -> Any:
    return value[0] * value[1]  # here


def takes_a_power(value: Any) -> Any:
    return value[0] ** 2  # here


def divides_by_zero(value: Any) -> Any:
    return value[0] / 0  # here


def multiplies_by_infinity(value: Any) -> Any:
    return value[0] * math.inf  # here


def is_out_of_range(value: Any) -> Any:
    return bx.max(value[7], value[0])  # here


def has_too_many_indices(value: Any) -> Any:
    return bx.max(value[0, 1], value[0])  # here


def indexes_with_a_score(value: Any) -> Any:
    return [1, 2][value[0]]  # here


def counts_to_a_score(value: Any) -> Any:
    return sum(range(value[0]))  # here


def takes_an_exponential(value: Any) -> Any:
    return math.exp(value[0])  # here


def iterates_over_a_score(value: Any) -> Any:
    return list(value[0])  # here


def stacks(value: Any) -> Any:
    return torch.stack(list(value))  # here


def uses_a_tensor(value: Any) -> Any:
    return bx.max(value[0], torch.tensor(1.0))  # here


def adds_a_tensor(value: Any) -> Any:
    return torch.tensor(1.0) + value[0]  # here


def uses_a_string(value: Any) -> Any:
    return bx.max("a", value[0])  # here


def uses_lists(value: Any) -> Any:
    return bx.max([value[0]], [value[1]])  # here


def passes_a_key(value: Any) -> Any:
    return bx.max(value, key=len)  # type: ignore[call-arg]  # here


def adds_nan(value: Any) -> Any:
    return value[0] + math.nan  # here


def is_infinitely_good(value: Any) -> Any:
    return bx.max(value[0], math.inf)  # here


def is_infinitely_cheap(value: Any) -> Any:
    return bx.min(value[0], -math.inf)  # here


def returns_nothing(value: Any) -> Any:
    value[0] + 1  # here


def returns_a_list(value: Any) -> Any:
    return [value[0]]  # here


def returns_nan(value: Any) -> Any:
    return math.nan  # here


def has_two_returns(value: Any) -> Any:  # here
    if len(value) > 3:
        return [value[0]]
    return [value[1]]


def fills_an_array_of_numbers(value: Any) -> Any:
    best = np.zeros(4)
    best[0] = value[0]  # here
    return best[0]


def fills_a_tensor(value: Any) -> Any:
    best = torch.zeros(4)
    best[:] = value  # here
    return best[0]


def starts_from_a_tensor(value: Any) -> Any:
    best = torch.zeros(4)
    return bx.max(best[0], value[0])  # here


def asks_for_an_item(value: Any) -> Any:
    return value[0].item()  # here


def clones(value: Any) -> Any:
    return value.clone()[0]  # here


def takes_the_max_of_rows(value: Any) -> Any:
    return bx.max(value[:2], value[2:])  # here


def indexes_twice(value: Any) -> Any:
    return value[0][1]  # here


def unpacks_a_score(value: Any) -> Any:
    first, second = value[0]  # here
    return bx.max(first, second)


def takes_the_length_of_a_score(value: Any) -> Any:
    return len(value[0])  # here


def indexes_an_array_with_a_score(value: Any) -> Any:
    return value[None][0, value[1]]  # here


def asks_for_a_size(value: Any) -> Any:
    return bx.max(value[n] for n in range(value.size(0)))  # here


def joins_lists(value: Any) -> Any:
    return bx.max(list(value), 0.0)  # here


def takes_the_max_of_keys(value: Any) -> Any:
    return bx.max(dict(enumerate(value)))  # here


def uses_dim(value: Any) -> Any:
    return value.sum(dim=0)  # here


def branches_on_an_array(value: Any) -> Any:
    return value[0] if value else 0.0  # here


def looks_for_nan(value: Any) -> Any:
    return 0.0 if np.isnan(value[0]) else value[0]  # here


def adds_a_very_large_number(value: Any) -> Any:
    return value[0] + 10**400  # here


def takes_the_max_of_an_array_without_dimensions(value: Any) -> Any:
    return bx.max(np.array(1.0))  # here


def takes_the_max_of_torch(value: Any) -> Any:
    return torch.max(value[0], value[1])  # here


def multiplies_by_a_tensor(value: Any) -> Any:
    return bx.max(torch.ones(4) * value)  # here


def calls_a_program(value: Any) -> Any:
    return bx.program("i")(lambda v: bx.max(v))(value)  # here


def grows(value: Any) -> Any:
    total = 0.0
    for _ in range(100):
        total = bx.max(total + value[0], total + value[1])  # here
    return total


def sums_grow(value: Any) -> Any:
    total = 0.0
    for n in range(100):
        total = total + value[n % 4] * (n + 1)  # here
    return total


def sums_of_nodes_grow(value: Any) -> Any:
    nodes = [bx.max(value[0], value[1]) for _ in range(20)]
    total = 0.0
    for node in nodes:
        total = total + node  # here
    return total


WRONG: dict[Callable[..., Any], str] = {
    branches: "cannot compare or branch on a smoothed value: use bx.max",
    takes_python_max: "cannot compare or branch",
    sorts: "cannot compare or branch",
    compares: "cannot compare or branch",
    takes_numpy_max: "cannot compare or branch",
    mixes: "must use either bx.max or bx.min, not both",
    multiplies_a_node: "can only add to the result of bx.max, .*: multiply the options instead",
    negates_a_node: "can only add to the result of bx.max",
    subtracts_a_node: "can only add to the result of bx.max",
    multiplies_scores: "got a product of two smoothed values",
    takes_a_power: "can only add and subtract scores and multiply them by numbers",
    divides_by_zero: "cannot be divided by 0",
    multiplies_by_infinity: "a factor of a score must be finite, got inf",
    is_out_of_range: r"index 7 is out of bounds for axis 0 with size 4, where the shapes are value \(4,\)",
    has_too_many_indices: "too many indices",
    indexes_with_a_score: "cannot be an index or a size: pass integers as keyword arguments",
    counts_to_a_score: "cannot be an index or a size",
    takes_an_exponential: "has no number while a program is traced",
    iterates_over_a_score: r"a single score has no index, length or elements, where .* value \(4,\)",
    indexes_twice: "a single score has no index, length or elements",
    unpacks_a_score: "a single score has no index, length or elements",
    takes_the_length_of_a_score: "a single score has no index, length or elements",
    indexes_an_array_with_a_score: "an index must be an integer or a slice, and not a score",
    asks_for_a_size: r"use shape\[0\] instead of size\(0\)",
    joins_lists: r"got a list: unpack it with \*, or write one call for each entry",
    stacks: "expected Tensor as element 0",
    uses_a_tensor: "must not be a tensor: pass scores as positional arguments",
    adds_a_tensor: "a term of a sum must not be a tensor",
    uses_a_string: "got a str",
    uses_lists: "got a list",
    passes_a_key: "take no key or default: the max of no options is -inf",
    adds_nan: "a term of a sum must be a number, got nan",
    is_infinitely_good: r"must be less than \+inf, got \+inf",
    is_infinitely_cheap: "must be greater than -inf, got -inf",
    returns_nothing: "must return one smoothed value or number, got a NoneType",
    returns_a_list: "got a list",
    returns_nan: "got nan",
    has_two_returns: "got a list",
    fills_an_array_of_numbers: "use a list or a dictionary for a table",
    fills_a_tensor: "tables are lists, but here can't assign a numpy.ndarray",
    starts_from_a_tensor: "use a list or a dictionary for a table",
    asks_for_an_item: "here 'Symbol' object has no attribute 'item'",
    clones: "has no attribute 'clone'",
    takes_the_max_of_rows: "got a ndarray",
    takes_the_max_of_keys: r"must not be a dictionary: pass its values\(\)",
    uses_dim: "use axis instead of dim",
    branches_on_an_array: "cannot branch on scores: use bx.max or bx.min instead of if",
    looks_for_nan: "here ufunc 'isnan' not supported",
    adds_a_very_large_number: "a number must fit into a float: use math.inf",
    takes_the_max_of_an_array_without_dimensions: "but here iteration over a 0-d array",
    takes_the_max_of_torch: "got \\(Symbol, Symbol\\)",
    multiplies_by_a_tensor: "tables are lists, but here can't convert np.ndarray",
    calls_a_program: "cannot call another program: call <lambda>.function",
    grows: "more than max_edges = 150 edges and terms",
    sums_grow: "more than max_edges = 150 edges and terms",
    sums_of_nodes_grow: "more than max_edges = 150 edges and terms",
}


def _line_of_comment(function: Callable[..., Any]) -> int:
    code = function.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n in range(code.co_firstlineno, len(lines) + 1) if lines[n - 1].endswith("# here"))


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_wrong_programs_get_one_sentence_that_names_the_line(function):
    with pytest.raises(ValueError, match=WRONG[function]) as caught:
        bx.program("item", max_edges=150)(function)(VALUES)
    line = _line_of_comment(function)
    assert re.search(rf"\(line {line}: .*# here\)$", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_a_value_of_another_call_is_refused():
    leaked = []

    def leaks(value, *, n):
        leaked.append(value[0])
        return bx.max(leaked[0], value[1])

    program = bx.program("item")(leaks)
    program(VALUES, n=0)
    with pytest.raises(ValueError, match=r"smoothed value of another call: create caches inside the program \(line"):
        program(VALUES, n=1)


def test_errors_of_the_function_pass_through_and_leave_no_trace():
    def fails(value):
        raise KeyError("mine")

    def short(value):
        return [value[0]][3]

    with pytest.raises(KeyError, match="mine"):
        bx.program("item")(fails)(VALUES)
    with pytest.raises(IndexError, match="list index out of range") as caught:
        bx.program("item")(short)(VALUES)
    assert caught.value.__cause__ is None
    assert bx.max(1.0, 2.0) == 2.0


# --- what programs may do


def affine(value):
    return bx.max(
        value[0] - value[1],
        np.float64(2.0) * value[2] - 1.5,
        0.25,
        np.float64(1) + value[3] / 4,
        +value[1] - 2,
        1 - value[0],
        value[3] * np.True_,
        value[1:3].sum() - 3,
        sum(value) * 0.1,
    )


def elementwise(value):
    return bx.max(value - value[0]) + bx.max(2 * value[1:] + value[:-1] - 1.0)


def repeated(value):
    best = bx.max(value[0], 0.0)
    return best + best + value[1] + bx.max(best, value[1] + value[1])


def of_numbers(value):
    return bx.max(0.0, 0.0) + value[0]


def prefix_sums(value):
    prefix = [0.0]
    for v in value:
        prefix.append(prefix[-1] + v)
    return bx.max(prefix[j] - prefix[i] for i in range(5) for j in range(i + 1, 5))


def closed(value):
    unreachable = bx.max([])
    return bx.max(unreachable + value[0], value[1], -math.inf, bx.max(value[2], -math.inf))


@pytest.mark.parametrize(
    "function", [affine, elementwise, repeated, of_numbers, prefix_sums, closed], ids=lambda f: f.__name__
)
def test_sums_products_arrays_and_numbers(function):
    report = bx.check_program(bx.program("item")(function), VALUES)
    assert report.ok, report


def test_a_score_may_have_any_name():
    report = bx.check_program(bx.program("i")(lambda _one: bx.max(_one[0] + 2.0, _one[1])), VALUES)
    assert report.ok, report


def test_numbers_are_options_inside_a_program():
    p = bx.program("item")(of_numbers)(torch.zeros(4))
    assert torch.allclose(p.value.exp(), torch.tensor(2.0))
    assert p.num_paths == 2


def test_a_single_option_makes_no_node():
    p = bx.program("item")(lambda value: bx.max(bx.max(value[0]), bx.max([value[1]]), bx.max(-math.inf)))
    for omega in ("l2", "negentropy"):
        q = p(VALUES, omega=omega)
        assert q.hypergraph.num_nodes == 1
        assert q.hypergraph.num_edges == 2


def test_fractions_that_cancel_leave_no_rounding_error():
    p = bx.program("item")(lambda value: bx.max(0.1 * value[0] + 0.2 * value[0] - 0.3 * value[0], value[1]))
    assert p(torch.tensor([-math.inf, 0.0])).num_paths == 2


def test_differences_of_prefix_sums_have_no_terms_that_cancel():
    p = bx.program("item")(prefix_sums)(VALUES)
    assert [[(name, *index) for name, index, _ in edge.scores] for edge in p.derivation_edges([0, 9])] == [
        [("value", 0)],
        [("value", 3)],
    ]


def test_equal_sums_share_a_weight():
    @bx.program("item")
    def sums(v):
        three = v[0] + v[1] + v[2]
        return bx.max(v[0] + v[1], v[1] + v[0], three - v[2], 2 * (v[0] + v[1]) / 2, three, v[0] + v[0], 2 * v[0])

    graph = sums.graph((3,))
    assert graph.weight_of.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert bx.check_program(sums, torch.rand(3)).ok


def test_max_and_min_outside_a_program_are_those_of_python():
    assert bx.max(3, 1) == 3
    assert bx.min([3, 1]) == 1
    assert bx.max(x for x in (1, 5, 2)) == 5
    assert bx.max(2.5) == 2.5
    assert bx.min() == math.inf
    assert bx.max([]) == -math.inf
    x = torch.tensor([1.0, 2.0])
    assert bx.max(x[0], x[1]) is not None
    assert bx.max(np.array([1.0, 4.0])) == 4.0
