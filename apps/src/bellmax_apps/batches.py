"""Batches of sequences of similar length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def batches_of(
    order: Sequence[int],
    lengths: Sequence[int],
    tokens: int,
    sequences: float = math.inf,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Split sequences into batches. A sequence of more than ``tokens`` tokens is a batch by itself.

    Args:
        order: Indices of the sequences. Neighbors should have similar lengths.
        lengths: Number of tokens of each sequence.
        tokens: Maximum number of tokens in a batch, with padding.
        sequences: Maximum number of sequences in a batch.
        generator: Random numbers to shuffle the batches with. Default: do not shuffle.

    >>> batches_of([0, 2, 1], [3, 9, 4], tokens=8)
    [[0, 2], [1]]

    """
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not batches or len(batches[-1]) == sequences or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    if generator is None:
        return batches
    return [batches[n] for n in torch.randperm(len(batches), generator=generator).tolist()]
