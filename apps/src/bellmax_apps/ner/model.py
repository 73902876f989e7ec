"""The network of a tagger, as in section 5.2 and appendix C.1 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bellmax.nn import CRF, tag_constraints
from bellmax.regularizers import Regularizer
from bellmax.structures.chain import ScoredChain
from bellmax_apps.ner.data import Batch, Vocabulary


class Tagger(nn.Module):
    """Word embeddings and an LSTM over letters, an LSTM over the sentence, and a CRF of IOBES tags.

    Calling it returns the sum of the losses of a batch.

    Args:
        vocabulary: Words, letters and labels.
        omega: Regularizer Ω of the CRF.
        loss: "surrogate" or "relaxed".
        word_size: Word embedding size. The embedding of unknown words is 0 and is not trained.
        letter_size: Letter embedding size, and the size of the output of the LSTM over letters.
        hidden_size: Hidden size of the LSTM over the sentence, in each direction.
        dropout: Dropout probability at the input and output of the LSTM over the sentence.
        sparse: If True, the gradients of the word embeddings are sparse, as SGD allows.

    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        omega: str | Regularizer = "negentropy",
        loss: str = "surrogate",
        word_size: int = 300,
        letter_size: int = 50,
        hidden_size: int = 100,
        dropout: float = 0.5,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.labels = vocabulary.labels
        self.words = nn.Embedding(len(vocabulary.words) + 1, word_size, padding_idx=0, sparse=sparse)
        nn.init.uniform_(self.words.weight.detach()[1:], -((3 / word_size) ** 0.5), (3 / word_size) ** 0.5)
        self.letters = nn.Embedding(len(vocabulary.letters) + 1, letter_size)
        self.spelling = nn.LSTM(letter_size, letter_size // 2, batch_first=True, bidirectional=True)
        self.context = nn.LSTM(word_size + 2 * (letter_size // 2), hidden_size, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.to_emissions = nn.Linear(2 * hidden_size, len(vocabulary.labels))
        constraints = tag_constraints(vocabulary.labels, scheme="IOBES")
        self.crf = CRF(len(vocabulary.labels), omega=omega, constraints=constraints, loss=loss)

    def use_vectors(self, vectors: dict[int, Tensor]) -> None:
        """Set rows of the word embeddings to pretrained vectors."""
        with torch.no_grad():
            for row, vector in vectors.items():
                self.words.weight[row] = vector

    def forward(self, batch: Batch) -> Tensor:
        assert batch.tags is not None
        loss: Tensor = self.crf(self.emissions(batch), batch.tags, lengths=self._lengths(batch), reduction="sum")
        return loss

    def distribution(self, batch: Batch) -> ScoredChain:
        """Distribution over the tag sequences of each sentence."""
        return self.crf.distribution(self.emissions(batch), lengths=self._lengths(batch))

    def emissions(self, batch: Batch) -> Tensor:
        """Score of each tag, shape (B, T, S)."""
        words = torch.cat((self.words(batch.words), self._letter_states(batch)[batch.forms]), -1)
        packed = _packed(self.dropout(words), batch.lengths)
        hidden, _ = pad_packed_sequence(self.context(packed)[0], batch_first=True)
        scores: Tensor = self.to_emissions(self.dropout(hidden))
        return scores

    def _letter_states(self, batch: Batch) -> Tensor:
        """Last states of the LSTM over letters, in both directions, shape (U, letter_size)."""
        packed = _packed(self.letters(batch.letters), batch.letter_lengths)
        _, (last, _) = self.spelling(packed)
        return torch.cat(tuple(last), -1)

    def _lengths(self, batch: Batch) -> Tensor:
        """Lengths on the device of the model. In the batch they are on the CPU."""
        return batch.lengths.to(self.to_emissions.weight.device)


def _packed(sequences: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
