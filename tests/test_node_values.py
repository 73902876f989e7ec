"""``node_values``: the forward values of nodes, against recursions in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.hypergraphs import random_hypergraph
from support.inside import grid_size
from support.kernels import needs_kernels, took
from support.problems import OMEGAS, one_of_each_kind, potentials, random_dag, random_weights, solve, two_kinds
from support.recursions import RECURSIONS, Recursion, Tensors
from support.structures import STRUCTURES
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L

SEGMENTS_AND_TREES = "SemiMarkov", "ScoredSemiMarkov", "SpanTrees", "SpanTrees, labels", "DependencyTrees", "TreeModel"
with_nodes = pytest.mark.parametrize("name", [name for name in STRUCTURES if name not in SEGMENTS_AND_TREES])


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert not got.requires_grad


# --- chains


def chain_values(theta: Tensor, unmasked: list[bool], omega: bx.Regularizer) -> Tensor:
    """The values (T, S) of the states of one sequence, for potentials (T, S, S)."""
    values = torch.full(theta.shape[:2], -math.inf, dtype=torch.float64)
    before = [0.0]
    for t in [t for t, is_step in enumerate(unmasked) if is_step]:
        now = [solve(omega, [w + v for w, v in zip(into, before, strict=False)])[0] for into in theta[t].tolist()]
        values[t], before = torch.tensor(now, dtype=torch.float64), now
    return values


def test_chains(omega: bx.Regularizer, backend: str) -> None:
    theta = potentials(4, 5, 3, 3).requires_grad_()
    with torch.no_grad():
        theta[1, 2, 0] = theta[2, 0, 1] = theta[3, 4] = -math.inf  # a state, a start, and every way to the end
    close(
        bx.Chain(theta, omega=omega).node_values,
        torch.stack([chain_values(each, [True] * 5, omega) for each in theta]),
    )


@one_of_each_kind
def test_chains_of_many_states_and_of_one(omega: bx.Regularizer, backend: str) -> None:
    """Kernels solve the states of a step in tiles of 16."""
    for states in (1, 16, 19):
        theta = potentials(3, states, states)
        close(bx.Chain(theta, omega=omega).node_values, chain_values(theta, [True] * 3, omega))
    assert bx.Chain(potentials(2, 0, 3, 3), omega=omega).node_values.shape == (2, 0, 3)


@one_of_each_kind
def test_chains_with_masks_and_lengths(omega: bx.Regularizer, backend: str) -> None:
    theta = potentials(5, 4, 2, 2)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    wanted = torch.stack([chain_values(t, m, omega) for t, m in zip(theta, mask.tolist(), strict=True)])
    close(bx.Chain(theta, mask=mask, omega=omega).node_values, wanted)
    lengths = torch.tensor([4, 3, 1, 0, 2])
    within = (torch.arange(4) < lengths.unsqueeze(-1)).tolist()
    wanted = torch.stack([chain_values(t, m, omega) for t, m in zip(theta, within, strict=True)])
    close(bx.Chain(theta, lengths=lengths, omega=omega).node_values, wanted)


@pytest.mark.parametrize("by_step", [False, True])
def test_scored_chains(by_step: bool, omega: bx.Regularizer, backend: str) -> None:
    """End scores belong to the edges after the last nodes."""
    emissions, start, end = potentials(3, 4, 3), potentials(3, seed=1), potentials(3, seed=2)
    transitions = potentials(3, 3, 3, 3, seed=3) if by_step else potentials(3, 3, seed=3)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]]).bool()
    start[1] = transitions[..., 0, 2] = -math.inf
    p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=mask, omega=omega)
    for b in range(3):
        steps, before = mask[b].nonzero().flatten().tolist(), None
        for t in steps:
            between = transitions[b, t - 1] if by_step else transitions
            into = start[:, None] if before is None else torch.tensor(before, dtype=torch.float64) + between
            before = [solve(omega, row.tolist())[0] + float(e) for row, e in zip(into, emissions[b, t], strict=True)]
            close(p.node_values[b, t], torch.tensor(before, dtype=torch.float64))
        assert p.node_values[b, ~mask[b]].eq(-math.inf).all()


def test_long_chains_in_float32_are_absolute_values(backend: str) -> None:
    """Kernels may store values relative to the best state of their step."""
    theta = potentials(2, 300, 3, 3) + 5
    for omega in (bx.Negentropy(), bx.Hard()):
        wanted = torch.stack([chain_values(each, [True] * 300, omega) for each in theta])
        got = bx.Chain(theta.float(), omega=omega).node_values
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-4)


def test_scored_chains_with_peaked_and_mild_emissions(backend: str) -> None:
    """Kernels of scored chains under negentropy may compute in exp space."""
    for scale in (1, 300):
        emissions, transitions = scale * potentials(2, 6, 4), potentials(4, 4, seed=1)
        p = bx.Chain.from_scores(emissions, transitions)
        wanted = torch.stack([chain_values(each, [True] * 6, bx.Negentropy()) for each in p.potentials])
        close(p.node_values, wanted)
        single = bx.Chain.from_scores(emissions.float(), transitions.float()).node_values
        torch.testing.assert_close(single.double(), wanted, rtol=1e-6, atol=1e-4)


# --- lattices


def lattice_values(
    one: Recursion,
    tensors: Tensors,
    size: tuple[int, int],
    lengths: tuple[int, int],
    omega: bx.Regularizer,
    inside: Callable[[int, int], bool] = lambda i, j: True,
) -> Tensor:
    """The values (N, M[, states]) of the nodes of one lattice."""

    def maximum(scores: list[Tensor]) -> Tensor:
        return torch.tensor(solve(omega, [float(score) for score in scores])[0], dtype=torch.float64)

    values = torch.full((*size, one.lattice.states), -math.inf, dtype=torch.float64)
    for node, value in one.nodes(tensors, *lengths, maximum, inside).items():
        values[node] = value
    return values.squeeze(-1) if one.lattice.states == 1 else values


@pytest.mark.parametrize("name", list(RECURSIONS))
@two_kinds
def test_lattices_of_each_kind(name: str, omega: bx.Regularizer, backend: str) -> None:
    one = RECURSIONS[name]
    rows, columns = (5, 4) if one.has_columns else (5, 1)
    tensors = one.tensors(rows, columns)
    p = one.lattice.paths(tensors, grid=(rows, columns), omega=omega)
    wanted = lattice_values(one, tensors, grid_size(p), (rows, columns), omega)
    close(p.node_values, wanted)
    if "_1" not in one.lattice.scores:  # the constants of the declaration
        costs = {name: -t if t.is_floating_point() else t for name, t in tensors.items()}
        close(one.lattice.paths(costs, grid=(rows, columns), omega=omega, minimize=True).node_values, -wanted)


@pytest.mark.parametrize("name", ["DTW", "affine gaps", "monotone", "semi-global", "CTC"])
@one_of_each_kind
def test_lengths_and_bands(name: str, omega: bx.Regularizer, backend: str) -> None:
    one, lengths = RECURSIONS[name], [(5, 6), (5, 3), (3, 6), (2, 2), (1, 1)]
    tensors = one.tensors(5, 6)
    batched = {n: t.expand(len(lengths), *t.shape) for n, t in tensors.items()}
    n, m = torch.tensor(lengths).unbind(1)
    for band in (None, 1):
        values = one.lattice.paths(batched, grid=(n, m), band=band, omega=omega).node_values
        for b, (rows, columns) in enumerate(lengths):
            reach = math.inf if band is None or 1 in (rows, columns) else band * (max(rows, columns) - 1)

            def inside(i: int, j: int, n: int = rows, m: int = columns, reach: float = reach) -> bool:
                return abs(i * (m - 1) - j * (n - 1)) <= reach

            close(values[b], lattice_values(one, tensors, (5, 6), (rows, columns), omega, inside))


def test_nodes_that_lead_nowhere_have_values(backend: str) -> None:
    """From the state "open" no path of this lattice comes to an end in the last row, but paths reach it."""
    lattice = bx.Lattice(
        [bx.Move(1, 1), bx.Move(1, 0, 0, 1, "open"), bx.Move(1, 1, 1, 0)], states=2, node={0: L.cell("match")}
    )
    p = lattice.paths({"match": torch.ones(3, 3), "open": -5.0}, omega="hard")
    assert p.node_values[..., 1].tolist() == [[-math.inf] * 3, [-4, -math.inf, -math.inf], [-math.inf, -3, -math.inf]]


def test_scores_of_ends_are_not_values_of_nodes(backend: str) -> None:
    lattice = bx.Lattice([bx.Move(1, 0)], node=L.row("score"), end=L.along_column({0: L.row("bye")}))
    p = lattice.paths({"score": torch.ones(3), "bye": torch.tensor([0.0, -math.inf, 7.0])}, omega="hard")
    assert p.value == 10
    assert p.node_values.tolist() == [[1], [2], [3]]
    only = bx.Lattice([bx.Move(1, 0, score="step")], end=L.along_column({0: L.row("bye")}))
    p = only.paths({"step": 1.0, "bye": torch.zeros(3)}, omega="hard")
    assert p.node_values.tolist() == [[0], [1], [2]]


# --- DTW


def accumulated_cost(cost: Tensor, omega: bx.Regularizer) -> Tensor:
    rows, columns = cost.shape
    values = torch.full((rows + 1, columns + 1), math.inf, dtype=torch.float64)
    values[0, 0] = 0
    for i in range(rows):
        for j in range(columns):
            before = [-float(v) for v in (values[i, j], values[i, j + 1], values[i + 1, j])]
            values[i + 1, j + 1] = cost[i, j] - solve(omega, [x for x in before if x > -math.inf])[0]
    return values[1:, 1:]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (70, 9), (9, 131)])
def test_accumulated_cost_of_dtw(shape: tuple[int, int], omega: bx.Regularizer, backend: str) -> None:
    """Some grids are larger than the strips of 64 rows and the chunks of 64 columns of the kernels."""
    cost = potentials(*shape).square()
    close(bx.DTW(cost, omega=omega).node_values, accumulated_cost(cost, omega))


def test_accumulated_cost_of_dtaidistance(backend: str) -> None:
    dtw = pytest.importorskip("dtaidistance.dtw", reason="dtaidistance is not installed")
    x, y = potentials(12), potentials(9, seed=1)
    cost = (x.unsqueeze(1) - y).square()
    _, roots = dtw.warping_paths(x.numpy(), y.numpy())
    close(bx.DTW(cost, omega="hard").node_values, torch.tensor(roots[1:, 1:]).square())
    _, roots = dtw.warping_paths(x.numpy(), x.numpy(), window=3)
    cost = (x.unsqueeze(1) - x).square()
    close(bx.DTW(cost, omega="hard", band=2).node_values, torch.tensor(roots[1:, 1:]).square())


def test_value_of_dtw_is_the_last_node(omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(3, 5, 4).square()
    lengths = torch.tensor([5, 3, 1]), torch.tensor([4, 2, 1])
    p = bx.DTW(cost, lengths=lengths, omega=omega)
    n, m = lengths
    close(p.node_values[torch.arange(3), n - 1, m - 1], p.value.detach())


# --- graphs


def test_graphs(omega: bx.Regularizer, backend: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        edges, num_nodes = random_dag(rng)
        weights = random_weights(rng, len(edges))
        values = [0.0]
        for i in range(1, num_nodes):
            into = [w + values[a] for (a, b), w in zip(edges, weights, strict=True) if b == i]
            values.append(solve(omega, into)[0])
        names = rng.permutation(num_nodes).tolist()
        graph = bx.DAG([(f"n{names[a]}", f"n{names[b]}") for a, b in edges])
        wanted = torch.tensor([values[names.index(int(str(name)[1:]))] for name in graph.nodes], dtype=torch.float64)
        close(graph.paths(torch.tensor(weights), omega=omega).node_values, wanted)
        costs = torch.tensor(weights).expand(2, 1, -1).neg()
        close(graph.paths(costs, omega=omega, minimize=True).node_values, -wanted.expand(2, 1, -1))


def test_pruned_nodes_of_a_graph(backend: str) -> None:
    edges = [("x", "b"), ("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("a", "y"), ("d", "z"), ("w", "w2")]
    graph = bx.DAG(edges, start="a", end="d")
    p = graph.paths(torch.tensor([64.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 128.0]), omega="hard")
    values = dict(zip(graph.nodes, p.node_values.tolist(), strict=True))
    absent = dict.fromkeys(("x", "y", "z", "w", "w2"), -math.inf)
    assert values == {"a": 0, "b": 1, "c": 4, "d": 12} | absent
    costs = graph.paths(p.weights, omega="hard", minimize=True).node_values
    values = dict(zip(graph.nodes, costs.tolist(), strict=True))
    assert values == {"a": 0, "b": 1, "c": 3, "d": 11} | dict.fromkeys(absent, math.inf)
    pair = bx.Hypergraph([("a", ()), ("b", ()), ("c", ("a", "b")), ("d", ("c", "a"))], goal="c")
    got = pair.derivations(torch.tensor([1.0, 2.0, 4.0, 8.0]), omega="hard").node_values
    assert dict(zip(pair.nodes, got.tolist(), strict=True)) == {"a": 1, "b": 2, "c": 7, "d": -math.inf}


def test_graph_of_a_lattice(backend: str) -> None:
    graph = RECURSIONS["DTW"].lattice.dag(2, 2)
    assert graph.paths(torch.zeros(graph.num_edges), omega="hard").node_values.eq(0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_hypergraphs(shared: bool, omega: bx.Regularizer, backend: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(6):
        h = random_hypergraph(rng, shared, whole=True)
        theta = random_weights(rng, max(h.weight) + 1, missing=0.1)
        values: list[float] = []
        for edges in h.into:
            into = [theta[h.weight[e]] + sum(values[tail] for tail in h.edges[e][1]) for e in edges]
            values.append(solve(omega, into)[0])
        graph = bx.Hypergraph(h.edges, weight_of=h.weight if shared else None)
        got = graph.derivations(torch.tensor(theta), omega=omega).node_values
        close(got, torch.tensor(values, dtype=torch.float64))


# --- all structures


@with_nodes
def test_dtypes_and_batches(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(*structure.shape)
    wanted = structure.make(x).node_values
    assert wanted.dtype == torch.float64
    assert wanted.isfinite().any()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        got = structure.make(x.to(dtype)).node_values
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    p = structure.make(x)
    assert (p.expand((2, 1)).node_values == wanted.expand(2, 1, *wanted.shape)).all()
    assert p.expand((0,)).node_values.shape == (0, *wanted.shape)


@with_nodes
def test_gamma_as_a_tensor(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    x, gamma = potentials(*structure.shape), torch.tensor([0.5, 2.0], dtype=torch.float64)
    for one, number in zip(gamma.requires_grad_(), (0.5, 2.0), strict=True):
        close(
            structure.make(x, omega="l2", gamma=one).node_values,
            structure.make(x, omega="l2", gamma=number).node_values,
        )


def test_gamma_for_each_member_of_a_batch(backend: str) -> None:
    gamma = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    cost = potentials(2, 3, 4, 5).square()
    p = bx.DTW(cost, omega="negentropy", gamma=gamma)
    for i, j in ((0, 0), (1, 0), (1, 2)):
        close(p.node_values[i, j], accumulated_cost(cost[i, j], bx.Negentropy(float(gamma[i]))))
    theta = potentials(2, 4, 3, 3)
    values = bx.Chain(theta, omega="sparsemax", gamma=gamma.squeeze(-1)).node_values
    for own, one, got in zip(theta, gamma, values, strict=True):
        close(got, chain_values(own, [True] * 4, bx.Tsallis(2.0, float(one))))


@with_nodes
def test_no_path(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    got = structure.make(torch.full(structure.shape, structure.absent)).node_values
    start = structure.make(torch.zeros(structure.shape)).node_values
    assert ((got == structure.absent) | (got.isfinite() & start.isfinite())).all()
    assert (got == structure.absent).any()


@pytest.mark.parametrize("name", SEGMENTS_AND_TREES)
def test_structures_without_such_nodes(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    p = structure.make(potentials(*structure.shape))
    with pytest.raises(NotImplementedError, match="only defined for chains, lattices, DAGs and hypergraphs"):
        _ = p.node_values


@with_nodes
def test_scores_are_checked(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    with pytest.raises(ValueError, match="must"):
        _ = structure.make(torch.full(structure.shape, math.nan)).node_values
    with pytest.raises(ValueError, match="gamma must be large enough"):
        _ = structure.make(torch.full(structure.shape, structure.sense * 1e30), gamma=1e-30).node_values


@needs_kernels
def test_kernels_of_chains_grids_and_graphs() -> None:
    x = potentials(4, 2, 2)
    cases: list[tuple[str, bx.PathDistribution]] = [
        ("chain_node_values", bx.Chain(x)),
        ("scored_chain_node_values", bx.Chain.from_scores(x[..., 0], x[0])),
        ("lattice_end_values", bx.DTW(x[..., 0])),
        ("dag_forward", bx.DAG([(0, 1), (1, 2), (0, 2)]).paths(potentials(3))),
    ]
    for kernel, p in cases:
        with took(kernel, times=1):
            assert p.node_values.isfinite().any()


def test_under_vmap_and_compile(backend: str) -> None:
    cost = potentials(3, 4, 5).square()
    wanted = torch.stack([accumulated_cost(each, OMEGAS["l2"]) for each in cost])
    values = lambda x: bx.DTW(x, omega=OMEGAS["l2"]).node_values  # noqa: E731
    close(torch.vmap(values)(cost), wanted)
    close(torch.compile(values, fullgraph=True, backend="aot_eager")(cost), wanted)


class Doubled(bx.Negentropy):
    """An Ω written in Python, which has no kernel."""

    @property
    def kernel(self) -> None:
        return None


def test_an_omega_written_in_python() -> None:
    theta = potentials(4, 2, 2)
    close(bx.Chain(theta, omega=Doubled(0.7)).node_values, bx.Chain(theta, omega=bx.Negentropy(0.7)).node_values)
