"""Single instructions against numpy, and faulty programs that the emulator must reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.machine import Machine, Report
from gpu.memory import KernelError
from gpu.ptx import BITS, DTYPES, Module

THREADS = 64
INF, NAN = np.inf, np.nan


def program(body: str, *parameters: str) -> Module:
    """A kernel of one block: ``%t`` is the thread, and ``%<parameter>`` each parameter, a pointer."""
    loads = "".join(f"ld.param.u64 %{name}, [{name}];\n" for name in parameters)
    declared = "".join(f".reg .b64 %{name};\n" for name in parameters)
    return Module(f"""
        .visible .entry kernel({", ".join(f".param .u64 {name}" for name in parameters)}) .reqntid {THREADS} {{
        .shared .align 16 .b8 room[1024];
        .reg .b32 %t, %s<9>; .reg .b64 %at<9>; .reg .pred %q<9>; {declared}
        {loads} mov.u32 %t, %tid.x;
        {body}
        ret;
        }}
    """)


def launch(module: Module, *arguments: Any, blocks: int = 1, **known: Any) -> Report:
    return Machine(module, (blocks, 1, 1), THREADS).run(arguments, **known)


def computed(code: str, kind: str, *operands: Any) -> Any:
    """Result %y, of type ``kind``, of an instruction on %x0, %x1, …, for each operand."""
    arrays = [np.resize(np.asarray(operand), THREADS) for operand in operands]
    kinds = [
        next(k for k in ("s16", "s32", "s64", "u32", "u64", "f32", "f64", "b8") if DTYPES[k] == a.dtype) for a in arrays
    ]
    loads = "".join(
        f".reg .b{BITS[k]} %x{i}; mad.wide.u32 %at0, %t, {BITS[k] // 8}, %in{i}; ld.global.{k} %x{i}, [%at0];\n"
        for i, k in enumerate(kinds)
    )
    store = f"mad.wide.u32 %at1, %t, {BITS[kind] // 8}, %out; st.global.{kind} [%at1], %y;"
    module = program(f"{loads} .reg .b{BITS[kind]} %y; {code} {store}", *(f"in{i}" for i in range(len(arrays))), "out")
    out = np.zeros(THREADS, DTYPES[kind])
    assert not launch(module, *arrays, out).findings
    return out


def numbers(kind: str) -> tuple[Any, Any]:
    """Two arrays with ordinary numbers and special values."""
    random = np.random.default_rng(0)
    dtype = DTYPES[kind]
    if kind[0] == "f":
        special = [0.0, -0.0, 1.0, -1.5, INF, -INF, NAN, 1e30]
        return tuple(
            np.append(special, 10 * random.standard_normal(THREADS - 8)).astype(dtype)[:: 1 - 2 * i] for i in (0, 1)
        )
    info = np.iinfo(dtype)
    special = np.array([0, 1, 2, info.max, info.min, info.max - 1], dtype)
    return tuple(
        np.append(special, random.integers(info.min, info.max, THREADS - 6, dtype))[:: 1 - 2 * i] for i in (0, 1)
    )


BINARY: list[tuple[str, Callable[..., Any]]] = [
    ("add.s32", np.add),
    ("add.s64", np.add),
    ("sub.f32", np.subtract),
    ("mul.lo.s32", np.multiply),
    ("mul.f64", np.multiply),
    ("mul.hi.u32", lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)),
    ("mul.hi.s32", lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32)),
    ("mul.hi.u64", lambda a, b: np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], np.uint64)),
    ("mul.hi.s64", lambda a, b: np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], np.int64)),
    ("min.f32", np.fmin),
    ("max.f64", np.fmax),
    ("max.NaN.f32", np.maximum),
    ("max.s32", np.maximum),
    ("min.u32", np.minimum),
    ("div.rn.f32", np.divide),
    ("and.b32", np.bitwise_and),
    ("xor.b32", np.bitwise_xor),
]


@pytest.mark.parametrize(("code", "expected"), BINARY, ids=[code for code, _ in BINARY])
def test_two_operands(code: str, expected: Callable[..., Any]) -> None:
    kind = code.rpartition(".")[2].replace("b32", "u32")
    a, b = numbers(kind)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(computed(f"{code} %y, %x0, %x1;", kind, a, b), expected(a, b))


def test_integers_divide_towards_zero() -> None:
    a, b = np.array([7, -7, 7, -7], np.int32), np.array([2, 2, -2, -2], np.int32)
    np.testing.assert_array_equal(computed("div.s32 %y, %x0, %x1;", "s32", a, b)[:4], [3, -3, -3, 3])
    np.testing.assert_array_equal(computed("rem.s32 %y, %x0, %x1;", "s32", a, b)[:4], [1, -1, 1, -1])


def test_wide_products_and_sums() -> None:
    a, b = numbers("s32")
    wide = a.astype(np.int64) * b
    np.testing.assert_array_equal(computed("mul.wide.s32 %y, %x0, %x1;", "s64", a, b), wide)
    np.testing.assert_array_equal(computed("mad.wide.s32 %y, %x0, %x1, 5;", "s64", a, b), wide + 5)
    np.testing.assert_array_equal(computed("mad.lo.s32 %y, %x0, %x1, %x0;", "s32", a, b), a * b + a)


def test_a_fused_product_is_rounded_once() -> None:
    a = np.float32(1 + 2**-12)
    assert computed("fma.rn.f32 %y, %x0, %x0, %x1;", "f32", a, np.float32(-1 - 2**-11))[0] == 2.0**-24


@pytest.mark.parametrize(
    ("code", "exact"),
    [
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("rcp.approx.f32", np.reciprocal),
        ("sqrt.approx.f32", np.sqrt),
    ],
)
def test_approximate_functions_have_small_errors(code: str, exact: Callable[..., Any]) -> None:
    x = np.linspace(0.1, 20, THREADS).astype(np.float32)
    result = computed(f"{code} %y, %x0;", "f32", x)
    np.testing.assert_allclose(result, exact(x), rtol=3e-7)
    assert (result != exact(x)).any()
    special = computed("ex2.approx.ftz.f32 %y, %x0;", "f32", np.array([0, INF, -INF, NAN], np.float32))[:4]
    np.testing.assert_array_equal(special, np.array([1, INF, 0, NAN], np.float32))


def test_the_approximate_reciprocal() -> None:
    x = np.linspace(0.1, 20, THREADS)
    result = computed("rcp.approx.ftz.f64 %y, %x0;", "f64", x)
    np.testing.assert_allclose(result, 1 / x, rtol=2.0**-19)
    assert not (result.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()


@pytest.mark.parametrize("how", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"])
def test_comparisons_with_nan(how: str) -> None:
    a, b = numbers("f32")
    a[-1] = b[-1]
    none = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        expected = none == (how == "nan")
    else:
        tests = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        expected = np.where(none, how.endswith("u"), tests[how[:2]])
    result = computed(f"setp.{how}.f32 %q0, %x0, %x1; selp.b32 %y, 1, 0, %q0;", "u32", a, b)
    np.testing.assert_array_equal(result, expected)


def test_comparisons_are_combined() -> None:
    a, b = numbers("s32")
    code = """setp.ge.s32 %q1, %x1, 0; setp.lt.and.s32 %q0|%q2, %x0, %x1, !%q1;
        selp.b32 %y, 1, 0, %q0; @%q2 add.s32 %y, %y, 2;"""
    np.testing.assert_array_equal(computed(code, "s32", a, b), ((a < b) & (b < 0)) + 2 * (~(a < b) & (b < 0)))


def test_conversions() -> None:
    x = np.array([2.5, -2.5, 3.5, -0.7, 1e20, -1e20, NAN, INF], np.float32)
    most, least = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    for how, expected in {
        "rni": [2, -2, 4, -1],
        "rzi": [2, -2, 3, 0],
        "rmi": [2, -3, 3, -1],
        "rpi": [3, -2, 4, 0],
    }.items():
        result = computed(f"cvt.{how}.s32.f32 %y, %x0;", "s32", x)
        np.testing.assert_array_equal(result[:8], [*expected, most, least, 0, most])
    np.testing.assert_array_equal(computed("cvt.rzi.s64.f32 %y, %x0;", "s64", x)[4:6], [2**63 - 1, -(2**63)])
    a, _ = numbers("s32")
    np.testing.assert_array_equal(computed("cvt.s64.s32 %y, %x0;", "s64", a), a.astype(np.int64))
    np.testing.assert_array_equal(computed("cvt.u64.u32 %y, %x0;", "u64", a), a.view(np.uint32))
    np.testing.assert_array_equal(computed("cvt.s32.s8 %y, %x0;", "s32", a), a.astype(np.int8))
    np.testing.assert_array_equal(computed("cvt.rn.f32.s32 %y, %x0;", "f32", a), a.astype(np.float32))


def test_loads_fill_wider_registers() -> None:
    small = np.array([-1, 127], np.int16)
    np.testing.assert_array_equal(computed("cvt.s32.s16 %y, %x0;", "s32", small)[:2], small)
    parameter = program(
        "ld.param.s32 %at1, [count]; mad.wide.u32 %at0, %t, 8, %out; st.global.b64 [%at0], %at1;", "out", "count"
    )
    out = np.zeros(THREADS, np.int64)
    launch(parameter, out, -5)
    assert (out == -5).all()


def test_bits() -> None:
    a, b = numbers("u32")
    small = b % 40
    np.testing.assert_array_equal(
        computed("shl.b32 %y, %x0, %x1;", "u32", a, small), np.where(small < 32, a << np.minimum(small, 31), 0)
    )
    signed = a.view(np.int32)
    np.testing.assert_array_equal(
        computed("shr.s32 %y, %x0, %x1;", "s32", signed, small), signed >> np.minimum(small, 31).astype(np.int32)
    )
    np.testing.assert_array_equal(computed("bfe.u32 %y, %x0, 5, 3;", "u32", a), a >> 5 & 7)
    np.testing.assert_array_equal(computed("bfe.s32 %y, %x0, 5, 3;", "s32", signed), signed << 24 >> 29)
    np.testing.assert_array_equal(
        computed("bfi.b32 %y, %x0, %x1, 8, 4;", "u32", a, b), b & ~np.uint32(0xF00) | (a & 15) << 8
    )
    np.testing.assert_array_equal(computed("prmt.b32 %y, %x0, %x1, 0x7610;", "u32", a, b), a & 0xFFFF | b & 0xFFFF0000)
    np.testing.assert_array_equal(computed("lop3.b32 %y, %x0, %x1, %x0, 0x3c;", "u32", a, b), a ^ b)
    np.testing.assert_array_equal(computed("popc.b32 %y, %x0;", "u32", a), [int(x).bit_count() for x in a])
    np.testing.assert_array_equal(computed("clz.b32 %y, %x0;", "u32", a), [32 - int(x).bit_length() for x in a])
    both = (a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)) << np.uint64(7) >> np.uint64(32)
    np.testing.assert_array_equal(computed("shf.l.wrap.b32 %y, %x0, %x1, 7;", "u32", a, b), both.astype(np.uint32))


def test_numbers_are_packed_and_unpacked() -> None:
    a, b = numbers("u32")
    packed = computed("mov.b64 %y, {%x0, %x1};", "u64", a, b)
    np.testing.assert_array_equal(packed, a | b.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(computed("mov.b64 {_, %y}, %x0;", "u32", packed), b)


@pytest.mark.parametrize(
    ("code", "partner"),
    [
        ("bfly.b32 %y, %x0, 5, 31", lambda lane: lane ^ 5),
        ("up.b32 %y, %x0, 3, 0", lambda lane: np.where(lane < 3, lane, lane - 3)),
        ("down.b32 %y, %x0, 3, 31", lambda lane: np.where(lane > 28, lane, lane + 3)),
        ("idx.b32 %y, %x0, 7, 31", lambda lane: 0 * lane + 7),
        ("bfly.b32 %y, %x0, 1, 7199", lambda lane: lane ^ 1),  # among groups of four
    ],
)
def test_shuffles(code: str, partner: Callable[..., Any]) -> None:
    a, _ = numbers("u32")
    lanes = np.arange(THREADS)
    expected = a[lanes - lanes % 32 + partner(lanes % 32)]
    np.testing.assert_array_equal(computed(f"shfl.sync.{code}, -1;", "u32", a), expected)


def test_warps_reduce_and_vote() -> None:
    a, _ = numbers("s32")
    rows = a.reshape(2, 32)
    np.testing.assert_array_equal(computed("redux.sync.max.s32 %y, %x0, -1;", "s32", a), np.repeat(rows.max(1), 32))
    ballot = computed("setp.lt.s32 %q0, %x0, 0; vote.sync.ballot.b32 %y, %q0, -1;", "u32", a)
    expected = [sum(1 << i for i, negative in enumerate(row < 0) if negative) for row in rows]
    np.testing.assert_array_equal(ballot, np.repeat(expected, 32))


def test_matrices_of_halves() -> None:
    """A store and a load of matrices, transposed or not, give the original."""
    code = """shl.b32 %s0, %t, 4; mov.u32 %s1, room; add.s32 %s1, %s1, %s0;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%s1], {%x0}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x1{} .shared.b16 {{%y}}, [%s1];"""
    a, _ = numbers("u32")
    plain = computed(code.replace("{} ", "").replace("{{%y}}", "{%y}"), "u32", a)
    np.testing.assert_array_equal(plain, a)
    turned = computed(code.replace("{} ", ".trans").replace("{{%y}}", "{%y}"), "u32", a)
    halves = a.view(np.uint16).reshape(2, 8, 8).transpose(0, 2, 1)
    np.testing.assert_array_equal(turned.view(np.uint16), halves.reshape(-1))


LOOP = """
    mov.b32 %s0, 0;
