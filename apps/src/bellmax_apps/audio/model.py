"""Models that turn the features of a recording into costs of an alignment, and their training.

As in section 5.3 of the paper, a score is a sequence of columns, each with a set of keys. A classifier scores the keys
in each frame. The cost θ_ij of frame i and column j is the mean of −log softmax(scores of frame i)_k over the keys k of
the column. The soft alignment is ∇DTW_Ω(θ).
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
"""Index of the key that stands for silence."""


class Columns(NamedTuple):
    """A score as columns of an alignment.

    Args:
        keys: Weight of each class of the model in each column, shape (classes, columns).
        onsets: First column of each event, shape (M,).

    """

    keys: Tensor
    onsets: Tensor


class Model(Protocol):
    """A model that turns features into costs, with a vector of weights."""

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        """Features (frames, ...) of a recording that is ``tuned`` semitones too high."""
        ...

    def columns(self, score: Score, frames: int) -> Columns:
        """Columns of a score, for a recording with this number of frames."""
        ...

    def size(self) -> int:
        """Number of weights."""
        ...

    def costs(self, weights: Tensor, sound: Tensor, keys: Tensor) -> Tensor:
        """Costs θ (..., frames, columns) of the features ``sound`` and the keys of the columns."""
        ...

    def penalty(self, weights: Tensor) -> Tensor:
        """L2 penalty of the weights."""
        ...


def _mean_of_keys(classes: int, keys: Sequence[Set[int]]) -> Tensor:
    """Matrix (classes, columns) by which costs of classes are multiplied to take the mean over the keys of a column."""
    matrix = torch.zeros(classes, len(keys), dtype=torch.float64)
    for column, chosen in enumerate(keys):
        matrix[list(chosen), column] = 1 / len(chosen)
    return matrix


def _key(pitch: int) -> int:
    """Piano key of a pitch. A pitch outside the range of a piano is moved by octaves."""
    while pitch < features.LOWEST:
        pitch += 12
    while pitch > features.HIGHEST:
        pitch -= 12
    return pitch - features.LOWEST


class Linear(Model):
    """The model of the paper: a multinomial linear classifier Wᵀa + c of eight features.

    As in the paper, an event is one column with one key, the key of its lowest note. The first column is silence.

    Args:
        pitches: Pitches that have a key. Other pitches take the key of the nearest one.

    """

    def __init__(self, pitches: Iterable[int] = range(features.LOWEST, features.HIGHEST + 1)) -> None:
        self._pitches = np.array(sorted(set(pitches)))

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return features.of_paper(audio)

    def columns(self, score: Score, frames: int) -> Columns:
        silence = len(self._pitches)
        keys = [int(np.abs(self._pitches - min(sounding)).argmin()) for sounding in score.sounding]
        column_keys = [{key} for key in (silence, *keys)]
        return Columns(_mean_of_keys(silence + 1, column_keys), torch.arange(1, len(score) + 1))

    def size(self) -> int:
        return 9 * (len(self._pitches) + 1)

    def costs(self, weights: Tensor, sound: Tensor, keys: Tensor) -> Tensor:
        matrix = weights.reshape(9, -1)
        return -(sound @ matrix[:-1] + matrix[-1]).log_softmax(-1) @ keys

    def penalty(self, weights: Tensor) -> Tensor:
        return weights.reshape(9, -1)[:-1].square().sum()


class Harmonic(Model):
    """A classifier of the loudness at the harmonics of each key, and of its growth. All keys share the weights.

    Shared weights are few, and work for keys that are not in the training data. An event has at least two columns:
    first the keys that begin, then all keys that sound.

    Args:
        share: Number of columns per frame. An alignment passes all columns of an event one by one, so that many columns
            make it follow the tempo of the score. With 0, an event has two columns, which is fast in training.

    """

    def __init__(self, share: float = 0.7) -> None:
        self.share = share

    _evidence = 2 * (len(features.PARTIALS) + len(features.NEIGHBOURS))

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return features.harmonic(audio, tuned)

    def columns(self, score: Score, frames: int) -> Columns:
        classes = features.KEYS + 1
        durations = np.diff(score.onsets, append=score.end)
        counts = np.round(self.share * frames * durations / durations.sum()).astype(int)
        column_keys, onsets = [{SILENCE}], []
        for beginning, sounding, count in zip(score.beginning, score.sounding, counts, strict=True):
            onsets.append(len(column_keys))
            column_keys.append({classes + _key(pitch) for pitch in beginning})
            column_keys += [{_key(pitch) for pitch in sounding}] * max(1, count - 1)
        column_keys.append({SILENCE})
        return Columns(_mean_of_keys(2 * classes, column_keys), torch.tensor(onsets))

    def size(self) -> int:
        return 2 * (self._evidence + 2)

    def costs(self, weights: Tensor, sound: Tensor, keys: Tensor) -> Tensor:
        # One classifier for the keys that sound, one for the keys that begin. The extra class of each (silence, no
        # onset) is scored by the mean loudness, or the mean growth, of all keys.
        logs = []
        level = sound[..., 0].mean(-1, keepdim=True)
        growth = sound[..., self._evidence // 2].mean(-1, keepdim=True)
        for coefficients, mean in zip(weights.reshape(2, -1), (level, growth), strict=True):
            extra = coefficients[-2] * 10 * mean + coefficients[-1]
            logs.append(torch.cat((sound @ coefficients[:-2], extra), -1).log_softmax(-1))
        return -torch.cat(logs, -1) @ keys

    def penalty(self, weights: Tensor) -> Tensor:
        return weights.square().sum()


class Chroma(Harmonic):
    """Comparison of frames and events by their tones, regardless of the octave, without weights.

    A column has norm 1. The first column of an event has all tones that sound, since tones that began before are still
    loud, and a negative weight for silence.
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

    def costs(self, weights: Tensor, sound: Tensor, keys: Tensor) -> Tensor:
        return self._scale * (1 - sound @ keys)


