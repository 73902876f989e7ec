"""Lattices by a table of moves: calls of the kernels, and the explicit graph of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import bellmax as bx
from bellmax.backends.native.lattices import row_tape_size, strip_tape_size, table_bytes
from bellmax.backends.native.loading import kernels
from bellmax.programs.table import Axis, Ends, Step, Table, Term
from bellmax.regularizers import from_kernel

Node = tuple[int, int, int]
Scores = list[Tensor | None]


@dataclass
class Lattice:
    """A batch of lattices. A score is (batch or 1, rows or 1, columns or 1), or None for 0 everywhere."""

    rows: int
    columns: int
    states: int
    moves: list[tuple[int, int, int, int]]  # di, dj, from, to
    scores: Scores  # scores of the states, the moves, the starts by state, the ends by state
    start: tuple[str, Sequence[int]] = ("corner", (0,))
    end: tuple[str, Sequence[int]] = ("corner", (0,))
    batch: int = 1
    lengths: list[tuple[int, int]] | None = None
    band: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.scores) == 3 * self.states + len(self.moves)

    # --- by kernels

    def _problem(self, omega: bx.Regularizer) -> tuple[object, ...]:
        """The first arguments of every kernel."""
        lengths = band = None
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths)
            band = torch.tensor(self.band or [math.inf] * self.batch, dtype=torch.float64)
        assert omega.kernel is not None
        name, parameters = omega.kernel
        program = kernels.prepare_lattice(table_bytes(self.table), [1.0] * len(self.table.reads))
        return program, self.rows, self.columns, lengths, band, name, list(parameters), self.theta(self.scores), [], []

    def theta(self, scores: Scores) -> list[Tensor]:
        """Scores as tensors without the dimensions that they share. The first has the size of the batch."""
        tensors = [s.reshape(len(s), *[n for n in s.shape[1:] if n > 1]) for s in scores if s is not None]
        dtype = tensors[0].dtype if tensors else torch.float64
        return [torch.zeros(self.batch, dtype=dtype), *tensors]

    def by_slot(self, theta: list[Tensor]) -> Scores:
        """The inverse of :meth:`theta`."""
        tensors = iter(theta[1:])
        return [None if s is None else next(tensors).reshape(s.shape) for s in self.scores]

    @property
    def table(self) -> Table:
        def terms(slot: int) -> tuple[Term, ...]:
            score = self.scores[slot]
            if score is None:
                return ()
            axes = tuple(Axis(kind) for kind, size in zip("ij", score.shape[1:], strict=True) if size > 1)
            return (Term(1 + sum(s is not None for s in self.scores[:slot]), 1.0, axes),)

        moves, states = len(self.moves), self.states
        nodes = tuple(terms(k) for k in range(states))
        steps = tuple(Step(*move, terms(states + m), None) for m, move in enumerate(self.moves))
        start, end = (
            Ends(kind, tuple(terms(first + k) if k in allowed else None for k in range(states)))
            for first, (kind, allowed) in ((states + moves, self.start), (2 * states + moves, self.end))
        )
        return Table(states, steps, nodes, start, end, (), 0, 0)

    def _tape(self) -> Tensor:
        """An uninitialized tape."""
        by_rows = all(di > 0 for di, *_ in self.moves)
        size = (row_tape_size if by_rows else strip_tape_size)(self.table, self.rows, self.columns)
        return torch.empty(self.batch, size, dtype=torch.float64)

    def run(self, omega: bx.Regularizer, seed: Tensor, z: Scores, threads: int = 1) -> tuple[Tensor, Scores, Scores]:
        """The values, the gradients of ⟨seed, values⟩, and their derivative along z."""
        problem = self._problem(omega)
        value = torch.empty(self.batch, dtype=torch.float64)
        tape = self._tape()
        assert kernels.lattice_forward(*problem, value, tape, threads)
        gradient, product = ([torch.full_like(t, math.nan) for t in self.theta(self.scores)] for _ in range(2))
        kernels.lattice_backward(*problem, tape, seed, gradient, threads)
        kernels.lattice_hessian(*problem, tape, seed, self.theta(z), product, threads)
        return value, self.by_slot(gradient), self.by_slot(product)

    def sample(self, omega: bx.Regularizer, draws: int) -> list[list[list[tuple[Node, int]]]]:
        """For each lattice and draw the nodes of a path, each with the move that leads there, −1 for the first."""
        problem = self._problem(omega)
        value = torch.empty(self.batch, dtype=torch.float64)
        tape = self._tape()
        kernels.lattice_forward(*problem, value, tape, 1)
        longest = (self.rows + self.columns - 1) * self.states
        generator = torch.Generator().manual_seed(0)
        uniforms = torch.rand(self.batch, draws, longest + 1, generator=generator, dtype=torch.float64)
        paths = torch.empty(self.batch, draws, longest, 2, dtype=torch.int64)
        kernels.lattice_sample(*problem, tape, uniforms, paths, 1)

        def node(n: int) -> Node:
            return n // self.states // self.columns, n // self.states % self.columns, n % self.states

        return [[[(node(n), m) for n, m in path if n >= 0] for path in drawn] for drawn in paths.tolist()]

    # --- by its graph

    def graph(self, b: int) -> Graph:
        """The graph of lattice b: a source, the nodes on its paths, and the end, or a sink after several ends."""
        n, m = self.lengths[b] if self.lengths else (self.rows, self.columns)
        inside = self._region(b, n, m)
        moves, states = len(self.moves), self.states
        is_end_of = {"corner": lambda i, j: i == j == 0, "row": lambda i, j: i == 0, "column": lambda i, j: j == 0}
        starts: Callable[[int, int], bool] = is_end_of.get(self.start[0], lambda i, j: True)
        ends: Callable[[int, int], bool] = is_end_of.get(self.end[0], lambda i, j: True)
        cells = sorted(((i, j) for i in range(n) for j in range(m) if inside(i, j)), key=lambda c: (c[0] + c[1], c))
        nodes = [(i, j, k) for i, j in cells for k in range(states)]
        last = [v for v in nodes if v[2] in self.end[1] and ends(n - 1 - v[0], m - 1 - v[1])]
        edges: list[Edge] = []
        for i, j, k in nodes:
            terms = [(k, i, j)] + ([(2 * states + moves + k, i, j)] if last == [(i, j, k)] else [])
            if k in self.start[1] and starts(i, j):
                edges.append(Edge(None, (i, j, k), -1, [*terms, (states + moves + k, i, j)]))
            for move, (di, dj, source, to) in enumerate(self.moves):
                if to == k and i >= di and j >= dj and inside(i - di, j - dj):
                    edges.append(Edge((i - di, j - dj, source), (i, j, k), move, [*terms, (states + move, i, j)]))
        if len(last) > 1:
            edges += [Edge((i, j, k), "sink", -1, [(2 * states + moves + k, i, j)]) for i, j, k in last]
        return Graph(edges, "sink" if len(last) > 1 else last[0] if last else "none", nodes)

    def _region(self, b: int, n: int, m: int) -> Callable[[int, int], bool]:
        band = self.band[b] if self.band else math.inf
        reach = math.inf if n == 1 or m == 1 else max(band, 0.5) * (max(n, m) - 1)
        return lambda i, j: abs(i * (m - 1) - j * (n - 1)) <= reach

    def read(self, scores: Scores, b: int, terms: list[tuple[int, int, int]]) -> float:
        """The sum of some scores of lattice b."""
        total = 0.0
        for which, i, j in terms:
            array = scores[which]
            if array is not None:
                total += float(array[_place(array, b, i, j)])
        return total

    def spread(self, gradients: Sequence[np.ndarray], graphs: Sequence[Graph]) -> Scores:
        """Sum numbers of the edges of each graph into the scores that make up the weights of the edges."""
        sums = [None if s is None else torch.zeros(s.shape, dtype=torch.float64) for s in self.scores]
        for b, (graph, gradient) in enumerate(zip(graphs, gradients, strict=True)):
            for edge, mass in zip(graph.edges, gradient, strict=True):
                for which, i, j in edge.terms:
                    array = sums[which]
                    if array is not None:
                        array[_place(array, b, i, j)] += float(mass)
        return sums


def _place(array: Tensor, b: int, i: int, j: int) -> tuple[int, ...]:
    return tuple(min(n, size - 1) for n, size in zip((b, i, j), array.shape, strict=True))


@dataclass(frozen=True)
class Edge:
    parent: Node | None  # None: the source
    child: Node | str
    move: int
    terms: list[tuple[int, int, int]]  # (score, row, column) of each term of its weight


class Graph:
    """The edges on paths, and the number of each node in topological order."""

    def __init__(self, edges: list[Edge], end: Node | str, nodes: list[Node]) -> None:
        reached: set[Node | str | None] = {None}
        for edge in edges:  # sorted by child
            if edge.parent in reached:
                reached.add(edge.child)
        useful: set[Node | str | None] = {end}
        for edge in reversed(edges):
            if edge.child in useful:
                useful.add(edge.parent)
        both = reached & useful
        self.edges = [edge for edge in edges if edge.parent in both and edge.child in both]
        order = [None, *(v for v in nodes if v in both), *(["sink"] if end == "sink" else [])]
        self.number = {v: n for n, v in enumerate(order)}
        self.pairs = [(self.number[edge.parent], self.number[edge.child]) for edge in self.edges]

    @property
    def num_paths(self) -> int:
        count = [1] + [0] * (len(self.number) - 1)
        for parent, child in self.pairs:  # sorted by child
            count[child] += count[parent]
        return count[-1] if self.edges else 0


def at_one(omega: bx.Regularizer) -> bx.Regularizer:
    """The same Ω at γ = 1, the γ of the kernels."""
    assert omega.kernel is not None
    return from_kernel(omega.kernel)
