"""The record of scaled_matmul: a product of float8 matrices with a float32 scale for each block of them."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from fourfold.oracles import scaled_matmul as oracle
from fourfold.oracles.scaled_matmul import BLOCK, ORDERS, blocks

from fourfold.declaration.library import Declared
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.orders import either_formula
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation
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
    orders = ORDERS[1:] if _is_extreme(scale_a.value) or _is_extreme(scale_b.value) else ("dequantised",)
    others = (oracle.forward(a, b, scale_a, scale_b, order=order) for order in orders)
    return functools.reduce(either_formula, others, found)


def _is_extreme(scale: np.ndarray) -> bool:
    size = abs(scale[np.isfinite(scale) & (scale != 0)])
    return bool(((size < LEAST_SCALE) | (size > LARGEST_SCALE)).any())


# ---- cases

SCALED_MATMUL = Declared("scaled_matmul")
example = SCALED_MATMUL.example
# The numbers of float8_e4m3fn, in the order of their bits, and the bits of NaN of each sign.
NUMBERS: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
NAN = (0x7F, 0xFF)


def rows(m: int, n: int, k: int, **arguments: Any) -> Callable[[DType], Case]:
    """Return a named case of random numbers."""
    return example(m=m, n=n, k=k, **arguments)


def every_finite_number() -> Callable[[DType], Case]:
    """Multiply each number of the type, in a and in b, by a few others: all other terms are 0, so nothing is summed."""
    a, b = np.zeros((127, 2), NUMBERS.dtype), np.zeros((8, 2), NUMBERS.dtype)
    a[:, 0], a[:, 1] = np.delete(NUMBERS, NAN).reshape(2, 127)
    b[:4, 0] = b[4:, 1] = [1, -448, 2.0**-9, 1.875]
    return example(a=a, b=b, scale_a=np.full((127, 1), 2.0**-6), scale_b=[[2.0**-6]])


def nan_of_each_sign(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return a matrix with both NaN in rows of their own, and in the tail of a block."""
    matrix = rng.normal(0, 2, (7, 131)).astype(NUMBERS.dtype)
    matrix[[1, 2, 4], [0, 130, 64]] = NUMBERS[[*NAN, NAN[1]]]
    return matrix


def blocks_cancel() -> Callable[[DType], Case]:
    """Let the second block of terms cancel nearly all of the first: a half type keeps nothing of the difference."""
    rng = np.random.default_rng(9)
    half, b = rng.normal(0, 2, (6, 128)), rng.normal(0, 2, (5, 128))
    scale_a = np.exp(rng.normal(-3, 1, (6, 1))) * [1, 1 - 2.0**-9]
    return example(a=np.concatenate([half, -half], axis=1), b=np.tile(b, 2), scale_a=scale_a, scale_b=np.ones((1, 2)))


