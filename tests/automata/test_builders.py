"""Automata of sequences, CTC and lexicons: their languages, and the errors of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, product

import pytest
import torch
from support.languages import language, walks

import bellmax as bx

A = bx.Automaton


def collapse(frames: Sequence[int], blank: int) -> tuple[int, ...]:
    """Merge equal neighbors, then remove blanks."""
    return tuple(label for label, _ in groupby(frames) if label != blank)


def test_a_sequence_has_one_path() -> None:
    assert language(A.linear(torch.tensor([4, 0, 4])), 5) == {((4, 0, 4), (4, 0, 4)): [0.0]}
    assert language(A.linear([]), 2) == {((), ()): [0.0]}


@pytest.mark.parametrize(("vocab", "blank"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_ctc_of_a_vocabulary_accepts_all_alignments(vocab: int, blank: int) -> None:
    expected = {
        (frames, collapse(frames, blank)): [0.0] for size in range(5) for frames in product(range(vocab), repeat=size)
    }
    assert language(A.ctc(vocab=vocab, blank=blank), 4) == expected


@pytest.mark.parametrize("target", [[], [1], [1, 1], [1, 2], [2, 2, 1], [1, 2, 1]])
@pytest.mark.parametrize("blank", [0, 3])
def test_ctc_of_a_target_accepts_its_alignments(target: list[int], blank: int) -> None:
    alignments = (frames for size in range(6) for frames in product((blank, 1, 2), repeat=size))
    expected = {(frames, tuple(target)): [0.0] for frames in alignments if collapse(frames, blank) == tuple(target)}
    automaton = A.ctc(target, blank=blank)
    got = {key: scores for key, scores in language(automaton, 5).items() if len(key[1]) == len(target)}
    assert got == language(automaton, 5) == expected
    if target:
        same = A.ctc(vocab=4, blank=blank) @ A.linear(target)
        assert language(same, 5) == expected


@pytest.mark.parametrize("target", [[1], [2, 2], [1, 2, 1]])
def test_ctc_of_a_target_has_the_value_of_the_structure(target: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(6, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    frames = torch.tensor([labels for labels, _, _ in walks(A.ctc(target), 6) if len(labels) == 6])
    value = log_probs[torch.arange(6), frames].sum(-1).logsumexp(0)
    torch.testing.assert_close(value, bx.CTC(log_probs, torch.tensor(target)).value)


WORDS = {"to": [1, 2], "too": [1, 2, 2], "two": [1, 2], "a": [3], "at": [3, 1], "o": [2]}


def test_a_lexicon_accepts_all_sequences_of_words() -> None:
    weight = torch.tensor([0.5, -1.0, 0.25, 2.0, -0.125, 1.5], dtype=torch.float64)
    names, spellings = list(WORDS), list(WORDS.values())
    expected: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
    for size in range(6):
        for words in product(range(len(names)), repeat=size):
            letters = tuple(letter for word in words for letter in spellings[word])
            if len(letters) <= 5:
                expected.setdefault((letters, words), []).append(float(weight[list(words)].sum()))
    lexicon = A.lexicon(WORDS, scores=weight)
    assert lexicon.output_names == tuple(names)
    assert lexicon.label_names is None
    assert language(lexicon, 5) == expected


def test_a_lexicon_shares_prefixes_and_says_words_early() -> None:
    lexicon = A.lexicon({"one": [1, 2, 3, 4], "ore": [1, 5, 6, 7]})
    assert lexicon.num_states == 6
    assert lexicon.arcs.tolist()[:3] == [[0, 1, 1, -1], [1, 2, 2, 0], [1, 4, 5, 1]]


def test_the_scores_of_a_lexicon_are_learnt() -> None:
    weight = torch.zeros(2, requires_grad=True)
    lexicon = A.lexicon({"a": [1], "b": [2, 1]}, scores=weight)
    assert lexicon.scores.requires_grad
    total = torch.stack([score for _, _, score in walks(lexicon, 3, tensors=True)]).logsumexp(0)
    (gradient,) = torch.autograd.grad(total, weight)
    counts = torch.zeros(2)
    paths = list(walks(lexicon, 3))
    for _, outputs, _ in paths:
        counts += torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=2)
    torch.testing.assert_close(gradient, counts / len(paths))


def test_names_of_outputs() -> None:
    graph = A.ctc(vocab=8) @ A.lexicon({"yes": [5, 1, 7], "no": [3, 4]})
    log_probs = torch.full((1, 8, 8), -9.0)
    log_probs[:, range(8), [5, 1, 1, 7, 0, 3, 4, 4]] = 0.0
    p = graph.paths(log_probs)
    assert graph.names(p.outputs(p.decode())) == [["yes", "no"]]
    with pytest.raises(ValueError, match="names needs an automaton whose outputs have names"):
        A.linear([1]).names(torch.tensor([1]))
    with pytest.raises(ValueError, match="outputs must be below 2, the number of names, got 2"):
        graph.names(torch.tensor([2]))


def test_a_stack_is_padded() -> None:
    weight = torch.tensor([0.5, 1.5], requires_grad=True)
    long = A([(0, 1, 5), (1, 2, 6, -1)], scores=weight, start={0: 1.0}, final={1: 2.0, 2: 3.0})
    batch = A.stack([A.linear([7]), long])
    assert repr(batch) == "AutomatonBatch(2 automata, num_states=3, num_arcs=2)"
    assert (batch.num_states, batch.num_arcs) == (3, 2)
    assert batch.arcs.tolist() == [[[0, 1, 7, 7], [-1] * 4], [[0, 1, 5, 5], [1, 2, 6, -1]]]
    assert batch.scores.tolist() == [[0, 0], [0.5, 1.5]]
    assert batch.start.tolist() == [[0, -math.inf, -math.inf], [1, -math.inf, -math.inf]]
    assert batch.final.tolist() == [[-math.inf, 0, -math.inf], [-math.inf, 2, 3]]
    batch.scores[1].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A.linear("abc"), "labels must be integers, got the text 'abc'"),
        (lambda: A.linear(["a", "b"]), r"labels must be integers, got \['a', 'b'\]"),
        (lambda: A.linear([None]), r"labels must be integers, got \[None\]"),
        (lambda: A.linear([2**63]), r"labels must be integers, got \[9223372036854775808\]"),
        (lambda: A.linear([1, -1]), "labels must be at least 0, got -1 at position 1"),
        (lambda: A.linear([0.5]), r"labels must be integers, got dtype torch\.float32"),
        (lambda: A.linear(torch.zeros(2, 2)), r"labels must have one dimension, got shape \(2, 2\)"),
        (lambda: A.ctc(), "ctc needs either a target or vocab=, got neither"),
        (lambda: A.ctc([1], vocab=3), "ctc needs either a target or vocab=, got both"),
        (lambda: A.ctc([1, 0]), "target must not hold the blank 0, got it at position 1"),
        (lambda: A.ctc([1], blank=-1), "blank must be an integer of at least 0, got -1"),
        (lambda: A.ctc(vocab=0), "vocab must be a positive integer, .*, got 0"),
        (lambda: A.ctc(vocab=3, blank=3), "blank must be an integer from 0 to 2, got 3"),
        (lambda: A.lexicon({}), "words must have at least one word, got none"),
        (lambda: A.lexicon(["a"]), "words must map each word to its labels, got a list"),
        (lambda: A.lexicon({"a": []}), r"words\['a'\] must have at least one label, got none"),
        (lambda: A.lexicon({"a": [1, -3]}), r"words\['a'\] must be at least 0, got -3 at position 1"),
        (lambda: A.lexicon({"a": "b"}), r"words\['a'\] must be integers, got the text 'b'"),
        (lambda: A.lexicon({"a": [1]}, scores=[1.0, 2.0]), r"scores must have one number for each word, shape \(1,\)"),
        (lambda: A.lexicon({"a": [1]}, scores=[math.nan]), r"scores must be .* below \+inf, got scores\[0\] = nan"),
        (lambda: A.stack([]), "automata must have at least one Automaton, got none"),
        (lambda: A.stack([A.linear([1]), 3]), "automata must be a sequence of Automaton, got a int at 1"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
