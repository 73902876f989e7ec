"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch  # the kernels share the OpenMP runtime that torch loads: torch must come first
from torch import Tensor

from bellmax.regularizers import Regularizer

kernels: ModuleType | None = None
status = "available"
try:
    kernels = importlib.import_module("bellmax._native")
except ModuleNotFoundError:
    status = "not compiled"
except ImportError as error:
    status = f"not loadable: {error}"


def available() -> bool:
    """Whether the compiled kernels were installed."""
    return kernels is not None


def instructions() -> str:
    """The instruction set the kernels chose on this processor."""
    return str(kernels.instructions()) if kernels is not None else "none"


class NativeSweeps:
    """The sweeps of a structure, run by its kernels; what is a matter of shapes is asked of the reference."""

    def __init__(self, structure: str, reference: Any) -> None:
        self.structure = structure
        self.reference = reference
        self.index_is_batched = reference.index_is_batched
        self.empty_paths = reference.empty_paths

    def _call(self, name: str, tensors: Sequence[Tensor], index: Sequence[Tensor], omega: Regularizer) -> Any:
        assert omega.kernel is not None
        # As numpy arrays, which reach C++ in a tenth of the time that torch's own exchange takes.
        arrays = [tensor.detach().contiguous().numpy() for tensor in (*tensors, *index)]
        return getattr(kernels, f"{self.structure}_{name}")(*arrays, *omega.kernel, torch.get_num_threads())

    def tape_shape(self, theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[int, ...]:
        batch, *nodes = self.reference.tape_shape(theta, index, omega)
        return batch, 2, *nodes  # values and thresholds

    def check(self, theta: Tensor, index: Sequence[Tensor]) -> None:
        self.reference.check_index(theta, index)

    def forward(self, theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[Tensor, Tensor]:
        value = theta.new_empty(theta.shape[0])
        tape = theta.new_empty(self.tape_shape(theta, index, omega), dtype=torch.float64)
        if not self._call("forward", (theta, value, tape), index, omega):
            self.reference.check(theta, index)
        return value, tape

    def backward(self, theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
        return self._like_theta("backward", (theta, tape), index, omega)

    def hessian(self, theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
        return self._like_theta("hessian", (theta, tape, z), index, omega)

    def log_transitions(self, theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
        return self._like_theta("log_transitions", (theta, tape), index, omega)

    def log_transitions_jvp(
        self, theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer
    ) -> Tensor:
        return self._like_theta("log_transitions_jvp", (theta, tape, z), index, omega)

    def log_transitions_vjp(
        self, theta: Tensor, tape: Tensor, cotangent: Tensor, index: Sequence[Tensor], omega: Regularizer
    ) -> Tensor:
        return self._like_theta("log_transitions_vjp", (theta, tape, cotangent), index, omega)

    def sample(
        self, theta: Tensor, tape: Tensor, uniforms: Tensor, index: Sequence[Tensor], omega: Regularizer
    ) -> Tensor:
        paths: Tensor = self.empty_paths(theta, uniforms.shape[1])
        self._call("sample", (theta, tape, uniforms, paths), index, omega)
        return paths

    def topk(self, theta: Tensor, k: int, index: Sequence[Tensor], omega: Regularizer) -> tuple[Tensor, Tensor]:
        self.reference.check(theta, index)
        scores, paths = theta.new_empty(theta.shape[0], k), self.empty_paths(theta, k)
        self._call("topk", (theta, scores, paths), index, omega)
        return scores, paths

    def _like_theta(self, name: str, inputs: Sequence[Tensor], index: Sequence[Tensor], omega: Regularizer) -> Tensor:
        result = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        self._call(name, (*inputs, result), index, omega)
        return result
