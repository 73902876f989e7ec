"""Train, save, load, evaluate and use a tagger."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import bellmax_apps.training as training
from bellmax.regularizers import Negentropy, Regularizer, resolve
from bellmax.structures.chain import ScoredChain
from bellmax_apps.files import fingerprint
from bellmax_apps.ner.data import Batch, Corpus, Sentence, Vocabulary, as_iobes, find, read, read_vectors
from bellmax_apps.ner.model import Tagger
from bellmax_apps.ner.schemes import Entity, entities, to_iob2

OMEGAS = "negentropy", "softmax", "l2", "sparsemax", "entmax"
_SCORES = "precision", "recall", "f1"
_MOST, _FEW = 1000, 8  # maximum number of readings of a sentence by itself, and of each sentence of a batch


@dataclass(frozen=True)
class Config(training.Config):
    """The configuration of a tagger, without its vocabulary.

    Args:
        omega: Regularizer: "negentropy", "softmax" (the same), "l2", "sparsemax" or "entmax", as in the library.
        gamma: Strength of the regularizer.
        loss: "surrogate" or "relaxed".
        warm_up: Number of epochs with the surrogate loss before the relaxed loss. Under a sparse Ω the relaxed loss has
            no gradient where the true tag has probability 0, so that a tagger may predict "O" forever.
        word_size: Word embedding size without ``embeddings``.
        embeddings: File of word vectors to start from, or None.
        letter_size: Letter embedding size.
        hidden_size: Hidden size of the LSTM over the sentence, in each direction.
        dropout: Dropout probability at the input and output of this LSTM.
        sentences: Maximum number of sentences in a batch.
        tokens: Maximum number of tokens in a batch of several sentences, with padding.
        token_column: Column of the tokens, from 0.
        tag_column: Column of the tags. −1 is the last column.
        settings: Settings of the training loop.

    """

    command = "bellmax ner train"

    settings: training.Settings = field(
        default_factory=partial(training.Settings, epochs=14, optimizer="adamw", step_size=0.002, decay=0.7)
    )
    omega: str = "negentropy"
    gamma: float = 1.0
    loss: str = "surrogate"
    warm_up: int = 0
    word_size: int = 100
    embeddings: str | None = None
    letter_size: int = 50
    hidden_size: int = 100
    dropout: float = 0.5
    sentences: int = 16
    tokens: int = 2048
    token_column: int = 0
    tag_column: int = -1

    def __post_init__(self) -> None:
        training.check_share("dropout", self.dropout)

    def regularizer(self) -> Regularizer:
        """Regularizer Ω of the CRF. Raises ``ValueError`` if ``omega`` is unknown."""
        if self.omega not in OMEGAS:
            hint = ", which is now 'entmax'" if self.omega == "tsallis" else ""
            raise ValueError(f"omega must be one of {', '.join(map(repr, OMEGAS))}, got {self.omega!r}{hint}")
        return resolve(self.omega, self.gamma)

    def tagger(self, vocabulary: Vocabulary) -> Tagger:
        """Create an untrained tagger."""
        return Tagger(
            vocabulary,
            omega=self.regularizer(),
            loss=self.loss,
            word_size=self.word_size,
            letter_size=self.letter_size,
            hidden_size=self.hidden_size,
            dropout=self.dropout,
            sparse=self.settings.optimizer == "sgd",
        )

    def read(self, data: Path, split: str, kinds: Collection[str] | None = None) -> list[Sentence]:
        """Read the sentences of a split in IOBES. Raises ``ValueError`` if an entity has a type not in ``kinds``."""
        path = find(data, split)
        return as_iobes(read(path, token_column=self.token_column, tag_column=self.tag_column, kinds=kinds))


# --- training


class NamedEntities(training.Task[list[int]]):
    """Training of a tagger. Batches are lists of sentence indices."""

    metric = "f1"

    def __init__(self, model: Tagger, config: Config, train: Corpus, dev: Corpus) -> None:
        self.model: Tagger = model
        self._config, self._train, self._dev = config, train, dev
        self._device = next(model.parameters()).device

    def batches(self, epoch: int) -> Sequence[list[int]]:
        self.model.crf.loss = "surrogate" if epoch < self._config.warm_up else self._config.loss
        self._generator = torch.Generator().manual_seed(1_000_003 * self._config.settings.seed + epoch)
        return self._train.buckets(self._config.sentences, self._config.tokens, self._generator)

    def shard(self, batch: list[int], rank: int, world: int) -> tuple[Batch, int]:
        members = batch[rank::world]
        return self._train.batch(members or batch[:1], generator=self._generator).to(self._device), len(members)

    def items(self, batch: list[int]) -> int:
        return len(batch)

    def tokens(self, batch: list[int]) -> int:
        return sum(len(self._train.sentences[n].tokens) for n in batch)

    def evaluate(self) -> training.Record:
        return evaluate(self.model, self._dev, self._config.tokens)


def train(data: Path, run: Path, config: Config, **more: Any) -> training.State:
    """Train a tagger on the files of a folder, and write it to the folder ``run``.

    ``more`` are arguments of :func:`training.fit`. With ``resume``, only epochs and minutes may differ from the
    configuration of the run.
    """
    torch.manual_seed(config.settings.seed)
    config = replace(config, fingerprint=fingerprint(find(data, split) for split in ("train", "dev")))
    rows: dict[int, Tensor] = {}
    if more.get("resume") and training.is_begun(run):
        config = config.resumed(run)
    resume = bool(more.get("resume")) and training.has_epoch(run)
    if resume:
        vocabulary = Vocabulary.load(run / "vocabulary.json")
        sentences = config.read(data, "train", vocabulary.kinds)
    else:
        sentences = config.read(data, "train")
        words: list[str] = []
        vectors = np.empty((0, config.word_size), np.float32)
        if config.embeddings is not None:
            words, vectors = read_vectors(Path(config.embeddings))
        config = replace(config, word_size=vectors.shape[1])
        vocabulary = Vocabulary.of(sentences, words)
        rows = _embedding_rows(vocabulary, words, vectors)
    dev = config.read(data, "dev", vocabulary.kinds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with training.processes(device):
        model = config.tagger(vocabulary)
        model.use_vectors(rows)
        model.to(device)
        if training.rank() == 0:
            training.begin(run, config, resume=resume)
            vocabulary.save(run / "vocabulary.json")
        task = NamedEntities(model, config, Corpus(sentences, vocabulary), Corpus(dev, vocabulary))
        return training.fit(task, config.settings, run, **more)


def _embedding_rows(vocabulary: Vocabulary, words: list[str], vectors: NDArray[np.float32]) -> dict[int, Tensor]:
    """Pretrained vectors by row of the word embeddings. A word without a vector is looked up in lower case."""
    index = {word: n for n, word in enumerate(words)}
    rows = {row: index.get(word, index.get(word.lower())) for row, word in enumerate(vocabulary.words, start=1)}
    return {row: torch.from_numpy(vectors[n]) for row, n in rows.items() if n is not None}


def load(run: Path) -> tuple[Tagger, Vocabulary, Config]:
    """Load the best tagger of a run."""
    training.check_usable(run, Config.command)
    config, vocabulary = Config.load(run), Vocabulary.load(run / "vocabulary.json")
    model = training.load_best(lambda: config.tagger(vocabulary), run)
    return model.eval(), vocabulary, config


# --- use


class Guesses(NamedTuple):
    """True and predicted tags of sentences in IOB2, and the mean number of tags of a word with positive probability."""

    truth: list[list[str]]
    guesses: list[list[str]]
    tags_per_word: float


@torch.no_grad()
def guess(model: Tagger, corpus: Corpus, tokens: int = 4096) -> Guesses:
    """Tag sentences whose true tags are known."""
    truth: list[list[str]] = []
    guesses: list[list[str]] = []
    device = next(model.parameters()).device
    positive = words = 0
    labels = model.labels
    for members in corpus.buckets(64, tokens):
        p = model.distribution(corpus.batch(members).to(device))
        positive += int((p.marginals > 0).sum())
        for member, sequence in zip(members, p.decode().tolist(), strict=True):
            true_tags = corpus.sentences[member].tags
            predicted = [labels[tag] for tag in sequence[: len(true_tags)]]
            truth.append(to_iob2(entities(true_tags), len(true_tags)))
            guesses.append(to_iob2(entities(predicted), len(predicted)))
            words += len(true_tags)
    return Guesses(truth, guesses, positive / words)


def evaluate(model: Tagger, corpus: Corpus, tokens: int = 4096) -> training.Record:
    """Precision, recall and F1 of entities in percent, as CoNLL defines them, and the mean number of possible tags."""
    result = guess(model, corpus, tokens)
    return {**entity_scores(result.truth, result.guesses), "tags_per_word": result.tags_per_word}


def entity_scores(truth: list[list[str]], guesses: list[list[str]]) -> training.Record:
    """Precision, recall and F1 of entities in percent, from tags in IOB2.

    >>> entity_scores([["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "O", "O"]])["f1"]  # 1 of 1, 1 of 2
    66.66...
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    scores = precision_recall_fscore_support(truth, guesses, average="micro", zero_division=0)
    return dict(zip(_SCORES, (100 * float(score) for score in scores[:3]), strict=True))


def scores_by_type(truth: list[list[str]], guesses: list[list[str]]) -> dict[str, training.Record]:
    """Precision, recall and F1 in percent for each type of entity, and its number of true entities.

    >>> scores_by_type([["B-PER", "O", "B-LOC"]], [["B-PER", "O", "O"]])["LOC"]
    {'precision': 0.0, 'recall': 0.0, 'f1': 0.0, 'entities': 1}
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    kinds = sorted({tag[2:] for tags in (*truth, *guesses) for tag in tags if tag != "O"})
    *scores, counts = precision_recall_fscore_support(truth, guesses, average=None, zero_division=0)
    return {
        kind: {**dict(zip(_SCORES, (100 * float(score) for score in row), strict=True)), "entities": int(count)}
        for kind, *row, count in zip(kinds, *scores, counts, strict=True)
    }


class Reading(NamedTuple):
    """The entities of a possible tag sequence of a sentence, and its probability."""

    probability: float
    entities: list[Entity]


class Tagged(NamedTuple):
    """A tagged sentence.

    Args:
        tokens: The tokens.
        tags: Best tag of each token in IOB2.
        confidence: Probability of each of these tags.
        readings: Readings of the sentence, most probable first.
        is_all: True if these are all readings with positive probability.

    """

    tokens: list[str]
    tags: list[str]
    confidence: list[float]
    readings: list[Reading]
    is_all: bool


@torch.no_grad()
def tag(model: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sequence[str]], most: int = 5) -> list[Tagged]:
    """Tag tokenized sentences.

    Under a sparse Ω, all readings with positive probability are listed if there are at most 1000. Otherwise, and under
    negentropy, the ``most`` best readings are listed.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    results = [Tagged([], [], [], [], True) for _ in sentences]
    nonempty = [n for n, tokens in enumerate(sentences) if tokens]
    corpus = Corpus([Sentence(list(sentences[n]), []) for n in nonempty], vocabulary)
    for members in corpus.buckets(64, max(64, 10_000 // max(most, 5))):
        batch = corpus.batch(members)
        # float64, because the log-probability of a long sentence is a small difference of large scores
        p = model.crf.distribution(model.emissions(batch).double(), lengths=batch.lengths)
        best = p.decode()
        confidence = p.marginals.gather(-1, best.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        readings_of = _readings(p, vocabulary.labels, most)
        for member, sequence, probabilities, (readings, is_all) in zip(
            members, best.tolist(), confidence.tolist(), readings_of, strict=True
        ):
            tokens = corpus.sentences[member].tokens
            tags = [vocabulary.labels[label] for label in sequence[: len(tokens)]]
            tags = to_iob2(entities(tags), len(tags))
            results[nonempty[member]] = Tagged(tokens, tags, probabilities[: len(tokens)], readings, is_all)
    return results


def _readings(p: ScoredChain, labels: Sequence[str], most: int) -> list[tuple[list[Reading], bool]]:
    """Readings of each sentence of a batch, and True if they are all readings with positive probability.

    A sentence with many readings would make the whole batch list many. Therefore a batch in which a sentence has more
    than 8 readings is split in two.
    """
    if type(p.omega) is Negentropy:
        scores, sequences = p.topk_decoded(most)
        return _to_readings(sequences, (scores - p.value.unsqueeze(-1)) / p.omega.gamma, labels, is_all=False)
    count = p.batch_shape[0]
    try:
        paths, probabilities = p.support_paths(_MOST if count == 1 else _FEW)
        return _to_readings(p.path_to_sequence(paths).movedim(0, 1), probabilities.log().T, labels, is_all=True)
    except ValueError:
        if count > 1:
            return [pair for half in (p[: count // 2], p[count // 2 :]) for pair in _readings(half, labels, most)]
    sequences = p.topk_decoded(min(most, _MOST))[1]
    log_probabilities = p.log_prob(p.sequence_to_path(sequences.movedim(1, 0))).T
    return _to_readings(sequences, log_probabilities, labels, is_all=False)


def _to_readings(
    sequences: Tensor, log_probabilities: Tensor, labels: Sequence[str], *, is_all: bool
) -> list[tuple[list[Reading], bool]]:
    """Convert tag sequences (B, K, T) with log-probabilities (B, K) to readings, most probable first.

    A log-probability of −∞ marks a sequence that does not exist, in a sentence with fewer than K readings.
    """
    results = []
    for candidates, logs in zip(sequences.tolist(), log_probabilities.tolist(), strict=True):
        ordered = sorted(zip(logs, candidates, strict=True), key=lambda pair: -pair[0])
        readings = [
            Reading(math.exp(min(log, 0.0)), entities([labels[label] for label in sequence if label >= 0]))
            for log, sequence in ordered
            if log > -math.inf
        ]
        results.append((readings, is_all))
    return results
