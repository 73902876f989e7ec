"""Small hypergraphs whose edge weights are sums of entries of several scores, for tests of the program "linear"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from support.hypergraphs import Hypergraph, random_hypergraph
from support.problems import Array

Form = list[tuple[int, float]]
"""Pairs (entry, coefficient), where entries of all scores are numbered in order."""

SHAPES = (3,), (2, 2), ()  # of the scores, without the batch


@dataclass(frozen=True)
class LinearProgram:
    """A graph whose edge e has the weight Σ coefficient · entry of ``forms[graph.weight[e]]``."""

    graph: Hypergraph
    forms: list[Form]
    has_extra_root: bool = False

    @property
    def name(self) -> str:
        return f"linear:{int(self.has_extra_root)}:a,b,_c"

    @cached_property
    def index(self) -> tuple[Tensor, ...]:
        """Integer tensors, and the coefficients, in the format of the sweeps."""
        terms = [term for form in self.forms for term in form]
        coefficients = [coefficient for _, coefficient in terms]
        are_all_1 = all(coefficient == 1 for coefficient in coefficients)
        return (
            *self.graph.index,
            torch.tensor(np.cumsum([0, *map(len, self.forms)]), dtype=torch.int32),
            torch.tensor([entry for entry, _ in terms], dtype=torch.int32),
            torch.tensor([] if are_all_1 else coefficients, dtype=torch.float64),
            torch.tensor(self.graph.weight),
        )

    @cached_property
    def onto_edges(self) -> Array:
        """(edges, entries): the matrix of the linear function from entries to weights."""
        matrix = np.zeros((len(self.graph.edges), sum(map(math.prod, SHAPES))))
        for e, number in enumerate(self.graph.weight):
            for entry, coefficient in self.forms[number]:
                matrix[e, entry] += coefficient
        return matrix

    @property
    def most_edges(self) -> int:
        """The largest number of edges of a derivation."""
        return int(self.graph.derivations.sum(1).max())

    def with_index(self, position: int, number: int, value: int) -> tuple[Tensor, ...]:
        """The index with one entry of one tensor replaced."""
        index = [tensor.clone() for tensor in self.index]
        index[position][number] = value
        return tuple(index)


def random_linear(rng: np.random.Generator, *, shared: bool, ones: bool, extra_root: bool) -> LinearProgram:
    """A random graph with random forms of 0 to 3 terms. Entries may occur twice in a form.

    Args:
        rng: The generator.
        shared: True if edges share forms.
        ones: True if all coefficients are 1.
        extra_root: True to add a node with a single edge behind the root.

    """
    graph = random_hypergraph(rng, shared=shared, whole=True)
    if extra_root:
        edges = [*graph.edges, (graph.num_nodes, (graph.num_nodes - 1,))]
        graph = Hypergraph(graph.num_nodes + 1, edges, [*graph.weight, max(graph.weight) + 1])
    forms: list[Form] = []
    for _ in range(max(graph.weight) + 1):
        entries = rng.integers(0, sum(map(math.prod, SHAPES)), rng.integers(0, 4))
        forms.append([(int(entry), 1.0 if ones else float(rng.choice([-1.5, -1.0, 0.5, 2.0]))) for entry in entries])
    return LinearProgram(graph, forms, extra_root)


def random_scores(
    rng: np.random.Generator, batch: int, dtype: torch.dtype, absent: list[int] | None = None
) -> tuple[Tensor, ...]:
    """Scores of the shapes ``SHAPES``. The second is shared by the batch. The entries ``absent`` are −∞."""
    scores = [torch.tensor(rng.normal(size=(1 if n == 1 else batch, *shape))) for n, shape in enumerate(SHAPES)]
    sizes = np.cumsum([0, *map(math.prod, SHAPES)])
    for entry in absent or []:
        n = int(np.searchsorted(sizes, entry, side="right")) - 1
        scores[n].reshape(len(scores[n]), -1)[rng.integers(len(scores[n])), entry - sizes[n]] = -math.inf
    return tuple(score.to(dtype) for score in scores)


def positive_entries(problem: LinearProgram) -> list[int]:
    """The entries that no form has with a negative coefficient, so that −∞ removes edges."""
    negative = {entry for form in problem.forms for entry, coefficient in form if coefficient < 0}
    return sorted(set(range(problem.onto_edges.shape[1])) - negative)
