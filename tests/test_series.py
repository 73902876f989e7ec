"""Distances, divergences and barycenters of series against formulas, enumeration and loops."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.checks import close
from support.grids import enumerated
from support.inside import pairwise
from support.problems import OMEGAS, potentials
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx

NAIVE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sqeuclidean": lambda a, b: ((a - b) ** 2).sum(),
    "euclidean": lambda a, b: ((a - b) ** 2).sum().sqrt(),
    "cosine": lambda a, b: 1 - (a @ b) / (a.norm() * b.norm()),
    "cityblock": lambda a, b: (a - b).abs().sum(),
    "log_sqeuclidean": lambda a, b: ((a - b) ** 2).sum() / 2 + (2 - (-((a - b) ** 2).sum() / 2).exp()).log(),
}
DIVERGENCES = ["debiased", "sharp", "mean_cost"]
each_cost = pytest.mark.parametrize("cost", list(NAIVE))
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def ragged(*lengths: int, features: int = 2, seed: int = 0) -> list[torch.Tensor]:
    return [potentials(n, features, seed=seed + k) for k, n in enumerate(lengths)]


# --- costs


@each_cost
@pytest.mark.parametrize("features", [1, 3, 16, 17])
def test_cost_is_its_formula(cost: str, features: int) -> None:
    x, y = potentials(2, 1, 4, features), potentials(3, 5, features, seed=1)
    costs = pairwise(x, y, cost)
    assert costs.shape == (2, 3, 4, 5)
    for p, q, i, j in np.ndindex(*costs.shape):
        close(costs[p, q, i, j], NAIVE[cost](x[p, 0, i], y[q, j]), 1e-14)
    close(pairwise(x[..., 1:3, :], y[:, 2:, :], cost), costs[..., 1:3, 2:], 1e-14)  # a block of the matrix


@each_cost
@pytest.mark.parametrize("features", [2, 40])
def test_equal_points_have_cost_0(cost: str, features: int) -> None:
    x = (potentials(600, features) + 1e4).float()  # more cells than a block holds
    assert not pairwise(x, x.clone(), cost).diagonal().any()


def test_small_distances_keep_their_digits() -> None:
    x, step = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[3e-9, 0, 4e-9]], dtype=torch.float64)
    assert pairwise(x, step, "sqeuclidean").item() == pytest.approx(25e-18, rel=1e-12)
    assert pairwise(x, step, "log_sqeuclidean").item() == pytest.approx(25e-18, rel=1e-12)  # δ + log(2 − e^−δ) ≈ 2δ
    assert pairwise(x + 1, step + 1, "cosine").item() == pytest.approx((25 - 49 / 3) * 1e-18 / 6, rel=1e-7)


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_close_points_of_many_features_keep_their_digits(share: float) -> None:
    """Costs use matrix products, except for cells that would lose digits; if these are many, differences."""
    x, y = (potentials(2, 60, 80, seed=seed).float() + 30 for seed in (0, 1))
    n = int(share * 60)
    y[:, : n + 1] = x[:, : n + 1] + 1e-3 * potentials(2, n + 1, 80, seed=2).float()
    y[0, 0] = x[0, 0]
    exact = (x.double().unsqueeze(-2) - y.double().unsqueeze(-3)).square().sum(-1)
    costs = pairwise(x, y, "sqeuclidean")
    assert costs[0, 0, 0] == 0
    assert ((costs - exact).abs() <= 2e-6 * exact).all()


def test_infinite_points_of_many_features_are_infinitely_far() -> None:
    x, y = potentials(5, 40), potentials(6, 40, seed=1)
    whole = pairwise(x, y, "sqeuclidean")
    y[3, 0] = math.inf
    costs = pairwise(x, y, "sqeuclidean")
    assert costs[:, 3].isinf().all()
    close(costs[:, :3], whole[:, :3], 1e-14)


@each_cost
@pytest.mark.parametrize("features", [1, 3, 20])
def test_derivatives_of_costs(cost: str, features: int) -> None:
    x = potentials(2, 1, 3, features, requires_grad=True)
    y = potentials(3, 2, features, seed=1, requires_grad=True)
    assert gradcheck(lambda x, y: pairwise(x, y, cost), (x, y), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(lambda x, y: pairwise(x, y, cost), (x, y), fast_mode=True)


@each_cost
@pytest.mark.parametrize("features", [1, 3, 20])
def test_the_gradient_at_equal_points_is_0(cost: str, features: int) -> None:
    x = potentials(1, 3, features).expand(2, 3, features).clone()
    x[:, 1] = 0
    x.requires_grad_()
    diagonal = pairwise(x, x.detach().clone(), cost).diagonal(0, -2, -1)
    (slope,) = torch.autograd.grad(diagonal.sum(), x, create_graph=True)
    close(slope.detach(), torch.zeros_like(x), 1e-12)
    (curvature,) = torch.autograd.grad(slope.square().sum() + slope.sum(), x)
    assert curvature.isfinite().all()


@each_cost
def test_gradient_in_float32_is_invariant_to_an_offset(cost: str) -> None:
    x, y = potentials(50, 2).float(), potentials(60, 2, seed=1).float()
    x, y = x + 1024 - 1024, y + 1024 - 1024  # float32 has this accuracy at an offset of 1024
    weights, shift = potentials(50, 60, seed=2).float(), 0 if cost == "cosine" else 1024

    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad((weights * pairwise(x, y, cost)).sum(), x)[0]

    exact = gradient(x.double(), y.double())
    close(gradient(x + shift, y + shift).double(), exact, 1e-4)


@each_cost
def test_costs_under_torch_func(cost: str) -> None:
    x, y, z = potentials(5, 3, 2), potentials(4, 2, seed=1), potentials(3, 2, seed=2)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return pairwise(x, y, cost).square().sum()

    close(torch.func.vmap(lambda x: pairwise(x, y, cost))(x), pairwise(x, y, cost))
    leaf = x[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (bend,) = torch.autograd.grad((slope * z).sum(), leaf)
    close(torch.func.vmap(torch.func.grad(loss))(x)[0], slope.detach())
    forward_twice = torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (z,))[1], (x[0],), (z,))[1]
    close(forward_twice, (bend * z).sum())


def test_cosine_of_zero_vectors() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    close(pairwise(x, x, "cosine"), torch.tensor([[0.0, 0.5], [0.5, 0.0]]), 0)


# --- two series


@each_cost
def test_dtw_is_the_value_of_its_costs(cost: str, omega: bx.Regularizer, backend: str) -> None:
    x, y = potentials(3, 1, 4, 2), potentials(2, 5, 2, seed=1)
    costs = pairwise(x, y, cost)
    close(bx.dtw(x, y, cost=cost, omega=omega), bx.DTW(costs, omega=omega).value, 0)
    close(bx.dtw(x, y, cost=lambda *_: costs, omega=omega, band=1), bx.DTW(costs, omega=omega, band=1).value, 0)


@each_divergence
def test_divergence_of_equal_series_is_exactly_zero(divergence: str, omega: bx.Regularizer) -> None:
    for features, cost in enumerate(NAIVE, start=1):
        x = potentials(3, 6, features).float()
        assert not bx.dtw(x, x.clone(), cost=cost, omega=omega, divergence=divergence, band=3).any()
    assert not bx.dtw_cdist(x, omega=omega, divergence=divergence).diagonal().any()


@each_divergence
def test_divergences_by_enumeration(divergence: str, omega: bx.Regularizer, backend: str) -> None:
    x, y = potentials(3, 2), potentials(4, 2, seed=1)

    def measure(a: torch.Tensor, b: torch.Tensor) -> float:
        program = enumerated(pairwise(a, b, "sqeuclidean"), omega)
        if divergence == "debiased":
            return -program.value
        scores = program.scores
        return float(-scores.mean() if divergence == "mean_cost" else -(program.probabilities * scores).sum())

    expected = measure(x, y) - measure(x, x) / 2 - measure(y, y) / 2
    assert bx.dtw(x, y, omega=omega, divergence=divergence).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
@pytest.mark.parametrize("name", ["negentropy", "l2"])
def test_derivatives(divergence: str | None, name: str) -> None:
    x, y = potentials(2, 3, 2, requires_grad=True), potentials(1, 2, 2, seed=1, requires_grad=True)
    lengths = torch.tensor([3, 2]), 2

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return bx.dtw(x, y, lengths=lengths, omega=OMEGAS[name], divergence=divergence)

    assert gradcheck(run, (x, y), fast_mode=True)
    assert gradgradcheck(run, (x, y), fast_mode=True)


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
@pytest.mark.parametrize(("band", "name"), [(None, "negentropy"), (1, "negentropy"), (1, "l2")])
def test_padded_series_equal_cut_series(divergence: str | None, band: float | None, name: str) -> None:
    xs, ys = ragged(4, 1, 3, seed=2), ragged(2, 5, 4, seed=7)
    x = torch.nn.utils.rnn.pad_sequence(xs, True, padding_value=math.nan).requires_grad_()
    y = torch.nn.utils.rnn.pad_sequence(ys, True, padding_value=math.nan).requires_grad_()
    lengths = torch.tensor([4, 1, 3]), torch.tensor([2, 5, 4])

    def run(x: torch.Tensor, y: torch.Tensor, **more: Any) -> torch.Tensor:
        return bx.dtw(x, y, band=band, omega=OMEGAS[name], divergence=divergence, **more)

    together = run(x, y, lengths=lengths)
    close(together, torch.stack([run(a, b) for a, b in zip(xs, ys, strict=True)]))
    for series, length, gradient in zip((x, y), lengths, torch.autograd.grad(together.sum(), (x, y)), strict=True):
        assert gradient.isfinite().all()
        assert not gradient[series.isnan()].any()
        assert gradient[torch.arange(3), length - 1].any(-1).all() or divergence is not None
    close(run(x[0], y, lengths=(2, lengths[1])), run(x[0, :2], y, lengths=(2, lengths[1])))
    close(run(x[2], y[1], lengths=(3, 4)), run(xs[2], ys[1][:4]))


@st.composite
def pairs_of_series(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two series of any scale, or a series and a small or large change of it."""
    features, scale = draw(st.integers(1, 3)), 10.0 ** draw(st.floats(-6, 2))

    def series(length: int) -> torch.Tensor:
        return torch.from_numpy(draw(arrays(np.float64, (length, features), elements=st.floats(-3, 3))))

    x = series(draw(st.integers(1, 7)))
    if draw(st.booleans()):
        return x, x + scale * series(len(x))
    return scale * x, scale * series(draw(st.integers(1, 7)))


