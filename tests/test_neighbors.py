"""Nearest neighbors against all pairs and a stable sort."""

from __future__ import annotations

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
from support.data import folder
from support.inside import set_limit
from support.kernels import needs_kernels, took
from torch import Tensor

import bellmax as bx


def walks(*lengths: int, features: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(n, features, dtype=dtype).cumsum(0) for n in lengths]


def by_sorting(xs: Any, ys: Any = None, *, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    values = bx.dtw_cdist(xs, ys, **{"omega": "hard", **options})
    if ys is None:
        values.fill_diagonal_(math.nan)  # NaN is sorted to the end
    distances, indices = values.sort(dim=1, stable=True)
    return distances[:, :k], indices[:, :k]


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    assert got[1].dtype == torch.int64
    assert got[1].tolist() == expected[1].tolist()
    close(got[0], expected[0], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["sqeuclidean", "cityblock", "euclidean"])
@pytest.mark.parametrize(("features", "band"), [(1, None), (1, 3), (3, 0), (3, 4.5)])
def test_ragged_collections(cost: str, features: int, band: float | None, backend: str) -> None:
    lengths = torch.randint(1, 16 if backend == "reference" else 30, (16,)).tolist()
    xs, ys = walks(*lengths[:5], features=features), walks(*lengths[5:], 12, 12, 1, features=features)
    options: dict[str, Any] = {"cost": cost, "band": band}
    same(bx.dtw_neighbors(xs, ys, k=3, **options), by_sorting(xs, ys, k=3, **options))
    same(bx.dtw_neighbors(ys, k=len(ys) - 1, **options), by_sorting(ys, k=len(ys) - 1, **options))


@st.composite
def series_of_few_numbers(draw: st.DrawFn) -> list[Tensor]:
    """Two to seven series of the numbers 0, 1 and 2, many of which are equally far from each other."""
    features = draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=7).filter(lambda lengths: max(lengths) > 1))
    numbers = (
        draw(arrays(np.float64, (length, features), elements=st.sampled_from([0.0, 1.0, 2.0]))) for length in lengths
    )
    return [torch.from_numpy(array) for array in numbers]


