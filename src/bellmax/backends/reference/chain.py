"""The sweeps of a chain in plain torch, state values in the wide dtype (Algorithms 3 and 4 of the paper, mended).

θ and ``index`` are as in :mod:`bellmax.programs.chain`. Before the first step every path is in state 0:
v_0 = (0, −∞, …, −∞). A masked step passes everything on unchanged.

The edges into the end node have no potential of their own. Their probabilities belong to the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bellmax.programs import CHAIN
from bellmax.programs.chain import first_step, last_step, unmasked_steps
from bellmax.programs.values import reject_overflow
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen

__all__ = ["backward", "check", "empty_tape", "forward", "hessian", "log_transitions", "log_transitions_jvp"]
__all__ += ["log_transitions_vjp", "sample", "topk", "value"]

check = CHAIN.check


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    return theta[0].new_empty((theta[0].shape[0], *CHAIN.nodes(theta, index)), dtype=wide_dtype(theta[0].device))


def _skipped(theta: Tensor, index: Tensors) -> Tensor:
    """(B, T, 1, 1): the masked steps."""
    return ~unmasked_steps(theta, index)[..., None, None]


def _nowhere(theta: Tensor, index: Tensors) -> Tensor:
    """(B, T, 1, S): before the first step there are no states but 0."""
    state = torch.arange(theta.shape[-1], device=theta.device)
    return first_step(unmasked_steps(theta, index))[..., None, None] & (state > 0)


def _is_empty(theta: Tensor, index: Tensors) -> Tensor:
    """(B,): sequences of which no step is kept."""
    return ~unmasked_steps(theta, index).any(-1)


def _edges(theta: Tensor, index: Tensors) -> Tensor:
    """θ in the wide dtype, 0 where a step is skipped, −∞ where there is no edge."""
    return widen(theta).masked_fill(_nowhere(theta, index), -math.inf).masked_fill(_skipped(theta, index), 0)


def _before_first(theta: Tensor) -> Tensor:
    """v_0, (B, S)."""
    v = theta.new_full((theta.shape[0], theta.shape[2]), -math.inf, dtype=wide_dtype(theta.device))
    return torch.cat((torch.zeros_like(v[:, :1]), v[:, 1:]), 1)


def forward(inputs: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    v = [_before_first(theta)]
    skipped = _skipped(theta, index)[..., 0]
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        v.append(torch.where(skipped[:, t], v[-1], omega.max(edges + v[-1].unsqueeze(1))))
    value = omega.max(v[-1]).masked_fill(_is_empty(theta, index), 0).to(theta.dtype, copy=True)
    reject_overflow(value)
    return value, torch.stack(v, 1)


def value(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[0]


def _steps(theta: Tensor, tape: Tensor, index: Tensors, omega: Regularizer) -> Iterator[tuple[int, Tensor]]:
    """(t, x) with x = θ_t + v_{t−1}, (B, S, S), first to last."""
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        yield t, edges + tape[:, t].unsqueeze(1)


def _walk_back(theta: Tensor, index: Tensors, mass: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Run mass (B, S) from the last step to the first: a step turns it into source + q∘mass, (q, source) = parts[t]."""
    skipped = _skipped(theta, index)
    spread = []
    for t in reversed(range(theta.shape[1])):
        q, source = parts[t]
        e = (source + q * mass.unsqueeze(-1)).masked_fill(skipped[:, t], 0)
        mass = torch.where(skipped[:, t, 0], mass, e.sum(1))
        spread.append(e)
    if not spread:
        return torch.zeros_like(theta)
    return torch.stack(spread[::-1], 1).to(theta.dtype)


