"""Chains whose states do not fill a vector, with scores that overflow without subtracting the maximum."""

from __future__ import annotations

import math

import pytest
import torch
from support.kernels import needs_kernels
from support.problems import potentials

import bellmax as bx

pytestmark = needs_kernels


@pytest.mark.parametrize("omega", ["negentropy", "l2", "entmax", bx.Tsallis(1.3)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (9, 4, 3), (3, 4, 17), (2, 3, 25)])
def test_large_scores_and_forbidden_states(shape: tuple[int, int, int], omega: str | bx.Regularizer) -> None:
    batch, steps, states = shape
    theta = 300 * potentials(batch, steps, states, states)
    theta[:, :, 0, 1:] = -math.inf
    z = potentials(batch, steps, states, states, seed=1)
    for dtype in (torch.float32, torch.float64):
        p = bx.Chain(theta.to(dtype), omega=omega)
        with bx.use_backend("reference"):
            expected = bx.Chain(theta.to(dtype), omega=omega)
        for got, wanted in (
            (p.value, expected.value),
            (p.expected_path, expected.expected_path),
            (p.hessian_product(z.to(dtype)), expected.hessian_product(z.to(dtype))),
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
