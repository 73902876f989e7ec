"""Train, save, load, evaluate and use a translator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bellmax_apps.training as training
from bellmax_apps.files import fingerprint
from bellmax_apps.translation.data import END, Batch, Corpus, Vocabulary, find, read_pairs
from bellmax_apps.translation.model import Translation, Translator, beam_search, greedy


@dataclass(frozen=True)
class Config(training.Config):
    """The configuration of a translator; its vocabularies are separate.

    Args:
        source: source language: the file extension.
        target: target language: the file extension.
        attention: "softmax", "negentropy", "l2" or "sparsemax".
        size: size of the word embeddings and of the hidden states.
        dropout: dropout probability.
        smoothing: label smoothing.
        pieces: BPE vocabulary size of each language; 0 for whole words.
        longest: maximum number of tokens of a training sentence.
        tokens: maximum batch size in tokens, with padding.
        gamma_start: γ of the attention starts at this many times its usual value, and falls by the same factor after
            each epoch. It has its usual value when the cool-down starts (without one, in the last epoch), and on dev.
        settings: how to train.

    """

    command = "bellmax translation train"

    settings: training.Settings = field(
        default_factory=partial(training.Settings, epochs=6, optimizer="adamw", step_size=0.003, cool_down=4)
    )
    source: str = "fr"
    target: str = "en"
    attention: str = "softmax"
    size: int = 128
    dropout: float = 0.3
    smoothing: float = 0.1
    pieces: int = 0
    longest: int = 50
    tokens: int = 600
    gamma_start: float = 1.0

    def __post_init__(self) -> None:
        if not self.gamma_start > 0:
            raise ValueError(f"gamma_start must be above 0, got {self.gamma_start}")
        training.check_share("dropout", self.dropout)
        training.check_share("smoothing", self.smoothing)

    def gamma_at(self, epoch: int) -> float:
        """γ in an epoch, counted from 0, as a multiple of its usual value.

        >>> config = Config(gamma_start=4.0, settings=training.Settings(epochs=4, cool_down=2))
        >>> [config.gamma_at(epoch) for epoch in range(4)]
        [4.0, 2.0, 1.0, 1.0]
        """
        falling = self.settings.epochs - max(self.settings.cool_down, 1)
        return float(self.gamma_start ** (1 - epoch / falling)) if epoch < falling else 1.0

    def model(self, source: Vocabulary, target: Vocabulary) -> Translator:
        """An untrained translator."""
        return Translator(
            len(source),
            len(target),
            kind=self.attention,
            size=self.size,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )


# --- training


class Translating(training.Task[list[int]]):
    """Batches are lists of pair indices."""

    metric = "bleu"

    def __init__(self, model: Translator, config: Config, train: Corpus, dev: Corpus, written: Dev) -> None:
        self.model: Translator = model
        self._config, self._train, self._dev, self._written = config, train, dev, written
        self._members = train.within(config.longest)
        if not self._members:
            raise ValueError(f"no training pair has 1 to {config.longest} tokens on both sides")
        self._device = next(model.parameters()).device
        self._gamma = model.attention.omega.gamma

    def batches(self, epoch: int) -> Sequence[list[int]]:
        self.model.attention.omega.gamma = self._config.gamma_at(epoch) * self._gamma
        generator = torch.Generator().manual_seed(1_000_003 * self._config.settings.seed + epoch)
        return self._train.buckets(self._members, self._config.tokens, generator)

    def part(self, batch: list[int], rank: int, world: int) -> tuple[Batch, int]:
        own = batch[rank::world]
        return self._train.batch(own or batch[:1]).to(self._device), len(own)

    def items(self, batch: list[int]) -> int:
        return sum(len(self._train.pairs[n][1]) - 1 for n in batch)

    tokens = items

    def evaluate(self) -> training.Record:
        """Perplexity, and BLEU with greedy search, with the usual γ."""
        import sacrebleu

        self.model.attention.omega.gamma = self._gamma
        total = words = 0.0
        with torch.no_grad():
            for members in self._dev.buckets(range(len(self._dev.pairs)), 4 * self._config.tokens):
                total += self.model(self._dev.batch(members).to(self._device)).item()
                words += sum(len(self._dev.pairs[n][1]) - 1 for n in members)
        found = translate_all(self.model, [source for source, _ in self._dev.pairs])
        text = [self._written.vocabulary.decode(translation.words) for translation in found]
        perplexity = float(torch.tensor(total / words).exp())
        return {"perplexity": perplexity, "bleu": sacrebleu.corpus_bleu(text, [self._written.lines]).score}


@dataclass(frozen=True)
class Dev:
    """The reference translations of the development data."""

    lines: list[str]
    vocabulary: Vocabulary


def train(data: Path, run: Path, config: Config, **more: Any) -> training.State:
    """Train a translator on a folder of parallel text into the folder ``run``; ``more`` is for :func:`training.fit`.

    With ``resume`` only epochs and minutes may differ from the configuration of the run.
    """
    languages = config.source, config.target
    files = (find(data, split, language) for split in ("train", "dev") for language in languages)
    config = replace(config, fingerprint=fingerprint(files))
    if more.get("resume") and training.is_begun(run):
        config = config.resumed(run)
    resume = bool(more.get("resume")) and training.has_epoch(run)
    pairs, dev = (read_pairs(data, split, languages) for split in ("train", "dev"))
    if resume:
        source, target = vocabularies(run)
    else:
        source, target = (
            Vocabulary.of(language, (pair[side] for pair in pairs), pieces=config.pieces)
            for side, language in enumerate(languages)
        )
    torch.manual_seed(config.settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with training.processes(device):
        model = config.model(source, target).to(device)
        if training.rank() == 0:
            training.begin(run, config, resume=resume)
            source.save(run / "source.json")
            target.save(run / "target.json")
        known, unseen = (Corpus(own, source, target) for own in (pairs, dev))
        task = Translating(model, config, known, unseen, Dev([line for _, line in dev], target))
        return training.fit(task, config.settings, run, **more)


def vocabularies(run: Path) -> tuple[Vocabulary, Vocabulary]:
    return Vocabulary.load(run / "source.json"), Vocabulary.load(run / "target.json")


def load(run: Path) -> tuple[Translator, Vocabulary, Vocabulary, Config]:
    """Load the best translator of a run."""
    training.check_usable(run, Config.command)
    config, (source, target) = Config.load(run), vocabularies(run)
    model = training.load_best(lambda: config.model(source, target), run)
    return model.eval(), source, target, config


# --- use


def most_words(source: Tensor) -> int:
    """Maximum length of a translation."""
    return 2 * len(source) + 10


def translate_all(model: Translator, sources: Sequence[Tensor], batch: int = 64) -> list[Translation]:
    """Translate with greedy search, in batches of lines of similar length."""
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    found: dict[int, Translation] = {}
    for start in range(0, len(order), batch):
        own = order[start : start + batch]
        lines = [sources[n] for n in own]
        padded = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True).to(device)
        lengths = torch.tensor([len(line) for line in lines])
        found |= dict(zip(own, greedy(model, padded, lengths, most_words(lines[-1])), strict=True))
    return [found[n] for n in range(len(sources))]


def translate(
    model: Translator, source: Vocabulary, target: Vocabulary, lines: Sequence[str], width: int = 5
) -> Iterator[tuple[str, Translation]]:
    """The translation of each line, as text and in detail. A line without tokens gives an empty text."""
    for line in lines:
        numbers = torch.tensor([*source.encode(line), END])
        if len(numbers) == 1:
            yield "", Translation([], 0.0, torch.empty(0, 1))
            continue
        found = beam_search(model, numbers, width, most_words(numbers))
        yield target.decode(found.words), found


def evaluate(
    model: Translator, source: Vocabulary, target: Vocabulary, pairs: Sequence[tuple[str, str]], width: int = 1
) -> dict[str, Any]:
    """BLEU with its signature, and the mean number of source words with a weight above 0, and above 0.1."""
    import sacrebleu

    if width == 1:
        found = translate_all(model, [torch.tensor([*source.encode(a), END]) for a, _ in pairs])
        texts = [target.decode(translation.words) for translation in found]
    else:
        both = list(translate(model, source, target, [a for a, _ in pairs], width))
        texts, found = [text for text, _ in both], [translation for _, translation in both]
    metric = sacrebleu.BLEU()
    bleu = metric.corpus_score(texts, [[b for _, b in pairs]])
    rows = [row for translation in found for row in translation.weights]
    positive = sum(int((row > 0).sum()) for row in rows) / max(len(rows), 1)
    clear = sum(int((row > 0.1).sum()) for row in rows) / max(len(rows), 1)
    return {"bleu": bleu.score, "signature": str(metric.get_signature()), "attended": positive, "clearly": clear}
