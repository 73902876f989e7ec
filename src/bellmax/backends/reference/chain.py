"""The sweeps of a chain in plain torch, with values in the wide dtype (Algorithms 3 and 4 of the paper, corrected).

θ and ``index`` are described in :mod:`bellmax.programs.chain`. Before the first step every path is in state 0:
v_0 = (0, −∞, …, −∞). A masked step leaves the values of the states unchanged.

The edges into the end node have no potentials. ``log_transitions`` adds their log-probabilities to the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bellmax.programs import CHAIN
from bellmax.programs.chain import first_step, last_step, unmasked_steps
from bellmax.programs.checks import reject_overflow
from bellmax.regularizers import Hard, Regularizer
from bellmax.tensors import Tensors, wide_dtype, widen

__all__ = ["backward", "check", "empty_tape", "forward", "hessian", "log_transitions", "log_transitions_jvp"]
__all__ += ["log_transitions_vjp", "max_marginals", "node_values", "sample", "topk", "value"]

check = CHAIN.check


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    return theta[0].new_empty((theta[0].shape[0], *CHAIN.nodes(theta, index)), dtype=wide_dtype(theta[0].device))


def _is_masked(theta: Tensor, index: Tensors) -> Tensor:
    """Mask (B, T, 1, 1), True at the masked steps."""
    return ~unmasked_steps(theta, index)[..., None, None]


def _is_unreachable(theta: Tensor, index: Tensors) -> Tensor:
    """Mask (B, T, 1, S) of edges that no path uses: those that leave a state other than 0 before the first step."""
    state = torch.arange(theta.shape[-1], device=theta.device)
    return first_step(unmasked_steps(theta, index))[..., None, None] & (state > 0)


def _is_empty(theta: Tensor, index: Tensors) -> Tensor:
    """Mask (B,), True for sequences in which all steps are masked. Their value is 0."""
    return ~unmasked_steps(theta, index).any(-1)


def _edge_scores(theta: Tensor, index: Tensors) -> Tensor:
    """Return θ in the wide dtype, with 0 at masked steps and −∞ for edges that no path uses."""
    return widen(theta).masked_fill(_is_unreachable(theta, index), -math.inf).masked_fill(_is_masked(theta, index), 0)


def _initial_values(theta: Tensor) -> Tensor:
    """Return v_0, (B, S): 0 for state 0 and −∞ for the others."""
    v = theta.new_full((theta.shape[0], theta.shape[2]), -math.inf, dtype=wide_dtype(theta.device))
    return torch.cat((torch.zeros_like(v[:, :1]), v[:, 1:]), 1)


def forward(inputs: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    v = [_initial_values(theta)]
    is_masked = _is_masked(theta, index)[..., 0]
    for t, edges in enumerate(_edge_scores(theta, index).unbind(1)):
        v.append(torch.where(is_masked[:, t], v[-1], omega.max(edges + v[-1].unsqueeze(1))))
    value = omega.max(v[-1]).masked_fill(_is_empty(theta, index), 0).to(theta.dtype, copy=True)
    reject_overflow(value)
    return value, torch.stack(v, 1)


def value(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[0]


def _local_scores(theta: Tensor, tape: Tensor, index: Tensors) -> Iterator[tuple[int, Tensor]]:
    """Yield (t, x) with x = θ_t + v_{t−1}, shape (B, S, S), for t from the first step to the last."""
    for t, edges in enumerate(_edge_scores(theta, index).unbind(1)):
        yield t, edges + tape[:, t].unsqueeze(1)


def _propagate_back(theta: Tensor, index: Tensors, mass: Tensor, steps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Propagate mass (B, S) from the last step to the first, and return the mass of each edge, of θ's shape.

    At step t, an edge gets source + q · (mass of its current state), where (q, source) = steps[t]. A state before
    step t gets the sum over its edges.
    """
    is_masked = _is_masked(theta, index)
    edge_masses = []
    for t in reversed(range(theta.shape[1])):
        q, source = steps[t]
        edge_mass = (source + q * mass.unsqueeze(-1)).masked_fill(is_masked[:, t], 0)
        mass = torch.where(is_masked[:, t, 0], mass, edge_mass.sum(1))
        edge_masses.append(edge_mass)
    if not edge_masses:
        return torch.zeros_like(theta)
    return torch.stack(edge_masses[::-1], 1).to(theta.dtype)


