"""What single PTX instructions do, beside NumPy and Python's whole numbers; run by `test_softgpu.py`.

The rarer ones, of division, exponentials and bytes, are seen where `soft_gpu.py` compares kernels with the oracle.
"""

import operator

import numpy as np
import pytest
from numba import cuda
from ptx_runner import run
from tables import each

import softgpu
from softgpu import assembler, ptx
from softgpu.cubin import Resources

RNG = np.random.default_rng(0)
EDGES = {
    "u32": np.array([0, 1, 2, 3, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1], np.uint32),
    "s32": np.array([0, 1, -1, 2, -3, 31, 32, 2**31 - 1, -(2**31), 77, -78, 12], np.int32),
    "u64": np.array([0, 1, 2, 63, 64, 2**32, 2**32 - 1, 2**63, 2**64 - 1, 5, 7, 9], np.uint64),
    "s64": np.array([0, 1, -1, -2, 63, 2**32, -(2**32), 2**63 - 1, -(2**63), 5, 7, -9], np.int64),
    "u16": np.array([0, 1, 2, 15, 16, 255, 256, 2**15, 2**16 - 1, 3, 5, 7], np.uint16),
    "s16": np.array([0, 1, -1, 15, 16, 255, -256, 2**15 - 1, -(2**15), 3, -5, 7], np.int16),
    "f32": np.array([0, -0.0, 1, -1, 1.5, 1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 0.1], np.float32),
    "f64": np.array([0, -0.0, 1, -1, 1.5, 1e-310, 1e308, -1e308, np.inf, -np.inf, np.nan, 0.1], np.float64),
}
REGISTERS = {1: "h", 2: "h", 4: "r", 8: "rd"}


def pairs(kind: str) -> np.ndarray:
    """Return pairs of edge cases and random ones, (n, 2)."""
    edges = EDGES[kind]
    every = np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)
    if kind[0] == "f":
        drawn = (RNG.standard_normal((100, 2)) * 10.0 ** RNG.integers(-30, 30, (100, 2))).astype(edges.dtype)
    else:
        drawn = np.frombuffer(RNG.bytes(200 * edges.itemsize), edges.dtype).reshape(100, 2)
    return np.concatenate([every, drawn])


def register(kind: str, number: int) -> str:
    if kind[0] == "f":
        return f"%{'f' if kind == 'f32' else 'd'}{number}"
    return f"%{REGISTERS[int(kind[1:]) // 8]}{10 + number if kind[1:] == '64' else number + 8}"


def computed(instruction: str, x: np.ndarray, kind: str, result: str = "", more: str = "") -> np.ndarray:
    """Return what `instruction d, a, b...` makes of each row of operands; `more` stands after them."""
    result, names = result or kind, [register(kind, i) for i in range(x.shape[1])]
    loads = " ".join(f"ld.global.{kind} {name}, [%rd1+{i * x.itemsize}];" for i, name in enumerate(names))
    d = register(result, 3)
    body = f"{loads} {instruction} {d}, {', '.join(names)}{more}; st.global.{result} [%rd2], {d};"
    return run(body, x, len(x), EDGES[result].dtype)


def wrapped(value: int, kind: str) -> int:
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


WHOLE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": trunc_div,
    "rem": lambda a, b: a - b * trunc_div(a, b),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
