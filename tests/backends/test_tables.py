"""Kernels of lattices, against enumeration for small tables and the graph engine for known tables."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from support.inside import loading
from support.kernels import needs_kernels, took
from support.lattices import Lattice, Scores, at_one
from support.problems import OMEGAS, Enumerated, one_of_each_kind
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L

pytestmark = needs_kernels

PLACES = ("corner", "row", "column", "anywhere")


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


def random_scores(rng: np.random.Generator, shape: tuple[int, int, int], missing: float) -> Tensor | None:
    """Random scores with some −∞, sometimes None or shared along the batch, rows or columns."""
    if rng.random() < 0.3:
        return None
    scores = rng.normal(size=[n if rng.random() < 0.7 else 1 for n in shape])
    scores[rng.random(scores.shape) < missing] = -math.inf
    return torch.from_numpy(scores)


def random_lattice(rng: np.random.Generator) -> Lattice:
    """A random lattice of up to three states with 8 to 400 paths."""
    while True:
        lattice = any_lattice(rng)
        paths = [lattice.graph(b).num_paths for b in range(lattice.batch)]
        if 8 <= max(paths) <= 400:
            return lattice


def any_lattice(rng: np.random.Generator) -> Lattice:
    batch, rows, columns, states = (int(rng.integers(1, n + 1)) for n in (3, 5, 4, 3))
    by_rows = rng.random() < 0.4
    moves = []
    for _ in range(rng.integers(2, 8)):
        di, dj = (int(rng.choice(3, p=(0.4, 0.4, 0.2))) for _ in range(2))
        source, to = (int(rng.integers(states)) for _ in range(2))
        if (source < to) if di + dj == 0 else (di > 0 or not by_rows):
            moves.append((di, dj, source, to))  # may repeat a move
    missing = float(rng.choice([0, 0.1]))
    scores = [random_scores(rng, (batch, rows, columns), missing) for _ in range(3 * states + len(moves))]
    ends = [
        (str(rng.choice(PLACES)), rng.permutation(states)[: rng.integers(1, states + 1)].tolist()) for _ in range(2)
    ]
    lengths, band = None, []
    if rng.random() < 0.6:
        lengths = [(int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))) for _ in range(batch)]
        band = [float(rng.choice([math.inf, 0.5, 1])) for _ in range(batch)] if rng.random() < 0.5 else []
    return Lattice(rows, columns, states, moves, scores, ends[0], ends[1], batch, lengths, band)


def directions(rng: np.random.Generator, scores: Scores) -> Scores:
    return [None if s is None else torch.from_numpy(rng.normal(size=tuple(s.shape))) for s in scores]


def check_scores(results: Scores, expected: Scores, tolerance: float) -> None:
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OMEGAS)
@pytest.mark.parametrize("seed", range(40))
def test_small_lattices_equal_all_their_paths(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    lattice, omega = random_lattice(rng), at_one(OMEGAS[name])
    weight, z = normal(rng, lattice.batch), directions(rng, lattice.scores)
    value, gradient, product = lattice.run(omega, weight, z)
    gradients, products = [], []
    graphs = [lattice.graph(b) for b in range(lattice.batch)]
    for b, graph in enumerate(graphs):
        weights = [lattice.read(lattice.scores, b, edge.terms) for edge in graph.edges]
        if graph.num_paths == 0:
            assert value[b] == -math.inf
            gradients.append(np.zeros(0))
            products.append(np.zeros(0))
            continue
        expected = Enumerated(graph.pairs, len(graph.number), weights, omega)
        torch.testing.assert_close(float(value[b]), expected.value, rtol=1e-9, atol=1e-9)
        along = np.array([lattice.read(z, b, edge.terms) for edge in graph.edges])
        gradients.append(expected.expected_path * float(weight[b]))
        hessian_product = expected.hessian_product(along)
        assert hessian_product is not None, "no seed is at a kink"
        products.append(hessian_product * float(weight[b]))
    assert any(graph.num_paths for graph in graphs)
    check_scores(gradient, lattice.spread(gradients, graphs), 1e-8)
    check_scores(product, lattice.spread(products, graphs), 1e-5)


# --- known tables against their graphs


def dtw(rng: np.random.Generator) -> Lattice:
    scores: Scores = [normal(rng, 2, 7, 9), None, None, None, None, None]
    return Lattice(7, 9, 1, [(1, 1, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0)], scores, batch=2, lengths=[(7, 9), (5, 6)])


def affine(rng: np.random.Generator) -> Lattice:
    """Gotoh's alignment: three states (match, gap in either sequence), scores for opening and extending a gap."""
    moves = [
        (1, 1, 0, 0),
        (1, 1, 1, 0),
        (1, 1, 2, 0),
        (1, 0, 0, 1),
        (1, 0, 1, 1),
        (0, 1, 0, 2),
        (0, 1, 2, 2),
        (0, 1, 1, 2),
    ]
    opens, extends = normal(rng, 2, 1, 1), normal(rng, 1, 1, 1)
    of_moves: Scores = [None, None, None, opens, extends, opens, extends, opens]
    scores: Scores = [normal(rng, 2, 6, 8), None, None, *of_moves, *[None] * 6]
    return Lattice(6, 8, 3, moves, scores, ("corner", (0,)), ("corner", (0, 1, 2)), batch=2)


