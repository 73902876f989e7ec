"""Semi-Markov models: sequences as segments with a label and a duration, under any Ω."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.layouts import segments as layout
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.dag import DAG, DAGPaths
from bellmax.structures.named import NamedScores
from bellmax.tensors import Gamma
from bellmax.transforms import is_readable


class SemiMarkov(NamedScores):
    """A distribution over the segmentations of T steps, given the score of each segment.

    A segmentation cuts the steps into segments of 1 to D steps, each with one of K labels; neighbours may have the same
    label. Its score is the sum of its segments', of ``transitions`` for each neighbouring pair, and of ``start`` and
    ``end`` for the first and the last label. As an event it is a 0/1 tensor (T, D, K) of its segments. Time and memory
    are O(T(DK + K²)): segments and transitions are moves of their own. For an Ω other than negentropy the value depends
    on that, and differs from the one with moves for both at once.

    Args:
        segments: (..., T, D, K) ``[last step, duration − 1, label]``; −∞ forbids one. Entries of segments that would
            begin before the first step are ignored.
        transitions: (..., K, K) ``[current, previous]``; without batch dimensions it is shared.
        start: (..., K), the score of the first label; 0 by default.
        end: (..., K), that of the last.
        lengths: integers of the batch shape, or a number, from 1 to T. Later steps are ignored, may hold NaN and get no
            gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". Under
            :class:`SquaredL2` every segment adds a cost; under ``"sparsemax"`` none.
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

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

    structure = "semi_markov"
    _own_tensors: ClassVar[dict[str, int]] = {"_lengths": 0}
    _lengths: Tensor

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
        steps, _, labels = shape[-3:]
        own = _check_shape("transitions", transitions, (labels, labels))
        none = segments.new_zeros(labels)
        start = none if start is None else _check_shape("start", start, (labels,))
        end = none if end is None else _check_shape("end", end, (labels,))
        length = as_lengths("lengths", steps if lengths is None else lengths, segments.device)
        others = {"transitions": (own, 2), "start": (start, 1), "end": (end, 1)}
        shapes = [shape[:-3], *(t.shape[: t.ndim - dims] for t, dims in others.values()), length.shape]
        try:
            batch = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            got = ", ".join(str(tuple(s)) for s in shapes)
            raise ValueError(f"the batch dimensions of scores and lengths must broadcast, got {got}") from None
        event = shape[-3:]
        super().__init__({"segments": (segments.expand(batch + event), 3), **others}, batch, event, omega, gamma)
        self._lengths = length.expand(batch)

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
        """Segments that score the sum of their steps' emissions, and a term for their duration.

        Args:
            emissions: (..., T, K), the score of each label at each step.
            durations: (..., D, K) ``[duration − 1, label]``; D is the longest duration.
            transitions: (..., K, K) ``[current, previous]``.
            start: as in :class:`SemiMarkov`, like the other arguments.
            end: see there.
            lengths: see there.
            omega: see there.
            gamma: see there.

        """
        if check_tensor("emissions", emissions).ndim < 2 or 0 in emissions.shape[-2:]:
            raise ValueError(f"emissions must have shape (..., T, K), each at least 1, got {tuple(emissions.shape)}")
        labels = emissions.shape[-1]
        if check_tensor("durations", durations).ndim < 2 or not durations.shape[-2] or durations.shape[-1] != labels:
            raise ValueError(f"durations must have shape (..., D, {labels}), got {tuple(durations.shape)}")
        sums = [emissions]
        for _ in range(durations.shape[-2] - 1):  # one step longer, from one step earlier on
            sums.append(pad(sums[-1], (0, 0, 1, 0))[..., :-1, :] + emissions)
        segments = torch.stack(sums, -2) + durations.unsqueeze(-3)
        return cls(segments, transitions, start=start, end=end, lengths=lengths, omega=omega, gamma=gamma)

    @property
    def _names(self) -> tuple[str, ...]:
        return "segments", "transitions", "start", "end"

    @property
    def lengths(self) -> Tensor:
        """(...) int64: the steps of each sequence."""
        return self._lengths

    # --- segments and labels

    @property
    def marginals(self) -> Tensor:
        """The probability of each label at each step, (..., T, K); 0 past the length. Differentiable."""
        at_least = self.expected_path.flip(-2).cumsum(-2).flip(-2)  # by last step: of segments at least so long
        return layout.by_first_step(at_least).sum(-2)

    def best_segments(self) -> Tensor:
        """The segments of the best path in order, (..., T, 3) int64 [start, end, label], padded with −1.

        A segment has the steps from start up to, and without, end.
        """
        return self._with(self._detached(), Hard()).sample_segments()

    def sample_segments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Segments drawn from the distribution, (*sample_shape, ..., T, 3), as in :meth:`best_segments`."""
        shape = torch.Size(sample_shape)
        codes = self._sample(shape.numel()).movedim(1, 0)
        codes = codes.reshape(*shape, *self.batch_shape, codes.shape[-1])
        steps, _, labels = self.event_shape
        end = torch.arange(1, steps + 1, device=self.device)
        found = torch.stack((end - 1 - codes // labels, end.expand(codes.shape), codes % labels), -1)
        found = torch.where(codes.unsqueeze(-1) < 0, -1, found)
        order = (codes < 0).long().argsort(dim=-1, stable=True)
        return found.gather(-2, order.unsqueeze(-1).expand(found.shape))

    # --- the expansion: an edge for every segment and every transition

    def _theta(self) -> list[Tensor]:
        return self._flat.unscaled(self._detached())

    def _expanded(self) -> DAGPaths:
        theta = self._flat.unscaled(self._scores)
        if is_readable(theta[0]):
            layout.check([t.detach() for t in theta], self._index)
        dag = DAG._of_grid(layout.graph_of(theta))
        weights = layout.weights(theta, self._index)
        paths = DAGPaths(dag, weights.reshape(*self.batch_shape, weights.shape[-1]), omega=self.omega)
        paths.backend = self.backend
        return paths

    def _onto_event(self, edges: Tensor) -> Tensor:
        return layout.onto_segments(edges, self._theta())

    def _from_event(self, path: Tensor) -> Tensor:
        return layout.from_segments(path)

    def _to_paths(self, found: Tensor) -> Tensor:
        _, longest, labels = self.event_shape
        flat = torch.zeros((*found.shape, longest * labels + 1), dtype=self.dtype, device=self.device)
        places = torch.where(found < 0, longest * labels, found).unsqueeze(-1)
        return flat.scatter(-1, places, 1)[..., :-1].reshape(*found.shape, longest, labels)

    def _unweighted(self, omega: Regularizer) -> PathDistribution:
        return self._expanded()._unweighted(omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return (self._lengths.reshape(-1),)

    @property
    def _num_choices(self) -> int:
        return 2 * self.event_shape[0] + 1

    def _is_path(self, value: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(value.shape[:-3], self.batch_shape)
        value = value.expand(batch + self.event_shape)
        covers = layout.by_first_step(value.flip(-2).cumsum(-2).flip(-2)).sum((-2, -1))  # segments at each step
        within = torch.arange(self.event_shape[0], device=self.device) < self._lengths.unsqueeze(-1)
        inside = layout.is_segment(self._theta()[0], self._index).reshape(*self.batch_shape, *self.event_shape[:2], 1)
        return (covers == within).all(-1) & ((value == 0) | ((value == 1) & inside)).flatten(-3).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, SemiMarkov)
            and self.batch_shape == other.batch_shape
            and self.event_shape == other.event_shape
            and self._lengths.equal(other._lengths)
        )


def _check_shape(name: str, given: Tensor, own: tuple[int, ...]) -> Tensor:
    if check_tensor(name, given).shape[-len(own) :] != own:
        needed = ", ".join(map(str, own))
        raise ValueError(f"{name} must have shape (..., {needed}), got {tuple(given.shape)}")
    return given
