"""The language gives the same results under the interpreter and compiled, in every type.

`ROWS` is the table: an expression of the blocks x, y and z, its result for NumPy's arrays (of ml_dtypes' type for
bfloat16), and the types that the language accepts there. To add a function, add a row.
"""

import ast
import importlib.util
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter import batches
from fourfold.operations.refusals import is_fault

N = 256
PROGRAMS = 3
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")} | {"bfloat16": BFLOAT16}
NUMPY |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = ("float16", "bfloat16", "float32", "float64")
WIDE = ("float32", "float64")
SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, "bool")

pytestmark = pytest.mark.usefixtures("interpreted")


# ---------------------------------------------------------------- what blocks hold


def rng(*seeds: int) -> np.random.Generator:
    return np.random.default_rng(seeds)


def anything(dtype: np.dtype, place: int) -> np.ndarray:
    """Return all pairs of special values in two blocks, then numbers of all sizes."""
    random = rng(place, dtype.itemsize)
    if dtype.kind == "b":
        return random.random(N) < 0.5
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        special = np.array([0, 1, 2, 3, 7, limits.max, limits.max - 1, limits.min, limits.min + 1], dtype)
        filling = random.integers(limits.min, limits.max, N, dtype, endpoint=True) >> random.integers(0, 8, N).astype(
            dtype
        )
    else:
        limits = ml_dtypes.finfo(dtype)
        tiny, largest = float(limits.smallest_subnormal), float(limits.max)
        special = np.array([0.0, -0.0, 1, -1.5, math.inf, -math.inf, math.nan, tiny, -largest, largest], np.float64)
        filling = random.standard_normal(N) * 2.0 ** random.integers(-8, 8, N)
    with np.errstate(all="ignore"):
        special, filling = special.astype(dtype), filling.astype(dtype)
    count = len(special)
    pairs = np.tile(special, count) if place == 0 else np.repeat(special, count)
    return np.concatenate([pairs, filling])[:N] if place < 2 else filling


def finite(dtype: np.dtype, place: int) -> np.ndarray:
    """Return numbers of all sizes."""
    return anything(dtype, 2 + place)


def positive(dtype: np.dtype, place: int) -> np.ndarray:
    """Return finite numbers x, or positive numbers y of at most 100."""
    return finite(dtype, place) if place == 0 else rng(place).integers(1, 100, N).astype(dtype)


def near_ties(dtype: np.dtype, place: int) -> np.ndarray:
    """Return x, y or z: x * y lies halfway between two numbers, and a tiny z decides which of them is nearer."""
    half = {"float16": 5, "bfloat16": 4, "float32": 12, "float64": 26}[dtype.name]
    other = {"float16": 6, "bfloat16": 4, "float32": 12, "float64": 27}[dtype.name]
    scale = np.resize(np.array([1.0, 2, -1, -0.5]), N)
    if place == 2:
        return (np.resize(np.array([1.0, -1, 0]), N) * 2.0 ** (-24 if dtype.name == "float16" else -100)).astype(dtype)
    return ((1 + 2.0**-half) * scale if place == 0 else np.full(N, 1 + 2.0**-other)).astype(dtype)


def above_zero(dtype: np.dtype, place: int) -> np.ndarray:
    return (0.01 + 30 * rng(place, 1).random(N)).astype(dtype)


def shifts(dtype: np.dtype, place: int) -> np.ndarray:
    """Return numbers x or counts of bits y."""
    return finite(dtype, place) if place == 0 else rng(place).integers(0, 8 * dtype.itemsize, N).astype(dtype)


def small(dtype: np.dtype, place: int) -> np.ndarray:
    """Return integers whose sums and products, by the dozen, are exact."""
    return rng(place, 2).integers(0 if dtype.kind in "ub" else -3, 4, N).astype(dtype)


def small_positive(dtype: np.dtype, place: int) -> np.ndarray:
    return rng(place, 3).integers(1, 10, N).astype(dtype)


def ones(dtype: np.dtype, place: int) -> np.ndarray:
    """Return 1, 2 and, of signed types, -1: their products by the dozen are exact."""
    values = [1, 1, 1, 1, 2, 1, 1, 1] if dtype.kind in "ub" else [1, -1, 1, 1, 2, 1, -1, 1]
    return np.resize(np.array(values), N).astype(dtype)


def distinct(dtype: np.dtype, place: int) -> np.ndarray:
    lowest = 0 if dtype.kind == "u" else -N // 2
    return (lowest + rng(place).permutation(N)).astype(np.float32).astype(dtype)


# ---------------------------------------------------------------- results of the language


def single(x: np.ndarray) -> np.ndarray:
    """Return an operand as a division converts it."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


def truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the quotient of integers, rounded toward zero."""
    return np.array(
        [abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(x, y)], dtype=x.dtype
    )


def remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the remainder of that quotient, with the sign of x."""
    if x.dtype.kind == "f" or x.dtype == BFLOAT16:
        return np.fmod(single(x), single(y))
    return np.array([int(a) - int(b) * int(q) for a, b, q in zip(x, y, truncated(x, y))], dtype=x.dtype)


def without_nan(function: Callable, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a minimum or maximum that is NaN only where both are."""
    with_nan = function(x, y)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, with_nan)) if x.dtype.kind not in "iub" else with_nan


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z, rounded once."""

    def one(a: Any, b: Any, c: Any) -> Any:
        if not all(map(np.isfinite, (a, b, c))):
            return x.dtype.type(float(a) * float(b) + float(c))
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        about = x.dtype.type(float(exact))
        near = [about, np.nextafter(about, x.dtype.type(math.inf)), np.nextafter(about, x.dtype.type(-math.inf))]
        near = [value for value in near if np.isfinite(value)]
        even = [value.view(f"u{x.dtype.itemsize}") & 1 for value in near]
        best = min(range(len(near)), key=lambda i: (abs(Fraction(float(near[i])) - exact), even[i]))
        return near[best]

    return np.array([one(*numbers) for numbers in zip(x, y, z)], dtype=x.dtype)


def high_half(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the upper bits of the product of two numbers, as unsigned integers."""
    unsigned, bits = f"u{x.dtype.itemsize}", 8 * x.dtype.itemsize
    products = [int(a) * int(b) >> bits for a, b in zip(x.view(unsigned), y.view(unsigned))]
    return np.array(products, dtype=unsigned).view(x.dtype)


