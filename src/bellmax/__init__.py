"""Differentiable dynamic programming for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import bellmax.dtw as _  # noqa: F401  so that a later import of the module does not hide the function
from bellmax import losses
from bellmax.backends.choice import backend_info, use_backend
from bellmax.checking import check_regularizer
from bellmax.distribution import PathDistribution
from bellmax.regularizers import Hard, Negentropy, Regularizer, SquaredL2, Tsallis
from bellmax.series import dtw, dtw_barycenter, dtw_cdist
from bellmax.structures.chain import Chain, viterbi
from bellmax.structures.dag import DAG
from bellmax.structures.dtw import DTW

if TYPE_CHECKING:
    from bellmax import compat, nn, plots

    __version__: str

__all__ = [
    "DAG",
    "DTW",
    "Chain",
    "Hard",
    "Negentropy",
    "PathDistribution",
    "Regularizer",
    "SquaredL2",
    "Tsallis",
    "__version__",
    "backend_info",
    "check_regularizer",
    "compat",
    "dtw",
    "dtw_barycenter",
    "dtw_cdist",
    "losses",
    "nn",
    "plots",
    "use_backend",
    "viterbi",
]


def __getattr__(name: str) -> Any:
    """Modules, and the version, when they are first asked for."""
    if name in ("nn", "plots", "compat"):
        return import_module(f"bellmax.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("bellmax")
    raise AttributeError(f"module 'bellmax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
