"""Segmentations: segments end, labels change at boundaries, and both are nodes of a graph.

θ is segments (B, T, D, K) ``[last step, duration − 1, label]``, transitions (B or 1, K, K) ``[current, previous]``,
start and end (B or 1, K). ``index`` is (lengths,), (B,) int64.

For steps read i = 0 … T and labels b, the boundary U(i, b) comes before a segment of label b, and G(i, b) behind one. A
segment leads from U(i − d, b) to G(i, b), a transition from G(i, a) to U(i, b): T·(D·K + K²) edges, not T·D·K².
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.layouts.values import check_lengths, reject
from bellmax.tensors import Tensors
from bellmax.transforms import is_checked

index_is_batched = True
engine = "dag"
sense = 1


class Segments(NamedTuple):
    """The graph. Its edges are K starts, segments (T, D, K), transitions (T − 1, K, K) and ends (T, K), in this order.

    A segment that would begin before the first step is an edge from the start, whose weight is always −∞.
    """

    edges: Tensor  # (E, 2) [parent, child]
    levels: Tensor
    graph: tuple[Tensor, ...]  # its integers, as in bellmax.layouts.graph


@lru_cache(maxsize=8)
def segments_graph(steps: int, longest: int, labels: int, device: torch.device) -> Segments:
    # The graph is the same whatever transforms, and default device, its caller is under.
    with torch._C._DisableFuncTorch(), torch.device("cpu"):
        return _make_graph(steps, longest, labels, device)


def _make_graph(steps: int, longest: int, labels: int, device: torch.device) -> Segments:
    # Node 0 is the start; then U(i) and G(i + 1) of each i < T; then the end.
    label = torch.arange(labels)
    before = 1 + 2 * labels * torch.arange(steps).unsqueeze(-1) + label  # (T, K): U(0) … U(T − 1)
    behind = before + labels  # G(1) … G(T)
    end = 1 + 2 * labels * steps
    t, d, k = torch.meshgrid(torch.arange(steps), torch.arange(longest), label, indexing="ij")
    first = torch.stack((torch.zeros_like(label), before[0]), 1)
    spans = torch.stack((torch.where(d <= t, before[(t - d).clamp(min=0), k], 0), behind[t, k]), -1)
    shape = (max(steps - 1, 0), labels, labels)
    changes = torch.stack((behind[:-1].unsqueeze(1).expand(shape), before[1:].unsqueeze(2).expand(shape)), -1)
    last = torch.stack((behind.flatten(), torch.full((steps * labels,), end)), 1)
    edges = torch.cat((first, spans.reshape(-1, 2), changes.reshape(-1, 2), last))
    by_node = torch.arange(1, 2 * steps + 1).repeat_interleave(labels)
    level = torch.cat((torch.zeros(1, dtype=torch.int64), by_node, torch.tensor([2 * steps + 1])))
    index = tuple(part.to(device, torch.int32) for part in _sorted(edges[:, 0], steps, longest, labels))
    return Segments(edges.to(device), level.to(device), index)


def _sorted(parent: Tensor, steps: int, longest: int, labels: int) -> tuple[Tensor, ...]:
    """The integers of the graph, as of :func:`bellmax.layouts.graph.sort`: nodes are sorted as they are numbered."""
    spans, changes, ends = longest * labels, labels * labels, steps * labels
    number = torch.arange(len(parent))
    first, segment, change, last = number.split((labels, steps * spans, max(steps - 1, 0) * changes, ends))
    behind = segment.reshape(steps, longest, labels).transpose(1, 2).reshape(steps, spans)  # of a step, by node
    before = pad(change.reshape(-1, changes), (0, 0, 0, 1))  # of the next step; the last has none
    between = torch.cat((behind, before), 1).flatten()[: steps * (spans + changes) - changes]
    edge = torch.cat((first, between, last))
    per_step = torch.tensor([longest, labels]).repeat_interleave(labels).repeat(steps)[: (2 * steps - 1) * labels]
    degree = torch.cat((torch.tensor([0]), torch.ones(labels, dtype=torch.int64), per_step, torch.tensor([ends])))
    offset = pad(degree.cumsum(0), (1, 0))
    group = pad(1 + labels * torch.arange(2 * steps + 2), (1, 0))
    group[-1] = len(degree)
    return offset, parent[edge], edge, group


def graph_of(theta: Tensors) -> Segments:
    return segments_graph(*theta[0].shape[1:], theta[0].device)


# --- what every backend shares


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    _, steps, _, labels = theta[0].shape
    return (2 + 2 * labels * steps,)


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for paths (B, count, T): (duration − 1)·K + label at the last step of each segment, −1 at the others."""
    batch, steps = theta[0].shape[:2]
    return theta[0].new_empty((batch, count, steps), dtype=torch.int64)


def check_index(theta: Tensors, index: Tensors) -> None:
    check_lengths("lengths", index[0], 1, theta[0].shape[1])


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    scores, *others = theta
    if not bool((scores < math.inf).all()):
        reject("segments", scores, ~(scores < math.inf) & is_segment(scores, index))
    for name, other in zip(("transitions", "start", "end"), others, strict=True):
        used = torch.ones((), dtype=torch.bool, device=other.device)
        if name == "transitions":
            used = (index[0] > 1).reshape(-1, 1, 1) if len(other) > 1 else (index[0] > 1).any()
        reject(name, other, ~(other < math.inf) & used)


