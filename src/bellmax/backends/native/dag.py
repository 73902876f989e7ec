"""The sweeps of a DAG, run by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native import kernels
from bellmax.backends.reference.dag import check as check
from bellmax.regularizers import Hard, Regularizer


def tape_shape(theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[int, ...]:
    rows = 1 if omega.kernel == (1.0, 0.0) else 2  # values, and thresholds where they are not the values
    return theta.shape[0], rows, index[0].shape[0] - 1


def _call(name: str, tensors: Sequence[Tensor], index: Sequence[Tensor], omega: Regularizer) -> Any:
    # As numpy arrays, which reach C++ in a tenth of the time that torch's own exchange takes.
    arrays = [tensor.detach().contiguous().numpy() for tensor in (*tensors, *index[:3])]
    return getattr(kernels, f"dag_{name}")(*arrays, *(omega.kernel or ()), torch.get_num_threads())


def _along(
    name: str, theta: Tensor, tape: Tensor, direction: Tensor, index: Sequence[Tensor], omega: Regularizer
) -> Tensor:
    product = torch.empty_like(theta, memory_format=torch.contiguous_format)
    _call(name, (theta, tape, direction, product), index, omega)
    return product


def forward(theta: Tensor, index: Sequence[Tensor], omega: Regularizer) -> tuple[Tensor, Tensor]:
    value = theta.new_empty(theta.shape[0])
    tape = theta.new_empty(tape_shape(theta, index, omega), dtype=torch.float64)
    _call("forward", (theta, value, tape), index, omega)
    return value, tape


def backward(theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    path = torch.empty_like(theta, memory_format=torch.contiguous_format)
    _call("backward", (theta, tape, path), index, omega)
    return path


def hessian(theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    return _along("hessian", theta, tape, z, index, omega)


def log_transitions(theta: Tensor, tape: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    log_q = torch.empty_like(theta, memory_format=torch.contiguous_format)
    _call("log_transitions", (theta, tape, log_q), index, omega)
    return log_q


def log_transitions_jvp(theta: Tensor, tape: Tensor, z: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    return _along("log_transitions_jvp", theta, tape, z, index, omega)


def log_transitions_vjp(
    theta: Tensor, tape: Tensor, cotangent: Tensor, index: Sequence[Tensor], omega: Regularizer
) -> Tensor:
    return _along("log_transitions_vjp", theta, tape, cotangent, index, omega)


def sample(theta: Tensor, tape: Tensor, uniforms: Tensor, index: Sequence[Tensor], omega: Regularizer) -> Tensor:
    paths = theta.new_empty(uniforms.shape[:2] + theta.shape[1:])
    _call("sample", (theta, tape, uniforms, paths), index, omega)
    return paths


def topk(theta: Tensor, k: int, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    scores, paths = theta.new_empty(theta.shape[0], k), theta.new_empty(theta.shape[0], k, theta.shape[1])
    _call("topk", (theta, scores, paths), index, Hard())
    return scores, paths
