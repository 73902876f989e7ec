"""Pooling by a smoothed max."""

from __future__ import annotations

import pytest
import torch
from support.problems import potentials
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from bellmax.nn import SmoothedMax


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_equals_the_function(omega: bx.Regularizer, dim: int) -> None:
    x = potentials(3, 4, 5)
    x[0, 1] = -torch.inf
    assert torch.equal(SmoothedMax(omega, dim)(x), omega.max(x, dim))


def test_gradients(omega: bx.Regularizer) -> None:
    x = potentials(3, 4, requires_grad=True)
    assert gradcheck(SmoothedMax(omega), x)
    assert gradgradcheck(SmoothedMax(omega), x)


def test_rows_of_minus_infinity() -> None:
    x = torch.full((2, 3), -torch.inf, requires_grad=True)
    value = SmoothedMax()(x)
    assert torch.equal(value, x.detach()[:, 0])
    assert not torch.autograd.grad(value.sum(), x)[0].any()


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_gamma_belongs_to_the_module(kind: type) -> None:
    pool = SmoothedMax(bx.SquaredL2(kind(torch.tensor(2.0))))
    assert len(list(pool.parameters())) == (kind is nn.Parameter)
    other = SmoothedMax(bx.SquaredL2(kind(torch.tensor(1.0))))
    other.load_state_dict(pool.state_dict())
    x = potentials(3, 4)
    assert torch.equal(other.double()(x), bx.SquaredL2(2.0).max(x))
    assert other.omega.gamma.dtype == torch.float64
    assert not SmoothedMax(bx.SquaredL2(2.0)).state_dict()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # a warning of dynamo
def test_compiles_and_exports() -> None:
    pool, x = SmoothedMax("l2"), potentials(3, 4, requires_grad=True)
    # Not in one graph: dynamo does not support a Function with a jvp.
    compiled = torch.compile(pool, backend="aot_eager")
    torch.testing.assert_close(compiled(x), pool(x))
    grads = (torch.autograd.grad(run(x).sum(), x) for run in (compiled, pool))
    torch.testing.assert_close(*grads)
    x = x.detach()
    torch.testing.assert_close(torch.export.export(pool, (x,)).module()(x), pool(x))


def test_repr_and_errors() -> None:
    assert repr(SmoothedMax("l2", 1)) == "SmoothedMax(omega=SquaredL2(gamma=1.0), dim=1)"
    with pytest.raises(ValueError, match=r"x must have a dimension 2, got shape \(3, 4\)"):
        SmoothedMax(dim=2)(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"x must have at least one entry along dim -1, got shape \(3, 0\)"):
        SmoothedMax()(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"x must be floating point, got dtype torch\.int64"):
        SmoothedMax()(torch.zeros(3, dtype=torch.int64))


def test_learnt_gamma_may_be_parametrized_and_replicated() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    layer = SmoothedMax(bx.Negentropy(torch.nn.Parameter(torch.tensor(4.0))))
    expected = layer(x)
    replica = layer._replicate_for_data_parallel()
    replica.gamma = layer.gamma.clone()
    torch.testing.assert_close(replica(x), expected)
    torch.nn.utils.parametrize.register_parametrization(layer, "gamma", torch.nn.Identity())
    value = layer(x)
    torch.testing.assert_close(value, expected)
    assert torch.autograd.grad(value, layer.parametrizations.gamma.original)[0] != 0


def test_negative_gamma_raises_at_the_first_use() -> None:
    gamma = torch.tensor(1.0)
    layer = SmoothedMax(bx.Negentropy(gamma))
    layer.load_state_dict({"gamma": torch.tensor(-1.0)})
    assert gamma == 1
    with pytest.raises(ValueError, match="gamma must be finite and > 0, got a tensor from -1 to -1"):
        layer(torch.zeros(3))


@pytest.mark.parametrize("name", ["negentropy", "l2"])
def test_nan_propagates(name: str) -> None:
    assert SmoothedMax(name)(torch.tensor([torch.nan, 0.0])).isnan()
