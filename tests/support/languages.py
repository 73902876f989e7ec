"""Enumeration of the paths of automata, and random automata and n-grams."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bellmax as bx

Symbols = tuple[int, ...]
Walk = tuple[Symbols, Symbols, Any]
Language = dict[tuple[Symbols, Symbols], list[float]]


def walks(
    automaton: bx.Automaton, most: int, labels: Symbols | None = None, *, tensors: bool = False
) -> Iterator[Walk]:
    """Labels, outputs and score of each accepted path of at most ``most`` labels, or of exactly these labels."""
    arcs = automaton.arcs.tolist()
    vectors = automaton.scores, automaton.start, automaton.final
    scores, start, final = (list(v.unbind()) if tensors else v.tolist() for v in vectors)
    leaving: dict[int, list[int]] = {}
    for n, arc in enumerate(arcs):
        leaving.setdefault(arc[0], []).append(n)

    def extend(state: int, read: Symbols, written: Symbols, score: Any) -> Iterator[Walk]:
        if final[state] > -math.inf and (labels is None or len(read) == len(labels)):
            yield read, written, score + final[state]
        for n in leaving.get(state, ()):
            _, target, label, output = arcs[n]
            if label >= 0:
                fits = len(read) < most if labels is None else labels[len(read) : len(read) + 1] == (label,)
                if not fits:
                    continue
            after = (*read, label) if label >= 0 else read
            yield from extend(target, after, (*written, output) if output >= 0 else written, score + scores[n])

    for state in range(automaton.num_states):
        if start[state] > -math.inf:
            yield from extend(state, (), (), start[state])


def language(automaton: bx.Automaton, most: int) -> Language:
    """The scores of the accepted paths by labels and outputs, sorted."""
    return sort_scores(walks(automaton, most))


def sort_scores(paths: Iterator[Walk]) -> Language:
    """Scores by labels and outputs, sorted and rounded."""
    scores: Language = {}
    for labels, outputs, score in paths:
        scores.setdefault((labels, outputs), []).append(round(score, 7))
    return {key: sorted(values) for key, values in scores.items()}


def composed(left: bx.Automaton, right: bx.Automaton, most: int, *, tensors: bool = False) -> Iterator[Walk]:
    """The paths of a composition: each pair of a left path and a right path that reads its outputs."""
    by_labels: dict[Symbols, list[Walk]] = {}
    for labels, outputs, score in walks(left, most, tensors=tensors):
        if outputs not in by_labels:
            by_labels[outputs] = list(walks(right, 0, outputs, tensors=tensors))
        for _, written, other in by_labels[outputs]:
            yield labels, written, score + other


def random_automaton(
    rng: random.Random,
    size: int = 3,
    num_arcs: int = 6,
    symbols: int = 2,
    epsilon: float = 0.3,
    *,
    tensors: bool = False,
) -> bx.Automaton:
    """An automaton with several start and final states. Its arcs without labels lead to later states."""
    while True:
        rows = []
        for _ in range(num_arcs):
            source, target = rng.randrange(size), rng.randrange(size)
            label = -1 if source < target and rng.random() < epsilon else rng.randrange(symbols)
            output = -1 if rng.random() < epsilon else rng.randrange(symbols)
            rows.append((source, target, label, output))
        generator = torch.Generator().manual_seed(rng.randrange(10**6))

        def draw(count: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(count, generator=generator, dtype=torch.float64)

        scores, start, final = draw(num_arcs), draw(size), draw(size)
        start[rng.randrange(size)] = -math.inf
        final[rng.randrange(size)] = -math.inf
        if tensors:
            scores, start, final = (vector.requires_grad_() for vector in (scores, start, final))
        try:
            return bx.Automaton(rows, scores=scores, start=start, final=final)
        except ValueError:  # no path
            continue


Grams = dict[tuple[str, ...], tuple[float, float]]


def random_grams(rng: random.Random, words: Sequence[str], order: int, density: float = 0.5) -> Grams:
    """Logarithms with base 10 of probabilities and back-off weights of random n-grams, which are not normalized."""
    grams: Grams = {}
    for word in ("<s>", "</s>", *words):
        grams[(word,)] = (-99.0 if word == "<s>" else -rng.random() - 0.1, round(rng.gauss(0, 0.3), 4))
    for n in range(2, order + 1):
        for context in [words for words in grams if len(words) == n - 1 and words[-1] != "</s>"]:
            for word in (*words, "</s>"):
                if rng.random() < density:
                    backoff = 0.0 if rng.random() < 0.3 else round(rng.gauss(0, 0.3), 4)
                    grams[(*context, word)] = (-round(rng.random(), 4), backoff)
    return grams


def write_arpa(path: Path, grams: Grams) -> Path:
    """Write n-grams in the ARPA format."""
    order = max(map(len, grams))
    by_order = [[words for words in grams if len(words) == n] for n in range(1, order + 1)]
    lines = ["\\data\\", *(f"ngram {n}={len(listed)}" for n, listed in enumerate(by_order, 1))]
    for n, listed in enumerate(by_order, 1):
        lines += ["", f"\\{n}-grams:"]
        for words in listed:
            score, backoff = grams[words]
            has_backoff = n < order and words[-1] != "</s>" and backoff != 0
            lines.append(f"{score}\t{' '.join(words)}" + (f"\t{backoff}" if has_backoff else ""))
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")
    return path


def gram_score(grams: Grams, sentence: Sequence[str]) -> float:
    """The natural logarithm of the probability of a sentence, by the definition of back-off."""
    order = max(map(len, grams))

    def log10(context: tuple[str, ...], word: str) -> float:
        if (*context, word) in grams:
            return grams[(*context, word)][0]
        backoff = grams[context][1] if context in grams and len(context) < order else 0.0
        return backoff + log10(context[1:], word)

    tokens = ("<s>", *(word if (word,) in grams else "<unk>" for word in sentence), "</s>")
    total = sum(log10(tokens[max(0, n - order + 1) : n], tokens[n]) for n in range(1, len(tokens)))
    return total * math.log(10)


def sentences(words: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    """All sequences of at most ``most`` words."""
    for size in range(most + 1):
        yield from product(words, repeat=size)
