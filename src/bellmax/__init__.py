"""Differentiable dynamic programming for PyTorch.

Each structure is a distribution with ``value``, ``expected_path``, ``decode``, ``topk``, ``sample``, ``log_prob`` and
``entropy``. ``decode`` returns the best path in the terms of the structure, such as tags or index pairs. ``log_prob``
and the losses accept these paths. Structures:

- sequences: ``Chain`` (CRF, HMM), ``SemiMarkov`` (segments with durations)
- alignments: ``DTW``, ``SequenceAlignment`` (Needleman–Wunsch, Smith–Waterman), ``MonotonicAlignment``
- speech: ``CTC``, ``Transducer`` (RNN-T)
- trees: ``SpanTrees`` (constituents), ``DependencyTrees``, ``TreeModel`` (labels on a given tree)
- your own recursion, in plain Python: ``program``, with ``bellmax.max`` and ``bellmax.min``
- automata over frames, such as lexicons and n-grams: ``Automaton``
- your own graph: ``DAG``, ``Hypergraph``, and ``Lattice`` with ``Move`` and the words in ``bellmax.lattice``

For graphs with cycles, ``BeliefPropagation`` computes approximate marginals. It is not a distribution.

Texts from a CTC network, with a lexicon and an n-gram: ``CTCDecoder``.

Functions: ``dtw``, ``dtw_cdist``, ``dtw_neighbors``, ``dtw_barycenter``, ``viterbi``.

Regularizers Ω: ``Negentropy`` (softmax), ``Tsallis`` (sparsemax, entmax), ``SquaredL2`` and ``Hard``. To write
your own, subclass ``Regularizer`` and test it with ``check_regularizer``.

Modules: ``losses``, ``nn`` (layers), ``sklearn`` (estimators), ``compat`` (the interfaces of other libraries),
``plots`` (figures), ``cluster`` (job arrays), ``onnx`` (export).

Checks: ``check_program`` compares a program with its function, run on numbers.

Settings: ``use_backend``, ``backend_info``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import bellmax.dtw as _  # noqa: F401  first: importing this module later would replace the function bellmax.dtw
from bellmax import lattice, losses
from bellmax.automata import Automaton, CTCDecoder
from bellmax.backends.choice import use_backend
from bellmax.checking import check_regularizer
from bellmax.distribution import PathDistribution
from bellmax.info import backend_info
from bellmax.names import attribute_error
from bellmax.recursions.check import check_program
from bellmax.recursions.choices import max as max
from bellmax.recursions.choices import min as min
from bellmax.recursions.definition import program
from bellmax.regularizers import Hard, Negentropy, Regularizer, SquaredL2, Tsallis
from bellmax.series import dtw, dtw_barycenter, dtw_cdist, dtw_neighbors
from bellmax.structures.alignment import SequenceAlignment
from bellmax.structures.belief_propagation import BeliefPropagation
from bellmax.structures.chain import Chain, viterbi
from bellmax.structures.ctc import CTC
from bellmax.structures.dag import DAG
from bellmax.structures.dtw import DTW
from bellmax.structures.hypergraph import Hypergraph
from bellmax.structures.lattice import Lattice, Move
from bellmax.structures.monotone import MonotonicAlignment
from bellmax.structures.parses import DependencyTrees, SpanTrees
from bellmax.structures.semi_markov import SemiMarkov
from bellmax.structures.transducer import Transducer
from bellmax.structures.tree import TreeModel

if TYPE_CHECKING:
    from bellmax import cluster, compat, nn, plots, sklearn
    from bellmax import onnx as onnx

    __version__: str

__all__ = [
    "CTC",
    "DAG",
    "DTW",
    "Automaton",
    "BeliefPropagation",
    "CTCDecoder",
    "Chain",
    "DependencyTrees",
    "Hard",
    "Hypergraph",
    "Lattice",
    "MonotonicAlignment",
    "Move",
    "Negentropy",
    "PathDistribution",
    "Regularizer",
    "SemiMarkov",
    "SequenceAlignment",
    "SpanTrees",
    "SquaredL2",
    "Transducer",
    "TreeModel",
    "Tsallis",
    "__version__",
    "backend_info",
    "check_program",
    "check_regularizer",
    "cluster",
    "compat",
    "dtw",
    "dtw_barycenter",
    "dtw_cdist",
    "dtw_neighbors",
    "lattice",
    "losses",
    "nn",
    "plots",
    "program",
    "sklearn",
    "use_backend",
    "viterbi",
]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        """Import the modules with optional or slow dependencies, and look up the version, on first use."""
        if name in ("nn", "plots", "compat", "cluster", "sklearn", "onnx"):
            return import_module(f"bellmax.{name}")
        if name == "__version__":
            from importlib.metadata import version

            return version("bellmax")
        raise attribute_error("bellmax", name)


def __dir__() -> list[str]:
    return __all__
