"""Pairs of short series, one pair per lane, against the sweeps over their cost matrices."""

from __future__ import annotations

import pytest
import torch
from support.inside import short_pairs
from support.kernels import needs_kernels, took

import bellmax as bx

pytestmark = needs_kernels


def collection(count: int, longest: int, features: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    lengths = torch.randint(1, longest + 1, (count,)).tolist()
    return [torch.randn(length, features, dtype=dtype) for length in lengths]


def by_sweeps(monkeypatch: pytest.MonkeyPatch, *collections: list[torch.Tensor], **options: object) -> torch.Tensor:
    with monkeypatch.context() as m, took("dtw_short_pairs", times=0):
        m.setattr(short_pairs.NativeShortPairs, "supports", lambda *_: False)
        return bx.dtw_cdist(*collections, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["sqeuclidean", "cityblock"])
@pytest.mark.parametrize(("longest", "features"), [(1, 1), (9, 1), (24, 3), (64, 2)])
def test_equals_the_sweeps_over_cost_matrices(
    longest: int, features: int, cost: str, omega: bx.Regularizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs, ys = collection(40, longest, features), collection(30, longest, features)
    with took("dtw_short_pairs"):
        got = bx.dtw_cdist(xs, ys, cost=cost, omega=omega)
    torch.testing.assert_close(got, by_sweeps(monkeypatch, xs, ys, cost=cost, omega=omega), rtol=1e-12, atol=1e-12)


def test_float32_by_products_and_by_values() -> None:
    """In float32, negentropy is computed by products, unless the costs are too large."""
    for scale in (1.0, 3000.0):
        xs = [scale * x for x in collection(20, 30, 1, torch.float32)]
        with took("dtw_short_pairs"):
            got = bx.dtw_cdist(xs, gamma=0.5)
        precise = bx.dtw_cdist([x.double() for x in xs], gamma=0.5)
        torch.testing.assert_close(got.double(), precise, rtol=3e-6, atol=3e-5)


def test_euclidean_cost_of_one_feature_and_zero_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = collection(40, 20, 1, torch.float32)
    with took("dtw_short_pairs"):
        got = bx.dtw_cdist(xs, omega="hard", cost="euclidean")
    torch.testing.assert_close(got, by_sweeps(monkeypatch, xs, omega="hard", cost="euclidean"))
    with took("dtw_short_pairs"):
        divergence = bx.dtw_cdist(xs, [x.clone() for x in xs], divergence="debiased")
    assert divergence.diagonal().eq(0).all()


@pytest.mark.parametrize("gamma", [torch.tensor(0.3), torch.full((1,), 0.3, requires_grad=True)])
def test_gamma_may_be_a_tensor_if_no_gradient_is_recorded(gamma: torch.Tensor) -> None:
    xs = collection(20, 12, 2)
    with took("dtw_short_pairs"), torch.no_grad():
        got = bx.dtw_cdist(xs, gamma=gamma)
    assert torch.equal(got, bx.dtw_cdist(xs, gamma=gamma.item()))


def test_others_take_the_sweeps() -> None:
    xs = collection(10, 12, 2)
    with took("dtw_short_pairs", times=0):
        learnt = torch.tensor(2.0, requires_grad=True)
        for options in ({"cost": "cosine"}, {"band": 3}, {"divergence": "sharp"}, {"gamma": learnt}):
            bx.dtw_cdist(xs, **options)
        bx.dtw_cdist([x.requires_grad_() for x in collection(10, 12, 2)]).sum().backward()
        bx.dtw_cdist(collection(10, 65, 2)[:3])
    xs[3] = xs[3].clone()
    xs[3][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"got NaN at xs\[3\]\[0, 0\]"):
        bx.dtw_cdist(xs)
