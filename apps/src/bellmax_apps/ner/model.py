"""The tagger of section 5.2 and appendix C.1 of the paper."""

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
        vocabulary: the words, letters and labels.
        omega: Ω of the CRF.
        loss: "surrogate" or "relaxed".
        word_size: word embedding size. The embedding of unknown words is 0 and is not trained.
        letter_size: letter embedding size, and the size of a word's representation by its letters.
        hidden_size: hidden size of the LSTM over the sentence, in each direction.
        dropout: dropout probability at the input and output of that LSTM.
        sparse: whether gradients of the word embeddings are sparse, which SGD supports.

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
        """Set these rows of the word embeddings."""
        with torch.no_grad():
            for row, vector in vectors.items():
                self.words.weight[row] = vector

    def forward(self, batch: Batch) -> Tensor:
        assert batch.tags is not None
        loss: Tensor = self.crf(self.emissions(batch), batch.tags, lengths=self._lengths(batch), reduction="sum")
        return loss

    def distribution(self, batch: Batch) -> ScoredChain:
        """The distribution over the tags of each sentence."""
        return self.crf.distribution(self.emissions(batch), lengths=self._lengths(batch))

    def emissions(self, batch: Batch) -> Tensor:
        """Scores of the tags, (B, T, S)."""
        words = torch.cat((self.words(batch.words), self._spelled(batch)[batch.forms]), -1)
        packed = _packed(self.dropout(words), batch.lengths)
        hidden, _ = pad_packed_sequence(self.context(packed)[0], batch_first=True)
        scores: Tensor = self.to_emissions(self.dropout(hidden))
        return scores

    def _spelled(self, batch: Batch) -> Tensor:
        """The last states of both directions for each distinct form, (U, letter_size)."""
        packed = _packed(self.letters(batch.letters), batch.letter_lengths)
        _, (last, _) = self.spelling(packed)
        return torch.cat(tuple(last), -1)

    def _lengths(self, batch: Batch) -> Tensor:
        return batch.lengths.to(self.to_emissions.weight.device)


def _packed(sequences: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
