"""DTW against the DAG engine on an explicit grid, and against enumeration of alignments."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import stats
from support.checks import close
from support.grids import MOVES, START, enumerated, grid
from support.inside import WARPING, program_name
from support.kernels import hessians, in_two_numbers, needs_kernels, took
from support.problems import OMEGAS, for_derivatives, one_of_each_kind, potentials, two_kinds
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

import bellmax as bx

ROWS, COLUMNS = 4, 5
LENGTHS = {"full": ([4, 4], [5, 5]), "unequal": ([3, 2], [4, 5])}
SHAPE = ROWS, COLUMNS


# --- two oracles


@lru_cache
def alignments(n: int, m: int, open_begin: bool = False, open_end: bool = False) -> list[list[tuple[int, int, int]]]:
    """Every alignment as its cells and moves (i, j, kind)."""

    def onwards(i: int, j: int) -> list[list[tuple[int, int, int]]]:
        ways = [[]] if i == n - 1 and (j == m - 1 or open_end) else []
        for kind, (a, b) in enumerate(MOVES):
            if i + a < n and j + b < m:
                ways += [[(i + a, j + b, kind), *rest] for rest in onwards(i + a, j + b)]
        return ways

    return [[(0, j, START), *rest] for j in range(m if open_begin else 1) for rest in onwards(0, j)]


def indicators(listed: list[list[tuple[int, int, int]]]) -> Tensor:
    paths = torch.zeros(len(listed), ROWS, COLUMNS, dtype=torch.float64)
    for path, cells in zip(paths, listed, strict=True):
        for i, j, _ in cells:
            path[i, j] = 1
    return paths


def in_band(n: int, m: int, band: float | None) -> Tensor:
    reach = math.inf if band is None else max(band, 0.5) * (max(n, m) - 1)
    return torch.tensor([[abs(i * (m - 1) - j * (n - 1)) <= reach for j in range(m)] for i in range(n)])


def problem(name: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Costs (2, N, M), two of them +∞ and NaN in the padding, and lengths."""
    cost = potentials(2, ROWS, COLUMNS, seed=3) * 1.5
    cost[0, 1, 2] = cost[1, 0, 2] = math.inf
    sides = LENGTHS[name]
    for b, (n, m) in enumerate(zip(*sides, strict=True)):
        cost[b, n:] = cost[b, :, m:] = math.nan
    return cost, (torch.tensor(sides[0]), torch.tensor(sides[1]))


@lru_cache
def by_engine(name: str, band: float | None, omega: bx.Regularizer) -> list[dict[str, Tensor]]:
    """Results of the DAG engine for each pair, on the current backend."""
    cost, z, results = problem(name)[0], potentials(2, ROWS, COLUMNS, seed=4), []
    for b, (n, m) in enumerate(zip(*LENGTHS[name], strict=True)):
        g, z_edges = grid(n, m), grid(n, m).on_edges(z[b, :n, :m])
        pair_cost = cost[b, :n, :m].masked_fill(~in_band(n, m, band), math.inf)
        with bx.use_backend("native" if bx.backend_info()["native"] == "available" else "reference"):
            p = bx.DAG(g.edges).paths(-g.on_edges(pair_cost), omega=omega)
        (scores, paths), (listed, probabilities) = p.topk(5), p.support_paths()
        results.append(
            {
                "value": -p.value,
                "path": g.on_cells(p.expected_path, SHAPE),
                "slope": p.directional_derivative(z_edges),
                "hessian": -g.on_cells(p.hessian_product(z_edges), SHAPE),
                "entropy": p.entropy(),
                "best": g.on_cells(p.best_path(), SHAPE),
                "mode": g.on_cells(p.mode, SHAPE),
                "count": p.num_paths,
                "costs": -scores,
                "paths": g.on_cells(paths, SHAPE),
                "listed": g.on_cells(listed, SHAPE),
                "probabilities": probabilities,
            }
        )
    return results


@lru_cache
def by_enumeration(name: str, band: float | None, omega: bx.Regularizer) -> list[dict[str, Tensor]]:
    """The same results by enumeration of all alignments, and the probability of each alignment."""
    cost, z, results = problem(name)[0], potentials(2, ROWS, COLUMNS, seed=4), []
    for b, (n, m) in enumerate(zip(*LENGTHS[name], strict=True)):
        pair_cost = cost[b, :n, :m].masked_fill(~in_band(n, m, band), math.inf)
        priced = torch.stack([sum(pair_cost[i, j] for i, j, _ in cells) for cells in alignments(n, m)])
        exists, every = priced < math.inf, indicators(alignments(n, m))
        order = priced.argsort(stable=True)[: int(exists.sum())][:5]
        g = grid(n, m)
        solved = enumerated(pair_cost, omega)
        codes = {tuple(path.flatten().tolist()): k for k, path in enumerate(every)}
        order_of_paths = [
            codes[tuple(p)] for p in g.on_cells(torch.from_numpy(solved.all_paths), SHAPE).flatten(1).tolist()
        ]
        probability = torch.zeros_like(priced)
        probability[order_of_paths] = torch.from_numpy(solved.probabilities)
        path = torch.einsum("p,pij->ij", probability, every)
        results.append(
            {
                "value": torch.tensor(-solved.value, dtype=torch.float64),
                "path": path,
                "slope": (path * z[b]).sum(),
                "entropy": torch.tensor(solved.entropy, dtype=torch.float64),
                "best": every[priced.argmin()],
                "mode": every[probability.argmax()],
                "count": exists.sum(),
                "costs": torch.cat((priced[order], torch.full((5 - len(order),), math.inf))),
                "paths": torch.cat((every[order], torch.zeros(5 - len(order), ROWS, COLUMNS))),
                "probabilities": probability[probability > 0].sort(descending=True).values,
                "every": every,
                "probability": probability,
            }
        )
    return results


