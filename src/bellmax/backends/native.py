"""C++ kernels on the CPU, for float32 and float64 and the Ω that ship with bellmax."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch  # the kernels share the OpenMP runtime that torch loads: torch must come first
from torch import Tensor

from bellmax.backends.potentials import Tensors
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

    def _call(self, name: str, tensors: Tensors, index: Tensors, omega: Regularizer) -> Any:
        assert omega.kernel is not None
        # As numpy arrays, which reach C++ in a tenth of the time that torch's own exchange takes.
        arrays = [(t.detach() if t.requires_grad else t).contiguous().numpy() for t in (*tensors, *index)]
        try:
            return getattr(kernels, f"{self.structure}_{name}")(*arrays, *omega.kernel, torch.get_num_threads())
        except ValueError:
            self.reference.check_index(tensors, index)  # says it better
            raise

    def _like_theta(self, name: str, theta: Tensors, more: Tensors, index: Tensors, omega: Regularizer) -> Tensors:
        results = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in theta]
        self._call(name, (*theta, *more, *results), index, omega)
        return results

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        batch, *nodes = self.reference.empty_tape(theta, index).shape
        if self.structure == "dtw":
            assert kernels is not None
            size = kernels.dtw_tape_size(*theta[0].shape[1:]) if nodes[0] else 0
            return theta[0].new_empty((batch, size), dtype=torch.float64)
        # Values and thresholds. A chain's are relative to the greatest of their step.
        dtype = torch.float64 if self.structure == "dag" else theta[0].dtype
        return theta[0].new_empty((batch, 2, *nodes), dtype=dtype)

    def check(self, theta: Tensors, index: Tensors) -> None:
        """The kernels look at the values as they read them."""

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        value = theta[0].new_empty(theta[0].shape[0])
        tape = self.empty_tape(theta, index)
        if not self._call("forward", (*theta, value, tape), index, omega):
            self.reference.check(theta, index)
        return value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("backward", theta, (tape, seed), index, omega)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("hessian", theta, (tape, seed, *z), index, omega)

    def log_transitions(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        return self._like_theta("log_transitions", theta, (tape,), index, omega)

    def log_transitions_jvp(
        self, theta: Tensors, tape: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("log_transitions_jvp", theta, (tape, *z), index, omega)

    def log_transitions_vjp(
        self, theta: Tensors, tape: Tensor, cotangent: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        return self._like_theta("log_transitions_vjp", theta, (tape, *cotangent), index, omega)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths: Tensor = self.empty_paths(theta, uniforms.shape[1])
        self._call("sample", (*theta, tape, uniforms, paths), index, omega)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        scores, paths = theta[0].new_empty(theta[0].shape[0], k), self.empty_paths(theta, k)
        if not self._call("topk", (*theta, scores, paths), index, omega):
            self.reference.check(theta, index)
        return scores, paths
