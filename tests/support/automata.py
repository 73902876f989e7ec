"""Automata over frames, unrolled edge by edge into a graph."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import bellmax as bx


@dataclass
class Unrolled:
    """The graph of one automaton through all frames of ``log_probs`` (T, V): the definition of its paths."""

    arcs: list[tuple[int, int, int]]
    log_probs: Tensor
    scores: Tensor
    start: Tensor
    final: Tensor
    omega: bx.Regularizer

    @cached_property
    def edges(self) -> list[tuple[int, int, int | None, int | None]]:
        """(parent, child, frame, arc): the frame is None for ε-arcs, the arc is None at the start and the end."""
        states, steps = len(self.start), len(self.log_probs)
        edges: list[tuple[int, int, int | None, int | None]] = [(0, 1 + s, None, None) for s in range(states)]
        for t in range(steps + 1):
            here = 1 + t * states
            for a, (source, target, label) in enumerate(self.arcs):
                if label >= 0 and t:
                    edges.append((here - states + source, here + target, t - 1, a))
            for a, (source, target, label) in enumerate(self.arcs):
                if label < 0:
                    edges.append((here + source, here + target, None, a))
        end = 1 + (steps + 1) * states
        return edges + [(end - states + s, end, None, None) for s in range(states)]

    @cached_property
    def terms(self) -> tuple[Tensor, Tensor]:
        """(E,): the two entries of the scores, joined, that add up to the weight of each edge. The last entry is 0."""
        classes, states = self.log_probs.shape[1], len(self.start)
        emitted, arcs = self.log_probs.numel(), len(self.scores)
        zero, end = emitted + arcs + 2 * states, max(child for _, child, *_ in self.edges)
        first, second = [], []
        for parent, child, t, a in self.edges:
            first.append(zero if t is None or a is None else t * classes + self.arcs[a][2])
            state = states + parent - (end - states) if child == end else child - 1
            second.append(emitted + (arcs + state if a is None else a))
        return torch.tensor(first), torch.tensor(second)

    def weights(self, *scores: Tensor) -> Tensor:
        """The weight of each edge, a linear function of the scores."""
        entries = torch.cat([*(t.flatten() for t in scores), torch.zeros(1, dtype=scores[0].dtype)])
        first, second = self.terms
        return entries[first] + entries[second]

    def by_arc(self, edges: Tensor) -> Tensor:
        """Sum numbers of edges (E,) over the edges of each arc at each frame, (T, A), without ε-arcs."""
        totals = edges.new_zeros(len(self.log_probs), len(self.scores))
        for (_, _, t, a), number in zip(self.edges, edges.tolist(), strict=True):
            if t is not None:
                totals[t, a] += number
        return totals

    def best_by_label(self, edges: Tensor) -> Tensor:
        """The maximum of numbers of edges (E,) over the edges that read each entry of log_probs, (T, V)."""
        best = torch.full_like(self.log_probs, -torch.inf)
        for (_, _, t, a), number in zip(self.edges, edges.tolist(), strict=True):
            if t is not None and a is not None:
                label = self.arcs[a][2]
                best[t, label] = max(float(best[t, label]), number)
        return best

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in (self.log_probs, self.scores, self.start, self.final)]

    @cached_property
    def graph(self) -> bx.DAG | None:
        """The graph; None if it has no path from the start to the end."""
        end = max(child for _, child, *_ in self.edges)
        try:
            return bx.DAG([edge[:2] for edge in self.edges], end + 1, start=0, end=end)
        except ValueError:
            return None

    @cached_property
    def paths(self) -> bx.PathDistribution:
        assert self.graph is not None
        return self.graph.paths(self.weights(*self.inputs), omega=self.omega)

    def onto(self, edges: Tensor) -> list[Tensor]:
        """Sum numbers of edges (..., E) onto the scores: the transpose of :meth:`weights`."""
        sizes = [t.numel() for t in self.inputs]
        entries = edges.detach().new_zeros(*edges.shape[:-1], sum(sizes) + 1)
        for term in self.terms:
            entries = entries.index_add(-1, term, edges.detach())
        parts = entries[..., :-1].split(sizes, -1)
        return [part.reshape(*edges.shape[:-1], *t.shape) for part, t in zip(parts, self.inputs, strict=True)]

    def hessian_product(self, z: list[Tensor]) -> list[Tensor]:
        return self.onto(self.paths.hessian_product(self.weights(*z)))

    def arcs_of(self, edges: Tensor) -> list[int]:
        """The arcs along a path (E,), in order."""
        assert self.graph is not None
        taken = sorted(edges.nonzero().squeeze(1).tolist(), key=lambda e: int(self.graph.levels[self.edges[e][1]]))
        return [arc for e in taken if (arc := self.edges[e][3]) is not None]


def random_arcs(seed: int, states: int, count: int, classes: int, epsilon: int = 0) -> list[tuple[int, int, int]]:
    """Arcs in random order, some of them parallel. ε-arcs do not form a cycle."""
    rng = random.Random(seed)
    arcs = [(rng.randrange(states), rng.randrange(states), rng.randrange(classes)) for _ in range(count)]
    order = rng.sample(range(states), states)
    for _ in range(epsilon):
        a, b = sorted(rng.sample(range(states), 2))
        arcs.append((order[a], order[b], -1))
    rng.shuffle(arcs)
    return [(a, b, label) for a, b, label in arcs]
