"""Every structure as a function of one small tensor of scores, for tests of all structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L


class Structure(NamedTuple):
    """``make(x, omega=…, gamma=…)`` is a distribution for scores x of that shape, without a batch."""

    make: Callable[..., bx.PathDistribution]
    shape: tuple[int, ...]
    sense: int = 1

    @property
    def absent(self) -> float:
        """The infinity that stands for "no edge"."""
        return -self.sense * float("inf")


def _like(x: Tensor, *numbers: float) -> Tensor:
    return torch.tensor(numbers).to(x)


LABELS = torch.tensor([1, 2, 2])
DAG = bx.DAG([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
HYPER = bx.Hypergraph([("a", ()), ("b", ()), ("b", ("a",)), ("c", ("a", "b")), ("c", ("b",))])
TREE = bx.TreeModel([-1, 0, 0])
EDIT = bx.Lattice([bx.Move(1, 1, score=L.cell("s")), bx.Move(1, 0, score=L.cell("s")), bx.Move(0, 1)])
AUTOMATON = bx.Automaton([(0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 0, 1), (0, 1, -1)], final={1: 0.5})
MATRIX = torch.tensor([[0.3, -0.2], [0.1, 0.4]])


def _lattice(x: Tensor, **omega: Any) -> bx.PathDistribution:
    return EDIT.paths({"s": x}, **omega)


def _automaton(x: Tensor, omega: Any = "negentropy", **gamma: Any) -> bx.PathDistribution:
    """The paths of an automaton, which refuses l2 and takes sparsemax instead."""
    if omega == "l2" or isinstance(omega, bx.SquaredL2):
        omega = "sparsemax" if omega == "l2" else bx.Tsallis(2.0, omega.gamma)
    p: bx.PathDistribution = AUTOMATON.paths(x, omega=omega, **gamma)
    return p


STRUCTURES: dict[str, Structure] = {
    "Chain": Structure(lambda x, **o: bx.Chain(x, **o), (3, 2, 2)),
    "ScoredChain": Structure(lambda x, **o: bx.Chain.from_scores(x, MATRIX.to(x), **o), (4, 2)),
    "ScoredChain, transitions": Structure(
        lambda x, **o: bx.Chain.from_scores(_like(x, *range(6)).reshape(3, 2).expand(*x.shape[:-2], 3, 2), x, **o),
        (2, 2),
    ),
    "DAG": Structure(lambda x, **o: DAG.paths(x, **o), (5,)),
    "Hypergraph": Structure(lambda x, **o: HYPER.derivations(x, **o), (5,)),
    "DTW": Structure(lambda x, **o: bx.DTW(x, **o), (3, 4), -1),
    "DTW, open": Structure(lambda x, **o: bx.DTW(x, open_begin=True, open_end=True, **o), (3, 4), -1),
    "DTW, weighted": Structure(lambda x, **o: bx.DTW(x, step_weights=(2.0, 1.0, 1.0), **o), (3, 4), -1),
    "DTW, band": Structure(lambda x, **o: bx.DTW(x, band=1, **o), (4, 4), -1),
    "Lattice": Structure(_lattice, (3, 3)),
    "CTC": Structure(lambda x, **o: bx.CTC(x, LABELS, **o), (5, 3)),
    "MonotonicAlignment": Structure(lambda x, **o: bx.MonotonicAlignment(x, **o), (4, 3)),
    "SequenceAlignment": Structure(lambda x, **o: bx.SequenceAlignment(x, gap_open=-1.0, gap_extend=-0.5, **o), (3, 3)),
    "SequenceAlignment, local": Structure(
        lambda x, **o: bx.SequenceAlignment(x, gap_open=-1.0, mode="local", **o), (3, 3)
    ),
    "SequenceAlignment, semiglobal": Structure(
        lambda x, **o: bx.SequenceAlignment(x, gap_open=-1.0, mode="semiglobal", **o), (3, 3)
    ),
    "Transducer": Structure(lambda x, **o: bx.Transducer(x[..., :3], x[..., 3:], **o), (3, 5)),
    "SemiMarkov": Structure(lambda x, **o: bx.SemiMarkov(x, MATRIX.to(x), **o), (3, 2, 2)),
    "ScoredSemiMarkov": Structure(
        lambda x, **o: bx.SemiMarkov.from_scores(x, MATRIX.to(x), MATRIX.to(x), last_durations=MATRIX.to(x), **o),
        (4, 2),
    ),
    "SpanTrees": Structure(lambda x, **o: bx.SpanTrees(x, **o), (3, 3)),
    "SpanTrees, labels": Structure(lambda x, **o: bx.SpanTrees(x, labels=True, **o), (3, 3, 2)),
    "DependencyTrees": Structure(lambda x, **o: bx.DependencyTrees(x, **o), (4, 4)),
    "Automaton": Structure(_automaton, (3, 3)),
    "TreeModel": Structure(lambda x, **o: TREE.labels(x, MATRIX.to(x).expand(3, 2, 2), **o), (3, 2)),
}
