"""Operations on automata, compared with the languages of their arguments."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from support.languages import Language, composed, language, random_automaton, sort_scores, walks

import bellmax as bx

A = bx.Automaton
SEEDS = range(15)


def merged(*languages: Language) -> Language:
    """Return the union of languages."""
    scores: Language = {}
    for one in languages:
        for key, values in one.items():
            scores[key] = sorted([*scores.get(key, []), *values])
    return scores


def joined(one: Language, other: Language, most: int) -> Language:
    """Return the concatenation of languages."""
    scores: Language = {}
    for (key, mine), (other_key, theirs) in product(one.items(), other.items()):
        if len(key[0]) + len(other_key[0]) <= most:
            both = (key[0] + other_key[0], key[1] + other_key[1])
            scores.setdefault(both, []).extend(round(a + b, 7) for a in mine for b in theirs)
    return {key: sorted(values) for key, values in scores.items()}


def agree(one: Language, other: Language) -> None:
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert values == pytest.approx(other[key], abs=1e-6), key


@pytest.mark.parametrize("seed", SEEDS)
def test_union_concatenation_and_reversal(seed: int) -> None:
    rng = random.Random(seed)
    one, two, three = (random_automaton(rng, num_arcs=5) for _ in range(3))
    languages = [language(a, 3) for a in (one, two, three)]
    agree(language(one.union(two, three), 3), merged(*languages))
    agree(language(one.concatenate(two, three), 3), joined(joined(languages[0], languages[1], 3), languages[2], 3))
    backward = {(labels[::-1], outputs[::-1]): values for (labels, outputs), values in languages[0].items()}
    agree(language(one.reverse(), 3), backward)


@pytest.mark.parametrize("seed", SEEDS)
def test_closure(seed: int) -> None:
    rng = random.Random(seed)
    automaton = random_automaton(rng, num_arcs=5)
    with pytest.raises(ValueError, match="closure needs an automaton that does not accept the empty sequence"):
        automaton.union(A.linear([])).closure()
    scored = A([(0, 1, 1, 0), (0, 1, 0, -1)], scores=[rng.random(), rng.random()], start={0: 0.25}, final={1: 0.5})
    automaton = automaton.concatenate(scored)
    own = language(automaton, 3)
    total: Language = {((), ()): [0.0]}
    power = total
    for _ in range(3):
        power = joined(power, own, 3)
        total = merged(total, power)
    agree(language(automaton.closure(), 3), total)


@pytest.mark.parametrize("seed", SEEDS)
def test_trimming_keeps_the_language_and_only_useful_states(seed: int) -> None:
    automaton = random_automaton(random.Random(seed), size=6, num_arcs=7)
    trimmed = automaton.trim()
    agree(language(trimmed, 4), language(automaton, 4))
    assert trimmed.num_states <= automaton.num_states
    for other in (trimmed, trimmed.reverse()):  # all states can be reached
        reached = set(other.start.isfinite().nonzero().flatten().tolist())
        for _ in range(other.num_states):
            reached |= {target for source, target, *_ in other.arcs.tolist() if source in reached}
        assert len(reached) == other.num_states


def test_trimming_keeps_names() -> None:
    automaton = A([("a", "dead", 1), ("a", "b", 2), ("island", "b", 3)], final={"b": 0.5})
    assert automaton.trim().states == ["a", "b"]
    assert automaton.trim().trim().states == ["a", "b"]
    assert automaton.reverse().states == automaton.states


@pytest.mark.parametrize("seed", range(40))
def test_composition_has_one_path_for_each_pair_of_paths(seed: int) -> None:
    rng = random.Random(seed)
    left, right = (random_automaton(rng, num_arcs=5, epsilon=epsilon) for epsilon in (0.5, 0.5))
    expected = sort_scores(composed(left, right, 3))
    try:
        both = left @ right
    except ValueError as error:
        assert "composition is empty" in str(error)  # noqa: PT017
        assert not expected
        return
    agree(language(both, 3), expected)
    assert both.trim().num_states == both.num_states


def test_epsilon_on_both_sides_is_handled_once() -> None:
    left = A([(0, 1, 5, 7), (1, 2, 5, -1), (2, 3, -1, -1), (3, 4, 5, 8)])
    right = A([(0, 1, 7, 1), (1, 2, -1, 2), (2, 3, -1, 3), (3, 4, 8, 4)])
    assert language(left @ right, 3) == {((5, 5, 5), (1, 2, 3, 4)): [0.0]}


@pytest.mark.parametrize("seed", range(10))
def test_composition_is_associative(seed: int) -> None:
    rng = random.Random(seed)
    one, two, three = (random_automaton(rng, num_arcs=7, epsilon=0.3) for _ in range(3))
    try:
        agree(language((one @ two) @ three, 3), language(one @ (two @ three), 3))
    except ValueError as error:
        assert "composition is empty" in str(error)  # noqa: PT017


@pytest.mark.parametrize("seed", range(10))
def test_gradients_flow_to_the_scores_of_both_sides(seed: int) -> None:
    rng = random.Random(seed)
    left, right = (random_automaton(rng, num_arcs=8, epsilon=0.3, tensors=True) for _ in range(2))
    leaves = [getattr(a, name) for a in (left, right) for name in ("scores", "start", "final")]
    expected = [score for _, _, score in composed(left, right, 3, tensors=True)]
    if not expected:
        pytest.skip("no path")
    both = left @ right
    got = [score for _, _, score in walks(both, 3, tensors=True)]
    close_gradients(got, expected, leaves)


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_the_other_operations(seed: int) -> None:
    rng = random.Random(seed)
    one, two = (random_automaton(rng, num_arcs=5, epsilon=0.0, tensors=True) for _ in range(2))
    leaves = [getattr(a, name) for a in (one, two) for name in ("scores", "start", "final")]
    mine, theirs = (list(walks(a, 3, tensors=True)) for a in (one, two))
    expected = [a + b for x, _, a in mine for y, _, b in theirs if len(x) + len(y) <= 3]
    close_gradients([score for _, _, score in walks(one.concatenate(two), 3, tensors=True)], expected, leaves)
    expected = [score for _, _, score in (*mine, *theirs, *mine)]
    got = [score for _, _, score in walks(one.union(two, one).reverse().trim(), 3, tensors=True)]
    close_gradients(got, expected, leaves)


def close_gradients(got: list[torch.Tensor], expected: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Assert that the log-partition functions of two lists of scores agree, with their gradients."""
    total, other = torch.stack(got).logsumexp(0), torch.stack(expected).logsumexp(0)
    torch.testing.assert_close(total, other)
    results = (
        torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True) for value in (total, other)
    )
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_new_values_of_a_tensor_are_seen_by_what_was_made_of_it() -> None:
    weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    lexicon = A.lexicon({"a": [1, 2], "b": [2]}, scores=weight)
    graph = A.ctc(vocab=3) @ lexicon
    before = graph.scores.detach().clone()
    with torch.no_grad():
        weight += torch.tensor([1.0, 2.0])
    is_word = graph.arcs[:, 3] >= 0
    difference = graph.scores.detach() - before
    assert difference.tolist() == [float(output + 1) if output >= 0 else 0.0 for output in graph.arcs[:, 3].tolist()]
    for _ in range(2):  # each access makes a new graph of autograd
        weight.grad = None
        graph.scores[is_word].sum().backward()
        assert weight.grad is not None
        assert float(weight.grad.sum()) == int(is_word.sum())


