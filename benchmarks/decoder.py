"""Decoders of CTC networks on synthetic utterances, with one score for the texts of all decoders. Used by automata.py.

The utterances are synthetic: 20 utterances of 300 frames, with noise, a lexicon of 50 words and a bigram. The score of
a text is the logarithm of the sum over its alignments, plus the weighted score of the bigram. Decoders that are not
installed are left out.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import bellmax as bx

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LABELS = ["", " ", *LETTERS]
LM_WEIGHT = 0.5
Decode = Callable[[], list[str]]


def write_bigram(path: Path, words: list[str]) -> None:
    """Write random log-probabilities of all words, and of half of the pairs of words."""
    pairs = random.sample(list(product(["<s>", *words], [*words, "</s>"])), len(words) ** 2 // 2)
    unigrams = [f"{-random.uniform(1, 3):.3f}\t{word}\t-0.5" for word in ("<s>", "</s>", "<unk>", *words)]
    bigrams = [f"{-random.uniform(0.1, 3):.3f}\t{' '.join(pair)}" for pair in pairs]
    lines = ["\\data\\", f"ngram 1={len(unigrams)}", f"ngram 2={len(bigrams)}", "", "\\1-grams:", *unigrams]
    path.write_text("\n".join([*lines, "", "\\2-grams:", *bigrams, "", "\\end\\", ""]), encoding="utf-8")


def utterances(words: list[str], count: int = 20, frames: int = 300) -> Tensor:
    """Return log-probabilities (count, frames, V) of noisy random texts."""
    logits = 1.5 * torch.randn(count, frames, len(LABELS))
    for row in logits:
        path: list[int] = []
        text = " ".join(random.choices(words, k=frames // 10))
        for letter in text:
            path += [LABELS.index(letter), *[0] * random.randint(1, 2)]
        row[range(frames), path[:frames]] += 4.0
    return logits.log_softmax(-1)


def score(text: str, log_probs: Tensor, words: list[str], ngram: bx.Automaton) -> float:
    """Return the score of a text, −∞ if a word is not in the lexicon."""
    spoken = text.split()
    if not {*spoken} <= {*words}:
        return -float("inf")
    sentence = bx.Automaton.linear([words.index(word) for word in spoken]) @ ngram
    prior = float(sentence.paths(torch.zeros(len(spoken), len(words), dtype=torch.float64)).value)
    inner = [LABELS.index(letter) for letter in " ".join(spoken)]
    forms = [[1] * first + inner + [1] * last for first, last in product((0, 1), repeat=2)]
    values = torch.stack([bx.CTC(log_probs.double(), torch.tensor(form)).value for form in forms])
    return float(values.logsumexp(0)) + LM_WEIGHT * prior


def of_flashlight(path: Path, words: list[str], log_probs: Tensor, beam: int) -> Decode:
    from flashlight.lib.text import decoder as fl
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    dictionary = Dictionary([*words, "<unk>"])
    model, trie = KenLM(str(path), dictionary), fl.Trie(len(LABELS), 1)
    start = model.start(False)
    for word in words:
        number = dictionary.get_index(word)
        trie.insert([*(LABELS.index(letter) for letter in word), 1], number, model.score(start, number)[1])
    trie.smear(fl.SmearingMode.MAX)
    options = fl.LexiconDecoderOptions(
        beam_size=beam, beam_size_token=len(LABELS), beam_threshold=1e9, lm_weight=LM_WEIGHT, word_score=0.0,
        unk_score=-float("inf"), sil_score=0.0, log_add=True, criterion_type=fl.CriterionType.CTC,
    )  # fmt: skip
    decoder = fl.LexiconDecoder(options, trie, model, 1, 0, dictionary.get_index("<unk>"), [], False)
    rows = log_probs.float().contiguous()

    def decode() -> list[str]:
        best = [decoder.decode(row.data_ptr(), *row.shape)[0] for row in rows]
        return [" ".join(dictionary.get_entry(word) for word in one.words if word >= 0) for one in best]

    return decode


def of_pyctcdecode(path: Path, words: list[str], log_probs: Tensor) -> Decode:
    import kenlm  # noqa: F401  (pyctcdecode needs it, but does not say so)
    from pyctcdecode import build_ctcdecoder

    decoder = build_ctcdecoder(LABELS, str(path), unigrams=words, alpha=LM_WEIGHT, beta=0.0)
    return lambda: [decoder.decode(row) for row in log_probs.numpy()]


def decoders(path: Path, words: list[str], log_probs: Tensor) -> Iterator[tuple[str, Decode]]:
    ours = bx.CTCDecoder(LABELS, lexicon=words, ngram=path, lm_weight=LM_WEIGHT)
    yield "bellmax", lambda: [best.text for (best,) in ours.decode(log_probs)]
    makers: list[tuple[str, Callable[[], Decode]]] = [
        ("flashlight-text, 50 beams", lambda: of_flashlight(path, words, log_probs, 50)),
        ("flashlight-text, 500 beams", lambda: of_flashlight(path, words, log_probs, 500)),
        ("pyctcdecode", lambda: of_pyctcdecode(path, words, log_probs)),
    ]
    for name, make in makers:
        try:
            yield name, make()
        except ImportError as error:  # noqa: PERF203
            print(f"{name} is left out: {error}", file=sys.stderr)


def compare() -> list[dict[str, Any]]:
    """Return the name and the time of each decoder, and how many of its texts have a lower or a higher score than ours.

    ``texts`` has the pairs of texts (bellmax, decoder) with different scores.
    """
    random.seed(0)
    torch.manual_seed(0)
    words = sorted({"".join(random.choices(LETTERS, k=random.randint(3, 8))) for _ in range(50)})
    log_probs = utterances(words)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bigram.arpa"
        write_bigram(path, words)
        ngram = bx.Automaton.ngram(path, words)
        for name, decode in decoders(path, words, log_probs):
            decode()
            started = time.perf_counter()
            texts = decode()
            row = {"name": name, "seconds": time.perf_counter() - started, "lower": None, "higher": None}
            scores = [score(text, log_prob, words, ngram) for text, log_prob in zip(texts, log_probs, strict=True)]
            if not rows:
                best, ours = scores, texts
            else:
                off = [one - first for one, first in zip(scores, best, strict=True)]
                row["lower"], row["higher"] = sum(x < -1e-6 for x in off), sum(x > 1e-6 for x in off)
                row["texts"] = [[ours[n], texts[n]] for n in range(len(off)) if abs(off[n]) > 1e-6]
            rows.append(row)
    return rows
