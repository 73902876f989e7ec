"""Autograd: every transform of torch against analytic results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support.inside import forbid_plain_torch
from support.inside import index as index_of
from support.kernels import needs_kernels, took
from support.problems import diamond, for_derivatives, is_one_of_a_kind, potentials, smooth
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx

DIAMOND = diamond()


def value(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    return DIAMOND.paths(theta, omega=omega).value


def path(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    return DIAMOND.paths(theta, omega=omega).expected_path


def entropy(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    return DIAMOND.paths(theta, omega=omega).entropy()


def log_prob(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    p = DIAMOND.paths(theta, omega=omega)
    return p.log_prob(p.mode)


def divergence(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    p, r = DIAMOND.paths(theta, omega=omega), DIAMOND.paths(0.3 * theta.flip(-1), omega=bx.Negentropy())
    return torch.distributions.kl_divergence(p, r)


# --- reverse and forward mode


@for_derivatives
@pytest.mark.parametrize("function", [value, path, entropy, log_prob, divergence])
def test_gradcheck_and_gradgradcheck(function, omega: bx.Regularizer, backend: str) -> None:
    theta = potentials(2, 10, requires_grad=True)

    def run(t: Tensor) -> Tensor:
        return function(t, omega)

    assert gradcheck(run, theta, check_forward_ad=True, fast_mode=True)
    # Second derivatives of the value, third of the expected path.
    assert gradgradcheck(run, theta, fast_mode=True)
    # Third derivatives of the kernels come from the reference; the other functions cover the terms of the entropy.
    if function in (value, path, entropy) and is_one_of_a_kind(omega) and backend == "native":
        assert gradcheck(run, theta[0].detach().requires_grad_(), check_forward_ad=True)
        assert gradgradcheck(run, theta[0].detach().requires_grad_())


@for_derivatives
def test_hessian_product_is_differentiable_in_both_arguments(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(2, 10, requires_grad=True), potentials(2, 10, seed=1, requires_grad=True)

    def run(t: Tensor, d: Tensor) -> Tensor:
        return DIAMOND.paths(t, omega=omega).hessian_product(d)

    assert gradcheck(run, (theta, z), check_forward_ad=True, fast_mode=True)
    if is_one_of_a_kind(omega) and backend == "native":
        alone = [t[0].detach().requires_grad_() for t in (theta, z)]
        assert gradcheck(run, alone, check_forward_ad=True)


@needs_kernels
def test_value_and_path_share_one_forward() -> None:
    p = DIAMOND.paths(potentials(10, requires_grad=True))
    with took("dag_forward", times=1):
        (p.value + p.expected_path.sum() + p.entropy()).backward()


def test_grad_modes(backend: str) -> None:
    theta = potentials(10, requires_grad=True)
    p = DIAMOND.paths(theta)
    with torch.no_grad():
        assert not p.value.requires_grad
    with torch.inference_mode():
        assert not p.expected_path.requires_grad
    assert p.value.requires_grad  # results without gradients are not reused with gradients
    (gradient,) = torch.autograd.grad(p.value, theta)
    torch.testing.assert_close(gradient, p.expected_path)


def test_autocast(backend: str) -> None:
    theta = potentials(2, 10).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        p = DIAMOND.paths(theta)
        assert p.value.dtype == torch.float32
        weights = (theta @ torch.eye(10)).requires_grad_()
        assert weights.dtype == torch.bfloat16
        mixed = DIAMOND.paths(weights)
        assert mixed.value.dtype == torch.float32
        assert mixed.expected_path.dtype == torch.bfloat16
    mixed.value.sum().backward()
    assert theta.grad is not None


# --- torch.func


def test_torch_func(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(3, 10), potentials(3, 10, seed=1)
    p = DIAMOND.paths(theta, omega=omega)

    def one(t: Tensor) -> Tensor:
        return value(t, omega)

    torch.testing.assert_close(torch.func.vmap(one)(theta), p.value)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(one))(theta), p.expected_path)
    torch.testing.assert_close(torch.func.vmap(one, in_dims=1)(theta.T), p.value)
    derivative = torch.func.jvp(one, (theta,), (z,))[1]
    torch.testing.assert_close(derivative, p.directional_derivative(z))
    pulled = torch.func.vjp(lambda t: path(t, omega), theta)[1](z)[0]
    torch.testing.assert_close(pulled, p.hessian_product(z))
    hessians = torch.func.vmap(torch.func.hessian(one))(theta)
    torch.testing.assert_close((hessians @ z.unsqueeze(-1)).squeeze(-1), p.hessian_product(z))
    nested = torch.func.vmap(torch.func.vmap(one))(theta.reshape(3, 1, 10))
    torch.testing.assert_close(nested.squeeze(1), p.value)
    directions = torch.func.vmap(lambda d: DIAMOND.paths(theta[0], omega=omega).hessian_product(d))(z)
    torch.testing.assert_close(directions, DIAMOND.paths(theta[0].expand(3, 10), omega=omega).hessian_product(z))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.jacfwd(lambda t: entropy(t, omega)))(theta),
        torch.func.vmap(torch.func.grad(lambda t: entropy(t, omega)))(theta),
    )


def test_checks_allow_nested_transforms(backend: str) -> None:
    theta = potentials(3, 10)
    p = DIAMOND.paths(theta)
    best = p.best_path()
    per_sample = torch.func.vmap(torch.func.grad(lambda t, y: DIAMOND.paths(t).log_prob(y)))(theta, best)
    torch.testing.assert_close(per_sample, best - p.expected_path)
    gammas = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    of_gamma = torch.func.vmap(torch.func.grad(lambda g: DIAMOND.paths(theta[0], omega=bx.Negentropy(g)).value))(gammas)
    assert of_gamma.isfinite().all()
    assert torch.func.vmap(lambda t: DIAMOND.paths(t).topk(2)[0])(theta).equal(p.topk(2)[0])


def test_gradient_in_the_direction_needs_no_third_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_plain_torch(monkeypatch)
    theta, z = potentials(2, 10), potentials(2, 10, seed=1, requires_grad=True)
    p = DIAMOND.paths(theta)
    (gradient,) = torch.autograd.grad(p.hessian_product(z).square().sum(), z)
    torch.testing.assert_close(gradient, p.hessian_product(2 * p.hessian_product(z.detach())))


def test_third_derivatives_through_torch_func(backend: str) -> None:
    theta = potentials(10)

    def one(t: Tensor) -> Tensor:
        return value(t, bx.Negentropy(0.7))

    third = torch.func.jacfwd(torch.func.hessian(one))(theta)
    step = 1e-4 * potentials(10, seed=2)
    ahead, behind = torch.func.hessian(one)(theta + step), torch.func.hessian(one)(theta - step)
    torch.testing.assert_close(third @ step, (ahead - behind) / 2, rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(third, torch.func.jacrev(torch.func.hessian(one))(theta))


def test_forward_mode_nests(backend: str) -> None:
    theta, z = potentials(10), potentials(10, seed=1)

    def one(t: Tensor) -> Tensor:
        return value(t, bx.Negentropy(0.7))

    def along(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: torch.func.jvp(function, (t,), (z,))[1]

    torch.testing.assert_close(along(along(one))(theta), z @ torch.func.hessian(one)(theta) @ z)
    step = 1e-4
    ahead, behind = along(along(one))(theta + step * z), along(along(one))(theta - step * z)
    torch.testing.assert_close(along(along(along(one)))(theta), (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(one))(theta), torch.func.hessian(one)(theta))
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(one))(theta), torch.func.hessian(one)(theta))


# --- torch.compile and torch.export


def best_score(theta: Tensor, omega: bx.Regularizer) -> Tensor:
    return DIAMOND.paths(theta, omega=omega).topk(2)[0]


@smooth
@pytest.mark.parametrize("function", [value, path, entropy, best_score])
def test_compile_forward_and_backward(function, omega: bx.Regularizer, backend: str) -> None:
    theta = potentials(3, 10, requires_grad=True)

    def loss(t: Tensor) -> Tensor:
        return (function(t, omega) ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(theta), loss(theta))
    (got,), (expected,) = torch.autograd.grad(compiled(theta), theta), torch.autograd.grad(loss(theta), theta)
    torch.testing.assert_close(got, expected)
    assert expected.abs().max() > 0.01


def test_compile_with_dynamic_shapes(backend: str) -> None:
    compiled = torch.compile(lambda t: DIAMOND.paths(t).value, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 5, 9):
        theta = potentials(batch, 10)
        torch.testing.assert_close(compiled(theta), DIAMOND.paths(theta).value)


def test_compile_with_learnable_gamma(backend: str) -> None:
    theta = potentials(3, 10)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def loss(g: Tensor) -> Tensor:
        return DIAMOND.paths(theta, omega=bx.SquaredL2(g)).value.sum()

    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(gamma), gamma)
    torch.testing.assert_close(got, torch.autograd.grad(loss(gamma), gamma)[0])


@pytest.mark.parametrize("omega", ["l2"], indirect=True)
def test_torch_func_inside_compile_equals_eager(omega: bx.Regularizer, backend: str) -> None:
    theta, z = potentials(10), potentials(10, seed=1)

    def one(t: Tensor) -> Tensor:
        return value(t, omega)

    for transform in (
        lambda t: torch.func.grad(one)(t),
        lambda t: torch.func.jvp(one, (t,), (z,))[1],
        lambda t: torch.func.jvp(lambda u: path(u, omega), (t,), (z,))[1],
        lambda t: torch.func.jvp(lambda u: entropy(u, omega), (t,), (z,))[1],
        lambda t: torch.func.vjp(lambda u: path(u, omega), t)[1](z)[0],
        lambda t: torch.func.hessian(one)(t),
        lambda t: torch.func.vmap(one)(t.expand(3, 10)),
        lambda t: torch.func.vmap(torch.func.grad(one))(torch.stack((t, z))),
    ):
        expected = transform(theta)
        torch.testing.assert_close(torch.compile(transform, fullgraph=True, backend="aot_eager")(theta), expected)
        assert expected.abs().max() > 1e-3


def test_errors_survive_compile_and_vmap(backend: str) -> None:
    theta = torch.zeros(2, 10)
    theta[1, 3] = torch.nan
    for run in (
        torch.compile(lambda t: DIAMOND.paths(t).value, fullgraph=True, backend="aot_eager"),
        torch.func.vmap(lambda t: DIAMOND.paths(t).value),
    ):
        with pytest.raises(ValueError, match=r"weights .*got nan at event index \(3,\) of batch element 1"):
            run(theta)


def test_export(backend: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dag = DIAMOND

        def forward(self, theta: Tensor) -> tuple[Tensor, Tensor]:
            p = self.dag.paths(theta, omega="l2")
            return p.value, p.expected_path

    theta = potentials(3, 10)
    program = torch.export.export(Layer(), (theta,), dynamic_shapes={"theta": {0: torch.export.Dim("batch")}})
    other = potentials(7, 10, seed=1)
    for got, expected in zip(program.module()(other), Layer()(other), strict=True):
        torch.testing.assert_close(got, expected)


def test_operators_pass_opcheck(backend: str) -> None:
    theta, z, index = potentials(3, 10), potentials(3, 10, seed=1), list(index_of(DIAMOND))
    for omega, parameters in (("negentropy", []), ("tsallis", [1.5]), ("hard", [])):
        program = ("dag", backend, omega, parameters)
        ops = torch.ops.bellmax
        _, tape = ops.forward(*program, [theta], index)
        seed = torch.ones(3, dtype=torch.float64)
        uniforms = torch.rand(3, 4, 6, dtype=torch.float64)
        for op, args in (
            (ops.forward, ([theta], index)),
            (ops.backward, ([theta], tape, seed, index)),
            (ops.hessian, ([theta], tape, seed, [z], index)),
            (ops.log_transitions, ([theta], tape, index)),
            (ops.log_transitions_jvp, ([theta], tape, [z], index)),
            (ops.log_transitions_vjp, ([theta], tape, [z], index)),
            (ops.sample, ([theta], tape, uniforms, index)),
            (ops.topk, ([theta], 3, index)),
        ):
            torch.library.opcheck(op.default, (*program, *args), test_utils=("test_schema", "test_faketensor"))


def test_find_spec_does_not_count_as_importing_the_compiler() -> None:
    code = """
import importlib.util, torch, bellmax as bx
importlib.util.find_spec("torch._dynamo")
dag = bx.DAG([(0, 1), (0, 1)])
print(torch.compile(lambda t: dag.paths(t).value, fullgraph=True, backend="aot_eager")(torch.zeros(2)).exp().round())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "tensor(2.)\n", result.stderr