def _end_probabilities(theta: Tensor, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Return the probabilities (B, S) of the edges into the end node, 0 for a fully masked sequence."""
    return omega.argmax(tape[:, -1]).masked_fill(_is_empty(theta, index).unsqueeze(-1), 0)


def _times_seed(edge_masses: Tensor, seed: Tensor) -> Tensors:
    """Multiply (B, T, S, S) by the seed (B,) of each sequence."""
    return [edge_masses * seed[:, None, None, None]]


def backward(inputs: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    zero = tape.new_zeros(())
    steps = [(omega.argmax(x), zero) for _, x in _local_scores(theta, tape, index)]
    return _times_seed(_propagate_back(theta, index, _end_probabilities(theta, tape, index, omega), steps), seed)


class _Tangent:
    """The tangent forward sweep: derivatives v̇ of the state values along the direction z.

    ``q`` and ``y`` hold, for each step, the probabilities and the tangents z + v̇ of its edges, (B, S, S). ``end_q`` and
    ``end_y``, (B, S), are the same for the edges into the end node.
    """

    def __init__(self, theta: Tensor, tape: Tensor, z: Tensor, index: Tensors, omega: Regularizer) -> None:
        is_masked = _is_masked(theta, index)
        self.q, self.y = [], []
        v_dot = torch.zeros_like(tape[:, 0])
        for t, x in _local_scores(theta, tape, index):
            q = omega.argmax(x)
            y = (widen(z[:, t]) + v_dot.unsqueeze(1)).masked_fill(is_masked[:, t] | (x == -math.inf), 0)
            v_dot = torch.where(is_masked[:, t, 0], v_dot, (q * y.masked_fill(q == 0, 0)).sum(-1))
            self.q.append(q)
            self.y.append(y)
        self.end_q = _end_probabilities(theta, tape, index, omega)
        self.end_y = v_dot


def hessian(
    inputs: Tensors, tape: Tensor, seed: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    tangent = _Tangent(theta, tape, z, index, omega)
    is_masked = _is_masked(theta, index)
    mass = tangent.end_q
    mass_dot = omega.jacobian_product(mass, tangent.end_y.masked_fill(mass == 0, 0))
    steps = []
    for t in reversed(range(theta.shape[1])):
        q = tangent.q[t]
        q_dot = omega.jacobian_product(q, tangent.y[t].masked_fill(q == 0, 0))
        source = q_dot.masked_fill(mass.unsqueeze(-1) == 0, 0) * mass.unsqueeze(-1)
        steps.append((q, source))
        mass = torch.where(is_masked[:, t, 0], mass, (q * mass.unsqueeze(-1)).sum(1))
    return _times_seed(_propagate_back(theta, index, mass_dot, steps[::-1]), seed)


def _is_last_step(theta: Tensor, index: Tensors) -> Tensor:
    """Mask (B, T, 1, 1), True at the last unmasked step of each sequence."""
    return last_step(unmasked_steps(theta, index))[..., None, None]


def log_transitions(inputs: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    log_q = [omega.log_argmax(x) for _, x in _local_scores(theta, tape, index)]
    if not log_q:
        return [torch.zeros_like(theta)]
    into_end = omega.log_argmax(tape[:, -1])[:, None, :, None]
    edges = torch.stack(log_q, 1)
    edges = torch.where(_is_last_step(theta, index), edges + into_end, edges)
    return [edges.masked_fill(_is_masked(theta, index), 0).to(theta.dtype)]


def log_transitions_jvp(
    inputs: Tensors, tape: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    tangent = _Tangent(theta, tape, z, index, omega)
    tangents = []
    for t, x in _local_scores(theta, tape, index):
        log_q_dot = omega.log_argmax_jvp(tangent.q[t], tangent.y[t])
        tangents.append(log_q_dot.masked_fill(x == -math.inf, 0))
    if not tangents:
        return [torch.zeros_like(theta)]
    into_end = omega.log_argmax_jvp(tangent.end_q, tangent.end_y).masked_fill(tape[:, -1] == -math.inf, 0)
    edges = torch.stack(tangents, 1)
    edges = torch.where(_is_last_step(theta, index), edges + into_end[:, None, :, None], edges)
    return [edges.masked_fill(_is_masked(theta, index), 0).to(theta.dtype)]


def log_transitions_vjp(
    inputs: Tensors, tape: Tensor, cotangents: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (cotangent,) = inputs, cotangents
    cotangent = widen(cotangent).masked_fill(_is_masked(theta, index), 0)
    at_last = cotangent.masked_fill(~_is_last_step(theta, index), 0)
    into_end = at_last.sum((1, 3)).masked_fill(tape[:, -1] == -math.inf, 0)
    steps = []
    for t, x in _local_scores(theta, tape, index):
        q = omega.argmax(x)
        steps.append((q, omega.log_argmax_vjp(q, cotangent[:, t].masked_fill(x == -math.inf, 0))))
    mass = omega.log_argmax_vjp(_end_probabilities(theta, tape, index, omega), into_end)
    return [_propagate_back(theta, index, mass, steps)]


def _draw(q: Tensor, uniform: Tensor) -> Tensor:
    """Return int64 indices (...), drawn from unnormalized probabilities q (..., S) by inverting their cumulative sum.

    ``uniform`` (...) holds numbers in [0, 1).
    """
    cumulative = q.cumsum(-1)
    return (cumulative <= (uniform * cumulative[..., -1]).unsqueeze(-1)).sum(-1).clamp(max=q.shape[-1] - 1)


def sample(inputs: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Return sequences (B, K, T), −1 at masked steps, drawn backwards with one of ``uniforms`` (B, K, T) per step."""
    (theta,) = inputs
    mask = unmasked_steps(theta, index)
    is_last = last_step(mask)
    end_q = _end_probabilities(theta, tape, index, omega)
    has_path = end_q.any(-1, keepdim=True)
    state = torch.zeros_like(uniforms[..., :1], dtype=torch.int64).sum(-1)
    next_q = torch.zeros_like(tape[:, :1]).expand(-1, theta.shape[2], -1)  # q of the next unmasked step
    states = []
    for t, x in reversed(list(_local_scores(theta, tape, index))):
        is_step = mask[:, t, None]
        into_state = next_q.gather(1, state.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        q = torch.where(is_last[:, t, None, None], end_q.unsqueeze(1), into_state)
        state = torch.where(is_step, _draw(q, uniforms[..., t]), state)
        states.append(torch.where(is_step & has_path, state, -1))
        next_q = torch.where(is_step.unsqueeze(-1), omega.argmax(x), next_q)
    return torch.stack(states[::-1], -1) if states else state.new_empty(uniforms.shape)


def topk(inputs: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    """Return scores (B, k) and sequences (B, k, T) of the k best paths, best first.

    Sequences are −1 at masked steps, and if there are fewer than k sequences.
    """
    (theta,) = inputs
    batch, steps, size = theta.shape[:3]
    mask = unmasked_steps(theta, index)
    best = theta.new_full((batch, size, k), -math.inf, dtype=wide_dtype(theta.device))
    best[:, 0, 0] = 0
    backpointers = []  # a pointer is state · k + rank
    for t, edges in enumerate(_edge_scores(theta, index).unbind(1)):
        candidates = (edges.unsqueeze(-1) + best.unsqueeze(1)).flatten(2).sort(dim=-1, descending=True, stable=True)
        best = torch.where(mask[:, t, None, None], candidates.values[..., :k], best)
        backpointers.append(candidates.indices[..., :k])
    ends = best.flatten(1).sort(dim=-1, descending=True, stable=True)
    scores, pointer = ends.values[:, :k], ends.indices[:, :k]
    is_empty = _is_empty(theta, index)
    scores = scores.masked_fill(is_empty.unsqueeze(-1), -math.inf)
    scores[:, 0] = scores[:, 0].masked_fill(is_empty, 0)
    sequences = []
    for t in reversed(range(steps)):
        is_step = mask[:, t, None]
        sequences.append(torch.where(is_step & (scores > -math.inf), pointer // k, -1))
        pointer = torch.where(is_step, backpointers[t].flatten(1).gather(1, pointer), pointer)
    stacked = torch.stack(sequences[::-1], -1) if sequences else pointer.new_empty((batch, k, 0))
    return scores.to(theta.dtype).contiguous(), stacked


def node_values(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    """Return the value of each state at each step, (B, T, S), −∞ at masked steps."""
    (theta,) = inputs
    values = forward(inputs, index, omega)[1][:, 1:]
    return values.masked_fill(_is_masked(theta, index)[..., 0], -math.inf).to(theta.dtype)


def max_marginals(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    """Return the score of the best sequence with each transition, (B, T, S, S), −∞ if there is none."""
    (theta,) = inputs
    before, edges, is_masked = forward(inputs, index, Hard())[1], _edge_scores(theta, index), _is_masked(theta, index)
    best = torch.empty_like(edges)
    after = torch.zeros_like(before[:, 0])  # the best score of the steps after t, by the state at step t
    for t in reversed(range(theta.shape[1])):
        onward = edges[:, t] + after.unsqueeze(-1)
        best[:, t] = onward + before[:, t].unsqueeze(1)
        after = torch.where(is_masked[:, t, 0], after, onward.amax(1))
    return best.masked_fill(is_masked, -math.inf).to(theta.dtype)
