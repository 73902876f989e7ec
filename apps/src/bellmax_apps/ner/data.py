"""Files of tokens and tags, word vectors, the vocabulary of a tagger, and batches of sentences."""

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

from bellmax_apps.batches import batches_of
from bellmax_apps.files import check_expansion, expansion_limit, find_split, read_json, read_lines, reading, texts
from bellmax_apps.ner.schemes import entities, to_iobes

LETTERS = 100
"""A word of more than 200 letters is spelled by its first 100 and its last 100 letters."""
SPLITS: dict[str, Sequence[str]] = {"train": ("train",), "dev": ("dev", "valid", "testa"), "test": ("testb", "test")}
"""Names that the file of a split can have, in order of preference."""


class Sentence(NamedTuple):
    """Tokens, and a tag for each token. Without known tags, ``tags`` is empty."""

    tokens: list[str]
    tags: list[str]


_token = re.compile(r"[^ \t\n\v\f\r]+")


def tokens_of(line: str) -> list[str]:
    """Split a line at spaces and tabs. Other white space, such as a non-breaking space, belongs to a token.

    >>> tokens_of("10\u00a0000 people ")
    ['10\xa0000', 'people']
    """
    return _token.findall(line)


# --- files


def find(folder: Path, split: str) -> Path:
    """The file of a split, recognized by its name.

    The name contains "train", "dev" (or "valid", "testa"), or "test" (or "testb").

    >>> find(Path("/nowhere"), "train")
    Traceback (most recent call last):
    ...
    ValueError: /nowhere is not a folder: it must hold a file for each of train, dev and test
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: it must hold a file for each of train, dev and test")
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    candidates = [path for path in files if split != "test" or "testa" not in path.name.lower()]
    path = find_split(folder, candidates, split, SPLITS)
    if path is None:
        names = " or ".join(map(repr, SPLITS[split]))
        raise ValueError(f"{folder} must hold a file with {names} in its name, got {[path.name for path in files]}")
    return path


def read(
    path: Path, *, token_column: int = 0, tag_column: int = -1, kinds: Collection[str] | None = None
) -> list[Sentence]:
    """Read a file of columns: one token per line, columns separated by tabs or spaces, an empty line after a sentence.

    Lines that begin with ``-DOCSTART-`` are skipped. Columns are counted from 0, negative ones from the end. Raises
    ``ValueError`` if an entity has a type that is not in ``kinds``.
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
                f"{path}, line {number}: the tag {tag[:60]!r} has a type that does not occur in the training data, "
                f"whose types are {', '.join(sorted(kinds))}"
            )
        tokens.append(token)
        tags.append(tag)
    if not sentences:
        raise ValueError(f"{path} holds no sentence")
    return sentences