def terms_of_14_bits(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return terms of one sign whose sums have more digits than the float8 tensor cores of Hopper keep."""
    return rng.choice([1.125, 1.625, 1.875, 3.25, 0.01953125], (4, 128))


examples: Mapping[str, Callable[[DType], Case]] = {
    "three_blocks_each_way": rows(3, 260, 290, scale_a="spread", scale_b="spread"),
    "whole_blocks": rows(32, 128, 128),
    "rows_past_a_tile_by_one": rows(129, 9, 144),
    # More rows of tiles than one group of them has.
    "tiles_in_every_place": rows(270, 70, 16),
    "as_many_blocks_as_rows": rows(3, 9, 300, scale_a="spread", scale_b="spread"),
    # Rows of whole vectors, and vectors that are not aligned.
    "whole_vectors": rows(16, 16, 160),
    "misaligned": rows(16, 16, 160, **dict.fromkeys(("a", "b", "scale_a", "scale_b"), "misaligned")),
    "rows_apart_by_no_multiple_of_16_bytes": rows(9, 16, 144, a="cut_from_wider", b="cut_from_wider"),
    "every_finite_number": every_finite_number(),
    "scales_apart": rows(12, 20, 700, scale_a="spread", scale_b="spread"),
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
    half = (blocks(case["a"].shape[1]) + 1) // 2
    parts = []
    for terms, of_scales in (
        (slice(half * BLOCK), slice(half)),
        (slice(half * BLOCK, None), slice(half, None)),
    ):
        numbers = {name: case[name][:, terms] for name in ("a", "b")}
        numbers |= {name: case[name][:, of_scales] for name in ("scale_a", "scale_b")}
        parts.append(evaluate(case.with_inputs(**numbers)).output)
    finite = np.isfinite(parts[0].value) & np.isfinite(parts[1].value)
    yield Relation(only(finite, evaluate(case).output), only(finite, parts[0]) + only(finite, parts[1]))


def the_identity_gives_a_with_its_scales(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The product with the identity is a, each number with both scales of its block, in the rows without NaN.

    The scales of b are as they are for as many columns as a has, and 2 beyond these.
    """
    k = case["a"].shape[1]
    if not k:
        return
    given, wanted = case["scale_b"], (blocks(k), blocks(k))
    scale_b: np.ndarray = np.full(wanted, 2, np.float32)
    scale_b[: len(given)] = given[: len(scale_b)]
    identity = np.eye(k).astype(ml_dtypes.float8_e4m3fn)
    nothing: np.ndarray = np.zeros(case["a"].shape, dtype.numpy)
    square = replace(case.with_inputs(b=identity, scale_b=scale_b), grad_output=nothing)
    output, column = evaluate(square).output, np.arange(k) // BLOCK
    parts = (case["a"], case["scale_a"][:, column], scale_b[column, column][None])
    a, of_rows, of_columns = (Bounded.exact(x.astype(dtype.wide), dtype.arithmetic) for x in parts)
    expected = a * (of_rows * of_columns)
    finite = np.isfinite(a.value).all(axis=1, keepdims=True) & np.isfinite(case["scale_a"]).all(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = abs(of_rows.value * of_columns.value)
    usual = (
        (sizes < LARGEST_SCALE) & ((sizes > LEAST_SCALE) | (sizes == 0)) & np.logical_not(_is_extreme(case["scale_a"]))
    )
    columns_finite = np.isfinite(scale_b).all(axis=1)[column][None]
    yield equal_where(finite & usual & columns_finite, output, expected)


def blocks_of_columns_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Some rows, and the columns past their first block, are the same in a call without the others."""
    m, n = case.grad_output.shape
    first = m // 3
    begins = BLOCK if n > BLOCK else 0
    part = replace(
        case.with_inputs(
            a=case["a"][first:],
            scale_a=case["scale_a"][first:],
            b=case["b"][begins:],
            scale_b=case["scale_b"][begins // BLOCK :],
        ),
        grad_output=case.grad_output[first:, begins:],
    )
    yield Relation(evaluate(part).output, evaluate(case).output[first:, begins:])


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads all inputs once and writes the result. There is no backward.

    Operations are not counted: a device's ceilings are those of products of the result's dtype, and products of float8
    may be faster than these.
    """
    moved = sum(array.nbytes for array in case.inputs.values()) + case.grad_output.nbytes
    return Cost(moved, 0), Cost(0, 0)


def tile_blocks(m: int, n: int, k: int, times: int, across: int) -> Make:
    """Return a workload that repeats a case: its rows `times` times, and its columns, whole blocks, `across` times."""

    def make(dtype: DType) -> Workload:
        part = rows(m, n, k)(dtype)
        inputs = {name: np.tile(part[name], (times, 1)) for name in ("a", "scale_a")}
        inputs |= {name: np.tile(part[name], (across, 1)) for name in ("b", "scale_b")}
        nothing = np.tile(part.grad_output, (times, across))
        return Workload(case=replace(part, inputs=inputs, grad_output=nothing), part=part)

    return make


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(64, 64, 128)), "ragged": whole(rows(33, 150, 200))},
    "cuda": {
        "small": whole(rows(256, 256, 256)),
        "large": tile_blocks(64, 128, 4096, times=64, across=32),
        # As DeepSeek's layers have them: 4096 tokens, and 64 while tokens are generated.
        "tokens": tile_blocks(64, 128, 7168, times=64, across=16),
        "skinny": tile_blocks(64, 128, 7168, times=1, across=16),
        "ragged": whole(rows(65, 1003, 1001)),
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
    workloads=workloads,
)
