"""Chains from scores against dense chains with the summed potentials."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from support.chains import STEP_MASKS, assert_enumerated, steps_of
from support.checks import close
from support.kernels import hessians, needs_kernels, took
from support.problems import for_derivatives, is_one_of_a_kind, one_of_each_kind, potentials, two_kinds
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

import bellmax as bx

STEPS, STATES = 5, 3
MASKS = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
KINDS = {"shared": (STATES, STATES), "sequence": (5, STATES, STATES), "step": (5, STEPS - 1, STATES, STATES)}


def scores(kind: str, missing: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Emissions, transitions, start and end for a batch of five; NaN where a mask skips a step."""
    drawn = [
        potentials(5, STEPS, STATES, seed=1),
        potentials(*KINDS[kind], seed=2),
        potentials(STATES, seed=3),
        potentials(5, STATES, seed=4),
    ]
    for n, tensor in enumerate(drawn):
        tensor[potentials(*tensor.shape, seed=10 + n).sigmoid() < missing] = -math.inf
    drawn[0][~MASKS] = math.nan
    return tuple(drawn)  # type: ignore[return-value]


def added_up(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor, mask: Tensor) -> Tensor:
    """The potentials (K, S, S) of one sequence without its skipped steps."""
    steps, states = mask.nonzero().flatten().tolist(), len(start)
    rows = []
    for n, t in enumerate(steps):
        into = transitions if transitions.ndim == 2 else transitions[t - 1]
        row = into + emissions[t].unsqueeze(-1) if n else (start + emissions[t]).unsqueeze(-1).expand(states, states)
        rows.append(row + end.unsqueeze(-1) if n == len(steps) - 1 else row)
    return torch.stack(rows) if rows else emissions.new_zeros(0, states, states)


def of_sequence(tensors: tuple[Tensor, ...], b: int) -> tuple[Tensor, ...]:
    emissions, transitions, start, end = tensors
    return emissions[b], transitions if transitions.ndim == 2 else transitions[b], start, end[b]


def chain_and_dense_chains(kind: str, missing: float, omega: bx.Regularizer) -> tuple[bx.Chain, list[bx.Chain]]:
    """A batch of five chains from scores, and for each the dense chain of its unmasked steps."""
    tensors = scores(kind, missing)
    emissions, transitions, start, end = tensors
    p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=MASKS, omega=omega)
    return p, [bx.Chain(added_up(*of_sequence(tensors, b), MASKS[b]), omega=omega) for b in range(5)]


with_missing_edges = pytest.mark.parametrize("missing", [0.0, 0.35])
each_kind = pytest.mark.parametrize("kind", KINDS)


@with_missing_edges
@each_kind
def test_values_and_marginals_equal_the_dense_chain(
    kind: str, missing: float, omega: bx.Regularizer, backend: str
) -> None:
    p, dense_chains = chain_and_dense_chains(kind, missing, omega)
    assert p.backend == backend
    assert p.event_shape == (STEPS, STATES, STATES)
    entropy, count = p.entropy(), p.num_paths
    marginals, path, pairs = p.marginals, p.expected_path, p.pairwise_marginals
    assert not marginals[~MASKS].any()
    for b, (steps, dense) in enumerate(zip(MASKS, dense_chains, strict=True)):
        close(p.value[b], dense.value)
        close(marginals[b][steps], dense.marginals)
        close(path[b][steps], dense.expected_path)
        assert not path[b][~steps].any()
        close(entropy[b], dense.entropy())
        close(count[b], dense.num_paths)
        later = steps.clone()
        later[steps.nonzero()[:1]] = False
        close(pairs[b][later[1:]], dense.expected_path[1:])
        assert not pairs[b][~later[1:]].any()


@with_missing_edges
@each_kind
def test_best_paths_equal_the_dense_chain(kind: str, missing: float, omega: bx.Regularizer, backend: str) -> None:
    p, dense_chains = chain_and_dense_chains(kind, missing, omega)
    best_scores, best = p.topk_sequences(4)
    topk_scores, topk_paths = p.topk(4)
    mode, log_prob = p.mode, p.log_prob(p.sequence_to_path(best[:, 0])) if missing == 0 else None
    for b, (steps, dense) in enumerate(zip(MASKS, dense_chains, strict=True)):
        close(mode[b][steps], dense.mode)
        wanted_scores, wanted = dense.topk_sequences(4)
        close(best_scores[b], wanted_scores)
        close(topk_scores[b], wanted_scores)
        assert torch.equal(best[b][:, steps], wanted)
        assert (best[b][:, ~steps] == -1).all()
        close(topk_paths[b][:, steps], dense.sequence_to_path(wanted))
        if log_prob is not None:
            close(log_prob[b], dense.log_prob(dense.best_path()))


