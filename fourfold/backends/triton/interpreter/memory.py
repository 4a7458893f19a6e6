"""Check that every access of an interpreted kernel is within the memory of the launch's tensors.

The interpreter is more permissive than a GPU. It reads and writes at any pointer, so that a load without a mask goes
unnoticed as long as its value is unused. And where a mask is false and the load gives no other value, it returns 0,
where a GPU may return anything. Here such lanes have conspicuous values, see `masked_lane_values`.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter.arithmetic import (
    OPERANDS,
    Handle,
    from_bfloat16,
    numpy_type,
    to_bfloat16,
)
from fourfold.operations.refusals import Fault

# On a GPU a tensor descriptor's memory, and all of its strides but the last, must be multiples of this many bytes.
DESCRIPTOR_BYTES = 16
# From this many elements on, NumPy reads and writes faster than the interpreter, up to ten times.
MANY_ELEMENTS = 512


class _Undefined:
    """The setting for masked lanes of a load without another value."""

    are_zero = False


_undefined = _Undefined()


def undefined_lanes_are_zero(yes: bool) -> None:
    """Choose zeros for masked lanes, as NVIDIA's compiler does, or values that show in a result."""
    _undefined.are_zero = yes


def are_undefined_lanes_zero() -> bool:
    """Return the last setting of `undefined_lanes_are_zero`."""
    return _undefined.are_zero


@functools.cache
def masked_lane_values(kind: str, dtype: np.dtype, lanes: int) -> np.ndarray:
    """Return the values of masked lanes along a block's last axis.

    Floating-point lanes are NaN, large and large negative in turn: a maximum and a comparison swallow NaN, and a
    minimum and a sum show it. Every other integer lane has all bits set, which is no valid index; the lanes between are
    small numbers that may be one.

    Args:
        kind: the name of Triton's type.
        dtype: of the array that holds the lanes.
        lanes: the length of the axis.
    """
    places = np.arange(lanes)
    if kind in OPERANDS:
        floats = OPERANDS[kind]
        large = float(ml_dtypes.finfo(floats).max) / 2
        return np.array([np.nan, large, -large])[places % 3].astype(floats).view(dtype)
    return np.where(places % 2, places // 2 % 16, -1).astype(np.int64).astype(dtype)


class OutOfBounds(IndexError, Fault):
    """A kernel accessed memory that belongs to none of its tensors."""


class InvalidDescriptor(ValueError, Fault):
    """A kernel made a tensor descriptor of memory that a GPU cannot describe."""


def tensor_of(argument: Any) -> torch.Tensor | None:
    """Return the tensor whose memory an argument of a launch points to, or None for a number.

    An object of another class, such as Triton's TensorWrapper, has the tensor among its attributes.
    """
    if isinstance(argument, torch.Tensor):
        return argument
    base = getattr(argument, "base", None)  # the attribute of Triton's wrappers and descriptors
    if isinstance(base, torch.Tensor) or not hasattr(argument, "data_ptr"):
        return base if isinstance(base, torch.Tensor) else None
    attributes = getattr(argument, "__dict__", {}).values()
    return next((x for x in attributes if isinstance(x, torch.Tensor) and holds(x, argument.data_ptr())), None)


def holds(tensor: Any, address: int) -> bool:
    """Return whether an address is within a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage is not None and storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()


class Storages:
    """The storages of a launch's tensors. A kernel may access all of a storage, even if its tensor is only a part."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # The beginning and the end of each, and the name of the argument.
        self.places: list[tuple[int, int, str]] = []
        for name, argument in arguments.items():
            for part in argument if isinstance(argument, tuple) else (argument,):
                tensor = tensor_of(part)
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    self.places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))

    def check(self, access: str, addresses: np.ndarray, size: int) -> tuple[int, int] | None:
        """Check that accesses of `size` bytes are inside.

        Returns:
            The beginning and the end of the storage that holds all accesses, or None if no single one does.

        Raises:
            OutOfBounds: an access is outside of all storages.
        """
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, end, _ in self.places:
            if start <= low and high <= end:
                return start, end
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end, _ in self.places:
            inside |= (addresses >= start) & (addresses <= max(end - size, 0)) & (end - start >= size)
        if not inside.all():
            self.complain(access, addresses, inside, size)
        return None

    def complain(self, access: str, addresses: np.ndarray, inside: np.ndarray, size: int) -> None:
        """Raise OutOfBounds, naming the first access that is outside."""
        stray = int(addresses[~inside].flat[0])
        distance, nearest = min(
            ((start - stray if stray < start else stray + size - end, name) for start, end, name in self.places),
            default=(0, "no tensor"),
        )
        raise OutOfBounds(
            f"{access} of {size} bytes, {distance} bytes outside of the memory of {nearest}"
            f" ({np.count_nonzero(~inside)} of {addresses.size} elements that are not masked)"
        )


