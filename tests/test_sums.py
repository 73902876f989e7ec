"""Support checks of programs whose paths can use an entry of a score more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from support.checks import close
from support.inside import count_abandoned_searches, scores, set_limit, with_scores
from support.problems import potentials
from torch import Tensor

import bellmax as bx
from bellmax import PathDistribution
from bellmax import lattice as L

A, B = torch.tensor([0, 1, 1, 0]), torch.tensor([1, 0, 1])
GRID = [bx.Move(1, 1), bx.Move(1, 0), bx.Move(0, 1)]


def by_moves(*scores: L.Score | str | float | None) -> bx.Lattice:
    """A lattice with the moves (1, 1), (1, 0) and (0, 1)."""
    return bx.Lattice([bx.Move(m.di, m.dj, score=score) for m, score in zip(GRID, scores, strict=True)])


def edit_distance() -> PathDistribution:
    lattice = by_moves(L.pair("change", "a", "b", -1, -1), 1.0, 1.0)
    return lattice.paths({"change": 1 - torch.eye(2), "a": A, "b": B}, minimize=True)


def substitutions() -> PathDistribution:
    lattice = by_moves(L.pair("matrix", "a", "b", -1, -1), L.row("gaps", -1), "gap")
    tensors = {"matrix": potentials(2, 2), "gaps": potentials(4), "gap": -1.0, "a": A, "b": B}
    return lattice.paths(tensors, grid=(torch.tensor([5, 3, 4]), torch.tensor([4, 4, 2])))


def with_a_forbidden_gap() -> PathDistribution:
    gaps = potentials(4)
    gaps[2] = -torch.inf
    lattice = by_moves(L.pair("matrix", "a", "b", -1, -1), L.row("gaps", -1), "gap")
    return lattice.paths({"matrix": potentials(2, 2), "gaps": gaps, "gap": -1.0, "a": A, "b": B})


def learnt_gap() -> PathDistribution:
    return by_moves(L.cell("match", -1, -1) + L.scalar("gap"), "gap", "gap").paths(
        {"match": potentials(3, 3), "gap": -1.0}
    )


def scalar_gap() -> PathDistribution:
    lattice = bx.Lattice([*(bx.Move(m.di, m.dj, score="gap") for m in GRID[1:]), GRID[0]], node=L.cell("match"))
    return lattice.paths({"match": potentials(3, 3), "gap": -1.0})


def gathered() -> PathDistribution:
    return bx.Lattice(GRID, node=L.gather("scores", "y")).paths(
        {"scores": potentials(3, 2), "y": torch.tensor([0, 1, 1])}
    )


def negated() -> PathDistribution:
    return bx.Lattice(GRID, node=-L.cell("cost")).paths({"cost": potentials(3, 4)})


def weighted_steps() -> PathDistribution:
    lattice = bx.Lattice([bx.Move(1, 1, score=L.cell("cost")), *GRID[1:]], node=L.cell("cost"))
    return lattice.paths({"cost": potentials(3, 3)}, minimize=True)


def halves() -> PathDistribution:
    lattice = by_moves(1.5 * L.column("a"), 0.5 * L.column("a") + L.row("b"), L.column("a"))
    return lattice.paths({"a": potentials(3), "b": potentials(3)})


def both_signs() -> PathDistribution:
    return bx.Lattice(GRID, node=L.row("a") - L.column("a")).paths({"a": potentials(3)})


def within_a_cell() -> PathDistribution:
    moves = [bx.Move(1, 1, 1, 0), bx.Move(0, 1, 0, 0, L.row("a") + L.column("b")), bx.Move(0, 0, 0, 1, L.row("a"))]
    lattice = bx.Lattice(moves, states=2, end=L.corner(1))
    return lattice.paths({"a": potentials(3), "b": potentials(5)})


def shared_graph() -> PathDistribution:
    """A graph with shared weights: three steps of two or three parallel edges."""
    edges = [(0, ()), (1, (0,)), (1, (0,)), (2, (1,)), (2, (1,)), (2, (0,)), (3, (2,)), (3, (2,))]
    return bx.Hypergraph(edges, weight_of=[0, 1, 2, 1, 2, 3, 3, 2]).derivations(potentials(2, 4))


def shared_tree() -> PathDistribution:
    edges = [(0, ()), (0, ()), (1, (0, 0)), (1, (0,)), (2, (1, 0)), (2, (1, 1))]
    return bx.Hypergraph(edges, weight_of=[0, 1, 2, 2, 0, 1]).derivations(potentials(3))


SHARED: list[Callable[[], PathDistribution]] = [
    edit_distance, substitutions, with_a_forbidden_gap, learnt_gap, scalar_gap, gathered, negated, weighted_steps,
    halves, both_signs, within_a_cell, shared_graph, shared_tree,
]  # fmt: skip
ONCE: dict[str, Callable[[], PathDistribution]] = {
    "alignment": lambda: bx.SequenceAlignment.from_sequences(potentials(2, 2), A, B, gap_open=-1.0),
    "local alignment": lambda: bx.SequenceAlignment(potentials(3, 3), gap_open=-1.0, mode="local"),
    "segments": lambda: bx.SemiMarkov.from_scores(potentials(5, 2), potentials(3, 2), potentials(2, 2)),
    "transducer": lambda: bx.Transducer(potentials(3, 3), potentials(3, 2)),
    "monotone": lambda: bx.MonotonicAlignment(potentials(2, 5, 3)),
    "CTC": lambda: bx.CTC(potentials(5, 3), torch.tensor([1, 1])),
    "cells": lambda: by_moves(L.cell("match", -1, -1), -1.0, -1.0).paths({"match": potentials(3, 3)}),
}
each = pytest.mark.parametrize("made", [*SHARED, *ONCE.values()], ids=[*(made.__name__ for made in SHARED), *ONCE])


def all_events(p: PathDistribution) -> Tensor:
    return p.support_paths()[0]


def rows(events: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in events.reshape(len(events), -1).round(decimals=6).tolist()}


@pytest.fixture
def _every_search_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    searches = count_abandoned_searches(monkeypatch)
    yield
    assert searches.times_exceeded == 0


@each
@pytest.mark.usefixtures("_every_search_ends")
def test_sampled_events_are_in_the_support(made: Callable[[], PathDistribution], backend: str) -> None:
    p = made()
    torch.manual_seed(0)
    assert p.support.check(p.sample((40,))).all()


@each
@pytest.mark.usefixtures("_every_search_ends")
def test_the_support_is_the_set_of_sums_of_paths(made: Callable[[], PathDistribution]) -> None:
    whole = made()
    for p in whole if whole.batch_shape else [whole]:
        events = all_events(p)
        wanted = rows(events)
        assert len(events) >= len(wanted) > 1
        units = torch.eye(p.event_shape.numel(), dtype=events.dtype).reshape(-1, *p.event_shape)
        ordered = torch.tensor(sorted(wanted), dtype=events.dtype).reshape(-1, *p.event_shape)
        near = [ordered, *(ordered + sign * unit for unit in units for sign in (1, -1, 0.5)), (ordered > 0).double()]
        mixed = [torch.stack([w * a + (1 - w) * b for a, b in pairwise(ordered)]) for w in (0.5, 0.25)]
        tried = torch.cat([*near, *mixed, 0 * units, 2 * ordered])
        right = [tuple(row) in wanted for row in tried.reshape(len(tried), -1).round(decimals=6).tolist()]
        assert p.support.check(tried).tolist() == right


@pytest.mark.parametrize(("limit", "programs"), [(0, 10), (600, 2)])
def test_a_search_that_gives_up_accepts_the_event(limit: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some events need no search. Searches of at least ``programs`` programs must give up."""
    abandoned = 0
    for make in SHARED:
        searches = count_abandoned_searches(monkeypatch, limit)
        p = make()
        assert p.support.check(p.sample((10,))).all()
        abandoned += searches.times_exceeded > 0
    assert abandoned >= programs


