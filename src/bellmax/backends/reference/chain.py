"""The sweeps of a chain in plain torch, state values in float64 (Algorithms 3 and 4 of the paper, mended).

``theta`` is (B, T, S, S) ``[t, current, previous]`` and ``index`` is (lengths,). Before the first step every path is in
state 0: v_0 = (0, −∞, …, −∞). A step past the end of a sequence passes everything on unchanged.

The edges into the end node have no potential of their own. Whatever belongs to them is counted with the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bellmax.backends.potentials import reject
from bellmax.regularizers import Regularizer

index_is_batched = True


def tape_shape(theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[int, ...]:
    return theta.shape[0], theta.shape[1] + 1, theta.shape[2]


def _padding(theta: Tensor, index: Sequence[Tensor]) -> Tensor:
    """(B, T, 1, 1): steps past the end."""
    steps = torch.arange(theta.shape[1], device=theta.device)
    return (steps >= index[0].unsqueeze(-1))[..., None, None]


def empty_paths(theta: Tensor, count: int) -> Tensor:
    return theta.new_empty(theta.shape[0], count, theta.shape[1], dtype=torch.int64)


def check_index(theta: Tensor, index: Sequence[Tensor]) -> None:
    lengths, steps = index[0], theta.shape[1]
    if lengths.device.type == "cpu" and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= steps:
        batch = int(((lengths < 0) | (lengths > steps)).nonzero()[0])
        raise ValueError(
            f"lengths must be from 0 to {steps}, got {int(lengths[batch])} for batch element {batch} (batch flattened)"
        )


def check(theta: Tensor, index: Sequence[Tensor]) -> None:
    check_index(theta, index)
    bad = ~(theta < math.inf) & ~_padding(theta, index)
    bad[:, :1, :, 1:] = False
    reject("potentials", theta, bad)


def _edges(theta: Tensor, index: Sequence[Tensor]) -> Tensor:
    """θ in float64, 0 in the padding, −∞ where the first step has no edge."""
    nowhere = torch.zeros(theta.shape[1:], dtype=torch.bool, device=theta.device)
    nowhere[:1, :, 1:] = True
    return theta.double().masked_fill(nowhere, -math.inf).masked_fill(_padding(theta, index), 0)


def _before_first(theta: Tensor) -> Tensor:
    """v_0, (B, S)."""
    v = theta.new_full((theta.shape[0], theta.shape[2]), -math.inf, dtype=torch.float64)
    return torch.cat((torch.zeros_like(v[:, :1]), v[:, 1:]), 1)


def forward(theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[Tensor, Tensor]:
    v = [_before_first(theta)]
    padding = _padding(theta, index)[..., 0]
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        v.append(torch.where(padding[:, t], v[-1], omega.max(edges + v[-1].unsqueeze(1))))
    value = omega.max(v[-1]).masked_fill(index[0] == 0, 0)
    return value.to(theta.dtype, copy=True), torch.stack(v, 1)


def _steps(theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Iterator[tuple[int, Tensor]]:
    """(t, x) with x = θ_t + v_{t−1}, (B, S, S), first to last."""
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        yield t, edges + tape[:, t].unsqueeze(1)


def _walk_back(theta: Tensor, index: Sequence[Tensor], mass: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Run mass (B, S) from the last step to the first: a step turns it into source + q∘mass, (q, source) = parts[t]."""
    padding = _padding(theta, index)
    spread = []
    for t in reversed(range(theta.shape[1])):
        q, source = parts[t]
        e = (source + q * mass.unsqueeze(-1)).masked_fill(padding[:, t], 0)
        mass = torch.where(padding[:, t, 0], mass, e.sum(1))
        spread.append(e)
    if not spread:
        return torch.zeros_like(theta)
    return torch.stack(spread[::-1], 1).to(theta.dtype)


