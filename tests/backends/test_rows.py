"""The kernels that sweep lattices row by row, against the graphs of odd tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.checks import close
from support.kernels import hessians, needs_kernels, took
from support.problems import OMEGAS
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L

pytestmark = needs_kernels

PLACES = (L.corner, L.along_row, L.along_column, L.anywhere)
BATCH, ROWS, COLUMNS, CLASSES = 3, 11, 10, 4


def any_score(rng: np.random.Generator, rows: int = 0) -> L.Score | None:
    """A random sum of up to two scores of any kind, or None."""
    kinds = [
        L.cell("cell", rows, int(rng.integers(-2, 1))),
        L.row("row", rows),
        L.column("column", int(rng.integers(-1, 1))),
        L.scalar("scalar"),
        L.at_class("classes", int(rng.integers(CLASSES)), rows=rows),
        L.gather("classes", "y", rows, int(rng.integers(-1, 1))),
        L.cell_label("joint", "y", rows, 0),
        L.pair("pair", "x", "y", rows, 0),
    ]
    chosen = [kinds[n] * float(rng.choice([1, 0.5])) for n in rng.integers(len(kinds), size=rng.integers(3))]
    return sum(chosen[1:], start=chosen[0]) if chosen else None


def random_lattice(rng: np.random.Generator) -> bx.Lattice:
    """A random lattice of up to three states, with moves of up to ten rows and three columns."""
    while True:
        states = int(rng.integers(1, 4))
        moves = [
            bx.Move(
                int(rng.choice([1, 2, 10], p=(0.7, 0.25, 0.05))),
                int(rng.choice(4, p=(0.4, 0.35, 0.2, 0.05))),
                *(int(n) for n in rng.integers(states, size=2)),
                score=any_score(rng, int(rng.integers(-1, 1))),
                where=[None, "mask", L.row("rows_mask"), L.cell("cells_mask")][int(rng.choice(4, p=(0.7, *[0.1] * 3)))],
            )
            for _ in range(rng.integers(2, 6))
        ]
        node = {state: score for state in range(states) if (score := any_score(rng)) is not None}
        ends = [PLACES[rng.integers(4)]({int(rng.integers(states)): any_score(rng)}) for _ in range(2)]
        try:
            return bx.Lattice(moves, states=states, node=node, start=ends[0], end=ends[1])
        except ValueError:  # no path leads to the end
            continue


def tensors_of(lattice: bx.Lattice, rng: np.random.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {
        "cell": (ROWS, COLUMNS),
        "row": (ROWS,),
        "column": (COLUMNS,),
        "scalar": (),
        "classes": (ROWS, CLASSES),
        "joint": (ROWS, COLUMNS, CLASSES),
        "pair": (CLASSES, CLASSES),
    }
    tensors = {}
    for name in lattice.scores:
        if name in shapes:
            batch = (BATCH,) if rng.random() < 0.7 else ()
            tensors[name] = torch.from_numpy(rng.normal(size=batch + shapes[name])).to(dtype)
            tensors[name][torch.from_numpy(rng.random(tensors[name].shape)) < 0.05] = -math.inf
    for name in lattice.labels:  # some are padding
        tensors[name] = torch.from_numpy(rng.integers(-1, CLASSES + 1, size=(BATCH, ROWS if name == "x" else COLUMNS)))
    for name in lattice.masks:
        shape = {"mask": (COLUMNS,), "rows_mask": (ROWS,), "cells_mask": (ROWS, COLUMNS)}[name]
        tensors[name] = torch.from_numpy(rng.random(shape) < 0.8)
    return tensors


def everything(p: bx.LatticePaths, seed: int) -> list[Tensor]:
    """The value, the gradient and the Hessian product."""
    generator = torch.Generator().manual_seed(seed)
    z = {n: torch.randn(s.shape, generator=generator, dtype=torch.float64).to(s.dtype) for n, s in p.scores.items()}
    return [p.value, *p.gradient.values(), *p.hessian_product(z).values()]


@pytest.mark.parametrize("name", OMEGAS)
@pytest.mark.parametrize("seed", range(15))
def test_odd_tables_equal_their_graphs(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng)
    while not lattice.scores or "_1" in lattice.scores:
        lattice = random_lattice(rng)
    tensors = tensors_of(lattice, rng, torch.float64)
    sizes = tuple(torch.from_numpy(rng.integers(1, n + 1, size=BATCH)) for n in (ROWS, COLUMNS))
    options = [{"grid": (ROWS, COLUMNS)}, {"grid": sizes}, {"grid": sizes, "band": 1.2}][seed % 3]
    with took("lattice_forward"), took("lattice_backward"), took("lattice_hessian", hessians(OMEGAS[name])):
        results = everything(lattice.paths(tensors, omega=OMEGAS[name], **options), seed)
    with bx.use_backend("reference"):
        expected = everything(lattice.paths(tensors, omega=OMEGAS[name], **options), seed)
    for a, b in zip(results, expected, strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize("omega", ["negentropy", "l2"])
@pytest.mark.parametrize("labels", [0, 1, 9, 60])
def test_float32_is_as_accurate_as_float64(labels: int, omega: str) -> None:
    """The scores differ by thousands within a row, because few frames already spell the whole target."""
    torch.manual_seed(labels)
    scores = 10 * torch.randn(2, 800, 8)
    y = torch.randint(1, 8, (2, labels))
    single, double = (bx.CTC(s, y, omega=omega) for s in (scores, scores.double()))
    close(single.value.double(), double.value, 2e-5 * 800)
    close(single.expected_path.double(), double.expected_path, 2e-5)


def test_walks_are_drawn_by_their_probability() -> None:
    lattice = bx.Lattice([bx.Move(1, 0), bx.Move(2, 1), bx.Move(1, 2)], node=L.cell("s"), end=L.along_row())
    p = lattice.paths({"s": torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)})
    with took("lattice_sample"):
        walks = p.sample_walks((4000,))
    close(p.sample((4000,)).mean(0), p.expected_path, 0.05)
    assert bool((walks[:, 0, :2] == 0).all())


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_best_paths_with_ties_equal_the_graph(rows: int) -> None:
    lattice = bx.Lattice([bx.Move(1, 0), bx.Move(9, 1), bx.Move(1, 2)], node=L.cell("s"), end=L.along_row())
    scores = torch.randint(3, (4, rows, 7), generator=torch.Generator().manual_seed(rows)).float()
    p = lattice.paths({"s": scores}, omega="hard")
    with took("lattice_backward"):
        path = p.expected_path
    with bx.use_backend("reference"):
        assert torch.equal(path, lattice.paths({"s": scores}, omega="hard").expected_path)
    with took("lattice_sample"):
        assert torch.equal(p.sample((3,)), path.expand(3, -1, -1, -1))


def test_gradients_of_shared_scores_are_sums_over_the_batch() -> None:
    torch.manual_seed(0)
    scores, y = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 1, 2], [3, 4, 3]])
    (shared,) = torch.autograd.grad(bx.CTC(scores, y).value.sum(), scores)
    parts = [torch.autograd.grad(bx.CTC(scores, labels).value, scores)[0] for labels in y]
    close(shared, parts[0] + parts[1])


@pytest.mark.parametrize("make", [bx.CTC, bx.SequenceAlignment.from_sequences], ids=["by rows", "by strips"])
def test_gradients_of_large_shared_scores_are_summed_by_group(make) -> None:
    """Beyond 2²⁰ numbers, the sums are not kept for each lattice. Their order does not depend on the threads."""
    torch.manual_seed(0)
    classes, batch = 300, 40
    labels = [torch.randint(1, classes, (batch, length)) for length in (5, 4)]
    arguments = labels[:1] if make is bx.CTC else labels
    scores = torch.randn(classes, classes, dtype=torch.float64, requires_grad=True)  # [frame or label, label]
    parts = [make(scores, *(y[b] for y in arguments)).value for b in range(batch)]
    (wanted,) = torch.autograd.grad(torch.stack(parts).sum(), scores)
    gradients = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        gradients += torch.autograd.grad(make(scores, *arguments).value.sum(), scores)
    close(gradients[0], wanted)
    assert torch.equal(*gradients)
