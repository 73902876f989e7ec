"""Exact decoding of CTC networks with a lexicon and an n-gram."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from bellmax.automata.arpa import ngram as read_ngram
from bellmax.automata.automaton import Automaton
from bellmax.automata.builders import ctc_topology
from bellmax.automata.composition import compose
from bellmax.automata.matching import Failing
from bellmax.automata.scores import Scores
from bellmax.automata.spelling import Alphabet, Token
from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.programs.checks import batch_first_hint, check_lengths
from bellmax.structures.ctc import CTC

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAMPLES = 16  # for each text
_GAMMAS = 1.0, 2.0, 4.0, 8.0  # larger values draw more different texts

_ROUNDING = 1e-3  # log-probabilities may be above 0 by this number

_Candidates = dict[tuple[tuple[int, ...], tuple[int, ...]], float]
"""The labels of texts and the numbers of their words in the lexicon, with the scores of the n-gram and the words."""


class CTCWord(NamedTuple):
    """A word of a decoded text."""

    text: str
    start: int
    """The first frame."""
    end: int
    """The frame after the last."""
    confidence: float
    """The geometric mean of the probabilities of the frames along the best alignment."""


class CTCText(NamedTuple):
    """A decoded text."""

    text: str
    score: float
    """The logarithm of the probability of the text, with the weighted scores of the n-gram and of the words."""
    labels: list[int]
    """The classes of the text, without blanks and without word delimiters at the ends."""
    words: list[CTCWord]


class CTCDecoder:
    """Find the best texts for the output of a CTC network, without a beam.

    The decoder composes the alignments of CTC, the lexicon and the n-gram to one automaton, when it is made.
    :meth:`decode` finds the best alignments in this automaton exactly. The score of an alignment is the sum of the
    log-probabilities of its frames, plus ``lm_weight`` times the log-probability of its text under the n-gram, plus
    ``word_score`` for each word.

    Some labels have a special meaning:

    - The first of " ", "|", "<space>" and "▁" that is a label is the word delimiter. A text has one delimiter between
      two words. The network may also write a delimiter before the first and after the last word.
    - A label that starts with "▁" starts a word. If there are labels such as "▁the", then "▁" is not a delimiter.
    - Other labels in angle or square brackets, such as "<s>" and "[UNK]", are never in a text.

    Args:
        labels: The label of each class, strings.
        blank: The class of the blank, default 0.
        lexicon: The words that a text may contain, which are spelled letter by letter, or a mapping from each word to
            the labels that spell it. By default, all sequences of labels are allowed.
        ngram: An ARPA file: an n-gram of words if there is a lexicon, and otherwise an n-gram of labels, in which a
            delimiter " " is written "|". Words of the lexicon and labels that the file does not have are scored as
            "<unk>".
        lm_weight: The weight of the natural logarithm of the probability of the n-gram, default 0.5.
        word_score: The score that each word adds, default 0.

    >>> decoder = CTCDecoder(["-", "a", "c", "t", " "], lexicon=["a", "act", "cat"])
    >>> logits = torch.zeros(1, 7, 5)
    >>> logits[0, range(7), [2, 0, 3, 3, 4, 1, 1]] = 3.0    # "c-tt aa"
    >>> [[best]] = decoder.decode(logits.log_softmax(-1))
    >>> best.text, best.labels
    ('cat a', [2, 1, 3, 4, 1])
    >>> best.words[1]
    CTCWord(text='a', start=5, end=7, confidence=0.8339...)
    """

    @answers_near_misses
    def __init__(
        self,
        labels: Sequence[str],
        *,
        blank: int = 0,
        lexicon: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        ngram: str | Path | None = None,
        lm_weight: float = 0.5,
        word_score: float = 0.0,
    ) -> None:
        for name, weight in (("lm_weight", lm_weight), ("word_score", word_score)):
            if not math.isfinite(weight):
                raise ValueError(f"{name} must be a finite number, got {weight}")
        self._alphabet = Alphabet(labels, blank)
        self._spellings = None if lexicon is None else self._alphabet.spellings(lexicon)
        self.automaton = self._compose(ngram, float(lm_weight), float(word_score))
        """The automaton of all alignments. Its labels are classes, and its outputs are words, or labels."""

    def __repr__(self) -> str:
        return f"CTCDecoder({len(self._alphabet.labels)} labels, {self.automaton!r})"

    def _compose(self, ngram: str | Path | None, lm_weight: float, word_score: float) -> Automaton:
        """Return the automaton of CTC, of the texts and of the n-gram."""
        alphabet = self._alphabet
        if self._spellings is None:
            texts = alphabet.letter_table(word_score)
        else:
            texts = alphabet.word_table(self._spellings, word_score)
        table = compose(ctc_topology(len(alphabet.labels), alphabet.blank), texts)
        if ngram is not None:
            symbols = alphabet.symbols() if self._spellings is None else list(self._spellings)
            table = compose(table, _weighted(read_ngram(ngram, symbols), lm_weight))
        return Automaton._of(table)

    def greedy(self, log_probs: Tensor, lengths: Lengths | None = None) -> list[CTCText]:
        """Return the text of the best class of each frame, for each batch member.

        The lexicon and the n-gram are ignored. The score is the log-probability of the alignment.

        Args:
            log_probs: The log-probability (B, T, V) of each class at each frame.
            lengths: The number of frames of each batch member, by default T.

        >>> decoder = CTCDecoder(["-", "a", "c", "t", " "])
        >>> classes = torch.tensor([[2, 2, 0, 1, 3, 4, 1]])    # "cc-at a"
        >>> decoder.greedy(torch.nn.functional.one_hot(classes, 5).log())[0].text
        'cat a'
        """
        scores, frames = self._read(log_probs, lengths)
        results = []
        for rows, count in zip(scores, frames, strict=True):
            best, path = rows[:count].max(-1)
            tokens = self._alphabet.trimmed(self._tokens(path.tolist()))
            results.append(self._result(float(best.sum()), best, tokens, self._alphabet.split(tokens)))
        return results

    def decode(self, log_probs: Tensor, lengths: Lengths | None = None, n_best: int = 1) -> list[list[CTCText]]:
        """Return the best texts, the best first, for each batch member.

        The candidates are the text of the best alignment, which is exact, and texts that are drawn from their
        distribution, always with the same random numbers. The score of a candidate is the logarithm of the sum over all
        its alignments. A text that is not drawn is missed, even if it is better.

        There may be fewer than ``n_best`` texts. If no alignment is possible, the result is one empty text with the
        score −∞.

        Args:
            log_probs: The log-probability (B, T, V) of each class at each frame.
            lengths: The number of frames of each batch member, from 0 to T, by default T.
            n_best: The number of texts, default 1.

        """
        if not isinstance(n_best, int) or n_best < 1:
            raise ValueError(f"n_best must be a positive integer, got {n_best!r}")
        scores, frames = self._read(log_probs, lengths)
        totals, best = self.automaton.paths(scores, lengths=frames, omega="hard").topk_decoded(1)
        is_possible = (totals[:, 0] > -torch.inf).tolist()
        candidates = [
            self._texts(path) if path_exists else {} for path, path_exists in zip(best, is_possible, strict=True)
        ]
        members = [member for member, path_exists in enumerate(is_possible) if path_exists]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for gamma in _GAMMAS:
                if not members:
                    break
                p = self.automaton.paths(scores[members], lengths=frames[members], gamma=gamma)
                samples = p.sample_decoded((_SAMPLES * (n_best + 1),))
                for member, arcs in zip(members, samples.unbind(1), strict=True):
                    candidates[member].update(self._texts(arcs))
                members = [member for member in members if len(candidates[member]) < n_best]
        return [
            self._best(rows[:count], texts, n_best) or [CTCText("", -math.inf, [], [])]
            for rows, count, texts in zip(scores, frames.tolist(), candidates, strict=True)
        ]

    def _read(self, log_probs: Tensor, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T, V) in float64, with 0 in the padding, and the number of frames (B,)."""
        classes = len(self._alphabet.labels)
        shape = tuple(check_tensor("log_probs", log_probs).shape)
        if len(shape) != 3 or shape[-1] != classes:
            raise ValueError(f"log_probs must have shape (B, T, {classes}) for {classes} labels, got {shape}")
        scores = log_probs.detach().to("cpu", torch.float64)
        batch, steps, _ = shape
        frames = torch.full((batch,), steps) if lengths is None else as_lengths("lengths", lengths, scores.device)
        if frames.shape not in ((), (batch,)):
            raise ValueError(f"lengths must have shape ({batch},), got {tuple(frames.shape)}")
        frames = frames.expand(batch)
        is_swapped = lengths is not None and batch != steps and bool((frames > steps).any())
        check_lengths("lengths", frames, 0, steps, batch_first_hint("log_probs", is_swapped))
        is_padding = torch.arange(steps) >= frames.unsqueeze(-1)
        scores = scores.masked_fill(is_padding.unsqueeze(-1), 0.0)
        bad = (~(scores <= _ROUNDING)).nonzero()
        if len(bad):
            member, frame, label = bad[0].tolist()
            got = f"{float(scores[member, frame, label])} for class {label} at frame {frame} of batch member {member}"
            raise ValueError(f"log_probs must be log-probabilities of at most 0, such as log_softmax(-1), got {got}")
        return scores, frames

    def _tokens(self, path: Sequence[int]) -> list[Token]:
        """Return the labels of an alignment: the class of each frame, merged, without blanks."""
        tokens: list[Token] = []
        before = self._alphabet.blank
        for frame, label in enumerate(path):
            if label == before != self._alphabet.blank:
                tokens[-1] = tokens[-1]._replace(end=frame + 1)
            elif label != self._alphabet.blank:
                tokens.append(Token(label, frame, frame + 1))
            before = label
        return tokens

    def _texts(self, arcs: Tensor) -> _Candidates:
        """Return the texts of alignments (k, T)."""
        automaton, alphabet = self.automaton, self._alphabet
        is_arc, number = arcs >= 0, arcs.clamp(min=0)
        _, target, label, output = automaton.arcs[number].masked_fill(~is_arc.unsqueeze(-1), -1).unbind(-1)
        last = pad(target, (1, 0), value=int((automaton.start + automaton.final).argmax()))
        last = last.gather(1, is_arc.sum(1, keepdim=True)).squeeze(1)
        weights = automaton.scores[number].masked_fill(~is_arc, 0.0).sum(1) + automaton.final[last]
        before = pad(label, (1, 0), value=alphabet.blank)[:, :-1]
        is_start = is_arc & (label != alphabet.blank) & (label != before)
        candidates: _Candidates = {}
        for row, weight in enumerate(weights.tolist()):
            tokens = alphabet.trimmed([Token(found, 0, 0) for found in label[row, is_start[row]].tolist()])
            words = output[row, output[row] >= 0].tolist() if self._spellings is not None else []
            candidates[tuple(token.label for token in tokens), tuple(words)] = weight
        return candidates

    def _best(self, scores: Tensor, candidates: _Candidates, n_best: int) -> list[CTCText]:
        """Return the best texts of a batch member with log-probabilities (T, V)."""
        if not len(scores):
            return [CTCText("", weight, [], []) for weight in candidates.values()]
        if not candidates:
            return []
        owners, values, _ = self._solve(scores, [labels for labels, _ in candidates], "negentropy")
        sums = [float(values[owners == n].logsumexp(0)) + weight for n, weight in enumerate(candidates.values())]
        ranked = sorted(range(len(sums)), key=lambda n: -sums[n])[:n_best]
        keys = list(candidates)
        owners, values, paths = self._solve(scores, [keys[n][0] for n in ranked], "hard")
        results = []
        for rank, n in enumerate(ranked):
            path = paths[int(torch.where(owners == rank, values, -torch.inf).argmax())]
            tokens = self._alphabet.trimmed(self._tokens(path.tolist()))
            along = scores.gather(1, path.unsqueeze(1)).squeeze(1)
            results.append(self._result(sums[n], along, tokens, self._words(tokens, keys[n][1])))
        return results

    def _solve(self, scores: Tensor, sequences: Sequence[Sequence[int]], omega: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values and the best alignments of sequences of labels, also with a delimiter at each end.

        The first tensor has the number of the sequence.
        """
        owners: list[int] = []
        targets: list[Tensor] = []
        space, blank = [self._alphabet.delimiter], self._alphabet.blank
        for number, labels in enumerate(sequences):
            forms = [[*labels]]
            if self._alphabet.delimiter >= 0:
                forms += [[*space, *labels], [*labels, *space], [*space, *labels, *space]] if labels else [space]
            owners += [number] * len(forms)
            targets += [torch.tensor(form, dtype=torch.int64) for form in forms]
        sizes = torch.tensor([len(target) for target in targets])
        rows = scores.expand(len(targets), *scores.shape)
        padded = pad_sequence(targets, True, padding_value=blank)
        p = CTC(rows, padded, lengths=(len(scores), sizes), blank=blank, omega=omega)
        return torch.tensor(owners), p.value, p.decode() if omega == "hard" else p.value

    def _words(self, tokens: Sequence[Token], numbers: Sequence[int]) -> list[tuple[str, list[Token]]]:
        """Return the words of a text, each with its tokens. Words of the lexicon have these numbers."""
        if self._spellings is None:
            return self._alphabet.split(tokens)
        letters = (token for token in tokens if token.label != self._alphabet.delimiter)
        names = list(self._spellings)
        return [(names[n], [next(letters) for _ in self._spellings[names[n]]]) for n in numbers]

    def _result(
        self, score: float, along: Tensor, tokens: Sequence[Token], words: Sequence[tuple[str, Sequence[Token]]]
    ) -> CTCText:
        """Return a text, given the log-probability of each frame along its best alignment."""
        timed = []
        for word, letters in words:
            start, end = letters[0].start, letters[-1].end
            timed.append(CTCWord(word, start, end, float(along[start:end].mean().exp())))
        text = " ".join(word for word, _ in words)
        return CTCText(text, score, [token.label for token in tokens], timed)


def _weighted(ngram: Failing, weight: float) -> Failing:
    """Return the n-gram with all scores multiplied by a weight. −∞ stays −∞."""

    def scaled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(scores == -np.inf, -np.inf, weight * np.where(scores == -np.inf, 0.0, scores))

    table = ngram.table
    table = replace(table, scores=Scores(scaled(table.scores.constant)), final=Scores(scaled(table.final.constant)))
    return Failing(table, ngram.failure, scaled(ngram.failure_score))
