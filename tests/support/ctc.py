"""CTC alignments by enumeration: as a graph over 2L + 1 positions, blanks between labels, and as lists of labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

import bellmax as bx
from support.problems import Array, Enumerated


def collapse(labels: Sequence[int], blank: int = 0) -> list[int]:
    """Merge repeated labels, then remove blanks."""
    return [label for label, _ in itertools.groupby(labels) if label != blank]


class Alignments:
    """All alignments of one target, by the recursion of Graves et al. over positions, for any Ω."""

    def __init__(self, log_probs: Array, target: Sequence[int], omega: bx.Regularizer, blank: int = 0) -> None:
        self.frames, self.classes = log_probs.shape
        places = [blank, *itertools.chain.from_iterable((label, blank) for label in target)]
        number: dict[tuple[int, int], int] = {}  # of each node (frame, position) that a path from the start reaches
        edges: list[tuple[int, int]] = []
        self.entries: list[tuple[int, int] | None] = []  # the score that is the weight of each edge
        for t in range(self.frames):
            for s, label in enumerate(places):
                before = [s, s - 1] + [s - 2] * (s > 1 and label not in (blank, places[s - 2]))
                parents = [number[t - 1, r] for r in before if (t - 1, r) in number] if t else [0] * (s <= 1)
                if parents:
                    number[t, s] = 1 + len(number)
                edges += [(parent, number[t, s]) for parent in parents]
                self.entries += [(t, label)] * len(parents)
        end = 1 + len(number)
        last = [(self.frames - 1, s) for s in range(len(places))[-2:]]
        edges += [(number[node], end) for node in last if node in number]
        self.entries += [None] * (len(edges) - len(self.entries))
        weights = [0.0 if entry is None else float(log_probs[entry]) for entry in self.entries]
        self.graph = Enumerated(edges, end + 1, weights, omega)

    @property
    def value(self) -> float:
        return self.graph.value

    def onto_frames(self, edges: Array) -> Array:
        """Sum numbers of edges (..., E) into the entries (..., T, V) that are their weights."""
        sums = np.zeros((*edges.shape[:-1], self.frames, self.classes))
        for e, entry in enumerate(self.entries):
            if entry is not None:
                sums[(..., *entry)] += edges[..., e]
        return sums

    @cached_property
    def paths(self) -> Array:
        """(K, T, V)."""
        return self.onto_frames(self.graph.all_paths)

    @property
    def probabilities(self) -> Array:
        return self.graph.probabilities

    @property
    def posterior(self) -> Array:
        return np.tensordot(self.probabilities, self.paths, 1)

    def hessian_product(self, z: Array) -> Array | None:
        """Derivative of the posterior along z (T, V); None across a kink of a sparse Ω."""
        along = np.array([0.0 if entry is None else z[entry] for entry in self.entries])
        product = self.graph.hessian_product(along)
        return None if product is None else self.onto_frames(product)

    @property
    def best(self) -> list[int]:
        """The labels of frames on the best path."""
        labels: list[int] = self.paths[self.graph.scores.argmax()].argmax(-1).tolist()
        return labels


def least_frames(target: Sequence[int]) -> int:
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


def listed(log_probs: Array, target: Sequence[int], blank: int = 0) -> float:
    """log p(target) by summing over every sequence of labels."""
    frames, classes = log_probs.shape
    every = itertools.product(range(classes), repeat=frames)
    scores = [sum(log_probs[t, k] for t, k in enumerate(each)) for each in every if collapse(each, blank) == [*target]]
    return float(np.logaddexp.reduce(scores)) if scores else -math.inf
