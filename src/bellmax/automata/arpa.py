"""Back-off n-grams in ARPA files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from bellmax.automata.matching import Failing
from bellmax.automata.scores import Scores, one_hot
from bellmax.automata.table import UNKNOWN, Table

BEGIN, END = "<s>", "</s>"
Words = tuple[str, ...]
_SPACES = re.compile(r"[ \t]+")  # words may have other white space


class Entry(NamedTuple):
    """Natural logarithms of the probability of an n-gram and of its back-off weight."""

    score: float
    backoff: float


def ngram(path: str | Path, vocabulary: Sequence[str | None] | None) -> Failing:
    """Return the automaton of an ARPA file. Its states are the contexts that matter."""
    entries = Reader(Path(path)).read()
    labels = _labels(entries, vocabulary)
    names = tuple(word or "" for word in (labels if vocabulary is None else vocabulary))
    by_word: dict[str, list[int]] = {}
    for label, word in enumerate(labels):
        if word is not None:
            by_word.setdefault(word, []).append(label)
    contexts = _contexts(entries, by_word)
    number = {words: state for state, words in enumerate(contexts)}

    def state_of(words: Words) -> int:
        while words not in number:
            words = words[1:]
        return number[words]

    rows, scores = [], []
    for words, entry in entries.items():
        if words[:-1] in number and words[-1] in by_word:
            source, target = number[words[:-1]], state_of(words)
            rows += [(source, target, label, label) for label in by_word[words[-1]]]
            scores += [entry.score] * len(by_word[words[-1]])
    failure = np.array([-1, *(state_of(words[1:]) for words in contexts[1:])])
    weight = np.array([0.0, *(entries[words].backoff for words in contexts[1:])])
    final = np.full(len(contexts), entries[(END,)].score)
    for state, words in enumerate(contexts[1:], 1):  # shorter contexts come first
        explicit = entries.get((*words, END))
        final[state] = weight[state] + final[failure[state]] if explicit is None else explicit.score
    arcs, start = np.array(rows, np.int64).reshape(-1, 4), one_hot(len(contexts), state_of((BEGIN,)))
    states = [" ".join(words) for words in contexts]
    table = Table(arcs, Scores(np.array(scores, float)), start, Scores(final), states, names, names)
    return Failing(table, failure, weight)


def _contexts(entries: dict[Words, Entry], by_word: Collection[str]) -> list[Words]:
    """Return the contexts of known words that have a next word or a back-off weight, shorter contexts first."""
    known = {*by_word, BEGIN}
    has_next = {words[:-1] for words in entries if words[-1] == END or words[-1] in by_word}
    contexts: list[Words] = [()]
    contexts += (
        words for words, entry in entries.items() if known.issuperset(words) and (words in has_next or entry.backoff)
    )
    return contexts


def _unigrams(entries: dict[Words, Entry]) -> list[tuple[Words, Entry]]:
    """Return the 1-grams that are words."""
    return [(words, entry) for words, entry in entries.items() if len(words) == 1 and words[0] not in (BEGIN, END)]


def check_vocabulary(vocabulary: Sequence[str | None]) -> None:
    """Raise ``ValueError`` if words are missing or occur twice."""
    if isinstance(vocabulary, str) or not all(isinstance(word, str | None) for word in vocabulary):
        raise ValueError("vocabulary must be a sequence of words, such as ['yes', 'no']")
    if all(word is None for word in vocabulary):
        raise ValueError("vocabulary must have at least one word, got none")
    first: dict[str, int] = {}
    for n, word in enumerate(vocabulary):
        if word is not None and first.setdefault(word, n) != n:
            raise ValueError(f"vocabulary must have each word once, got {word!r} at positions {first[word]} and {n}")


def _labels(entries: dict[Words, Entry], vocabulary: Sequence[str | None] | None) -> Sequence[str | None]:
    """Return the word of the file for each label: the word with its name, or the unknown word."""
    words = [words[0] for words, _ in _unigrams(entries)]
    if vocabulary is None:
        if not words:
            raise ValueError(f"the ARPA file must have at least one word other than {BEGIN} and {END}, got none")
        return words
    check_vocabulary(vocabulary)
    known = {*words}
    missing = [word for word in vocabulary if word is not None and word not in known]
    if missing and UNKNOWN not in known:
        raise ValueError(f"the ARPA file has no word {missing[0]!r}, and no word {UNKNOWN} for unknown words")
    return [word if word is None or word in known else UNKNOWN for word in vocabulary]


class Reader:
    """Reads an ARPA file. Errors name the file and the line."""

    def __init__(self, path: Path) -> None:
        self.path, self.number, self.line = path, 0, ""
        self.entries: dict[Words, Entry] = {}

    def read(self) -> dict[Words, Entry]:
        """Return the n-grams in the order of the file."""
        with self.path.open("rb") as file:
            lines = self._lines(file)
            counts = self._counts(lines)
            for order, count in enumerate(counts, 1):
                if self.line != f"\\{order}-grams:":
                    self._fail(f"must be \\{order}-grams:, got {self._shown()}")
                self._section(lines, order, count, order == len(counts))
            if self.line != "\\end\\":
                self._fail(f"must be \\end\\, got {self._shown()}")
        if self.entries.get((END,), Entry(-math.inf, 0.0)).score == -math.inf:
            raise ValueError(f"{self.path} must have the 1-gram {END} with a positive probability")
        return self.entries

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}, line {self.number}: {problem}")

    def _shown(self) -> str:
        return repr(self.line) if self.line else "the end of the file"

    def _lines(self, file: Iterable[bytes]) -> Iterator[str]:
        """Yield the lines that are not empty."""
        for line in file:
            self.number += 1
            try:
                self.line = line.decode().strip(" \t\r\n\ufeff")
            except UnicodeDecodeError:
                self._fail(f"must be UTF-8, got {line[:20]!r}")
            if self.line:
                yield self.line
        self.number, self.line = self.number + 1, ""

    def _counts(self, lines: Iterator[str]) -> list[int]:
        """Read the header, and stop at the line after it."""
        for line in lines:
            if line == "\\data\\":
                break
        else:
            self._fail("must have a line \\data\\, got none")
        counts: list[int] = []
        for line in lines:
            match = re.fullmatch(r"ngram[ \t]+(\d+)[ \t]*=[ \t]*(\d+)", line)
            if match is None:
                break
            if int(match[1]) != len(counts) + 1:
                self._fail(f"must be the number of {len(counts) + 1}-grams, got {line!r}")
            counts.append(int(match[2]))
        if not counts:
            self._fail(f"must be the number of 1-grams, such as ngram 1=100, got {self._shown()}")
        return counts

    def _section(self, lines: Iterator[str], order: int, count: int, is_highest: bool) -> None:
        """Read the n-grams of one order, and stop at the line after them."""
        num_before = len(self.entries)
        for line in lines:
            if line.startswith("\\") and (line == "\\end\\" or line.endswith("-grams:")):
                break
            self._entry(_SPACES.split(line), order, is_highest)
        got = len(self.entries) - num_before
        if got != count:
            self._fail(f"must come after {count} {order}-grams, got {got}")

    def _entry(self, fields: list[str], order: int, is_highest: bool) -> None:
        """Read one n-gram."""
        most = order + 1 if is_highest else order + 2
        if not order + 1 <= len(fields) <= most:
            extra = "" if is_highest else " and at most one back-off weight"
            needed = f"a log-probability, {order} word{'s' * (order > 1)}{extra}"
            self._fail(f"a {order}-gram must have {needed}, got {self.line!r}")
        score = self._number(fields[0], "log-probability")
        if score > 0:
            self._fail(f"a log-probability must be at most 0, got {fields[0]}")
        backoff = self._number(fields[order + 1], "back-off weight") if len(fields) > order + 1 else 0.0
        words = tuple(fields[1 : order + 1])
        self._check_words(words)
        self.entries[words] = Entry(score, backoff)

    def _number(self, field: str, kind: str) -> float:
        """Return a logarithm with base e."""
        try:
            value = float(field)
        except ValueError:
            value = math.nan
        if math.isnan(value) or value == math.inf:
            self._fail(f"a {kind} must be a number, got {field!r}")
        return value * math.log(10)

    def _check_words(self, words: Words) -> None:
        shown = " ".join(words)
        if words in self.entries:
            self._fail(f"the n-gram {shown!r} must occur once, got it again")
        if BEGIN in words[1:] or END in words[:-1]:
            self._fail(f"{BEGIN} must be the first word and {END} the last, got {shown!r}")
        if len(words) == 1:
            return
        for word in words:
            if (word,) not in self.entries:
                self._fail(f"each word must be a 1-gram, got {word!r} in {shown!r}")
        if words[:-1] not in self.entries:
            self._fail(f"the {len(words)}-gram {shown!r} needs the {len(words) - 1}-gram {' '.join(words[:-1])!r}")
