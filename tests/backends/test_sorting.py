"""Kernels that sort and prune graphs, against the same functions in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.inside import graph, index, loading, sorting
from support.kernels import needs_kernels
from torch import Tensor

import bellmax as bx

Integers = NDArray[np.int64]


def random_edges(rng: np.random.Generator, num_nodes: int, num_edges: int) -> tuple[Integers, Integers, Integers]:
    """Edges from smaller to larger nodes, in any order: heads, tails and the number of tails of each edge."""
    head = rng.integers(0, num_nodes, num_edges)
    arity = np.where(head > 0, rng.integers(0, 4, num_edges), 0)
    tail = (rng.random(arity.sum()) * np.repeat(head, arity)).astype(np.int64)
    return head, tail, arity


def assert_same(own: tuple[NDArray[Any], ...], wanted: tuple[NDArray[Any], ...]) -> None:
    assert len(own) == len(wanted)
    for one, other in zip(own, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@needs_kernels
@pytest.mark.parametrize("seed", range(20))
def test_sorted_graphs_equal_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes, num_edges = rng.integers(1, 60, 2)
    head, tail, arity = random_edges(rng, num_nodes, num_edges)
    pairs = np.stack((tail, np.repeat(head, arity)), 1)
    level = sorting.levels(pairs, num_nodes)
    np.testing.assert_array_equal(level, graph.levels(pairs, num_nodes))
    assert_same(sorting.sort(head, tail, level, arity), graph.sort(head, tail, level, arity))
    one_tail = pairs[:, 1], pairs[:, 0], level
    assert_same(sorting.sort(*one_tail), graph.sort(*one_tail))
    nodes = rng.random(num_nodes) < 0.8
    level[~nodes] = -1
    edge_of_tail = np.repeat(np.arange(num_edges), arity)
    mask = nodes[head] & ~np.isin(np.arange(num_edges), edge_of_tail[~nodes[tail]])
    if mask.any():
        pruned = graph.prune(head, tail, level, mask, arity)
        assert_same(sorting.sort(*pruned), graph.sort(*pruned))


@needs_kernels
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_reachable_nodes_equal_those_of_numpy(seed: int, is_reversed: bool) -> None:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 40))
    pairs = rng.integers(0, num_nodes, (rng.integers(0, 60), 2))  # with cycles
    directed = pairs[:, ::-1] if is_reversed else pairs
    for source in range(num_nodes):
        own = sorting.is_reachable(source, pairs, num_nodes, is_reversed=is_reversed)
        np.testing.assert_array_equal(own, graph.is_reachable(source, directed, num_nodes))
        np.testing.assert_array_equal(own, sorting.is_reachable(source, directed, num_nodes))


def test_graphs_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (1, 4), (2, 4)]
    edges = [(0, ()), *[(head, (tail,)) for tail, head in pairs]]

    def indices() -> list[tuple[Tensor, ...]]:
        return [index(bx.DAG(pairs, start=0, end=3)), index(bx.Hypergraph(edges, goal=3))]

    own = indices()
    monkeypatch.setattr(loading, "kernels", None)
    torch.testing.assert_close(own, indices())


# --- numbers that do not fit together


def sort_by_kernel(**changes: Any) -> None:
    given = {"head": [1, 2, 2], "tail": [0, 0, 1], "level": [0, 1, 2], "arity": [1, 1, 1]} | changes
    inputs = [None if numbers is None else torch.tensor(numbers) for numbers in given.values()]
    sizes = 4, len(given["tail"]), 3
    results = [torch.empty(size, dtype=torch.int32) for size in sizes]
    begins_group, tail_offset = torch.empty(3, dtype=torch.bool), torch.empty(4, dtype=torch.int32)
    loading.kernels.dag_sort(*inputs, *results, begins_group, tail_offset)


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"head": [1, 2, 3]},
        {"head": [1, 2, -1]},
        {"head": [1, 2]},
        {"tail": [0, 3, 1]},
        {"tail": [0, 0]},
        {"level": [0, 1, 4]},
        {"level": [0, -1, 2]},
        {"arity": [1, 1, 2]},
        {"arity": [1, 3, -1]},
        {"arity": [1, 2]},
        {"tail": [0, 0], "arity": None},
    ],
)
def test_kernels_refuse_numbers_out_of_range(changes: dict[str, Any]) -> None:
    sort_by_kernel()
    with pytest.raises(ValueError, match=r"out of range|fit together|add up"):
        sort_by_kernel(**changes)


@needs_kernels
@pytest.mark.parametrize(("pairs", "source"), [([[0, 3]], 0), ([[-1, 0]], 0), ([[0, 1]], 3), ([[0, 1]], -1)])
def test_kernels_refuse_nodes_out_of_range(pairs: list[list[int]], source: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        loading.kernels.dag_reachable(torch.tensor(pairs), 0, source, torch.empty(3, dtype=torch.bool))
