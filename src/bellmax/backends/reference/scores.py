"""The sweeps of a chain from scores: those of the dense chain, whose potentials are a linear function of the scores.

θ is emissions (B, T, S), transitions (B or 1, T−1 or 1, S, S) ``[current, previous]``, start and end (B or 1, S);
``index`` as for the dense chain. Here the potentials are built; the native backend does without.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.backends.potentials import Tensors, reject
from bellmax.backends.reference import chain
from bellmax.backends.reference.chain import check_index, empty_paths, empty_tape, first_step, kept_steps, last_step
from bellmax.regularizers import Regularizer

__all__ = ["backward", "check", "check_index", "dense", "empty_paths", "empty_tape", "forward", "hessian"]
__all__ += ["index_is_batched", "sample", "topk"]

index_is_batched = True


def dense(theta: Tensors, index: Tensors) -> Tensor:
    """Potentials (B, T, S, S). The first step has no transition, only the start, for the previous state 0."""
    emissions, transitions, start, end = theta
    steps, states = emissions.shape[1:]
    kept = kept_steps(index, steps)
    between = transitions.expand(-1, max(steps - 1, 0), -1, -1)
    into = torch.cat((between.new_zeros((between.shape[0], min(steps, 1), states, states)), between), 1)
    into = torch.where(first_step(kept)[..., None, None], start[:, None, :, None], into)
    at = torch.where(last_step(kept).unsqueeze(-1), emissions + end.unsqueeze(1), emissions)
    return into + at.unsqueeze(-1)


def _onto_scores(edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
    """The transpose of ``dense``."""
    kept = kept_steps(index, edges.shape[1])
    first, last = first_step(kept)[..., None, None], last_step(kept).unsqueeze(-1)
    emissions = edges.sum(-1)
    transitions = edges.masked_fill(first, 0)[:, 1:]
    start = edges.masked_fill(~first, 0).sum((1, 3))
    end = emissions.masked_fill(~last, 0).sum(1)
    parts = zip((emissions, transitions, start, end), theta, strict=True)
    return [part.sum_to_size(t.shape).contiguous() if part.numel() else torch.zeros_like(t) for part, t in parts]


def check(theta: Tensors, index: Tensors) -> None:
    check_index(theta, index)
    emissions, transitions, start, end = theta
    kept = kept_steps(index, emissions.shape[1])
    reject("emissions", emissions, ~(emissions < math.inf) & kept.unsqueeze(-1))
    linked = (kept & ~first_step(kept))[:, 1:]  # (B, T−1): whether a transition is used
    for dim in (0, 1):
        if transitions.shape[dim] == 1:
            linked = linked.any(dim, keepdim=True)
    reject("transitions", transitions, ~(transitions < math.inf) & linked[..., None, None])
    visited = kept.any(1, keepdim=True)
    for name, score in (("start", start), ("end", end)):
        used = visited.any(0, keepdim=True) if score.shape[0] == 1 else visited
        reject(name, score, ~(score < math.inf) & used)


def forward(theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    return chain.forward([dense(theta, index)], index, omega)


def backward(theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (path,) = chain.backward([dense(theta, index)], tape, seed, index, omega)
    return _onto_scores(path, theta, index)


def hessian(theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
    (product,) = chain.hessian([dense(theta, index)], tape, seed, [dense(z, index)], index, omega)
    return _onto_scores(product, theta, index)


def sample(theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    return chain.sample([dense(theta, index)], tape, uniforms, index, omega)


def topk(theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    return chain.topk([dense(theta, index)], k, index, omega)