def as_iobes(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Convert the tags of sentences from any scheme to IOBES."""
    return [Sentence(s.tokens, to_iobes(entities(s.tags), len(s.tags))) for s in sentences]


def read_vectors(path: Path, most: int = 400_000) -> tuple[list[str], NDArray[np.float32]]:
    """Read the first ``most`` words and their vectors (words, D) from a fastText or GloVe text file, or an ``.npz``.

    A line of text is a word and its vector; the first line may be a header. An ``.npz`` has the arrays ``words`` and
    ``vectors``. Raises ``ValueError`` if it expands to more than 64 MiB and more than 100 times its size.
    """
    words, vectors = _read_npz(path, most) if path.suffix == ".npz" else _read_text(path, most)
    wrong = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(wrong):
        raise ValueError(
            f"{path} must hold finite numbers, got others for {len(wrong)} words, the first of them {words[wrong[0]]!r}"
        )
    return words, vectors


def _read_npz(path: Path, limit: int) -> tuple[list[str], NDArray[np.float32]]:
    """Read at most ``limit`` words and vectors of an ``.npz``, after checks of its size, types and shapes."""
    with (
        reading(path, "an .npz of word vectors"),
        warnings.catch_warnings(),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        warnings.simplefilter("ignore")  # numpy warns of unusual headers, which it reads correctly
        check_expansion(sum(member.file_size for member in arrays.zip.infolist()), expansion_limit(path))
        if not {"words", "vectors"} <= set(arrays):
            raise ValueError(f"it must hold the arrays 'words' and 'vectors', got {sorted(arrays)}")
        words, vectors = (np.asarray(arrays[name]) for name in ("words", "vectors"))
        if words.dtype.kind != "U" or vectors.dtype.kind not in "fiu":
            raise ValueError(f"it must hold text and numbers, got {words.dtype} and {vectors.dtype}")
        if vectors.ndim != 2 or words.shape != vectors.shape[:1] or not vectors.size:
            raise ValueError(f"it must hold a vector for each word, got {words.shape} and {vectors.shape}")
        return texts({"words": words[:limit].tolist()}, "words"), vectors[:limit].astype(np.float32)


def _read_text(path: Path, limit: int) -> tuple[list[str], NDArray[np.float32]]:
    """Read at most ``limit`` lines of a word and its vector. A number that overflows float32 becomes infinite."""
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    size = 0
    for number, line in enumerate(read_lines(path), start=1):
        if len(rows) == limit:
            break
        word, *cells = line.rstrip().split(" ")
        if number == 1 and len(cells) == 1:
            continue
        size = size or len(cells)
        try:
            with np.errstate(over="ignore"):
                row = np.array(cells, np.float32)
        except ValueError:
            row = np.empty(0, np.float32)
        if len(row) != size or not size:
            raise ValueError(f"{path}, line {number}: expected a word and {size or 'its'} numbers, got {line[:60]!r}")
        words.append(word)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no vector")
    return words, np.stack(rows)


# --- numbers


@dataclass(frozen=True)
class Vocabulary:
    """The words, letters and labels of a tagger. Index 0 is for unknown words and for unknown letters.

    Args:
        words: Words of the training data and of the word vectors, with their original case.
        letters: Letters of the training data.
        labels: Tags in IOBES, "O" first.
        rare: Words without a vector that occur once in the training data. Training replaces half of their occurrences
            by the unknown word.

    """

    words: tuple[str, ...]
    letters: tuple[str, ...]
    labels: tuple[str, ...]
    rare: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sentences: Iterable[Sentence], more_words: Iterable[str] = ()) -> Vocabulary:
        """Vocabulary of sentences in IOBES, with ``more_words`` that have vectors."""
        counts: Counter[str] = Counter()
        kinds: set[str] = set()
        for sentence in sentences:
            counts.update(sentence.tokens)
            kinds.update(tag[2:] for tag in sentence.tags if tag != "O")
        words = tuple(dict.fromkeys((*sorted(counts), *more_words)))
        letters = sorted({letter for word in counts for letter in word})
        with_vector = set(more_words)
        rare = frozenset(w for w, n in counts.items() if n == 1 and not {w, w.lower()} & with_vector)
        return cls(words, tuple(letters), tuple(_labels(sorted(kinds))), rare)

    @property
    def kinds(self) -> set[str]:
        """Types of entities."""
        return {label[2:] for label in self.labels if label != "O"}

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON."""
        data = {"words": self.words, "letters": self.letters, "labels": self.labels, "rare": sorted(self.rare)}
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a vocabulary that :meth:`save` wrote."""
        data = read_json(path)
        with reading(path, "the vocabulary of a run"):
            words, letters, labels, rare = (texts(data, name) for name in ("words", "letters", "labels", "rare"))
            kinds = dict.fromkeys(label[2:] for label in labels[1::4])
            if not all(kinds) or labels != _labels(kinds):
                raise ValueError(f"labels must be O, and B-, I-, E- and S- of each type, got {labels}")
            return cls(tuple(words), tuple(letters), tuple(labels), frozenset(rare))


class Example(NamedTuple):
    """Indices of T tokens: words (T,), forms (T,) among the distinct tokens of the corpus, and tags (T,) or None."""

    words: Tensor
    forms: Tensor
    tags: Tensor | None


class Batch(NamedTuple):
    """B sentences of up to T tokens, with U distinct tokens of up to L letters.

    Args:
        words: Word indices, shape (B, T).
        lengths: Number of tokens of each sentence, shape (B,).
        letters: Letter indices of each distinct token, shape (U, L).
        letter_lengths: Number of letters of each distinct token, shape (U,).
        forms: Index of each token among the distinct tokens, shape (B, T).
        tags: Label indices, shape (B, T), −100 for padding, or None.

    """

    words: Tensor
    lengths: Tensor
    letters: Tensor
    letter_lengths: Tensor
    forms: Tensor
    tags: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """Copy to a device. Lengths stay on the CPU, since torch packs sequences by lengths there."""
        moved = {name: t.to(device) for name, t in self._asdict().items() if t is not None and "lengths" not in name}
        return self._replace(**moved)


class Corpus:
    """Indices of the words, letters and tags of sentences, and batches of them.

    Raises ``ValueError`` if a tag is not in the vocabulary.

    Args:
        sentences: Sentences with tags in IOBES, or without tags.
        vocabulary: Words, letters and labels of the tagger.

    """

    def __init__(self, sentences: Sequence[Sentence], vocabulary: Vocabulary) -> None:
        self.sentences = sentences
        words = {word: n for n, word in enumerate(vocabulary.words, start=1)}
        letters = {letter: n for n, letter in enumerate(vocabulary.letters, start=1)}
        labels = {label: n for n, label in enumerate(vocabulary.labels)}
        forms = {form: n for n, form in enumerate(dict.fromkeys(t for s in sentences for t in s.tokens))}
        spellings = [
            torch.tensor([letters.get(letter, 0) for letter in _shortened(form)], dtype=torch.int32) for form in forms
        ]
        self._letters = pad_sequence(spellings, batch_first=True) if spellings else torch.empty(0, 0, dtype=torch.int32)
        self._letter_lengths = torch.tensor([len(spelling) for spelling in spellings], dtype=torch.int64)
        word_of = [words.get(form, words.get(form.lower(), 0)) for form in forms]
        self._rare = torch.tensor([form in vocabulary.rare for form in forms], dtype=torch.bool)
        self.examples = []
        for sentence in sentences:
            tokens = [forms[token] for token in sentence.tokens]
            try:
                tags = torch.tensor([labels[tag] for tag in sentence.tags]) if sentence.tags else None
            except KeyError as error:
                raise ValueError(
                    f"tags must occur in the training data, which has {sorted(set(labels))}, got {error}"
                ) from None
            self.examples.append(Example(torch.tensor([word_of[n] for n in tokens]), torch.tensor(tokens), tags))

    def batch(self, members: Sequence[int], *, generator: torch.Generator | None = None) -> Batch:
        """Batch of the sentences with these indices. With a generator, half of the rare words become unknown."""
        examples = [self.examples[n] for n in members]
        words = pad_sequence([example.words for example in examples], batch_first=True)
        tokens = pad_sequence([example.forms for example in examples], batch_first=True)
        if generator is not None:
            words = words.masked_fill(self._rare[tokens] & (torch.rand(words.shape, generator=generator) < 0.5), 0)
        tags = [example.tags for example in examples if example.tags is not None]
        distinct, forms = tokens.unique(return_inverse=True)
        lengths = self._letter_lengths[distinct]
        letters = self._letters[distinct, : int(lengths.max())].long()
        padded = pad_sequence(tags, batch_first=True, padding_value=-100) if len(tags) == len(examples) else None
        return Batch(words, torch.tensor([len(e.words) for e in examples]), letters, lengths, forms, padded)

    def buckets(self, sentences: int, tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
        """Sentence indices of each batch. A batch has at most this many sentences, and tokens with padding.

        Sentences of similar length share a batch; a longer sentence is a batch by itself. With a generator, the
        batches and the sentences of similar length are shuffled.
        """
        lengths = torch.tensor([len(example.words) for example in self.examples])
        noise = torch.zeros(len(lengths)) if generator is None else torch.rand(len(lengths), generator=generator)
        # Lengths count as similar if they differ by at most a tenth and one token.
        order = torch.argsort(lengths * (1 + 0.1 * noise) + noise, stable=True).tolist()
        return batches_of(order, lengths.tolist(), tokens, sentences, generator)


def _labels(kinds: Iterable[str]) -> list[str]:
    """Labels of a tagger: "O", then the four tags of each type of entity."""
    return ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BIES")]


def _shortened(word: str) -> str:
    """The letters that spell a word: the first and last ones if it is very long."""
    return word if len(word) <= 2 * LETTERS else word[:LETTERS] + word[-LETTERS:]
