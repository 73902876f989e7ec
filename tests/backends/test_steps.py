"""Chains whose states do not fill a vector, with scores that overflow without subtracting the maximum."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import needs_kernels
from support.problems import potentials

import bellmax as bx

pytestmark = needs_kernels


@pytest.mark.parametrize("omega", ["negentropy", "l2", "entmax", bx.Tsallis(1.3)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (9, 4, 3), (3, 4, 17), (2, 3, 25)])
def test_large_scores_and_forbidden_states(shape: tuple[int, int, int], omega: str | bx.Regularizer) -> None:
    batch, steps, states = shape
    theta = 300 * potentials(batch, steps, states, states)
    theta[:, :, 0, 1:] = -math.inf
    z = potentials(batch, steps, states, states, seed=1)
    for dtype in (torch.float32, torch.float64):
        p = bx.Chain(theta.to(dtype), omega=omega)
        with bx.use_backend("reference"):
            expected = bx.Chain(theta.to(dtype), omega=omega)
        for got, wanted in (
            (p.value, expected.value),
            (p.expected_path, expected.expected_path),
            (p.hessian_product(z.to(dtype)), expected.hessian_product(z.to(dtype))),
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("omega", ["negentropy", "l2", "entmax", "hard"])
@pytest.mark.parametrize("states", [1, 2, 5, 20])
def test_sequences_equal_paths_of_the_graph_with_the_same_edges(states: int, omega: str) -> None:
    steps, k = 4, 6
    weights = potentials(3, steps + 1, states, states, seed=states).round(decimals=1)  # with ties
    weights[2] = weights[2].masked_fill(potentials(steps + 1, states, states, seed=7) < -0.8, -math.inf)
    weights[:, -1] = 0
    theta = weights[:, :steps]
    edges = [("start", (0, i)) for i in range(states)]
    edges += [((t - 1, j), (t, i)) for t in range(1, steps) for i in range(states) for j in range(states)]
    edges += [((steps - 1, j), "end") for j in range(states)]
    flat = torch.cat((theta[:, 0, :, 0], theta[:, 1:].flatten(1), weights[:, -1, 0]), 1)
    chain, graph = bx.Chain(theta, omega=omega), bx.DAG(edges).paths(flat, omega=omega)
    scores, sequences = chain.topk(k)
    graph_scores, paths = graph.topk(k)
    torch.testing.assert_close(scores, graph_scores)
    chain_edges = torch.cat((sequences[:, :, 0, :, 0], sequences[:, :, 1:].flatten(2)), 2)
    assert torch.equal(chain_edges, paths[:, :, :-states])
    torch.testing.assert_close(chain.entropy(), graph.entropy())


@pytest.mark.parametrize("omega", ["negentropy", "l2", "hard"])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_sequences_in_float32(threads: int, omega: str) -> None:
    """Full groups of eight sequences share vectors, and the others go alone or fill one more group."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    theta = potentials(21, 4, 8, 8).float().requires_grad_()
    lengths = torch.arange(21) % 5
    with bx.use_backend("reference"):
        expected = bx.Chain(theta, lengths=lengths, omega=omega)
        values, (gradient,) = expected.value, torch.autograd.grad(expected.value.sum(), theta)
    for batch in range(22):
        p = bx.Chain(theta[:batch], lengths=lengths[:batch], omega=omega)
        torch.testing.assert_close(p.value, values[:batch])
        (got,) = torch.autograd.grad(p.value.sum(), theta)
        torch.testing.assert_close(got[:batch], gradient[:batch])
    torch.set_num_threads(before)
