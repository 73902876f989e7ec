"""Alignment from features, and its training (section 5.3 of the paper).

A score becomes columns j, each with a set of keys. With a classifier, the cost θ_ij of a frame and a column is the mean
of −log softmax(scores of frame i)_k over the column's keys k; the alignment is ∇DTW_Ω(θ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import bellmax_apps.audio.features as features
from bellmax.regularizers import Regularizer
from bellmax.structures.dtw import DTW
from bellmax_apps.audio.score import Score, first_frames, true_alignment

SILENCE = features.KEYS
"""The key of silence."""


class Columns(NamedTuple):
    """A score as columns of an alignment.

    keys (classes, columns): what a column should sound like, in the classes of the model; onsets: the first column of
    each event.
    """

    keys: Tensor
    onsets: Tensor


class Model(Protocol):
    """A model with a vector of weights, which turns features into costs."""

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        """Features (frames, ...) of a recording that is tuned so many semitones too high."""
        ...

    def columns(self, score: Score, frames: int) -> Columns:
        """Columns of a score, for a recording of so many frames."""
        ...

    def size(self) -> int:
        """Number of weights."""
        ...

    def costs(self, weights: Tensor, heard: Tensor, keys: Tensor) -> Tensor:
        """θ (..., frames, columns), from the weights, the features, and the keys of the columns."""
        ...

    def penalty(self, weights: Tensor) -> Tensor:
        """L2 penalty of the weights."""
        ...


def _named(classes: int, keys: Sequence[Set[int]]) -> Tensor:
    named = torch.zeros(classes, len(keys), dtype=torch.float64)
    for column, own in enumerate(keys):
        named[list(own), column] = 1 / len(own)
    return named


def _key(pitch: int) -> int:
    """The piano key of a pitch, which is moved by octaves into the range of a piano."""
    while pitch < features.LOWEST:
        pitch += 12
    while pitch > features.HIGHEST:
        pitch -= 12
    return pitch - features.LOWEST


class Linear(Model):
    """The model of the paper: a multinomial linear classifier Wᵀa + c of eight features.

    An event is one column with one key, as in the paper: that of its lowest note. Silence comes first.

    Args:
        pitches: the pitches that have a key. Another pitch takes the key of the nearest.

    """

    def __init__(self, pitches: Iterable[int] = range(features.LOWEST, features.HIGHEST + 1)) -> None:
        self._pitches = np.array(sorted(set(pitches)))

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return features.of_paper(audio)

    def columns(self, score: Score, frames: int) -> Columns:
        silence = len(self._pitches)
        keys = [int(np.abs(self._pitches - min(sounding)).argmin()) for sounding in score.sounding]
        every = [{key} for key in (silence, *keys)]
        return Columns(_named(silence + 1, every), torch.arange(1, len(score) + 1))

    def size(self) -> int:
        return 9 * (len(self._pitches) + 1)

    def costs(self, weights: Tensor, heard: Tensor, keys: Tensor) -> Tensor:
        matrix = weights.reshape(9, -1)
        return -(heard @ matrix[:-1] + matrix[-1]).log_softmax(-1) @ keys

    def penalty(self, weights: Tensor) -> Tensor:
        return weights.reshape(9, -1)[:-1].square().sum()


class Harmonic(Model):
    """A classifier with weights shared by all keys, from the loudness of their harmonics and its growth.

    An event has at least two columns: first the keys that begin, then all keys that sound. Shared weights are few, and
    they also work for keys that are not in the training data.

    Args:
        share: number of columns per frame. An alignment passes all columns of an event one by one, so more columns
            follow the tempo of the score. 0 for two columns per event, which is fast, for training.

    """

    def __init__(self, share: float = 0.7) -> None:
        self.share = share

    _evidence = 2 * (len(features.PARTIALS) + len(features.NEIGHBOURS))

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return features.harmonic(audio, tuned)

    def columns(self, score: Score, frames: int) -> Columns:
        classes = features.KEYS + 1
        lasting = np.diff(score.onsets, append=score.end)
        held = np.round(self.share * frames * lasting / lasting.sum()).astype(int)
        every, begins = [{SILENCE}], []
        for new, all_of, count in zip(score.beginning, score.sounding, held, strict=True):
            begins.append(len(every))
            every.append({classes + _key(p) for p in new})
            every += [{_key(p) for p in all_of}] * max(1, count - 1)
        every.append({SILENCE})
        return Columns(_named(2 * classes, every), torch.tensor(begins))

    def size(self) -> int:
        return 2 * (self._evidence + 2)

    def costs(self, weights: Tensor, heard: Tensor, keys: Tensor) -> Tensor:
        # Silence, and no onset, have separate features: the means over all keys.
        both = []
        level = heard[..., 0].mean(-1, keepdim=True)
        growth = heard[..., self._evidence // 2].mean(-1, keepdim=True)
        for own, of_all in zip(weights.reshape(2, -1), (level, growth), strict=True):
            none = own[-2] * 10 * of_all + own[-1]
            both.append(torch.cat((heard @ own[:-2], none), -1).log_softmax(-1))
        return -torch.cat(both, -1) @ keys

    def penalty(self, weights: Tensor) -> Tensor:
        return weights.square().sum()


class Chroma(Harmonic):
    """No weights: frames and events are compared by their tones, regardless of the octave.

    A column has norm 1. An attack has all tones that sound, since those held over are loud too, and is not in silence.
    """

    _scale = 8.0
    _not_silent = -2.0

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return features.chroma(audio, tuned)

    def columns(self, score: Score, frames: int) -> Columns:
        keys, onsets = super().columns(score, frames)
        sounding = keys[: features.KEYS]
        sounding[:, onsets] = sounding[:, onsets + 1]
        tones = torch.zeros(features.TONES, keys.shape[1], dtype=torch.float64)
        tones.index_add_(0, (torch.arange(features.KEYS) + features.LOWEST) % 12, sounding)
        tones[12] = keys[SILENCE]
        tones /= tones.norm(dim=0)
        tones[12, onsets] = self._not_silent
        return Columns(tones, onsets)

    def size(self) -> int:
        return 0

    def costs(self, weights: Tensor, heard: Tensor, keys: Tensor) -> Tensor:
        return self._scale * (1 - heard @ keys)


class Both(Harmonic):
    """The costs of :class:`Harmonic`, which are sharp, and a quarter of those of :class:`Chroma`, which are robust."""

    _weight = 0.25

    def __init__(self, share: float = 0.7) -> None:
        super().__init__(share)
        self._chroma = Chroma(share)

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return torch.cat((super().features(audio, tuned).flatten(1), self._chroma.features(audio, tuned)), 1)

    def columns(self, score: Score, frames: int) -> Columns:
        keys, onsets = super().columns(score, frames)
        return Columns(torch.cat((keys, self._chroma.columns(score, frames).keys)), onsets)

    def costs(self, weights: Tensor, heard: Tensor, keys: Tensor) -> Tensor:
        harmonic, tones = self.split(heard)
        sharp = super().costs(weights, harmonic, keys[: -features.TONES])
        return sharp + self._weight * self._chroma.costs(weights, tones, keys[-features.TONES :])

    @staticmethod
    def split(heard: Tensor) -> tuple[Tensor, Tensor]:
        """The features of :class:`Harmonic` and those of :class:`Chroma`."""
        return heard[..., : -features.TONES].unflatten(-1, (features.KEYS, -1)), heard[..., -features.TONES :]


def onset_frames(theta: Tensor, columns: Columns) -> Tensor:
    """The first frame (M,) of each event in the alignment of least cost."""
    return first_frames(DTW(theta, omega="hard").best_path())[columns.onsets]


# --- training


@dataclass(frozen=True)
class Piece:
    """Features of a recording, the columns of its score, and the true times of the events."""

    heard: Tensor
    columns: Columns
    truth: NDArray[np.float64]

    @property
    def frames(self) -> int:
        return len(self.heard)

    @property
    def shape(self) -> tuple[int, int]:
        """Frames and columns."""
        return self.frames, self.columns.keys.shape[1]

    def alignment(self) -> Tensor:
        """The true alignment, as index pairs (L, 2)."""
        begins = np.round(self.truth * features.RATE / features.HOP).astype(np.int64)
        # The first of several columns of an event lasts one frame, the others share its time evenly.
        last = self.columns.keys.shape[1] - 1
        known = {0: 0, last: max(self.frames - 1, int(begins[-1]) + 1)}
        known |= {column + 1: begin + 1 for column, begin in zip(self.columns.onsets.tolist(), begins, strict=True)}
        known |= dict(zip(self.columns.onsets.tolist(), begins, strict=True))
        columns = sorted(known)
        starts = np.interp(np.arange(last + 1), columns, [known[column] for column in columns])
        return true_alignment(np.floor(starts).astype(np.int64), self.frames)


class Batch(NamedTuple):
    """A padded batch of pieces: features, keys, true alignments (B, frames, columns), and lengths."""

    heard: Tensor
    keys: Tensor
    truth: Tensor
    lengths: tuple[Tensor, Tensor]


def batch(pieces: Sequence[Piece]) -> Batch:
    sizes = [piece.shape for piece in pieces]
    truth = torch.zeros(len(pieces), *map(max, zip(*sizes, strict=True)), dtype=torch.float64)
    for n, piece in enumerate(pieces):
        truth[n][tuple(piece.alignment().T)] = 1
    keys = pad_sequence([piece.columns.keys.T for piece in pieces], batch_first=True).mT
    heard = pad_sequence([piece.heard for piece in pieces], batch_first=True)
    lengths = torch.tensor([size[0] for size in sizes]), torch.tensor([size[1] for size in sizes])
    return Batch(heard, keys, truth, lengths)


def cost_of_classes(model: Model, weights: Tensor, of: Batch) -> Tensor:
    """The cross-entropy of the classifier: the mean cost of the cells of the true alignment."""
    return (model.costs(weights, of.heard, of.keys) * of.truth).sum() / of.truth.sum()


def area(model: Model, weights: Tensor, of: Batch, omega: Regularizer) -> Tensor:
    """The mean over frames of ‖L(Y − Y_true)ᵀ‖², for the alignment Y = ∇DTW_Ω(θ).

    It is ``losses.alignment_area``, which checks that Y_true is an alignment; here that would take a third of the time.
    """
    p = DTW(model.costs(weights, of.heard, of.keys), lengths=of.lengths, omega=omega)
    within = torch.arange(of.truth.shape[-1]) < of.lengths[1].unsqueeze(-1)
    beside = (p.expected_path - of.truth).cumsum(-1) * within.unsqueeze(-2)
    return beside.square().sum() / of.lengths[0].sum()


def learn(
    model: Model,
    loss: Callable[[Tensor], Tensor],
    begin: Tensor,
    *,
    penalty: float = 1e-3,
    iterations: int = 300,
) -> Tensor:
    """Minimise loss + penalty by L-BFGS, starting from ``begin``."""
    from scipy.optimize import minimize

    def value_and_gradient(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.tensor(numbers, requires_grad=True)
        total = loss(weights) + penalty * model.penalty(weights)
        (gradient,) = torch.autograd.grad(total, weights)
        return total.item(), gradient.numpy()

    found = minimize(value_and_gradient, begin.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return torch.from_numpy(found.x)
