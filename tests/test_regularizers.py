"""Smoothed max operators: Lemma 1, derivatives, edge cases, and user-defined Ω."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import from_kernel
from support.problems import OMEGAS, diamond, potentials, solve
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx

DIAMOND = diamond()
vectors = st.lists(st.floats(-50, 50), min_size=1, max_size=8)
each_omega = pytest.mark.parametrize("name", list(OMEGAS))


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


# --- the definition and Lemma 1


@each_omega
@given(x=vectors)
def test_equals_the_definition(name: str, x: list[float]) -> None:
    omega = OMEGAS[name]
    value, q = solve(omega, x)
    assert float(omega.max(tensor(x))) == pytest.approx(value, abs=1e-10)
    assert omega.argmax(tensor(x)).tolist() == pytest.approx(q, abs=1e-10)


@each_omega
@given(x=vectors)
def test_lemma_1_boundedness(name: str, x: list[float]) -> None:
    omega, size = OMEGAS[name], len(x)
    least = float(omega.gamma * omega.penalty(torch.full((size,), 1 / size, dtype=torch.float64)))
    most = float(omega.gamma * omega.penalty(torch.eye(size, dtype=torch.float64)[0]))
    assert max(x) - most - 1e-10 <= float(omega.max(tensor(x))) <= max(x) - least + 1e-10


@each_omega
@given(x=vectors, c=st.floats(-100, 100))
def test_lemma_1_distributivity(name: str, x: list[float], c: float) -> None:
    omega = OMEGAS[name]
    torch.testing.assert_close(omega.max(tensor(x) + c), omega.max(tensor(x)) + c, rtol=1e-10, atol=1e-10)


@each_omega
@given(x=vectors, data=st.data())
def test_lemma_1_commutativity(name: str, x: list[float], data) -> None:
    omega, order = OMEGAS[name], data.draw(st.permutations(range(len(x))))
    torch.testing.assert_close(omega.max(tensor(x)[order]), omega.max(tensor(x)), rtol=1e-12, atol=1e-12)


@each_omega
@given(x=vectors, data=st.data())
def test_lemma_1_monotonicity(name: str, x: list[float], data) -> None:
    omega = OMEGAS[name]
    rise = data.draw(st.lists(st.floats(0, 10), min_size=len(x), max_size=len(x)))
    assert omega.max(tensor(x)) <= omega.max(tensor(x) + tensor(rise)) + 1e-10


@each_omega
@given(x=vectors, position=st.integers(0, 8))
def test_lemma_1_insensitivity_to_minus_infinity(name: str, x: list[float], position: int) -> None:
    omega = OMEGAS[name]
    position = min(position, len(x))
    longer = tensor([*x[:position], -math.inf, *x[position:]])
    q = omega.argmax(longer)
    assert q[position] == 0
    torch.testing.assert_close(omega.max(longer), omega.max(tensor(x)), rtol=1e-12, atol=1e-12)
    others = torch.arange(len(x) + 1) != position
    torch.testing.assert_close(q[others], omega.argmax(tensor(x)), rtol=1e-10, atol=1e-10)


# --- derivatives


@each_omega
def test_derivatives(name: str) -> None:
    omega, x = OMEGAS[name], potentials(3, 5, requires_grad=True)
    for function in (omega.max, omega.argmax, omega.min, omega.argmin):
        assert gradcheck(function, x, check_forward_ad=True)
        assert gradgradcheck(function, x)
    if not isinstance(omega, bx.Hard):  # the Hessian of hard has no graph
        assert gradgradcheck(lambda t: omega.hessian_product(omega.argmax(t), potentials(3, 5, seed=1)), x)


@each_omega
def test_hessian_product_is_the_second_derivative(name: str) -> None:
    omega, x, z = OMEGAS[name], potentials(5), potentials(5, seed=1)
    hessian = torch.func.hessian(omega.max)(x)
    torch.testing.assert_close(omega.hessian_product(omega.argmax(x), z), hessian @ z)
    torch.testing.assert_close(hessian, hessian.T)


@each_omega
def test_transforms_of_torch_func(name: str) -> None:
    omega, x = OMEGAS[name], potentials(4, 5)
    torch.testing.assert_close(torch.func.vmap(omega.max)(x), omega.max(x))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(omega.max))(x), omega.argmax(x))
    jacobians = torch.func.vmap(torch.func.jacfwd(omega.argmax))(x), torch.func.vmap(torch.func.jacrev(omega.argmax))(x)
    torch.testing.assert_close(*jacobians)


@each_omega
def test_along_any_dim(name: str) -> None:
    omega, x = OMEGAS[name], potentials(2, 3, 4)
    for dim in range(-3, 3):
        torch.testing.assert_close(omega.max(x, dim), omega.max(x.movedim(dim, -1)))
        torch.testing.assert_close(omega.argmax(x, dim), omega.argmax(x.movedim(dim, -1)).movedim(-1, dim))
        torch.testing.assert_close(omega.min(x, dim), -omega.max(-x, dim))
        torch.testing.assert_close(omega.argmin(x, dim), omega.argmax(-x, dim))
        q = omega.argmax(x, dim)
        moved = omega.hessian_product(q.movedim(dim, -1), x.movedim(dim, -1)).movedim(-1, dim)
        torch.testing.assert_close(omega.hessian_product(q, x, dim), moved)


# --- edge cases


@each_omega
def test_rows_of_minus_infinity(name: str) -> None:
    omega, x = OMEGAS[name], potentials(3, 4)
    x[1] = -math.inf
    x[2, :2] = -math.inf
    x.requires_grad_()
    value, q = omega.max(x), omega.argmax(x)
    assert value[1] == -math.inf
    assert not q[1].any()
    (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, q)
    (second,) = torch.autograd.grad((gradient * potentials(3, 4)).sum(), x)
    assert second.isfinite().all()
    assert not second[1].any()
    assert omega.hessian_product(q, x).isfinite().all()


@each_omega
def test_ties_and_one_element(name: str) -> None:
    omega = OMEGAS[name]
    q = omega.argmax(torch.zeros(4))
    if isinstance(omega, bx.Hard):
        assert q.tolist() == [1, 0, 0, 0]
    else:
        torch.testing.assert_close(q, torch.full((4,), 0.25))
    assert omega.argmax(tensor([3.0])).tolist() == [1.0]
    vertex = float(omega.gamma * omega.penalty(tensor([1.0])))
    assert float(omega.max(tensor([3.0]))) == pytest.approx(3 - vertex)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.001, 1.05, 1.2, 1.5, 1.75, 2.0])
def test_tsallis_to_the_precision_of_the_dtype(alpha: float, dtype: torch.dtype) -> None:
    x = (potentials(200, 50) * 3).to(dtype)
    q = bx.Tsallis(alpha).argmax(x)
    assert (q.sum(-1) - 1).abs().max() < 20 * torch.finfo(dtype).eps
    # At the solution, q^(α−1)/(α−1) = x − τ with one τ for the whole support.
    tau = x - q.double().pow(alpha - 1) / (alpha - 1)
    spread = torch.where(q > 1e-3, tau, math.nan)
    width = (spread - spread.nanmean(-1, keepdim=True)).abs().nan_to_num().amax()
    assert width < 100 * torch.finfo(dtype).eps / (alpha - 1)


def test_tsallis_approaches_negentropy_and_l2() -> None:
    x = potentials(10, 6)
    torch.testing.assert_close(bx.Tsallis(1 + 1e-6).argmax(x), bx.Negentropy().argmax(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bx.Tsallis(2.0, 0.7).max(x), bx.SquaredL2(0.7).max(x) + 0.35)
    torch.testing.assert_close(bx.Tsallis(1.5 + 1e-9).argmax(x), bx.Tsallis(1.5).argmax(x), rtol=1e-6, atol=1e-7)


@each_omega
@pytest.mark.parametrize("scale", [1e-4, 1e4, 1e30])
def test_huge_and_tiny_scales(name: str, scale: float) -> None:
    omega, x = OMEGAS[name], potentials(5, 6).float() * scale
    assert omega.max(x).isfinite().all()
    torch.testing.assert_close(omega.argmax(x).sum(-1), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = potentials(3, 4).to(dtype)
    assert bx.Negentropy().max(x).dtype == torch.float32
    assert bx.Negentropy().argmax(x).dtype == dtype


# --- γ


@pytest.mark.parametrize("kind", [bx.Negentropy, bx.SquaredL2, bx.Tsallis])
def test_gamma_may_be_a_tensor(kind) -> None:
    x = potentials(3, 5)
    x[0, 1] = -math.inf
    gamma = tensor([0.5, 1.0, 3.0]).requires_grad_()
    torch.testing.assert_close(kind(gamma=gamma).max(x)[2], kind(gamma=3.0).max(x[2]))
    assert gradcheck(lambda g: (kind(gamma=g).max(x), kind(gamma=g).argmax(x)), gamma)
    assert gradgradcheck(lambda g: kind(gamma=g).max(x), gamma)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bx.Negentropy(0.0), "gamma must be a finite number > 0, got 0.0"),
        (lambda: bx.SquaredL2(-1), "gamma must be a finite number > 0, got -1"),
        (lambda: bx.Negentropy(math.nan), "gamma must be a finite number > 0, got nan"),
        (lambda: bx.Negentropy(torch.tensor([1.0, -2.0])), "gamma must be finite and > 0, got a tensor from -2 to 1"),
        (lambda: bx.Negentropy(torch.tensor([1, 2])), "gamma must be a floating point tensor, got dtype torch.int64"),
        (lambda: bx.Tsallis(1.0), r"alpha must satisfy 1 < alpha <= 2, got 1.0 \(alpha = 1 is Negentropy\)"),
        (lambda: bx.Tsallis(2.5), "alpha must satisfy 1 < alpha <= 2, got 2.5"),
        (lambda: bx.Hard().argmax(torch.tensor([1, 2])), "x must be floating point, got dtype torch.int64"),
        (
            lambda: bx.Chain(torch.zeros(2, 3, 3), omega="alpha"),
            "omega must be a Regularizer or one of 'negentropy', 'softmax', .*, got 'alpha'",
        ),
    ],
)
def test_bad_parameters_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@each_omega
def test_kernels_name_their_regularizer(name: str) -> None:
    omega = OMEGAS[name]
    again = from_kernel(omega.kernel)
    assert type(again) is type(omega)
    assert again.kernel == omega.kernel
    assert again.gamma == 1


def test_repr() -> None:
    made = [bx.Negentropy(0.5), bx.SquaredL2(), bx.Tsallis(1.2), bx.Hard()]
    shown = "[Negentropy(gamma=0.5), SquaredL2(gamma=1.0), Tsallis(alpha=1.2, gamma=1.0), Hard()]"
    assert repr(made) == shown


# --- user-defined Ω


class Gini(bx.Regularizer):
    """Tsallis with α = 2, written from scratch."""

    def penalty(self, q: torch.Tensor) -> torch.Tensor:
        return (q.square().sum(-1) - 1) / 2

    def project(self, x: torch.Tensor) -> torch.Tensor:
        top = x.clamp(min=-2).sort(-1, descending=True).values
        size = torch.arange(1, x.shape[-1] + 1)
        taken = (1 + size * top > top.cumsum(-1)).sum(-1, keepdim=True)
        return (x - (top.cumsum(-1).gather(-1, taken - 1) - 1) / taken).clamp(min=0)

    def jacobian_product(self, q: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        s = (q > 0).to(q)
        return s * (y - (s * y).sum(-1, keepdim=True) / s.sum(-1, keepdim=True).clamp(min=1))


def test_custom_regularizer_equals_tsallis() -> None:
    custom, ours = Gini(0.6), bx.Tsallis(2.0, 0.6)
    theta, z = potentials(3, 10, requires_grad=True), potentials(3, 10, seed=1)
    p, expected = DIAMOND.paths(theta, omega=custom), DIAMOND.paths(theta, omega=ours)
    for a, b in (
        (p.value, expected.value),
        (p.expected_path, expected.expected_path),
        (p.hessian_product(z), expected.hessian_product(z)),
        (p.entropy(), expected.entropy()),
        (p.mode, expected.mode),
        (p.log_prob(p.mode), expected.log_prob(p.mode)),
        (torch.autograd.grad(p.entropy().sum(), theta)[0], torch.autograd.grad(expected.entropy().sum(), theta)[0]),
    ):
        torch.testing.assert_close(a, b)
    assert gradgradcheck(lambda t: DIAMOND.paths(t, omega=custom).expected_path, theta, fast_mode=True)


def test_a_subclass_of_a_shipped_regularizer_is_a_custom_regularizer() -> None:
    class Doubled(bx.Negentropy):
        def penalty(self, q: torch.Tensor) -> torch.Tensor:
            return 2 * super().penalty(q)

        def project(self, x: torch.Tensor) -> torch.Tensor:
            return super().project(x / 2)

        def jacobian_product(self, q: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().jacobian_product(q, y) / 2

    theta = potentials(3, 10)
    custom, expected = DIAMOND.paths(theta, omega=Doubled()), DIAMOND.paths(theta, omega=bx.Negentropy(2.0))
    torch.testing.assert_close(custom.value, expected.value)
    torch.testing.assert_close(custom.expected_path, expected.expected_path)
    torch.testing.assert_close(custom.mode, expected.mode)


def test_custom_regularizer_under_vmap() -> None:
    theta = potentials(3, 10)
    mapped = torch.func.vmap(torch.func.grad(lambda t: DIAMOND.paths(t, omega=Gini(0.6)).value))(theta)
    torch.testing.assert_close(mapped, DIAMOND.paths(theta, omega=Gini(0.6)).expected_path)


def test_custom_regularizer_with_learnable_gamma() -> None:
    theta, gamma = potentials(3, 10), tensor([0.4, 0.8, 1.5]).requires_grad_()
    assert gradcheck(lambda g: DIAMOND.paths(theta, omega=Gini(g)).value, gamma)
