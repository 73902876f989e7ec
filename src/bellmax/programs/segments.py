"""Segmentations: programs whose paths cut T steps into segments of up to D steps, each with one of K labels.

A path in the compact form is (T,) int64: (duration − 1)·K + label at the last step of each segment, −1 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from bellmax.modes import is_checked
from bellmax.programs.blocks import BlockProgram, Edges
from bellmax.programs.checks import check_lengths
from bellmax.programs.graph import is_flow
from bellmax.programs.program import Program
from bellmax.tensors import Tensors

_MAX_BYTES = 10**9


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
        is_inside = is_segment(segments, lengths)
        return [is_inside, is_linked if len(transitions) > 1 else is_linked.any(), None, None]

    def exists(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        (segments, *_), (lengths,) = theta, index
        step, length = torch.arange(segments.shape[1], device=segments.device), lengths.unsqueeze(-1)
        is_full = is_checked(lengths) and bool((lengths == segments.shape[1]).all())
        within = None if is_full else (step < length)[..., None, None]
        return [within, None, None, (step + 1 == length).unsqueeze(-1)]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Take the first block: each segment has one edge."""
        event = theta[0].shape[1:]
        return edges[:, : event.numel()].reshape(len(edges), *event)

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        (lengths,) = index
        ends, begins = event.sum(-2), by_first_step(event).sum(-2)
        transitions = begins[:, 1:, :, None] * ends[:, :-1, None, :]
        is_last = torch.arange(event.shape[1], device=event.device) + 1 == lengths.unsqueeze(-1)
        blocks = event, transitions, begins[:, 0], ends * is_last.unsqueeze(-1)
        return torch.cat([block.flatten(1) for block in blocks], 1)

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return is_flow(self.edges_of(event, theta, index), self.engine_index([event], index))


SEGMENTS = SegmentProgram()


