"""Estimators: the checks of scikit-learn, and comparison with its estimators on precomputed distances."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data import folder
from support.kernels import needs_kernels

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, KNeighborsTransformer
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks

import bellmax as bx
from bellmax.sklearn import (
    DTWBarycenterClassifier,
    DTWKernel,
    DTWKMeans,
    DTWNeighborsClassifier,
    DTWNeighborsRegressor,
    DTWNeighborsTransformer,
)

ALL = [
    DTWNeighborsClassifier(),
    DTWNeighborsRegressor(),
    DTWNeighborsTransformer(),
    DTWKMeans(3, max_iter=4, max_iter_barycenter=3),
    DTWBarycenterClassifier(max_iter_barycenter=5),
    DTWKernel(),
]


@parametrize_with_checks(ALL)
def test_estimators_pass_the_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def waves(count: int = 24, features: int = 1, ragged: bool = True, seed: int = 0) -> tuple[list[Any], Any]:
    """Slow and fast waves, and their classes."""
    rng = np.random.default_rng(seed)
    X, y = [], np.arange(count) % 2
    for speed in 1 + y:
        time = np.linspace(0, 6, rng.integers(15, 22) if ragged else 18)[:, None]
        X.append(np.sin(speed * time + rng.uniform(0, 1, features)) + rng.normal(0, 0.1, (len(time), features)))
    return X, y


def layouts() -> Iterator[tuple[list[Any], Any, Any]]:
    """Training series, test series and labels."""
    for features, ragged in ((1, True), (3, True)):
        X, y = waves(features=features, ragged=ragged)
        yield X[:16], X[16:], y
    X, y = waves(features=2, ragged=False)
    yield np.stack(X[:16]), np.stack(X[16:]), y
    X, y = waves(ragged=False)
    flat = np.stack(X).squeeze(-1)
    yield flat[:16], torch.tensor(flat[16:]), y


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("train", "test", "y"), list(layouts()))
def test_collections(estimator: Any, train: Any, test: Any, y: Any) -> None:
    model = clone(estimator).fit(train, y[:16])
    again = pickle.loads(pickle.dumps(model))
    for name in ("predict", "transform"):
        if hasattr(model, name):
            predicted, same = getattr(model, name)(test), getattr(again, name)(test)
            assert len(predicted.toarray() if hasattr(predicted, "toarray") else predicted) == 8
            assert (predicted != same).sum() == 0
    if name == "predict" and hasattr(model, "classes_"):
        assert model.score(test, y[16:]) == 1


def test_padded_arrays_and_frames_equal_the_series() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = waves()
    padded = np.full((len(X), 25), np.nan)
    for row, series in zip(padded, X, strict=True):
        row[: len(series)] = series[:, 0]
    expected = DTWNeighborsClassifier(3).fit(X, y).kneighbors(X)
    cells = pandas.Series([x[:, 0] for x in X], index=range(5, 5 + len(X)))
    for same in (padded, pandas.DataFrame(padded), cells, cells.to_frame(), [x[:, 0].tolist() for x in X]):
        neighbours = DTWNeighborsClassifier(3).fit(same, y).kneighbors(same)
        assert (neighbours[1] == expected[1]).all()
        np.testing.assert_allclose(neighbours[0], expected[0])


@pytest.mark.parametrize("weights", ["uniform", "distance"])
@pytest.mark.parametrize("measure", [{}, {"omega": "negentropy", "divergence": "debiased", "cost": "log_sqeuclidean"}])
def test_neighbours_equal_scikit_learn(weights: str, measure: dict[str, Any]) -> None:
    X, y = waves(30)
    X[20] = X[3]  # at distance 0
    options: dict[str, Any] = {"band": 4, "omega": "hard", **measure}
    full = bx.dtw_cdist(X, **options).clamp(min=0).numpy()
    inner, outer = full[:20, :20], full[20:, :20]
    ours = DTWNeighborsClassifier(4, weights=weights, **options).fit(X[:20], y[:20])
    theirs = KNeighborsClassifier(4, weights=weights, metric="precomputed").fit(inner, y[:20])
    np.testing.assert_allclose(ours.predict_proba(X[20:]), theirs.predict_proba(outer), atol=1e-9)
    assert (ours.predict(X[20:]) == theirs.predict(outer)).all()
    assert (ours.kneighbors(return_distance=False) == theirs.kneighbors(return_distance=False)).all()
    targets = np.linspace(0, 1, 20)
    regressor = DTWNeighborsRegressor(4, weights=weights, **options).fit(X[:20], targets)
    other = KNeighborsRegressor(4, weights=weights, metric="precomputed").fit(inner, targets)
    np.testing.assert_allclose(regressor.predict(X[20:]), other.predict(outer), atol=1e-9)


@pytest.mark.parametrize("mode", ["distance", "connectivity"])
def test_the_graph_equals_scikit_learn(mode: str) -> None:
    X, _ = waves()
    theirs = KNeighborsTransformer(n_neighbors=3, mode=mode, metric="precomputed")
    expected = theirs.fit_transform(bx.dtw_cdist(X, omega="hard").abs().numpy())
    ours = DTWNeighborsTransformer(3, mode=mode).fit(X)
    np.testing.assert_allclose(ours.transform(X).toarray(), expected.toarray(), atol=1e-9)
    assert ours.transform(X).nnz == expected.nnz
    assert ours.kneighbors_graph().diagonal().sum() == 0


def test_parameters_can_be_searched() -> None:
    X, y = waves(features=2)
    measures = [{"omega": ["hard"], "band": [2, None]}, {"omega": ["negentropy", "sparsemax"], "gamma": [0.1, 1.0]}]
    search = GridSearchCV(DTWNeighborsClassifier(), measures, cv=2, error_score="raise").fit(X, y)
    assert search.best_score_ == 1
    machine = make_pipeline(DTWKernel(), SVC(kernel="precomputed"))
    grid = {"dtwkernel__length_scale": ["scale", 2.5], "dtwkernel__band": [3, None]}
    assert GridSearchCV(machine, grid, cv=2, error_score="raise").fit(X, y).best_score_ == 1
    means = GridSearchCV(DTWKMeans(random_state=0, max_iter=2), {"n_clusters": [1, 2]}, cv=2, error_score="raise")
    assert means.fit(X).best_params_ == {"n_clusters": 2}


def test_the_kernel_is_positive_definite() -> None:
    X, _ = waves(features=2)
    kernel = DTWKernel().fit(X)
    got = kernel.transform(X)
    assert (got.diagonal() == 1).all()
    assert np.linalg.eigvalsh((got + got.T) / 2).min() > -1e-9
    scaled = [x / kernel.length_scale_ for x in X]
    apart = bx.dtw(scaled[0], scaled[5], cost="log_sqeuclidean", divergence="debiased").item()
    assert got[0, 5] == pytest.approx(np.exp(-apart))
    hard = DTWKernel(length_scale=2.0**0.5, omega="hard", cost="sqeuclidean", divergence=None).fit(X).transform(X[:1])
    np.testing.assert_allclose(hard, np.exp(-bx.dtw_cdist(X[:1], X, omega="hard").numpy() / 2))


@pytest.mark.parametrize("options", [{"gamma": 0.1}, {"omega": "hard"}, {"omega": "l2", "divergence": "debiased"}])
def test_means_lower_their_inertia(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    X, y = waves(14, features=2)
    model = DTWKMeans(2, random_state=1, verbose=1, **options).fit(X)
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert (np.diff(printed) <= 1e-4 * np.abs(printed[1:])).all()  # the second run is in float64
    assert len(printed) > 1
    apart = bx.dtw_cdist(X, model.cluster_centers_, **options)
    assert model.inertia_ == pytest.approx(float(apart.amin(1).sum()))
    assert (model.labels_ == apart.argmin(1).numpy()).all()
    assert (model.predict(X) == model.labels_).all()
    assert model.score(X) == pytest.approx(-model.inertia_)
    assert (model.labels_ == y).all() or (model.labels_ == 1 - y).all()


def test_starts_of_means() -> None:
    X, _ = waves(12)
    once = [DTWKMeans(4, random_state=seed, max_iter=3).fit(X).inertia_ for seed in (0, 0)]
    assert once[0] == once[1]
    several = DTWKMeans(4, random_state=0, n_init=3, max_iter=3).fit(X)
    assert several.inertia_ <= once[0]
    assert several.cluster_centers_.shape == (4, 19, 1)
    restarted = DTWKMeans(4, init=several.cluster_centers_, max_iter=0).fit(X)
    assert restarted.inertia_ == pytest.approx(several.inertia_)
    far = np.stack([X[0][:15], X[1][:15], X[2][:15] + 1e3])
    assert len(np.unique(DTWKMeans(3, init=far, gamma=1e-3).fit(X).labels_)) == 3  # no empty cluster
    assert DTWKMeans(3, init="random", length=9, random_state=0, max_iter=1).fit(X).cluster_centers_.shape == (3, 9, 1)
    same = DTWKMeans(3, random_state=0, max_iter=2).fit([[1.0, 2.0]] * 4)
    assert len(same.cluster_centers_) == 3


def test_as_many_threads_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = waves()
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    DTWNeighborsClassifier(n_jobs=3).fit(X, y).predict(X)
    assert asked == [3, before]


@needs_kernels
def test_error_rates_equal_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    data = folder("timeseries")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    example = importlib.import_module("nearest_neighbour")
    sets = {name: known for name, known in example.published(data).items() if (data / name).is_dir()}
    assert len(sets) == 6
    for name, known in sets.items():
        train, test = (example.read(data / name, split) for split in ("TRAIN", "TEST"))
        models = example.models(train.series.shape[1], 2, known)
        assert round(example.error(models["full"], train, test), 4) == known.full
        assert round(example.error(models["window"], train, test), 4) == known.window


def wrong_calls() -> Iterator[tuple[Callable[[], Any], str]]:
    X, y = waves(6)
    broken = [*X[:2], np.array([1.0, np.nan, 2.0])]
    yield (
        lambda: DTWKMeans(2).fit(broken),
        r"X\[2\] must be finite, except for NaN padding at its end, got NaN or inf at step 1",
    )
    yield lambda: DTWNeighborsClassifier().fit([], []), "X must hold at least one series, got none"
    yield lambda: DTWNeighborsClassifier().fit(X, y[:4]), "inconsistent numbers of samples"
    yield lambda: DTWNeighborsClassifier().fit(X, None), "requires y to be passed"
    yield lambda: DTWNeighborsRegressor().fit(X, [*y[:5], np.nan]), "y must be finite, got NaN or inf"
    yield (
        lambda: DTWNeighborsClassifier().fit(X, y).predict([np.zeros((4, 2))]),
        r"X\[0\] must have 1 features, as the series of fit, got 2",
    )
    yield lambda: DTWNeighborsClassifier(7).fit(X, y).predict(X), "n_neighbors must be from 1 to 6, .* got 7"
    yield lambda: DTWNeighborsClassifier(6).fit(X, y).kneighbors(), "n_neighbors must be from 1 to 5, .* got 6"
    yield lambda: DTWNeighborsClassifier(weights="far").fit(X, y).predict(X), "weights must be one of 'uniform'"
    yield (
        lambda: DTWNeighborsClassifier(weights="distance", omega="negentropy").fit(X, y).predict(X),
        "weights='distance' needs distances of at least 0",
    )
    yield lambda: DTWNeighborsTransformer(1, mode="far").fit(X).transform(X), "mode must be one of 'connectivity'"
    yield lambda: DTWKMeans(9).fit(X), "n_clusters must be from 1 to the number of series, n_samples=6, got 9"
    yield lambda: DTWKMeans(2, init="best").fit(X), "init must be a collection or one of 'k-means\\+\\+', 'random'"
    yield lambda: DTWKMeans(2, init=np.zeros((3, 5))).fit(X), r"init must have shape \(2, length, 1\), got \(3, 5, 1\)"
    unequal = [np.zeros(4), np.zeros(5)]
    yield lambda: DTWKMeans(2, init=unequal).fit(X), r"init must hold series of equal length, got lengths \[4, 5\]"
    yield lambda: DTWKernel(length_scale="auto").fit(X), "length_scale must be 'scale' or a number > 0, got 'auto'"
    yield lambda: DTWKernel(length_scale=0.0).fit(X), "length_scale must be 'scale' or a number > 0, got 0.0"


@pytest.mark.parametrize(("call", "message"), list(wrong_calls()), ids=lambda value: None if callable(value) else value)
def test_bad_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
