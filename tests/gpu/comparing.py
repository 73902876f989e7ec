"""Comparison of the Triton sweeps with the sweeps of the reference backend in float64."""

from __future__ import annotations

import torch
from support.inside import BACKENDS, Tensors
from torch import Tensor

import bellmax as bx

BOUNDS = {torch.float32: 5e-6, torch.float64: 1e-10}


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def assert_sweeps(structure: str, theta: Tensors, index: Tensors, omega: bx.Regularizer) -> None:
    """Compare the value, and the gradient and Hessian product along a random seed."""
    kernels, reference = (BACKENDS[name].sweeps(structure) for name in ("triton", "reference"))
    dtype, wide = theta[0].dtype, [t.double() for t in theta]
    seed, z = torch.randn(theta[0].shape[0], dtype=dtype), [torch.randn_like(t) for t in theta]
    value, tape = kernels.forward(theta, index, omega)
    wanted, wide_tape = reference.forward(wide, index, omega)
    assert tape.shape == kernels.empty_tape(theta, index).shape
    assert_close(value, wanted, dtype)
    assert_close(kernels.value(theta, index, omega), wanted, dtype)
    paths = kernels.backward(theta, tape, seed, index, omega)
    wanted_paths = reference.backward(wide, wide_tape, seed.double(), index, omega)
    products = kernels.hessian(theta, tape, seed, z, index, omega)
    wanted_products = reference.hessian(wide, wide_tape, seed.double(), [t.double() for t in z], index, omega)
    pairs = zip((*paths, *products), (*wanted_paths, *wanted_products), (*theta, *theta), strict=True)
    for got, right, t in pairs:
        assert got.shape == t.shape
        assert_close(got, right, dtype)
