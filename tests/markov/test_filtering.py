"""Filtering against distributions over the steps so far, forecasts against powers of matrices and enumeration."""

from __future__ import annotations

import io
import itertools
import math
import pickle

import pytest
import torch
from support.problems import two_kinds
from torch import Tensor

import bellmax as bx
from bellmax.markov.filtering import Filter, FilterState, log_survival

STATES, LONGEST = 3, 4
with_and_without_durations = pytest.mark.parametrize("has_durations", [False, True], ids=["", "durations"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model:
    """A process with random scores, as a filter and as a distribution over the steps of a sequence."""

    def __init__(self, omega: bx.Regularizer, has_durations: bool, states: int = STATES) -> None:
        self.omega = omega
        self.start = random(states, seed=1).log_softmax(-1)
        logits = random(states, states, seed=2)
        if has_durations:
            logits.fill_diagonal_(-math.inf)
        self.transitions = logits.log_softmax(0)
        self.durations = random(LONGEST, states, seed=3).log_softmax(0) if has_durations else None
        self.last = None if self.durations is None else log_survival(self.durations)

    @property
    def filter(self) -> Filter:
        return Filter(
            self.start, self.transitions, omega=self.omega, durations=self.durations, last_durations=self.last
        )

    def over(self, emissions: Tensor) -> bx.Chain | bx.SemiMarkov:
        if self.durations is None:
            return bx.Chain.from_scores(emissions, self.transitions, start=self.start, omega=self.omega)
        return bx.SemiMarkov.from_scores(
            emissions, self.durations, self.transitions, start=self.start, last_durations=self.last, omega=self.omega
        )

    def check(self, emissions: Tensor) -> None:
        """Compare value and posterior with the distribution over the first t steps, for every t."""
        state = self.filter.start(emissions.shape[:-2])
        _, posterior = self.filter.filter(emissions, state)
        for t in range(emissions.shape[-2]):
            p = self.over(emissions[..., : t + 1, :])
            state, _ = self.filter.filter(emissions[..., t : t + 1, :], state)
            torch.testing.assert_close(posterior[..., t, :], p.marginals[..., -1, :])
            torch.testing.assert_close(state.value, p.value)


def same(a: FilterState, b: FilterState, tolerance: float = 1e-12) -> None:
    """Compare states. Their offsets may differ."""
    torch.testing.assert_close(a.value, b.value, rtol=tolerance, atol=tolerance)
    absolute = [s.scores + s.offset.reshape(s.offset.shape + (1,) * (s.scores.ndim - s.offset.ndim)) for s in (a, b)]
    torch.testing.assert_close(*absolute, rtol=tolerance, atol=tolerance)


# --- the definition


@with_and_without_durations
def test_equals_the_last_step_of_the_distribution_so_far(
    omega: bx.Regularizer, has_durations: bool, backend: str
) -> None:
    Model(omega, has_durations).check(2 * random(2, 6, STATES, seed=4))


@with_and_without_durations
@pytest.mark.parametrize("shape", [(), (2,)])
def test_gamma_as_a_tensor(shape: tuple[int, ...], has_durations: bool) -> None:
    gamma = torch.tensor([0.4, 1.7]) if shape else torch.tensor(0.6)
    for omega in (bx.Negentropy(gamma), bx.SquaredL2(gamma), bx.Tsallis(1.5, gamma.requires_grad_())):
        model = Model(omega, has_durations)
        model.check(random(2, 5, STATES, seed=4))
        assert not model.filter.start((2,)).scores.requires_grad


class Gini(bx.Regularizer):
    """Sparsemax without kernels."""

    def penalty(self, q: Tensor) -> Tensor:
        return (q.square().sum(-1) - 1) / 2

    def project(self, x: Tensor) -> Tensor:
        return bx.Tsallis(2).project(x)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return bx.Tsallis(2).jacobian_product(q, y)


@with_and_without_durations
def test_own_omega(has_durations: bool) -> None:
    Model(Gini(0.7), has_durations).check(random(2, 4, STATES, seed=4))


def test_one_state() -> None:
    for omega in (bx.Negentropy(), bx.SquaredL2()):
        Model(omega, False, states=1).check(random(2, 4, 1, seed=4))


# --- chunks


@with_and_without_durations
@pytest.mark.parametrize("sizes", [[1] * 12, [0, 5, 0, 7, 0], [11, 1], [4, 3, 5]], ids=str)
def test_chunks_equal_the_whole(sizes: list[int], omega: bx.Regularizer, has_durations: bool) -> None:
    model, emissions = Model(omega, has_durations), 3 * random(2, 12, STATES, seed=5)
    whole, posterior = model.filter.filter(emissions, model.filter.start((2,)))
    state, chunks = model.filter.start((2,)), []
    for chunk in emissions.split(sizes, -2):
        state, probabilities = model.filter.filter(chunk, state)
        chunks.append(probabilities)
    torch.testing.assert_close(torch.cat(chunks, -2), posterior, rtol=1e-12, atol=1e-12)
    same(state, whole)


@two_kinds
@with_and_without_durations
def test_ragged_chunks_equal_each_stream_alone(omega: bx.Regularizer, has_durations: bool, backend: str) -> None:
    model, lengths = Model(omega, has_durations), torch.tensor([[4, 0, 2], [1, 3, 0], [0, 4, 4]])
    state, emissions = model.filter.start((3,)), random(3, 3, 4, STATES, seed=6)  # chunk, stream, step
    posteriors = []
    for n, chunk in zip(lengths, emissions, strict=True):
        padded = chunk.masked_fill((torch.arange(4) >= n.unsqueeze(-1)).unsqueeze(-1), math.nan)
        state, posterior = model.filter.filter(padded, state, n)
        posteriors.append(posterior)
    for stream, n in enumerate(lengths.T.tolist()):
        whole = torch.cat([emissions[c, stream, :k] for c, k in enumerate(n)])
        wanted, posterior = model.filter.filter(whole, model.filter.start())
        same(FilterState(*(tensor[stream] for tensor in state)), wanted)
        torch.testing.assert_close(torch.cat([posteriors[c][stream, :k] for c, k in enumerate(n)]), posterior)
        assert not any(posteriors[c][stream, k:].any() for c, k in enumerate(n))


@with_and_without_durations
def test_long_streams_keep_their_precision(has_durations: bool) -> None:
    """After a value of 1e9, the posterior of the next steps is the same as at the start of a stream."""
    model = Model(bx.Negentropy(), has_durations)
    emissions = random(1, 20, STATES, seed=7).float()
    state, posterior = model.filter.filter(emissions, model.filter.start((1,)))
    far, far_posterior = model.filter.filter(emissions, model.filter.start((1,))._replace(offset=torch.tensor([1e9])))
    assert far_posterior.equal(posterior)
    assert far.scores.equal(state.scores)
    assert state.scores.abs().amax() < 100


def test_many_steps() -> None:
    model = Model(bx.Negentropy(), False)
    emissions = 5 * random(100_000, STATES, seed=8).float() - 20
    state, posterior = model.filter.filter(emissions, model.filter.start())
    torch.testing.assert_close(posterior.sum(-1), torch.ones(100_000))
    torch.testing.assert_close(state.value, model.over(emissions.double()).value)
    torch.testing.assert_close(posterior[-1].double(), model.over(emissions[-500:].double()).marginals[-1])


# --- forecasts


def test_log_survival_and_its_gradient() -> None:
    logits = 5 * random(5, STATES, seed=3)
    logits[1, 0] = logits[3:, 1] = logits[0, 2] = -math.inf
    logits.requires_grad_()
    got = log_survival(logits.log_softmax(0))
    wanted = torch.stack([logits.softmax(0)[d:].sum(0) for d in range(5)])
    torch.testing.assert_close(got, wanted.log())
    weights, is_zero = random(5, STATES, seed=4), wanted == 0
    (grad,) = torch.autograd.grad((got.masked_fill(is_zero, 0) * weights).sum(), logits)
    (wanted_grad,) = torch.autograd.grad((wanted.masked_fill(is_zero, 1).log() * weights).sum(), logits)
    torch.testing.assert_close(grad, wanted_grad)


def test_forecast_is_the_posterior_times_powers_of_the_transitions() -> None:
    model = Model(bx.Negentropy(), False)
    state, posterior = model.filter.filter(random(2, 5, STATES, seed=9), model.filter.start((2,)))
    powers = [posterior[:, -1] @ torch.linalg.matrix_power(model.transitions.exp().T, n) for n in range(1, 8)]
    torch.testing.assert_close(model.filter.forecast(state, 7), torch.stack(powers, -2))
    assert model.filter.forecast(state, 0).shape == (2, 0, STATES)
    first = model.filter.forecast(model.filter.start((2,)), 1)
    torch.testing.assert_close(first, model.start.exp().expand(2, 1, -1))


def test_forecast_with_durations_by_enumeration() -> None:
    model, seen, ahead = Model(bx.Negentropy(), True), 3, 4
    assert model.durations is not None
    assert model.last is not None
    emissions = random(seen, STATES, seed=10)
    wanted = torch.zeros(ahead, STATES, dtype=torch.float64)
    for labels in itertools.product(range(STATES), repeat=seen + ahead):
        runs = [(label, len(list(run))) for label, run in itertools.groupby(labels)]
        if max(size for _, size in runs) > LONGEST:
            continue
        score = model.start[runs[0][0]] + sum(emissions[t, labels[t]] for t in range(seen))
        score = score + sum(model.durations[size - 1, label] for label, size in runs[:-1])
        score = score + model.last[runs[-1][1] - 1, runs[-1][0]]
        score = score + sum(model.transitions[b, a] for (a, _), (b, _) in itertools.pairwise(runs))
        for t in range(ahead):
            wanted[t, labels[seen + t]] += score.exp()
    state, _ = model.filter.filter(emissions, model.filter.start())
    torch.testing.assert_close(model.filter.forecast(state, ahead), wanted / wanted[0].sum())


@with_and_without_durations
def test_forecast_is_filtering_without_observations(omega: bx.Regularizer, has_durations: bool) -> None:
    model, emissions = Model(omega, has_durations), random(2, 3, STATES, seed=11)
    state, _ = model.filter.filter(emissions, model.filter.start((2,)))
    for steps in (1, 4):
        p = model.over(torch.nn.functional.pad(emissions, (0, 0, 0, steps)))
        torch.testing.assert_close(model.filter.forecast(state, steps)[:, -1], p.marginals[:, -1])


# --- geometric durations


@pytest.mark.parametrize("steps", [1, 6])
def test_geometric_durations_equal_self_transitions(steps: int) -> None:
    model, emissions = Model(bx.Negentropy(), False), random(2, steps, STATES, seed=12)
    stay = model.transitions.diagonal().exp()
    leave = model.transitions.clone().fill_diagonal_(-math.inf).log_softmax(0)
    elapsed = torch.arange(steps + 3, dtype=torch.float64).unsqueeze(-1)
    last = elapsed * stay.log()
    explicit = Filter(model.start, leave, omega=model.omega, durations=last + (1 - stay).log(), last_durations=last)
    state, posterior = model.filter.filter(emissions, model.filter.start((2,)))
    other, other_posterior = explicit.filter(emissions, explicit.start((2,)))
    torch.testing.assert_close(other_posterior, posterior)
    torch.testing.assert_close(other.value, state.value)
    torch.testing.assert_close(explicit.forecast(other, 3), model.filter.forecast(state, 3))


# --- no path, and bad input


@with_and_without_durations
def test_forbidden_transitions_and_impossible_steps(omega: bx.Regularizer, has_durations: bool) -> None:
    model, emissions = Model(omega, has_durations), random(3, 5, STATES, seed=13)
    model.start[0] = model.transitions[2, 0] = model.transitions[0, 1] = -math.inf
    emissions[1, 2] = -math.inf  # no path from here
    emissions[2, 3, 1] = -math.inf
    model.check(emissions)
    state, posterior = model.filter.filter(emissions, model.filter.start((3,)))
    assert not posterior.isnan().any()
    assert (posterior[:, 0, 0] == 0).all()
    assert not posterior[1, 2:].any()
    assert (posterior[2, 3, 1] == 0).all()
    torch.testing.assert_close(posterior[0].sum(-1), torch.ones(5, dtype=torch.float64))
    assert state.value[1] == -math.inf
    later, none = model.filter.filter(emissions, state)
    assert not none[1].any()
    assert later.value[1] == -math.inf
    assert later.value[[0, 2]].isfinite().all()
    assert not model.filter.forecast(state, 3)[1].any()
    assert not later.scores.isnan().any()


def test_a_segment_that_cannot_end_yet() -> None:
    """Without ``last_durations``, the last segment must be complete. A stream may have no path now and one later."""
    durations = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]])  # all segments have two steps
    process = Filter(torch.zeros(2), torch.zeros(2, 2), omega=bx.Negentropy(), durations=durations)
    state, values = process.start(), []
    for _ in range(4):
        state, _ = process.filter(torch.zeros(1, 2), state)
        values.append(state.value.exp().item())
    assert values == pytest.approx([0, 2, 0, 4])


