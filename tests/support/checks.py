from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def close(got: Tensor, wanted: Any, tolerance: float = 1e-10) -> None:
    """Assert equality to a relative and absolute tolerance; integers, lists and arrays are cast to the dtype of got."""
    if not isinstance(wanted, Tensor):
        wanted = torch.tensor(np.array(wanted), dtype=got.dtype)
    elif not wanted.is_floating_point():
        wanted = wanted.to(got.dtype)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
