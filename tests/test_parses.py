"""Span and dependency trees against enumeration, recursions and hand-written hypergraphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import close
from support.inside import ChartProgram
from support.parses import all_trees, brackets, model, projective, value
from support.problems import for_second_order, one_of_each_kind, potentials
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx

KINDS = ["spans", "one root", "roots"]
of_all = pytest.mark.parametrize("kind", KINDS)
CASES = {"spans": (4, 4), "labels": (4, 4, 2), "one root": (5, 5), "roots": (5, 5)}
of_cases = pytest.mark.parametrize("case", CASES)


def kind_of(case: str) -> str:
    return "spans" if case == "labels" else case


def problem(case: str, *batch: int, seed: int = 0) -> Tensor:
    return potentials(*batch, *CASES[case], seed=seed)


def words_of(case: str) -> int:
    return CASES[case][0] - (case not in ("spans", "labels"))


# --- against recursions and enumeration


def test_numbers_of_trees() -> None:
    assert [len(brackets(0, n - 1)) for n in range(1, 6)] == [1, 1, 2, 5, 14]
    counts = {single: [len(projective(n, single)) for n in (1, 2, 3, 4)] for single in (True, False)}
    assert counts == {True: [1, 2, 7, 30], False: [1, 3, 12, 55]}
    for n, count in enumerate([1, 1, 2, 5, 14, 42, 132], 1):
        close(bx.SpanTrees(torch.zeros(n, n)).num_paths, count)
    close(bx.DependencyTrees(torch.zeros(4, 5, 5), lengths=[1, 2, 3, 4]).num_paths, [1, 2, 7, 30])
    close(bx.DependencyTrees(torch.zeros(4, 5, 5), lengths=[1, 2, 3, 4], single_root=False).num_paths, [1, 3, 12, 55])
    close(bx.SpanTrees(torch.zeros(3, 3, 4), labels=True).num_paths, 2 * 4**5)


@of_cases
def test_value_and_derivatives_equal_the_recursion(case: str, omega: bx.Regularizer, backend: str) -> None:
    words = words_of(case)
    lengths = torch.tensor([words, words - 1, 1])
    scores = problem(case, 3).requires_grad_()
    by_hand = torch.stack([value(kind_of(case), s, int(n), omega) for s, n in zip(scores, lengths, strict=True)])
    (gradient,) = torch.autograd.grad(by_hand.sum(), scores, create_graph=True)
    z = problem(case, 3, seed=1)
    (product,) = torch.autograd.grad((gradient * z).sum(), scores, allow_unused=True)
    p = model(kind_of(case), scores, lengths=lengths, omega=omega)
    close(p.value, by_hand)
    close(p.expected_path, gradient.nan_to_num())
    close(p.hessian_product(z), torch.zeros_like(scores) if product is None else product.nan_to_num(), 1e-8)
    close(torch.autograd.grad(p.value.sum(), scores)[0], gradient.detach().nan_to_num())


@of_cases
@one_of_each_kind
def test_distribution_against_enumeration(case: str, omega: bx.Regularizer, backend: str) -> None:
    words, places = words_of(case) - 1, CASES[case][0]
    scores = problem(case)
    p = model(kind_of(case), scores, lengths=words, omega=omega)
    trees = all_trees(kind_of(case), words, places, CASES[case][2] if case == "labels" else None)
    log_p = p.log_prob(trees)
    close(log_p.exp().sum(), 1.0)
    close(p.expected_path, torch.einsum("k,k...->...", log_p.exp(), trees))
    close(p.entropy(), torch.special.entr(log_p.exp()).sum())
    totals = (trees * scores).flatten(1).sum(-1)
    if isinstance(omega, bx.Negentropy):
        close(log_p, (totals / float(omega.gamma)).log_softmax(0))
    k = min(4, len(trees))
    best, best_trees = p.topk(k)
    close(best, totals.sort(descending=True).values[:k])
    close((best_trees * scores).flatten(1).sum(-1), best)
    close(p.best_path(), trees[totals.argmax()])
    close(p.mode, trees[log_p.argmax()])
    survivors, probabilities = p.support_paths(10**4)
    assert len(survivors) == int((log_p > -math.inf).sum())
    close(probabilities, log_p.exp().sort(descending=True).values[: len(survivors)])
    assert bool(p.support.check(trees).all())
    assert len(p.enumerate_support()) == len(trees)


@of_cases
def test_samples_have_the_marginals(case: str, backend: str) -> None:
    p = model(kind_of(case), problem(case, 2), lengths=[words_of(case), words_of(case) - 1], omega="entmax")
    drawn = p.sample((2000,))
    assert bool(p.support.check(drawn).all())
    close(drawn.mean(0), p.expected_path, 0.06)


def spans_by_hand(scores: Tensor) -> tuple[list[Any], list[Any]]:
    n = len(scores)
    edges: list[Any] = [((i, i), ()) for i in range(n)]
    edges += [((i, j), ((i, k), (k + 1, j))) for i, j in itertools.combinations(range(n), 2) for k in range(i, j)]
    return edges, [head for head, _ in edges]


def arcs_by_hand(scores: Tensor) -> tuple[list[Any], list[Any]]:
    """Edges of Eisner's algorithm for a single root, each with its arc or None."""
    n = len(scores) - 1
    edges: list[Any] = [((kind, i, i), ()) for kind in "RL" for i in range(n + 1) if kind == "R" or i]
    places: list[Any] = [None] * len(edges)
    for i, j in itertools.combinations(range(n + 1), 2):
        for k in range(i, j):
            if i or k == 0:
                edges.append((("forth", i, j), (("R", i, k), ("L", k + 1, j))))
                places.append((i, j))
            if i:
                edges.append((("back", i, j), (("R", i, k), ("L", k + 1, j))))
                edges.append((("L", i, j), (("L", i, k), ("back", k, j))))
                places += [(j, i), None]
            if i or j == n:
                edges.append((("R", i, j), (("forth", i, k + 1), ("R", k + 1, j))))
                places.append(None)
    return edges, places


