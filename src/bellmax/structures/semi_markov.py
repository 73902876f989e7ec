"""Semi-Markov models under any Ω: segmentations with a label and a duration for each segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.modes import is_checked
from bellmax.programs import register
from bellmax.programs.blocks import BlockProgram, Edges
from bellmax.programs.checks import check_lengths
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.lattice import common_batch
from bellmax.structures.named import NamedScores
from bellmax.tensors import Gamma, Tensors


class SegmentProgram(BlockProgram):
    """Segmentations of T steps into segments of up to D steps, each with one of K labels.

    θ is segments (B, T, D, K) ``[last step, duration − 1, label]``, transitions (B or 1, K, K) ``[current, previous]``,
    start and end (B or 1, K). ``index`` is (lengths,), (B,) int64.

    The boundary "before" step i with label k comes before a segment with this label, and the boundary "after" step i
    follows one. A segment leads from before its first step to after its last step, a transition from after a step to
    before the next one. So there are T·(D·K + K²) edges, not T·D·K².
    """

    name = "semi_markov"
    scores = ("segments", "transitions", "start", "end")
    index_dims = (0,)

    def blocks(self, event: Sequence[int]) -> list[tuple[int, ...]]:
        steps, longest, labels = event
        return [(steps, longest, labels), (steps - 1, labels, labels), (labels,), (steps, labels)]

    def edges(self, event: Sequence[int]) -> Edges:
        steps, longest, labels = event
        label, end = np.arange(labels), 1 + 2 * labels * steps
        before = 1 + 2 * labels * np.arange(steps)[:, None] + label  # (T, K); node 0 is the start
        after = before + labels
        last, shorter, _ = np.indices(event)
        first = last - shorter
        dead = end + 1  # segments that would begin before the first step lead to it, and no edge leaves it
        segments = (
            np.where(first >= 0, before[np.maximum(first, 0), label], 0),
            np.where(first >= 0, after[last, label], dead),
        )
        transitions = np.repeat(after[:-1, None], labels, 1), np.repeat(before[1:, :, None], labels, 2)
        ends = [segments, transitions, (0 * label, before[0]), (after, np.full_like(after, end))]
        level = np.concatenate(
            ([0], np.repeat(np.arange(1, 2 * steps + 1), labels), [2 * steps + 1], [1] * (longest > 1))
        )
        parent, child = (np.concatenate([pair[side].ravel() for pair in ends]) for side in (0, 1))
        return Edges(parent, child, level)

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return 2 * theta[0].shape[1] + 1

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int:
        """Return 1 for the end node if there is one label: only then does it have a single parent."""
        return int(theta[0].shape[-1] == 1)

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        check_lengths("lengths", index[0], 1, theta[0].shape[1])

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        (segments, transitions, *_), (lengths,) = theta, index
        is_linked = (lengths > 1).reshape(-1, 1, 1)
        return [self._is_segment(segments, lengths), is_linked if len(transitions) > 1 else is_linked.any(), None, None]

    def exists(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        (segments, *_), (lengths,) = theta, index
        step, length = torch.arange(segments.shape[1], device=segments.device), lengths.unsqueeze(-1)
        is_full = is_checked(lengths) and bool((lengths == segments.shape[1]).all())
        within = None if is_full else (step < length)[..., None, None]
        return [within, None, None, (step + 1 == length).unsqueeze(-1)]

    def _is_segment(self, segments: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, D, 1): True if a segment begins at the first step or later, and ends within the length."""
        last, shorter = (torch.arange(n, device=segments.device) for n in segments.shape[1:3])
        return ((last < lengths.unsqueeze(-1)).unsqueeze(-1) & (shorter <= last.unsqueeze(-1))).unsqueeze(-1)


_PROGRAM = register(SegmentProgram())


