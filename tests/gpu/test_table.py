"""Lattices, including DTW, on an emulated GPU against plain torch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.inside import PLACES, WARPING, Axis, Ends, Step, Table, Tensors, Term, triton_module
from support.lattices import at_one
from support.problems import OMEGAS
from torch import Tensor

import bellmax as bx
from gpu.comparing import assert_close, assert_sweeps
from gpu.driver import Log

table = triton_module("lattices")

SERVED = "negentropy", "l2", "tsallis1.5", "hard"
FLOAT32, FLOAT64 = torch.float32, torch.float64
slow = pytest.mark.slow_gpu


def every(*quick: tuple[str, torch.dtype]) -> pytest.MarkDecorator:
    """Parametrize by Ω and dtype; all but the ``quick`` ones are slow."""
    both = [(omega, dtype) for omega in SERVED for dtype in (FLOAT32, FLOAT64)]
    return pytest.mark.parametrize(
        ("omega", "dtype"), [pytest.param(*pair, marks=[slow] * (pair not in quick)) for pair in both]
    )


# --- DTW


def padded_costs(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Four pairs: one with a forbidden cell, a shorter one in a band, one without a path, and a single cell."""
    cost = torch.rand(4, 6, 9, dtype=dtype) * 3
    cost[0, 2, 3] = cost[2, 3, 4] = math.inf
    lengths = torch.tensor([[6, 9], [4, 5], [4, 5], [1, 1]])
    for matrix, (rows, columns) in zip(cost, lengths.tolist(), strict=True):
        matrix[rows:] = matrix[:, columns:] = math.nan
    return [cost], [lengths, torch.tensor([math.inf, 1.0, 0.5, math.inf], dtype=FLOAT64)]


@every(("negentropy", FLOAT32))
def test_pairs_of_many_lengths_with_a_band(omega: str, dtype: torch.dtype, launches: Log) -> None:
    assert_sweeps(WARPING.name, *padded_costs(dtype), at_one(OMEGAS[omega]))
    assert launches.kernels == ["table_forward"] * 2 + ["table_backward", "table_tangents", "table_backward"]


@slow
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 5), (2, 5, 1), (1, 3, 40), (3, 40, 3)])
def test_whole_pairs(shape: tuple[int, ...], launches: Log) -> None:
    assert_sweeps(WARPING.name, [torch.rand(shape)], (), bx.Negentropy())


@slow
def test_costs_that_are_not_contiguous(launches: Log) -> None:
    assert_sweeps(WARPING.name, [torch.rand(7, 5, 2).permute(2, 1, 0)], (), bx.SquaredL2())


def test_an_empty_batch_uses_another_backend(launches: Log) -> None:
    assert bx.DTW(torch.zeros(0, 3, 4)).value.shape == (0,)
    assert not launches


# --- declared structures, from scores to a Hessian product

Build = Callable[[Tensors, bx.Regularizer], Tensor]


def ctc(scores: Tensors, omega: bx.Regularizer) -> Tensor:
    targets = torch.tensor([[1, 1, 2, 0], [3, 2, 0, 0]])
    return bx.CTC(scores[0], targets, lengths=(torch.tensor([8, 5]), torch.tensor([3, 2])), omega=omega).value


def monotone(scores: Tensors, omega: bx.Regularizer) -> Tensor:
    return bx.MonotonicAlignment(scores[0], lengths=(torch.tensor([8, 3]), torch.tensor([4, 2])), omega=omega).value


def transducer(scores: Tensors, omega: bx.Regularizer) -> Tensor:
    return bx.Transducer(*scores, lengths=(torch.tensor([4, 3]), torch.tensor([3, 1])), omega=omega).value


def alignment(mode: str) -> Build:
    def build(scores: Tensors, omega: bx.Regularizer) -> Tensor:
        gaps = {"gap_open": scores[1], "row_gaps": (scores[2], -0.5)}
        lengths = torch.tensor([5, 3]), torch.tensor([6, 4])
        return bx.SequenceAlignment(scores[0], **gaps, mode=mode, lengths=lengths, omega=omega).value

    return build


def warping(scores: Tensors, omega: bx.Regularizer) -> Tensor:
    """A lattice that starts and ends at any column."""
    return bx.DTW(-scores[0], open_begin=True, open_end=True, omega=omega).value


STRUCTURES: dict[str, tuple[Build, list[tuple[int, ...]]]] = {
    "ctc": (ctc, [(2, 8, 4)]),
    "monotone": (monotone, [(2, 8, 4)]),
    "transducer": (transducer, [(2, 4, 4), (2, 4, 3)]),
    "global": (alignment("global"), [(2, 5, 6), (2,), (2, 5)]),
    "local": (alignment("local"), [(2, 5, 6), (2,), (2, 5)]),
    "semiglobal": (alignment("semiglobal"), [(2, 5, 6), (2,), (2, 5)]),
    "warping": (warping, [(2, 5, 6)]),
}