@pytest.mark.parametrize("band", [None, 1])
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_the_grid_and_enumeration(name: str, band: float | None, omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem(name)
    z = potentials(*cost.shape, seed=4)
    p = bx.DTW(cost, lengths=None if name == "full" else lengths, band=band, omega=omega)
    assert p.backend == backend
    (costs, paths), (listed, probabilities) = p.topk(5), p.support_paths()
    layers = {
        "value": p.value,
        "path": p.expected_path,
        "slope": p.directional_derivative(z),
        "hessian": p.hessian_product(z),
        "entropy": p.entropy(),
        "best": p.best_path(),
        "mode": p.mode,
        "count": p.num_paths,
        "costs": costs,
        "paths": paths,
        "listed": listed.movedim(0, 1),
        "probabilities": probabilities.T,
    }
    for wanted in (by_engine(name, band, omega), by_enumeration(name, band, omega)):
        for b in range(2):
            for layer in layers.keys() & wanted[b].keys():
                got = layers[layer][b]
                if layer in ("listed", "probabilities"):  # padded to the larger of the batch
                    assert not got[len(wanted[b][layer]) :].any()
                    got = got[: len(wanted[b][layer])]
                close(got, wanted[b][layer])
    for b, (n, m) in enumerate(zip(*LENGTHS[name], strict=True)):
        alone = bx.DTW(cost[b], lengths=(n, m), band=band, omega=omega)
        close(alone.log_prob(wanted[b]["every"]).exp(), wanted[b]["probability"])


def test_a_band_always_leaves_a_path(backend: str) -> None:
    n, m = torch.meshgrid(torch.arange(1, 8), torch.arange(1, 10), indexing="ij")
    for band in (0, 1.4, 2):
        p = bx.DTW(torch.zeros(7, 9, 7, 9), lengths=(n.contiguous(), m.contiguous()), band=band)
        assert (p.num_paths >= 1).all()
        for i, j in ((1, 9), (4, 9), (7, 2), (6, 7), (5, 5)):
            torch.testing.assert_close(p.expected_path[i - 1, j - 1, :i, :j] > 0, in_band(i, j, band))
            assert p.expected_path[i - 1, j - 1].count_nonzero() == in_band(i, j, band).sum()
    assert int(bx.DTW(torch.zeros(5, 5), band=1).num_paths) == int(bx.DTW(torch.zeros(5, 5), band=1.9).num_paths)


# --- derivatives


@for_derivatives
@pytest.mark.parametrize(("lengths", "band"), [(None, None), (([2, 2], [3, 2]), 0)])
def test_derivatives(
    lengths: tuple[list[int], list[int]] | None, band: float | None, omega: bx.Regularizer, backend: str
) -> None:
    cost = potentials(2, 2, 3, requires_grad=True)
    sides = lengths and (torch.tensor(lengths[0]), torch.tensor(lengths[1]))

    def run(c: Tensor) -> tuple[Tensor, ...]:
        p = bx.DTW(c, lengths=sides, band=band, omega=omega)
        return p.value, p.expected_path

    assert gradcheck(run, cost, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, cost, fast_mode=True)


@two_kinds
def test_derivatives_of_the_distribution(omega: bx.Regularizer, backend: str) -> None:
    lengths = torch.tensor([3, 2]), torch.tensor([2, 4])
    other = bx.DTW(potentials(2, 3, 4, seed=9), lengths=lengths)

    def run(c: Tensor) -> tuple[Tensor, ...]:
        p = bx.DTW(c, lengths=lengths, omega=omega)
        return p.entropy(), kl_divergence(p, other), p.log_prob(p.mode), p.topk(1)[0]

    assert gradcheck(run, potentials(2, 3, 4, requires_grad=True), fast_mode=True)


@two_kinds
def test_third_derivative(omega: bx.Regularizer, backend: str) -> None:
    cost, z = potentials(3, 2, requires_grad=True), potentials(3, 2, seed=1, requires_grad=True)
    assert gradcheck(lambda c, d: bx.DTW(c, omega=omega).hessian_product(d), (cost, z), fast_mode=True)


@pytest.mark.parametrize("kind", [bx.Negentropy, bx.SquaredL2])
def test_gamma_of_a_batch_is_learnable(kind, backend: str) -> None:
    cost, lengths = problem("unequal")
    z = potentials(*cost.shape, seed=4)
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def run(g: Tensor) -> tuple[Tensor, ...]:
        p = bx.DTW(cost, lengths=lengths, omega=kind(gamma=g))
        return p.value, p.expected_path, p.entropy(), p.hessian_product(z)

    assert gradcheck(run, gamma, fast_mode=True)
    together = run(gamma)
    for b in range(2):
        single = bx.DTW(cost[b], lengths=(lengths[0][b], lengths[1][b]), omega=kind(gamma=float(gamma.detach()[b])))
        for got, wanted in zip(
            together, (single.value, single.expected_path, single.entropy(), single.hessian_product(z[b])), strict=True
        ):
            close(got[b], wanted)


def test_torch_func(backend: str) -> None:
    cost, z = potentials(3, 2, 4), potentials(3, 2, 4, seed=1)
    p = bx.DTW(cost, omega=OMEGAS["l2"])

    def value(c: Tensor) -> Tensor:
        return bx.DTW(c, omega=OMEGAS["l2"]).value.sum()

    close(torch.func.grad(value)(cost), p.expected_path)
    close(torch.func.jvp(value, (cost,), (z,))[1], p.directional_derivative(z).sum())
    close(torch.func.vmap(torch.func.grad(value))(cost), p.expected_path)
    close(torch.einsum("ijkl,kl->ij", torch.func.hessian(value)(cost[0]), z[0]), p.hessian_product(z)[0])
    lengths = torch.tensor([1, 2, 2]), torch.tensor([4, 3, 1])
    whole = bx.DTW(cost, lengths=lengths, band=1)
    mapped = torch.func.vmap(lambda c, n, m: bx.DTW(c, lengths=(n, m), band=1).value)(cost, *lengths)
    close(mapped, whole.value)
    unseen = potentials(2, 3, 11)  # a size whose index is first built inside a transform
    got = torch.func.vmap(torch.func.grad(lambda c: bx.DTW(c).entropy()))(unseen)
    close(got, torch.func.grad(lambda c: bx.DTW(c).entropy().sum())(unseen))
    opened = bx.DTW(cost, open_end=True, step_weights=STEPS)
    each = torch.func.vmap(lambda c: bx.DTW(c, open_end=True, step_weights=STEPS).value)
    close(each(cost), opened.value)
    with torch.no_grad():
        close(torch.func.jvp(value, (cost,), (z,))[1], p.directional_derivative(z).sum())
        close(torch.func.grad(value)(cost), p.expected_path)


def test_compiles(backend: str) -> None:
    cost, lengths = potentials(2, 3, 4, requires_grad=True), (torch.tensor([3, 2]), torch.tensor([1, 4]))

    def run(c: Tensor) -> tuple[Tensor, Tensor]:
        p = bx.DTW(c, lengths=lengths, band=1, omega="l2")
        return p.value, p.expected_path

    def loss(c: Tensor) -> Tensor:
        value, path = run(c)
        return value.sum() + path.square().sum()

    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(cost), cost)
    close(got, torch.autograd.grad(loss(cost), cost)[0])
    with torch.no_grad():
        for compiled, eager in zip(
            torch.compile(run, fullgraph=True, backend="aot_eager")(cost), run(cost), strict=True
        ):
            close(compiled, eager)


