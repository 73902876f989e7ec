"""Construction of graphs: order of edges, conversions, error messages."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from support.checks import close
from support.inside import index, loading
from support.kernels import needs_kernels
from support.problems import diamond, layered_edges, potentials, random_dag

import bellmax as bx
from bellmax import losses


@pytest.fixture(params=[pytest.param("native", marks=needs_kernels), "numpy"])
def sorter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setattr(loading, "kernels", None)
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
        ([(0, 2), (1, 2)], None, "one start node \\(no parents\\), got 2: nodes 0, 1"),
        ([(0, 1), (0, 2)], None, "one end node \\(no children\\), got 2: nodes 1, 2"),
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


def test_a_cycle_between_other_edges_is_reported() -> None:
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
    assert all(tensor.is_meta for tensor in (dag.edges, dag.levels, *index(dag)))
    assert (dag.num_nodes, dag.num_edges) == (2, 2)
    assert repr(dag) == "DAG(num_nodes=2, num_edges=2)"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda dag: pickle.loads(pickle.dumps(dag))])
def test_copies(duplicate: Callable[[bx.DAG], bx.DAG], backend: str) -> None:
    dag = bx.DAG([("a", "b"), ("a", "b"), ("b", "c"), ("a", "c")])
    same = duplicate(dag)
    assert (same.nodes, same.num_nodes, same.num_edges) == (dag.nodes, 3, 4)
    theta, z = potentials(2, 4), potentials(2, 4, seed=1)
    p, q = dag.paths(theta), same.paths(theta)
    for got, wanted in ((q.value, p.value), (q.hessian_product(z), p.hessian_product(z)), (q.topk(2)[1], p.topk(2)[1])):
        assert got.equal(wanted)
    torch.testing.assert_close(torch.distributions.kl_divergence(p, q), torch.zeros(2, dtype=torch.float64))


def test_a_copy_is_independent() -> None:
    dag = bx.DAG([(0, 1), (0, 1)])
    same = copy.deepcopy(dag)
    same.edges.zero_()
    assert dag.edges.tolist() == [[0, 1], [0, 1]]


def test_moves_there_and_back(backend: str) -> None:
    dag, theta = diamond(), potentials(2, 10)
    same = dag.to("cpu")
    assert same.paths(theta).expected_path.equal(dag.paths(theta).expected_path)
    with pytest.raises(ValueError, match="device"):
        dag.to("meta").paths(theta)
    assert dag.device.type == "cpu"


def test_groups_share_level_and_number_of_parents() -> None:
    dag = bx.DAG(layered_edges(4, 3))
    offset, parent, _, group = index(dag)
    assert group.tolist() == [0, 1, 4, 7, 10, 13, 14]
    assert (parent < torch.repeat_interleave(torch.arange(14), offset.diff())).all()


@pytest.mark.parametrize(
    ("layers", "width", "backend"), [(20_000, 10, "native"), (40, 30, "reference")], indirect=["backend"]
)
def test_probabilities_of_every_layer_sum_to_one(layers: int, width: int, backend: str) -> None:
    dag = bx.DAG(layered_edges(layers, width))
    theta = potentials(dag.num_edges).float().requires_grad_()
    p = dag.paths(theta)
    (path,) = torch.autograd.grad(p.value, theta)
    # The probabilities of the edges between two layers sum to 1.
    cuts = path.double()[width:-width].reshape(layers - 1, -1).sum(1)
    assert (cuts - 1).abs().max() < 2e-6
    product = p.hessian_product(torch.ones_like(theta))  # every path has the same number of edges
    assert product.abs().max() < 1e-4
    assert p.best_path().sum() == layers + 1


# --- names and costs


def test_named_nodes() -> None:
    edges = [("home", ("bus", 7)), ("home", "bike"), (("bus", 7), "work"), ("bike", "work"), ("home", "work")]
    dag = bx.DAG(edges)
    assert dag.nodes == ["home", ("bus", 7), "bike", "work"]
    assert dag.edges.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3], [0, 3]]
    p = dag.paths(torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0]]), omega="hard")
    assert dag.path_nodes(p.best_path()) == [["home", ("bus", 7), "work"], ["home", "work"]]
    assert dag.path_nodes(torch.zeros(5)) == []
    assert dag.to("meta").nodes == dag.nodes
    assert bx.DAG([(0, 2), (0, 1), (1, 2)]).path_nodes(torch.tensor([0, 1, 1])) == [0, 1, 2]


def test_names_from_arrays() -> None:
    dag = bx.DAG(np.array([["a", "b"], ["b", "c"], ["a", "c"]]))
    assert dag.nodes == ["a", "b", "c"]
    with pytest.raises(ValueError, match="path must hold one path, got edges that do not follow each other"):
        dag.path_nodes(torch.tensor([0.5, 0.5, 0.5]))


def test_path_nodes_of_every_path() -> None:
    dag = diamond()
    paths = dag.paths(torch.zeros(10)).enumerate_support()
    for path, nodes in zip(paths, dag.path_nodes(paths), strict=True):
        taken = dag.edges[path > 0].tolist()
        assert sorted(map(list, pairwise(nodes))) == sorted(taken)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("a", "b"), ("b", "c"), ("c", "a")], "edges must not form a cycle, got "),
        ([("a", "b"), ("c", "b")], "edges must have exactly one start node \\(no parents\\), got 2: nodes a, c"),
        ([("a", "b", "c")], r"edges must be pairs \(parent, child\) of hashable names, got \('a', 'b', 'c'\) at row 0"),
        ([("a", ["b"])], r"hashable names, got \('a', \['b'\]\) at row 0"),
        ({("a", "b"): 1.0}, r"edges must be rows \(parent, child\), got a dict"),
        ("ab", r"edges must be rows \(parent, child\), got a str"),
        (3, r"edges must be rows \(parent, child\), got a int"),
        ([(0, 1), (1,)], r"edges must be pairs .* got \(1,\) at row 1"),
        (["ab"], r"edges must be pairs .* got \('ab',\) at row 0"),
    ],
)
def test_wrong_names_are_named(edges: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.DAG(edges)
    with pytest.raises(ValueError, match="num_nodes must be left out if edges hold names, got 3"):
        bx.DAG([("a", "b")], 3)


def test_costs_are_minimised(omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(3, 10, requires_grad=True)
    with torch.no_grad():
        cost[1, 4] = math.inf
    p, q = diamond().paths(cost, omega=omega, minimize=True), diamond().paths(-cost, omega=omega)
    z = potentials(3, 10, seed=2)
    torch.testing.assert_close(p.value, -q.value)
    torch.testing.assert_close(p.weights, cost)
    torch.testing.assert_close(torch.autograd.grad(p.value.sum(), cost)[0], p.expected_path)
    torch.testing.assert_close(p.expected_path, q.expected_path)
    torch.testing.assert_close(p.directional_derivative(z), (p.expected_path * z).sum(-1))
    torch.testing.assert_close(p.hessian_product(z), -q.hessian_product(z))
    (pulled,) = torch.autograd.grad(p.expected_path, cost, z)
    torch.testing.assert_close(pulled, p.hessian_product(z))
    costs, paths = p.topk(12)
    torch.testing.assert_close(costs, -q.topk(12)[0])
    assert (costs.diff(dim=-1) >= 0)[costs[:, 1:] < math.inf].all()
    assert (paths.sum(-1) > 0).equal(costs < math.inf)
    torch.testing.assert_close(p.entropy(), q.entropy())
    torch.testing.assert_close(p.log_prob(paths[:, 0]), q.log_prob(paths[:, 0]))
    assert p.best_path().equal(paths[:, 0])
    assert p.mode.equal(q.mode)
    assert p.num_paths.equal(q.num_paths)


def test_losses_of_costs() -> None:
    cost = potentials(3, 10)
    p, q = diamond().paths(cost, minimize=True, omega="l2"), diamond().paths(-cost, omega="l2")
    target = p.topk(3)[1][:, 2]
    for loss in (losses.surrogate, losses.relaxed, losses.crf_nll, losses.structured_hinge, losses.path_nll):
        torch.testing.assert_close(loss(p, target), loss(q, target))
    assert (losses.surrogate(p, target, reduction="none") >= 0).all()


def test_a_graph_without_paths_has_infinite_cost(backend: str) -> None:
    p = bx.DAG([(0, 1), (1, 2)]).paths(torch.tensor([math.inf, 1.0], requires_grad=True), minimize=True)
    assert p.value == math.inf
    assert not p.expected_path.any()
    p.value.backward()


def test_under_l2_a_node_with_one_parent_is_not_free() -> None:
    weights = torch.tensor([0.1, 0.0])
    direct = bx.DAG([("a", "b"), ("a", "b")])
    detour = bx.DAG([("a", "x"), ("x", "b"), ("a", "b")])
    around = torch.tensor([0.1, 0.0, 0.0])
    for omega, moved in (("l2", True), ("sparsemax", False), ("negentropy", False)):
        plain = direct.paths(weights, omega=omega).expected_path[0]
        longer = detour.paths(around, omega=omega).expected_path[0]
        assert bool((plain - longer).abs() > 0.1) == moved


# --- pruning to a start and an end

JUNK = [("s", "dead end"), ("far", "t"), ("far", "b"), ("x", "y"), ("y", "x"), ("t", "beyond"), ("x", "a")]
PART = [("s", "a"), ("s", "b"), ("a", "b"), ("a", "t"), ("b", "t"), ("b", "t")]


def pruned(is_kept: torch.Tensor) -> bx.DAG:
    """A graph with the edges of PART where ``is_kept``, and the edges of JUNK between them."""
    wanted, junk = iter(PART), iter(JUNK)
    return bx.DAG([next(wanted if is_wanted else junk) for is_wanted in is_kept.tolist()], start="s", end="t")


def test_edges_off_the_paths_from_start_to_end_are_pruned(omega: bx.Regularizer, backend: str) -> None:
    is_kept = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool)
    whole, subgraph = pruned(is_kept), bx.DAG(PART)
    weights, z = potentials(2, 13, seed=1).requires_grad_(), potentials(2, 13, seed=2)
    p, q = whole.paths(weights, omega=omega), subgraph.paths(weights[:, is_kept], omega=omega)
    assert p.backend == backend

    def spread(of_part: torch.Tensor) -> torch.Tensor:
        return of_part.new_zeros(*of_part.shape[:-1], 13).index_copy(-1, is_kept.nonzero()[:, 0], of_part)

    close(p.value, q.value)
    close(torch.autograd.grad(p.value.sum(), weights, retain_graph=True)[0], spread(q.expected_path))
    close(p.hessian_product(z), spread(q.hessian_product(z[:, is_kept])))
    close(p.directional_derivative(z), q.directional_derivative(z[:, is_kept]))
    close(p.entropy(), q.entropy())
    close(p.num_paths, q.num_paths)
    for mine, other in ((p.topk(6), q.topk(6)), (p.support_paths()[::-1], q.support_paths()[::-1])):
        close(mine[0], other[0])
        close(mine[1], spread(other[1]))
    close(p.mode, spread(q.mode))
    close(p.best_path(), spread(q.best_path()))
    samples = []
    for each in (p, q):
        torch.manual_seed(0)
        samples.append(each.sample((5,)))
    close(samples[0], spread(samples[1]))
    close(p.log_prob(samples[0]), q.log_prob(samples[1]))
    assert p.support.check(samples[0]).all()
    assert whole.path_nodes(p.best_path()) == subgraph.path_nodes(q.best_path())
    assert repr(whole) == "DAG(num_nodes=9, num_edges=13)"


def test_edges_that_are_pruned_are_on_no_path() -> None:
    dag = pruned(torch.tensor([1] * 6 + [0] * 7, dtype=torch.bool))
    path = torch.tensor([1, 0, 0, 1, 0, 0] + [0] * 7)
    p = dag.paths(torch.zeros(13))
    assert p.support.check(path)
    for other in ([9, 10], [6], [11]):  # a cycle, a dead end, and edges past the end
        wrong = path.index_fill(0, torch.tensor(other), 1)
        assert not p.support.check(wrong)
        with pytest.raises(ValueError, match="path is not a path of the graph"):
            p.log_prob(wrong.float())


def test_start_or_end_may_be_passed_alone() -> None:
    edges = torch.tensor([(0, 1), (1, 3), (2, 3), (3, 4), (3, 5)])
    assert bx.DAG(edges, start=2, end=5).paths(torch.ones(5)).expected_path.tolist() == [0, 0, 1, 0, 1]
    assert bx.DAG(edges[:4], 7, start=0).paths(torch.ones(4)).expected_path.tolist() == [1, 1, 0, 1]
    assert bx.DAG(edges[[0, 1, 3, 4]], end=4).paths(torch.ones(4)).expected_path.tolist() == [1, 1, 1, 0]
    matrix = torch.full((6, 6), -math.inf)
    matrix[edges[:, 1], edges[:, 0]] = 0.0
    assert bx.DAG.from_matrix(matrix, start=2, end=5).paths(torch.zeros(5)).value == 0
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("x", "b")])
    assert bx.DAG.from_networkx(graph, start="x").paths(torch.zeros(3)).num_paths == 1
    with pytest.raises(ValueError, match="start must be a node of the graph, got 0"):  # nodes are not named by position
        bx.DAG.from_networkx(graph, start=0)


def test_graphs_between_other_nodes_differ() -> None:
    edges = [(0, 1), (1, 2), (0, 2)]
    weights = torch.zeros(3)
    with pytest.raises(ValueError, match="graph"):
        torch.distributions.kl_divergence(bx.DAG(edges).paths(weights), bx.DAG(edges, end=1).paths(weights))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "s"}, r"exactly one end node .*, got 2: nodes t, u. .* pass end="),
        ({}, r"exactly one start node .*, got 2: nodes s, far. To keep the paths of one of them, pass start="),
        ({"start": "S"}, "start must be a node of the edges, got 'S'"),
        ({"end": 3}, "end must be a node of the edges, got 3"),
        ({"start": "far", "end": "u"}, "edges must have a path from start 'far' to end 'u', got none"),
        ({"start": "s", "end": "s"}, "edges must have a path from start 's' to end 's', got none"),
    ],
)
def test_a_start_and_an_end_that_are_wrong_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.DAG([("s", "t"), ("s", "u"), ("far", "t")], **options)
    with pytest.raises(ValueError, match="must not form a cycle, got"):
        bx.DAG([(0, 1), (1, 2), (2, 1), (2, 3)], start=0, end=3)
