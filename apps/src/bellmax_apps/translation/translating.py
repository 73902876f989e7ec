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
from bellmax_apps.translation.model import FORMER, Translation, Translator, beam_search, check_attention, greedy


@dataclass(frozen=True)
class Config(training.Config):
    """The configuration of a translator, without its vocabularies.

    Args:
        source: Source language: the file extension.
        target: Target language: the file extension.
        attention: "dot" or "structured".
        omega: Ω of the attention: "negentropy", "softmax" (the same), "l2", "sparsemax" or "entmax", as in the library.
        size: Size of the word embeddings and of the hidden states.
        dropout: Dropout probability.
        smoothing: Label smoothing.
        pieces: BPE vocabulary size of each language; 0 for whole words.
        longest: Maximum number of tokens of a training sentence.
        tokens: Maximum batch size in tokens, with padding.
        gamma_start: γ of the attention in the first epoch, as a multiple of its usual value. It falls by the same
            factor after each epoch, and has its usual value from the start of the cool-down (without cool-down, in the
            last epoch). Evaluation always uses the usual value.
        settings: Settings of the training loop.

    """

    command = "bellmax translation train"

    settings: training.Settings = field(
        default_factory=partial(training.Settings, epochs=6, optimizer="adamw", step_size=0.003, cool_down=4)
    )
    source: str = "fr"
    target: str = "en"
    attention: str = "dot"
    omega: str = "negentropy"
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
        check_attention(self.attention, self.omega)
        training.check_share("dropout", self.dropout)
        training.check_share("smoothing", self.smoothing)

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a saved run. A run of version 0.2 has one name for the attention and its Ω."""
        if "omega" not in values and values.get("attention") in FORMER:
            return values | dict(zip(("attention", "omega"), FORMER[values["attention"]], strict=True))
        return values

    def gamma_at(self, epoch: int) -> float:
        """γ of the attention in an epoch, counted from 0, as a multiple of its usual value.

        >>> config = Config(gamma_start=4.0, settings=training.Settings(epochs=4, cool_down=2))
        >>> [config.gamma_at(epoch) for epoch in range(4)]
        [4.0, 2.0, 1.0, 1.0]
        """
        falling = self.settings.epochs - max(self.settings.cool_down, 1)
        return float(self.gamma_start ** (1 - epoch / falling)) if epoch < falling else 1.0

    def model(self, source: Vocabulary, target: Vocabulary) -> Translator:
        """Create an untrained translator."""
        return Translator(
            len(source),
            len(target),
            attention=self.attention,
            omega=self.omega,
            size=self.size,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )


# --- training


class Translating(training.Task[list[int]]):
    """Training of a translator. Batches are lists of pair indices."""

    metric = "bleu"

    def __init__(self, model: Translator, config: Config, train: Corpus, dev: Corpus, references: References) -> None:
        self.model: Translator = model
        self._config, self._train, self._dev, self._references = config, train, dev, references
        self._members = train.within(config.longest)
        if not self._members:
            raise ValueError(f"no training pair has 1 to {config.longest} tokens on both sides")
        self._device = next(model.parameters()).device
        self._gamma = model.attention.omega.gamma

    def batches(self, epoch: int) -> Sequence[list[int]]:
        self.model.attention.omega.gamma = self._config.gamma_at(epoch) * self._gamma
        generator = torch.Generator().manual_seed(1_000_003 * self._config.settings.seed + epoch)
        return self._train.buckets(self._members, self._config.tokens, generator)

    def shard(self, batch: list[int], rank: int, world: int) -> tuple[Batch, int]:
        members = batch[rank::world]
        return self._train.batch(members or batch[:1]).to(self._device), len(members)

    def items(self, batch: list[int]) -> int:
        return sum(len(self._train.pairs[n][1]) - 1 for n in batch)

    tokens = items

    def evaluate(self) -> training.Record:
        """Perplexity, and BLEU of greedy search, on the development data with the usual γ."""
        import sacrebleu

        self.model.attention.omega.gamma = self._gamma
        total = words = 0.0
        with torch.no_grad():
            for members in self._dev.buckets(range(len(self._dev.pairs)), 4 * self._config.tokens):
                total += self.model(self._dev.batch(members).to(self._device)).item()
                words += sum(len(self._dev.pairs[n][1]) - 1 for n in members)
        translations = translate_all(self.model, [source for source, _ in self._dev.pairs])
        lines = [self._references.vocabulary.decode(translation.words) for translation in translations]
        perplexity = float(torch.tensor(total / words).exp())
        return {"perplexity": perplexity, "bleu": sacrebleu.corpus_bleu(lines, [self._references.lines]).score}


@dataclass(frozen=True)
class References:
    """Reference translations of the development data, and the vocabulary of their language."""

    lines: list[str]
    vocabulary: Vocabulary


def train(data: Path, run: Path, config: Config, **more: Any) -> training.State:
    """Train a translator on a folder of parallel text, and write it to the folder ``run``.

    ``more`` are arguments of :func:`training.fit`. With ``resume``, only epochs and minutes may differ from the
    configuration of the run.
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
        references = References([line for _, line in dev], target)
        task = Translating(model, config, Corpus(pairs, source, target), Corpus(dev, source, target), references)
        return training.fit(task, config.settings, run, **more)


