"""The translator of section 6 and appendix C.3 of the paper, its kinds of attention, greedy search and beam search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bellmax.nn import SegmentationAttention
from bellmax.regularizers import Regularizer, resolve
from bellmax_apps.translation.data import BEGIN, END, PADDING, Batch

ATTENTIONS = "dot", "structured"
OMEGAS = "negentropy", "softmax", "l2", "sparsemax", "entmax"
FORMER = {
    "softmax": ("dot", "negentropy"),
    "negentropy": ("structured", "negentropy"),
    "l2": ("structured", "l2"),
    "sparsemax": ("dot", "sparsemax"),
}
"""Attention and Ω, by the name of both in version 0.2."""

# Appendix C.3 of the paper has γ = 2 and γ = 10 for structured attention. With γ = 1, sparsemax would put all weight on
# one word after a few steps, and then its gradient is 0. Entmax with γ = 5 and sparsemax with γ = 10 give weight 0 at
# the same distance from the best score.
_GAMMAS = {
    "dot": {"negentropy": 1.0, "softmax": 1.0, "l2": 10.0, "sparsemax": 10.0, "entmax": 5.0},
    "structured": {"negentropy": 2.0, "softmax": 2.0, "l2": 10.0, "sparsemax": 10.0, "entmax": 5.0},
}


def check_attention(attention: str, omega: str) -> None:
    """Raise ``ValueError`` if there is no such attention or no such Ω."""
    if attention not in ATTENTIONS:
        hint = ""
        if attention in FORMER:
            hint = ": write --attention {} --omega {}".format(*FORMER[attention])
        raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTIONS))}, got {attention!r}{hint}")
    if omega not in OMEGAS:
        raise ValueError(f"omega must be one of {', '.join(map(repr, OMEGAS))}, got {omega!r}")


class PlainAttention(nn.Module):
    """Dot-product attention: bilinear scores, and the argmax of max_Ω as weights, which is softmax for negentropy.

    Queries (B, Q, D) and keys (B, K, D) give a context (B, Q, D) and weights (B, Q, K).
    """

    def __init__(self, size: int, omega: Regularizer) -> None:
        super().__init__()
        self.omega = omega
        self.weight = nn.Parameter(torch.empty(size, size))
        nn.init.normal_(self.weight, std=1 / size)

    def forward(self, queries: Tensor, keys: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = (queries @ self.weight @ keys.mT).masked_fill(~mask.unsqueeze(-2), -torch.inf)
        weights = self.omega.argmax(scores).to(keys.dtype)
        return weights @ keys, weights


def create_attention(attention: str, omega: str, size: int) -> PlainAttention | SegmentationAttention:
    """Create attention by its name and the name of its Ω, with γ as in appendix C.3 of the paper."""
    check_attention(attention, omega)
    regularizer = resolve(omega, _GAMMAS[attention][omega])
    if attention == "dot":
        return PlainAttention(size, regularizer)
    return SegmentationAttention(size, size, omega=regularizer)


class State(NamedTuple):
    """The state of the decoder between two words, (B, H) each. ``fed`` is the last input of the output layer."""

    hidden: Tensor
    cell: Tensor
    fed: Tensor


class Translator(nn.Module):
    """A bidirectional LSTM encoder and an LSTM decoder with attention and input feeding.

    Calling it returns the sum of the losses of a batch, over the target words.

    Args:
        source_words: Vocabulary size of the source language.
        target_words: Vocabulary size of the target language.
        attention: "dot" for dot-product attention, or "structured" for :class:`SegmentationAttention`.
        omega: Ω of the attention: "negentropy", "softmax" (the same), "l2", "sparsemax" or "entmax", as in the library.
        size: Size of the word embeddings and of the hidden states.
        dropout: Dropout probability of embeddings and of the input of the output layer.
        smoothing: Label smoothing in training.

    """

    def __init__(
        self,
        source_words: int,
        target_words: int,
        *,
        attention: str = "dot",
        omega: str = "negentropy",
        size: int = 256,
        dropout: float = 0.3,
        smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        if size < 2 or size % 2:
            raise ValueError(f"size must be even and above 0, got {size}")
        self.size, self.smoothing = size, smoothing
        self.source = nn.Embedding(source_words, size, padding_idx=PADDING)
        self.target = nn.Embedding(target_words, size, padding_idx=PADDING)
        self.encoder = nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(2 * size, size)
        self.attention = create_attention(attention, omega, size)
        self.combine = nn.Linear(2 * size, size, bias=False)
        self.write = nn.Linear(size, target_words)
        self.dropout = nn.Dropout(dropout)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=size**-0.5)
        self.write.weight = self.target.weight

    def forward(self, batch: Batch) -> Tensor:
        outputs, _ = self.states(batch)
        scores, words = self.write(outputs).flatten(0, 1), batch.target[:, 1:].flatten()
        smoothing = self.smoothing if self.training else 0.0
        return cross_entropy(scores, words, ignore_index=PADDING, reduction="sum", label_smoothing=smoothing)

    def states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs of the output layer for the target words after the first, (B, T−1, H), and weights (B, T−1, S)."""
        keys, mask, state = self.read(batch.source, batch.lengths)
        words = self.dropout(self.target(batch.target[:, :-1]))
        outputs, weights = [], []
        for word in words.unbind(1):
            state, word_weights = self.step(word, state, keys, mask)
            outputs.append(state.fed)
            weights.append(word_weights)
        return torch.stack(outputs, 1), torch.stack(weights, 1)

    def read(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, State]:
        """Encode a batch: keys (B, S, H), their mask (B, S) and the first state of the decoder."""
        words = self.dropout(self.source(source))
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, (hidden, cell) = self.encoder(packed)
        keys, _ = pad_packed_sequence(states, batch_first=True)
        hidden, cell = (torch.cat(tuple(last), -1) for last in (hidden, cell))
        return keys, source != PADDING, State(hidden, cell, torch.zeros_like(hidden))

    def step(self, word: Tensor, state: State, keys: Tensor, mask: Tensor) -> tuple[State, Tensor]:
        """Decode a word (B, H): the next state, from which ``write`` scores the next word, and weights (B, S)."""
        hidden, cell = self.decoder(torch.cat((word, state.fed), -1), (state.hidden, state.cell))
        context, weights = self.attention(hidden.unsqueeze(1), keys, mask=mask)
        fed = self.dropout(torch.tanh(self.combine(torch.cat((context.squeeze(1), hidden), -1))))
        return State(hidden, cell, fed), weights.squeeze(1)