@with_and_without_durations
def test_bad_input(has_durations: bool) -> None:
    process = Model(bx.Negentropy(), has_durations).filter
    state, emissions = process.start((2,)), torch.zeros(2, 3, STATES)
    for bad in (process.start(), process.start((3,))):
        with pytest.raises(ValueError, match=r"state must have scores of shape \(2, .* of shape \(2, 3, 3\), got"):
            process.filter(emissions, bad)
    for call in (lambda: process.filter(emissions, None), lambda: process.forecast(None, 1)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"state must be the result of start\(\) or filter\(\), got NoneType"):
            call()
    for lengths in ([1, 2, 3], [[1], [2]]):
        with pytest.raises(ValueError, match=r"lengths must have the batch shape \(2,\), got"):
            process.filter(emissions, state, lengths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths must be from 0 to 3, got 4 for batch element 1"):
        process.filter(emissions, state, [0, 4])
    for number in (math.nan, math.inf):
        emissions[1, 1, 0] = number
        with pytest.raises(ValueError, match="emissions must be finite or -inf, got"):
            process.filter(emissions, state)
    with pytest.raises(ValueError, match="state must be on the device of the emissions, meta, got cpu"):
        process.filter(torch.zeros(2, 3, STATES, device="meta"), state)


@with_and_without_durations
def test_states_are_saved_and_moved(has_durations: bool) -> None:
    process = Model(bx.Negentropy(), has_durations).filter
    emissions = random(2, 3, STATES, seed=14).requires_grad_()
    state, _ = process.filter(emissions, process.start((2,)))
    assert not any(tensor.requires_grad for tensor in state)
    assert state.to("meta").scores.is_meta
    file = io.BytesIO()
    torch.save(tuple(state), file)
    file.seek(0)
    for copy in (pickle.loads(pickle.dumps(state)), FilterState(*torch.load(file)), state.to("cpu")):
        assert process.filter(emissions, copy)[1].equal(process.filter(emissions, state)[1])
