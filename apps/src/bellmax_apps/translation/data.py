"""Files of parallel text, the vocabulary of a language, and batches of sentence pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bellmax_apps.batches import batches_of
from bellmax_apps.files import find_split, read_json, read_lines, reading, texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING, BEGIN, END, UNKNOWN = range(4)
SPECIAL = "<pad>", "<s>", "</s>", "<unk>"
SPLITS: dict[str, Sequence[str]] = {
    "train": ("train",),
    "dev": ("val", "dev"),
    "test": ("test_2016", "test2016", "test"),
}
"""Names that the files of a split can have, in order of preference."""


# --- files


def find(folder: Path, split: str, language: str) -> Path:
    """The file of a split in a language, recognized by its name: ``train.en``, ``val.fr.gz``, ``newstest2014.de``, …"""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: it must hold parallel text, such as train.{language}")
    files = sorted(path for path in folder.iterdir() if path.name.removesuffix(".gz").endswith(f".{language}"))
    path = find_split(folder, files, split, SPLITS)
    if path is None:
        raise ValueError(f"{folder} must hold a file for {split} that ends in .{language} or .{language}.gz")
    return path


def read_pairs(folder: Path, split: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
    """Read the sentence pairs of a split."""
    paths = [find(folder, split, language) for language in languages]
    texts = [[line.rstrip("\n") for line in read_lines(path)] for path in paths]
    if len(texts[0]) != len(texts[1]):
        sizes = " and ".join(f"{path.name} {len(text)}" for path, text in zip(paths, texts, strict=True))
        raise ValueError(f"parallel files must have as many lines as each other, got {sizes}")
    if not texts[0]:
        raise ValueError(f"{paths[0]} is empty")
    return list(zip(*texts, strict=True))


# --- words


class Vocabulary:
    """Conversion between text and token ids of a language. Ids 0 to 3 are padding, begin, end and unknown.

    Args:
        language: Language code for the Moses tokenizer.
        words: Text of each token id.
        pieces: Byte pair encoding that splits words into pieces, or None for whole words.

    """

    def __init__(self, language: str, words: Sequence[str], pieces: Tokenizer | None = None) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        self.language, self.words, self._pieces = language, list(words), pieces
        self._ids = {word: n for n, word in enumerate(self.words)}
        self._tokenizer, self._detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of(cls, language: str, lines: Iterable[str], *, pieces: int = 0, least: int = 2) -> Vocabulary:
        """Vocabulary of text: all words that occur ``least`` times or, if ``pieces`` > 0, that many word pieces."""
        from sacremoses import MosesTokenizer
        from tokenizers import Tokenizer
        from tokenizers.decoders import BPEDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from tokenizers.trainers import BpeTrainer

        tokenizer = MosesTokenizer(lang=language)
        tokenized = [tokenizer.tokenize(line, escape=False) for line in lines]
        if not pieces:
            counts = Counter(token for tokens in tokenized for token in tokens)
            return cls(language, [*SPECIAL, *sorted(word for word, n in counts.items() if n >= least)])
        model = Tokenizer(BPE(unk_token=SPECIAL[UNKNOWN], end_of_word_suffix="</w>"))
        model.pre_tokenizer = WhitespaceSplit()
        model.decoder = BPEDecoder(suffix="</w>")
        trainer = BpeTrainer(
            vocab_size=pieces, special_tokens=list(SPECIAL), end_of_word_suffix="</w>", show_progress=False
        )
        model.train_from_iterator((" ".join(tokens) for tokens in tokenized), trainer)
        return cls(language, _pieces_by_id(model), model)

    def encode(self, line: str) -> list[int]:
        """Token ids of a line, without begin and end."""
        tokens = self._tokenizer.tokenize(line, escape=False)
        if self._pieces is not None:
            return list(self._pieces.encode(" ".join(tokens)).ids)
        return [self._ids.get(token, UNKNOWN) for token in tokens]

    def tokens(self, line: str) -> list[str]:
        """Text of each token of ``encode``. Unknown words keep their text."""
        if self._pieces is not None:
            return [piece.removesuffix("</w>") for piece in self._pieces.encode(" ".join(self._split(line))).tokens]
        return self._split(line)

    def _split(self, line: str) -> list[str]:
        return list(self._tokenizer.tokenize(line, escape=False))

    def shown(self, ids: Sequence[int]) -> list[str]:
        """Text of each token id."""
        return [self.words[n].removesuffix("</w>") for n in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, up to the first end."""
        before_end = ids[: ids.index(END)] if END in ids else ids
        words = [self.words[n] for n in before_end if n > END]
        if self._pieces is not None:
            words = "".join(word.replace("</w>", " ") for word in words).split()
        return str(self._detokenizer.detokenize(words))

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON."""
        pieces = None if self._pieces is None else self._pieces.to_str()
        data = {"language": self.language, "words": self.words, "pieces": pieces}
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a vocabulary that :meth:`save` wrote."""
        from tokenizers import Tokenizer

        data = read_json(path)
        with reading(path, "the vocabulary of a run"):
            pieces = Tokenizer.from_str(data["pieces"]) if data["pieces"] else None
            words = texts(data, "words")
            if not isinstance(data["language"], str):
                raise ValueError(f"language must be text, got {data['language']!r}")
            if tuple(words[: len(SPECIAL)]) != SPECIAL:
                raise ValueError(f"words must begin with {', '.join(SPECIAL)}")
            if pieces is not None and (_pieces_by_id(pieces) != words or pieces.model.unk_token != SPECIAL[UNKNOWN]):
                raise ValueError("pieces and words must have the same texts")
            return cls(data["language"], words, pieces)


