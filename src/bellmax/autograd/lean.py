"""An autograd.Function with a cheaper ``apply``."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class LeanFunction(Function):
    """A Function whose arguments have no default values.

    ``Function.apply`` inspects the signature of ``forward`` for defaults, which takes longer than a small sweep.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(Function, cls).apply(*args)  # type: ignore[misc]