class SemiMarkov(NamedScores):
    """A distribution over the segmentations of T steps, given the score of each segment.

    A segmentation cuts the steps into segments of 1 to D steps, each with one of K labels. Adjacent segments may have
    the same label. Its score is the sum of ``segments`` over its segments, of ``transitions`` over its pairs of
    adjacent segments, of ``start`` for the first label and of ``end`` for the last label. Its event is the 0/1 tensor
    (T, D, K) of its segments. Time and memory are O(T(DK + K²)), since segments and transitions are separate edges. For
    an Ω other than negentropy, the value would be different with one edge for a segment and its transition.

    Args:
        segments: The score (..., T, D, K) of each segment ``[last step, duration − 1, label]``. −∞ forbids a segment.
            Entries of segments that would begin before the first step are ignored.
        transitions: The score (..., K, K) of each transition ``[current, previous]``. (K, K) is shared by the batch.
        start: The score (..., K) of the first label, default 0.
        end: The score (..., K) of the last label, default 0.
        lengths: The number of steps of each sequence, integers of the batch shape or one number, from 1 to T, default
            T. The rest is padding: it is ignored, may contain NaN and gets no gradient.
        omega: A :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". Under
            :class:`SquaredL2`, every segment adds a constant; under ``"sparsemax"``, it adds 0.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> emissions = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 1.0]])
    >>> p = bx.SemiMarkov.from_scores(emissions, torch.zeros(3, 2), torch.full((2, 2), -1.0))
    >>> p.best_segments()                           # [start, end), label
    tensor([[ 0,  2,  0],
            [ 2,  5,  1],
            [-1, -1, -1],
            [-1, -1, -1],
            [-1, -1, -1]])
    >>> p.marginals
    tensor([[0.9147, 0.0853],
            [0.8054, 0.1946],
            [0.2479, 0.7521],
            [0.0535, 0.9465],
            [0.1216, 0.8784]])
    """

    @answers_near_misses
    def __init__(
        self,
        segments: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("segments", segments).shape
        if len(shape) < 3 or 0 in shape[-3:]:
            raise ValueError(f"segments must have shape (..., T, D, K), each at least 1, got {tuple(shape)}")
        steps, _, labels = event = shape[-3:]
        _check_shape("transitions", transitions, (labels, labels))
        zeros = segments.new_zeros(labels)
        start = zeros if start is None else _check_shape("start", start, (labels,))
        end = zeros if end is None else _check_shape("end", end, (labels,))
        length = as_lengths("lengths", steps if lengths is None else lengths, segments.device)
        others = {"transitions": (transitions, 2), "start": (start, 1), "end": (end, 1)}
        batch = common_batch({"segments": (segments, 3), **others, "lengths": (length, 0)})
        scores = {"segments": (segments.expand(batch + event), 3), **others}
        super().__init__(_PROGRAM, scores, (length.expand(batch),), batch, event, omega, gamma)

    @classmethod
    def from_scores(
        cls,
        emissions: Tensor,
        durations: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> SemiMarkov:
        """Return a model whose segments score the sum of the emissions of their steps, and a term for their duration.

        Args:
            emissions: The score (..., T, K) of each label at each step.
            durations: The score (..., D, K) of each duration ``[duration − 1, label]``. D is the longest duration.
            transitions: The score (..., K, K) of each transition ``[current, previous]``.
            start: The score (..., K) of the first label, default 0.
            end: The score (..., K) of the last label, default 0.
            lengths: The number of steps of each sequence, integers of the batch shape or one number, default T.
            omega: A :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        """
        if check_tensor("emissions", emissions).ndim < 2 or 0 in emissions.shape[-2:]:
            raise ValueError(f"emissions must have shape (..., T, K), each at least 1, got {tuple(emissions.shape)}")
        labels = emissions.shape[-1]
        if check_tensor("durations", durations).ndim < 2 or not durations.shape[-2] or durations.shape[-1] != labels:
            raise ValueError(f"durations must have shape (..., D, {labels}), got {tuple(durations.shape)}")
        sums = [emissions]
        for _ in range(durations.shape[-2] - 1):  # extend each sum by one earlier step
            sums.append(pad(sums[-1], (0, 0, 1, 0))[..., :-1, :] + emissions)
        segments = torch.stack(sums, -2) + durations.unsqueeze(-3)
        return cls(segments, transitions, start=start, end=end, lengths=lengths, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each sequence, (...) int64."""
        return self._solver.integers[0]

    # --- segments and labels

    @property
    def marginals(self) -> Tensor:
        """Probability of each label at each step, (..., T, K); 0 in the padding. Differentiable."""
        at_least = self.expected_path.flip(-2).cumsum(-2).flip(-2)  # by last step and least duration
        return _by_first_step(at_least).sum(-2)

    def best_segments(self) -> Tensor:
        """Return the segments of the best path in order, (..., T, 3) int64 [start, end, label], padded with −1.

        A segment contains the steps from ``start`` to ``end`` − 1.
        """
        return self._under(Hard()).sample_segments()

    def sample_segments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the segments of random paths, (*sample_shape, ..., T, 3), in the form of :meth:`best_segments`."""
        path = self.sample(sample_shape).flatten(-2)
        code = torch.where(path.any(-1), path.argmax(-1), -1)  # (duration − 1)·K + label at the last step of a segment
        steps, _, labels = self.event_shape
        end = torch.arange(1, steps + 1, device=self.device).expand(code.shape)
        segments = torch.stack((end - 1 - code // labels, end, code % labels), -1)
        segments = torch.where(code.unsqueeze(-1) < 0, -1, segments)
        order = (code < 0).long().argsort(dim=-1, stable=True)
        return segments.gather(-2, order.unsqueeze(-1).expand(segments.shape))


def _by_first_step(segments: Tensor) -> Tensor:
    """Reindex values of segments (..., T, D, K) by their first step instead of their last; 0 if there is no segment."""
    steps, longest = segments.shape[-3:-1]
    padded = pad(segments, (0, 0, 0, 0, 0, longest - 1))
    first, shorter = (torch.arange(n, device=segments.device) for n in (steps, longest))
    by_first: Tensor = padded[..., first.unsqueeze(-1) + shorter, shorter, :]
    return by_first


def _check_shape(name: str, score: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a score. Raises ``ValueError`` unless its last dimensions are ``shape``."""
    if check_tensor(name, score).shape[-len(shape) :] != shape:
        needed = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape (..., {needed}), got {tuple(score.shape)}")
    return score
