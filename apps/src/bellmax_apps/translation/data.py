"""Parallel text, its vocabulary of words or word pieces, and batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bellmax_apps.files import read_json, read_lines, reading, texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING, BEGIN, END, UNKNOWN = range(4)
SPECIAL = "<pad>", "<s>", "</s>", "<unk>"
SPLITS = {"train": ("train",), "dev": ("val", "dev"), "test": ("test_2016", "test2016", "test")}


# --- files


def find(folder: Path, split: str, language: str) -> Path:
    """The file in ``folder`` for a split and a language: ``train.en``, ``val.fr.gz``, ``newstest2014.de``, …"""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: it must hold parallel text, such as train.{language}")
    files = sorted(path for path in folder.iterdir() if path.name.removesuffix(".gz").endswith(f".{language}"))
    for name in SPLITS[split]:
        found = [path for path in files if name in path.name]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} has {len(found)} files for {split}: {', '.join(path.name for path in found)}")
    raise ValueError(f"{folder} must hold a file for {split} that ends in .{language} or .{language}.gz")


def read_pairs(folder: Path, split: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
    """Lines in both languages."""
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
    """Text of a language to token ids, and back. Ids 0 to 3 are padding, begin, end and unknown.

    Text is tokenised as by Moses. With ``pieces`` tokens are split by byte pair encoding.
    """

    def __init__(self, language: str, words: Sequence[str], pieces: Tokenizer | None = None) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        self.language, self.words, self._pieces = language, list(words), pieces
        self._number = {word: n for n, word in enumerate(self.words)}
        self._tokenizer, self._detokenizer = MosesTokenizer(lang=language), MosesDetokenizer(lang=language)

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of(cls, language: str, lines: Iterable[str], *, pieces: int = 0, least: int = 2) -> Vocabulary:
        """All words seen at least ``least`` times, or a number of word pieces."""
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
        return cls(language, _known(model), model)

    def encode(self, line: str) -> list[int]:
        """Token ids of a line, without begin and end."""
        tokens = self._tokenizer.tokenize(line, escape=False)
        if self._pieces is not None:
            return list(self._pieces.encode(" ".join(tokens)).ids)
        return [self._number.get(token, UNKNOWN) for token in tokens]

    def tokens(self, line: str) -> list[str]:
        """The text of each token that ``encode`` gives, unknown ones included."""
        if self._pieces is not None:
            return [piece.removesuffix("</w>") for piece in self._pieces.encode(" ".join(self._split(line))).tokens]
        return self._split(line)

    def _split(self, line: str) -> list[str]:
        return list(self._tokenizer.tokenize(line, escape=False))

    def shown(self, numbers: Sequence[int]) -> list[str]:
        """The text of each token id."""
        return [self.words[n].removesuffix("</w>") for n in numbers]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of token ids, up to the first end."""
        kept = list(numbers[: numbers.index(END)] if END in numbers else numbers)
        if self._pieces is not None:
            text = "".join(self.words[n].replace("</w>", " ") for n in kept if n > END)
            return str(self._detokenizer.detokenize(text.split()))
        return str(self._detokenizer.detokenize([self.words[n] for n in kept if n > END]))

    def save(self, path: Path) -> None:
        pieces = None if self._pieces is None else self._pieces.to_str()
        given = {"language": self.language, "words": self.words, "pieces": pieces}
        path.write_text(json.dumps(given, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        from tokenizers import Tokenizer

        given = read_json(path)
        with reading(path, "the vocabulary of a run"):
            pieces = Tokenizer.from_str(given["pieces"]) if given["pieces"] else None
            words = texts(given, "words")
            if not isinstance(given["language"], str):
                raise ValueError(f"language must be text, got {given['language']!r}")
            if tuple(words[: len(SPECIAL)]) != SPECIAL:
                raise ValueError(f"words must begin with {', '.join(SPECIAL)}")
            if pieces is not None and (_known(pieces) != words or pieces.model.unk_token != SPECIAL[UNKNOWN]):
                raise ValueError("pieces must be those of the words")
            return cls(given["language"], words, pieces)


def _known(pieces: Tokenizer) -> list[str]:
    """The pieces by their numbers."""
    numbers = pieces.get_vocab()
    return sorted(numbers, key=lambda piece: numbers[piece])


# --- batches


class Batch(NamedTuple):
    """B pairs: source (B, S) and its lengths (B,), target (B, T) with begin and end."""

    source: Tensor
    lengths: Tensor
    target: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.source.to(device), self.lengths, self.target.to(device))


class Corpus:
    """Pairs of lines as token ids. An empty source becomes a single end token."""

    def __init__(self, pairs: Sequence[tuple[str, str]], source: Vocabulary, target: Vocabulary) -> None:
        self.pairs = [
            (torch.tensor([*source.encode(a), END]), torch.tensor([BEGIN, *target.encode(b), END])) for a, b in pairs
        ]

    def within(self, most: int) -> list[int]:
        """Indices of the pairs with 1 to ``most`` tokens on both sides."""
        return [n for n, (a, b) in enumerate(self.pairs) if 1 < len(a) <= most + 1 and 2 < len(b) <= most + 2]

    def batch(self, members: Sequence[int]) -> Batch:
        source, target = ([self.pairs[n][side] for n in members] for side in (0, 1))
        lengths = torch.tensor([len(s) for s in source])
        return Batch(pad_sequence(source, batch_first=True), lengths, pad_sequence(target, batch_first=True))

    def buckets(self, members: Sequence[int], tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
        """Batches of pairs of similar length, with at most so many tokens, padding included."""
        sizes = torch.tensor([[len(self.pairs[n][1]), len(self.pairs[n][0])] for n in members]).reshape(-1, 2)
        noise = torch.zeros(len(members)) if generator is None else torch.rand(len(members), generator=generator)
        order = torch.argsort(100 * sizes[:, 0] + sizes[:, 1] + 100 * noise, stable=True).tolist()
        found: list[list[int]] = []
        longest = 0
        for place in order:
            length = int(sizes[place].max())
            longest = max(longest, length)
            if not found or (len(found[-1]) + 1) * longest > tokens:
                found.append([])
                longest = length
            found[-1].append(members[place])
        if generator is None:
            return found
        return [found[n] for n in torch.randperm(len(found), generator=generator).tolist()]
