"""Arithmetic that the whole library shares, where −∞ is a score like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Sequence[Tensor]
Gamma: TypeAlias = "float | Tensor"

WITHOUT_FLOAT64 = ["mps"]
"""Types of devices."""


def promote_half(x: Tensor) -> Tensor:
    """float32 for half precision, any other tensor as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, in which long sums keep their digits, or float32 on a device that has no float64."""
    if device.type == "xpu" and torch.xpu.is_available():  # some have it
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widen(x: Tensor) -> Tensor:
    """x in the wide dtype of its device."""
    return x.to(wide_dtype(x.device))


def read_gamma(gamma: Gamma) -> float:
    """A γ of one element as a number, which waits for its device."""
    return gamma.item() if isinstance(gamma, Tensor) else gamma


def divide_by_gamma(x: Tensor, gamma: Gamma) -> Tensor:
    """x / γ, where an x that is infinite or NaN stays as it is and gives γ no gradient."""
    if not isinstance(gamma, Tensor):
        return x if gamma == 1 else x / gamma
    special = ~x.isfinite()
    return torch.where(special, x, x.masked_fill(special, 0) / gamma)


def multiply_by_gamma(x: Tensor, gamma: Gamma) -> Tensor:
    """γ x, where an x that is infinite or NaN stays as it is and gives γ no gradient."""
    if not isinstance(gamma, Tensor):
        if gamma == 1 or gamma >= torch.finfo(x.dtype).tiny:
            return x if gamma == 1 else x * gamma
        return torch.where(x.isinf(), x, x * gamma)  # γ may round to 0, and 0 · ∞ is NaN
    special = ~x.isfinite()
    return torch.where(special, x, x.masked_fill(special, 0) * gamma)


def inner(path: Tensor, z: Tensor, event_dims: int = 1) -> Tensor:
    """⟨path, z⟩ over the last ``event_dims`` dimensions, where a zero of the path hides an infinite or NaN z."""
    product = path * z.masked_fill(path == 0, 0)
    return product.flatten(-event_dims).sum(-1) if event_dims else product


def without_rounding_below_zero(x: Tensor) -> Tensor:
    """x, with 0 for what rounding put below 0; the gradient stays."""
    return torch.where(x < 0, x - x.detach(), x)
