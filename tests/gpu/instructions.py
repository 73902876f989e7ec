"""Semantics of PTX instructions: each is translated to a function that runs it for the threads of a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu.memory import Array, KernelError, Lanes
from gpu.ptx import BITS, DTYPES, Instruction

if TYPE_CHECKING:
    from gpu.machine import Machine

Mask = NDArray[np.bool_] | bool
"""Who executes: True for all."""

Run = Callable[[Mask], Any]

OPERATIONS: dict[str, Callable[[Machine, Instruction], Run]] = {}


def operation(*names: str) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        OPERATIONS.update(dict.fromkeys(names, build))
        return build

    return register


def _sources(machine: Machine, instruction: Instruction, count: int, kind: str | None = None) -> list[Array]:
    return [machine.source(argument, kind or instruction.kind) for argument in instruction.arguments[1 : 1 + count]]


def _assigned(machine: Machine, instruction: Instruction, value: Callable[[], Array], kind: str | None = None) -> Run:
    out = machine.target(instruction.arguments[0], kind or instruction.kind)
    return lambda mask: np.copyto(out, value(), where=mask, casting="unsafe")


# Arithmetic that is the same in numpy.

_UFUNCS: dict[str, tuple[np.ufunc, np.ufunc]] = {  # for integers (and predicates), and for floating-point numbers
    "add": (np.add, np.add),
    "sub": (np.subtract, np.subtract),
    "mul": (np.multiply, np.multiply),
    "and": (np.bitwise_and, np.bitwise_and),
    "or": (np.bitwise_or, np.bitwise_or),
    "xor": (np.bitwise_xor, np.bitwise_xor),
    "not": (np.invert, np.invert),
    "neg": (np.negative, np.negative),
    "abs": (np.absolute, np.absolute),
    "min": (np.minimum, np.fmin),
    "max": (np.maximum, np.fmax),
}


@operation("add", "sub", "and", "or", "xor", "not", "neg", "abs", "min", "max")
def _plain(machine: Machine, instruction: Instruction) -> Run:
    ufunc = _UFUNCS[instruction.name][instruction.kind[0] == "f" and "NaN" not in instruction.modifiers]
    sources = _sources(machine, instruction, ufunc.nin)
    out = machine.target(instruction.arguments[0], instruction.kind)
    if ufunc.nin == 1:
        (a,) = sources
        return lambda mask: ufunc(a, out=out, where=mask)
    a, b = sources
    return lambda mask: ufunc(a, b, out=out, where=mask)


@operation("mul", "mad", "fma")
def _product(machine: Machine, instruction: Instruction) -> Run:
    kind = instruction.kind
    wide = kind[0] + str(2 * BITS[kind]) if "wide" in instruction.modifiers else kind
    a, b = _sources(machine, instruction, 2)
    out = machine.target(instruction.arguments[0], wide)
    product = _upper(kind) if "hi" in instruction.modifiers else None
    if instruction.name == "mul":
        if product:
            return lambda mask: np.copyto(out, product(a, b), where=mask)
        return lambda mask: np.multiply(a, b, out=out, where=mask, dtype=out.dtype)
    c = machine.source(instruction.arguments[3], wide)
    if kind == "f32":  # rounded once
        return lambda mask: np.copyto(out, np.multiply(a, b, dtype=np.float64) + c, where=mask, casting="same_kind")
    product = product or (lambda a, b: np.multiply(a, b, dtype=out.dtype))
    return lambda mask: np.add(product(a, b), c, out=out, where=mask)


def _upper(kind: str) -> Callable[[Array, Array], Array]:
    """The upper half of a product."""
    half = BITS[kind] // 2
    if BITS[kind] < 64:
        wide = DTYPES[kind[0] + str(4 * half)]
        return lambda a, b: (np.multiply(a, b, dtype=wide) >> wide.type(2 * half)).astype(a.dtype)
    shift = DTYPES[kind].type(half)
    low = DTYPES[kind].type((1 << half) - 1)

    def product(a: Array, b: Array) -> Array:
        a0, b0, a1, b1 = a & low, b & low, a >> shift, b >> shift
        first = a0.view(np.uint64) * b0.view(np.uint64) >> np.uint64(half)
        middle = a1 * b0 + first.view(a.dtype)
        rest = a0 * b1 + (middle & low)
        return a1 * b1 + (middle >> shift) + (rest >> shift)

    return product


@operation("div", "rem")
def _divide(machine: Machine, instruction: Instruction) -> Run:
    a, b = _sources(machine, instruction, 2)
    if instruction.kind[0] == "f":
        quotient = (lambda: _rough(a / b, a, b)) if _is_rough(instruction) else (lambda: a / b)
        return _assigned(machine, instruction, quotient)

    def whole() -> Array:
        sign = np.where((a < 0) == (b < 0), 1, -1).astype(a.dtype)
        return sign * (np.abs(a) // np.abs(b))

    return _assigned(machine, instruction, whole if instruction.name == "div" else lambda: a - whole() * b)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}


@operation(*_FUNCTIONS)
def _function(machine: Machine, instruction: Instruction) -> Run:
    (a,) = _sources(machine, instruction, 1)
    f = _FUNCTIONS[instruction.name]
    if not _is_rough(instruction):
        return _assigned(machine, instruction, lambda: f(a))
    if instruction.kind == "f64":
        return _assigned(machine, instruction, lambda: _upper_half(f(_upper_half(a))))
    return _assigned(machine, instruction, lambda: _rough(f(a), a))


def _is_rough(instruction: Instruction) -> bool:
    return bool({"approx", "full"} & set(instruction.modifiers))


def _upper_half(x: Array) -> Array:
    """Round to the 20 fractional bits that approximate functions of float64 read and write."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64)