def local(rng: np.random.Generator) -> Lattice:
    """Smith–Waterman: the same moves, starting and ending anywhere."""
    lattice = affine(rng)
    lattice.start = lattice.end = ("anywhere", (0,))
    return lattice


def ctc(rng: np.random.Generator) -> Lattice:
    """CTC: the states are blank and label. Equal labels need a blank between them, so some columns lack a move."""
    moves = [(1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 1)]
    skips = torch.zeros(1, 1, 5, dtype=torch.float64)
    skips[0, 0, 3] = -math.inf
    first = torch.full((1, 9, 5), -math.inf, dtype=torch.float64)
    blank_first, label_first = first.clone(), first.clone()
    blank_first[0, 0, 0] = label_first[0, 0, 1] = 0
    scores: Scores = [
        normal(rng, 2, 9, 1),
        normal(rng, 2, 9, 5),
        None,
        None,
        None,
        None,
        skips,
        blank_first,
        label_first,
        None,
        None,
    ]
    return Lattice(9, 5, 2, moves, scores, ("row", (0, 1)), ("corner", (0, 1)), batch=2)


def rnnt(rng: np.random.Generator) -> Lattice:
    scores: Scores = [None, normal(rng, 2, 7, 5), normal(rng, 2, 7, 5), None, None]
    return Lattice(7, 5, 1, [(1, 0, 0, 0), (0, 1, 0, 0)], scores, batch=2, lengths=[(7, 5), (4, 3)])


def monotone(rng: np.random.Generator) -> Lattice:
    return Lattice(11, 6, 1, [(1, 0, 0, 0), (1, 1, 0, 0)], [normal(rng, 2, 11, 6), None, None, None, None], batch=2)


def semi_markov(rng: np.random.Generator) -> Lattice:
    """Two states of segments up to 3 steps: ends of segments (0, 1) lead to boundaries (2, 3) inside a cell."""
    durations = [(d, 0, 2 + k, k) for d in (1, 2, 3) for k in (0, 1)]
    changes = [(0, 0, a, 2 + k) for a in (0, 1) for k in (0, 1)]
    scores: Scores = [*[None] * 4, *[normal(rng, 2, 8, 1) for _ in durations], *[normal(rng, 1, 1, 1) for _ in changes]]
    scores += [
        None,
        None,
        normal(rng, 1, 1, 1),
        normal(rng, 1, 1, 1),
        normal(rng, 2, 1, 1),
        normal(rng, 2, 1, 1),
        None,
        None,
    ]
    return Lattice(8, 1, 4, durations + changes, scores, ("corner", (2, 3)), ("corner", (0, 1)), batch=2)


KNOWN = {made.__name__: made for made in (dtw, affine, local, ctc, rnnt, monotone, semi_markov)}


def by_the_graph(lattice: Lattice, omega: bx.Regularizer, weight: Tensor, z: Scores) -> tuple[Tensor, Scores, Scores]:
    values, gradients, products = [], [], []
    graphs = [lattice.graph(b) for b in range(lattice.batch)]
    for b, graph in enumerate(graphs):
        terms = [edge.terms for edge in graph.edges]
        weights, along = (
            torch.tensor([lattice.read(s, b, t) for t in terms], dtype=torch.float64) for s in (lattice.scores, z)
        )
        weights.requires_grad_()
        value = bx.DAG(graph.pairs).paths(weights, omega=omega).value
        (gradient,) = torch.autograd.grad(value * weight[b], weights, create_graph=True)
        (product,) = (
            torch.autograd.grad(gradient, weights, along) if gradient.requires_grad else (torch.zeros_like(along),)
        )
        values.append(float(value.detach()))
        gradients.append(gradient.detach().numpy())
        products.append(product.numpy())
    return (
        torch.tensor(values, dtype=torch.float64),
        lattice.spread(gradients, graphs),
        lattice.spread(products, graphs),
    )


@one_of_each_kind
@pytest.mark.parametrize("table", KNOWN)
def test_known_tables_equal_their_graph(table: str, omega: bx.Regularizer) -> None:
    rng = np.random.default_rng(1)
    lattice, omega = KNOWN[table](rng), at_one(omega)
    weight, z = normal(rng, lattice.batch), directions(rng, lattice.scores)
    expected = by_the_graph(lattice, omega, weight, z)
    for threads in (1, 2):
        value, gradient, product = lattice.run(omega, weight, z, threads)
        torch.testing.assert_close(value, expected[0], rtol=1e-10, atol=1e-10)
        check_scores(gradient, expected[1], 1e-9)
        check_scores(product, expected[2], 1e-8)


