"""A replacement for ``torchcrf``, the module of pytorch-crf 0.7.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bellmax.modes import is_readable
from bellmax.structures.chain import ScoredChain

__all__ = ["CRF"]


class CRF(nn.Module):
    """A linear-chain CRF with the arguments, parameters and results of pytorch-crf's ``CRF``.

    Shapes are (seq_length, batch_size, …), or (batch_size, seq_length, …) with ``batch_first``. This class and the
    original can load each other's ``state_dict``.

    Differences from the original:

    - A mask may have any dtype. If a mask has gaps (masked steps between unmasked steps), the gaps are skipped. (The
      original scores the tag in a gap as the previous tag, and reads the last tag at the wrong step.)
    - A tag out of range, including a negative tag, raises ``ValueError``. Masked tags are ignored. NaN emissions raise
      ``ValueError``.
    - States that no path reaches get zero gradients, not NaN. If no path exists, ``decode`` returns an empty list.
    - Half precision gives float32.
    - ``torch.compile`` works. ``torch.jit.script`` does not work.

    Args:
        num_tags: The number S of tags.
        batch_first: If True, the batch is the first dimension. Default False.

    Attributes:
        start_transitions: The scores (S,) of the first tag.
        end_transitions: The scores (S,) of the last tag.
        transitions: The scores (S, S) ``[previous, current]`` of two adjacent tags.

    >>> _ = torch.manual_seed(0)
    >>> crf = CRF(num_tags=3)
    >>> emissions, tags = torch.randn(4, 2, 3), torch.randint(3, (4, 2))  # four steps, two sequences
    >>> mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]], dtype=torch.bool)
    >>> loss = -crf(emissions, tags, mask, reduction="mean")              # a log-likelihood, to be negated
    >>> loss.backward()
    >>> [len(best) for best in crf.decode(emissions, mask)]
    [4, 2]
    """

    def __init__(self, num_tags: int, batch_first: bool = False) -> None:
        if num_tags <= 0:
            raise ValueError(f"invalid number of tags: {num_tags}")
        super().__init__()
        self.num_tags = num_tags
        self.batch_first = batch_first
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from the uniform distribution on [−0.1, 0.1], in the original's order."""
        for parameter in (self.start_transitions, self.end_transitions, self.transitions):
            nn.init.uniform_(parameter, -0.1, 0.1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_tags={self.num_tags})"

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum") -> Tensor:
        """Return the log-likelihood of ``tags`` given ``emissions``.

        Args:
            emissions: The scores (seq_length, batch_size, S), or batch first.
            tags: Integers (seq_length, batch_size), or batch first.
            mask: A mask of the tags' shape, True at the steps to keep, default all. It must be True at the first step.
            reduction: "none" for the shape (batch_size,), "sum" (the default), "mean" over the batch, or "token_mean"
                over the unmasked steps.
        """
        self._validate(emissions, tags, mask)
        if reduction not in ("none", "sum", "mean", "token_mean"):
            raise ValueError(f"invalid reduction: {reduction}")
        p = self._distribution(emissions, mask)
        is_step = p._unmasked
        tags = (tags if self.batch_first else tags.T).long()
        self._check_tags(tags, is_step)
        likelihood = p._score_of(tags.masked_fill(~is_step, 0)).to(p.value.dtype) - p.value
        if reduction == "none":
            return likelihood
        if reduction == "mean":
            return likelihood.mean()
        return likelihood.sum() if reduction == "sum" else likelihood.sum() / is_step.sum()

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """Return the best tags of each sequence as a list, with one tag for each unmasked step.

        See ``forward`` for the arguments.
        """
        self._validate(emissions, None, mask)
        best = self._distribution(emissions, mask).decode()
        return [[tag for tag in sequence if tag >= 0] for sequence in best.tolist()]

    def _distribution(self, emissions: Tensor, mask: Tensor | None) -> ScoredChain:
        """Return the distribution over sequences of tags, with the batch as the first dimension."""
        if not self.batch_first:
            emissions, mask = emissions.transpose(0, 1), None if mask is None else mask.T
        mask = None if mask is None else mask.bool()
        start, end = self.start_transitions, self.end_transitions
        return ScoredChain(emissions, self.transitions.T, start=start, end=end, mask=mask)

    def _check_tags(self, tags: Tensor, mask: Tensor) -> None:
        """Raise ``ValueError`` if an unmasked tag is out of range. Both arguments are (batch_size, seq_length)."""
        is_invalid = mask & ((tags < 0) | (tags >= self.num_tags))
        if is_readable(is_invalid) and bool(is_invalid.any()):
            sequence, step = is_invalid.nonzero()[0].tolist()
            raise ValueError(
                f"tags must be from 0 to {self.num_tags - 1}, "
                f"got {int(tags[sequence, step])} in sequence {sequence} at step {step}"
            )

    def _validate(self, emissions: Tensor, tags: Tensor | None, mask: Tensor | None) -> None:
        """Check shapes, the dtype of the tags and the first step of the mask, with the original's messages."""
        if emissions.dim() != 3:
            raise ValueError(f"emissions must have dimension of 3, got {emissions.dim()}")
        if emissions.size(2) != self.num_tags:
            raise ValueError(f"expected last dimension of emissions is {self.num_tags}, got {emissions.size(2)}")
        if tags is not None and (tags.is_floating_point() or tags.dtype == torch.bool):
            raise ValueError(f"tags must be of an integer type, got {tags.dtype}")
        if not emissions.size(1 if self.batch_first else 0):
            raise ValueError(f"emissions must have at least one step, got shape {tuple(emissions.shape)}")
        for name, tensor in (("tags", tags), ("mask", mask)):
            if tensor is not None and tensor.shape != emissions.shape[:2]:
                raise ValueError(
                    f"the first two dimensions of emissions and {name} must match, "
                    f"got {tuple(emissions.shape[:2])} and {tuple(tensor.shape)}"
                )
        if mask is not None and is_readable(mask) and not (mask[:, 0] if self.batch_first else mask[0]).all():
            raise ValueError("mask of the first timestep must all be on")