_HASH = 0x9E3779B1, 0x85EBCA6B
_ERRORS = np.array([-2, -1, -1, 0, 0, 1, 1, 2], np.int32)


def _rough(result: Array, *operands: Array) -> Array:
    """Add a deterministic error of up to two units in the last place; exact at 0."""
    seed = sum(number.view(np.uint32) * np.uint32(odd) for number, odd in zip(operands, _HASH, strict=False))
    size = np.abs(result)
    exact = (operands[0] == 0) | (size < 2.0**-120) | ~(size < 2.0**120)
    return np.where(exact, result, (result.view(np.int32) + _ERRORS[seed >> np.uint32(29)]).view(np.float32))


# Comparisons, choices and conversions.

_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@operation("setp")
def _compare(machine: Machine, instruction: Instruction) -> Run:
    how, *rest = instruction.modifiers
    a, b = _sources(machine, instruction, 2)
    names = instruction.arguments[0].split("|")
    outs = [machine.target(name, "pred") for name in names]
    test = _comparison(how, instruction.kind)
    if len(outs) == 1 and rest[0] not in _COMBINED:
        (out,) = outs
        if how in _COMPARISONS and how != "ne":  # comparisons of numpy are ordered, except ≠
            return lambda mask: _COMPARISONS[how](a, b, out=out, where=mask)
        return lambda mask: np.copyto(out, test(a, b), where=mask)
    last = instruction.arguments[3] if rest[0] in _COMBINED else "1"
    third, negated = machine.source(last.lstrip("!"), "pred"), last.startswith("!")
    combine = _COMBINED.get(rest[0], np.logical_and)

    def run(mask: Mask) -> None:
        result, other = test(a, b), third != negated
        np.copyto(outs[0], combine(result, other), where=mask)
        if len(outs) > 1:
            np.copyto(outs[1], combine(~result, other), where=mask)

    return run


def _comparison(how: str, kind: str) -> Callable[[Array, Array], NDArray[np.bool_]]:
    if how in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (how == "nan")
    if how in _COMPARISONS:
        ufunc = _COMPARISONS[how]
        return (lambda a, b: (a < b) | (a > b)) if how == "ne" and kind[0] == "f" else ufunc
    ufunc = _COMPARISONS[how[:-1]]  # true for NaN
    return lambda a, b: ufunc(a, b) | np.isnan(a) | np.isnan(b)


@operation("selp")
def _select(machine: Machine, instruction: Instruction) -> Run:
    a, b = _sources(machine, instruction, 2)
    chosen = machine.source(instruction.arguments[3], "pred")
    return _assigned(machine, instruction, lambda: np.where(chosen, a, b))


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt")
def _convert(machine: Machine, instruction: Instruction) -> Run:
    to, source = instruction.kinds
    (a,) = _sources(machine, instruction, 1)
    rounded = next((_ROUND[modifier] for modifier in instruction.modifiers if modifier in _ROUND), None)
    if source[0] != "f":
        return _assigned(machine, instruction, lambda: a.astype(DTYPES[to]), to)
    if to[0] == "f":
        return _assigned(machine, instruction, (lambda: rounded(a)) if rounded else (lambda: a.astype(DTYPES[to])), to)
    low, high = np.iinfo(DTYPES[to]).min, np.iinfo(DTYPES[to]).max

    def whole() -> Array:
        number = np.where(np.isnan(a), 0.0, rounded(a).astype(np.float64))
        inside = np.clip(number, float(low), np.nextafter(float(high) + 1, 0)).astype(DTYPES[to])
        return np.where(number >= float(high), np.array(high, DTYPES[to]), inside)

    return _assigned(machine, instruction, whole, to)


