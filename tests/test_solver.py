"""The solver: cached graphs and sweeps, mixed dtypes, empty batches, and scores that vmap maps over."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.checks import close

import bellmax as bx


def run_in_a_fresh_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_graph_that_is_first_compiled_serves_eager_calls() -> None:
    run_in_a_fresh_process("""if True:
        import torch, bellmax as bx
        x, t = torch.rand(2, 4, 2, 2), torch.zeros(2, 2)
        value = torch.compile(lambda x, t: bx.SemiMarkov(x, t).value, backend="aot_eager")(x, t)
        torch.testing.assert_close(value, bx.SemiMarkov(x, t).value)
    """)


@pytest.mark.slow
def test_graphs_made_in_inference_mode_can_be_trained_on() -> None:
    run_in_a_fresh_process("""if True:
        import torch, bellmax as bx
        scores = torch.rand(2, 4, 4)
        make = [
            lambda s: bx.MonotonicAlignment(s), lambda s: bx.SpanTrees(s), lambda s: bx.DTW(s, band=1),
            lambda s: bx.SemiMarkov(s.unsqueeze(-1), torch.zeros(1, 1)),
            lambda s: bx.TreeModel([-1, 0, 0, 1]).labels(s, s[0]),
        ]
        with torch.inference_mode():
            for structure in make:
                structure(scores).entropy()
        for structure in make:
            structure(scores.clone().requires_grad_()).entropy().sum().backward()
    """)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_of_gammas_in_half_precision_meets_scalar_scores(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gamma = torch.rand(2, 3, 4).to(dtype), torch.tensor([0.5, 0.8]).to(dtype)
    expected = bx.SequenceAlignment(x.float(), gamma=gamma.float()).value
    torch.testing.assert_close(bx.SequenceAlignment(x, gamma=gamma).value.float(), expected, rtol=1e-2, atol=1e-2)


def test_a_wide_scalar_score_meets_a_batch_of_narrow_gammas() -> None:
    x, gamma = torch.rand(2, 3, 4, dtype=torch.float64), torch.tensor([0.5, 0.8])
    close(bx.SequenceAlignment(x, gamma=gamma).value, bx.SequenceAlignment(x, gamma=gamma.double()).value, 1e-6)


def test_gradients_of_penalties_are_as_wide_as_the_penalties() -> None:
    torch.manual_seed(0)
    cost, penalties = torch.rand(2, 30, 40), torch.tensor([0.1, 0.2, 0.3])
    gradients = []
    for dtype in (torch.float32, torch.float16):
        steps = penalties.clone().requires_grad_()
        (bx.DTW(cost.to(dtype).requires_grad_(), step_penalties=steps).value.sum() * 3000).backward()
        gradients.append(steps.grad)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=0)


def test_an_empty_batch_gives_shared_inputs_no_gradient() -> None:
    gamma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    log_probs = torch.rand(0, 6, 4, dtype=torch.float64, requires_grad=True)
    bx.CTC(log_probs, torch.ones(0, 3, dtype=torch.int64), gamma=gamma).value.sum().backward()
    assert gamma.grad == 0
    gap = torch.tensor(-1.0, requires_grad=True)
    p = bx.SequenceAlignment(torch.rand(0, 3, 4), gap_open=gap)
    p.value.sum().backward()
    assert gap.grad == 0
    assert torch.autograd.grad(p.expected_path.sum(), gap)[0] == 0


def test_a_path_of_shared_weights_broadcasts_over_the_batch() -> None:
    h = bx.Hypergraph([(0, ()), (1, ()), (2, (0, 1)), (2, (1,))], weight_of=[0, 1, 2, 3])
    p = h.derivations(torch.rand(2, 4))
    path = p.best_path()[0]
    assert p.support.check(path)
    close(p.log_prob(path), p.log_prob(path.expand(2, 4)))
    with pytest.raises(ValueError, match="path is not a derivation of the hypergraph"):
        p.log_prob(torch.zeros(4))


def test_vmap_over_a_score_that_is_not_the_first() -> None:
    emissions, cost = torch.rand(4, 2), torch.rand(3, 4)
    counts = torch.vmap(lambda w: bx.Chain.from_scores(emissions, w).num_paths)(torch.rand(2, 2, 2))
    assert counts.tolist() == [16, 16]
    weights = 1 + torch.rand(2, 3)
    entropies = torch.vmap(lambda w: bx.DTW(cost, step_weights=w).entropy())(weights)
    close(entropies, torch.stack([bx.DTW(cost, step_weights=w).entropy() for w in weights]), 1e-5)


def test_changes_in_place_in_inference_mode_are_seen_by_step_weights() -> None:
    with torch.inference_mode():
        cost = torch.rand(2, 4, 5)
        p = bx.DTW(cost, step_weights=(1, 2, 1.5))
        _ = p.value
        cost.mul_(0.5)
        close(p.value, bx.DTW(cost.clone(), step_weights=(1, 2, 1.5)).value)


def test_step_weights_keep_the_dtype_of_the_cost() -> None:
    p = bx.DTW(torch.rand(2, 4, 5).half(), step_weights=(1, 2, 1.5))
    assert p.best_path().dtype == p.mode.dtype == torch.float16
