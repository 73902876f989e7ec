"""A GPU that executes PTX with numpy: every register is an array with one entry for each thread of the whole grid.

Threads that stand at the first of all places go first, which brings those together that took different branches; who
waits for others (a barrier, a shuffle) lets later places go before. Every access is checked: see :mod:`gpu.memory`.
Counted are the instructions of a warp, barriers, shuffles, accesses, pieces of 32 bytes of global memory, and its words
that are read after they were written.

It is our reading of NVIDIA's manual, checked by the results of kernels and by its own controls. It does not know what
ptxas makes of PTX, real scheduling, the order of accesses between two barriers, or races of a read and a later write by
two lanes of a warp. ``fma.f64`` rounds twice. Approximate functions are off by up to two units in the last place, as
documented, though not by those of any hardware; small numbers are not flushed to 0. Products of matrices, copies by
hardware, atomics, bfloat16 and local memory are not there.
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
    """What a launch cost, and what was wrong with it: findings, and how often."""

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
        """Launch. An array is a pointer, of which ``written`` may tell, by argument, which bytes anybody wrote."""
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

    # Operands: arrays that are always up to date.

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
        """Where a result of type ``kind`` goes; a wider register is filled by the sign, or zeros."""
        if argument == "_":
            return np.zeros(self.size, DTYPES[kind])
        register = self.registers[argument]
        if kind == "pred" or register.itemsize == DTYPES[kind].itemsize:
            return register.view(DTYPES[kind])
        return register.view(f"{'i' if kind[0] == 's' else 'u'}{register.itemsize}")

    def address(self, argument: str) -> tuple[Array, int]:
        """A register, or where a shared variable is, and what is added to it."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", argument).groups()
        kind = f"u{BITS[self.module.registers[base]]}" if base in self.registers else "u64"
        return self.source(base, kind), int(offset or "0", 0)

    def _special_registers(self, threads: int) -> dict[str, Array]:
        x, y, _ = self.grid
        block, ids = self.threads.block, self.threads.ids
        at = {"x": block % x, "y": block // x % y, "z": block // (x * y)}
        found = {f"%ctaid.{axis}": index for axis, index in at.items()}
        found |= {f"%nctaid.{axis}": np.full_like(ids, count) for axis, count in zip("xyz", self.grid, strict=True)}
        found |= {"%tid.x": ids % threads, "%tid.y": 0 * ids, "%tid.z": 0 * ids}
        return found | {"%ntid.x": 0 * ids + threads, "%laneid": self.threads.lane, "%warpid": ids % threads // 32}

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
    """Where each thread stands: ``here`` are those that go next, ``now`` is their block of instructions."""

    def __init__(self, machine: Machine) -> None:
        self._threads, self._registers, self._blocks = machine.threads, machine.registers, machine.module.blocks
        self._place = np.zeros(machine.size, np.int64)
        self.now, self.end = 0, len(self._blocks)
        self._go(np.ones(machine.size, bool))

    def _go(self, here: NDArray[np.bool_]) -> None:
        self.here: Mask = True if here.all() else here
        self.warps = int(np.count_nonzero(here.reshape(-1, 32).any(1)))
        # As long as they stay together and come before all others, nobody else goes; unless they wait for some.
        others = ~here & (self._place < self.end)
        waits = np.isin(self._threads.block[others], self._threads.block[here]).any()
        self._next_others = 0 if waits else int(self._place[others].min(initial=self.end))

    def advance(self) -> None:
        """From the end of a block to where it leads, and find who is next."""
        block, after = self._blocks[self.now], self.now + 1
        jumps: Mask = block.jump is not None
        if block.jump is not None and block.jump.guard is not None:
            guard = block.jump.guard
            jumps = self._registers[guard.lstrip("!")] != guard.startswith("!")
            mine = jumps if self.here is True else jumps[self.here]
            jumps = bool(mine[0]) if mine.all() or not mine.any() else jumps
        if isinstance(jumps, bool) and (place := block.target if jumps else after) < self._next_others:
            self.now = place
            return
        np.copyto(self._place, np.where(jumps, block.target, after), where=self.here)
        self._choose()

    def _choose(self) -> None:
        """The first place where nobody has to wait for others, or some have all they wait for."""
        place = self._place
        running = place < self.end
        for now in np.unique(place[running]).tolist():
            here = place == now
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
    """An argument as it is handed over."""
    if isinstance(value, float):
        return np.array(value, f"f{bits // 8}").view(UNSIGNED[bits])
    return np.array(value % (1 << bits), UNSIGNED[bits])


def _literal(text: str, kind: str) -> Array:
    """``0f3F800000``, ``0d…`` and numbers."""
    if kind == "pred":
        return np.array(int(text, 0) != 0)
    if re.match(r"0[fFdD][0-9A-Fa-f]{8}", text):
        return _bits(int(text[2:], 16), 4 * len(text[2:])).view(DTYPES[kind])
    if kind[0] == "f":
        return np.array(float(text), DTYPES[kind])
    return _bits(int(text.rstrip("U"), 0), BITS[kind]).view(DTYPES[kind])
