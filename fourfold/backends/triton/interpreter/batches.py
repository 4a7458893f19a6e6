"""Run many programs of a launch at once, in little more time than one of them takes the interpreter.

The interpreter spends its time on Python, not on arithmetic. So the values of all programs of a batch are kept in one
array, with a leading axis for the programs: see `Batch`. Values that all programs share, such as the kernel's
arguments, are kept once. Each operation then computes for all programs.

The programs of a batch go through the kernel in step. Where a condition or a loop's bound differs between them, the
stores are undone, and the batch restarts in parts: see `Diverged`. Programs that wait for others run one at a time: see
`Unbatchable`. So do programs that raise an error, so that the message names the first wrong program.

In step, no program sees later stores of other programs of its batch. A GPU runs programs the same way: a kernel that
needs another order, and does not enforce it by atomic operations, is wrong.
"""

import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter.arithmetic import Handle, Reduce, Scan, numpy_type, steps_of

Program = tuple[int, int, int]
# The number of programs of a launch's first batch, and the minimum and maximum of later ones.
FIRST, LEAST, MOST = 64, 16, 1024
# The approximate number of elements of a batch's largest value.
ELEMENTS = 1 << 18
# The default of `Batches.most_bytes`.
MOST_BYTES = 1 << 24
# The number of divisions of a batch before its programs run one by one.
DIVISIONS = 4
# A kernel runs one program at a time after this many divergent batches, if they are the majority.
COME_APART = 8


class Batch(Handle):
    """The values of all programs of a batch: ``data [programs, ...]``."""

    def first_elements(self) -> np.ndarray:
        """Return the first element of each program."""
        return self.data.reshape(len(self.data), -1)[:, 0]

    def first_steps(self, axis: int) -> np.ndarray:
        """Return the difference of each program's first two elements along an axis."""
        return steps_of(self.data, axis)


class Diverged(Exception):
    """A condition, or a number that Python needs, differs between the programs of a batch.

    Args:
        values: the number of each program.
    """

    def __init__(self, values: np.ndarray) -> None:
        super().__init__("the programs of a batch differ")
        self.values = values

    def groups(self) -> list[np.ndarray]:
        """Return the indices of the programs with the same number, for each number, the first program's first."""
        _, first, group_of_each = np.unique(self.values, return_index=True, return_inverse=True)
        return [np.flatnonzero(group_of_each == number) for number in np.argsort(first)]


class Unbatchable(Exception):
    """An operation that runs for one program at a time."""


def number_of(handle: Any) -> Any:
    """Return a value as a Python number.

    Raises:
        Diverged: it differs between the programs.
    """
    if type(handle) is not Batch:
        return handle.data.item()
    values = handle.data.reshape(len(handle.data))
    if (values != values[0]).any():
        raise Diverged(values)
    return values[0].item()