class Both(Harmonic):
    """The sum of the costs of :class:`Harmonic` and a quarter of the costs of :class:`Chroma`.

    Harmonic costs are precise, chroma costs are robust.
    """

    _weight = 0.25

    def __init__(self, share: float = 0.7) -> None:
        super().__init__(share)
        self._chroma = Chroma(share)

    def features(self, audio: NDArray[np.float32], tuned: float = 0.0) -> Tensor:
        return torch.cat((super().features(audio, tuned).flatten(1), self._chroma.features(audio, tuned)), 1)

    def columns(self, score: Score, frames: int) -> Columns:
        keys, onsets = super().columns(score, frames)
        return Columns(torch.cat((keys, self._chroma.columns(score, frames).keys)), onsets)

    def costs(self, weights: Tensor, sound: Tensor, keys: Tensor) -> Tensor:
        harmonic, tones = self.split(sound)
        precise = super().costs(weights, harmonic, keys[: -features.TONES])
        return precise + self._weight * self._chroma.costs(weights, tones, keys[-features.TONES :])

    @staticmethod
    def split(sound: Tensor) -> tuple[Tensor, Tensor]:
        """Split the features into the features of :class:`Harmonic` and of :class:`Chroma`."""
        return sound[..., : -features.TONES].unflatten(-1, (features.KEYS, -1)), sound[..., -features.TONES :]


def onset_frames(theta: Tensor, columns: Columns) -> Tensor:
    """First frame of each event in the alignment of least cost, shape (M,)."""
    return first_frames(DTW(theta, omega="hard").best_path())[columns.onsets]


# --- training


@dataclass(frozen=True)
class Piece:
    """Features of a recording, the columns of its score, and the true times of the events (M,) in seconds."""

    sound: Tensor
    columns: Columns
    truth: NDArray[np.float64]

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.sound)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of frames and number of columns."""
        return self.frames, self.columns.keys.shape[1]

    def alignment(self) -> Tensor:
        """True alignment as index pairs (L, 2)."""
        frames = np.round(self.truth * features.RATE / features.HOP).astype(np.int64)
        # The first of several columns of an event lasts one frame. The others share the remaining time evenly.
        last = self.columns.keys.shape[1] - 1
        fixed = {0: 0, last: max(self.frames - 1, int(frames[-1]) + 1)}
        fixed |= {column + 1: frame + 1 for column, frame in zip(self.columns.onsets.tolist(), frames, strict=True)}
        fixed |= dict(zip(self.columns.onsets.tolist(), frames, strict=True))
        columns = sorted(fixed)
        starts = np.interp(np.arange(last + 1), columns, [fixed[column] for column in columns])
        return true_alignment(np.floor(starts).astype(np.int64), self.frames)


class Batch(NamedTuple):
    """Padded pieces: features, keys, true alignments (B, frames, columns), and numbers of frames and columns."""

    sound: Tensor
    keys: Tensor
    truth: Tensor
    lengths: tuple[Tensor, Tensor]


def to_batch(pieces: Sequence[Piece]) -> Batch:
    """Pad pieces to the same number of frames and of columns."""
    sizes = [piece.shape for piece in pieces]
    truth = torch.zeros(len(pieces), *map(max, zip(*sizes, strict=True)), dtype=torch.float64)
    for n, piece in enumerate(pieces):
        truth[n][tuple(piece.alignment().T)] = 1
    keys = pad_sequence([piece.columns.keys.T for piece in pieces], batch_first=True).mT
    sound = pad_sequence([piece.sound for piece in pieces], batch_first=True)
    lengths = torch.tensor([size[0] for size in sizes]), torch.tensor([size[1] for size in sizes])
    return Batch(sound, keys, truth, lengths)


def cost_of_classes(model: Model, weights: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the classifier: the mean cost of the cells of the true alignment."""
    return (model.costs(weights, batch.sound, batch.keys) * batch.truth).sum() / batch.truth.sum()


def area(model: Model, weights: Tensor, batch: Batch, omega: Regularizer) -> Tensor:
    """Mean over frames of ‖L(Y − Y_true)ᵀ‖², for the soft alignment Y = ∇DTW_Ω(θ).

    ``losses.alignment_area`` computes this loss, too. It also checks that Y_true is an alignment, which would take a
    third of the training time.
    """
    p = DTW(model.costs(weights, batch.sound, batch.keys), lengths=batch.lengths, omega=omega)
    is_column = torch.arange(batch.truth.shape[-1]) < batch.lengths[1].unsqueeze(-1)
    difference = (p.expected_path - batch.truth).cumsum(-1) * is_column.unsqueeze(-2)
    return difference.square().sum() / batch.lengths[0].sum()


def learn(
    model: Model,
    loss: Callable[[Tensor], Tensor],
    begin: Tensor,
    *,
    penalty: float = 1e-3,
    iterations: int = 300,
) -> Tensor:
    """Minimize the loss plus ``penalty`` times the L2 penalty by L-BFGS, starting from ``begin``."""
    from scipy.optimize import minimize

    def value_and_gradient(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.tensor(numbers, requires_grad=True)
        total = loss(weights) + penalty * model.penalty(weights)
        (gradient,) = torch.autograd.grad(total, weights)
        return total.item(), gradient.numpy()

    result = minimize(value_and_gradient, begin.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return torch.from_numpy(result.x)
