"""Models based on DTW barycenters: k-means clustering, and classification by the nearest barycenter."""

from __future__ import annotations

from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bellmax.inputs import as_collection, check_choice
from bellmax.names import answers_near_misses
from bellmax.regularizers import Regularizer
from bellmax.series.barycenter import dtw_barycenter
from bellmax.series.collections import Collection, dtw_cdist
from bellmax.series.costs import Cost
from bellmax.sklearn.base import Series, SeriesEstimator


class _Centers(SeriesEstimator):
    """Base class of the estimators that fit barycenters."""

    length: int | None

    def _center_length(self, series: Series) -> int:
        """Return the length of the centers: the parameter ``length``, or the median length of the series."""
        return median_low(map(len, series)) if self.length is None else self.length

    def _distances(self, series: Series, centers: Tensor) -> Tensor:
        """Return the distance of each series from each center, (n, centers), without gradient."""
        with torch.no_grad():
            distances: Tensor = dtw_cdist(series, centers.unbind(), **self._measure_options())
        return distances

    def _barycenter(self, series: Series, init: Tensor, max_iter: int) -> Tensor:
        """Return the barycenter (length, features) of series, optimized from ``init``."""
        return dtw_barycenter(series, init=init, max_iter=max_iter, **self._measure_options())


def _stretched_mean(series: Series, length: int) -> Tensor:
    """Return the mean (length, features) of the series after linear interpolation to ``length`` steps."""
    return dtw_barycenter(series, length=length, max_iter=0)


class _Run(NamedTuple):
    """The result of k-means from one start."""

    inertia: float
    labels: Tensor  # (n,)
    centers: Tensor  # (k, length, features)
    iterations: int


class DTWKMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, _Centers):
    """k-means clustering of time series with DTW barycenters as centers.

    The algorithm minimizes the inertia: the sum of the distances of all series from their nearest centers. The distance
    is :func:`bellmax.dtw`.

    Args:
        n_clusters: The number of clusters, default 8.
        init: "k-means++" (the default), "random", or the initial centers as a collection of ``n_clusters`` series of
            equal length.
        n_init: The number of runs from different initial centers, default 1. The run with the lowest inertia is used.
            Ignored if ``init`` is a collection.
        max_iter: The maximum number of iterations, default 50. Each iteration assigns every series to its nearest
            center, and then updates all centers.
        max_iter_barycenter: The maximum number of L-BFGS iterations for each update of a center, default 10.
        tol: The tolerance, default 1e-6. The algorithm stops if an iteration decreases the inertia by less than the
            fraction ``tol``.
        length: The length of the centers, default the median length of the series.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`bellmax.Regularizer`.
        gamma: Smoothing strength, default 1. Ignored if ``omega`` is "hard" or a :class:`bellmax.Regularizer`.
        divergence: The divergence, as in :func:`bellmax.dtw`. With None (the default), distances and the inertia can be
            negative, unless ``omega`` is "hard".
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.
        random_state: A seed or a NumPy generator, for the choice of the initial centers.
        verbose: If nonzero, print the inertia of each iteration. Default 0.

    After ``fit``, the estimator has the attributes ``cluster_centers_`` (n_clusters, length) or
    (n_clusters, length, features), ``labels_``, ``inertia_`` and ``n_iter_``.

    >>> X = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6, 6], [0, 2, 2]]
    >>> model = DTWKMeans(2, gamma=0.1, random_state=0).fit(X)
    >>> model.labels_.tolist() in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])
    True
    """

    @answers_near_misses
    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: str | Collection = "k-means++",
        n_init: int = 1,
        max_iter: int = 50,
        max_iter_barycenter: int = 10,
        tol: float = 1e-6,
        length: int | None = None,
        cost: Cost = "sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: float = 1.0,
        divergence: str | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self._store_parameters(locals())

    @property
    def _n_features_out(self) -> int:
        """The number of columns of ``transform``, from which scikit-learn generates their names."""
        return len(self._centers)

    def fit(self, X: Collection, y: Any = None) -> DTWKMeans:
        """Compute the clusters of the series of X. ``y`` is ignored."""
        series = self._read(X, reset=True)
        rng = check_random_state(self.random_state)
        if not 1 <= self.n_clusters <= len(series):
            needed = f"n_clusters must be from 1 to the number of series, n_samples={len(series)}"
            raise ValueError(f"{needed}, got {self.n_clusters}")
        with self._threads():
            num_starts = self.n_init if isinstance(self.init, str) else 1
            runs = (self._run_in_two_precisions(series, self._initial_centers(series, rng)) for _ in range(num_starts))
            best = min(runs, key=lambda run: run.inertia)
        self.inertia_, self.n_iter_ = best.inertia, max(1, best.iterations)
        self.labels_ = best.labels.numpy()
        self._centers = best.centers
        self.cluster_centers_ = self._as_input_layout(best.centers)
        return self

    def _initial_centers(self, series: Series, rng: Any) -> Tensor:
        """Return the centers (n_clusters, length, features) of a new start, by the parameter ``init``."""
        length = self._center_length(series)
        if not isinstance(self.init, str):
            initial = as_collection("init", self.init)
            lengths = [len(center) for center in initial]
            if len(set(lengths)) > 1:
                raise ValueError(f"init must hold series of equal length, got lengths {lengths}")
            centers = torch.stack(initial).to(series[0])
            if len(centers) != self.n_clusters or centers.shape[2] != self._features:
                needed = f"({self.n_clusters}, length, {self._features})"
                raise ValueError(f"init must have shape {needed}, got {tuple(centers.shape)}")
            return centers
        check_choice("init", self.init, ("k-means++", "random"), "a collection or ")
        if self.init == "random":
            chosen = rng.choice(len(series), self.n_clusters, replace=False)
        else:
            chosen = self._k_means_plus_plus(series, rng)
        return torch.stack([_stretched_mean([series[k]], length) for k in chosen])

    def _k_means_plus_plus(self, series: Series, rng: Any) -> list[int]:
        """Return the indices of ``n_clusters`` series, chosen one after the other.

        The probability of a series is proportional to its classical DTW distance from the nearest series chosen so far.
        """
        chosen = [int(rng.randint(len(series)))]
        nearest = np.full(len(series), np.inf)
        while len(chosen) < self.n_clusters:
            with torch.no_grad():
                distances = dtw_cdist(series, [series[chosen[-1]]], cost=self.cost, band=self.band, omega="hard")
            nearest = np.minimum(nearest, distances.squeeze(1).numpy())
            nearest[chosen] = 0
            total = nearest.sum()
            candidates = np.setdiff1d(np.arange(len(series)), chosen)
            probabilities = nearest[candidates] / total if total > 0 else None
            chosen.append(int(rng.choice(candidates, p=probabilities)))
        return chosen

    def _run_in_two_precisions(self, series: Series, centers: Tensor) -> _Run:
        """Run k-means from these centers: first in float32, which is several times as fast, then in float64.

        Only one run is needed if the series are float32, or overflow in float32. The run in float64 stops at its first
        iteration if it changes nothing.
        """
        single = [s.float() for s in series]
        if centers.dtype == torch.float32 or not all(bool(s.isfinite().all()) for s in single):
            return self._run(series, centers)
        first = self._run(single, centers.float())
        second = self._run(series, first.centers.double(), first.inertia, first.labels)
        return second._replace(iterations=first.iterations + second.iterations)

    def _run(self, series: Series, centers: Tensor, inertia: float = np.inf, labels: Tensor | None = None) -> _Run:
        """Run k-means from these centers. The stop rule uses ``inertia`` and ``labels`` of an earlier run."""
        for iteration in range(self.max_iter + 1):
            distances = self._distances(series, centers)
            previous, (nearest, nearest_centers) = inertia, distances.min(1)
            inertia = float(nearest.sum())
            if self.verbose:
                print(f"iteration {iteration}: inertia {inertia:.6g}")
            has_same_labels = labels is not None and nearest_centers.equal(labels)
            labels = nearest_centers
            has_converged = has_same_labels and previous - inertia <= self.tol * abs(previous)
            if has_converged or iteration == self.max_iter:
                break
            centers = self._update_centers(series, centers, labels, nearest)
        return _Run(inertia, nearest_centers, centers, iteration)

    def _update_centers(self, series: Series, centers: Tensor, labels: Tensor, nearest: Tensor) -> Tensor:
        """Return the barycenter of each cluster, (n_clusters, length, features).

        An empty cluster gets the series that is farthest from its center, by the distances ``nearest`` (n,).
        """
        farthest = iter(nearest.argsort(descending=True).tolist())
        updated = []
        for k, center in enumerate(centers):
            members = [series[n] for n in (labels == k).nonzero().squeeze(1).tolist()]
            if members:
                updated.append(self._barycenter(members, center, self.max_iter_barycenter))
            else:
                updated.append(_stretched_mean([series[next(farthest)]], len(center)))
        return torch.stack(updated)

    def transform(self, X: Collection) -> NDArray[Any]:
        """Return the distance of each series of X from each center, (n, n_clusters)."""
        check_is_fitted(self)
        with self._threads():
            distances: NDArray[Any] = self._distances(self._read(X, reset=False), self._centers).numpy()
        return distances

    def predict(self, X: Collection) -> NDArray[np.int64]:
        """Return the index of the nearest center for each series of X, (n,)."""
        labels: NDArray[np.int64] = self.transform(X).argmin(1)
        return labels

    def score(self, X: Collection, y: Any = None) -> float:
        """Return the inertia of X, multiplied by −1."""
        return -float(self.transform(X).min(1).sum())


