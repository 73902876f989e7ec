"""The score of given states in a scored chain, and its gradient, in one pass over the labels."""

from __future__ import annotations

from torch import Tensor

from bellmax.backends.native.loading import call, contiguous, padded
from bellmax.programs import SCORED_CHAIN
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_ANY = Kernel("hard")  # an Ω has no part in it


class LabelScores:
    """⟨Y, θ⟩ of the sequences Y that labels (B, T) name."""

    def run(self, theta: Tensors, index: Tensors, labels: Tensor, ignored: int) -> Tensor | None:
        """(B,); None if a label is no state, or ``ignored``, or a score is infinite."""
        scores = theta[0].new_empty(labels.shape[0])
        given = contiguous((*theta, labels, scores))
        try:
            served = call("scored_chain_score", *given, ignored, *padded(index, 2), *_ANY)
        except ValueError:
            SCORED_CHAIN.check_index(theta, index)  # names the argument and the value
            raise
        return scores if served else None

    def subtract(self, gradients: Tensors, theta: Tensors, index: Tensors, labels: Tensor, seed: Tensor) -> None:
        """``gradients`` −= ``seed`` Y, in place."""
        given = contiguous((*theta, labels, seed, *gradients))
        call("scored_chain_subtract", *given, *padded(index, 2), *_ANY)