@pytest.mark.parametrize(("kind", "write"), [("spans", spans_by_hand), ("one root", arcs_by_hand)])
def test_a_hypergraph_written_by_hand(
    kind: str, write: Callable[[Tensor], tuple[list[Any], list[Any]]], omega: bx.Regularizer
) -> None:
    scores = potentials(5, 5)
    edges, places = write(scores)
    used = [(e, arc) for e, arc in enumerate(places) if arc is not None]
    weights = torch.stack([scores.new_zeros(()) if arc is None else scores[arc] for arc in places])
    by_hand = bx.Hypergraph(edges).derivations(weights, omega=omega)
    p = model(kind, scores, omega=omega)
    close(p.value, by_hand.value)
    expected = torch.zeros_like(scores)
    for e, arc in used:
        expected[arc] += by_hand.expected_path[e]
    close(p.expected_path, expected)
    close(p.entropy(), by_hand.entropy())


# --- derivatives


@of_cases
@for_second_order
def test_gradcheck(case: str, omega: bx.Regularizer, backend: str) -> None:
    shape = tuple(size - 1 for size in CASES[case][:2]) + CASES[case][2:]
    scores = potentials(*shape, seed=3, requires_grad=True)

    def run(scores: Tensor) -> tuple[Tensor, Tensor]:
        p = model(kind_of(case), scores, lengths=words_of(case) - 1, omega=omega)
        return p.value, p.expected_path

    assert gradcheck(run, scores)
    assert gradgradcheck(run, scores, fast_mode=True)


@of_all
def test_gamma_has_a_gradient(kind: str) -> None:
    gamma = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    scores = potentials(2, 4, 4)
    scores[..., 0, 0] = scores[1, :, 3] = math.nan if kind != "spans" else 0.0

    def run(gamma: Tensor) -> Tensor:
        return model(kind, scores, lengths=[3, 2], omega=bx.Negentropy(gamma)).value

    assert gradcheck(run, gamma)


