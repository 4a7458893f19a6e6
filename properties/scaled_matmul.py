"""The record of scaled_matmul: a product of float8 matrices with a float32 scale for each block of them."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from fourfold.oracles import scaled_matmul as oracle
from fourfold.oracles.scaled_matmul import BLOCK, ORDERS

from fourfold.declaration.library import Declared
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.orders import either_formula
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation, what_must_be_moved
from fourfold.operations.relations import equal_where, only
from fourfold.operations.workloads import Make, Workload, whole

# Between these, and with the numbers of float8, no product of a term with its scales leaves float32's normal range,
# whichever factors are multiplied first.
LEAST_SCALE, LARGEST_SCALE = 2.0**-40, 2.0**40

# ---- the right results


def forward(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any = None) -> Any:
    """Return the oracle's result, with a bound on the error of each order in which sums and scales are multiplied.

    A scale may be multiplied with a sum, with the other scale, or with each number before it is summed. All of these
    round alike, unless one of them leaves the range of normal numbers on the way. Where a scale is infinite, sums of
    scaled numbers may be NaN though the scaled sum is infinite: nothing is known of such a result.
    """
    found = oracle.forward(a, b, scale_a, scale_b)
    if not isinstance(found, Bounded):
        return found
    others = (oracle.forward(a, b, scale_a, scale_b, order=order) for order in orders(scale_a, scale_b))
    return functools.reduce(either_formula, others, found)


def is_extreme(scale: np.ndarray) -> bool:
    """Return whether a scale may leave the normal range of float32 in some order: see `LEAST_SCALE`."""
    size = abs(scale[np.isfinite(scale) & (scale != 0)])
    return bool(((size < LEAST_SCALE) | (size > LARGEST_SCALE)).any())


def orders(scale_a: Any, scale_b: Any) -> tuple[str, ...]:
    """Return the orders, beside that of scales first, whose errors differ for these scales."""
    values = (getattr(scale, "value", scale) for scale in (scale_a, scale_b))
    return ORDERS[1:] if any(map(is_extreme, values)) else ("dequantised",)


# ---- cases

SCALED_MATMUL = Declared("scaled_matmul")
example = SCALED_MATMUL.example
# The numbers of float8_e4m3fn, in the order of their bits, and the bits of NaN of each sign.
NUMBERS: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
NAN = (0x7F, 0xFF)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


def rows(m: int, n: int, k: int, **arguments: Any) -> Callable[[DType], Case]:
    """Return a named case of random numbers."""
    return example(m=m, n=n, k=k, **arguments)


def numbers_of_e5m2(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return numbers of the other type, infinities among them."""
    numbers = np.exp(rng.normal(0, 4, (7, 300))) * rng.choice([1, -1], (7, 300))
    numbers[3, [5, 40]] = np.inf, -np.inf
    return numbers.astype(E5M2)


