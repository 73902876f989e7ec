"""What the values of potentials must satisfy, whichever backend runs."""

from __future__ import annotations

import math

from torch import Tensor


def check_below_infinity(name: str, theta: Tensor) -> None:
    """Raise a ValueError that names the first entry of ``theta`` (B, *event) that is NaN or +∞. CPU only."""
    if theta.device.type != "cpu" or theta.numel() == 0 or bool(theta.max() < math.inf):
        return
    batch, *event = (~(theta < math.inf)).nonzero()[0].tolist()
    raise ValueError(
        f"{name} must be finite or -inf, got {theta[(batch, *event)].item()} at event index {tuple(event)} "
        f"of batch element {batch} (batch flattened)"
    )
