"""Add block pointers to the interpreter if the installed Triton has none: version 3.8 has removed them.

Scripts that were written for an older Triton call ``tl.make_block_ptr`` and ``tl.advance``, and pass ``boundary_check``
to ``tl.load`` and ``tl.store``.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter.arithmetic import Handle, numpy_type

MISSING = not hasattr(interpreter.InterpreterBuilder, "create_make_block_ptr")


def _cache_placeholders(method: str, count: int) -> list[None]:
    """Return None for each caching parameter after the given ones; releases have one parameter or more."""
    parameters = inspect.signature(getattr(interpreter.InterpreterBuilder, method)).parameters
    return [None] * (len(parameters) - 1 - count)


LOAD_REST, STORE_REST = _cache_placeholders("create_masked_load", 3), _cache_placeholders("create_masked_store", 3)


def _number(value: Any) -> int:
    value = getattr(value, "value", value)  # of a tl.constexpr
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


def _numbers(values: Any) -> list[int]:
    values = getattr(values, "value", values)
    return [_number(value) for value in (values if isinstance(values, Sequence | tl.tuple) else [values])]


class BlockPointer:
    """A block of a tensor in memory: the result of ``tl.make_block_ptr``."""

    def __init__(self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any = None) -> None:
        self.base, self.shape, self.strides = base, _numbers(shape), _numbers(strides)
        self.offsets, self.block_shape = _numbers(offsets), _numbers(block_shape)
        self.element = base.dtype.element_ty
        self.block_type = tl.block_type(self.element, self.block_shape)
        self.dtype = self.type = tl.pointer_type(self.block_type)

    def advance(self, offsets: Any) -> "BlockPointer":
        """Return the block moved by `offsets` elements along the axes."""
        moved = [old + step for old, step in zip(self.offsets, _numbers(offsets))]
        return BlockPointer(self.base, self.shape, self.strides, moved, self.block_shape)

    def lanes(self, boundary_check: Any) -> tuple[Handle, Handle]:
        """Return the pointers to the block's elements, and the mask of those inside along the checked axes."""
        checked = set(_numbers(boundary_check or ()))
        offset, inside = np.zeros(self.block_shape, np.int64), np.ones(self.block_shape, bool)
        for axis, length in enumerate(self.block_shape):
            along = [1] * len(self.block_shape)
            along[axis] = length
            index = (self.offsets[axis] + np.arange(length, dtype=np.int64)).reshape(along)
            offset = offset + index * self.strides[axis]
            if axis in checked:
                inside = inside & (index >= 0) & (index < self.shape[axis])
        size = max(self.element.primitive_bitwidth // 8, 1)
        addresses = self.base.handle.data + (size * offset).astype(np.uint64)
        return Handle(addresses.reshape(self.block_shape), self.base.dtype.scalar), Handle(inside, tl.int1)

    def load(self, boundary_check: Any = (), padding_option: Any = "") -> tl.tensor:
        """Perform ``tl.load``."""
        pointers, inside = self.lanes(boundary_check)
        kind = numpy_type(self.element)
        padding = getattr(padding_option, "value", padding_option)
        other = np.full(inside.data.shape, np.nan if padding == "nan" else 0, kind)
        builder = interpreter.interpreter_builder
        loaded = builder.create_masked_load(pointers, inside, Handle(other, self.element), *LOAD_REST)
        return tl.tensor(loaded, self.block_type)

    def store(self, value: Any, boundary_check: Any = ()) -> None:
        """Perform ``tl.store``."""
        pointers, inside = self.lanes(boundary_check)
        semantic = interpreter.interpreter_semantic
        value = semantic.cast(semantic.to_tensor(getattr(value, "value", value)), self.element)
        values = Handle(np.broadcast_to(value.handle.data, inside.data.shape), self.element)
        interpreter.interpreter_builder.create_masked_store(pointers, values, inside, *STORE_REST)


def _extend(shipped: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return a `tl.load` or `tl.store` that also takes a block pointer."""

    def call(pointer: Any, *args: Any, **options: Any) -> Any:
        if isinstance(pointer, BlockPointer):
            parameters = ("boundary_check", "padding_option", "value")
            return getattr(pointer, method)(*args, **{key: x for key, x in options.items() if key in parameters})
        for name in ("boundary_check", "padding_option"):  # older releases allow them at their defaults
            if not options.get(name, True):
                options.pop(name)
        return shipped(pointer, *args, **options)

    return call


@contextlib.contextmanager
def supply() -> Iterator[None]:
    """Let kernels use block pointers during a launch."""
    if not MISSING:
        yield
        return
    replaced: dict[str, Any] = {
        "load": _extend(tl.load, "load"),
        "store": _extend(tl.store, "store"),
    }
    replaced |= {"make_block_ptr": BlockPointer, "advance": lambda base, offsets: base.advance(offsets)}
    shipped = {name: getattr(tl, name, None) for name in replaced}
    for name, value in replaced.items():
        setattr(tl, name, value)
    try:
        yield
    finally:
        for name, value in shipped.items():
            if value is None:
                delattr(tl, name)
            else:
                setattr(tl, name, value)
