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
@pytest.mark.parametrize("states", [1, 2, 9, 17])
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
    scale = max(float(t.abs().max()) for t in precise)  # cancelled terms had this size
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
