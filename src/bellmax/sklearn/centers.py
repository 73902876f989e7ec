"""Barycenters as models: k-means, and the nearest barycenter of a class."""

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
from bellmax.regularizers import Regularizer
from bellmax.series.barycenter import dtw_barycenter
from bellmax.series.collections import Collection, dtw_cdist
from bellmax.series.costs import Cost
from bellmax.sklearn.base import Series, SeriesEstimator


class _Centers(SeriesEstimator):
    length: int | None

    def _length(self, series: Series) -> int:
        return median_low(map(len, series)) if self.length is None else self.length

    def _distances(self, series: Series, centers: Tensor) -> Tensor:
        """(n, centers)."""
        with torch.no_grad():
            distances: Tensor = dtw_cdist(series, centers.unbind(), **self._measure())
        return distances

    def _barycenter(self, series: Series, init: Tensor, max_iter: int) -> Tensor:
        return dtw_barycenter(series, init=init, max_iter=max_iter, **self._measure())


def _stretched(series: Series, length: int) -> Tensor:
    """Their mean after each was stretched linearly."""
    return dtw_barycenter(series, length=length, max_iter=0)


class _Run(NamedTuple):
    inertia: float
    labels: Tensor  # (n,)
    centers: Tensor  # (k, length, features)
    iterations: int


class DTWKMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, _Centers):
    """k-means with barycenters under a smoothed DTW: it lowers Σ dtw(x, nearest center).

    Args:
        n_clusters: how many clusters.
        init: "k-means++", "random", or centers as a collection of ``n_clusters`` series of one length.
        n_init: how many starts; the one of least inertia is kept. Given centers are one start.
        max_iter: how many times at most series are assigned and centers moved.
        max_iter_barycenter: how many iterations of L-BFGS a center is moved each time.
        tol: the relative decrease of the inertia below which to stop.
        length: of the centers; the median length of the series by default.
        cost: what a match of two elements costs, as in :func:`bellmax.dtw`.
        band: half the width of the Sakoe-Chiba band in steps, as in :class:`bellmax.DTW`; None for no band.
        omega: a :class:`bellmax.Regularizer` or its name.
        gamma: strength of the smoothing, beside a name of Ω; "hard" ignores it.
        divergence: as in :func:`bellmax.dtw`. The value itself, None, may be negative, and so may the inertia.
        n_jobs: how many threads; None for as many as torch uses, −1 for all processors.
        random_state: a seed or a generator of NumPy's, for the starts.
        verbose: whether to print the inertia of each iteration.

    After ``fit``: ``cluster_centers_`` (n_clusters, length) or (n_clusters, length, features), ``labels_``,
    ``inertia_`` and ``n_iter_``.

    >>> X = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6, 6], [0, 2, 2]]
    >>> model = DTWKMeans(2, gamma=0.1, random_state=0).fit(X)
    >>> model.labels_.tolist() in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])
    True
    """

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
        self._take(locals())

    @property
    def _n_features_out(self) -> int:
        return len(self._kept)

    def fit(self, X: Collection, y: Any = None) -> DTWKMeans:
        series = self._read(X, reset=True)
        rng = check_random_state(self.random_state)
        if not 1 <= self.n_clusters <= len(series):
            needed = f"n_clusters must be from 1 to the number of series, n_samples={len(series)}"
            raise ValueError(f"{needed}, got {self.n_clusters}")
        with self._threads():
            starts = self.n_init if isinstance(self.init, str) else 1
            runs = (self._in_both_precisions(series, self._start(series, rng)) for _ in range(starts))
            best = min(runs, key=lambda run: run.inertia)
        self.inertia_, self.n_iter_ = best.inertia, max(1, best.iterations)
        self.labels_ = best.labels.numpy()
        self._kept = best.centers
        self.cluster_centers_ = self._laid_out(best.centers)
        return self

    def _start(self, series: Series, rng: Any) -> Tensor:
        length = self._length(series)
        if not isinstance(self.init, str):
            given = torch.stack(as_collection("init", self.init)).to(series[0])
            if len(given) != self.n_clusters or given.shape[2] != self._features:
                needed = f"({self.n_clusters}, length, {self._features})"
                raise ValueError(f"init must have shape {needed}, got {tuple(given.shape)}")
            return given
        check_choice("init", self.init, ("k-means++", "random"), "a collection or ")
        chosen = (
            rng.choice(len(series), self.n_clusters, replace=False)
            if self.init == "random"
            else self._spread(series, rng)
        )
        return torch.stack([_stretched([series[k]], length) for k in chosen])

    def _spread(self, series: Series, rng: Any) -> list[int]:
        """k-means++: each next one with a probability in proportion to its classical distance from those chosen."""
        chosen = [int(rng.randint(len(series)))]
        nearest = np.full(len(series), np.inf)
        while len(chosen) < self.n_clusters:
            with torch.no_grad():
                latest = dtw_cdist(series, [series[chosen[-1]]], cost=self.cost, band=self.band, omega="hard")
            nearest = np.minimum(nearest, latest.squeeze(1).numpy())
            nearest[chosen] = 0
            total = nearest.sum()
            others = np.setdiff1d(np.arange(len(series)), chosen)
            shares = nearest[others] / total if total > 0 else None
            chosen.append(int(rng.choice(others, p=shares)))
        return chosen

    def _in_both_precisions(self, series: Series, centers: Tensor) -> _Run:
        """In float32, which is several times as fast; if float64 was given, on from there, unless that is still."""
        single = [s.float() for s in series]
        if centers.dtype == torch.float32 or not all(bool(s.isfinite().all()) for s in single):
            return self._run(series, centers)
        first = self._run(single, centers.float())
        second = self._run(series, first.centers.double(), first.inertia, first.labels)
        return second._replace(iterations=first.iterations + second.iterations)

    def _run(self, series: Series, centers: Tensor, inertia: float = np.inf, labels: Tensor | None = None) -> _Run:
        """From given centers on, and what is known of them."""
        for iteration in range(self.max_iter + 1):
            distances = self._distances(series, centers)
            before, (nearest, found) = inertia, distances.min(1)
            inertia = float(nearest.sum())
            if self.verbose:
                print(f"iteration {iteration}: inertia {inertia:.6g}")
            is_still = labels is not None and found.equal(labels) and before - inertia <= self.tol * abs(before)
            labels = found
            if is_still or iteration == self.max_iter:
                break
            centers = self._moved(series, centers, labels, nearest)
        return _Run(inertia, found, centers, iteration)

    def _moved(self, series: Series, centers: Tensor, labels: Tensor, nearest: Tensor) -> Tensor:
        """A barycenter for each cluster; one without members goes to the series that is farthest from its center."""
        far = iter(nearest.argsort(descending=True).tolist())
        moved = []
        for k, center in enumerate(centers):
            members = [series[n] for n in (labels == k).nonzero().squeeze(1).tolist()]
            if members:
                moved.append(self._barycenter(members, center, self.max_iter_barycenter))
            else:
                moved.append(_stretched([series[next(far)]], len(center)))
        return torch.stack(moved)

    def transform(self, X: Collection) -> NDArray[Any]:
        """The distance from every center, (n, n_clusters)."""
        check_is_fitted(self)
        with self._threads():
            distances: NDArray[Any] = self._distances(self._read(X, reset=False), self._kept).numpy()
        return distances

    def predict(self, X: Collection) -> NDArray[np.int64]:
        """The index of the nearest center, (n,)."""
        labels: NDArray[np.int64] = self.transform(X).argmin(1)
        return labels

    def score(self, X: Collection, y: Any = None) -> float:
        """Minus the inertia of X."""
        return -float(self.transform(X).min(1).sum())