# --- unusual numbers


@of_all
def test_padding_and_unused_scores_may_hold_any_number(kind: str, backend: str) -> None:
    scores = potentials(2, 6, 6)
    spoilt = scores.clone()
    spoilt[1, 4:], spoilt[1, :, 4:] = math.nan, math.inf
    below = torch.ones(6, 6).tril(-1).bool() if kind == "spans" else torch.eye(6).bool()
    spoilt[:, below] = math.nan
    if kind != "spans":
        spoilt[..., 0] = math.nan
    spoilt.requires_grad_()
    lengths = [6, 4] if kind == "spans" else [5, 3]
    for omega in ("negentropy", "sparsemax"):
        p, clean = (model(kind, s, lengths=lengths, omega=omega) for s in (spoilt, scores))
        close(p.value, clean.value)
        close(p.expected_path, clean.expected_path)
        close(torch.autograd.grad(p.value.sum(), spoilt)[0], clean.expected_path)
        close(p.entropy(), clean.entropy())


def test_padding_and_unused_scores_of_labels_may_hold_any_number(backend: str) -> None:
    scores, z = potentials(2, 4, 4, 3), potentials(2, 4, 4, 3, seed=1)
    spoilt = scores.clone()
    spoilt[1, 3:], spoilt[1, :, 3:] = math.nan, math.inf
    spoilt[:, torch.ones(4, 4).tril(-1).bool()] = math.nan
    z_spoilt = z.masked_fill(spoilt.isnan(), math.nan)
    for omega in ("negentropy", "sparsemax"):
        p, clean = (bx.SpanTrees(s, labels=True, lengths=[4, 3], omega=omega) for s in (spoilt, scores))
        close(p.value, clean.value)
        close(p.expected_path, clean.expected_path)
        close(p.hessian_product(z_spoilt), clean.hessian_product(z))


@of_all
@one_of_each_kind
def test_sentences_without_a_tree(kind: str, omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(2, 4, 4)
    scores[1] = -math.inf
    scores.requires_grad_()
    p = model(kind, scores, omega=omega)
    assert p.value[1] == -math.inf
    assert p.value[0].isfinite()
    assert not p.expected_path[1].any()
    (gradient,) = torch.autograd.grad(p.value[0], scores)
    assert gradient.isfinite().all()
    assert not p.best_path()[1].any()


@of_all
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
def test_scores_that_leave_exp_space(kind: str, scale: float) -> None:
    scores = scale * potentials(3, 24, 24)
    scores[2, 3:9, 4:12] = -math.inf
    z = potentials(3, 24, 24, seed=1)
    results = {}
    for backend in ("reference", "native"):
        with bx.use_backend(backend):
            p = model(kind, scores, lengths=[23, 20, 9])
            results[backend] = p.value, p.expected_path, p.hessian_product(z)
    for expected, other in zip(results["reference"], results["native"], strict=True):
        close(expected, other, 1e-8)


@of_all
@pytest.mark.parametrize(("sentences", "words"), [(1, 37), (2, 9), (7, 26)])
def test_sentences_of_several_lengths(kind: str, sentences: int, words: int) -> None:
    scores, z = potentials(sentences, words, words), potentials(sentences, words, words, seed=1)
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) < 0.1] = -math.inf
    lengths = torch.randint(2, words + 1, (sentences,), generator=torch.Generator().manual_seed(3))
    results = {}
    for backend in ("reference", "native"):
        with bx.use_backend(backend):
            p = model(kind, scores, lengths=lengths)
            results[backend] = p.value, p.expected_path, p.hessian_product(z)
    for expected, other in zip(results["reference"], results["native"], strict=True):
        close(expected, other, 1e-10)


