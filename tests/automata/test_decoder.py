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
    assert missed <= 2


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
