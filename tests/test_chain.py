"""Chains against the DAG engine on the explicit trellis, and conveniences of chains."""

from __future__ import annotations

import math

import pytest
import torch
from support.chains import STEP_MASKS, assert_enumerated, on_trellis, steps_of, to_chain
from support.kernels import hessians, needs_kernels, took
from support.problems import for_derivatives, is_one_of_a_kind, one_of_each_kind, potentials, two_kinds
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

import bellmax as bx

STEPS, STATES = 4, 3


def problem(missing: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Potentials (6, T, S, S) with −∞ and with NaN in the padding, and their lengths."""
    theta = potentials(6, STEPS, STATES, STATES, seed=3)
    theta[torch.rand(theta.shape) < missing] = -math.inf
    lengths = torch.tensor([4, 2, 1, 3, 4, 2])
    for b, length in enumerate(lengths):
        theta[b, length:] = math.nan
    theta[:, 0, :, 1:] = math.nan  # no edges
    return theta, lengths


def test_equals_the_trellis(omega: bx.Regularizer, backend: str) -> None:
    theta, lengths = problem()
    z = potentials(*theta.shape, seed=4)
    chain = bx.Chain(theta, lengths=lengths, omega=omega)
    assert chain.backend == backend
    results = {
        "value": chain.value,
        "path": chain.expected_path,
        "hessian": chain.hessian_product(z),
        "entropy": chain.entropy(),
        "best": chain.best_path(),
        "mode": chain.mode,
        "count": chain.num_paths,
    }
    scores, paths = chain.topk(5)
    for b, length in enumerate(lengths.tolist()):
        p, offsets = on_trellis(theta[b].nan_to_num(0, neginf=-math.inf), length, omega)
        event = theta.shape[1:]
        expected_z = torch.cat((z[b, :length].flatten()[offsets], z.new_zeros(STATES)))
        expected = {
            "value": p.value,
            "path": to_chain(p.expected_path, offsets, event),
            "hessian": to_chain(p.hessian_product(expected_z), offsets, event),
            "entropy": p.entropy(),
            "best": to_chain(p.best_path(), offsets, event),
            "mode": to_chain(p.mode, offsets, event),
            "count": p.num_paths,
        }
        for name, value in expected.items():
            torch.testing.assert_close(
                results[name][b], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        best_scores, best_paths = p.topk(5)
        torch.testing.assert_close(scores[b], best_scores, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(paths[b], to_chain(best_paths, offsets, event))
        listed, probabilities = p.support_paths()
        alone = bx.Chain(theta[b], lengths=lengths[b], omega=omega)
        got_listed, got = alone.support_paths()
        torch.testing.assert_close(got, probabilities, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(alone.log_prob(to_chain(listed, offsets, event)).exp(), probabilities)
        assert got_listed.shape == (len(probabilities), *event)


@pytest.mark.parametrize("states", [2, 3])
@pytest.mark.parametrize("padding", STEP_MASKS)
def test_equals_enumeration(padding: str, states: int, omega: bx.Regularizer, backend: str) -> None:
    mask = STEP_MASKS[padding]
    theta = potentials(3, 3, states, states, seed=5)
    theta[:, 1:, 0, 1] = -math.inf
    theta[~mask] = math.nan
    p = bx.Chain(theta, omega=omega, **steps_of(padding))
    assert_enumerated(p, [theta[b, mask[b]] for b in range(3)], mask)


@for_derivatives
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 0, 2])])
def test_derivatives(lengths: torch.Tensor | None, omega: bx.Regularizer, backend: str) -> None:
    theta = potentials(3, 3, 2, 2, requires_grad=True)

    def run(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = bx.Chain(t, lengths=lengths, omega=omega)
        return p.value, p.expected_path, p.entropy()

    fast = lengths is None or backend == "reference" or not is_one_of_a_kind(omega)
    assert gradcheck(run, theta, check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(run, theta, fast_mode=True)
    other = bx.Chain(potentials(3, 3, 2, 2, seed=9), lengths=lengths, omega=bx.Negentropy())
    divergence = lambda t: kl_divergence(bx.Chain(t, lengths=lengths, omega=omega), other)  # noqa: E731
    assert gradcheck(divergence, theta, fast_mode=fast)


@pytest.mark.slow
@one_of_each_kind
def test_second_derivatives_in_full(omega: bx.Regularizer, backend: str) -> None:
    along = potentials(3, 2, 2, seed=1)

    def run(t: torch.Tensor) -> torch.Tensor:
        p = bx.Chain(t, lengths=torch.tensor([3, 2]), omega=omega)
        if backend == "reference":  # third derivatives of both backends come from the reference
            return p.value
        return p.value + (p.expected_path * along).sum((1, 2, 3))

    assert gradgradcheck(run, potentials(2, 3, 2, 2, requires_grad=True))


@needs_kernels
def test_backends_agree_on_everything(omega: bx.Regularizer) -> None:
    theta = potentials(7, 9, 11, 11) * 2
    theta[torch.rand(theta.shape) < 0.2] = -math.inf
    lengths = torch.tensor([9, 0, 1, 5, 9, 2, 8])
    z = potentials(*theta.shape, seed=1)
    results = []
    for backend in ("reference", "native"):
        times = None if backend == "native" else 0
        with (
            bx.use_backend(backend),
            took("chain_forward", times),
            took("chain_backward", times),
            took("chain_hessian", hessians(omega, times)),
            took("chain_log_transitions_jvp", times),
            took("chain_log_transitions_vjp", times),
            took("chain_topk", times),
            took("chain_sample", times),
        ):
            t = theta.clone().requires_grad_()
            p = bx.Chain(t, lengths=lengths, omega=omega)
            torch.manual_seed(0)
            (gradient,) = torch.autograd.grad(p.entropy().sum(), t, retain_graph=True)
            derivative = torch.func.jvp(lambda t: bx.Chain(t, lengths=lengths, omega=omega).entropy(), (theta,), (z,))[
                1
            ]
            layers = p.value, p.expected_path, p.hessian_product(z), p.entropy(), gradient, derivative
            results.append((*layers, *p.topk_sequences(4), p.sample_sequences((20,)), p.best_path()))
    for reference, native in zip(*results, strict=True):
        torch.testing.assert_close(native, reference, rtol=1e-10, atol=1e-10)


def test_sequences_and_paths(omega: bx.Regularizer, backend: str) -> None:
    theta, lengths = problem(missing=0.0)
    p = bx.Chain(theta, lengths=lengths, omega=omega)
    drawn = p.sample_sequences((4, 5))
    assert drawn.shape == (4, 5, 6, STEPS)
    assert torch.equal((drawn >= 0).sum(-1), lengths.expand(4, 5, 6))
    paths = p.sequence_to_path(drawn)
    assert torch.equal(p.path_to_sequence(paths), drawn)
    assert p.log_prob(paths).shape == (4, 5, 6)
    assert torch.equal(p.sequence_to_path(p.best_sequence()), p.best_path())
    torch.testing.assert_close(p.marginals, p.expected_path.sum(-1))
    torch.testing.assert_close(p.marginals.sum(-1), (torch.arange(STEPS) < lengths[:, None]).double())


def test_sampling_frequencies(omega: bx.Regularizer, backend: str) -> None:
    p = bx.Chain(potentials(2, 3, 2, 2), lengths=torch.tensor([3, 2]), omega=omega)
    assert (p.sample((20_000,)).mean(0) - p.mean).abs().max() < 0.02


def test_constrain_conditions_negentropy(backend: str) -> None:
    theta = potentials(STEPS, STATES, STATES)
    allowed = torch.ones(STEPS, STATES, dtype=torch.bool)
    allowed[1, 0] = allowed[3, 2] = False
    free, bound = bx.Chain(theta), bx.Chain(theta).constrain(allowed)
    paths, probabilities = free.support_paths()
    is_allowed = (paths.sum(-1) * ~allowed).flatten(1).sum(1) == 0
    torch.testing.assert_close(bound.num_paths, is_allowed.sum().double())
    conditional = probabilities[is_allowed] / probabilities[is_allowed].sum()
    torch.testing.assert_close(bound.log_prob(paths[is_allowed]).exp(), conditional)


def test_padding_gets_no_gradient(omega: bx.Regularizer, backend: str) -> None:
    theta, lengths = problem()
    theta.requires_grad_()
    p = bx.Chain(theta, lengths=lengths, omega=omega)
    loss = p.value.sum() + p.entropy().sum() + p.expected_path.square().sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    assert gradient.isfinite().all()
    for b, length in enumerate(lengths):
        assert not gradient[b, length:].any()
    assert not gradient[:, 0, :, 1:].any()


def test_corners(omega: bx.Regularizer, backend: str) -> None:
    single = bx.Chain(torch.tensor([[[[2.0]]]]), omega=omega)  # one step, one state
    assert single.expected_path.tolist() == [[[[1.0]]]]
    assert single.best_sequence().tolist() == [[0]]
    empty = bx.Chain(torch.zeros(0, 3, 2, 2, requires_grad=True), omega=omega)
    assert empty.value.shape == (0,)
    assert empty.hessian_product(torch.zeros(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    assert empty.topk(2)[1].shape == (0, 2, 3, 2, 2)
    none = bx.Chain(torch.zeros(2, 0, 2, 2), omega=omega)  # no steps
    assert none.value.tolist() == [0, 0]
    assert none.expected_path.shape == (2, 0, 2, 2)
    lost = torch.zeros(2, 3, 2, 2)
    lost[1, 1] = -math.inf
    nowhere = bx.Chain(lost.requires_grad_(), omega=omega)
    assert nowhere.value[1] == -math.inf
    assert not nowhere.expected_path[1].any()
    assert nowhere.best_sequence()[1].tolist() == [-1, -1, -1]
    assert not torch.autograd.grad(nowhere.value[1] + nowhere.entropy()[1], lost)[0].any()


@two_kinds
@pytest.mark.parametrize("batch", [2, 9])
def test_a_sequence_without_a_path_in_a_batch(batch: int, omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(batch, STEPS, STATES, STATES), potentials(batch, STEPS, STATES, STATES, seed=1)
    theta[1] = -math.inf
    others = torch.arange(batch) != 1

    def run(theta: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = bx.Chain(theta.requires_grad_(), omega=omega)
        (gradient,) = torch.autograd.grad(p.value.sum(), theta, create_graph=True)
        (second,) = torch.autograd.grad((gradient * z).sum(), theta, retain_graph=True)
        (of_entropy,) = torch.autograd.grad(p.entropy().sum(), theta, retain_graph=True)
        layers = p.expected_path, p.marginals, p.directional_derivative(z), p.hessian_product(z), p.entropy()
        return p.value, p.best_sequence(), *layers, gradient, second, of_entropy

    value, best, *rest = run(theta, z)
    assert value[1] == -math.inf
    assert (best[1] == -1).all()
    assert not any(result[1].any() for result in rest)
    for got, wanted in zip((value, best, *rest), run(theta[others].detach(), z[others]), strict=True):
        torch.testing.assert_close(got[others], wanted)


def test_strided_inputs(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(3, 2, 4, 3).permute(2, 1, 3, 0), potentials(3, 3).expand(4, 2, 3, 3)
    p, copy = bx.Chain(theta, omega=omega), bx.Chain(theta.contiguous(), omega=omega)
    assert torch.equal(p.value, copy.value)
    assert torch.equal(p.expected_path, copy.expected_path)
    assert torch.equal(p.hessian_product(z), copy.hessian_product(z.contiguous()))
    assert torch.equal(p.best_sequence(), copy.best_sequence())


def test_vmap_over_lengths(backend: str) -> None:
    theta, lengths = potentials(5, 2, 4, 3, 3), torch.tensor([[1, 4], [2, 3], [4, 0], [1, 1], [3, 2]])
    mapped = torch.func.vmap(lambda t, n: bx.Chain(t, lengths=n).value)(theta, lengths)
    torch.testing.assert_close(mapped, bx.Chain(theta, lengths=lengths).value)
    gradient = torch.func.vmap(torch.func.grad(lambda t: bx.Chain(t, omega="l2").value.sum()))(theta)
    torch.testing.assert_close(gradient, bx.Chain(theta, omega="l2").expected_path)


def test_compiles(backend: str) -> None:
    theta, lengths = potentials(5, 4, 3, 3, requires_grad=True), torch.tensor([4, 1, 0, 3, 2])

    def loss(t: torch.Tensor) -> torch.Tensor:
        return bx.Chain(t, lengths=lengths, omega="l2").marginals.square().sum()

    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(theta), theta)
    torch.testing.assert_close(got, torch.autograd.grad(loss(theta), theta)[0])


def test_compiles_to_code() -> None:
    """With the default compiler of torch, which is slow and used in this test only."""
    theta = potentials(2, 4, 3, 3, requires_grad=True)

    def loss(t: torch.Tensor) -> torch.Tensor:
        return bx.Chain(2 * t, lengths=torch.tensor([4, 2]), omega="l2").value.square().sum()

    compiled = torch.compile(loss, fullgraph=True)(theta)
    torch.testing.assert_close(compiled, loss(theta))
    torch.testing.assert_close(torch.autograd.grad(compiled, theta), torch.autograd.grad(loss(theta), theta))


def test_float32_over_4096_steps(backend: str) -> None:
    steps = 4096 if backend == "native" else 256
    theta = potentials(steps, 8, 8).float()
    single, double = bx.Chain(theta).marginals, bx.Chain(theta.double()).marginals
    assert (single.double() - double).abs().max() < 1e-6
    assert (single.double().sum(-1) - 1).abs().max() < 2e-6


def test_huge_scales_in_float32(omega: bx.Regularizer, backend: str) -> None:
    theta = (potentials(3, 20, 5, 5) * 1e4).float().requires_grad_()
    p = bx.Chain(theta, omega=omega)
    (gradient,) = torch.autograd.grad(p.value.sum(), theta)
    assert gradient.isfinite().all()
    assert p.hessian_product(torch.ones_like(theta)).isfinite().all()
    torch.testing.assert_close(gradient, p.best_path(), rtol=0, atol=1e-3)


def test_gamma_is_learnable_with_nan_padding(backend: str) -> None:
    theta, lengths = problem()
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda g: bx.Chain(theta, lengths=lengths, omega=bx.Negentropy(g)).value, gamma)


def test_bad_input_raises_an_error_that_names_it(backend: str) -> None:
    theta = torch.zeros(2, 3, 4, 4)
    p = bx.Chain(theta)
    bad = theta.clone()
    bad[1, 2, 3, 0] = math.nan
    for wrong, message in [
        (lambda: bx.Chain(torch.zeros(3, 4, 5)), r"potentials must have shape \(\.\.\., T, S, S\).* got \(3, 4, 5\)"),
        (lambda: bx.Chain(torch.zeros(2, 2)), r"potentials must have shape \(\.\.\., T, S, S\).* got \(2, 2\)"),
        (
            lambda: bx.Chain(theta, lengths=torch.tensor([1.0, 2.0])),
            "lengths must hold integers, got dtype torch.float32",
        ),
        (lambda: bx.Chain(theta, lengths=torch.tensor([1])), r"lengths must have the batch shape \(2,\), got \(1,\)"),
        (
            lambda: bx.Chain(theta, lengths=torch.tensor([1, 4])).value,
            "lengths must be from 0 to 3, got 4 for batch element 1",
        ),
        (lambda: bx.Chain(theta, lengths=torch.tensor([-1, 3])).best_sequence(), "lengths must be from 0 to 3, got -1"),
        (lambda: bx.Chain(bad).value, r"potentials .*got nan at event index \(2, 3, 0\) of batch element 1"),
        (lambda: p.constrain(torch.ones(3, 4)), "allowed must be a bool tensor, got dtype torch.float32"),
        (lambda: p.constrain(torch.ones(2, 4) > 0), r"allowed must broadcast to \(2, 3, 4\), got shape \(2, 4\)"),
        (
            lambda: p.sequence_to_path(torch.zeros(2, 5)),
            r"sequence must hold integers of shape \(\.\.\., 3\), got torch.float32",
        ),
        (
            lambda: p.log_prob(torch.zeros(2, 3, 4, 4)),
            r"path\[0\] is not a path of the graph",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
