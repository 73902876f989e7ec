"""check_regularizer accepts correct regularizers and names the fault of wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.problems import OMEGAS

import bellmax as bx


def test_shipped_regularizers_pass(omega: bx.Regularizer) -> None:
    state = torch.get_rng_state()
    bx.check_regularizer(omega)
    assert torch.get_rng_state().equal(state)


def test_regularizers_with_tensor_gamma_pass() -> None:
    bx.check_regularizer(bx.Negentropy(torch.tensor([0.5, 2.0])))


class Doubled(bx.Negentropy):
    def penalty(self, q):
        return 2 * super().penalty(q)


class Unscaled(bx.Negentropy):
    def project(self, x):
        return x.exp()


class Negative(bx.Negentropy):
    def project(self, x):
        return 2 * super().project(x) - 1 / x.shape[-1]


class Undefined(bx.Negentropy):
    def penalty(self, q):
        return (q * q.log()).sum(-1)


class Constant(bx.Negentropy):
    def jacobian_product(self, q, y):
        return super().jacobian_product(q, y).detach()


class Detached(bx.Negentropy):
    def jacobian_product(self, q, y):
        return super().jacobian_product(q.detach(), y)


class Scalar(bx.Negentropy):
    def penalty(self, q):
        return 3.0


class Flat(bx.Negentropy):
    def project(self, x):
        return super().project(x).reshape(-1, x.shape[-1])


class Skewed(bx.Negentropy):
    def jacobian_product(self, q, y):
        return q * (y - y.mean(-1, keepdim=True))


class Clamped(bx.Negentropy):
    def project(self, x):
        return super().project(x.clamp(min=-50))


class Unsummed(bx.Negentropy):
    def penalty(self, q):
        return torch.xlogy(q, q)


class Sized(bx.Negentropy):
    def project(self, x):  # slightly wrong, like an approximation that stops early
        q = super().project(x)
        return 0.999 * q + 0.001 / x.shape[-1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Doubled, r"project\(x\) must maximize .*another q is better by"),
        (Doubled, r"project\(x\) must be the gradient of"),
        (Unscaled, r"project\(x\) must add up to 1, got"),
        (Negative, r"project\(x\) must be at least 0, got -"),
        (Undefined, r"penalty\(q\) must (be finite|not change with an entry of 0)"),
        (Constant, r"operations that are differentiable in q: its derivative is, got 0 where finite differences give"),
        (Detached, r"operations that are differentiable in q: its derivative is, got"),
        (Scalar, r"penalty\(q\) must be a tensor, got float"),
        (Flat, r"project\(x\) must have shape \(2, 8, 5\)"),
        (Skewed, r"jacobian_product\(q, y\) must be the derivative of project\(x\) along y, got .* differences give"),
        (Skewed, r"jacobian_product must be symmetric"),
        (Unsummed, r"penalty\(q\) must have shape \(16,\) and dtype torch.float64, got shape \(16, 5\)"),
        (Sized, r"project\(x\) must be the gradient"),
    ],
)
def test_errors_name_the_wrong_method(wrong: type[bx.Regularizer], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)^{wrong.__name__} is not a regularizer yet:.*{message}"):
        bx.check_regularizer(wrong())


def test_a_probability_at_minus_infinity_that_is_not_zero() -> None:
    with pytest.raises(ValueError, match=r"project\(x\) must be 0 where x is -inf"):
        bx.check_regularizer(Clamped())

    class Leaking(bx.Negentropy):
        def jacobian_product(self, q, y):
            return super().jacobian_product(q, y) + 1e-3 * (q == 0)

    with pytest.raises(ValueError, match=r"jacobian_product\(q, y\) must be 0 where x is -inf"):
        bx.check_regularizer(Leaking())


def test_a_missing_method_is_named() -> None:
    class Empty(bx.Regularizer):
        pass

    x = torch.zeros(2)
    for call, message in [
        (lambda: Empty().max(x), r"Empty must define project\(x\)"),
        (lambda: Empty().penalty(x), r"Empty must define penalty\(q\)"),
        (lambda: Empty().jacobian_product(x, x), r"Empty must define jacobian_product\(q, y\)"),
        (lambda: bx.check_regularizer(Empty()), "Empty must define"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            call()
    with pytest.raises(ValueError, match="omega must be a Regularizer, got 'l2'"):
        bx.check_regularizer("l2")


def test_equal_regularizers() -> None:
    assert bx.Negentropy(0.5) == bx.Negentropy(0.5)
    assert len({bx.Negentropy(0.5), bx.Negentropy(0.5), bx.Negentropy(1.0), bx.SquaredL2(0.5)}) == 3
    assert bx.Tsallis(1.5) != bx.Tsallis(1.4)
    assert bx.Tsallis(2.0) != bx.SquaredL2()
    assert bx.Negentropy() != "negentropy"
    gamma = torch.tensor(1.0)
    assert bx.Negentropy(gamma) == bx.Negentropy(gamma)
    assert bx.Negentropy(gamma) != bx.Negentropy(gamma.clone())
    assert all(omega == omega for omega in OMEGAS.values())
    assert hash(bx.Negentropy(gamma)) == hash(bx.Negentropy(gamma))
    assert bx.Negentropy(1.0) != bx.Negentropy(gamma)
    assert bx.Negentropy(gamma) != bx.Negentropy(1.0)
    assert bx.Negentropy(1.0) != bx.Negentropy(torch.ones(3))

    class Custom(bx.Negentropy):
        def __init__(self, table: np.ndarray) -> None:
            super().__init__()
            self.table = table

    assert Custom(np.ones(3)) == Custom(np.ones(3))
    assert Custom(np.ones(3)) != Custom(np.zeros(3))
