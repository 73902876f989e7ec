"""Small graphs solved by enumeration, and the Ω of all tests.

Nothing here calls the library's own solvers: an Ω is solved by bisection in plain floats, a graph by listing its paths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import bellmax as bx
from support.kernels import needs_kernels

Array = NDArray[np.float64]

OMEGAS = {
    "negentropy": bx.Negentropy(0.7),
    "l2": bx.SquaredL2(0.9),
    "tsallis2": bx.Tsallis(2.0, 0.6),
    "tsallis1.5": bx.Tsallis(1.5, 0.8),
    "tsallis1.3": bx.Tsallis(1.3, 0.5),
    "hard": bx.Hard(),
}

# One Ω of each kind for which kernels or formulas differ, and the Ω whose Hessian is not 0.
one_of_each_kind = pytest.mark.parametrize("omega", ["negentropy", "l2", "tsallis1.5", "hard"], indirect=True)
smooth = pytest.mark.parametrize("omega", ["negentropy", "l2", "tsallis1.5"], indirect=True)
# Third derivatives of both backends are computed by the reference, so it runs one Ω of each kind.
for_derivatives = pytest.mark.parametrize(
    ("omega", "backend"),
    [pytest.param(name, "native", marks=needs_kernels) for name in OMEGAS]
    + [(name, "reference") for name in ("negentropy", "l2", "tsallis1.5", "hard")],
    indirect=True,
)
# For weights that are a linear function of scores: derivatives of this function, and kernels of each kind.
for_second_order = pytest.mark.parametrize(
    ("omega", "backend"),
    [pytest.param(name, "native", marks=needs_kernels) for name in ("negentropy", "l2", "tsallis1.5")]
    + [("negentropy", "reference")],
    indirect=True,
)
two_kinds = pytest.mark.parametrize("omega", ["negentropy", "l2"], indirect=True)


def is_one_of_a_kind(omega: bx.Regularizer) -> bool:
    """True for one Ω of each kind, whose derivatives are checked for every entry and not along one direction only."""
    return not isinstance(omega, bx.Tsallis) or isinstance(omega, bx.SquaredL2) or omega.alpha == 1.5


def solve(omega: bx.Regularizer, x: list[float]) -> tuple[float, list[float]]:
    """max_Ω(x) and its gradient, from the definition: q_j = ((α−1)(x_j/γ − τ))₊^(1/(α−1)) with τ by bisection."""
    top = max(x)
    if top == -math.inf:
        return -math.inf, [0.0] * len(x)
    if isinstance(omega, bx.Hard):
        return top, [float(j == x.index(top)) for j in range(len(x))]
    gamma = float(omega.gamma)
    u = [(xi - top) / gamma for xi in x]
    if isinstance(omega, bx.Negentropy):
        total = math.fsum(math.exp(ui) for ui in u)
        return top + gamma * math.log(total), [math.exp(ui) / total for ui in u]
    assert isinstance(omega, bx.Tsallis)
    slope = omega.alpha - 1

    def weights(tau: float) -> list[float]:
        return [max(0.0, slope * (ui - tau)) ** (1 / slope) if ui > -math.inf else 0.0 for ui in u]

    low, high = -1 / slope, 0.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(weights(middle)) >= 1 else (low, middle)
    q = weights(low)
    q = [qj / math.fsum(q) for qj in q]
    penalty = (math.fsum(qj**omega.alpha for qj in q) - 1) / (omega.alpha * slope)
    if isinstance(omega, bx.SquaredL2):
        penalty += 0.5
    score = math.fsum(qj * uj for qj, uj in zip(q, u, strict=True) if qj > 0)
    return top + gamma * (score - penalty), q


@dataclass(frozen=True)
class Enumerated:
    """One graph with one set of weights, solved by listing its paths. Nodes are in topological order."""

    edges: list[tuple[int, int]]
    num_nodes: int
    weights: list[float]
    omega: bx.Regularizer

    @cached_property
    def nodes(self) -> tuple[list[float], list[float]]:
        """Value of each node and q of each edge, by the recursion itself."""
        value = [0.0] + [-math.inf] * (self.num_nodes - 1)
        q = [0.0] * len(self.edges)
        for i in range(1, self.num_nodes):
            into = [e for e, (_, child) in enumerate(self.edges) if child == i]
            value[i], solved = solve(self.omega, [self.weights[e] + value[self.edges[e][0]] for e in into])
            for e, q_e in zip(into, solved, strict=True):
                q[e] = q_e
        return value, q

    @cached_property
    def all_paths(self) -> Array:
        """Indicators of every path whose edges all exist, (paths, edges)."""
        paths: list[list[int]] = []

        def extend(node: int, taken: list[int]) -> None:
            if node == 0:
                paths.append(taken)
            for e, (parent, child) in enumerate(self.edges):
                if child == node and self.weights[e] > -math.inf:
                    extend(parent, [*taken, e])

        extend(self.num_nodes - 1, [])
        indicators = np.zeros((len(paths), len(self.edges)))
        for row, taken in enumerate(paths):
            indicators[row, taken] = 1
        return indicators

    @property
    def value(self) -> float:
        return self.nodes[0][-1]

    @cached_property
    def probabilities(self) -> Array:
        q = np.asarray(self.nodes[1])
        return np.array([np.prod(q[path > 0]) for path in self.all_paths])

    @cached_property
    def scores(self) -> Array:
        weights = np.asarray(self.weights)
        return np.array([weights[path > 0].sum() for path in self.all_paths])

    @property
    def expected_path(self) -> Array:
        return self.probabilities @ self.all_paths

    @property
    def entropy(self) -> float:
        p = self.probabilities[self.probabilities > 0]
        return float(-(p * np.log(p)).sum())

    def hessian_product(self, z: Array, step: float = 2e-5) -> Array | None:
        """Fourth-order central difference of the enumerated expected path along z; None across a kink of a sparse Ω."""
        path = {
            n: Enumerated(
                self.edges,
                self.num_nodes,
                [w + n * step * zi if w > -math.inf else w for w, zi in zip(self.weights, z, strict=True)],
                self.omega,
            ).expected_path
            for n in (-2, -1, 1, 2)
        }
        wide, narrow = (path[2] - path[-2]) / (4 * step), (path[1] - path[-1]) / (2 * step)
        return (4 * narrow - wide) / 3 if np.abs(wide - narrow).max() < 1e-6 else None


def random_dag(rng: np.random.Generator, max_nodes: int = 9) -> tuple[list[tuple[int, int]], int]:
    """Edges in random order of a random DAG with one source and one sink, now and then with parallel edges."""
    num_nodes = int(rng.integers(2, max_nodes + 1))
    density = rng.uniform(0.2, 0.9)
    edges = [(j, i) for i in range(num_nodes) for j in range(i) if rng.random() < density]
    for i in range(1, num_nodes):
        if not any(child == i for _, child in edges):
            edges.append((int(rng.integers(i)), i))
    for j in range(num_nodes - 1):
        if not any(parent == j for parent, _ in edges):
            edges.append((j, int(rng.integers(j + 1, num_nodes))))
    if rng.random() < 0.3:
        edges.append(edges[int(rng.integers(len(edges)))])
    return [edges[e] for e in rng.permutation(len(edges))], num_nodes


def random_weights(rng: np.random.Generator, num_edges: int, missing: float = 0.15) -> Array:
    """Normal weights, some −∞."""
    weights = rng.normal(scale=1.5, size=num_edges)
    weights[rng.random(num_edges) < missing] = -math.inf
    return weights


def diamond() -> bx.DAG:
    """A graph of 6 nodes and 10 edges with a parallel pair, for derivative tests."""
    return bx.DAG([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (3, 4), (1, 5), (4, 5)])


def potentials(*shape: int, seed: int = 0, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def layered_edges(layers: int, width: int) -> torch.Tensor:
    """A source, ``layers`` fully linked layers of ``width`` nodes, a sink."""
    column = torch.arange(width)
    between = torch.cartesian_prod(column, column)
    firsts = 1 + width * torch.arange(layers - 1).reshape(-1, 1, 1)
    inner = (between + torch.tensor([0, width]) + firsts).reshape(-1, 2)
    source = torch.stack((torch.zeros_like(column), 1 + column), 1)
    last = 1 + width * (layers - 1)
    sink = torch.stack((last + column, torch.full_like(column, last + width)), 1)
    return torch.cat((source, inner, sink))
