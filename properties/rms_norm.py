"""The record of rms_norm: root mean square normalization over the last axis."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fourfold.oracles import rms_norm as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import Declared
from fourfold.inputs.arrays import GENERATORS, cotangent, values
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, contract_of, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.workloads import Make, tiled, whole

from .norms import (
    ROWS_NOT_FINITE,
    a_row_does_not_see_the_others,
    columns_may_change_places,
    gradient_of_weight_weighs_the_normalized_rows,
    gradients_of_two_batches_add_up,
    normalized_rows_have_at_most_unit_mean_square,
    reorder_factors,
    scaling_a_row_scales_the_deviation_alone,
    squares_overflow,
)

RMS_NORM = Declared("rms_norm")
rows = RMS_NORM.example


def rows_of_others_with_infinities(x: Any) -> np.ndarray:
    """Return a mask ``[..., 1]`` of the rows with an infinity, for which other kernels may give anything.

    Ours divide by the infinite root, so that a finite entry gives 0. torch's own gives NaN throughout on a GPU.
    """
    if not contract_of(x).nonfinite:
        return np.zeros(1, dtype=bool)
    return np.isinf(x.value).any(-1, keepdims=True)


def forward(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """Return the oracle's output; unspecified, for other kernels, in a row with an infinity."""
    output = oracle.forward(x, weight, eps)
    infinite = rows_of_others_with_infinities(x)
    return unspecified_where(output, infinite) if np.any(infinite) else output


def backward(grad_output: Any, x: Any, weight: Any, eps: float = 1e-6) -> tuple[Any, Any]:
    """Return the oracle's gradients. The gradient of x is unspecified in a row in which a step might overflow.

    Where `forward` leaves a row open, so are the row's gradient of x and the whole gradient of weight, a sum over rows.
    """
    grad_x, grad_weight = oracle.backward(grad_output, x, weight, eps)
    if isinstance(grad_x, Bounded):
        infinite = np.isinf(np.max(abs(x.value), axis=-1, keepdims=True, initial=0)) | rows_of_others_with_infinities(x)
        grad_x = reorder_factors(grad_x, grad_output, weight, x, oracle.normalize(x, eps)[1])
        grad_x = unspecified_where(grad_x, infinite)
    if np.any(rows_of_others_with_infinities(x)):
        grad_weight = unspecified_where(grad_weight, np.ones(1, dtype=bool))
    return grad_x, grad_weight


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw one to three rows of two to five columns, away from 0, where the slope changes fast."""
    rng = draw(GENERATORS)
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    x = (rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape)).astype(dtype.numpy)
    weight = values(rng, shape[1:], dtype, "normal")
    return Case({"x": x, "weight": weight}, cotangent(rng, shape, dtype), {"eps": 1e-6})


examples: Mapping[str, Callable[[DType], Case]] = {
    # eps is all that is divided by.
    "rows_of_zeros": rows(x=np.zeros((3, 8))),
    "one_large_entry": rows(x=lambda rng, dtype: np.where(np.arange(40) == 7, 200.0, rng.normal(0, 0.1, (3, 40)))),
    "squares_overflow": rows(x=squares_overflow),
    "rows_not_finite": rows(x=ROWS_NOT_FINITE),
    "each_entry_in_turn_not_finite": rows(x=lambda rng, dtype: not_finite_in_turn(rng, 17, dtype)),
    "eps_far_above_the_mean_square": rows(x=lambda rng, dtype: rng.normal(0, 0.01, (3, 24)), eps=0.25),
    "eps_far_below_the_mean_square": rows(x=lambda rng, dtype: rng.normal(0, 1e-4, (3, 24)), eps=1e-12),
    # A sum of bfloat16 in bfloat16 stops growing at 256.
    "long_row": rows(1, cols=4096),
    "four_short_of_16384_columns": rows(2, cols=16380),
    # More rows than blocks run at a time: each sums the gradients of several, and a second stage what they leave.
    "many_rows_of_whole_vectors": rows(300, cols=16),
    # Whole vectors, more than the registers of a block hold; and rows of which vectors are held in part.
    "rows_longer_than_registers": rows(3, cols=8200),
    "rows_of_whole_vectors_held_by_many_threads": rows(5, cols=1016),
    # More of them than a block has room for at once, where they are brought to shared memory ahead.
    "rows_in_stages": rows(11, cols=2056),
    # Rows that begin between two multiples of 16 bytes, of more columns than a warp holds. Each block has several.
    "odd_rows_of_single_columns": rows(45, cols=1027),
    # More rows than programs that run at a time, along two axes that no single stride spans.
    "more_rows_than_programs_along_two_axes": rows(4, 3, cols=2049, x="transposed", grad_output="transposed"),
    "rows_longer_than_registers_along_two_axes": rows(
        2, 2, cols=16500, x="transposed", grad_output="transposed", weight="sliced_columns"
    ),
    # More columns than the largest number of float16, and than a grid has blocks along y.
    "one_past_65536_columns": rows(1, cols=65537),
    "weight_strided": rows(4, cols=48, weight="sliced_columns"),
    "all_misaligned": rows(5, cols=64, x="misaligned", weight="misaligned", grad_output="misaligned"),
    "cotangent_of_a_sum": rows(9, cols=40, grad_output=(-1.5, "expanded")),
}


def a_sign_goes_through(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """rms_norm(-x) = -rms_norm(x), with the same gradient of x and the negative one of weight."""
    here, there = evaluate(case), evaluate(case.with_inputs(x=-case["x"]))
    yield Relation(-here.output, there.output)
    yield Relation(here.gradients["x"], there.gradients["x"])
    yield Relation(-here.gradients["weight"], there.gradients["weight"])


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads x and weight and writes rows. Backward reads x, cotangent and weight and writes gradients."""
    x, weight = case["x"], case["weight"].nbytes
    return Cost(2 * x.nbytes + weight, 4 * x.size), Cost(3 * x.nbytes + 2 * weight, 10 * x.size)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, cols=256)), "ragged": whole(rows(17, cols=1001))},
    "cuda": {
        "small": whole(rows(128, cols=256)),
        "large": tiled(rows(256, cols=4096), 128, "x"),
        "short_rows": tiled(rows(256, cols=1024), 128, "x"),
        "long_rows": tiled(rows(16, cols=16384), 1024, "x"),
        "longest_rows": tiled(rows(16, cols=65536), 256, "x"),
        # Rows that begin between two multiples of 16 bytes.
        "misaligned": tiled(rows(32, cols=4099), 1024, "x"),
        # Each head of a query has such a norm of its own.
        "heads": tiled(rows(256, 32, cols=128), 32, "x"),
        "ragged": tiled(rows(33, cols=1001), 256, "x"),
    },
}

operation = RMS_NORM.operation(
    oracle,
    forward=forward,
    backward=backward,
    examples=examples,
    smooth=smooth,
    laws=(
        a_sign_goes_through,
        scaling_a_row_scales_the_deviation_alone,
        columns_may_change_places,
        normalized_rows_have_at_most_unit_mean_square,
        gradient_of_weight_weighs_the_normalized_rows,
        a_row_does_not_see_the_others,
        gradients_of_two_batches_add_up,
    ),
    cost=cost,
    workloads=workloads,
)
