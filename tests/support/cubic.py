"""An Ω that the library does not have. Its kernel, ``cubic.h``, is for a changed copy of the native code."""

from __future__ import annotations

import torch
from torch import Tensor

import bellmax as bx
from bellmax.regularizers import KERNELS, Kernel
from bellmax.tensors import Gamma


class Cubic(bx.Regularizer):
    """Ω(q) = γ Σ q²/2 + c q³/3, which is no Tsallis entropy. The gradient of max_Ω is sparse."""

    def __init__(self, c: float = 1.0, gamma: Gamma = 1.0) -> None:
        super().__init__(gamma)
        self.c = c

    def penalty(self, q: Tensor) -> Tensor:
        return (q.square() / 2 + self.c * q.pow(3) / 3).sum(-1)

    def project(self, x: Tensor) -> Tensor:
        low = torch.full_like(x[..., :1], -1 - self.c)
        high = torch.zeros_like(low)
        for _ in range(60):
            middle = (low + high) / 2
            is_low = self._probabilities(x, middle).sum(-1, keepdim=True) > 1
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        q = self._probabilities(x, low)
        return q / q.sum(-1, keepdim=True)

    def _probabilities(self, x: Tensor, tau: Tensor) -> Tensor:
        """Return the q with q + c q² = (x − τ)₊."""
        t = (x - tau).clamp(min=0)
        return 2 * t / (1 + (1 + 4 * self.c * t).sqrt())

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        s = (1 / (1 + 2 * self.c * q)).masked_fill(~(q > 0), 0)
        total = s.sum(-1, keepdim=True)
        return s * (y - (s * y).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1))

    @property
    def kernel(self) -> Kernel:
        return Kernel("cubic", (self.c,))


KERNELS["cubic"] = Cubic
