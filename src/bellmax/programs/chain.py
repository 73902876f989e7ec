"""Chains: a score for each transition at each step, and the steps of a sequence that are masked.

θ is one tensor (B, T, S, S) ``[t, current, previous]``. ``index`` is () if no step is masked, (lengths,) if the steps
past a length (B,) are masked, or (lengths, mask) with a mask (B, T), True at the steps to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.programs.checks import check_lengths
from bellmax.programs.program import Program
from bellmax.tensors import Tensors


class ChainProgram(Program):
    """Sequences of states, with a weight for each transition: a chain is an engine itself."""

    name = "chain"
    scores: Sequence[str] = ("potentials",)
    engine = "chain"
    index_dims = (0, 1)
    event_dims = 3

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        steps, states = theta[0].shape[1:3]
        return steps + 1, states

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return theta[0].shape[1]

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """(B, count, T): states, −1 at masked steps."""
        batch, steps = theta[0].shape[:2]
        return theta[0].new_empty((batch, count, steps), dtype=torch.int64)

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        if index:
            check_lengths("lengths", index[0], 0, theta[0].shape[1])

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        return [is_used(unmasked_steps(theta[0], index), theta[0].shape[2])]

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return index

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        return theta[0]

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return z[0]

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        return [edges]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return edges

    def node_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """(T, S)."""
        steps, states = theta[0].shape[1:3]
        return steps, states

    def by_edge(
        self, scores: Tensors, dims: Sequence[int], batch_shape: Sequence[int], index: Tensors
    ) -> tuple[Tensors, tuple[int, ...]] | None:
        return scores, (3,)

    def edge_counts(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return self.events(paths, theta, index)

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return edges

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return transitions_of(paths, theta[0].shape[2]).to(theta[0].dtype)

    def event_of(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return edges

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        return event

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        states = states_of(event)
        is_complete = ((states >= 0) == unmasked_steps(event, index)).all(-1)
        return is_complete & (transitions_of(states, event.shape[-1]) == event).flatten(-3).all(-1)

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        return [unmasked_steps(theta[0], index)]


def unmasked_steps(theta: Tensor, index: Tensors) -> Tensor:
    """(B, T): True at the steps that are not masked, for a tensor (B, T, …)."""
    steps = theta.shape[1]
    if len(index) == 2:
        return index[1]
    if index:
        return torch.arange(steps, device=theta.device) < index[0].unsqueeze(-1)
    return torch.ones(theta.shape[:2], dtype=torch.bool, device=theta.device)


def first_step(unmasked: Tensor) -> Tensor:
    """(..., T): True at the first step that is not masked."""
    return unmasked & (unmasked.cumsum(-1) == 1)


def last_step(unmasked: Tensor) -> Tensor:
    """(..., T): True at the last step that is not masked."""
    return first_step(unmasked.flip(-1)).flip(-1)


def is_used(unmasked: Tensor, states: int) -> Tensor:
    """(..., T, 1, S): True at the potentials that a path may use. Before the first step every path is in state 0."""
    state = torch.arange(states, device=unmasked.device)
    return unmasked[..., None, None] & ~(first_step(unmasked)[..., None, None] & (state > 0))


def previous_states(sequence: Tensor, unmasked: Tensor) -> Tensor:
    """(..., T): the state at the last unmasked step before each step, 0 if there is none."""
    steps = unmasked.shape[-1]
    step = torch.arange(steps, device=unmasked.device)
    latest = torch.where(unmasked, step, -1).cummax(-1).values if steps else step.expand(unmasked.shape)
    before = torch.cat((torch.full_like(latest[..., :1], -1), latest[..., :-1]), -1)
    return torch.where(before >= 0, sequence.gather(-1, before.clamp(min=0)), 0)


def transitions_of(sequence: Tensor, states: int) -> Tensor:
    """(..., T, S, S) bool: the transitions of states (..., T), none at a step whose state is −1."""
    current, previous = sequence.unsqueeze(-1), previous_states(sequence, sequence >= 0).unsqueeze(-1)
    state = torch.arange(states, device=sequence.device)
    return (current == state).unsqueeze(-1) & (previous == state).unsqueeze(-2)


def states_of(event: Tensor) -> Tensor:
    """(..., T) int64: the state at each step of an event (..., T, S, S), −1 at a step without a transition."""
    current = event.any(-1)
    return torch.where(current.any(-1), current.long().argmax(-1), -1)
