"""The record of softmax over the last axis."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fourfold.oracles import softmax as oracle

from fourfold.declaration.library import Declared
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, stored
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.relations import between, equals, equals_exactly, exactly, only
from fourfold.operations.workloads import Make, tiled, whole

from .norms import (
    a_row_does_not_see_the_others,
    adding_a_number_to_a_row_changes_nothing,
    columns_may_change_places,
)


def backward(grad_output: Any, x: Any) -> tuple[Any]:
    """Return the oracle's gradient, from the output as a kernel saves it: rounded to the tested dtype."""
    return oracle.backward(grad_output, stored(oracle.forward(x)))


SOFTMAX = Declared("softmax")
rows = SOFTMAX.example


def long_row(kib: int, more: int) -> Callable[[DType], Case]:
    """Return a named case of one row of `kib` KiB and `more` elements: 536 KiB are 274,432 columns of a half type."""
    return lambda dtype: rows(1, cols=kib * 1024 // dtype.numpy.itemsize + more)(dtype)


def causal_mask(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Mask row i of 33 after its first i columns; the first row sees none and is NaN."""
    return np.where(np.tri(33, k=-1) == 0, -np.inf, rng.normal(0, 2, (33, 33)))


def largest_first(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return a long row whose first entry is the largest: exp overflows unless it is subtracted."""
    return np.concatenate([[1000], rng.normal(0, 2, 16391)])[None]


def late_maximum(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return long rows whose running sum must be rescaled: one is -inf up to its last entry, the other rises."""
    cols = 160 * 1024 // dtype.numpy.itemsize + 16
    x = np.stack([np.full(cols, -np.inf), np.sort(rng.normal(0, 2, cols))])
    x[0, -1] = 40
    return x


def halves_of_the_largest(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return half of the largest number and its negative, whose difference is finite, and rows of only one of them."""
    return np.array([[1, -1, 0], [1, 1, 1], [-1, -1, -1], [-1, 0, 0.25]]) * (dtype.largest / 2)


examples: Mapping[str, Callable[[DType], Case]] = {
    "two_columns": rows(x=[[0.0, 1.0], [3.0, 3.0], [-4.0, 4.0]]),
    # exp(1000) overflows; without the maximum taken off, NaN.
    "large_values": rows(x=[[1000.0, 999.0, -1000.0], [-1000.0, -1001.0, -999.0]]),
    "largest_and_lowest": rows(x=halves_of_the_largest),
    "rows_not_finite": rows(
        x=[
            [-np.inf, -np.inf, -np.inf, -np.inf],
            [np.inf, 0.0, 1.0, 2.0],
            [np.inf, -np.inf, 1.0, 2.0],
            [1.0, 2.0, np.nan, 3.0],
            [1.0, 2.0, 3.0, np.nan],
            [-np.inf, np.nan, -np.inf, -np.inf],
            [-np.inf, 0.0, -np.inf, 1.0],
            [0.0, 1.0, 2.0, 3.0],
        ]
    ),
    # Rows that a loss leaves out. One holds NaN, so that its gradient is NaN, too.
    "rows_of_zero_cotangents": rows(
        x=[[1.0, np.nan, 3.0], [0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], grad_output=[[0, 0, 0], [-1, 0.5, 2], [0, 0, 0]]
    ),
    # 17 columns: the lanes of whole vectors, and a tail of one.
    "each_entry_in_turn_not_finite": rows(x=lambda rng, dtype: not_finite_in_turn(rng, 17, dtype)),
    "causal_mask": rows(x=causal_mask),
    # Rows at every distance from a multiple of 16 bytes, of several vectors for each thread.
    "rows_that_begin_anywhere": rows(9, cols=1029),
    # A sum of bfloat16 in bfloat16 stops growing at 256.
    "long_row": rows(1, cols=16384),
    # The longest row that a block's registers hold. The block has all of its 1024 threads.
    "longest_row_in_registers": rows(1, cols=32768),
    "row_of_31_warps": long_row(62, 0),
    "largest_first": rows(x=largest_first),
    "late_maximum": rows(x=late_maximum),
    # A row of -inf throughout, past a block of every kernel, and one with an entry.
    "masked_long_rows": rows(x=lambda rng, dtype: np.where(np.arange(80_000).reshape(2, -1) == 40_777, 1, -np.inf)),
    # A block has 256 KiB of registers, which hold other things too, and 227 KiB of shared memory. A cluster has eight
    # times as much.
    "row_longer_than_registers": long_row(160, 0),
    "rows_longer_than_registers": rows(2, cols=34008),
    "row_longer_than_registers_and_shared_memory": long_row(256, 1),
    "row_longer_than_registers_of_a_cluster": long_row(536, 0),
    "rows_longer_than_registers_along_two_axes": rows(2, 2, cols=33000, x="transposed", grad_output="transposed"),
    "five_axes_each_in_another_order": rows(2, 3, 2, 3, cols=4, x="axes_reversed", grad_output="transposed"),
}


def finite_rows(case: Case) -> np.ndarray:
    """Return ``[..., 1]`` which rows have a distribution as softmax: they hold no NaN or +inf, and not only -inf."""
    x = case["x"].astype(np.float64)
    return np.isfinite(np.max(x, axis=-1, keepdims=True, initial=-np.inf))


def rows_sum_to_one(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The entries of a row sum to 1."""
    rows = finite_rows(case)
    sums = total(only(rows, evaluate(case).output), axis=-1, keepdims=True)
    yield equals(sums, np.where(rows, 1, 0))


def entries_lie_between_zero_and_one(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """0 <= softmax(x) <= 1."""
    output = evaluate(case).output
    yield between(output, 0, 1)


def entries_are_to_the_largest_as_exponentials(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """y_i = y_m exp(x_i - x_m), where x_m is the largest of a row.

    The sum of the row is not in it, and so not the error of a long sum, below which half of an exponential's digits
    could hide.
    """
    x: np.ndarray = case["x"].astype(dtype.wide)
    output, rows = evaluate(case).output, finite_rows(case)
    if not x.size:
        return
    at = np.argmax(np.where(rows, x, 0), axis=-1, keepdims=True)
    largest, its_entry = (np.take_along_axis(values, at, -1) for values in (x, output.value))
    arithmetic = output.arithmetic
    narrow = arithmetic.storage if arithmetic.rounds_each_step else None
    roundoff = (narrow or arithmetic).roundoff
    with np.errstate(invalid="ignore"):
        # Others may compute exp2(x log2(e) - x_m log2(e)), or exp(x - x_m - log(sum)).
        sizes = abs(x) + abs(largest) + np.log(x.shape[-1])
        error = np.where(np.isfinite(x), 4 * roundoff * sizes, 0)
        exponents = Bounded(np.where(rows, x - largest, 0), np.where(rows, error, 0), arithmetic)
    expected = stored(Bounded(its_entry, 4 * roundoff * abs(its_entry), arithmetic)) * np.exp(exponents)
    yield Relation(only(rows, exactly(output.value, output)), only(rows, stored(expected)))


# It takes no gradients, and it is about long rows.
entries_are_to_the_largest_as_exponentials.most_named = 40_000  # type: ignore[attr-defined]


def masked_columns_add_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Columns of -inf before and after the others have output 0 and gradient 0, and leave the rest unchanged."""
    rows = finite_rows(case)
    width = [(0, 0)] * (case["x"].ndim - 1) + [(1, 2)]
    wider = Case(
        {"x": np.pad(case["x"], width, constant_values=-np.inf)}, np.pad(case.grad_output, width, constant_values=1.5)
    )
    here, there = evaluate(case), evaluate(wider)
    for narrow, wide in ((here.output, there.output), (here.gradients["x"], there.gradients["x"])):
        yield Relation(narrow, wide[..., 1:-2])
        for outside in (wide[..., :1], wide[..., -2:]):
            yield equals_exactly(only(rows, outside), 0)


def gradients_of_a_row_sum_to_zero(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of a row sums to 0, because adding a number to a row changes nothing."""
    sums = total(only(finite_rows(case), evaluate(case).gradients["x"]), axis=-1)
    yield equals(sums, 0)


def a_constant_cotangent_gives_no_gradient(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A cotangent that is constant along a row gives the gradient 0, because the entries always sum to 1."""
    constant = np.full_like(case.grad_output, -1.5)
    gradient = only(finite_rows(case), evaluate(Case(case.inputs, constant)).gradients["x"])
    yield equals(gradient, 0)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads the input and writes the output. Backward reads output and cotangent, and writes the gradient."""
    x = case["x"]
    return Cost(2 * x.nbytes, 5 * x.size), Cost(3 * x.nbytes, 4 * x.size)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, cols=256)), "ragged": whole(rows(17, cols=1001))},
    "cuda": {
        "small": whole(rows(128, cols=256)),
        "large": tiled(rows(32, cols=4096), 1024, "x"),
        "short_rows": tiled(rows(256, cols=256), 512, "x"),
        "long_rows": tiled(rows(16, cols=65536), 256, "x"),
        "longest_rows": tiled(rows(2, cols=262144), 256, "x"),
        # Rows that begin between two multiples of 16 bytes.
        "misaligned": tiled(rows(8, cols=50257), 256, "x"),
        "ragged": tiled(rows(33, cols=1001), 256, "x"),
    },
}

operation = SOFTMAX.operation(
    oracle,
    backward=backward,
    examples=examples,
    laws=(
        rows_sum_to_one,
        entries_lie_between_zero_and_one,
        entries_are_to_the_largest_as_exponentials,
        adding_a_number_to_a_row_changes_nothing,
        columns_may_change_places,
        masked_columns_add_nothing,
        gradients_of_a_row_sum_to_zero,
        a_constant_cotangent_gives_no_gradient,
        a_row_does_not_see_the_others,
    ),
    cost=cost,
    workloads=workloads,
)
