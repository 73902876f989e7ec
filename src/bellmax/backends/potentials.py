"""The one thing that potentials' values must satisfy."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import Tensor


def reject_potentials(name: str, theta: Tensor) -> NoReturn:
    """Raise the ValueError that names the first entry of ``theta`` (B, *event) that is NaN or +∞."""
    bad = ~(theta < math.inf)
    batch, *event = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name} must be finite or -inf, got {theta[(batch, *event)].item()} at event index {tuple(event)} "
        f"of batch element {batch} (batch flattened)"
    )
