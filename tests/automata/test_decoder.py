"""bx.CTCDecoder equals the enumeration of all alignments, and its texts are ranked by the sum over alignments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bellmax as bx

LETTERS = ["-", "a", "b"]
SPACED = ["-", "a", "b", " "]
WORDS = ["a", "ab", "bb"]
Bigram = Mapping[tuple[str, ...], tuple[float, float]]


def random_log_probs(*shape: int, seed: int, sharpness: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, dtype=torch.float64, generator=generator)).log_softmax(-1)


def write_bigram(path: Path, words: list[str], seed: int = 0, unknown: bool = False) -> Bigram:
    """Write an ARPA file with half of the bigrams. Return the logarithms with base 10, and the back-off weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> float:
        return -round(2 * float(torch.rand((), generator=generator)), 3) - 0.1

    unigrams = ["<s>", "</s>", *words, *(["<unk>"] if unknown else [])]
    entries: dict[tuple[str, ...], tuple[float, float]] = {(w,): (draw(), draw()) for w in unigrams}
    pairs = list(itertools.product(["<s>", *words], [*words, "</s>"]))
    entries.update({pair: (draw(), 0.0) for pair in pairs[::2]})
    lines = ["\\data\\", f"ngram 1={len(unigrams)}", f"ngram 2={len(pairs[::2])}", "", "\\1-grams:"]
    lines += [f"{score}\t{key[0]}\t{backoff}" for key, (score, backoff) in entries.items() if len(key) == 1]
    lines += ["", "\\2-grams:"]
    lines += [f"{score}\t{' '.join(key)}" for key, (score, _) in entries.items() if len(key) == 2]
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")
    return entries


def log_probability(bigram: Bigram, words: list[str]) -> float:
    """Return the natural logarithm of the probability of a sentence."""
    total = 0.0
    known = [word if (word,) in bigram else "<unk>" for word in words]
    for pair in itertools.pairwise(["<s>", *known, "</s>"]):
        total += bigram[pair][0] if pair in bigram else bigram[pair[:1]][1] + bigram[pair[1:]][0]
    return total * math.log(10)


def segmentations(text: str, words: list[str]) -> Iterator[list[str]]:
    if not text:
        yield []
    for word in words:
        if text.startswith(word):
            yield from ([word, *rest] for rest in segmentations(text[len(word) :], words))


def readings(path: tuple[int, ...], labels: list[str], lexicon: list[str] | None) -> Iterator[tuple[str, str]]:
    """Yield the texts of an alignment with the labels between the first and the last letter."""
    merged = "".join(labels[k] for k, _ in itertools.groupby(path) if k != 0)
    if "  " in merged:
        return
    inner = merged.strip(" ")
    if lexicon is None:
        yield inner, inner
    elif " " not in labels:
        yield from ((" ".join(words), inner) for words in segmentations(inner, lexicon))
    elif not inner or {*inner.split(" ")} <= {*lexicon}:
        yield inner, inner


class Enumeration:
    """The scores of all alignments and of all texts."""

    def __init__(
        self,
        log_probs: Tensor,
        labels: list[str],
        lexicon: list[str] | None = None,
        bigram: Bigram | None = None,
        lm_weight: float = 0.5,
        word_score: float = 0.0,
    ) -> None:
        sums: dict[tuple[str, str], list[float]] = {}
        rows = log_probs.tolist()
        for path in itertools.product(range(len(labels)), repeat=len(rows)):
            for key in readings(path, labels, lexicon):
                sums.setdefault(key, []).append(sum(row[k] for row, k in zip(rows, path, strict=True)))
        self.best, self.texts = -math.inf, dict[str, float]()
        for (text, inner), scores in sums.items():
            words = text.split()
            extra = word_score * len(words)
            if bigram is not None:
                symbols = words if lexicon is not None else list(inner.replace(" ", "|"))
                extra += lm_weight * log_probability(bigram, symbols)
            self.best = max(self.best, max(scores) + extra)
            self.texts[text] = float(torch.tensor(scores, dtype=torch.float64).logsumexp(0)) + extra
        self.total = float(torch.tensor([*self.texts.values()], dtype=torch.float64).logsumexp(0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"word_score": -0.7},
    {"lexicon": WORDS},
    {"lexicon": WORDS, "word_score": 0.9},
    {"ngram": True, "lm_weight": 0.8},
    {"lexicon": WORDS, "ngram": True},
    {"lexicon": WORDS, "ngram": True, "lm_weight": 1.3, "word_score": 0.6},
    {"lexicon": WORDS, "ngram": True, "lm_weight": 0.0},
]