class DTWBarycenterClassifier(ClassifierMixin, _Centers):
    """Nearest-centroid classifier of time series, with one DTW barycenter per class.

    Args:
        length: The length of the barycenters, default the median length of the series.
        max_iter_barycenter: The maximum number of L-BFGS iterations for a barycenter, default 100.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`bellmax.Regularizer`.
        gamma: Smoothing strength, default 1. Ignored if ``omega`` is "hard" or a :class:`bellmax.Regularizer`.
        divergence: The divergence, as in :func:`bellmax.dtw`. Default None.
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.

    After ``fit``, the estimator has the attributes ``classes_`` and ``barycenters_`` (classes, length) or
    (classes, length, features).

    >>> X, y = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6]], ["low", "high", "low", "high"]
    >>> DTWBarycenterClassifier(gamma=0.1).fit(X, y).predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

    @answers_near_misses
    def __init__(
        self,
        *,
        length: int | None = None,
        max_iter_barycenter: int = 100,
        cost: Cost = "sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: float = 1.0,
        divergence: str | None = None,
        n_jobs: int | None = None,
    ) -> None:
        self._store_parameters(locals())

    def fit(self, X: Collection, y: Any) -> DTWBarycenterClassifier:
        """Compute the barycenter of each class, from the series of X and their labels y (n,)."""
        series, labels = self._read_with_targets(X, y)
        self.classes_, class_indices = np.unique(labels, return_inverse=True)
        length = self._center_length(series)
        centers = []
        with self._threads():
            for k in range(len(self.classes_)):
                members = [series[n] for n in np.flatnonzero(class_indices == k)]
                centers.append(self._barycenter(members, _stretched_mean(members, length), self.max_iter_barycenter))
        self._centers = torch.stack(centers)
        self.barycenters_ = self._as_input_layout(self._centers)
        return self

    def predict(self, X: Collection) -> NDArray[Any]:
        """Return the class of the nearest barycenter for each series of X, (n,)."""
        check_is_fitted(self)
        with self._threads():
            nearest = self._distances(self._read(X, reset=False), self._centers).argmin(1)
        labels: NDArray[Any] = self.classes_[nearest.numpy()]
        return labels
