"""The programs of examples/textbook.py against exhaustive search, autograd, and structures that compute the same."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import close
from support.kernels import needs_kernels
from support.problems import OMEGAS
from support.textbook import LARGEST, PATH, PROBLEMS, SMALLEST, Problem, list_derivations, smoothed, textbook
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import bellmax as bx

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "program-gallery.md"
ALL_OMEGAS = {**OMEGAS, "tsallis1.2": bx.Tsallis(1.2, 1.5), "gamma1": bx.Negentropy()}
NAMES = [name for name, thing in vars(textbook).items() if hasattr(thing, "axes")]

of_each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
of_each_program = pytest.mark.parametrize("problem", SMALLEST, ids=repr)


def gradients(value: Tensor, scores: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the value for all scores, 0 if the value is constant."""
    if not value.requires_grad:
        return [torch.zeros_like(score) for score in scores]
    return list(grad(value, scores, materialize_grads=True))


def test_every_program_has_problems() -> None:
    assert len(NAMES) == 22
    assert {problem.name for problem in PROBLEMS} == set(NAMES)
    assert len(PROBLEMS) >= 2 * len(NAMES)


# --- correctness of the programs


@of_each_problem
def test_derivations_are_the_solutions(problem: Problem) -> None:
    scores, options = problem.tensors(), problem.options
    wanted = problem.solutions()
    assert len(wanted)
    p = problem.program(*scores, omega="negentropy", gamma=0.6, **options)
    listed = list_derivations(problem.program, scores, options)
    assert listed is not None
    np.testing.assert_allclose(np.sort(listed), np.sort(wanted), atol=1e-12)
    assert p.num_paths == len(wanted)
    close(p.topk(len(wanted) + 1)[0][:-1], wanted)
    assert p.topk(len(wanted) + 1)[0][-1] == -p.sense * torch.inf
    close(p.value, p.sense * 0.6 * torch.tensor(p.sense * wanted / 0.6).logsumexp(0))
    hard = problem.program(*scores, omega="hard", **options)
    close(hard.value, wanted[0])
    close(hard.value, problem.program.function(*problem.numbers, **options))


@of_each_program
def test_check_program_agrees(problem: Problem) -> None:
    report = bx.check_program(problem.program, *problem.tensors(), **problem.options)
    assert report.ok, str(report)


# --- values and derivatives under every Ω


@pytest.mark.parametrize("omega", ALL_OMEGAS.values(), ids=ALL_OMEGAS.keys())
@of_each_problem
def test_values_and_gradients_under_every_omega(problem: Problem, omega: bx.Regularizer) -> None:
    scores = problem.tensors()
    p = problem.program(*scores, omega=omega, **problem.options)
    wanted = smoothed(problem.program, scores, problem.options, omega)
    close(p.value, wanted)
    wanted_gradients = gradients(wanted, scores)
    for got, by_name, expected in zip(gradients(p.value, scores), p.gradient.values(), wanted_gradients, strict=True):
        close(got, expected)
        close(by_name, expected)
    close(p.expected_path, wanted_gradients[0])


@pytest.mark.parametrize("omega", [bx.Negentropy(0.7), bx.Tsallis(1.5, 0.8), bx.SquaredL2(0.9)], ids=repr)
@of_each_program
def test_batches_equal_their_members(problem: Problem, omega: bx.Regularizer) -> None:
    scores = problem.tensors(batch=2)
    p = problem.program(*scores, omega=omega, **problem.options)
    for k in range(2):
        member = [score[k] for score in scores]
        close(p.value[k], smoothed(problem.program, member, problem.options, omega))
        close(p.expected_path[k], problem.program(*member, omega=omega, **problem.options).expected_path)