@with_missing_edges
@each_kind
def test_support_constraints_and_divergence(kind: str, missing: float, omega: bx.Regularizer, backend: str) -> None:
    p, _ = chain_and_dense_chains(kind, missing, omega)
    listed, probabilities = p.support_paths()
    torch.testing.assert_close(probabilities.sum(0), (p.value > -math.inf).double())
    torch.testing.assert_close((listed * probabilities[..., None, None, None]).sum(0), p.expected_path)
    allowed = potentials(5, STEPS, STATES, seed=8) > -1
    bound, dense_bound = p.constrain(allowed), bx.Chain(p.potentials, mask=MASKS, omega=omega).constrain(allowed)
    torch.testing.assert_close(bound.value, dense_bound.value)
    assert isinstance(bound, type(p))
    assert kl_divergence(p, p).abs().max() < 1e-12


@pytest.mark.parametrize("states", [2, 3])
@pytest.mark.parametrize("padding", STEP_MASKS)
def test_equals_enumeration(padding: str, states: int, omega: bx.Regularizer, backend: str) -> None:
    mask = STEP_MASKS[padding]
    emissions, transitions = potentials(3, 3, states, seed=1), potentials(states, states, seed=2)
    start, end = potentials(states, seed=3), potentials(states, seed=4)
    transitions[0, 1] = -math.inf
    emissions[~mask] = math.nan
    p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, omega=omega, **steps_of(padding))
    assert_enumerated(p, [added_up(emissions[b], transitions, start, end, mask[b]) for b in range(3)], mask)


