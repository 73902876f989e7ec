"""Fused kernels with a differentiable fallback: inputs that depend on each other, and unusual kinds of tensors."""

from __future__ import annotations

import pytest
import torch
from support.kernels import needs_kernels
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import bellmax as bx
from bellmax import losses
from bellmax.nn import CRF

LABELS = torch.tensor([[0, 1, -100, 2], [1, 2, 0, -100]])


def scores() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, requires_grad=True)


OF_ONE_TENSOR = {
    "the same series": lambda e: bx.dtw(e, e),
    "a series and its mirror": lambda e: bx.dtw(e, e.flip(0)),
    "debiased": lambda e: bx.dtw(e, torch.ones(5, 3, dtype=torch.float64), divergence="debiased"),
    "long": lambda e: bx.dtw(e.repeat(30, 1), e.repeat(30, 1)),
    "transitions of emissions": lambda e: bx.Chain.from_scores(e, e[:3] * 2).value,
    "start is end": lambda e: bx.Chain.from_scores(e, torch.zeros(3, 3).double(), start=e[0], end=e[0]).value,
    "labels": lambda e: losses.surrogate(bx.Chain.from_scores(e, e[:3].T), torch.tensor([0, 2, 1, 1])),
    "marginals": lambda e: bx.Chain.from_scores(e[:, :2], e[:2, :2]).marginals.square().sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_TENSOR)
def test_inputs_that_depend_on_each_other(name: str, backend: str) -> None:
    e, function = scores(), OF_ONE_TENSOR[name]
    (first,) = torch.autograd.grad(function(e), e)
    (again,) = torch.autograd.grad(function(e), e, create_graph=True)
    torch.testing.assert_close(again, first)
    assert torch.autograd.gradgradcheck(function, e, fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"lengths": [2, 3]}, {"mask": LABELS >= 0}])
def test_second_derivatives_with_padded_labels(options: dict) -> None:
    crf, e = CRF(3).double(), torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    labels = LABELS if not options else LABELS.masked_fill(LABELS < 0, 99)

    def loss(e: Tensor) -> Tensor:
        return crf(e, labels, **options)

    if "lengths" in options:
        labels = torch.tensor([[0, 1, -7, 99], [1, 2, 0, -100]])
    assert torch.autograd.gradgradcheck(loss, e)


def test_a_sequence_without_steps() -> None:
    crf = CRF(3)
    for batch in ((), (2,), (2, 3), (0,)):
        e = torch.zeros(*batch, 0, 3, requires_grad=True)
        loss = crf(e, torch.zeros(*batch, 0, dtype=torch.int64))
        assert loss == 0
        loss.backward()


def test_a_default_device_does_not_matter() -> None:
    crf, e = CRF(3), torch.randn(2, 4, 3)
    x = torch.randn(600, 1)
    labels = torch.zeros(2, 4, dtype=torch.int64)
    wanted = crf(e, labels), bx.dtw(x, x.flip(0)), bx.DTW(torch.rand(3, 5, generator=torch.Generator())).entropy()
    with torch.device("meta"):
        got = crf(e, labels), bx.dtw(x, x.flip(0))
    assert [value.equal(other) for value, other in zip(got, wanted, strict=False)] == [True, True]


@needs_kernels
def test_tensor_subclasses_and_lazy_views() -> None:
    x, z = torch.randn(4, 3, 3), torch.randn(2, 4, 3)
    wanted = bx.Chain(x).value
    pair = bx.Chain(TwoTensor(x, x.clone())).value
    assert pair.a.equal(wanted)
    torch.testing.assert_close(bx.Chain(torch._neg_view(x)).value, bx.Chain(-x).value)
    torch.testing.assert_close(bx.DTW(torch._neg_view(x)).value, bx.DTW(-x).value)
    assert bx.Chain(torch._efficientzerotensor((4, 3, 3))).value.exp().round() == 81
    assert not bx.Chain(x).hessian_product(torch._efficientzerotensor((4, 3, 3))).any()
    loss = CRF(3)(TwoTensor(z, z.clone()), torch.zeros(2, 4, dtype=torch.int64))
    assert loss.a.equal(CRF(3)(z, torch.zeros(2, 4, dtype=torch.int64)))