def array_at(address: int, length: int, dtype: np.dtype) -> np.ndarray:
    """Return the elements of some memory as an array, which shares it."""
    memory = {"data": (address, False), "shape": (length,), "typestr": dtype.str, "version": 3}
    return np.asarray(types.SimpleNamespace(__array_interface__=memory)) if length else np.empty(0, dtype)


def _elements(storage: tuple[int, int], addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a storage as an array, and the indices of the elements at some addresses.

    None if the addresses are few, or not multiples of the elements' size from the beginning of the storage.
    """
    start, end = storage
    if addresses.size < MANY_ELEMENTS:
        return None
    offsets = addresses - np.uint64(start)
    if int(np.bitwise_or.reduce(offsets, axis=None)) % dtype.itemsize:
        return None
    array = array_at(start, (end - start) // dtype.itemsize, dtype)
    return array, (offsets // np.uint64(dtype.itemsize)).astype(np.int64)


class CheckedMemory(interpreter.InterpreterBuilder):
    """Loads, stores and atomic operations that are checked first."""

    # The storages of the running launch; None if a pointer may point anywhere.
    storages: Storages | None = None

    def check(self, access: str, pointers: Any, mask: np.ndarray) -> tuple[bool, tuple[int, int] | None]:
        """Check the lanes that are not masked.

        Returns:
            Whether no lane is masked; and the beginning and the end of the storage that holds all accesses, or None.

        Raises:
            OutOfBounds: an access is outside of all storages.
        """
        addresses, complete = pointers.data, bool(mask.all())
        if self.storages is None:
            return complete, None
        if not complete:
            addresses = addresses[mask if mask.shape == addresses.shape else np.broadcast_to(mask, addresses.shape)]
        if not addresses.size:
            return complete, None
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        return complete, self.storages.check(access, addresses, size)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        """Perform tl.load. Masked lanes without another value get the values of `masked_lane_values`."""
        allowed = np.asarray(mask.data)
        complete, storage = self.check("load", ptrs, allowed)
        kind = ptrs.get_element_ty()
        values = None if storage is None else _elements(storage, ptrs.data, numpy_type(kind))
        if values is None:
            loaded = super().create_masked_load(ptrs, mask, other, *rest, **options)
        else:
            # A masked lane may have any address.
            loaded = Handle(values[0].take(values[1], mode="clip"), kind)
        if complete:
            return loaded
        left_out = ~np.broadcast_to(allowed, loaded.data.shape)
        if other is not None:
            if values is not None:
                loaded.data[left_out] = np.broadcast_to(other.data, left_out.shape)[left_out]
        elif _undefined.are_zero:
            loaded.data[left_out] = 0
        else:
            masked_values = masked_lane_values(kind.name, loaded.data.dtype, left_out.shape[-1])
            loaded.data[left_out] = np.broadcast_to(masked_values, left_out.shape)[left_out]
        return loaded

    def distances(self, addresses: np.ndarray) -> np.ndarray:
        """Return the bytes from the beginning of its storage to each address; 0 where the storage is unknown."""
        result = np.zeros_like(addresses)
        for start, end, _ in self.storages.places if self.storages is not None else ():
            within = (addresses >= start) & (addresses < end)
            result[within] = addresses[within] - np.uint64(start)
        return result

    def prepare_store(self, storage: tuple[int, int] | None) -> None:
        """Prepare for a store; `storage` is the storage that holds all of it, if there is one."""

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        """Perform tl.store."""
        allowed = np.asarray(mask.data)
        complete, storage = self.check("store", ptrs, allowed)
        if 8 * value.data.itemsize != max(ptrs.get_element_ty().primitive_bitwidth, 8):
            raise TypeError(f"a store of {value.data.dtype} through a pointer to {ptrs.get_element_ty()}")
        if not complete and not allowed.any():
            return None
        self.prepare_store(storage)
        values = None if storage is None else _elements(storage, ptrs.data, value.data.dtype)
        if values is None:
            return super().create_masked_store(ptrs, value, mask, *rest, **options)
        if complete:
            values[0][values[1]] = value.data
        else:
            allowed = np.broadcast_to(allowed, ptrs.data.shape)
            values[0][values[1][allowed]] = np.broadcast_to(value.data, allowed.shape)[allowed]
        return None

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        """Perform tl.atomic_add, tl.atomic_max and so on, which return the former value."""
        _, storage = self.check("atomic operation", ptr, mask.data)
        if np.any(mask.data):
            self.prepare_store(storage)
        if rmwOp == interpreter._ir.ATOMIC_OP.FADD and val.dtype.scalar.name == "bf16":
            return self.add_one_by_one(ptr, val, mask)
        if rmwOp == interpreter._ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            # The interpreter exchanges integers only.
            bits = Handle(val.data.view(f"u{val.data.itemsize}"), val.dtype)
            old = super().create_atomic_rmw(rmwOp, ptr, bits, mask, *rest)
            return Handle(old.data.view(val.data.dtype), val.dtype)
        return super().create_atomic_rmw(rmwOp, ptr, val, mask, *rest)

    def add_one_by_one(self, pointers: Any, values: Any, mask: Any) -> Handle:
        """Perform tl.atomic_add of bfloat16 lane by lane, because several lanes may add to one place."""
        shape = np.broadcast_shapes(pointers.data.shape, values.data.shape, mask.data.shape)
        before = np.zeros(shape, dtype=np.uint16)
        addresses, bits, active = (np.broadcast_to(x.data, shape) for x in (pointers, values, mask))
        for index in zip(*np.nonzero(active)):
            address, yes = addresses[index].reshape(1), np.ones(1, dtype=bool)
            old = interpreter._interpreter.load(address, yes, np.zeros(1, np.uint16), np.dtype(np.uint16))
            before[index] = old[0]
            interpreter._interpreter.store(address, to_bfloat16(from_bfloat16(old) + from_bfloat16(bits[index])), yes)
        return Handle(before, tl.bfloat16)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        """Perform tl.atomic_cas, which returns the former value."""
        self.check("atomic operation", ptr, np.array(True))
        return super().create_atomic_cas(ptr, cmp, val, *rest)

    def create_make_tensor_descriptor(
        self, base: Any, shape: list[Any], strides: list[Any], tensor_shape: list[int], *rest: Any, **options: Any
    ) -> Any:
        """Perform tl.make_tensor_descriptor. A GPU checks nothing, and moves other elements than those described.

        The stride of an axis of one element does not matter.

        Raises:
            InvalidDescriptor: the memory's address, or a stride in bytes, is not a multiple of 16.
        """
        size = base.get_element_ty().primitive_bitwidth // 8
        if (beyond := int(base.data.item()) % DESCRIPTOR_BYTES) != 0:
            raise InvalidDescriptor(
                f"the memory of a tensor descriptor must begin at a multiple of {DESCRIPTOR_BYTES} bytes, not {beyond}"
                " bytes after one"
            )
        inner_strides = []
        for axis, (length, stride) in enumerate(zip(shape[:-1], strides[:-1], strict=True)):
            number = int(stride.data.item())
            if int(length.data.item()) <= 1:
                stride = Handle(np.zeros_like(stride.data), stride.dtype)
            elif number * size % DESCRIPTOR_BYTES:
                raise InvalidDescriptor(
                    f"stride {axis} of a tensor descriptor must be a multiple of {DESCRIPTOR_BYTES} bytes, not"
                    f" {number} elements of {size} bytes"
                )
            inner_strides.append(stride)
        return super().create_make_tensor_descriptor(
            base, shape, [*inner_strides, strides[-1]], tensor_shape, *rest, **options
        )

    def create_int_to_ptr(self, src: Any, dst_type: Any) -> Any:
        """Make a pointer from an integer, and stop checking: it may point to memory that only the caller knows."""
        self.storages = None
        return super().create_int_to_ptr(src, dst_type)


@contextlib.contextmanager
def restrict_memory(arguments: dict[str, Any]) -> Iterator[None]:
    """Let a kernel access these arguments' tensors, and no other memory."""
    builder = interpreter.interpreter_builder
    before, builder.storages = builder.storages, Storages(arguments)
    try:
        yield
    finally:
        builder.storages = before
