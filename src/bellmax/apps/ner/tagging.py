"""Train, save, load, evaluate and use a tagger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from torch import Tensor

import bellmax.apps.training as training
from bellmax.apps.ner.data import Batch, Corpus, Sentence, Vocabulary, as_iobes, find, read, read_vectors
from bellmax.apps.ner.model import Tagger
from bellmax.apps.ner.schemes import Entity, entities, to_iob2
from bellmax.regularizers import Negentropy, Regularizer, SquaredL2, Tsallis
from bellmax.structures.chain import ScoredChain

OMEGAS = "negentropy", "l2", "tsallis"


@dataclass(frozen=True)
class Config(training.Config):
    """The configuration of a tagger; its vocabulary is separate.

    Args:
        omega: "negentropy", "l2" or "tsallis" (α = 1.5).
        gamma: strength of the regularizer.
        loss: "surrogate" or "relaxed".
        warm_up: epochs with the surrogate loss before the relaxed one. Under a sparse Ω the relaxed loss has no
            gradient where the right tag has probability 0, and may never leave "O".
        word_size: word embedding size, if no vectors are given.
        letter_size: letter embedding size.
        hidden_size: hidden size of the LSTM over the sentence, in each direction.
        dropout: dropout probability at its input and output.
        sentences: maximum number of sentences in a batch.
        tokens: maximum number of tokens in a batch of several sentences, with padding.
        token_column: column of the tokens, from 0.
        tag_column: column of the tags; −1 is the last.
        settings: how to train.

    """

    omega: str = "negentropy"
    gamma: float = 1.0
    loss: str = "surrogate"
    warm_up: int = 0
    word_size: int = 300
    letter_size: int = 50
    hidden_size: int = 100
    dropout: float = 0.5
    sentences: int = 8
    tokens: int = 2048
    token_column: int = 0
    tag_column: int = -1

    def regularizer(self) -> Regularizer:
        if self.omega not in OMEGAS:
            raise ValueError(f"omega must be one of {', '.join(map(repr, OMEGAS))}, got {self.omega!r}")
        if self.omega == "tsallis":
            return Tsallis(1.5, gamma=self.gamma)
        return Negentropy(self.gamma) if self.omega == "negentropy" else SquaredL2(self.gamma)

    def tagger(self, vocabulary: Vocabulary) -> Tagger:
        """An untrained tagger."""
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

    def read(self, data: Path, split: str) -> list[Sentence]:
        """The sentences of a split of a folder, in IOBES."""
        path = find(data, split)
        return as_iobes(read(path, token_column=self.token_column, tag_column=self.tag_column))


# --- training


class NamedEntities(training.Task[list[int]]):
    """Batches are lists of sentence indices."""

    metric = "f1"

    def __init__(self, model: Tagger, config: Config, train: Corpus, dev: Corpus) -> None:
        self.model: Tagger = model
        self._config, self._train, self._dev = config, train, dev
        self._device = next(model.parameters()).device

    def batches(self, epoch: int) -> Sequence[list[int]]:
        self.model.crf.loss = "surrogate" if epoch < self._config.warm_up else self._config.loss
        self._generator = torch.Generator().manual_seed(1_000_003 * self._config.settings.seed + epoch)
        return self._train.buckets(self._config.sentences, self._config.tokens, self._generator)

    def part(self, batch: list[int], rank: int, world: int) -> tuple[Batch, int]:
        own = batch[rank::world]
        return self._train.batch(own or batch[:1], generator=self._generator).to(self._device), len(own)

    def items(self, batch: list[int]) -> int:
        return len(batch)

    def tokens(self, batch: list[int]) -> int:
        return sum(len(self._train.sentences[n].tokens) for n in batch)

    def evaluate(self) -> training.Record:
        return evaluate(self.model, self._dev, self._config.tokens)


def train(data: Path, run: Path, config: Config, *, embeddings: Path | None = None, **more: Any) -> training.State:
    """Train a tagger on a folder of files into the folder ``run``; ``more`` is for :func:`training.fit`.

    With ``resume`` the vocabulary and the configuration are the run's; only epochs and minutes come from ``config``.
    """
    torch.manual_seed(config.settings.seed)
    sentences, dev = config.read(data, "train"), config.read(data, "dev")
    rows: dict[int, Tensor] = {}
    resume = bool(more.get("resume")) and training.is_begun(run)
    if resume:
        vocabulary = Vocabulary.load(run / "vocabulary.json")
        config = config.resumed(run)
    else:
        words, vectors = read_vectors(embeddings) if embeddings else ([], np.empty((0, config.word_size), np.float32))
        config = replace(config, word_size=vectors.shape[1])
        vocabulary = Vocabulary.of(sentences, words)
        rows = _rows(vocabulary, words, vectors)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with training.processes(device):
        model = config.tagger(vocabulary)
        model.use_vectors(rows)
        model.to(device)
        if training.rank() == 0:
            training.begin(run, resume=resume)
            config.save(run)
            vocabulary.save(run / "vocabulary.json")
        task = NamedEntities(model, config, Corpus(sentences, vocabulary), Corpus(dev, vocabulary))
        return training.fit(task, config.settings, run, **more)


def _rows(vocabulary: Vocabulary, words: list[str], vectors: NDArray[np.float32]) -> dict[int, Tensor]:
    """Word vectors by row of the embeddings, for the words that have one, maybe in lower case."""
    known = {word: row for row, word in enumerate(words)}
    found = {n: known.get(word, known.get(word.lower())) for n, word in enumerate(vocabulary.words, start=1)}
    return {n: torch.from_numpy(vectors[row]) for n, row in found.items() if row is not None}


def load(run: Path) -> tuple[Tagger, Vocabulary, Config]:
    """Load the best tagger of a run."""
    if not (run / "best.pt").exists():
        raise ValueError(f"{run} is not a run of 'bellmax ner train': it has no best.pt")
    config, vocabulary = Config.load(run), Vocabulary.load(run / "vocabulary.json")
    model = config.tagger(vocabulary)
    model.load_state_dict(torch.load(run / "best.pt", weights_only=True, map_location="cpu"))
    return model.eval(), vocabulary, config


# --- use


@torch.no_grad()
def evaluate(model: Tagger, corpus: Corpus, tokens: int = 4096) -> training.Record:
    """Precision, recall and F1 of entities in per cent, as CoNLL defines them, and the mean number of possible tags."""
    truth: list[list[str]] = []
    guesses: list[list[str]] = []
    device = next(model.parameters()).device
    positive = words = 0
    labels = model.labels
    for members in corpus.buckets(64, tokens):
        p = model.distribution(corpus.batch(members).to(device))
        positive += int((p.marginals > 0).sum())
        for member, sequence in zip(members, p.best_sequence().tolist(), strict=True):
            given = corpus.sentences[member].tags
            guess = [labels[tag] for tag in sequence[: len(given)]]
            for tags, to in ((given, truth), (guess, guesses)):
                to.append(to_iob2(entities(tags), len(tags)))
            words += len(given)
    return {**entity_scores(truth, guesses), "tags_per_word": positive / words}


def entity_scores(truth: list[list[str]], guesses: list[list[str]]) -> training.Record:
    """Precision, recall and F1 of entities in per cent, of tags in IOB2.

    >>> entity_scores([["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "O", "O"]])["f1"]  # 1 of 1, 1 of 2
    66.66...
    """
    scores = precision_recall_fscore_support(truth, guesses, average="micro", zero_division=0)
    return dict(zip(("precision", "recall", "f1"), (100 * float(score) for score in scores[:3]), strict=True))


class Reading(NamedTuple):
    """One reading of a sentence: its entities, with their joint probability."""

    probability: float
    entities: list[Entity]


class Tagged(NamedTuple):
    """A sentence, its best tags in IOB2, their probabilities, and its readings, most probable first.

    ``is_all`` says whether these are all readings with positive probability.
    """

    tokens: list[str]
    tags: list[str]
    confidence: list[float]
    readings: list[Reading]
    is_all: bool


@torch.no_grad()
def tag(model: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sequence[str]], most: int = 5) -> list[Tagged]:
    """Tag tokenised sentences.

    Under a sparse Ω all readings with positive probability are listed, if there are at most 1000. Otherwise, and under
    negentropy, the ``most`` best ones are.
    """
    corpus = Corpus([Sentence(list(tokens), []) for tokens in sentences], vocabulary)
    found = []
    for n, tokens in enumerate(sentences):
        if not tokens:
            found.append(Tagged([], [], [], [], True))
            continue
        p = model.distribution(corpus.batch([n]))
        best = p.best_sequence()[0]
        confidence = p.marginals[0].gather(-1, best.unsqueeze(-1)).squeeze(-1).tolist()
        tags = [vocabulary.labels[label] for label in best.tolist()]
        readings, is_all = _readings(p, vocabulary, most)
        found.append(Tagged(list(tokens), to_iob2(entities(tags), len(tags)), confidence, readings, is_all))
    return found


def _readings(p: ScoredChain, vocabulary: Vocabulary, most: int) -> tuple[list[Reading], bool]:
    is_all = type(p.omega) is not Negentropy
    if is_all:
        try:
            paths, probabilities = p.support_paths(1000)
        except ValueError:
            is_all = False
    if not is_all:
        paths = p.sequence_to_path(p.topk_sequences(most)[1].movedim(1, 0))
        probabilities = p.log_prob(paths).exp()
        order = probabilities[:, 0].argsort(descending=True)
        paths, probabilities = paths[order], probabilities[order]
    readings = []
    for sequence, probability in zip(
        p.path_to_sequence(paths)[:, 0].tolist(), probabilities[:, 0].tolist(), strict=True
    ):
        tags = [vocabulary.labels[label] for label in sequence if label >= 0]
        if tags and probability > 0:
            readings.append(Reading(probability, entities(tags)))
    return readings, is_all