@of_each_program
def test_hessian_products_equal_those_of_autograd(problem: Problem) -> None:
    scores, omega = problem.tensors(), bx.Negentropy(0.7)
    directions = [torch.randn_like(score) for score in scores]
    wanted = smoothed(problem.program, scores, problem.options, omega)
    first = grad(wanted, scores, create_graph=True, materialize_grads=True)
    slope = sum((g * z).sum() for g, z in zip(first, directions, strict=True))
    assert isinstance(slope, Tensor)
    p = problem.program(*problem.tensors(), omega=omega, **problem.options)
    named = dict(zip(p.gradient, directions, strict=True))
    close(p.directional_derivative(named), slope.detach())
    products = list(p.hessian_product(named).values())
    assert all(product.any() for product in products)
    for got, expected in zip(products, gradients(slope, scores), strict=True):
        close(got, expected)


@pytest.mark.parametrize("omega", [bx.Negentropy(0.7), bx.Tsallis(1.5, 0.8)], ids=repr)
@of_each_program
def test_derivatives_pass_gradcheck(problem: Problem, omega: bx.Regularizer) -> None:
    def value(*scores: Tensor) -> Tensor:
        result: Tensor = problem.program(*scores, omega=omega, **problem.options).value
        return result

    scores = tuple(problem.tensors())
    assert gradcheck(value, scores)
    assert gradgradcheck(value, scores)


# --- probabilities


@pytest.mark.parametrize("omega", [bx.Negentropy(0.7), bx.Tsallis(1.5, 0.8), bx.Tsallis(2, 3.0)], ids=repr)
@of_each_problem
def test_probabilities_add_up_to_1(problem: Problem, omega: bx.Regularizer) -> None:
    scores = problem.tensors()
    p = problem.program(*scores, omega=omega, **problem.options)
    values, derivations = p.topk_decoded(int(p.num_paths))
    probabilities = torch.stack([p.log_prob(derivation) for derivation in derivations]).exp()
    close(probabilities.sum(), 1.0)
    if isinstance(omega, bx.Negentropy):
        close(probabilities, (p.sense * values / 0.7).softmax(0))
    events = torch.stack([p.encode(derivation) for derivation in derivations])
    close(torch.tensordot(probabilities, events, 1), p.expected_path)
    # A derivation has the score of its edges, and each edge has the entries of one option.
    for value, derivation in zip(values.tolist(), derivations, strict=True):
        edges = p.derivation_edges(derivation)
        arrays = dict(zip(p.gradient, problem.numbers, strict=True))
        terms = [c * arrays[name][index] for edge in edges for name, index, c in edge.scores]
        assert sum(terms) + sum(edge.constant for edge in edges) == pytest.approx(value)
    support, weights = p.support_paths()
    close(weights, probabilities[probabilities > 0].sort(descending=True).values)
    close(torch.tensordot(weights, support, 1), p.expected_path)


@pytest.mark.parametrize("problem", LARGEST, ids=repr)
def test_sparse_programs_have_derivations_of_probability_0(problem: Problem) -> None:
    p = problem.program(*problem.tensors(), omega="sparsemax", gamma=0.2, **problem.options)
    assert 1 <= len(p.support_paths()[1]) < p.num_paths


# --- the same values as other structures


def chain(scores: list[Tensor], **omega: Any) -> bx.PathDistribution:
    return bx.Chain.from_scores(*scores, **omega)


def graph(scores: list[Tensor], **omega: Any) -> bx.PathDistribution:
    edges: Any = next(problem.options["edges"] for problem in PROBLEMS if problem.name == "longest_path")
    return bx.DAG(edges).paths(scores[0], **omega)


EQUALS: dict[str, Callable[..., bx.PathDistribution]] = {
    "viterbi": chain,
    "cky": lambda scores, **omega: bx.SpanTrees(scores[0], **omega),
    "time_warping": lambda scores, **omega: bx.DTW(scores[0], **omega),
    "longest_path": graph,
}


