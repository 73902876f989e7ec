"""Base class of the estimators: validation of collections of series, and the options of the distance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from bellmax.inputs import as_collection, as_floating, transposed
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection
from bellmax.series.costs import Cost
from bellmax.tensors import promote_half

Series = list[Tensor]


class CollectionEstimator(BaseEstimator):
    """An estimator whose ``X`` is a collection of series."""

    n_jobs: int | None
    verbose: int

    def _store_parameters(self, parameters: dict[str, Any]) -> None:
        """Store the arguments of ``__init__``, from its ``locals()``, as attributes with the same names.

        scikit-learn requires that ``__init__`` stores its arguments unchanged.
        """
        self.__dict__.update({name: value for name, value in parameters.items() if name != "self"})

    # --- data

    def _read(self, X: Collection, *, reset: bool) -> Series:
        """Return the series (length, features) of X as valid tensors on the CPU, of one dtype.

        ``reset`` is True in ``fit``, which determines the number of features, and False later, as in scikit-learn.
        """
        if isinstance(X, Tensor):
            X = X.detach().cpu().numpy()
        collection = X
        if _is_table(X):
            collection = validate_data(self, X, reset=reset, dtype=(np.float64, np.float32), ensure_all_finite=False)
        series = self._as_floating([s.detach().cpu() for s in as_collection("X", collection)])
        if reset:
            if not series:
                raise ValueError("X must hold at least one series, got none")
            self._features = series[0].shape[1]
            if isinstance(X, list | tuple):
                self._is_univariate = np.ndim(X[0]) == 1
            else:
                self._is_univariate = getattr(collection, "ndim", 0) == 2
            if not _is_table(X):
                self._set_n_features_in(series)
        for k, x in enumerate(series):
            if x.shape[1] != self._features:
                hint = transposed(min(self._features, x.shape[1]) > 1)
                needed = f"X[{k}] must have {self._features} features, as the series of fit"
                raise ValueError(f"{needed}, got {x.shape[1]}{hint}")
        try:
            self._check_values("X", torch.cat(series))  # faster than one by one
        except ValueError:
            for k, x in enumerate(series):
                self._check_values(f"X[{k}]", x)
            raise
        return series

    def _as_floating(self, series: Series) -> Series:
        """Convert series to one floating point dtype."""
        return [promote_half(s) for s in as_floating(series)]

    def _check_values(self, name: str, x: Tensor) -> None:
        """Raise ``ValueError`` if a series has a value that is not finite."""
        if not bool(x.isfinite().all()):
            step = int((~x.isfinite()).any(1).nonzero()[0])
            raise ValueError(f"{name} must be finite, except for NaN padding at its end, got NaN or inf at step {step}")

    def _set_n_features_in(self, series: Series) -> None:
        """Set ``n_features_in_`` to the number of steps if X was not a table: scikit-learn checks later tables by it.

        If lengths differ or series are multivariate, a later X may have any number of steps.
        """
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
        lengths = {len(s) for s in series}
        if len(lengths) == 1 and self._features == 1:
            (self.n_features_in_,) = lengths

    def _read_with_targets(self, X: Collection, y: Any) -> tuple[Series, Any]:
        """Return the series of X and the validated targets y, in ``fit``."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        series = self._read(X, reset=True)
        targets = column_or_1d(y, warn=True)
        check_consistent_length(series, targets)
        if not is_classifier(self):
            targets = np.asarray(targets, dtype=np.float64)
        if targets.dtype.kind == "f" and not np.isfinite(targets).all():
            raise ValueError("y must be finite, got NaN or inf")
        if is_classifier(self):
            check_classification_targets(targets)
        return series, targets

    def _as_input_layout(self, series: Tensor) -> Any:
        """Convert series (..., time, features) to an array in the layout of X: (..., time) if it was univariate."""
        return (series.squeeze(-1) if self._is_univariate else series).numpy()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Run the body with ``n_jobs`` threads of torch, then restore the number of threads."""
        num_threads = torch.get_num_threads()
        if self.n_jobs is not None:
            torch.set_num_threads(effective_n_jobs(self.n_jobs))
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


class SeriesEstimator(CollectionEstimator):
    """An estimator that compares series by DTW."""

    cost: Cost
    band: float | None
    omega: str | Regularizer
    gamma: Any
    divergence: str | None

    @property
    def _omega(self) -> Regularizer:
        """The regularizer. "hard" ignores γ here, so that a grid search can combine all names with all γ."""
        if isinstance(self.omega, Regularizer):
            return self.omega
        return resolve(self.omega, None if self.omega == "hard" else self.gamma)

    def _measure_options(self) -> dict[str, Any]:
        """Return the keyword arguments that :func:`bellmax.dtw_cdist` and its relatives have in common."""
        return {"cost": self.cost, "band": self.band, "omega": self._omega, "divergence": self.divergence}


def _is_table(X: Any) -> bool:
    """True if X is a table of numbers, which scikit-learn's ``validate_data`` accepts.

    False for a list, an array (n, time, features) and a frame whose cells contain series.
    """
    if isinstance(X, list | tuple):
        return False
    cells = X.to_numpy() if hasattr(X, "iloc") else X
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "O" and cells.size:
        return np.ndim(cells.flat[0]) == 0
    return getattr(cells, "ndim", 2) != 3
