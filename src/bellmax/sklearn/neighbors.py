"""Nearest neighbours under DTW."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from bellmax.inputs import check_choice
from bellmax.regularizers import Regularizer
from bellmax.series.collections import Collection
from bellmax.series.costs import Cost
from bellmax.series.neighbors import dtw_neighbors
from bellmax.sklearn.base import Series, SeriesEstimator


class _Neighbors(SeriesEstimator):
    n_neighbors: int

    def _keep(self, series: Series) -> None:
        self._series, self.n_samples_fit_ = series, len(series)

    def kneighbors(
        self, X: Collection | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> Any:
        """The distances to the nearest series of ``fit`` and their indices, nearest first, each (n, n_neighbors).

        Without X, of each series of ``fit`` among the others. Distances are sums of costs, without a square root.
        """
        check_is_fitted(self)
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        most = self.n_samples_fit_ - (X is None)
        if not 1 <= k <= most:
            raise ValueError(f"n_neighbors must be from 1 to {most}, the number of series to choose from, got {k}")
        queries, candidates = (self._series, None) if X is None else (self._read(X, reset=False), self._series)
        with self._threads():
            found = dtw_neighbors(queries, candidates, k=k, progress=bool(self.verbose), **self._measure())
        distances, indices = found.distances.numpy(), found.indices.numpy()
        return (distances, indices) if return_distance else indices

    def kneighbors_graph(
        self, X: Collection | None = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> csr_matrix:
        """The same as a sparse matrix (n, n_samples_fit_) of ones (``mode="connectivity"``) or distances ("distance").

        Other estimators take it with ``metric="precomputed"``.
        """
        check_choice("mode", mode, ("connectivity", "distance"))
        distances, indices = self.kneighbors(X, n_neighbors)
        rows, k = indices.shape
        data = distances if mode == "distance" else np.ones_like(distances)
        starts = np.arange(0, rows * k + 1, k)
        return csr_matrix((data.ravel(), indices.ravel(), starts), shape=(rows, self.n_samples_fit_))


class _Voting(_Neighbors):
    weights: str

    def __init__(
        self,
        n_neighbors: int = 1,
        *,
        weights: str = "uniform",
        cost: Cost = "sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "hard",
        gamma: float = 1.0,
        divergence: str | None = None,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._take(locals())

    def _votes(self, X: Collection) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Weights of sum 1 and indices of the neighbours, each (n, n_neighbors)."""
        check_choice("weights", self.weights, ("uniform", "distance"))
        distances, indices = self.kneighbors(X)
        if self.weights == "uniform":
            return np.full_like(distances, 1 / indices.shape[1]), indices
        if self.divergence is None and (distances < 0).any():
            raise ValueError("weights='distance' needs distances of at least 0: use omega='hard' or a divergence")
        equal = distances <= 0  # by rounding, or a sparse Ω, a divergence may be just below
        shares = np.where(equal.any(1, keepdims=True), equal, 1 / np.where(equal, 1, distances))
        return shares / shares.sum(1, keepdims=True), indices


