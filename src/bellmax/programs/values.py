"""Messages about values: which one is wrong, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.modes import is_checked


def reject(name: str, theta: Tensor, bad: Tensor, absent: float = -math.inf) -> None:
    """Raise a ValueError that names the first entry of ``theta`` (B, *event) where ``bad`` is True. CPU only.

    ``absent`` is the infinity that is allowed.
    """
    if theta.device.type != "cpu" or not bool(bad.any()):
        return
    batch, *event = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name} must be finite or {absent:+}, got {theta[(batch, *event)].item()} at event index {tuple(event)} "
        f"of batch element {batch} (batch flattened)"
    )


def reject_overflow(value: Tensor, sense: int = 1) -> None:
    """Raise a ValueError if a value is NaN or the infinity that no missing path gives. CPU only."""
    if is_checked(value) and not bool((sense * value < math.inf).all()):
        raise overflow(value.dtype)


def overflow(dtype: torch.dtype) -> ValueError:
    name, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    return ValueError(
        f"scores, divided by gamma, must add up to less than {largest:.2g}, the largest number in {name}, but they "
        "overflow: scale them down, increase gamma, or use float64"
    )


def batch_first(name: str, is_likely: bool) -> str:
    """A hint for the end of a message, if time is likely to be the first dimension of a tensor."""
    hint = f". bellmax is batch-first: if {name} is (time, batch, ...), pass {name}.transpose(0, 1)"
    return hint if is_likely else ""


def check_lengths(name: str, lengths: Tensor, least: int, most: int, hint: str = "") -> None:
    """Raise a ValueError, with a hint, for a length of a flat batch (B,) that is out of range. CPU only."""
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    if not least <= int(lengths.min()) <= int(lengths.max()) <= most:
        batch = int(((lengths < least) | (lengths > most)).nonzero()[0])
        raise ValueError(
            f"{name} must be from {least} to {most}, got {int(lengths[batch])} for batch element {batch} "
            f"(batch flattened){hint}"
        )


def subscript(index: Sequence[int]) -> str:
    """An index as Python writes it behind a name; nothing if it is empty."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def of_sequence(batch: Sequence[int]) -> str:
    """Which member of the batch, by its index."""
    return f" of sequence {batch[0] if len(batch) == 1 else tuple(batch)}" if batch else ""
