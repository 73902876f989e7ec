"""Random small programs with random scores, dtypes, Ω and queries, compared with enumeration of their paths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L
from bellmax.structures.lattice import LatticePaths
from support.problems import Enumerated, random_dag

Uses = list[tuple[int, int, float]]  # for an edge: the index of a tensor, the flat index in its batch member, a factor
WAYS = "eager", "reference", "jvp", "twice", "verbs"
NUMBERS = "normal", "normal", "ties", "masks", "bad", "overflow"
HALF = torch.float16, torch.bfloat16
BANDS = None, 2.0**63, 1e19, 1e300, math.inf
MOST_PATHS = 3000
MASKED = -3e4  # a lower score means that the path contains a mask, in every dtype


@dataclass
class Program:
    """A batch of programs on tensors (B, ...), and for each member its graph and the entries that the edges use."""

    name: str
    tensors: list[Tensor]
    make: Callable[[list[Tensor], bx.Regularizer], bx.PathDistribution]
    graphs: list[tuple[list[tuple[int, int]], int, list[Uses]]]  # edges, number of nodes, uses
    sense: int = 1

    def solved(self, b: int, omega: bx.Regularizer) -> Enumerated:
        edges, nodes, uses = self.graphs[b]
        parts = [_summable(tensor[b]).flatten().tolist() for tensor in self.tensors]
        weights = [math.fsum(self.sense * c * parts[k][n] for k, n, c in terms) for terms in uses]
        return Enumerated(edges, nodes, weights, omega)

    def by_edge(self, b: int, direction: list[Tensor]) -> np.ndarray[Any, Any]:
        parts = [z[b].double().flatten().tolist() for z in direction]
        return np.array([self.sense * sum(c * parts[k][n] for k, n, c in terms) for terms in self.graphs[b][2]])

    def by_entry(self, b: int, mass: np.ndarray[Any, Any]) -> list[Tensor]:
        sums = [torch.zeros(tensor[b].numel(), dtype=torch.float64) for tensor in self.tensors]
        for terms, share in zip(self.graphs[b][2], mass, strict=True):
            for k, n, c in terms:
                sums[k][n] += c * share
        return [flat.reshape(tensor[b].shape) for flat, tensor in zip(sums, self.tensors, strict=True)]


def _summable(scores: Tensor) -> Tensor:
    """Scores in float64, clamped so that sums of masks do not overflow."""
    return torch.where(scores.isfinite(), scores.double().clamp(-1e300, 1e300), scores.double())


def normal(rng: np.random.Generator, *shape: int, missing: float = 0.0, sense: int = 1) -> Tensor:
    scores = rng.normal(scale=rng.choice([0.1, 1.5, 20.0]), size=shape)
    scores[rng.random(shape) < missing] = -sense * math.inf
    return torch.tensor(scores)


def of_graph(rng: np.random.Generator) -> Program:
    edges, nodes = random_dag(rng, 7)
    dag = bx.DAG(edges, num_nodes=nodes)
    weights = normal(rng, 2, len(edges), missing=0.15)
    uses: list[Uses] = [[(0, e, 1.0)] for e in range(len(edges))]
    return Program("DAG", [weights], lambda t, omega: dag.paths(t[0], omega=omega), [(edges, nodes, uses)] * 2)


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

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        return bx.Chain(t[0], lengths=lengths, omega=omega)

    return Program("Chain", [theta], make, [graph(length) for length in lengths.tolist()])


def of_scores(rng: np.random.Generator) -> Program:
    """A chain from scores: weights are sums of emissions, transitions, and the scores of the first and last state."""
    batch, steps, states = 2, int(rng.integers(1, 5)), int(rng.integers(1, 4))
    lengths = torch.tensor(rng.integers(1, steps + 1, batch))
    tensors = [normal(rng, batch, steps, states, missing=rng.choice([0.0, 0.2])), normal(rng, batch, states, states)]
    tensors += [normal(rng, batch, states), normal(rng, batch, states)]

    def graph(length: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        node = lambda t, i: 1 + t * states + i  # noqa: E731
        edges = [(0, node(0, i)) for i in range(states)]
        uses: list[Uses] = [[(0, i, 1.0), (2, i, 1.0)] for i in range(states)]
        for t in range(1, length):
            for i, j in np.ndindex(states, states):
                edges.append((node(t - 1, j), node(t, i)))
                uses.append([(0, t * states + i, 1.0), (1, i * states + j, 1.0)])
        edges += [(node(length - 1, i), 1 + length * states) for i in range(states)]
        return edges, 2 + length * states, uses + [[(3, i, 1.0)] for i in range(states)]

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        return bx.Chain.from_scores(t[0], t[1], start=t[2], end=t[3], lengths=lengths, omega=omega)

    return Program("ScoredChain", tensors, make, [graph(length) for length in lengths.tolist()])


MOVES = (1, 1), (1, 0), (0, 1), (2, 1), (1, 2), (0, 0)


def of_lattice(rng: np.random.Generator) -> Program:
    """A lattice with a few moves between up to three states, with scores per cell, row or column, or a scalar."""
    rows, columns, states, sense = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4)), 1
    kinds = {"cell": (rows, columns), "row": (rows,), "column": (columns,), "scalar": ()}
    maps = {"cell": L.cell("cell"), "row": L.row("row"), "column": L.column("column"), "scalar": L.scalar("scalar")}
    moves = []
    for _ in range(int(rng.integers(2, 6))):
        di, dj = MOVES[rng.integers(len(MOVES))]
        source, target = (int(k) for k in rng.integers(states, size=2))
        if di or dj or source < target:
            moves.append((di, dj, source, target, list(kinds)[rng.integers(len(kinds))]))
    moves.append((1, 1, 0, 0, "cell"))
    moves += [(1, 0, 0, 0, "row"), (0, 1, 0, 0, "column")]  # ensures that a path exists
    lattice = bx.Lattice(
        [bx.Move(di, dj, source, target, score=maps[kind]) for di, dj, source, target, kind in moves], states=states
    )
    names = [name for name in lattice.scores if name in kinds]
    batch = 2
    tensors = [normal(rng, batch, *kinds[name], missing=0.1 if name == "cell" else 0.0) for name in names]
    sizes = [(int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))) for _ in range(batch)]

    def graph(n: int, m: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        offset = {"cell": lambda i, j: i * columns + j, "row": lambda i, j: i, "column": lambda i, j: j}
        nodes = sorted(np.ndindex(n, m, states), key=lambda v: (v[0] + v[1], v))
        edges: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        uses: list[Uses] = []
        reached = {(0, 0, 0)}
        for i, j, k in nodes:
            for di, dj, source, target, kind in moves:
                before = (i - di, j - dj, source)
                if target == k and before in reached:
                    edges.append((before, (i, j, k)))
                    uses.append([(names.index(kind), offset.get(kind, lambda i, j: 0)(i, j), 1.0)])
                    reached.add((i, j, k))
        end = (n - 1, m - 1, 0)
        useful = {end}
        for parent, child in reversed(edges):
            if child in useful:
                useful.add(parent)
        on_path = [(e, use) for e, use in zip(edges, uses, strict=True) if e[0] in useful and e[1] in useful]
        number = {v: 1 + x for x, v in enumerate(v for v in nodes if v in useful)}
        begins = [(0, number[0, 0, 0])] if (0, 0, 0) in useful else []
        inner = [(number[a], number[c]) for (a, c), _ in on_path]
        return begins + inner, 1 + len(number), [[] for _ in begins] + [use for _, use in on_path]

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        lengths = tuple(torch.tensor(side) for side in zip(*sizes, strict=True))
        return lattice.paths(dict(zip(names, t, strict=True)), grid=lengths, omega=omega)

    return Program("Lattice", tensors, make, [graph(*size) for size in sizes], sense)


def of_alignment(rng: np.random.Generator) -> Program:
    """DTW, whose path uses the cost of each of its cells."""
    rows, columns, batch = int(rng.integers(1, 5)), int(rng.integers(1, 5)), 2
    band = BANDS[rng.integers(len(BANDS))]
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

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        lengths = tuple(torch.tensor(side) for side in zip(*sizes, strict=True))
        return bx.DTW(t[0], lengths=lengths, band=band, omega=omega)

    return Program("DTW", [cost], make, [graph(*size) for size in sizes], sense=-1)


def of_segments(rng: np.random.Generator) -> Program:
    """A semi-Markov model from scores: a segment uses the emissions of its steps and a duration."""
    batch, steps, longest, labels = 2, int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    has_last, lengths = bool(rng.integers(2)), torch.tensor(rng.integers(1, steps + 1, batch))
    sizes = [(steps, labels), (longest, labels), (labels, labels), (labels,), (labels,)]
    tensors = [normal(rng, batch, *size, missing=rng.choice([0.0, 0.1])) for size in sizes + sizes[1:2] * has_last]

    def graph(length: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        before = lambda t, k: 1 + 2 * t * labels + k  # noqa: E731
        after = lambda t, k: before(t, k) + labels  # noqa: E731
        edges, uses = [(0, before(0, k)) for k in range(labels)], [[(3, k, 1.0)] for k in range(labels)]
        for t in range(length):
            is_last = t == length - 1
            for k, d in np.ndindex(labels, min(longest, t + 1)):
                edges.append((before(t - d, k), after(t, k)))
                uses.append([(0, s * labels + k, 1.0) for s in range(t - d, t + 1)])
                uses[-1].append((5 if has_last and is_last else 1, d * labels + k, 1.0))
                uses[-1] += [(4, k, 1.0)] if is_last and labels == 1 else []  # one label has no end node
            for k, j in np.ndindex(*[0 if is_last else labels] * 2):
                edges.append((after(t, j), before(t + 1, k)))
                uses.append([(2, k * labels + j, 1.0)])
        end = 1 + 2 * length * labels
        ends = range(labels if labels > 1 else 0)
        edges += [(after(length - 1, k), end) for k in ends]
        return edges, end + (labels > 1), uses + [[(4, k, 1.0)] for k in ends]

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        options = {"start": t[3], "end": t[4], "last_durations": t[5] if has_last else None}
        return bx.SemiMarkov.from_scores(*t[:3], lengths=lengths, omega=omega, **options)

    return Program("SemiMarkov", tensors, make, [graph(length) for length in lengths.tolist()])


def of_automaton(rng: np.random.Generator) -> Program:
    """An automaton over frames, or one for each member of the batch. ε-arcs lead to larger states."""
    batch, steps, states, classes = 2, int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    least = int(states > 1)  # without frames, a path does not show its state
    lengths, own = torch.tensor(rng.integers(least, steps + 1, batch)), bool(rng.integers(2))
    automata, count = [], int(rng.integers(1, 6))
    for _ in range(batch if own else 1):
        arcs = [(int(a), int(b), int(rng.integers(classes))) for a, b in rng.integers(states, size=(count, 2))]
        arcs += [(int(rng.integers(b)), b, -1) for b in range(1, states) if rng.random() < 0.4]
        arcs = [arcs[n] for n in rng.permutation(len(arcs))] + [(0, states - 1, 0)] + [(s, s, 0) for s in range(states)]
        some = {s: 0.0 for s in range(states) if not s or rng.random() < 0.3}
        automata.append(bx.Automaton(arcs, start=some, final={states - 1: 0.0}))
    automaton = bx.Automaton.stack(automata) if own else automata[0]
    ends = [t.double().expand(batch, -1) for t in (automaton.start, automaton.final)]
    tensors = [normal(rng, batch, steps, classes, missing=0.1), normal(rng, batch, automaton.num_arcs, missing=0.1)]
    tensors += [normal(rng, *end.shape) + end for end in ends]

    def graph(b: int, length: int) -> tuple[list[tuple[int, int]], int, list[Uses]]:
        node = lambda t, s: 1 + t * states + s  # noqa: E731
        last = node(length, states)
        edges, uses = [(0, node(0, s)) for s in range(states)], [[(2, s, 1.0)] for s in range(states)]
        arcs = [(a, arc) for a, arc in enumerate(automata[b if own else 0].arcs.tolist())]
        for t in range(length + 1):
            for a, (source, target, label, _) in arcs:
                if label >= 0 and t:
                    edges.append((node(t - 1, source), node(t, target)))
                    uses.append([(0, (t - 1) * classes + label, 1.0), (1, a, 1.0)])
            for a, (source, target, label, _) in arcs:
                if label < 0:
                    edges.append((node(t, source), node(t, target)))
                    uses.append([(1, a, 1.0)])
        edges += [(node(length, s), last) for s in range(states)]
        return edges, 1 + last, uses + [[(3, s, 1.0)] for s in range(states)]

    def make(t: list[Tensor], omega: bx.Regularizer) -> bx.PathDistribution:
        scores = dict(zip(("scores", "start", "final"), t[1:], strict=True))
        paths: bx.PathDistribution = automaton.paths(t[0], **scores, lengths=lengths, omega=omega)
        return paths

    return Program("Automaton", tensors, make, [graph(b, n) for b, n in enumerate(lengths.tolist())])


KINDS = of_graph, of_chain, of_scores, of_lattice, of_alignment, of_segments, of_automaton


def omegas(rng: np.random.Generator) -> Callable[[float | Tensor], bx.Regularizer]:
    """A random kind of Ω, as a function of γ."""
    alpha = min(float(rng.uniform(1.2, 2.5)), 2.0) if rng.random() < 0.5 else 1.5
    choices = [bx.Negentropy, bx.SquaredL2, lambda gamma: bx.Tsallis(alpha, gamma), lambda gamma: bx.Hard()]
    return choices[rng.integers(len(choices))]


@dataclass
class Report:
    """A random program that was checked, and how many comparisons of each kind were made."""

    program: str
    description: str
    comparisons: Counter[str] = field(default_factory=Counter)


def check(seed: int) -> Report:
    """Check one random program. An AssertionError says how to repeat it."""
    rng = np.random.default_rng(seed)
    program, make_omega = KINDS[rng.integers(len(KINDS))](rng), omegas(rng)
    if program.name == "Automaton" and isinstance(make_omega(1.0), bx.SquaredL2):
        make_omega = lambda gamma: bx.Tsallis(2.0, gamma)  # noqa: E731  automata refuse l2
    numbers, way = NUMBERS[rng.integers(len(NUMBERS))], WAYS[rng.integers(len(WAYS))]
    dtype = [torch.float64, torch.float64, torch.float64, torch.float32, *HALF][rng.integers(6)]
    way = "eager" if dtype in HALF and way in ("jvp", "twice") else way
    gammas = rng.choice([0.3, 1.0, 4.0], len(program.graphs)).tolist()
    is_tensor = rng.random() < 0.3 and not isinstance(make_omega(1.0), bx.Hard)
    gammas = gammas if is_tensor else gammas[:1] * len(gammas)
    program.tensors = [spoil(rng, tensor, numbers, dtype, program.sense) for tensor in program.tensors]
    gamma = torch.tensor(gammas, dtype=torch.promote_types(dtype, torch.float32)) if is_tensor else gammas[0]
    settings = f"{make_omega(gammas[0])!r}, {numbers}, {way}, {dtype}, tensor γ {is_tensor}"
    report = Report(program.name, f"seed {seed}: {program.name}, {settings}")
    try:
        if numbers == "overflow":
            report.comparisons[check_overflow(rng, program, make_omega, dtype)] += 1
        elif numbers == "bad":
            report.comparisons[check_bad(rng, program, make_omega(gamma))] += 1
        else:
            solved = [program.solved(b, make_omega(gammas[b])) for b in range(len(gammas))]
            if any(len(one.all_paths) > MOST_PATHS for one in solved):
                report.comparisons["too many paths"] += 1
            else:
                report.comparisons += check_answers(rng, program, make_omega(gamma), solved, way, dtype)
    except Exception as error:
        raise AssertionError(f"{report.description}: {type(error).__name__}: {error}") from error
    return report


def spoil(rng: np.random.Generator, tensor: Tensor, numbers: str, dtype: torch.dtype, sense: int) -> Tensor:
    """Change scores so that they have ties, or masks of the least finite number."""
    tensor = tensor.clamp(-2, 2).round() if numbers == "ties" else tensor.clamp(-60, 60)
    absent = tensor.abs() == 60 if numbers == "ties" else torch.zeros_like(tensor, dtype=torch.bool)
    tensor = tensor.masked_fill(absent, -sense * math.inf).to(dtype)
    if numbers == "masks":
        tensor = tensor.masked_fill(torch.tensor(rng.random(tensor.shape) < 0.3), -sense * torch.finfo(dtype).max)
    return tensor


def check_bad(rng: np.random.Generator, program: Program, omega: bx.Regularizer) -> str:
    """Check that NaN or +∞ is refused if an edge uses it, and has no effect otherwise. Returns the outcome."""
    k = int(rng.integers(len(program.tensors)))
    tensor = program.tensors[k]
    b, entry = int(rng.integers(len(program.graphs))), int(rng.integers(tensor[0].numel()))
    spoilt, plain = tensor.clone(), tensor.clone()
    spoilt[b].view(-1)[entry], plain[b].view(-1)[entry] = rng.choice([math.nan, program.sense * math.inf]), 0.0
    is_used = any((k, entry) == use[:2] for uses in program.graphs[b][2] for use in uses)
    try:
        value = program.make([*program.tensors[:k], spoilt, *program.tensors[k + 1 :]], omega).value
    except ValueError as error:
        # A lattice reads the whole grid, and an automaton all frames.
        assert is_used or program.name in ("Lattice", "Automaton"), "an unused entry was refused"
        assert "must be finite" in str(error)  # noqa: PT017
        return "bad number refused"
    if is_used:  # used only by edges on no path, so it must have no effect
        assert not value.isnan().any(), "a bad number was taken"
    wanted = program.make([*program.tensors[:k], plain, *program.tensors[k + 1 :]], omega).value
    torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    return "bad number without effect"


def check_overflow(
    rng: np.random.Generator, program: Program, make: Callable[[float], bx.Regularizer], dtype: torch.dtype
) -> str:
    """Check that scores that overflow, directly or after division by γ, are refused or solved. Returns the outcome."""
    large = float(rng.choice([1e4, float(torch.finfo(dtype).max) ** 0.9]))
    tensors = [(tensor.double() * large).to(dtype).requires_grad_() for tensor in program.tensors]
    omega = make(float(rng.choice([1.0, 1e-3, 1e-30, 1e-300])))
    try:
        value = program.make(tensors, omega).value
        gradients = torch.autograd.grad(value.sum(), tensors)
    except ValueError as error:
        assert "must " in str(error)  # noqa: PT017
        return "overflow refused"
    assert not value.isnan().any(), "the value is NaN"
    assert not any(bool(gradient.isnan().any()) for gradient in gradients), "a gradient is NaN"
    return "overflow solved"


def check_answers(
    rng: np.random.Generator,
    program: Program,
    omega: bx.Regularizer,
    solved: list[Enumerated],
    way: str,
    dtype: torch.dtype,
) -> Counter[str]:
    """Compare the library's results with enumeration. Returns the number of comparisons of each kind."""
    comparisons = Counter[str]()
    direction = [torch.tensor(rng.normal(size=tensor.shape)).to(dtype) for tensor in program.tensors]
    base = {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 2e-2)
    answers = _verbs(program, omega, solved) if way == "verbs" else _answers(program, omega, solved, way, direction)
    for got, wanted, name in answers:
        scale = max(1.0, float(wanted.double().abs().nan_to_num(posinf=0, neginf=0).max()) if wanted.numel() else 1.0)
        tolerance = base * scale * (10 if way == "twice" else 1)
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}\n{text}"
        )
        comparisons[name] += wanted.numel() > 0
    return comparisons


