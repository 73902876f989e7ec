"""Fused kernel: the score of label sequences in a scored chain, and its gradient, in one pass over the labels."""

from __future__ import annotations

from torch import Tensor

from bellmax.backends.fused import LabelledChain
from bellmax.backends.native.loading import call, contiguous, padded
from bellmax.programs import SCORED_CHAIN
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_UNUSED = Kernel("hard")  # scores do not depend on Ω, but every binding takes one


class NativeLabelScores:
    """⟨Y, θ⟩ for the paths Y that labels (B, T) describe."""

    def supports(self, problem: LabelledChain) -> bool:
        return True

    def run(self, problem: LabelledChain) -> Tensor | None:
        theta, lengths_and_mask, labels, ignored = problem
        scores = theta[0].new_empty(labels.shape[0])
        tensors = contiguous((*theta, labels, scores))
        try:
            is_scored = call("scored_chain_score", *tensors, ignored, *padded(lengths_and_mask, 2), *_UNUSED)
        except ValueError:
            SCORED_CHAIN.check_index(theta, lengths_and_mask)  # its error names the argument and the value
            raise
        return scores if is_scored else None

    def subtract_vjp(self, gradients: Tensors, problem: LabelledChain, grad: Tensor) -> None:
        tensors = contiguous((*problem.theta, problem.labels, grad, *gradients))
        call("scored_chain_subtract", *tensors, *padded(problem.lengths_and_mask, 2), *_UNUSED)