def across_strips(rng: np.random.Generator) -> Lattice:
    """Rows and columns over several strips and chunks of the sweeps, with moves over two rows and three columns."""
    moves = [(1, 1, 0, 0), (2, 1, 1, 0), (0, 3, 0, 1), (1, 0, 1, 1), (0, 0, 0, 1), (2, 0, 0, 0), (0, 1, 1, 0)]
    shapes = [(2, 70, 75), (1, 70, 1), (2, 70, 75), (1, 1, 75), None, (1, 1, 1), (2, 1, 75), (1, 70, 75), (2, 70, 1)]
    scores: Scores = [None if shape is None else normal(rng, *shape) for shape in shapes]
    scores += [normal(rng, 1, 1, 75), None, normal(rng, 2, 70, 75), normal(rng, 1, 70, 1)]
    lengths, band = [(70, 75), (66, 70)], [math.inf, 0.6]
    return Lattice(70, 75, 2, moves, scores, ("row", (0, 1)), ("column", (0, 1)), 2, lengths, band)


@pytest.mark.slow
def test_strips_and_chunks_fit_together() -> None:
    rng = np.random.default_rng(4)
    lattice = across_strips(rng)
    weight, z = normal(rng, 2), directions(rng, lattice.scores)
    for places in (("row", "column"), ("corner", "anywhere")):
        lattice.start, lattice.end = (places[0], (0, 1)), (places[1], (0, 1))
        expected = by_the_graph(lattice, bx.Negentropy(), weight, z)
        for threads in (1, 2):
            value, gradient, product = lattice.run(bx.Negentropy(), weight, z, threads)
            torch.testing.assert_close(value, expected[0], rtol=1e-10, atol=1e-10)
            check_scores(gradient, expected[1], 1e-9)
            check_scores(product, expected[2], 1e-7)
        single = across_strips(rng)
        single.scores = [None if s is None else s.float() for s in lattice.scores]
        single.start, single.end = lattice.start, lattice.end
        value, gradient, _ = single.run(bx.Negentropy(), weight, [None if s is None else s.float() for s in z])
        torch.testing.assert_close(value, expected[0], rtol=1e-6, atol=1e-6)
        check_scores(gradient, expected[1], 2e-5)


