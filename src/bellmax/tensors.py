"""Arithmetic on scores that may be infinite or NaN, and choices of dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Sequence[Tensor]
Gamma: TypeAlias = "float | Tensor"

_CPU = torch.device("cpu")
WITHOUT_FLOAT64 = ["mps"]
"""Types of devices that have no float64."""


HALF = torch.float16, torch.bfloat16


def promote_half(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, and other tensors unchanged."""
    return x.float() if x.dtype in HALF else x


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, for accurate long sums, or float32 on a device that has no float64."""
    if device == _CPU:  # device.type would make a new string
        return torch.float64
    if device.type == "xpu" and torch.xpu.is_available():  # only some XPUs have float64
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widen(x: Tensor) -> Tensor:
    """Return x in the wide dtype of its device, see :func:`wide_dtype`."""
    return x.to(wide_dtype(x.device))


def read_gamma(gamma: Gamma) -> float:
    """A γ of one element as a number, which waits for its device."""
    return gamma.item() if isinstance(gamma, Tensor) else gamma


def divide_by_gamma(x: Tensor, gamma: Gamma) -> Tensor:
    """Return x / γ. Infinite and NaN entries of x stay unchanged and contribute nothing to the gradient of γ."""
    if not isinstance(gamma, Tensor):
        return x if gamma == 1 else x / gamma
    is_special = ~x.isfinite()
    return torch.where(is_special, x, x.masked_fill(is_special, 0) / gamma)


def multiply_by_gamma(x: Tensor, gamma: Gamma) -> Tensor:
    """Return γ x. Infinite and NaN entries of x stay unchanged and contribute nothing to the gradient of γ."""
    if not isinstance(gamma, Tensor):
        if gamma == 1 or gamma >= torch.finfo(x.dtype).tiny:
            return x if gamma == 1 else x * gamma
        return torch.where(x.isinf(), x, x * gamma)  # γ may round to 0, and 0 · ∞ is NaN
    is_special = ~x.isfinite()
    return torch.where(is_special, x, x.masked_fill(is_special, 0) * gamma)


def inner(path: Tensor, z: Tensor, event_dims: int = 1) -> Tensor:
    """Return ⟨path, z⟩ over the last ``event_dims`` dimensions. Where path is 0, an infinite or NaN z is ignored."""
    product = path * z.masked_fill(path == 0, 0)
    return product.flatten(-event_dims).sum(-1) if event_dims else product


def without_rounding_below_zero(x: Tensor) -> Tensor:
    """Return x with negative entries replaced by 0, for values that are only negative by rounding.

    The gradient passes through unchanged.
    """
    return torch.where(x < 0, x - x.detach(), x)
