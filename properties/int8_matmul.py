"""The record of int8_matmul: a product of int8 matrices with a float32 scale for each row of both."""

from typing import Any

import numpy as np

from fourfold.declaration.library import Declared
from fourfold.numerics.bounded import Bounded

from . import rowwise_scaled_matmul


def forward(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any = None) -> Any:
    """Return the oracle's result. Its bound also admits sums of float32, in any order."""
    if isinstance(scale_a, Bounded):
        a, b = (Bounded.exact(x.astype(scale_a.value.dtype), scale_a.arithmetic) for x in (a, b))
    else:
        a, b = a.astype(scale_a.dtype), b.astype(scale_a.dtype)
    return rowwise_scaled_matmul.forward(a, b, scale_a, scale_b)


INT8 = Declared("int8_matmul")
# The products of the least numbers are the largest, and their sums have more digits than float32 from 1024 of them on.
LEAST: np.ndarray = np.full((3, 1100), -128, np.int8)
operation = rowwise_scaled_matmul.record_of(
    INT8,
    forward=forward,
    examples={
        "largest_sums": INT8.example(a=LEAST, b=LEAST),
        "largest_sums_but_one_term": INT8.example(a=np.where(np.arange(1100) == 7, 127, LEAST), b=LEAST),
    },
)