@needs_kernels
@one_of_each_kind
def test_value_alone_keeps_no_tape(omega: bx.Regularizer) -> None:
    cost, lengths = problem("unequal")
    cost.requires_grad_()
    with took("lattice_forward", times=2) as calls:
        with torch.no_grad():
            alone = bx.DTW(cost, lengths=lengths, omega=omega)
            value = alone.value
        plain = bx.DTW(cost.detach(), lengths=lengths, omega=omega).value
    assert [call.args[-2].numel() for call in calls] == [0, 0]
    graph = bx.DTW(cost, lengths=lengths, omega=omega)
    with took("lattice_forward", times=1) as calls:
        for got in (value, plain):
            close(got, graph.value, 1e-14)
    assert calls[0].args[-2].numel() > 0
    with torch.no_grad():
        assert torch.equal(alone.expected_path, graph.expected_path)  # needs a tape
    with torch.inference_mode():
        close(bx.DTW(cost.detach(), lengths=lengths, omega=omega).value, value, 1e-14)


# --- alignments


@pytest.mark.slow
def test_sampling_distribution(omega: bx.Regularizer, backend: str) -> None:
    lengths, draws = (torch.tensor([3, 2]), torch.tensor([4, 3])), 10_000
    p = bx.DTW(potentials(2, 3, 4), lengths=lengths, omega=omega)
    samples = p.sample((draws,))
    paths, probabilities = p.support_paths()
    binary = 2.0 ** torch.arange(12, dtype=torch.float64)
    for b in range(2):
        is_possible = probabilities[:, b] > 0
        codes, order = (paths[is_possible, b].flatten(1) @ binary).sort()
        drawn = samples[:, b].flatten(1) @ binary
        assert torch.isin(drawn, codes).all()
        observed = (drawn == codes.unsqueeze(-1)).sum(-1).numpy()
        expected = probabilities[is_possible, b][order].numpy() * draws
        large = expected > 5
        if large.sum() > 1:
            share = expected[large] / expected[large].sum() * observed[large].sum()
            assert stats.chisquare(observed[large], share).pvalue > 1e-4


