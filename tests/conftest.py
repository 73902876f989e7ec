from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from support.inside import KERNELS
from support.kernels import needs_kernels
from support.problems import OMEGAS

import bellmax as bx

settings.register_profile("bellmax", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("bellmax")

collect_ignore = ["fuzz_readers.py"]  # it needs atheris


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # importing tslearn sets another


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


_BACKENDS = "reference", pytest.param("native", marks=needs_kernels), pytest.param("triton", marks=pytest.mark.slow_gpu)


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "triton":
            pytest.importorskip("triton")
            from gpu.driver import emulated

            if "omega" in request.fixturenames and request.getfixturevalue("omega").kernel not in KERNELS:
                pytest.skip("there are no kernels for GPUs of this Ω")
            stack.enter_context(emulated())
        stack.enter_context(bx.use_backend(request.param))
        yield request.param


@pytest.fixture(params=list(OMEGAS))
def omega(request: pytest.FixtureRequest) -> bx.Regularizer:
    return OMEGAS[request.param]
