"""A GPU that executes PTX with numpy: every register is an array with one entry for each thread of the whole grid.

The threads with the lowest program counter run first, so that threads reconverge after a branch. Threads that wait at
a barrier or a shuffle let later ones run. :mod:`gpu.memory` checks every access. The machine counts instructions per
warp, barriers, shuffles, accesses, 32-byte sectors of global memory, and words that are read after they were
written.

The semantics follow NVIDIA's manual and are tested by the results of kernels. The machine does not model what ptxas
makes of PTX, real scheduling, the order of accesses between two barriers, or races of a read and a later write by two
lanes of a warp. ``fma.f64`` rounds twice. Approximate functions have errors of up to two units in the last place, as
documented, but not the errors of any hardware. Denormals are not flushed to 0. Products of matrices, copies by
hardware, atomics, bfloat16 and local memory are not supported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.instructions import OPERATIONS, Mask, Run
from gpu.memory import Array, Global, KernelError, Shared, Threads
from gpu.ptx import BITS, DTYPES, UNSIGNED, Instruction, Module


@dataclass(frozen=True)
class Report:
    """Counts of the instructions of a launch, and of the faults that were detected."""

    counts: Counter[str]
    findings: Counter[str]


class Machine:
    """One kernel on one grid of blocks of ``threads`` threads."""

    LIMIT = 1_000_000

    def __init__(self, module: Module, grid: Sequence[int], threads: int, shared_bytes: int = 0) -> None:
        self.module, self.grid = module, tuple(grid)
        self.blocks = int(np.prod(self.grid))
        self.threads = Threads(self.blocks, threads)
        self.size = self.blocks * threads
        self.shared_bytes = max(module.shared_bytes, shared_bytes)
        self.registers = {name: np.zeros(self.size, _storage(kind)) for name, kind in module.registers.items()}
        self.parameters = {name: np.zeros(1, _storage(kind)) for name, kind in module.parameters}
        self._special = self._special_registers(threads)
        self._runs = [[self._decode(instruction) for instruction in block.body] for block in module.blocks]

    def run(self, arguments: Sequence[Any], written: Mapping[int, NDArray[np.bool_]] | None = None) -> Report:
        """Launch the kernel. Arrays are pointers; ``written`` maps an argument to the mask of its initialized bytes."""
        threads = self.threads
        threads.start()
        pointers = [i for i, argument in enumerate(arguments) if isinstance(argument, np.ndarray)]
        known = {n: written[i] for n, i in enumerate(pointers) if written and i in written}
        self.memory = {
            "global": Global([arguments[i] for i in pointers], known, self.module.granule("global"), threads),
            "shared": Shared(self.shared_bytes, self.module.granule("shared"), self.blocks, threads),
        }
        values = list(arguments) + [0] * (len(self.parameters) - len(arguments))  # Triton adds pointers to scratch
        for i, pointer in zip(pointers, self.memory["global"].pointers, strict=True):
            values[i] = pointer
        for (name, kind), value in zip(self.module.parameters, values, strict=True):
            self.parameters[name][...] = _bits(value, BITS[kind])
        with np.errstate(all="ignore"):
            self._execute()
        self.memory["global"].give_back()
        return Report(threads.counts, threads.findings)

    # Operands: views, so that they always show the current registers.

    def source(self, argument: str, kind: str) -> Array:
        """An operand of an instruction, read as ``kind``."""
        if argument.startswith("!"):
            raise KernelError(f"a negated operand: {argument}")
        dtype = DTYPES[kind]
        if argument in self.registers:
            register = self.registers[argument]
            return register if kind == "pred" else register.view(dtype)[:: register.itemsize // dtype.itemsize]
        if argument in self._special:
            return self._special[argument].astype(dtype)
        value = self.module.shared.get(argument)
        return np.broadcast_to(_literal(argument, kind) if value is None else np.array(value, dtype), self.size)

    def is_constant(self, argument: str) -> bool:
        return argument not in self.registers and argument not in self._special

    def target(self, argument: str, kind: str) -> Array:
        """The array for a result of type ``kind``; a wider register is sign- or zero-extended."""
        if argument == "_":
            return np.zeros(self.size, DTYPES[kind])
        register = self.registers[argument]
        if kind == "pred" or register.itemsize == DTYPES[kind].itemsize:
            return register.view(DTYPES[kind])
        return register.view(f"{'i' if kind[0] == 's' else 'u'}{register.itemsize}")

    def address(self, argument: str) -> tuple[Array, int]:
        """An address: a register or the offset of a shared variable, plus an offset."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", argument).groups()
        kind = f"u{BITS[self.module.registers[base]]}" if base in self.registers else "u64"
        return self.source(base, kind), int(offset or "0", 0)

    def _special_registers(self, threads: int) -> dict[str, Array]:
        x, y, _ = self.grid
        block, ids = self.threads.block, self.threads.ids
        at = {"x": block % x, "y": block // x % y, "z": block // (x * y)}
        registers = {f"%ctaid.{axis}": index for axis, index in at.items()}
        registers |= {f"%nctaid.{axis}": np.full_like(ids, count) for axis, count in zip("xyz", self.grid, strict=True)}
        registers |= {"%tid.x": ids % threads, "%tid.y": 0 * ids, "%tid.z": 0 * ids}
        return registers | {"%ntid.x": 0 * ids + threads, "%laneid": self.threads.lane, "%warpid": ids % threads // 32}

    # Execution, by blocks of instructions.

    def _decode(self, instruction: Instruction) -> Run:
        if instruction.name not in OPERATIONS:
            raise KernelError(f"unknown instruction: {instruction.text}")
        run = OPERATIONS[instruction.name](self, instruction)
        guard = instruction.guard
        if guard is None:
            return run
        register, expected = self.registers[guard.lstrip("!")], not guard.startswith("!")
        return lambda mask: run((register == expected) & mask)

    def _execute(self) -> None:
        threads, flow = self.threads, _Flow(self)
        visits = np.zeros(len(self.module.blocks), np.int64)
        while flow.now < flow.end:
            threads.tick()
            visits[flow.now] += flow.warps
            if threads.now >> 32 > self.LIMIT:
                raise KernelError(f"{self.module.name} still runs after {self.LIMIT} blocks of instructions")
            for run in self._runs[flow.now]:
                run(flow.here)
            flow.advance()
        self._count(visits)

    def _count(self, visits: NDArray[np.int64]) -> None:
        counts = self.threads.counts
        for block, times in zip(self.module.blocks, visits.tolist(), strict=True):
            for instruction in [*block.body, *filter(None, [block.jump])]:
                counts["instructions"] += times
                if kind := _counted(instruction):
                    counts[kind] += times


class _Flow:
    """Program counters. ``here`` is the mask of the threads that run next, ``now`` is their basic block."""

    def __init__(self, machine: Machine) -> None:
        self._threads, self._registers, self._blocks = machine.threads, machine.registers, machine.module.blocks
        self._place = np.zeros(machine.size, np.int64)
        self.now, self.end = 0, len(self._blocks)
        self._go(np.ones(machine.size, bool))

    def _go(self, here: NDArray[np.bool_]) -> None:
        self.here: Mask = True if here.all() else here
        self.warps = int(np.count_nonzero(here.reshape(-1, 32).any(1)))
        # While they stay together and before all other threads, no other thread runs, unless they wait for one.
        others = ~here & (self._place < self.end)
        waits = np.isin(self._threads.block[others], self._threads.block[here]).any()
        self._next_others = 0 if waits else int(self._place[others].min(initial=self.end))

    def advance(self) -> None:
        """Jump from the end of a block, and select the threads that run next."""
        block, after = self._blocks[self.now], self.now + 1
        jumps: Mask = block.jump is not None
        if block.jump is not None and block.jump.guard is not None:
            guard = block.jump.guard
            jumps = self._registers[guard.lstrip("!")] != guard.startswith("!")
            mine = jumps if self.here is True else jumps[self.here]
            jumps = bool(mine[0]) if mine.all() or not mine.any() else jumps
        if isinstance(jumps, bool) and (target := block.target if jumps else after) < self._next_others:
            self.now = target
            return
        np.copyto(self._place, np.where(jumps, block.target, after), where=self.here)
        self._choose()

    def _choose(self) -> None:
        """The first basic block whose threads need not wait, or have met all threads that they wait for."""
        position = self._place
        running = position < self.end
        for now in np.unique(position[running]).tolist():
            here = position == now
            if who := self._blocks[now].together:
                group = getattr(self._threads, who)
                late = np.bincount(group, weights=running & ~here) > 0
                here &= ~late[group]
            if here.any():
                self.now = now
                return self._go(here)
        if running.any():
            raise KernelError("deadlock: threads wait for others that never come")
        self.now = self.end


def _counted(instruction: Instruction) -> str | None:
    if instruction.name in ("ld", "st"):
        return f"{instruction.space} {'loads' if instruction.name == 'ld' else 'stores'}"
    return {"shfl": "shuffles", "redux": "shuffles", "ldmatrix": "shared loads", "stmatrix": "shared stores"}.get(
        instruction.name
    )


def _storage(kind: str) -> np.dtype[Any]:
    return np.dtype(bool) if kind == "pred" else np.dtype(UNSIGNED[BITS[kind]])


def _bits(value: float, bits: int) -> Array:
    """An argument as a register value."""
    if isinstance(value, float):
        return np.array(value, f"f{bits // 8}").view(UNSIGNED[bits])
    return np.array(value % (1 << bits), UNSIGNED[bits])


def _literal(text: str, kind: str) -> Array:
    """Parse a literal: ``0f3F800000``, ``0d…`` or a number."""
    if kind == "pred":
        return np.array(int(text, 0) != 0)
    if re.match(r"0[fFdD][0-9A-Fa-f]{8}", text):
        return _bits(int(text[2:], 16), 4 * len(text[2:])).view(DTYPES[kind])
    if kind[0] == "f":
        return np.array(float(text), DTYPES[kind])
    return _bits(int(text.rstrip("U"), 0), BITS[kind]).view(DTYPES[kind])
