"""The program whose edge weights are sums of entries: native kernels against the reference backend."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.inside import BACKENDS, PROGRAMS, Solver, loading
from support.kernels import needs_kernels, took
from support.linear import SHAPES, LinearProgram, positive_entries, random_linear, random_scores
from support.problems import OMEGAS
from torch import Tensor

import bellmax as bx

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
BATCHES = pytest.mark.parametrize("batch", [1, 3, 8, 17])
Case = tuple[LinearProgram, tuple[Tensor, ...], np.random.Generator]


def cases(batch: int, dtype: torch.dtype, seed: int = 0, count: int = 8) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    for n in range(count):
        problem = random_linear(rng, shared=n % 2 == 1, ones=n % 4 < 2, extra_root=n % 3 == 0)
        absent = [e for e in positive_entries(problem) if rng.random() < 0.3] if n % 4 == 3 else []
        yield problem, random_scores(rng, batch, dtype, absent), rng


def sweeps(problem: LinearProgram) -> list:
    return [BACKENDS[name].sweeps(problem.name) for name in ("native", "reference")]


def assert_equal(own: object, wanted: object, dtype: torch.dtype, times: float = 1) -> None:
    tolerance = times * (1e-5 if dtype == torch.float32 else 1e-10)
    torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=list(OMEGAS))
def unit_omega(request: pytest.FixtureRequest) -> bx.Regularizer:
    omega = OMEGAS[request.param]
    return type(omega)(omega.alpha) if type(omega) is bx.Tsallis else type(omega)()


@needs_kernels
@DTYPES
@BATCHES
def test_value_gradient_and_hessian(unit_omega: bx.Regularizer, batch: int, dtype: torch.dtype) -> None:
    for problem, theta, rng in cases(batch, dtype):
        results = []
        seed = torch.tensor(rng.normal(size=batch), dtype=dtype)
        z = [torch.tensor(rng.normal(size=score.shape), dtype=dtype) for score in theta]
        for backend in sweeps(problem):
            value, tape = backend.forward(theta, problem.index, unit_omega)
            gradients = backend.backward(theta, tape, seed, problem.index, unit_omega)
            products = backend.hessian(theta, tape, seed, z, problem.index, unit_omega)
            results.append((value, list(gradients), list(products)))
            assert [g.shape for g in gradients] == [p.shape for p in products] == [s.shape for s in theta]
        assert_equal(results[0][0], results[1][0], dtype, 2)
        assert_equal(results[0][1], results[1][1], dtype, 10)
        assert_equal(results[0][2], results[1][2], dtype, 100)


@needs_kernels
@DTYPES
@BATCHES
def test_nodes_and_samples(unit_omega: bx.Regularizer, batch: int, dtype: torch.dtype) -> None:
    for problem, theta, rng in cases(batch, dtype, seed=1):
        uniforms = torch.tensor(rng.random((batch, 9, problem.most_edges)))
        results = []
        for backend in sweeps(problem):
            tape = backend.forward(theta, problem.index, unit_omega)[1]
            paths = backend.sample(theta, tape, uniforms, problem.index, unit_omega)
            results.append((paths, backend.node_values(theta, problem.index, unit_omega)))
        assert torch.equal(results[0][0], results[1][0])
        assert_equal(results[0][1], results[1][1], dtype, 2)


@needs_kernels
@DTYPES
@BATCHES
def test_best_derivations_and_max_marginals(batch: int, dtype: torch.dtype) -> None:
    omega = bx.Hard()
    for problem, theta, _ in cases(batch, dtype, seed=2, count=12):
        native, reference = sweeps(problem)
        scores, counts = native.topk(theta, 6, problem.index, omega)
        assert_equal(scores, reference.topk(theta, 6, problem.index, omega)[0], dtype, 2)
        best = [backend.max_marginals(theta, problem.index, omega) for backend in (native, reference)]
        assert_equal(*best, dtype, 2)
        weights = PROGRAMS[problem.name].weights(theta, problem.index)
        for row, rank in np.ndindex(batch, 6):
            count, score = counts[row, rank], scores[row, rank]
            if score == -math.inf:
                assert not count.any()
                continue
            assert_equal((count * weights[row].masked_fill(count == 0, 0)).sum(), score, dtype, 10)
            assert (problem.graph.derivations == count.double().numpy()).all(1).any()


@needs_kernels
@pytest.mark.parametrize("batch", [1, 9])
def test_ties_are_broken_alike(batch: int) -> None:
    """Sums in another order, or of rounded products, would choose different edges."""
    omega = bx.Hard()
    for problem, theta, _ in cases(batch, torch.float64, seed=3, count=24):
        rounded = [(3 * score).round() / 3 for score in theta]
        native, _ = sweeps(problem)
        value, tape = native.forward(rounded, problem.index, omega)
        uniforms = torch.full((batch, 1, problem.most_edges), 0.5, dtype=torch.float64)
        drawn = native.sample(rounded, tape, uniforms, problem.index, omega)[:, 0]
        scores, counts = native.topk(rounded, 1, problem.index, omega)
        assert_equal(scores[:, 0], value, torch.float64)
        assert torch.equal(counts[:, 0], drawn)
        gradients = native.backward(rounded, tape, torch.ones_like(value), problem.index, omega)
        assert_equal(list(gradients), PROGRAMS[problem.name].onto_scores(drawn, rounded, problem.index), torch.float64)


@needs_kernels
@DTYPES
def test_weights_are_not_stored_by_edge(dtype: torch.dtype) -> None:
    problem, theta, _ = next(cases(3, dtype, seed=4))
    with took("dag_forward") as calls:
        BACKENDS["native"].sweeps(problem.name).forward(theta, problem.index, bx.Negentropy())
    assert calls[0].args[0].shape == (3, sum(map(math.prod, SHAPES)))


def solver(problem: LinearProgram, scores: tuple[Tensor, ...], omega: bx.Regularizer, backend: str) -> Solver:
    program = type(PROGRAMS[problem.name])(("a", "b", "_c"), problem.has_extra_root, lambda: problem.most_edges)
    dims = [len(shape) for shape in SHAPES]
    return Solver(program, scores, dims, problem.index, torch.Size([4]), omega, backend)


@pytest.mark.parametrize("omega", ["negentropy", "tsallis1.5"], indirect=True)
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    for problem, theta, _ in cases(4, torch.float64, seed=5, count=3):
        a, b, c = (score.requires_grad_() for score in theta)
        inputs = a, b.detach()[0].requires_grad_(), c  # without a batch dimension: shared

        def value(*scores: Tensor, of: LinearProgram = problem) -> Tensor:
            return solver(of, scores, omega, backend).value()

        assert torch.autograd.gradcheck(value, inputs)
        assert torch.autograd.gradgradcheck(value, inputs)


def test_invalid_scores_are_named(backend: str) -> None:
    for problem, theta, _ in cases(4, torch.float64, seed=6, count=4):
        used = np.flatnonzero(problem.onto_edges[:, : SHAPES[0][0]].any(0))
        for sweep in ("forward", "topk", "max_marginals", "node_values"):
            for bad in (math.nan, math.inf):
                scores = (theta[0].clone(), *theta[1:])
                scores[0][2, used[0]] = bad
                run = solver(problem, scores, bx.Hard(), backend)
                with pytest.raises(ValueError, match=rf"^a must be finite.*\({used[0]},\) of batch element 2"):
                    run.topk(2) if sweep == "topk" else getattr(run, sweep)()


def test_unused_entries_may_hold_any_number(backend: str) -> None:
    for problem, theta, _ in cases(4, torch.float64, seed=7, count=6):
        scores = theta[0].clone(), *theta[1:]
        scores[0][:, ~torch.tensor(problem.onto_edges[:, : SHAPES[0][0]].any(0))] = math.nan
        results = []
        for inputs in (scores, theta):
            run = solver(problem, inputs, bx.Hard(), backend)
            results.append((run.value(), run.topk(3)[0], run.max_marginals()))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("coefficient", [1.0, -1.0])
def test_sums_that_overflow_raise(coefficient: float, backend: str) -> None:
    problem, _, _ = next(cases(4, torch.float64, seed=8))
    forms = [[(0, coefficient)] * 2 for _ in problem.forms]
    scores = [torch.zeros(4, *shape, dtype=torch.float64) for shape in SHAPES]
    scores[0][3, 0] = coefficient * 1.7e308
    with pytest.raises(ValueError, match="overflow"):
        solver(LinearProgram(problem.graph, forms), tuple(scores), bx.Negentropy(), backend).value()


# --- malformed indices


@needs_kernels
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["forward", "backward", "hessian", "sample", "topk", "max_marginals"])
@pytest.mark.parametrize("position", range(8))
def test_indices_out_of_range_are_refused(position: int, name: str, batch: int) -> None:
    problem, theta, rng = next(cases(batch, torch.float64, seed=9))
    problem = LinearProgram(problem.graph, [[(0, 1.0), (6, 2.0)] for _ in problem.forms], problem.has_extra_root)
    omega, native = bx.Negentropy(), BACKENDS["native"].sweeps(problem.name)
    value, tape = native.forward(theta, problem.index, omega)
    more = {
        "forward": (),
        "backward": (tape, value),
        "hessian": (tape, value, theta),
        "sample": (tape, torch.tensor(rng.random((batch, 2, 9)))),
        "topk": (2,),
        "max_marginals": (),
    }[name]
    for bad in (-1, 10**6, 2**31 - 1):
        with pytest.raises(ValueError, match=r"index|group"):
            getattr(native, name)(theta, *more, problem.with_index(position, -1, bad), omega)


@needs_kernels
@pytest.mark.parametrize("position", [6, 7, 8])
def test_sizes_of_the_index_are_checked(position: int) -> None:
    problem, theta, _ = next(p for p in cases(2, torch.float64, seed=10) if p[0].index[8].numel())
    native = BACKENDS["native"].sweeps(problem.name)
    index = list(problem.index)
    index[position] = index[position][:-1]
    with pytest.raises(ValueError, match="index"):
        native.forward(theta, tuple(index), bx.Negentropy())
    index[position] = problem.index[position].float()
    with pytest.raises(TypeError):
        native.forward(theta, tuple(index), bx.Negentropy())


@needs_kernels
def test_terms_need_the_numbers_of_forms() -> None:
    problem, theta, _ = next(cases(1, torch.float64, seed=11))
    index = [None if n == 5 else tensor for n, tensor in enumerate(problem.index[:9])]
    weights = theta[0].new_zeros(1, len(problem.graph.edges))
    tape, value = weights.new_empty(1, 2, problem.graph.num_nodes + 3), weights.new_empty(1)
    with pytest.raises(ValueError, match="index"):
        loading.call("dag_forward", weights, value, tape, *index, *bx.Negentropy().kernel)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_operators_pass_opcheck(backend: str) -> None:
    """Results for several scores are contiguous, as the shape rules of torch.compile say."""
    problem, theta, rng = next(cases(3, torch.float64, seed=7))
    ops, index = torch.ops.bellmax, list(problem.index)
    uniforms = torch.tensor(rng.random((3, 4, problem.most_edges)))
    seed, z = torch.ones(3, dtype=torch.float64), [torch.randn_like(score) for score in theta]
    assert len(theta) > 1
    for omega, parameters in (("negentropy", []), ("tsallis", [1.5]), ("hard", [])):
        program = (problem.name, backend, omega, parameters)
        _, tape = ops.forward(*program, theta, index)
        for op, args in (
            (ops.forward, (theta, index)),
            (ops.backward, (theta, tape, seed, index)),
            (ops.hessian, (theta, tape, seed, z, index)),
            (ops.sample, (theta, tape, uniforms, index)),
            (ops.topk, (theta, 3, index)),
            (ops.node_values, (theta, index)),
            (ops.max_marginals, (theta, index)),
        ):
            torch.library.opcheck(op.default, (*program, *args), test_utils=("test_schema", "test_faketensor"))
