"""The kernels that users get, compiled for GPUs that are not here: nothing spills, everything fits, and a step costs no
more than it did.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bellmax as bx
from bellmax.apps.gpu.problems import OMEGAS
from gpu.driver import Launch, emulated, triton
from gpu.sweeps import BATCH, BY_NAME, launches_by_sweep

_nvidia = triton.backends.nvidia.compiler
_TOOLS = Path(_nvidia.__file__).parent / "bin"
_Target = triton.backends.compiler.GPUTarget
TARGETS = {f"sm_{arch}": _Target("cuda", arch, 32) for arch in (80, 90, 100)} | {"gfx942": _Target("hip", "gfx942", 64)}
REGISTERS, THREADS, SHARED = 65536, 1024, 48 * 1024  # of a block, on all of them
PARKED = 8  # bytes a thread that ptxas puts away, far from the limit of registers, to fit one more block

FLOAT32, FLOAT64 = torch.float32, torch.float64
QUICK = "chain from scores", 17, "negentropy", FLOAT32, "sm_80"


def resources(launch: Launch, target: Any, directory: Path) -> tuple[int, int]:
    """How many registers a thread needs, and how much does not fit into them."""
    for_all_targets = str(launch.compiled.file("ttir"))
    compiled = triton.compile(for_all_targets, target=target, options={"num_warps": launch.warps})
    assert compiled.metadata.shared <= SHARED
    if target.backend == "hip":
        told = compiled.asm["amdgcn"]
        return _number(r"vgpr_count:\s+(\d+)", told), _number(r"vgpr_spill_count:\s+(\d+)", told)
    ptx, binary = directory / "kernel.ptx", directory / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    told = _run(_TOOLS / "cuobjdump", "-res-usage", binary)
    registers, stack = _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told)
    if not stack:
        return registers, 0
    ptx.write_text(compiled.asm["ptx"])  # on the stack are spills or something else: ask the assembler
    name = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
    told = _run(_nvidia.get_ptxas(target.arch).path, "-v", f"--gpu-name={name}", ptx, "-o", binary)
    return registers, _number(r"(\d+) bytes spill stores", told)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])


# Bytes a thread that do not fit, known and too many: 64 × 64 states in float64 beside their derivatives.
SPILLED = {("chain from scores", 64, "Tsallis 1.5", FLOAT64): 260}


def variants() -> Iterator[Any]:
    """Each family of kernels under every Ω and dtype at a usual size; other tables of moves, and the greatest sizes,
    under two.
    """
    families = {"chain from scores": 17, "dense chain": 17, "soft-DTW": 40, "CTC": 40, "graph": 5}
    for name, size in families.items():
        yield from ((name, size, omega, dtype) for omega in OMEGAS for dtype in (FLOAT32, FLOAT64))
    others = [("chain from scores", 1), ("chain from scores", 64), ("dense chain", 64), ("soft-DTW", 1024)]
    others += [("monotone alignment", 40), ("alignment with gaps", 40), ("transducer", 40)]
    for name, size in others:
        yield name, size, "negentropy", FLOAT32
        yield name, size, "Tsallis 1.5", FLOAT64


@pytest.mark.parametrize(
    ("name", "size", "omega", "dtype", "arch"),
    [
        pytest.param(*variant, arch, marks=[pytest.mark.slow_gpu] * ((*variant, arch) != QUICK))
        for variant in variants()
        for arch in TARGETS
    ],
)
def test_every_kernel_fits(name: str, size: int, omega: str, dtype: torch.dtype, arch: str, tmp_path: Path) -> None:
    with emulated(executes=False) as log, bx.use_backend("triton"):
        sweeps = launches_by_sweep(log, BY_NAME[name], 4, size, omega, dtype)
    del sweeps["value"]  # a part of what "forward" does
    kernels = {launch.compiled: launch for launches in sweeps.values() for launch in launches}.values()
    assert kernels
    for launch in kernels:
        target = TARGETS[arch]
        registers, spilled = resources(launch, target, tmp_path)
        threads = launch.warps * target.warp_size
        assert spilled <= SPILLED.get((name, size, omega, dtype), PARKED), (
            f"{launch.kernel} spills {spilled} bytes beside {registers} registers, {threads} threads"
        )
        assert threads <= THREADS, f"{launch.kernel} has {threads} threads"
        assert registers * launch.warps * 32 <= REGISTERS, f"{launch.kernel} has {registers} registers a thread"


# Instructions of warps and barriers, a program and step: forward, backward, Hessian product. What is more by a tenth is
# an accident of layout; what is less may be written here.
BUDGETS = {
    ("dense chain", 16): ((191, 1), (328, 1), (836, 3)),
    ("dense chain", 17): ((852, 8), (1492, 11), (3768, 27)),
    ("dense chain", 32): ((852, 8), (1492, 11), (3768, 27)),
    ("dense chain", 64): ((2760, 11), (5752, 14), (14512, 36)),
    ("chain from scores", 16): ((121, 1), (236, 2), (642, 4)),
    ("chain from scores", 17): ((536, 5), (1092, 10), (2932, 23)),
    ("chain from scores", 32): ((536, 5), (1092, 10), (2932, 23)),
    ("chain from scores", 64): ((1496, 11), (4336, 16), (11328, 38)),
    ("soft-DTW", 32): ((122, 0), (131, 0), (369, 0)),
    ("soft-DTW", 40): ((236, 2), (268, 2), (738, 4)),
    ("soft-DTW", 64): ((236, 2), (268, 2), (738, 4)),
    ("CTC", 40): ((208, 0), (209, 0), (624, 0)),
    ("monotone alignment", 40): ((230, 2), (238, 2), (624, 4)),
    ("alignment with gaps", 40): ((546, 2), (592, 2), (1784, 4)),
    ("transducer", 40): ((246, 2), (292, 2), (772, 4)),
    ("graph", 5): ((1060, 3.5), (1442, 6), (3628, 16)),
}


def a_step(name: str, size: int) -> dict[str, dict[str, float]]:
    """What one more step costs a program, by sweep."""
    found: dict[str, dict[str, float]] = {sweep: {} for sweep in ("forward", "backward", "hessian")}
    for steps, sign in ((4, -1), (6, 1)):
        with emulated() as log, bx.use_backend("triton"):
            launches = launches_by_sweep(log, BY_NAME[name], steps, size)
        for sweep, counts in found.items():
            for kind in ("instructions", "barriers"):
                total = sum(launch.counts[kind] for launch in launches[sweep])
                counts[kind] = counts.get(kind, 0) + sign * total / (2 * BATCH)
    return found


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*key, marks=[pytest.mark.slow_gpu] * (key != QUICK[:2])) for key in BUDGETS]
)
def test_a_step_costs_what_it_did(name: str, size: int) -> None:
    for (sweep, counts), (instructions, barriers) in zip(a_step(name, size).items(), BUDGETS[name, size], strict=True):
        assert counts["instructions"] <= 1.1 * instructions, sweep
        assert counts["barriers"] <= barriers, sweep