def _pieces_by_id(pieces: Tokenizer) -> list[str]:
    """Text of each word piece, in the order of their ids."""
    ids = pieces.get_vocab()
    return sorted(ids, key=lambda piece: ids[piece])


# --- batches


class Batch(NamedTuple):
    """B sentence pairs: source (B, S), lengths of the source (B,), and target (B, T) with begin and end."""

    source: Tensor
    lengths: Tensor
    target: Tensor

    def to(self, device: torch.device) -> Batch:
        """Copy to a device. Lengths stay on the CPU, since torch packs sequences by lengths there."""
        return Batch(self.source.to(device), self.lengths, self.target.to(device))


class Corpus:
    """Sentence pairs as token ids. An empty source is a single end token."""

    def __init__(self, pairs: Sequence[tuple[str, str]], source: Vocabulary, target: Vocabulary) -> None:
        self.pairs = [
            (torch.tensor([*source.encode(a), END]), torch.tensor([BEGIN, *target.encode(b), END])) for a, b in pairs
        ]

    def within(self, most: int) -> list[int]:
        """Indices of the pairs with 1 to ``most`` tokens on both sides."""
        return [n for n, (a, b) in enumerate(self.pairs) if 1 < len(a) <= most + 1 and 2 < len(b) <= most + 2]

    def batch(self, members: Sequence[int]) -> Batch:
        """Batch of the pairs with these indices."""
        source, target = ([self.pairs[n][side] for n in members] for side in (0, 1))
        lengths = torch.tensor([len(s) for s in source])
        return Batch(pad_sequence(source, batch_first=True), lengths, pad_sequence(target, batch_first=True))

    def buckets(self, members: Sequence[int], tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
        """Pair indices of each batch, which has at most this many tokens in a language, with padding.

        Pairs of similar length share a batch. With a generator, the batches and the pairs of similar length are
        shuffled.
        """
        sizes = torch.tensor([[len(self.pairs[n][1]), len(self.pairs[n][0])] for n in members]).reshape(-1, 2)
        noise = torch.zeros(len(members)) if generator is None else torch.rand(len(members), generator=generator)
        order = torch.argsort(100 * sizes[:, 0] + sizes[:, 1] + 100 * noise, stable=True).tolist()
        batches = batches_of(order, sizes.amax(1).tolist(), tokens, generator=generator)
        return [[members[n] for n in batch] for batch in batches]
