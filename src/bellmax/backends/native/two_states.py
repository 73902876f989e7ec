"""Fused kernels for chains of two states: marginals, and weights of attention to segments.

One sweep computes the result and another one its gradient, under negentropy and l2. The kernels decline NaN scores,
steps at which both states are forbidden, and infinite scores that the batch shares.
"""

from __future__ import annotations

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
        weights = empty_like([scores])[0]
        totals = scores.new_empty(scores.shape[:-1].numel())
        tensors = contiguous((_by_query(scores), scale * transitions, _by_query(weights), totals))
        is_solved = call("two_states_weights", *tensors, scale, *_groups(problem), *omega)
        return AttentionWeights(weights, totals) if is_solved else None

    def vjp(self, problem: AttentionScores, saved: AttentionWeights, grad: Tensor) -> Tensors:
        """Gradients in the scores and in the transitions."""
        scores, transitions, _, scale, omega = problem
        score_grad, transition_grad = empty_like((scores, transitions))
        inputs = _by_query(scores), scale * transitions, _by_query(saved.weights), saved.totals, _by_query(grad)
        tensors = contiguous((*inputs, _by_query(score_grad), transition_grad))
        call("two_states_weights_vjp", *tensors, scale, *_groups(problem), *omega)
        return score_grad, scale * transition_grad


def _groups(problem: AttentionScores) -> list[object]:
    """The number of groups of queries that share their keys, and the lengths and mask of these keys."""
    return [problem.scores.shape[:-2].numel(), *padded(problem.lengths_and_mask, 2)]


def _by_query(tensor: Tensor) -> Tensor:
    """(..., Q, K) as (… · Q, K)."""
    return tensor.reshape(-1, tensor.shape[-1])
