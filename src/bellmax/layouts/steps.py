"""Chains: which of their steps are kept, and what follows from that.

θ is one tensor (B, T, S, S) ``[t, current, previous]``. ``index`` is () if every step is kept, (lengths,) if the first
ones are, lengths (B,), or (lengths, mask) with a mask (B, T), True at the steps to keep.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.layouts.values import check_lengths, reject
from bellmax.tensors import Tensors

index_is_batched = True
sense = 1


def nodes(theta: Tensors, index: Tensors) -> tuple[int, ...]:
    steps, states = theta[0].shape[1:3]
    return steps + 1, states


def empty_paths(theta: Tensors, index: Tensors, count: int) -> Tensor:
    """Room for states (B, count, T), −1 at masked steps."""
    batch, steps = theta[0].shape[:2]
    return theta[0].new_empty((batch, count, steps), dtype=torch.int64)


def check_index(theta: Tensors, index: Tensors) -> None:
    if index:
        check_lengths("lengths", index[0], 0, theta[0].shape[1])


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    (potentials,) = theta
    kept = kept_steps(potentials, index)
    reject("potentials", potentials, ~(potentials < math.inf) & is_used(kept, potentials.shape[-1]))


def kept_steps(theta: Tensor, index: Tensors) -> Tensor:
    """(B, T), for anything of shape (B, T, …)."""
    steps = theta.shape[1]
    if len(index) == 2:
        return index[1]
    if index:
        return torch.arange(steps, device=theta.device) < index[0].unsqueeze(-1)
    return torch.ones(theta.shape[:2], dtype=torch.bool, device=theta.device)


def first_step(kept: Tensor) -> Tensor:
    """(..., T): the first of the steps kept."""
    return kept & (kept.cumsum(-1) == 1)


def last_step(kept: Tensor) -> Tensor:
    """(..., T): the last of the steps kept."""
    return first_step(kept.flip(-1)).flip(-1)


def is_used(kept: Tensor, states: int) -> Tensor:
    """(..., T, 1, S): where potentials are used. Before the first step every path is in state 0."""
    state = torch.arange(states, device=kept.device)
    return kept[..., None, None] & ~(first_step(kept)[..., None, None] & (state > 0))


def previous_states(sequence: Tensor, kept: Tensor) -> Tensor:
    """(..., T): the state at the kept step before each step, 0 where there is none."""
    steps = kept.shape[-1]
    step = torch.arange(steps, device=kept.device)
    seen = torch.where(kept, step, -1).cummax(-1).values if steps else step.expand(kept.shape)
    before = torch.cat((torch.full_like(seen[..., :1], -1), seen[..., :-1]), -1)
    return torch.where(before >= 0, sequence.gather(-1, before.clamp(min=0)), 0)
