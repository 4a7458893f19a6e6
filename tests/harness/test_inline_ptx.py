"""Inline assembly computes what the PTX ISA says, under the interpreter and, where there is a GPU, compiled."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends.ptx_source import statements
from fourfold.operations.blame import Blame, blame_of

N = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16, E4M3, E5M2 = (np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))


@triton.jit
def assembly_kernel(
    x_ptr,
    y_ptr,
    output_ptr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if TWO:
        y = tl.load(y_ptr + at)
        z = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [x, y], dtype=output_ptr.dtype.element_ty, is_pure=True, pack=PACK
        )
    else:
        z = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [x], dtype=output_ptr.dtype.element_ty, is_pure=True, pack=PACK)
    tl.store(output_ptr + at, z)


class Row(NamedTuple):
    """An assembly with one or two operands.

    Attributes:
        asm: its text.
        constraints: of its registers.
        inputs: the types of its operands.
        output: the type of its result.
        reference: its result for NumPy's arrays.
        pack: the number of elements of an instance.
        error: the relative error that the PTX ISA states for an approximation.
        capability: the least compute capability of a GPU that has the instruction.
    """

    asm: str
    constraints: str
    inputs: Sequence[str]
    output: str
    reference: Callable[..., Any]
    pack: int = 1
    error: float = 0.0
    capability: int = 80


def bits(x: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(x).view(kind)


def table(a: np.ndarray, b: np.ndarray, immediate: int) -> np.ndarray:
    """Return lop3 of a, b and b, bit by bit."""
    rows = [
        sum((immediate >> (4 * (x >> i & 1) + 3 * (y >> i & 1)) & 1) << i for i in range(32))
        for x, y in zip(bits(a, "u4").tolist(), bits(b, "u4").tolist())
    ]
    return np.array(rows, np.uint32).view(np.int32)


def permuted(a: np.ndarray, b: np.ndarray, selection: Sequence[int]) -> np.ndarray:
    whole = np.concatenate([bits(a, "u1").reshape(-1, 4), bits(b, "u1").reshape(-1, 4)], axis=1)
    return np.ascontiguousarray(whole[:, selection]).view(np.int32)[:, 0]


def fused(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x * y + x, rounded once: longdouble has 64 bits, and the inputs' products 48."""
    return (x.astype(np.longdouble) * y + x).astype(np.float32)


def saturated_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(x + y, nan=0), 0, 1)


def bit_counts(x: np.ndarray) -> list[int]:
    return [each.bit_count() for each in bits(x, "u4").tolist()]


def leading_zeros(x: np.ndarray) -> list[int]:
    return [32 - each.bit_length() for each in bits(x, "u4").tolist()]