@pytest.mark.parametrize(
    ("name", "omega"),
    [
        pytest.param(name, omega, id=f"{name}-{key}")
        for name in EQUALS
        for key, omega in ALL_OMEGAS.items()
        # Under l2, structures pay γ/2 for each node with a single option, and programs have no such nodes. The number
        # of these nodes depends on the path, except in a chain, which has one in its first step.
        if key != "l2" or name == "viterbi"
    ],
)
def test_programs_equal_structures(name: str, omega: bx.Regularizer) -> None:
    problems = [problem for problem in PROBLEMS if problem.name == name]
    for problem in problems[:1] if name == "longest_path" else problems:
        scores = problem.tensors()
        p, other = problem.program(*scores, omega=omega, **problem.options), EQUALS[name](scores, omega=omega)
        close(p.value, other.value + (omega.gamma / 2 if isinstance(omega, bx.SquaredL2) else 0))
        close(p.gradient[next(iter(p.gradient))], grad(other.value, scores)[0])
        close(p.topk(4)[0], other.topk(4)[0])
        close(p.entropy(), other.entropy())
        assert p.num_paths == other.num_paths


@needs_kernels
@pytest.mark.parametrize("omega", [bx.Negentropy(0.7), bx.Tsallis(1.5, 0.8), bx.Hard()], ids=repr)
@of_each_program
def test_backends_agree(problem: Problem, omega: bx.Regularizer) -> None:
    answers = []
    for backend in ("native", "reference"):
        with bx.use_backend(backend):
            p = problem.program(*problem.tensors(batch=2), omega=omega, **problem.options)
            direction = {name: g + 1 for name, g in p.gradient.items()}
            products = p.hessian_product(direction)
            answers.append([p.value, p.entropy(), p.topk(3)[0], *p.gradient.values(), *products.values()])
    for native, reference in zip(*answers, strict=True):
        close(native, reference)


# --- the example and the page


def test_the_page_shows_the_programs_of_the_example() -> None:
    shown = [
        example.source
        for example in doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8"))
        if example.source.startswith("@bx.program")
    ]
    sources = [inspect.getsource(getattr(textbook, name).function) for name in NAMES]
    assert shown == sources


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_short(name: str) -> None:
    source = inspect.getsource(getattr(textbook, name).function)
    code = source[source.index('"""\n') + 4 :] if '"""\n' in source else source
    assert len(code.splitlines()) + 2 < 15  # two lines: the decorator and def
    assert re.search(r"O\(.+\)", textbook.__dict__[name].function.__doc__)


# The optimum of each example, from textbooks and by hand.
OPTIMA = {
    "knapsack": 7,
    "unbounded_knapsack": 10.2,
    "coin_change": 2,
    "rod_cutting": 13,
    "scheduling": 9,
    "independent_set": 8,
    "maximum_subarray": 6,
    "increasing_subsequence": 4,
    "common_subsequence": 4,
    "edit_distance": 3,
    "time_warping": 0,
    "word_segmentation": -3,
    "line_breaking": 11,
    "viterbi": -4.19174,
    "matrix_chain": 15125,
    "search_tree": 142,
    "triangulation": 10.099,
    "nussinov": 3,
    "cky": 2,
    "grid_path": 7,
    "longest_path": 9,
    "round_trip": 80,
}


def test_the_example_prints_all_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [PATH.name])
    textbook.main()
    printed = re.findall(r"^(\w+): .*\n    optimum ([-\d.]+):", capsys.readouterr().out, re.MULTILINE)
    assert {name: float(optimum) for name, optimum in printed} == pytest.approx(OPTIMA, rel=1e-4)
    assert [name for name, _ in printed] == NAMES


def test_the_example_prints_one_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [PATH.name, "knapsack", "--omega", "sparsemax"])
    textbook.main()
    printed = capsys.readouterr().out
    assert printed.startswith("knapsack: 0/1 knapsack")
    assert "value under sparsemax" in printed
    monkeypatch.setattr("sys.argv", [PATH.name, "backpack"])
    with pytest.raises(SystemExit):
        textbook.main()
    assert "there is no program 'backpack'" in capsys.readouterr().err