@given(pairs_of_series())
def test_debiased_divergence_is_not_negative(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = pair
    assert bx.dtw(x, y, cost="log_sqeuclidean", divergence="debiased") >= -1e-9


@pytest.mark.parametrize("gamma", [0.1, 10.0])
def test_the_cost_that_goes_with_another_gamma(gamma: float) -> None:
    def cost(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gamma * pairwise(x / gamma**0.5, y / gamma**0.5, "log_sqeuclidean")

    x, y = potentials(4, 2), potentials(5, 2, seed=1)
    smoothed = bx.dtw(x, y, cost=cost, omega=bx.Negentropy(gamma), divergence="debiased")
    scaled = bx.dtw(x / gamma**0.5, y / gamma**0.5, cost="log_sqeuclidean", divergence="debiased")
    close(smoothed, gamma * scaled)


def test_debiased_divergence_can_be_negative_for_l2(backend: str) -> None:
    x = torch.tensor([1.495, 0.787, 0.23, -0.123, 1.089], dtype=torch.float64).unsqueeze(-1)
    y = torch.tensor([1.513, 0.835, 0.246, -0.106, 1.102], dtype=torch.float64).unsqueeze(-1)
    assert bx.dtw(x, y, omega="l2", divergence="debiased").item() == pytest.approx(-3.695e-4, abs=1e-7)
    assert bx.dtw(x, y, omega="negentropy", divergence="debiased") > 0


def test_a_tensor_gamma_broadcasts_and_learns(backend: str) -> None:
    x, y = potentials(2, 3, 2), potentials(4, 2, seed=1)
    gamma = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64, requires_grad=True)

    def run(gamma: torch.Tensor) -> torch.Tensor:
        return bx.dtw(x, y, omega=bx.Negentropy(gamma), divergence="debiased", lengths=(3, torch.tensor([4, 2])))

    assert run(gamma).shape == (3, 2)
    close(run(gamma)[2, 1], bx.dtw(x[1], y[:2], omega=bx.Negentropy(2.0), divergence="debiased"))
    assert gradcheck(run, gamma)


@pytest.mark.parametrize("divergence", [None, "sharp"])
def test_pairs_without_an_alignment(divergence: str | None) -> None:
    x, y = potentials(2, 3, 1, requires_grad=True), potentials(2, 3, 1, seed=1)

    def cost(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wall = torch.zeros(2, 3, 3, dtype=torch.float64)
        if x is not y:
            wall[1, 1] = math.inf
        return (x - y.mT).square() + wall

    value = bx.dtw(x, y, cost=cost, divergence=divergence)
    assert value.isinf().tolist() == [False, True]
    assert torch.autograd.grad(value[0], x)[0].isfinite().all()


def test_dtypes_and_reductions(backend: str) -> None:
    x, y = potentials(3, 4, 2).half(), potentials(3, 5, 2, seed=1).half()
    values = bx.dtw(x, y)
    assert values.dtype == torch.float32
    close(values, bx.dtw(x.float(), y.float()), 0)
    assert bx.dtw(x, y.double()).dtype == torch.float64
    close(bx.dtw(x, y, reduction="mean"), values.mean(), 0)
    close(bx.dtw(x, y, reduction="sum"), values.sum(), 0)
    assert bx.dtw(x[:0], y[:0]).shape == (0,)


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
def test_transforms(divergence: str | None) -> None:
    x, y = potentials(3, 4, 2), potentials(5, 2, seed=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return bx.dtw(x, y, cost="euclidean", divergence=divergence).sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(leaf), leaf)
    close(torch.func.vmap(torch.func.grad(run))(x), gradient)
    close(torch.func.jvp(run, (x,), (x,))[1], (gradient * x).sum())


def test_compiles() -> None:
    x, y = potentials(3, 4, 2, requires_grad=True), potentials(5, 2, seed=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return bx.dtw(x, y, cost="euclidean", divergence="debiased", reduction="sum")

    (got,) = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(x), x)
    close(got, torch.autograd.grad(run(x), x)[0])


# --- collections


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
@pytest.mark.parametrize("max_cells", [1, 2**8, 2**20])
def test_cdist_is_the_loop(divergence: str | None, max_cells: int) -> None:
    xs, ys = ragged(3, 6, 1, 4, 4), ragged(5, 2, 3, seed=9)
    options: dict[str, Any] = {"omega": "l2", "band": 2, "cost": "cityblock", "divergence": divergence}
    for right in (xs, ys):
        loop = torch.stack([torch.stack([bx.dtw(x, y, **options) for y in right]) for x in xs])
        got = bx.dtw_cdist(xs, None if right is xs else right, max_cells=max_cells, **options)
        close(got, loop)
        assert right is ys or got.equal(got.mT)


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
def test_cdist_keeps_gradients(divergence: str | None) -> None:
    xs, ys = ragged(3, 2, 4), ragged(2, 3, seed=9)
    weights = potentials(3, 3, seed=4)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    leaves = [x.requires_grad_() for x in (*xs, *ys)]
    omega = bx.Negentropy(gamma)
    for right in (xs, ys):
        loop = torch.stack([torch.stack([bx.dtw(x, y, omega=omega, divergence=divergence) for y in right]) for x in xs])
        got = bx.dtw_cdist(xs, None if right is xs else ys, omega=omega, divergence=divergence, max_cells=2**7)
        w = weights[:, : len(right)]
        wanted = [*leaves[: 3 if right is xs else 5], gamma]
        for a, b in zip(
            *(torch.autograd.grad((w * v).sum(), wanted, allow_unused=True) for v in (got, loop)), strict=True
        ):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                close(a, b)
    with torch.no_grad():
        assert not bx.dtw_cdist(xs, omega=omega).requires_grad
    mapped = torch.func.grad(lambda x: bx.dtw_cdist([x], [y.detach() for y in ys]).sum())(xs[0].detach())
    close(mapped, torch.autograd.grad(bx.dtw_cdist(xs[:1], ys).sum(), xs[0])[0])


def test_cdist_takes_lists_arrays_and_frames(backend: str) -> None:
    xs = ragged(3, 5, 4, features=1)
    stacked = torch.nn.utils.rnn.pad_sequence(xs, True, padding_value=math.nan)
    expected = bx.dtw_cdist(xs)
    for same in (
        stacked,
        stacked.squeeze(-1),
        stacked.numpy(),
        [x.squeeze(-1) for x in xs],
        [x.numpy()[:, 0] for x in xs],
    ):
        close(bx.dtw_cdist(same), expected, 0)
    reversed_view = [x.numpy()[::-1] for x in xs]
    close(bx.dtw_cdist(reversed_view), bx.dtw_cdist([x.flip(0) for x in xs]), 0)
    assert bx.dtw_cdist([x.half() for x in xs], [xs[0]]).dtype == torch.float64
    assert bx.dtw_cdist([], xs).shape == (0, 3)
    assert bx.dtw_cdist(xs, [], divergence="sharp").shape == (3, 0)
    assert bx.dtw_cdist([]).shape == (0, 0)


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    xs = ragged(3, 2)
    pytest.importorskip("rich")
    close(bx.dtw_cdist(xs, progress=True), bx.dtw_cdist(xs), 0)
    assert not capsys.readouterr().out

    def interrupted(*_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bx.dtw_cdist(xs, cost=interrupted, progress=True)
    real_import = builtins.__import__

    def without_rich(name: str, *args: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(ImportError, match=r"progress=True needs rich: pip install 'bellmax\[progress\]'"):
        bx.dtw_cdist(xs, progress=True)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [*((name, None) for name in OMEGAS), *(("negentropy", d) for d in DIVERGENCES), ("l2", "sharp")],
)
def test_barycenter_lowers_the_objective(name: str, divergence: str | None) -> None:
    xs, weights = [x.cumsum(0) for x in ragged(6, 4, 5)], torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    copies = [x.clone() for x in xs]
    options: dict[str, Any] = {"omega": OMEGAS[name], "divergence": divergence}

    def objective(z: torch.Tensor) -> float:
        return float((weights * bx.dtw_cdist([z], xs, **options)).sum())

    start = bx.dtw_barycenter(xs, weights, max_iter=0, **options)
    mean = sum(w * stretched for w, stretched in zip(weights / 6, map(to_length_5, xs), strict=True))
    close(start, torch.as_tensor(mean))
    z = bx.dtw_barycenter(xs, weights, max_iter=6, **options)
    assert z.shape == (5, 2)
    assert not z.requires_grad
    assert objective(z) < objective(start)
    assert z.equal(bx.dtw_barycenter(xs, (weights * 5).tolist(), max_iter=6, **options))
    assert all(x.equal(copy) for x, copy in zip(xs, copies, strict=True))


def to_length_5(x: torch.Tensor) -> torch.Tensor:
    at = np.linspace(0, len(x) - 1, 5)
    return torch.from_numpy(np.stack([np.interp(at, np.arange(len(x)), column) for column in x.mT.numpy()], 1))


def test_barycenter_of_copies_is_the_series() -> None:
    x = potentials(6, 2).cumsum(0)
    for omega in (bx.Negentropy(1e-3), bx.SquaredL2(1e-3)):
        close(bx.dtw_barycenter([x, x, x], omega=omega), x, 5e-2)
    away = x + potentials(6, 2, seed=5) / 10
    close(bx.dtw_barycenter([x, x], init=away, divergence="debiased", cost="log_sqeuclidean"), x, 1e-3)


def test_barycenter_is_stationary_and_leaves_gamma_alone() -> None:
    xs = [x.requires_grad_() for x in ragged(5, 4)]
    gamma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        z = bx.dtw_barycenter(xs, omega=bx.Negentropy(gamma), length=3)
    z = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(bx.dtw_cdist([z], xs, omega=bx.Negentropy(gamma)).mean(), z)
    assert gradient.abs().max() < 1e-5
    assert gamma.grad is None
    assert all(x.grad is None for x in xs)


# --- errors


def wrong_calls() -> Iterator[tuple[Callable[[], Any], str]]:
    x, y = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
    three = torch.tensor([3, 3, 3])
    yield lambda: bx.dtw(x, y[..., :3]), r"same number of features, got 4 in x of shape \(2, 3, 4\) and 3 in y"
    yield lambda: bx.dtw(3.0, y), r"x must have shape \(length,\) or \(\.\.\., length, features\).* got \(\)"
    yield lambda: bx.dtw(x, y[:, :0]), r"y must have shape .* got \(2, 0, 4\)"
    yield lambda: bx.dtw(x + 0j, y), "x must hold real numbers, got dtype torch.complex64"
    yield (
        lambda: bx.dtw(x, y, cost="manhattan"),
        (
            "cost must be a function or one of 'sqeuclidean', 'euclidean', 'cosine', 'cityblock', 'log_sqeuclidean', "
            "got 'manhattan'"
        ),
    )
    yield (
        lambda: bx.dtw(x, y, cost=lambda x, y: x),
        (
            r"cost must return a tensor of shape \(2, 3, 5\) for x of shape \(2, 3, 4\) and y of shape \(2, 5, 4\), "
            r"got shape \(2, 3, 4\)"
        ),
    )
    yield lambda: bx.dtw(x, y, cost=lambda x, y: 1), "cost must return a tensor .* got int"
    yield (
        lambda: bx.dtw(x, y, divergence="sinkhorn"),
        ("divergence must be None or one of 'debiased', 'sharp', 'mean_cost', got 'sinkhorn'"),
    )
    yield lambda: bx.dtw(x, y, reduction="max"), "reduction must be one of 'none', 'mean', 'sum', got 'max'"
    yield lambda: bx.dtw(x, y, omega="entropy"), "omega must be"
    yield lambda: bx.dtw(x, y, band=-1), "band must be at least 0, got -1"
    yield lambda: bx.dtw_cdist([x, y], band=0.1), "band must be a number of steps, 0 or at least 1, got 0.1: for"
    holed = torch.tensor([1.0, math.nan, 2.0])
    yield lambda: bx.dtw_cdist([holed[2:]], [holed[:1], holed]), r"got NaN at ys\[1\]\[1\]"
    yield lambda: bx.dtw_barycenter([holed]), r"got NaN at xs\[0\]\[1\]"
    two = torch.tensor([[1.0, 2.0], [3.0, math.nan], [0.0, 0.0]])
    yield lambda: bx.dtw_neighbors([two, two], k=1), r"got NaN at xs\[0\]\[1, 1\]"
    yield lambda: bx.dtw(x, torch.zeros(3, 5, 4)), r"batch shapes must broadcast, got x \(2,\), y \(3,\)"
    yield lambda: bx.dtw(x, y, lengths=(three, 5)), r"batch shapes must broadcast, .*lengths\[0\] \(3,\)"
    yield lambda: bx.dtw(x, y, omega=bx.Negentropy(three / 1.0)), r"must broadcast, .*gamma \(3,\)"
    yield lambda: bx.dtw(x, y, lengths=(0, 5)), r"lengths\[0\] must be from 1 to 3, got 0"
    yield lambda: bx.dtw(x, y, lengths=(3, 6)), r"lengths\[1\] must be from 1 to 5, got 6"
    yield lambda: bx.dtw(x, y, lengths=(torch.tensor([1, 4]), 5)), r"lengths\[0\] must be from 1 to 3, got 4"
    yield lambda: bx.dtw(x, y, lengths=(3, torch.tensor([1.0, 2.0]))), r"lengths\[1\] must hold integers, got .*float32"
    yield lambda: bx.dtw(x, y, lengths=three), r"lengths must be a pair \(lengths_a, lengths_b\), got Tensor"
    yield lambda: bx.dtw(x, y * math.nan), "cost must be finite or .inf, got nan"
    yield lambda: bx.dtw_cdist([x]), r"xs\[0\] must have shape \(length,\) or \(length, features\), got \(2, 3, 4\)"
    yield lambda: bx.dtw_cdist([x[0], x[0, 0]]), r"xs\[1\] must have 4 features like xs\[0\], got 1"
    yield lambda: bx.dtw_cdist([x[0]], [y[0, :, :3]]), r"ys\[0\] must have 4 features like xs\[0\], got 3"
    yield lambda: bx.dtw_cdist([x[0, :0]]), r"xs\[0\] must have shape .* got \(0, 4\)"
    yield lambda: bx.dtw_cdist([["a", "b"]]), r"xs\[0\] must hold numbers, got dtype <U1"
    yield lambda: bx.dtw_cdist(x * math.nan), r"xs\[0\] must have a value before its NaN padding, got only NaN"
    yield lambda: bx.dtw_cdist(x, max_cells=0), "max_cells must be at least 1, got 0"
    yield lambda: bx.dtw_cdist(x, omega=bx.Negentropy(three / 1.0)), r"gamma must be one number .* got shape \(3,\)"
    yield lambda: bx.dtw_barycenter([]), "xs must hold at least one series, got none"
    yield lambda: bx.dtw_barycenter(x, [1.0]), r"weights must hold one number for each of 2 series, got shape \(1,\)"
    yield lambda: bx.dtw_barycenter(x, [1.0, -1.0]), r"weights must be at least 0 and not all 0, got \[1.0, -1.0\]"
    yield lambda: bx.dtw_barycenter(x, [0.0, 0.0]), "weights must be at least 0 and not all 0"
    yield lambda: bx.dtw_barycenter(x, init=x[0, :, :2]), r"init must have shape \(length, 4\), got \(3, 2\)"
    yield lambda: bx.dtw_barycenter(x, init=x[0], length=2), r"init must have shape \(2, 4\), got \(3, 4\)"
    yield lambda: bx.dtw_barycenter(x, length=0), "length must be at least 1, got 0"


@pytest.mark.parametrize(("call", "message"), list(wrong_calls()), ids=lambda value: None if callable(value) else value)
def test_bad_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- custom moves


def test_penalties_weights_and_open_ends_equal_dtw() -> None:
    x, y = ragged(9, 12)
    penalty = torch.tensor([0.0, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    moves = {"step_weights": (2, 1, 1), "step_penalties": penalty, "open_end": True}
    got = bx.dtw(x, y, band=6, omega="sparsemax", **moves)
    close(got, bx.DTW(pairwise(x, y, "sqeuclidean"), band=6, omega="sparsemax", **moves).value)
    assert torch.autograd.grad(got, penalty)[0].sum() > 0
    loss = bx.nn.DTWLoss("sparsemax", band=6, **moves)
    close(loss(x.unsqueeze(0), y.unsqueeze(0)), got)
    open_value = bx.dtw(x[3:7], x, open_begin=True, open_end=True, omega="hard")
    assert open_value == 0
