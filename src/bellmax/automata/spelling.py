"""Texts that are spelled with the labels of a CTC network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bellmax.automata.lexicon import lexicon
from bellmax.automata.scores import Scores, join, one_hot
from bellmax.automata.table import TARGET, Table

DELIMITERS = " ", "|", "<space>", "▁"
WORD_START = "▁"


class Token(NamedTuple):
    """A label of an alignment, and its frames."""

    label: int
    start: int
    end: int


class Alphabet:
    """The labels of a network. Raises ``ValueError`` if they are wrong."""

    def __init__(self, labels: Sequence[str], blank: int) -> None:
        if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"labels must be a sequence of strings, one for each class, got {labels!r}")
        if not isinstance(blank, int) or not 0 <= blank < max(len(labels), 1):
            raise ValueError(f"blank must be a class, from 0 to {len(labels) - 1}, got {blank!r}")
        self.labels, self.blank = tuple(labels), blank
        texts = {label: k for k, label in enumerate(labels) if k != blank and _is_text(label)}
        has_pieces = any(len(label) > 1 and label.startswith(WORD_START) for label in texts)
        candidates = [label for label in DELIMITERS if not (has_pieces and label == WORD_START)]
        delimiter = next((texts[label] for label in candidates if label in texts), -1)
        self.delimiter: int = delimiter
        """The class of the word delimiter, or −1."""
        self.letters = {label: k for label, k in texts.items() if k != delimiter}
        if not self.letters:
            raise ValueError(f"labels must have a letter besides the blank and the delimiter, got {list(labels)}")
        for k, label in enumerate(labels):
            if k != blank and _is_text(label) and texts[label] != k:
                raise ValueError(f"labels must be different, got {label!r} for the classes {k} and {texts[label]}")

    def spellings(self, words: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
        """Return the labels of each word. Raises ``ValueError`` if a word cannot be spelled."""
        if isinstance(words, str):
            raise ValueError(f"lexicon must be a sequence of words or map words to labels, got the text {words!r}")
        spelled = words if isinstance(words, Mapping) else {word: word for word in words}
        if not spelled:
            raise ValueError("lexicon must have at least one word, got none")
        numbers = {}
        for word, letters in spelled.items():
            if not isinstance(word, str) or not len(letters):
                raise ValueError(f"lexicon must have words with at least one letter, got {word!r}")
            unknown = next((letter for letter in letters if letter not in self.letters), None)
            if unknown is not None:
                raise ValueError(f"lexicon has the word {word!r}, but {unknown!r} is not a label that spells words")
            numbers[word] = [self.letters[letter] for letter in letters]
        return numbers

    def trimmed(self, tokens: Sequence[Token]) -> list[Token]:
        """Return tokens of texts without the delimiters at both ends."""
        classes = {self.delimiter, *self.letters.values()}
        kept = [token for token in tokens if token.label in classes]
        while kept and kept[-1].label == self.delimiter:
            kept.pop()
        first = next((n for n, token in enumerate(kept) if token.label != self.delimiter), 0)
        return kept[first:]

    def split(self, tokens: Sequence[Token]) -> list[tuple[str, list[Token]]]:
        """Return the words of trimmed tokens, each with its tokens."""
        words: list[list[Token]] = []
        is_new = True
        for token in tokens:
            if token.label == self.delimiter:
                is_new = True
                continue
            if is_new or self.labels[token.label].startswith(WORD_START):
                words.append([])
            words[-1].append(token)
            is_new = False
        named = [("".join(self.labels[token.label].removeprefix(WORD_START) for token in word), word) for word in words]
        return [(name, word) for name, word in named if name]

    def symbols(self) -> list[str | None]:
        """Return the word of each class in an n-gram of labels, None for classes that are never in a text."""
        classes = {self.delimiter, *self.letters.values()}
        return [("|" if label == " " else label) if k in classes else None for k, label in enumerate(self.labels)]

    def letter_table(self, word_score: float) -> Table:
        """Return the automaton of all texts. It maps labels to the labels between their first and last letter."""
        letters = np.array([*self.letters.values()])
        zero, one = np.zeros_like(letters), np.ones_like(letters)
        first, later = (np.stack((state, one, letters, letters), 1) for state in (zero, one))
        is_start = np.array([label.startswith(WORD_START) for label in self.letters])
        scores = np.concatenate((np.full(len(letters), word_score), np.where(is_start, word_score, 0.0)))
        arcs = np.concatenate((first, later))
        if self.delimiter < 0:
            names = self.labels
            return Table(arcs, Scores(scores), one_hot(2, 0), one_hot(2, 0, 1), range(2), names, names)
        names = tuple("|" if label == " " else label for label in self.labels)
        return self._spaced(Table(arcs, Scores(scores), one_hot(1), one_hot(1), range(1), names, names), self.delimiter)

    def word_table(self, spellings: Mapping[str, Sequence[int]], word_score: float) -> Table:
        """Return the automaton of all sequences of words. It maps labels to words."""
        table = lexicon(spellings, np.full(len(spellings), word_score))
        if self.delimiter < 0:
            return table
        arcs = table.arcs.copy()
        arcs[arcs[:, TARGET] == 0, TARGET] = table.num_states
        return self._spaced(replace(table, arcs=arcs), -1)

    def _spaced(self, table: Table, output: int) -> Table:
        """Return the automaton with one delimiter between words, and at most one at each end.

        Words start in state 0 and end in the state after the last. Each sequence of labels has one path.
        """
        end = table.num_states
        before, nothing, after = end + 1, end + 2, end + 3
        spaces = [(before, 0, -1), (end, 0, output), (end, after, -1), (nothing, after, -1)]
        rows = np.array([(source, target, self.delimiter, symbol) for source, target, symbol in spaces])
        size = end + 4
        return Table(
            np.concatenate((table.arcs, rows)),
            join((table.scores, Scores(np.zeros(len(rows))))),
            one_hot(size, 0, before, nothing),
            one_hot(size, end, nothing, after),
            range(size),
            table.label_names,
            table.output_names,
        )


def _is_text(label: str) -> bool:
    """True unless the label is a special token, such as "<s>" and "[UNK]"."""
    return label in DELIMITERS or not re.fullmatch(r"<.+>|\[.+\]", label)
