import math

import pytest
import torch
from support.inside import two_states
from support.kernels import needs_kernels, took

import bellmax as bx

pytestmark = needs_kernels
OMEGAS = [bx.Negentropy(), bx.SquaredL2(), bx.Negentropy(0.3), bx.SquaredL2(2.0), bx.Tsallis(2, gamma=0.7)]


def scores(batch, steps, dtype=torch.float64, scale=1.0, shift=1.0):
    torch.manual_seed(batch + steps)
    shapes = (batch, steps, 2), (2, 2), (2,), (2,)
    scales = scale, shift, 1.0, 1.0
    return [(s * torch.randn(shape, dtype=dtype)).requires_grad_() for shape, s in zip(shapes, scales, strict=True)]


def chain(emissions, transitions, start, end, **more):
    return bx.Chain.from_scores(emissions, transitions, start=start, end=end, **more)


def both(monkeypatch, run):
    """The results of the kernel for two states, which must run, and of the general sweeps."""
    with took("two_states_marginals", times=1):
        by_kernel = run()
    monkeypatch.setattr(two_states.NativeMarginals, "supports", lambda *_: False)
    with took("two_states_marginals", times=0):
        return by_kernel, run()


@pytest.mark.parametrize("omega", OMEGAS, ids=repr)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1.0), (100.0, 1.0), (3.0, 30.0)])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (5, 4), (19, 33)])
def test_equals_the_general_sweeps(monkeypatch, omega, batch, steps, scale, shift):
    inputs = scores(batch, steps, scale=scale, shift=shift)
    mask, weights = torch.rand(batch, steps) < 0.7, torch.randn(batch, steps, 2, dtype=torch.float64)
    nan = inputs[0].detach().masked_fill(~mask.unsqueeze(-1), math.nan).requires_grad_()

    def run():
        marginals = chain(nan, *inputs[1:], mask=mask, omega=omega).marginals
        return marginals, *torch.autograd.grad(marginals, (nan, *inputs[1:]), weights)

    with took("two_states_marginals_vjp", times=1):
        torch.testing.assert_close(*both(monkeypatch, run), rtol=1e-9, atol=1e-11)


def test_lengths_and_batch_dimensions(monkeypatch):
    emissions, *rest = scores(6, 5)
    lengths = torch.tensor([[0, 5, 3], [1, 2, 5]])
    run = lambda: chain(emissions.reshape(2, 3, 5, 2), *rest, lengths=lengths).marginals  # noqa: E731
    torch.testing.assert_close(*both(monkeypatch, run))


@pytest.mark.parametrize("omega", [bx.Negentropy(), bx.SquaredL2()], ids=repr)
def test_single_precision(omega):
    inputs = scores(9, 300, torch.float32)
    weights = torch.randn(9, 300, 2)
    precise = [g.detach().double().requires_grad_() for g in inputs]
    with took("two_states_marginals", times=2), took("two_states_marginals_vjp", times=2):
        marginals, expected = (chain(*scores, omega=omega).marginals for scores in (inputs, precise))
        of_marginals = torch.autograd.grad(marginals, inputs, weights)
        of_expected = torch.autograd.grad(expected, precise, weights.double())
    torch.testing.assert_close(marginals.double(), expected, rtol=0, atol=1e-6)
    for a, b in zip(of_marginals, of_expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_second_derivative_of_marginals():
    inputs = scores(3, 4)
    f = lambda *s: chain(*s).marginals[..., 1]  # noqa: E731
    with took("two_states_marginals"):
        assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
    with took("two_states_marginals"):
        assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


@pytest.mark.parametrize("omega", [bx.Negentropy(), bx.SquaredL2()], ids=repr)
def test_forbidden_states(monkeypatch, omega):
    emissions, *rest = (g.detach() for g in scores(4, 5))
    emissions[0, 2, 1] = emissions[1, 3, 0] = emissions[2, 0, 0] = -math.inf
    torch.testing.assert_close(*both(monkeypatch, lambda: chain(emissions, *rest, omega=omega).marginals))


@pytest.mark.parametrize("omega", [bx.Negentropy(), bx.SquaredL2()], ids=repr)
@pytest.mark.parametrize("forbidden", ["a step", "a transition", "an end"])
def test_declined_scores_take_the_general_sweeps(omega, forbidden):
    emissions, transitions, start, end = (g.detach() for g in scores(4, 5))
    entries = {"a step": emissions[1, 3], "a transition": transitions[0, 1:], "an end": end[:1]}[forbidden]
    entries.fill_(-math.inf)
    with took("two_states_marginals", times=0):
        marginals = chain(emissions, transitions, start, end, omega=omega).marginals
    path = bx.Chain(chain(emissions, transitions, start, end).potentials, omega=omega).expected_path
    torch.testing.assert_close(marginals, path.sum(-1))


def test_nan_raises_an_error_with_its_position():
    emissions, *rest = (g.detach() for g in scores(2, 3))
    emissions[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"emissions must be finite or -inf, got nan at event index \(2, 0\)"):
        _ = chain(emissions, *rest).marginals


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 20.0), (torch.float32, 85.0), (torch.float64, 60.0)])
def test_improbable_states_keep_their_digits(dtype, gap):
    emissions = torch.tensor([[[gap, 0.0], [0.0, gap], [1.0, gap]]], dtype=dtype, requires_grad=True)
    with took("two_states_marginals"):
        marginals = chain(emissions, torch.zeros(2, 2, dtype=dtype), None, None).marginals
    torch.testing.assert_close(marginals, emissions.softmax(-1), rtol=1e-4, atol=0)
    wrong = marginals[0, [0, 1], [1, 0]].log().sum()
    gradient = torch.tensor([[[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]]], dtype=dtype)
    with took("two_states_marginals_vjp"):
        torch.testing.assert_close(torch.autograd.grad(wrong, emissions)[0], gradient)
