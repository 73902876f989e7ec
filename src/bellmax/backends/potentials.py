"""What the values of potentials must satisfy, whichever backend runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Tensors: TypeAlias = Sequence[Tensor]


def reject(name: str, theta: Tensor, bad: Tensor) -> None:
    """Raise a ValueError that names the first entry of ``theta`` (B, *event) where ``bad`` is True. CPU only."""
    if theta.device.type != "cpu" or not bool(bad.any()):
        return
    batch, *event = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name} must be finite or -inf, got {theta[(batch, *event)].item()} at event index {tuple(event)} "
        f"of batch element {batch} (batch flattened)"
    )