def _is_plain(one: Enumerated) -> bool:
    """True if some path contains no mask (sums with a mask lose all digits), or if there is no path."""
    return one.value > MASKED or not len(one.all_paths)


def _has_near_ties(solved: list[Enumerated]) -> bool:
    """True if rounding can change the choice of Hard."""
    return any(
        isinstance(one.omega, bx.Hard) and len(one.scores) > 1 and float(np.diff(np.sort(one.scores)[-2:])[0]) < 1e-3
        for one in solved
    )


def _is_rounded_alike(program: Program) -> bool:
    """True if all backends round the scores of paths in the same way, and so break ties alike.

    The kernels of segments add float32 in double, and durations in another order make ties that rounding breaks.
    """
    is_double = program.tensors[0].dtype == torch.float64
    are_integers = all(torch.equal(t, t.round()) for t in program.tensors)
    return program.name != "SemiMarkov" or is_double or are_integers


def _verbs(program: Program, omega: bx.Regularizer, solved: list[Enumerated]) -> Iterator[tuple[Tensor, Tensor, str]]:
    p = program.make(program.tensors, omega)
    decodes = (isinstance(p, LatticePaths) and not isinstance(p, bx.DTW)) or program.name == "Automaton"
    entropy, best, drawn = p.entropy(), p.topk(3)[0], p.sample_decoded((4,)) if decodes else p.sample((4,))
    yield entropy.isnan(), torch.zeros_like(entropy), "entropy is NaN"
    yield best.isnan(), torch.zeros_like(best), "topk is NaN"
    for b, one in enumerate(solved):
        if not _is_plain(one) or not len(one.all_paths):
            continue
        if not _has_near_ties([one]):
            yield entropy[b], torch.tensor(one.entropy), "entropy"
        scores = sorted((float(s) for s in one.scores if s > MASKED), reverse=True)[:3]
        yield best[b, : len(scores)] * program.sense, torch.tensor(scores), "topk"
    if all(one.value > MASKED for one in solved):
        paths = [drawn, (p.decode() if decodes else p.best_path()).unsqueeze(0)]
        for path in paths if isinstance(omega, bx.Negentropy | bx.Hard) else paths[:1]:
            is_possible = p.log_prob(path) > -math.inf
            yield is_possible, torch.ones_like(is_possible), "log_prob of a sample or of the best path is finite"


