"""Belief propagation against the computation tree, and against enumeration on trees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.problems import OMEGAS
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from bellmax import Regularizer

TREE = [(0, 1), (2, 1), (1, 3), (4, 3)]
LOOPY = [(0, 1), (1, 2), (2, 0), (2, 3)]


def scores(edges: list[tuple[int, int]], states: int = 3, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(edges) * states)
    nodes = max(itertools.chain(*edges)) + 1
    unary = torch.randn((*batch, nodes, states), dtype=torch.float64, generator=generator)
    pairwise = torch.randn((*batch, len(edges), states, states), dtype=torch.float64, generator=generator)
    return unary, pairwise


def value_by_walks(
    edges: list[tuple[int, int]], unary: Tensor, pairwise: Tensor, root: int, depth: int, omega: Regularizer
) -> Tensor:
    """DP_Ω on the computation tree of ``root``, by its definition."""

    def arriving(node: int, but: int | None, left: int) -> Tensor:
        total = unary[node]
        for (u, v), pair in zip(edges, pairwise, strict=True):
            for source, target, table in ((u, v, pair), (v, u, pair.T)):
                if left and target == node and source != but:
                    below = arriving(source, target, left - 1)
                    total = total + omega.max(below[:, None] + table, dim=0)
        return total

    return omega.max(arriving(root, None, depth))


def marginals_by_enumeration(
    edges: list[tuple[int, int]], unary: Tensor, pairwise: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    nodes, states = unary.shape
    labels = torch.tensor(list(itertools.product(range(states), repeat=nodes)))
    total = unary[torch.arange(nodes), labels].sum(-1)
    for (u, v), pair in zip(edges, pairwise, strict=True):
        total = total + pair[labels[:, u], labels[:, v]]
    p, hot = total.softmax(0), torch.nn.functional.one_hot(labels, states).double()
    pairs = [torch.einsum("n,ns,nt->st", p, hot[:, u], hot[:, v]) for u, v in edges]
    return torch.einsum("n,nvs->vs", p, hot), pairs, total.logsumexp(0)


@pytest.mark.parametrize("omega", OMEGAS.values(), ids=OMEGAS)
@pytest.mark.parametrize("edges", [TREE, LOOPY], ids=["tree", "loopy"])
def test_value_equals_the_computation_tree(edges: list[tuple[int, int]], omega: Regularizer) -> None:
    unary, pairwise = scores(edges)
    for iterations in (0, 1, 4):
        values = bx.BeliefPropagation(edges)(unary, pairwise, iterations=iterations, omega=omega).value
        walks = [value_by_walks(edges, unary, pairwise, u, iterations, omega) for u in range(len(unary))]
        assert torch.allclose(values, torch.stack(walks), rtol=1e-12)


def test_exact_on_a_tree() -> None:
    unary, pairwise = scores(TREE)
    b = bx.BeliefPropagation(TREE)(unary, pairwise, iterations=3)
    nodes, pairs, total = marginals_by_enumeration(TREE, unary, pairwise)
    assert torch.allclose(b.beliefs, nodes)
    assert torch.allclose(b.edge_beliefs, torch.stack(pairs))
    assert torch.allclose(b.value, total)
    assert torch.equal(b.best_labels(), nodes.argmax(-1))
    assert bx.BeliefPropagation(TREE)(unary, pairwise, iterations=4).residual == 0


@pytest.mark.parametrize("omega", OMEGAS.values(), ids=OMEGAS)
def test_root_of_a_tree_gets_the_gradient_of_its_value(omega: Regularizer) -> None:
    unary, pairwise = (s.requires_grad_() for s in scores(TREE))
    b = bx.BeliefPropagation(TREE)(unary, pairwise, iterations=4, omega=omega)
    by_unary, by_pairwise = torch.autograd.grad(b.value[3], (unary, pairwise))
    assert torch.allclose(b.beliefs[3], by_unary[3])
    assert torch.allclose(b.edge_beliefs[2], by_pairwise[2])


def test_derivatives_through_the_iterations() -> None:
    unary, pairwise = (s.requires_grad_() for s in scores(LOOPY, states=2))
    graph = bx.BeliefPropagation(LOOPY)

    def run(unary: Tensor, pairwise: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        b = graph(unary, pairwise, iterations=3, damping=0.3, omega=bx.Negentropy(gamma))
        return b.beliefs, b.edge_beliefs, b.value

    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(run, (unary, pairwise, gamma))
    assert gradgradcheck(run, (unary, pairwise, gamma))


def test_damping_has_the_same_fixed_point() -> None:
    unary, pairwise = scores(LOOPY)
    graph = bx.BeliefPropagation(LOOPY)
    plain, damped = (graph(unary, 0.3 * pairwise, iterations=200, damping=d) for d in (0.0, 0.5))
    assert max(plain.residual, damped.residual) < 1e-12
    assert torch.allclose(plain.beliefs, damped.beliefs)


def test_members_of_a_batch_are_independent() -> None:
    unary, pairwise = scores(LOOPY, batch=(2, 3))
    gamma = torch.rand(2, 3, dtype=torch.float64) + 0.5
    graph = bx.BeliefPropagation(LOOPY)
    b = graph(unary, pairwise, omega=bx.SquaredL2(gamma))
    for index in itertools.product(range(2), range(3)):
        one = graph(unary[index], pairwise[index], omega=bx.SquaredL2(gamma[index]))
        for name in ("beliefs", "edge_beliefs", "value", "residual"):
            assert torch.allclose(getattr(b, name)[index], getattr(one, name)), name


def test_forbidden_states_and_isolated_nodes() -> None:
    unary, pairwise = scores(LOOPY)
    unary = torch.cat([unary, torch.tensor([[1.0, 1.0, -math.inf]])])
    unary[0, 1:] = -math.inf
    pairwise[0, 0, :2] = -math.inf
    unary.requires_grad_()
    b = bx.BeliefPropagation(LOOPY)(unary, pairwise, iterations=9, damping=0.1)
    assert torch.equal(b.beliefs[0], torch.tensor([1.0, 0.0, 0.0]).double())
    assert torch.equal(b.beliefs[1], torch.tensor([0.0, 0.0, 1.0]).double())
    assert torch.equal(b.beliefs[4], torch.tensor([0.5, 0.5, 0.0]).double())
    (gradient,) = torch.autograd.grad(b.beliefs[3, 0], unary)
    assert gradient.isfinite().all()
    assert b.residual.isfinite()


def test_many_iterations_keep_their_digits() -> None:
    side = 6
    cells = torch.arange(side * side).reshape(side, side)
    edges = torch.cat(
        [
            torch.stack([cells[:, :-1], cells[:, 1:]], -1).reshape(-1, 2),
            torch.stack([cells[:-1], cells[1:]], -1).reshape(-1, 2),
        ]
    )
    unary = torch.randn(side * side, 2, generator=torch.Generator().manual_seed(0))
    graph, agree = bx.BeliefPropagation(edges), 0.4 * torch.eye(2)
    single = graph(unary, agree, iterations=60)
    double = graph(unary.double(), agree.double(), iterations=60)
    assert (single.beliefs - double.beliefs).abs().max() < 1e-5
    half = graph(unary.bfloat16(), agree.bfloat16(), iterations=60)
    assert half.beliefs.dtype == torch.bfloat16
    assert half.value.dtype == half.residual.dtype == torch.float32


def test_no_edges_and_empty_batch() -> None:
    unary = torch.zeros(2, 3)
    b = bx.BeliefPropagation([])(unary, torch.zeros(0, 3, 3))
    assert torch.allclose(b.beliefs, torch.full((2, 3), 1 / 3))
    assert b.edge_beliefs.shape == (0, 3, 3)
    empty = bx.BeliefPropagation(TREE)(torch.zeros(0, 5, 2), torch.zeros(2, 2))
    assert empty.beliefs.shape == (0, 5, 2)
    assert empty.residual.shape == (0,)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 0)], r"edges must join two nodes, got edge 0 from 0 to itself"),
        ([(0, 1), (1, 0)], r"edges must name each pair of nodes once, got 0 and 1 more than once"),
        ([(0, -1)], r"edges must hold nodes >= 0, got -1 in edge 0"),
        ([0, 1], r"edges must have shape \(E, 2\), got \(2,\)"),
        ([(0.5, 1.0)], r"edges must hold integers, got dtype torch.float"),
    ],
)
def test_bad_edges(edges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.BeliefPropagation(edges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unary": torch.zeros(3, 2)}, r"unary must have shape \(\.\.\., V >= 5, K >= 1\), got \(3, 2\)"),
        ({"pairwise": torch.zeros(3, 2, 2)}, r"pairwise must have shape \(2, 2\) or \(4, 2, 2\), got \(3, 2, 2\)"),
        ({"unary": torch.full((5, 2), math.nan)}, r"unary must hold finite scores or -inf, got nan or \+inf"),
        ({"pairwise": torch.zeros(2, 2, dtype=torch.int64)}, r"pairwise must be floating point, got dtype torch.int64"),
        ({"iterations": -1}, r"iterations must be an integer >= 0, got -1"),
        ({"damping": 1.0}, r"damping must be a number from 0 to below 1, got 1.0"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"unary": torch.zeros(5, 2), "pairwise": torch.zeros(2, 2)} | change
    with pytest.raises(ValueError, match=message):
        bx.BeliefPropagation(TREE)(**arguments)  # type: ignore[arg-type]


def test_values_of_half_precision_do_not_overflow() -> None:
    graph, zeros = bx.BeliefPropagation(LOOPY), torch.zeros(4, 2, dtype=torch.float16)
    p = graph(zeros, zeros[:2], gamma=1e30)
    torch.testing.assert_close(p.value, graph(zeros.float(), zeros[:2].float(), gamma=1e30).value)
    assert p.beliefs.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_overflow_raise(dtype: torch.dtype) -> None:
    graph, most = bx.BeliefPropagation(LOOPY), torch.finfo(dtype).max
    large, zeros = torch.full((4, 2), most, dtype=dtype), torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(ValueError, match=r"must add up to less than .* but they overflow"):
        graph(large, zeros)
    with pytest.raises(ValueError, match="increase gamma"):
        graph(large / 1e20, zeros, gamma=1e-30)
    masked = torch.zeros(4, 2, dtype=dtype)
    masked[:, 1] = -most
    p = graph(masked, zeros)
    assert p.value.eq(0).all()
    assert p.beliefs[:, 0].eq(1).all()
    assert graph(-large, zeros).value.eq(-math.inf).all()