@needs_kernels
@given(series_of_few_numbers(), st.sampled_from([None, 0, 1, 1.2, 2, 7]))
def test_ties_go_to_the_lower_index(xs: list[Tensor], band: float | None) -> None:
    for k in {1, len(xs) // 2, len(xs) - 1} - {0}:
        with took("dtw_neighbors"):
            same(bx.dtw_neighbors(xs, k=k, band=band), by_sorting(xs, k=k, band=band), 0)
        same(bx.dtw_neighbors(xs[:2], xs, k=k + 1, band=band), by_sorting(xs[:2], xs, k=k + 1, band=band), 0)


@needs_kernels
def test_many_candidates_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a block of candidates, several groups of queries and several calls of the kernel."""
    xs, ys = walks(*[40] * 6, *range(30, 40), dtype=torch.float32), walks(*range(35, 60), *[90] * 400)
    expected = by_sorting(xs, ys, k=4, band=4)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        same(bx.dtw_neighbors(xs, ys, k=4, band=4), expected)
    set_limit(monkeypatch, "pairs in a call of the kernel for neighbors", 4 * len(ys))
    with took("dtw_neighbors", times=4):
        neighbours = bx.dtw_neighbors([x.requires_grad_() for x in xs], ys, k=4, band=4, progress=True)
    same(neighbours, expected)
    assert not neighbours.distances.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"omega": "negentropy", "gamma": 0.1},
        {"omega": bx.SquaredL2(0.5), "band": 3},
        {"divergence": "debiased", "omega": "negentropy"},
        {"cost": "cosine"},
        {"cost": lambda x, y: torch.cdist(x, y, 3)},
    ],
)
def test_other_measures_are_exact_too(options: dict[str, Any]) -> None:
    xs, ys = walks(8, 5, 9, 3, 8, features=2), walks(7, 4, features=2)
    with took("dtw_neighbors", times=0):
        same(bx.dtw_neighbors(xs, k=2, **options), by_sorting(xs, k=2, **options))
        same(bx.dtw_neighbors(ys, xs, k=5, **options), by_sorting(ys, xs, k=5, **options))


def test_neighbors_takes_lists_and_arrays(backend: str) -> None:
    array = np.array([[0.0, 1.0, 2.0], [0.0, 2.0, np.nan], [5.0, 5.0, 6.0]])
    expected = by_sorting(array, k=1)
    same(bx.dtw_neighbors(array, k=1), expected)
    same(bx.dtw_neighbors([[0, 1, 2], [0, 2], [5, 5, 6]], k=1), by_sorting([[0, 1, 2], [0, 2], [5, 5, 6]], k=1))
    assert bx.dtw_neighbors(array.astype(np.float32), k=2).distances.dtype == torch.float32
    assert bx.dtw_neighbors(torch.tensor(array).half(), k=2).distances.dtype == torch.float32
    assert bx.dtw_neighbors([], array, k=2).indices.shape == (0, 2)


def test_infinite_series_are_the_last_neighbours() -> None:
    ys = walks(5, 6, 7)
    ys[1][2] = math.inf
    distances, indices = bx.dtw_neighbors(ys[:1], ys, k=3)
    assert indices[0, 2] == 1
    assert distances[0, 2] == math.inf
    assert bx.dtw_neighbors(ys[1:2], [ys[0], ys[2]], k=2).distances.isinf().all()


@needs_kernels
def test_pruning_leaves_few_cells_on_six_datasets() -> None:
    data, few = folder("timeseries"), 0
    for path in sorted(path for path in data.iterdir() if path.is_dir()):
        train, test = (np.loadtxt(path / f"{path.name}_{split}.tsv.gz")[:, 1:] for split in ("TRAIN", "TEST"))
        xs, ys = test[:30], train
        steps = train.shape[1]
        band = steps // 20
        with took("dtw_neighbors") as calls:
            neighbours = bx.dtw_neighbors(xs, ys, k=1, band=band)
        same(neighbours, by_sorting(xs, ys, k=1, band=band))
        in_band = int((np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))) <= band).sum())
        computed = sum(int(call.args[8].sum()) for call in calls)
        few += computed <= 0.3 * len(xs) * len(ys) * in_band
        same(bx.dtw_neighbors(xs[:3], ys, k=5), by_sorting(xs[:3], ys, k=5))
    assert few >= 5


def wrong_calls() -> Iterator[tuple[Callable[[], Any], str]]:
    xs = walks(3, 4)
    yield lambda: bx.dtw_neighbors(xs, k=2), "k must be an integer from 1 to the number of other series, 1, got 2"
    yield lambda: bx.dtw_neighbors(xs, xs, k=3), "k must be an integer from 1 to the number of series in ys, 2, got 3"
    yield lambda: bx.dtw_neighbors(xs, k=0), "k must be an integer from 1 to .* got 0"
    yield lambda: bx.dtw_neighbors(xs, [], k=1), "k must be an integer from 1 to the number of series in ys, 0, got 1"
    yield lambda: bx.dtw_neighbors(xs, k=1, band=-1), "band must be at least 0, got -1"
    yield lambda: bx.dtw_neighbors(xs, k=1, band=math.nan), "band must be at least 0, got nan"
    yield lambda: bx.dtw_neighbors(xs, k=1, cost="manhattan"), "cost must be a function or one of"
    yield lambda: bx.dtw_neighbors(xs, walks(3, features=2), k=1), r"ys\[0\] must have 1 features like xs\[0\], got 2"
    yield lambda: bx.dtw_neighbors([xs[0], [1.0, math.nan, 2.0]], k=1), r"must hold no NaN, .* got NaN at .s\[\d\]\[\d"
    yield lambda: bx.dtw_neighbors([[1.0, math.nan]], xs, k=1), r"must hold no NaN, .* got NaN at .s\[\d\]\[\d"


@pytest.mark.parametrize(("call", "message"), list(wrong_calls()), ids=lambda value: None if callable(value) else value)
def test_bad_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_names_of_other_libraries() -> None:
    with pytest.raises(TypeError, match=r"dtw_neighbors\(\) has no argument 'n_neighbors': use k="):
        bx.dtw_neighbors([[0.0]], n_neighbors=1)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("band", [None, 0, 7, 200])
def test_the_search_computes_all_pairs(band: float | None) -> None:
    xs, ys = walks(*range(60, 100)), walks(70, 5, 90)
    for left, right in ((xs, None), (xs, ys), (ys, xs)):
        with took("dtw_neighbors") as calls:
            got = bx.dtw_cdist(left, right, band=band, omega="hard")
        assert calls
        with bx.use_backend("reference"):
            close(got, bx.dtw_cdist(left, right, band=band, omega="hard"), 1e-12)
        assert right is not None or got.equal(got.mT)


@needs_kernels
@pytest.mark.parametrize("band", [None, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_pairs_of_long_series_need_no_cost_matrices(band: float | None, dtype: torch.dtype) -> None:
    xs = [x.to(dtype) for x in walks(513, 700, 1200)]
    with took("dtw_neighbors"), took("lattice_forward", times=0):
        got = bx.dtw_cdist(xs, band=band, omega="hard")
    expected = torch.stack([torch.stack([bx.dtw(x, y, band=band, omega="hard") for x in xs]) for y in xs])
    torch.testing.assert_close(got, expected, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
