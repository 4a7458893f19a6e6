"""Corrections to Triton's interpreter, which runs the kernels on a machine without a GPU.

As shipped it rounds float32 to bfloat16 toward zero, where every GPU rounds to nearest even, and converts other types
to and from bfloat16 as if its bits were an integer. Both show as wrong results of right kernels. It prepares the
language anew for each call of a device function, which takes longer than the call. And it is kinder than a GPU: it
reads and writes whatever a pointer leads to, so that a load that lacks its mask goes unnoticed as long as nobody uses
what it has read; and where a mask is false and nothing is said to take the place, it gives 0, where a GPU may give
anything. Here that is NaN, and of an integer all bits are set.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

NUMPY_FLOATS = {
    tl.float16: np.dtype(np.float16),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
}


class OutOfBounds(IndexError):
    """A kernel accessed memory that belongs to none of its tensors."""


class _Bounds:
    """Where the tensors of a launch are: what may be read and written, for any storage belongs to a tensor in full."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.places: list[tuple[int, int, str]] = []
        for name, argument in arguments.items():
            for part in argument if isinstance(argument, tuple) else (argument,):
                tensor = getattr(part, "base", part)
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self.places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))

    def check(self, what: str, pointers: Any, mask: np.ndarray | None) -> None:
        """Raises OutOfBounds where what is not masked is outside."""
        addresses = pointers.data if mask is None else pointers.data[np.broadcast_to(mask, pointers.data.shape)]
        if not addresses.size:
            return
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        low, high = int(addresses.min()), int(addresses.max()) + size
        if any(start <= low and high <= end for start, end, _ in self.places):
            return
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end, _ in self.places:
            inside |= (addresses >= start) & (addresses <= max(end - size, 0)) & (end - start >= size)
        if inside.all():
            return
        stray = int(addresses[~inside].flat[0])
        distance, nearest = min(
            ((start - stray if stray < start else stray + size - end, name) for start, end, name in self.places),
            default=(0, "no tensor"),
        )
        raise OutOfBounds(
            f"{what} of {size} bytes, {distance} bytes outside of the memory of {nearest}"
            f" ({np.count_nonzero(~inside)} of {addresses.size} elements that are not masked)"
        )


def _remember_shapes() -> None:
    """What a tensor and its type derive from their shape they derive once: it takes most of an operation's time."""
    of_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    of_tensors: dict[tuple[int, ...], dict[str, Any]] = {}
    shipped_type, shipped_tensor = tl.block_type.__init__, tl.tensor.__init__

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        derived = of_types.get(key)
        if derived is None:
            shipped_type(self, element_ty, shape)
            of_types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.__dict__.update(derived, element_ty=element_ty)

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else ()
        derived = of_tensors.get(key)
        if derived is None:
            shipped_tensor(self, handle, type)
            given = ("handle", "type", "dtype")
            of_tensors[key] = {name: value for name, value in vars(self).items() if name not in given}
        else:
            self.__dict__.update(derived, handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__ = new_type
    tl.tensor.__init__ = new_tensor


def install() -> None:
    """Correct what the interpreter gets wrong, look at every access, and save time.

    It also keeps quiet about NaN and infinity, which kernels are tested with. Within a launch, what is outside of the
    storages of its tensors raises `OutOfBounds`, unless the launch makes pointers of integers.
    """
    builder = interpreter.InterpreterBuilder
    shipped_cast, shipped_convert, shipped_run, shipped_patch = (
        builder.cast_impl,
        builder.create_fp_to_fp,
        interpreter.GridExecutor.__call__,
        interpreter._patch_lang,
    )
    shipped_load, shipped_store, shipped_pointer = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_int_to_ptr,
    )
    shipped_rmw, shipped_cas = builder.create_atomic_rmw, builder.create_atomic_cas
    shipped_numpy_type = interpreter._get_np_dtype
    # Of the running launch.
    bounds: list[_Bounds] = []
    # What the running launch has prepared: until it ends, and restores it, nobody needs to do so again.
    prepared: set[ModuleType] = set()
    # How that is done, by what a function needs: it takes longer to find out than to do.
    patches: dict[frozenset[ModuleType], list[tuple[Any, str, Any]]] = {}
    numpy_types: dict[str, np.dtype] = {}

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
        needed = languages(function)
        if needed <= prepared:
            return interpreter._LangPatchScope()
        prepared.update(needed)
        if needed in patches:
            scope = interpreter._LangPatchScope()
            for place, name, value in patches[needed]:
                scope.set_attr(place, name, value)
            return scope
        scope = shipped_patch(function)
        # Triton 3.6 makes an int of an array with one axis, which NumPy 2.5 refuses.
        scope.set_attr(tl.tensor, "__index__", lambda number: number.handle.data.item())
        patches[needed] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
        return scope

    def numpy_type(kind: Any) -> np.dtype:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return shipped_numpy_type(scalar)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = shipped_numpy_type(scalar)
        return numpy_types[scalar.name]

    def dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
        left, right = (x.data.view(NUMPY_FLOATS[x.dtype.scalar]).astype(sums.data.dtype) for x in (a, b))
        # A library's product sums a row in another order at another place of the tile, on some processors.
        products = np.einsum("...mk,...kn->...mn", left, right)
        return interpreter.TensorHandle(products + sums.data, sums.dtype.scalar)

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        if bounds:
            bounds[0].check("load", pointers, mask.data)
        loaded = shipped_load(self, pointers, mask, other, *rest, **options)
        kind = pointers.get_element_ty()
        if other is None and not mask.data.all():
            left_out = ~np.broadcast_to(mask.data, loaded.data.shape)
            if kind in NUMPY_FLOATS:
                loaded.data.view(NUMPY_FLOATS[kind])[left_out] = np.nan
            else:
                loaded.data[left_out] = ~loaded.data.dtype.type(0)
        return loaded

    def store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if bounds:
            bounds[0].check("store", pointers, mask.data)
        return shipped_store(self, pointers, values, mask, *rest, **options)

    def rmw(self: Any, operation: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        if bounds:
            bounds[0].check("atomic operation", pointers, mask.data)
        return shipped_rmw(self, operation, pointers, values, mask, *rest)

    def cas(self: Any, pointers: Any, *rest: Any) -> Any:
        if bounds:
            bounds[0].check("atomic operation", pointers, None)
        return shipped_cas(self, pointers, *rest)

    def pointer(self: Any, *args: Any) -> Any:
        # It may lead to what only the caller knows of.
        bounds.clear()
        return shipped_pointer(self, *args)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        bounds[:] = [_Bounds({**dict(zip(self.arg_names, args)), **kwargs})]
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # NumPy's own words about a maximum over nothing but NaN do not ask errstate.
                warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
                return shipped_run(self, *args, **kwargs)
        finally:
            prepared.clear()
            bounds.clear()

    builder.create_masked_load = load
    builder.create_masked_store = store
    builder.create_atomic_rmw = rmw
    builder.create_atomic_cas = cas
    builder.create_int_to_ptr = pointer
    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.create_dot = dot
    interpreter.GridExecutor.__call__ = run
    interpreter._patch_lang = patch
    interpreter._get_np_dtype = numpy_type
    _remember_shapes()
    # Whether integers overflow it finds out by operations of its own, and tells nobody.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
