"""Kernels of series, for support vector machines."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection, dtw_cdist
from bellmax.series.costs import Cost
from bellmax.sklearn.base import Series, SeriesEstimator


class DTWKernel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SeriesEstimator):
    """exp(−D(x/√γ, y/√γ)) of each series x with each series y of ``fit``, for ``SVC(kernel="precomputed")``.

    With the parameters as they are, D is the debiased soft-DTW at γ = 1, and the kernel is positive definite: the
    normalised global alignment kernel. For other costs, Ω and divergences there is no such proof.

    Args:
        gamma: what squared distances are divided by, > 0; "scale" for the variance of the elements, summed over the
            features, times the median length.
        cost: what a match of two elements costs, as in :func:`bellmax.dtw`.
        band: half the width of the Sakoe-Chiba band in steps, as in :class:`bellmax.DTW`; None for no band.
        omega: a name of Ω, at γ = 1, or a :class:`bellmax.Regularizer`; "hard" for classical DTW.
        divergence: as in :func:`bellmax.dtw`.
        n_jobs: how many threads; None for as many as torch uses, −1 for all processors.
        verbose: whether to draw a progress bar, which needs ``pip install 'bellmax[progress]'``.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.svm import SVC
    >>> X, y = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6]], ["low", "high", "low", "high"]
    >>> model = make_pipeline(DTWKernel(), SVC(kernel="precomputed")).fit(X, y)
    >>> model.predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

    def __init__(
        self,
        gamma: float | str = "scale",
        *,
        cost: Cost = "log_sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        divergence: str | None = "debiased",
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._take(locals())

    @property
    def _n_features_out(self) -> int:
        return len(self._series)

    @property
    def _omega(self) -> Regularizer:
        return resolve(self.omega)

    def fit(self, X: Collection, y: Any = None) -> DTWKernel:
        series = self._read(X, reset=True)
        if self.gamma == "scale":
            variance = float(torch.cat(series).var(0, correction=0).sum())
            self.gamma_ = variance * median(map(len, series)) or 1.0
        elif isinstance(self.gamma, str) or not self.gamma > 0:
            raise ValueError(f"gamma must be 'scale' or a number > 0, got {self.gamma!r}")
        else:
            self.gamma_ = float(self.gamma)
        self._series = self._scaled(series)
        return self

    def _scaled(self, series: Series) -> Series:
        return [s / self.gamma_**0.5 for s in series]

    def transform(self, X: Collection) -> NDArray[np.floating[Any]]:
        """(n, n of ``fit``)."""
        check_is_fitted(self)
        given = self._scaled(self._read(X, reset=False))
        with self._threads(), torch.no_grad():
            distances = dtw_cdist(given, self._series, progress=bool(self.verbose), **self._measure())
            kernel: NDArray[np.floating[Any]] = distances.neg_().exp_().numpy()
        return kernel