@for_derivatives
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str, omega: bx.Regularizer, backend: str) -> None:
    generator = potentials(200, seed=5)
    sizes = {"shared": (2, 2), "sequence": (3, 2, 2), "step": (3, 2, 2, 2)}[kind]
    inputs = tuple(
        generator[n * 30 : n * 30 + math.prod(shape)].reshape(shape).clone().requires_grad_()
        for n, shape in enumerate([(3, 3, 2), sizes, (2,), (3, 2)])
    )
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1]]).bool()

    def run(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, ...]:
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=mask, omega=omega)
        return p.value, p.marginals

    fast = backend == "reference" or not is_one_of_a_kind(omega)
    assert gradcheck(run, inputs, check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(run, inputs, fast_mode=True)
    if kind == "shared" and isinstance(omega, bx.Negentropy):
        assert gradcheck(
            lambda *s: bx.Chain.from_scores(s[0], s[1], start=s[2], end=s[3], mask=mask, omega=omega).entropy(),
            inputs,
            fast_mode=fast,
        )


@pytest.mark.slow
@one_of_each_kind
def test_second_derivatives_in_full(omega: bx.Regularizer, backend: str) -> None:
    shapes = (2, 3, 2), (2, 2), (2,), (2, 2)
    inputs = tuple(potentials(*shape, seed=n, requires_grad=True) for n, shape in enumerate(shapes))
    along = potentials(3, 2, seed=9)

    def run(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
        lengths = torch.tensor([3, 2])
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, lengths=lengths, omega=omega)
        if backend == "reference":  # third derivatives of both backends come from the reference
            return p.value
        return p.value + (p.marginals * along).sum((1, 2))

    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_tangents_take_and_return_scores(kind: str, omega: bx.Regularizer, backend: str) -> None:
    inputs = tuple(t.nan_to_num(0).requires_grad_() for t in scores(kind))
    z = tuple(potentials(*t.shape, seed=20 + n) for n, t in enumerate(inputs))
    p = bx.Chain.from_scores(inputs[0], inputs[1], start=inputs[2], end=inputs[3], mask=MASKS, omega=omega)
    gradient = torch.autograd.grad(p.value.sum(), inputs, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(gradient, z, strict=True))
    torch.testing.assert_close(p.directional_derivative(z).sum(), slope)
    wanted = torch.autograd.grad(slope, inputs)
    for product, tensor in zip(p.hessian_product(z), wanted, strict=True):
        torch.testing.assert_close(product, tensor)
    alone = p.hessian_product((z[0], None, None, None))
    torch.testing.assert_close(
        alone[0],
        torch.func.jvp(
            lambda e: (
                bx.Chain.from_scores(e, inputs[1], start=inputs[2], end=inputs[3], mask=MASKS, omega=omega).marginals
            ),
            (inputs[0].detach(),),
            (z[0],),
        )[1].detach(),
    )


def large(batch: int, steps: int, states: int, spread: float = 1.0) -> tuple[Tensor, ...]:
    emissions = potentials(batch, steps, states)
    emissions[potentials(*emissions.shape, seed=1) > 1.8] = -math.inf
    transitions = potentials(states, states, seed=2) * spread
    transitions[potentials(states, states, seed=3) > 1.5] = -math.inf
    start, end = potentials(states, seed=4), potentials(states, seed=5)
    start[0] = -math.inf
    return emissions, transitions, start, end


# Sequences in lanes and states in lanes; in exp space and, if transitions differ widely, in log space.
@needs_kernels
@pytest.mark.parametrize("spread", [1.0, 400.0])
@pytest.mark.parametrize("shape", [(21, 9, 11), (2, 9, 19), (1, 40, 9), (9, 6, 2)])
def test_backends_agree_on_everything(shape: tuple[int, int, int], spread: float, omega: bx.Regularizer) -> None:
    tensors = large(*shape, spread)
    mask = potentials(*shape[:2], seed=7) > -1
    z = tuple(potentials(*t.shape, seed=30 + n) for n, t in enumerate(tensors))
    seed = potentials(shape[0], seed=40)
    results = []
    for backend in ("reference", "native"):
        times = None if backend == "native" else 0
        with (
            bx.use_backend(backend),
            took("scored_chain_forward", times),
            took("scored_chain_backward", times),
            took("scored_chain_hessian", hessians(omega, times)),
            took("scored_chain_topk", times),
            took("scored_chain_sample", times),
        ):
            leaves = tuple(t.clone().requires_grad_() for t in tensors)
            p = bx.Chain.from_scores(leaves[0], leaves[1], start=leaves[2], end=leaves[3], mask=mask, omega=omega)
            value = p.value.masked_fill(p.value == -math.inf, 0)
            gradient = torch.autograd.grad((value * seed).sum(), leaves, retain_graph=True)
            torch.manual_seed(0)
            sequences = (*p.topk_sequences(1), *p.topk_sequences(3), p.sample_sequences((10,)))
            results.append(
                (p.value, *gradient, *p.hessian_product(z), p.directional_derivative(z), p.marginals, *sequences)
            )
    for reference, native in zip(*results, strict=True):
        torch.testing.assert_close(native, reference, rtol=1e-9, atol=1e-9)


def test_sampling_frequencies(omega: bx.Regularizer, backend: str) -> None:
    mask = torch.tensor([[True, True, True], [True, False, True]])
    p = bx.Chain.from_scores(potentials(2, 3, 2), potentials(2, 2, seed=1), mask=mask, omega=omega)
    drawn = p.sample_sequences((20_000,))
    assert torch.equal(drawn >= 0, mask.expand_as(drawn))
    frequency = torch.nn.functional.one_hot(drawn.clamp(min=0), 2).double().mean(0) * mask.unsqueeze(-1)
    assert (frequency - p.marginals).abs().max() < 0.02


def test_padding_gets_no_gradient(omega: bx.Regularizer, backend: str) -> None:
    emissions, transitions, start, end = (t.requires_grad_() for t in scores("step"))
    with torch.no_grad():
        transitions[0, 3] = transitions[3] = math.nan  # a step past the end, and the only step
    mask = MASKS.clone()
    mask[0, 4] = False
    p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=mask, omega=omega)
    loss = p.value.sum() + p.marginals.square().sum()
    gradient = torch.autograd.grad(loss, (emissions, transitions, start, end))
    assert all(g.isfinite().all() for g in gradient)
    assert not gradient[0][~mask].any()
    assert not gradient[1][3].any()
    assert not gradient[1][0, 3].any()


def test_lengths_are_masks(backend: str) -> None:
    emissions, transitions, lengths = potentials(4, 6, 3), potentials(3, 3, seed=1), torch.tensor([6, 0, 3, 1])
    by_length = bx.Chain.from_scores(emissions, transitions, lengths=lengths)
    by_mask = bx.Chain.from_scores(emissions, transitions, mask=torch.arange(6) < lengths.unsqueeze(-1))
    assert torch.equal(by_length.value, by_mask.value)
    assert torch.equal(by_length.marginals, by_mask.marginals)
    assert torch.equal(by_length.best_sequence(), by_mask.best_sequence())
    assert torch.equal(by_mask.lengths, lengths)