def _answers(
    program: Program, omega: bx.Regularizer, solved: list[Enumerated], way: str, direction: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, str]]:
    plain = torch.tensor([_is_plain(one) for one in solved])
    values = torch.tensor([program.sense * one.value for one in solved])[plain]
    masses = [one.expected_path if one.value > -math.inf else np.zeros(len(one.edges)) for one in solved]
    paths = [
        torch.stack(members) for members in zip(*(program.by_entry(b, m) for b, m in enumerate(masses)), strict=True)
    ]
    inputs = [tensor.clone().requires_grad_() for tensor in program.tensors]
    has_ties = _has_near_ties(solved)
    has_kinks = not isinstance(omega, bx.Negentropy) and any(t.double().frac().eq(0).all() for t in program.tensors)
    if way == "jvp":
        primals = tuple(program.tensors)
        got, slope = torch.func.jvp(lambda *t: program.make(list(t), omega).value, primals, tuple(direction))
        yield got[plain], values, "value"
        wanted = sum((p * z.double()).reshape(len(p), -1).sum(1) for p, z in zip(paths, direction, strict=True))
        if not has_ties:
            yield slope[plain], torch.as_tensor(wanted)[plain], "directional derivative"
        return
    with bx.use_backend("reference") if way == "reference" else nullcontext():
        value = program.make(inputs, omega).value
        yield value.detach().isnan(), torch.zeros(len(value)), "value is NaN"
        yield value.detach()[plain], values, "value"
        gradient = torch.autograd.grad(value.sum(), inputs, create_graph=way == "twice")
    for got, wanted in zip(gradient, paths, strict=True):
        yield got.detach().isnan(), torch.zeros_like(wanted), "gradient is NaN"
        if not has_ties:
            yield got.detach()[plain], wanted[plain], "gradient"
    if has_ties and _is_rounded_alike(program):
        best = program.make(program.tensors, omega).best_path()
        with bx.use_backend("reference"):
            yield program.make(program.tensors, omega).best_path()[plain], best[plain], "best path"
    if way == "twice" and not isinstance(omega, bx.Hard) and not has_kinks:
        dot = sum((g * z).sum() for g, z in zip(gradient, direction, strict=True))
        second = torch.autograd.grad(dot, inputs) if isinstance(dot, Tensor) and dot.requires_grad else gradient
        for b, one in enumerate(solved):
            product = one.hessian_product(program.by_edge(b, direction)) if one.value > MASKED else None
            if product is None:
                continue
            for got, wanted in zip(second, program.by_entry(b, product), strict=True):
                yield got[b].detach(), wanted, "Hessian product"
