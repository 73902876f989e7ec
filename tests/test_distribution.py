"""Every verb of a path distribution against enumeration, and the paper's propositions about DP_Ω."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from support.checks import close
from support.hypergraphs import bracketings
from support.inside import scores
from support.kernels import hessians, needs_kernels, took
from support.problems import OMEGAS, Enumerated, diamond, layered_edges, potentials, random_dag, random_weights
from support.structures import STRUCTURES
from torch.distributions import kl_divergence

import bellmax as bx

GRAPHS, SOME_GRAPHS = 100, 40


class Problem(NamedTuple):
    solved: list[Enumerated]  # one for each row of the weights
    dag: bx.DAG
    weights: torch.Tensor
    z: torch.Tensor
    hessian_products: list[np.ndarray | None]


@lru_cache
def enumerate_problems(omega: bx.Regularizer) -> list[Problem]:
    rng = np.random.default_rng(1)
    problems = []
    for _ in range(GRAPHS):
        edges, num_nodes = random_dag(rng)
        weights = np.stack([random_weights(rng, len(edges)) for _ in range(2)])
        z = rng.normal(size=weights.shape)
        solved = [Enumerated(edges, num_nodes, row.tolist(), omega) for row in weights]
        products = [s.hessian_product(zi) for s, zi in zip(solved, z, strict=True)]
        dag = bx.DAG(edges, num_nodes)
        problems.append(Problem(solved, dag, torch.from_numpy(weights), torch.from_numpy(z), products))
    return problems


def problems(omega: bx.Regularizer, backend: str) -> Iterator[tuple[Problem, bx.PathDistribution]]:
    """Yield all graphs for the kernels, and some for the reference, which other tests compare with the kernels."""
    for problem in enumerate_problems(omega)[: GRAPHS if backend == "native" else SOME_GRAPHS]:
        yield problem, problem.dag.paths(problem.weights, omega=omega)


def test_equals_enumeration(omega: bx.Regularizer, backend: str) -> None:
    compared = 0
    for (solved, _, _, z, products), p in problems(omega, backend):
        assert p.backend == backend
        close(p.value, [s.value for s in solved])
        close(p.expected_path, [s.expected_path for s in solved])
        close(p.entropy(), [s.entropy for s in solved])
        close(p.num_paths, [len(s.all_paths) for s in solved])
        expected = [s.expected_path @ zi for s, zi in zip(solved, z.numpy(), strict=True)]
        close(p.directional_derivative(z), expected)
        for product, difference in zip(p.hessian_product(z), products, strict=True):
            if difference is not None:
                close(product, difference, 1e-8)
                compared += 1
    assert compared > 1.8 * (GRAPHS if backend == "native" else SOME_GRAPHS)


def test_single_paths_equal_enumeration(omega: bx.Regularizer, backend: str) -> None:
    for (solved, *_), p in problems(omega, backend):
        k = 4
        scores, paths = p.topk(k)
        best, mode = p.best_path(), p.mode
        for b, s in enumerate(solved):
            if not len(s.all_paths):
                assert not best[b].any()
                assert not mode[b].any()
                assert (scores[b] == -math.inf).all()
                continue
            expected = np.sort(s.scores)[::-1][:k]
            close(scores[b, : len(expected)], expected)
            assert (scores[b, len(expected) :] == -math.inf).all()
            assert not paths[b, len(expected) :].any()
            rows = [s.all_paths.tolist().index(row) for row in paths[b, : len(expected)].tolist()]
            assert len(set(rows)) == len(rows)
            close(torch.from_numpy(s.scores[rows]), expected)
            assert best[b].tolist() == paths[b, 0].tolist()
            row = s.all_paths.tolist().index(mode[b].tolist())
            assert s.probabilities[row] == pytest.approx(s.probabilities.max(), abs=1e-12)


def test_log_prob_and_support_equal_enumeration(omega: bx.Regularizer, backend: str) -> None:
    for (solved, dag, weights, *_), p in problems(omega, backend):
        paths, probabilities = p.support_paths()
        assert (probabilities.diff(dim=0) <= 1e-12).all()
        for b, s in enumerate(solved):
            is_possible = s.probabilities > 1e-13
            listed = probabilities[:, b] > 1e-13
            close(probabilities[listed, b], np.sort(s.probabilities[is_possible])[::-1])
            close(probabilities[:, b].sum(), float(len(s.all_paths) > 0))
            assert not paths[probabilities[:, b] == 0, b].any()
            every = torch.from_numpy(s.all_paths)
            alone = dag.paths(weights[b], omega=omega)
            close(alone.log_prob(every).exp(), s.probabilities)


@pytest.mark.slow
def test_sampling_distribution(omega: bx.Regularizer, backend: str) -> None:
    draws, tested = 20_000, 0
    for (solved, *_), p in problems(omega, backend):
        if tested == 4:
            break
        if min(len(s.all_paths) for s in solved) < 5:
            continue
        tested += 1
        samples = p.sample((draws,))
        assert samples.shape == (draws, *p.potentials.shape)
        for b, s in enumerate(solved):
            index = {tuple(path): i for i, path in enumerate(s.all_paths.tolist())}
            rows, counts = samples[:, b].unique(dim=0, return_counts=True)
            observed = np.zeros(len(index))
            observed[[index[tuple(row)] for row in rows.tolist()]] = counts.numpy()
            expected = s.probabilities * draws
            assert observed[expected < 1e-9].sum() == 0
            large = expected > 5
            if large.sum() > 1:
                share = expected[large] / expected[large].sum() * observed[large].sum()
                assert stats.chisquare(observed[large], share).pvalue > 1e-4
    assert tested == 4


@needs_kernels
@pytest.mark.parametrize("name", list(OMEGAS))
def test_backends_agree(name: str) -> None:
    omega = OMEGAS[name]
    rng = np.random.default_rng(3)
    for _ in range(30):
        edges, num_nodes = random_dag(rng)
        dag = bx.DAG(edges, num_nodes)
        weights = torch.from_numpy(np.stack([random_weights(rng, len(edges)) for _ in range(11)]))
        z = torch.from_numpy(rng.normal(size=weights.shape))
        results = []
        for backend in ("reference", "native"):
            times = None if backend == "native" else 0
            with (
                bx.use_backend(backend),
                took("dag_forward", times),
                took("dag_backward", times),
                took("dag_hessian", hessians(omega, times)),
                took("dag_log_transitions_jvp", times),
                took("dag_log_transitions_vjp", times),
                took("dag_topk", times),
                took("dag_sample", times),
            ):
                theta = weights.clone().requires_grad_()
                p = dag.paths(theta, omega=omega)
                torch.manual_seed(0)
                gradient = torch.autograd.grad(p.entropy()[p.value > -math.inf].sum(), theta)[0]
                tangent = torch.func.jvp(lambda t, dag=dag: dag.paths(t, omega=omega).entropy(), (weights,), (z,))[1]
                results.append(
                    (
                        p.value,
                        p.expected_path,
                        p.hessian_product(z),
                        p.entropy(),
                        *p.topk(3),
                        p.sample((5,)),
                        gradient,
                        tangent,
                    )
                )
        for reference, native in zip(*results, strict=True):
            torch.testing.assert_close(native, reference, rtol=1e-10, atol=1e-10)


# --- the paper's propositions


@st.composite
def graphs(draw: st.DrawFn, rows: int = 1) -> tuple[bx.DAG, torch.Tensor]:
    """A graph of up to 7 nodes, where the first is the start and the last the end, with weights (rows, E)."""
    count = draw(st.integers(2, 7))
    edges = [(j, i) for i in range(1, count) for j in sorted(draw(st.sets(st.integers(0, i - 1), min_size=1)))]
    childless = set(range(count - 1)) - {j for j, _ in edges}
    edges += [(j, count - 1) for j in sorted(childless)]
    edges += edges[: draw(st.integers(0, 1))]  # a parallel edge
    weights = draw(arrays(np.float64, (rows, len(edges)), elements=st.floats(-5, 5)))
    return bx.DAG(edges, count), torch.from_numpy(weights)


def enumerated(omega: bx.Regularizer) -> st.SearchStrategy[tuple[Enumerated, bx.PathDistribution]]:
    def solve(problem: tuple[bx.DAG, torch.Tensor]) -> tuple[Enumerated, bx.PathDistribution]:
        dag, (weights,) = problem
        solved = Enumerated(dag.edges.tolist(), dag.num_nodes, weights.tolist(), omega)
        return solved, dag.paths(weights, omega=omega)

    return graphs().map(solve)


@settings(max_examples=100)
@given(enumerated(bx.Hard()))
def test_proposition_1(problem) -> None:
    solved, p = problem
    assert float(p.value) == pytest.approx(solved.scores.max(), abs=1e-12)


@pytest.mark.parametrize("name", list(OMEGAS))
@given(problem=graphs(rows=2), share=st.floats(0, 1))
def test_proposition_2_convex(name: str, problem, share: float) -> None:
    dag, (a, b) = problem
    ends = dag.paths(torch.stack((a, b, share * a + (1 - share) * b)), omega=OMEGAS[name]).value
    assert ends[2] <= share * ends[0] + (1 - share) * ends[1] + 1e-12


def bounds(omega: bx.Regularizer, size: int) -> tuple[float, float]:
    """Least and greatest Ω on the simplex: at its center and at its vertices."""
    centre, vertex = torch.full((size,), 1 / size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)[0]
    return float(omega.gamma * omega.penalty(centre)), float(omega.gamma * omega.penalty(vertex))


@pytest.mark.parametrize("name", list(OMEGAS))
@settings(max_examples=100)
@given(graphs())
def test_proposition_2_bounds_as_corrected(name: str, problem) -> None:
    omega, (dag, (weights,)) = OMEGAS[name], problem
    p = dag.paths(weights, omega=omega)
    low, high = bounds(omega, int(dag.edges[:, 1].bincount().max()))
    gap = float(p.topk(1)[0][0] - p.value)
    assert float(p.expected_path.sum()) * low - 1e-10 <= gap <= float(p.best_path().sum()) * high + 1e-10


def test_proposition_2_bound_as_printed_is_false() -> None:
    nodes = 5
    dag = bx.DAG([(j, i) for i in range(nodes) for j in range(i)])
    p = dag.paths(torch.zeros(dag.num_edges, dtype=torch.float64), omega="l2")
    gap = float(p.topk(1)[0][0] - p.value)
    assert gap == pytest.approx(0.3832, abs=1e-4)
    assert gap < (nodes - 1) * bounds(bx.SquaredL2(), nodes)[0]


@settings(max_examples=100)
@given(enumerated(bx.Negentropy(0.7)))
def test_proposition_2_negentropy_is_the_linear_program(problem) -> None:
    solved, p = problem
    assert float(p.value) == pytest.approx(solve_lp(solved), abs=1e-10)


def solve_lp(solved: Enumerated) -> float:
    """LP_Ω: the smoothed max over all paths at once."""
    return float(solved.omega.max(torch.from_numpy(solved.scores)))


@settings(max_examples=100)
@given(enumerated(bx.SquaredL2(0.9)))
def test_l2_linear_program_is_above(problem) -> None:
    solved, p = problem
    assert solve_lp(solved) >= float(p.value) - 1e-12


@settings(max_examples=100)
@given(enumerated(bx.Tsallis(1.5, 0.8)))
def test_tsallis_linear_program_is_below(problem) -> None:
    solved, p = problem
    assert solve_lp(solved) <= float(p.value) + 1e-12


def test_l2_differs_from_the_linear_program() -> None:
    # Two paths of two edges: DP pays 1/2 at each single-parent node as well.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    solved = Enumerated(edges, 4, [0.0] * 4, bx.SquaredL2())
    assert solve_lp(solved) == pytest.approx(-0.25)
    assert float(bx.DAG(edges).paths(torch.zeros(4), omega="l2").value) == pytest.approx(-0.75)


@given(problem=graphs(), kind=st.sampled_from([bx.Negentropy, bx.SquaredL2, bx.Tsallis]))
def test_vanishing_smoothing_gives_the_best_score(problem, kind) -> None:
    dag, (theta,) = problem
    best = float(dag.paths(theta, omega="hard").value)
    assert float(dag.paths(theta, omega=kind(gamma=1e-6)).directional_derivative(theta)) == pytest.approx(
        best, abs=1e-4
    )


@settings(max_examples=100)
@given(enumerated(bx.SquaredL2(0.9)))
def test_proposition_3_expected_path_is_in_the_hull(problem) -> None:
    solved, p = problem
    flow = p.expected_path
    assert (flow >= 0).all()
    for node in range(1, solved.num_nodes - 1):
        entering = sum(float(flow[e]) for e, (_, child) in enumerate(solved.edges) if child == node)
        leaving = sum(float(flow[e]) for e, (parent, _) in enumerate(solved.edges) if parent == node)
        assert entering == pytest.approx(leaving, abs=1e-12)


# --- the interface of torch.distributions, and edge cases


def test_follows_torch_distributions(omega: bx.Regularizer, backend: str) -> None:
    dag, theta = diamond(), 0.3 * potentials(2, 3, 10, seed=1)  # here the best path is not the mode under l2
    p = dag.paths(theta, omega=omega)
    assert (p.batch_shape, p.event_shape) == ((2, 3), (10,))
    assert p.sample((4, 5)).shape == (4, 5, 2, 3, 10)
    assert p.log_prob(p.sample((4,))).shape == (4, 2, 3)
    assert p.entropy().shape == (2, 3)
    for member in np.ndindex(2, 3):
        s = Enumerated(dag.edges.tolist(), dag.num_nodes, theta[member].tolist(), omega)
        spread = s.probabilities @ (s.all_paths - s.expected_path) ** 2
        close(p.mean[member], s.expected_path)
        close(p.variance[member], spread)
        close(p.stddev[member] ** 2, spread)
        close(p.mode[member], s.all_paths[s.probabilities.argmax()])


def test_kl_divergence_equals_enumeration(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    edges, theta = dag.edges.tolist(), potentials(2, 4, 10)
    p, r = dag.paths(theta[0], omega=omega), dag.paths(theta[1] * 0.3, omega=bx.Negentropy(2.0))
    got = kl_divergence(p, r)
    for b in range(4):
        sp = Enumerated(edges, 6, theta[0, b].tolist(), omega)
        sr = Enumerated(edges, 6, (theta[1, b] * 0.3).tolist(), bx.Negentropy(2.0))
        is_possible = sp.probabilities > 0
        ratio = np.log(sp.probabilities[is_possible]) - np.log(sr.probabilities[is_possible])
        assert float(got[b]) == pytest.approx((sp.probabilities[is_possible] * ratio).sum(), abs=1e-10)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(4, dtype=torch.float64))


def test_kl_divergence_is_infinite_outside_the_support(backend: str) -> None:
    dag = bx.DAG([(0, 1), (0, 1)])
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    divergence = kl_divergence(dag.paths(theta), dag.paths(torch.tensor([0.0, -5.0]).double(), omega="l2"))
    assert divergence == math.inf
    assert torch.autograd.grad(divergence, theta)[0].isfinite().all()


def test_kl_divergence_needs_one_graph() -> None:
    with pytest.raises(ValueError, match="same graph"):
        kl_divergence(bx.DAG([(0, 1)]).paths(torch.zeros(1)), bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2)))


def test_no_path_at_all(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    theta = potentials(2, 10)
    theta[1, [8, 9]] = -math.inf
    theta.requires_grad_()
    p = dag.paths(theta, omega=omega)
    assert p.value[1] == -math.inf
    assert p.value[0].isfinite()
    z = torch.ones_like(theta)
    for zero in (p.expected_path, p.hessian_product(z), p.best_path(), p.mode, p.sample((7,)).movedim(0, 1)):
        assert not zero[1].any()
    for graph_of in (p.value[1], p.entropy()[1], p.expected_path[1].sum()):
        (gradient,) = torch.autograd.grad(graph_of, theta, retain_graph=True)
        assert not gradient.any()
    assert p.entropy()[1] == 0
    assert p.num_paths.tolist()[1] == 0
    paths, probabilities = p.support_paths()
    assert not paths[:, 1].any()
    assert not probabilities[:, 1].any()
    assert p.log_prob(p.best_path()[0].expand(2, 10))[1] == -math.inf


def test_minus_infinity_everywhere(omega: bx.Regularizer, backend: str) -> None:
    theta = torch.full((3, 10), -math.inf, dtype=torch.float64, requires_grad=True)
    p = diamond().paths(theta, omega=omega)
    assert (p.value == -math.inf).all()
    (gradient,) = torch.autograd.grad(p.value.sum() + p.entropy().sum() + p.expected_path.sum(), theta)
    for zero in (gradient, p.hessian_product(torch.ones_like(theta)), p.sample((2,)), p.topk(2)[1], p.mode):
        assert not zero.any()


def test_one_edge_and_ties(omega: bx.Regularizer, backend: str) -> None:
    assert bx.DAG([(0, 1)]).paths(torch.tensor([3.0]), omega=omega).expected_path.tolist() == [1.0]
    tied = bx.DAG([(0, 1), (0, 1), (0, 1)]).paths(torch.zeros(3), omega=omega)
    if isinstance(omega, bx.Hard):
        assert tied.expected_path.tolist() == [1, 0, 0]
    else:
        torch.testing.assert_close(tied.expected_path, torch.full((3,), 1 / 3))
    assert tied.best_path().tolist() == [1, 0, 0]
    assert tied.topk(3)[1].tolist() == torch.eye(3).tolist()


def test_empty_batch(omega: bx.Regularizer, backend: str) -> None:
    theta = torch.zeros(0, 10, requires_grad=True)
    p = diamond().paths(theta, omega=omega)
    assert p.value.shape == (0,)
    assert p.hessian_product(theta).shape == (0, 10)
    assert p.sample((3,)).shape == (3, 0, 10)
    assert p.topk(2)[1].shape == (0, 2, 10)
    assert p.support_paths()[0].shape == (0, 0, 10)
    p.value.sum().backward()


def test_strided_inputs(omega: bx.Regularizer, backend: str) -> None:
    dag, theta = diamond(), potentials(10, 4).T
    z = potentials(10).expand(4, 10)
    p, copy = dag.paths(theta, omega=omega), dag.paths(theta.contiguous(), omega=omega)
    assert torch.equal(p.value, copy.value)
    assert torch.equal(p.expected_path, copy.expected_path)
    assert torch.equal(p.hessian_product(z), copy.hessian_product(z.contiguous()))


def test_infinite_direction_on_an_absent_edge(backend: str) -> None:
    theta = potentials(3, 10) * 20
    p = diamond().paths(theta, omega="l2")
    z = torch.where(p.expected_path > 0, 1.0, math.inf)
    assert p.directional_derivative(z).isfinite().all()
    assert p.hessian_product(z).isfinite().all()


@pytest.mark.parametrize("scale", [1e4, 1e-3])
@pytest.mark.parametrize("gamma", [1e-3, 1e3])
def test_extreme_scales(scale: float, gamma: float, backend: str) -> None:
    for kind in (bx.Negentropy, bx.SquaredL2, bx.Tsallis):
        theta = (potentials(3, 10) * scale).float().requires_grad_()
        p = diamond().paths(theta, omega=kind(gamma=gamma))
        exact = diamond().paths(theta.double(), omega=kind(gamma=gamma))
        (gradient,) = torch.autograd.grad(p.value.sum() + p.entropy().sum(), theta)
        assert gradient.isfinite().all()
        assert p.hessian_product(theta).isfinite().all()
        torch.testing.assert_close(p.value.double(), exact.value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(p.expected_path.double(), exact.expected_path, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, backend: str) -> None:
    theta = potentials(2, 10).to(dtype)
    half, single = diamond().paths(theta), diamond().paths(theta.float())
    for result, expected in (
        (half.value, single.value),
        (half.entropy(), single.entropy()),
        (half.log_prob(half.best_path()), single.log_prob(single.best_path())),
    ):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected)
    for tensor in (half.expected_path, half.hessian_product(theta), half.sample(), half.best_path(), half.topk(2)[1]):
        assert tensor.dtype == dtype
    torch.testing.assert_close(half.expected_path, single.expected_path.to(dtype))


def test_inputs_are_not_changed(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(2, 10), potentials(2, 10, seed=1)
    before = theta.clone(), z.clone()
    p = diamond().paths(theta, omega=omega)
    p.hessian_product(z), p.entropy(), p.sample(), p.topk(2), p.mode, p.support_paths(), p.num_paths
    assert torch.equal(theta, before[0])
    assert torch.equal(z, before[1])
    assert not theta.requires_grad


def test_in_place_changes_of_the_weights_are_seen(backend: str) -> None:
    weights = potentials(10)
    p = diamond().paths(weights)
    before = p.value
    before += 100
    assert float(p.value) < 50
    weights.mul_(3)
    torch.testing.assert_close(p.expected_path, diamond().paths(weights.clone()).expected_path)


def test_certain_paths_have_probability_one(backend: str) -> None:
    dag = bx.DAG(layered_edges(300, 3))
    p = dag.paths(1e4 * potentials(dag.num_edges), omega=bx.SquaredL2(1e-3))
    assert float(p.log_prob(p.mode)) == pytest.approx(0, abs=1e-12)
    assert float(p.entropy()) == pytest.approx(0, abs=1e-12)
    assert str(diamond().paths(torch.zeros(10), omega="hard").entropy()) == "tensor(0.)"


def test_log_prob_keeps_its_digits_in_float32(backend: str) -> None:
    dag = bx.DAG(layered_edges(512, 4))
    theta = potentials(dag.num_edges).float()
    for gamma in (1.0, 1e-2):
        single, double = (
            dag.paths(theta, omega=bx.Negentropy(gamma)),
            dag.paths(theta.double(), omega=bx.Negentropy(gamma)),
        )
        path = double.mode
        torch.testing.assert_close(single.log_prob(path).double(), double.log_prob(path), rtol=1e-5, atol=1e-5)


def test_topk_descends_in_float32_and_is_differentiable(backend: str) -> None:
    dag = bx.DAG(layered_edges(1024, 4))
    theta = potentials(dag.num_edges).float().requires_grad_()
    scores, paths = dag.paths(theta).topk(20)
    assert (scores.diff() <= 0).all()
    (gradient,) = torch.autograd.grad(scores[3], theta)
    assert torch.equal(gradient, paths[3])


def test_more_paths_than_a_float_can_count() -> None:
    dag = bx.DAG([(i, i + 1) for i in range(2000) for _ in range(2)])
    with pytest.raises(ValueError, match="max_paths is 1000, but the support holds inf paths"):
        dag.paths(torch.zeros(4000)).support_paths()


def test_paths_of_any_dtype(backend: str) -> None:
    p = diamond().paths(potentials(10), omega="l2")
    expected = p.log_prob(p.mode)
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert p.log_prob(p.mode.to(dtype)) == expected
    assert diamond().paths(potentials(10).half(), omega="l2").mode.dtype == torch.float16


# --- γ as a tensor


@pytest.mark.parametrize("kind", [bx.Negentropy, bx.SquaredL2, bx.Tsallis])
def test_gamma_per_batch_element(kind, backend: str) -> None:
    theta, gammas = potentials(3, 10), torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    together = diamond().paths(theta, omega=kind(gamma=gammas))
    for b in range(3):
        alone = diamond().paths(theta[b], omega=kind(gamma=float(gammas[b])))
        torch.testing.assert_close(together.value[b], alone.value)
        torch.testing.assert_close(together.expected_path[b], alone.expected_path)
        torch.testing.assert_close(together.hessian_product(theta)[b], alone.hessian_product(theta[b]))
        torch.testing.assert_close(together.entropy()[b], alone.entropy())


@pytest.mark.parametrize("kind", [bx.Negentropy, bx.SquaredL2, bx.Tsallis])
def test_gamma_is_learnable(kind, backend: str) -> None:
    theta = potentials(3, 10)
    theta[0, 2] = theta[2, 9] = theta[2, 8] = -math.inf  # the third has no path
    path = diamond().paths(theta[:2]).best_path()
    gamma = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64, requires_grad=True)

    def run(gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = diamond().paths(theta, omega=kind(gamma=gamma))
        return p.value[:2], p.expected_path, p.entropy()

    fast = backend == "reference"
    assert torch.autograd.gradcheck(run, gamma, fast_mode=fast)
    assert torch.autograd.gradgradcheck(run, gamma, fast_mode=True)
    p = diamond().paths(theta[:2], omega=kind(gamma=gamma[:2]))
    assert torch.autograd.grad(p.log_prob(path).sum(), gamma)[0].isfinite().all()
    lost = diamond().paths(theta, omega=kind(gamma=gamma)).value[2]
    assert lost == -math.inf
    assert torch.autograd.grad(lost, gamma)[0].tolist() == [0, 0, 0]


# --- bad input


def test_bad_input_is_named(backend: str) -> None:
    dag = diamond()
    p = dag.paths(torch.zeros(2, 10))
    for wrong, message in [
        (lambda: dag.paths(torch.zeros(2, 9)), r"weights must have shape \(\.\.\., 10\), got \(2, 9\)"),
        (lambda: dag.paths(torch.tensor(1.0)), r"weights must have shape \(\.\.\., 10\), got \(\)"),
        (
            lambda: dag.paths(torch.zeros(10, dtype=torch.int64)),
            "weights must be floating point, got dtype torch.int64",
        ),
        (lambda: dag.paths(torch.zeros(10, device="meta")), "weights must be on the graph's device cpu, got meta"),
        (lambda: dag.paths(torch.zeros(10), omega="soft"), "omega must be a Regularizer or one of .* got 'soft'"),
        (
            lambda: p.hessian_product(torch.zeros(10, device="meta")),
            "z must be on the potentials' device cpu, got meta",
        ),
        (lambda: dag.paths(torch.full((10,), math.nan)).topk(2), r"weights .*got nan at event index \(0,\)"),
        (lambda: p.topk(0), "k must be at least 1, got 0"),
        (lambda: p.hessian_product(torch.zeros(3)), r"z must broadcast to the potentials' shape \(2, 10\), got \(3,\)"),
        (lambda: p.log_prob(torch.zeros(3)), r"path must have event shape \(10,\), got shape \(3,\)"),
        (lambda: p.log_prob(torch.zeros(2, 10)), r"path\[0\] is not a path of the graph"),
        (lambda: p.support_paths(max_paths=3), "max_paths is 3, but the support holds 9 paths"),
        (
            lambda: dag.paths(torch.zeros(2, 10), omega=bx.Negentropy(torch.ones(3))),
            r"gamma must broadcast to the batch shape \(2,\), got shape \(3,\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_are_named_by_index(bad: float, omega: bx.Regularizer, backend: str) -> None:
    theta = torch.zeros(3, 10)
    theta[1, 7] = bad
    p = diamond().paths(theta, omega=omega)
    with pytest.raises(ValueError, match=rf"weights .*got {bad} at event index \(7,\) of batch element 1"):
        _ = p.value


# --- conventions of torch


def some_distributions(requires_grad: bool = False) -> dict[str, bx.PathDistribution]:
    """A batch (2, 3) of each structure with γ ≠ 1, with and without shared scores."""
    scores = potentials(2, 3, 5, 4, requires_grad=requires_grad)
    transitions = potentials(4, 4, seed=1, requires_grad=requires_grad)
    mask = torch.tensor([1, 0, 1, 1, 0]).bool().expand(2, 3, 5)
    gamma = potentials(2, 3, seed=4).exp()
    return {
        "dag": diamond().paths(potentials(2, 3, 10, requires_grad=requires_grad), omega="l2", gamma=0.5),
        "costs": diamond().paths(potentials(2, 3, 10, requires_grad=requires_grad), gamma=gamma, minimize=True),
        "chain": bx.Chain(potentials(2, 3, 5, 4, 4, requires_grad=requires_grad), mask=mask, gamma=0.5),
        "scores": bx.Chain.from_scores(scores, transitions, lengths=mask.sum(-1), omega="entmax", gamma=gamma),
        "dtw": bx.DTW(potentials(2, 3, 3, 4, requires_grad=requires_grad), gamma=0.5),
        "steps": bx.DTW(potentials(2, 3, 3, 4, requires_grad=requires_grad), step_weights=(2, 1, 1), gamma=gamma),
        "chart": bracketings(4)[0].derivations(potentials(2, 3, 10, requires_grad=requires_grad), gamma=gamma),
        "tree": bx.TreeModel([2, 2, -1]).labels(
            potentials(2, 3, 3, 2, requires_grad=requires_grad),
            potentials(2, 2, requires_grad=requires_grad),
            gamma=0.5,
        ),
    }


@pytest.fixture(params=["dag", "costs", "chain", "scores", "dtw", "steps", "chart", "tree"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_backward_twice_and_in_any_order(kind: str, backend: str) -> None:
    results = []
    for order in ([0, 1, 2, 0, 1, 2], [2, 1, 0, 2]):
        p = some_distributions(requires_grad=True)[kind]
        leaf = scores(p)[0]
        while leaf.grad_fn is not None:  # negated costs
            leaf = leaf.grad_fn.next_functions[0][0].variable
        asked = (lambda p: p.value, lambda p: p.entropy(), lambda p: p.expected_path.square())
        for which in order:
            leaf.grad = None
            asked[which](p).sum().backward()
            results.append((which, leaf.grad))
    for which, grad in results:
        torch.testing.assert_close(grad, next(g for w, g in results if w == which))


@needs_kernels
@pytest.mark.parametrize(  # the other kinds make a graph each time they are asked
    ("kind", "structure"), [("dag", "dag"), ("costs", "dag"), ("chain", "chain"), ("dtw", "lattice")]
)
def test_the_sweep_runs_once(kind: str, structure: str) -> None:
    p = some_distributions(requires_grad=True)[kind]
    with took(f"{structure}_forward", times=1):
        for _ in range(2):
            p.value.sum().backward()
            _ = p.expected_path
            with torch.no_grad():
                _ = p.value


def test_inference_mode_first_then_gradients(kind: str) -> None:
    p = some_distributions(requires_grad=True)[kind]
    with torch.inference_mode():
        first = p.value
    with torch.no_grad():
        assert p.value.equal(first)
        _ = p.expected_path, p.entropy()
    p.value.sum().backward()


def test_members_of_a_batch(kind: str, backend: str) -> None:
    p = some_distributions()[kind]
    for index in (0, -1, (1, 2), slice(1), (slice(None), 0), (..., 1), torch.tensor([1, 0, 1]), None):
        q = p[index]
        torch.testing.assert_close(q.value, p.value[index])
        assert q.batch_shape == p.value[index].shape
        members = p.expected_path.flatten(0, 1)[torch.arange(6).reshape(2, 3)[index]]
        torch.testing.assert_close(q.expected_path, members)
    assert [q.batch_shape for q in p] == [(3,), (3,)]
    with pytest.raises(IndexError):
        _ = p[2]
    with pytest.raises(IndexError, match="no batch dimensions"):
        _ = p[0, 0][0]


def test_expand(kind: str, backend: str) -> None:
    p = some_distributions()[kind]
    wide = p.expand((4, 2, 3))
    torch.testing.assert_close(wide.value, p.value.expand(4, 2, 3))
    torch.testing.assert_close(wide.expected_path, p.expected_path.expand(4, *p.expected_path.shape))
    single = p[0, 0].expand([5])
    torch.testing.assert_close(single.value, p.value[0, 0].expand(5))
    assert single.sample((2,)).shape == (2, 5, *p.event_shape)
    with pytest.raises(ValueError, match=r"batch_shape must be a shape to which \(2, 3\) expands, got \(3, 2\)"):
        p.expand((3, 2))


def test_copies_and_moves(kind: str) -> None:
    p = some_distributions(requires_grad=True)[kind]
    value = p.value
    q = copy.deepcopy(p)
    assert q.value.equal(value)
    assert q.value.requires_grad
    with torch.no_grad():
        scores(q)[0].add_(1.0)
    assert p.value.equal(value)
    assert not p.detach().value.requires_grad
    assert p.detach().value.equal(value.detach())
    narrow = p.to(torch.float32)
    assert narrow.dtype == narrow.value.dtype == torch.float32
    torch.testing.assert_close(narrow.value.double(), value, rtol=1e-5, atol=1e-5)
    assert p.to("meta").device.type == "meta"
    assert p.to("cpu").value.equal(value)
    assert pickle.loads(pickle.dumps(p.detach())).value.equal(value.detach())
    with pytest.raises(ValueError, match=r"dtype must be floating point, got torch.int64"):
        p.to(torch.int64)


def test_support_and_its_enumeration(kind: str, backend: str) -> None:
    p = some_distributions()[kind]
    paths = p.enumerate_support()
    assert paths.shape == (int(p.num_paths[0, 0]), 2, 3, *p.event_shape)
    assert p.support.check(paths).all()
    assert not p.support.check(torch.zeros_like(paths)).any()
    assert p.support.event_dim == len(p.event_shape)
    assert len(paths.flatten(1).unique(dim=0)) == len(paths)
    torch.testing.assert_close(p.log_prob(paths).exp().sum(0), torch.ones(2, 3, dtype=torch.float64))
    narrow = p.enumerate_support(expand=False)
    assert narrow.shape == (len(paths), 1, 1, *p.event_shape)
    assert (narrow == paths).all()


def test_enumeration_of_different_or_too_many_paths() -> None:
    theta = torch.zeros(2, 4, 3, 3)
    with pytest.raises(ValueError, match="needs the same number of paths for each batch member, got 9 to 81"):
        bx.Chain(theta, lengths=[2, 4]).enumerate_support()
    with pytest.raises(ValueError, match="lists up to 100000 paths, got 531441"):
        bx.Chain(torch.zeros(12, 3, 3)).enumerate_support()
    with pytest.raises(ValueError, match="needs the same paths for each batch member"):
        bx.Chain(theta, mask=[[1, 1, 0, 0], [0, 0, 1, 1]]).enumerate_support(expand=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # a warning of torch at a graph break
def test_own_omega_under_compile() -> None:
    class Custom(bx.Negentropy):
        pass

    def value(theta: torch.Tensor) -> torch.Tensor:
        return bx.Chain(theta, omega=Custom()).value.sum()

    theta = potentials(3, 4, 2, 2, requires_grad=True)
    with pytest.raises(Exception, match=r"Custom is written in Python and does not run under torch.compile: keep the"):
        torch.compile(value, fullgraph=True, backend="eager")(theta)
    torch._dynamo.reset()
    broken = torch.compile(value, backend="eager")(theta)
    torch.testing.assert_close(broken, value(theta))
    (grad,) = torch.autograd.grad(broken, theta)
    torch.testing.assert_close(grad, torch.autograd.grad(value(theta), theta)[0])


# --- regressions


def test_two_states_on_steps_of_any_strides() -> None:
    emissions, transitions = potentials(4, 3, 2), potentials(2, 2, seed=1)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]).bool()  # (T, B)
    wanted = bx.Chain.from_scores(emissions, transitions, mask=mask.T.contiguous()).marginals
    for strided in (mask.T, mask.long().T, np.asfortranarray(mask.T.numpy())):
        torch.testing.assert_close(bx.Chain.from_scores(emissions, transitions, mask=strided).marginals, wanted)
    p = bx.Chain.from_scores(emissions[0], transitions)
    torch.testing.assert_close(p.expand((5,)).marginals, p.marginals.expand(5, 3, 2))


def test_expanded_transitions_per_step() -> None:
    p = bx.Chain.from_scores(potentials(4, 2), potentials(3, 2, 2, seed=1), omega="l2")
    allowed = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool()
    for count in (3, 5):
        q = p.expand((count,))
        torch.testing.assert_close(q.entropy(), p.entropy().expand(count))
        torch.testing.assert_close(q.constrain(allowed).value, p.constrain(allowed).value.expand(count))
        torch.testing.assert_close(kl_divergence(q, q), torch.zeros(count, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_first_access_inside_a_transform_keeps_the_gradients(kind: str) -> None:
    p = some_distributions(requires_grad=True)[kind]
    _ = torch.func.grad(lambda s: (p.value * s).sum())(torch.tensor(1.0, dtype=torch.float64))
    assert p.value.requires_grad
    assert p.expected_path.requires_grad
    leaf = potentials(10)
    late = diamond().paths(leaf, gamma=0.5)
    _ = late.value
    leaf.requires_grad_()
    assert late.value.requires_grad


def test_threads_in_different_modes() -> None:
    p = some_distributions()["chain"]
    wanted = p.value

    def look(inference: bool) -> bool:
        with torch.inference_mode(inference):
            return all(p.value.equal(wanted) for _ in range(50))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(look, [True, False] * 4))
    finally:
        sys.setswitchinterval(before)


def test_compiled_code_sees_a_change_of_the_scores() -> None:
    weights = potentials(10)
    p = diamond().paths(weights)
    run = torch.compile(lambda: p.value * 1, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(run(), diamond().paths(weights).value)
        weights.add_(1)


def test_support_takes_bool_and_names_shapes() -> None:
    for p in some_distributions().values():
        assert p.support.check(p.best_path().bool()).all()
        with pytest.raises(ValueError, match="value must have event shape"):
            p.support.check(torch.zeros(3))
        with pytest.raises(TypeError, match="no batch dimensions to iterate over"):
            list(p[0, 0])


FLOATS = torch.float32, torch.float64
TIED_OMEGAS = [bx.Hard(), bx.SquaredL2(1.0), bx.SquaredL2(3.0)]
TIED_OMEGAS += [bx.Tsallis(alpha, gamma) for alpha in (1.5, 2.0) for gamma in (1.0, 3.0)]


def tied_programs(dtype: torch.dtype, omega: bx.Regularizer, seed: int) -> dict[str, bx.PathDistribution]:
    """Batches of four programs with integer scores."""

    def integers(*shape: int) -> torch.Tensor:
        return potentials(4, *shape, seed=seed).mul(1.5).round().to(dtype)

    return {
        "chain": bx.Chain(integers(5, 3, 3), omega=omega),
        "scores": bx.Chain.from_scores(integers(5, 3), integers(3, 3), omega=omega),
        "dag": diamond().paths(integers(10), omega=omega),
        "dtw": bx.DTW(integers(4, 5), omega=omega),
        "open dtw": bx.DTW(integers(3, 4), open_begin=True, omega=omega),
        "semi_markov": bx.SemiMarkov(integers(4, 2, 2), integers(2, 2), omega=omega),
        "monotone": bx.MonotonicAlignment(integers(6, 3), omega=omega),
        "tree": bx.TreeModel([-1, 0, 0, 1]).labels(integers(4, 2), integers(4, 2, 2), omega=omega),
    }


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float64, "reference"), *(pytest.param(dtype, "native", marks=needs_kernels) for dtype in FLOATS)],
    indirect=["backend"],
)
@pytest.mark.parametrize("omega", TIED_OMEGAS, ids=repr)
def test_entropy_of_tied_scores_equals_enumeration(dtype: torch.dtype, omega: bx.Regularizer, backend: str) -> None:
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    for seed in range(2 if backend == "reference" else 6):
        for p in tied_programs(dtype, omega, seed).values():
            probabilities = p.support_paths(3000)[1].double()
            entropy = -torch.special.xlogy(probabilities, probabilities).sum(0)
            torch.testing.assert_close(p.entropy().double(), entropy, rtol=tolerance, atol=tolerance)
            same = kl_divergence(p, p).double()
            torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=tolerance)


@needs_kernels
def test_an_edge_of_probability_0_does_not_change_entropy_and_divergence() -> None:
    # The sweep back leaves a mass of 3.5e-17 on an edge whose log q is −∞.
    theta = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[1.0, -1.0], [2.0, 1.0]]], dtype=torch.float64)
    theta.requires_grad_()
    p = bx.Chain(theta, omega="l2", gamma=3.0)
    assert p.entropy().isfinite()
    assert torch.autograd.grad(p.entropy(), theta)[0].isfinite().all()
    for r in (p, bx.Chain(torch.zeros_like(theta)), bx.Chain(theta.detach(), omega="l2", gamma=4.0)):
        assert kl_divergence(p, r).isfinite()
    away = theta.detach() + torch.tensor([0.0, -99.0], dtype=torch.float64)[:, None]
    assert kl_divergence(p, bx.Chain(away, omega="l2")) == math.inf


def test_nan_raises_for_gamma_as_a_number_and_as_a_tensor(backend: str) -> None:
    def programs(gamma: float | torch.Tensor, bad: float) -> Iterator[Callable[[], bx.PathDistribution]]:
        def put(*shape: int) -> torch.Tensor:
            scores = potentials(*shape)
            scores.view(-1)[5] = bad
            return scores

        return iter(
            [
                lambda: bx.Chain(put(4, 2, 2), gamma=gamma),
                lambda: bx.Chain.from_scores(put(4, 2), torch.zeros(2, 2).double(), gamma=gamma),
                lambda: bx.DTW(put(3, 4), gamma=gamma),
                lambda: bx.DTW(put(3, 4), open_end=True, gamma=gamma),
                lambda: diamond().paths(put(10), gamma=gamma),
                lambda: bx.CTC(put(4, 3), torch.tensor([2]), gamma=gamma),
                lambda: bx.MonotonicAlignment(put(4, 3), gamma=gamma),
                lambda: bx.SequenceAlignment(put(4, 3), gap_open=-1.0, gap_extend=-1.0, gamma=gamma),
                lambda: bx.Transducer(put(3, 3), potentials(3, 2), gamma=gamma),
                lambda: bx.SemiMarkov(put(4, 2, 2), torch.zeros(2, 2).double(), gamma=gamma),
                lambda: bx.SpanTrees(put(4, 4), gamma=gamma),
                lambda: bx.TreeModel([-1, 0, 0]).labels(put(3, 2), potentials(3, 2, 2), gamma=gamma),
            ]
        )

    costs = 0
    for bad in (math.nan, math.inf):
        for number, tensor in zip(programs(2.0, bad), programs(torch.tensor(2.0), bad), strict=True):
            if bad == math.inf and number().sense < 0:
                costs += 1  # where +∞ forbids a cell
                continue
            messages = []
            for make in (number, tensor):
                with pytest.raises(ValueError, match="must be finite") as raised:
                    _ = make().value
                messages.append(str(raised.value))
            assert messages[0] == messages[1]
    assert costs == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_scores_where_a_path_overflows(dtype: torch.dtype, backend: str) -> None:
    low = torch.finfo(dtype).min
    dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    theta = torch.tensor([1.0, low, 0.0, low], dtype=dtype, requires_grad=True)
    scores, paths = dag.paths(theta).topk(2)
    assert scores.tolist() == [1.0, -math.inf]
    assert paths[0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert torch.autograd.grad(scores[0], theta)[0].equal(paths[0])
    chain = bx.Chain(torch.full((3, 2, 2), low, dtype=dtype)).topk(2)[0]
    assert not chain.isnan().any()


@pytest.mark.parametrize("gamma", [1e-30, torch.tensor(1e-30)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["negentropy", "entmax"])
def test_a_gamma_that_makes_scores_overflow_is_named(name: str, gamma: float | torch.Tensor, backend: str) -> None:
    many = torch.full((3, 3), 1e30)
    for make in (
        lambda: bx.Chain(many.expand(2, 3, 3), omega=name, gamma=gamma),
        lambda: bx.Chain.from_scores(many, torch.zeros(3, 3), omega=name, gamma=gamma),
        lambda: bx.DAG([(0, 1), (0, 1), (1, 2)]).paths(many, omega=name, gamma=gamma),
        lambda: bx.DTW(-many, omega=name, gamma=gamma),
        lambda: bx.DTW(-many, open_end=True, omega=name, gamma=gamma),
        lambda: bx.CTC(many, torch.tensor([1]), omega=name, gamma=gamma),
    ):
        for ask in (lambda p: p.value, lambda p: p.expected_path):
            with pytest.raises(
                ValueError, match=r"gamma must be large enough .* got a score of -?1e\+30 and gamma=1e-30"
            ):
                ask(make())
    # A mask that overflows to −∞ after division by γ removes the edge.
    masked = torch.tensor([[[0.0, -1e30], [1.0, -1e30]]] * 3)
    assert bx.Chain(masked, omega=name, gamma=gamma).value.isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_sum_to_infinity_raise_or_are_infinite(dtype: torch.dtype, backend: str) -> None:
    most = torch.full((3, 2, 2), torch.finfo(dtype).max, dtype=dtype)
    for name in ("negentropy", "l2", "hard"):
        low = bx.Chain(-most, omega=name)
        assert low.value == -math.inf
        assert not low.expected_path.isnan().any()
        try:
            assert bx.Chain(most, omega=name).value == math.inf
        except ValueError as error:
            assert "they overflow: scale them down, increase gamma, or use float64" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", STRUCTURES)
def test_straight_through_samples_have_the_gradient_of_the_expected_path(name: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, requires_grad=True)
    for omega in ("negentropy", "sparsemax"):
        p = structure.make(x, omega=omega)
        torch.manual_seed(0)
        paths = p.sample((3,))
        torch.manual_seed(0)
        passed_through = p.sample_straight_through((3,))
        assert torch.equal(passed_through, paths)
        z = potentials(*paths.shape, seed=1)
        (gradient,) = torch.autograd.grad((passed_through * z).sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad((p.expected_path * z.sum(0)).sum(), x)
        assert expected.any() or omega == "sparsemax"
        close(gradient, expected)
    assert structure.make(x).sample_straight_through().shape == p.batch_shape + p.event_shape
    with torch.no_grad():
        assert not structure.make(x).sample_straight_through((3,)).requires_grad


def test_straight_through_samples_of_infinite_scores() -> None:
    x = torch.tensor([[[0.5, -math.inf], [0.1, 0.2]], [[-math.inf, -math.inf], [0.0, 0.0]]], requires_grad=True)
    p = bx.Chain.from_scores(x, torch.zeros(2, 2))  # the second has no path
    paths = p.sample_straight_through((50,))
    assert not paths[:, 1].any()
    (gradient,) = torch.autograd.grad(paths.square().sum(), x)
    assert gradient.isfinite().all()
    assert gradient[0].any()
    assert (
        bx.Chain.from_scores(x.bfloat16(), torch.zeros(2, 2).bfloat16()).sample_straight_through().dtype
        == x.bfloat16().dtype
    )
    hard = bx.Chain.from_scores(x, torch.zeros(2, 2), omega="hard").sample_straight_through((4,))
    assert torch.equal(hard[0, 0, -1], p.best_path()[0, -1])
    assert not torch.autograd.grad(hard.sum(), x)[0].any()
    with pytest.raises(ValueError, match="sample_shape must be a tuple, got 3"):
        p.sample_straight_through(3)
