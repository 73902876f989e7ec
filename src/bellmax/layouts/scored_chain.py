"""Chains given by scores: the potentials of a dense chain as a linear function of four tensors.

θ is emissions (B, T, S), transitions (B or 1, S, S) or (B or 1, T−1, S, S) ``[current, previous]``, start and end
(B or 1, S); ``index`` as in :mod:`bellmax.layouts.steps`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.layouts.steps import (
    check_index,
    empty_paths,
    first_step,
    index_is_batched,
    is_used,
    kept_steps,
    last_step,
    nodes,
)
from bellmax.layouts.values import reject
from bellmax.tensors import Tensors

__all__ = ["check", "check_index", "empty_paths", "engine_index", "index_is_batched", "nodes"]
__all__ += ["along", "dense", "engine", "extra_nodes", "found_paths", "from_edges", "onto_edges", "onto_scores"]
__all__ += ["sense", "weights"]

engine = "chain"
sense = 1


def dense(theta: Tensors, index: Tensors) -> Tensor:
    """Potentials (B, T, S, S). The first step has no transition, only the start, for the previous state 0."""
    emissions, transitions, start, end = theta
    steps, states = emissions.shape[1:]
    kept = kept_steps(emissions, index)
    if transitions.ndim == 3:
        transitions = transitions.unsqueeze(1)
    between = transitions.expand(-1, max(steps - 1, 0), -1, -1)
    into = torch.cat((between.new_zeros((between.shape[0], min(steps, 1), states, states)), between), 1)
    into = torch.where(first_step(kept)[..., None, None], start[:, None, :, None], into)
    at = torch.where(last_step(kept).unsqueeze(-1), emissions + end.unsqueeze(1), emissions)
    return into + at.unsqueeze(-1)


def weights(theta: Tensors, index: Tensors) -> Tensor:
    return dense(theta, index)


def along(z: Tensors, index: Tensors) -> Tensor:
    return dense(z, index)


def extra_nodes(theta: Tensors, index: Tensors) -> int:
    return 0


def engine_index(theta: Tensors, index: Tensors) -> Tensors:
    return index


def onto_scores(edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
    """The transpose of :func:`dense`."""
    kept = kept_steps(edges, index)
    first, last = first_step(kept)[..., None, None], last_step(kept).unsqueeze(-1)
    emissions = edges.sum(-1)
    transitions = edges.masked_fill(first, 0)[:, 1:]
    if theta[1].ndim == 3:
        transitions = transitions.sum(1)
    start = edges.masked_fill(~first, 0).sum((1, 3))
    end = emissions.masked_fill(~last, 0).sum(1)
    parts = zip((emissions, transitions, start, end), theta, strict=True)
    return [part.sum_to_size(t.shape).contiguous() if part.numel() else torch.zeros_like(t) for part, t in parts]


# --- numbers of edges in θ's shapes, with transitions by sequence and step


def _begins_at_0(theta: Tensor, index: Tensors) -> bool:
    """True if the first step of a sequence is step 0, for anything of shape (B, T, …)."""
    return len(index) < 2 and theta.shape[1] > 0


def from_edges(edges: Tensor, theta: Tensors, index: Tensors) -> list[Tensor]:
    """Numbers (B, T, S, S) of edges as transitions and start, with emissions and end 0."""
    if _begins_at_0(edges, index):
        transitions, start = edges[:, 1:], edges[:, 0, :, 0]
    else:
        kept = kept_steps(edges, index)
        first = first_step(kept)
        transitions = edges.masked_fill(~(kept & ~first)[..., None, None], 0)[:, 1:]
        start = edges[..., 0].masked_fill(~first.unsqueeze(-1), 0).sum(1)
    parts = torch.zeros_like(theta[0]), transitions, start, torch.zeros_like(theta[3])
    return [part.to(t.dtype).contiguous() for part, t in zip(parts, theta, strict=True)]


def onto_edges(transitions: Tensor, start: Tensor, emissions: Tensor, index: Tensors) -> Tensor:
    """Transitions (B, T−1, S, S) and start (B, S) as numbers (B, T, S, S) of edges, 0 where there is no edge."""
    if _begins_at_0(emissions, index):
        return torch.cat((pad(start[:, None, :, None], (0, emissions.shape[-1] - 1)), transitions), 1)
    nothing = torch.zeros_like(emissions)
    edges = dense((nothing, transitions, start, nothing[:, :0].sum(1)), index)
    return edges.masked_fill(~is_used(kept_steps(emissions, index), emissions.shape[-1]), 0)


def found_paths(found: Tensor, theta: Tensors, index: Tensors) -> Tensor:
    return found


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    emissions, transitions, start, end = theta
    kept = kept_steps(emissions, index)
    reject("emissions", emissions, ~(emissions < math.inf) & kept.unsqueeze(-1))
    linked = (kept & ~first_step(kept))[:, 1:]  # (B, T−1): whether a transition is used
    if transitions.ndim == 3:
        linked = linked.any(1)
    if transitions.shape[0] == 1:
        linked = linked.any(0, keepdim=True)
    reject("transitions", transitions, ~(transitions < math.inf) & linked[..., None, None])
    visited = kept.any(1, keepdim=True)
    for name, score in (("start", start), ("end", end)):
        used = visited.any(0, keepdim=True) if score.shape[0] == 1 else visited
        reject(name, score, ~(score < math.inf) & used)
