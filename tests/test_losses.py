"""Every loss against its definition by enumeration, and the paper's statements about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.chains import STEP_MASKS, steps_of, trellis
from support.checks import close
from support.grids import grid
from support.inside import on_edges, with_scores
from support.problems import OMEGAS, Enumerated, diamond, potentials
from torch import Tensor
from torch.autograd import gradcheck

import bellmax as bx
from bellmax import losses

STEPS, STATES = 3, 3
LABELS = torch.tensor([[2, 0, 1], [1, 2, 2], [0, 2, 1]])
ALIGNMENTS = torch.tensor([[[0, 0], [0, 1], [1, 1], [2, 1]], [[0, 0], [1, 1], [2, 2], [-1, -1]]])
LENGTHS = torch.tensor([3, 3]), torch.tensor([2, 3])


def chain_value(theta: torch.Tensor, omega: bx.Regularizer) -> float:
    """DP_Ω of potentials (K, S, S) on the explicit graph."""
    dag, offsets = trellis(len(theta), theta.shape[-1])
    weights = torch.cat((theta.flatten()[offsets], theta.new_zeros(theta.shape[-1]))).tolist()
    return Enumerated(dag.edges.tolist(), dag.num_nodes, weights, omega).value


def alignment_value(cost: torch.Tensor, omega: bx.Regularizer, moves: set[Any] | None = None) -> float:
    """DTW_Ω of costs (N, M) on the explicit graph, optionally restricted to moves (from, to) between cells."""
    g = grid(*cost.shape)
    cells = [divmod(n, cost.shape[1]) for n in range(cost.numel())]
    exists = [moves is None or a == 0 or (cells[a - 1], cells[b - 1]) in moves for a, b in g.edges]
    weights = (-g.on_edges(cost)).masked_fill(~torch.tensor(exists), -math.inf)
    return -Enumerated(g.edges, 1 + cost.numel(), weights.tolist(), omega).value


def cells_of(pairs: torch.Tensor) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in pairs if i >= 0]


def chain_problem(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Potentials (3, T, S, S) with −∞, and NaN at masked steps; and the mask."""
    mask = STEP_MASKS[padding]
    theta = potentials(3, STEPS, STATES, STATES, seed=5)
    theta[:, 1:, 0, 1] = -math.inf
    theta[~mask] = math.nan
    return theta, mask


def alignment_problem(**options: Any) -> bx.DTW:
    cost = potentials(2, 3, 3, seed=7).abs()
    cost[1, 2, 0] = math.inf
    cost[0, :, 2] = math.nan
    return bx.DTW(cost, lengths=LENGTHS, **options)


# --- surrogate


def test_surrogate_of_graphs(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    weights = potentials(dag.num_edges, seed=1)
    weights[3] = -math.inf
    cost = potentials(dag.num_edges, seed=2).abs()
    free = Enumerated(dag.edges.tolist(), dag.num_nodes, weights.tolist(), omega)
    augmented = Enumerated(dag.edges.tolist(), dag.num_nodes, (weights + cost).tolist(), omega)
    paths = torch.from_numpy(free.all_paths)
    targets = torch.cat((paths, torch.maximum(paths[:1], paths[1:])))  # also for pairs of paths
    p = dag.paths(weights.expand(len(targets), -1), omega=omega)
    plain, with_cost = (losses.surrogate(p, targets, c, reduction="none") for c in (None, cost))
    for b, target in enumerate(targets):
        inside = weights.masked_fill(target == 0, -math.inf).tolist()
        restricted = Enumerated(dag.edges.tolist(), dag.num_nodes, inside, omega).value
        close(plain[b], free.value - restricted)
        close(with_cost[b], augmented.value - restricted)
    assert (plain >= 0).all()
    assert (with_cost >= plain).all()
    close(losses.surrogate(p, targets), plain.mean())
    close(losses.surrogate(p, targets.bool(), reduction="sum"), plain.sum())
    close(losses.surrogate(dag.paths(weights, omega=omega), targets[0]), plain[0])


@pytest.mark.parametrize("padding", STEP_MASKS)
def test_surrogate_of_chains(padding: str, omega: bx.Regularizer, backend: str) -> None:
    theta, mask = chain_problem(padding)
    p = bx.Chain(theta, omega=omega, **steps_of(padding))
    labels = LABELS.masked_fill(~mask, 77)
    one_hot = LABELS.unsqueeze(-1) == torch.arange(STATES)
    free = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0]]).bool() & mask
    two = one_hot | (torch.arange(STATES) == 2)
    path = p.sequence_to_path(LABELS.masked_fill(~mask, -1))
    edges = torch.maximum(path, p.sequence_to_path(torch.full_like(LABELS, 2).masked_fill(~mask, -1)))
    targets = [
        (labels, one_hot.unsqueeze(-1)),
        (
            labels.masked_fill(free, -1),
            (one_hot | free.unsqueeze(-1))[..., None],
        ),
        (two, two.unsqueeze(-1)),
        (path, path > 0),
        (edges.bool(), edges > 0),
    ]
    by_state = potentials(*theta.shape[:3], seed=6).abs().masked_fill(~mask.unsqueeze(-1), math.nan)
    on_edges = by_state.unsqueeze(-1) + potentials(*theta.shape, seed=8).abs()
    costs = (None, by_state, on_edges)
    over_edges = (torch.zeros_like(theta), by_state.unsqueeze(-1), on_edges)
    best = theta.new_tensor([[chain_value((theta + c)[b, mask[b]], omega) for b in range(3)] for c in over_edges])
    for target, within in targets:
        inside = theta.masked_fill(~within, -math.inf)
        restricted = theta.new_tensor([chain_value(inside[b, mask[b]], omega) for b in range(3)])
        got = torch.stack([losses.surrogate(p, target, c, reduction="none") for c in costs])
        assert (got >= 0).all()
        close(got, best - restricted)


