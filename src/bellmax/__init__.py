"""Differentiable dynamic programming for PyTorch."""

from bellmax.backends import backend_info, use_backend
from bellmax.chain import Chain, viterbi
from bellmax.dag import DAG
from bellmax.distribution import PathDistribution
from bellmax.regularizers import Hard, Negentropy, Regularizer, SquaredL2, Tsallis

__all__ = [
    "DAG",
    "Chain",
    "Hard",
    "Negentropy",
    "PathDistribution",
    "Regularizer",
    "SquaredL2",
    "Tsallis",
    "backend_info",
    "use_backend",
    "viterbi",
]