def _end(theta: Tensor, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """q of the edges into the end node, (B, S)."""
    return omega.argmax(tape[:, -1]).masked_fill(_is_empty(theta, index).unsqueeze(-1), 0)


def _seeded(result: Tensor, seed: Tensor) -> Tensors:
    return [result * seed[:, None, None, None]]


def backward(inputs: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    zero = tape.new_zeros(())
    parts = [(omega.argmax(x), zero) for _, x in _steps(theta, tape, index, omega)]
    return _seeded(_walk_back(theta, index, _end(theta, tape, index, omega), parts), seed)


class _Tangent:
    """The tangent forward sweep: q of every step, y = z + v̇ along its edges, and v̇ at the end."""

    def __init__(self, theta: Tensor, tape: Tensor, z: Tensor, index: Tensors, omega: Regularizer) -> None:
        skipped = _skipped(theta, index)
        self.q, self.y = [], []
        v_dot = torch.zeros_like(tape[:, 0])
        for t, x in _steps(theta, tape, index, omega):
            q = omega.argmax(x)
            y = (widen(z[:, t]) + v_dot.unsqueeze(1)).masked_fill(skipped[:, t] | (x == -math.inf), 0)
            v_dot = torch.where(skipped[:, t, 0], v_dot, (q * y.masked_fill(q == 0, 0)).sum(-1))
            self.q.append(q)
            self.y.append(y)
        self.end_q = _end(theta, tape, index, omega)
        self.end_y = v_dot


def hessian(
    inputs: Tensors, tape: Tensor, seed: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    tangent = _Tangent(theta, tape, z, index, omega)
    skipped = _skipped(theta, index)
    mass = tangent.end_q
    mass_dot = omega.jacobian_product(mass, tangent.end_y.masked_fill(mass == 0, 0))
    parts = []
    for t in reversed(range(theta.shape[1])):
        q = tangent.q[t]
        q_dot = omega.jacobian_product(q, tangent.y[t].masked_fill(q == 0, 0))
        source = q_dot.masked_fill(mass.unsqueeze(-1) == 0, 0) * mass.unsqueeze(-1)
        parts.append((q, source))
        mass = torch.where(skipped[:, t, 0], mass, (q * mass.unsqueeze(-1)).sum(1))
    return _seeded(_walk_back(theta, index, mass_dot, parts[::-1]), seed)


def _is_last(theta: Tensor, index: Tensors) -> Tensor:
    """(B, T, 1, 1): the last step of each sequence."""
    return last_step(unmasked_steps(theta, index))[..., None, None]


def log_transitions(inputs: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    log_q = [omega.log_argmax(x) for _, x in _steps(theta, tape, index, omega)]
    if not log_q:
        return [torch.zeros_like(theta)]
    into_end = omega.log_argmax(tape[:, -1])[:, None, :, None]
    every = torch.stack(log_q, 1)
    every = torch.where(_is_last(theta, index), every + into_end, every)
    return [every.masked_fill(_skipped(theta, index), 0).to(theta.dtype)]


def log_transitions_jvp(
    inputs: Tensors, tape: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    tangent = _Tangent(theta, tape, z, index, omega)
    parts = []
    for t, x in _steps(theta, tape, index, omega):
        along = omega.log_argmax_jvp(tangent.q[t], tangent.y[t])
        parts.append(along.masked_fill(x == -math.inf, 0))
    if not parts:
        return [torch.zeros_like(theta)]
    into_end = omega.log_argmax_jvp(tangent.end_q, tangent.end_y).masked_fill(tape[:, -1] == -math.inf, 0)
    every = torch.stack(parts, 1)
    every = torch.where(_is_last(theta, index), every + into_end[:, None, :, None], every)
    return [every.masked_fill(_skipped(theta, index), 0).to(theta.dtype)]


def log_transitions_vjp(
    inputs: Tensors, tape: Tensor, cotangents: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (cotangent,) = inputs, cotangents
    given = widen(cotangent).masked_fill(_skipped(theta, index), 0)
    into_end = given.masked_fill(~_is_last(theta, index), 0).sum((1, 3)).masked_fill(tape[:, -1] == -math.inf, 0)
    parts = []
    for t, x in _steps(theta, tape, index, omega):
        q = omega.argmax(x)
        parts.append((q, omega.log_argmax_vjp(q, given[:, t].masked_fill(x == -math.inf, 0))))
    return [_walk_back(theta, index, omega.log_argmax_vjp(_end(theta, tape, index, omega), into_end), parts)]


def _draw(q: Tensor, uniform: Tensor) -> Tensor:
    """The index that each uniform (...) picks from the unnormalised q (..., S)."""
    cumulative = q.cumsum(-1)
    return (cumulative <= (uniform * cumulative[..., -1]).unsqueeze(-1)).sum(-1).clamp(max=q.shape[-1] - 1)


def sample(inputs: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Sequences (B, K, T), −1 where a step is skipped, drawn with ``uniforms`` (B, K, T): one for each step's state."""
    (theta,) = inputs
    kept = unmasked_steps(theta, index)
    last = last_step(kept)
    end = _end(theta, tape, index, omega)
    exists = end.any(-1, keepdim=True)
    state = torch.zeros_like(uniforms[..., :1], dtype=torch.int64).sum(-1)
    later = torch.zeros_like(tape[:, :1]).expand(-1, theta.shape[2], -1)  # q of the step after t
    states = []
    for t, x in reversed(list(_steps(theta, tape, index, omega))):
        here = kept[:, t, None]
        chosen = later.gather(1, state.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        q = torch.where(last[:, t, None, None], end.unsqueeze(1), chosen)
        state = torch.where(here, _draw(q, uniforms[..., t]), state)
        states.append(torch.where(here & exists, state, -1))
        later = torch.where(here.unsqueeze(-1), omega.argmax(x), later)
    return torch.stack(states[::-1], -1) if states else state.new_empty(uniforms.shape)


def topk(inputs: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    """Scores (B, k) and sequences (B, k, T), −1 where a step is skipped and past the number of sequences."""
    (theta,) = inputs
    batch, steps, size = theta.shape[:3]
    kept = unmasked_steps(theta, index)
    best = theta.new_full((batch, size, k), -math.inf, dtype=wide_dtype(theta.device))
    best[:, 0, 0] = 0
    back = []
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        ways = (edges.unsqueeze(-1) + best.unsqueeze(1)).flatten(2).sort(dim=-1, descending=True, stable=True)
        best = torch.where(kept[:, t, None, None], ways.values[..., :k], best)
        back.append(ways.indices[..., :k])
    ends = best.flatten(1).sort(dim=-1, descending=True, stable=True)
    scores, place = ends.values[:, :k], ends.indices[:, :k]
    empty = _is_empty(theta, index)
    scores = scores.masked_fill(empty.unsqueeze(-1), -math.inf)
    scores[:, 0] = scores[:, 0].masked_fill(empty, 0)
    sequences = []
    for t in reversed(range(steps)):
        here = kept[:, t, None]
        sequences.append(torch.where(here & (scores > -math.inf), place // k, -1))
        place = torch.where(here, back[t].flatten(1).gather(1, place), place)
    stacked = torch.stack(sequences[::-1], -1) if sequences else place.new_empty((batch, k, 0))
    return scores.to(theta.dtype).contiguous(), stacked
