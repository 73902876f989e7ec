"""Monotone alignments of frames with tokens: monotonic alignment search (Kim et al., 2020) under any Ω."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import Lattice, LatticePaths, Move, cell, read_lengths
from bellmax.tensors import Gamma

_LATTICE = Lattice([Move(1, 0), Move(1, 1)], node=cell("scores"))  # among equals, a frame stays with its token


class Monotone(LatticePaths):
    """A distribution over the monotone alignments of T frames with J tokens, given the score of each frame and token.

    Each frame belongs to one token, the first to the first and the last to the last; tokens come in order, and none is
    left out. As an event an alignment is a 0/1 tensor (T, J) with a 1 for each frame. ``best_path()`` is monotonic
    alignment search, ``value`` under negentropy the forward sum, and ``expected_path`` (..., T, J) the probability of
    each token at each frame, differentiable. A pair with more tokens than frames has no alignment, and the
    value −∞. If ``lengths`` are not given, more tokens than frames raise a ``ValueError``.

    Args:
        scores: (..., T, J) ``[frame, token]``, usually log-likelihoods; −∞ forbids a frame for a token.
        lengths: (frames, tokens), each integers of the batch shape or a number, at least 1. The rest is padding: it is
            ignored, may hold NaN and gets no gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> scores = torch.tensor([[2.0, 0.0], [1.0, 1.5], [0.0, 1.0], [3.0, 0.0]])
    >>> p = bx.Monotone(scores)
    >>> p.durations()
    tensor([1, 3])
    >>> p.expected_path
    tensor([[1.0000, 0.0000],
            [0.4535, 0.5465],
            [0.1220, 0.8780],
            [0.0000, 1.0000]])
    """

    _has_unique_paths = True

    @answers_near_misses
    def __init__(
        self,
        scores: Tensor,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("scores", scores).shape
        if len(shape) < 2 or 0 in shape[-2:]:
            raise ValueError(f"scores must have shape (..., T, J) with T, J >= 1, got {tuple(shape)}")
        # torch.export would take the comparison of two sizes for a constraint on them.
        if lengths is None and not torch.compiler.is_compiling() and shape[-1] > shape[-2]:
            raise ValueError(
                f"scores (..., T, J) must have at least as many frames as tokens, got {shape[-2]} frames and "
                f"{shape[-1]} tokens. Each token takes a frame; if scores are [token, frame], pass scores.mT"
            )
        own = read_lengths("scores", (scores, 2), lengths, (1, 1), (shape[-2], shape[-1]))
        super().__init__(_LATTICE, {"scores": scores}, lengths=own, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """(..., 2) int64: the frames and the tokens of each pair."""
        return self._lengths

    def durations(self) -> Tensor:
        """How many frames each token has on the best path, (..., J) int64; 0 for padding, and where there is no path.

        The expected durations are ``expected_path.sum(-2)``.
        """
        return self.best_path().sum(-2).to(torch.int64)