def promoted(x: np.ndarray) -> np.ndarray:
    """Return the operand of a maximum or a sum: integers of less than 32 bits are widened to 32."""
    if x.dtype.kind in "iub" and x.dtype.itemsize < 4:
        return x.astype(np.int32 if x.dtype.kind == "i" else np.uint32)
    return x


def table(x: np.ndarray) -> np.ndarray:
    return x.reshape(16, 16)


class Row(NamedTuple):
    """The expected result of an expression of x, y and z.

    Attributes:
        text: the expression, in Triton.
        reference: the same in NumPy: a function of as many of the blocks as it uses.
        dtypes: those that the language accepts; it refuses or promotes others.
        inputs: the contents of the blocks: a function of the dtype and of the block's number.
        error: the allowed relative error; 0 for results that are rounded once.
        signs: whether the sign of 0 is compared.
    """

    text: str
    reference: Callable[..., Any]
    dtypes: tuple[str, ...] = NUMBERS
    inputs: Callable[[np.dtype, int], np.ndarray] = anything
    error: float = 0.0
    signs: bool = True


def negated(x: np.ndarray) -> np.ndarray:
    return -x if x.dtype.kind != "i" else x.dtype.type(0) - x


def accurate(function: Callable) -> Callable:
    """Return an elementary function, computed in float64."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def clamped(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), -1, np.clip(x.astype(np.float64), -1, 1)).astype(x.dtype)


def clamped_or_nan(x: np.ndarray) -> np.ndarray:
    return np.clip(x.astype(np.float64), -1, 1).astype(x.dtype)


def total(x: np.ndarray, axis: int | None = None) -> Any:
    return promoted(x).sum(axis, dtype=promoted(x).dtype)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype(np.float64) - x.max())
    return (powers / powers.sum()).astype(x.dtype)


def truncated_to_bfloat16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


def philox(seed: int, counters: np.ndarray) -> np.ndarray:
    """Return Philox 4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011."""
    word = 0xFFFFFFFF
    words = []
    for counter in counters:
        c, key = [int(counter)] * 4, [seed & word, seed >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ key[0], b & word, (a >> 32) ^ c[3] ^ key[1], a & word]
            key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
        words.append(c)
    return np.array(words, dtype=np.uint32)


# Before Triton 3.9 a negation is a difference, compiled too.
NEGATES_ZERO = "create_fneg" in inspect.getsource(TritonSemantic.minus)
OPERATORS = (
    Row("x + y", operator.add),
    Row("x - y", operator.sub),
    Row("x * y", operator.mul),
    Row("x / y", lambda x, y: single(x) / single(y), FLOATS),
    Row("x / y ", lambda x, y: x.astype(np.float32) / y.astype(np.float32), INTEGERS),
    Row("x // y", truncated, INTEGERS, positive),
    Row("x % y", remainder, inputs=positive),
    Row("-x", negated, FLOATS + SIGNED, signs=NEGATES_ZERO),
    Row("~x", operator.invert, (*INTEGERS, "bool")),
    Row("x & y", operator.and_, (*INTEGERS, "bool")),
    Row("x | y", operator.or_, (*INTEGERS, "bool")),
    Row("x ^ y", operator.xor, (*INTEGERS, "bool")),
    Row("x << y", operator.lshift, INTEGERS, shifts),
    Row("x >> y", operator.rshift, INTEGERS, shifts),
    Row("x < y", operator.lt),
    Row("x <= y", operator.le),
    Row("x > y", operator.gt),
    Row("x >= y", operator.ge),
    Row("x == y", operator.eq),
    Row("x != y", operator.ne),
)
# A number takes the block's type.
OPERATORS_WITH_A_NUMBER = (
    Row("x + 1", lambda x: x + x.dtype.type(1)),
    Row("1 + x", lambda x: x + x.dtype.type(1)),
    Row("x - 3", lambda x: x - x.dtype.type(3)),
    Row("3 - x", lambda x: x.dtype.type(3) - x),
    Row("x * 0.1", lambda x: x * x.dtype.type(0.1), FLOATS),
    Row("0.1 * x", lambda x: x * x.dtype.type(0.1), FLOATS),
    Row("x * 0.1 ", lambda x: x.astype(np.float32) * np.float32(0.1), INTEGERS),
    Row("x / 3", lambda x: single(x) / single(x.dtype.type(3)), FLOATS),
    Row("3.0 / x", lambda x: single(x.dtype.type(3)) / single(x), FLOATS),
    Row("x // 3", lambda x: truncated(x, np.full(N, 3, x.dtype)), INTEGERS),
    Row("100 // y", lambda y: truncated(np.full(N, 100, y.dtype), y), INTEGERS, positive),
    Row("x % 3", lambda x: remainder(x, np.full(N, 3).astype(x.dtype))),
    Row("100 % y", lambda y: remainder(np.full(N, 100, y.dtype), y), INTEGERS, positive),
    Row("x & 5", lambda x: x & x.dtype.type(5), INTEGERS),
    Row("5 & x", lambda x: x & x.dtype.type(5), INTEGERS),
    Row("x | 5", lambda x: x | x.dtype.type(5), INTEGERS),
    Row("5 | x", lambda x: x | x.dtype.type(5), INTEGERS),
    Row("x ^ 5", lambda x: x ^ x.dtype.type(5), INTEGERS),
    Row("5 ^ x", lambda x: x ^ x.dtype.type(5), INTEGERS),
    Row("x << 2", lambda x: x << x.dtype.type(2), INTEGERS),
    Row("1 << y", lambda y: y.dtype.type(1) << y, INTEGERS, shifts),
    Row("x >> 2", lambda x: x >> x.dtype.type(2), INTEGERS),
    Row("100 >> y", lambda y: y.dtype.type(100) >> y, INTEGERS, shifts),
    Row("x < 1", lambda x: x < x.dtype.type(1)),
    Row("1 < x", lambda x: x > x.dtype.type(1)),
    Row("x >= 0.1", lambda x: x >= x.dtype.type(0.1), FLOATS),
)
LOGIC = (
    Row("(x < y) and (y < z)", lambda x, y, z: (x < y) & (y < z)),
    Row("(x < y) or (y < z)", lambda x, y, z: (x < y) | (y < z)),
    Row("not (x < y)", lambda x, y: ~(x < y)),
    Row("(x < y).logical_and(y < z)", lambda x, y, z: (x < y) & (y < z)),
    Row("(x < y).logical_or(y < z)", lambda x, y, z: (x < y) | (y < z)),
    Row("~tl.broadcast_to(tl.max(x) > 1, (256,))", lambda x: np.full(N, x.max() <= 1), inputs=small),
    # Numbers of one bit
    Row("(x < y) + (y < z)", lambda x, y, z: (x < y) ^ (y < z)),
    Row("(x < y) - (y < z)", lambda x, y, z: (x < y) ^ (y < z)),
    Row("(x < y) * (y < z)", lambda x, y, z: (x < y) & (y < z)),
    Row("tl.where(x < y, x, z)", lambda x, y, z: np.where(x < y, x, z), ALL),
    Row("tl.where(x < y, 0, z)", lambda x, y, z: np.where(x < y, z.dtype.type(0), z)),
    Row("tl.where((x < y) & (y < z), x + y, z)", lambda x, y, z: np.where((x < y) & (y < z), x + y, z)),
)
ARITHMETIC = (
    Row("tl.add(x, y)", operator.add),
    Row("tl.sub(x, y)", operator.sub),
    Row("tl.mul(x, y)", operator.mul),
    Row("tl.fdiv(x, y)", operator.truediv, WIDE),
    Row("tl.div_rn(x, y)", operator.truediv, ("float32",)),
    Row("tl.maximum(x, y)", lambda x, y: without_nan(np.maximum, x, y), signs=False),
    Row("tl.minimum(x, y)", lambda x, y: without_nan(np.minimum, x, y), signs=False),
    Row("tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)", np.maximum, FLOATS, signs=False),
    Row("tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)", np.minimum, FLOATS, signs=False),
    Row("tl.clamp(x, -1.0, 1.0)", clamped, FLOATS),
    Row("tl.clamp(x, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)", clamped_or_nan, FLOATS),
    Row("tl.fma(x, y, z)", fused, FLOATS, finite),
    Row("tl.fma(x, y, z) ", fused, FLOATS, near_ties),
    Row("tl.abs(x)", np.abs),
    Row("tl.cdiv(x, y)", lambda x, y: truncated(x + (y - y.dtype.type(1)), y), INTEGERS, small_positive),
    Row("tl.umulhi(x, y)", high_half, ("int32", "int64", "uint32", "uint64")),
    Row("tl.exp(x)", accurate(np.exp), WIDE, above_zero, 2.0**-20),
    Row("tl.exp2(x)", accurate(np.exp2), WIDE, above_zero, 2.0**-20),
    Row("tl.log(x)", accurate(np.log), WIDE, above_zero, 2.0**-18),
    Row("tl.log2(x)", accurate(np.log2), WIDE, above_zero, 2.0**-18),
    Row("tl.sin(x)", accurate(np.sin), WIDE, above_zero, 2.0**-15),
    Row("tl.cos(x)", accurate(np.cos), WIDE, above_zero, 2.0**-15),
    Row("tl.erf(x)", accurate(np.vectorize(math.erf)), WIDE, above_zero, 2.0**-20),
    Row("tl.sqrt(x)", accurate(np.sqrt), WIDE, above_zero, 2.0**-20),
    Row("tl.sqrt_rn(x)", np.sqrt, ("float32",), above_zero),
    Row("tl.rsqrt(x)", accurate(lambda x: 1 / np.sqrt(x)), WIDE, above_zero, 2.0**-20),
    Row("tl.floor(x)", np.floor, WIDE),
    Row("tl.ceil(x)", np.ceil, WIDE),
    Row("tl.sigmoid(x)", accurate(lambda x: 1 / (1 + np.exp(-x))), WIDE, above_zero, 2.0**-20),
    Row("tl.softmax(x)", softmax, WIDE, above_zero, 2.0**-17),
    Row("x.to(tl.int16, bitcast=True)", lambda x: x.view(np.int16), ("float16", "bfloat16", "uint16")),
    Row("x.to(tl.bfloat16, bitcast=True)", lambda x: x.view(BFLOAT16), ("int16", "uint16")),
    Row("x.to(tl.int32, bitcast=True)", lambda x: x.view(np.int32), ("float32", "uint32")),
    Row("x.to(tl.int64, bitcast=True)", lambda x: x.view(np.int64), ("float64", "uint64")),
    Row("tl.cast(x, tl.bfloat16, fp_downcast_rounding='rtz')", truncated_to_bfloat16, ("float32",), finite),
    Row("tl.to_tensor(1.5) * x", lambda x: np.float32(1.5) * x, WIDE),
)
SQUARE = "tl.reshape(x, (16, 16))"
PAIRS = "tl.reshape(x, (128, 2))"
REDUCTIONS = (
    Row("tl.sum(x)", total, ALL, small),
    Row(f"tl.sum({SQUARE}, axis=1)", lambda x: total(table(x), 1), ALL, small),
    Row(f"tl.sum({SQUARE}, axis=0, keep_dims=True)", lambda x: total(table(x), 0), ALL, small),
    Row(f"tl.sum({PAIRS}, axis=1)", lambda x: x[::2] + x[1::2], FLOATS),
    Row("tl.sum(x, dtype=tl.float32)", lambda x: total(x.astype(np.float32)), inputs=small),
    Row("tl.max(x)", np.max, NUMBERS, finite),
    Row("tl.min(x)", np.min, NUMBERS, finite),
    Row(f"tl.max({SQUARE}, axis=1)", lambda x: table(x).max(1), NUMBERS, finite),
    Row(f"tl.max({PAIRS}, axis=1)", lambda x: without_nan(np.maximum, x[::2], x[1::2]), signs=False),
    Row(f"tl.min({PAIRS}, axis=1)", lambda x: without_nan(np.minimum, x[::2], x[1::2]), signs=False),
    Row(f"tl.max({SQUARE}, axis=1, return_indices=True)[0]", lambda x: table(x).max(1), inputs=distinct),
    Row(f"tl.argmax({SQUARE}, axis=1)", lambda x: table(x).argmax(1).astype(np.int32), inputs=distinct),
    Row(f"tl.argmin({SQUARE}, axis=1)", lambda x: table(x).argmin(1).astype(np.int32), inputs=distinct),
    Row("tl.xor_sum(x)", np.bitwise_xor.reduce, INTEGERS),
    Row(f"tl.reduce_or({SQUARE}, axis=1)", lambda x: np.bitwise_or.reduce(table(x), 1), INTEGERS),
    Row(f"tl.reduce({SQUARE}, 1, product)", lambda x: table(x).prod(1, dtype=x.dtype), inputs=ones),
    Row(f"tl.reduce({SQUARE}, 0, product, keep_dims=True)", lambda x: table(x).prod(0, dtype=x.dtype), inputs=ones),
    Row(f"tl.associative_scan({SQUARE}, 1, product)", lambda x: table(x).cumprod(1, dtype=x.dtype), inputs=ones),
    Row(f"tl.cumsum({SQUARE}, axis=1)", lambda x: table(promoted(x)).cumsum(1, promoted(x).dtype), inputs=small),
    Row(f"tl.cumsum({SQUARE}, axis=0)", lambda x: table(promoted(x)).cumsum(0, promoted(x).dtype), inputs=small),
    Row(f"tl.cumprod({SQUARE}, axis=1)", lambda x: table(promoted(x)).cumprod(1, promoted(x).dtype), inputs=ones),
    Row("tl.histogram(x & 15, 16)", lambda x: np.bincount(x & 15, minlength=16).astype(np.int32), ("int32",)),
    Row(
        f"tl.dot({SQUARE}, tl.reshape(y, (16, 16)))",
        lambda x, y: (table(x).astype(np.float64) @ table(y).astype(np.float64)).astype(single(x).dtype),
        FLOATS,
        small,
    ),
    Row(
        "tl.dot(tl.reshape(x, (8, 32)), tl.reshape(y, (32, 8)))",
        lambda x, y: x.reshape(8, 32).astype(np.int32) @ y.reshape(32, 8).astype(np.int32),
        ("int8",),
        small,
    ),
)
SHAPES = (
    Row("tl.arange(0, 256)", lambda: np.arange(N, dtype=np.int32), ("int32",)),
    Row("tl.full((256,), 3, x.dtype)", lambda x: np.full(N, 3).astype(x.dtype)),
    Row("tl.zeros((256,), x.dtype)", np.zeros_like, ALL),
    Row("tl.zeros_like(x)", np.zeros_like, ALL),
    Row("tl.broadcast(x[:, None], tl.full((256, 2), 0, x.dtype))[0]", lambda x: np.repeat(x, 2)),
    Row("tl.broadcast_to(x[:, None], (256, 2))", lambda x: np.repeat(x, 2), ALL),
    Row("tl.expand_dims(x, 0)", lambda x: x, ALL),
    Row(f"tl.trans({SQUARE})", lambda x: table(x).T, ALL),
    Row(f"tl.permute({SQUARE}, (1, 0))", lambda x: table(x).T, ALL),
    Row(f"{SQUARE}.T", lambda x: table(x).T, ALL),
    Row(f"tl.ravel({SQUARE})", lambda x: x, ALL),
    Row("tl.view(x, (16, 16))", lambda x: x, ALL),
    Row(f"tl.split({PAIRS})[1]", lambda x: x[1::2], ALL),
    Row("tl.join(x, y)", lambda x, y: np.stack([x, y], -1), ALL),
    Row("tl.interleave(x, y)", lambda x, y: np.stack([x, y], -1), ALL),
    Row("tl.cat(x, y, can_reorder=True)", lambda x, y: np.concatenate([x, y]), ALL),
    Row("tl.flip(x, 0)", lambda x: x[::-1], NUMBERS),
    Row("tl.sort(x)", np.sort, NUMBERS, distinct),
    Row("tl.topk(x, 4)", lambda x: np.sort(x)[::-1][:4], NUMBERS, distinct),
    Row("tl.gather(x, 255 - tl.arange(0, 256), 0)", lambda x: x[::-1], ALL),
    Row("tl.squeeze(tl.unsqueeze(x, 0), 0)", lambda x: x, ALL),
    Row(
        "tl.swizzle2d(tl.arange(0, 16) // 4, tl.arange(0, 16) % 4, 4, 4, 2)[0]",
        lambda: np.array([0, 1] * 4 + [2, 3] * 4, np.int32),
        ("int32",),
    ),
    Row("tl.program_id(0) + tl.num_programs(1)", lambda: np.int32(1), ("int32",)),
    Row("tl.philox(7, x, x, x, x)[2]", lambda x: philox(7, x)[:, 2], ("uint32",)),
)
ROWS = OPERATORS + OPERATORS_WITH_A_NUMBER + LOGIC + ARITHMETIC + REDUCTIONS + SHAPES
CELLS = [(row, dtype) for row in ROWS for dtype in row.dtypes]


@triton.jit
def apply_kernel(x_ptr, y_ptr, z_ptr, output_ptr, FUNCTION: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    # Each program owns a block of x and z, and all share y.
    at = tl.arange(0, BLOCK)
    own = tl.program_id(0) * BLOCK + at
    output = FUNCTION(tl.load(x_ptr + own), tl.load(y_ptr + at), tl.load(z_ptr + own))
    if COUNT == 0:
        tl.store(output_ptr + tl.program_id(0), output)
    else:
        tl.store(output_ptr + tl.program_id(0) * COUNT + tl.arange(0, COUNT), tl.reshape(output, (COUNT,)))


def expected_of(row: Row, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the result of compiled code; skip the test if Triton lacks a function of the expression."""
    if missing := [name for name in named(row.text) if not hasattr(tl, name) and not hasattr(tl.tensor, name)]:
        pytest.skip(f"Triton {triton.__version__} has no {', '.join(missing)}")
    used = {node.id for node in ast.walk(ast.parse(row.text.strip())) if isinstance(node, ast.Name)}
    with np.errstate(all="ignore"):
        return np.asarray(row.reference(*[block for name, block in zip("xyz", blocks) if name in used]))


