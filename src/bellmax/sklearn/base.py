"""What the estimators share: collections of series checked as scikit-learn wants it, and the options of a measure."""

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


class SeriesEstimator(BaseEstimator):
    """An estimator whose ``X`` is a collection of series."""

    cost: Cost
    band: float | None
    omega: str | Regularizer
    gamma: Any
    divergence: str | None
    n_jobs: int | None
    verbose: int

    def _take(self, parameters: dict[str, Any]) -> None:
        """The arguments of ``__init__``, as they are and under their names, as scikit-learn wants them."""
        self.__dict__.update({name: given for name, given in parameters.items() if name != "self"})

    # --- data

    def _read(self, X: Collection, *, reset: bool) -> Series:
        """The series (length, features) of X, finite and of one dtype."""
        if isinstance(X, Tensor):
            X = X.detach().cpu().numpy()
        given = X
        if _is_table(X):
            given = validate_data(self, X, reset=reset, dtype=(np.float64, np.float32), ensure_all_finite=False)
        series = [promote_half(s.detach().cpu()) for s in as_floating(as_collection("X", given))]
        if reset:
            if not series:
                raise ValueError("X must hold at least one series, got none")
            self._features = series[0].shape[1]
            self._is_flat = np.ndim(X[0]) == 1 if isinstance(X, list | tuple) else getattr(given, "ndim", 0) == 2
            if not _is_table(X):
                self._count_steps(series)
        _check(series, self._features)
        return series

    def _count_steps(self, series: Series) -> None:
        """What scikit-learn calls the features of a table, by which a later one is checked; none if lengths differ."""
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
        lengths = {len(s) for s in series}
        if len(lengths) == 1 and self._features == 1:
            (self.n_features_in_,) = lengths

    def _read_with_targets(self, X: Collection, y: Any) -> tuple[Series, Any]:
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

    def _laid_out(self, series: Tensor) -> Any:
        """Series as an array of X's layout: (..., time) if its series were (time,)."""
        return (series.squeeze(-1) if self._is_flat else series).numpy()

    # --- the measure

    @property
    def _omega(self) -> Regularizer:
        if isinstance(self.omega, Regularizer):
            return self.omega
        return resolve(self.omega, None if self.omega == "hard" else self.gamma)

    def _measure(self) -> dict[str, Any]:
        return {"cost": self.cost, "band": self.band, "omega": self._omega, "divergence": self.divergence}

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """With ``n_jobs`` threads."""
        before = torch.get_num_threads()
        if self.n_jobs is not None:
            torch.set_num_threads(effective_n_jobs(self.n_jobs))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _is_table(X: Any) -> bool:
    """Whether X is rows of numbers, which scikit-learn can check: no list, no array (n, time, features), no series in
    cells."""
    if isinstance(X, list | tuple):
        return False
    cells = X.to_numpy() if hasattr(X, "iloc") else X
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "O" and cells.size:
        return np.ndim(cells.flat[0]) == 0
    return getattr(cells, "ndim", 2) != 3


def _check(series: Series, features: int) -> None:
    for k, one in enumerate(series):
        if one.shape[1] != features:
            hint = transposed(min(features, one.shape[1]) > 1)
            raise ValueError(f"X[{k}] must have {features} features, as those in fit, got {one.shape[1]}{hint}")
        if not bool(one.isfinite().all()):
            step = int((~one.isfinite()).any(1).nonzero()[0])
            raise ValueError(
                f"X[{k}] must be finite up to its end, past which there may be NaN; got NaN or inf at step {step}"
            )
