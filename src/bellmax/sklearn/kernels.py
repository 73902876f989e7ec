"""Kernels between series, for support vector machines."""

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
    """Kernel matrix exp(−D(x/√γ, y/√γ)) of series x and the series y of ``fit``, for ``SVC(kernel="precomputed")``.

    With the default parameters, D is the debiased soft-DTW at γ = 1, and the kernel is positive definite: it is the
    normalised global alignment kernel. For other costs, Ω and divergences, positive definiteness is not proven.

    Args:
        gamma: The divisor γ of squared distances, > 0, or "scale" (the default) for the variance of the elements,
            summed over the features, times the median length.
        cost: The cost of matching two elements, as in :func:`bellmax.dtw`. Default "log_sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`bellmax.DTW`. Default None, no band.
        omega: A :class:`bellmax.Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax" at smoothing
            strength 1, or "hard" for classical DTW.
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
        self._store_parameters(locals())

    @property
    def _n_features_out(self) -> int:
        """The number of columns of ``transform``, from which scikit-learn generates their names."""
        return len(self._series)

    @property
    def _omega(self) -> Regularizer:
        """The regularizer. Here the parameter ``gamma`` is a scale of the series, not the smoothing strength."""
        return resolve(self.omega)

    def fit(self, X: Collection, y: Any = None) -> DTWKernel:
        """Set γ, and store the series of X. ``y`` is ignored."""
        series = self._read(X, reset=True)
        if self.gamma == "scale":
            variance = float(torch.cat(series).var(0, correction=0).sum())
            self.gamma_ = variance * median(map(len, series)) or 1.0
        elif isinstance(self.gamma, str) or not self.gamma > 0:
            raise ValueError(f"gamma must be 'scale' or a number > 0, got {self.gamma!r}")
        else:
            self.gamma_ = float(self.gamma)
        self._series = self._divide_by_root_gamma(series)
        return self

    def _divide_by_root_gamma(self, series: Series) -> Series:
        """Return x/√γ for each series x, which divides squared distances by γ."""
        return [s / self.gamma_**0.5 for s in series]

    def transform(self, X: Collection) -> NDArray[np.floating[Any]]:
        """Return the kernel matrix (n, number of series in ``fit``)."""
        check_is_fitted(self)
        series = self._divide_by_root_gamma(self._read(X, reset=False))
        with self._threads(), torch.no_grad():
            distances = dtw_cdist(series, self._series, progress=bool(self.verbose), **self._measure_options())
            kernel: NDArray[np.floating[Any]] = distances.neg_().exp_().numpy()
        return kernel
