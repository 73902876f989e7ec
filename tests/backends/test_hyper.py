"""Kernels of hypergraphs against enumeration of derivations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.hypergraphs import Hypergraph, random_hypergraph
from support.inside import loading
from support.kernels import needs_kernels
from support.problems import OMEGAS, Array
from torch import Tensor

import bellmax as bx

pytestmark = needs_kernels


def padded(index: Sequence[Tensor]) -> list[Tensor | None]:
    """The index as kernels take it: without the terms of forms."""
    return loading.padded(index, 9)


class Kernels:
    """The kernels on one graph and weights (B, W) at γ = 1."""

    def __init__(self, graph: Hypergraph, theta: Tensor, omega: bx.Regularizer) -> None:
        self.graph, self.theta, self.kernel = graph, theta, omega.kernel
        self.tape = torch.empty(len(theta), 2, graph.num_nodes + 3, dtype=torch.float64)
        self.value = theta.new_empty(len(theta))
        assert self.call("forward", self.value, self.tape)

    def call(self, name: str, *tensors: Tensor) -> object:
        index = padded(self.graph.index)
        return loading.call(f"dag_{name}", self.theta, *tensors, *index, *self.kernel)

    def by_weight(self, name: str, *tensors: Tensor) -> Tensor:
        out = torch.full_like(self.theta, math.nan)
        self.call(name, self.tape, *tensors, out)
        return out

    def by_edge(self, name: str, *tensors: Tensor) -> Tensor:
        out = self.theta.new_full((len(self.theta), len(self.graph.edges)), math.nan)
        self.call(name, self.tape, *tensors, out)
        return out


def at_unit_gamma(name: str) -> bx.Regularizer:
    omega = OMEGAS[name]
    return type(omega)(omega.alpha) if type(omega) is bx.Tsallis else type(omega)()


@pytest.fixture(params=list(OMEGAS))
def unit_omega(request: pytest.FixtureRequest) -> bx.Regularizer:
    return at_unit_gamma(request.param)


def problems(batch: int, seed: int, count: int) -> list[tuple[Hypergraph, Array]]:
    rng = np.random.default_rng(seed)
    cases = []
    for n in range(count):
        graph = random_hypergraph(rng, shared=n % 2 == 1)
        theta = rng.normal(scale=1.5, size=(batch, graph.onto_weights.shape[1]))
        theta[rng.random(theta.shape) < 0.15] = -math.inf
        cases.append((graph, theta))
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 20])
def test_sweeps_against_enumeration(unit_omega: bx.Regularizer, batch: int, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1e-9
    for graph, weights in problems(batch, seed=batch, count=24 if batch == 1 else 6):
        rng = np.random.default_rng(7)
        theta = torch.tensor(weights, dtype=dtype)
        run = Kernels(graph, theta, unit_omega)
        exact = theta.double().numpy()
        seed = torch.tensor(rng.normal(size=batch), dtype=dtype)
        z = torch.tensor(rng.normal(size=weights.shape), dtype=dtype)
        path, product = run.by_weight("backward", seed), run.by_weight("hessian", seed, z)
        log_q = run.by_edge("log_transitions")
        for row in {0, batch // 3, batch - 1}:
            value, q = graph.transitions(exact[row], unit_omega)
            assert run.value[row].item() == pytest.approx(value, rel=tolerance, abs=tolerance)
            scale = float(seed[row])
            np.testing.assert_allclose(path[row], scale * graph.expectation(exact[row], unit_omega), atol=tolerance)
            with np.errstate(divide="ignore"):
                expected_log = np.log(q)
            close = q > 1e-3 if dtype == torch.float32 else q > 1e-9
            np.testing.assert_allclose(log_q[row].numpy()[close], expected_log[close], atol=100 * tolerance)
            assert not log_q[row].isnan().any()
            difference = graph.hessian_product(exact[row], z[row].double().numpy(), unit_omega)
            if difference is not None:
                np.testing.assert_allclose(product[row], scale * difference, atol=max(20 * tolerance, 1e-6))
        assert not product.isnan().any()


@pytest.mark.parametrize("batch", [1, 20])
def test_log_transitions_along_a_direction(unit_omega: bx.Regularizer, batch: int) -> None:
    """The jvp is the difference of log q, and the vjp is its transpose."""
    for graph, weights in problems(batch, seed=2, count=6):
        rng = np.random.default_rng(5)
        theta, z = torch.tensor(weights), torch.tensor(rng.normal(size=weights.shape))
        run = Kernels(graph, theta, unit_omega)
        change = run.by_edge("log_transitions_jvp", z)
        cotangent = torch.tensor(rng.normal(size=change.shape))
        back = run.by_weight("log_transitions_vjp", cotangent)
        torch.testing.assert_close((back * z).sum(1), (change * cotangent).sum(1))
        step = 1e-6
        logs = [Kernels(graph, theta + n * step * z, unit_omega).by_edge("log_transitions") for n in (-1, 1)]
        difference = (logs[1] - logs[0]) / (2 * step)
        stays = logs[0].isfinite() & logs[1].isfinite() & (logs[0] > -6)
        assert stays.double().mean() > 0.25
        torch.testing.assert_close(change[stays], difference[stays], rtol=1e-4, atol=1e-4)


def test_samples_have_the_probabilities(unit_omega: bx.Regularizer) -> None:
    draws, compared = 2000, 0
    for graph, theta in problems(2, seed=3, count=4):
        run = Kernels(graph, torch.tensor(theta), unit_omega)
        choices = max(1, int(graph.derivations.sum(1).max()))
        uniforms = torch.rand(2, draws, choices, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        counts = torch.empty(2, draws, len(graph.edges), dtype=torch.float64)
        run.call("sample", run.tape, uniforms, counts)
        distinct, first = np.unique(graph.derivations, axis=0, return_inverse=True)
        for row in range(2):
            p = np.bincount(first.ravel(), graph.probabilities(theta[row], unit_omega), len(distinct))
            if p.sum() == 0:
                assert not counts[row].any()
                continue
            compared += 1
            drawn = [(counts[row].numpy() == derivation).all(1).mean() for derivation in distinct]
            np.testing.assert_allclose(drawn, p, atol=4 * math.sqrt(0.25 / draws))
            assert sum(drawn) == pytest.approx(1)
    assert compared >= 7  # of 8


def test_draws_do_not_depend_on_each_other(unit_omega: bx.Regularizer) -> None:
    draws = 40
    for graph, theta in problems(3, seed=5, count=4):
        run = Kernels(graph, torch.tensor(theta), unit_omega)
        choices = max(1, int(graph.derivations.sum(1).max()))
        uniforms = torch.rand(3, draws, choices, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        together = torch.full((3, draws, len(graph.edges)), math.nan, dtype=torch.float64)
        run.call("sample", run.tape, uniforms, together)
        for d in range(draws):
            alone = torch.full((3, 1, len(graph.edges)), math.nan, dtype=torch.float64)
            run.call("sample", run.tape, uniforms[:, d : d + 1].contiguous(), alone)
            assert torch.equal(alone[:, 0], together[:, d])


def test_choices_are_taken_depth_first() -> None:
    # The first tail of the root and its subtree come before the second tail.
    graph = Hypergraph(3, [(0, ()), (0, ()), (1, (0,)), (1, (0,)), (2, (1, 0))], list(range(5)))
    run = Kernels(graph, torch.zeros(1, 5, dtype=torch.float64), bx.Negentropy())
    counts = torch.empty(1, 1, 5, dtype=torch.float64)
    uniforms = torch.tensor([[[0.5, 0.9, 0.1, 0.8]]], dtype=torch.float64)  # root, node 1, its tail, node 0
    run.call("sample", run.tape, uniforms, counts)
    assert counts.flatten().tolist() == [1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="more choices"):
        run.call("sample", run.tape, uniforms[..., :3].contiguous(), counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_derivations(dtype: torch.dtype) -> None:
    for graph, numbers in problems(2, seed=4, count=12):
        theta = torch.tensor(numbers, dtype=dtype)
        run = Kernels(graph, theta, bx.Hard())
        scores, counts = theta.new_empty(2, 7), theta.new_empty(2, 7, len(graph.edges))
        assert run.call("topk", scores, counts)
        for row in range(2):
            weights = theta[row].double().numpy()[graph.weight]
            all_scores = np.array([weights[d > 0] @ d[d > 0] for d in graph.derivations])
            best = np.sort(all_scores)[::-1][:7]
            best = np.concatenate((best, np.full(7 - len(best), -math.inf)))
            np.testing.assert_allclose(scores[row], best, rtol=1e-5, atol=1e-5)
            for score, count in zip(scores[row].tolist(), counts[row].double().numpy(), strict=True):
                if score > -math.inf:
                    assert weights[count > 0] @ count[count > 0] == pytest.approx(score, rel=1e-5, abs=1e-5)
                    assert (graph.derivations == count).all(1).any()
                else:
                    assert not count.any()


def test_a_graph_without_derivations(unit_omega: bx.Regularizer) -> None:
    graph = Hypergraph(3, [(0, ()), (2, (0, 1))], [0, 1])  # node 1 has no edges
    run = Kernels(graph, torch.ones(1, 2, dtype=torch.float64), unit_omega)
    assert run.value.item() == -math.inf
    assert not run.by_weight("backward", torch.ones(1, dtype=torch.float64)).any()
    assert not run.by_weight("hessian", torch.ones(1, dtype=torch.float64), torch.ones_like(run.theta)).any()


def test_bad_numbers_are_detected() -> None:
    graph = Hypergraph(1, [(0, ()), (0, ())], [0, 1])
    tape, value = torch.empty(1, 2, 4, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    for bad in (math.nan, math.inf):
        theta = torch.tensor([[0.0, bad]], dtype=torch.float64)
        assert not loading.call("dag_forward", theta, value, tape, *padded(graph.index), *bx.Negentropy().kernel)


@pytest.mark.parametrize("position", range(6))
def test_indices_out_of_range_are_refused(position: int) -> None:
    graph = Hypergraph(2, [(0, ()), (1, (0, 0)), (1, (0,))], [0, 1, 1])
    tape, value = torch.empty(1, 2, 5, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    theta = torch.zeros(1, 2, dtype=torch.float64)
    for bad in (-1, 5, 2**31 - 1):
        index = [tensor.clone() for tensor in graph.index]
        index[position][-1] = bad
        with pytest.raises(ValueError, match=r"index|group"):
            loading.call("dag_forward", theta, value, tape, *padded(index), *bx.Negentropy().kernel)


@pytest.mark.parametrize("offset", [[0, 2**31 - 1, -(2**31), -1, 2], [0, 2, 1, 2, 2], [0, -1, 1, 1, 2]])
def test_offsets_that_descend_or_wrap_around_are_refused(offset: list[int]) -> None:
    index = [torch.tensor(numbers, dtype=torch.int32) for numbers in (offset, [], [0, 1], [0, 4], [0, 0, 0])]
    tape, value = torch.empty(1, 2, 7, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    theta = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="index does not fit"):
        loading.call("dag_forward", theta, value, tape, *padded(index), *bx.Negentropy().kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("width", [3, 17, 70])
def test_wide_groups(width: int, batch: int, dtype: torch.dtype) -> None:
    """More nodes and edges than one vector holds, and remaining rows."""
    column = torch.arange(width)
    pairs = torch.cartesian_prod(column, column)
    layers = [pairs + torch.tensor([1, 1 + width]) + width * n for n in range(2)]
    start = torch.stack((torch.zeros_like(column), 1 + column), 1)
    end = torch.stack((1 + 2 * width + column, torch.full_like(column, 1 + 3 * width)), 1)
    dag = bx.DAG(torch.cat((start, *layers, end)))
    generator = torch.Generator().manual_seed(width)
    weights = torch.randn(batch, dag.num_edges, generator=generator, dtype=torch.float64)
    weights[torch.rand(weights.shape, generator=generator) < 0.1] = -math.inf
    z = torch.randn(weights.shape, generator=generator, dtype=torch.float64).to(dtype)
    results = []
    for backend in ("native", "reference"):
        with bx.use_backend(backend):
            theta = weights.to(dtype).requires_grad_()
            p = dag.paths(theta)
            path = p.expected_path
            (product,) = torch.autograd.grad((path * z).sum(), theta)
            results.append((p.value, path, product))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*results, rtol=10 * tolerance, atol=tolerance)
