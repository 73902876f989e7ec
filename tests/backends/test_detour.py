"""The CPU fallback, on a device written in Python, which needs a separate process; and the devices that use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.inside import BACKENDS, WARPING
from support.kernels import needs_kernels

import bellmax as bx

KERNEL = bx.Negentropy().kernel


@pytest.mark.slow
@needs_kernels
def test_programs_on_a_device_without_kernels() -> None:
    programs = Path(__file__).with_name("elsewhere.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(programs)],
        cwd=programs.parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_kernels
@pytest.mark.parametrize("structure", ["chain", "scored_chain", "dag", WARPING.name, "spans", "tree"])
def test_the_fallback_supports_what_the_native_kernels_support(structure: str) -> None:
    detour = BACKENDS["detour"]
    for device in ("cuda", "cuda:1", "mps", "xpu"):
        assert detour.serves(structure, torch.device(device), KERNEL)
        assert not detour.serves(structure, torch.device(device), None)  # an Ω written in Python
    for device in ("cpu", "meta"):
        assert not detour.serves(structure, torch.device(device), KERNEL)


@needs_kernels
def test_backend_info_of_a_device() -> None:
    assert bx.backend_info() == bx.backend_info("cpu") | {"cpu": "native"}
    assert bx.backend_info(torch.device("mps"))["mps"] == "detour"
    assert bx.backend_info("meta")["meta"] == "reference"
    with bx.use_backend("reference"):
        assert bx.backend_info("cuda")["cuda"] == "reference"


def test_kernels_that_move_too_much_data_have_no_cpu_fallback() -> None:
    native, detour = BACKENDS["native"].fused, BACKENDS["detour"].fused
    assert all(kernel is not None for kernel in vars(native).values())
    missing = {name for name, kernel in vars(detour).items() if kernel is None}
    assert missing == {"label_scores", "long_pairs", "pair_costs"}
