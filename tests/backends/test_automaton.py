"""Kernels of automata against the unrolled graph of the reference backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.inside import BACKENDS, PROGRAMS
from support.kernels import needs_kernels
from torch import Tensor

import bellmax as bx

pytestmark = needs_kernels

OMEGAS = {
    "negentropy": bx.Negentropy(),
    "tsallis2": bx.Tsallis(2.0),
    "tsallis1.5": bx.Tsallis(1.5),
    "tsallis1.3": bx.Tsallis(1.3),
    "hard": bx.Hard(),
}


@dataclass
class Problem:
    """Scores, lengths and arcs for the sweeps, at γ = 1."""

    scores: list[Tensor]
    lengths: Tensor
    arcs: Tensor
    omega: bx.Regularizer = field(default_factory=bx.Negentropy)

    @property
    def index(self) -> list[Tensor]:
        return [self.lengths, self.arcs]

    def sweep(self, backend: str, name: str, *args: object) -> list[Tensor]:
        sweeps = BACKENDS[backend].sweeps("automaton")
        result = getattr(sweeps, name)(self.scores, *args, self.index, self.omega)
        return [result] if isinstance(result, Tensor) else list(result)

    def assert_equal(self, tol: float = 1e-10, second: float = 1e-9) -> None:
        """Compare all sweeps of both backends."""
        g = torch.Generator().manual_seed(0)
        seed, *z = (torch.randn(t.shape, generator=g).to(self.scores[0]) for t in (self.lengths, *self.scores))
        (value, tape), (expected, graph_tape) = (self.sweep(name, "forward") for name in ("native", "reference"))
        close([value, *self.sweep("native", "value")], [expected, expected], tol)
        sweeps = [("backward", [seed], tol), ("hessian", [seed, z], second)]
        for name, args, accuracy in sweeps:
            own, other = self.sweep("native", name, tape, *args), self.sweep("reference", name, graph_tape, *args)
            close(own, other, accuracy)
        uniforms = torch.rand((len(seed), 5, self.choices()), generator=g, dtype=torch.float64)
        own, other = (
            self.sweep("native", "sample", tape, uniforms),
            self.sweep("reference", "sample", graph_tape, uniforms),
        )
        assert torch.equal(own[0], other[0])
        for count in (1, 4):
            (scores, paths), (expected, best) = (self.sweep(name, "topk", count) for name in ("native", "reference"))
            close([scores], [expected], tol)
            assert torch.equal(paths, best)

    def choices(self) -> int:
        return PROGRAMS["automaton"].num_choices(self.scores, self.index)


def close(own: list[Tensor], other: list[Tensor], tol: float) -> None:
    for result, expected in zip(own, other, strict=True):
        torch.testing.assert_close(result, expected, rtol=tol, atol=tol)


def random_problem(
    seed: int,
    batch: int = 5,
    frames: int = 6,
    classes: int = 4,
    states: int = 6,
    arcs: int = 20,
    *,
    has_epsilon: bool = True,
    is_shared: bool = True,
    shares_scores: bool = True,
    scale: float = 1,
    has_holes: bool = False,
    has_ties: bool = False,
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * scale
        x = x.round() if has_ties else x
        return x.masked_fill(torch.rand(shape, generator=g) < 0.3, -math.inf) if has_holes else x

    def automaton() -> Tensor:
        pairs = torch.randint(states, (arcs, 2), generator=g)
        labels = torch.randint(classes, (arcs, 1), generator=g)
        if has_epsilon:
            is_epsilon = (torch.rand(arcs, generator=g) < 0.3) & (pairs[:, 0] != pairs[:, 1])
            labels[is_epsilon], pairs[is_epsilon] = -1, pairs[is_epsilon].sort(1).values
        return torch.cat((torch.randperm(states, generator=g)[pairs], labels), 1).int()

    automata = torch.stack([automaton() for _ in range(1 if is_shared else batch)])
    automata[1:, -2:] = -1
    members = 1 if shares_scores else batch
    lengths = torch.randint(frames + 1, (batch,), generator=g)
    lengths[0] = frames
    theta = [scores(batch, frames, classes), scores(members, arcs), scores(members, states), scores(members, states)]
    return Problem(theta, lengths, automata.expand(batch, -1, -1))


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "stack"])
@pytest.mark.parametrize("has_epsilon", [True, False], ids=["epsilon", "labels"])
def test_sweeps_are_those_of_the_graph(omega: str, is_shared: bool, has_epsilon: bool) -> None:
    for seed in range(3):
        problem = random_problem(seed, is_shared=is_shared, has_epsilon=has_epsilon, shares_scores=seed > 0)
        replace(problem, omega=OMEGAS[omega]).assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "stack"])
def test_ties_and_closed_edges(omega: str, is_shared: bool) -> None:
    for seed in range(3):
        problem = random_problem(seed, is_shared=is_shared, has_holes=True, has_ties=True)
        replace(problem, omega=OMEGAS[omega]).assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("scale", [30, 300])
def test_large_scores(omega: str, scale: float) -> None:
    for seed in range(3):
        problem = random_problem(seed, frames=9, scale=scale, is_shared=seed > 0, has_holes=seed > 1)
        replace(problem, omega=OMEGAS[omega]).assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
def test_small_automata(omega: str) -> None:
    for sizes in [(1, 0, 1, 1, 1), (1, 3, 1, 1, 1), (2, 1, 2, 2, 1), (3, 2, 1, 4, 2), (1, 6, 3, 5, 9), (9, 2, 3, 2, 6)]:
        for is_shared in (True, False):
            problem = random_problem(sum(sizes), *sizes, has_epsilon=False, is_shared=is_shared)
            replace(problem, omega=OMEGAS[omega]).assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
def test_no_path(omega: str) -> None:
    problem = replace(random_problem(0), omega=OMEGAS[omega])
    problem.scores[3] = torch.full_like(problem.scores[3], -math.inf)
    problem.assert_equal()
    assert bool((problem.sweep("native", "value")[0] == -math.inf).all())


def detour(far: float) -> Problem:
    """Two paths: one leads at once to the end, which stays costly; the other pays for it at the first frame, and wins.

    In scaled exp space, the number of the second underflows at the first frame.
    """
    arcs = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 2, 1], [2, 2, 1]], dtype=torch.int32)
    log_probs = torch.tensor([[0.0, -far], *[[-far, 0.0]] * 3], dtype=torch.float64)
    closed = torch.tensor([0, -math.inf, -math.inf], dtype=torch.float64)
    final = torch.tensor([-math.inf, 0, 0.5], dtype=torch.float64)
    batch = torch.stack([log_probs, log_probs / 1000])
    scores = [batch, torch.zeros(1, 4, dtype=torch.float64), closed[None], final[None]]
    return Problem(scores, torch.tensor([4, 4]), arcs.expand(2, -1, -1))


@pytest.mark.parametrize("far", [100, 600, 800, 3000])
def test_a_path_that_underflows_is_not_lost(far: float) -> None:
    problem = detour(far)
    problem.assert_equal()
    assert problem.sweep("native", "value")[0][0].item() == pytest.approx(0.5 - far)


def test_states_that_underflow_without_effect() -> None:
    problem = random_problem(4, batch=6, frames=40, scale=40, has_epsilon=False)
    problem.assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
def test_blocks_of_frames(omega: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape that has room for some frames only gives the same results."""
    from support.inside import automaton_tape

    for room in (0, 100):
        monkeypatch.setattr(*automaton_tape, room)
        for seed in range(2):
            problem = random_problem(seed, frames=11, is_shared=seed > 0, scale=[1, 200][seed])
            replace(problem, omega=OMEGAS[omega]).assert_equal()


