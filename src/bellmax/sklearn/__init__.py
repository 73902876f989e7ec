"""Estimators for scikit-learn: neighbors, clusters and kernels of time series under DTW, and hidden Markov models.

The argument ``X`` of all estimators is a collection of n series, as in :func:`bellmax.dtw_cdist`: an array (n, time) or
(n, time, features), a data frame with a series in each row, or a list of series of any lengths. In an array or a frame,
NaN at the end of a series is padding. A distance is the sum of the costs of the matched elements, without a square
root. The estimators work in ``GridSearchCV`` and in pipelines. Install them with ``pip install 'bellmax[sklearn]'``.

>>> import numpy as np
>>> import bellmax as bx
>>> from sklearn.model_selection import GridSearchCV
>>> time = np.linspace(0, 6, 40)
>>> X = np.array([np.sin(time * speed + delay) for speed in (1, 2) for delay in np.linspace(0, 1, 12)])
>>> y = np.repeat(["slow", "fast"], 12)
>>> search = GridSearchCV(bx.sklearn.DTWNeighborsClassifier(), {"band": [0, 2, 8], "n_neighbors": [1, 3]}, cv=3)
>>> float(search.fit(X, y).best_score_)
1.0
"""

from typing import TYPE_CHECKING

from bellmax.names import attribute_error

try:
    import sklearn as _  # noqa: F401
except ImportError as error:
    raise ImportError("bellmax.sklearn needs scikit-learn: pip install 'bellmax[sklearn]'") from error

from bellmax.sklearn.centers import DTWBarycenterClassifier, DTWKMeans
from bellmax.sklearn.hmm import HMM
from bellmax.sklearn.kernels import DTWKernel
from bellmax.sklearn.neighbors import DTWNeighborsClassifier, DTWNeighborsRegressor, DTWNeighborsTransformer

__all__ = [
    "HMM",
    "DTWBarycenterClassifier",
    "DTWKMeans",
    "DTWKernel",
    "DTWNeighborsClassifier",
    "DTWNeighborsRegressor",
    "DTWNeighborsTransformer",
]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        raise attribute_error("bellmax.sklearn", name)
