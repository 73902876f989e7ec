"""Sweeps of segmentations that are scored by emissions and durations, without a number for each segment."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs.checks import overflow_error
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_LANES = 4  # label_lanes in native/segments/segments.h


class NativeSegments(Expanded):
    """Sweeps with memory O(T·K). The k best paths come from the graph engine, with memory O(T·(D·K + K²))."""

    @property
    def check(self) -> None:
        """None: the kernels check scores while they read them."""
        return None

    def _call(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Tensor | None) -> bool:
        """Call a kernel with contiguous tensors, which include its outputs. A seed may have any stride."""
        kernel = omega.kernel
        assert kernel is not None
        readable = [t if t is None or t.ndim == 1 else t.contiguous() for t in (*_padded(theta), *args)]
        try:
            return bool(call(f"segments_{name}", *readable, *contiguous(index), *kernel))
        except ValueError:
            self.program.check_index(theta, index)  # raises a message with the argument and the value
            raise

    def _like_theta(
        self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Tensor | None
    ) -> Tensors:
        """Call a kernel whose outputs have the shapes of θ. Return them, summed over the batch for shared scores."""
        batch = theta[0].shape[0]
        results = [t.new_empty((batch, *t.shape[1:])) for t in theta]
        self._call(name, theta, index, omega, *args, *_padded(results))
        pairs = zip(results, theta, strict=True)
        return [r.sum(0, keepdim=True) if t.shape[0] != batch else r for r, t in pairs]

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        batch, steps, labels = theta[0].shape
        width = (labels + _LANES - 1) // _LANES * _LANES
        return theta[0].new_empty((batch, 4, steps, width), dtype=torch.float64)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        value, tape = theta[0].new_empty(theta[0].shape[0]), self.empty_tape(theta, index)
        if not self._call("forward", theta, index, omega, value, tape):
            self.program.check(theta, index)
            raise overflow_error(value.dtype)  # all scores were valid, so a sum of scores overflowed
        return value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("backward", theta, index, omega, tape, seed)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("hessian", theta, index, omega, tape, seed, *_padded(z))

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._call("sample", theta, index, omega, tape, uniforms, paths)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        self.program.check(theta, index)
        return super().topk(theta, k, index, omega)


def _padded(tensors: Tensors) -> list[Tensor | None]:
    """Return tensors shaped like θ as kernels take them: the last one, last_durations, may be None."""
    return [*tensors, *[None] * (6 - len(tensors))]
