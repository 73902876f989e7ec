"""``max_marginals``: the best value of a path that uses each entry, against an enumeration of all paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.hypergraphs import random_hypergraph
from support.kernels import needs_kernels, took
from support.problems import one_of_each_kind, potentials, random_dag
from support.recursions import RECURSIONS
from support.structures import HYPER, STRUCTURES
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L

each_structure = pytest.mark.parametrize("name", list(STRUCTURES))


def by_enumeration(p: bx.PathDistribution) -> Tensor:
    """The best score of the paths of one distribution whose event has each entry; ∓∞ if there is none."""
    absent = -p.sense * math.inf
    count = int(p.num_paths)
    if not count:
        return torch.full(p.event_shape, absent, dtype=p.value.dtype)
    scores, paths = p.topk(count)
    used = torch.where(paths != 0, scores.reshape(-1, *[1] * len(p.event_shape)), absent)
    return p.sense * (p.sense * used).amax(0)


def check(p: bx.PathDistribution, some: bool = True) -> None:
    """Compare each member of a batch with the enumeration. ``some`` is True if paths use some of the entries."""
    got = p.max_marginals
    assert got.shape == p.batch_shape + p.event_shape
    assert not got.requires_grad
    members = list(p) if p.batch_shape else [p]
    for member, own in zip(members, got if p.batch_shape else [got], strict=True):
        torch.testing.assert_close(own, by_enumeration(member), rtol=1e-5, atol=1e-5)
    assert bool(got.isfinite().any()) == some


@each_structure
def test_random_scores(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    check(structure.make(potentials(*structure.shape).requires_grad_()))


@each_structure
def test_scores_of_absent_edges(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    compared = 0
    for seed in range(4):
        x = potentials(*structure.shape, seed=seed)
        x[potentials(*structure.shape, seed=seed + 9) > 1.2] = structure.absent
        p = structure.make(x)
        check(p, some=p.num_paths > 0)
        compared += int(p.num_paths > 0)
    assert compared
    check(structure.make(torch.full(structure.shape, structure.absent)), some=False)


@each_structure
def test_dtypes(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(*structure.shape)
    wanted = structure.make(x).max_marginals
    assert wanted.dtype == torch.float64
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        got = structure.make(x.to(dtype)).max_marginals
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@one_of_each_kind
def test_paths_are_compared_by_their_scores_under_any_omega(omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(3, 4).square()
    got = bx.DTW(cost, omega=omega).max_marginals
    torch.testing.assert_close(got, by_enumeration(bx.DTW(cost, omega="hard")))


# --- batches


def test_chains_with_lengths_and_masks(backend: str) -> None:
    x = potentials(5, 4, 3, 3)
    check(bx.Chain(x, lengths=torch.tensor([4, 3, 2, 1, 0])))
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    p = bx.Chain(x, mask=mask)
    check(p)
    assert (p.max_marginals.isfinite().flatten(-2).any(-1) == mask).all()
    scored = bx.Chain.from_scores(x[..., 0], x[0, 0], start=x[0, 1, 0], end=x[0, 2, 0], mask=mask)
    check(scored)
    torch.testing.assert_close(scored.max_marginals, bx.Chain(scored.potentials, mask=mask).max_marginals)


def test_chains_of_one_step_and_one_state(backend: str) -> None:
    check(bx.Chain(potentials(2, 1, 3, 3)))
    check(bx.Chain(potentials(2, 4, 1, 1)))
    check(bx.Chain.from_scores(potentials(2, 1, 3), torch.zeros(3, 3).double()))
    assert bx.Chain(potentials(2, 0, 3, 3)).max_marginals.shape == (2, 0, 3, 3)


def test_grids_with_lengths_and_a_band(backend: str) -> None:
    cost = potentials(4, 4, 5).square()
    lengths = torch.tensor([4, 3, 2, 1]), torch.tensor([5, 2, 5, 1])
    for p in (bx.DTW(cost, lengths=lengths), bx.DTW(cost, lengths=lengths, band=1), bx.DTW(cost, band=0)):
        check(p)
        assert (p.max_marginals.isfinite() == (p.expected_path > 0)).all()


@needs_kernels
def test_kernels_of_chains_grids_and_graphs() -> None:
    x = potentials(4, 2, 2)
    cases: list[tuple[str, bx.PathDistribution]] = [
        ("chain_max_marginals", bx.Chain(x)),
        ("scored_chain_max_marginals", bx.Chain.from_scores(x[..., 0], x[0])),
        ("lattice_max_marginals", bx.DTW(x[..., 0])),
        ("dag_max_marginals", HYPER.derivations(potentials(5))),
        ("dag_max_marginals", bx.SpanTrees(potentials(4, 4))),
    ]
    for kernel, p in cases:
        with took(kernel, times=1):
            check(p)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_grids_equal_those_of_the_reference(dtype: torch.dtype) -> None:
    cost, labels = potentials(2, 70, 131).square().to(dtype), torch.tensor([[1, 2, 2, 1], [2, 1, 1, 1]])
    scores = potentials(2, 70, 3).to(dtype)

    def results() -> list[Tensor]:
        lengths = torch.tensor([70, 66]), torch.tensor([131, 90])
        alignment = bx.SequenceAlignment(1 - cost, gap_open=-1.0, gap_extend=-0.5, mode="local")
        paths = [bx.DTW(cost), bx.DTW(cost, lengths=lengths, band=9), alignment, bx.CTC(scores, labels)]
        return [p.max_marginals for p in paths]

    with bx.use_backend("reference"):
        wanted = results()
    with bx.use_backend("native"):
        torch.testing.assert_close(results(), wanted)


def test_other_lengths(backend: str) -> None:
    check(bx.CTC(potentials(3, 5, 3), torch.tensor([[1, 2], [2, 2], [1, -1]]), lengths=([5, 4, 3], [2, 2, 1])))
    check(bx.SpanTrees(potentials(2, 4, 4), lengths=torch.tensor([4, 2])))
    check(bx.DependencyTrees(potentials(2, 4, 4), lengths=torch.tensor([3, 2]), single_root=False))
    check(bx.SemiMarkov(potentials(2, 4, 2, 2), potentials(2, 2, seed=1), lengths=torch.tensor([4, 2])))
    check(bx.MonotonicAlignment(potentials(2, 5, 3), lengths=([5, 4], [3, 2])))


@each_structure
def test_batch_dimensions(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    p = structure.make(potentials(*structure.shape))
    assert (p.expand((2, 1)).max_marginals == p.max_marginals.expand(2, 1, *p.event_shape)).all()
    assert p.expand((0,)).max_marginals.shape == (0, *p.event_shape)


# --- graphs


def test_random_graphs(backend: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        edges, _ = random_dag(rng)
        weights = torch.tensor(rng.normal(size=(2, len(edges))))
        weights[1, rng.random(len(edges)) < 0.2] = -math.inf
        check(bx.DAG(edges).paths(weights))
        check(bx.DAG(edges).paths(-weights, minimize=True))


def test_random_hypergraphs(backend: str) -> None:
    """With repeated tails, and with shared weights."""
    rng = np.random.default_rng(1)
    for shared in (False, True):
        for _ in range(10):
            h = random_hypergraph(rng, shared, whole=True)
            graph = bx.Hypergraph(h.edges, weight_of=h.weight if shared else None)
            theta = rng.normal(size=graph.num_weights)
            theta[rng.random(len(theta)) < 0.1] = -math.inf
            scores = h.derivations @ np.where(np.isinf(theta), -1e9, theta)[h.weight]
            counts = h.derivations @ h.onto_weights
            wanted = np.where(counts > 0, scores[:, None], -math.inf).max(0)
            wanted[wanted < -1e8] = -math.inf
            got = graph.derivations(torch.tensor(theta)).max_marginals
            torch.testing.assert_close(got, torch.tensor(wanted))


def test_a_tail_without_a_derivation_closes_the_edge_for_the_other_tails_only() -> None:
    """The best derivation that uses "a" must not be lost if "b", the other tail of an edge, has none."""
    weights = torch.tensor([1.0, -math.inf, -math.inf, 2.0, 3.0])
    assert HYPER.derivations(weights).max_marginals.eq(-math.inf).all()
    weights = torch.tensor([1.0, -math.inf, 0.5, 2.0, 3.0])
    assert HYPER.derivations(weights).max_marginals.tolist() == [4.5, -math.inf, 4.5, 4.5, 4.5]


def test_pruned_edges_are_on_no_path(backend: str) -> None:
    roads = bx.DAG([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("x", "b")], start="a", end="c")
    p = roads.paths(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert p.max_marginals.tolist() == [3, 3, 4, -math.inf, -math.inf]


# --- lattices


@pytest.mark.parametrize("name", list(RECURSIONS))
def test_lattices_of_each_kind(name: str, backend: str) -> None:
    """Some read an entry in several places, or a matrix by labels, or with negative coefficients."""
    one = RECURSIONS[name]
    rows, columns = (3, 4) if name.startswith(("Drop-DTW", "states")) else (4, 3 if one.has_columns else 1)
    tensors = one.tensors(rows, columns)
    check(one.lattice.paths(tensors, grid=(rows, columns)))
    costs = {name: -t if t.is_floating_point() else t for name, t in tensors.items()}
    check(one.lattice.paths(costs, grid=(rows, columns), minimize=True))


def test_a_matrix_that_the_batch_shares_has_values_for_each_member(backend: str) -> None:
    edit = bx.Lattice([bx.Move(1, 1, score=L.pair("m", "a", "b", -1, -1)), bx.Move(1, 0), bx.Move(0, 1)])
    a, b = torch.tensor([[0, 1, 1], [1, 0, 2]]), torch.tensor([[0, 1], [2, 2]])
    p = edit.paths({"m": potentials(3, 3), "a": a, "b": b}, grid=(4, 3))
    check(p)
    assert p.max_marginals.isfinite().tolist() == [
        [[True, True, False], [True, True, False], [False, False, False]],
        [[False, False, True], [False, False, True], [False, False, True]],
    ]


# --- transforms and errors


def test_under_vmap_and_compile(backend: str) -> None:
    x = potentials(3, 4, 2, 2)
    wanted = torch.stack([by_enumeration(bx.Chain(each)) for each in x])
    torch.testing.assert_close(torch.vmap(lambda t: bx.Chain(t).max_marginals)(x), wanted)
    compiled = torch.compile(lambda t: bx.Chain(t).max_marginals, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)


@each_structure
def test_scores_are_checked(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    with pytest.raises(ValueError, match=r"must be finite|must not|inf|nan"):
        _ = structure.make(torch.full(structure.shape, math.nan)).max_marginals
