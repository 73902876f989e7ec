from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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

TESTS = Path(__file__).parent

# Not run by --quick. It also skips tests of the compiler, Ω other than negentropy, l2 and hard, and marked tests.
SLOW_FOLDERS = "apps", "compat", "gpu"
SLOW_FILES = "benchmarks", "cluster", "command", "demo", "digits", "distributed", "examples", "fuzz_readers"
SLOW_FILES += "huggingface", "interrupts", "notebooks", "onnx", "package", "peers", "proteins", "readme"
SLOW_FILES += "recordings", "site", "sklearn"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run one Ω of each kind, and no slow test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        quick, slow = [], []
        for item in items:
            (slow if is_slow(item) else quick).append(item)
        items[:] = quick
        config.hook.pytest_deselected(items=slow)


def is_slow(item: pytest.Item) -> bool:
    """True if --quick leaves a test out."""
    parameters = getattr(item, "callspec", None)
    return (
        item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS
        or item.path.stem.removeprefix("test_") in SLOW_FILES
        or item.get_closest_marker("slow") is not None
        or any(word in item.name for word in ("compile", "export"))
        or (parameters is not None and any(map(is_further_omega, parameters.params.values())))
    )


def is_further_omega(parameter: object) -> bool:
    """True for an Ω that is neither negentropy, l2 nor hard, or for its name."""
    if isinstance(parameter, str):
        return parameter == "entmax" or parameter.startswith("tsallis")
    return isinstance(parameter, bx.Tsallis) and not isinstance(parameter, bx.SquaredL2)


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
