"""Columns of tokens and tags, their vocabulary, and batches of them."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bellmax_apps.files import check_expansion, most_expanded, read_json, read_lines, reading, texts
from bellmax_apps.ner.schemes import entities, to_iobes

LETTERS = 100
"""A word is spelled by its first and its last letters, so many of each."""
SPLITS = {"train": ("train",), "dev": ("dev", "valid", "testa"), "test": ("testb", "test")}


class Sentence(NamedTuple):
    """Tokens, and a tag for each; no tags if they are unknown."""

    tokens: list[str]
    tags: list[str]


_token = re.compile(r"[^ \t\n\v\f\r]+")


def tokens_of(line: str) -> list[str]:
    """Tokens separated by spaces or tabs; other white space, such as a non-breaking space, is part of a token.

    >>> tokens_of("10\u00a0000 people ")
    ['10\xa0000', 'people']
    """
    return _token.findall(line)


# --- files


def find(folder: Path, split: str) -> Path:
    """The file of ``folder`` whose name has "train", "dev" (or "valid", "testa") or "test" (or "testb") in it.

    >>> find(Path("/nowhere"), "train")
    Traceback (most recent call last):
    ...
    ValueError: /nowhere is not a folder: it must hold a file for each of train, dev and test
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: it must hold a file for each of train, dev and test")
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    for name in SPLITS[split]:
        found = [path for path in files if name in path.name.lower()]
        if split == "test":
            found = [path for path in found if "testa" not in path.name.lower()]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} has {len(found)} files for {split}: {', '.join(path.name for path in found)}")
    wanted = " or ".join(map(repr, SPLITS[split]))
    raise ValueError(f"{folder} must hold a file with {wanted} in its name, got {[path.name for path in files]}")


def read(
    path: Path, *, token_column: int = 0, tag_column: int = -1, kinds: Collection[str] | None = None
) -> list[Sentence]:
    """Read a file of columns: one token per line, columns separated by tabs or spaces, an empty line after a sentence.

    Lines that begin with ``-DOCSTART-`` are skipped. Columns are counted from 0, negative ones from the end. With
    ``kinds``, entities of other types are a ValueError.
    """
    sentences: list[Sentence] = []
    tokens: list[str] = []
    tags: list[str] = []
    columns = 0
    for number, line in enumerate((*read_lines(path), ""), start=1):
        cells = tokens_of(line)
        if not cells or line.startswith("-DOCSTART-"):
            if tokens:
                sentences.append(Sentence(tokens, tags))
                tokens, tags = [], []
            continue
        if "\t" in line:
            cells = [cell.strip(" \n\v\f\r") for cell in line.split("\t")]
        columns = columns or len(cells)
        if len(cells) != columns or not all(-columns <= c < columns for c in (token_column, tag_column)):
            needed = max(columns, 2, *(c + 1 if c >= 0 else -c for c in (token_column, tag_column)))
            raise ValueError(
                f"{path}, line {number}: expected {needed} columns, got {len(cells)}: {line.strip()[:60]!r}"
            )
        token, tag = cells[token_column], cells[tag_column]
        prefix, dash, kind = tag.partition("-")
        if columns < 2 or not token or (tag != "O" and (prefix not in {"B", "I", "E", "S"} or not dash or not kind)):
            expected = "O, or B-, I-, E- or S- and a type"
            got = line.strip()[:60]
            raise ValueError(f"{path}, line {number}: expected a token and a tag ({expected}), got {got!r}")
        if kinds is not None and kind and kind not in kinds:
            raise ValueError(
                f"{path}, line {number}: the tag {tag[:60]!r} has a type that the training data has not, "
                f"which are {', '.join(sorted(kinds))}"
            )
        tokens.append(token)
        tags.append(tag)
    if not sentences:
        raise ValueError(f"{path} holds no sentence")
    return sentences


