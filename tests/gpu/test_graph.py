"""Graphs, hypergraphs and structures that use them on an emulated GPU, against plain torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.inside import count_level_searches, index, set_limit, triton_module
from support.lattices import at_one
from support.problems import OMEGAS, layered_edges, random_dag, random_weights
from torch import Tensor

import bellmax as bx
from gpu.comparing import assert_close, assert_sweeps
from gpu.driver import Log

triton_module("graph")

SERVED = "negentropy", "l2", "tsallis1.5", "hard"
FLOAT32, FLOAT64 = torch.float32, torch.float64
slow = pytest.mark.slow_gpu


@pytest.mark.parametrize(
    ("omega", "dtype"),
    [
        pytest.param(omega, dtype, marks=[slow] * ((omega, dtype) != ("negentropy", FLOAT32)))
        for omega in SERVED
        for dtype in (FLOAT32, FLOAT64)
    ],
)
def test_random_graphs(omega: str, dtype: torch.dtype, launches: Log) -> None:
    """Graphs with edges of −∞, parallel edges and unreachable nodes."""
    rng = np.random.default_rng(SERVED.index(omega))
    edges, _ = random_dag(rng)
    weights = torch.tensor(np.stack([random_weights(rng, len(edges), 0.2) for _ in range(3)]), dtype=dtype)
    weights[2] = -torch.inf
    assert_sweeps("dag", [weights], index(bx.DAG(edges)), at_one(OMEGAS[omega]))
    assert set(launches.kernels) == {"graph_forward", "graph_tangents", "graph_backward"}


def brackets(weight_of: list[int] | None = None) -> bx.Hypergraph:
    """A hypergraph with edges of no, two and three tails, and a repeated tail."""
    words = [(word, ()) for word in "abc"]
    pairs = [("ab", ("a", "b")), ("bc", ("b", "c")), ("aa", ("a", "a"))]
    wholes = [("abc", ("ab", "c")), ("abc", ("a", "bc")), ("abc", ("aa", "bc", "c"))]
    return bx.Hypergraph([*words, *pairs, *wholes], weight_of=weight_of)


@slow
@pytest.mark.parametrize("omega", SERVED)
@pytest.mark.parametrize("weight_of", [None, [0, 1, 0, 2, 3, 1, 1, 4, 0]])
def test_hypergraphs(weight_of: list[int] | None, omega: str, launches: Log) -> None:
    hypergraph = brackets(weight_of)
    weights = torch.randn(2, 9 if weight_of is None else 6)  # the last weight is unused
    assert_sweeps("dag", [weights], index(hypergraph), at_one(OMEGAS[omega]))
    assert ("graph_onto_weights" in launches.kernels) == (weight_of is not None)


def test_shared_weights_and_separate_weights_of_one_graph(launches: Log) -> None:
    """A graph whose edges share weights and the graph of its edges have different levels."""
    shared = index(brackets([0, 1, 0, 2, 3, 1, 1, 4, 0]))
    assert_sweeps("dag", [torch.randn(2, 5)], shared, bx.Negentropy())
    assert_sweeps("dag", [torch.randn(2, 9)], shared[:5], bx.Negentropy())
    assert launches


@slow
def test_one_launch_per_level(launches: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads a graph once."""
    searches = count_level_searches(monkeypatch)
    dag = bx.DAG(layered_edges(4, 3))
    for _ in range(2):
        weights = torch.randn(2, dag.num_edges, requires_grad=True)
        dag.paths(weights).value.sum().backward()
    assert launches.kernels == 2 * (["graph_forward"] * 5 + ["graph_backward"] * 5)
    assert len(searches) == 1


@slow
def test_many_edges_into_a_node(launches: Log) -> None:
    """Several threads sum the edges of a node."""
    dag = bx.DAG([(0, 1 + n) for n in range(70)] + [(1 + n, 71) for n in range(70)])
    weights = [torch.randn(2, 140)]
    assert_sweeps("dag", weights, index(dag), bx.SquaredL2())
    assert launches


def test_too_many_edges_are_summed_by_torch(launches: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "edges into a node on a GPU", 1)
    dag = bx.DAG([(0, 1), (0, 1), (1, 2)])
    assert_sweeps("dag", [torch.randn(2, 3)], index(dag), bx.Negentropy())
    assert not launches


@slow
def test_gradcheck(launches: Log) -> None:
    edges, _ = random_dag(np.random.default_rng(1), 5)
    weights = torch.randn(1, len(edges), dtype=FLOAT64, requires_grad=True)
    dag = bx.DAG(edges)
    torch.autograd.gradcheck(lambda w: dag.paths(w, omega=bx.Negentropy(0.7)).value, weights)


@slow
def test_structures_that_are_graphs(launches: Log) -> None:
    """Structures that build a graph use the kernels of graphs."""

    def segments(emissions: Tensor) -> Tensor:
        durations, transitions = emissions.new_zeros(3, 2), emissions.new_full((2, 2), -1.0)
        return bx.SemiMarkov.from_scores(emissions, durations, transitions).value

    scores = torch.randn(2, 5, 2, requires_grad=True)
    with bx.use_backend("reference"):
        wide = scores.detach().double().requires_grad_()
        wanted = segments(wide)
        (path,) = torch.autograd.grad(wanted.sum(), wide)
    value = segments(scores)
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    assert_close(value, wanted, FLOAT32)
    assert_close(gradient, path, FLOAT32)
    assert "graph_backward" in launches.kernels
