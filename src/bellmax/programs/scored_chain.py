"""Chains given by scores of states and transitions, which add up to the potentials of a dense chain.

θ is emissions (B, T, S), transitions (B or 1, S, S) or (B or 1, T−1, S, S) ``[current, previous]``, start and end
(B or 1, S). ``index`` is the one that :mod:`bellmax.programs.chain` describes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.programs.chain import ChainProgram, first_step, is_used, last_step, unmasked_steps
from bellmax.tensors import Tensors


class ScoredChainProgram(ChainProgram):
    """Sequences of states, scored by four tensors. The expansion is a dense chain, (B, T, S, S)."""

    name = "scored_chain"
    scores = ("emissions", "transitions", "start", "end")
    paths = "chain"
    tape_is_large = True

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        emissions, transitions, start, end = theta
        unmasked = unmasked_steps(emissions, index)
        is_linked = (unmasked & ~first_step(unmasked))[:, 1:]  # (B, T−1): True if a transition is used
        if transitions.ndim == 3:
            is_linked = is_linked.any(1)
        if transitions.shape[0] == 1:
            is_linked = is_linked.any(0, keepdim=True)
        is_visited = unmasked.any(1, keepdim=True)
        ends = [is_visited.any(0, keepdim=True) if len(score) == 1 else is_visited for score in (start, end)]
        return [unmasked.unsqueeze(-1), is_linked[..., None, None], *ends]

    def by_edge(
        self, scores: Tensors, dims: Sequence[int], batch_shape: Sequence[int], index: Tensors
    ) -> tuple[Tensors, tuple[int, ...]]:
        """Give each sequence its own transitions at every step."""
        emissions, transitions, start, end = scores
        steps, states = emissions.shape[-2:]
        if dims[1] == 2:
            transitions = transitions.unsqueeze(-3)
        transitions = transitions.expand(*batch_shape, max(steps - 1, 0), states, states)
        ends = [score.expand(*batch_shape, states) for score in (start, end)]
        return (emissions, transitions, *ends), (2, 3, 1, 1)

    def edges_from(self, tensors: Tensors, theta: Tensors, index: Tensors) -> Tensor:
        _, transitions, start, _ = tensors
        return onto_edges(transitions, start, theta[0], index)

    def event_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        steps, states = theta[0].shape[1:]
        return steps, states, states

    def node_engine(self, theta: Tensors, index: Tensors) -> tuple[Tensor, Tensors]:
        """Leave out the end scores: they belong to the edges into the end node."""
        return dense((*theta[:3], torch.zeros_like(theta[3])), index), index

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        return dense(theta, index)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return dense(z, index)

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        unmasked = unmasked_steps(edges, index)
        is_first, is_last = first_step(unmasked)[..., None, None], last_step(unmasked).unsqueeze(-1)
        emissions = edges.sum(-1)
        transitions = edges.masked_fill(is_first, 0)[:, 1:]
        if theta[1].ndim == 3:
            transitions = transitions.sum(1)
        start = edges.masked_fill(~is_first, 0).sum((1, 3))
        end = emissions.masked_fill(~is_last, 0).sum(1)
        pairs = zip((emissions, transitions, start, end), theta, strict=True)
        return [
            total.sum_to_size(score.shape).contiguous() if total.numel() else torch.zeros_like(score)
            for total, score in pairs
        ]


def dense(theta: Tensors, index: Tensors) -> Tensor:
    """Potentials (B, T, S, S). The first step has no transition, only the start, for the previous state 0."""
    emissions, transitions, start, end = theta
    steps, states = emissions.shape[1:]
    unmasked = unmasked_steps(emissions, index)
    if transitions.ndim == 3:
        transitions = transitions.unsqueeze(1)
    between = transitions.expand(-1, max(steps - 1, 0), -1, -1)
    into = torch.cat((between.new_zeros((between.shape[0], min(steps, 1), states, states)), between), 1)
    into = torch.where(first_step(unmasked)[..., None, None], start[:, None, :, None], into)
    at = torch.where(last_step(unmasked).unsqueeze(-1), emissions + end.unsqueeze(1), emissions)
    return into + at.unsqueeze(-1)


# --- one number for each edge, in the shapes of θ with transitions by sequence and step


def _starts_at_step_0(theta: Tensor, index: Tensors) -> bool:
    """True if step 0 of every sequence is unmasked or the sequence is empty, for a tensor (B, T, …)."""
    return len(index) < 2 and theta.shape[1] > 0


def from_edges(edges: Tensor, theta: Tensors, index: Tensors) -> list[Tensor]:
    """Return numbers of edges (B, T, S, S) as transitions and start, with emissions and end 0."""
    if _starts_at_step_0(edges, index):
        transitions, start = edges[:, 1:], edges[:, 0, :, 0]
    else:
        unmasked = unmasked_steps(edges, index)
        is_first = first_step(unmasked)
        transitions = edges.masked_fill(~(unmasked & ~is_first)[..., None, None], 0)[:, 1:]
        start = edges[..., 0].masked_fill(~is_first.unsqueeze(-1), 0).sum(1)
    tensors = torch.zeros_like(theta[0]), transitions, start, torch.zeros_like(theta[3])
    return [tensor.to(t.dtype).contiguous() for tensor, t in zip(tensors, theta, strict=True)]


def onto_edges(transitions: Tensor, start: Tensor, emissions: Tensor, index: Tensors) -> Tensor:
    """Return transitions (B, T−1, S, S) and start (B, S) as numbers of edges (B, T, S, S), 0 if there is no edge."""
    if _starts_at_step_0(emissions, index):
        return torch.cat((pad(start[:, None, :, None], (0, emissions.shape[-1] - 1)), transitions), 1)
    zeros = torch.zeros_like(emissions)
    edges = dense((zeros, transitions, start, zeros[:, :0].sum(1)), index)
    return edges.masked_fill(~is_used(unmasked_steps(emissions, index), emissions.shape[-1]), 0)