def is_segment(scores: Tensor, index: Tensors) -> Tensor:
    """(B, T, D, 1): whether a segment begins at the first step or later, and ends within the length."""
    steps, longest = scores.shape[1:3]
    last, longer = torch.arange(steps, device=scores.device), torch.arange(longest, device=scores.device)
    within = last < index[0].unsqueeze(-1)
    return (within.unsqueeze(-1) & (longer <= last.unsqueeze(-1))).unsqueeze(-1)


# --- the graph


def extra_nodes(theta: Tensors, index: Tensors) -> int:
    """The end, if it can be reached from one node alone."""
    return int(theta[0].shape[-1] == 1)


def engine_index(theta: Tensors, index: Tensors) -> Tensors:
    return graph_of(theta).graph


def weights(theta: Tensors, index: Tensors) -> Tensor:
    scores, transitions, start, end = theta
    whole = is_segment(scores, index)
    early = scores.shape[2] - 1  # a later step has segments of all durations, unless it is past the length
    parts = [scores[:, :early].masked_fill(~whole[:, :early], -math.inf)]
    if is_checked(index[0]) and bool((index[0] == scores.shape[1]).all()):
        parts.append(scores[:, early:])
    else:
        parts.append(scores[:, early:].masked_fill(~whole[:, early:], -math.inf))
    is_last = torch.arange(1, scores.shape[1] + 1, device=scores.device) == index[0].unsqueeze(-1)
    ends = end.unsqueeze(1).masked_fill(~is_last.unsqueeze(-1), -math.inf)
    return _by_edge(parts, transitions, start, ends)


def along(z: Tensors, index: Tensors) -> Tensor:
    """The change of the weights for a change of the scores."""
    scores, transitions, start, end = z
    return _by_edge([scores], transitions, start, end.unsqueeze(1))


def _by_edge(scores: Tensors, transitions: Tensor, start: Tensor, ends: Tensor) -> Tensor:
    batch, labels, steps = len(scores[0]), start.shape[1], sum(part.shape[1] for part in scores)
    rows = [start.expand(batch, labels), *(part.flatten(1) for part in scores)]
    changes = transitions.flatten(1).unsqueeze(1).expand(batch, max(steps - 1, 0), labels * labels)
    return torch.cat((*rows, *changes.unbind(1), ends.expand(batch, steps, labels).flatten(1)), 1)


def onto_scores(edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
    """The transpose of :func:`along`."""
    _, steps, _, labels = theta[0].shape
    start, spans, changes, ends = _parts(edges, theta)
    shape = (len(edges), max(steps - 1, 0), labels, labels)
    parts = spans, changes.reshape(shape).sum(1), start, ends.reshape(-1, steps, labels).sum(1)
    return [part.sum_to_size(t.shape).contiguous() for part, t in zip(parts, theta, strict=True)]


def _parts(edges: Tensor, theta: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of edges (..., E) by their kind; those of segments as (..., T, D, K)."""
    _, steps, longest, labels = theta[0].shape
    sizes = labels, steps * longest * labels, max(steps - 1, 0) * labels * labels, steps * labels
    start, spans, changes, ends = edges.split(sizes, -1)
    return start, spans.reshape(*edges.shape[:-1], steps, longest, labels), changes, ends


def onto_segments(edges: Tensor, theta: Tensors) -> Tensor:
    """(..., E) as (..., T, D, K)."""
    return _parts(edges, theta)[1]


def found_paths(found: Tensor, theta: Tensors, index: Tensors) -> Tensor:
    by_step = onto_segments(found, theta).flatten(-2)
    return torch.where(by_step.any(-1), by_step.argmax(-1), -1)


# --- segments and steps


def by_first_step(scores: Tensor) -> Tensor:
    """Numbers of segments (..., T, D, K) [last step, …] as (..., T, D, K) [first step, …], 0 where there is none."""
    steps, longest = scores.shape[-3:-1]
    padded = pad(scores, (0, 0, 0, 0, 0, longest - 1))
    first, longer = (torch.arange(n, device=scores.device) for n in (steps, longest))
    found: Tensor = padded[..., first.unsqueeze(-1) + longer, longer, :]
    return found


def from_segments(path: Tensor) -> Tensor:
    """The edges (..., E) that a path (..., T, D, K) takes, as a 0/1 tensor."""
    begins, ends = by_first_step(path).sum(-2), path.sum(-2)  # (..., T, K): labels of segments by first and last step
    changes = begins[..., 1:, :].unsqueeze(-1) * ends[..., :-1, :].unsqueeze(-2)
    is_last = ends.sum(-1, keepdim=True) * (1 - pad(begins.sum(-1, keepdim=True)[..., 1:, :], (0, 0, 0, 1)))
    return torch.cat((begins[..., 0, :], path.flatten(-3), changes.flatten(-3), (ends * is_last).flatten(-2)), -1)