def wrapped(x: Any, kind: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    return np.array([int(each) & (1 << 8 * size) - 1 for each in x], f"u{size}").view(kind)


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(object)


def to_integers(x: np.ndarray, kind: str, rounding: Callable = np.rint) -> np.ndarray:
    """Return floats as integers, the nearest ones if they are too large; NaN gives 0."""
    limits = np.iinfo(kind)
    return np.array([0 if math.isnan(v) else int(min(max(rounding(v), limits.min), limits.max)) for v in x], kind)


FLOATS = ("float32", "float32")
INTEGERS = ("int32", "int32")
ROWS = [
    Row("add.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", lambda x, y: x + y),
    Row("sub.rn.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", lambda x, y: x - y),
    Row("mul.f32 $0, $1, 0f40490FDB;", "=f,f", FLOATS[:1], "float32", lambda x: x * np.float32(math.pi)),
    Row("fma.rn.f32 $0, $1, $2, $1;", "=f,f,f", FLOATS, "float32", fused),
    Row("div.rn.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", lambda x, y: x / y),
    Row("sqrt.rn.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", np.sqrt),
    Row("add.sat.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", saturated_sum),
    Row("add.f64 $0, $1, $2;", "=d,d,d", ("float64", "float64"), "float64", lambda x, y: x + y),
    Row("min.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", np.fmin),
    Row("max.NaN.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", np.maximum),
    Row("abs.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", np.abs),
    Row("neg.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", np.negative),
    Row("copysign.f32 $0, $1, $2;", "=f,f,f", FLOATS, "float32", lambda x, y: np.copysign(y, x)),
    Row("ex2.approx.ftz.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", np.exp2, error=2**-21),
    Row("rcp.approx.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", lambda x: 1 / x, error=2**-22),
    Row("rsqrt.approx.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", lambda x: 1 / np.sqrt(x), error=2**-22),
    Row("tanh.approx.f32 $0, $1;", "=f,f", FLOATS[:1], "float32", np.tanh, error=2**-10.9),
    Row("add.s32 $0, $1, $2;", "=r,r,r", INTEGERS, "int32", lambda x, y: wrapped(exact(x) + exact(y), "i4")),
    Row("mul.hi.s32 $0, $1, $2;", "=r,r,r", INTEGERS, "int32", lambda x, y: wrapped(exact(x) * exact(y) >> 32, "i4")),
    Row("mul.wide.s32 $0, $1, $2;", "=l,r,r", INTEGERS, "int64", lambda x, y: x.astype("i8") * y.astype("i8")),
    Row(
        *("mad.lo.s32 $0, $1, $2, 3;", "=r,r,r", INTEGERS, "int32"),
        lambda x, y: wrapped(exact(x) * exact(y) + 3, "i4"),
    ),
    Row("and.b32 $0, $1, 0xFF;", "=r,r", INTEGERS[:1], "int32", lambda x: x & 255),
    Row("shl.b32 $0, $1, 5;", "=r,r", INTEGERS[:1], "int32", lambda x: wrapped(exact(x) << 5, "i4")),
    Row("shr.s32 $0, $1, 40;", "=r,r", INTEGERS[:1], "int32", lambda x: x >> 31),
    Row("shr.u32 $0, $1, 3;", "=r,r", INTEGERS[:1], "int32", lambda x: (bits(x, "u4") >> 3).view("i4")),
    Row("lop3.b32 $0, $1, $2, $2, 0xCA;", "=r,r,r", INTEGERS, "int32", lambda x, y: table(x, y, 0xCA)),
    Row("prmt.b32 $0, $1, $2, 0x7250;", "=r,r,r", INTEGERS, "int32", lambda x, y: permuted(x, y, (0, 5, 2, 7))),
    Row(
        *("bfe.s32 $0, $1, 4, 8;", "=r,r", INTEGERS[:1], "int32"),
        lambda x: (bits(x, "u4") >> 4).astype("u1").view("i1").astype("i4"),
    ),
    Row(
        "popc.b32 $0, $1;",
        "=r,r",
        INTEGERS[:1],
        "int32",
        bit_counts,
    ),
    Row(
        "clz.b32 $0, $1;",
        "=r,r",
        INTEGERS[:1],
        "int32",
        leading_zeros,
    ),
    Row("cvt.rni.s32.f32 $0, $1;", "=r,f", FLOATS[:1], "int32", lambda x: to_integers(x, "int32")),
    Row("cvt.rzi.s32.f32 $0, $1;", "=r,f", FLOATS[:1], "int32", lambda x: to_integers(x, "int32", np.trunc)),
    Row("cvt.rn.f32.s32 $0, $1;", "=f,r", INTEGERS[:1], "float32", lambda x: x.astype("f4")),
    Row("cvt.rn.f16.f32 $0, $1;", "=h,f", FLOATS[:1], "float16", lambda x: x.astype("f2")),
    Row(
        *("{.reg .b16 low; cvt.rn.bf16.f32 low, $1; mov.b16 $0, low;}", "=h,f", FLOATS[:1], "bfloat16"),
        lambda x: x.astype(BFLOAT16),
    ),
    # Two elements in a register, the first one in its lower half.
    Row("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", FLOATS[:1], "float16", lambda x: x.astype("f2"), pack=2),
    Row(
        *("fma.rn.f16x2 $0, $1, $2, $1;", "=r,r,r", ("float16", "float16"), "float16"),
        lambda x, y: (x.astype("f8") * y + x).astype("f2"),
        pack=2,
    ),
    Row("add.f16x2 $0, $1, $2;", "=r,r,r", ("float16", "float16"), "float16", lambda x, y: x + y, pack=2),
    Row(
        *("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", FLOATS[:1], "int8"),
        lambda x: bits(np.where(np.isnan(x), x, np.clip(x, -448, 448)).astype(E4M3), "i1") & np.int8(-1),
        pack=2,
        capability=90,
    ),
    Row(
        *("cvt.rn.f16x2.e5m2x2 $0, $1;", "=r,h", ("int8",), "float16"),
        lambda x: bits(x, E5M2).astype("f2"),
        pack=2,
        capability=90,
    ),
    # Four bytes in a register, each to a register of its own, as in the description of tl.inline_asm_elementwise.
    Row(
        """
        {
            .reg .b8 t<4>;                       // the bytes
            mov.b32 {t0, t1, t2, t3}, $4;
            cvt.s32.s8 $0, t0; cvt.s32.s8 $1, t1; /* signed */
            cvt.s32.s8 $2, t2; cvt.s32.s8 $3, t3;
        }
        """,
        *("=r,=r,=r,=r,r", ("int8",), "int32"),
        lambda x: x.astype("i4"),
        pack=4,
    ),
    Row(
        "{.reg .pred p, q; setp.lt.f32 p|q, $1, $2; mov.b32 $0, 7; @p mov.b32 $0, 1; @!q add.s32 $0, $0, 10;}",
        *("=r,f,f", FLOATS, "int32"),
        lambda x, y: np.where(x < y, 11, 7),
    ),
    Row(
        "{.reg .pred p; setp.ne.s32 p, 0, 0; setp.geu.and.f32 p, $1, $2, p; not.pred p, p; selp.f32 $0, $1, $2, p;}",
        *("=f,f,f", FLOATS, "float32"),
        lambda x, y: x,
    ),
    Row("prefetch.global.L2 [$1]; mov.u32 $0, 5;", "=r,l", ("int64",), "int32", lambda x: np.full(len(x), 5)),
]


def block(kind: str, place: int) -> np.ndarray:
    random = np.random.default_rng((place, np.dtype(kind).itemsize))
    if np.dtype(kind).kind in "iu":
        limits = np.iinfo(kind)
        numbers = random.integers(limits.min, limits.max, 2 * N, kind, endpoint=True)
        numbers[:6] = [0, 1, -1, limits.min, limits.max, 2][place:] + [3, 5][:place]
        return numbers
    numbers = random.standard_normal(2 * N) * 10.0 ** random.integers(-3, 4, 2 * N)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 2.5, 3.5]
    numbers[: len(special)] = special[place:] + special[:place]
    return numbers.astype(kind)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(DEVICE)


