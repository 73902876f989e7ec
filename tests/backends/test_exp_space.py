"""Chains from scores under negentropy in exp space, for every layout of the kernels, against the reference."""

import math

import pytest
import torch
from support.kernels import needs_kernels, took

import bellmax as bx

pytestmark = needs_kernels


def scores(batch, steps, states, dtype=torch.float64):
    torch.manual_seed(batch + 10 * steps + 100 * states)
    return [
        torch.randn(shape, dtype=dtype) for shape in ((batch, steps, states), (states, states), (states,), (states,))
    ]


def results(tensors, backend, **more):
    """Value with and without a tape, gradient, and the derivative of a function of the gradient."""
    with bx.use_backend(backend), took("scored_chain_forward", None if backend == "native" else 0):
        plain = bx.Chain.from_scores(tensors[0], tensors[1], start=tensors[2], end=tensors[3], **more).value
        leaves = [t.clone().requires_grad_() for t in tensors]
        value = bx.Chain.from_scores(leaves[0], leaves[1], start=leaves[2], end=leaves[3], **more).value
        torch.testing.assert_close(plain, value, rtol=0, atol=0)
        weights = torch.linspace(-1, 2, len(value), dtype=value.dtype)
        finite = value.masked_fill(value == -math.inf, 0)
        gradient = torch.autograd.grad((finite * weights).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradient), leaves)
    return [t.detach() for t in (value, *gradient, *second)]


def assert_agree(tensors, tolerance=1e-10, **more):
    for native, reference in zip(
        results(tensors, "native", **more), results(tensors, "reference", **more), strict=True
    ):
        torch.testing.assert_close(native, reference, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Sizes around the block sizes of the layouts: 1, 4, the number of lanes, and four times that.
@pytest.mark.parametrize("states", [1, 2, 3, 9, 17])
@pytest.mark.parametrize("batch", [1, 4, 5, 8, 9, 34, 70])
def test_every_layout(batch, states, threads):
    assert_agree(scores(batch, 11, states))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 70, 33), (6, 35, 20), (9, 35, 16), (40, 35, 5), (70, 67, 3)])
def test_unequal_lengths_and_holes(shape, threads):
    tensors = scores(*shape)
    batch, steps, _ = shape
    lengths = torch.randint(0, steps + 1, (batch,))
    assert_agree(tensors, lengths=lengths)
    mask = (torch.rand(batch, steps) > 0.3) & (torch.arange(steps) < lengths.unsqueeze(-1))
    tensors[0][~mask] = math.nan
    assert_agree(tensors, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 40])
@pytest.mark.parametrize("states", [3, 20])
def test_states_that_cannot_be_reached(batch, states, threads):
    emissions, transitions, start, end = scores(batch, 30, states)
    transitions[torch.ones(states, states).triu(1).bool()] = -math.inf  # from left to right
    start[1:] = -math.inf
    emissions[:, ::3, -1] = -math.inf
    assert_agree((emissions, transitions, start, end))
    single = [t.float() for t in (emissions, transitions, start, end)]
    precise = results([t.double() for t in single], "native")
    scale = max(float(t.abs().max()) for t in precise)  # canceled terms had this size
    for got, wanted in zip(results(single, "native"), precise, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5 * scale)


# A state or a weight underflows in float32 and becomes relevant later.
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 6, 40])
@pytest.mark.parametrize("states", [3, 18])
@pytest.mark.parametrize("what", ["emission", "transition", "end"])
def test_underflows_are_repaired(what, states, batch, threads):
    emissions, transitions, start, end = (t.float() for t in scores(batch, 20, states))
    if what == "emission":
        emissions[-1, 5, 0] -= 150
        emissions[-1, 6, 1:] -= 400  # every path still passes through it
        transitions[0, 1:] = -math.inf
    elif what == "transition":
        transitions[0, :] -= torch.arange(states) * 80.0
        transitions[0, 0] = -math.inf
    else:
        end[1:] = -math.inf
        emissions[-1, -1, 0] -= 200
    single = emissions, transitions, start, end
    for got, wanted in zip(results(single, "native"), results([t.double() for t in single], "reference"), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-4, atol=2e-6 * max(100.0, wanted.abs().max().item()))


# No transition is nearly closed, so states that underflow never matter.
@pytest.mark.parametrize("depth", [5, 27, 320])
@pytest.mark.parametrize("spread", [100, 3000])
def test_states_that_underflow_between_open_transitions(depth, spread, threads):
    emissions, transitions, start, end = scores(9, 40, 8)
    transitions = -depth * torch.rand(8, 8, dtype=torch.float64)
    transitions -= transitions.amax(1, keepdim=True)
    tensors = emissions * spread, transitions, start, end
    assert_agree(tensors, tolerance=1e-8)
    assert_close_to_double([t.float() for t in tensors], rtol=max(2e-4, 1e-6 * spread))


