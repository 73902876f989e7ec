"""Fused kernels for chains of two states: marginals, and weights of attention to segments.

One sweep computes the result and another one its gradient, under negentropy and l2. The kernels decline NaN scores,
steps at which both states are forbidden, and infinite scores that the batch shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.backends.fused import AttentionScores, AttentionWeights, TwoStateChain
from bellmax.backends.native.loading import call, contiguous, empty_like, padded
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_OMEGAS = Kernel("negentropy"), Kernel("l2"), Kernel("tsallis", (2.0,))


class NativeMarginals:
    """Marginals (B, T, 2) of a chain of two states."""

    def supports(self, problem: TwoStateChain) -> bool:
        emissions, transitions, start, end = problem.theta
        if problem.omega not in _OMEGAS or emissions.shape[-1] != 2 or not emissions.numel() or transitions.ndim != 3:
            return False
        return transitions.shape[0] == start.shape[0] == end.shape[0] == 1

    def run(self, problem: TwoStateChain) -> Tensor | None:
        theta, lengths_and_mask, omega = problem
        marginals = empty_like(theta[:1])[0]
        tensors = contiguous((*theta, marginals))
        is_solved = call("two_states_marginals", *tensors, *padded(lengths_and_mask, 2), *omega)
        return marginals if is_solved else None

    def vjp(self, problem: TwoStateChain, saved: None, grad: Tensor) -> Tensors:
        theta, lengths_and_mask, omega = problem
        gradients = empty_like(theta)
        tensors = contiguous((*theta, grad, *gradients))
        call("two_states_marginals_vjp", *tensors, *padded(lengths_and_mask, 2), *omega)
        return gradients


class NativeWeights:
    """Weights (..., Q, K) of attention to segments: marginals of state 1, divided by their sum."""

    def supports(self, problem: AttentionScores) -> bool:
        scores = problem.scores
        return problem.omega in _OMEGAS and scores.dtype in (torch.float32, torch.float64) and scores.numel() > 0

    def run(self, problem: AttentionScores) -> AttentionWeights | None:
        scores, transitions, _, scale, omega = problem
        matrices, weights = (scale * transitions).reshape(-1, 2, 2), _like_scores(problem)
        totals = scores.new_empty(len(matrices), scores.shape[:-1].numel() // len(matrices))
        options = scale, *_groups(problem), *omega
        for tensors in zip(_heads(problem, scores), matrices, _heads(problem, weights), totals, strict=True):
            if not call("two_states_weights", *tensors, *options):
                return None
        return AttentionWeights(weights, totals)

    def vjp(self, problem: AttentionScores, saved: AttentionWeights, grad: Tensor) -> Tensors:
        """Gradients in the scores and in the transitions."""
        scores, transitions, _, scale, omega = problem
        matrices, score_grad = (scale * transitions).reshape(-1, 2, 2), _like_scores(problem)
        transition_grad = torch.empty_like(matrices)
        options = scale, *_groups(problem), *omega
        of_scores, weights, of_grad, out = (_heads(problem, t) for t in (scores, saved.weights, grad, score_grad))
        for tensors in zip(of_scores, matrices, weights, saved.totals, of_grad, out, transition_grad, strict=True):
            call("two_states_weights_vjp", *tensors, *options)
        return score_grad, scale * transition_grad.reshape(transitions.shape)


def _groups(problem: AttentionScores) -> list[object]:
    """The number of groups of queries that share their keys, and the lengths and mask of these keys."""
    groups = len(problem.lengths_and_mask[0]) if problem.lengths_and_mask else 1
    return [groups, *padded(problem.lengths_and_mask, 2)]


def _like_scores(problem: AttentionScores) -> Tensor:
    """An output in the shape of the scores, in which the numbers of each head are contiguous."""
    shape = problem.scores.shape
    if problem.transitions.ndim == 2:
        return problem.scores.new_empty(shape)
    return problem.scores.new_empty(shape[-3], *shape[:-3], *shape[-2:]).movedim(0, -3)


def _heads(problem: AttentionScores, tensor: Tensor) -> Sequence[Tensor]:
    """Contiguous tensors (… · Q, K), one for each head, from numbers in the shape of the scores. Views if possible."""
    if problem.transitions.ndim == 2:
        return [tensor.reshape(-1, tensor.shape[-1]).contiguous()]
    return tensor.movedim(-3, 0).flatten(1, -2).contiguous().unbind()
