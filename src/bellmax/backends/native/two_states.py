"""Chains of two states in one sweep, and their gradient in another: marginals, and weights of attention to segments.

The kernels are for negentropy and l2. They decline, with None, NaN among the scores, a step without a state, or an
infinite score that is shared: the general sweeps deal with those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous, empty_like, padded
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_SERVED = Kernel("negentropy"), Kernel("l2"), Kernel("tsallis", (2.0,))


class Marginals:
    """The marginals (B, T, 2) of a scored chain whose scores the batch shares, but for the emissions."""

    def serves(self, kernel: Kernel | None, theta: Tensors) -> bool:
        emissions, transitions, start, end = theta
        if kernel not in _SERVED or emissions.shape[-1] != 2 or not emissions.numel() or transitions.ndim != 3:
            return False
        return transitions.shape[0] == start.shape[0] == end.shape[0] == 1

    def run(self, kernel: Kernel, theta: Tensors, index: Tensors) -> Tensor | None:
        found = empty_like(theta[:1])[0]
        served = call("two_states_marginals", *contiguous((*theta, found)), *padded(index, 2), *kernel)
        return found if served else None

    def vjp(self, kernel: Kernel, theta: Tensors, index: Tensors, grad: Tensor) -> Tensors:
        gradients = empty_like(theta)
        call("two_states_marginals_vjp", *contiguous((*theta, grad, *gradients)), *padded(index, 2), *kernel)
        return gradients


class Weights:
    """The weights (..., Q, K) of attention to segments, from scores of that shape and transitions (2, 2).

    ``index`` is as for a chain, of the rows of queries that share their keys.
    """

    def serves(self, kernel: Kernel | None, scores: Tensor) -> bool:
        is_kind = scores.dtype in (torch.float32, torch.float64)
        return kernel in _SERVED and is_kind and scores.numel() > 0

    def run(
        self, kernel: Kernel, scale: float, scores: Tensor, transitions: Tensor, index: Tensors
    ) -> tuple[Tensor, Tensor] | None:
        """The weights and, for each query, the sum of the marginals that they come from."""
        found = empty_like([scores])[0]
        totals = scores.new_empty(scores.shape[:-1].numel())
        flat = contiguous((_by_query(scores), scale * transitions, _by_query(found), totals))
        served = call("two_states_weights", *flat, scale, *self._index(scores, index), *kernel)
        return (found, totals) if served else None

    def vjp(
        self, kernel: Kernel, scale: float, inputs: Tensors, found: Tensors, index: Tensors, grad: Tensor
    ) -> Tensors:
        scores, transitions = inputs
        weights, totals = found
        to_scores, to_transitions = empty_like(inputs)
        given = _by_query(scores), scale * transitions, _by_query(weights), totals, _by_query(grad)
        flat = contiguous((*given, _by_query(to_scores), to_transitions))
        call("two_states_weights_vjp", *flat, scale, *self._index(scores, index), *kernel)
        return to_scores, scale * to_transitions

    def _index(self, scores: Tensor, index: Tensors) -> list[object]:
        return [scores.shape[:-2].numel(), *padded(index, 2)]


def _by_query(tensor: Tensor) -> Tensor:
    """(..., Q, K) as (… · Q, K)."""
    return tensor.reshape(-1, tensor.shape[-1])
