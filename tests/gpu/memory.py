"""Memory that checks every access for bounds, uninitialized reads and races.

A race is two unordered accesses to one address by different threads, one of them a write of another value. A
barrier orders the warps of a block, a barrier of a warp its lanes; nothing orders blocks.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from gpu.ptx import UNSIGNED

Array = NDArray[np.generic]
Lanes = slice | NDArray[np.intp]
"""Some threads, or all."""

_LOW = (1 << 32) - 1
_MANY = _LOW  # marks words with readers in more than one warp or block


class KernelError(Exception):
    """A fault that a GPU would answer with an error, wrong results, or no sign at all."""


class Threads:
    """All threads of a grid, and the times of the last barriers of each block and warp.

    The upper half of an access record is its time, the lower half the thread.
    """

    def __init__(self, blocks: int, threads: int) -> None:
        self.ids = np.arange(blocks * threads)
        self.block, self.lane = self.ids // threads, self.ids % threads % 32
        self.warp = self.ids // 32
        self.since = {"block": np.zeros_like(self.ids), "warp": np.zeros_like(self.ids)}
        self.start()

    def start(self) -> None:
        self.now = 0
        for since in self.since.values():
            since[:] = 0
        self.counts: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()

    def tick(self) -> None:
        self.now += 1 << 32

    def meet(self, who: str, lanes: Lanes) -> None:
        """Record a barrier, at the start of the current time step."""
        for kind in ("warp", "block") if who == "block" else ("warp",):
            self.since[kind][lanes] = self.now - 1

    def find(self, what: str, where: str, count: int = 1) -> None:
        self.findings[f"{what}: {where}"] += count


class Memory:
    """Words of ``granule`` bytes: the smallest that the kernel touches. An access is an array (lanes, words)."""

    def __init__(self, name: str, size: int, granule: int, threads: Threads) -> None:
        count = -(-size // granule)
        self.name, self.granule, self.threads = name, granule, threads
        self.words: Array = np.zeros(count, UNSIGNED[8 * granule])
        self.valid = np.zeros(count, bool)
        self.wrote, self.read = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def locate(self, addresses: Array, lanes: Lanes, width: int, store: bool, where: str) -> NDArray[np.int64]:
        """The words at addresses (lanes, items) of numbers of ``width`` bytes."""
        if (addresses[:, 0] % np.uint64(width * addresses.shape[1])).any():
            raise KernelError(f"misaligned access to {self.name} memory: {where}")
        return self.elements(self.offsets(addresses, lanes, width, store, where), width)

    def elements(self, offsets: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """The words of numbers of ``width`` bytes at offsets (lanes, items)."""
        at, parts = offsets // self.granule, width // self.granule
        return at if parts == 1 else (at[..., None] + np.arange(parts)).reshape(len(at), -1)

    def offsets(self, addresses: Array, lanes: Lanes, width: int, store: bool, where: str) -> NDArray[np.int64]:
        raise NotImplementedError

    def load(self, at: NDArray[np.int64], lanes: Lanes, where: str) -> Array:
        threads = self.threads
        if not self.valid[at].all():
            threads.find(f"unwritten {self.name} memory is read", where)
        self._report("read after write", self._unordered(at, lanes), where)
        warp, since = threads.warp[lanes, None], threads.since["block"][lanes, None]
        before, mine = self.read[at], threads.now | warp
        self.read[at] = mine
        many = (self.read[at] != mine) | ((before > since) & (before & _LOW != warp))
        if many.any():
            self.read[at[many]] = threads.now | _MANY
        return self.words[at]

    def store(self, at: NDArray[np.int64], lanes: Lanes, words: Array, where: str) -> None:
        threads = self.threads
        changed = self.differ(self.words[at], words)
        if changed.any():
            unordered = {who: pairs & changed for who, pairs in self._unordered(at, lanes).items()}
            self._report("write after write", unordered, where)
            read = self.read[at]
            late = (read > threads.since["block"][lanes, None]) & (read & _LOW != threads.warp[lanes, None]) & changed
            self._report("write after read", {"warps": late}, where)
        self.words[at] = words
        self._report("two values at once", {"threads": self.differ(self.words[at], words)}, where)
        self.wrote[at] = threads.now | threads.ids[lanes, None]
        self.valid[at] = True

    def _unordered(self, at: NDArray[np.int64], lanes: Lanes) -> dict[str, NDArray[np.bool_]]:
        """Words that another thread wrote without a barrier since then."""
        threads, wrote = self.threads, self.wrote[at]
        if not (wrote > self.floor(lanes)).any():
            return {}
        writer, me = wrote & _LOW, threads.ids[lanes, None]
        other = (wrote > 0) & (writer != me)
        of_block = threads.block[writer] == threads.block[me]
        of_warp = threads.warp[writer] == threads.warp[me]
        return {
            "blocks": other & ~of_block,
            "warps": other & of_block & ~of_warp & (wrote > threads.since["block"][lanes, None]),
            "lanes": other & of_warp & (wrote > threads.since["warp"][lanes, None]),
        }

    def floor(self, lanes: Lanes) -> Array | int:
        """The time before which all accesses are ordered."""
        return 0

    def differ(self, a: Array, b: Array) -> NDArray[np.bool_]:
        """True where two conflicting writes differ."""
        return a != b

    def _report(self, what: str, conflicts: Mapping[str, NDArray[np.bool_]], where: str) -> None:
        for who, pairs in conflicts.items():
            if pairs.any():
                self.threads.find(f"race between {who} in {self.name} memory, {what}", where, int(pairs.sum()))


class Shared(Memory):
    """``size`` bytes for each block."""

    def __init__(self, size: int, granule: int, blocks: int, threads: Threads) -> None:
        self.size = -(-size // 16) * 16
        super().__init__("shared", self.size * blocks, granule, threads)

    def offsets(self, addresses: Array, lanes: Lanes, width: int, store: bool, where: str) -> NDArray[np.int64]:
        if (addresses > self.size - width).any():
            raise KernelError(f"out of bounds of {self.size} bytes of shared memory: {where}")
        return addresses.astype(np.int64) + self.size * self.threads.block[lanes, None]

    def floor(self, lanes: Lanes) -> Array | int:
        return self.threads.since["block"][lanes, None]

    def differ(self, a: Array, b: Array) -> NDArray[np.bool_]:
        """Ignore differences of rounding: several lanes store the same sum, each computed in a different order."""
        rounded = (a - b + a.dtype.type(4) <= 8) & (np.minimum(a, b) > 1 << 16)  # excludes small integers
        return (a != b) & ~rounded


class Global(Memory):
    """Arrays at separate addresses with their real alignment.

    Overlapping arrays share memory. ``written`` holds the masks of initialized bytes of some arrays; other arrays are
    initialized.
    """

    SPACING = np.uint64(40)
    PHASE = 256

    def __init__(
        self, arrays: Sequence[Array], written: Mapping[int, NDArray[np.bool_]], granule: int, threads: Threads
    ) -> None:
        self.arrays, self.written = arrays, written
        spans = [byte_bounds(array) for array in arrays]
        starts, size = _places(spans, self.PHASE)
        super().__init__("global", size, granule, threads)
        bytes_, valid = self.words.view(np.uint8), np.ones(len(self.words) * granule, bool)
        self.slices = [slice(start, start + high - low) for start, (low, high) in zip(starts, spans, strict=True)]
        for i, (array, span) in enumerate(zip(arrays, self.slices, strict=True)):
            bytes_[span] = _bytes(array)
            if i in written:
                valid[span] = written[i]
        self.valid[:] = valid.reshape(-1, granule).all(1)
        phases = [low % self.PHASE for low, _ in spans]
        self.pointers = [((i + 1) << int(self.SPACING)) + phase for i, phase in enumerate(phases)]
        self._first, self._start = np.array(phases, np.int64), np.array(starts, np.int64)
        self._size = np.array([high - low for low, high in spans], np.int64)
        self._reader = np.zeros(len(self.words), np.int64)  # block of the last access, or _MANY, regardless of barriers

    def load(self, at: NDArray[np.int64], lanes: Lanes, where: str) -> Array:
        before, mine = self._reader[at], self.threads.block[lanes, None] + 1
        self._reader[at] = mine
        many = (self._reader[at] != mine) | ((before != mine) & (before > 0))
        if many.any():
            self._reader[at[many]] = _MANY
        self.threads.counts["words read back"] += int(np.count_nonzero(self.wrote[at]))
        return super().load(at, lanes, where)

    def store(self, at: NDArray[np.int64], lanes: Lanes, words: Array, where: str) -> None:
        reader = self._reader[at]
        late = (reader > 0) & (reader != self.threads.block[lanes, None] + 1) & (self.words[at] != words)
        self._report("write after read", {"blocks": late}, where)
        super().store(at, lanes, words, where)

    def offsets(self, addresses: Array, lanes: Lanes, width: int, store: bool, where: str) -> NDArray[np.int64]:
        which = (addresses >> self.SPACING) - np.uint64(1)
        if (which >= len(self._size)).any():
            raise KernelError(f"wild address {hex(int(addresses[which >= len(self._size)][0]))}: {where}")
        which = which.astype(np.int64)
        offsets = (addresses & ((np.uint64(1) << self.SPACING) - np.uint64(1))).astype(np.int64) - self._first[which]
        outside = (offsets < 0) | (offsets > self._size[which] - width)
        if outside.any():
            offset, array = offsets[outside][0], which[outside][0]
            raise KernelError(f"out of bounds at byte {offset} of {self._size[array]} of array {array}: {where}")
        self._count_sectors(addresses[:, 0], lanes, "written" if store else "read")
        return offsets + self._start[which]

    def _count_sectors(self, addresses: Array, lanes: Lanes, how: str) -> None:
        """Number of 32-byte sectors that each warp touches."""
        keys = (addresses // np.uint64(32)).astype(np.int64) | self.threads.warp[lanes] << 44
        keys.sort()
        self.threads.counts[f"sectors {how}"] += 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))

    def give_back(self) -> None:
        """Copy the results of the kernel back into the arrays."""
        bytes_, valid = self.words.view(np.uint8), np.repeat(self.valid, self.granule)
        for i, (array, span) in enumerate(zip(self.arrays, self.slices, strict=True)):
            _bytes(array)[:] = bytes_[span]
            if i in self.written:
                self.written[i][:] = valid[span]


def _places(spans: Sequence[tuple[int, int]], phase: int) -> tuple[list[int], int]:
    """Offset of each span of real addresses in one buffer, and the size of the buffer."""
    starts, size, end, shift = [0] * len(spans), 0, -1, 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i]):
        low, high = spans[i]
        if low >= end:  # does not overlap an earlier span
            shift = -(-size // phase) * phase + low % phase - low
        starts[i], end = low + shift, max(end, high)
        size = max(size, high + shift)
    return starts, -(-size // phase) * phase


def _bytes(array: Array) -> NDArray[np.uint8]:
    """All bytes from the first to the last of an array, including gaps between elements."""
    low, high = byte_bounds(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