def test_scores_of_labels_that_leave_exp_space() -> None:
    scores, z = 1e3 * potentials(2, 9, 9, 3), potentials(2, 9, 9, 3, seed=1)
    results = {}
    for backend in ("reference", "native"):
        with bx.use_backend(backend):
            p = bx.SpanTrees(scores, lengths=[9, 6], labels=True)
            results[backend] = p.value, p.expected_path, p.hessian_product(z)
    for expected, other in zip(results["reference"], results["native"], strict=True):
        close(expected, other, 1e-8)


@of_all
def test_scores_far_below_the_others(kind: str) -> None:
    scores = potentials(4, 4)
    scores[0, 1] = scores[1, 2] = scores[2, 3] = scores[1, 3] = scores[0, 2] = scores[2, 1] = scores[3, 2] = -1e4
    for backend in ("reference", "native"):
        with bx.use_backend(backend):
            p = model(kind, scores)
            trees = all_trees(kind, 4 if kind == "spans" else 3, 4)
            totals = (trees * scores).flatten(1).sum(-1)
            close(p.value, totals.logsumexp(0))
            close(p.expected_path, torch.einsum("k,k...->...", totals.softmax(0), trees))


@of_all
def test_float32_keeps_its_digits(kind: str) -> None:
    scores = 3 * potentials(2, 60, 60)
    exact, single = model(kind, scores), model(kind, scores.float())
    close(single.value, exact.value.float(), 1e-6)
    close(single.expected_path, exact.expected_path.float(), 3e-6)
    close(
        model(kind, scores.float(), omega="sparsemax").value, model(kind, scores, omega="sparsemax").value.float(), 1e-6
    )


@of_cases
def test_items_are_counted_without_a_graph(case: str) -> None:
    program = ChartProgram({"one root": "arcs_of_one_root", "roots": "arcs"}.get(case, "spans"))
    for places in range(1 + (case in ("roots", "one root")), 7):
        theta = [torch.zeros(1, places, places, *CASES[case][2:])]
        assert program.nodes(theta, []) == (len(program.engine_index(theta, [])[0]) - 1,)


@of_all
def test_scores_need_not_be_contiguous(kind: str, backend: str) -> None:
    scores = potentials(5, 5, 2).permute(2, 1, 0)
    for omega in ("negentropy", "l2"):
        p, plain = (model(kind, s, lengths=[4, 3], omega=omega) for s in (scores, scores.contiguous()))
        close(p.value, plain.value)
        close(p.expected_path, plain.expected_path)
        close(p.hessian_product(scores), plain.hessian_product(scores.contiguous()))


def test_one_word_and_empty_batch() -> None:
    assert bx.SpanTrees(torch.tensor([[2.5]])).value == 2.5
    close(bx.DependencyTrees(torch.tensor([[0.0, 2.5], [9.0, 9.0]])).value, torch.tensor(2.5))
    assert bx.DependencyTrees(torch.zeros(0, 4, 4)).best_heads().shape == (0, 3)
    assert bx.SpanTrees(torch.zeros(0, 4, 4)).expected_path.shape == (0, 4, 4)


# --- trees as lists


def test_best_trees_as_lists() -> None:
    scores = potentials(3, 5, 5)
    p = bx.SpanTrees(scores, lengths=[5, 3, 1])
    for tree, path in zip(p.best_tree(), p.best_path(), strict=True):
        spans = tree[tree[:, 0] >= 0]
        again = torch.zeros(5, 5, dtype=torch.float64)
        again[spans[:, 0], spans[:, 1]] = 1
        close(again, path.triu(1))
        assert (tree[len(spans) :] == -1).all()
        assert spans.tolist() == sorted(spans.tolist(), key=lambda span: (span[0], -span[1]))
    labelled = bx.SpanTrees(potentials(2, 4, 4, 3), labels=True)
    assert labelled.best_tree().shape == (2, 7, 3)
    first, last, label = labelled.best_tree()[0].unbind(-1)
    assert labelled.best_path()[0, first, last, label].all()
    assert labelled.sample_trees((6,)).shape == (6, 2, 7, 3)


