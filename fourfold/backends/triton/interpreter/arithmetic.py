"""The interpreter's arithmetic, corrected to the results of compiled code: conversions, operators, reductions.

The interpreter stores bfloat16 in arrays of uint16, and originally adds, multiplies and compares those integers. Here
an operation on bfloat16 is computed in float32 and rounded to nearest even, like a GPU's instructions.
"""

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from fourfold.numerics.dtypes import round_to_tf32
from fourfold.operations.refusals import Fault

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BOOL = np.dtype(bool)
# A sum of booleans is a sum of integers of one bit, which wraps; NumPy's saturates, and its difference raises.
MODULO_2 = {np.add: np.bitwise_xor, np.subtract: np.bitwise_xor, np.multiply: np.bitwise_and}
NUMPY_FLOATS = {"fp16": np.float16, "bf16": BFLOAT16, "fp32": np.float32, "fp64": np.float64}
# The interpreter holds these in arrays of uint8. As shipped it takes NaN, once it is converted, for a number.
FLOAT8 = {"fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn), "fp8e5": np.dtype(ml_dtypes.float8_e5m2)}
# The types of a product's operands.
OPERANDS = NUMPY_FLOATS | FLOAT8

# The attributes that tl.multiple_of and tl.max_contiguous set.
DIVISIBILITY, CONTIGUITY = "tt.divisibility", "tt.contiguity"

_shipped_numpy_type = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype] = {}


class FalseHint(ValueError, Fault):
    """A kernel told the compiler something false, so that compiled code may do anything."""


class Handle(interpreter.TensorHandle):
    """A value of a kernel: an array and the type of its elements. It is faster to create than its base class."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, attr

    def set_attr(self, key: str, value: Any) -> None:
        """Store what the kernel tells the compiler of the value, for example by tl.multiple_of.

        The number of a pointer is its distance in bytes from the beginning of its storage: a GPU's allocator aligns
        storages to 512 bytes, and the host's to 64.

        Raises:
            FalseHint: the first element, where a group of contiguous ones begins in any case, is no multiple, or the
                second one of a contiguous axis is not the next number. It may be the same or a smaller one: kernels
                give the same hint where the offsets of a block end or restart, which does no harm.
        """
        self.attr = {**(self.attr or {}), key: value}
        if key == CONTIGUITY and self.data.size:
            pointer = self.dtype.scalar.is_ptr()
            size = self.dtype.scalar.element_ty.primitive_bitwidth // 8 if pointer else 1
            for axis, length in enumerate(value):
                steps = self.first_steps(axis) if length > 1 else np.empty(0, np.int64)
                if (steps > size).any():
                    raise FalseHint(
                        f"tl.max_contiguous says that {length} numbers along axis {axis} follow one another, but the"
                        f" second is the first one + {steps[steps > size][0] / size:g}"
                    )
        if key == DIVISIBILITY and self.data.size:
            first = self.first_elements()
            pointer = self.dtype.scalar.is_ptr()
            if pointer:
                first = interpreter.interpreter_builder.distances(first)
            for divisor in value:
                if (first % divisor).any():
                    number = first[first % divisor != 0][0]
                    description = f"a pointer {number} bytes after the beginning of its memory" if pointer else number
                    raise FalseHint(f"tl.multiple_of says that {description} is a multiple of {divisor}")

    def first_elements(self) -> np.ndarray:
        """Return the first element, as an array of one element."""
        return self.data.reshape(-1)[:1]

    def first_steps(self, axis: int) -> np.ndarray:
        """Return the difference of the first two elements along an axis, as an array of at most one element."""
        return steps_of(self.data[None], axis)


def steps_of(batch: np.ndarray, axis: int) -> np.ndarray:
    """Return the difference of the first two elements along an axis of each block in a batch."""
    line = np.moveaxis(batch, 1 + axis, -1).reshape(len(batch), -1, batch.shape[1 + axis])[:, 0, :2]
    return np.diff(line.astype(np.int64)).reshape(-1)


def numpy_type(kind: tl.dtype) -> np.dtype:
    """Return the dtype of arrays that hold values of a type, cached by the type's name."""
    scalar = kind.scalar
    dtype = _numpy_types.get(scalar.name)
    if dtype is None:
        dtype = _numpy_types[scalar.name] = _shipped_numpy_type(scalar)
    return dtype