again: setp.ge.u32 %q0, %s0, %t;
    @%q0 bra done;
    add.s32 %s0, %s0, 1;
    bra.uni again;
done: mad.wide.u32 %at0, %t, 4, %out; st.global.b32 [%at0], %s0;
"""


def test_divergent_threads_reconverge() -> None:
    out = np.zeros(THREADS, np.uint32)
    counts = launch(program(LOOP, "out"), out).counts
    np.testing.assert_array_equal(out, np.arange(THREADS))
    assert counts["global stores"] == 2  # of one warp, after reconvergence
    assert counts["sectors written"] in range(8, 11)  # 256 bytes at any address


# Faulty programs.

PLACE = "mad.wide.u32 %at0, %t, 4, %out;"
FAR = "xor.b32 %s2, %t, 32; mad.wide.u32 %at1, %s2, 4, %out;"  # the address of a thread in the other warp
ROOM = "shl.b32 %s0, %t, 2; mov.u32 %s1, room; add.s32 %s1, %s1, %s0;"  # a word for each thread
OTHER = "xor.b32 %s2, %s0, 128; mov.u32 %s3, room; add.s32 %s3, %s3, %s2;"  # the address of the other warp
NEIGHBOUR = OTHER.replace("128", "4")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (f"{PLACE} st.global.b32 [%at0+4], %t;", "out of bounds at byte 256 of 256 of array 0"),
        (f"{PLACE} st.global.b32 [%at0+-4], %t;", "(out of bounds|wild address)"),
        (f"{PLACE} st.global.b32 [%at0+2], %t;", "misaligned"),
        ("mov.u64 %at0, 64; ld.global.b32 %s0, [%at0];", "wild address 0x40"),
        (f"{ROOM} st.shared.b32 [%s1+896], %t;", "out of bounds of 1024 bytes of shared memory"),
        ("setp.lt.u32 %q0, %t, 40; @%q0 bra here; bar.sync 0; here: bar.sync 0;", "deadlock"),
        ("tex.2d.v4.f32.f32 %s0, %s1;", "unknown instruction: tex"),
    ],
)
def test_programs_that_a_gpu_would_refuse(body: str, fault: str) -> None:
    with pytest.raises(KernelError, match=fault):
        launch(program(body, "out"), np.zeros(THREADS, np.int32))


def test_an_endless_loop_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "LIMIT", 100)
    with pytest.raises(KernelError, match="still runs after 100"):
        launch(program("again: bra.uni again;", "out"), np.zeros(1))


@pytest.mark.parametrize(
    ("body", "race"),
    [
        (
            f"{ROOM} {OTHER} st.shared.b32 [%s1], %t; {{}} ld.shared.b32 %s4, [%s3];",
            "warps in shared memory, read after write",
        ),
        (
            f"{ROOM} {NEIGHBOUR} st.shared.b32 [%s1], %t; {{}} ld.shared.b32 %s4, [%s3];",
            "lanes in shared memory, read after write",
        ),
        (
            f"{ROOM} {OTHER} st.shared.b32 [%s1], 0; ld.shared.b32 %s4, [%s1]; {{}} st.shared.b32 [%s3], 7;",
            "warps in shared memory, write after read",
        ),
        (
            f"{ROOM} {OTHER} st.shared.b32 [%s1], 1; {{}} st.shared.b32 [%s3], 7;",
            "warps in shared memory, write after write",
        ),
        (
            f"{PLACE} {FAR} st.global.b32 [%at0], 3; {{}} ld.global.b32 %s3, [%at1];",
            "warps in global memory, read after write",
        ),
    ],
)
def test_a_barrier_prevents_a_race(body: str, race: str) -> None:
    out = np.zeros(THREADS, np.int32)
    assert not launch(program(body.format("bar.sync 0;"), "out"), out).findings
    assert f"race between {race}" in " ".join(launch(program(body.format(""), "out"), out).findings)


def test_a_warp_barrier_is_enough_for_lanes() -> None:
    body = f"{ROOM} {{}} st.shared.b32 [%s1], %t; bar.warp.sync -1; ld.shared.b32 %s4, [%s3];"
    assert not launch(program(body.format(NEIGHBOUR), "out"), np.zeros(1)).findings
    assert launch(program(body.format(OTHER), "out"), np.zeros(1)).findings


@pytest.mark.parametrize("first", ["read", "write"])
def test_no_barrier_orders_blocks(first: str) -> None:
    """Each block writes one word and reads the word of the other block."""
    moves = ["ld.global.b32 %s2, [%at1];", "st.global.b32 [%at0], 7;"][:: 1 if first == "read" else -1]
    body = f"""mov.u32 %s0, %ctaid.x; xor.b32 %s1, %s0, 1;
        mad.wide.u32 %at0, %s0, 4, %out; mad.wide.u32 %at1, %s1, 4, %out; {" bar.sync 0;".join(moves)}"""
    assert not launch(program(body, "out"), np.zeros(2, np.int32)).findings
    (fault,) = launch(program(body, "out"), np.zeros(2, np.int32), blocks=2).findings
    assert (
        "race between blocks in global memory, " + ("write after read" if first == "read" else "read after write")
        in fault
    )


def test_conflicting_writes_of_one_instruction() -> None:
    faults = launch(program("st.global.b32 [%out], %t;", "out"), np.zeros(1, np.int32)).findings
    assert "race between threads in global memory, two values at once" in " ".join(faults)
    assert not launch(program("st.global.b32 [%out], 5;", "out"), np.zeros(1, np.int32)).findings


def test_reads_of_uninitialised_memory() -> None:
    read = f"{PLACE} ld.global.b32 %s0, [%at0];"
    out, written = np.zeros(THREADS, np.int32), np.zeros(4 * THREADS, bool)
    assert "unwritten global memory is read" in next(
        iter(launch(program(read, "out"), out, written={0: written}).findings)
    )
    assert not launch(program(f"{PLACE} st.global.b32 [%at0], 1;", "out"), out, written={0: written}).findings
    assert written.all()
    assert not launch(program(read, "out"), out, written={0: written}).findings
    shared = launch(program(f"{ROOM} ld.shared.b32 %s2, [%s1];", "out"), out).findings
    assert "unwritten shared memory is read" in next(iter(shared))


def test_overlapping_arrays_share_memory() -> None:
    whole = np.zeros(2 * THREADS, np.int32)
    body = f"{PLACE} st.global.b32 [%at0], %t; {FAR.replace('%out', '%again')} ld.global.b32 %s3, [%at1];"
    assert launch(program(body, "out", "again"), whole[THREADS:], whole[THREADS:]).findings
    assert not launch(program(body, "out", "again"), whole[THREADS:], whole[:THREADS]).findings
    np.testing.assert_array_equal(whole[THREADS:], np.arange(THREADS))