def result_of(row: Row, blocks: Sequence[np.ndarray]) -> np.ndarray:
    output = torch.zeros(2 * N, dtype=getattr(torch, row.output), device=DEVICE)
    first, last = tensor(blocks[0]), tensor(blocks[-1])
    if row.asm.startswith("prefetch"):  # of an address
        first = torch.full_like(first, output.data_ptr())
    constants = {"ASM": row.asm, "CONSTRAINTS": row.constraints, "PACK": row.pack}
    assembly_kernel[(2,)](first, last, output, TWO=len(row.inputs) == 2, BLOCK=N, **constants)
    output = output.cpu()
    return output.view(torch.int16).numpy().view(BFLOAT16) if row.output == "bfloat16" else output.numpy()


@pytest.mark.parametrize("row", ROWS, ids=[re.sub(r"[^\w.<>]+", " ", row.asm)[:60].strip() for row in ROWS])
def test_assembly_gives_what_the_instructions_say(row: Row) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < divmod(row.capability, 10):
        pytest.skip("this GPU lacks the instruction")
    blocks = [block(kind, place) for place, kind in enumerate(row.inputs)]
    with np.errstate(all="ignore"):
        expected = np.asarray(row.reference(*blocks)).astype(BFLOAT16 if row.output == "bfloat16" else row.output)
    actual = result_of(row, blocks)
    if actual.dtype.kind in "iu":
        wrong = actual != expected
    else:
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.abs(a - b) <= row.error * np.abs(b) + (1e-37 if row.error else 0)
        wrong = ~((a == b) | near | (np.isnan(a) & np.isnan(b)))
    places = np.flatnonzero(wrong)[:4]
    assert not len(places), [([x[i] for x in blocks], actual[i], expected[i]) for i in places]


UNKNOWN = {
    "a clock": ("mov.u32 $0, %clock;", "=r,f"),
    "memory": ("ld.global.u32 $0, [$1];", "=r,l"),
    "a rounding": ("add.rz.f32 $0, $1, $1;", "=f,f"),
    "a register": ("mov.b32 $0, nowhere;", "=r,f"),
    "a guard": ("@p mov.b32 $0, 1;", "=r,f"),
    "a branch": ("bra done; done:", "=r,f"),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_instruction_is_no_fault_of_the_kernel(name: str) -> None:
    asm, constraints = UNKNOWN[name]
    row = Row(asm, constraints, ("float32",), "float32" if "=f" in constraints else "int32", np.abs)
    with pytest.raises(interpreter.InterpreterError) as caught:
        result_of(row, [block("float32", 0)])
    assert blame_of(caught.value) is Blame.LACK
    assert next(statements(asm)) in str(caught.value.__cause__)


@pytest.mark.usefixtures("interpreted")
def test_constraints_must_name_every_register() -> None:
    row = Row("add.f32 $0, $1, $1;", "=f,f,f", ("float32",), "float32", np.abs)
    with pytest.raises(interpreter.InterpreterError) as caught:
        result_of(row, [block("float32", 0)])
    assert "3 constraints (=f,f,f) and 2 registers" in str(caught.value.__cause__)
