"""The record of rowwise_scaled_matmul: a product of float8 matrices with a float32 scale for each row of both."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import rowwise_scaled_matmul as oracle

from fourfold.declaration.library import Declared
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.orders import either_formula
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Operation, Relation
from fourfold.operations.relations import equal_where, only

from .scaled_matmul import (
    LARGEST_SCALE,
    LEAST_SCALE,
    a_power_of_2_goes_through,
    cost,
    is_extreme,
    nan_of_each_sign,
    numbers_of_e5m2,
    orders,
    terms_of_14_bits,
    workloads_of,
)


def forward(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any = None) -> Any:
    """Return the oracle's result, with a bound on the error of each order in which sums and scales are multiplied."""
    found = oracle.forward(a, b, scale_a, scale_b)
    if not isinstance(found, Bounded):
        return found
    others = (oracle.forward(a, b, scale_a, scale_b, order=order) for order in orders(scale_a, scale_b))
    return functools.reduce(either_formula, others, found)


# ---- laws


def terms_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The result is that of the first half of the terms plus that of the others, where both are finite."""
    half = (case["a"].shape[1] + 1) // 2
    parts = ({name: case[name][:, terms] for name in "ab"} for terms in (slice(half), slice(half, None)))
    first, second = (evaluate(case.with_inputs(**part)).output for part in parts)
    finite = np.isfinite(first.value) & np.isfinite(second.value)
    yield Relation(only(finite, evaluate(case).output), only(finite, first) + only(finite, second))


def the_identity_gives_a_with_its_scales(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The product with the identity is a, each number with both of its scales, in the rows without NaN.

    The scales of b are as they are, or 2 where there are too few.
    """
    a, scale_a = case["a"][:, :9], case["scale_a"]
    scale_b: np.ndarray = np.full(a.shape[1], 2, np.float32)
    scale_b[: len(case["scale_b"])] = case["scale_b"][: len(scale_b)]
    square = case.with_inputs(a=a, b=np.eye(a.shape[1]).astype(a.dtype), scale_b=scale_b)
    output = evaluate(replace(square, grad_output=np.zeros(a.shape, dtype.numpy))).output
    parts = (a, scale_a[:, None], scale_b[None])
    numbers, of_rows, of_columns = (Bounded.exact(x.astype(dtype.wide), dtype.arithmetic) for x in parts)
    usual = np.isfinite(numbers.value).all(axis=1, keepdims=True) & np.isfinite(of_rows.value)
    with np.errstate(over="ignore", invalid="ignore"):
        size = abs(of_rows.value * of_columns.value)
    usual = usual & (size < LARGEST_SCALE) & ((size > LEAST_SCALE) | (size == 0))
    if not is_extreme(scale_a) and not is_extreme(scale_b):
        yield equal_where(usual & np.isfinite(of_columns.value), output, numbers * (of_rows * of_columns))


def rows_and_columns_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Some rows and columns are the same in a call without the others."""
    begins = {"a": case.grad_output.shape[0] // 3, "b": case.grad_output.shape[1] // 2}
    part = case.with_inputs(
        **{name: case[name][begins[name[-1]] :] for name in ("a", "b", "scale_a", "scale_b")},
    )
    part = replace(part, grad_output=case.grad_output[begins["a"] :, begins["b"] :])
    yield Relation(evaluate(part).output, evaluate(case).output[begins["a"] :, begins["b"] :])


# ---- the record


def record_of(declared: Declared, **fields: Any) -> Operation:
    """Return the record of a product with a scale for each row of both matrices."""

    def rows(m: int, n: int, k: int, **arguments: Any) -> Callable[[DType], Case]:
        return declared.example(m=m, n=n, k=k, **arguments)

    examples: Mapping[str, Callable[[DType], Case]] = {
        "spread_scales": rows(3, 260, 290, scale_a="spread", scale_b="spread"),
        "whole_blocks": rows(32, 128, 128),
        "rows_past_a_tile_by_one": rows(129, 9, 144),
        # More rows of tiles than one group of them has.
        "tiles_in_every_place": rows(270, 70, 16),
        "misaligned": rows(16, 16, 160, **dict.fromkeys(("a", "b", "scale_a", "scale_b"), "misaligned")),
        "rows_apart_by_no_multiple_of_16_bytes": rows(9, 16, 144, a="cut_from_wider", b="cut_from_wider"),
        "one_scale_of_a_tensor": rows(9, 20, 140, scale_a="expanded", scale_b="expanded"),
        "scales_of_zero": rows(12, 131, 140, scale_a="whole", scale_b="whole"),
        "subnormal_scales": rows(6, 5, 140, scale_a="tiny"),
        "scales_not_finite_of_zeros": declared.example(
            a=np.zeros((3, 131)), n=4, scale_a=[np.nan, np.inf, -np.inf], scale_b=np.ones(4)
        ),
        # A sum of ones stops growing at 256 in bfloat16, and at 2048 in float16.
        "sums_past_the_digits_of_a_half_type": declared.example(
            a=np.ones((2, 2100)), b=np.ones((3, 2100)) * [[1], [2], [3]], scale_a="constant", scale_b=np.ones(3)
        ),
    }
    return declared.operation(
        oracle,
        **{
            "batched": {"a": 1, "scale_a": 0},
            "laws": (
                a_power_of_2_goes_through,
                terms_add_up,
                the_identity_gives_a_with_its_scales,
                rows_and_columns_stand_alone,
            ),
            "cost": cost,
            "workloads": workloads_of(rows),
            **fields,
            "examples": {**examples, **fields.get("examples", {})},
        },
    )


ROWWISE = Declared("rowwise_scaled_matmul")
operation = record_of(
    ROWWISE,
    forward=forward,
    examples={
        "e5m2": ROWWISE.example(a=numbers_of_e5m2, b=numbers_of_e5m2),
        "e5m2_times_e4m3": ROWWISE.example(a=numbers_of_e5m2, n=9),
        "nan_of_each_sign": ROWWISE.example(a=nan_of_each_sign, b=nan_of_each_sign),
        "terms_of_14_bits": ROWWISE.example(
            a=terms_of_14_bits, b=terms_of_14_bits, scale_a="constant", scale_b=np.ones(4)
        ),
    },
)
