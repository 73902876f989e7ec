"""Kernel launches: the device, and sizes of blocks, which must be powers of two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, first: Tensor | None, *args: Any, **options: Any) -> None:
    """Run ``programs`` programs of a kernel on the device of its first argument, in the device's current stream."""
    assert first is not None
    device = first.device
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        kernel[(programs,)](first, *args, **options)


def power_of_two(size: int, minimum: int = 2) -> int:
    """Return the smallest power of two that is at least ``size`` and ``minimum``."""
    return max(minimum, 1 << (size - 1).bit_length())


def warps(entries: int) -> int:
    """Return the number of warps for a tile: each thread gets eight entries, or more if the tile is large."""
    return max(1, min(8, entries // 256))
