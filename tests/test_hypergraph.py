"""Hypergraphs against enumeration of derivations, and against graphs (one tail per edge)."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.checks import close
from support.hypergraphs import Hypergraph, bracketings, random_hypergraph
from support.kernels import needs_kernels, took
from support.problems import (
    OMEGAS,
    Array,
    diamond,
    for_derivatives,
    is_one_of_a_kind,
    one_of_each_kind,
    potentials,
    solve,
    two_kinds,
)
from torch import Tensor
from torch.distributions import kl_divergence

import bellmax as bx
from bellmax import losses

GRAPHS, SOME_GRAPHS = 24, 6


class Problem(NamedTuple):
    graph: Hypergraph
    mine: bx.Hypergraph
    weights: Array  # (2, W), some −∞
    z: Array
    probabilities: list[Array]
    products: list[Array | None]

    def by_edge(self, row: int) -> Array:
        return self.weights[row][self.graph.weight]

    def scores(self, row: int) -> Array:
        """Score of each derivation."""
        weights = self.by_edge(row)
        return np.array([weights[d > 0] @ d[d > 0] for d in self.graph.derivations])

    def mean(self, row: int, p: Array | None = None) -> Array:
        return (self.probabilities[row] if p is None else p) @ self.graph.derivations @ self.graph.onto_weights


@lru_cache
def enumerate_problems(name: str) -> list[Problem]:
    omega, rng = OMEGAS[name], np.random.default_rng(3)
    problems = []
    for n in range(GRAPHS):
        graph = random_hypergraph(rng, shared=n % 2 == 1, whole=True)
        weights = rng.normal(scale=1.5, size=(2, graph.onto_weights.shape[1]))
        weights[rng.random(weights.shape) < 0.1] = -math.inf
        z = rng.normal(size=weights.shape)
        mine = bx.Hypergraph(graph.edges, weight_of=graph.weight if n % 2 else None)
        probabilities = [graph.probabilities(row, omega) for row in weights]
        products = [graph.hessian_product(row, zi, omega) for row, zi in zip(weights, z, strict=True)]
        problems.append(Problem(graph, mine, weights, z, probabilities, products))
    return problems


def problems(omega: bx.Regularizer, backend: str) -> Iterator[tuple[Problem, bx.PathDistribution]]:
    name = next(name for name, each in OMEGAS.items() if each is omega)
    for problem in enumerate_problems(name)[: GRAPHS if backend == "native" else SOME_GRAPHS]:
        p = problem.mine.derivations(torch.from_numpy(problem.weights), omega=omega)
        assert p.backend == backend
        yield problem, p


def test_equals_enumeration(omega: bx.Regularizer, backend: str) -> None:
    compared = 0
    for problem, p in problems(omega, backend):
        graph, z = problem.graph, torch.from_numpy(problem.z)
        means = [problem.mean(row) for row in range(2)]
        close(p.value, [graph.transitions(row, omega)[0] for row in problem.weights])
        close(p.expected_path, means)
        close(p.directional_derivative(z), [mean @ zi for mean, zi in zip(means, problem.z, strict=True)])
        with np.errstate(divide="ignore", invalid="ignore"):
            close(p.entropy(), [-np.nansum(q * np.log(q)) for q in problem.probabilities])
        close(p.num_paths, [np.isfinite(problem.scores(row)).sum() for row in range(2)])
        for product, difference in zip(p.hessian_product(z), problem.products, strict=True):
            if difference is not None:
                close(product, difference, 1e-7)
                compared += 1
    assert compared > 1.6 * (GRAPHS if backend == "native" else SOME_GRAPHS)


def test_single_derivations_equal_enumeration(omega: bx.Regularizer, backend: str) -> None:
    k, best_paths, modes, rows = 5, 0, 0, 0
    for problem, p in problems(omega, backend):
        fine, derivations = p.by_edge, problem.graph.derivations
        scores, best_counts = fine.topk(k)
        for row in range(2):
            every, q = problem.scores(row), problem.probabilities[row]
            best = np.sort(every)[::-1][:k]
            close(scores[row], np.concatenate((best, np.full(k - len(best), -math.inf))))
            for score, counts in zip(scores[row].tolist(), best_counts[row].numpy(), strict=True):
                if score == -math.inf:
                    assert not counts.any()
                else:
                    same = (derivations == counts).all(1)
                    assert every[same][0] == pytest.approx(score)
            if np.isfinite(best[0]) and (len(best) < 2 or best[0] - best[1] > 1e-9):
                close(fine.best_path()[row], derivations[every.argmax()])
                best_paths += 1
            top = np.sort(q)[::-1]
            if top[0] > 0 and (len(top) < 2 or top[0] - top[1] > 1e-9):
                close(fine.mode[row], derivations[q.argmax()])
                modes += 1
            rows += 1
        torch.testing.assert_close(p.topk(k)[0], scores)
        onto = torch.from_numpy(problem.graph.onto_weights)
        if p is not fine:
            close(p.topk(k)[1], best_counts @ onto)
            close(p.best_path(), fine.best_path() @ onto)
            close(p.mode, fine.mode @ onto)
    assert min(best_paths, modes) > 0.8 * rows


def test_probabilities_and_the_support(omega: bx.Regularizer, backend: str) -> None:
    compared = graphs = 0
    for problem, p in problems(omega, backend):
        graphs += 1
        fine, derivations = p.by_edge, torch.from_numpy(problem.graph.derivations)
        wanted = torch.from_numpy(np.stack(problem.probabilities, 1))
        logs = fine.log_prob(derivations.unsqueeze(1))
        close(logs.exp(), wanted, 1e-9)
        assert fine.support.check(derivations).all()
        survive = wanted > 1e-9
        if not survive.equal(wanted > 0):
            continue
        paths, weights = p.support_paths()
        assert paths.shape == (len(weights), 2, *p.event_shape)
        assert (weights > 0).sum(0).equal(survive.sum(0))
        close(weights, wanted.sort(0, descending=True).values[: len(weights)], 1e-9)
        mean = (paths * weights.unsqueeze(-1)).sum(0)
        close(mean, p.expected_path, 1e-9)
        compared += 1
    assert compared > 0.6 * graphs


def test_samples_have_the_probabilities(omega: bx.Regularizer, backend: str) -> None:
    draws = 1000
    for problem, p in itertools.islice(problems(omega, backend), 4):
        drawn = p.by_edge.sample((draws,))
        distinct, first = np.unique(problem.graph.derivations, axis=0, return_inverse=True)
        for row in range(2):
            q = np.bincount(first.ravel(), problem.probabilities[row], len(distinct))
            share = [(drawn[:, row].numpy() == derivation).all(1).mean() for derivation in distinct]
            np.testing.assert_allclose(share, q, atol=4 * math.sqrt(0.25 / draws))
            assert sum(share) == pytest.approx(1.0 if q.sum() else 0.0)
        assert p.sample((3, 2)).shape == (3, 2, 2, *p.event_shape)


def test_both_backends_draw_the_same() -> None:
    for problem in enumerate_problems("l2")[:6]:
        drawn = []
        for backend in ("reference", "native" if bx.backend_info()["native"] == "available" else "reference"):
            torch.manual_seed(5)
            with bx.use_backend(backend):
                drawn.append(problem.mine.derivations(torch.from_numpy(problem.weights), omega="l2").sample((20,)))
        assert drawn[0].equal(drawn[1])


def test_kl_divergence_equals_enumeration(omega: bx.Regularizer, backend: str) -> None:
    other = bx.Negentropy(2.0)
    for problem, p in problems(omega, backend):
        weights = np.random.default_rng(1).normal(size=problem.weights.shape)
        r = problem.mine.derivations(torch.from_numpy(weights), omega=other)
        expected = []
        for row, q in enumerate(problem.probabilities):
            beside = problem.graph.probabilities(weights[row], other)
            expected.append(sum(a * math.log(a / b) for a, b in zip(q, beside, strict=True) if a > 0))
        close(kl_divergence(p, r), expected, 1e-9)
    with pytest.raises(ValueError, match="paths of the same graph"):
        kl_divergence(p, diamond().paths(torch.zeros(10, dtype=torch.float64)))


@pytest.mark.parametrize(("name", "sense"), [("negentropy", 0), ("l2", -1), ("tsallis2", 1)])
def test_the_value_differs_from_a_maximum_over_whole_derivations(name: str, sense: int, backend: str) -> None:
    omega = OMEGAS[name]
    for problem, p in problems(omega, backend):
        for row, value in enumerate(p.value.tolist()):
            whole = solve(omega, problem.scores(row).tolist())[0]
            assert (value == pytest.approx(whole)) if sense == 0 else sense * (value - whole) > -1e-9 or value == whole


# --- derivatives


def small(shared: bool = False) -> bx.Hypergraph:
    """A hypergraph with 11 derivations of 2 to 8 edges, in which node 1 may occur three times."""
    edges = [(0, ()), (0, ()), (1, (0,)), (1, ()), (2, (1, 1)), (2, (0,)), (3, (2, 1)), (3, (2,)), (3, ())]
    return bx.Hypergraph(edges, weight_of=[0, 1, 2, 3, 0, 4, 2, 5, 1] if shared else None)


@for_derivatives
@pytest.mark.parametrize("shared", [False, True])
def test_derivatives(omega: bx.Regularizer, backend: str, shared: bool) -> None:
    h = small(shared)
    theta = potentials(2, h.num_weights, requires_grad=True)
    fast = not is_one_of_a_kind(omega) or not (shared and backend == "native")
    asked: list[Callable[[Tensor], Tensor]] = [
        lambda t: h.derivations(t, omega=omega).value,
        lambda t: h.derivations(t, omega=omega).expected_path,
    ]
    if not isinstance(omega, bx.Hard):
        asked.append(lambda t: h.derivations(t, omega=omega).entropy())
    for function in asked:
        assert torch.autograd.gradcheck(function, theta, fast_mode=fast)
    for function in asked[:2]:
        assert torch.autograd.gradgradcheck(function, theta, fast_mode=fast)


@pytest.mark.parametrize("shared", [False, True])
def test_the_hessian_is_symmetric_and_positive(omega: bx.Regularizer, backend: str, shared: bool) -> None:
    h = small(shared)
    p = h.derivations(potentials(h.num_weights), omega=omega)
    eye = torch.eye(h.num_weights, dtype=torch.float64)
    hessian = torch.stack([p.hessian_product(z) for z in eye])
    torch.testing.assert_close(hessian, hessian.T)
    assert torch.linalg.eigvalsh(hessian).min() > -1e-12
    theta = p.weights.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(h.derivations(theta, omega=omega).expected_path, theta, eye[0])
    torch.testing.assert_close(pulled, hessian[0])


@two_kinds
def test_under_transforms(omega: bx.Regularizer, backend: str) -> None:
    h = small(shared=True)
    theta, z = potentials(3, h.num_weights), potentials(3, h.num_weights, seed=1)
    p = h.derivations(theta, omega=omega)

    def value(weights: Tensor) -> Tensor:
        return h.derivations(weights, omega=omega).value

    torch.testing.assert_close(torch.func.vmap(torch.func.grad(value))(theta), p.expected_path)
    torch.testing.assert_close(torch.func.jvp(value, (theta,), (z,)), (p.value, p.directional_derivative(z)))
    hessians = torch.func.vmap(torch.func.hessian(value))(theta)
    torch.testing.assert_close((hessians @ z.unsqueeze(-1)).squeeze(-1), p.hessian_product(z))
    compiled = torch.compile(lambda t: h.derivations(t, omega=omega).expected_path, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(theta), p.expected_path)


def test_gamma_is_learnt_and_costs_are_minimised(backend: str) -> None:
    h, cost = small(), potentials(2, 9)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    p, q = h.derivations(cost, gamma=gamma, minimize=True), h.derivations(-cost, gamma=0.7)
    torch.testing.assert_close(p.value, -q.value)
    torch.testing.assert_close(p.expected_path, q.expected_path)
    (slope,) = torch.autograd.grad(p.value.sum(), gamma)
    torch.testing.assert_close(slope, -p.entropy().sum())
    assert (p.topk(4)[0].diff(dim=-1) >= 0).all()


# --- graphs: one tail per edge


def as_hypergraph(dag: bx.DAG) -> bx.Hypergraph:
    """Edges from the start have no tails."""
    start = int((dag.levels == 0).nonzero())
    edges = [(child, () if parent == start else (parent,)) for parent, child in dag.edges.tolist()]
    names = sorted({head for head, _ in edges})
    return bx.Hypergraph([(names.index(head), tuple(map(names.index, tails))) for head, tails in edges])


def test_a_graph_is_a_hypergraph_with_one_tail_per_edge(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(2, 3, 10), potentials(2, 3, 10, seed=1)
    theta[0, 1, 4] = -math.inf
    p, q = diamond().paths(theta, omega=omega), as_hypergraph(diamond()).derivations(theta, omega=omega)
    assert p.num_paths.equal(q.num_paths)
    for name in ("value", "expected_path", "mode"):
        assert getattr(p, name).equal(getattr(q, name))
    assert p.hessian_product(z).equal(q.hessian_product(z))
    assert p.entropy().equal(q.entropy())
    for got, wanted in zip(q.topk(4), p.topk(4), strict=True):
        assert got.equal(wanted)
    path = p.topk(2)[1][..., 1, :]
    assert p.log_prob(path).equal(q.log_prob(path))
    for loss in (losses.surrogate, losses.relaxed, losses.crf_nll, losses.structured_hinge):
        assert loss(p, path).equal(loss(q, path))
    drawn = []
    for each in (p, q):
        torch.manual_seed(0)
        drawn.append(each.sample((7,)))
    assert drawn[0].equal(drawn[1])


# --- shared weights


def test_shared_weights_are_gathered(omega: bx.Regularizer, backend: str) -> None:
    h, theta, z = small(shared=True), potentials(4, 6), potentials(4, 6, seed=1)
    which = h.weight_of
    p, q = h.derivations(theta, omega=omega), small().derivations(theta[:, which], omega=omega)
    onto = torch.eye(6, dtype=torch.float64)[which]
    torch.testing.assert_close(p.value, q.value)
    torch.testing.assert_close(p.expected_path, q.expected_path @ onto)
    torch.testing.assert_close(p.hessian_product(z), q.hessian_product(z[:, which]) @ onto)
    torch.testing.assert_close(p.by_edge.expected_path, q.expected_path)
    assert q.by_edge is q


def test_shared_weights_that_identify_the_derivation(omega: bx.Regularizer, backend: str) -> None:
    h, number = bracketings(5)
    p = h.derivations(potentials(2, len(number)), omega=omega)
    assert p.num_paths.tolist() == [14, 14]
    trees, probabilities = p.support_paths()
    for row in range(2):
        count = int((probabilities[:, row] > 0).sum())
        close(p[row].log_prob(trees[:count, row]), probabilities[:count, row].log())
    tree = p.topk(3)[1][:, 2]
    assert tree.sum(-1).tolist() == [9, 9]
    assert p.support.check(tree).all()
    assert (losses.surrogate(p, tree, reduction="none") >= 0).all()
    if isinstance(omega, bx.Negentropy):
        torch.testing.assert_close(losses.path_nll(p, tree, reduction="none"), -p.log_prob(tree))
    distance = losses.relaxed(p, tree, reduction="none")
    if not isinstance(omega, bx.Negentropy):
        torch.testing.assert_close(distance, (p.expected_path - tree).square().sum(-1) / 2)


def test_shared_weights_that_do_not_identify_the_derivation() -> None:
    h = bx.Hypergraph([(0, ()), (0, ())], weight_of=[0, 0])
    p = h.derivations(torch.zeros(1))
    assert p.num_paths == 2
    with pytest.raises(ValueError, match=r"the weights of one derivation only, got weights of several.*by_edge takes"):
        p.log_prob(torch.ones(1))
    assert p.by_edge.log_prob(torch.tensor([0.0, 1.0])).exp() == 0.5
    with pytest.raises(ValueError, match="target must be a single derivation of the goal, got a set"):
        losses.relaxed(p, torch.ones(1))
    assert losses.surrogate(p, torch.ones(1)) == 0


# --- losses


@one_of_each_kind
def test_losses(omega: bx.Regularizer, backend: str) -> None:
    h, theta = small(), potentials(3, 9, requires_grad=True)
    p = h.derivations(theta, omega=omega)
    # A derivation in which a node that occurs twice is derived in one way, so that no other one has these edges.
    target = torch.tensor([2.0, 0, 2, 0, 1, 0, 0, 1, 0]).expand(3, 9)
    assert p.support.check(target).all()
    loss = losses.surrogate(p, target, reduction="none")
    only = h.derivations(theta.masked_fill(target == 0, -math.inf), omega=omega)
    torch.testing.assert_close(loss, p.value - only.value)
    assert (loss >= 0).all()
    (slope,) = torch.autograd.grad(loss.sum(), theta)
    torch.testing.assert_close(slope, (p.expected_path - target).to(slope.dtype))
    partial = torch.tensor([1, 1, 1, 1, 1, 0, 0, 1, 0]).bool()
    assert (losses.surrogate(p, partial, reduction="none") <= loss + 1e-12).all()
    assert (losses.path_nll(p, partial, reduction="none") >= 0).all()
    torch.testing.assert_close(losses.expected_cost(p, torch.ones(9)), p.expected_path.sum(-1).mean())
    with pytest.raises(ValueError, match=r"target must hold counts 0, 1, 2, …, got 0.5 at \(0, 1\)"):
        losses.surrogate(p, torch.full((3, 9), 0.5).masked_fill(torch.arange(9) < 1, 0))
    with pytest.raises(ValueError, match="target must be a single derivation of the goal"):
        losses.relaxed(p, partial)
    with pytest.raises(ValueError, match="allows no path of finite score"):
        losses.surrogate(p, torch.zeros(9))


# --- construction


def test_any_order_and_numbering(backend: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        graph = random_hypergraph(rng, shared=False, whole=True)
        theta = rng.normal(size=len(graph.edges))
        p = bx.Hypergraph(graph.edges).derivations(torch.from_numpy(theta), omega="l2")
        order, names = rng.permutation(len(graph.edges)), rng.permutation(graph.num_nodes)
        rows = [graph.edges[e] for e in order]
        shuffled = [(int(names[head]), tuple(int(names[t]) for t in tails)) for head, tails in rows]
        width = 1 + max(len(tails) for _, tails in rows)
        padded = torch.tensor([[head, *tails, *[-1] * (width - 1 - len(tails))] for head, tails in shuffled])
        for same in (bx.Hypergraph(shuffled), bx.Hypergraph(padded), bx.Hypergraph(padded.numpy())):
            other = same.derivations(torch.from_numpy(theta[order]), omega="l2")
            torch.testing.assert_close(other.value, p.value)
            torch.testing.assert_close(other.expected_path, p.expected_path[torch.from_numpy(order)])
            assert same.edges == shuffled


def test_names_and_edges_of_derivations() -> None:
    h, _ = bracketings(4)
    assert h.goal == (0, 4)
    assert (h.num_nodes, h.num_edges, h.num_weights) == (10, 14, 10)
    assert repr(h) == "Hypergraph(num_nodes=10, num_edges=14)"
    p = h.derivations(torch.zeros(2, 10)).by_edge
    trees = p.enumerate_support()
    assert len(trees) == 5
    for tree, (rows, again) in zip(trees, h.derivation_edges(trees), strict=True):
        assert rows == again
        assert rows[0][0] == (0, 4)
        assert len(rows) == len(set(rows)) == 7
        counts = torch.zeros(14)
        counts[[h.edges.index(row) for row in rows]] = 1
        assert counts.equal(tree[0])
    assert h.derivation_edges(torch.zeros(14)) == []
    twice = bx.Hypergraph([("x", ()), ("x", ()), ("xx", ("x", "x"))])
    assert twice.derivation_edges(torch.tensor([1, 1, 1])) == [("xx", ("x", "x")), ("x", ()), ("x", ())]
    with pytest.raises(ValueError, match="derivation must hold one derivation, got no edge to x"):
        twice.derivation_edges(torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="got further edges"):
        twice.derivation_edges(torch.tensor([2, 1, 1]))
    with pytest.raises(ValueError, match=r"derivation must have shape \(\.\.\., 3\), got \(2,\)"):
        twice.derivation_edges(torch.zeros(2))
    with pytest.raises(ValueError, match=r"path.* is not a derivation of the hypergraph"):
        twice.derivations(torch.zeros(3)).log_prob(torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("edges", "num_nodes", "message"),
    [
        ([(0, ()), (1, (0, 2)), (2, (1,)), (3, (2,))], None, "must not form a cycle, got (1 → 2 → 1|2 → 1 → 2)$"),
        ([(0, ()), (1, (0, 1))], None, "must not form a cycle, got 1 → 1$"),
        ([("a", ()), ("b", ("a",)), ("c", ("a",))], None, r"one goal \(no edge's tail\), got 2: nodes b, c"),
        ([(0, ()), (2, (0,))], None, "must reach every node, but none touches 1 .num_nodes is 3"),
        (
            [(0, ()), (2, (0, 1, 3))],
            None,
            "must derive every node, but no edge leads to 1, 3. If 1 is a leaf, add the edge .1, ...$",
        ),
        ([(0, ()), (1, (0, 3))], 3, r"must hold nodes below num_nodes = 3, got \(1, \(0, 3\)\) at row 1"),
        ([(0, ()), (-1, (0,))], None, r"must hold nodes >= 0, got \(-1, \(0,\)\) at row 1"),
        ([(0, ()), (1, (0, -1))], None, r"must hold nodes >= 0, got \(1, \(0, -1\)\) at row 1"),
        ([], None, "must have at least one row"),
        (
            [(0, 1)],
            None,
            r"rows \(head, tails\) of hashable nodes, with a tuple or list of tails, got \(0, 1\) at row 0",
        ),
        ([(0, ()), (0, (), 1)], None, r"rows \(head, tails\) .*, got \(0, \(\), 1\) at row 1"),
        ([(0, ([1],))], None, r"of hashable nodes, .* at row 0"),
        ([("a", ())], 1, "num_nodes must be left out if edges hold names, got 1"),
        ({0: ()}, None, r"edges must be rows \(head, tails\), got a dict"),
        (7, None, r"edges must be rows \(head, tails\), got a int"),
        ([(0.5, ())], None, "must hold integers, got dtype torch.float32"),
        (torch.zeros(2, 2), None, "must hold integers, got dtype torch.float32"),
        (torch.zeros(0, 2), None, r"shape \(E, 1 \+ A\) with E >= 1, got \(0, 2\)"),
        (torch.tensor([[0, -2]]), None, r"must hold nodes >= 0, got \(0, \(-2,\)\) at row 0"),
    ],
)
def test_bad_hypergraphs_are_named(edges, num_nodes: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.Hypergraph(edges, num_nodes)


def test_bad_weights_are_named(backend: str) -> None:
    h = small()
    with pytest.raises(ValueError, match=r"weights must have shape \(\.\.\., 9\), got \(2, 8\)"):
        h.derivations(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"weights must be finite or -inf, got inf at event index \(3,\)"):
        _ = h.derivations(torch.zeros(9).masked_fill(torch.arange(9) == 3, math.inf)).value
    for weights, message in (
        ([0, 1], r"weight_of must have shape \(9,\), got \(2,\)"),
        ([-1] * 9, "weight_of must hold numbers >= 0, got -1"),
        ([0.5] * 9, "weight_of must hold integers, got dtype torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            bx.Hypergraph(h.edges, weight_of=weights)
    with pytest.raises(NotImplementedError, match="variance"):
        _ = h.derivations(torch.zeros(9)).variance


# --- edge cases


def test_corners(omega: bx.Regularizer, backend: str) -> None:
    one = bx.Hypergraph([(0, ())]).derivations(torch.tensor([[2.0], [-math.inf]], dtype=torch.float64), omega=omega)
    vertex = 0.45 if isinstance(omega, bx.SquaredL2) else 0.0
    close(one.value, [2.0 - vertex, -math.inf])
    assert one.expected_path.tolist() == [[1.0], [0.0]]
    assert one.sample().tolist() == [[1.0], [0.0]]
    assert one.topk(2)[0].tolist() == [[2.0, -math.inf], [-math.inf, -math.inf]]
    theta = torch.full((9,), -math.inf, dtype=torch.float64, requires_grad=True)
    p = small().derivations(theta, omega=omega)
    assert p.value == -math.inf
    (slope,) = torch.autograd.grad(p.value, theta)
    for nothing in (slope, p.hessian_product(torch.ones(9)), p.sample((2,)), p.best_path(), p.entropy(), p.num_paths):
        assert not nothing.any()
    none = small(shared=True).derivations(torch.zeros(0, 6, requires_grad=True), omega=omega)
    assert none.value.shape == (0,)
    assert none.expected_path.shape == none.hessian_product(torch.zeros(6)).shape == (0, 6)
    assert none.topk(3)[1].shape == (0, 3, 6)
    assert none.sample((2,)).shape == (2, 0, 6)
    assert none.support_paths()[0].shape == (0, 0, 6)


def test_many_derivations(backend: str) -> None:
    """Each node has the one before twice as its tails: 2^(2^9 − 1)… derivations of 511 edges."""
    depth = 9
    edges: list[tuple[int, tuple[int, ...]]] = [(0, ()), (0, ())]
    edges += [(n, (n - 1, n - 1)) for n in range(1, depth)]
    p = bx.Hypergraph(edges).derivations(torch.zeros(len(edges), dtype=torch.float64))
    close(p.log_num_paths, 256 * math.log(2))
    counts = p.sample((50,))
    assert (counts[:, :2].sum(1) == 256).all()
    assert counts[:, 0].std() > 4
    assert p.expected_path.tolist() == [128, 128, *[2.0 ** (depth - 1 - n) for n in range(1, depth)]]
    large = bx.Hypergraph([(0, ()), *[(n, (n - 1, n - 1)) for n in range(1, 60)]]).derivations(torch.zeros(60))
    with pytest.raises(ValueError, match="sampled derivations must have at most 100000000 edges, got up to"):
        large.sample()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_copies_and_moves(duplicate: Callable[[bx.Hypergraph], bx.Hypergraph]) -> None:
    h = small(shared=True)
    theta = potentials(2, 3, 6)
    p, q = h.derivations(theta), duplicate(h).derivations(theta)
    assert p.value.equal(q.value)
    torch.testing.assert_close(kl_divergence(p, q), torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(p[1].value, p.value[1])
    assert p.expand((4, 2, 3)).value.equal(p.value.expand(4, 2, 3))
    meta = p.to("meta")
    assert meta.value.is_meta
    assert meta.sample((2,)).shape == (2, 2, 3, 6)
    assert h.to("meta").weight_of.is_meta
    assert pickle.loads(pickle.dumps(p)).value.equal(p.value)


@needs_kernels
def test_kernels_sweep_a_large_chart() -> None:
    h, number = bracketings(24)
    theta = potentials(3, len(number)).float().requires_grad_()
    with took("dag_forward", times=1), took("dag_backward"):
        h.derivations(theta).value.sum().backward()
    with bx.use_backend("reference"):
        wanted = h.derivations(theta.detach().double()).expected_path
    torch.testing.assert_close(theta.grad.double(), wanted, rtol=1e-4, atol=1e-6)
    assert h.derivations(theta).sample().sum(-1).tolist() == [47, 47, 47]


# --- pruning to a goal

DEAD = [("dead", ("a", "bc")), ("loop", ("pool", "a")), ("pool", ("loop",)), ("over", ("abc", "abc")), ("none", ("?",))]
CHART = [("a", ()), ("b", ()), ("c", ()), ("ab", ("a", "b")), ("bc", ("b", "c")), ("abc", ("ab", "c"))]
CHART += [("abc", ("a", "bc")), ("b", ())]


@pytest.mark.parametrize("shared", [False, True])
def test_edges_that_do_not_derive_the_goal_are_pruned(omega: bx.Regularizer, backend: str, shared: bool) -> None:
    order = torch.tensor([8, 0, 1, 9, 2, 3, 10, 4, 5, 11, 12, 6, 7])
    rows, is_kept = [(CHART + DEAD)[n] for n in order], order < 8
    weight_of = (order * 3) % 7 if shared else None
    whole = bx.Hypergraph(rows, weight_of=weight_of, goal="abc")
    subgraph = bx.Hypergraph(CHART, weight_of=weight_of[is_kept] if shared else None)
    assert whole.goal == subgraph.goal == "abc"
    assert whole.edges == rows

    def spread(of_part: Tensor) -> Tensor:
        index = torch.arange(7) if shared else is_kept.nonzero()[:, 0]
        return of_part.new_zeros(*of_part.shape[:-1], 7 if shared else 13).index_copy(-1, index, of_part)

    weights, z = potentials(2, whole.num_weights, seed=1), potentials(2, whole.num_weights, seed=2)
    columns = slice(None) if shared else is_kept
    p, q = whole.derivations(weights, omega=omega), subgraph.derivations(weights[:, columns], omega=omega)
    assert p.backend == backend
    close(p.value, q.value)
    close(p.expected_path, spread(q.expected_path))
    close(p.hessian_product(z), spread(q.hessian_product(z[:, columns])))
    close(p.entropy(), q.entropy())
    close(p.num_paths, q.num_paths)
    for mine, other in ((p.topk(6), q.topk(6)), (p.support_paths()[::-1], q.support_paths()[::-1])):
        close(mine[0], other[0])
        close(mine[1], spread(other[1]))
    close(p.mode, spread(q.mode))
    samples = []
    for each in (p, q):
        torch.manual_seed(0)
        samples.append(each.sample((5,)))
    close(samples[0], spread(samples[1]))
    assert p.support.check(samples[0]).all()
    edges = p.by_edge.sample((3,))
    close(p.by_edge.log_prob(edges), q.by_edge.log_prob(edges[..., is_kept]))
    assert not edges[..., ~is_kept].any()
    assert len(whole.derivation_edges(p.by_edge.best_path())[0]) == 5


def test_a_wrong_goal_is_named() -> None:
    with pytest.raises(ValueError, match=r"exactly one goal .*, got 2: nodes dead, abc. .* one of them, pass goal="):
        bx.Hypergraph([*DEAD[:1], *CHART])
    with pytest.raises(ValueError, match="goal must be a node of the edges, got 'S'"):
        bx.Hypergraph(CHART, goal="S")
    with pytest.raises(ValueError, match=r"but no edge leads to \?\. If \? is a leaf, add the edge \(\?, \(\)\)$"):
        bx.Hypergraph(CHART + DEAD, goal="none")
    with pytest.raises(ValueError, match="must not form a cycle"):
        bx.Hypergraph(CHART + DEAD, goal="loop")
    outright = bx.Hypergraph(CHART + DEAD, goal="b").derivations(torch.zeros(13))
    assert outright.expected_path.tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0.5, *[0] * 5]
