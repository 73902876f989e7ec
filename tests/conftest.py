from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from problems import OMEGAS

import bellmax as bx

settings.register_profile("bellmax", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("bellmax")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # importing tslearn sets another


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and bx.backend_info()["native"] != "available":
        pytest.skip("the native kernels are not compiled")
    with bx.use_backend(request.param):
        yield request.param


@pytest.fixture(params=list(OMEGAS))
def omega(request: pytest.FixtureRequest) -> bx.Regularizer:
    return OMEGAS[request.param]