def make(labels: list[str], options: Mapping[str, Any], tmp_path: Path) -> tuple[bx.CTCDecoder, dict[str, Any]]:
    """Return a decoder, and the options of its enumeration."""
    passed = {**options}
    if not passed.pop("ngram", False):
        return bx.CTCDecoder(labels, **passed), passed
    symbols = passed.get("lexicon") or ["|" if label == " " else label for label in labels[1:]]
    path = tmp_path / "bigram.arpa"
    bigram = write_bigram(path, symbols)
    return bx.CTCDecoder(labels, ngram=path, **passed), {**passed, "bigram": bigram}


@pytest.mark.parametrize("labels", [LETTERS, SPACED], ids=["letters", "spaced"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_alignments_and_texts_equal_enumeration(labels: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    decoder, others = make(labels, options, tmp_path)
    log_probs = random_log_probs(2, 5, len(labels), seed=3)
    results = decoder.decode(log_probs, lengths=[5, 4], n_best=10)
    for rows, count, texts in zip(log_probs, (5, 4), results, strict=True):
        expected = Enumeration(rows[:count], labels, **others)
        p = decoder.automaton.paths(rows[:count], omega="hard")
        assert float(p.value) == pytest.approx(expected.best, abs=1e-10)
        total = decoder.automaton.paths(rows[:count]).value
        assert float(total) == pytest.approx(expected.total, abs=1e-10)  # no alignment is counted twice
        ranked = sorted(expected.texts.items(), key=lambda item: -item[1])
        assert [result.text for result in texts[:2]] == [text for text, _ in ranked[:2]]
        assert len({result.text for result in texts}) >= min(3, len(ranked))
        scores = [result.score for result in texts]
        assert scores == pytest.approx([expected.texts[result.text] for result in texts], abs=1e-10)
        assert scores == sorted(scores, reverse=True)
        for result in texts:
            assert [word.text for word in result.words] == result.text.split()
            spans = [frame for word in result.words for frame in (word.start, word.end)]
            assert spans == sorted(spans)
            assert all(0 <= frame <= count for frame in spans)
            assert all(0 < word.confidence <= 1 for word in result.words)


def test_best_text_is_missed_rarely(tmp_path: Path) -> None:
    missed = 0
    for seed in range(40):
        decoder, others = make(SPACED, OPTIONS[5], tmp_path)
        log_probs = random_log_probs(1, 6, 4, seed=seed)
        [[best]] = decoder.decode(log_probs)
        expected = Enumeration(log_probs[0], SPACED, **others)
        assert best.score == pytest.approx(expected.texts[best.text], abs=1e-10)
        missed += best.score < max(expected.texts.values()) - 1e-9
    assert missed <= 1


def test_certain_networks_have_several_texts() -> None:
    log_probs = random_log_probs(2, 6, 3, seed=0, sharpness=15.0)
    results = bx.CTCDecoder(LETTERS).decode(log_probs, n_best=4)
    assert [len({result.text for result in texts}) for texts in results] == [4, 4]


def test_greedy_merges_and_removes_blanks() -> None:
    log_probs = random_log_probs(8, 12, 4, seed=1)
    lengths = torch.tensor([12, 1, 5, 12, 7, 0, 3, 12])
    decoder = bx.CTCDecoder(SPACED, lexicon=["b"])
    for result, rows, count in zip(decoder.greedy(log_probs, lengths), log_probs, lengths.tolist(), strict=True):
        scores, classes = rows[:count].max(-1)
        merged = [k for k in torch.unique_consecutive(classes).tolist() if k != 0]
        assert result.text == " ".join("".join(SPACED[k] for k in merged).split())
        assert result.score == pytest.approx(float(scores.sum()))
        assert "".join(word.text for word in result.words) == result.text.replace(" ", "")


def spoken(text: str, labels: list[str]) -> Tensor:
    """Return log-probabilities (1, T, V) whose best class at each frame is a letter of the text."""
    logits = torch.zeros(1, len(text), len(labels), dtype=torch.float64)
    logits[0, range(len(text)), [labels.index(letter) for letter in text]] = 5.0
    return logits.log_softmax(-1)


def test_words_have_times_and_confidences() -> None:
    decoder = bx.CTCDecoder(SPACED, lexicon=WORDS)
    log_probs = spoken("-a-bb  a- ", SPACED)
    [[best]] = decoder.decode(log_probs)
    high = float(log_probs.max().exp())
    assert (best.text, best.labels) == ("ab a", [1, 2, 3, 1])
    assert [word[:3] for word in best.words] == [("ab", 1, 5), ("a", 7, 8)]
    assert [word.confidence for word in best.words] == pytest.approx([high, high])


def test_words_without_delimiter_are_told_apart_by_the_lexicon(tmp_path: Path) -> None:
    decoder = bx.CTCDecoder(LETTERS, lexicon={"to": ["a"], "day": ["b"], "today": ["a", "b"]}, word_score=-1.0)
    first, second = decoder.decode(spoken("ab", LETTERS), n_best=2)[0]
    assert (first.text, second.text) == ("today", "to day")
    assert first.labels == second.labels == [1, 2]
    assert first.score == pytest.approx(second.score + 1.0)
    assert [word[:3] for word in second.words] == [("to", 0, 1), ("day", 1, 2)]


def test_pieces_start_words_and_special_tokens_are_left_out() -> None:
    labels = ["<pad>", "<s>", "▁a", "b", "▁", "[UNK]"]
    decoder = bx.CTCDecoder(labels)
    log_probs = torch.full((1, 7, 6), -4.0, dtype=torch.float64)
    log_probs[0, range(7), [1, 2, 3, 0, 2, 4, 5]] = -0.1
    assert decoder.greedy(log_probs)[0].text == "ab a"
    [[best]] = decoder.decode(log_probs)
    assert best.text == "ab a"
    assert [word.text for word in best.words] == ["ab", "a"]
    spelled = bx.CTCDecoder(labels, lexicon={"ab": ["▁a", "b"]})
    assert spelled.decode(log_probs)[0][0].text == "ab ab"


def test_blank_can_be_any_class() -> None:
    log_probs = random_log_probs(2, 5, 4, seed=5)
    [first], [second] = bx.CTCDecoder(SPACED, lexicon=WORDS).decode(log_probs)
    moved = bx.CTCDecoder([*SPACED[1:], "-"], blank=3, lexicon=WORDS).decode(log_probs.roll(-1, 2))
    for before, [after] in zip((first, second), moved, strict=True):
        assert (after.text, after.words) == (before.text, before.words)
        assert after.score == pytest.approx(before.score)


@pytest.mark.parametrize("lexicon", [None, WORDS])
def test_no_frames_and_no_alignment_give_empty_texts(lexicon: list[str] | None) -> None:
    decoder = bx.CTCDecoder(SPACED, lexicon=lexicon)
    empty = ("", 0.0, [], [])
    assert decoder.decode(torch.zeros(2, 0, 4), n_best=2) == [[empty], [empty]]
    assert decoder.greedy(torch.zeros(1, 0, 4)) == [empty]
    assert decoder.decode(torch.zeros(0, 3, 4)) == []
    log_probs = random_log_probs(3, 4, 4, seed=0)
    log_probs[1] = -torch.inf
    log_probs[2, 2:] = torch.nan
    results = decoder.decode(log_probs, lengths=[0, 4, 2])
    assert results[0] == [empty]
    assert results[1] == [("", -math.inf, [], [])]
    assert math.isfinite(results[2][0].score)


def test_texts_that_the_lexicon_cannot_spell_are_impossible() -> None:
    log_probs = torch.full((1, 2, 3), -torch.inf)
    log_probs[0, :, 1] = 0.0
    assert bx.CTCDecoder(LETTERS, lexicon=["ab"]).decode(log_probs) == [[("", -math.inf, [], [])]]


def test_lengths_and_random_numbers() -> None:
    decoder = bx.CTCDecoder(SPACED, lexicon=WORDS)
    log_probs = random_log_probs(2, 6, 4, seed=2)
    state = torch.get_rng_state()
    results = decoder.decode(log_probs, lengths=torch.tensor([6, 3]), n_best=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert results == decoder.decode(log_probs, lengths=[6, 3], n_best=3)
    [[alone]] = decoder.decode(log_probs[1:, :3])
    assert results[1][0].text == alone.text
    assert results[1][0].score == pytest.approx(alone.score)
    [[single]] = decoder.decode(log_probs[:1].float())
    assert single.text == results[0][0].text


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "labels must have a letter besides the blank and the delimiter"),
        (["-"], {}, "labels must have a letter besides the blank and the delimiter"),
        (["-", "|", "<s>"], {}, "labels must have a letter besides the blank and the delimiter"),
        ("-ab", {}, "labels must be a sequence of strings, one for each class, got '-ab'"),
        (["-", "a", "a"], {}, "labels must be different, got 'a' for the classes 1 and 2"),
        (LETTERS, {"blank": 3}, "blank must be a class, from 0 to 2, got 3"),
        (LETTERS, {"lexicon": []}, "lexicon must have at least one word, got none"),
        (LETTERS, {"lexicon": "ab"}, "lexicon must be a sequence of words or map words to labels, got the text 'ab'"),
        (LETTERS, {"lexicon": ["ab", ""]}, "lexicon must have words with at least one letter, got ''"),
        (LETTERS, {"lexicon": ["ab", "tab"]}, "lexicon has the word 'tab', but 't' is not a label that spells words"),
        (SPACED, {"lexicon": ["ab "]}, "lexicon has the word 'ab ', but ' ' is not a label that spells words"),
        (LETTERS, {"lm_weight": math.nan}, "lm_weight must be a finite number, got nan"),
        (LETTERS, {"word_score": math.inf}, "word_score must be a finite number, got inf"),
    ],
)
def test_wrong_arguments_raise_one_sentence(labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        bx.CTCDecoder(labels, **options)


def test_wrong_inputs_raise_one_sentence(tmp_path: Path) -> None:
    decoder = bx.CTCDecoder(LETTERS)
    nan = torch.zeros(1, 4, 3)
    nan[0, 2, 1] = torch.nan
    for call in (decoder.decode, decoder.greedy):
        with pytest.raises(ValueError, match=r"^log_probs must have shape \(B, T, 3\) for 3 labels, got \(1, 4, 5\)"):
            call(torch.zeros(1, 4, 5))
        with pytest.raises(ValueError, match=r"^log_probs must have shape \(B, T, 3\) for 3 labels, got \(4, 3\)"):
            call(torch.zeros(4, 3))
        with pytest.raises(ValueError, match=r"^lengths must have shape \(2,\), got \(3,\)"):
            call(torch.zeros(2, 4, 3), lengths=[1, 2, 3])
        with pytest.raises(ValueError, match=r"^lengths must be .* got 5"):
            call(torch.zeros(2, 4, 3), lengths=[1, 5])
        with pytest.raises(
            ValueError, match=r"^log_probs must be log-probabilities of at most 0.*, got nan for class 1 at frame 2"
        ):
            call(nan)
        with pytest.raises(ValueError, match=r"got 0\.5 for class 0 at frame 0 of batch member 0$"):
            call(torch.full((1, 4, 3), 0.5))
    with pytest.raises(ValueError, match=r"^n_best must be a positive integer, got 0$"):
        decoder.decode(torch.zeros(1, 4, 3), n_best=0)
    write_bigram(tmp_path / "words.arpa", ["a"])
    with pytest.raises(ValueError, match=r"^the ARPA file has no word 'ab', and no word <unk> for unknown words$"):
        bx.CTCDecoder(LETTERS, lexicon=["a", "ab"], ngram=tmp_path / "words.arpa")


def test_unknown_words_have_the_score_of_unk(tmp_path: Path) -> None:
    bigram = write_bigram(tmp_path / "words.arpa", ["a"], unknown=True)
    decoder = bx.CTCDecoder(LETTERS, lexicon=["a", "b"], ngram=tmp_path / "words.arpa", lm_weight=1.0)
    log_probs = random_log_probs(1, 4, 3, seed=0)
    others = {"lexicon": ["a", "b"], "bigram": bigram, "lm_weight": 1.0}
    for result in decoder.decode(log_probs, n_best=3)[0]:
        assert result.score == pytest.approx(Enumeration(log_probs[0], LETTERS, **others).texts[result.text])


@pytest.mark.parametrize("seed", range(3))
def test_texts_and_scores_equal_pyctcdecode(seed: int) -> None:
    theirs = pytest.importorskip("pyctcdecode", reason="pyctcdecode is not installed")
    labels = ["", "a", "b"]
    log_probs = random_log_probs(1, 6, 3, seed=seed)
    decoder = theirs.build_ctcdecoder(labels)
    wide = {"beam_width": 1000, "beam_prune_logp": -1e9, "token_min_logp": -1e9}
    beams = decoder.decode_beams(log_probs[0].float().numpy(), **wide)
    results = bx.CTCDecoder(labels).decode(log_probs, n_best=3)[0]
    assert [result.text for result in results] == [beam[0] for beam in beams[:3]]
    assert [result.score for result in results] == pytest.approx([beam[-2] for beam in beams[:3]], abs=1e-4)


def test_text_of_pyctcdecode_with_an_ngram_is_not_better(tmp_path: Path) -> None:
    theirs = pytest.importorskip("pyctcdecode", reason="pyctcdecode is not installed")
    pytest.importorskip("kenlm", reason="kenlm is not installed")
    decoder, others = make(SPACED, {"lexicon": WORDS, "ngram": True, "word_score": 1.5}, tmp_path)
    peer = theirs.build_ctcdecoder(["", *SPACED[1:]], str(tmp_path / "bigram.arpa"), WORDS, alpha=0.5, beta=1.5)
    for seed in range(5):
        log_probs = random_log_probs(1, 5, 4, seed=seed, sharpness=2.0)
        texts = Enumeration(log_probs[0], SPACED, **others).texts
        [[best]] = decoder.decode(log_probs)
        assert best.score >= texts.get(peer.decode(log_probs[0].float().numpy()), -math.inf) - 1e-9