class DTWNeighborsClassifier(ClassifierMixin, _Voting):
    """The label of most of the nearest series. One neighbour under classical DTW is the usual baseline.

    Args:
        n_neighbors: how many series vote.
        weights: "uniform", or "distance" for votes that are inverse to distances.
        cost: what a match of two elements costs, as in :func:`bellmax.dtw`.
        band: half the width of the Sakoe-Chiba band in steps, as in :class:`bellmax.DTW`; None for no band.
        omega: "hard" for classical DTW, searched with lower bounds; a :class:`bellmax.Regularizer` or its name.
        gamma: strength of the smoothing, beside a name of Ω; "hard" ignores it.
        divergence: as in :func:`bellmax.dtw`.
        n_jobs: how many threads; None for as many as torch uses, −1 for all processors.
        verbose: whether to draw a progress bar, which needs ``pip install 'bellmax[progress]'``.

    >>> model = DTWNeighborsClassifier(band=2).fit([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1]], ["low", "high", "low"])
    >>> model.predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

    def fit(self, X: Collection, y: Any) -> DTWNeighborsClassifier:
        series, labels = self._read_with_targets(X, y)
        self.classes_, self._labels = np.unique(labels, return_inverse=True)
        self._keep(series)
        return self

    def predict_proba(self, X: Collection) -> NDArray[np.float64]:
        """The share of each class in the votes, (n, classes)."""
        check_is_fitted(self)
        shares, indices = self._votes(X)
        votes = np.zeros((len(indices), len(self.classes_)))
        np.add.at(votes, (np.arange(len(indices))[:, None], self._labels[indices]), shares)
        return votes

    def predict(self, X: Collection) -> NDArray[Any]:
        """The class with the largest share, (n,); the first of those that share it."""
        shares = self.predict_proba(X).round(12)  # sums of equal shares in another order are equal
        labels: NDArray[Any] = self.classes_[shares.argmax(1)]
        return labels


class DTWNeighborsRegressor(RegressorMixin, _Voting):
    """The mean target of the nearest series. Parameters are those of :class:`DTWNeighborsClassifier`.

    >>> model = DTWNeighborsRegressor(2).fit([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1]], [1.0, 7.0, 2.0])
    >>> model.predict([[0, 2]])
    array([1.5])
    """

    def fit(self, X: Collection, y: Any) -> DTWNeighborsRegressor:
        series, self._targets = self._read_with_targets(X, y)
        self._keep(series)
        return self

    def predict(self, X: Collection) -> NDArray[np.float64]:
        """The weighted mean of the neighbours' targets, (n,)."""
        check_is_fitted(self)
        shares, indices = self._votes(X)
        means: NDArray[np.float64] = (shares * self._targets[indices]).sum(1)
        return means


class DTWNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Neighbors):
    """The sparse graph of nearest series, for estimators with ``metric="precomputed"``: DBSCAN, UMAP, t-SNE, spectral
    clustering.

    As in scikit-learn's ``KNeighborsTransformer``, a series of ``fit`` that is transformed is its own first neighbour
    under hard DTW or a divergence, unless another one equals it, and with ``mode="distance"`` one neighbour more is
    kept for it. Other measures can be below 0, which most estimators refuse.

    Args:
        n_neighbors: how many neighbours.
        mode: "distance", or "connectivity" for ones.
        cost: what a match of two elements costs, as in :func:`bellmax.dtw`.
        band: half the width of the Sakoe-Chiba band in steps, as in :class:`bellmax.DTW`; None for no band.
        omega: "hard" for classical DTW, searched with lower bounds; a :class:`bellmax.Regularizer` or its name.
        gamma: strength of the smoothing, beside a name of Ω; "hard" ignores it.
        divergence: as in :func:`bellmax.dtw`.
        n_jobs: how many threads; None for as many as torch uses, −1 for all processors.
        verbose: whether to draw a progress bar, which needs ``pip install 'bellmax[progress]'``.

    >>> from sklearn.cluster import DBSCAN
    >>> from sklearn.pipeline import make_pipeline
    >>> model = make_pipeline(DTWNeighborsTransformer(2), DBSCAN(eps=3, min_samples=2, metric="precomputed"))
    >>> model.fit_predict([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6], [0, 2]]).tolist()
    [0, 1, 0, 1, 0]
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        mode: str = "distance",
        cost: Cost = "sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "hard",
        gamma: float = 1.0,
        divergence: str | None = None,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._take(locals())

    @property
    def _n_features_out(self) -> int:
        return self.n_samples_fit_

    def fit(self, X: Collection, y: Any = None) -> DTWNeighborsTransformer:
        self._keep(self._read(X, reset=True))
        return self

    def transform(self, X: Collection) -> csr_matrix:
        """A sparse matrix (n, n_samples_fit_)."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)