def test_best_heads() -> None:
    p = bx.DependencyTrees(potentials(2, 5, 5), lengths=[4, 2])
    heads = p.best_heads()
    assert heads.shape == (2, 4)
    assert (heads[1, 2:] == -1).all()
    close(p.best_path()[0][heads[0], torch.arange(1, 5)], torch.ones(4).double())
    assert p.sample_heads((7,)).shape == (7, 2, 4)
    assert (p.sample_heads((7,)) == 0).sum(-1).eq(1).all()


# --- losses


def test_heads_as_targets(omega: bx.Regularizer) -> None:
    arcs = potentials(2, 4, 4)
    p = bx.DependencyTrees(arcs, lengths=[3, 2], omega=omega)
    heads = torch.tensor([[2, 0, 2], [2, 0, -1]])
    tree = torch.zeros(2, 4, 4)
    tree[0, [2, 0, 2], [1, 2, 3]] = 1
    tree[1, [2, 0], [1, 2]] = 1
    for loss in (bx.losses.surrogate, bx.losses.structured_perceptron, bx.losses.path_nll):
        close(loss(p, heads, reduction="none"), loss(p, tree, reduction="none"))
    gold_score = (tree * arcs).sum((-1, -2))
    if isinstance(omega, bx.Negentropy):
        close(bx.losses.surrogate(p, heads, reduction="none"), p.value - gold_score)


def test_partial_targets_are_sums_over_trees() -> None:
    arcs = potentials(4, 4)
    p = bx.DependencyTrees(arcs)
    trees = all_trees("one root", 3, 4)
    totals = (trees * arcs).flatten(1).sum(-1)
    within = trees[:, 0, 2] == 1
    close(bx.losses.surrogate(p, torch.tensor([-1, 0, -1])), totals.logsumexp(0) - totals[within].logsumexp(0))
    spans = potentials(4, 4)
    trees = all_trees("spans", 4, 4)
    totals = (trees * spans).flatten(1).sum(-1)
    allowed = torch.ones(4, 4).bool()
    allowed[0, 1] = allowed[2, 3] = False
    within = (trees[:, 0, 1] == 0) & (trees[:, 2, 3] == 0)
    close(bx.losses.surrogate(bx.SpanTrees(spans), allowed), totals.logsumexp(0) - totals[within].logsumexp(0))


