"""What the records of norms and of softmax over the last axis share: the numbers of their cases, and laws."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.numerics.steps.orders import any_order, slopes_of_normalized
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Relation
from fourfold.operations.relations import between, equal_where, only

# The first three rows have an infinity or NaN.
ROWS_NOT_FINITE = [
    [np.inf, 0.0, 1.0, 2.0, 3.0],
    [0.0, -np.inf, np.inf, 2.0, 3.0],
    [1.0, 2.0, 3.0, 4.0, np.nan],
    [1.0, 2.0, 3.0, 5.0, 9.0],
]


def squares_overflow(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return two rows whose squares overflow, between two ordinary rows."""
    x = rng.normal(0, 2, (4, 40))
    x[1] *= dtype.largest / 64
    x[2] = dtype.largest / 64
    return x


def reorder_factors(grad_x: Any, grad_output: Any, weight: Any, x: Any, deviation: Any) -> Any:
    """Return the gradient of x, whose factors may be multiplied in any order."""
    if not isinstance(grad_x, Bounded):
        return grad_x
    return any_order(grad_x, *slopes_of_normalized(grad_output, weight, x, 1 / deviation, x.shape[-1]), axis=(-1,))


def sum_over_rows(result: Bounded) -> Bounded:
    """Return the sum over all axes but the last."""
    return total(result, axis=tuple(range(result.ndim - 1)))


def plain_cotangent(case: Case, dtype: DType) -> Bounded:
    """Return the cotangent as an array without error."""
    return Bounded.exact(case.grad_output.astype(dtype.wide), dtype.arithmetic)


def standard(case: Case) -> Case:
    """Return the case with weight 1 and without bias: its output is the normalized rows."""
    numbers = {"weight": 1, "bias": 0}
    return case.with_inputs(**{n: np.full_like(case[n], numbers[n]) for n in case.inputs if n in numbers})


def adding_a_number_to_a_row_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """f(x + t) = f(x), and the gradients are equal, for each row to which adding t is exact."""
    x: np.ndarray = case["x"].astype(dtype.wide)
    with np.errstate(invalid="ignore", over="ignore"):
        there = (x + 16).astype(dtype.numpy)
        unmoved = (there.astype(dtype.wide) - 16 == x) | ~np.isfinite(x)
    rows = unmoved.all(axis=-1, keepdims=True)
    here, moved = evaluate(case), evaluate(case.with_inputs(x=there))
    yield equal_where(rows, here.output, moved.output)
    yield equal_where(rows, here.gradients["x"], moved.gradients["x"])


def scaling_a_row_scales_the_deviation_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """norm(2 x) with 4 eps = norm(x) with eps, and the gradient halves."""
    x: np.ndarray = case["x"].astype(dtype.wide)
    with np.errstate(over="ignore"):
        doubled = (2 * x).astype(dtype.numpy)
    exact = np.isfinite(doubled.astype(dtype.wide)).all(axis=-1, keepdims=True)
    here = evaluate(case)
    there = evaluate(case.with_inputs(x=doubled).with_parameters(eps=4 * case.parameters["eps"]))
    yield equal_where(exact, here.output, there.output)
    yield equal_where(exact, here.gradients["x"], 2.0 * there.gradients["x"])


def columns_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Reordering the columns of all inputs reorders the output and the gradients."""
    order = np.random.default_rng(case["x"].size).permutation(case["x"].shape[-1])
    inputs = {name: array[..., order] for name, array in case.inputs.items()}
    here, there = evaluate(case), evaluate(Case(inputs, case.grad_output[..., order], case.parameters))
    yield Relation(here.output[..., order], there.output)
    for name, gradient in here.gradients.items():
        yield Relation(gradient[..., order], there.gradients[name])


def normalized_rows_have_at_most_unit_mean_square(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With weight 1 and no bias, the squares of a row sum to no more than the number of columns."""
    output = evaluate(standard(case)).output
    output = only(np.isfinite(output.value).all(-1, keepdims=True), output)
    sums = total(output * output, axis=-1)
    yield between(sums, -np.inf, case["x"].shape[-1])


def gradient_of_weight_weighs_the_normalized_rows(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of weight is the sum over rows of the cotangent times the normalized row."""
    normal = evaluate(standard(case)).output
    yield Relation(evaluate(case).gradients["weight"], sum_over_rows(plain_cotangent(case, dtype) * normal))


def a_row_does_not_see_the_others(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The last row has the same results alone as among the others."""
    if not case["x"].size:
        return
    flat = case["x"].reshape(-1, case["x"].shape[-1])
    here = evaluate(case)
    alone = evaluate(Case({**case.inputs, "x": flat[-1]}, case.grad_output.reshape(flat.shape)[-1], case.parameters))
    for among, by_itself in ((here.output, alone.output), (here.gradients["x"], alone.gradients["x"])):
        yield Relation(among.reshape(flat.shape)[-1], by_itself)


def gradients_of_two_batches_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of parameters over all rows are the sums of those over the first third and over the rest."""
    flat = (-1, case["x"].shape[-1])
    if not case["x"].size:
        return
    x, grad_output = case["x"].reshape(flat), case.grad_output.reshape(flat)
    cut = len(x) // 3
    whole = evaluate(case)
    parts = [
        evaluate(Case({**case.inputs, "x": x[part]}, grad_output[part], case.parameters))
        for part in (slice(cut), slice(cut, None))
    ]
    for name in sorted(whole.gradients.keys() - {"x"}):
        first, rest = (part.gradients[name] for part in parts)
        finite = np.isfinite(first.value) & np.isfinite(rest.value)
        yield Relation(only(finite, whole.gradients[name]), only(finite, first) + only(finite, rest))
