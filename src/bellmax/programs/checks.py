"""Checks of scores and lengths, and the words with which error messages name an entry or a batch element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.modes import is_checked


def reject_entries(name: str, theta: Tensor, bad: Tensor, absent: float = -math.inf) -> None:
    """Raise a ValueError with the first entry of a score (B, *event) where ``bad`` is True. Does nothing on a GPU.

    Args:
        name: The name of the score, for the message.
        theta: The score.
        bad: A mask of the shape of ``theta``.
        absent: The infinity that is allowed because it marks a forbidden entry.

    """
    if not theta.is_cpu or not bool(bad.any()):
        return
    batch, *event = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name} must be finite or {absent:+}, got {theta[(batch, *event)].item()} at event index {tuple(event)} "
        f"of batch element {batch} (counted over all batch dimensions)"
    )


def reject_overflow(value: Tensor, sense: int = 1) -> None:
    """Raise a ValueError if a value (B,) overflowed. Only values on the CPU are checked.

    A program without a path has value −∞ (∞ for costs, ``sense`` −1), so only NaN and the other infinity are errors.
    """
    if is_checked(value) and not bool((sense * value < math.inf).all()):
        raise overflow_error(value.dtype)


def overflow_error(dtype: torch.dtype) -> ValueError:
    """The error for sums of scores that exceed the largest number of a dtype."""
    name, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    return ValueError(
        f"scores, divided by gamma, must add up to less than {largest:.2g}, the largest number in {name}, but they "
        "overflow: scale them down, increase gamma, or use float64"
    )


def batch_first_hint(name: str, is_likely: bool) -> str:
    """The end of a message about a tensor whose first dimension is likely to be time; empty if not ``is_likely``."""
    hint = f". bellmax is batch-first: if {name} is (time, batch, ...), pass {name}.transpose(0, 1)"
    return hint if is_likely else ""


def check_lengths(name: str, lengths: Tensor, least: int, most: int, hint: str = "") -> None:
    """Raise a ValueError if a length (B,) is not in least … most. The message ends in ``hint``. CPU only."""
    if not lengths.is_cpu or not lengths.numel():
        return
    if not least <= int(lengths.min()) <= int(lengths.max()) <= most:
        batch = int(((lengths < least) | (lengths > most)).nonzero()[0])
        raise ValueError(
            f"{name} must be from {least} to {most}, got {int(lengths[batch])} for batch element {batch} "
            f"(counted over all batch dimensions){hint}"
        )


def subscript(index: Sequence[int]) -> str:
    """An index as Python code, such as "[0, 2]", to append to a name; empty for no index."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def of_sequence(batch: Sequence[int]) -> str:
    """The batch index in the words of a message, such as " of sequence 3"; empty without batch dimensions."""
    return f" of sequence {batch[0] if len(batch) == 1 else tuple(batch)}" if batch else ""