def every_finite_number(float8: Any, swapped: bool = False) -> Callable[[DType], Case]:
    """Multiply each number of a type by a few others: all other terms are 0, so nothing is summed."""
    numbers = np.arange(256, dtype=np.uint8).view(float8)
    numbers = numbers[np.isfinite(numbers.astype(np.float64))]
    a, b = np.zeros((len(numbers) // 2, 2), float8), np.zeros((8, 2), NUMBERS.dtype)
    a[:, 0], a[:, 1] = numbers.reshape(2, -1)
    b[:4, 0] = b[4:, 1] = [1, -448, 2.0**-9, 1.875]
    a, b = (b, a) if swapped else (a, b)
    return example(a=a, b=b, scale_a=np.full((len(a), 1), 2.0**-6), scale_b=[[2.0**-6]])


def nan_of_each_sign(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return a matrix with both NaN in rows of their own, and in the tail of a block."""
    matrix = rng.normal(0, 2, (7, 131)).astype(NUMBERS.dtype)
    matrix[[1, 2, 4], [0, 130, 64]] = NUMBERS[[*NAN, NAN[1]]]
    return matrix


def blocks_cancel() -> Callable[[DType], Case]:
    """Let the second block of terms cancel nearly all of the first: a half type keeps nothing of the difference."""
    rng = np.random.default_rng(9)
    half, b = (rng.normal(0, 2, (extent, 128)).astype(NUMBERS.dtype) for extent in (6, 5))
    scale_a = np.exp(rng.normal(-3, 1, (6, 1))) * [1, 1 - 2.0**-9]
    return example(a=np.concatenate([half, -half], axis=1), b=np.tile(b, 2), scale_a=scale_a, scale_b=np.ones((1, 2)))


def terms_of_14_bits(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return terms of one sign whose sums have more digits than the float8 tensor cores of Hopper keep."""
    return rng.choice([1.125, 1.625, 1.875, 3.25, 0.01953125], (4, 128)).astype(NUMBERS.dtype)


examples: Mapping[str, Callable[[DType], Case]] = {
    "three_blocks_each_way": rows(3, 260, 290, scale_a="spread", scale_b="spread"),
    "whole_blocks": rows(32, 128, 128),
    "rows_past_a_tile_by_one": rows(129, 9, 144),
    # More rows of tiles than one group of them has.
    "tiles_in_every_place": rows(270, 70, 16),
    "as_many_blocks_as_rows": rows(3, 9, 300, scale_a="spread", scale_b="spread"),
    # Rows of whole vectors that are not aligned.
    "misaligned": rows(16, 16, 160, **dict.fromkeys(("a", "b", "scale_a", "scale_b"), "misaligned")),
    "rows_apart_by_no_multiple_of_16_bytes": rows(9, 16, 144, a="cut_from_wider", b="cut_from_wider"),
    "every_finite_number": every_finite_number(NUMBERS.dtype),
    "every_finite_number_of_e5m2": every_finite_number(E5M2),
    "every_finite_number_of_e5m2_in_b": every_finite_number(E5M2, swapped=True),
    "e5m2": example(a=numbers_of_e5m2, b=numbers_of_e5m2),
    "e5m2_times_e4m3": example(a=numbers_of_e5m2, n=9),
    "scales_of_zero": rows(12, 131, 140, scale_a="whole", scale_b="whole"),
    "subnormal_scales": rows(6, 5, 140, scale_a="tiny"),
    "nan_of_each_sign": example(a=nan_of_each_sign, b=nan_of_each_sign),
    "scales_not_finite_of_zeros": example(a=np.zeros((3, 131)), scale_a=[[np.nan, 1], [1, np.inf], [-np.inf, 1]]),
    "blocks_cancel": blocks_cancel(),
    # A sum of ones stops growing at 256 in bfloat16, and at 2048 in float16.
    "sums_past_the_digits_of_a_half_type": example(
        a=np.ones((2, 2100)), b=np.ones((3, 2100)) * [[1], [0.5], [1.75]], scale_a="constant", scale_b=np.ones((1, 17))
    ),
    "terms_of_14_bits": example(a=terms_of_14_bits, b=terms_of_14_bits, scale_a="constant", scale_b=[[1]]),
}

# ---- laws


def a_power_of_2_goes_through(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Doubling the scales of a doubles the result, where both are finite."""
    with np.errstate(over="ignore"):
        doubled = evaluate(case.with_inputs(scale_a=case["scale_a"] * np.float32(2))).output
    once = evaluate(case).output
    finite = np.isfinite(once.value) & np.isfinite(doubled.value)
    yield Relation(only(finite, doubled), only(finite, once) + only(finite, once))


def blocks_of_terms_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The result is that of the first blocks of terms plus that of the others, where both are finite."""
    half, steps = (case["scale_a"].shape[1] + 1) // 2, {"a": BLOCK, "b": BLOCK, "scale_a": 1, "scale_b": 1}
    parts = {name: (case[name][:, : half * step], case[name][:, half * step :]) for name, step in steps.items()}
    first, second = (evaluate(case.with_inputs(**{n: x[i] for n, x in parts.items()})).output for i in range(2))
    finite = np.isfinite(first.value) & np.isfinite(second.value)
    yield Relation(only(finite, evaluate(case).output), only(finite, first) + only(finite, second))


def the_identity_gives_a_with_its_scales(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The product with the identity is a, each number with both scales of its block, in the rows without NaN.

    Only the first block of terms and one more are taken. The scales of b are as they are, or 2 where there are too few.
    """
    left, scale_a = case["a"][:, : BLOCK + 1], case["scale_a"][:, :2]
    column = np.arange(left.shape[1]) // BLOCK
    scale_b: np.ndarray = np.full((scale_a.shape[1],) * 2, 2, np.float32)
    scale_b[: len(case["scale_b"])] = case["scale_b"][: len(scale_b), : len(scale_b)]
    square = case.with_inputs(a=left, b=np.eye(left.shape[1]).astype(left.dtype), scale_a=scale_a, scale_b=scale_b)
    output = evaluate(replace(square, grad_output=np.zeros(left.shape, dtype.numpy))).output
    parts = (left, scale_a[:, column], scale_b[column, column][None])
    a, of_rows, of_columns = (Bounded.exact(x.astype(dtype.wide), dtype.arithmetic) for x in parts)
    usual = np.isfinite(a.value).all(axis=1, keepdims=True) & np.isfinite(scale_a).all(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        size = abs(of_rows.value * of_columns.value)
    usual = usual & (size < LARGEST_SCALE) & ((size > LEAST_SCALE) | (size == 0)) & (not is_extreme(scale_a))
    yield equal_where(usual & np.isfinite(scale_b).all(axis=1)[column], output, a * (of_rows * of_columns))


def blocks_of_columns_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Some rows, and the columns past their first block, are the same in a call without the others."""
    row, block = case.grad_output.shape[0] // 3, int(case.grad_output.shape[1] > BLOCK)
    begins = {"a": row, "scale_a": row, "b": block * BLOCK, "scale_b": block}
    part = case.with_inputs(**{name: case[name][begin:] for name, begin in begins.items()})
    part = replace(part, grad_output=case.grad_output[row:, block * BLOCK :])
    yield Relation(evaluate(part).output, evaluate(case).output[row:, block * BLOCK :])


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads all inputs once and writes the result. There is no backward.

    Operations are not counted: a device's ceilings are those of products of the result's dtype, and products of float8
    may be faster than these.
    """
    moved, nothing = what_must_be_moved(case)
    return replace(moved, flops=0), nothing


def tile_blocks(make_part: Callable[[DType], Case], times: int, across: int) -> Make:
    """Return a workload that repeats a case: its rows `times` times, and its columns, whole blocks, `across` times."""

    def make(dtype: DType) -> Workload:
        part = make_part(dtype)
        inputs = {name: np.concatenate([part[name]] * times) for name in ("a", "scale_a")}
        inputs |= {name: np.concatenate([part[name]] * across) for name in ("b", "scale_b")}
        nothing = np.tile(part.grad_output, (times, across))
        return Workload(case=replace(part, inputs=inputs, grad_output=nothing), part=part)

    return make


def workloads_of(part: Callable[[int, int, int], Callable[[DType], Case]]) -> Mapping[str, Mapping[str, Make]]:
    """Return the workloads of an operation, given the function that makes a named case from m, n and k."""
    return {
        "cpu": {"small": whole(part(64, 64, 128)), "ragged": whole(part(33, 150, 200))},
        "cuda": {
            "small": whole(part(256, 256, 256)),
            "large": tile_blocks(part(64, 128, 4096), times=64, across=32),
            # As DeepSeek's layers have them: 4096 tokens, and 64 while tokens are generated.
            "tokens": tile_blocks(part(64, 128, 7168), times=64, across=16),
            "skinny": tile_blocks(part(64, 128, 7168), times=1, across=16),
            "ragged": whole(part(65, 1003, 1001)),
        },
    }


operation = SCALED_MATMUL.operation(
    oracle,
    forward=forward,
    examples=examples,
    batched={"a": 1, "scale_a": 1},
    laws=(
        a_power_of_2_goes_through,
        blocks_of_terms_add_up,
        the_identity_gives_a_with_its_scales,
        blocks_of_columns_stand_alone,
    ),
    cost=cost,
    workloads=workloads_of(rows),
)
