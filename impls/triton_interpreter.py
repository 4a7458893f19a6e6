"""Corrections to Triton's interpreter, which runs the kernels on a machine without a GPU.

As shipped it rounds float32 to bfloat16 toward zero, where every GPU rounds to nearest even, and converts other types
to and from bfloat16 as if its bits were an integer. Both show as wrong results of right kernels. And it prepares the
language anew for each call of a device function, which takes longer than the call.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
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
    """Correct bfloat16 conversions, keep quiet about NaN and infinity, which kernels are tested with, and save time."""
    builder = interpreter.InterpreterBuilder
    shipped_cast, shipped_convert, shipped_run, shipped_patch = (
        builder.cast_impl,
        builder.create_fp_to_fp,
        interpreter.GridExecutor.__call__,
        interpreter._patch_lang,
    )
    # What the running launch has prepared: until it ends, and restores it, nobody needs to do so again.
    prepared: set[ModuleType] = set()

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

    @functools.cache
    def languages(function: Callable) -> frozenset[ModuleType]:
        modules = {value for value in function.__globals__.values() if inspect.ismodule(value)}
        return frozenset(modules & {tl, tl.core})

    def patch(function: Callable) -> Any:
        if languages(function) <= prepared:
            return interpreter._LangPatchScope()
        prepared.update(languages(function))
        scope = shipped_patch(function)
        # Triton 3.6 makes an int of an array with one axis, which NumPy 2.5 refuses.
        scope.set_attr(tl.tensor, "__index__", lambda number: number.handle.data.item())
        return scope

    def dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
        left, right = (x.data.view(NUMPY_FLOATS[x.dtype.scalar]).astype(sums.data.dtype) for x in (a, b))
        return interpreter.TensorHandle(left @ right + sums.data, sums.dtype.scalar)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # NumPy's own words about a maximum over nothing but NaN do not ask errstate.
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                return shipped_run(self, *args, **kwargs)
        finally:
            prepared.clear()

    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.create_dot = dot
    interpreter.GridExecutor.__call__ = run
    interpreter._patch_lang = patch