@pytest.mark.parametrize("omega", OMEGAS)
def test_float32(omega: str) -> None:
    problem = replace(random_problem(1), omega=OMEGAS[omega])
    expected = problem.sweep("reference", "forward")
    single = replace(problem, scores=[t.float() for t in problem.scores])
    value, tape = single.sweep("native", "forward")
    seed = torch.ones(len(value))
    close([value.double()], expected[:1], 2e-6)
    own = single.sweep("native", "backward", tape, seed)
    close([t.double() for t in own], problem.sweep("reference", "backward", expected[1], seed.double()), 1e-5)


@pytest.mark.parametrize("omega", ["negentropy", "tsallis1.5"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("score", range(4))
def test_bad_scores_raise(omega: str, bad: float, score: int) -> None:
    problem = replace(random_problem(2, has_epsilon=False), omega=OMEGAS[omega])
    entry = (0, 0, int(problem.arcs[0, 0, 2])) if score == 0 else (0, 0)
    problem.scores[score][entry] = bad
    name = PROGRAMS["automaton"].scores[score]
    for sweep, *args in (["value"], ["forward"], ["topk", 2]):
        with pytest.raises(ValueError, match=f"{name} must be finite or -inf, got {bad}"):
            problem.sweep("native", sweep, *args)


def test_entries_without_an_arc_are_not_read() -> None:
    problem = random_problem(2, has_epsilon=False)
    expected = problem.sweep("native", "value")
    extra = torch.full_like(problem.scores[0][..., :1], math.nan)
    problem.scores[0] = torch.cat((problem.scores[0], extra), -1)
    problem.scores[0][1, int(problem.lengths[1]) :] = math.nan
    close(problem.sweep("native", "value"), expected, 0)


def test_overflow_raises() -> None:
    problem = random_problem(2, has_epsilon=False)
    problem.scores[0] = torch.full_like(problem.scores[0], 3e38)
    single = replace(problem, scores=[t.float() for t in problem.scores], lengths=torch.full_like(problem.lengths, 6))
    with pytest.raises(ValueError, match="overflow"):
        single.sweep("native", "value")


@pytest.mark.parametrize(
    ("arc", "message"), [((0, 9, 1), "out of range"), ((9, 0, 1), "out of range"), ((0, 1, -1), "cycle")]
)
def test_bad_arcs_raise(arc: tuple[int, int, int], message: str) -> None:
    problem = random_problem(2, has_epsilon=False)
    arcs = problem.arcs.clone()
    arcs[0, 0], arcs[0, 1] = torch.tensor(arc), torch.tensor((1, 0, -1))
    with pytest.raises(ValueError, match=message):
        replace(problem, arcs=arcs).sweep("native", "value")


def test_threads_give_equal_results() -> None:
    problem = random_problem(3, batch=9, frames=60, states=20, arcs=200)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            value, tape = problem.sweep("native", "forward")
            results.append([value, *problem.sweep("native", "backward", tape, torch.ones_like(value))])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
