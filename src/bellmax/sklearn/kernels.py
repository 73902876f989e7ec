"""Kernels between series, for support vector machines."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from bellmax.inputs import answers_near_misses
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection, dtw_cdist
from bellmax.series.costs import Cost
from bellmax.sklearn.base import Series, SeriesEstimator


class DTWKernel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SeriesEstimator):
    """Transformer that computes a DTW kernel matrix, for estimators such as ``SVC(kernel="precomputed")``.

    The kernel of a series x and a training series y is exp(−D(x/ℓ, y/ℓ)), where ℓ is ``length_scale``. With the default
    parameters, D is the divergence "debiased" of soft-DTW with γ = 1. The result is the normalized global alignment
    kernel, which is positive definite. For another cost, Ω or divergence, there is no proof that the kernel is positive
    definite.

    Args:
        length_scale: The bandwidth ℓ > 0. Series are divided by it. With "scale" (the default), ℓ² is the median length
            of the series, multiplied by the sum of the variances of all features.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "log_sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax" or "l2" with γ = 1, "hard" for
            classical DTW, or a :class:`bellmax.Regularizer`.
        divergence: The divergence, as in :func:`bellmax.dtw`. Default "debiased".
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.
        verbose: If nonzero, show a progress bar, which needs ``pip install 'bellmax[progress]'``. Default 0.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.svm import SVC
    >>> X, y = [[0, 1, 2, 1], [5, 5, 6], [0, 1, 1], [5, 6]], ["low", "high", "low", "high"]
    >>> model = make_pipeline(DTWKernel(), SVC(kernel="precomputed")).fit(X, y)
    >>> model.predict([[6, 6, 6], [0, 2]]).tolist()
    ['high', 'low']
    """

    @answers_near_misses
    def __init__(
        self,
        *,
        length_scale: float | str = "scale",
        cost: Cost = "log_sqeuclidean",
        band: float | None = None,
        omega: str | Regularizer = "negentropy",
        divergence: str | None = "debiased",
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._store_parameters(locals())

    @property
    def _n_features_out(self) -> int:
        """The number of columns of ``transform``, from which scikit-learn generates their names."""
        return len(self._series)

    @property
    def _omega(self) -> Regularizer:
        """The regularizer at smoothing strength 1: :attr:`length_scale` takes the place of γ."""
        return resolve(self.omega)

    def fit(self, X: Collection, y: Any = None) -> DTWKernel:
        """Compute ℓ from the series of X, and store these series. ``y`` is ignored."""
        series = self._read(X, reset=True)
        if self.length_scale == "scale":
            variance = float(torch.cat(series).var(0, correction=0).sum())
            self.length_scale_ = math.sqrt(variance * median(map(len, series))) or 1.0
        elif not isinstance(self.length_scale, int | float | np.number) or not self.length_scale > 0:
            raise ValueError(f"length_scale must be 'scale' or a number > 0, got {self.length_scale!r}")
        else:
            self.length_scale_ = float(self.length_scale)
        self._series = self._scaled(series)
        return self

    def _scaled(self, series: Series) -> Series:
        """Return x/ℓ for each series x."""
        return [s / self.length_scale_ for s in series]

    def transform(self, X: Collection) -> NDArray[np.floating[Any]]:
        """Return the kernel of each series of X and each training series, (n, number of training series)."""
        check_is_fitted(self)
        series = self._scaled(self._read(X, reset=False))
        with self._threads(), torch.no_grad():
            distances = dtw_cdist(series, self._series, progress=bool(self.verbose), **self._measure_options())
            kernel: NDArray[np.floating[Any]] = distances.neg_().exp_().numpy()
        return kernel