def from_bfloat16(bits: Any) -> Any:
    """Convert bits of bfloat16 numbers to float32."""
    return bits.view(BFLOAT16).astype(np.float32)


def to_bfloat16(numbers: Any) -> Any:
    """Round numbers to bfloat16, to nearest even, and return the bits; float64 and integers become float32 first."""
    return numbers.astype(BFLOAT16).view(np.uint16)


def saturate_to_bits(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the bits of `numbers` rounded to nearest even, as PTX's ``cvt.rn.satfinite`` does.

    What is larger than the largest number of the type, infinity too, becomes that number. NaN stays NaN.
    """
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(numbers, -largest, largest).astype(dtype).view(np.uint8)


class Conversions(interpreter.InterpreterBuilder):
    """Conversions between types."""

    def cast_impl(self, src: Any, dst_type: Any) -> Handle:
        """Convert, rounding to nearest even, or toward zero where the result is an integer."""
        source, target = src.dtype.scalar, dst_type.scalar
        values = src.data
        if source.name == "bf16":
            values = from_bfloat16(values)
        return Handle(to_bfloat16(values) if target.name == "bf16" else values.astype(numpy_type(target)), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """Convert between floating-point types, with the rounding that the kernel requests."""
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        if source in FLOAT8 and target in NUMPY_FLOATS:  # exact, so that nothing is rounded
            numbers = src.data.view(FLOAT8[source]).astype(np.float32)
            return Handle(
                to_bfloat16(numbers) if target == "bf16" else numbers.astype(NUMPY_FLOATS[target]),
                dst_type.scalar,
            )
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        if target in FLOAT8 and source in NUMPY_FLOATS and not toward_zero:
            numbers = from_bfloat16(src.data) if source == "bf16" else src.data
            return Handle(saturate_to_bits(numbers, FLOAT8[target]), dst_type.scalar)
        names = {source, target}
        if "bf16" in names and names <= NUMPY_FLOATS.keys() and not toward_zero:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value: float) -> Handle:
        """Return a constant. Triton 3.6 has no such method."""
        return Handle(to_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)


class Operators(interpreter.InterpreterBuilder):
    """Operators on one, two or three operands, element by element, and the product of matrices."""

    def create_assume(self, condition: Any) -> None:
        """Check what tl.assume tells the compiler.

        Raises:
            FalseHint: the condition does not hold.
        """
        if not condition.data.all():
            raise FalseHint("tl.assume of a condition that does not hold")

    def unary_op(self, arg: Any, op: Any) -> Handle:
        """Return ``op(arg)``, where `op` is a NumPy function."""
        kind = arg.dtype.scalar
        if kind.name == "bf16":
            return Handle(to_bfloat16(op(from_bfloat16(arg.data))), kind)
        return Handle(op(arg.data), kind)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Handle:
        """Return ``op(lhs, rhs)`` of operands of one type. A comparison returns booleans."""
        x, y, kind = lhs.data, rhs.data, lhs.dtype.scalar
        if kind.name == "bf16":
            output = op(from_bfloat16(x), from_bfloat16(y))
            return Handle(output, tl.int1) if output.dtype == BOOL else Handle(to_bfloat16(output), kind)
        output = MODULO_2.get(op, op)(x, y) if x.dtype == y.dtype == BOOL else op(x, y)
        if output.dtype == BOOL:
            kind = tl.int1
        elif output.itemsize > x.itemsize:
            output = output.astype(numpy_type(kind))
        return Handle(output, kind)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Handle:
        """Return ``op(lhs, rhs, other)``: tl.where of a condition and two operands of one type."""
        x, y = rhs.data, other.data
        # The atomic minimum of Triton 3.6 selects from int64 and uint64, whose common type is float64 to NumPy.
        return Handle(op(lhs.data, x if x.dtype == y.dtype else x.astype(y.dtype), y), other.dtype.scalar)

    def get_all_ones_value(self, type: Any) -> Handle:
        """Return the integer whose bits are all set, for ``~x``. Triton 3.8 raises for unsigned types."""
        return Handle(np.invert(np.zeros(1, dtype=numpy_type(type))), type.scalar)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Handle:
        """Return tl.maximum: the number, of NaN and a number. Triton 3.6 returns NaN."""
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Handle:
        """Return tl.minimum: the number, of NaN and a number."""
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Handle:
        """Return tl.clamp: `lo` for NaN, or NaN if the kernel asks to propagate it."""
        ignores_nan = propagate_nans == interpreter._ir.PROPAGATE_NAN.NONE
        least, most = (np.fmax, np.fmin) if ignores_nan else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, least), hi, most)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Handle:
        """Return tl.umulhi: the product of the operands' bits as unsigned integers. Triton 3.6 keeps them signed."""
        bits = 8 * lhs.data.itemsize
        x, y = (operand.data.view(f"u{bits // 8}").astype(object) for operand in (lhs, rhs))
        return Handle(((x * y) >> bits).astype(f"u{bits // 8}").view(lhs.data.dtype), lhs.dtype.scalar)

    def create_splat(self, ret_ty: Any, arg: Any) -> Handle:
        """Return a block with one number in all elements."""
        block = np.empty(tuple(ret_ty.shape), dtype=numpy_type(arg.dtype))
        block[...] = arg.data
        return Handle(block, arg.dtype.scalar)

    def create_expand_dims(self, arg: Any, axis: int) -> Handle:
        """Return ``x[:, None]``: one more axis, of length 1."""
        return Handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Handle:
        """Return tl.fma: ``x * y + z``, rounded once. Triton 3.6 rounds twice."""
        kind = z.dtype.scalar
        a, b, c = (from_bfloat16(value.data) if kind.name == "bf16" else value.data for value in (x, y, z))
        return Handle(fused_multiply_add(a, b, c, kind.name), kind)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, *options: Any) -> Handle:
        """Return tl.dot: ``a @ b + d``, multiplied and summed in the type of `d`.

        Operands of float32 are rounded to TF32 unless the kernel asks for another precision, as on a GPU.
        """
        names = a.dtype.scalar.name, b.dtype.scalar.name
        if not OPERANDS.keys() >= set(names):
            return super().create_dot(a, b, d, input_precision, *options)
        left, right = (x.data.view(OPERANDS[name]).astype(d.data.dtype) for x, name in zip((a, b), names))
        if names == ("fp32", "fp32") and input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            left, right = (round_to_tf32(x) for x in (left, right))
        # A library's product sums a row in another order at another place of the tile, on some processors.
        products = np.einsum("...mk,...kn->...mn", left, right)
        return Handle(products + d.data, d.dtype.scalar)


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray, kind: str) -> np.ndarray:
    """Return x * y + z rounded once; for bfloat16, return the bits.

    For numbers of at most 24 bits, the sum is computed in float64 and rounded to odd. Rounding it again gives the same
    as rounding the exact sum. See Boldo and Melquiond, Emulation of a FMA and correctly rounded sums: proved algorithms
    using rounding to odd, 2008.
    """
    if kind == "fp64":
        return np.asarray(_FUSED_DOUBLES(x, y, z), dtype=np.float64)
    product = x.astype(np.float64) * y.astype(np.float64)  # exact
    total = np.asarray(product + z)
    part = total - product
    total = _round_to_odd(total, (product - (total - part)) + (z - part))
    if kind != "bf16":
        return total.astype(NUMPY_FLOATS[kind])
    single = total.astype(np.float32)
    return to_bfloat16(_round_to_odd(single, total - single))