PADDED = {
    "ctc": (5,),
    "monotone": (3, 2),
    "transducer": (3, 2),
    "global": (3, 4),
    "local": (3, 4),
    "semiglobal": (3, 4),
}
"""The lengths of the second of a batch."""


def derivatives(build: Build, scores: Tensors, omega: bx.Regularizer) -> list[Tensor]:
    """Values, a gradient and a Hessian product."""
    scores = [score.detach().requires_grad_() for score in scores]
    value = build(scores, omega)
    finite = value.masked_fill(value.isinf(), 0)
    gradient = torch.autograd.grad(
        finite @ torch.linspace(-1, 2, len(value), dtype=value.dtype), scores, create_graph=True
    )
    along = [torch.linspace(-1, 1, g.numel(), dtype=g.dtype).reshape(g.shape) for g in gradient]
    product = torch.autograd.grad(gradient, scores, along, allow_unused=True, materialize_grads=True)
    return [value.detach(), *(g.detach() for g in gradient), *product]


def assert_derivatives(build: Build, scores: Tensors, omega: bx.Regularizer) -> None:
    with bx.use_backend("reference"):
        expected = derivatives(build, [score.double() for score in scores], omega)
    for got, wanted in zip(derivatives(build, scores, omega), expected, strict=True):
        assert_close(got, wanted, scores[0].dtype)