def test_events_that_are_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "work of a search for a sum", 0)
    too_many, no_count, below_zero = [[0, 0], [0, 9.0]], [[0, 0], [0, 0.5]], [[0, -1.0], [0, 1]]
    assert not edit_distance().support.check(torch.tensor([too_many, no_count, below_zero])).any()


def test_a_large_grid_is_checked_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = count_abandoned_searches(monkeypatch)
    letters = torch.arange(100) * 7 % 11 % 4
    p = by_moves(L.pair("matrix", "a", "b", -1, -1), "gap", "gap").paths(
        {"matrix": torch.eye(4), "gap": -1.0, "a": letters, "b": letters.flip(0)}
    )
    event = p.sample()
    assert p.support.check(event)
    assert searches.times_exceeded == 1
    assert not p.support.check(event + 100)


def test_checks_draw_no_numbers() -> None:
    p = edit_distance()
    events = p.sample((20,))
    state = torch.get_rng_state()
    p.support.check(events)
    assert state.equal(torch.get_rng_state())


def test_losses_take_counts_for_the_paths_within(backend: str) -> None:
    p = edit_distance()
    event = next(e for e in all_events(p) if e.max() == 2)
    within = with_scores(p, (p.potentials.masked_fill(event == 0, torch.inf), *scores(p)[1:]), p.omega)
    close(bx.losses.surrogate(p, event), within.value - p.value)
    close(bx.losses.path_nll(p, event), within.value - p.value)
    with pytest.raises(ValueError, match="target must have the entries of a single path, got several paths or none"):
        bx.losses.relaxed(p, event)
    with pytest.raises(ValueError, match=r"target must hold counts 0, 1, 2, …, got 0.5 at \(0, 0\)"):
        bx.losses.surrogate(p, event.clamp(max=0.5) + 0.5)
    only = bx.Lattice([bx.Move(1, 0, score=L.pair("a", "x", "x", 0, 0) + L.row("b"))]).paths(
        {"a": potentials(2, 2), "b": potentials(3), "x": torch.tensor([1, 1, 1])}, grid=(3, 1), omega="hard"
    )
    assert bx.losses.relaxed(only, torch.tensor([[0, 0], [0, 2]])) == 0
    with pytest.raises(NotImplementedError, match="variance is not available if a path can use an entry twice"):
        _ = p.variance


