"""The record of add_layer_norm: a residual is added to x, and the sum is normalized over the last axis.

As of add_rms_norm, it is left open whether the sum is rounded to the dtype before it is normalized.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import add_layer_norm as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import Declared
from fourfold.numerics.bounded import stored
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost

from . import layer_norm
from .add_rms_norm import (
    backward_of_sum,
    joint_record,
    next_to_ties,
    nothing_is_added_to_nothing,
    pair,
    sums_not_finite,
    the_summands_may_change_places,
    two_cotangents,
    workloads_of,
    y_is_norm_of_the_sum,
)

INPUTS = ("x", "residual", "weight", "bias")
y_is_the_norm_of_the_sum = y_is_norm_of_the_sum("layer_norm")

# ---- the right results


def norm_output(**arguments: Any) -> Any:
    """Return the norm of the sum, which may be rounded."""
    return oracle.forward(**arguments, stored=stored, norm=layer_norm.forward)[0]


def sum_output(x: Any, residual: Any, **others: Any) -> Any:
    """Return the sum, rounded once."""
    return x + residual


def joined_outputs(**arguments: Any) -> Any:
    """Return y and h, side by side."""
    return np.concatenate(oracle.forward(**arguments, stored=stored, norm=layer_norm.forward), axis=-1)


def backward_of_y(grad_y: Any, x: Any, residual: Any, **others: Any) -> tuple[Any, ...]:
    """Return the gradients where h is not used. x and residual have the same."""
    of_sum, *rest = layer_norm.backward(grad_y, stored(x + residual), **others)
    return of_sum, of_sum, *rest


def backward_of_both(grad_outputs: Any, **arguments: Any) -> tuple[Any, ...]:
    """Return the sums of both outputs' gradients."""
    cols = arguments["x"].shape[-1]
    grads = grad_outputs[..., :cols], grad_outputs[..., cols:]
    return oracle.backward(*grads, **arguments, stored=stored, norm=layer_norm.backward)


# ---- cases


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw the cases of layer_norm, with x as the sum of two tensors."""
    case = draw(layer_norm.smooth(dtype))
    half = (case["x"] / 2).astype(dtype.numpy)
    inputs = {"x": half, "residual": case["x"] - half, "weight": case["weight"], "bias": case["bias"]}
    return replace(case, inputs=inputs)


ADD_LAYER_NORM = Declared("add_layer_norm", ("y", "h"))
rows = ADD_LAYER_NORM.example


examples: Mapping[str, Callable[[DType], Case]] = {
    "residual_lies_otherwise": rows(33, cols=65, x="transposed", residual="misaligned"),
    "sums_next_to_ties": pair(next_to_ties, rows),
    "sums_are_far_smaller": pair(lambda rng, dtype: (x := rng.normal(0, 2, (3, 24)), -x * (1 + 2.0**-7)), rows),
    "sums_are_not_finite": pair(sums_not_finite, rows),
    "many_rows": rows(300, cols=16),
    "longer_than_registers": rows(1, cols=8200),
    "rows_in_stages": rows(11, cols=2056),
    # Rows that begin between two multiples of 16 bytes, of more columns than a warp holds, and than a block does.
    "odd_rows_of_single_columns": rows(20, cols=1027),
    "odd_rows_longer_than_registers": rows(1, cols=16501),
}
# Of the sum alone, and of both cotangents at once: other sizes and numbers are those of y.
OF_H = ("no_rows", "no_cols", "without_leading_axes", "all_transposed", *list(examples)[:4], *list(examples)[-2:])
OF_BOTH = ("no_rows", "no_cols", "without_leading_axes", "all_sliced_columns", "all_misaligned", *list(examples)[2:])


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads all inputs and writes both outputs; backward reads both cotangents and the sum."""
    x, parameters = case["x"], case["weight"].nbytes
    return Cost(4 * x.nbytes + 2 * parameters, 9 * x.size), Cost(4 * x.nbytes + 3 * parameters, 15 * x.size)


_y = ADD_LAYER_NORM.operation(
    oracle,
    name="add_layer_norm.y",
    forward=norm_output,
    backward=backward_of_y,
    examples=examples,
    smooth=smooth,
    laws=(the_summands_may_change_places, y_is_the_norm_of_the_sum),
    cost=cost,
    workloads=workloads_of(rows, lambda make: make),
)
_h = replace(
    _y,
    name="add_layer_norm.h",
    forward=sum_output,
    backward=backward_of_sum(backward_of_y),
    differentiable=INPUTS[:2],
    examples={name: _y.examples[name] for name in OF_H},
    laws=(the_summands_may_change_places, nothing_is_added_to_nothing),
)
operation = joint_record(
    _y, _h, OF_BOTH, forward=joined_outputs, backward=backward_of_both, workloads=workloads_of(rows, two_cotangents)
)