@pytest.mark.parametrize("by_step", [False, True])
def test_chains_from_scores(by_step: bool, omega: bx.Regularizer, backend: str) -> None:
    mask = STEP_MASKS["mask"]
    emissions = potentials(3, STEPS, STATES).masked_fill(~mask.unsqueeze(-1), math.nan)
    shape = (3, STEPS - 1, STATES, STATES) if by_step else (STATES, STATES)
    start, end = potentials(STATES, seed=2), potentials(3, STATES, seed=3)
    p = bx.Chain.from_scores(emissions, potentials(*shape, seed=1), start=start, end=end, omega=omega, mask=mask)
    q = bx.Chain(p.potentials, omega=omega, mask=mask)
    partial = LABELS.masked_fill(torch.tensor([False, True, False]), -1)
    path = q.sequence_to_path(LABELS.masked_fill(~mask, -1))
    cost = potentials(3, STEPS, STATES, seed=6).abs()
    for target in (LABELS, partial, path, path.bool() | (path.sum(-2, keepdim=True) > 0)):
        for c in (None, cost, cost.unsqueeze(-1).expand(q.potentials.shape)):
            close(losses.surrogate(p, target, c, reduction="none"), losses.surrogate(q, target, c, reduction="none"))
        for loss in (losses.relaxed, losses.path_nll):
            close(loss(p, target, reduction="none"), loss(q, target, reduction="none"))
    one_path = path.bool()
    close(losses.surrogate(q, LABELS), losses.surrogate(q, one_path))  # an explicit sum against a program
    close(losses.expected_cost(p, cost), losses.expected_cost(q, cost.unsqueeze(-1).expand(q.potentials.shape)))
    if isinstance(omega, bx.Negentropy):
        close(losses.path_nll(p, LABELS, reduction="none"), -q.log_prob(path))


def test_surrogate_of_alignments(omega: bx.Regularizer, backend: str) -> None:
    p = alignment_problem(omega=omega)
    cost = potentials(2, 3, 3, seed=9).abs()
    cost[0, :, 2] = math.nan
    plain, with_cost = (losses.surrogate(p, ALIGNMENTS, c, reduction="none") for c in (None, cost))
    thick = p.alignment_to_path(ALIGNMENTS)
    thick[0, :, 0] = thick[1, :, 1] = thick[1, 1, 0] = 1
    partial = losses.surrogate(p, thick, reduction="none")
    assert (torch.cat((plain, with_cost, partial)) >= 0).all()
    for b in range(2):
        theta, c = (full[b, : LENGTHS[0][b], : LENGTHS[1][b]] for full in (p.cost, cost))
        cells = cells_of(ALIGNMENTS[b])
        alone = alignment_value(theta, omega, set(pairwise(cells)))
        close(plain[b], alone - alignment_value(theta, omega))
        close(with_cost[b], alone - alignment_value(theta - c, omega))
        inside = theta.masked_fill(thick[b, : LENGTHS[0][b], : LENGTHS[1][b]] == 0, math.inf)
        close(partial[b], alignment_value(inside, omega) - alignment_value(theta, omega))
    close(losses.surrogate(p, p.alignment_to_path(ALIGNMENTS)), plain.mean())


@pytest.mark.parametrize("open_end", [False, True])
def test_alignments_with_custom_moves(open_end: bool, omega: bx.Regularizer, backend: str) -> None:
    options = {"step_weights": (2.0, 1.0, 1.5), "step_penalties": (0.1, 0.2, 0.3), "open_end": open_end}
    p = alignment_problem(omega=omega, open_begin=True, **options)
    target = torch.tensor([[[0, 1], [1, 1], [2, 1]], [[0, 0], [1, 1], [2, 2]]])
    wanted = losses.surrogate(*on_edges(p, p.alignment_to_path(target)), reduction="none")
    close(losses.surrogate(p, target, reduction="none"), wanted)
    close(losses.path_nll(p, target, reduction="none"), -p.log_prob(p.alignment_to_path(target)))