def _end(tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    """q of the edges into the end node, (B, S)."""
    return omega.argmax(tape[:, -1]).masked_fill((index[0] == 0).unsqueeze(-1), 0)


def backward(theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    zero = tape.new_zeros(())
    parts = [(omega.argmax(x), zero) for _, x in _steps(theta, tape, index, omega)]
    return _walk_back(theta, index, _end(tape, index, omega), parts)


class _Tangent:
    """The tangent forward sweep: q of every step, y = z + v̇ along its edges, and v̇ at the end."""

    def __init__(self, theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> None:
        padding = _padding(theta, index)
        self.q, self.y = [], []
        v_dot = torch.zeros_like(tape[:, 0])
        for t, x in _steps(theta, tape, index, omega):
            q = omega.argmax(x)
            y = (z[:, t].double() + v_dot.unsqueeze(1)).masked_fill(padding[:, t] | (x == -math.inf), 0)
            v_dot = torch.where(padding[:, t, 0], v_dot, (q * y.masked_fill(q == 0, 0)).sum(-1))
            self.q.append(q)
            self.y.append(y)
        self.end_q = _end(tape, index, omega)
        self.end_y = v_dot


def hessian(theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    tangent = _Tangent(theta, tape, z, index, omega)
    padding = _padding(theta, index)
    mass = tangent.end_q
    mass_dot = omega.jacobian_product(mass, tangent.end_y.masked_fill(mass == 0, 0))
    parts = []
    for t in reversed(range(theta.shape[1])):
        q = tangent.q[t]
        q_dot = omega.jacobian_product(q, tangent.y[t].masked_fill(q == 0, 0))
        source = q_dot.masked_fill(mass.unsqueeze(-1) == 0, 0) * mass.unsqueeze(-1)
        parts.append((q, source))
        mass = torch.where(padding[:, t, 0], mass, (q * mass.unsqueeze(-1)).sum(1))
    return _walk_back(theta, index, mass_dot, parts[::-1])


def _is_last(theta: Tensor, index: Sequence[Tensor]) -> Tensor:
    """(B, T, 1, 1): the last step of each sequence."""
    steps = torch.arange(theta.shape[1], device=theta.device)
    return (steps + 1 == index[0].unsqueeze(-1))[..., None, None]


def log_transitions(theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    log_q = [omega.log_argmax(x) for _, x in _steps(theta, tape, index, omega)]
    if not log_q:
        return torch.zeros_like(theta)
    into_end = omega.log_argmax(tape[:, -1])[:, None, :, None]
    every = torch.stack(log_q, 1)
    every = torch.where(_is_last(theta, index), every + into_end, every)
    return every.masked_fill(_padding(theta, index), 0).to(theta.dtype)


def log_transitions_jvp(theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    tangent = _Tangent(theta, tape, z, index, omega)
    parts = []
    for t, x in _steps(theta, tape, index, omega):
        along = omega.log_argmax_jvp(tangent.q[t], tangent.y[t])
        parts.append(along.masked_fill(x == -math.inf, 0))
    if not parts:
        return torch.zeros_like(theta)
    into_end = omega.log_argmax_jvp(tangent.end_q, tangent.end_y).masked_fill(tape[:, -1] == -math.inf, 0)
    every = torch.stack(parts, 1)
    every = torch.where(_is_last(theta, index), every + into_end[:, None, :, None], every)
    return every.masked_fill(_padding(theta, index), 0).to(theta.dtype)


def log_transitions_vjp(
    theta: Tensor, tape: Tensor, cotangent: Tensor, index: Sequence[Tensor], omega: Regularizer
) -> Tensor:
    given = cotangent.double().masked_fill(_padding(theta, index), 0)
    into_end = given.masked_fill(~_is_last(theta, index), 0).sum((1, 3)).masked_fill(tape[:, -1] == -math.inf, 0)
    parts = []
    for t, x in _steps(theta, tape, index, omega):
        q = omega.argmax(x)
        parts.append((q, omega.log_argmax_vjp(q, given[:, t].masked_fill(x == -math.inf, 0))))
    return _walk_back(theta, index, omega.log_argmax_vjp(_end(tape, index, omega), into_end), parts)


def _draw(q: Tensor, uniform: Tensor) -> Tensor:
    """The index that each uniform (...) picks from the unnormalised q (..., S)."""
    cumulative = q.cumsum(-1)
    return (cumulative <= (uniform * cumulative[..., -1]).unsqueeze(-1)).sum(-1).clamp(max=q.shape[-1] - 1)


def sample(theta: Tensor, tape: Tensor, uniforms: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    """Sequences (B, K, T), −1 past the end, drawn with ``uniforms`` (B, K, T): one for the state at each step."""
    lengths = index[0].unsqueeze(-1)
    end = _end(tape, index, omega)
    exists = end.any(-1, keepdim=True)
    state = torch.zeros_like(uniforms[..., 0], dtype=torch.int64)
    states = []
    later = None  # q of the step after t
    for t, x in reversed(list(_steps(theta, tape, index, omega))):
        drawn = _draw(end.unsqueeze(1), uniforms[..., t])
        if later is not None:
            chosen = later.gather(1, state.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            drawn = torch.where(lengths == t + 1, drawn, _draw(chosen, uniforms[..., t]))
        state = drawn
        states.append(torch.where((t < lengths) & exists, state, -1))
        later = omega.argmax(x)
    return torch.stack(states[::-1], -1) if states else state.new_empty(uniforms.shape)


def topk(theta: Tensor, k: int, index: Sequence[Tensor], omega: Regularizer) -> tuple[Tensor, Tensor]:
    """Scores (B, k) and sequences (B, k, T), −1 past the end and past the number of sequences."""
    batch, steps, size = theta.shape[:3]
    lengths = index[0].reshape(-1, 1, 1)
    best = theta.new_full((batch, size, k), -math.inf, dtype=torch.float64)
    best[:, 0, 0] = 0
    back = []
    for t, edges in enumerate(_edges(theta, index).unbind(1)):
        ways = (edges.unsqueeze(-1) + best.unsqueeze(1)).flatten(2).sort(dim=-1, descending=True, stable=True)
        best = torch.where(t < lengths, ways.values[..., :k], best)
        back.append(ways.indices[..., :k])
    ends = best.flatten(1).sort(dim=-1, descending=True, stable=True)
    scores, place = ends.values[:, :k], ends.indices[:, :k]
    scores = scores.masked_fill(index[0].unsqueeze(-1) == 0, -math.inf)
    scores[:, 0] = scores[:, 0].masked_fill(index[0] == 0, 0)
    sequences = []
    for t in reversed(range(steps)):
        state = place // k
        inside = t < lengths[..., 0]
        sequences.append(torch.where(inside & (scores > -math.inf), state, -1))
        place = torch.where(inside, back[t].flatten(1).gather(1, place), place)
    stacked = torch.stack(sequences[::-1], -1) if sequences else place.new_empty((batch, k, 0))
    return scores.to(theta.dtype).contiguous(), stacked