def test_the_scores_of_an_automaton_are_the_tensor() -> None:
    weight = torch.zeros(1, requires_grad=True)
    automaton = A([(0, 1, 3)], scores=weight)
    assert automaton.scores is weight
    assert (automaton @ automaton).scores.dtype == torch.float32
    (gradient,) = torch.autograd.grad((automaton @ automaton).scores.sum(), weight)
    assert gradient.tolist() == [2.0]


def test_a_mapping_of_start_and_final_scores_can_hold_tensors() -> None:
    begin, end = torch.tensor(0.5, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    automaton = A([("a", "b", 3)], start={"a": begin}, final={"a": -1, "b": end})
    assert automaton.start.tolist() == [0.5, -math.inf]
    assert automaton.final.tolist() == [-1.0, 1.5]
    for _ in range(2):
        gradients = torch.autograd.grad(automaton.start[0] + 2 * automaton.final[1], (begin, end))
        assert [float(gradient) for gradient in gradients] == [1.0, 2.0]


def test_empty_composition_names_the_outputs() -> None:
    with pytest.raises(ValueError, match=r"composition is empty: no output sequence .* by the right one$"):
        A.linear([1, 2]) @ A.linear([2, 1])
    with pytest.raises(ValueError, match=r"composition is empty: .* no label of the right one .*, such as 1$"):
        A.linear([1, 2]) @ A.linear([5])


def test_names_must_agree() -> None:
    one, two = A.lexicon({"a": [1]}), A.lexicon({"b": [1]})
    with pytest.raises(ValueError, match=r"same output_names, got \('a'\) and \('b'\)"):
        one.union(two)
    assert one.union(A.linear([1])).output_names == ("a",)
    assert one.concatenate(one).output_names == ("a",)


def test_operations_take_automata() -> None:
    with pytest.raises(ValueError, match="others must be automata, got a list"):
        A.linear([1]).union([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unsupported operand"):
        A.linear([1]) @ [1]  # type: ignore[operator]