KINDS = ("u32", "s32", "u64", "s64", "u16", "s16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WHOLE)
def test_arithmetic_of_whole_numbers(name, kind):
    x, of = pairs(kind), f"b{kind[1:]}" if name in ("and", "or", "xor") else kind
    if kind == "s16" and name in ("min", "max", "div", "rem"):
        with pytest.raises(Exception, match=r"INVALID_IMAGE"):
            computed(f"{name}.{kind}", x, kind)
        softgpu.revive()
        return
    for (a, b), found in zip(x.tolist(), computed(f"{name}.{of}", x, kind).tolist(), strict=True):
        if b or name not in ("div", "rem"):
            assert found == wrapped(WHOLE[name](a, b), kind), (a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_full_width(kind):
    x, bits = pairs(kind), int(kind[1:])
    products = [a * b for a, b in x.tolist()]
    assert computed(f"mul.hi.{kind}", x, kind).tolist() == [wrapped(product >> bits, kind) for product in products]
    if bits == 32:
        assert computed(f"mul.wide.{kind}", x, kind, f"{kind[0]}64").tolist() == products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["shl", "shr"])
def test_shifts_by_more_than_there_is(name, kind):
    x, bits = pairs(kind)[:, :1], int(kind[1:])
    for by in (0, 1, bits - 1, bits, bits + 7, 2**31):
        y = computed(f"shl.b{bits}" if name == "shl" else f"shr.{kind}", x, kind, more=f", {by}")
        for a, found in zip(x[:, 0].tolist(), y.tolist(), strict=True):
            assert found == wrapped(a << min(by, 64) if name == "shl" else a >> min(by, 64), kind), (a, by)


def clipped(values: np.ndarray, least: int, most: int) -> np.ndarray:
    return np.nan_to_num(np.clip(values.astype(np.float64), least, most), nan=0)


@pytest.mark.parametrize("kind", [*KINDS, "f32", "f64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name, kind):
    x, a, b = pairs(kind), register(kind, 0), register(kind, 1)
    unordered = f"{name}u" if kind[0] == "f" else name
    body = f"""
    ld.global.{kind} {a}, [%rd1]; ld.global.{kind} {b}, [%rd1+{x.itemsize}];
    setp.{name}.{kind} %p1, {a}, {b}; setp.{unordered}.{kind} %p2, {a}, {b};
    selp.u32 %r4, 1, 0, %p1; selp.u32 %r5, 2, 0, %p2; or.b32 %r4, %r4, %r5;
    st.global.u32 [%rd2], %r4;
    """
    for (a, b), found in zip(x.tolist(), run(body, x, len(x), np.uint32).tolist(), strict=True):
        nan = a != a or b != b
        wanted = getattr(operator, name)(a, b) and not nan
        assert found == wanted + 2 * (wanted or nan), (a, b)


IEEE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide, "min": np.fmin, "max": np.fmax}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("instruction", IEEE)
def test_floating_point_is_that_of_ieee(instruction, kind):
    x = pairs(kind)
    y = computed(f"{instruction}.{kind}", x, kind)
    with np.errstate(all="ignore"):
        wanted = IEEE[instruction](x[:, 0], x[:, 1])
    if instruction in ("min", "max"):  # of two zeros, either
        y, wanted = y + 0, wanted + 0
    np.testing.assert_array_equal(y, wanted)


def test_a_fused_multiply_add_rounds_once():
    x = np.float32(RNG.standard_normal((500, 3)))
    x[:, 2] = -x[:, 0] * x[:, 1]  # what is left is the rounding of the product
    exact = x[:, 0].astype(np.float64) * x[:, 1] + x[:, 2]
    np.testing.assert_array_equal(computed("fma.rn.f32", x, "f32"), exact.astype(np.float32))
    assert np.count_nonzero(exact) > 400


@each(
    ("cvt.rzi.s32.f32", "f32", "s32", lambda v: clipped(np.trunc(v), -(2**31), 2**31 - 1)),
    ("cvt.rni.u32.f32", "f32", "u32", lambda v: clipped(np.rint(v), 0, 2**32 - 1)),
    ("cvt.sat.f32.f32", "f32", "f32", lambda v: np.nan_to_num(np.clip(v, 0, 1), nan=0)),
    ("cvt.rn.f32.u32", "u32", "f32", lambda v: v),
    ("cvt.rn.f32.s64", "s64", "f32", lambda v: v),
    ("cvt.rn.f32.f64", "f64", "f32", lambda v: v),
    ("cvt.f64.f32", "f32", "f64", lambda v: v),
    ("cvt.u64.u32", "u32", "u64", lambda v: v),
    ("cvt.s64.s32", "s32", "s64", lambda v: v),
    ("cvt.u32.u64", "u64", "u32", lambda v: v & 0xFFFFFFFF),
    ("cvt.u16.u64", "u64", "u16", lambda v: v & 0xFFFF),
    ("cvt.s32.s16", "s16", "s32", lambda v: v),
    ("cvt.u32.u16", "u16", "u32", lambda v: v),
    ("cvt.s16.s8", "s16", "s16", lambda v: v.astype(np.int8)),
    ("neg.f32", "f32", "f32", lambda v: -v),
    ("abs.s32", "s32", "s32", lambda v: np.abs(v)),
    ("sqrt.rn.f32", "f32", "f32", np.sqrt),
    ("not.b16", "u16", "u16", lambda v: ~v),
    ("popc.b32", "u32", "u32", np.bitwise_count),
    ("brev.b32", "u32", "u32", lambda v: np.array([int(f"{n:032b}"[::-1], 2) for n in v.tolist()])),
    ("clz.b64", "u64", "u32", lambda v: np.array([64 - n.bit_length() for n in v.tolist()])),
)
def test_conversions_and_what_has_one_operand(instruction, kind, result, wanted):
    x = pairs(kind)[:, :1]
    with np.errstate(all="ignore"):
        expected = np.asarray(wanted(x[:, 0])).astype(EDGES[result].dtype)
    np.testing.assert_array_equal(computed(instruction, x, kind, result), expected)


def test_branches_join_again_and_predicates_guard():
    x = np.arange(64, dtype=np.int32)
    body = """
    ld.global.u32 %r4, [%rd1]; mov.u32 %r5, 0; and.b32 %r6, %r4, 3; setp.eq.s32 %p1, %r6, 0;
    @%p1 bra $ZERO; setp.eq.s32 %p2, %r6, 1; @!%p2 bra $OTHER; add.s32 %r5, %r5, 100; bra.uni $JOIN;
$OTHER: add.s32 %r5, %r5, 1; add.s32 %r6, %r6, -1; setp.gt.s32 %p3, %r6, 0; @%p3 bra $OTHER; bra.uni $JOIN;
$ZERO: mov.u32 %r5, 7;
$JOIN: activemask.b32 %r7; popc.b32 %r7, %r7; mul.lo.s32 %r7, %r7, 1000; add.s32 %r5, %r5, %r7;
    @%p1 add.s32 %r5, %r5, 5; st.global.u32 [%rd2], %r5;
    """
    assert run(body, x, 64, np.int32).tolist() == [32000 + {0: 12, 1: 100, 2: 2, 3: 3}[n % 4] for n in range(64)]


def test_lanes_exchange_and_vote():
    @cuda.jit("void(int32[::1])")
    def kernel(y):
        i = cuda.threadIdx.x
        total = i
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        below = cuda.shfl_up_sync(0xFFFFFFFF, i, 1)
        above = cuda.shfl_down_sync(0xFFFFFFFF, i, 2)
        odd = cuda.ballot_sync(0xFFFFFFFF, i % 2)
        every = cuda.all_sync(0xFFFFFFFF, i < 32)
        y[i] = total + 1000 * below + 100000 * above
        y[i] += (np.uint32(odd) == np.uint32(0xAAAAAAAA)) * 10000000 + every * 20000000

    y = cuda.to_device(np.zeros(32, np.int32))
    kernel[1, 32](y)
    wanted = [496 + 1000 * max(i - 1, 0) + 100000 * (i + 2 if i < 30 else i) + 30000000 for i in range(32)]
    assert y.copy_to_host().tolist() == wanted
    assert softgpu.findings() == []


def test_vectors_local_memory_and_generic_addresses():
    @cuda.jit("void(float32[::1], uint32)")
    def kernel(y, first):
        mine = cuda.local.array(8, np.float32)
        for k in range(8):
            mine[k] = np.float32(k) + y[k]
        y[8 + cuda.threadIdx.x] = mine[np.uint32(first + cuda.threadIdx.x) % 8]

    y = cuda.to_device(np.arange(16, dtype=np.float32))
    kernel[1, 8](y, np.uint32(3))
    assert y.copy_to_host()[8:].tolist() == [2.0 * ((3 + i) % 8) for i in range(8)]

    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    body = """
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
    mov.u64 %rd3, tile; mad.wide.u32 %rd3, %r3, 16, %rd3; st.shared.v2.f32 [%rd3], {%f1, %f2};
    cvta.shared.u64 %rd4, %rd3; st.v2.f32 [%rd4+8], {%f3, %f4}; ld.v4.f32 {%f5, %f6, %f7, %f8}, [%rd4];
    cvta.to.shared.u64 %rd5, %rd4; ld.shared.f32 %f9, [%rd5+12]; fma.rn.f32 %f5, %f6, 0f41200000, %f5;
    fma.rn.f32 %f5, %f7, 0f42C80000, %f5; fma.rn.f32 %f5, %f9, 0f447A0000, %f5; st.global.f32 [%rd2], %f5;
    """
    assert run(body, rows, 4).tolist() == (rows @ np.float32([1, 10, 100, 1000])).tolist()
    assert softgpu.findings() == []


def test_what_it_does_not_have_is_named():
    body = ".reg .b32 %r<3>;\nmov.u32 %r1, 1;\ndp4a.u32.u32 %r2, %r1, %r1, %r1;"
    (entry,) = ptx.parse(f".target sm_90\n.visible .entry k() {{\n{body}\n}}")
    with pytest.raises(ptx.PtxError, match=r"line 5: the software GPU has no such instruction: dp4a\.u32\.u32"):
        assembler.image(entry, Resources(1, 0, 0))