def as_iobes(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The same sentences in IOBES, whichever scheme they are in."""
    return [Sentence(s.tokens, to_iobes(entities(s.tags), len(s.tags))) for s in sentences]


def read_vectors(path: Path, most: int = 400_000) -> tuple[list[str], NDArray[np.float32]]:
    """Read the first ``most`` words and their vectors (words, D) from a fastText or GloVe text file, or an ``.npz``.

    A line of text is a word and its vector; the first line may be a header. An ``.npz`` has ``words`` and ``vectors``;
    it may expand to 100 times its size, or to 64 MiB if that is more.
    """
    if path.suffix == ".npz":
        with (
            reading(path, "an .npz of word vectors"),
            warnings.catch_warnings(),
            path.open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            warnings.simplefilter("ignore")  # of numpy, on headers that it reads as meant
            check_expansion(sum(member.file_size for member in arrays.zip.infolist()), most_expanded(path))
            if not {"words", "vectors"} <= set(arrays):
                raise ValueError(f"it must hold the arrays 'words' and 'vectors', got {sorted(arrays)}")
            words, vectors = (np.asarray(arrays[name]) for name in ("words", "vectors"))
            if words.dtype.kind != "U" or vectors.dtype.kind not in "fiu":
                raise ValueError(f"it must hold text and numbers, got {words.dtype} and {vectors.dtype}")
            if vectors.ndim != 2 or words.shape != vectors.shape[:1] or not vectors.size:
                raise ValueError(f"it must hold a vector for each word, got {words.shape} and {vectors.shape}")
            known, numbers = texts({"words": words[:most].tolist()}, "words"), vectors[:most].astype(np.float32)
        return _finite(path, known, numbers)
    names: list[str] = []
    rows: list[NDArray[np.float32]] = []
    size = 0
    for number, line in enumerate(read_lines(path), start=1):
        if len(rows) == most:
            break
        word, *cells = line.rstrip().split(" ")
        if number == 1 and len(cells) == 1:
            continue
        size = size or len(cells)
        try:
            with np.errstate(over="ignore"):  # what is too large is infinite, and named below
                row = np.array(cells, np.float32)
        except ValueError:
            row = np.empty(0, np.float32)
        if len(row) != size or not size:
            raise ValueError(f"{path}, line {number}: expected a word and {size or 'its'} numbers, got {line[:60]!r}")
        names.append(word)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no vector")
    return _finite(path, names, np.stack(rows))


def _finite(path: Path, words: list[str], vectors: NDArray[np.float32]) -> tuple[list[str], NDArray[np.float32]]:
    wrong = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(wrong):
        word = words[wrong[0]]
        raise ValueError(
            f"{path} must hold finite numbers, got others for {len(wrong)} words, the first of them {word!r}"
        )
    return words, vectors


# --- numbers


@dataclass(frozen=True)
class Vocabulary:
    """The words, letters and labels of a tagger. Index 0 is for unknown words and for unknown letters.

    Args:
        words: with their original case.
        letters: all letters of the training data.
        labels: in IOBES, "O" first.
        rare: words seen once in training; half of the time a tagger sees them as unknown.

    """

    words: tuple[str, ...]
    letters: tuple[str, ...]
    labels: tuple[str, ...]
    rare: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sentences: Iterable[Sentence], more_words: Iterable[str] = ()) -> Vocabulary:
        """The vocabulary of sentences in IOBES and of words that have vectors."""
        counts: Counter[str] = Counter()
        kinds: set[str] = set()
        for sentence in sentences:
            counts.update(sentence.tokens)
            kinds.update(tag[2:] for tag in sentence.tags if tag != "O")
        words = tuple(dict.fromkeys((*sorted(counts), *more_words)))
        letters = sorted({letter for word in counts for letter in word})
        known = set(more_words)
        rare = frozenset(w for w, n in counts.items() if n == 1 and w not in known and w.lower() not in known)
        return cls(words, tuple(letters), tuple(_labels(sorted(kinds))), rare)

    @property
    def kinds(self) -> set[str]:
        """The types of entities."""
        return {label[2:] for label in self.labels if label != "O"}

    def save(self, path: Path) -> None:
        given = {"words": self.words, "letters": self.letters, "labels": self.labels, "rare": sorted(self.rare)}
        path.write_text(json.dumps(given, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        given = read_json(path)
        with reading(path, "the vocabulary of a run"):
            words, letters, labels, rare = (texts(given, name) for name in ("words", "letters", "labels", "rare"))
            kinds = dict.fromkeys(label[2:] for label in labels[1::4])
            if not all(kinds) or labels != _labels(kinds):
                raise ValueError(f"labels must be O, and B-, I-, E- and S- of each type, got {labels}")
            return cls(tuple(words), tuple(letters), tuple(labels), frozenset(rare))


class Example(NamedTuple):
    """A sentence of T tokens as numbers: words (T,), forms (T,) among the corpus's, tags (T,) or None."""

    words: Tensor
    forms: Tensor
    tags: Tensor | None


class Batch(NamedTuple):
    """B sentences of up to T tokens.

    words (B, T), lengths (B,) and tags (B, T) or None; letters (U, L) and their lengths (U,) of the U different forms,
    and which of these each token has, forms (B, T).
    """

    words: Tensor
    lengths: Tensor
    letters: Tensor
    letter_lengths: Tensor
    forms: Tensor
    tags: Tensor | None

    def to(self, device: torch.device) -> Batch:
        moved = {name: t.to(device) for name, t in self._asdict().items() if t is not None and "lengths" not in name}
        return self._replace(**moved)  # torch packs by lengths on the CPU


class Corpus:
    """Sentences as numbers, and batches of them.

    Args:
        sentences: with tags in IOBES, or without.
        vocabulary: the known words, letters and labels. An unknown tag is a ValueError.

    """

    def __init__(self, sentences: Sequence[Sentence], vocabulary: Vocabulary) -> None:
        self.sentences = sentences
        words = {word: n for n, word in enumerate(vocabulary.words, start=1)}
        letters = {letter: n for n, letter in enumerate(vocabulary.letters, start=1)}
        labels = {label: n for n, label in enumerate(vocabulary.labels)}
        forms = {form: n for n, form in enumerate(dict.fromkeys(t for s in sentences for t in s.tokens))}
        spelled = [
            torch.tensor([letters.get(letter, 0) for letter in _shortened(form)], dtype=torch.int32) for form in forms
        ]
        self._letters = pad_sequence(spelled, batch_first=True) if spelled else torch.empty(0, 0, dtype=torch.int32)
        self._letter_lengths = torch.tensor([len(letters) for letters in spelled], dtype=torch.int64)
        known = [words.get(form, words.get(form.lower(), 0)) for form in forms]
        self._rare = torch.tensor([form in vocabulary.rare for form in forms], dtype=torch.bool)
        self.examples = []
        for sentence in sentences:
            own = [forms[token] for token in sentence.tokens]
            try:
                tags = torch.tensor([labels[tag] for tag in sentence.tags]) if sentence.tags else None
            except KeyError as error:
                raise ValueError(f"tags must be among those of training, {sorted(set(labels))}, got {error}") from None
            self.examples.append(Example(torch.tensor([known[form] for form in own]), torch.tensor(own), tags))

    def batch(self, members: Sequence[int], *, generator: torch.Generator | None = None) -> Batch:
        """A batch of sentences. With a generator, for training: half of the rare words become unknown."""
        chosen = [self.examples[n] for n in members]
        words = pad_sequence([example.words for example in chosen], batch_first=True)
        every = pad_sequence([example.forms for example in chosen], batch_first=True)
        if generator is not None:
            words = words.masked_fill(self._rare[every] & (torch.rand(words.shape, generator=generator) < 0.5), 0)
        tags = [example.tags for example in chosen if example.tags is not None]
        different, forms = every.unique(return_inverse=True)
        lengths = self._letter_lengths[different]
        letters = self._letters[different, : int(lengths.max())].long()
        whole = pad_sequence(tags, batch_first=True, padding_value=-100) if len(tags) == len(chosen) else None
        return Batch(words, torch.tensor([len(e.words) for e in chosen]), letters, lengths, forms, whole)

    def buckets(self, sentences: int, tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
        """Indices of batches with at most so many sentences and padded tokens; a longer sentence is a batch by itself.

        Sentences of similar length share a batch. A generator shuffles the sentences within this limit, and the
        batches.
        """
        lengths = torch.tensor([len(example.words) for example in self.examples])
        noise = torch.zeros(len(lengths)) if generator is None else torch.rand(len(lengths), generator=generator)
        # Up to a tenth and one token of difference in length does not matter.
        order = torch.argsort(lengths * (1 + 0.1 * noise) + noise, stable=True).tolist()
        found: list[list[int]] = []
        longest = 0
        for member in order:
            length = int(lengths[member])
            longest = max(longest, length)
            if not found or len(found[-1]) == sentences or (len(found[-1]) + 1) * longest > tokens:
                found.append([])
                longest = length
            found[-1].append(member)
        if generator is None:
            return found
        return [found[n] for n in torch.randperm(len(found), generator=generator).tolist()]


def _labels(kinds: Iterable[str]) -> list[str]:
    return ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BIES")]


def _shortened(word: str) -> str:
    return word if len(word) <= 2 * LETTERS else word[:LETTERS] + word[-LETTERS:]
