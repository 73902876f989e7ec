"""The equalities of docs/migrate/time-series.md in float64, with tslearn and dtaidistance if they are installed."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from support.peers import without_numba
from torch import Tensor

import bellmax as bx
from bellmax.nn import DTWLoss

SHAPES = [(20, 20, 1), (17, 17, 3), (25, 18, 1), (12, 30, 2)]  # length of x, length of y, features
EQUAL = [shape for shape in SHAPES if shape[0] == shape[1]]
GAMMAS = [0.01, 1.0, 10.0]


@pytest.fixture
def tslearn() -> ModuleType:
    return without_numba("tslearn.metrics")


@pytest.fixture
def dtaidistance() -> ModuleType:
    """The functions of dtaidistance for several features, which also take one."""
    return pytest.importorskip("dtaidistance.dtw_ndim", reason="dtaidistance is not installed")


def walks(*lengths: int, features: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, features, dtype=torch.float64, generator=generator).cumsum(0) for n in lengths]


def pair(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    x, y = walks(*shape[:2], features=shape[2])
    return x, y


def costs(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def window_of(n: int, m: int, radius: int) -> Tensor:
    offset = torch.arange(m) - torch.arange(n).unsqueeze(-1)
    return (offset >= -radius - max(0, n - m)) & (offset <= radius + max(0, m - n))


def pairs_of(p: bx.DTW) -> list[tuple[int, int]]:
    return [(i, j) for i, j in p.best_alignment().tolist() if i >= 0]


def stacked(series: list[Tensor]) -> np.ndarray:
    """An array padded with NaN, the format of tslearn."""
    return torch.nn.utils.rnn.pad_sequence(series, batch_first=True, padding_value=torch.nan).numpy()


def assert_equal(actual: Tensor, expected: object, rtol: float = 1e-14, atol: float = 0.0) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_root_of_hard_value_is_dtw_of_tslearn(tslearn: ModuleType, shape: tuple[int, int, int]) -> None:
    x, y = pair(shape)
    path, distance = tslearn.dtw_path(x.numpy(), y.numpy())
    assert_equal(bx.dtw(x, y, omega="hard").sqrt(), tslearn.dtw(x.numpy(), y.numpy()))
    assert_equal(bx.DTW(costs(x, y), omega="hard").value.sqrt(), distance)
    assert pairs_of(bx.DTW(costs(x, y), omega="hard")) == path


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
def test_cost_is_metric_of_tslearn(tslearn: ModuleType, metric: str) -> None:
    x, y = pair((25, 18, 3))
    _, value = tslearn.dtw_path_from_metric(x.numpy(), y.numpy(), metric=metric)
    # Distances of scikit-learn are less accurate.
    assert_equal(bx.dtw(x, y, cost=metric, omega="hard"), value, rtol=1e-13)


@pytest.mark.parametrize("radius", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_window_is_sakoe_chiba_radius_of_tslearn(tslearn: ModuleType, shape: tuple[int, int, int], radius: int) -> None:
    x, y = pair(shape)
    window = {"global_constraint": "sakoe_chiba", "sakoe_chiba_radius": radius}
    path, distance = tslearn.dtw_path(x.numpy(), y.numpy(), **window)
    cost = costs(x, y).masked_fill(~window_of(*shape[:2], radius), torch.inf)
    assert_equal(bx.DTW(cost, omega="hard").value.sqrt(), distance)
    assert pairs_of(bx.DTW(cost, omega="hard")) == path
    soft = tslearn.soft_dtw(x.numpy(), y.numpy(), gamma=0.1, **window)
    assert_equal(bx.DTW(cost, omega=bx.Negentropy(0.1)).value, soft)
    if shape in EQUAL:
        assert_equal(bx.dtw(x, y, omega="hard", band=radius).sqrt(), distance)
        assert_equal(bx.dtw(x, y, omega=bx.Negentropy(0.1), band=radius), soft)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_alignment_and_divergence_are_soft_dtw_of_tslearn(
    tslearn: ModuleType, shape: tuple[int, int, int], gamma: float
) -> None:
    x, y = pair(shape)
    omega = bx.Negentropy(gamma)
    assert_equal(bx.dtw(x, y, omega=omega), tslearn.soft_dtw(x.numpy(), y.numpy(), gamma=gamma))
    normalized = tslearn.soft_dtw_normalized(x.numpy(), y.numpy(), gamma=gamma)
    assert_equal(bx.dtw(x, y, omega=omega, divergence="debiased"), normalized, atol=1e-13)
    alignment, _ = tslearn.soft_dtw_alignment(x.numpy(), y.numpy(), gamma=gamma)
    assert_equal(bx.DTW(costs(x, y), omega=omega).expected_path, alignment, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_divergence_is_logarithm_of_gak_of_tslearn(
    tslearn: ModuleType, shape: tuple[int, int, int], sigma: float
) -> None:
    x, y = (series / 4 for series in pair(shape))
    value = bx.dtw(x / sigma, y / sigma, cost="log_sqeuclidean", divergence="debiased")
    assert_equal(torch.exp(-value), tslearn.gak(x.numpy(), y.numpy(), sigma=sigma), rtol=1e-13)


def test_open_ends_are_subsequence_of_tslearn(tslearn: ModuleType) -> None:
    x, y = pair((12, 30, 2))
    p = bx.DTW(costs(x, y), open_begin=True, open_end=True, omega="hard")
    path, distance = tslearn.dtw_subsequence_path(x.numpy(), y.numpy())
    assert_equal(p.value.sqrt(), distance)
    assert pairs_of(p) == path


@pytest.mark.parametrize("lengths", [(20, 20, 20, 20), (20, 9, 14, 25)], ids=["equal", "ragged"])
def test_cdist_equals_tslearn(tslearn: ModuleType, lengths: tuple[int, ...]) -> None:
    xs = walks(*lengths, features=2)
    padded, omega = stacked(xs), bx.Negentropy(0.5)
    for collection in (xs, padded):
        assert_equal(bx.dtw_cdist(collection, omega="hard").sqrt(), tslearn.cdist_dtw(padded))
        assert_equal(bx.dtw_cdist(collection, omega=omega), tslearn.cdist_soft_dtw(padded, gamma=0.5))
        normalized = tslearn.cdist_soft_dtw_normalized(padded, gamma=0.5)
        assert_equal(bx.dtw_cdist(collection, omega=omega, divergence="debiased"), normalized, atol=1e-13)
    assert_equal(bx.dtw_cdist(xs[:2], xs[1:], omega="hard").sqrt(), tslearn.cdist_dtw(stacked(xs[:2]), stacked(xs[1:])))


@pytest.mark.parametrize(("normalize", "divergence"), [(False, None), (True, "debiased")])
def test_loss_equals_tslearn_to_float32(tslearn: ModuleType, normalize: bool, divergence: str | None) -> None:
    x, y = torch.stack(walks(15, 15, features=2)), torch.stack(walks(20, 20, features=2))
    loss = DTWLoss(bx.Negentropy(0.5), divergence=divergence, reduction="none")
    assert_equal(loss(x, y), tslearn.SoftDTWLossPyTorch(gamma=0.5, normalize=normalize)(x, y), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_root_of_hard_value_is_distance_of_dtaidistance(dtaidistance: ModuleType, shape: tuple[int, int, int]) -> None:
    x, y = pair(shape)
    a, b = x.numpy(), y.numpy()
    assert_equal(bx.dtw(x, y, omega="hard").sqrt(), dtaidistance.distance(a, b))
    assert_equal(bx.dtw(x, y, omega="hard", cost="euclidean"), dtaidistance.distance(a, b, inner_dist="euclidean"))
    assert pairs_of(bx.DTW(costs(x, y), omega="hard")) == dtaidistance.warping_path(a, b)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_window_of_dtaidistance_is_one_wider(dtaidistance: ModuleType, shape: tuple[int, int, int], width: int) -> None:
    x, y = pair(shape)
    distance = dtaidistance.distance(x.numpy(), y.numpy(), window=width)
    cost = costs(x, y).masked_fill(~window_of(*shape[:2], width - 1), torch.inf)
    assert_equal(bx.DTW(cost, omega="hard").value.sqrt(), distance)
    if shape in EQUAL:
        assert_equal(bx.dtw(x, y, omega="hard", band=width - 1).sqrt(), distance)


@pytest.mark.parametrize("shape", SHAPES)
def test_penalty_psi_and_max_step_of_dtaidistance(dtaidistance: ModuleType, shape: tuple[int, int, int]) -> None:
    x, y = pair(shape)
    a, b, m = x.numpy(), y.numpy(), shape[1]
    cost = costs(x, y)
    steps = torch.tensor([0.0, 0.3**2, 0.3**2], dtype=torch.float64)
    penalised = bx.DTW(cost, step_penalties=steps, omega="hard").value
    assert_equal(penalised.sqrt(), dtaidistance.distance(a, b, penalty=0.3))
    for begin, end in ((True, True), (True, False), (False, True)):
        open_value = bx.DTW(cost, open_begin=begin, open_end=end, omega="hard").value
        assert_equal(open_value.sqrt(), dtaidistance.distance(a, b, psi=(0, 0, m * begin, m * end)))
    limited = bx.DTW(cost.masked_fill(cost > 9, torch.inf), omega="hard").value
    assert_equal(limited.sqrt(), dtaidistance.distance(a, b, max_step=3.0))


@pytest.mark.parametrize("lengths", [(20, 20, 20, 20), (20, 9, 14, 25)], ids=["equal", "ragged"])
def test_cdist_is_distance_matrix_of_dtaidistance(dtaidistance: ModuleType, lengths: tuple[int, ...]) -> None:
    xs = walks(*lengths, features=2)
    matrix = dtaidistance.distance_matrix([x.numpy() for x in xs], ndim=2)
    assert_equal(bx.dtw_cdist(xs, omega="hard").sqrt(), matrix)
