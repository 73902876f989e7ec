"""Nearest neighbors under DTW: classification, regression, and sparse graphs for other estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from bellmax.inputs import check_choice
from bellmax.names import answers_near_misses
from bellmax.regularizers import Regularizer
from bellmax.series.collections import Collection
from bellmax.series.costs import Cost
from bellmax.series.neighbors import dtw_neighbors
from bellmax.sklearn.base import Series, SeriesEstimator


class _Neighbors(SeriesEstimator):
    """Base class of the estimators that search the series of ``fit``."""

    n_neighbors: int

    def _store_series(self, series: Series) -> None:
        """Set the series to search in."""
        self._series, self.n_samples_fit_ = series, len(series)

    def kneighbors(
        self, X: Collection | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> Any:
        """Return the distances to the nearest series of ``fit`` and their indices, nearest first.

        Both arrays have shape (n, n_neighbors). Distances are sums of costs, without a square root.

        Args:
            X: The series whose neighbors are searched. If None (the default), these are the series of ``fit``, and a
                series is not its own neighbor.
            n_neighbors: The number of neighbors, default the parameter of the estimator.
            return_distance: If False, return the indices only. Default True.

        """
        check_is_fitted(self)
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        num_candidates = self.n_samples_fit_ - (X is None)
        if not 1 <= k <= num_candidates:
            needed = f"from 1 to {num_candidates}, the number of series to choose from"
            raise ValueError(f"n_neighbors must be {needed}, got {k}")
        queries, candidates = (self._series, None) if X is None else (self._read(X, reset=False), self._series)
        with self._threads():
            neighbors = dtw_neighbors(queries, candidates, k=k, progress=bool(self.verbose), **self._measure_options())
        distances, indices = neighbors.distances.numpy(), neighbors.indices.numpy()
        return (distances, indices) if return_distance else indices

    def kneighbors_graph(
        self, X: Collection | None = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> csr_matrix:
        """Return the neighbors as a sparse matrix (n, n_samples_fit_), for estimators with ``metric="precomputed"``.

        Args:
            X: The series whose neighbors are searched, as in :meth:`kneighbors`.
            n_neighbors: The number of neighbors, default the parameter of the estimator.
            mode: The entries of the matrix: ones for "connectivity" (the default), distances for "distance".

        """
        check_choice("mode", mode, ("connectivity", "distance"))
        distances, indices = self.kneighbors(X, n_neighbors)
        rows, k = indices.shape
        data = distances if mode == "distance" else np.ones_like(distances)
        starts = np.arange(0, rows * k + 1, k)
        return csr_matrix((data.ravel(), indices.ravel(), starts), shape=(rows, self.n_samples_fit_))


class _Voting(_Neighbors):
    """Base class of the estimators that average the targets of the nearest neighbors."""

    weights: str

    @answers_near_misses
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
        self._store_parameters(locals())

    def _weighted_neighbors(self, X: Collection) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return weights, which sum to 1 in each row, and indices of the neighbors, each (n, n_neighbors)."""
        check_choice("weights", self.weights, ("uniform", "distance"))
        distances, indices = self.kneighbors(X)
        if self.weights == "uniform":
            return np.full_like(distances, 1 / indices.shape[1]), indices
        if self.divergence is None and (distances < 0).any():
            raise ValueError("weights='distance' needs distances of at least 0: use omega='hard' or a divergence")
        is_zero = distances <= 0  # rounding, or a sparse Ω, can make a divergence slightly negative
        weights = np.where(is_zero.any(1, keepdims=True), is_zero, 1 / np.where(is_zero, 1, distances))
        return weights / weights.sum(1, keepdims=True), indices


