"""Corrections to Triton's interpreter, which runs the kernels on a machine without a GPU.

As shipped it rounds float32 to bfloat16 toward zero, where every GPU rounds to nearest even, and converts other types
to and from bfloat16 as if its bits were an integer. Both show as wrong results of right kernels.
"""

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NUMPY_FLOATS = {
    tl.float16: np.dtype(np.float16),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
}


def install() -> None:
    """Correct bfloat16 conversions, and keep quiet about NaN and infinity, which kernels are tested with."""
    builder = interpreter.InterpreterBuilder
    shipped_cast, shipped_convert, shipped_run = (
        builder.cast_impl,
        builder.create_fp_to_fp,
        interpreter.GridExecutor.__call__,
    )

    def as_floats(source: Any, target: Any) -> Any:
        """The conversion between two floating-point types one of which is bfloat16, or None for any other."""
        given, wanted = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in (given, wanted) or given not in NUMPY_FLOATS or wanted not in NUMPY_FLOATS:
            return None
        values = source.data.view(NUMPY_FLOATS[given]).astype(NUMPY_FLOATS[wanted])
        return interpreter.TensorHandle(values.view(np.uint16) if wanted == tl.bfloat16 else values, wanted)

    def cast(self: Any, source: Any, target: Any) -> Any:
        converted = as_floats(source, target)
        return shipped_cast(self, source, target) if converted is None else converted

    def convert(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        converted = None if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ else as_floats(source, target)
        return shipped_convert(self, source, target, rounding_mode) if converted is None else converted

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return shipped_run(self, *args, **kwargs)

    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    interpreter.GridExecutor.__call__ = run