class DTWBarycenterClassifier(ClassifierMixin, _Centers):
    """The class whose barycenter is nearest.

    Args:
        length: of the barycenters; the median length of the series by default.
        max_iter_barycenter: how many iterations of L-BFGS a barycenter takes at most.
        cost: what a match of two elements costs, as in :func:`bellmax.dtw`.
        band: half the width of the Sakoe-Chiba band in steps, as in :class:`bellmax.DTW`; None for no band.
        omega: a :class:`bellmax.Regularizer` or its name.
        gamma: strength of the smoothing, beside a name of Ω; "hard" ignores it.
        divergence: as in :func:`bellmax.dtw`.
        n_jobs: how many threads; None for as many as torch uses, −1 for all processors.

    After ``fit``: ``classes_`` and ``barycenters_`` (classes, length) or (classes, length, features).

    >>> X, y = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6]], ["low", "high", "low", "high"]
    >>> DTWBarycenterClassifier(gamma=0.1).fit(X, y).predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

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
        self._take(locals())

    def fit(self, X: Collection, y: Any) -> DTWBarycenterClassifier:
        series, labels = self._read_with_targets(X, y)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        length = self._length(series)
        centers = []
        with self._threads():
            for number in range(len(self.classes_)):
                members = [series[n] for n in np.flatnonzero(numbers == number)]
                centers.append(self._barycenter(members, _stretched(members, length), self.max_iter_barycenter))
        self._kept = torch.stack(centers)
        self.barycenters_ = self._laid_out(self._kept)
        return self

    def predict(self, X: Collection) -> NDArray[Any]:
        """The class of the nearest barycenter, (n,)."""
        check_is_fitted(self)
        with self._threads():
            nearest = self._distances(self._read(X, reset=False), self._kept).argmin(1)
        labels: NDArray[Any] = self.classes_[nearest.numpy()]
        return labels
