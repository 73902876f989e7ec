"""Differentiable dynamic programming for PyTorch."""

from bellmax import losses
from bellmax.backends import backend_info, use_backend
from bellmax.chain import Chain, viterbi
from bellmax.dag import DAG
from bellmax.distribution import PathDistribution
from bellmax.dtw import DTW
from bellmax.regularizers import Hard, Negentropy, Regularizer, SquaredL2, Tsallis
from bellmax.series import dtw, dtw_barycenter, dtw_cdist

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
    "backend_info",
    "dtw",
    "dtw_barycenter",
    "dtw_cdist",
    "losses",
    "use_backend",
    "viterbi",
]