# All transitions into a state are nearly closed, and an emission makes every path pass through this state.
@pytest.mark.parametrize("states", [3, 8, 20])
def test_a_state_into_which_all_transitions_are_nearly_closed(states, threads):
    emissions, transitions, start, end = scores(9, 40, states)
    emissions *= 5000
    emissions[:, ::3, 1] += 50000
    transitions[1] -= 1000
    transitions[2] -= 1500
    assert_agree((emissions, transitions, start, end), tolerance=1e-8)
    single = [t.float() for t in (emissions / 10, transitions / 10, start, end)]
    assert_close_to_double(single, rtol=1e-3)


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_transitions_of_each_sequence(batch, threads):
    emissions, _, _, end = scores(batch, 12, 6)
    transitions, start = torch.randn(batch, 6, 6, dtype=torch.float64), torch.randn(batch, 6, dtype=torch.float64)
    assert_agree((emissions, transitions, start, end))


def test_a_sequence_without_a_path_in_a_batch(threads):
    tensors = scores(40, 9, 4)
    tensors[0][3, 4] = -math.inf
    tensors[0][39, 0] = -math.inf
    assert_agree(tensors)
    assert (results(tensors, "native")[0] == -math.inf).sum() == 2


def assert_close_to_double(single, rtol=2e-4, **more):
    """Compare float32 results with the reference in float64, relative to the largest entry of each result."""
    precise = results([t.double() for t in single], "reference", **more)
    for got, wanted in zip(results(single, "native", **more), precise, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=2e-6 * max(100.0, wanted.abs().max().item()))


# Float is enough for a spread of 1, double for 30 and 100; 1e4 needs log space.
@pytest.mark.parametrize("spread", [1, 30, 100, 1e4])
@pytest.mark.parametrize("shape", [(1, 9, 8), (6, 7, 17), (19, 13, 3), (40, 35, 8), (9, 1, 5), (5, 4, 1)])
def test_peaked_emissions(shape, spread, threads):
    tensors = scores(*shape)
    tensors[0] *= spread
    assert_agree(tensors, tolerance=1e-8)
    # Log space rounds scores of this size to 24 bits.
    assert_close_to_double([t.float() for t in tensors], rtol=max(2e-4, 1e-7 * spread))


@pytest.mark.parametrize("states", range(1, 18))
def test_every_number_of_states_with_peaked_emissions(states):
    tensors = scores(10, 6, states, torch.float32)
    tensors[0] *= torch.linspace(0, 60, 10).view(-1, 1, 1)  # sequences of each precision in one batch
    assert_close_to_double(tensors, lengths=torch.tensor([6, 0, 1, 6, 2, 3, 6, 0, 5, 6]))


# Around the least factor of floats, exp(−64), and of doubles, exp(−645), and the limits of their exponents.
@pytest.mark.parametrize("depth", [60, 64, 65, 87, 104, 640, 645, 700, 709, 745, 3000])
@pytest.mark.parametrize("batch", [1, 9])
def test_states_at_the_limits_of_the_exponent(depth, batch):
    emissions, transitions, start, end = scores(batch, 12, 4)
    emissions[:, 3::4, 0] -= depth
    emissions[:, 4::4, 1:] -= depth  # the best path passes through state 0 at both steps, or at neither
    transitions[2, 1] = -math.inf
    tensors = emissions, transitions, start, end
    assert_agree(tensors, tolerance=1e-8)
    assert_close_to_double([t.float() for t in tensors])


@pytest.mark.parametrize("batch", [1, 9])
def test_forbidden_states_with_peaked_emissions(batch):
    emissions, transitions, start, end = (t.float() for t in scores(batch, 12, 5))
    emissions *= 40
    emissions[:, :, 2] = -math.inf
    emissions[-1, 4] = -math.inf  # no path
    transitions[:, 3] = -math.inf
    assert_close_to_double((emissions, transitions, start, end))
    leaves = [t.requires_grad_() for t in (emissions, transitions)]
    chain = bx.Chain.from_scores(*leaves, start=start, end=end)
    gradient = torch.autograd.grad(chain.value[:-1].sum(), leaves)
    assert chain.value[-1] == -math.inf
    for forbidden in (gradient[0][:, :, 2], gradient[0][-1], gradient[1][2], gradient[1][:, 2]):
        assert not forbidden.any()


def test_masks_with_peaked_emissions(threads):
    tensors = scores(20, 33, 6, torch.float32)
    tensors[0] *= 40
    mask = torch.rand(20, 33) > 0.3
    tensors[0][~mask] = math.nan
    assert_close_to_double(tensors, mask=mask)


def test_transitions_of_each_sequence_with_peaked_emissions(threads):
    emissions, _, start, end = scores(5, 12, 6, torch.float32)
    assert_close_to_double((40 * emissions, torch.randn(5, 6, 6), start, end))


def test_verbs_that_read_the_tape_of_peaked_emissions():
    torch.manual_seed(0)
    emissions, transitions = torch.randn(6, 9, 4), torch.randn(4, 4)
    emissions *= torch.tensor([1, 40, 40, 1, 2000, 40]).view(-1, 1, 1)  # float, double, and log space
    lengths = torch.tensor([9, 9, 5, 3, 9, 0])
    chain = bx.Chain.from_scores(emissions, transitions, lengths=lengths)
    with bx.use_backend("reference"):
        precise = bx.Chain.from_scores(emissions.double(), transitions.double(), lengths=lengths)
        entropy, best, mean = precise.entropy(), precise.best_path(), precise.mean
        log_prob = precise.log_prob(best)
    torch.testing.assert_close(chain.entropy().double(), entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chain.log_prob(best.float()).double(), log_prob, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(chain.sample((500,)).double().mean(0), mean, rtol=0, atol=0.15)