@pytest.mark.parametrize("open_begin", [False, True])
@pytest.mark.parametrize("open_end", [False, True])
def test_one_alignment_is_distinguished_from_other_sets(open_begin: bool, open_end: bool) -> None:
    sets = torch.cartesian_prod(*[torch.tensor([False, True])] * 9).reshape(-1, 3, 3)
    for lengths in ((3, 3), (2, 3), (3, 1), (1, 2)):
        many = bx.DTW(torch.zeros(sets.shape), lengths=lengths, open_begin=open_begin, open_end=open_end)
        one = bx.DTW(torch.zeros(3, 3), lengths=lengths, open_begin=open_begin, open_end=open_end)
        listed = one.topk(int(one.num_paths))[1].bool()
        wanted = (sets.unsqueeze(1) == listed).flatten(2).all(-1).any(-1)
        assert torch.equal(many.support.check(sets.float()), wanted)


@pytest.mark.parametrize("name", OMEGAS)
@settings(max_examples=30)
@given(ends=arrays(np.float64, (2, 37), elements=st.floats(-9, 9)))
def test_surrogate_is_convex(name: str, ends: np.ndarray) -> None:
    omega = OMEGAS[name]
    dag = diamond()
    edges = dag.paths(torch.zeros(dag.num_edges)).best_path()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        chain = bx.Chain(theta[:, :18].reshape(-1, 2, 3, 3), omega=omega)
        labels = torch.tensor([2, 1]).expand(len(theta), 2)
        grid = bx.DTW(theta[:, 18:27].reshape(-1, 3, 3), omega=omega)
        pairs = ALIGNMENTS[:1, [0, 1, 2, 3, 3]].clone()
        pairs[0, 4] = 2
        paths = dag.paths(theta[:, 27:], omega=omega)
        return torch.stack(
            (
                losses.surrogate(chain, labels, reduction="none"),
                losses.surrogate(chain, labels, losses.hamming_cost(chain, labels), reduction="none"),
                losses.surrogate(grid, pairs.expand(len(theta), -1, -1), reduction="none"),
                losses.surrogate(paths, edges, reduction="none"),
            )
        )

    a, b = torch.from_numpy(ends)
    at_a, at_b, middle = loss(torch.stack((a, b, (a + b) / 2))).unbind(-1)
    assert (middle <= (at_a + at_b) / 2 + 1e-9).all()


def test_zero_at_the_optimum(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    labels, pairs = torch.tensor([2, 0, 1]), torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2]])
    far = 300.0
    edges = dag.paths(potentials(dag.num_edges)).best_path()
    grid = bx.DTW(torch.zeros(3, 3, dtype=torch.float64))
    problems = [
        (lambda t: bx.Chain(t, omega=omega), bx.Chain(potentials(3, 3, 3)).sequence_to_path(labels) * far, labels),
        (lambda t: dag.paths(t, omega=omega), edges * far, edges),
        (lambda t: bx.DTW(t, omega=omega), far * (1 - 2 * grid.alignment_to_path(pairs)), pairs),
    ]
    for build, theta, target in problems:
        theta = (theta + potentials(*theta.shape)).requires_grad_()
        p = build(theta)
        for loss in (losses.surrogate, losses.relaxed, losses.path_nll, losses.structured_hinge):
            value = loss(p, target)
            (gradient,) = torch.autograd.grad(value, theta, retain_graph=True)
            close(value, 0.0)
            close(gradient, torch.zeros_like(theta))
    only = torch.full((3, 3, 3), -math.inf, dtype=torch.float64).masked_fill(problems[0][1].detach() > far / 2, 0)
    p = bx.Chain(only.requires_grad_(), omega=omega)
    for loss in (losses.surrogate, losses.relaxed, losses.path_nll):
        assert not torch.autograd.grad(loss(p, labels), only, retain_graph=True)[0].any()


def test_losses_equal_their_definitions_in_the_literature(backend: str) -> None:
    theta = potentials(2, STEPS, STATES, STATES)
    p = bx.Chain(theta, omega="l2")
    labels = LABELS[:2]
    path = p.sequence_to_path(labels)
    scores, paths = bx.Chain(theta).topk(STATES**STEPS)
    gold = (theta * path).flatten(1).sum(1)
    wrong = STEPS - (p.path_to_sequence(paths) == labels.unsqueeze(1)).sum(-1)
    close(losses.crf_nll(p, labels, reduction="none"), scores.logsumexp(1) - gold)
    close(losses.structured_perceptron(p, labels, reduction="none"), scores.amax(1) - gold)
    close(losses.structured_hinge(p, labels, reduction="none"), (scores + wrong).amax(1) - gold)
    close(losses.structured_hinge(p, labels, 2.5, reduction="none"), (scores + 2.5 * wrong).amax(1) - gold)
    cold = bx.Chain(theta, omega=bx.Negentropy(0.5))
    close(losses.crf_nll(cold, labels), 0.5 * losses.path_nll(cold, labels))
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    by_class = losses.hamming_cost(p, labels, weight)
    close(by_class, weight * (labels.unsqueeze(-1) != torch.arange(STATES)))