def tensor(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(result: torch.Tensor) -> np.ndarray:
    if result.dtype == torch.bfloat16:
        return result.view(torch.int16).numpy().view(BFLOAT16)
    return result.numpy()


HEADER = """
import triton
import triton.language as tl


@triton.jit
def product(a, b):
    return a * b
"""
FUNCTION = """

@triton.jit
def {name}(x, y, z):
    return {text}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the expressions as device functions, whose source Triton reads from a file."""
    names = {text: f"function_{number}" for number, text in enumerate(dict.fromkeys(row.text for row in ROWS))}
    file = tmp_path_factory.mktemp("language") / "expressions.py"
    file.write_text(HEADER + "".join(FUNCTION.format(name=name, text=text) for text, name in names.items()))
    spec = importlib.util.spec_from_file_location("expressions", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {text: getattr(module, name) for text, name in names.items()}


def same(actual: np.ndarray, expected: np.ndarray, error: float = 0.0, signs: bool = True) -> np.ndarray:
    """Return a mask of the elements that are the expected ones."""
    if expected.dtype.kind in "iub":
        return actual == expected
    with np.errstate(all="ignore"):
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        right = (actual == expected) | (np.abs(actual - expected) <= error * np.abs(expected))
    if signs:
        right &= np.signbit(actual) == np.signbit(expected)
    return right | (np.isnan(actual) & np.isnan(expected))


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(("row", "dtype"), CELLS, ids=[f"{dtype}: {row.text}" for row, dtype in CELLS])
def test_expression_gives_what_compiled_code_gives(row: Row, dtype: str, functions: dict[str, Any]) -> None:
    blocks = [row.inputs(NUMPY[dtype], place) for place in range(3)]
    expected = expected_of(row, blocks)
    output = tensor(np.zeros(expected.size, dtype=expected.dtype))
    count = expected.size if expected.ndim else 0
    apply_kernel[(1, 1)](*map(tensor, blocks), output, FUNCTION=functions[row.text], COUNT=count, BLOCK=N)
    wrong = np.nonzero(~same(array(output), expected.ravel(), row.error, row.signs))[0]
    if len(wrong):
        where = ", ".join(f"[{i}] is {array(output)[i]}, not {expected.ravel()[i]}" for i in wrong[:4])
        operands = [[block[i] for block in blocks] for i in wrong[:4]] if expected.size == N else ""
        pytest.fail(f"{row.text} of {dtype}: {len(wrong)} of {expected.size} are wrong: {where} {operands}")


IN_BATCHES = [(row, dtype) for row, dtype in CELLS if dtype in ("float32", "bfloat16", "int32", "bool")]


@pytest.mark.full(but=80)
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(("row", "dtype"), IN_BATCHES, ids=[f"{dtype}: {row.text}" for row, dtype in IN_BATCHES])
def test_programs_that_run_at_once_give_the_bits_of_one_after_another(
    row: Row, dtype: str, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, z = (row.inputs(NUMPY[dtype], place) for place in range(3))
    result = expected_of(row, (x, y, z))
    given = [tensor(np.concatenate([np.roll(x, n) for n in range(PROGRAMS)])), tensor(y), tensor(np.tile(z, PROGRAMS))]
    found, options = [], {"FUNCTION": functions[row.text], "COUNT": result.size if result.ndim else 0, "BLOCK": N}
    batches._HISTORIES.clear()
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(batches.Runner, "run", lambda self, programs: self.one_by_one(iter(programs)))
        found.append(tensor(np.zeros(PROGRAMS * result.size, dtype=result.dtype)))
        apply_kernel[(PROGRAMS,)](*given, found[-1], **options)
    assert array(found[0]).tobytes() == array(found[1]).tobytes()
    (history,) = (kept for kernel, kept in batches._HISTORIES.items() if kernel.__name__ == "apply_kernel")
    assert history.together
    assert not history.alone


@triton.jit
def cast_kernel(x_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(output_ptr + at, tl.load(x_ptr + at).to(output_ptr.dtype.element_ty))


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("given", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_converts_exactly_and_stays_nan(given: str, wanted: str) -> None:
    every: np.ndarray = np.arange(256, dtype=np.uint8)
    output = torch.zeros(256, dtype=getattr(torch, wanted))
    x = torch.from_numpy(every).view(getattr(torch, given))
    cast_kernel[(1,)](x, output, BLOCK=256)
    expected = every.view(getattr(ml_dtypes, given)).astype(np.float64)
    assert np.isnan(expected).any()
    assert np.array_equal(output.double().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("wanted", ["float8_e4m3fn", "float8_e5m2"])
def test_rounding_to_float8_is_to_nearest_even_and_saturates(given: str, wanted: str) -> None:
    every: np.ndarray = np.arange(256, dtype=np.uint8)
    numbers = np.unique(every.view(getattr(ml_dtypes, wanted)).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    halfway = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    x = torch.from_numpy(np.concatenate([numbers, halfway, *beside])).to(getattr(torch, given))
    padded = torch.cat([x, torch.zeros(1024 - len(x), dtype=x.dtype)])
    output = torch.zeros(1024, dtype=getattr(torch, wanted))
    cast_kernel[(1,)](padded, output, BLOCK=1024)
    assert torch.equal(output.view(torch.uint8), padded.to(output.dtype).view(torch.uint8))
    most = torch.finfo(output.dtype).max
    beyond = torch.tensor([torch.inf, -torch.inf, torch.finfo(x.dtype).max, torch.nan], dtype=x.dtype)
    output = torch.zeros(4, dtype=output.dtype)
    cast_kernel[(1,)](beyond, output, BLOCK=4)
    assert output.float()[:3].tolist() == [most, -most, most]
    assert output.float()[3].isnan()


@triton.jit
def product_kernel(x_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(output_ptr + at, tl.dot(x, tl.trans(x)))


def test_product_of_float8_has_nan_in_the_rows_and_columns_of_nan() -> None:
    # A product of types of 8 bits has a K of at least 32.
    every = torch.arange(256).repeat_interleave(4).to(torch.uint8).reshape(32, 32).view(torch.float8_e4m3fn)
    output = torch.zeros(32, 32)
    product_kernel[(1,)](every, output, BLOCK=32)
    assert torch.equal(output.isnan(), (every.float() @ every.float().t()).isnan())
    assert torch.equal(output.isnan().all(0), every.isnan().any(1))


@pytest.mark.parametrize("wanted", ALL)
@pytest.mark.parametrize("given", ALL)
def test_conversion_gives_what_compiled_code_gives(given: str, wanted: str) -> None:
    given_type, wanted_type = NUMPY[given], NUMPY[wanted]
    x = anything(given_type, 0)
    if wanted in INTEGERS and given in FLOATS:
        # Others have no defined result.
        x = rng(1).integers(0 if wanted in UNSIGNED else -100, 100, N).astype(given_type) + given_type.type(0.75)
    if given == "float64" and wanted == "bfloat16":
        with np.errstate(all="ignore"):
            x = x.astype(np.float32).astype(np.float64)  # backends differ in whether they round twice
    with np.errstate(all="ignore"):
        if wanted == "bool":
            expected = x != given_type.type(0)
        else:
            expected = (x.astype(np.float32) if BFLOAT16 in (given_type, wanted_type) else x).astype(wanted_type)
    output = tensor(np.zeros(N, wanted_type))
    cast_kernel[(1,)](tensor(x), output, BLOCK=N)
    assert same(array(output), expected).all()


@triton.jit
def masked_copy_kernel(x_ptr, output_ptr, n, other, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=other)
    tl.store(output_ptr + BLOCK - 1 - at, x, mask=at % 3 != 0)


@pytest.mark.parametrize("block", [1, 64, 1024])
@pytest.mark.parametrize("dtype", ALL)
def test_masked_load_and_store(dtype: str, block: int) -> None:
    """Few elements are not read in the same way as many."""
    x = np.resize(anything(NUMPY[dtype], 0), block)
    n = block - block // 3
    for other in (0, 1):
        output = tensor(np.full(block, 7).astype(NUMPY[dtype]))
        masked_copy_kernel[(1,)](tensor(x[:n]), output, n, other, BLOCK=block)
        loaded = np.where(np.arange(block) < n, x, NUMPY[dtype].type(other))
        expected = np.where(np.arange(block) % 3 != 0, loaded, NUMPY[dtype].type(7))[::-1]
        assert same(array(output), expected).all()


@triton.jit
def scalar_load_kernel(x_ptr, output_ptr, n, BLOCK: tl.constexpr):
    tl.store(output_ptr, tl.load(x_ptr, mask=n > 0, other=0.0))
    at = tl.arange(0, BLOCK)
    tl.store(output_ptr + 1 + at, tl.load(x_ptr + at, mask=at < n, other=0.0))


def test_zero_takes_the_place_of_one_number_that_is_masked() -> None:
    """Triton tests whether `other` is given, and mistook 0 for a missing one."""
    x = torch.ones(1)
    for n in (0, 1):
        output = torch.full((2,), 7.0)
        scalar_load_kernel[(1,)](x, output, n, BLOCK=1)
        assert output.tolist() == [n, n]


@triton.jit
def atomic_kernel(place_ptr, y_ptr, old_ptr, n, OPERATION: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + at)
    if OPERATION == "add":
        old = tl.atomic_add(place_ptr + at // SHARED, y, mask=at < n)
    elif OPERATION == "max":
        old = tl.atomic_max(place_ptr + at // SHARED, y, mask=at < n)
    elif OPERATION == "min":
        old = tl.atomic_min(place_ptr + at // SHARED, y, mask=at < n)
    elif OPERATION == "and":
        old = tl.atomic_and(place_ptr + at // SHARED, y, mask=at < n)
    elif OPERATION == "or":
        old = tl.atomic_or(place_ptr + at // SHARED, y, mask=at < n)
    elif OPERATION == "xor":
        old = tl.atomic_xor(place_ptr + at // SHARED, y, mask=at < n)
    else:
        old = tl.atomic_xchg(place_ptr + at // SHARED, y, mask=at < n)
    tl.store(old_ptr + at, old, mask=at < n)


ATOMICS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "add": (np.add, (*FLOATS, "int32", "int64", "uint32", "uint64")),
    "max": (np.maximum, (*WIDE, "int32", "int64", "uint32", "uint64")),
    "min": (np.minimum, (*WIDE, "int32", "int64", "uint32", "uint64")),
    "and": (np.bitwise_and, ("int32", "int64", "uint32", "uint64")),
    "or": (np.bitwise_or, ("int32", "int64", "uint32", "uint64")),
    "xor": (np.bitwise_xor, ("int32", "int64", "uint32", "uint64")),
    "xchg": (lambda place, y: y, ("float32", "float64", "int32", "int64", "uint32", "uint64")),
}


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize(("operation", "dtype"), [(name, dtype) for name in ATOMICS for dtype in ATOMICS[name][1]])
def test_atomic_operation(operation: str, dtype: str, shared: int) -> None:
    """One number or two go to a place; either of two may be the first."""
    function = ATOMICS[operation][0]
    place, y = finite(NUMPY[dtype], 0)[:64], finite(NUMPY[dtype], 1)[:64]
    result, old = tensor(place.copy()), tensor(y.copy())
    atomic_kernel[(1,)](result, tensor(y), old, 63, OPERATION=operation, SHARED=shared, BLOCK=64)
    expected = place.copy()
    for i in range(63):
        expected[i // shared] = function(expected[i // shared], y[i])
    assert same(array(result), expected).all()
    if shared == 1:
        assert same(array(old)[:63], place[:63]).all()


@triton.jit
def swap_kernel(place_ptr, expected_ptr, y_ptr, old_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(old_ptr + at, tl.atomic_cas(place_ptr + at, tl.load(expected_ptr + at), tl.load(y_ptr + at)))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64", "float32"])
def test_compare_and_swap(dtype: str) -> None:
    place, y = small(NUMPY[dtype], 0), distinct(NUMPY[dtype], 1)
    expected = small(NUMPY[dtype], 1)
    result, old = tensor(place.copy()), tensor(place * 0)
    swap_kernel[(1,)](result, tensor(expected), tensor(y), old, BLOCK=N)
    assert (array(old) == place).all()
    assert (array(result) == np.where(place == expected, y, place)).all()


@triton.jit
def sum_of_four_kernel(x_ptr, output_ptr):
    tl.store(output_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 4)), axis=0))


@pytest.mark.parametrize(("dtype", "one_more"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_sum_in_16_bits_is_rounded_at_each_addition(dtype: torch.dtype, one_more: float) -> None:
    """Depending on the order of additions, 1 is lost once, twice or three times; in float32 it never is."""
    output = torch.empty(1, dtype=dtype)
    sum_of_four_kernel[(1,)](torch.tensor([one_more, 1, 1, 1], dtype=dtype), output)
    assert output.item() in (one_more, one_more + 2)
    assert torch.tensor(one_more + 3).to(dtype).item() == one_more + 4


@triton.jit
def largest_kernel(x_ptr, output_ptr, index_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(output_ptr, tl.max(x, axis=0))
    tl.store(index_ptr, tl.argmax(x, axis=0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maximum_of_nan_alone_is_nan(dtype: torch.dtype) -> None:
    output, index = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    largest_kernel[(1,)](torch.full((4,), math.nan, dtype=dtype), output, index, BLOCK=4)
    assert output.isnan()
    largest_kernel[(1,)](torch.tensor([math.nan, -2, 1, math.nan], dtype=dtype), output, index, BLOCK=4)
    assert (output.item(), index.item()) == (1, 2)


@triton.jit
def argument_kernel(
    x_ptr, scaled_ptr, shifted_ptr, product_ptr, n, wide: tl.int64, factor, shift: tl.float64, ADDED: tl.constexpr
):
    x = tl.load(x_ptr)
    tl.store(scaled_ptr, x * factor)
    tl.store(shifted_ptr, tl.full((), 0, tl.float64) + shift + ADDED)
    tl.store(product_ptr, wide * n * 65536)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_argument_is_a_value_of_the_type_that_it_is_compiled_for(dtype: torch.dtype) -> None:
    """A float is a float32, whatever it is multiplied by, unless its type is declared."""
    x = torch.tensor([1.1], dtype=dtype)
    scaled, shifted, product = (torch.empty(1, dtype=kind) for kind in (torch.float64, torch.float64, torch.int64))
    argument_kernel[(1,)](x, scaled, shifted, product, 65537, 65537, 0.1, 0.1, ADDED=0)
    rounded = torch.tensor([0.1], dtype=torch.float32).to(torch.promote_types(dtype, torch.float32))
    assert scaled.item() == (x.to(rounded.dtype) * rounded).item()
    assert shifted.item() == 0.1
    assert product.item() == 65537 * 65537 * 65536


def named(text: str) -> set[str]:
    """Return the functions of the language that an expression names, and the named methods of values."""
    attributes = [node for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "tl"}


# By the name of a node in ast that is not its own.
SYMBOLS = {"Mult": "mul", "Div": "truediv", "BitAnd": "and", "BitOr": "or", "BitXor": "xor"}
SYMBOLS |= {"LtE": "le", "GtE": "ge", "Eq": "eq", "NotEq": "ne", "USub": "neg"}


def symbol(node: ast.AST) -> str:
    """Return the name of an operator in Python's methods."""
    name = type(node).__name__
    return SYMBOLS.get(name, name.lower())


def operators(text: str) -> set[str]:
    """Return the methods of values that an expression's operators call, and those that it names."""
    found = set()
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.BinOp):
            reflected = "r" if isinstance(node.left, ast.Constant) else ""
            found.add(f"__{reflected}{symbol(node.op)}__")
        elif isinstance(node, ast.Compare):
            found.add(f"__{symbol(node.ops[0])}__")
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            found.add(f"__{symbol(node.op)}__")
        elif isinstance(node, ast.Subscript):
            found.add("__getitem__")
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


@triton.jit
def hints_kernel(output_ptr, stride, n, wrap, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Give hints for offsets as a matrix product does: those of the last block restart at `wrap`."""
    tl.assume(n > 0)
    output_ptr = tl.multiple_of(output_ptr, 4096)
    stride = tl.multiple_of(stride, 16)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wrapped = tl.max_contiguous(tl.multiple_of(at % wrap, BLOCK), BLOCK)
    tl.store(tl.max_contiguous(output_ptr + at, BLOCK), wrapped + stride, mask=at < n)
    table = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] * STEP
    tl.static_assert(tl.max_contiguous(table, [1, BLOCK]).shape[1] == BLOCK)


@pytest.mark.parametrize(
    ("first", "stride", "n", "wrap", "step", "says"),
    [
        (0, 32, 40, 40, 1, ""),
        (0, 32, 40, 1, 1, ""),
        (0, 24, 40, 40, 1, "tl.multiple_of says that 24 is a multiple of 16"),
        (0, 32, 40, 24, 1, "tl.multiple_of says that 8 is a multiple of 16"),
        (0, 32, 40, 40, 3, "16 numbers along axis 1 follow one another, but the second is the first one + 3"),
        (0, 32, 0, 40, 1, "tl.assume of a condition that does not hold"),
        (4, 32, 40, 40, 1, "a pointer 16 bytes after the beginning of its memory is a multiple of 4096"),
    ],
)
def test_false_hint_to_the_compiler_is_a_fault(
    first: int, stride: int, n: int, wrap: int, step: int, says: str
) -> None:
    output = torch.zeros(first + 48, dtype=torch.int32)[first:]
    if not says:
        hints_kernel[(3,)](output, stride, n, wrap, step, BLOCK=16)
        assert output[:n].tolist() == [place % wrap + stride for place in range(n)]
        return
    with pytest.raises(interpreter.InterpreterError) as caught:
        hints_kernel[(3,)](output, stride, n, wrap, step, BLOCK=16)
    assert is_fault(caught.value)
    assert says in str(caught.value.__cause__)


# By other tests of this file.
TESTED = {
    "assume": test_false_hint_to_the_compiler_is_a_fault,
    "multiple_of": test_false_hint_to_the_compiler_is_a_fault,
    "max_contiguous": test_false_hint_to_the_compiler_is_a_fault,
    "load": test_masked_load_and_store,
    "store": test_masked_load_and_store,
    "atomic_cas": test_compare_and_swap,
    **{f"atomic_{name}": test_atomic_operation for name in ATOMICS},
}
REASONS = {
    "Python turns a comparison around: 1 < x is x > 1": "__rlt__ __rle__ __rgt__ __rge__ __req__ __rne__",
    "tl.philox, which is tested, and operations on integers": "philox_impl rand rand4x randint randint4x randn randn4x"
    " pair_uniform_to_normal uint_to_uniform_float",
    "says something to the compiler, and computes nothing": "max_constancy debug_barrier",
    "does something while a kernel is compiled": "static_assert static_print target_info",
    "tensor descriptors are tested by the operation matmul": "load_tensor_descriptor store_tensor_descriptor"
    " make_tensor_descriptor",
    "block pointers, which Triton 3.9 has no more": "make_block_ptr advance",
    "has an effect, and gives nothing": "device_assert device_print",
    "a load or a store under the interpreter, which runs one program after the other": "atomic_load atomic_store",
    "waits for another program, and the interpreter runs one after the other": "atomic_poll",
    "a part of tl.sort": "bitonic_merge",
    "of 8 and 4 bits, which nothing here takes": "dot_scaled",
    "gives its operand": "expect_zero",
    "tests/harness/test_inline_ptx.py tests it": "inline_asm_elementwise",
    "the interpreter does not have it, and says so": "map_elementwise",
}
NOT_TESTED = {name: reason for reason, names in REASONS.items() for name in names.split()}


def test_every_function_of_the_language_is_tested_or_a_reason_given() -> None:
    public = {name for name in tl.__all__ if callable(getattr(tl, name)) and not isinstance(getattr(tl, name), type)}
    methods = {name for name, member in vars(tl.tensor).items() if name.startswith("__") and tl.core.is_builtin(member)}
    covered = set().union(*(named(row.text) | operators(row.text) for row in ROWS)) | TESTED.keys()
    assert sorted((public | methods) - covered - NOT_TESTED.keys()) == []
    assert sorted(covered & NOT_TESTED.keys()) == []
