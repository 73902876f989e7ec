"""Lattices against hand-written recursions and their graphs."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import product

import pytest
import torch
from support.checks import close
from support.inside import edge_weights, grid_size, has_sink
from support.kernels import needs_kernels
from support.problems import OMEGAS, for_derivatives, potentials, two_kinds
from support.recursions import RECURSIONS, Recursion, Tensors, segments
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from bellmax import lattice as L

each_recursion = pytest.mark.parametrize("name", list(RECURSIONS))
SIZES = [(5, 4), (4, 6), (1, 1)]
MORE_COLUMNS_THAN_ROWS = "Drop-DTW", "Drop-DTW of runs", "states within a cell"


def sizes(one: Recursion, candidates: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return candidates if one.has_columns else [(rows, 1) for rows, _ in candidates]


def size_with_paths(name: str) -> tuple[int, int]:
    """Rows and columns for which the recursion has at least six paths."""
    return sizes(RECURSIONS[name], [(3, 5) if name in MORE_COLUMNS_THAN_ROWS else (5, 3)])[0]


def floats(tensors: Tensors) -> list[str]:
    return [name for name, t in tensors.items() if t.is_floating_point() and not name.startswith("_")]


def with_grad(tensors: Tensors) -> Tensors:
    wanted = floats(tensors)
    return {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}


def negated(tensors: Tensors) -> Tensors:
    return {name: -t if t.is_floating_point() else t for name, t in tensors.items()}


def reversed_band(n: int, m: int, band: float) -> object:
    reach = math.inf if 1 in (n, m) else max(band, 0.5) * (max(n, m) - 1)
    return lambda i, j: abs(i * (m - 1) - j * (n - 1)) <= reach


def first_and_second(value: Tensor, tensors: Tensors) -> list[Tensor]:
    """Gradients of all scores, and a Hessian product along cos(0), cos(1), …."""
    leaves = [t for t in tensors.values() if t.requires_grad]
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in 2 * leaves]
    first = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    along = [torch.cos(torch.arange(t.numel(), dtype=t.dtype)).reshape(t.shape) for t in leaves]
    slope = sum((g * z).sum() for g, z in zip(first, along, strict=True))
    if not slope.requires_grad:
        return [*first, *(torch.zeros_like(t) for t in leaves)]
    return [*first, *torch.autograd.grad(slope, leaves, materialize_grads=True)]


# --- the recursion


@each_recursion
@for_derivatives
def test_value_and_derivatives_equal_the_recursion(name: str, omega: bx.Regularizer, backend: str) -> None:
    one, compared = RECURSIONS[name], 0
    for rows, columns in sizes(one, SIZES if backend == "native" else SIZES[1:]):
        tensors = with_grad(one.tensors(rows, columns))
        wanted = one.value(tensors, rows, columns, omega)
        p = one.lattice.paths(tensors, grid=(rows, columns), omega=omega)
        assert p.backend == backend
        close(p.value, wanted)
        if wanted.isinf():
            assert not p.expected_path.any()
            continue
        for got, right in zip(first_and_second(p.value, tensors), first_and_second(wanted, tensors), strict=True):
            close(got, right, 1e-8)
        compared += 1
    assert compared >= (2 if backend == "native" else 1)


@each_recursion
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_members_of_a_batch_with_lengths_and_a_band_equal_single_lattices(name: str, omega: str, backend: str) -> None:
    one, chosen = RECURSIONS[name], OMEGAS[omega]
    lengths = sizes(one, [(5, 6), (5, 3), (3, 6), (2, 2), (1, 1)])
    tensors = one.tensors(5, 6)
    batched = {n: t.expand(len(lengths), *t.shape).clone() for n, t in tensors.items()}
    n, m = torch.tensor(lengths).unbind(1)
    for band in (None, 0):
        p = one.lattice.paths(batched, grid=(n, m), band=band, omega=chosen)
        for b, (rows, columns) in enumerate(lengths):
            inside = reversed_band(rows, columns, math.inf if band is None else band)
            close(p.value[b], one.value(tensors, rows, columns, chosen, inside))  # type: ignore[arg-type]


@needs_kernels
@each_recursion
def test_lengths_in_a_band_equal_the_graph_of_the_lattice(name: str, omega: bx.Regularizer) -> None:
    """Kernels against ``lattice.dag``, which has a separate end node even if paths end at one node."""
    one = RECURSIONS[name]
    lengths = sizes(one, [(5, 6), (5, 3), (3, 6), (2, 2), (1, 1)])
    n, m = torch.tensor(lengths).unbind(1)
    tensors = with_grad({name: t.expand(len(lengths), *t.shape) for name, t in one.tensors(5, 6).items()})
    p = one.lattice.paths(tensors, grid=(n, m), band=0, omega=omega)
    with bx.use_backend("reference"):
        graph = one.lattice.dag(*grid_size(p)).paths(edge_weights(p), omega=omega)
        wanted = graph.value - omega.max(torch.zeros(1, dtype=torch.float64)) * ~has_sink(p)
        close(p.value, wanted)
        right = first_and_second(wanted[wanted.isfinite()].sum(), tensors)
    assert wanted.isfinite().any()
    for got, expected in zip(first_and_second(p.value[wanted.isfinite()].sum(), tensors), right, strict=True):
        close(got, expected, 1e-8)


@each_recursion
def test_gradients_of_shared_scores_are_sums_over_the_batch(name: str, backend: str) -> None:
    one = RECURSIONS[name]
    tensors = with_grad(one.tensors(4, 5))
    first = floats(tensors)[0]
    shared = tensors | {first: torch.stack((tensors[first], 2 * tensors[first])).detach().requires_grad_()}
    options = {"omega": "sparsemax", "grid": sizes(one, [(4, 5)])[0]}
    p = one.lattice.paths(shared, **options)
    each = [one.lattice.paths(tensors | {first: shared[first][b]}, **options) for b in range(2)]
    close(p.value, torch.stack([q.value for q in each]))
    for name_of in floats(tensors)[1:]:
        close(p.gradient[name_of], sum(q.gradient[name_of] for q in each))
        z = {name_of: torch.ones_like(tensors[name_of])}
        close(p.hessian_product(z)[name_of], sum(q.hessian_product(z)[name_of] for q in each))


@each_recursion
def test_gradcheck(name: str) -> None:
    """On the default backend; the tests above compare both backends with the recursions."""
    one, omega = RECURSIONS[name], "tsallis1.5"
    tensors, size = with_grad(one.tensors(3, 3)), sizes(one, [(3, 3)])[0]
    wanted = floats(tensors)

    def value(*inputs: Tensor) -> Tensor:
        scores = tensors | dict(zip(wanted, inputs, strict=True))
        return one.lattice.paths(scores, grid=size, omega=OMEGAS[omega]).value

    inputs = tuple(tensors[n] for n in wanted)
    assert value(*inputs).isfinite()
    assert gradcheck(value, inputs)
    assert gradgradcheck(value, inputs)


def test_float32_and_half(backend: str) -> None:
    one = RECURSIONS["affine gaps"]
    tensors = one.tensors(6, 7)
    wanted = one.lattice.paths(tensors).value
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        p = one.lattice.paths({name: t.to(dtype) for name, t in tensors.items()})
        assert p.value.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        assert p.expected_path.dtype == dtype
        close(p.value.double(), wanted, tolerance)


# --- paths


def counted(
    one: Recursion, tensors: Tensors, rows: int, columns: int
) -> list[tuple[float, tuple[tuple[int, ...], ...]]]:
    """Score and nodes of every path, sorted by score."""
    begin = dict(one.starts(tensors, rows, columns))
    ends = dict(one.ends(tensors, rows, columns))

    def back(node: tuple[int, int, int], score: float, walk: tuple[tuple[int, ...], ...]) -> None:
        i, j, k = node
        if not (0 <= i < rows and 0 <= j < columns):
            return
        here = score + float(one.node(tensors, i, j, k))
        if node in begin and float(begin[node]) > -math.inf:
            listed.append((here + float(begin[node]), (node, *walk)))
        for source, g in one.into(tensors, i, j, k):
            if min(source) >= 0 and float(g) > -math.inf:
                back(source, here + float(g), (node, *walk))

    listed: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
    for node, score in ends.items():
        back(node, float(score), ())
    return sorted(listed, reverse=True)


@each_recursion
def test_paths_equal_enumeration(name: str, backend: str) -> None:
    one, k = RECURSIONS[name], 6
    rows, columns = size_with_paths(name)
    tensors = one.tensors(rows, columns)
    wanted = counted(one, tensors, rows, columns)
    p = one.lattice.paths(tensors, grid=(rows, columns))
    assert p.num_paths == len(wanted) >= k
    scores, paths = p.topk(k)
    close(scores, [score for score, _ in wanted[:k]])
    assert paths.shape == (k, *p.event_shape)
    nodes = [tuple(node[:3]) for node in p.best_walk().tolist() if node[0] >= 0]
    assert nodes in [list(walk) for score, walk in wanted if score > wanted[0][0] - 1e-9]
    total = math.log(math.fsum(math.exp(score) for score, _ in wanted))
    close(p.value, total)
    probabilities = [math.exp(score - total) for score, _ in wanted]
    close(p.entropy(), -sum(q * math.log(q) for q in probabilities))
    events, weights = p.support_paths(max_paths=len(wanted))
    close(weights, probabilities)
    close((events.flatten(1) * weights.unsqueeze(1)).sum(0).reshape(p.event_shape), p.expected_path)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "native") for name in RECURSIONS), ("affine gaps", "reference"), ("CTC", "reference")],
    indirect=["backend"],
)
@pytest.mark.parametrize("omega", ["negentropy", "sparsemax"])
def test_walks_are_sampled_with_their_probabilities(name: str, omega: str, backend: str) -> None:
    one = RECURSIONS[name]
    rows, columns = size_with_paths(name)
    p = one.lattice.paths(one.tensors(rows, columns), grid=(rows, columns), omega=omega)
    assert p.num_paths >= 6
    torch.manual_seed(0)
    draws = 1500
    walks = p.sample_walks((draws,))
    assert walks.shape == (draws, (sum(grid_size(p)) - 1) * one.lattice.states, 4)
    distinct, count = walks.unique(dim=0, return_counts=True)
    probabilities = p.log_prob(distinct).exp()
    assert probabilities.sum() <= 1 + 1e-9
    assert ((count / draws - probabilities).abs() < 0.06).all()
    torch.manual_seed(0)
    close(p.sample((draws,)).mean(0), p.expected_path, 0.08 * max(1.0, float(p.expected_path.max())))


@pytest.mark.parametrize("name", ["monotone", "Drop-DTW of runs"])
def test_a_lattice_without_paths(name: str, backend: str) -> None:
    one = RECURSIONS[name]
    rows, columns = size_with_paths(name)[::-1]
    p = one.lattice.paths(one.tensors(rows, columns), grid=(rows, columns))
    assert p.num_paths == 0
    assert p.value == -math.inf
    assert (p.sample_walks((3,)) == -1).all()
    assert not p.expected_path.any()


def test_dag_has_the_same_value_and_paths() -> None:
    one = RECURSIONS["affine gaps"]
    dag = one.lattice.dag(4, 5)
    assert bx.DAG(dag.edges).num_nodes == dag.num_nodes
    p = one.lattice.paths(one.tensors(4, 5))
    assert p.num_paths == dag.paths(edge_weights(p)).num_paths == 35  # binomial(7, 3)
    close(dag.paths(edge_weights(p)).value, p.value)


def test_kl_divergence_and_entropy_of_any_omega(backend: str) -> None:
    one = RECURSIONS["Smith-Waterman"]
    t = one.tensors(3, 3)
    p, r = one.lattice.paths(t, omega="entmax"), one.lattice.paths(t | {"open": t["open"] - 1})
    _, probabilities = p.support_paths()
    close(p.entropy(), -(probabilities * probabilities.log()).sum())
    assert torch.distributions.kl_divergence(p, r) > 0
    close(torch.distributions.kl_divergence(p, p), 0.0)
    with pytest.raises(ValueError, match="same graph"):
        torch.distributions.kl_divergence(p, RECURSIONS["DTW"].lattice.paths({"cost": t["match"]}))


# --- as a layer


def test_losses_take_paths_of_the_first_score(backend: str) -> None:
    p = RECURSIONS["monotone"].lattice.paths(RECURSIONS["monotone"].tensors(5, 3), omega="sparsemax")
    best, third = p.topk(3)[1][[0, 2]]
    for loss in (bx.losses.surrogate, bx.losses.structured_perceptron, bx.losses.structured_hinge, bx.losses.path_nll):
        assert 0 <= loss(p, best) < loss(p, third)
    wrong = torch.zeros_like(best)
    wrong[0, 2] = 1
    with pytest.raises(ValueError, match="target allows no path of finite score"):
        bx.losses.path_nll(p, wrong)


def test_batch_shapes_indexing_copies(backend: str) -> None:
    one = RECURSIONS["CTC"]
    tensors = one.tensors(6, 4)
    batched = tensors | {"scores": torch.stack([tensors["scores"] + s for s in range(6)]).reshape(2, 3, 6, 4)}
    p = one.lattice.paths(batched, grid=(torch.tensor([6, 5, 4]), 4))
    assert p.batch_shape == (2, 3)
    for b, c in product(range(2), range(3)):
        close(p[b, c].value, p.value[b, c])
    close(p.expand((4, 2, 3)).value, p.value.expand(4, 2, 3))
    close(deepcopy(p).value, p.value)
    close(pickle.loads(pickle.dumps(p)).value, p.value)
    close(p.to(torch.float32).value.double(), p.value, 1e-5)


def test_gamma_may_be_a_tensor(backend: str) -> None:
    one = RECURSIONS["transducer"]
    tensors = one.tensors(4, 3)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    close(one.lattice.paths(tensors, gamma=gamma).value, one.lattice.paths(tensors, gamma=0.7).value)
    assert gradcheck(lambda g: one.lattice.paths(tensors, gamma=g).value, (gamma,))


def test_vmap_and_functional_gradients(backend: str) -> None:
    one = RECURSIONS["affine gaps"]
    t = one.tensors(4, 5)
    match = torch.stack((t["match"], t["match"].flip(0)))
    wanted = one.lattice.paths(t | {"match": match}).value
    close(torch.vmap(lambda s: one.lattice.paths(t | {"match": s}).value)(match), wanted)
    slopes = torch.func.grad(lambda s: one.lattice.paths(t | {"match": s}).value.sum())(match)
    close(slopes, one.lattice.paths(t | {"match": match}).expected_path)


# --- negated scores, invalid input, edge cases


# Lattices without numbers in their declaration, which would have to change their sign.
WITHOUT_NUMBERS = [name for name, one in RECURSIONS.items() if "_1" not in one.lattice.scores]


@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
@for_derivatives
def test_minimised_costs_equal_maximised_negated_scores(name: str, omega: bx.Regularizer, backend: str) -> None:
    one = RECURSIONS[name]
    assert len(WITHOUT_NUMBERS) >= 17
    (rows, columns) = sizes(one, [(4, 6)])[0]
    costs = with_grad(negated(one.tensors(rows, columns)))
    scores = negated(costs)
    size = {"grid": (rows, columns), "omega": omega}
    p, q = one.lattice.paths(costs, minimize=True, **size), one.lattice.paths(scores, **size)
    assert p.backend == backend
    close(p.value, -q.value)
    for got, right in zip(first_and_second(p.value, costs), first_and_second(-q.value, costs), strict=True):
        close(got, right, 1e-8)
    z = {n: torch.cos(torch.arange(t.numel(), dtype=t.dtype)).reshape(t.shape) for n, t in p.scores.items()}
    for n, product_of in p.hessian_product(z).items():
        close(product_of, -q.hessian_product(z)[n], 1e-8)
    (got, paths), (right, others) = p.topk(3), q.topk(3)
    close(got, -right)
    assert paths.equal(others)
    assert p.best_walk().equal(q.best_walk())


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_bad_costs_are_reported_with_their_sign(bad: float, backend: str) -> None:
    for moves in ([bx.Move(1, 1), bx.Move(0, 1)], [bx.Move(1, 1), bx.Move(1, 0)]):
        costs = torch.zeros(2, 3, 3)
        costs[1, 1, 2] = bad
        p = bx.Lattice(moves, node=L.cell("cost")).paths({"cost": costs}, minimize=True)
        message = rf"cost must be finite or \+inf, got {bad} at cell \(1, 2\) of batch element 1"
        with pytest.raises(ValueError, match=message):
            p.value  # noqa: B018


def test_costs_are_minimised(backend: str) -> None:
    edit = bx.Lattice(
        [bx.Move(1, 1, score=L.pair("change", "a", "b", -1, -1)), bx.Move(1, 0, score=1.0), bx.Move(0, 1, score=1.0)]
    )
    a, b = (torch.tensor([ord(c) for c in word]) - 97 for word in ("sunday", "saturday"))
    p = edit.paths({"change": 1.0 - torch.eye(26), "a": a, "b": b}, omega="hard", minimize=True)
    assert p.value == 3
    assert p.topk(2)[0].tolist() == [3, 4]
    soft = edit.paths({"change": 1.0 - torch.eye(26), "a": a, "b": b}, minimize=True)
    assert soft.value < 3


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([bx.Move(0, 0, 1, 1)], "move 0, .0, 0. from state 1 to 1, stays in its cell"),
        ([bx.Move(1, 0), bx.Move(0, 0, 1, 0)], "move 1, .0, 0. from state 1 to 0, stays in its cell"),
        ([bx.Move(-1, 0)], "move 0, .-1, 0. from state 0 to 0, must not go back"),
        ([bx.Move(1, 0, 0, 2)], "move 0, .1, 0. from state 0 to 2, must be between states from 0 to 1"),
        ([bx.Move(1, 0, 0, 0)], "end must be reached by moves, but no moves lead from the start to state 1"),
    ],
)
def test_invalid_declarations(moves: list[bx.Move], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.Lattice(moves, states=2, end=L.corner(1))


def test_tensors_that_do_not_fit() -> None:
    affine = RECURSIONS["affine gaps"].lattice
    t = RECURSIONS["affine gaps"].tensors(4, 5)
    with pytest.raises(ValueError, match="tensors must have the keys extend, match, open; 'open' is missing"):
        affine.paths({"match": t["match"], "extend": 0.0})
    with pytest.raises(ValueError, match="got 'opening'"):
        affine.paths(t | {"opening": 0.0})
    with pytest.raises(ValueError, match="match must have at least 2 dimensions, got shape"):
        affine.paths(t | {"match": t["match"][0]})
    with pytest.raises(ValueError, match="batch dimensions"):
        affine.paths(t | {"match": t["match"].expand(2, 3, 4), "open": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"grid\[1\] must be from 1 to 5, got 6"):
        _ = affine.paths(t, grid=(4, 6)).value
    with pytest.raises(ValueError, match=r"match must be finite or -inf, got nan at cell \(2, 3\)"):
        _ = affine.paths(
            t
            | {
                "match": t["match"]
                .clone()
                .index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan, dtype=torch.float64))
            }
        ).value
    with pytest.raises(ValueError, match="y must hold integers"):
        RECURSIONS["CTC"].lattice.paths(RECURSIONS["CTC"].tensors(4, 3) | {"y": torch.zeros(2)})
    with pytest.raises(ValueError, match="skip must be bool"):
        RECURSIONS["CTC"].lattice.paths(RECURSIONS["CTC"].tensors(4, 3) | {"skip": torch.zeros(3)})
    with pytest.raises(TypeError, match="use gamma="):
        affine.paths(t, temperature=1.0)


def test_padding_may_hold_nan(backend: str) -> None:
    one = RECURSIONS["affine gaps"]
    t = one.tensors(5, 6)
    padded = t["match"].clone()
    padded[2:] = math.nan
    p = one.lattice.paths(t | {"match": padded.requires_grad_()}, grid=(3, 6))
    wanted = one.lattice.paths(t | {"match": t["match"][:2]})
    close(p.value, wanted.value)
    (gradient,) = torch.autograd.grad(p.value, padded)
    close(gradient[:2], wanted.expected_path)
    assert not gradient[2:].any()


def test_lattices_without_a_path(backend: str) -> None:
    lattice = bx.Lattice([bx.Move(1, 1)], node=L.cell("scores"), start=L.corner(0), end=L.corner(0))
    scores = torch.zeros(2, 3, 4, requires_grad=True)
    p = lattice.paths({"scores": scores}, grid=(torch.tensor([3, 2]), torch.tensor([3, 3])))
    assert p.value.tolist() == [0.0, -math.inf]
    (gradient,) = torch.autograd.grad(p.value[0], scores)
    assert gradient.sum() == 3
    assert not gradient[1].any()
    assert (p.sample_walks()[1] == -1).all()
    assert p.num_paths.tolist() == [1, 0]


def test_paths_of_a_batch_whose_every_score_is_batched(backend: str) -> None:
    one = RECURSIONS["transducer"]
    tensors = {name: torch.stack((t, t.flip(0))) for name, t in one.tensors(4, 3).items()}
    p = one.lattice.paths(tensors)
    assert p.sample((3,)).shape == (3, 2, *p.event_shape)
    scores, paths = p.topk(4)
    for b in range(2):
        alone = one.lattice.paths({name: t[b] for name, t in tensors.items()}).topk(4)
        close(scores[b], alone[0])
        close(paths[b], alone[1])


def test_a_direction_is_not_read_at_missing_scores(backend: str) -> None:
    lattice = RECURSIONS["monotone"].lattice
    for dtype in (torch.float32, torch.float64):
        scores = torch.zeros(3, 2, dtype=dtype)
        scores[1, 0] = -math.inf
        assert not lattice.paths({"scores": scores}).hessian_product(scores).any()


def test_an_empty_batch_has_every_verb(backend: str) -> None:
    p = RECURSIONS["CTC"].lattice.paths(RECURSIONS["CTC"].tensors(4, 3) | {"scores": torch.zeros(0, 4, 4).double()})
    assert p.value.shape == p.entropy().shape == p.num_paths.shape == (0,)
    assert p.topk(2)[0].shape == (0, 2)
    assert p.sample_walks((2,)).shape[:2] == (2, 0)


def test_invalid_classes_offsets_and_walks() -> None:
    with pytest.raises(ValueError, match="the class of x must be at least 0, got -1"):
        L.at_class("x", -1)
    with pytest.raises(ValueError, match="at least one state"):
        L.corner({})
    lattice = bx.Lattice([bx.Move(1, 0)], node=L.at_class("x", 5))
    with pytest.raises(ValueError, match=r"x must have more than 5 classes, got shape \(3, 2\)"):
        lattice.paths({"x": torch.zeros(3, 2)})
    p = RECURSIONS["monotone"].lattice.paths(RECURSIONS["monotone"].tensors(3, 2))
    walk = p.best_walk()
    walk[1, 1] = 3
    with pytest.raises(ValueError, match=r"path\[1\] must be a node of the grid"):
        p.log_prob(walk)
    local = bx.SequenceAlignment(torch.zeros(3, 3), mode="local", gap_open=-1.0)
    assert not local.support.check(torch.zeros(3, 3))


@needs_kernels
def test_negative_views_are_read_correctly() -> None:
    scores = torch.ones(5, 4)
    close(bx.MonotonicAlignment(torch._neg_view(-scores)).value, bx.MonotonicAlignment(scores).value)


@needs_kernels
@two_kinds
@pytest.mark.parametrize("size", [3, 9])
def test_an_unreachable_node_that_is_also_forbidden(omega: bx.Regularizer, size: int) -> None:
    # Only the corner of row 0 is reachable, and the only move into the last column is forbidden.
    scores = torch.zeros(size, size)
    scores[:, -1] = -math.inf
    lattice = bx.Lattice([bx.Move(1, 1, score=L.cell("a")), bx.Move(1, 0, score=L.cell("a"))], end=L.along_row(0))
    diagonal = bx.Lattice([bx.Move(1, 1, score=L.cell("a")), bx.Move(0, 1, score=L.cell("a"))], end=L.along_column(0))
    for table, table_scores in ((lattice, scores), (diagonal, scores.mT.contiguous())):
        results = {}
        for backend in ("reference", "native"):
            with bx.use_backend(backend):
                p = table.paths({"a": table_scores}, omega=omega)
                results[backend] = p.value, p.gradient["a"], p.hessian_product(torch.ones(size, size))
        for by_kernels, wanted in zip(results["native"], results["reference"], strict=True):
            close(by_kernels, wanted, 1e-5)


def test_a_table_too_large_for_kernels_compiles() -> None:
    states = 9
    lattice = bx.Lattice(
        [bx.Move(1, 1, a, (a + 1) % states, score=L.cell("a")) for a in range(states)], states=states, end=L.corner(2)
    )
    scores = potentials(3, 3, requires_grad=True)
    compiled = torch.compile(lambda s: lattice.paths({"a": s}).value, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(scores), scores)
    close(gradient, lattice.paths({"a": scores}).gradient["a"])


def test_the_grid_of_a_tensor_that_is_read_at_several_offsets() -> None:
    joint, y = potentials(3, 4, 5), torch.tensor([1, 2, 1])
    usual = bx.Lattice(
        [bx.Move(1, 0, score=L.cell_class("s", 0, -1)), bx.Move(0, 1, score=L.cell_label("s", "y", 0, -1))]
    )
    with pytest.raises(
        ValueError, match=r"pass grid=\(rows, columns\): a tensor is read with several offsets, so 3 × 4 to 4"
    ):
        usual.paths({"s": joint, "y": y})
    p = usual.paths({"s": joint, "y": y}, grid=(4, 4))
    close(
        p.value, bx.Transducer(joint[..., 0], joint[:, :3].gather(-1, y[None, :, None].expand(3, 3, 1))[..., 0]).value
    )


def test_counts_of_paths() -> None:
    """Lattices with three moves contain an alignment more than once; with affine gaps they contain it once."""
    for name, size, count in (("Needleman-Wunsch", 4, 63), ("affine gaps", 4, 20), ("Smith-Waterman", 3, 19)):
        one = RECURSIONS[name]
        assert one.lattice.paths(one.tensors(size, size)).num_paths == count


@two_kinds
def test_flat_and_factored_segments_agree_under_negentropy_only(omega: bx.Regularizer) -> None:
    flat, factored = segments(flat=True), segments(flat=False)
    tensors = factored.tensors(6, 1)
    values = [one.lattice.paths(tensors, omega=omega).value for one in (flat, factored)]
    close(values[0], flat.value(tensors, 6, 1, omega))
    assert torch.isclose(*values) == isinstance(omega, bx.Negentropy)


@pytest.mark.parametrize("name", ["dtw", "open begin", "local", "semiglobal"])
def test_backends_break_ties_of_several_starts_and_ends_alike(name: str) -> None:
    programs: dict[str, Callable[[Tensor], bx.PathDistribution]] = {
        "dtw": lambda x: bx.DTW(x, open_begin=True, open_end=True, omega="hard"),
        "open begin": lambda x: bx.DTW(x, open_begin=True, omega="hard"),
        "local": lambda x: bx.SequenceAlignment(x, gap_open=-1.0, mode="local", omega="hard"),
        "semiglobal": lambda x: bx.SequenceAlignment(x, gap_open=-1.0, gap_extend=0.0, mode="semiglobal", omega="hard"),
    }
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        rows, columns = torch.randint(1, 5, (2,), generator=generator).tolist()
        scores = torch.randint(-1, 2, (8, rows, columns), generator=generator).double()
        best = programs[name](scores).best_path()
        with bx.use_backend("reference"):
            assert torch.equal(best, programs[name](scores).best_path())


def test_in_place_changes_of_masks_have_no_effect(backend: str) -> None:
    scores, mask = potentials(3, 3).requires_grad_(), torch.ones(3, dtype=torch.bool)
    moves = [bx.Move(1, 0, score=L.cell("s"), where=L.row("_m")), bx.Move(1, 1, score=L.cell("s"))]
    value = bx.Lattice([*moves, bx.Move(0, 1)]).paths({"s": scores, "_m": mask}).value
    (before,) = torch.autograd.grad(value, scores, retain_graph=True)
    mask.fill_(False)
    assert torch.equal(torch.autograd.grad(value, scores)[0], before)


def test_a_missing_offset_changes_the_grid() -> None:
    moves = [bx.Move(1, 0, score=-1.0), bx.Move(0, 1, score=-1.0)]
    scores = {"score": torch.zeros(2, 4, 5)}
    forgotten = bx.Lattice([bx.Move(1, 1, score=L.cell("score")), *moves]).paths(scores)
    shifted = bx.Lattice([bx.Move(1, 1, score=L.cell("score", -1, -1)), *moves]).paths(scores)
    shapes = "LatticePaths(batch_shape=(2,), event_shape=(4, 5), grid="
    assert repr(forgotten) == f"{shapes}4 rows × 5 columns, omega=Negentropy(gamma=1.0))"
    assert repr(shifted).startswith(f"{shapes}5 rows × 6 columns")


# --- sides that no tensor has

WEIGHTS = (3, 1, 4, 2)
KNAPSACK = bx.Lattice(
    [bx.Move(1, 0), *(bx.Move(1, w, score=L.row("worth", -1), where=L.row(f"weighs {w}", -1)) for w in WEIGHTS)],
    end=L.along_row(),
)


def knapsack(worth: Tensor) -> Tensors:
    """A knapsack: rows are items, columns are weights from 0 to the capacity, and no tensor has the columns."""
    return {"worth": worth, **{f"weighs {w}": torch.tensor([w == weight for weight in WEIGHTS]) for w in WEIGHTS}}


def choices(capacity: int) -> Tensor:
    """Every set of items that fits, (sets, items)."""
    sets = torch.tensor(list(product((0, 1), repeat=len(WEIGHTS))))
    return sets[sets @ torch.tensor(WEIGHTS) <= capacity].double()


@pytest.mark.parametrize("capacity", [1, 6, 10])
def test_lengths_give_the_size_of_a_side_that_no_tensor_has(capacity: int, backend: str) -> None:
    worth = potentials(len(WEIGHTS), seed=capacity)
    p = KNAPSACK.paths(knapsack(worth), grid=(5, capacity + 1))
    sets = choices(capacity)
    probabilities = (sets @ worth).softmax(0)
    mean = probabilities @ sets
    close(p.value, (sets @ worth).logsumexp(0))
    close(p.expected_path, mean)
    z = potentials(len(WEIGHTS), seed=9)
    close(p.hessian_product(z), (sets.T * probabilities) @ (sets @ z) - mean * (mean @ z))
    close(p.topk(2)[0], (sets @ worth).topk(2).values)
    assert p.num_paths == len(sets)
    walks = p.sample_walks((20,))
    counts = (walks[..., 1:5, 3] > 0).double()
    close(p.log_prob(walks), probabilities[(counts.unsqueeze(1) == sets).all(-1).int().argmax(1)].log())
    close(sum(p.support_paths()[1]), 1.0)


def test_a_side_that_no_tensor_has_is_as_long_as_the_longest_member(backend: str) -> None:
    worth, capacity = potentials(3, len(WEIGHTS)), torch.tensor([6, 0, 9])
    p = KNAPSACK.paths(knapsack(worth), grid=(5, capacity + 1), omega="hard")
    close(p.value, torch.stack([(choices(int(c)) @ w).max() for c, w in zip(capacity, worth, strict=True)]))


def test_a_side_that_no_tensor_has_under_vmap_and_compile(backend: str) -> None:
    worth, masks = potentials(3, len(WEIGHTS)), knapsack(torch.empty(0))
    value = lambda x, capacity=7: KNAPSACK.paths(masks | {"worth": x}, grid=(5, capacity)).value  # noqa: E731
    close(torch.func.vmap(value)(worth), value(worth))
    close(torch.compile(value, backend="aot_eager", fullgraph=True)(worth), value(worth))
    with pytest.raises(ValueError, match=r"grid\[1\] must be a Python number: no tensor has the number of columns"):
        torch.func.vmap(value)(worth, torch.tensor([3, 4, 5]))


def test_a_lattice_without_scores_counts_paths() -> None:
    p = bx.Lattice([bx.Move(1, 0), bx.Move(0, 1)]).paths({}, grid=(3, 4))
    assert p.num_paths == 10
    torch.testing.assert_close(p.value.exp(), torch.tensor(10.0))
    assert bx.Lattice([bx.Move(1, 0)]).paths({}, grid=(3, 1)).decode().shape == (3, 4)
