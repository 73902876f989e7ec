"""The report of ``bellmax gpu``, as JSON and as Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch

import bellmax
from bellmax.gpu_check.checks import Check
from bellmax.gpu_check.times import Compiled, Time


def versions(device: torch.device) -> dict[str, str]:
    """Names and versions of the device and of the software."""
    import triton

    module: Any = torch.get_device_module(device)
    name = platform.processor() or platform.machine() if device.type == "cpu" else module.get_device_name(device)
    return {
        "device": f"{name} ({device})",
        "runtime": _runtime(device),
        "bellmax": bellmax.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _runtime(device: torch.device) -> str:
    """Version of CUDA, HIP or XPU."""
    if device.type == "cpu":
        return "Triton's interpreter, on the CPU"
    runtimes = {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "XPU": torch.version.xpu}
    return next((f"{name} {version}" for name, version in runtimes.items() if version), "unknown")


def as_json(
    names: dict[str, str], checks: Sequence[Check], times: Sequence[Time], variants: Sequence[Compiled]
) -> dict[str, Any]:
    """Report as JSON data. ``names`` are the :func:`versions`."""
    tables: dict[str, Sequence[Any]] = {"checks": checks, "times": times, "kernels": variants}
    return {"versions": names} | {name: [row._asdict() for row in rows] for name, rows in tables.items()}


def as_markdown(
    names: dict[str, str], checks: Sequence[Check], times: Sequence[Time], variants: Sequence[Compiled]
) -> str:
    """Report as Markdown: versions, failed checks, times, and the registers of the kernels."""
    lines = [f"- {name}: {text}" for name, text in names.items()]
    right = sum(check.is_right for check in checks)
    lines += ["", f"{right} of {len(checks)} checks passed."]
    wrong = [check for check in checks if not check.is_right]
    if wrong:
        lines += [
            "",
            *_table(("program", "Ω", "dtype", "value", "gradient", "Hessian", "same twice"), map(_check_cells, wrong)),
        ]
    if times:
        head = "program", "shape", "by", "value and gradient, ms", "launches"
        lines += ["", *_table(head, [_time_cells(time) for time in times])]
    if variants:
        registers, spills = max(v.registers for v in variants), sum(v.spills for v in variants)
        lines += ["", f"{len(variants)} variants of kernels: at most {registers} registers, {spills} spills."]
    return "\n".join(lines) + "\n"


def _check_cells(check: Check) -> tuple[str, ...]:
    """Row of the table of failed checks."""
    errors = (f"{error:.1e}" for error in (check.value, check.gradient, check.hessian))
    return check.program, check.omega, check.dtype, *errors, "yes" if check.same_twice else "no"


def _time_cells(time: Time) -> tuple[str, ...]:
    """Row of the table of times."""
    launches = "" if time.launches is None else str(time.launches)
    return time.program, str(time.shape), time.who, f"{time.milliseconds:.3g}", launches


def _table(head: Sequence[str], rows: Any) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