def vocabularies(run: Path) -> tuple[Vocabulary, Vocabulary]:
    """Vocabularies of the source and the target language of a run."""
    return Vocabulary.load(run / "source.json"), Vocabulary.load(run / "target.json")


def load(run: Path) -> tuple[Translator, Vocabulary, Vocabulary, Config]:
    """Load the best translator of a run."""
    training.check_usable(run, Config.command)
    config, (source, target) = Config.load(run), vocabularies(run)
    model = training.load_best(lambda: config.model(source, target), run)
    return model.eval(), source, target, config


# --- use


def most_words(source: Tensor) -> int:
    """Maximum number of words of a translation."""
    return 2 * len(source) + 10


def translate_all(model: Translator, sources: Sequence[Tensor], batch: int = 64) -> list[Translation]:
    """Translate sentences by greedy search, in batches of similar length."""
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    translations: dict[int, Translation] = {}
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        lines = [sources[n] for n in members]
        padded = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True).to(device)
        lengths = torch.tensor([len(line) for line in lines])
        translations |= zip(members, greedy(model, padded, lengths, most_words(lines[-1])), strict=True)
    return [translations[n] for n in range(len(sources))]


def translate(
    model: Translator, source: Vocabulary, target: Vocabulary, lines: Sequence[str], width: int = 5
) -> Iterator[tuple[str, Translation]]:
    """Translate lines by beam search, to text and token ids. The translation of a line without tokens is empty."""
    for line in lines:
        ids = torch.tensor([*source.encode(line), END])
        if len(ids) == 1:
            yield "", Translation([], 0.0, torch.empty(0, 1))
            continue
        translation = beam_search(model, ids, width, most_words(ids))
        yield target.decode(translation.words), translation


def evaluate(
    model: Translator, source: Vocabulary, target: Vocabulary, pairs: Sequence[tuple[str, str]], width: int = 1
) -> dict[str, Any]:
    """BLEU with its signature, and statistics of the attention weights of the target words, without the end.

    The statistics are the mean number of source words with a weight above 0 ("attended") and above 0.1 ("clearly"), and
    the share of target words with no weight above 0 ("nothing").
    """
    import sacrebleu

    if width == 1:
        translations = translate_all(model, [torch.tensor([*source.encode(a), END]) for a, _ in pairs])
        texts = [target.decode(translation.words) for translation in translations]
    else:
        results = list(translate(model, source, target, [a for a, _ in pairs], width))
        texts, translations = [text for text, _ in results], [translation for _, translation in results]
    metric = sacrebleu.BLEU()
    bleu = metric.corpus_score(texts, [[b for _, b in pairs]])
    rows = [row for translation in translations for row in translation.weights]
    positive, clear = ([int((row > least).sum()) for row in rows] for least in (0, 0.1))
    words = max(len(rows), 1)
    return {
        "bleu": bleu.score,
        "signature": str(metric.get_signature()),
        "attended": sum(positive) / words,
        "clearly": sum(clear) / words,
        "nothing": positive.count(0) / words,
    }