@operation("mov", "cvta")
def _move(machine: Machine, instruction: Instruction) -> Run:
    out, operand = instruction.arguments
    kind = instruction.kind
    if out.startswith("{"):
        return _unpack(machine, _items(out), machine.source(operand, kind))
    if operand.startswith("{"):
        return _assigned(machine, instruction, _packed(machine, _items(operand), kind))
    source, target = machine.source(operand, kind), machine.target(out, kind)
    return lambda mask: np.copyto(target, source, where=mask)


def _items(argument: str) -> list[str]:
    return [item.strip() for item in argument.strip("{} ").split(",")]


def _unpack(machine: Machine, names: list[str], source: Array) -> Run:
    small = f"b{8 * source.itemsize // len(names)}"
    parts = source.view(DTYPES[small]).reshape(len(source), -1).T
    targets = [(machine.target(name, small), chunk) for name, chunk in zip(names, parts, strict=True) if name != "_"]

    def run(mask: Mask) -> None:
        for target, chunk in targets:
            np.copyto(target, chunk, where=mask)

    return run


def _packed(machine: Machine, names: list[str], kind: str) -> Callable[[], Array]:
    small = f"b{BITS[kind] // len(names)}"
    parts = [machine.source(name, small) for name in names]
    return lambda: np.stack(parts, 1).view(DTYPES[kind])[:, 0]


# Bits.


@operation("shl", "shr")
def _shift(machine: Machine, instruction: Instruction) -> Run:
    kind = instruction.kind
    a, bits = machine.source(instruction.arguments[1], kind), machine.source(instruction.arguments[2], "u32")
    shift = np.left_shift if instruction.name == "shl" else np.right_shift
    if a.dtype.kind == "i":
        return _assigned(machine, instruction, lambda: shift(a, np.minimum(bits, BITS[kind] - 1).astype(a.dtype)))
    out = machine.target(instruction.arguments[0], kind)
    if machine.is_constant(instruction.arguments[2]) and bits[0] < BITS[kind]:
        by = bits.astype(a.dtype)
        return lambda mask: shift(a, by, out=out, where=mask)
    return _assigned(
        machine, instruction, lambda: np.where(bits < BITS[kind], shift(a, (bits % BITS[kind]).astype(a.dtype)), 0)
    )


@operation("shf")
def _funnel(machine: Machine, instruction: Instruction) -> Run:
    """A funnel shift of two words."""
    low, high, bits = _sources(machine, instruction, 3, "u32")
    limit = (lambda: np.minimum(bits, 32)) if "clamp" in instruction.modifiers else (lambda: bits & np.uint32(31))

    def value() -> Array:
        both, by = high.astype(np.uint64) << np.uint64(32) | low, limit().astype(np.uint64)
        return ((both << by) >> np.uint64(32) if "l" in instruction.modifiers else both >> by).astype(np.uint32)

    return _assigned(machine, instruction, value)


@operation("bfe")
def _extract(machine: Machine, instruction: Instruction) -> Run:
    """Extract a bit field, sign-extended for signed types."""
    (a,) = _sources(machine, instruction, 1)
    start, length = (machine.source(argument, "u32").astype(np.int64) for argument in instruction.arguments[2:4])
    bits = BITS[instruction.kind]
    left = bits - np.minimum(start + length, bits)
    up, down = left.astype(a.dtype), np.minimum(left + start, bits - 1).astype(a.dtype)
    if not all(machine.is_constant(argument) for argument in instruction.arguments[2:4]) or not length.all():
        raise KernelError(f"unknown instruction: {instruction.text}")
    return _assigned(machine, instruction, lambda: a << up >> down)