def test_hamming_cost_counts_mistakes(backend: str) -> None:
    p = alignment_problem()
    y = p.alignment_to_path(ALIGNMENTS)
    cost = losses.hamming_cost(p, ALIGNMENTS)
    close(cost[1], 1 - y[1])
    close(cost[0, :, :2], 1 - y[0, :, :2])
    assert not cost[0, :, 2].any()  # past the end
    assert not (cost * y).any()
    chain = bx.Chain(potentials(2, 3, 2, 2), mask=torch.tensor([[1, 0, 1], [0, 1, 0]]).bool())
    cost = losses.hamming_cost(chain, torch.tensor([[0, 9, -1], [9, 1, 9]]))
    close(cost, [[[0, 1], [0, 0], [0, 0]], [[0, 0], [1, 0], [0, 0]]])


# --- losses of the expected path


@pytest.mark.parametrize("padding", STEP_MASKS)
def test_relaxed_of_chains(padding: str, omega: bx.Regularizer, backend: str) -> None:
    theta, mask = chain_problem(padding)
    p = bx.Chain(theta, omega=omega, **steps_of(padding))
    rows = p.marginals
    target = LABELS.masked_fill(~mask, 77)
    one_hot = (LABELS.unsqueeze(-1) == torch.arange(STATES)).double()
    if isinstance(omega, bx.Negentropy):
        by_step = -(one_hot * rows.log()).nan_to_num(0).sum(-1)
    else:
        by_step = (one_hot - rows).square().sum(-1) / 2
    by_step = by_step.masked_fill(~mask, 0)
    close(losses.relaxed(p, target, reduction="none"), by_step.sum(-1))
    close(losses.relaxed(p, p.sequence_to_path(LABELS.masked_fill(~mask, -1))), by_step.sum(-1).mean())
    close(losses.relaxed(p, target.masked_fill(torch.arange(STEPS) == 2, -1), reduction="sum"), by_step[:, :2].sum())


def test_relaxed_with_sets_of_states(omega: bx.Regularizer, backend: str) -> None:
    p = bx.Chain(potentials(1, 1, 3, 3), omega=omega)
    allowed = torch.tensor([[[True, True, False]]])
    m = p.marginals[0, 0]
    share = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    near = torch.stack((share, 1 - share, torch.zeros_like(share)), -1)  # every distribution over the two
    if isinstance(omega, bx.Negentropy):
        distance = (torch.xlogy(near, near) - torch.xlogy(near, m)).sum(-1)
    else:
        distance = (near - m).square().sum(-1) / 2
    torch.testing.assert_close(losses.relaxed(p, allowed), distance.min(), atol=1e-8, rtol=1e-8)
    assert losses.relaxed(p, torch.ones_like(allowed)) == 0


def test_relaxed_of_paths(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    p = dag.paths(potentials(3, dag.num_edges), omega=omega)
    y = p.best_path()
    grid = alignment_problem(omega=omega)
    cells, e = grid.alignment_to_path(ALIGNMENTS), grid.expected_path
    if isinstance(omega, bx.Negentropy):
        wanted = -(y * p.expected_path.log()).sum(-1)
        inside = ~grid.cost.isnan() & (e > 0) & (e < 1)
        coins = torch.where(cells > 0, e.log(), (1 - e).log())
        of_cells = -coins.masked_fill(~inside, 0).flatten(1).sum(1)
    else:
        wanted = (p.expected_path - y).square().sum(-1) / 2
        of_cells = (e - cells).square().flatten(1).sum(1) / 2
    close(losses.relaxed(p, y, reduction="none"), wanted)
    close(losses.relaxed(grid, ALIGNMENTS, reduction="none"), of_cells)


def test_relaxed_distinguishes_an_alignment_from_a_subset() -> None:
    cost = torch.tensor([[0.0, -50.0], [50.0, 0.0]], dtype=torch.float64)  # via (0, 1), not along the diagonal
    assert losses.relaxed(bx.DTW(cost), torch.eye(2)) > 1


def test_alignment_area(omega: bx.Regularizer, backend: str) -> None:
    p = alignment_problem(omega=omega)
    got = losses.alignment_area(p, ALIGNMENTS, reduction="none")
    for b in range(2):
        rows, columns = LENGTHS[0][b], LENGTHS[1][b]
        difference = (p.expected_path - p.alignment_to_path(ALIGNMENTS))[b, :rows, :columns]
        lower = torch.ones(columns, columns, dtype=torch.float64).tril()
        close(got[b], (lower @ difference.T).square().sum())
    close(losses.alignment_area(p, p.alignment_to_path(ALIGNMENTS), reduction="sum"), got.sum())


def test_area_and_deviation_agree_for_one_cell_per_row() -> None:
    a, b = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0, 0, 1, 2, 3])
    rows = torch.arange(5)
    grid = torch.full((5, 4), 9.0, dtype=torch.float64)
    grid[rows, a] = 0
    p, target = bx.DTW(grid, omega="hard"), torch.stack((rows, b), -1)
    deviation = losses.mean_absolute_deviation(p.best_alignment(), target)
    close(deviation, 3 / 5)
    close(losses.alignment_area(p, target), (5 * deviation).double())
    close(losses.mean_absolute_deviation(p.best_path(), target).float(), deviation)
    wide = torch.tensor([[0, 0], [0, 1], [1, 1]])
    close(losses.mean_absolute_deviation(wide, torch.eye(2).bool()), 0.25)
    batch = torch.stack((ALIGNMENTS[1, :3], torch.tensor([[0, 0], [1, 0], [-1, -1]])))
    close(losses.mean_absolute_deviation(batch, batch.flip(1)), [0, 0])


