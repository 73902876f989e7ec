"""Random small programs with −∞, lengths, dtypes and ways to differentiate, each against the list of its paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bellmax as bx
from support.problems import Enumerated, random_dag

Uses = list[tuple[int, int, float]]  # of an edge: the number of a tensor, the place in its member's part, a factor
WAYS = "eager", "reference", "jvp", "twice"
MOST_PATHS = 3000


@dataclass
class Program:
    """A batch of programs on tensors (B, ...), and the graph of each member with what its edges use."""

    name: str
    tensors: list[Tensor]
    run: Callable[[list[Tensor], bx.Regularizer], Tensor]
    graphs: list[tuple[list[tuple[int, int]], int, list[Uses]]]  # edges, number of nodes, uses
    sense: int = 1

    def solved(self, b: int, omega: bx.Regularizer) -> Enumerated:
        edges, nodes, uses = self.graphs[b]
        parts = [tensor[b].double().flatten().tolist() for tensor in self.tensors]
        weights = [math.fsum(self.sense * c * parts[k][n] for k, n, c in own) for own in uses]
        return Enumerated(edges, nodes, weights, omega)

    def by_edge(self, b: int, direction: list[Tensor]) -> np.ndarray[Any, Any]:
        parts = [z[b].double().flatten().tolist() for z in direction]
        return np.array([self.sense * sum(c * parts[k][n] for k, n, c in own) for own in self.graphs[b][2]])

    def by_entry(self, b: int, mass: np.ndarray[Any, Any]) -> list[Tensor]:
        found = [torch.zeros(tensor[b].numel(), dtype=torch.float64) for tensor in self.tensors]
        for own, share in zip(self.graphs[b][2], mass, strict=True):
            for k, n, c in own:
                found[k][n] += c * share
        return [flat.reshape(tensor[b].shape) for flat, tensor in zip(found, self.tensors, strict=True)]


def normal(rng: np.random.Generator, *shape: int, missing: float = 0.0, sense: int = 1) -> Tensor:
    scores = rng.normal(scale=rng.choice([0.1, 1.5, 20.0]), size=shape)
    scores[rng.random(shape) < missing] = -sense * math.inf
    return torch.tensor(scores)


def of_graph(rng: np.random.Generator) -> Program:
    edges, nodes = random_dag(rng, 7)
    dag = bx.DAG(edges, num_nodes=nodes)
    weights = normal(rng, 2, len(edges), missing=0.15)
    uses: list[Uses] = [[(0, e, 1.0)] for e in range(len(edges))]
    return Program("DAG", [weights], lambda t, omega: dag.paths(t[0], omega=omega).value, [(edges, nodes, uses)] * 2)


def of_chain(rng: np.random.Generator) -> Program:
    batch, steps, states = 3, int(rng.integers(1, 5)), int(rng.integers(1, 4))
    lengths = torch.tensor(rng.integers(1, steps + 1, batch))
    theta = normal(rng, batch, steps, states, states, missing=rng.choice([0.0, 0.2]))

    def graph(length: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        node = lambda t, i: 1 + t * states + i  # noqa: E731
        edges, uses = [(0, node(0, i)) for i in range(states)], [[(0, i * states, 1.0)] for i in range(states)]
        for t in range(1, length):
            for i, j in np.ndindex(states, states):
                edges.append((node(t - 1, j), node(t, i)))
                uses.append([(0, (t * states + i) * states + j, 1.0)])
        edges += [(node(length - 1, i), 1 + length * states) for i in range(states)]
        return edges, 2 + length * states, uses + [[] for _ in range(states)]

    def run(t: list[Tensor], omega: bx.Regularizer) -> Tensor:
        return bx.Chain(t[0], lengths=lengths, omega=omega).value

    return Program("Chain", [theta], run, [graph(length) for length in lengths.tolist()])


MOVES = (1, 1), (1, 0), (0, 1), (2, 1), (1, 2), (0, 0)


def of_lattice(rng: np.random.Generator) -> Program:
    """A table of a few moves between up to three states, with scores by cell, row, column and alone."""
    rows, columns, states, sense = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4)), 1
    kinds = {"cell": (rows, columns), "row": (rows,), "column": (columns,), "scalar": ()}
    maps = {"cell": bx.cell("cell"), "row": bx.row("row"), "column": bx.column("column"), "scalar": bx.scalar("scalar")}
    moves = []
    for _ in range(int(rng.integers(2, 6))):
        di, dj = MOVES[rng.integers(len(MOVES))]
        source, target = (int(k) for k in rng.integers(states, size=2))
        if di or dj or source < target:
            moves.append((di, dj, source, target, list(kinds)[rng.integers(len(kinds))]))
    moves.append((1, 1, 0, 0, "cell"))
    moves += [(1, 0, 0, 0, "row"), (0, 1, 0, 0, "column")]  # so that there is a path
    lattice = bx.Lattice(
        [bx.Move(di, dj, source, target, score=maps[kind]) for di, dj, source, target, kind in moves], states=states
    )
    names = [name for name in lattice.scores if name in kinds]
    batch = 2
    tensors = [normal(rng, batch, *kinds[name], missing=0.1 if name == "cell" else 0.0) for name in names]
    sizes = [(int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))) for _ in range(batch)]

    def graph(n: int, m: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        place = {"cell": lambda i, j: i * columns + j, "row": lambda i, j: i, "column": lambda i, j: j}
        nodes = sorted(np.ndindex(n, m, states), key=lambda v: (v[0] + v[1], v))
        edges: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        uses: list[Uses] = []
        reached = {(0, 0, 0)}
        for i, j, k in nodes:
            for di, dj, source, target, kind in moves:
                before = (i - di, j - dj, source)
                if target == k and before in reached:
                    edges.append((before, (i, j, k)))
                    uses.append([(names.index(kind), place.get(kind, lambda i, j: 0)(i, j), 1.0)])
                    reached.add((i, j, k))
        end = (n - 1, m - 1, 0)
        useful = {end}
        for parent, child in reversed(edges):
            if child in useful:
                useful.add(parent)
        kept = [(e, use) for e, use in zip(edges, uses, strict=True) if e[0] in useful and e[1] in useful]
        number = {v: 1 + x for x, v in enumerate(v for v in nodes if v in useful)}
        begins = [(0, number[0, 0, 0])] if (0, 0, 0) in useful else []
        inner = [(number[a], number[c]) for (a, c), _ in kept]
        return begins + inner, 1 + len(number), [[] for _ in begins] + [use for _, use in kept]

    def run(t: list[Tensor], omega: bx.Regularizer) -> Tensor:
        lengths = tuple(torch.tensor(side) for side in zip(*sizes, strict=True))
        return lattice.paths(dict(zip(names, t, strict=True)), lengths=lengths, omega=omega).value

    return Program("Lattice", tensors, run, [graph(*size) for size in sizes], sense)


def of_alignment(rng: np.random.Generator) -> Program:
    """DTW, whose path uses the cost of each of its cells."""
    rows, columns, batch = int(rng.integers(1, 5)), int(rng.integers(1, 5)), 2
    cost = normal(rng, batch, rows, columns, missing=rng.choice([0.0, 0.1]), sense=-1)
    sizes = [(int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))) for _ in range(batch)]

    def graph(n: int, m: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        number = {v: 1 + x for x, v in enumerate(np.ndindex(n, m))}
        edges, uses = [(0, 1)], [[(0, 0, 1.0)]]
        for (i, j), x in number.items():
            for before in ((i - 1, j - 1), (i - 1, j), (i, j - 1)):
                if before in number:
                    edges.append((number[before], x))
                    uses.append([(0, i * columns + j, 1.0)])
        return edges, 1 + n * m, uses

    def run(t: list[Tensor], omega: bx.Regularizer) -> Tensor:
        lengths = tuple(torch.tensor(side) for side in zip(*sizes, strict=True))
        return bx.DTW(t[0], lengths=lengths, omega=omega).value

    return Program("DTW", [cost], run, [graph(*size) for size in sizes], sense=-1)


KINDS = of_graph, of_chain, of_lattice, of_alignment


def omegas(rng: np.random.Generator) -> bx.Regularizer:
    gamma = float(rng.choice([0.3, 1.0, 4.0]))
    alpha = float(rng.uniform(1.2, 2.5)) if rng.random() < 0.5 else 1.5
    choices = [bx.Negentropy(gamma), bx.SquaredL2(gamma), bx.Tsallis(min(alpha, 2.0), gamma), bx.Hard()]
    return choices[rng.integers(len(choices))]


def check(seed: int) -> str:
    """One random program; an AssertionError says how to repeat it. Returns what it was."""
    rng = np.random.default_rng(seed)
    program, omega = KINDS[rng.integers(len(KINDS))](rng), omegas(rng)
    way, dtype = WAYS[rng.integers(len(WAYS))], torch.float64 if rng.random() < 0.7 else torch.float32
    what = f"seed {seed}: {program.name}, {omega!r}, {way}, {dtype}"
    program.tensors = [tensor.to(dtype) for tensor in program.tensors]
    solved = [program.solved(b, omega) for b in range(len(program.graphs))]
    if any(len(one.all_paths) > MOST_PATHS for one in solved) or _has_near_ties(solved):
        return f"{what}: left out"
    direction = [torch.tensor(rng.normal(size=tensor.shape)).to(dtype) for tensor in program.tensors]
    for got, wanted, name in _answers(program, omega, solved, way, direction):
        scale = max(1.0, float(wanted.double().abs().nan_to_num(posinf=0, neginf=0).max()))
        tolerance = (1e-7 if dtype == torch.float64 else 2e-3) * scale * (10 if way == "twice" else 1)
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=0, atol=tolerance, msg=lambda text, name=name: f"{what}: {name}\n{text}"
        )
    return what


def _has_near_ties(solved: list[Enumerated]) -> bool:
    """Whether Hard could choose otherwise by rounding: ties are tested elsewhere."""
    return any(
        isinstance(one.omega, bx.Hard) and len(one.scores) > 1 and float(np.diff(np.sort(one.scores)[-2:])[0]) < 1e-3
        for one in solved
    )


def _answers(
    program: Program, omega: bx.Regularizer, solved: list[Enumerated], way: str, direction: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, str]]:
    sense = program.sense
    values = torch.tensor([sense * one.value for one in solved])
    masses = [one.expected_path if one.value > -math.inf else np.zeros(len(one.edges)) for one in solved]
    paths = [torch.stack(own) for own in zip(*(program.by_entry(b, m) for b, m in enumerate(masses)), strict=True)]
    inputs = [tensor.clone().requires_grad_() for tensor in program.tensors]
    if way == "jvp":
        got, slope = torch.func.jvp(lambda *t: program.run(list(t), omega), tuple(program.tensors), tuple(direction))
        yield got, values, "value"
        wanted = sum((p * z.double()).reshape(len(p), -1).sum(1) for p, z in zip(paths, direction, strict=True))
        yield slope, torch.as_tensor(wanted), "directional derivative"
        return
    with bx.use_backend("reference") if way == "reference" else nullcontext():
        value = program.run(inputs, omega)
        yield value.detach(), values, "value"
        gradient = torch.autograd.grad(value.sum(), inputs, create_graph=way == "twice")
    for got, wanted in zip(gradient, paths, strict=True):
        yield got.detach(), wanted, "gradient"
    if way == "twice" and not isinstance(omega, bx.Hard):
        dot = sum((g * z).sum() for g, z in zip(gradient, direction, strict=True))
        second = torch.autograd.grad(dot, inputs) if isinstance(dot, Tensor) and dot.requires_grad else gradient
        for b, one in enumerate(solved):
            product = one.hessian_product(program.by_edge(b, direction)) if one.value > -math.inf else None
            if product is None:
                continue
            for got, wanted in zip(second, program.by_entry(b, product), strict=True):
                yield got[b].detach(), wanted, "Hessian product"