class DTWNeighborsClassifier(ClassifierMixin, _Voting):
    """k-nearest-neighbor classifier of time series under DTW.

    With the default parameters, the classifier returns the class of the one nearest series under classical DTW (1-NN).

    Args:
        n_neighbors: The number of nearest series that vote for their class, default 1.
        weights: "uniform" (the default), or "distance" to weight each vote by the inverse of its distance.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: "hard" (the default) for classical DTW, whose search uses lower bounds; or a
            :class:`bellmax.Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax".
        gamma: Smoothing strength, default 1. Ignored if ``omega`` is "hard" or a :class:`bellmax.Regularizer`.
        divergence: The divergence, as in :func:`bellmax.dtw`. Default None.
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.
        verbose: If nonzero, show a progress bar, which needs ``pip install 'bellmax[progress]'``. Default 0.

    >>> model = DTWNeighborsClassifier(band=2).fit([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1]], ["low", "high", "low"])
    >>> model.predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

    def fit(self, X: Collection, y: Any) -> DTWNeighborsClassifier:
        """Store the series of X and their labels y (n,)."""
        series, labels = self._read_with_targets(X, y)
        self.classes_, self._labels = np.unique(labels, return_inverse=True)
        self._store_series(series)
        return self

    def predict_proba(self, X: Collection) -> NDArray[np.float64]:
        """Return the fraction of the votes for each class, for each series of X, (n, classes)."""
        check_is_fitted(self)
        weights, indices = self._weighted_neighbors(X)
        votes = np.zeros((len(indices), len(self.classes_)))
        np.add.at(votes, (np.arange(len(indices))[:, None], self._labels[indices]), weights)
        return votes

    def predict(self, X: Collection) -> NDArray[Any]:
        """Return the class with the most votes for each series of X, (n,).

        If several classes have the same number of votes, the first class in sorted order is returned.
        """
        probabilities = self.predict_proba(X).round(12)  # so that ties do not depend on the order of summation
        labels: NDArray[Any] = self.classes_[probabilities.argmax(1)]
        return labels


class DTWNeighborsRegressor(RegressorMixin, _Voting):
    """k-nearest-neighbor regressor of time series under DTW.

    The prediction is the mean of the targets of the ``n_neighbors`` nearest series. See :class:`DTWNeighborsClassifier`
    for the parameters.

    >>> model = DTWNeighborsRegressor(2).fit([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1]], [1.0, 7.0, 2.0])
    >>> model.predict([[0, 2]])
    array([1.5])
    """

    def fit(self, X: Collection, y: Any) -> DTWNeighborsRegressor:
        """Store the series of X and their targets y (n,)."""
        series, self._targets = self._read_with_targets(X, y)
        self._store_series(series)
        return self

    def predict(self, X: Collection) -> NDArray[np.float64]:
        """Return the mean of the neighbors' targets for each series of X, (n,), weighted as ``weights`` says."""
        check_is_fitted(self)
        weights, indices = self._weighted_neighbors(X)
        means: NDArray[np.float64] = (weights * self._targets[indices]).sum(1)
        return means


class DTWNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Neighbors):
    """Transformer to a sparse neighbor graph, for DBSCAN, UMAP or t-SNE with ``metric="precomputed"``.

    With ``mode="distance"``, each row has n_neighbors + 1 entries, as in scikit-learn's ``KNeighborsTransformer``. The
    additional entry is for the series itself: in the graph of the training series, each series is its own neighbor.
    Under classical DTW and divergences, it is the first neighbor, unless an equal series comes first. Soft-DTW without
    a divergence can give negative distances, which most estimators reject.

    Args:
        n_neighbors: The number of neighbors, default 5.
        mode: The values that the matrix contains for neighbors: "distance" (the default) for their distances, or
            "connectivity" for 1.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: "hard" (the default) for classical DTW, whose search uses lower bounds; or a
            :class:`bellmax.Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax".
        gamma: Smoothing strength, default 1. Ignored if ``omega`` is "hard" or a :class:`bellmax.Regularizer`.
        divergence: The divergence, as in :func:`bellmax.dtw`. Default None.
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.
        verbose: If nonzero, show a progress bar, which needs ``pip install 'bellmax[progress]'``. Default 0.

    >>> from sklearn.cluster import DBSCAN
    >>> from sklearn.pipeline import make_pipeline
    >>> model = make_pipeline(DTWNeighborsTransformer(2), DBSCAN(eps=3, min_samples=2, metric="precomputed"))
    >>> model.fit_predict([[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6], [0, 2]]).tolist()
    [0, 1, 0, 1, 0]
    """

    @answers_near_misses
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
        self._store_parameters(locals())

    @property
    def _n_features_out(self) -> int:
        """The number of columns of ``transform``, from which scikit-learn generates their names."""
        return self.n_samples_fit_

    def fit(self, X: Collection, y: Any = None) -> DTWNeighborsTransformer:
        """Store the series of X. ``y`` is ignored."""
        self._store_series(self._read(X, reset=True))
        return self

    def transform(self, X: Collection) -> csr_matrix:
        """Return the nearest training series of each series of X, as a sparse matrix (n, number of training series)."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)
