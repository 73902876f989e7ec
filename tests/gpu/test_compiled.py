"""All kernels compiled for several GPUs: they do not spill, fit the limits, and their instructions per step have not
grown.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import bellmax as bx
from bellmax.gpu_check.problems import OMEGAS
from gpu.driver import DRIVER, Launch, emulated, made, triton
from gpu.sweeps import BATCH, BY_NAME, SIZES, launches_by_sweep

_nvidia = triton.backends.nvidia.compiler
_TOOLS = Path(_nvidia.__file__).parent / "bin"
_Target = triton.backends.compiler.GPUTarget
TARGETS = {f"sm_{arch}": _Target("cuda", arch, 32) for arch in (80, 90, 100)} | {"gfx942": _Target("hip", "gfx942", 64)}
REGISTERS = {"cuda": 65536, "hip": 131072}  # threads of a block
THREADS, SHARED = 1024, 48 * 1024  # on every GPU
PARKED = 16  # most bytes per thread that the assembler may spill by choice

FLOAT32, FLOAT64 = torch.float32, torch.float64
QUICK = "chain from scores", 17, "negentropy", FLOAT32


class Resources(NamedTuple):
    """Registers per thread, bytes spilled even with all registers, and bytes spilled by choice of the assembler, so
    that one more block fits.
    """

    registers: int
    spilled: int
    parked: int


def resources(launch: Launch, target: Any, directory: Path) -> Resources:
    metadata = launch.compiled.metadata
    if target != DRIVER.target:
        for_all_targets = str(made(metadata, "ttir"))
        metadata = triton.compile(for_all_targets, target=target, options={"num_warps": launch.warps}).metadata
    assert metadata.shared <= SHARED
    if target.backend == "hip":
        told = made(metadata, "amdgcn").read_text()
        return Resources(_number(r"vgpr_count:\s+(\d+)", told), _number(r"vgpr_spill_count:\s+(\d+)", told), 0)
    told = _run(_TOOLS / "cuobjdump", "-res-usage", made(metadata, "cubin"))
    registers, stack = _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told)
    if not stack:
        return Resources(registers, 0, 0)
    ptx = made(metadata, "ptx").read_text()  # stack bytes may be spills or not: ask the assembler
    most = min(255, REGISTERS["cuda"] // (32 * launch.warps))
    as_many_as_it_wants = ptx.replace(".reqntid", f".maxnreg {most}\n.reqntid", 1)
    assert ptx != as_many_as_it_wants
    spilled, stored = (_bytes_stored(text, target, directory) for text in (as_many_as_it_wants, ptx))
    return Resources(registers, spilled, stored)


def _bytes_stored(ptx: str, target: Any, directory: Path) -> int:
    source, name = directory / "kernel.ptx", re.search(r"\.target (\w+)", ptx)[1]
    source.write_text(ptx)
    told = _run(_nvidia.get_ptxas(target.arch).path, "-v", f"--gpu-name={name}", source, "-o", directory / "cubin")
    return _number(r"(\d+) bytes spill stores", told)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])


def has_wide_offsets(launch: Launch) -> bool:
    """True if the program id is extended to 64 bits at every use, because offsets may exceed 2³¹."""
    code = made(launch.compiled.metadata, "ttir").read_text()
    (number,) = re.findall(r"(%\w+) = tt\.get_program_id", code)
    uses = re.findall(rf".*[ (,]{number}\b.*", code)[1:]
    return bool(uses) and all(f"arith.extsi {number} : i32 to i64" in use for use in uses)


def variants() -> Iterator[Any]:
    """Each family of kernels under every Ω and dtype at a typical size; other tables and the greatest sizes under two
    Ω.
    """
    families = "chain from scores", "dense chain", "soft-DTW", "CTC", "graph"
    for name, omega, dtype in product(families, OMEGAS, (FLOAT32, FLOAT64)):
        yield name, SIZES[name], omega, dtype
    others = [(name, size) for name, size in SIZES.items() if name not in families]
    for name, size in (*others, ("chain from scores", 64), ("dense chain", 64), ("soft-DTW", 1024)):
        yield name, size, "negentropy", FLOAT32
        yield name, size, "Tsallis 1.5", FLOAT64


@pytest.mark.parametrize(
    ("name", "size", "omega", "dtype", "targets"),
    [(*QUICK, ["sm_80"]), *(pytest.param(*variant, TARGETS, marks=pytest.mark.slow_gpu) for variant in variants())],
)
def test_every_kernel_fits_the_limits_of_a_gpu(
    name: str, size: int, omega: str, dtype: torch.dtype, targets: Iterable[str], tmp_path: Path
) -> None:
    with emulated(executes=False) as log, bx.use_backend("triton"):
        sweeps = launches_by_sweep(log, BY_NAME[name], 4, size, omega, dtype)
    del sweeps["value"]  # a subset of "forward"
    kernels = {launch.compiled: launch for launches in sweeps.values() for launch in launches}.values()
    assert len(kernels) >= (2 if omega == "hard" else 4)  # the Hessian of hard is 0, so no sweep runs
    assert [launch.kernel for launch in kernels if not has_wide_offsets(launch)] == []
    for launch, arch in product(kernels, targets):
        registers, spilled, parked = resources(launch, TARGETS[arch], tmp_path)
        threads = launch.warps * TARGETS[arch].warp_size
        assert spilled == 0, f"{launch.kernel} spills {spilled} bytes on {arch}, {threads} threads of {registers}"
        assert parked <= PARKED, f"{launch.kernel} puts {parked} bytes away on {arch}"
        assert threads <= THREADS, f"{launch.kernel} has {threads} threads on {arch}"
        assert registers * threads <= REGISTERS[TARGETS[arch].backend], f"{launch.kernel} has {registers} on {arch}"


# Warp instructions and barriers per program and step: forward, backward, Hessian product. A tenth more is tolerated.
# If a number falls, write the new number here.
BUDGETS = {
    ("dense chain", 16): ((191, 1), (328, 1), (823, 3)),
    ("dense chain", 17): ((852, 8), (1492, 11), (3716, 27)),
    ("dense chain", 32): ((852, 8), (1492, 11), (3716, 27)),
    ("dense chain", 64): ((2760, 11), (5752, 14), (14472, 36)),
    ("chain from scores", 16): ((121, 1), (224, 1), (645, 3)),
    ("chain from scores", 17): ((536, 5), (1044, 8), (2944, 21)),
    ("chain from scores", 32): ((536, 5), (1044, 8), (2944, 21)),
    ("chain from scores", 64): ((1496, 11), (4040, 14), (11400, 36)),
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
    """Counts of instructions per program and step, by sweep."""
    per_step: dict[str, dict[str, float]] = {sweep: {} for sweep in ("forward", "backward", "hessian")}
    for steps, sign in ((4, -1), (6, 1)):
        with emulated() as log, bx.use_backend("triton"):
            launches = launches_by_sweep(log, BY_NAME[name], steps, size)
        for sweep, counts in per_step.items():
            for kind in ("instructions", "barriers"):
                total = sum(launch.counts[kind] for launch in launches[sweep])
                counts[kind] = counts.get(kind, 0) + sign * total / (2 * BATCH)
    return per_step


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*key, marks=[pytest.mark.slow_gpu] * (key != QUICK[:2])) for key in BUDGETS]
)
def test_the_cost_of_a_step_has_not_grown(name: str, size: int) -> None:
    for (sweep, counts), (instructions, barriers) in zip(a_step(name, size).items(), BUDGETS[name, size], strict=True):
        assert counts["instructions"] <= 1.1 * instructions, sweep
        assert counts["barriers"] <= barriers, sweep