def _round_to_odd(rounded: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return ``rounded + error`` rounded to odd: the odd one of the two numbers around it, one of them `rounded`."""
    even = rounded.view(f"u{rounded.itemsize}") & 1 == 0
    other = np.nextafter(rounded, np.copysign(np.inf, error).astype(rounded.dtype))
    return np.where(even & np.isfinite(rounded) & (error != 0), other, rounded)


def _double_fused_multiply_add(x: float, y: float, z: float) -> float:
    """Return x * y + z, rounded once."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(exact) if exact else x * y + z  # a Fraction has no sign of 0
    except OverflowError:
        return math.copysign(math.inf, exact)


_FUSED_DOUBLES = np.frompyfunc(_double_fused_multiply_add, 3, 1)


class Reduce(interpreter.ReduceOps):
    """Reductions. A sum in 16 bits is rounded at every addition. A maximum ignores NaN."""

    def sum(self, input: Any) -> Any:
        """Return tl.sum."""
        kind = input.dtype.name
        if kind not in ("fp16", "bf16"):
            return super().sum(input)
        axis = 0 if self.axis is None else self.axis
        data = input.handle.data.ravel() if self.axis is None else input.handle.data
        handle = Handle(np.moveaxis(data, axis, 0), input.dtype)
        # Add one half to the other, as the lanes of a warp do. The compiler may take any order.
        while len(handle.data) > 1:
            half = len(handle.data) // 2
            first, second = Handle(handle.data[:half], input.dtype), Handle(handle.data[half:], input.dtype)
            handle = interpreter.interpreter_builder.binary_op(first, second, np.add)
        total = handle.data[0]
        if self.keep_dims:
            total = np.expand_dims(total, tuple(range(input.handle.data.ndim)) if self.axis is None else axis)
        return self.to_tensor(total, input.dtype)

    def min_max(self, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        """Return tl.max or tl.min, or tl.argmax or tl.argmin if `idx_reduce_op` is given; NaN if all are NaN."""
        input = input[0] if isinstance(input, tuple) else input
        values = from_bfloat16(input.handle.data) if input.dtype.name == "bf16" else input.handle.data
        largest = "max" in val_reduce_op.__name__
        shape = {"axis": self.axis, "keepdims": self.keep_dims}
        result = (np.fmax if largest else np.fmin).reduce(values, **shape)
        result = self.to_tensor(to_bfloat16(result) if input.dtype.name == "bf16" else result, input.dtype)
        if idx_reduce_op is None:
            return result
        if values.dtype.kind == "f":
            values = np.where(np.isnan(values), -np.inf if largest else np.inf, values)
        return result, self.to_tensor((np.argmax if largest else np.argmin)(values, **shape), tl.int32)

    def generic_reduce(self, input: Any) -> list[Any]:
        """Return tl.reduce with any function. It combines one slice after the other, and not one number."""
        given = [x.handle.data for x in input]
        arrays = [data.ravel() if self.axis is None else np.moveaxis(data, self.axis, 0) for data in given]
        totals: tuple[Any, ...] = ()
        for numbers in zip(*arrays):
            values = tuple(self.to_tensor(array, x.dtype) for array, x in zip(numbers, input))
            combined = self.combine_fn.fn(*totals, *values) if totals else values
            totals = combined if isinstance(combined, tuple) else (combined,)
        results = [total.handle.data.reshape(array.shape[1:]) for total, array in zip(totals, arrays)]
        if self.keep_dims:
            axes = tuple(range(given[0].ndim)) if self.axis is None else self.axis
            results = [np.expand_dims(result, axes) for result in results]
        return [self.to_tensor(result, x.dtype) for result, x in zip(results, input)]


class Scan(interpreter.ScanOps):
    """Cumulative sums and products. Those of bfloat16 are rounded at every step."""

    def cumsum(self, input: Any) -> list[Any]:
        """Return tl.cumsum."""
        return self._running(input, np.add) if input.dtype.name == "bf16" else super().cumsum(input)

    def cumprod(self, input: Any) -> list[Any]:
        """Return tl.cumprod."""
        return self._running(input, np.multiply) if input.dtype.name == "bf16" else super().cumprod(input)

    def _running(self, input: Any, op: Any) -> list[Any]:
        lines = np.moveaxis(input.handle.data, self.axis, 0).copy()
        for i in range(1, len(lines)):
            lines[i] = to_bfloat16(op(from_bfloat16(lines[i - 1]), from_bfloat16(lines[i])))
        return [self.to_tensor(np.moveaxis(lines, 0, self.axis), input.dtype)]
