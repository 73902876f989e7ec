"""Making graphs: order, conversions, messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from problems import layered_edges, potentials, random_dag

import bellmax as bx
from bellmax.backends import native


@pytest.fixture(params=["native", "numpy"])
def sorter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setattr(native, "kernels", None)
    elif native.kernels is None:
        pytest.skip("the native kernels are not compiled")
    with bx.use_backend("reference"):
        yield


@pytest.mark.usefixtures("sorter")
def test_any_edge_order_and_numbering() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges, num_nodes = random_dag(rng)
        theta = torch.from_numpy(rng.normal(size=len(edges)))
        p = bx.DAG(edges, num_nodes).paths(theta)
        order, names = rng.permutation(len(edges)), rng.permutation(num_nodes)
        shuffled = [(int(names[edges[e][0]]), int(names[edges[e][1]])) for e in order]
        other = bx.DAG(shuffled).paths(theta[torch.from_numpy(order)])
        torch.testing.assert_close(other.value, p.value)
        torch.testing.assert_close(other.expected_path, p.expected_path[torch.from_numpy(order)])


@pytest.mark.usefixtures("sorter")
@pytest.mark.parametrize(
    ("edges", "num_nodes", "message"),
    [
        (
            [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)],
            None,
            r"must not form a cycle, got (1 → 2 → 3 → 1|2 → 3 → 1 → 2|3 → 1 → 2 → 3)$",
        ),
        ([(0, 1), (1, 1), (1, 2)], None, "must not form a cycle, got 1 → 1$"),
        ([(0, 1), (1, 0)], None, "must not form a cycle, got (0 → 1 → 0|1 → 0 → 1)$"),
        ([(0, 2), (1, 2)], None, "one start node, without parents, got 2: nodes 0, 1"),
        ([(0, 1), (0, 2)], None, "one end node, without children, got 2: nodes 1, 2"),
        ([(0, 2)], None, "must reach every node, but none touches 1 .num_nodes is 3"),
        ([(0, 1)], 14, "none touches 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"),
        ([(0, 1), (1, 3)], 3, r"must hold nodes below num_nodes = 3, got \(1, 3\) at row 1"),
        ([(0, 1), (-1, 1)], None, r"must hold nodes >= 0, got \(-1, 1\) at row 1"),
        ([], None, r"shape \(E, 2\) with E >= 1, got \(0,\)"),
        ([(0, 1, 2)], None, r"shape \(E, 2\) with E >= 1, got \(1, 3\)"),
        (torch.zeros(2, 2), None, "must hold integers, got dtype torch.float32"),
    ],
)
def test_bad_graphs_are_named(edges, num_nodes: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.DAG(edges, num_nodes)


def test_a_cycle_behind_a_tail_is_found() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 2), (4, 5), (5, 6), (6, 7)]
    with pytest.raises(ValueError, match="cycle") as error:
        bx.DAG(edges)
    nodes = [int(node) for node in re.findall(r"\d+", str(error.value))]
    assert nodes[0] == nodes[-1]
    assert all(step in edges for step in pairwise(nodes))


def test_edges_are_copied() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    dag = bx.DAG(edges)
    edges[0, 0] = 7
    assert dag.edges.tolist() == [[0, 1], [1, 2]]


def test_matrix_round_trip() -> None:
    theta = torch.full((2, 4, 4), -torch.inf)
    theta[0, 1, 0], theta[0, 3, 1], theta[1, 2, 0], theta[:, 3, 2], theta[:, 2, 1] = 1.0, 2.0, 3.0, 4.0, 5.0
    dag = bx.DAG.from_matrix(theta)
    assert dag.edges.tolist() == [[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]]
    weights = dag.matrix_to_edges(theta)
    best = dag.paths(weights, omega="hard")
    assert best.value.tolist() == [10.0, 7.0]
    matrix = dag.edges_to_matrix(best.expected_path)
    assert matrix.shape == (2, 4, 4)
    assert matrix[1].nonzero().tolist() == [[2, 0], [3, 2]]
    torch.testing.assert_close(dag.matrix_to_edges(matrix), best.expected_path)
    with pytest.raises(ValueError, match=r"theta must have shape \(\.\.\., N, N\), got \(3, 4\)"):
        bx.DAG.from_matrix(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"matrix must have shape \(\.\.\., 4, 4\), got \(3, 3\)"):
        dag.matrix_to_edges(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"values must have shape \(\.\.\., 5\), got \(4,\)"):
        dag.edges_to_matrix(torch.zeros(4))


def test_parallel_edges_are_summed_in_a_matrix() -> None:
    dag = bx.DAG([(0, 1), (0, 1)])
    assert dag.edges_to_matrix(torch.tensor([0.25, 0.75])).tolist() == [[0, 0], [1, 0]]


def test_networkx_multigraph() -> None:
    graph = nx.MultiDiGraph()
    graph.add_edges_from([("a", "b"), ("a", "b"), ("b", "c")])
    dag = bx.DAG.from_networkx(graph)
    assert dag.edges.tolist() == [[0, 1], [0, 1], [1, 2]]
    assert dag.paths(torch.zeros(3)).num_paths == 2


def test_moves_between_devices() -> None:
    dag = bx.DAG([(0, 1), (0, 1)]).to("meta")
    assert dag.device.type == "meta"
    assert (dag.num_nodes, dag.num_edges) == (2, 2)
    assert repr(dag) == "DAG(num_nodes=2, num_edges=2)"


def test_groups_share_level_and_number_of_parents() -> None:
    dag = bx.DAG(layered_edges(4, 3))
    offset, parent, _, group = dag._index
    assert group.tolist() == [0, 1, 4, 7, 10, 13, 14]
    assert (parent < torch.repeat_interleave(torch.arange(14), offset.diff())).all()


@pytest.mark.parametrize(
    ("layers", "width", "backend"), [(20_000, 10, "native"), (40, 30, "reference")], indirect=["backend"]
)
def test_a_unit_flows_through_every_layer(layers: int, width: int, backend: str) -> None:
    dag = bx.DAG(layered_edges(layers, width))
    theta = potentials(dag.num_edges).float().requires_grad_()
    p = dag.paths(theta)
    (path,) = torch.autograd.grad(p.value, theta)
    # What leaves the source, crosses each layer and enters the sink is one unit.
    cuts = path.double()[width:-width].reshape(layers - 1, -1).sum(1)
    assert (cuts - 1).abs().max() < 2e-6
    product = p.hessian_product(torch.ones_like(theta))  # every path has the same number of edges
    assert product.abs().max() < 1e-4
    assert p.best_path().sum() == layers + 1