def test_expected_cost(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    weights, cost = potentials(dag.num_edges, seed=1), potentials(dag.num_edges, seed=2)
    weights[3], cost[3] = -math.inf, math.inf
    listed = Enumerated(dag.edges.tolist(), dag.num_nodes, weights.tolist(), omega)
    each = [float(cost[torch.from_numpy(path) > 0].sum()) for path in listed.all_paths]
    risk = sum(prob * c for prob, c in zip(listed.probabilities, each, strict=True))
    close(losses.expected_cost(dag.paths(weights, omega=omega), cost), risk)
    theta, mask = chain_problem("mask")
    p = bx.Chain(theta, mask=mask, omega=omega)
    by_state = potentials(3, STEPS, STATES).masked_fill(~mask.unsqueeze(-1), math.nan)
    wanted = (p.marginals * by_state.nan_to_num(0)).flatten(1).sum(1)
    close(losses.expected_cost(p, by_state, reduction="none"), wanted)
    grid = alignment_problem(omega=omega)
    close(losses.expected_cost(grid, torch.ones(3, 3)), grid.mean.sum() / 2)


# --- likelihood


def test_path_nll(omega: bx.Regularizer, backend: str) -> None:
    dag = diamond()
    weights = potentials(dag.num_edges, seed=1)
    listed = Enumerated(dag.edges.tolist(), dag.num_nodes, weights.tolist(), omega)
    paths, probabilities = torch.from_numpy(listed.all_paths), torch.from_numpy(listed.probabilities)
    p = dag.paths(weights.expand(len(paths), -1), omega=omega)
    close(losses.path_nll(p, paths, reduction="none"), -probabilities.log())
    two = torch.maximum(paths[0], paths[-1])
    within = (paths <= two).all(-1)
    close(losses.path_nll(dag.paths(weights, omega=omega), two), -probabilities[within].sum().log())
    theta, mask = chain_problem("mask")
    chain = bx.Chain(theta, mask=mask, omega=omega)
    path = chain.sequence_to_path(LABELS.masked_fill(~mask, -1))
    close(losses.path_nll(chain, LABELS, reduction="none"), -chain.log_prob(path))
    grid = alignment_problem(omega=omega)
    cells = grid.alignment_to_path(ALIGNMENTS)
    close(losses.path_nll(grid, ALIGNMENTS, reduction="none"), -grid.log_prob(cells))
    thick, over, under = cells.clone(), cells.clone(), cells.clone()
    thick[1, 0, 1] = thick[1, 1, 0] = over[1, 0, 1] = under[1, 1, 0] = 1
    both = grid.log_prob(torch.stack((cells, over, under)))[:, 1].logsumexp(0)
    close(losses.path_nll(grid, thick, reduction="none")[1], -both)


def test_path_of_probability_zero() -> None:
    weights = torch.tensor([9.0, 0.0], requires_grad=True)
    loss = losses.path_nll(bx.DAG([(0, 1), (0, 1)]).paths(weights, omega="l2"), torch.tensor([0, 1]))
    assert loss == math.inf
    assert not torch.autograd.grad(loss, weights)[0].any()


# --- derivatives, precision, corners


@pytest.mark.parametrize("name", ["surrogate", "relaxed", "path_nll"])
def test_gradients(name: str, omega: bx.Regularizer, backend: str) -> None:
    loss = getattr(losses, name)
    dag = diamond()
    edges = dag.paths(torch.zeros(dag.num_edges)).best_path()
    mask = STEP_MASKS["mask"]
    if name == "path_nll" and isinstance(omega, bx.Hard):
        pytest.skip("0 or infinite")
    scale = 0.03 if name == "path_nll" else 1.0  # so that nearly all paths have a positive probability

    def chain(t: torch.Tensor) -> torch.Tensor:
        return loss(bx.Chain(scale * t, mask=mask, omega=omega), LABELS, reduction="none")

    def scores(e: torch.Tensor, t: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        p = bx.Chain.from_scores(scale * e, scale * t, end=end * scale, mask=mask, omega=omega)
        return loss(p, LABELS.masked_fill(LABELS == 0, -1), reduction="none")

    assert gradcheck(chain, potentials(3, 3, 3, 3, seed=1, requires_grad=True), fast_mode=True)
    inputs = [potentials(*s, seed=2 + i, requires_grad=True) for i, s in enumerate(((3, 3, 3), (3, 3), (3,)))]
    assert gradcheck(scores, inputs, fast_mode=True)
    grid = lambda t: loss(bx.DTW(scale * t, lengths=LENGTHS, omega=omega), ALIGNMENTS, reduction="none")  # noqa: E731
    assert gradcheck(grid, potentials(2, 3, 3, seed=5, requires_grad=True), fast_mode=True)
    weights = potentials(dag.num_edges, seed=4, requires_grad=True)
    assert gradcheck(lambda t: loss(dag.paths(scale * t, omega=omega), edges), weights, fast_mode=True)


def test_gradients_of_areas_and_costs(omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(2, 3, 3, seed=1)
    theta = potentials(2, 3, 3, seed=5, requires_grad=True)

    def run(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = bx.DTW(t, lengths=LENGTHS, omega=omega)
        return losses.alignment_area(p, ALIGNMENTS), losses.expected_cost(p, cost)

    assert gradcheck(run, theta, fast_mode=True)


def test_padding_gets_no_gradient(omega: bx.Regularizer, backend: str) -> None:
    theta, mask = chain_problem("mask")
    theta.requires_grad_()
    p = bx.Chain(theta, mask=mask, omega=omega)
    grid = alignment_problem(omega=omega)
    grid = with_scores(grid, (grid.cost.requires_grad_(),), omega)
    partial = LABELS.masked_fill(LABELS == 1, -1)
    total = sum(loss(p, t) for loss in (losses.surrogate, losses.relaxed) for t in (LABELS, partial))
    total = total + sum(loss(grid, ALIGNMENTS) for loss in (losses.surrogate, losses.relaxed, losses.alignment_area))
    of_chain, of_grid = torch.autograd.grad(total, (theta, grid.cost))
    assert of_chain.isfinite().all()
    assert not of_chain[~mask].any()
    assert of_grid.isfinite().all()
    assert not of_grid[0, :, 2].any()


def test_learnable_gamma(backend: str) -> None:
    theta = potentials(2, 3, 3, 3)

    def run(gamma: torch.Tensor) -> torch.Tensor:
        p = bx.Chain(theta, lengths=torch.tensor([3, 2]), omega=bx.SquaredL2(gamma))
        q = bx.DTW(theta[:, 0], lengths=LENGTHS, omega=bx.Negentropy(gamma))
        return losses.surrogate(p, LABELS[:2]) + losses.surrogate(q, ALIGNMENTS) + losses.path_nll(q, ALIGNMENTS)

    assert gradcheck(run, torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_and_sign(dtype: torch.dtype, omega: bx.Regularizer, backend: str) -> None:
    emissions, transitions = potentials(8, 12, 5).to(dtype), potentials(5, 5).to(dtype)
    p = bx.Chain.from_scores(emissions * 20, transitions, omega=omega)
    for target in (p.best_sequence(), p.best_sequence().masked_fill(torch.arange(12) < 6, -1)):
        loss = losses.surrogate(p, target, reduction="none")
        assert loss.dtype == torch.float32
        assert (loss >= 0).all()
        assert (losses.relaxed(p, target, reduction="none") >= 0).all()
        assert (losses.path_nll(p, target, reduction="none") >= 0).all()


def test_corners(omega: bx.Regularizer, backend: str) -> None:
    empty = bx.Chain(torch.full((2, 2, 3, 3), math.nan), lengths=torch.tensor([0, 0]), omega=omega)
    for loss in (losses.surrogate, losses.relaxed, losses.path_nll):
        assert torch.equal(loss(empty, torch.zeros(2, 2, dtype=torch.int64), reduction="none"), torch.zeros(2))
        assert loss(bx.Chain(torch.zeros(4, 1, 1), omega=omega), torch.zeros(4, dtype=torch.int64)) == 0  # one state
        assert loss(bx.DTW(torch.zeros(1, 1), omega=omega), torch.ones(1, 1)) == 0
        one_edge = bx.DAG([(0, 1)]).paths(torch.zeros(1), omega=omega)
        assert loss(one_edge, torch.ones(1)) == 0
        assert loss(bx.Chain(torch.zeros(2, 0, 3, 3), omega=omega), torch.zeros(2, 0, dtype=torch.int64)) == 0


def test_func_and_vmap() -> None:
    theta = potentials(4, 3, 3, 3)
    labels = torch.tensor([2, 0, 1])

    def each(t: torch.Tensor) -> torch.Tensor:
        p = bx.Chain(t, omega="l2")
        return losses.surrogate(p, labels) + losses.relaxed(p, labels)

    batch = bx.Chain(theta.requires_grad_(), omega="l2")
    several = labels.expand(4, 3)
    wanted = losses.surrogate(batch, several, reduction="none") + losses.relaxed(batch, several, reduction="none")
    close(torch.func.vmap(each)(theta.detach()), wanted.detach())
    (gradient,) = torch.autograd.grad(wanted.sum(), theta)
    close(torch.func.vmap(torch.func.grad(each))(theta.detach()), gradient)


# --- bad input


def chain_of(**options: Any) -> bx.Chain:
    return bx.Chain(torch.zeros(2, 3, 2, 2), **options)


FORBIDDEN = torch.zeros(2, 3, 2, 2)
FORBIDDEN[1, 2, 1, 0] = -math.inf
SCORED = bx.Chain.from_scores(torch.zeros(2, 3, 2), torch.tensor([[0.0, 0.0], [-math.inf, 0.0]]))
WALL = torch.tensor([[0.0, math.inf], [0.0, 0.0]])
DAG = bx.DAG([(0, 1), (0, 1), (1, 2)]).paths(torch.tensor([0.0, -math.inf, 0.0]))
ZEROS = torch.zeros(2, 3, dtype=torch.int64)
APART = torch.zeros(2, 3, 2, 2)  # two edges (state, previous state) that are not consecutive
APART[:, 0, 0, 0] = APART[:, 1, 0, 1] = APART[:, 2, 0, 0] = 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.surrogate(chain_of(), ZEROS, reduction="max"), "reduction must be one of 'none'.*'max'"),
        (lambda: losses.surrogate(chain_of(), ZEROS[:, :2]), r"target must have shape \(2, 3, 2, 2\).*got \(2, 2\)"),
        (lambda: losses.surrogate(chain_of(), ZEROS.float()), "target must have shape.*float32"),
        (lambda: losses.surrogate(chain_of(), [0, 1]), "target must be a tensor, got list"),
        (lambda: losses.surrogate(chain_of(), ZEROS + 2), "from 0 to 1, .* got 2 at step 0 of sequence 0"),
        (lambda: losses.relaxed(chain_of(), ZEROS - 7), "got -7 at step 0 of sequence 0"),
        (lambda: losses.hamming_cost(chain_of(), torch.zeros(2, 3, 2).bool()), "a state .* at step 0 of sequence 0"),
        (lambda: losses.surrogate(chain_of(), torch.full((2, 3, 2, 2), 0.5)), r"0 and 1, got 0.5 at \(0, 0, 0, 0\)"),
        (
            lambda: losses.surrogate(bx.Chain(FORBIDDEN), torch.tensor([[0, 0, 1], [0, 0, 1]])),
            r"^target\[1, 2\] = 1 is forbidden: potentials\[1, 2, 1, 0\] is -inf$",
        ),
        (
            lambda: losses.relaxed(bx.Chain(FORBIDDEN), torch.tensor([[0, 0, 1], [0, 0, 1]])),
            r"^target\[1, 2\] = 1 is forbidden: potentials\[1, 2, 1, 0\] is -inf$",
        ),
        (lambda: losses.surrogate(SCORED, torch.tensor([[0, 0, 0], [-1, 0, 1]])), r"target\[1, 2\] = 1 is forbidden"),
        (lambda: losses.path_nll(SCORED, torch.tensor([[0, 1, 0], [0, 0, 0]])), r"target\[0, 1\] = 1 is forbidden"),
        (
            lambda: losses.path_nll(bx.Chain(FORBIDDEN, omega="l2"), torch.tensor([[0, 0, 1], [0, 0, 1]])),
            r"target\[1, 2\] = 1 is forbidden",
        ),
        (lambda: losses.surrogate(chain_of(), torch.zeros(2, 3, 2, 2)), r"target\[0, 0\] allows no state$"),
        (lambda: losses.surrogate(chain_of(), APART), r"target\[0, 1\] does not go on from state 0, where .* ends$"),
        (lambda: losses.surrogate(DAG, torch.tensor([0, 1, 1])), "target allows no path of finite score"),
        (lambda: losses.surrogate(DAG, torch.tensor([1, 0, 0])), "target allows no path of finite score"),
        (lambda: losses.relaxed(DAG, torch.tensor([0, 1, 1])), "target allows no path of finite score"),
        (lambda: losses.relaxed(DAG, torch.ones(3)), "target must be a single path"),
        (lambda: losses.surrogate(bx.DTW(WALL), torch.tensor([[0, 0], [0, 1], [1, 1]])), r"cell \(0, 1\) has cost inf"),
        (lambda: losses.relaxed(bx.DTW(WALL), torch.tensor([[0, 0], [0, 1], [1, 1]])), r"cell \(0, 1\) has cost inf"),
        (lambda: losses.surrogate(bx.DTW(WALL), torch.tensor([[0, 0], [2, 1]])), r"target\[1\] must be a cell of"),
        (lambda: losses.surrogate(bx.DTW(WALL), torch.zeros(1, 3, 2).long()), r"got a batch of shape \(1,\)"),
        (lambda: losses.surrogate(bx.DTW(WALL.T), torch.tensor([[0, 1], [1, 1]])), r"must lead from \(0, 0\)"),
        (
            lambda: losses.surrogate(
                bx.DTW(torch.zeros(2, 3, 3), band=0), torch.tensor([[[0, 0], [0, 1], [1, 1], [2, 2]]] * 2)
            ),
            r"target\[0\] allows .* cell \(0, 1\)",
        ),
        (lambda: losses.alignment_area(bx.DTW(WALL), torch.ones(2, 2)), "target must be a single path"),
        (lambda: losses.alignment_area(chain_of(), ZEROS), "p must be a DTW, got Chain"),
        (lambda: losses.surrogate(chain_of(), ZEROS, torch.zeros(3, 2)), r"cost must have shape .*got \(3, 2\)"),
        (lambda: losses.surrogate(chain_of(), ZEROS, -torch.ones(2, 3, 2)), r"at least 0, got -1.0 at \(0, 0, 0\)"),
        (lambda: losses.expected_cost(DAG, torch.zeros(4)), r"cost must have shape \(3,\), got \(4,\)"),
        (lambda: losses.hamming_cost(chain_of(), ZEROS, torch.ones(3)), r"weight must broadcast to \(2, 3, 2\)"),
        (lambda: losses.mean_absolute_deviation(torch.zeros(3), torch.zeros(3)), "a must have shape"),
        (lambda: losses.mean_absolute_deviation(torch.eye(2), torch.eye(3)), "a has none in row 2"),
        (lambda: losses.mean_absolute_deviation(torch.eye(2), torch.ones(4, 2, 2)), "the same batch"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "loss",
    [
        losses.surrogate,
        losses.crf_nll,
        losses.structured_hinge,
        losses.structured_perceptron,
        losses.hamming_cost,
        losses.relaxed,
        losses.expected_cost,
        losses.path_nll,
        losses.alignment_area,
    ],
)
def test_scores_instead_of_a_distribution_are_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"p must be a distribution such as bx\.Chain, got Tensor"):
        loss(torch.randn(4, 3), torch.tensor([0, 1, 1, 2]))


def test_cells_past_the_lengths_are_ignored() -> None:
    p = bx.DTW(torch.zeros(4, 4), lengths=(3, 3))
    pairs = torch.tensor([[0, 0], [1, 0], [1, 1], [2, 2]])
    target = p.alignment_to_path(pairs)
    more = target.clone()
    more[3, 3] = 1
    for loss in (losses.surrogate, losses.path_nll, losses.relaxed, losses.alignment_area):
        expected = loss(p, target)
        for other in (more, more.bool(), pairs):
            torch.testing.assert_close(loss(p, other), expected)
        with pytest.raises(ValueError, match=r"target\[4\] must be a cell of \(3, 3\), got \(3, 3\)"):
            loss(p, torch.cat((pairs, torch.tensor([[3, 3]]))))


def test_deviation_of_other_integers_raises() -> None:
    pairs = torch.tensor([[0, 0], [1, 0], [2, 1]])
    with pytest.raises(ValueError, match=r"must be floating point or bool for paths, .*, got dtype torch.int32"):
        losses.mean_absolute_deviation(pairs.int(), pairs)


# --- labels that mask


LOSSES = [losses.surrogate, losses.relaxed, losses.crf_nll, losses.structured_hinge, losses.path_nll]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("from_scores", [False, True])
def test_minus_100_masks_and_minus_1_is_any(loss: Callable[..., Tensor], from_scores: bool, backend: str) -> None:
    emissions, transitions = potentials(3, STEPS, STATES), potentials(STATES, STATES, seed=1)

    omega = bx.SquaredL2(4.0)
    theta = bx.Chain.from_scores(emissions, transitions).potentials

    def chain(**steps: Any) -> bx.Chain:
        if from_scores:
            return bx.Chain.from_scores(emissions, transitions, omega=omega, **steps)
        return bx.Chain(theta, omega=omega, **steps)

    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]).bool()
    whole, shorter = chain(), chain(mask=mask)
    masked = LABELS.masked_fill(~mask, -100)
    close(loss(whole, masked, reduction="none"), loss(shorter, LABELS, reduction="none"))
    allowed = (LABELS.unsqueeze(-1) == torch.arange(STATES)) | ~mask.unsqueeze(-1)
    close(loss(whole, LABELS.masked_fill(~mask, -1), reduction="none"), loss(whole, allowed, reduction="none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "compiled"), [*((loss, False) for loss in LOSSES), (losses.surrogate, True), (losses.relaxed, True)]
)
def test_a_row_with_all_labels_minus_100(loss: Callable[..., Tensor], compiled: bool) -> None:
    emissions = potentials(4, STEPS, STATES, requires_grad=True)
    transitions = potentials(STATES, STATES, seed=1)
    labels = torch.cat((LABELS, torch.full((1, STEPS), -100)))
    labels[1, 2] = -100

    def run(emissions: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return loss(bx.Chain.from_scores(emissions, transitions), labels, reduction=reduction)

    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    each = run(emissions, labels, "none")
    assert each[3] == 0
    close(run(emissions, labels, "mean"), each[:3].mean())
    close(run(emissions, labels, "token_mean"), each.sum() / 8)
    close(run(emissions, labels, "sum"), each.sum())
    assert run(emissions, torch.full_like(labels, -100), "mean") == 0
    (grad,) = torch.autograd.grad(run(emissions, labels, "mean"), emissions)
    assert not grad[3].any()
    assert grad.isfinite().all()


def test_sequences_of_length_0_are_excluded_from_the_mean() -> None:
    theta = potentials(3, STEPS, STATES, STATES)
    p = bx.Chain(theta, lengths=[2, 0, 3])
    each = losses.surrogate(p, LABELS, reduction="none")
    assert each[1] == 0
    close(losses.surrogate(p, LABELS), each.sum() / 2)
    close(losses.surrogate(p, LABELS, reduction="token_mean"), each.sum() / 5)
    with pytest.raises(ValueError, match="reduction='token_mean' is only for chains, got a DTW"):
        losses.relaxed(bx.DTW(torch.zeros(2, 2)), torch.eye(2), reduction="token_mean")