class ScoredSegmentProgram(Program):
    """Segmentations whose segments are scored by emissions and durations. The expansion is a :class:`SegmentProgram`.

    θ is emissions (B, T, K), durations (B or 1, D, K), transitions (B or 1, K, K) ``[current, previous]``, start and
    end (B or 1, K), and if the last segment has its own scores, last_durations (B or 1, D, K). ``index`` is (lengths,),
    (B,) int64.

    Args:
        has_last: True if θ has last_durations.

    """

    paths = "semi_markov"
    index_dims = (0,)
    event_dims = 3

    def __init__(self, has_last: bool) -> None:
        self.name = "scored_segments" + "_with_last" * has_last
        self.scores = ("emissions", "durations", "transitions", "start", "end", *["last_durations"] * has_last)

    def _shape(self, theta: Tensors) -> tuple[int, int, int, int]:
        """(B, T, D, K)."""
        return *theta[0].shape[:2], *theta[1].shape[1:]

    def _like_segments(self, theta: Tensors) -> list[Tensor]:
        """Return θ of the expansion, for its shapes alone."""
        return [theta[0].new_zeros(()).expand(self._shape(theta)), *theta[2:5]]

    # --- sizes and checks

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        _, steps, longest, labels = self._shape(theta)
        return (2 * labels * steps + 2 + (longest > 1),)

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return 2 * theta[0].shape[1] + 1

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int:
        return int(theta[0].shape[-1] == 1)

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        batch, steps = theta[0].shape[:2]
        return theta[0].new_empty((batch, count, steps), dtype=torch.int64)

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        check_lengths("lengths", index[0], 1, theta[0].shape[1])

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        (lengths,), has_last = index, len(theta) > 5
        step, shorter = (torch.arange(t.shape[1], device=t.device) for t in theta[:2])

        def over_batch(mask: Tensor, score: Tensor) -> Tensor:
            return mask if len(score) > 1 else mask.any(0, keepdim=True)

        def durations(before: Tensor, score: Tensor) -> Tensor:
            return over_batch(shorter < before.unsqueeze(-1), score).unsqueeze(-1)

        masks = [
            (step < lengths.unsqueeze(-1)).unsqueeze(-1),
            durations(lengths - int(has_last), theta[1]),
            over_batch((lengths > 1).reshape(-1, 1, 1), theta[2]),
            None,
            None,
        ]
        return [*masks, durations(lengths, theta[5])] if has_last else masks

    # --- the expansion

    def segments(self, theta: Tensors, index: Tensors) -> Tensor:
        """Return the score of each segment, (B, T, D, K), 0 for segments outside of the sequence."""
        check_size(self._shape(theta), theta[0].dtype)
        (emissions, durations, *rest), (lengths,) = theta, index
        sums = [emissions]
        for d in range(1, durations.shape[1]):  # in the order of the kernels, so that ties are rounded alike
            sums.append(sums[-1] + pad(emissions, (0, 0, d, 0))[:, : emissions.shape[1]])
        durations = durations.unsqueeze(1)
        if len(rest) > 3:
            durations = torch.where(self._is_last(emissions, lengths), rest[3].unsqueeze(1), durations)
        segments = torch.stack(sums, 2) + durations
        return segments.masked_fill(~is_segment(segments, lengths), 0)

    def _is_last(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, 1, 1): True at the last step of a sequence."""
        step = torch.arange(emissions.shape[1], device=emissions.device)
        return (step + 1 == lengths.unsqueeze(-1))[..., None, None]

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        check_size(self._shape(theta)[1:], torch.int32)
        return SEGMENTS.engine_index(self._like_segments(theta), index)

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.weights([self.segments(theta, index), *theta[2:5]], index)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.along([self.segments(z, index), *z[2:5]], index)

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        segments, *rest = SEGMENTS.onto_scores(edges, self._like_segments(theta), index)
        segments = segments.masked_fill(~is_segment(segments, index[0]), 0)
        emissions = covered_steps(segments)
        if len(theta) == 5:
            return [emissions, _sum_durations(segments, theta[1]), *rest]
        is_last = self._is_last(theta[0], index[0])
        durations = _sum_durations(segments.masked_fill(is_last, 0), theta[1])
        return [emissions, durations, *rest, _sum_durations(segments.masked_fill(~is_last, 0), theta[5])]

    def event_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return self._shape(theta)[1:]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.best_by_entry(edges, self._like_segments(theta), index)

    # --- paths

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return codes_of_event(SEGMENTS.compact_paths(edges, self._like_segments(theta), index))

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return event_of_codes(paths, self._shape(theta)[2:], theta[0].dtype)

    def event_of(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.event_of(edges, self._like_segments(theta), index)

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.edges_of(event, theta, index)

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return SEGMENTS.is_path(event, theta, index)


def _sum_durations(segments: Tensor, durations: Tensor) -> Tensor:
    """Sum values of segments (B, T, D, K) by duration and label, to the shape of the score ``durations``."""
    return segments.sum(1).sum_to_size(durations.shape).contiguous()


def check_size(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if a tensor of a number for each segment would take more than 1 GB."""
    if (size := torch.Size(shape).numel() * dtype.itemsize) > _MAX_BYTES:
        raise ValueError(
            f"this method needs a number for each segment, a tensor of shape {tuple(shape)}, {size / 1e9:.1f} GB, but "
            "the limit is 1 GB: use value, gradient, marginals, best_segments or sample_segments instead, or pass "
            "segments (..., L, 3) instead of events"
        )


def is_segment(segments: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D, 1): True if a segment of (B, T, D, K) begins at the first step or later, and ends within the length."""
    last, shorter = (torch.arange(n, device=lengths.device) for n in segments.shape[1:3])
    return ((last < lengths.unsqueeze(-1)).unsqueeze(-1) & (shorter <= last.unsqueeze(-1))).unsqueeze(-1)


def by_first_step(segments: Tensor) -> Tensor:
    """Reindex values of segments (..., T, D, K) by their first step instead of their last; 0 if there is no segment."""
    steps, longest = segments.shape[-3:-1]
    padded = pad(segments, (0, 0, 0, 0, 0, longest - 1))
    first, shorter = (torch.arange(n, device=segments.device) for n in (steps, longest))
    by_first: Tensor = padded[..., first.unsqueeze(-1) + shorter, shorter, :]
    return by_first


def covered_steps(segments: Tensor) -> Tensor:
    """Sum values of segments (..., T, D, K) over the segments that contain each step, (..., T, K)."""
    at_least = segments.flip(-2).cumsum(-2).flip(-2)  # by last step and least duration
    return by_first_step(at_least).sum(-2)


def codes_of_event(event: Tensor) -> Tensor:
    """Return paths (..., T, D, K) in the compact form (..., T)."""
    flat = event.flatten(-2)
    return torch.where(flat.any(-1), flat.argmax(-1), -1)


def event_of_codes(codes: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return paths in the compact form (..., T) as events (..., T, D, K), for the sizes (D, K)."""
    longest, labels = sizes
    check_size((*codes.shape, longest, labels), torch.int64)
    by_segment: Tensor = one_hot(codes + 1, longest * labels + 1)[..., 1:]
    return by_segment.reshape(*codes.shape, longest, labels).to(dtype)