def test_one_path_alone(omega: bx.Regularizer, backend: str) -> None:
    cycle = torch.full((4, 4), -math.inf).masked_fill(torch.eye(4).roll(1, 0).bool(), -300.0).requires_grad_()
    start = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])
    emissions = (potentials(2, 30, 4).float() * 100).requires_grad_()
    p = bx.Chain.from_scores(emissions, cycle, start=start, omega=omega)
    path = torch.arange(30) % 4
    assert torch.equal(p.best_sequence(), path.expand(2, 30))
    gradient = torch.autograd.grad(p.value.sum(), (emissions, cycle))
    torch.testing.assert_close(gradient[0], torch.nn.functional.one_hot(path, 4).float().expand(2, 30, 4))
    torch.testing.assert_close(gradient[1].sum(), torch.tensor(2.0 * 29))
    assert all(h.abs().max() < 1e-12 for h in p.hessian_product((emissions, cycle.detach().exp(), None, None)))


@pytest.mark.parametrize("states", [3, 17])
@pytest.mark.parametrize("batch", [1, 20])
def test_transitions_that_spread_over_a_hundred(batch: int, states: int) -> None:
    single = [t.float() for t in large(batch, 40, states, spread=40.0)]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in single]
        p = bx.Chain.from_scores(leaves[0], leaves[1], start=leaves[2], end=leaves[3])
        gradient = torch.autograd.grad(p.value.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(gradient[0].square().sum(), leaves)
        results.append([t.double() for t in (p.value, *gradient, *second)])
    for got, wanted in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("gamma", [1.0, 1e-3])
def test_huge_scales_in_float32(gamma: float, omega: bx.Regularizer, backend: str) -> None:
    scaled: bx.Regularizer = bx.Hard()
    if isinstance(omega, bx.Negentropy):
        scaled = bx.Negentropy(gamma)
    elif isinstance(omega, bx.Tsallis):
        scaled = bx.Tsallis(omega.alpha, gamma)
    emissions = (potentials(3, 20, 5) * 1e4 * gamma).float().requires_grad_()
    p = bx.Chain.from_scores(emissions, (potentials(5, 5, seed=1) * 1e4 * gamma).float(), omega=scaled)
    (gradient,) = torch.autograd.grad(p.value.sum(), emissions)
    best = torch.nn.functional.one_hot(p.best_sequence(), 5).float()
    torch.testing.assert_close(gradient, best, rtol=0, atol=1e-3)
    assert all(h.isfinite().all() for h in p.hessian_product((torch.ones_like(emissions), None, None, None)))


def test_float32_over_4096_steps(backend: str) -> None:
    steps = 4096 if backend == "native" else 256
    emissions, transitions = potentials(steps, 8).float(), potentials(8, 8, seed=1).float()
    single = bx.Chain.from_scores(emissions, transitions).marginals
    double = bx.Chain.from_scores(emissions.double(), transitions.double()).marginals
    assert (single.double() - double).abs().max() < 1e-6
    assert (single.double().sum(-1) - 1).abs().max() < 2e-6


def test_corners(omega: bx.Regularizer, backend: str) -> None:
    def chain(*shape: int) -> bx.Chain:
        return bx.Chain.from_scores(torch.zeros(*shape), torch.zeros(shape[-1], shape[-1]), omega=omega)

    assert chain(1, 1).marginals.tolist() == [[1.0]]
    assert chain(2, 1, 3).best_sequence().tolist() == [[0], [0]]
    empty = chain(0, 3, 2)
    assert empty.value.shape == (0,)
    assert [tuple(t.shape) for t in empty.hessian_product((None,) * 4)] == [(0, 3, 2), (2, 2), (2,), (2,)]
    assert empty.topk_sequences(2)[1].shape == (0, 2, 3)
    assert chain(2, 0, 2).value.tolist() == [0, 0]
    assert chain(2, 0, 2).marginals.shape == (2, 0, 2)
    start = torch.full((2,), -math.inf, requires_grad=True)
    nowhere = bx.Chain.from_scores(torch.zeros(2, 3, 2), torch.zeros(2, 2), start=start, omega=omega)
    assert nowhere.value.tolist() == [-math.inf, -math.inf]
    assert not nowhere.marginals.any()
    assert not nowhere.entropy().any()
    assert (nowhere.best_sequence() == -1).all()
    assert (nowhere.sample_sequences() == -1).all()
    assert not torch.autograd.grad(nowhere.value.sum(), start)[0].any()


@two_kinds
@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_path_in_a_batch(kind: str, batch: int, omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(kind)
    shared = [len(t) != 5 for t in tensors]
    for tensor, for_all in zip(tensors, shared, strict=True):
        if not for_all:
            tensor[1] = -math.inf

    def run(rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients and Hessian products of scores per sequence and of shared scores, for some rows."""
        leaves = [(t if s else t[rows]).clone().requires_grad_() for t, s in zip(tensors, shared, strict=True)]
        z = [t.detach().nan_to_num(1.0, neginf=2.0) for t in leaves]
        p = bx.Chain.from_scores(leaves[0], leaves[1], start=leaves[2], end=leaves[3], mask=MASKS[rows], omega=omega)
        gradient = torch.autograd.grad(p.value.sum(), leaves, create_graph=True)
        slope = sum((g * d).sum() for g, d in zip(gradient, z, strict=True))
        second = torch.autograd.grad(slope, leaves, retain_graph=True)
        derivatives = list(zip((*gradient, *second, *p.hessian_product(z)), shared * 3, strict=True))
        layers = [p.value, p.best_sequence(), p.marginals, p.expected_path, p.directional_derivative(z), p.entropy()]
        return layers + [t for t, s in derivatives if not s], [t for t, s in derivatives if s]

    rows = torch.arange(batch) % 5
    others = rows != 1
    (separate, common), (separate_wanted, common_wanted) = run(rows), run(rows[others])
    value, best, *rest = (result[~others] for result in separate)
    assert (value == -math.inf).all()
    assert (best == -1).all()
    assert not any(result.any() for result in rest)
    torch.testing.assert_close([result[others] for result in separate], separate_wanted)
    torch.testing.assert_close(common, common_wanted)


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_empty_sequences_give_no_gradient(batch: int, omega: bx.Regularizer, backend: str) -> None:
    lengths = torch.arange(batch) % 3
    end = potentials(batch, 3, seed=2).requires_grad_()
    p = bx.Chain.from_scores(potentials(batch, 4, 3), potentials(3, 3, seed=1), end=end, lengths=lengths, omega=omega)
    (gradient,) = torch.autograd.grad(p.value.sum(), end)
    torch.testing.assert_close(gradient.sum(-1), (lengths > 0).double())
    assert not p.hessian_product((None, None, None, end.detach()))[3][lengths == 0].any()
    assert bx.Chain.from_scores(torch.zeros(2, 0, 3), torch.zeros(3, 3)).sample_sequences((4,)).shape == (4, 2, 0)


def test_in_place_changes_are_seen_or_have_no_effect(backend: str) -> None:
    emissions, transitions, lengths = potentials(2, 5, 3), potentials(3, 3, seed=1), torch.tensor([2, 5])
    gamma = torch.tensor(1.0, dtype=torch.float64)
    p = bx.Chain.from_scores(emissions, transitions, lengths=lengths, omega=bx.Negentropy(gamma))
    before = p.value
    lengths[0] = 5
    assert torch.equal(p.value, before)
    gamma += 1
    transitions += 1
    fresh = bx.Chain.from_scores(
        emissions, transitions, lengths=torch.tensor([2, 5]), omega=bx.Negentropy(gamma.clone())
    )
    torch.testing.assert_close(p.value, fresh.value)
    torch.testing.assert_close(p.marginals, fresh.marginals)


@two_kinds
@pytest.mark.parametrize("states", [2, 8, 40])
def test_one_step_has_no_transitions(states: int, omega: bx.Regularizer, backend: str) -> None:
    emissions, empty = potentials(3, 1, states), torch.zeros(3, 0, states, states, dtype=torch.float64)
    for transitions in (potentials(states, states, seed=1), empty.requires_grad_()):
        p = bx.Chain.from_scores(emissions, transitions, omega=omega)
        at_vertex = omega.gamma * omega.penalty(emissions.new_ones(1))  # at the node of the step, which has one parent
        torch.testing.assert_close(p.value, omega.max(emissions[:, 0]) - at_vertex)
        torch.testing.assert_close(p.expected_path[:, 0, :, 0], omega.argmax(emissions[:, 0]))
        assert torch.equal(p.best_sequence(), p.best_path()[:, :, :, 0].argmax(-1))
        z = potentials(3, 1, states, seed=2)
        product = torch.func.jvp(lambda x: omega.argmax(x[:, 0]), (emissions,), (z,))[1]
        torch.testing.assert_close(p.hessian_product(z)[0][:, 0], product)
    p.value.sum().backward()
    assert empty.grad is not None


def test_entropy_with_masks_of_the_lowest_number(backend: str) -> None:
    """Rounding leaves probabilities of 1e-308, which times such a score are not small."""
    low = torch.finfo(torch.float64).min
    emissions = torch.tensor([[-10.0, 1.4], [8.5, 33.3]], dtype=torch.float64)
    transitions = torch.tensor([[0.1, low], [-0.1, -0.2]], dtype=torch.float64)
    end = torch.tensor([0.2, low], dtype=torch.float64)
    p = bx.Chain.from_scores(emissions, transitions, end=end, gamma=4.0)  # one path without a mask
    torch.testing.assert_close(p.entropy(), torch.zeros((), dtype=torch.float64))


def test_entropy_with_huge_scores(backend: str) -> None:
    emissions = torch.zeros(1, 4, 3)
    emissions[0, 2] = -1e30
    p = bx.Chain.from_scores(emissions, torch.full((3, 3), 1e20), start=torch.full((3,), 1e25))
    torch.testing.assert_close(p.entropy(), torch.tensor([4 * math.log(3)]))


def test_scores_that_are_not_used_may_be_nan(backend: str) -> None:
    transitions = potentials(2, 1, 3, 3)
    transitions[0] = math.nan
    p = bx.Chain.from_scores(potentials(2, 2, 3), transitions, lengths=torch.tensor([1, 2]))
    assert p.value.isfinite().all()
    alone = bx.Chain.from_scores(potentials(2, 1, 3), torch.full((3, 3), math.nan, dtype=torch.float64))
    assert alone.value.isfinite().all()


def test_strides_batches_and_dtypes(omega: bx.Regularizer, backend: str) -> None:
    emissions, transitions = potentials(3, 4, 2, 5).permute(2, 0, 3, 1), potentials(4, 4, seed=1).T
    p = bx.Chain.from_scores(emissions, transitions.float(), omega=omega)
    assert p.batch_shape == (2, 3)
    assert p.dtype == torch.float64
    assert p.emissions is emissions
    assert p.transitions.shape == (4, 4)
    copy = bx.Chain.from_scores(emissions.contiguous(), transitions.float().double().contiguous(), omega=omega)
    assert torch.equal(p.value, copy.value)
    assert torch.equal(p.marginals, copy.marginals)
    half = bx.Chain.from_scores(emissions.half(), transitions.half(), omega=omega)
    assert half.value.dtype == torch.float32
    assert half.marginals.dtype == torch.float16
    expanded = bx.Chain.from_scores(potentials(4).expand(2, 5, 4), potentials(4).expand(2, 4, 4), omega=omega)
    torch.testing.assert_close(expanded.marginals.sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_gamma_of_a_batch(backend: str) -> None:
    emissions, transitions, start, end = scores("shared")
    gamma = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3], dtype=torch.float64, requires_grad=True)

    def run(g: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        p = bx.Chain.from_scores(emissions, t, start=start, end=end, mask=MASKS, omega=bx.Negentropy(g))
        return p.value, p.marginals, p.entropy(), p.hessian_product((None, t, None, None))[1]

    assert gradcheck(run, (gamma, transitions.requires_grad_()), fast_mode=True)


def test_vmap_and_compile(backend: str) -> None:
    emissions, transitions = potentials(6, 2, 4, 3), potentials(3, 3, seed=1)
    p = bx.Chain.from_scores(emissions, transitions, omega="l2")
    mapped = torch.func.vmap(lambda e: bx.Chain.from_scores(e, transitions, omega="l2").value)(emissions)
    torch.testing.assert_close(mapped, p.value)
    each = torch.func.vmap(torch.func.grad(lambda t, e: bx.Chain.from_scores(e, t, omega="l2").value.sum()), (None, 0))
    whole = torch.func.grad(lambda t: bx.Chain.from_scores(emissions, t, omega="l2").value.sum())
    torch.testing.assert_close(each(transitions, emissions).sum(0), whole(transitions))
    jacobian = torch.func.jacrev(lambda t: bx.Chain.from_scores(emissions[0], t).marginals)(transitions)
    forward = torch.func.jacfwd(lambda t: bx.Chain.from_scores(emissions[0], t).marginals)(transitions)
    torch.testing.assert_close(jacobian, forward)

    def loss(e: Tensor, t: Tensor) -> Tensor:
        return bx.Chain.from_scores(e, t, lengths=torch.tensor([4, 2]), omega="l2").marginals.square().sum()

    leaves = emissions[0].clone().requires_grad_(), transitions.clone().requires_grad_()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_results_do_not_depend_on_the_run() -> None:
    emissions, transitions = potentials(50, 30, 9).float(), potentials(9, 9, seed=1).float().requires_grad_()
    for omega in ("negentropy", "l2"):
        runs = [
            torch.autograd.grad(bx.Chain.from_scores(emissions, transitions, omega=omega).value.sum(), transitions)[0]
            for _ in range(5)
        ]
        assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.slow
@needs_kernels
def test_a_quarter_of_a_million_steps_train_under_a_quarter_of_a_gigabyte() -> None:
    if sys.platform != "linux":
        pytest.skip("peak memory is read from Linux")
    program = """
import resource, torch, bellmax as bx
emissions, transitions = torch.randn(250_000, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bx.Chain.from_scores(emissions, transitions).value.backward()
bx.Chain.from_scores(emissions, transitions, omega="l2").value.backward()
potentials = torch.randn(250_000, 8, 8, requires_grad=True)
bx.Chain(potentials).value.backward()
assert emissions.grad.isfinite().all() and potentials.grad.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 250_000  # KB; the dense potentials and their gradient would need 64 MB each


@pytest.mark.parametrize("steps", [4, 5])
def test_a_tensor_as_direction_is_a_direction_of_the_emissions(steps: int, backend: str) -> None:
    p = bx.Chain.from_scores(potentials(steps, 3), potentials(3, 3))
    z = potentials(steps, 3, seed=1)
    for bare, whole in zip(p.hessian_product(z), p.hessian_product((z, None, None, None)), strict=True):
        assert bare.equal(whole)
    assert p.directional_derivative(z).equal(p.directional_derivative((z, None, None, None)))
    batch = bx.Chain.from_scores(potentials(4, 2, 3), potentials(3, 3))  # four sequences, not four scores
    assert batch.hessian_product(potentials(4, 2, 3))[0].shape == (4, 2, 3)


def test_bad_input_is_named(backend: str) -> None:
    emissions, transitions = torch.zeros(2, 5, 3), torch.zeros(3, 3)
    bad = emissions.clone()
    bad[1, 2, 0] = math.nan
    make = bx.Chain.from_scores
    for wrong, message in [
        (lambda: make(torch.zeros(3), transitions), r"emissions must have shape \(\.\.\., T, S\).* got \(3,\)"),
        (lambda: make(emissions, torch.zeros(4, 4)), r"transitions must have shape \(3, 3\) or .*, got \(4, 4\)"),
        (lambda: make(emissions, transitions, start=torch.zeros(4)), r"start must have shape \(3,\) or \(2, 3\), got"),
        (lambda: make(emissions, transitions, end=torch.zeros(1, 3)), r"end must have shape .*, got \(1, 3\)"),
        (lambda: make(emissions.long(), transitions), "emissions must be floating point, got dtype torch.int64"),
        (
            lambda: make(emissions, transitions, mask=torch.ones(2, 5)),
            "mask must be bool, or integers 0 and 1, .*, got dtype torch.float32",
        ),
        (
            lambda: make(emissions, transitions, mask=torch.ones(5) > 0),
            r"mask must have shape \(2, 5\), got \(5,\)",
        ),
        (
            lambda: make(emissions, transitions, mask=torch.ones(2, 5) > 0, lengths=torch.tensor([1, 2])),
            "pass either lengths or mask, not both",
        ),
        (
            lambda: make(emissions, transitions, lengths=torch.tensor([1, 6])).value,
            "lengths must be from 0 to 5, got 6 for batch element 1",
        ),
        (lambda: make(bad, transitions).value, r"emissions .*got nan at event index \(2, 0\) of batch element 1"),
        (lambda: make(bad, transitions).best_sequence(), r"emissions .*got nan at event index \(2, 0\)"),
        (lambda: make(emissions, transitions + math.inf).value, "transitions must be finite or -inf, got inf"),
        (lambda: make(emissions, transitions, end=torch.full((3,), math.nan)).value, "end must be finite or -inf"),
        (
            lambda: make(emissions, transitions).hessian_product((None, torch.zeros(2, 3, 3), None, None)),
            r"transitions of z must broadcast to .*\(3, 3\), got \(2, 3, 3\)",
        ),
        (
            lambda: make(emissions, transitions).sequence_to_path(torch.full((5,), 7)),
            "sequence must hold states from 0 to 2, or -1, got 7",
        ),
        (lambda: make(emissions, transitions).hessian_product((emissions,)), "z must be a tuple "),
        (lambda: make(emissions, transitions).hessian_product(torch.zeros(4)), "emissions of z must broadcast to"),
        (
            lambda: make(emissions, transitions).hessian_product((torch.zeros(7), None, None, None)),
            r"emissions of z must broadcast to .*\(2, 5, 3\), got \(7,\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def tied(kind: str, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Emissions, transitions, start and end of 32 chains, most of which have several best sequences."""
    drawn = [potentials(*shape, seed=seed + n) for n, shape in enumerate(((32, 7, 3), (3, 3), (3,), (3,)))]
    return [{"integers": (2 * x).round(), "tenths": (4 * x).round() / 10, "normal": x}[kind].to(dtype) for x in drawn]


# Sums of tenths are rounded; in half precision, sums in float32 are exact.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in ("integers", "normal") for dtype in (torch.float32, torch.float64)]
    + [("tenths", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)],
)
@pytest.mark.parametrize("name", ["hard", "l2", "negentropy"])
def test_every_verb_of_one_program(name: str, kind: str, dtype: torch.dtype, backend: str) -> None:
    for seed in range(3):
        emissions, transitions, start, end = tied(kind, dtype, seed)
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, omega=name)
        best = p.best_path()
        assert best.equal(p.sequence_to_path(p.best_sequence()))
        assert p.topk(1)[1].squeeze(1).equal(best)
        samples = p.sample((4,))
        assert p.log_prob(samples).isfinite().all()
        assert (p.expected_path.expand_as(samples)[samples > 0] > 0).all()
        close(p.expected_path.sum(-1).float(), p.marginals.float(), 1e-5 if dtype.itemsize > 2 else 5e-3)
        if name == "hard":
            assert p.log_prob(best).eq(0).all()
            assert p.mode.equal(best)
            assert p.expected_path.equal(best)
            assert p.topk(1)[0].squeeze(1).equal(p.value)
            assert p.entropy().eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float32_program_of_the_rounded_scores(dtype: torch.dtype, backend: str) -> None:
    drawn = [potentials(*shape, seed=n).to(dtype) for n, shape in enumerate(((4, 50, 5), (5, 5), (5,), (5,)))]
    for omega in bx.Negentropy(), bx.SquaredL2(), bx.Tsallis(1.5):
        p, exact = (
            bx.Chain.from_scores(e, t, start=s, end=n, omega=omega)
            for e, t, s, n in (drawn, [x.float() for x in drawn])
        )
        path = exact.sample()
        assert p.log_prob(path).dtype == torch.float32
        close(p.log_prob(path), exact.log_prob(path), 1e-4)
        close(p.entropy(), exact.entropy(), 1e-4)
        close(p.topk(3)[0], exact.topk(3)[0], 1e-4)
        close(p.expected_path.float(), exact.expected_path, 5e-3)


def test_scores_that_add_up_to_more_than_float16_holds(backend: str) -> None:
    emissions, transitions = torch.full((5, 2), 40000.0).half(), torch.full((2, 2), 40000.0).half()
    p = bx.Chain.from_scores(emissions, transitions)
    close(p.value, torch.tensor(360000.0), 1e-4)
    close(p.topk(1)[0], torch.tensor([360000.0]), 1e-6)
    close(p.log_prob(p.sample()), torch.tensor(-5 * math.log(2)), 1e-5)
    close(p.expected_path.sum((-1, -2)), torch.ones(5).half(), 1e-3)
    assert p.potentials.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_stays_within_its_bounds_if_every_path_is_masked(dtype: torch.dtype, backend: str) -> None:
    steps, states = 4, 2
    for seed in range(10):
        drawn = [potentials(32, steps, states, seed=seed), potentials(32, states, states, seed=seed + 1)]
        emissions, transitions = (x.masked_fill(x < 0.1, -1e30).to(dtype) for x in drawn)
        entropy = bx.Chain.from_scores(emissions, transitions).entropy()
        assert (entropy > -1e-6).all()
        assert (entropy <= steps * math.log(states) + 1e-5).all()


@needs_kernels
def test_paths_and_their_probabilities_need_no_second_sweep() -> None:
    emissions = potentials(2, 5, 3, requires_grad=True)
    p = bx.Chain.from_scores(emissions, potentials(3, 3), omega="l2")
    with took("scored_chain_forward", times=1), took("chain_forward", times=0):
        p.value.sum().backward()
        _ = p.expected_path, p.entropy(), p.log_prob(p.sample())