@operation("bfi")
def _insert(machine: Machine, instruction: Instruction) -> Run:
    a, b = _sources(machine, instruction, 2)
    start, length = (machine.source(x, instruction.kind) for x in instruction.arguments[3:])

    def value() -> Array:
        bits = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << start.astype(np.uint64)
        return (b & ~bits) | ((a.astype(np.uint64) << start.astype(np.uint64)) & bits)

    return _assigned(machine, instruction, value)


@operation("prmt")
def _permute(machine: Machine, instruction: Instruction) -> Run:
    """Select four of eight bytes, or replicate their signs."""
    a, b, choice = _sources(machine, instruction, 3, "b32")

    def value() -> Array:
        both = np.stack([a, b], 1).view(np.uint8)
        pick = (choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
        taken = np.take_along_axis(both, (pick & np.uint32(7)).astype(np.intp), 1)
        return np.where(pick & np.uint32(8), (taken.view(np.int8) >> 7).view(np.uint8), taken).view(np.uint32)[:, 0]

    return _assigned(machine, instruction, value)


@operation("lop3")
def _logic(machine: Machine, instruction: Instruction) -> Run:
    """Apply a function of three bits, by its truth table."""
    operands = _sources(machine, instruction, 3)
    table = int(instruction.arguments[4], 0)

    def value() -> Array:
        result = np.zeros_like(operands[0])
        for row in (row for row in range(8) if table >> row & 1):
            a, b, c = (x if row >> 2 - i & 1 else ~x for i, x in enumerate(operands))
            result |= a & b & c
        return result

    return _assigned(machine, instruction, value)


@operation("popc", "clz")
def _count_bits(machine: Machine, instruction: Instruction) -> Run:
    (a,) = _sources(machine, instruction, 1)
    if instruction.name == "popc":
        return _assigned(machine, instruction, lambda: np.bitwise_count(a), "u32")
    powers = np.array([1 << bit for bit in range(BITS[instruction.kind])], a.dtype)
    return _assigned(machine, instruction, lambda: len(powers) - np.searchsorted(powers, a, side="right"), "u32")


# Memory.


def _lanes(mask: Mask) -> Lanes:
    return slice(None) if mask is True else np.flatnonzero(mask)


def _addresses(base: Array, offset: int, lanes: Lanes, count: int, width: int) -> Array:
    """Byte offsets of ``count`` numbers of ``width`` bytes for each lane."""
    steps = np.arange(count) * width + offset
    return (base[lanes, None].astype(np.int64) + steps).view(np.uint64)


@operation("ld")
def _load(machine: Machine, instruction: Instruction) -> Run:
    out, address = instruction.arguments[:2]
    kind, where, space = instruction.kind, instruction.text, instruction.space
    if space == "param":
        return _parameter(machine, instruction)
    items = _items(out)
    targets = [machine.target(item, kind) for item in items]
    base, offset = machine.address(address)
    width = BITS[kind] // 8

    def run(mask: Mask) -> None:
        memory, lanes = machine.memory[space], _lanes(mask)
        addresses = _addresses(base, offset, lanes, len(items), width)
        if len(addresses):
            words = memory.load(memory.locate(addresses, lanes, width, False, where), lanes, where)
            for target, column in zip(targets, words.view(DTYPES[kind]).T, strict=True):
                target[lanes] = column

    return run


def _parameter(machine: Machine, instruction: Instruction) -> Run:
    out, address = instruction.arguments
    source = machine.parameters[address.strip("[] ")].view(DTYPES[instruction.kind])[:1]
    target = machine.target(out, instruction.kind)
    return lambda mask: np.copyto(target, source, where=mask)


@operation("st")
def _store(machine: Machine, instruction: Instruction) -> Run:
    address, operand = instruction.arguments[:2]
    kind, where, space = instruction.kind, instruction.text, instruction.space
    sources = [machine.source(item, kind) for item in _items(operand)]
    base, offset = machine.address(address)
    width = BITS[kind] // 8

    def run(mask: Mask) -> None:
        memory, lanes = machine.memory[space], _lanes(mask)
        addresses = _addresses(base, offset, lanes, len(sources), width)
        if len(addresses):
            words = np.stack([source[lanes] for source in sources], 1).view(memory.words.dtype)
            memory.store(memory.locate(addresses, lanes, width, True, where), lanes, words, where)

    return run


@operation("ldmatrix", "stmatrix")
def _matrices(machine: Machine, instruction: Instruction) -> Run:
    """8 × 8 halves of words; lane 8k + r has the address of row r of the k-th, lane l its numbers 2l and 2l + 1."""
    load, where = instruction.name == "ldmatrix", instruction.text
    names, address = instruction.arguments if load else instruction.arguments[::-1]
    registers = [machine.registers[name] for name in _items(names)]
    base, offset = machine.address(address)
    lane = machine.threads.lane[:, None]
    matrix, number = np.divmod(np.arange(2 * len(registers)), 2)
    row, column = lane // 4 + 0 * number, 2 * (lane % 4) + number
    if "trans" in instruction.modifiers:
        row, column = column, row
    holder = machine.threads.ids[:, None] - lane + 8 * matrix + row

    def run(mask: Mask) -> None:
        memory, lanes = machine.memory["shared"], _lanes(mask)
        starts = base[holder[lanes]].astype(np.int64) + offset
        if (starts % 16).any():
            raise KernelError(f"misaligned access to shared memory: {where}")
        at = memory.elements(memory.offsets((starts + 2 * column[lanes]).view(np.uint64), lanes, 2, not load, where), 2)
        if load:
            words = memory.load(at, lanes, where).view(np.uint32)
            for register, word in zip(registers, words.T, strict=True):
                register[lanes] = word
        else:
            words = np.stack([register[lanes] for register in registers], 1).view(memory.words.dtype)
            memory.store(at, lanes, words, where)

    return run


# Barriers, shuffles and votes.


@operation("bar", "barrier")
def _barrier(machine: Machine, instruction: Instruction) -> Run:
    threads, who = machine.threads, instruction.together

    def run(mask: Mask) -> None:
        lanes = _lanes(mask)
        threads.meet(who, lanes)
        if who == "block":
            threads.counts["barriers"] += (
                machine.blocks if mask is True else int(np.count_nonzero(np.diff(threads.block[lanes]))) + 1
            )

    return run


@operation("shfl")
def _shuffle(machine: Machine, instruction: Instruction) -> Run:
    a = machine.source(instruction.arguments[1], "b32")
    by, control = machine.source(instruction.arguments[2], "s32"), machine.source(instruction.arguments[3], "s32")
    names = instruction.arguments[0].split("|")
    outs = [machine.target(name, kind) for name, kind in zip(names, ("b32", "pred"), strict=False)]
    lane, first = machine.threads.lane, machine.threads.ids - machine.threads.lane

    def partners() -> tuple[Array, Array]:
        segment, clamp = control >> 8 & 31, control & 31
        high = (lane & segment) | (clamp & ~segment)
        if "up" in instruction.modifiers:
            other = lane - by
            reached = other >= high
        else:
            other = {"bfly": lane ^ by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}[
                instruction.modifiers[1]
            ]
            reached = other <= high
        return first + np.where(reached, other, lane), reached

    fixed = partners() if all(map(machine.is_constant, instruction.arguments[2:4])) else None

    def run(mask: Mask) -> None:
        partner, reached = fixed or partners()
        np.copyto(outs[0], a[partner], where=mask)
        for out in outs[1:]:
            np.copyto(out, reached, where=mask)

    return run


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum} | {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@operation("redux")
def _reduce(machine: Machine, instruction: Instruction) -> Run:
    (a,) = _sources(machine, instruction, 1)
    ufunc = next(_REDUCTIONS[modifier] for modifier in instruction.modifiers if modifier in _REDUCTIONS)
    return _assigned(machine, instruction, lambda: np.repeat(ufunc.reduce(a.reshape(-1, 32), 1, dtype=a.dtype), 32))


@operation("vote")
def _vote(machine: Machine, instruction: Instruction) -> Run:
    name = instruction.arguments[1]
    source, expected = machine.source(name.lstrip("!"), "pred"), not name.startswith("!")
    how = instruction.modifiers[1]
    out = machine.target(instruction.arguments[0], instruction.kind)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)

    def run(mask: Mask) -> None:
        votes = ((source == expected) & mask).reshape(-1, 32)
        silent = ~np.broadcast_to(mask, source.shape).reshape(-1, 32)
        if how == "ballot":
            ballot = (votes * bits).sum(1, dtype=np.uint32)
        else:
            ballot = votes.any(1) if how == "any" else (votes | silent).all(1)
        np.copyto(out, np.repeat(ballot, 32), where=mask)

    return run


@operation("fence", "membar", "nanosleep", "griddepcontrol", "createpolicy")
def _nothing(machine: Machine, instruction: Instruction) -> Run:
    return lambda mask: None