@pytest.mark.parametrize("name", ["negentropy", "l2", "hard"])
def test_dtw_equals_its_table(name: str) -> None:
    rng, omega = np.random.default_rng(5), at_one(OMEGAS[name])
    cost = normal(rng, 2, 130, 140).abs()
    lengths = [(130, 140), (70, 129)]
    lattice = dtw(rng)
    lattice.rows, lattice.columns, lattice.lengths, lattice.scores[0] = 130, 140, lengths, -cost
    value, gradient, _ = lattice.run(omega, torch.ones(2, dtype=torch.float64), lattice.scores)
    n, m = (torch.tensor(side) for side in zip(*lengths, strict=True))
    p = bx.DTW(cost, lengths=(n, m), omega=omega)
    torch.testing.assert_close(value, -p.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient[0], p.expected_path, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("table", KNOWN)
def test_single_precision(table: str) -> None:
    rng = np.random.default_rng(2)
    lattice = KNOWN[table](rng)
    weight, z = normal(rng, lattice.batch), directions(rng, lattice.scores)
    expected = lattice.run(bx.Negentropy(), weight, z)
    lattice.scores = [None if s is None else s.float() for s in lattice.scores]
    value, gradient, product = lattice.run(bx.Negentropy(), weight, [None if s is None else s.float() for s in z])
    torch.testing.assert_close(value, expected[0], rtol=1e-6, atol=1e-6)
    check_scores(gradient, [None if s is None else s.double() for s in expected[1]], 1e-5)
    check_scores(product, [None if s is None else s.double() for s in expected[2]], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("table", KNOWN)
@pytest.mark.parametrize("name", ["negentropy", "l2", "hard"])
def test_draws_follow_the_probabilities(name: str, table: str) -> None:
    rng, draws = np.random.default_rng(3), 2000
    lattice, omega = KNOWN[table](rng), at_one(OMEGAS[name])
    gradient = by_the_graph(lattice, omega, torch.ones(lattice.batch, dtype=torch.float64), lattice.scores)[1]
    paths = lattice.sample(omega, draws)
    counts: list[np.ndarray] = []
    graphs = [lattice.graph(b) for b in range(lattice.batch)]
    for graph, draws_of_graph in zip(graphs, paths, strict=True):
        taken: Counter[object] = Counter()
        for path in draws_of_graph:
            before = [None, *(node for node, _ in path)]
            taken.update((parent, node, move) for parent, (node, move) in zip(before, path, strict=False))
            taken[path[-1][0], "sink", -1] += 1
        known = {(edge.parent, edge.child, edge.move) for edge in graph.edges}
        assert {edge for edge in taken if edge[1] != "sink"} <= known  # type: ignore[index]
        counts.append(np.array([taken[edge.parent, edge.child, edge.move] / draws for edge in graph.edges]))
    for a, b in zip(lattice.spread(counts, graphs), gradient, strict=True):
        if a is not None and b is not None:
            assert (a - b).abs().max() <= 0.06 * b.abs().max().clamp(min=1)


def test_bad_numbers_are_detected_and_padding_is_not_read() -> None:
    lattice = dtw(np.random.default_rng(0))
    scores = lattice.scores[0]
    assert scores is not None
    scores[1, 5:] = scores[1, :, 6:] = math.nan
    weight = torch.ones(2, dtype=torch.float64)
    _, gradient, _ = lattice.run(bx.Negentropy(), weight, [torch.zeros(2, 7, 9, dtype=torch.float64), *[None] * 5])
    assert gradient[0] is not None
    assert gradient[0].isfinite().all()
    for bad in (math.nan, math.inf):
        scores[1, 2, 2] = bad
        with pytest.raises(AssertionError):
            lattice.run(bx.Negentropy(), weight, lattice.scores)


@needs_kernels
@pytest.mark.parametrize(("batch", "minimize", "name"), [(1, True, "negentropy"), (2, False, "l2")])
def test_scores_of_a_window_of_the_cells(batch: int, minimize: bool, name: str) -> None:
    """Scores of a window of the grid. Outside it nodes have score 0 and there are no moves."""
    moves = [bx.Move(1, 1, score=L.cell("diagonal", -3, 2)), bx.Move(1, 0), bx.Move(0, 1)]
    lattice = bx.Lattice(moves, node=L.cell("node", -1, -7), end=L.along_row({0: L.cell("end", -66, -1)}))
    shapes = {"node": (batch, 70, 9), "diagonal": (68, 20), "end": (batch, 5, 22)}
    rng = np.random.default_rng(0)
    tensors = {n: torch.from_numpy(rng.normal(size=shape)).requires_grad_() for n, shape in shapes.items()}
    lengths = torch.tensor([71, 60])[:batch], torch.tensor([21, 15])[:batch]

    def all_of(backend: str) -> list[Tensor]:
        with bx.use_backend(backend):
            p = lattice.paths(tensors, grid=lengths, omega=OMEGAS[name], minimize=minimize)
            first = torch.autograd.grad(p.value.sum(), list(tensors.values()), create_graph=True)
            second = torch.autograd.grad(sum(g.cos().sum() for g in first), list(tensors.values()))
        return [p.value, *first, *second]

    for got, right in zip(all_of("native"), all_of("reference"), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-10)


# --- sizes of tapes, which Python computes for torch.compile, and kernels compute again


def lattice_of_long_moves(rng: np.random.Generator, by_rows: bool) -> bx.Lattice:
    """A lattice of up to three states, with moves of up to 80 rows and columns; ``by_rows``, each to a later row."""
    places = L.corner, L.along_row, L.along_column, L.anywhere
    while True:
        states = int(rng.integers(1, 4))
        moves = [] if by_rows else [bx.Move(0, 1)]
        for _ in range(rng.integers(1, 5)):
            di, dj = rng.choice([0, 1, 2, 7, 8, 9, 63, 64, 65, 80], size=2).tolist()
            moves.append(bx.Move(max(di, 1) if by_rows else di, dj, *rng.integers(states, size=2).tolist()))
        start, end = (places[rng.integers(4)](int(rng.integers(states))) for _ in range(2))
        try:
            return bx.Lattice(moves, states=states, node=L.cell("scores"), start=start, end=end)
        except ValueError:  # no path leads to the end, or a move stays at its node
            continue


@pytest.mark.parametrize("by_rows", [False, True])
def test_python_and_kernels_agree_on_the_sizes_of_tapes(by_rows: bool) -> None:
    """A kernel refuses a tape of another size."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        lattice = lattice_of_long_moves(rng, by_rows)
        scores = normal(rng, *rng.integers(1, 150, size=2).tolist()).requires_grad_()
        with took("lattice_forward", times=1) as calls:
            _ = lattice.paths({"scores": scores}).value
        args = calls[0].args
        (n,) = [n for n, arg in enumerate(args) if getattr(arg, "dtype", None) == torch.float64 and arg.ndim == 2]
        assert args[n].numel()
        with pytest.raises(ValueError, match="the tape does not fit the lattice"):
            loading.kernels.lattice_forward(*args[:n], args[n][:, 1:].contiguous(), *args[n + 1 :])
