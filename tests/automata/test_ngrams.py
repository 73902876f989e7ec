"""N-grams from ARPA files, compared with the definition of back-off on all sentences."""

from __future__ import annotations

import math
import random
from itertools import groupby, product
from pathlib import Path

import pytest
import torch
from support.languages import gram_score, language, random_grams, sentences, write_arpa

import bellmax as bx

A = bx.Automaton
WORDS = ("ab", "b", "c")


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_each_sentence_has_one_path_with_its_probability(order: int, density: float, tmp_path: Path) -> None:
    grams = random_grams(random.Random(10 * order + int(density)), WORDS, order, density)
    automaton = A.ngram(write_arpa(tmp_path / "words.arpa", grams))
    assert automaton.label_names == automaton.output_names == WORDS
    got = language(automaton, 4)
    assert len(got) == sum(3**n for n in range(5))
    for sentence in sentences(WORDS, 4):
        numbers = tuple(WORDS.index(word) for word in sentence)
        assert got[numbers, numbers] == pytest.approx([gram_score(grams, sentence)], abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_composition_resolves_back_off_exactly(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    grams = random_grams(rng, WORDS, 1 + seed % 3, 0.4)
    spellings = {"c": [1], "ab": [1, 2], "b": [2]}
    graph = A.lexicon(spellings) @ A.ngram(write_arpa(tmp_path / "words.arpa", grams))
    assert graph.output_names == tuple(spellings)
    expected: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for sentence in sentences(WORDS, 4):
        letters = tuple(letter for word in sentence for letter in spellings[word])
        if len(letters) <= 4:
            expected[letters, tuple(list(spellings).index(word) for word in sentence)] = gram_score(grams, sentence)
    got = language(graph, 4)
    assert got.keys() == expected.keys()
    for key, score in expected.items():
        assert got[key] == pytest.approx([score], abs=1e-6)


def test_an_explicit_ngram_is_never_backed_off(tmp_path: Path) -> None:
    grams = {("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, 0.0), ("a",): (-0.1, 2.0), ("a", "a"): (-5.0, 0.0)}
    automaton = A.ngram(write_arpa(tmp_path / "words.arpa", grams))
    scores = language(A.linear([0, 0]) @ automaton, 2)
    assert scores == {((0, 0), (0, 0)): [pytest.approx((-0.1 - 5.0 + 2.0 - 1.0) * math.log(10))]}


@pytest.mark.parametrize("seed", range(4))
def test_a_vocabulary_selects_words_and_maps_others_to_unk(seed: int, tmp_path: Path) -> None:
    grams = random_grams(random.Random(seed), ("<unk>", "b", "c"), 3, 0.5)
    path = write_arpa(tmp_path / "words.arpa", grams)
    vocabulary = ("c", "new", "newer")
    automaton = A.ngram(path, vocabulary)
    assert automaton.label_names == vocabulary
    got = language(automaton, 3)
    assert len(got) == sum(3**n for n in range(4))
    for sentence in sentences(vocabulary, 3):
        numbers = tuple(vocabulary.index(word) for word in sentence)
        assert got[numbers, numbers] == pytest.approx([gram_score(grams, sentence)], abs=1e-6)
    words = A.lexicon({"newer": [1], "b": [2], "c": [3]})
    by_name = language(words @ A.ngram(path), 3)
    for sentence in sentences(("newer", "b", "c"), 3):
        numbers = tuple(("newer", "b", "c").index(word) for word in sentence)
        letters = tuple(number + 1 for number in numbers)
        assert by_name[letters, numbers] == pytest.approx([gram_score(grams, sentence)], abs=1e-6)


def test_a_label_of_the_vocabulary_can_be_no_word(tmp_path: Path) -> None:
    grams = random_grams(random.Random(0), ("a", "b"), 2)
    letters = A.ngram(write_arpa(tmp_path / "letters.arpa", grams), [None, "b", "a"])
    got = language(A.ctc(vocab=3) @ letters, 3)
    for frames in product(range(3), repeat=3):
        outputs = tuple(label for label, _ in groupby(frames) if label)
        assert got[frames, outputs] == pytest.approx([gram_score(grams, ["_ba"[label] for label in outputs])], abs=1e-6)
    assert letters.names(torch.tensor([2, 1])) == ["a", "b"]


def test_probabilities_of_a_normalized_model_add_up(tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    third = math.log10(1 / 3)
    # p(a | a) = 1/2 is explicit; the back-off weight gives the other half to b and the end
    backoff = math.log10(0.5 / (2 / 3))
    path.write_text(
        f"A comment\n\n\\data\\\r\nngram 1=4\nngram 2=1\n\n\\1-grams:\n-99\t<s>\n{third} </s>\n{third}\ta\t{backoff}\n"
        f"{third}\tb\n\n\\2-grams:\n{math.log10(0.5)}\ta a\n\n\\end\\\nignored",
        encoding="utf-8",
    )
    automaton = A.ngram(path)
    assert repr(automaton) == "Automaton(num_states=2, num_ngrams=3)"
    assert (automaton.num_states, automaton.num_arcs) == (2, 4)
    assert automaton.states == ["", "a"]
    outgoing = automaton.final.exp().index_add(0, automaton.arcs[:, 0], automaton.scores.exp())
    torch.testing.assert_close(outgoing, torch.ones(2, dtype=torch.float64))
    total = sum(math.exp(score) for (score,) in language(automaton, 9).values())
    assert total == pytest.approx(1, abs=0.05)


def test_words_may_have_other_white_space(tmp_path: Path) -> None:
    grams = {("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, 0.0), ("a\u00a0b",): (-0.5, 0.0), ("c\u2028d",): (-0.5, 0.0)}
    assert A.ngram(write_arpa(tmp_path / "words.arpa", grams)).label_names == ("a\u00a0b", "c\u2028d")


HEADER = ["\\data\\", "ngram 1=3", "ngram 2=1", ""]
UNIGRAMS = ["\\1-grams:", "-99\t<s>\t-0.3", "-1\t</s>", "-0.5\ta\t-0.2", ""]
BIGRAMS = ["\\2-grams:", "-0.1\t<s> a", "", "\\end\\"]
GOOD = [*HEADER, *UNIGRAMS, *BIGRAMS]


def test_the_file_of_the_next_test_is_right(tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    path.write_text("\n".join(GOOD), encoding="utf-8")
    assert A.ngram(path, ["a"]).num_states == 3


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, "data", r"line 14: must have a line \\data\\, got none"),
        (2, "ngram 2=3", "line 2: must be the number of 1-grams, got 'ngram 2=3'"),
        (2, "ngrams 1=3", "line 2: must be the number of 1-grams, such as ngram 1=100, got 'ngrams 1=3'"),
        (3, "ngram two=1", r"line 3: must be \\1-grams:, got 'ngram two=1'"),
        (2, "ngram 1=4", r"line 10: must come after 4 1-grams, got 3"),
        (3, "ngram 2=2", r"line 13: must come after 2 2-grams, got 1"),
        (5, "\\unigrams:", r"line 5: must be \\1-grams:, got '\\\\unigrams:'"),
        (10, "\\3-grams:", r"line 10: must be \\2-grams:, got '\\\\3-grams:'"),
        (10, "\\end\\", r"line 10: must be \\2-grams:, got '\\\\end\\\\'"),
        (13, "", r"line 13: must be \\end\\, got the end of the file"),
        (13, "\\3-grams:", r"line 13: must be \\end\\, got"),
        (8, "-O.5\ta\t-0.2", "line 8: a log-probability must be a number, got '-O.5'"),
        (8, "nan\ta\t-0.2", "line 8: a log-probability must be a number, got 'nan'"),
        (8, "0.5\ta\t-0.2", r"line 8: a log-probability must be at most 0, got 0\.5"),
        (8, "-0.5\ta\tb", "line 8: a back-off weight must be a number, got 'b'"),
        (8, "-0.5\ta\tinf", "line 8: a back-off weight must be a number, got 'inf'"),
        (8, "-0.5", "line 8: a 1-gram must have a log-probability, 1 word and at most one back-off weight, got '-0.5'"),
        (8, "-0.5\ta\t-0.2\t3", "line 8: a 1-gram must have .* got"),
        (11, "-0.1\t<s> a -0.2", "line 11: a 2-gram must have a log-probability, 2 words, got '-0.1"),
        (8, "-0.5\t</s>", "line 8: the n-gram '</s>' must occur once, got it again"),
        (11, "-0.1\ta <s>", "line 11: <s> must be the first word and </s> the last, got 'a <s>'"),
        (11, "-0.1\t</s> a", "line 11: <s> must be the first word and </s> the last, got '</s> a'"),
        (11, "-0.1\tb a", "line 11: each word must be a 1-gram, got 'b' in 'b a'"),
        (7, "-1\tb", "must have the 1-gram </s> with a positive probability"),
        (7, "-inf\t</s>", "must have the 1-gram </s> with a positive probability"),
    ],
)
def test_malformed_files_are_named_with_the_line(number: int, line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    path.write_text("\n".join([*GOOD[: number - 1], line, *GOOD[number:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        A.ngram(path)
    assert str(error.value).startswith(str(path))


def test_contexts_must_be_listed(tmp_path: Path) -> None:
    grams = {("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, 0.0), ("a",): (-0.5, 0.0)}
    grams |= {("a", "a"): (-1.0, 0.0), ("a", "</s>"): (-1.0, 0.0), ("<s>", "a", "a"): (-1.0, 0.0)}
    path = write_arpa(tmp_path / "words.arpa", grams)
    with pytest.raises(ValueError, match="line 16: the 3-gram '<s> a a' needs the 2-gram '<s> a'"):
        A.ngram(path)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ([], "vocabulary must have at least one word, got none"),
        ([None], "vocabulary must have at least one word, got none"),
        (["a", "a"], "vocabulary must have each word once, got 'a' at positions 0 and 1"),
        (["a", "d"], "the ARPA file has no word 'd', and no word <unk> for unknown words"),
        ("a", "vocabulary must be a sequence of words"),
        ([1], "vocabulary must be a sequence of words"),
    ],
)
def test_bad_vocabularies_are_named(vocabulary: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    path.write_text("\n".join(GOOD), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        A.ngram(path, vocabulary)


def test_unknown_words_and_empty_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "words.arpa"
    path.write_text("\n".join(GOOD), encoding="utf-8")
    with pytest.raises(ValueError, match="must have all words of the left one, but it has no word 'd'"):
        A.lexicon({"a": [1], "d": [2]}) @ A.ngram(path)
    with pytest.raises(ValueError, match="outputs of the left automaton must have names, but 5 has none"):
        A.lexicon({"a": [1]}).union(A.linear([5])) @ A.ngram(path, [None, "a"])
    write_arpa(path, {("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, 0.0)})
    with pytest.raises(ValueError, match="must have at least one word other than <s> and </s>, got none"):
        A.ngram(path)
    path.write_bytes(b"\xef\xbb\xbf\\data\\\nngram 1=\xff")
    with pytest.raises(ValueError, match="line 2: must be UTF-8, got"):
        A.ngram(path)
    with pytest.raises(FileNotFoundError):
        A.ngram(tmp_path / "none.arpa")


def test_a_large_model_needs_a_composition(tmp_path: Path) -> None:
    grams = {("<s>",): (-99.0, 0.0), ("</s>",): (-1.0, 0.0)}
    grams |= {(f"w{n}",): (-4.0, -0.1) for n in range(7500)} | {("w0", "w0"): (-1.0, 0.0)}
    model = A.ngram(write_arpa(tmp_path / "words.arpa", grams))
    assert repr(model) == "Automaton(num_states=7501, num_ngrams=7501)"
    with pytest.raises(ValueError, match="an n-gram of 7501 states and 7500 words has too many arcs on its own"):
        _ = model.arcs
    assert (A.linear([3]) @ model).scores.tolist() == pytest.approx([-4 * math.log(10)])