def loop(*bounds: Any, **options: Any) -> Any:
    """Return ``range`` in a kernel: the compiler makes its numbers tensors, even for constant bounds.

    Programs with the same number of iterations stay together, even if they start at different numbers.

    Raises:
        TypeError: a bound or the step is no integer, as the compiler raises it.
        Diverged: the number of iterations differs.
    """
    limits = [*bounds, *(options[name] for name in ("step",) if name in options)]
    if not all(limit.dtype.is_int() for limit in limits if isinstance(limit, tl.tensor)):
        kinds = ", ".join(str(limit.dtype) if isinstance(limit, tl.tensor) else "int32" for limit in limits)
        raise TypeError(f"For loop bounds and step must all be ints, are ({kinds})")
    if not _are_batched((*bounds, *options.values())):
        numbers = range(*limits)
        types = [limit.dtype for limit in limits if isinstance(limit, tl.tensor)]
        fits = min(numbers.start, numbers.stop) >= -(1 << 31) and max(numbers.start, numbers.stop) < 1 << 31
        kind = max([tl.int32 if fits else tl.int64, *types], key=lambda each: each.primitive_bitwidth)
        return (tl.tensor(Handle(np.array([number], numpy_type(kind)), kind), kind) for number in numbers)
    start, stop, step = [*([0] if len(bounds) == 1 else []), *bounds, options.get("step", 1)][:3]
    first, last, by = (_integers(x) for x in (start, stop, step))
    times = np.maximum(-((first - last) // by), 0)
    if (times != times[0]).any():
        raise Diverged(times)
    return (start + number * step for number in range(int(times[0])))


def _integers(bound: Any) -> np.ndarray:
    if isinstance(bound, tl.tensor):
        return bound.handle.data.reshape(-1).astype(np.int64)
    return np.array([getattr(bound, "value", bound)], dtype=np.int64)


def least(*numbers: Any, **options: Any) -> Any:
    """Return ``min`` in a kernel."""
    return functools.reduce(tl.minimum, numbers) if _are_batched(numbers) else min(*numbers, **options)


def largest(*numbers: Any, **options: Any) -> Any:
    """Return ``max`` in a kernel."""
    return functools.reduce(tl.maximum, numbers) if _are_batched(numbers) else max(*numbers, **options)


def _are_batched(values: Any) -> bool:
    return any(isinstance(x, tl.tensor) and type(x.handle) is Batch for x in values)


def shape_of(handle: Any) -> tuple[int, ...]:
    """Return the shape of a value of one program."""
    return handle.data.shape[1:] if type(handle) is Batch else handle.data.shape


def _has_batches(values: Any) -> bool:
    for x in values:  # noqa: SIM110 - this is asked before every operation, and a generator takes twice as long
        if type(x) is Batch or (type(x) in (list, tuple) and _has_batches(x)):
            return True
    return False


def _align(value: Any, rank: int) -> Any:
    """Return a batch with its axis in front of those of a block of some rank, and any other value unchanged."""
    if type(value) is not Batch:
        return value
    shape = value.data.shape
    return Handle(value.data.reshape(shape[:1] + (1,) * (rank + 1 - len(shape)) + shape[1:]), value.dtype)


def _broadcast(value: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast a value to a shape in contiguous memory, as Triton 3.6 requires for stores and atomics."""
    same = value.data.shape == shape
    data = np.ascontiguousarray(value.data) if same else np.broadcast_to(value.data, shape).copy()
    return value if data is value.data else Handle(data, value.dtype)


def _to_batches(result: Any) -> Any:
    """Return a result, or several, as batches."""
    if isinstance(result, tuple):
        return tuple(_to_batches(part) for part in result)
    return Batch(result.data, result.dtype) if isinstance(result, interpreter.TensorHandle) else result


def _rank(values: Sequence[Any]) -> int:
    return max(len(shape_of(x)) for x in values if isinstance(x, interpreter.TensorHandle))


Method = Callable[..., Any]


def _lanes(name: str) -> Method:
    """Return the method of an elementwise operation."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        shipped = getattr(super(Batches, self), name)
        if not _has_batches(arguments):
            return shipped(*arguments, **options)
        rank = _rank(arguments)
        return _to_batches(shipped(*[_align(x, rank) for x in arguments], **options))

    return method


def _full(name: str) -> Method:
    """Return the method of an operation on operands of one shape, mainly an access to memory."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        shipped = getattr(super(Batches, self), name)
        if not _has_batches(arguments):
            return shipped(*arguments, **options)
        rank = _rank(arguments)
        aligned = [_align(x, rank) for x in arguments]
        shape = np.broadcast_shapes(*(x.data.shape for x in aligned if isinstance(x, interpreter.TensorHandle)))
        self.widest = max(self.widest, int(np.prod(shape[1:])))
        aligned = [_broadcast(x, shape) if isinstance(x, interpreter.TensorHandle) else x for x in aligned]
        self.in_step = True
        try:
            return _to_batches(shipped(*aligned, **options))
        finally:
            self.in_step = False

    return method


def _moving(name: str) -> Method:
    """Return the method of an operation that gives a block another shape."""
    move = MOVING[name.removeprefix("create_")]

    def method(self: Any, block: Any, *arguments: Any) -> Any:
        if type(block) is not Batch:
            return getattr(super(Batches, self), name)(block, *arguments)
        data = move(block.data, *arguments)
        return Batch(data, block.dtype.scalar if name == "create_unsplat" else block.dtype)

    return method


def _item(value: Any, place: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_item(x, place) for x in value])
    return Handle(value.data[place], value.dtype) if type(value) is Batch else value


def _separately(name: str) -> Method:
    """Return the method of an operation that runs for each program separately, with results of one shape."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        shipped = getattr(super(Batches, self), name)
        if not _has_batches(arguments):
            return shipped(*arguments, **options)
        results = [shipped(*_item(arguments, place), **options) for place in range(len(self.batch))]
        return Batch(np.stack([result.data for result in results]), results[0].dtype)

    return method


def _alone(name: str) -> Method:
    """Return the method of an operation for which programs take turns."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.batch is not None:
            raise Unbatchable(name)
        return getattr(super(Batches, self), name)(*arguments, **options)

    return method


def _unknown(name: str) -> Method:
    """Return the method of an operation unknown to this module."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if _has_batches((*arguments, *options.values())):
            raise Unbatchable(name)
        return getattr(super(Batches, self), name)(*arguments, **options)

    return method


LANES = (
    *("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp", "int_cast", "bitcast"),
    *("int_to_ptr", "ptr_to_int", "addptr", "fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "add", "sub", "mul"),
    *("precise_divf", "approx_divf", "sdiv", "udiv", "srem", "urem", "idiv", "shl", "lshr", "ashr", "and", "or", "xor"),
    *("minsi", "minui", "minimumf", "minnumf", "maxsi", "maxui", "maximumf", "maxnumf", "umulhi", "clampf", "select"),
    *("fma", "fabs", "iabs", "floor", "ceil", "exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "precise_sqrt"),
    *("rsqrt", "erf", "icmpEQ", "icmpNE"),
    *(f"icmp{sign}{order}" for sign in "SU" for order in ("LT", "LE", "GT", "GE")),
    *(f"fcmp{kind}{order}" for kind in "OU" for order in ("LT", "LE", "GT", "GE", "EQ", "NE")),
)
FULL = ("masked_load", "masked_store", "load", "store", "atomic_rmw", "join")
SEPARATE = ("dot", "dot_scaled", "histogram", "gather")
ALONE = (
    *("atomic_cas", "atomic_load", "atomic_store", "atomic_poll", "print"),
    *("make_block_ptr", "advance", "tensor_pointer_load", "tensor_pointer_store", "make_tensor_descriptor"),
    *("descriptor_load", "descriptor_store", "descriptor_gather", "descriptor_scatter"),
)
# What becomes of the array of a batch.
MOVING: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda data, shape, *reorder: data.reshape(len(data), *shape),
    "trans": lambda data, order: np.transpose(data, (0, *(axis + 1 for axis in order))),
    "expand_dims": lambda data, axis: np.expand_dims(data, axis + 1),
    "broadcast": lambda data, shape: np.broadcast_to(data, (len(data), *shape)),
    "unsplat": lambda data: data.reshape(len(data), -1)[:, :1],
}
# Operations that `Batches` defines itself, and operations without values of the kernel.
OTHERS = (
    *("splat", "split", "cat", "extern_elementwise", "inline_asm"),
    *("get_program_id", "get_num_programs", "make_range", "barrier", "assert", "assume"),
)


class Batches(interpreter.InterpreterBuilder):
    """The builder's operations for a batch of programs."""

    # The programs that run at once, ``[programs, 3]``; None if a single program runs.
    batch: np.ndarray | None = None
    # Whether the first axis of the running access is that of the programs.
    in_step = False
    # The largest storage that is copied before a batch stores into it.
    most_bytes = MOST_BYTES
    # Elements of the largest value that a program of the batch has loaded or stored.
    widest = 1
    # The former contents of the storages that the batch has stored into, by their start addresses.
    saved: dict[int, bytes]

    def create_get_program_id(self, axis: int) -> Any:
        """Return tl.program_id."""
        if self.batch is None:
            return super().create_get_program_id(axis)
        numbers = self.batch[:, axis]
        if (numbers == numbers[0]).all():
            return Handle(numbers[:1].astype(np.int32), tl.int32)
        return Batch(numbers.astype(np.int32).reshape(-1, 1), tl.int32)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        """Perform tl.load. A volatile load (the last argument) may read a concurrent program's store."""
        if self.batch is not None and options.get("is_volatile", rest[-1] if rest else False):
            raise Unbatchable("a volatile load")
        return _LOAD(self, ptrs, mask, other, *rest, **options)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        """Perform tl.atomic_add and so on for one program after the other: each sees the previous ones' effect."""
        if self.batch is not None and type(ptr) is not Batch:
            ptr = Batch(np.broadcast_to(ptr.data, (len(self.batch), *ptr.data.shape)), ptr.dtype)
        return _ATOMIC(self, rmwOp, ptr, val, mask, *rest)

    def prepare_store(self, storage: tuple[int, int] | None) -> None:
        """Save the contents of a storage, so that the store can be undone."""
        if self.batch is None:
            return
        if storage is None or storage[1] - storage[0] > self.most_bytes:
            raise Unbatchable("a store that is not kept")
        start, end = storage
        if start not in self.saved:
            self.saved[start] = ctypes.string_at(start, end - start)

    def undo(self) -> None:
        """Restore the storages that the batch has stored into."""
        for start, content in self.saved.items():
            ctypes.memmove(start, content, len(content))
        self.saved = {}

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        """Return a block filled with one number."""
        if type(arg) is not Batch:
            return super().create_splat(ret_ty, arg)
        programs, shape = len(arg.data), tuple(ret_ty.shape)
        block = np.empty((programs, *shape), dtype=numpy_type(arg.dtype))
        block[...] = arg.data.reshape(programs, *(1,) * len(shape))
        return Batch(block, arg.dtype.scalar)

    def create_split(self, val: Any) -> Any:
        """Return tl.split, along the last axis."""
        result = super().create_split(val)
        return _to_batches(result) if type(val) is Batch else result

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        """Return tl.cat of two blocks with one axis."""
        if not _has_batches((lhs, rhs)):
            return super().create_cat(lhs, rhs)
        assert self.batch is not None
        blocks = [np.broadcast_to(x.data, (len(self.batch), *shape_of(x))) for x in (lhs, rhs)]
        return Batch(np.concatenate(blocks, axis=1), lhs.dtype.scalar)

    def create_extern_elementwise(self, library: Any, path: Any, symbol: Any, arguments: Any, *rest: Any) -> Any:
        """Call a function of libdevice."""
        if not _has_batches(arguments):
            return super().create_extern_elementwise(library, path, symbol, arguments, *rest)
        rank = _rank(arguments)
        aligned = [_align(x, rank) for x in arguments]
        return _to_batches(super().create_extern_elementwise(library, path, symbol, aligned, *rest))

    def create_inline_asm(self, asm: str, constraints: str, arguments: Any, *rest: Any) -> Any:
        """Run inline assembly on all elements."""
        if not _has_batches(arguments):
            return super().create_inline_asm(asm, constraints, arguments, *rest)
        rank = _rank(arguments)
        call = super().create_inline_asm(asm, constraints, [_align(x, rank) for x in arguments], *rest)
        return type(call)(_to_batches(call.results))


def _define() -> None:
    """Define the operations of `Batches` that follow one of the patterns above."""
    patterns = (_lanes, LANES), (_full, FULL), (_separately, SEPARATE), (_alone, ALONE), (_moving, MOVING)
    for pattern, names in patterns:
        for name in names:
            if f"create_{name}" not in vars(Batches):
                setattr(Batches, f"create_{name}", pattern(f"create_{name}"))
    known = {f"create_{name}" for name in (*LANES, *FULL, *SEPARATE, *ALONE, *MOVING, *OTHERS)}
    for name in dir(interpreter.InterpreterBuilder):
        if name.startswith("create_") and name not in known:
            setattr(Batches, name, _unknown(name))


_LOAD, _ATOMIC = _full("create_masked_load"), _full("create_atomic_rmw")
_define()


class _AlongAnAxis(interpreter.ReduceScanOpInterface):
    """A reduction or a scan for a batch of programs."""

    # The functions that combine two values and that NumPy has as a whole.
    combiners: tuple[str, ...] = ()
    # While all programs are processed at once: the shape of a result of all axes; None for that of the array.
    shape: tuple[int, ...] | None = None
    at_once = False
    axis: int | None

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        """Apply it to blocks."""
        handles = [x.handle for x in input]
        if self.at_once or not _has_batches(handles):
            return super().apply_impl(input)
        if type(handles[0]) is Batch and self.takes_arrays(handles):
            return self.apply_to_programs(input)
        programs = next(len(handle.data) for handle in handles if type(handle) is Batch)
        results = [
            super(_AlongAnAxis, self).apply_impl(tuple(tl.tensor(_item(x.handle, place), x.type) for x in input))
            for place in range(programs)
        ]
        if not isinstance(results[0], list | tuple):
            return _together(results)
        return [_together(part) for part in zip(*results)]

    def takes_arrays(self, handles: Sequence[Any]) -> bool:
        """Return whether the function combines arrays at once, with one more axis than the blocks have."""
        return any(self.combine_fn is getattr(tl.standard, name, None) for name in self.combiners)

    def apply_to_programs(self, input: tuple[Any, ...]) -> Any:
        """Apply it to all programs at once, by NumPy."""
        axis, first = self.axis, input[0].handle
        data = first.data if axis is not None else first.data.reshape(len(first.data), -1)
        self.shape = (1,) * (first.data.ndim - 1) if axis is None and getattr(self, "keep_dims", False) else None
        self.axis = 1 if axis is None else axis + 1 if axis >= 0 else axis
        self.at_once = True
        try:
            return super().apply_impl((types.SimpleNamespace(handle=Handle(data, first.dtype), dtype=input[0].dtype),))
        finally:
            self.axis, self.at_once = axis, False

    def to_tensor(self, ret: Any, dtype: Any) -> Any:
        """Return an array as a tensor."""
        if not self.at_once:
            return super().to_tensor(ret, dtype)
        shape = ret.shape[1:] if self.shape is None else self.shape
        handle = Batch(ret.astype(numpy_type(dtype)).reshape(len(ret), *(shape or (1,))), dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def _together(values: Sequence[tl.tensor]) -> tl.tensor:
    """Join the values of the programs in one."""
    return tl.tensor(Batch(np.stack([x.handle.data for x in values]), values[0].handle.dtype), values[0].type)


class BatchedReduce(_AlongAnAxis, Reduce):
    """tl.reduce."""

    combiners = (
        *("_sum_combine", "_elementwise_max", "_elementwise_min", "_argmax_combine_tie_break_left"),
        *("_argmax_combine_tie_break_fast", "_argmin_combine_tie_break_left", "_argmin_combine_tie_break_fast"),
    )

    def takes_arrays(self, handles: Sequence[Any]) -> bool:
        """Return whether the function combines arrays at once: any of two values does."""
        return len(handles) == 1 or super().takes_arrays(handles)


class BatchedScan(_AlongAnAxis, Scan):
    """tl.associative_scan."""

    combiners = ("_sum_combine", "_prod_combine")


def _difference(error: BaseException | None) -> Diverged | None:
    """Return the divergence that caused an error, or None. A kernel's own functions raise another error from it."""
    while error is not None and not isinstance(error, Diverged):
        error = error.__cause__
    return error


class _History:
    """The record of a kernel's batches.

    Attributes:
        alone: whether its programs run one by one from now on.
    """

    def __init__(self) -> None:
        self.alone = False
        self.together = self.apart = 0

    def came_apart(self) -> None:
        self.apart += 1
        self.alone |= self.apart >= COME_APART and self.apart > self.together


_HISTORIES: weakref.WeakKeyDictionary[Callable, _History] = weakref.WeakKeyDictionary()


def history_of(kernel: Callable) -> _History:
    """Return the record of a kernel's batches."""
    return _HISTORIES.setdefault(kernel, _History())


class Runner:
    """Runner of a launch's programs in batches.

    Args:
        kernel: the function.
        values: its arguments.
        one_by_one: runs programs one after the other.
    """

    def __init__(
        self, kernel: Callable, values: dict[str, Any], one_by_one: Callable[[Iterator[Program]], None]
    ) -> None:
        self.kernel, self.values, self.one_by_one = kernel, values, one_by_one
        self.history = history_of(kernel)

    def run(self, programs: Sequence[Program]) -> None:
        """Run these programs."""
        builder, at, size = interpreter.interpreter_builder, 0, FIRST
        if builder.storages is None or any(
            end - start > builder.most_bytes for start, end, _ in builder.storages.places
        ):
            return self.one_by_one(iter(programs))
        while at < len(programs):
            if self.history.alone:
                return self.one_by_one(iter(programs[at:]))
            builder.widest = 1
            self.batch(programs[at : at + size], DIVISIONS)
            at, size = at + size, min(max(ELEMENTS // builder.widest, LEAST), MOST)
        return None

    def batch(self, programs: Sequence[Program], divisions: int) -> None:
        """Run these programs at once, or in parts if they differ."""
        if len(programs) == 1 or not divisions:
            return self.one_by_one(iter(programs))
        builder = interpreter.interpreter_builder
        outer, builder.batch, builder.saved = builder.batch, np.array(programs), {}
        groups: list[np.ndarray] | None = None
        try:
            self.kernel(**self.values)
            self.history.together += 1
            return None
        except Exception as error:
            builder.undo()
            diverged = _difference(error)
            groups = diverged.groups() if diverged else None
        finally:
            builder.batch = outer
        if groups is None:
            self.one_by_one(iter(programs))
            self.history.alone = True  # it raises no error of its own
        elif len(groups) == len(programs):
            self.history.came_apart()
            self.one_by_one(iter(programs))
        else:
            for group in groups:
                self.batch([programs[place] for place in group], divisions - 1)
        return None