def random_scores(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Scores with −∞, and with NaN past the lengths of the second batch member."""
    scores = [torch.randn(shape, dtype=dtype) for shape in STRUCTURES[name][1]]
    scores[0][0, 1, 1] = -math.inf
    for score in scores if name in PADDED else ():
        for dim, length in enumerate(PADDED[name][: score.ndim - 1]):
            score[1].narrow(dim, length, score.shape[1 + dim] - length).fill_(math.nan)
    return scores


PAIRS = ("l2", FLOAT32), ("negentropy", FLOAT64), ("tsallis1.5", FLOAT32), ("hard", FLOAT64)


@pytest.mark.parametrize(
    ("name", "omega", "dtype"),
    [
        pytest.param(name, *pair, marks=[slow] * ((name, pair) != ("ctc", PAIRS[0])))
        for name in STRUCTURES
        for pair in (PAIRS[:2] if name in ("local", "semiglobal") else PAIRS)  # "global" with other ends
    ],
)
def test_structures(name: str, omega: str, dtype: torch.dtype, launches: Log) -> None:
    assert_derivatives(STRUCTURES[name][0], random_scores(name, dtype), OMEGAS[omega])
    second = {"table_tangents"} if omega != "hard" else set()  # the Hessian of hard is 0, so no sweep runs
    assert set(launches.kernels) == {"table_forward", "table_backward"} | second


@slow
@pytest.mark.parametrize("name", ["ctc", "monotone", "transducer", "global", "local"])
def test_gradcheck(name: str, launches: Log) -> None:
    build, shapes = STRUCTURES[name]
    scores = [torch.randn(shape, dtype=FLOAT64, requires_grad=True) for shape in shapes]
    torch.autograd.gradcheck(lambda *inputs: build(inputs, bx.Negentropy(0.7)), scores, fast_mode=True)


@slow
def test_gradcheck_of_pairs(launches: Log) -> None:
    cost = torch.rand(1, 3, 4, dtype=FLOAT64, requires_grad=True)
    torch.autograd.gradcheck(lambda cost: bx.DTW(cost, omega=bx.Negentropy(0.5)).value, cost)


# --- any table


def random_table(rng: np.random.Generator, by_rows: bool) -> tuple[Table, list[tuple[Axis, ...]]]:
    """A random table, and the axes of its scores: cells, rows, columns, or none."""
    shapes: list[tuple[Axis, ...]] = []

    def terms(chance: float) -> tuple[Term, ...]:
        if shapes and rng.random() > chance:
            return ()
        kinds = (Axis("i"), Axis("j")), (Axis("i"),), (Axis("j"),), (), (Axis("i"), Axis("j", 1))
        shapes.append(kinds[0 if not shapes else rng.integers(len(kinds))])
        return (Term(len(shapes) - 1, float(rng.choice([1.0, 0.5])), shapes[-1]),)

    def ends() -> Ends:
        chosen = rng.permutation(states)[: rng.integers(1, states + 1)]
        return Ends(str(rng.choice(PLACES)), tuple(terms(0.5) if k in chosen else None for k in range(states)))

    states = int(rng.integers(1, 4))
    nodes, moves = tuple(terms(0.6) for _ in range(states)), []
    while len(moves) < 6:
        di, dj = (int(rng.choice(3, p=(0.4, 0.4, 0.2))) for _ in range(2))
        source, target = (int(rng.integers(states)) for _ in range(2))
        if (source < target) if di + dj == 0 else (di > 0 or not by_rows):
            moves.append(Step(di, dj, source, target, terms(0.5), None))
    return Table(states, tuple(moves), nodes, ends(), ends(), tuple(f"s{n}" for n in range(len(shapes))), 0, 0), shapes


def random_problem(
    rng: np.random.Generator, by_rows: bool, size: tuple[int, int], dtype: torch.dtype
) -> tuple[str, list[Tensor], list[Tensor]]:
    """A table, scores some of which are −∞ or shared by the batch, and lengths and bands."""
    table_and_axes, shapes = random_table(rng, by_rows)
    theta = []
    for axes in shapes:
        sides = [size[0] if axis.kind == "i" else size[1] + axis.offset for axis in axes]
        scores = torch.from_numpy(rng.normal(size=[2 if not theta or rng.random() < 0.7 else 1, *sides])).to(dtype)
        theta.append(scores.masked_fill(torch.from_numpy(rng.random(tuple(scores.shape)) < 0.05), -math.inf))
    lengths = torch.tensor([size, [rng.integers(1, n + 1) for n in size]])
    return table_and_axes.name, theta, [lengths, torch.tensor([math.inf, 1.0], dtype=FLOAT64)]


@slow
@pytest.mark.parametrize("seed", range(8))
def test_any_table(seed: int, launches: Log) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6)), int(rng.integers(2, 6))
    problem = random_problem(rng, seed % 3 == 0, size, (FLOAT32, FLOAT64)[seed % 2])
    assert_sweeps(*problem, at_one(OMEGAS[SERVED[seed % 4]]))
    assert launches


@slow
def test_a_table_with_too_long_moves_uses_another_backend(launches: Log) -> None:
    far = Step(40, 0, 0, 0, (), None)
    nodes = (Term(0, 1.0, (Axis("i"), Axis("j"))),)
    corner = Ends("corner", ((),))
    deep = Table(1, (far, Step(0, 1, 0, 0, (), None)), (nodes,), corner, corner, ("scores",), 0, 0)
    theta, lengths = [torch.randn(1, 2, 3)], torch.tensor([[2, 3]])
    assert_sweeps(deep.name, theta, [lengths, torch.tensor([math.inf], dtype=FLOAT64)], bx.Negentropy())
    assert not launches


# --- strips of columns


@slow
@pytest.mark.parametrize("name", ["negentropy", "tsallis1.5"])
def test_strips_of_pairs(name: str, launches: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "STRIPS", (4, 4))
    assert_sweeps(WARPING.name, *padded_costs(FLOAT32), at_one(OMEGAS[name]))
    assert launches.kernels.count("table_backward") == 6


@slow
def test_pairs_longer_than_a_strip(launches: Log) -> None:
    cost = torch.rand(1, 2, 1026, requires_grad=True)
    value = bx.DTW(cost).value
    (path,) = torch.autograd.grad(value.sum(), cost)
    assert launches.kernels == ["table_forward"] * 2 + ["table_backward"] * 2
    wide = cost.detach().double().requires_grad_()
    with bx.use_backend("reference"):
        right = bx.DTW(wide).value
    assert_close(value, right, FLOAT32)
    assert_close(path, *torch.autograd.grad(right.sum(), wide), FLOAT32)


@slow
@pytest.mark.parametrize("seed", range(2))
def test_strips_of_any_table(seed: int, launches: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "STRIPS", (4, 4))
    rng = np.random.default_rng(100 + seed)
    assert_sweeps(*random_problem(rng, seed % 2 == 0, (4, 9), FLOAT32), bx.Negentropy())
    assert launches


@slow
def test_more_columns_than_lanes(launches: Log) -> None:
    """Paths from the first to the last row that advance at most two columns per row."""
    moves = tuple(Step(1, dj, 0, 0, (), None) for dj in range(3))
    row = Ends("row", ((),))
    wide = Table(1, moves, ((Term(0, 1.0, (Axis("i"), Axis("j"))),),), row, row, ("scores",), 0, 0)
    theta, lengths = [torch.randn(1, 3, 1030)], torch.tensor([[3, 1029]])
    assert_sweeps(wide.name, theta, [lengths, torch.tensor([math.inf], dtype=FLOAT64)], bx.Negentropy())
    assert launches.kernels.count("table_backward") == 4
