"""Monotone alignments of frames with tokens: monotonic alignment search (Kim et al., 2020) under any Ω."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.decoded import Fault
from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import Lattice, LatticePaths, Move, WalkForm, cell, read_lengths
from bellmax.tensors import Gamma

_LATTICE = Lattice([Move(1, 0), Move(1, 1)], node=cell("scores"))  # ties prefer the first move: stay with the token


class DurationForm(WalkForm):
    """The number of frames of each token, (..., J) int64, 0 in the padding. In arguments, −1 is padding as well."""

    p: MonotonicAlignment
    is_complete = True

    @property
    def own_shape(self) -> Sequence[int | str]:
        return self.p.event_shape[1:]

    def of_walks(self, walks: Tensor) -> Tensor:
        i, j = walks[..., :2].unbind(-1)
        tokens = self.p.event_shape[1]
        counts = torch.zeros((*j.shape[:-1], tokens + 1), dtype=torch.int64, device=j.device)
        return counts.scatter_add(-1, torch.where(i < 0, tokens, j), torch.ones_like(j))[..., :-1]

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        frames = self.p.event_shape[0]
        end = decoded.clamp(0, frames + 1).cumsum(-1)
        frame = torch.arange(frames, device=decoded.device).expand(*decoded.shape[:-1], frames)
        ends = torch.zeros((*decoded.shape[:-1], frames + 1), dtype=torch.int64, device=decoded.device)
        token = ends.scatter_add(-1, end.clamp(max=frames), torch.ones_like(end)).cumsum(-1)[..., :-1]
        nodes, _ = self.number(frame.masked_fill(frame >= end[..., -1:], -1), token, 0)
        num_frames, num_tokens = self.p.lengths.unbind(-1)
        is_token = torch.arange(decoded.shape[-1], device=decoded.device) < num_tokens.unsqueeze(-1)
        has_frames = ((decoded >= 1) == is_token).all(-1) & (decoded >= -1).all(-1)
        return nodes, has_frames & (end[..., -1] == num_frames)

    def events(self, decoded: Tensor) -> Tensor:
        return self._events_of_cells(decoded)

    def fault(self, decoded: Tensor) -> Fault:
        frames, tokens = self.p.lengths.tolist()
        durations = decoded.tolist()
        if any(duration < 1 for duration in durations[:tokens]):
            return Fault((), f"must hold at least 1 frame for each of {tokens} tokens, got {durations}")
        return Fault((), f"must hold durations that add up to {frames} frames, got {durations}")


class MonotonicAlignment(LatticePaths):
    """A distribution over the monotonic alignments of T frames with J tokens, as in text-to-speech.

    An alignment assigns one token to each frame. The tokens keep their order, and each token has at least one frame.
    The first frame has the first token, and the last frame has the last token. The event of an alignment is a 0/1
    tensor (T, J). Entry ``[frame, token]`` is 1 if the frame has this token. The decoded form of an alignment is the
    number of frames of each token, integers (..., J), with 0 in the padding. The literature on text-to-speech has names
    for two of the results: ``decode()`` is called monotonic alignment search, and ``value`` under negentropy with γ = 1
    is called the forward-sum objective. ``expected_path`` (..., T, J) is the probability of each token at each frame.
    It is differentiable.

    If a batch member has more tokens than frames, it has no alignment, and its value is −∞. If J > T and ``lengths`` is
    not passed, the constructor raises ``ValueError``.

    Args:
        scores: The scores (..., T, J) ``[frame, token]``, usually log-likelihoods. −∞ forbids a token at a frame.
        lengths: A pair (frames, tokens): the number of frames of each batch member, from 1 to T, and the number of its
            tokens, from 1 to J. By default, these numbers are T and J. Each item of the pair is an integer tensor of
            the batch shape, or one number for the whole batch. Scores beyond these lengths are padding. Padding is
            ignored, may contain NaN and gets no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> scores = torch.tensor([[2.0, 0.0], [1.0, 1.5], [0.0, 1.0], [3.0, 0.0]])
    >>> p = bx.MonotonicAlignment(scores)
    >>> p.durations()
    tensor([1, 3])
    >>> p.expected_path
    tensor([[1.0000, 0.0000],
            [0.4535, 0.5465],
            [0.1220, 0.8780],
            [0.0000, 1.0000]])
    """

    _form_kind = DurationForm
    _size_argument = "lengths"
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
        # Under torch.export, comparing two sizes would add a constraint on them.
        if lengths is None and not torch.compiler.is_compiling() and shape[-1] > shape[-2]:
            raise ValueError(
                f"scores (..., T, J) must have at least as many frames as tokens, got {shape[-2]} frames and "
                f"{shape[-1]} tokens. Each token takes a frame; if scores are [token, frame], pass scores.mT"
            )
        tensors = read_lengths("scores", (scores, 2), lengths, (1, 1), (shape[-2], shape[-1]))
        super().__init__(_LATTICE, {"scores": scores}, grid=tensors, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """The number of frames and the number of tokens of each batch member, (..., 2) int64."""
        return self._lengths

    def durations(self) -> Tensor:
        """Return the number of frames of each token on the best path, (..., J) int64.

        The result equals the result of :meth:`decode`. The number of frames is 0 in the padding. If no path exists, all
        numbers of frames are 0. The expected durations are ``expected_path.sum(-2)``.
        """
        return self.decode()

    @property
    def marginals(self) -> Tensor:
        """Probability of each token at each frame, (..., T, J). Differentiable."""
        return self.expected_path
