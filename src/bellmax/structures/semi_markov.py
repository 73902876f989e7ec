"""Semi-Markov models under any Ω: segmentations with a label and a duration for each segment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import DecodedForm, EdgeLists, Fault
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.programs import SCORED_SEGMENTS, SCORED_SEGMENTS_WITH_LAST, SEGMENTS
from bellmax.programs.segments import ScoredSegmentProgram, codes_of_event, covered_steps, event_of_codes
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.structures.lattice import common_batch
from bellmax.targets import Paths, Targets
from bellmax.tensors import Gamma, divide_by_gamma, wide_dtype


class SegmentForm(DecodedForm):
    """Segments (..., L, 3) int64 [start, end, label], in order."""

    p: SemiMarkov

    @property
    def own_shape(self) -> Sequence[int | str]:
        return "L", 3

    def of_compact(self, paths: Tensor) -> Tensor:
        codes = paths if paths.dtype == torch.int64 else codes_of_event(paths)
        steps, _, labels = self.p.event_shape
        end = torch.arange(1, steps + 1, device=codes.device).expand(codes.shape)
        segments = torch.stack((end - 1 - codes // labels, end, codes % labels), -1)
        segments = torch.where(codes.unsqueeze(-1) < 0, -1, segments)
        order = (codes < 0).long().argsort(dim=-1, stable=True)
        return segments.gather(-2, order.unsqueeze(-1).expand(segments.shape))

    def edges(self, decoded: Tensor) -> EdgeLists:
        (steps, longest, labels), is_path = self.p.event_shape, self._is_segmentation(decoded)
        first, end, label = decoded.masked_fill(~is_path[..., None, None], -1).unbind(-1)
        exists = first >= 0
        last = (end - 1).clamp(min=0)
        segments = (last * longest + end - first - 1) * labels + label
        is_linked = exists[..., 1:]
        links = ((last[..., :-1] * labels + label[..., 1:]) * labels + label[..., :-1]).masked_fill(~is_linked, -1)
        is_last = exists & ~pad(is_linked, (0, 1))
        sizes = steps * longest * labels, (steps - 1) * labels * labels, labels
        offsets = [sum(sizes[:n]) for n in range(1, 4)]  # of transitions, starts and ends
        numbers = [
            segments.masked_fill(~exists, -1),
            torch.where(links < 0, -1, offsets[0] + links),
            torch.where(exists, offsets[1] + label, -1)[..., :1],
            torch.where(is_last, offsets[2] + last * labels + label, -1).amax(-1, keepdim=True),
        ]
        return EdgeLists(torch.cat(numbers, -1), is_path)

    def events(self, decoded: Tensor) -> Tensor:
        return self.p._event_of(self.codes(decoded))

    def codes(self, decoded: Tensor) -> Tensor:
        """Return segments in the compact form of :mod:`bellmax.programs.segments`, (..., T)."""
        first, end, label = decoded.unbind(-1)
        steps, _, labels = self.p.event_shape
        last = torch.where(first < 0, steps, end - 1)  # padding is written past the last step
        codes = torch.where(first < 0, -1, (end - first - 1) * labels + label)
        empty = codes.new_full((*codes.shape[:-1], steps + 1), -1)
        return empty.scatter(-1, last, codes)[..., :-1]

    def is_path(self, decoded: Tensor) -> Tensor:
        return self._is_segmentation(decoded)

    def _is_segmentation(self, decoded: Tensor) -> Tensor:
        """(...): True if the segments follow each other and fill the sequence."""
        *by_segment, (is_partial, _) = self._faults(decoded)
        return ~torch.stack([is_wrong.any(-1) for is_wrong, _ in by_segment]).any(0) & ~is_partial

    def fault(self, decoded: Tensor) -> Fault:
        for is_wrong, reason in self._faults(decoded):
            if bool(is_wrong.any()):
                index = tuple(is_wrong.nonzero()[0].tolist())
                return Fault(index, reason(index))
        return super().fault(decoded)

    def _faults(self, decoded: Tensor) -> list[tuple[Tensor, Callable[[tuple[int, ...]], str]]]:
        """Return masks (..., L) or (...) of the segments that are wrong, each with its reason.

        A reason takes the index of the segment. ``p`` must then have no batch.
        """
        _, longest, labels = self.p.event_shape
        first, end, label = decoded.unbind(-1)
        is_padding = (decoded == -1).all(-1)
        previous = pad(end, (1, 0))[..., :-1]
        total = pad(end.masked_fill(is_padding, 0), (0, 1)).amax(-1)
        lengths = self.p.lengths.expand(total.shape)
        duration = end - first
        is_gap = is_padding & ((~is_padding).flip(-1).cumsum(-1).flip(-1) > 0)
        return [
            (is_gap, lambda n: "is padding, but a segment follows it"),
            (
                ~is_padding & ((first < 0) | (first != previous)),
                lambda n: f"starts at {first[n]}, but must start at {max(int(previous[n]), 0)}",
            ),
            (
                ~is_padding & ((duration < 1) | (duration > longest)),
                lambda n: f"has a duration of {duration[n]}, which must be from 1 to {longest}",
            ),
            (
                ~is_padding & ((label < 0) | (label >= labels)),
                lambda n: f"has label {label[n]}, which must be from 0 to {labels - 1}",
            ),
            (total != lengths, lambda n: f"ends at {total}, but the sequence has {lengths} steps"),
        ]


class ScoredSegmentTargets(Targets):
    """Targets of emissions and durations. Segments are scored without a number for each possible segment.

    For segments, ``allowed`` is their compact form (..., T) int64. Other targets, and costs, are compared with the
    scores of all segments.
    """

    @property
    def scored(self) -> ScoredSemiMarkov:
        return cast("ScoredSemiMarkov", self.p)

    def read(self, name: str, target: Any, ignore_index: int = -100) -> tuple[Targets, Tensor]:
        if not self.scored._form.matches(target):
            return self.scored._dense()._targets.read(name, target, ignore_index)
        return self, self.scored._codes_of(name, self.read_decoded(name, target))

    def restricted_value(self, allowed: Tensor) -> Tensor:
        nodes = 2 * (allowed >= 0).sum(-1) + (self.event_shape[-1] > 1)  # before and after each segment, and the end
        return self.value_of_one_path(self.scored._score_of(allowed), nodes)

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        self.check_possible(name, allowed)
        return self.scored._event_of(allowed)

    def edges_within(self, allowed: Tensor) -> Tensor:
        return self.scored._dense()._targets.edges_within(self.correct(allowed))

    def correct(self, allowed: Tensor) -> Tensor:
        return self.scored._event_of(allowed) > 0

    def is_used(self, ndim: int) -> Tensor:
        return self.scored._dense()._targets.is_used(ndim)

    def add(self, cost: Tensor) -> Paths:
        return self.scored._dense()._targets.add(cost)


class SemiMarkov(PathDistribution):
    """A distribution over segmentations with explicit durations: a semi-Markov CRF or a hidden semi-Markov model.

    A segmentation cuts T steps into segments of 1 to D steps, each with one of K labels. Adjacent segments may have the
    same label. The score of a segmentation is the sum of the scores of its segments and of the transitions between
    adjacent segments. The scores of the first label (``start``) and of the last label (``end``) are added to this sum.
    The event of a segmentation is the 0/1 tensor (T, D, K) of its segments. Its decoded form is segments (..., L, 3),
    see :meth:`best_segments`.

    Time and memory are O(T(DK + K²)). To reach this time, the program uses two separate smoothed max operations. One is
    over the durations of a segment, the other is over the labels of the previous segment. Under negentropy, the order
    of the two operations does not matter. Under another Ω, it changes the probabilities. To build a model from
    emissions and durations in memory O(TK), use :meth:`from_scores`.

    Args:
        segments: The score (..., T, D, K) of each segment ``[last step, duration − 1, label]``. −∞ forbids a segment.
            Entries of segments that would begin before the first step are ignored.
        transitions: The score (..., K, K) of each transition ``[current, previous]``. Pass (K, K) to use the same
            scores for the whole batch.
        start: The score (..., K) of the first label, default 0.
        end: The score (..., K) of the last label, default 0.
        lengths: The number of steps of each sequence, from 1 to T: a tensor of integers with the batch shape, or one
            number. Default T. Later steps are padding: they are ignored, may contain NaN and get no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`. If you want a sparse Ω, prefer "sparsemax" to "l2", since "l2" also subtracts a
            penalty for each segment.
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

    _form_kind = SegmentForm

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
        length = _lengths_or(steps, lengths, segments.device)
        others = {"transitions": (transitions, 2), "start": (start, 1), "end": (end, 1)}
        batch = common_batch({"segments": (segments, 3), **others, "lengths": (length, 0)})
        scores = {"segments": (segments.expand(batch + event), 3), **others}
        super().__init__(SEGMENTS, scores, (length.expand(batch),), batch, event, omega, gamma)

    @classmethod
    def from_scores(
        cls,
        emissions: Tensor,
        durations: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        last_durations: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> ScoredSemiMarkov:
        """Return a model from scores of steps and scores of durations.

        The score of a segment is the sum of the emissions of its steps, plus the score of its duration. On the CPU,
        time is O(T(DK + K²)). These results need only memory O(TK): ``value``, ``marginals``, ``best_segments``,
        ``sample_segments``, and the surrogate loss if the target is given as segments. Under negentropy, ``log_prob``
        of segments needs memory O(TK), too. The gradient and Hessian products need memory O(TK + DK + K²) for each
        sequence. All other methods store one number for each of the T·D·K possible segments. Third derivatives, and all
        methods on a GPU, store these numbers, too. If the numbers take more than 1 GB, bellmax raises ``ValueError``.

        The last segment of a sequence can be longer than observed, because the observation stops (right-censoring). To
        model such sequences, pass log survival probabilities as ``last_durations``. The log survival probability of d
        is the log-probability that a segment has at least d steps. If ``durations`` are log-probabilities, compute the
        log survival probabilities with ``durations.flip(-2).logcumsumexp(-2).flip(-2)``. If a duration is −∞, replace
        it by a large negative number first, because torch's gradient of ``logcumsumexp`` at −∞ is NaN.

        Args:
            emissions: The score (..., T, K) of each label at each step.
            durations: The score (..., D, K) of each duration ``[duration − 1, label]``. D is the longest duration.
            transitions: The score (..., K, K) of each transition ``[current, previous]``.
            start: The score (..., K) of the first label, default 0.
            end: The score (..., K) of the last label, default 0.
            last_durations: The score (..., D, K) of each duration of the last segment, default ``durations``.
            lengths: The number of steps of each sequence: a tensor of integers with the batch shape, or one number.
                Default T.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        """
        return ScoredSemiMarkov(
            emissions,
            durations,
            transitions,
            start=start,
            end=end,
            last_durations=last_durations,
            lengths=lengths,
            omega=omega,
            gamma=gamma,
        )

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each sequence, an int64 tensor of the batch shape."""
        return self._solver.integers[0]

    # --- segments and labels

    @property
    def marginals(self) -> Tensor:
        """Probability of each label at each step, (..., T, K); 0 in the padding. Differentiable."""
        return covered_steps(self.expected_path)

    def best_segments(self) -> Tensor:
        """Return the segments of the best path in order, (..., T, 3) int64 [start, end, label].

        :meth:`decode` returns the same tensor.

        A segment contains the steps from ``start`` to ``end`` − 1. The remaining rows are −1.
        """
        return self.decode()

    def sample_segments(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random segmentations, (*sample_shape, ..., T, 3) int64 [start, end, label], padded with −1."""
        return self.sample_decoded(sample_shape)

    def _event_of(self, codes: Tensor) -> Tensor:
        """Return paths in the compact form (..., T) as events in the computing dtype."""
        return event_of_codes(codes, self.event_shape[1:], torch.promote_types(self.dtype, torch.float32))


class ScoredSemiMarkov(SemiMarkov):
    """A semi-Markov model with scores of labels and durations, made by :meth:`SemiMarkov.from_scores`.

    Some methods store a number for each segment, in tensors (..., T, D, K): ``expected_path``, ``sample``, ``topk``,
    ``potentials``, ``entropy`` and others. They raise ``ValueError`` if such a tensor takes more than 1 GB.
    :meth:`SemiMarkov.from_scores` lists the methods that need less memory.
    """

    _target_kind = ScoredSegmentTargets

    @property
    def _form(self) -> SegmentForm:
        return SegmentForm(self)

    def __init__(
        self,
        emissions: Tensor,
        durations: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        last_durations: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        if check_tensor("emissions", emissions).ndim < 2 or 0 in emissions.shape[-2:]:
            raise ValueError(f"emissions must have shape (..., T, K), each at least 1, got {tuple(emissions.shape)}")
        steps, labels = emissions.shape[-2:]
        if check_tensor("durations", durations).ndim < 2 or not durations.shape[-2] or durations.shape[-1] != labels:
            raise ValueError(f"durations must have shape (..., D, {labels}), got {tuple(durations.shape)}")
        longest = durations.shape[-2]
        zeros = emissions.new_zeros(labels)
        scores = {
            "emissions": (emissions, 2),
            "durations": (durations, 2),
            "transitions": (_check_shape("transitions", transitions, (labels, labels)), 2),
            "start": (zeros if start is None else _check_shape("start", start, (labels,)), 1),
            "end": (zeros if end is None else _check_shape("end", end, (labels,)), 1),
        }
        if last_durations is not None:
            scores["last_durations"] = _check_shape("last_durations", last_durations, (longest, labels)), 2
        length = _lengths_or(steps, lengths, emissions.device)
        batch = common_batch({**scores, "lengths": (length, 0)})
        scores["emissions"] = emissions.expand(*batch, steps, labels), 2
        program = SCORED_SEGMENTS if last_durations is None else SCORED_SEGMENTS_WITH_LAST
        event = torch.Size((steps, longest, labels))
        PathDistribution.__init__(self, program, scores, (length.expand(batch),), batch, event, omega, gamma)

    @property
    def potentials(self) -> Tensor:
        """The score of each segment, (..., T, D, K) ``[last step, duration − 1, label]``, computed at each access.

        If the scores are in half precision, the potentials are float32.
        """
        batch = self._solver.batch
        program = cast(ScoredSegmentProgram, batch.program)
        segments = program.segments(batch.unscaled(self._scores), batch.index)
        return segments.reshape(self.batch_shape + self.event_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability of each label at each step, (..., T, K); 0 in the padding. Differentiable."""
        return self._solver.gradient()[0].to(self.dtype)

    def _expected_path(self) -> Tensor:
        if type(self.omega) is Hard:  # the expansion rounds differently, and could break a tie differently
            event = self._event_of(self._sample_compact(()))
            return event + self._zero().to(event.dtype)[..., None, None, None]
        return self._solver.events_of_edges(self._solver.expanded().expected_edges())

    def log_prob(self, path: Tensor) -> Tensor:
        """Log-probability of a path, segments (..., L, 3) or an event (..., T, D, K). Differentiable in θ and γ.

        Under negentropy, the log-probability of segments needs memory O(TK).
        """
        if type(self.omega) is Hard:
            return self._log_prob_of_best(path)
        if type(self.omega) is not Negentropy or not self._form.matches(path):
            return super().log_prob(path)
        p, _ = self._read_decoded("path", path)
        if p is not self:
            return p.log_prob(path)
        score = self._score_of(self._codes_of("path", path))
        log_prob = divide_by_gamma(score - self.value, self.omega.gamma)
        return log_prob.masked_fill(score == -math.inf, -math.inf).to(self.value.dtype)

    def _codes_of(self, name: str, path: Tensor) -> Tensor:
        """Return an argument, segments or an event, in the compact form (..., T)."""
        if not self._form.matches(path):
            return codes_of_event(self._check_path(path))
        p, segments = self._read_decoded(name, path)
        p._form.check(name, segments)
        return p._form.codes(segments)

    def _log_prob_of_best(self, path: Tensor) -> Tensor:
        """Log-probability of a path under the hard max: 0 for the best path, −∞ for others."""
        is_best = (self._codes_of("path", path) == self._sample_compact(())).all(-1) & self.value.isfinite()
        return self._zero().expand(is_best.shape).masked_fill(~is_best, -math.inf)

    def _zero(self) -> Tensor:
        """0 for each sequence, with a gradient of 0, so that results have a graph as under other Ω."""
        return 0 * self.value.masked_fill(self.value.isinf(), 0)

    def _most_accurate(self) -> Tensor:
        return self._dense().most_accurate()

    # --- for losses

    def _dense(self) -> SemiMarkov:
        """Return the same model with the score of each segment."""
        transitions, start, end = self._scores[2:5]
        return SemiMarkov(self.potentials, transitions, start=start, end=end, lengths=self.lengths, omega=self.omega)

    def _score_of(self, codes: Tensor) -> Tensor:
        """Return the sum of the scores along paths in the compact form (..., T), in the wide dtype."""
        emissions, durations, transitions, start, end, *last = self._scores
        (steps, _, labels), length = self.event_shape, self.lengths.unsqueeze(-1)
        step = torch.arange(steps, device=self.device)
        is_inside, is_last, is_end = step < length, step + 1 == length, codes >= 0
        next_end = torch.where(is_end, step, steps - 1).flip(-1).cummin(-1).values.flip(-1)
        label = codes.gather(-1, next_end).clamp(min=0) % labels
        previous = pad(label, (1, 0))[..., :-1]
        follows = pad(is_end, (1, 0))[..., :-1] & is_inside  # True at the first step of a segment after another one
        shape = torch.broadcast_shapes(codes.shape[:-1], self.batch_shape)

        def along(score: Tensor, entry: Tensor, mask: Tensor) -> Tensor:
            """Sum the entries of a score (..., N) where the mask (..., T) is True."""
            entries = score.expand(*shape, score.shape[-1]).gather(-1, entry.expand(*shape, steps))
            return entries.masked_fill(~mask, 0).sum(-1, dtype=wide_dtype(self.device))

        sums = [
            along(emissions.flatten(-2), step * labels + label, is_inside),
            along(durations.flatten(-2), codes.clamp(min=0), is_end & ~is_last if last else is_end),
            along(transitions.flatten(-2), label * labels + previous, follows),
            along(start, label, step == 0),
            along(end, label, is_last),
        ]
        sums += [along(score.flatten(-2), codes.clamp(min=0), is_end & is_last) for score in last]
        return torch.stack(sums).sum(0)


def _check_shape(name: str, score: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a score. Raises ``ValueError`` unless its last dimensions are ``shape``."""
    if check_tensor(name, score).shape[-len(shape) :] != shape:
        needed = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape (..., {needed}), got {tuple(score.shape)}")
    return score


def _lengths_or(steps: int, lengths: Lengths | None, device: torch.device) -> Tensor:
    """Return the lengths as a tensor, default ``steps``, which is symbolic under torch.export."""
    if lengths is None:
        return torch.full((), steps, dtype=torch.int64, device=device)
    return as_lengths("lengths", lengths, device).clone()  # the caller may modify them after the tape is made