def test_lists_of_spans_as_targets() -> None:
    scores = potentials(2, 4, 4)
    p = bx.SpanTrees(scores, lengths=[4, 3])
    trees = p.best_tree()
    close(bx.losses.surrogate(p, trees, reduction="none"), p.value - p.topk(1)[0][:, 0])
    without_words = torch.tensor([[[0, 3], [0, 1], [2, 3]], [[0, 2], [1, 2], [-1, -1]]])
    assert bx.losses.surrogate(p, without_words, reduction="none").gt(0).all()
    labelled = bx.SpanTrees(potentials(2, 4, 4, 3), labels=True)
    close(
        bx.losses.surrogate(labelled, labelled.best_tree(), reduction="none"),
        labelled.value - labelled.topk(1)[0][:, 0],
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bx.SpanTrees(torch.zeros(3, 4)),
            r"scores must have shape \(\.\.\., n, n\), each at least 1, got \(3, 4\)",
        ),
        (lambda: bx.SpanTrees(torch.zeros(3, 3), labels=True), r"scores must have shape \(\.\.\., n, n, L\)"),
        (
            lambda: bx.SpanTrees(torch.zeros(4, 4, 4), labels=4),
            r"labels must be True or False, got 4: for labels, pass labels=True",
        ),
        (lambda: bx.SpanTrees(torch.zeros(4, 4), labels=0), "labels must be True or False, got 0"),
        (lambda: bx.DependencyTrees(torch.zeros(1, 1)), r"arcs must have shape \(\.\.\., n \+ 1, n \+ 1\) with n >= 1"),
        (lambda: bx.DependencyTrees(torch.zeros(4, 4), lengths=4), r"lengths must be from 1 to 3, got 4$"),
        (lambda: bx.SpanTrees(torch.zeros(2, 3, 3), lengths=[1, 0]), r"lengths must be from 1 to 3, got 0 of seq"),
        (lambda: bx.SpanTrees(torch.zeros(2, 3, 3), lengths=[1, 1, 1]), r"lengths must have the batch shape \(2,\)"),
        (lambda: bx.SpanTrees(torch.full((3, 3), math.nan)).value, r"scores must be finite or -inf, got nan"),
        (
            lambda: bx.DependencyTrees(torch.full((3, 3), math.inf), omega="l2").value,
            r"arcs must be finite or -inf, got inf at event index \(0, 1\)",
        ),
        (
            lambda: bx.losses.surrogate(bx.DependencyTrees(torch.zeros(3, 3)), torch.tensor([3, 0])),
            r"target\[0\] must be a head from 0, the root, to 2, or -1 for any, got 3",
        ),
        (
            lambda: bx.losses.relaxed(bx.DependencyTrees(torch.zeros(3, 3)), torch.tensor([2, 1])),
            r"target is not a tree: the arcs 1→2→1 form a cycle",
        ),
        (
            lambda: bx.losses.surrogate(bx.SpanTrees(torch.zeros(3, 3)), torch.tensor([[0, 3], [1, 2]])),
            r"target\[0\] must be a span \[first word, last word\] below \[3, 3\], got \[0, 3\]",
        ),
        (lambda: bx.SpanTrees(torch.zeros(3, 3)).log_prob(torch.ones(3, 3)), r"path is not a tree of the chart"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- learning


def grammar(rng: torch.Generator, words: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A random sentence of a toy grammar and its brackets: S → A B | A S, A → a b | b, B → c | c d A."""

    def draw(symbol: str, left: int) -> tuple[list[int], list[tuple[int, int]]]:
        coin = float(torch.rand((), generator=rng))
        if symbol == "A":
            return ([0, 1], [(left, left + 1)]) if coin < 0.6 else ([1], [])
        if symbol == "B" and coin < 0.4:
            return [2], []
        if symbol == "B":
            tail, spans = draw("A", left + 2)
            end = left + 1 + len(tail)
            return [2, 3, *tail], [(left, end), (left, left + 1), *spans]
        first, spans = draw("A", left)
        then = left + len(first)
        rest, more = draw("S" if coin < 0.5 else "B", then)
        return [*first, *rest], [(left, then + len(rest) - 1), *spans, *more]

    while True:
        sentence, spans = draw("S", 0)
        if 3 <= len(sentence) <= words:
            return sentence, spans


class SpanScorer(nn.Module):
    """Scores of spans from the symbols at and around their ends."""

    def __init__(self, symbols: int, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(symbols + 1, width)
        self.score = nn.Sequential(nn.Linear(4 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, words: Tensor) -> Tensor:
        inside = self.words(words)
        before, after = inside.roll(1, -2), inside.roll(-1, -2)
        n = words.shape[-1]
        starts = torch.cat((before, inside), -1).unsqueeze(-2).expand(*words.shape, n, -1)
        ends = torch.cat((inside, after), -1).unsqueeze(-3).expand(*words.shape[:-1], n, n, -1)
        return self.score(torch.cat((starts, ends), -1)).squeeze(-1)


def padded(rows: list[list[int]], size: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (size - len(row))] for row in rows])


@pytest.mark.slow
def test_a_grammar_is_learnt() -> None:
    rng = torch.Generator().manual_seed(0)
    data = [grammar(rng, 14) for _ in range(200)]
    words = padded([sentence for sentence, _ in data], 16, 4)
    lengths = torch.tensor([len(sentence) for sentence, _ in data])
    gold = torch.zeros(len(data), 16, 16, dtype=torch.bool)
    for tree, (_, spans) in zip(gold, data, strict=True):
        tree[tuple(zip(*spans, strict=True))] = True
    gold |= torch.eye(16, dtype=torch.bool)
    torch.manual_seed(0)
    scorer = SpanScorer(4)
    optimizer = torch.optim.Adam(scorer.parameters(), lr=0.02)
    train, test = slice(0, 150), slice(150, None)
    for _ in range(60):
        optimizer.zero_grad()
        p = bx.SpanTrees(scorer(words[train]), lengths=lengths[train])
        # Trees of the grammar are binary, except for one ternary rule, which may be binarized in two ways.
        loss = bx.losses.surrogate(p, _compatible(gold[train], lengths[train]))
        loss.backward()
        optimizer.step()
    best = bx.SpanTrees(scorer(words[test]), lengths=lengths[test]).best_path().bool()
    off = ~torch.eye(16, dtype=torch.bool)
    recall = (best & gold[test] & off).sum() / (gold[test] & off).sum()
    assert recall > 0.95


def _compatible(gold: Tensor, lengths: Tensor) -> Tensor:
    """Mask of the spans that cross no bracket of a tree."""
    position = torch.arange(gold.shape[-1])
    i, j = position[:, None, None, None], position[None, :, None, None]
    a, b = position[None, None, :, None], position[None, None, None, :]
    crosses = ((i < a) & (a <= j) & (j < b)) | ((a < i) & (i <= b) & (b < j))
    return ~(crosses & gold[:, None, None]).flatten(3).any(-1)


def language(rng: torch.Generator) -> tuple[list[int], list[int]]:
    """Random words and heads: a verb with nouns before and after it, each with articles and adjectives."""
    words, heads = [], []
    nouns: list[int] = []
    sizes = [
        int(torch.randint(0, 3, (), generator=rng)) for _ in range(1 + int(torch.randint(1, 3, (), generator=rng)))
    ]
    for position, size in enumerate(sizes):
        noun = len(words) + size + 1
        for _ in range(size):
            words.append(int(torch.randint(0, 2, (), generator=rng)))
            heads.append(noun)
        words.append(2)
        heads.append(-1)
        nouns.append(noun)
        if position == 0:
            words.append(3)
            heads.append(0)
            verb = len(words)
    for noun in nouns:
        heads[noun - 1] = verb
    return words, heads


class ArcScorer(nn.Module):
    def __init__(self, symbols: int, width: int = 16) -> None:
        super().__init__()
        self.words, self.distance = nn.Embedding(symbols + 2, width), nn.Embedding(31, width)
        self.score = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, words: Tensor) -> Tensor:
        inside = self.words(words)
        n = words.shape[-1]
        head = inside.unsqueeze(-2).expand(*words.shape, n, -1)
        modifier = inside.unsqueeze(-3).expand(head.shape)
        position = torch.arange(n)
        away = self.distance((position[None] - position[:, None]).clamp(-15, 15) + 15).expand(head.shape)
        return self.score(torch.cat((head, modifier, away), -1)).squeeze(-1)


def test_a_parser_is_learnt() -> None:
    rng = torch.Generator().manual_seed(0)
    data = [language(rng) for _ in range(160)]
    words = padded([[5, *sentence] for sentence, _ in data], 12, 4)
    heads = padded([tree_heads for _, tree_heads in data], 11, -1)
    lengths = torch.tensor([len(tree_heads) for _, tree_heads in data])
    torch.manual_seed(0)
    scorer = ArcScorer(4)
    optimizer = torch.optim.Adam(scorer.parameters(), lr=0.02)
    train, test = slice(0, 100), slice(100, None)
    for _ in range(40):
        optimizer.zero_grad()
        p = bx.DependencyTrees(scorer(words[train]), lengths=lengths[train])
        bx.losses.surrogate(p, heads[train]).backward()
        optimizer.step()
    predicted = bx.DependencyTrees(scorer(words[test]), lengths=lengths[test]).best_heads()
    is_word = heads[test] >= 0
    assert (predicted[is_word] == heads[test][is_word]).double().mean() > 0.95


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([3, 0, 2, 2, 2, 2, 2], "is not a projective tree: the arcs 0→2 and 3→1 cross"),
        ([0, 1, 2, 3, 2, 5, 3], "is not a projective tree: the arcs 2→5 and 3→7 cross"),
        ([0, 1, 1, 2, 1, 5, 1], "is not a projective tree: the arcs 1→3 and 2→4 cross"),
        ([2, 0, 2, 2, 0, 5, 5], "has several roots, the words 2 and 5.*pass single_root=False"),
        ([2, 3, 1, 0, 4, 4, 4], "is not a tree: the arcs 1→3→2→1 form a cycle"),
        ([2, 1, 2, 3, 4, 5, 6], "is not a tree: the arcs 1→2→1 form a cycle"),
        ([0, 2, 1, 1, 1, 1, 1], "is not a tree: word 2 is its own head"),
    ],
)
def test_invalid_gold_heads_raise_with_reason_and_position(heads: list[int], message: str) -> None:
    fine = [0, 1, 1, 1, 1, 1, 1]
    trees, gold = bx.DependencyTrees(torch.zeros(2, 8, 8)), torch.tensor([fine, heads])
    for loss in (bx.losses.surrogate, bx.losses.relaxed, bx.losses.path_nll):
        with pytest.raises(ValueError, match=rf"^target\[1\] {message}"):
            loss(trees, gold)
    with pytest.raises(ValueError, match=rf"^target {message}"):
        bx.losses.surrogate(trees[0], gold[1])
    event = torch.zeros(8, 8)
    event[torch.tensor(heads), torch.arange(1, 8)] = 1
    with pytest.raises(ValueError, match=rf"^path {message}"):
        trees[0].log_prob(event)


def test_several_roots_are_a_tree_without_single_root() -> None:
    heads = torch.tensor([2, 0, 2, 0])
    assert bx.losses.surrogate(bx.DependencyTrees(torch.zeros(5, 5), single_root=False), heads) > 0


def test_a_forbidden_arc_is_named() -> None:
    arcs = torch.zeros(2, 4, 4)
    arcs[1, 2, 3] = -math.inf
    with pytest.raises(ValueError, match=r"^target\[1\] is forbidden: arcs\[1, 2, 3\] is -inf$"):
        bx.losses.surrogate(bx.DependencyTrees(arcs, lengths=[3, 3]), torch.tensor([[2, 0, 2], [2, 0, 2]]))
    partly = torch.tensor([[2, 0, 2], [3, -1, 1]])
    with pytest.raises(
        ValueError, match=r"^target\[1\] must allow a projective tree with a single root of finite score"
    ):
        bx.losses.surrogate(bx.DependencyTrees(arcs), partly)


def test_padding_of_gold_heads_is_ignored() -> None:
    trees = bx.DependencyTrees(torch.zeros(1, 6, 6), lengths=[3])
    with pytest.raises(ValueError, match=r"^target\[0\] is not a tree: the arcs 1→2→1 form a cycle"):
        bx.losses.surrogate(trees, torch.tensor([[2, 1, 0, 9, 9]]))


def test_gold_spans_that_do_not_form_a_tree_raise_with_the_reason() -> None:
    trees = bx.SpanTrees(torch.zeros(2, 4, 4))
    crossing, flat = torch.tensor([[0, 3], [0, 1], [1, 2]]), torch.tensor([[0, 3], [0, 2], [-1, -1]])
    lacking, fine = torch.tensor([[0, 1], [2, 3], [-1, -1]]), torch.tensor([[0, 3], [0, 1], [2, 3]])
    for spans, message in (
        (crossing, r"is not a tree: the spans \[0, 1\] and \[1, 2\] overlap"),
        (flat, r"is not a binary tree: .* span \[0, 2\].* binarize"),
        (lacking, r"is not a tree: it lacks the span \[0, 3\] of the whole sentence"),
    ):
        with pytest.raises(ValueError, match=rf"^target\[1\] {message}"):
            bx.losses.surrogate(trees, torch.stack((fine, spans)))
