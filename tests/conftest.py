from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from support.kernels import needs_kernels
from support.problems import OMEGAS

import bellmax as bx

settings.register_profile("bellmax", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("bellmax")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # importing tslearn sets another


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(params=["reference", pytest.param("native", marks=needs_kernels)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with bx.use_backend(request.param):
        yield request.param


@pytest.fixture(params=list(OMEGAS))
def omega(request: pytest.FixtureRequest) -> bx.Regularizer:
    return OMEGAS[request.param]
