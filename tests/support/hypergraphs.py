"""Small hypergraphs with answers by enumeration of all derivations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import bellmax as bx
from support.problems import Array, solve

MOST = 150  # limit for the derivations of one node


@dataclass(frozen=True)
class Hypergraph:
    """Edges (head, tails) between nodes in topological order, the root last; edge e has the weight ``weight[e]``."""

    num_nodes: int
    edges: list[tuple[int, tuple[int, ...]]]
    weight: list[int]

    @cached_property
    def into(self) -> list[list[int]]:
        return [[e for e, (head, _) in enumerate(self.edges) if head == i] for i in range(self.num_nodes)]

    @cached_property
    def derivations(self) -> Array:
        """Count of each edge in each derivation of the root, (derivations, edges)."""
        counts: list[list[Array]] = []
        for edges in self.into:
            counts.append([])
            for e in edges:
                unit = np.eye(len(self.edges))[e]
                for parts in itertools.product(*(counts[tail] for tail in self.edges[e][1])):
                    counts[-1].append(sum(parts, unit))
        return np.array(counts[-1]).reshape(-1, len(self.edges))

    @cached_property
    def counts(self) -> list[int]:
        """Number of derivations of each node."""
        counts: list[int] = []
        for edges in self.into:
            counts.append(sum(math.prod(counts[tail] for tail in self.edges[e][1]) for e in edges))
        return counts

    @cached_property
    def onto_weights(self) -> Array:
        """(edges, weights): 1 where an edge has a weight."""
        return np.eye(max(self.weight) + 1)[self.weight]

    @cached_property
    def index(self) -> tuple[Tensor, ...]:
        """Integer tensors in the format of the sweeps."""
        edge = [e for edges in self.into for e in edges]
        tails = [self.edges[e][1] for e in edge]
        parts = (
            np.cumsum([0, *map(len, self.into)]),
            [tail for each in tails for tail in each],
            edge,
            self.groups,
            np.cumsum([0, *map(len, tails)]),
            [self.weight[e] for e in edge],
        )
        return tuple(torch.tensor(np.asarray(numbers), dtype=torch.int32) for numbers in parts)

    @cached_property
    def groups(self) -> list[int]:
        """Bounds of runs of independent nodes with the same number of edges."""
        bounds = [0]
        for i, edges in enumerate(self.into):
            run = range(bounds[-1], i)
            depends = any(tail in run for e in edges for tail in self.edges[e][1])
            if i and (depends or len(edges) != len(self.into[i - 1])):
                bounds.append(i)
        return [*bounds, self.num_nodes]

    def transitions(self, theta: Array, omega: bx.Regularizer) -> tuple[float, Array]:
        """The root's value and q of each edge, by the recursion itself."""
        value: list[float] = []
        q = np.zeros(len(self.edges))
        for edges in self.into:
            scores = [theta[self.weight[e]] + sum(value[tail] for tail in self.edges[e][1]) for e in edges]
            node_value, q[edges] = solve(omega, scores) if edges else (-math.inf, [])
            value.append(node_value)
        return value[-1], q

    def probabilities(self, theta: Array, omega: bx.Regularizer) -> Array:
        value, q = self.transitions(theta, omega)
        return np.prod(q**self.derivations, axis=1) if value > -math.inf else np.zeros(self.counts[-1])

    def expectation(self, theta: Array, omega: bx.Regularizer) -> Array:
        """Expected use of each weight."""
        expected: Array = self.probabilities(theta, omega) @ self.derivations @ self.onto_weights
        return expected

    def hessian_product(self, theta: Array, z: Array, omega: bx.Regularizer, step: float = 2e-5) -> Array | None:
        """Fourth-order difference of the expectation along z; None across a kink of a sparse Ω."""
        at = {n: self.expectation(theta + n * step * z, omega) for n in (-2, -1, 1, 2)}
        wide, narrow = (at[2] - at[-2]) / (4 * step), (at[1] - at[-1]) / (2 * step)
        return (4 * narrow - wide) / 3 if np.abs(wide - narrow).max() < 1e-6 else None


def random_hypergraph(rng: np.random.Generator, shared: bool, whole: bool = False) -> Hypergraph:
    """Random edges with 0 to 3 tails, sometimes with a repeated tail or a node without a derivation.

    If ``whole``, every node has an edge, and every node but the last is a tail of some edge.
    """
    while True:
        num_nodes = int(rng.integers(2, 9))
        edges: list[tuple[int, tuple[int, ...]]] = []
        for head in range(num_nodes):
            for _ in range(int(rng.integers(0 if 0 < head < num_nodes - 1 and not whole else 1, 5))):
                arity = int(rng.integers(0, 4)) if head else 0
                edges.append((head, tuple(int(tail) for tail in rng.integers(0, head, arity))))
        if whole:
            head, tails = edges[-1]
            unused = set(range(num_nodes - 1)) - {tail for _, each in edges for tail in each}
            edges[-1] = head, (*tails, *sorted(unused))
        order = rng.permutation(len(edges))
        weight = rng.integers(0, max(1, len(edges) // 2), len(edges)).tolist() if shared else list(range(len(edges)))
        graph = Hypergraph(num_nodes, [edges[e] for e in order], weight)
        if graph.counts[-1] >= 2 and max(graph.counts) <= MOST:
            return graph


def bracketings(n: int) -> tuple[bx.Hypergraph, dict[tuple[int, int], int]]:
    """Binary trees over n words; all splits of a span share its weight."""
    spans = [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    number = {span: position for position, span in enumerate(spans)}
    edges: list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = [((i, i + 1), ()) for i in range(n)]
    edges += [((i, j), ((i, k), (k, j))) for i, j in spans for k in range(i + 1, j)]
    return bx.Hypergraph(edges, weight_of=[number[head] for head, _ in edges]), number