@one_of_each_kind
@pytest.mark.parametrize("open_ends", [False, True])
def test_alignments_and_paths(open_ends: bool, omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem("unequal")
    p = bx.DTW(cost, lengths=lengths, omega=omega, open_begin=open_ends, open_end=open_ends)
    torch.manual_seed(1)
    drawn = p.sample_alignments((6, 5))
    assert drawn.shape == (6, 5, 2, ROWS + COLUMNS - 1, 2)
    assert drawn.dtype == torch.int64
    paths = p.alignment_to_path(drawn)
    torch.manual_seed(1)
    assert torch.equal(p.sample((6, 5)), paths)
    assert p.log_prob(paths).isfinite().all()
    assert torch.equal(p.alignment_to_path(p.best_alignment()), p.best_path())
    for pairs in (*drawn[0, 0], *p.best_alignment()):
        cells = pairs[pairs[:, 0] >= 0]
        assert (pairs[len(cells) :] == -1).all()
        assert {tuple(move) for move in cells.diff(dim=0).tolist()} <= set(MOVES)
    ends = drawn[..., 0, :], drawn.flatten(0, 1).amax(-2)
    assert not ends[0][..., : 1 if open_ends else 2].any()
    assert (ends[1][..., 0] == lengths[0] - 1).all()
    if not open_ends:
        assert (ends[1][..., 1] == lengths[1] - 1).all()


def test_ties(backend: str) -> None:
    assert bx.DTW(torch.zeros(3, 5)).best_alignment()[:5].tolist() == [[0, 0], [0, 1], [0, 2], [1, 3], [2, 4]]
    up_or_left = bx.DTW(torch.tensor([[0.0, -1.0, 9.0], [-1.0, -5.0, 0.0]]), omega="hard")
    assert up_or_left.best_alignment().tolist() == [[0, 0], [0, 1], [1, 1], [1, 2]]
    assert torch.equal(up_or_left.expected_path, up_or_left.best_path())
    assert torch.equal(up_or_left.topk(1)[1][0], up_or_left.best_path())
    even = bx.DTW(torch.zeros(2, 2), omega=bx.Tsallis(2.0))
    torch.testing.assert_close(even.expected_path, torch.tensor([[1, 1 / 3], [1 / 3, 1]]))


# --- custom moves, open ends

STEPS = torch.tensor([2.0, 0.7, 1.3], dtype=torch.float64)
PENALTIES = torch.tensor([0.3, -0.2, 0.6], dtype=torch.float64)
CUSTOM_MOVES = {
    "weights": {"step_weights": STEPS},
    "penalties": {"step_penalties": PENALTIES},
    "open begin": {"open_begin": True},
    "open end": {"open_end": True},
    "all": {"step_weights": STEPS, "step_penalties": PENALTIES, "open_begin": True, "open_end": True},
}


@pytest.mark.parametrize("name", CUSTOM_MOVES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_custom_moves_equal_enumeration(name: str, lengths: str, backend: str) -> None:
    cost, sides = problem(lengths)
    options = CUSTOM_MOVES[name]
    opened = options.get("open_begin", False), options.get("open_end", False)
    factor = torch.cat((options.get("step_weights", torch.ones(3)), torch.ones(1))).tolist()
    penalty = torch.cat((options.get("step_penalties", torch.zeros(3)), torch.zeros(1))).tolist()
    soft = bx.DTW(cost, lengths=sides, omega=bx.Negentropy(0.7), band=1, **options)
    hard = bx.DTW(cost, lengths=sides, omega="hard", band=1, **options)
    costs, paths = hard.topk(6)
    for b, (n, m) in enumerate(zip(*LENGTHS[lengths], strict=True)):
        pair_cost = cost[b].masked_fill(
            ~torch.nn.functional.pad(in_band(n, m, 1), (0, COLUMNS - m, 0, ROWS - n)), math.inf
        )
        listed = alignments(n, m, *opened)
        priced = torch.tensor(
            [sum(factor[k] * float(pair_cost[i, j]) + penalty[k] for i, j, k in cells) for cells in listed],
            dtype=torch.float64,
        )
        every, ascending = indicators(listed), priced.sort().values
        probability = torch.softmax(-priced / 0.7, 0)
        close(soft.value[b], -0.7 * torch.logsumexp(-priced / 0.7, 0))
        close(soft.expected_path[b], torch.einsum("p,pij->ij", probability, every))
        close(soft.num_paths[b], (priced < math.inf).sum())
        close(soft.entropy()[b], torch.special.entr(probability).sum())
        alone = bx.DTW(cost[b], lengths=(n, m), omega=bx.Negentropy(0.7), band=1, **options)
        exists = priced < math.inf
        close(alone.log_prob(every[exists]).exp(), probability[exists])
        close(hard.value[b], ascending[0])
        assert torch.equal(hard.best_path()[b], every[priced.argmin()])
        count = min(6, int(exists.sum()))
        close(costs[b, :count], ascending[:count])
        assert torch.equal(paths[b, :count], every[priced.argsort()[:count]])


@pytest.mark.parametrize("omega", ["l2"], indirect=True)
@pytest.mark.parametrize("name", CUSTOM_MOVES)
def test_custom_moves_equal_the_grid(name: str, omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem("unequal")
    z, options = potentials(*cost.shape, seed=4), CUSTOM_MOVES[name]
    p = bx.DTW(cost, lengths=lengths, omega=omega, **options)
    factor, penalty = options.get("step_weights"), options.get("step_penalties", torch.zeros(3)).double()
    for b, (n, m) in enumerate(zip(*LENGTHS["unequal"], strict=True)):
        g = grid(n, m, options.get("open_begin", False), options.get("open_end", False))
        pays = g.on_edges(cost[b, :n, :m], factor) + torch.cat((penalty, penalty.new_zeros(2)))[g.kind]
        engine = bx.DAG(g.edges).paths(-pays, omega=omega)
        z_edges = g.on_edges(z[b, :n, :m], factor)
        product = engine.hessian_product(z_edges) * g.on_edges(torch.ones(n, m).double(), factor)
        close(p.value[b], -engine.value)
        close(p.expected_path[b], g.on_cells(engine.expected_path, SHAPE))
        close(p.directional_derivative(z)[b], engine.directional_derivative(z_edges))
        close(p.hessian_product(z)[b], -g.on_cells(product, SHAPE))
        close(p.mode[b], g.on_cells(engine.mode, SHAPE))
        close(p.entropy()[b], engine.entropy())


@two_kinds
def test_custom_moves_have_derivatives(omega: bx.Regularizer, backend: str) -> None:
    cost, z = potentials(2, 2, 3, requires_grad=True), potentials(2, 2, 3, seed=1)
    weights, penalties = STEPS.clone().requires_grad_(), potentials(2, 3, seed=2, requires_grad=True)

    def make(c: Tensor, w: Tensor, a: Tensor) -> bx.DTW:
        return bx.DTW(c, step_weights=w, step_penalties=a, open_begin=True, open_end=True, omega=omega)

    def run(c: Tensor, w: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        p = make(c, w, a)
        return p.value, p.expected_path

    assert gradcheck(run, (cost, weights, penalties), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, (cost, weights, penalties), fast_mode=True)
    p = make(cost, weights, penalties)
    (gradient,) = torch.autograd.grad(p.value.sum(), cost, create_graph=True)
    close(p.directional_derivative(z), (gradient * z).flatten(1).sum(1))
    step = 1e-6 * z
    slopes = make(cost + step, weights, penalties).value - make(cost - step, weights, penalties).value
    close(p.directional_derivative(z), slopes / 2e-6, 1e-8)
    close(p.hessian_product(z), torch.autograd.grad((gradient * z).sum(), cost)[0])

    def at(c: Tensor) -> Tensor:
        return torch.autograd.grad(make(c, weights, penalties).value.sum(), c)[0]

    close(p.hessian_product(z), (at(cost + step) - at(cost - step)) / 2e-6, 1e-7)


def test_diagonals_may_cost_two_steps(backend: str) -> None:
    p = bx.DTW(torch.ones(3, 5), step_weights=(2, 1, 1), omega="hard")
    assert p.value == 7  # the same for every path
    assert bx.DTW(torch.ones(3, 5), omega="hard").value == 5
    query = bx.DTW((torch.tensor([1.0, 2.0])[:, None] - torch.tensor([5.0, 9.0, 1.0, 2.0, 7.0])).square(),
                   open_begin=True, open_end=True, omega="hard")  # fmt: skip
    assert query.value == 0
    assert query.best_alignment()[:2].tolist() == [[0, 2], [1, 3]]


# --- edge cases


@one_of_each_kind
@pytest.mark.parametrize("options", [{}, {"open_begin": True, "step_weights": (2, 1, 1)}], ids=["cells", "moves"])
def test_infinite_cells(options: dict, omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(2, 4, 6)
    cost[0, 1, 1:5] = cost[1, 2:, 2] = cost[1, 0, 3:] = math.inf
    cost.requires_grad_()
    p = bx.DTW(cost, omega=omega, **options)
    blocked = cost.detach() == math.inf
    path, product = p.expected_path, p.hessian_product(torch.ones_like(cost))
    assert not path[blocked].any()
    assert not product[blocked].any()
    assert p.value.isfinite().all()
    loss = p.value.sum() + p.entropy().sum() + path.square().sum()
    (gradient,) = torch.autograd.grad(loss, cost, create_graph=True)
    assert gradient.isfinite().all()
    assert not gradient[blocked].any()
    if not options:
        assert torch.autograd.grad(gradient.square().sum(), cost)[0].isfinite().all()
    _, tangent = torch.func.jvp(lambda c: bx.DTW(c, omega=omega, **options).expected_path, (cost,), (blocked.double(),))
    assert tangent.isfinite().all()


@one_of_each_kind
@pytest.mark.parametrize("options", [{}, {"open_begin": True, "step_penalties": (1, 0, 0)}], ids=["cells", "moves"])
def test_a_pair_without_an_alignment_in_a_batch(options: dict, omega: bx.Regularizer, backend: str) -> None:
    cost = potentials(3, 3, 4)
    alone = bx.DTW(cost[1], omega=omega, **options)
    cost[0, 1] = cost[2, -1, -1] = math.inf
    cost.requires_grad_()
    p = bx.DTW(cost, omega=omega, **options)
    lost = [0, 2]
    assert p.value[lost].tolist() == [math.inf, math.inf]
    close(p.value[1], alone.value)
    close(p.expected_path[1], alone.expected_path)
    for zero in (p.expected_path, p.hessian_product(torch.ones_like(cost)), p.best_path(), p.mode, p.sample((7,))):
        assert not zero.movedim(-3, 0)[lost].any()
    assert not p.entropy()[lost].any()
    assert not p.directional_derivative(torch.ones_like(cost))[lost].any()
    assert p.num_paths[lost].tolist() == [0, 0]
    assert (p.best_alignment()[lost] == -1).all()
    assert (p.sample_alignments((4,))[:, lost] == -1).all()
    assert (p.topk(2)[0][lost] == math.inf).all()
    assert (p.log_prob(alone.best_path())[lost] == -math.inf).all()
    paths, probabilities = p.support_paths()
    assert not paths[:, lost].any()
    assert not probabilities[:, lost].any()
    for layer in (p.value[lost], p.entropy()[lost], p.expected_path[lost]):
        assert not torch.autograd.grad(layer.sum(), cost, retain_graph=True)[0].any()
    (gradient,) = torch.autograd.grad(p.value.sum() + p.expected_path.square().sum(), cost)
    assert gradient.isfinite().all()
    assert not gradient[lost].any()


@pytest.mark.parametrize("options", [{}, {"open_end": True}, {"step_weights": (2, 1, 1)}])
@pytest.mark.parametrize("kind", [bx.Negentropy, bx.SquaredL2])
def test_no_alignment_gives_gamma_no_gradient(kind, options: dict, backend: str) -> None:
    cost, gamma = potentials(2, 3, 4), torch.ones(2, dtype=torch.float64, requires_grad=True)
    cost[1, 1] = math.inf
    p = bx.DTW(cost, omega=kind(gamma=gamma), **options)
    assert p.value[1] == math.inf
    (gradient,) = torch.autograd.grad(p.value.sum() + p.entropy().sum() + p.expected_path.sum(), gamma)
    assert gradient.isfinite().all()
    assert gradient[1] == 0


@one_of_each_kind
def test_single_rows_and_columns(omega: bx.Regularizer, backend: str) -> None:
    vertex = 0.45 if isinstance(omega, bx.SquaredL2) else 0.0  # γ/2 for each node with one parent
    for shape in ((1, 1), (1, 6), (6, 1)):
        cost = potentials(2, *shape, requires_grad=True)
        for band in (None, 0):
            p = bx.DTW(cost, band=band, omega=omega)
            close(p.value, cost.detach().flatten(1).sum(1) + vertex * cost[0].numel())
            assert (p.expected_path == 1).all()
            assert not p.hessian_product(cost).any()
            assert not p.entropy().any()
            assert p.num_paths.tolist() == [1, 1]
            assert (p.sample((3,)) == 1).all()
            assert (p.best_alignment().amax(-1) == torch.arange(cost[0].numel())).all()
            assert (torch.autograd.grad(p.value.sum(), cost)[0] == 1).all()
    ones = torch.ones(3, dtype=torch.int64)
    short = bx.DTW(potentials(3, 4, 5), lengths=(ones, ones), omega=omega)
    close(short.value, short.cost[:, 0, 0] + vertex)
    assert short.expected_path.sum((1, 2)).tolist() == [1, 1, 1]
    row = bx.DTW(potentials(3, 4, 5), lengths=(1, 3), omega=omega)
    assert row.best_path().sum((1, 2)).tolist() == [3, 3, 3]


@one_of_each_kind
@pytest.mark.parametrize("options", [{}, {"open_begin": True, "step_weights": (2, 1, 1)}], ids=["cells", "moves"])
def test_padding_gets_no_gradient(options: dict, omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem("unequal")
    padded = cost.isnan()
    z = torch.ones_like(cost).masked_fill(padded, math.nan)
    cost.requires_grad_()
    p = bx.DTW(cost, lengths=lengths, omega=omega, **options)
    clean = bx.DTW(cost.detach().masked_fill(padded, 7), lengths=lengths, omega=omega, **options)
    close(p.value, clean.value)
    close(p.directional_derivative(z), clean.directional_derivative(torch.ones_like(cost)))
    close(p.hessian_product(z), clean.hessian_product(torch.ones_like(cost)))
    loss = p.value.sum() + p.entropy().sum() + p.expected_path.square().sum()
    (gradient,) = torch.autograd.grad(loss, cost)
    assert gradient.isfinite().all()
    for zero in (gradient, p.expected_path, p.hessian_product(z), p.sample(), p.best_path()):
        assert not zero[padded].any()


def test_cells_outside_the_band_may_be_nan(backend: str) -> None:
    hidden = ~in_band(6, 9, 1)
    cost = potentials(2, 6, 9)
    p, clean = bx.DTW(cost.masked_fill(hidden, math.nan), band=1), bx.DTW(cost, band=1)
    close(p.value, clean.value)
    close(p.expected_path, clean.expected_path)
    assert not p.expected_path[:, hidden].any()
    close(p.entropy(), clean.entropy())


@one_of_each_kind
def test_empty_batch(omega: bx.Regularizer, backend: str) -> None:
    cost = torch.zeros(0, 3, 4, requires_grad=True)
    p = bx.DTW(cost, omega=omega)
    assert p.value.shape == p.entropy().shape == (0,)
    assert p.expected_path.shape == p.hessian_product(cost).shape == p.mode.shape == (0, 3, 4)
    assert p.sample((2,)).shape == (2, 0, 3, 4)
    assert p.topk(2)[1].shape == (0, 2, 3, 4)
    assert p.best_alignment().shape == (0, 6, 2)
    assert p.support_paths()[0].shape == (0, 0, 3, 4)
    p.value.sum().backward()
    assert bx.DTW(torch.zeros(2, 0, 3, 4), lengths=(2, 3), band=1, omega=omega).value.shape == (2, 0)


@one_of_each_kind
def test_strides_batches_and_dtypes(omega: bx.Regularizer, backend: str) -> None:
    cost, z = potentials(3, 4, 2, 5).permute(2, 0, 3, 1), potentials(4).expand(2, 3, 5, 4)
    lengths = torch.tensor([[5, 1, 3], [2, 4, 5]]), torch.tensor([[4, 2], [1, 3], [4, 4]]).T
    p, copy = (
        bx.DTW(cost, lengths=lengths, omega=omega),
        bx.DTW(cost.contiguous(), lengths=(lengths[0], lengths[1].contiguous()), omega=omega),
    )
    assert (p.batch_shape, p.event_shape) == ((2, 3), (5, 4))
    assert torch.equal(p.value, copy.value)
    assert torch.equal(p.expected_path, copy.expected_path)
    assert torch.equal(p.hessian_product(z), copy.hessian_product(z.contiguous()))
    assert torch.equal(p.best_alignment(), copy.best_alignment())
    turned = bx.DTW(cost.mT, lengths=lengths[::-1], omega=omega)
    close(turned.value, p.value)
    if not isinstance(omega, bx.Hard):
        close(turned.expected_path, p.expected_path.mT)
    expanded = bx.DTW(potentials(5).expand(2, 3, 5), omega=omega)
    assert torch.equal(expanded.value, bx.DTW(potentials(5).expand(2, 3, 5).contiguous(), omega=omega).value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, backend: str) -> None:
    cost = potentials(2, 4, 5).to(dtype).requires_grad_()
    for options in ({}, {"open_end": True}):
        half, single = bx.DTW(cost, **options), bx.DTW(cost.detach().float(), **options)
        for got, wanted in (
            (half.value, single.value),
            (half.entropy(), single.entropy()),
            (half.log_prob(half.mode), single.log_prob(single.mode)),
            (half.directional_derivative(cost), single.directional_derivative(cost.float())),
        ):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted)
        for tensor in (half.hessian_product(cost), half.sample(), half.best_path(), half.mode, half.topk(2)[1]):
            assert tensor.dtype == dtype
        torch.testing.assert_close(half.expected_path, single.expected_path.to(dtype))
        (gradient,) = torch.autograd.grad(half.value.sum(), cost)
        torch.testing.assert_close(gradient, single.expected_path.to(dtype))


def scaled(omega: bx.Regularizer, gamma: float) -> bx.Regularizer:
    if isinstance(omega, bx.Hard):
        return omega
    return bx.Negentropy(gamma) if isinstance(omega, bx.Negentropy) else bx.Tsallis(omega.alpha, gamma)


@one_of_each_kind
def test_huge_scales_in_float32(omega: bx.Regularizer, backend: str) -> None:
    cost = (potentials(3, 20, 17).abs() * 1e4).float().requires_grad_()
    p = bx.DTW(cost, omega=scaled(omega, 1e-3))
    with took("lattice_backward", times=int(backend == "native")) as backward:
        (gradient,) = torch.autograd.grad(p.value.sum(), cost)
    assert not any(in_two_numbers(call).any() for call in backward)  # products are used for smaller numbers only
    torch.testing.assert_close(gradient, p.best_path(), rtol=0, atol=1e-3)
    torch.testing.assert_close(p.value, (p.best_path() * cost).sum((1, 2)), rtol=1e-5, atol=0)
    assert p.hessian_product(torch.ones_like(cost)).isfinite().all()
    assert p.entropy().abs().max() < 1e-3


@one_of_each_kind
@pytest.mark.parametrize("huge", [1e8, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_costs_among_normal_ones(dtype: torch.dtype, huge: float, omega: bx.Regularizer, backend: str) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    cost, z = potentials(2, 6, 8).to(dtype), potentials(2, 6, 8, seed=1).to(dtype)
    high = potentials(2, 6, 8, seed=2) > 0.8
    high[:, 0, 0] = high[:, -1, -1] = False
    p, without = (bx.DTW(cost.masked_fill(high, c), omega=omega) for c in (huge, math.inf))
    assert without.value.isfinite().all()
    for got, wanted in (
        (p.value, without.value),
        (p.expected_path, without.expected_path),
        (p.hessian_product(z), without.hessian_product(z)),
    ):
        close(got, wanted, tolerance)
    assert not p.expected_path[high].any()
    cost[:, 3] = huge  # one huge cost is unavoidable
    forced = bx.DTW(cost, omega=omega)
    path = forced.expected_path
    torch.testing.assert_close(forced.value, torch.full((2,), huge, dtype=dtype), rtol=1e-6, atol=0)
    assert ((path >= 0) & (path < 1 + 1e-5)).all()
    assert forced.hessian_product(z).isfinite().all()
    torch.testing.assert_close(path[:, 3].sum(-1), torch.ones(2, dtype=dtype), rtol=0, atol=1e-5)
    assert (path.sum(-1) > 1 - 1e-5).all()
    if huge == 1e8 and dtype == torch.float64:
        moved = cost.clone()
        moved[:, 3] = 100  # far enough apart that a path contains only one
        close(path, bx.DTW(moved, omega=omega).expected_path, 1e-6)


@one_of_each_kind
def test_inputs_are_not_changed(omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem("unequal")
    z, weights = potentials(*cost.shape, seed=1), STEPS.clone()
    before = [t.clone() for t in (cost, *lengths, z, weights)]
    for options in ({}, {"step_weights": weights, "open_begin": True}):
        p = bx.DTW(cost, lengths=lengths, band=1, omega=omega, **options)
        p.value.add_(1)
        p.expected_path.mul_(0)
        p.hessian_product(z).mul_(0)
        p.entropy(), p.sample(), p.topk(2), p.mode, p.support_paths(), p.num_paths, p.best_alignment()
        close(p.value, bx.DTW(cost, lengths=lengths, band=1, omega=omega, **options).value)
    for tensor, copy in zip((cost, *lengths, z, weights), before, strict=True):
        assert torch.equal(tensor.nan_to_num(0), copy.nan_to_num(0))
        assert not tensor.requires_grad


def test_in_place_changes_are_seen_or_have_no_effect(backend: str) -> None:
    cost, lengths = potentials(2, 3, 4), (torch.tensor([3, 2]), torch.tensor([2, 4]))
    p = bx.DTW(cost, lengths=lengths)
    before = p.expected_path
    lengths[0][1] = 3
    assert torch.equal(p.expected_path, before)
    cost.mul_(3)
    close(p.value, bx.DTW(cost.clone(), lengths=(torch.tensor([3, 2]), lengths[1])).value)


def test_a_user_defined_omega(backend: str) -> None:
    class Custom(bx.SquaredL2):
        pass

    cost, lengths = problem("unequal")
    z = potentials(*cost.shape, seed=4)
    custom, shipped = (
        bx.DTW(cost, lengths=lengths, omega=Custom(0.9)),
        bx.DTW(cost, lengths=lengths, omega=bx.SquaredL2(0.9)),
    )
    close(custom.value, shipped.value)
    close(custom.expected_path, shipped.expected_path)
    close(custom.hessian_product(z), shipped.hessian_product(z))
    close(custom.mode, shipped.mode)


@one_of_each_kind
def test_kl_divergence(omega: bx.Regularizer, backend: str) -> None:
    cost, lengths = problem("unequal")
    p = bx.DTW(cost, lengths=lengths, omega=omega)
    r = bx.DTW(0.3 * cost, lengths=lengths)
    got = kl_divergence(p, r)
    assert kl_divergence(p, p).abs().max() < 1e-12
    for b, (n, m) in enumerate(zip(*LENGTHS["unequal"], strict=True)):
        pair_cost = cost[b, :n, :m]
        sp, sr = enumerated(pair_cost, omega), enumerated(0.3 * pair_cost, bx.Negentropy())
        is_possible = sp.probabilities > 0
        ratio = np.log(sp.probabilities[is_possible]) - np.log(sr.probabilities[is_possible])
        close(got[b], (sp.probabilities[is_possible] * ratio).sum())
    with pytest.raises(ValueError, match="paths of the same graph"):
        kl_divergence(p, bx.DTW(cost.nan_to_num(0)))


# --- the kernels against the reference


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def large(size: tuple[int, int]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Costs of three pairs that are the same in both precisions, lengths, cotangents of the value, a direction."""
    cost = potentials(3, *size).float().double()
    if min(size) > 1:
        cost[potentials(3, *size, seed=1) > 2.2] = math.inf
    lengths = torch.randint(1, size[0] + 1, (3,)), torch.randint(1, size[1] + 1, (3,))
    lengths[0][0], lengths[1][0] = size
    for b, (n, m) in enumerate(zip(*lengths, strict=True)):
        cost[b, 0, 0] = cost[b, n - 1, m - 1] = 0
    return cost, lengths, potentials(3, seed=2), potentials(3, *size, seed=3)


def layers_of(cost: Tensor, lengths: tuple[Tensor, Tensor], seed: Tensor, z: Tensor, **options) -> list[Tensor]:
    leaf = cost.clone().requires_grad_()
    p = bx.DTW(leaf, lengths=lengths, **options)
    value = p.value.masked_fill(p.value == math.inf, 0)
    (gradient,) = torch.autograd.grad((value * seed).sum(), leaf, create_graph=True)
    (product,) = torch.autograd.grad((gradient * z).sum(), leaf)
    return [p.value.detach(), gradient.detach(), product, p.best_alignment()]


SIZES = [(1, 1), (1, 70), (70, 1), (63, 65), (64, 64), (65, 200), (130, 67), (200, 300)]  # across the kernels' strips


@needs_kernels
@one_of_each_kind
@pytest.mark.parametrize("band", [None, 5])
@pytest.mark.parametrize("size", SIZES)
def test_kernels_agree_with_the_engine(size: tuple[int, int], band: float | None, omega: bx.Regularizer) -> None:
    cost, lengths, seed, z = large(size)
    times = hessians(omega)
    with bx.use_backend("native"):
        with threads(1):
            # Moves with weights, even of 1, are swept by the loops for any table.
            with took("lattice_backward"), took("lattice_hessian", times):
                wanted = layers_of(cost, lengths, seed, z, band=band, omega=omega, step_weights=(1, 1, 1))
            with took("lattice_backward") as backward, took("lattice_hessian", times):
                single = layers_of(cost.float(), lengths, seed.float(), z.float(), band=band, omega=omega)
            has_two_numbers = omega.kernel is not None and omega.kernel.name in ("negentropy", "l2")
            assert all(in_two_numbers(call).all() == has_two_numbers for call in backward)
        for count in (1, 2):
            for pairs in (slice(0, 3), slice(0, 1)):
                pair_lengths = lengths[0][pairs], lengths[1][pairs]
                with threads(count), took("lattice_backward") as backward, took("lattice_hessian", times):
                    got = layers_of(cost[pairs], pair_lengths, seed[pairs], z[pairs], band=band, omega=omega)
                assert not any(in_two_numbers(call).any() for call in backward)
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a, b[pairs], rtol=1e-9, atol=1e-9)
    close(single[0].double(), wanted[0], 1e-5)
    close(single[1].double(), wanted[1], 1e-5)
    if isinstance(omega, bx.Negentropy):  # the Hessian of a sparse Ω is discontinuous
        scale = wanted[2].abs().max().clamp(min=1)
        close(single[2].double() / scale, wanted[2] / scale, 1e-5)


@pytest.mark.slow
@needs_kernels
@one_of_each_kind
@pytest.mark.parametrize(("size", "band"), [((40, 66), None), ((66, 40), 5)])
def test_backends_agree(size: tuple[int, int], band: float | None, omega: bx.Regularizer) -> None:
    cost, lengths, seed, z = large(size)
    results = []
    for backend in ("reference", "native"):
        times = None if backend == "native" else 0
        with bx.use_backend(backend), took("lattice_forward", times), took("lattice_sample", times):
            torch.manual_seed(0)
            drawn = bx.DTW(cost, lengths=lengths, band=band, omega=omega).sample_alignments((4,))
            with took("lattice_hessian", hessians(omega, times)):
                results.append((drawn, *layers_of(cost, lengths, seed, z, band=band, omega=omega)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@needs_kernels
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_float32_over_a_million_cells(omega: str) -> None:
    x, y = potentials(1, 1024, 2).float(), potentials(1, 1024, 2, seed=1).float()
    cost = (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1)
    with bx.use_backend("native"):
        single, double = bx.DTW(cost, omega=omega), bx.DTW(cost.double(), omega=omega)
        with took("lattice_backward", times=2) as backward:
            paths = single.expected_path, double.expected_path
        assert [bool(in_two_numbers(call)) for call in backward] == [True, False]
        torch.testing.assert_close(paths[0].double(), paths[1], rtol=0, atol=5e-6)
        torch.testing.assert_close(single.value.double(), double.value, rtol=1e-7, atol=0)


# --- bad input


def test_bad_input_is_named(backend: str) -> None:
    cost = torch.zeros(2, 3, 4)
    p = bx.DTW(cost)
    threes = torch.tensor([3, 3])
    for wrong, message in [
        (lambda: bx.DTW(torch.zeros(4)), r"cost must have shape \(\.\.\., N, M\) with N, M >= 1, got \(4,\)"),
        (lambda: bx.DTW(torch.zeros(2, 0, 4)), r"cost must have shape .* got \(2, 0, 4\)"),
        (lambda: bx.DTW(cost + 0j), "cost must hold real numbers, got dtype torch.complex64"),
        (lambda: bx.DTW([[0.0, 1.0], [2.0]]), "cost must be a rectangular array, got entries of different shapes"),
        (lambda: bx.DTW(cost, band=-1), "band must be at least 0, got -1"),
        (lambda: bx.DTW(cost, band=0.1), r"band must be a number of steps, 0 or at least 1, got 0.1"),
        (lambda: bx.DTW(cost, band=math.nan), "band must be at least 0, got nan"),
        (lambda: bx.DTW(cost, omega="softmin"), "omega must be a Regularizer or one of .* got 'softmin'"),
        (lambda: bx.DTW(cost, lengths=threes), r"lengths must be a pair \(lengths_a, lengths_b\), got Tensor"),
        (
            lambda: bx.DTW(cost, lengths=(threes, threes / 1)),
            r"lengths\[1\] must hold integers, got dtype torch.float32",
        ),
        (
            lambda: bx.DTW(cost, lengths=(threes[:1], threes)),
            r"lengths\[0\] must have the batch shape \(2,\), got \(1,\)",
        ),
        (lambda: bx.DTW(cost, lengths=(3, 0)).value, r"lengths\[1\] must be from 1 to 4, got 0 for batch element 0"),
        (
            lambda: bx.DTW(cost, lengths=(torch.tensor([3, 4]), threes)).best_alignment(),
            r"lengths\[0\] must be from 1 to 3, got 4 for batch element 1",
        ),
        (lambda: bx.DTW(cost, lengths=(-1, 2)).expected_path, r"lengths\[0\] must be from 1 to 3, got -1"),
        (lambda: bx.DTW(cost, step_weights=(1, 2)), r"step_weights must hold three numbers .* got shape \(2,\)"),
        (
            lambda: bx.DTW(cost, step_penalties=torch.zeros(3, 3)),
            r"step_penalties must hold three numbers .* shape \(3,\) or \(2, 3\), got shape \(3, 3\)",
        ),
        (lambda: p.hessian_product(torch.zeros(3)), r"z must broadcast to .* \(2, 3, 4\), got \(3,\)"),
        (lambda: p.log_prob(torch.zeros(4)), r"path must have event shape \(3, 4\), got shape \(4,\)"),
        (lambda: p.log_prob(cost), r"path\[0\] is not a path of the graph"),
        (lambda: p.log_prob(torch.ones(3, 4)), r"path.* is not a path of the graph"),
        (
            lambda: bx.DTW(cost, lengths=(3, 3)).log_prob(p.best_path()),
            r"path\[0\] is not a path of the graph",
        ),
        (lambda: p.topk(0), "k must be at least 1, got 0"),
        (lambda: p.support_paths(max_paths=9), "max_paths is 9, but the support holds 25 paths"),
        (lambda: p.alignment_to_path(torch.zeros(5, 3).long()), r"alignment must hold integers of shape .* \(5, 3\)"),
        (lambda: p.alignment_to_path(torch.tensor([[0, 0], [1, 4]])), r"got \(1, 4\) at \(1,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize("options", [{}, {"open_end": True}, {"step_weights": (2, 1, 1)}])
def test_bad_lengths_are_named_by_every_method(options: dict, backend: str) -> None:
    for lengths, side in (((3, 0), 1), ((3, 9), 1), ((0, 4), 0)):
        p = bx.DTW(torch.zeros(2, 3, 4), lengths=lengths, omega="l2", **options)
        for method in every_method(p):
            with pytest.raises(ValueError, match=rf"lengths\[{side}\] must be from 1 to"):
                method()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{}, {"open_end": True}, {"step_weights": (2, 1, 1)}])
def test_bad_costs_are_named_by_every_method(options: dict, bad: float, backend: str) -> None:
    cost = torch.zeros(3, 4, 5)
    cost[1, 2, 3] = bad
    for method in every_method(bx.DTW(cost, omega="l2", **options)):
        with pytest.raises(ValueError, match=rf"cost must be finite or \+inf, got {bad} at cell \(2, 3\)"):
            method()


def every_method(p: bx.DTW) -> list:
    path = torch.zeros(p.event_shape)
    path[0], path[:, -1] = 1, 1
    return [
        lambda: p.value,
        lambda: p.expected_path,
        lambda: p.directional_derivative(path),
        lambda: p.hessian_product(path),
        p.entropy,
        p.best_path,
        p.best_alignment,
        lambda: p.mode,
        lambda: p.topk(2),
        lambda: p.num_paths,
        p.support_paths,
        p.sample,
        p.sample_alignments,
        lambda: p.log_prob(path),
        lambda: kl_divergence(p, p),
    ]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_costs_are_named_by_cell(dtype: torch.dtype, bad: float, backend: str) -> None:
    cost = torch.zeros(3, 4, 5, dtype=dtype)
    cost[1, 2, 3] = bad
    p = bx.DTW(cost)
    message = rf"cost must be finite or \+inf, got {bad} at cell \(2, 3\) of batch element 1"
    for layer in (lambda: p.value, lambda: p.expected_path, p.best_alignment, p.sample_alignments):
        with pytest.raises(ValueError, match=message):
            layer()
    assert bx.DTW(cost, lengths=(2, 5)).value.isfinite().all()


@pytest.mark.parametrize("band", [2.0**62, 2.0**63 - 1, sys.maxsize, 1e19, 1e30, 1e300])
@pytest.mark.parametrize("omega", ["hard", "negentropy"])
def test_a_huge_band_equals_no_band(band: float, omega: str, backend: str) -> None:
    series = [torch.arange(5.0), torch.arange(7.0), torch.zeros(1)]
    cost = torch.rand(2, 4, 6)
    close(bx.DTW(cost, band=band, omega=omega).value, bx.DTW(cost, omega=omega).value)
    close(bx.dtw_cdist(series, band=band, omega=omega), bx.dtw_cdist(series, omega=omega))
    for got, wanted in zip(bx.dtw_neighbors(series, k=2, band=band), bx.dtw_neighbors(series, k=2), strict=True):
        assert torch.equal(got, wanted)


def test_probability_is_conserved_over_100_000_steps() -> None:
    """The probabilities of each step sum to 1. A quotient rounded down at every step would lose 8e-9 per step."""
    cost = torch.randn(1, 1, 100_000, requires_grad=True)
    (path,) = torch.autograd.grad(bx.DTW(cost).value.sum(), cost)
    close(path, torch.ones_like(path), 1e-6)


@needs_kernels
@pytest.mark.parametrize(
    "options", [{"step_weights": (2, 1, 1)}, {"step_penalties": (0, 1, 1)}, {"open_begin": True, "open_end": True}]
)
def test_custom_moves_and_open_ends_need_one_forward_sweep(options: dict) -> None:
    cost = potentials(2, 4, 5, requires_grad=True)
    p, z = bx.DTW(cost, omega="l2", **options), potentials(2, 4, 5, seed=1)
    with took("lattice_forward", times=1):
        for _ in range(2):
            p.value.sum().backward()
            _ = p.expected_path, p.directional_derivative(z), p.hessian_product(z), p.sample_alignments()
    with took("lattice_forward", times=1), torch.no_grad():
        cost += z
        _ = p.expected_path, p.sample((2,))
    close(p.expected_path, bx.DTW(cost.detach().clone(), omega="l2", **options).expected_path)


def test_in_place_changes_of_step_weights_are_seen(backend: str) -> None:
    cost, weights = potentials(2, 4, 5), torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    p = bx.DTW(cost, step_weights=weights)
    _ = p.value, p.expected_path
    weights += 1
    fresh = bx.DTW(cost, step_weights=weights.clone())
    close(p.value, fresh.value)
    close(p.expected_path, fresh.expected_path)


@pytest.mark.parametrize("options", [{}, {"open_end": True}, {"step_weights": (2, 1, 1)}])
def test_a_distance_of_zero_is_not_negative_zero(options: dict, backend: str) -> None:
    x = torch.arange(5.0).unsqueeze(-1)
    cost = torch.zeros(2, 3, 4)
    distances = [bx.dtw(x, x, omega="hard", **options), bx.dtw(x.clone().requires_grad_(), x, omega="hard", **options)]
    for p in (bx.DTW(cost, omega="hard", **options), bx.DTW(cost.clone().requires_grad_(), omega="hard", **options)):
        distances += [p.value, p.topk(2)[0]]
    graph = bx.DAG([(0, 1), (1, 2)]).paths(torch.zeros(2), omega="hard", minimize=True)
    distances += [graph.value, graph.topk(1)[0]]
    for value in distances:
        assert not value.signbit().any()
        assert not value.any()


@pytest.mark.parametrize("options", [{}, {"open_end": True}, {"step_penalties": PENALTIES}, {"step_weights": STEPS}])
def test_an_alignment_is_a_path_of_a_lattice(options: dict, backend: str) -> None:
    cost, lengths = problem("unequal")
    p = bx.DTW(cost, lengths=lengths, band=1, omega="l2", **options)
    assert program_name(p) == WARPING.name or options
    assert p.gradient["cost"].equal(p.expected_path) or "step_weights" in options
    assert p.best_walk()[..., :2].equal(p.best_alignment())