def test_targets_of_negated_costs(backend: str) -> None:
    p, q = negated(), bx.DTW(potentials(3, 4), omega=bx.Negentropy())
    cells = q.best_path()
    close(p.value, -q.value)
    close(bx.losses.structured_perceptron(p, cells), 0.0)
    with pytest.raises(ValueError, match="need a score 'a' with coefficients of one sign, got both"):
        bx.losses.surrogate(both_signs(), torch.ones(3))


def test_a_coefficient_of_zero_does_not_count_as_use() -> None:
    s = L.pair("s", "a", "b", -1, -1)
    lattice = by_moves(s, 0.0 * s + L.row("r", -1), L.column("c", -1))
    letters = {"a": torch.tensor([0, 1, 0]), "b": torch.tensor([0, 1, 1])}
    p = lattice.paths({"s": torch.zeros(2, 2), **letters, "r": torch.zeros(3), "c": torch.zeros(3)})
    assert bool(p.support.check(p.best_path()).all())
    assert bool(bx.losses.path_nll(p, p.best_path()).isfinite())


def test_losses_take_events_of_negated_scores_and_refuse_counts_without_a_path() -> None:
    letters = {"a": torch.tensor([0, 0]), "b": torch.tensor([0, 0])}
    s = L.pair("s", "a", "b", -1, -1)
    for sign in (1, -1):
        p = by_moves(sign * s, "g", "g").paths({"s": torch.rand(1, 1), **letters, "g": torch.tensor(-1.0)})
        best = p.best_path()
        close(bx.losses.surrogate(p, best), bx.losses.surrogate(p, best.abs()), 0)
        with pytest.raises(ValueError, match="target must hold the number of times that a path uses each"):
            bx.losses.surrogate(p, torch.tensor([[9.0]]))
