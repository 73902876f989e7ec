"""How kernels are launched: where their tensors are, in blocks whose sizes are powers of two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, first: Tensor | None, *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first argument, in that device's current stream."""
    assert first is not None
    device = first.device
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        kernel[(programs,)](first, *args, **options)


def power_of_two(size: int, least: int = 2) -> int:
    """The smallest block that holds ``size`` entries."""
    return max(least, 1 << (size - 1).bit_length())


def warps(entries: int) -> int:
    """How many warps share a tile: of eight entries a thread, or sixteen of a large one."""
    return max(1, min(8, entries // 256))