# --- search


class Translation(NamedTuple):
    """Token ids without begin and end, their log-probability, and attention weights (words, S)."""

    words: list[int]
    log_probability: float
    weights: Tensor


@torch.no_grad()
def greedy(model: Translator, source: Tensor, lengths: Tensor, max_words: int) -> list[Translation]:
    """Translate a batch by greedy search, up to ``max_words`` words."""
    keys, mask, state = model.read(source, lengths)
    batch = len(source)
    word = torch.full((batch,), BEGIN, device=source.device)
    done = torch.zeros(batch, dtype=torch.bool, device=source.device)
    total = torch.zeros(batch, device=source.device)
    words, weights = [], []
    for _ in range(max_words):
        state, word_weights = model.step(model.target(word), state, keys, mask)
        score, word = _next_words(model, state).max(-1)
        total = total + score.masked_fill(done, 0)
        words.append(word.masked_fill(done, END))
        weights.append(word_weights)
        done = done | (word == END)
        if bool(done.all()):
            break
    rows = zip(torch.stack(words, 1).tolist(), total.tolist(), torch.stack(weights, 1), strict=True)
    return [_up_to_end(*row) for row in rows]


def _next_words(model: Translator, state: State) -> Tensor:
    """Log-probabilities of the next word, shape (B, words). Padding and begin have −∞."""
    scores: Tensor = model.write(state.fed).float()
    scores[:, :END] = -torch.inf
    return scores.log_softmax(-1)


def _up_to_end(words: list[int], score: float, weights: Tensor) -> Translation:
    """Translation without the end token and what follows it."""
    count = words.index(END) if END in words else len(words)
    return Translation(words[:count], score, weights[:count])


@torch.no_grad()
def beam_search(model: Translator, source: Tensor, width: int, max_words: int, penalty: float = 1.0) -> Translation:
    """Translate a sentence (S,) by beam search with this width, up to ``max_words`` words.

    Translations are ranked by log-probability / length^``penalty``, where the length includes the end.
    """
    keys, mask, state = model.read(source.unsqueeze(0), torch.tensor([len(source)]))
    word = torch.full((1,), BEGIN, device=source.device)
    beam: list[tuple[float, _Prefix | None]] = [(0.0, None)]
    best: tuple[float, float, _Prefix | None] = -torch.inf, -torch.inf, None
    for length in range(1, max_words + 1):
        count = len(beam)
        state, weights = model.step(model.target(word), state, keys.expand(count, -1, -1), mask.expand(count, -1))
        before = torch.tensor([score for score, _ in beam], device=source.device)
        scores = _next_words(model, state) + before.unsqueeze(1)
        candidates = scores.flatten().topk(min(2 * width, scores.numel()))
        longer: list[tuple[float, _Prefix | None]] = []
        parents: list[int] = []
        for score, index in zip(candidates.values.tolist(), candidates.indices.tolist(), strict=True):
            parent, next_word = divmod(index, scores.shape[1])
            prefix = beam[parent][1]
            if next_word != END:
                prefix = _Prefix(prefix, next_word, weights[parent])
            if next_word == END or length == max_words:
                best = max(best, (score / length**penalty, score, prefix), key=lambda entry: entry[0])
            elif len(longer) < width:
                longer.append((score, prefix))
                parents.append(parent)
        # A longer translation has a lower log-probability, and at most `max_words` words: it cannot beat this rank.
        if not longer or best[0] >= longer[0][0] / max_words**penalty:
            break
        beam = longer
        state = State(*(tensor[parents] for tensor in state))
        word = torch.tensor([prefix.word for _, prefix in beam if prefix], device=source.device)
    return _from_prefix(best[2], best[1], len(source))


class _Prefix(NamedTuple):
    """The beginning of a translation as a linked list: the last word, its attention weights, and the words before."""

    before: _Prefix | None
    word: int
    weights: Tensor


def _from_prefix(prefix: _Prefix | None, score: float, source: int) -> Translation:
    """Translation of a source of ``source`` tokens from the linked list of its words."""
    words, weights = [], []
    while prefix is not None:
        words.append(prefix.word)
        weights.append(prefix.weights)
        prefix = prefix.before
    return Translation(words[::-1], score, torch.stack(weights[::-1]) if weights else torch.empty(0, source))
