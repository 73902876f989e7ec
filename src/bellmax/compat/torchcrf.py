"""A replacement for ``torchcrf``, the module of pytorch-crf 0.7.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bellmax.structures.chain import ScoredChain
from bellmax.transforms import is_readable


class CRF(nn.Module):
    """A linear-chain CRF with the arguments, parameters and results of pytorch-crf's ``CRF``.

    Shapes are (seq_length, batch_size, …), or (batch_size, seq_length, …) with ``batch_first``. A ``state_dict`` of the
    original loads here, and vice versa.

    Differences: a mask may be bool or of any other type, and holes in it are skipped (the original scores the tag of a
    hole as the previous tag, and takes the last tag from the wrong place); a tag out of range, also a negative one, is
    a ``ValueError``, but masked tags are ignored; NaN emissions are a ``ValueError``; states that no path reaches get
    zero gradients, not NaN; if no path exists, ``decode`` gives an empty list; half precision gives float32;
    ``torch.jit.script`` does not compile it, ``torch.compile`` does.

    Args:
        num_tags: S.
        batch_first: whether the batch is the first dimension.

    Attributes:
        start_transitions: (S,), the score of beginning with each tag.
        end_transitions: (S,), the score of ending with it.
        transitions: (S, S) ``[previous, current]``.

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
        """Log-likelihood of ``tags`` given ``emissions``.

        Args:
            emissions: (seq_length, batch_size, S), or batch first.
            tags: of an integer type, (seq_length, batch_size), or batch first.
            mask: of the tags' shape, True at the steps to keep; all by default. The first step must be kept.
            reduction: "none" for (batch_size,), "sum", "mean" over the batch, or "token_mean" over the steps kept.
        """
        self._validate(emissions, tags, mask)
        if reduction not in ("none", "sum", "mean", "token_mean"):
            raise ValueError(f"invalid reduction: {reduction}")
        p = self._distribution(emissions, mask)
        kept = p._unmasked
        tags = (tags if self.batch_first else tags.T).long()
        self._check_tags(tags, kept)
        likelihood = p._score_of(tags.masked_fill(~kept, 0)).to(p.value.dtype) - p.value
        if reduction == "none":
            return likelihood
        if reduction == "mean":
            return likelihood.mean()
        return likelihood.sum() if reduction == "sum" else likelihood.sum() / kept.sum()

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The best tags of each sequence, as lists: one tag for every step kept. Arguments as in ``forward``."""
        self._validate(emissions, None, mask)
        best = self._distribution(emissions, mask).best_sequence()
        return [[tag for tag in sequence if tag >= 0] for sequence in best.tolist()]

    def _distribution(self, emissions: Tensor, mask: Tensor | None) -> ScoredChain:
        if not self.batch_first:
            emissions, mask = emissions.transpose(0, 1), None if mask is None else mask.T
        mask = None if mask is None else mask.bool()
        start, end = self.start_transitions, self.end_transitions
        return ScoredChain(emissions, self.transitions.T, start=start, end=end, mask=mask)

    def _check_tags(self, tags: Tensor, kept: Tensor) -> None:
        outside = kept & ((tags < 0) | (tags >= self.num_tags))
        if is_readable(outside) and bool(outside.any()):
            sequence, place = outside.nonzero()[0].tolist()
            raise ValueError(
                f"tags must be from 0 to {self.num_tags - 1}, "
                f"got {int(tags[sequence, place])} in sequence {sequence} at step {place}"
            )

    def _validate(self, emissions: Tensor, tags: Tensor | None, mask: Tensor | None) -> None:
        if emissions.dim() != 3:
            raise ValueError(f"emissions must have dimension of 3, got {emissions.dim()}")
        if emissions.size(2) != self.num_tags:
            raise ValueError(f"expected last dimension of emissions is {self.num_tags}, got {emissions.size(2)}")
        if tags is not None and (tags.is_floating_point() or tags.dtype == torch.bool):
            raise ValueError(f"tags must be of an integer type, got {tags.dtype}")
        if not emissions.size(1 if self.batch_first else 0):
            raise ValueError(f"emissions must have at least one step, got shape {tuple(emissions.shape)}")
        for name, given in (("tags", tags), ("mask", mask)):
            if given is not None and given.shape != emissions.shape[:2]:
                raise ValueError(
                    f"the first two dimensions of emissions and {name} must match, "
                    f"got {tuple(emissions.shape[:2])} and {tuple(given.shape)}"
                )
        if mask is not None and is_readable(mask) and not (mask[:, 0] if self.batch_first else mask[0]).all():
            raise ValueError("mask of the first timestep must all be on")
