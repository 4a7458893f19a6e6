"""One case from a file: its cotangent, and smaller cases like it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import hypothesis
import numpy as np
from hypothesis import strategies as st

from fourfold.declaration.definition import DefinedOperation
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations import axes as notation
from fourfold.operations.case import Case, is_floating
from fourfold.operations.record import Operation, reference, sizes_of

# An integer is drawn up to this many times a size, and then limited to it: most cases keep the whole axis.
WHOLE = 4
# The most bits of a number's fraction: those of float64.
BITS = 53
Cuts = Mapping[str, slice]


def with_cotangent(operation: Operation, case: Case, dtype: DType) -> Case:
    """Return the case with a cotangent of the shape of the operation's output, unless it has one."""
    shape = reference(operation, case, dtype).shape
    if case.grad_output.shape == shape:
        return case
    result_dtype = operation.result_dtype(dtype).numpy if operation.differentiable else DTYPES["float32"].numpy
    numbers = np.linspace(-1.5, 2, int(np.prod(shape, dtype=np.int64)))
    return replace(case, grad_output=numbers.reshape(shape).astype(result_dtype))


@st.composite
def smaller_cases(draw: st.DrawFn, operation: Operation, case: Case, dtype: DType) -> Case:
    """Draw cases like another one: a part of each axis, and numbers with fewer bits. Most are the case itself.

    Smaller draws make a smaller case, so that Hypothesis shrinks it. Inputs that are limited to a range keep their
    numbers. Integers are not changed, and the axes that they may index are not cut.
    """
    cuts = {axis: _draw_slice(draw, size) for axis, size in _axes(operation, case).items()}
    inputs = {name: _cut(operation, name, array, cuts) for name, array in case.inputs.items()}
    for name, array in inputs.items():
        if is_floating(array) and name not in operation.ordinary:
            inputs[name] = _round(array, min(draw(st.integers(0, WHOLE * BITS)), BITS))
    smaller = replace(case, inputs=inputs)
    sized = operation.sized
    if sized is not None and any(array.shape != case[name].shape for name, array in inputs.items()):
        sizes = sizes_of(operation, smaller)
        if not sized.allows({axis: sizes[axis] for axis in sized.axes if axis in sizes}):
            hypothesis.reject()
    try:
        return with_cotangent(operation, smaller, dtype)
    except Exception:  # the definition does not take the smaller case
        hypothesis.reject()


def _draw_slice(draw: st.DrawFn, size: int) -> slice:
    """Draw a part of an axis. Its end and its length shrink independently."""
    end = min(draw(st.integers(min(size, 1), WHOLE * size)), size)
    return slice(end - min(draw(st.integers(min(size, 1), WHOLE * size)), end), end)


def _axis_names(operation: Operation, name: str, axes: int) -> Iterator[str]:
    """Yield the axes of an input; those of ``...`` with their places."""
    names = notation.parse(operation.axes[name])
    for axis in names:
        if axis == notation.LEADING:
            yield from (f"{axis}{place}" for place in range(axes - len(names) + 1))
        else:
            yield axis


def _axes(operation: Operation, case: Case) -> dict[str, int]:
    """Return the sizes of the axes that may be cut."""
    integers = {name for name, array in case.inputs.items() if array.dtype.kind in "iu"}
    declaration = operation.declaration if isinstance(operation, DefinedOperation) else None
    if case.inputs.keys() - operation.axes.keys() or (integers and (declaration is None or declaration.ragged)):
        return {}
    sizes: dict[str, int] = {}
    fixed = {tensor.high for tensor in declaration.tensors.values()} if declaration else set()
    for name, array in case.inputs.items():
        for axis, size in zip(_axis_names(operation, name, array.ndim), array.shape):
            sizes[axis] = size
            if not axis.startswith(notation.LEADING) and notation.split(axis).names != (axis,):
                fixed |= {axis, *notation.split(axis).names}
    return {axis: size for axis, size in sizes.items() if axis not in fixed}


def _cut(operation: Operation, name: str, array: np.ndarray, cuts: Cuts) -> np.ndarray:
    if not cuts:
        return array
    return array[tuple(cuts.get(axis, slice(None)) for axis in _axis_names(operation, name, array.ndim))]


def _round(array: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers rounded to some bits of fraction; infinities and NaN are unchanged."""
    if bits == BITS:
        return array
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(array.astype(np.float64))
        rounded = np.ldexp(np.round(np.ldexp(fraction, bits + 1)), exponent - bits - 1)
        return np.where(np.isfinite(rounded), rounded, array).astype(array.dtype)
