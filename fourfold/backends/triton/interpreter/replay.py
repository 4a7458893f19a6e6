"""Record what a function of the language does to operands of certain types, to save the interpreter's time.

At each call the language decides which operands to convert and to broadcast, and the type of the result. That takes
some 15 us, where NumPy computes the result in one or two. The decision depends only on the operands' types and on
constants. So the first call with operands of some types is recorded: the operations that the language requests from
the builder. Later calls replay them.
"""

import contextlib
import functools
import math
import operator
import re
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from fourfold.backends.triton.interpreter.batches import Batch, number_of, shape_of

_SYMBOLS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
# Functions that accept a Python integer as an operand. Their operations depend on its size, not on its value.
ARITHMETIC = frozenset(
    (
        *(f"__{prefix}{symbol}__" for symbol in _SYMBOLS for prefix in ("", "r")),
        *("add", "sub", "mul", "minimum", "maximum", "where"),
    )
)
# The functions and methods of the language that are recorded. Kernels seldom call others.
REPLAYED = ARITHMETIC | {
    *("__neg__", "__invert__", "__not__", "__getitem__", "logical_and", "logical_or"),
    *("abs", "ceil", "clamp", "cos", "div_rn", "erf", "exp", "exp2", "fdiv", "floor", "fma", "log", "log2", "rsqrt"),
    *("sin", "sqrt", "sqrt_rn", "dot", "cast", "to", "load", "store", "atomic_add", "program_id", "num_programs"),
    *("arange", "full", "broadcast", "broadcast_to", "expand_dims", "join", "permute", "reshape", "split", "trans"),
    "view",
}
# The builder's operations for which NumPy broadcasts operands itself.
BROADCASTING = frozenset(
    f"create_{name}"
    for name in (
        *("add", "sub", "mul", "sdiv", "udiv", "srem", "urem", "and", "or", "xor", "shl", "lshr", "ashr", "addptr"),
        *("fadd", "fsub", "fmul", "fdiv", "frem", "select", "minnumf", "maxnumf", "minimumf", "maximumf"),
        *("minsi", "minui", "maxsi", "maxui", "icmpEQ", "icmpNE", "fcmpOEQ", "fcmpUNE"),
        *(f"icmp{sign}{order}" for sign in "SU" for order in ("LT", "LE", "GT", "GE")),
        *(f"fcmpO{order}" for order in ("LT", "LE", "GT", "GE")),
    )
)
# The builder's operations whose result depends on the program.
OF_THE_PROGRAM = frozenset({"create_get_program_id", "create_get_num_programs"})
# The largest number of elements of a cached constant.
CONSTANT_ELEMENTS = 1 << 14
# The largest number of cached recordings of a function.
RECORDINGS = 1 << 12


class Unrepeatable(Exception):
    """A call that cannot be recorded: the next call of its kind may run other operations."""


class _Number(int):
    """An integer operand during a recording, distinct from a constant."""


class _Kinds(dict[type, Callable[[Any], Hashable]]):
    """Functions, by type of argument, that return the property of an argument that determines what a call does."""

    def __missing__(self, kind: type) -> Callable[[Any], Hashable]:
        if issubclass(kind, tl.tensor):
            self[kind] = operator.attrgetter("type.name")
        elif issubclass(kind, tl.dtype):
            self[kind] = lambda dtype: (kind, dtype.name)
        elif kind in (bool, int, str, type(None), tl.PropagateNan):
            self[kind] = lambda value: (kind, value)
        elif kind is float:
            # 0.0 and -0.0 are equal, NaN is not equal to itself.
            self[kind] = lambda value: (kind, value.hex())
        elif kind in (tuple, list, tl.tuple):
            self[kind] = lambda values: (kind, *[self[type(value)](value) for value in values])
        elif kind is slice:
            self[kind] = lambda cut: (kind, *[self[type(x)](x) for x in (cut.start, cut.stop, cut.step)])
        elif kind is tl.constexpr:
            self[kind] = lambda constant: (kind, self[type(constant.value)](constant.value))
        else:
            raise Unrepeatable(f"an argument of type {kind.__name__}")
        return self[kind]


def _range_of(number: int) -> Hashable:
    """Return the properties that decide an integer operand's type: see `TritonSemantic.to_tensor_type`."""
    return int, number < 0, number == 0, max(number, -1 - number).bit_length()


_KINDS = _Kinds()
_KINDS_OF_OPERANDS = _Kinds({int: _range_of})


class _Result(NamedTuple):
    """The number of a varying value: an argument of the call, or the result of a step."""

    number: int


class _Step(NamedTuple):
    """An operation of the builder. Arguments other than `_Result` are constants."""

    name: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]


class _Recorder:
    """A builder that records the operations requested from it."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.steps: list[_Step] = []
        # All values, by number. They are kept alive so that their ids, the keys of `known`, stay unique.
        self.values: list[Any] = []
        self.numbered: dict[int, Any] = {}
        # Broadcast values: the source of each, and whether that is a single number.
        self.copies: dict[int, tuple[_Result, bool]] = {}
        self.repeatable = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **options: Any) -> Any:
            result = member(*arguments, **options)
            try:
                self.note(name, member, arguments, options, result)
            except Unrepeatable:
                self.repeatable = False  # the call continues, because repeating it would store twice
            return result

        return call

    def add(self, value: Any) -> _Result:
        """Number a value that varies from call to call."""
        result = self.numbered[id(value)] = _Result(len(self.values))
        self.values.append(value)
        return result

    def find(self, argument: Any) -> Any:
        """Return a builder's argument in the form that a step holds: a `_Result`, or the constant itself."""
        if type(argument) is _Number or isinstance(argument, interpreter.TensorHandle):
            if id(argument) not in self.numbered:
                raise Unrepeatable("a value that no step has made")
            return self.numbered[id(argument)]
        if isinstance(argument, list | tuple) and any(isinstance(x, interpreter.TensorHandle) for x in argument):
            raise Unrepeatable("a list of values")
        return argument

    def note(self, name: str, operation: Any, arguments: tuple, options: dict[str, Any], output: Any) -> None:
        """Record a step, or its result if that is a constant."""
        results = output if isinstance(output, tuple) else (output,)
        if not any(isinstance(x, interpreter.TensorHandle) for x in (*arguments, *options.values(), *results)):
            return  # an operation on types
        sources = tuple(self.find(x) for x in arguments)
        named = {key: self.find(x) for key, x in options.items()}
        varies = name in OF_THE_PROGRAM or any(isinstance(x, _Result) for x in (*sources, *named.values()))
        if not varies and name != "create_splat" and len(results) == 1 and output.data.size <= CONSTANT_ELEMENTS:
            output.data.flags.writeable = False
            self.numbered[id(output)] = output
            self.values.append(output)
        elif name == "create_broadcast" and shape_of(output) == shape_of(arguments[0]):
            self.numbered[id(output)] = sources[0]
            self.values.append(output)
        else:
            numbers = tuple(self.add(result).number for result in results)
            self.steps.append(_Step(name, operation, sources, named, numbers))
            if name in ("create_broadcast", "create_splat"):
                self.copies[numbers[0]] = sources[name == "create_splat"], name == "create_splat"

    def uses_all_numbers(self) -> bool:
        """Return whether the steps use all numbers. The language makes a constant of 0."""
        used = {x.number for step in self.steps for x in step.arguments if isinstance(x, _Result)}
        return all(i in used or not x for i, x in enumerate(self.values) if type(x) is _Number)


class _Writer:
    """Writer of a recording as a Python function ``replay(arguments, options)``, with one line per step."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.constants: dict[str, Any] = {"make": _make}
        # Each line with the name that it defines if the line can be omitted when that name is unused, else "".
        self.lines: list[tuple[str, str]] = []
        self.splats: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def value(self, argument: Any) -> str:
        return f"value_{argument.number}" if isinstance(argument, _Result) else self.constant(argument)

    def call(self, step: _Step, arguments: tuple[str, ...]) -> str:
        options = [f"{key}={self.value(x)}" for key, x in step.options.items()]
        return f"{self.constant(step.operation)}({', '.join([*arguments, *options])})"

    def step(self, step: _Step) -> None:
        """Add the line of a step."""
        text = self.call(step, tuple(self.value(x) for x in step.arguments))
        if step.name == "create_splat":
            self.splats[step.results[0]] = text
        if step.name in BROADCASTING:
            text = self.broadcasting(step) or text
        targets = ", ".join(f"value_{number}" for number in step.results)
        unneeded = step.name in ("create_broadcast", "create_splat") or step.name.startswith("get_")
        self.lines.append((targets if unneeded else "", f"{targets} = {text}"))

    def broadcasting(self, step: _Step) -> str | None:
        """Return the step with operands before their broadcast, which NumPy performs faster.

        Return None if the result would have another shape.
        """
        values, copies = self.recorder.values, self.recorder.copies
        sources = [copies.get(x.number, (x, False)) if isinstance(x, _Result) else (x, False) for x in step.arguments]
        blocks = [values[x.number] if isinstance(x, _Result) else x for x, _ in sources]
        shape = shape_of(values[step.results[0]])
        if np.broadcast_shapes(*map(shape_of, blocks)) != shape:
            return None
        direct = self.call(step, tuple(self.value(x) for x, _ in sources))
        if not any(scalar for _, scalar in sources) or all(scalar for _, scalar in sources):
            return direct
        # NumPy lays the result out like its operands. A broadcast number is laid out row by row, and so is the result:
        # in another layout, a sum of it is rounded differently.
        full = [self.value(x) for (x, scalar), block in zip(sources, blocks) if not scalar and shape_of(block) == shape]
        copied = [
            self.splats[x.number] if scalar else self.value(source)
            for x, (source, scalar) in zip(step.arguments, sources)
        ]
        if len(full) < sum(not scalar for _, scalar in sources):
            return self.call(step, tuple(copied))
        rows = " and ".join(f"{name}.data.flags.c_contiguous" for name in full)
        return f"{direct} if {rows} else {self.call(step, tuple(copied))}"

    def result(self, output: Any, tensors: dict[int, str]) -> str:
        """Return the expression of the call's result, for example a tensor of a step's result."""
        if id(output) in tensors:
            return tensors[id(output)]
        if isinstance(output, tl.tensor):
            if output.handle is None:
                return self.constant(output)
            derived = {name: value for name, value in vars(output).items() if name != "handle"}
            return f"make({self.value(self.recorder.find(output.handle))}, {self.constant(derived)})"
        if type(output) is tuple:
            return f"({''.join(self.result(part, tensors) + ', ' for part in output)})"
        if output is None:
            return "None"
        raise Unrepeatable(f"a result of type {type(output).__name__}")

    def function(self, result: str) -> Callable[[tuple, dict[str, Any]], Any]:
        """Compile the lines to a function."""
        lines, used = [f"    return {result}"], result
        for name, line in reversed(self.lines):
            if not name or re.search(rf"\b{name}\b", used):
                lines.append(f"    {line}")
                used += line
        source = "\n".join(["def replay(arguments, options):", *reversed(lines)])
        return types.FunctionType(_code(source), self.constants)


@functools.lru_cache(4096)
def _code(source: str) -> types.CodeType:
    module = compile(source, f"{__file__}, a replayed operation", "exec")
    return next(part for part in module.co_consts if isinstance(part, types.CodeType))


def _make(handle: Any, derived: dict[str, Any]) -> tl.tensor:
    """Return a tensor, with the attributes that it derives from its type."""
    tensor = object.__new__(tl.tensor)
    tensor.__dict__.update(derived)
    tensor.handle = handle
    return tensor


class _Received:
    """The arguments of a recorded call, copied and named."""

    def __init__(self, recorder: _Recorder, writer: _Writer, numbers: bool) -> None:
        self.recorder, self.writer, self.numbers = recorder, writer, numbers
        # By the id of a copied tensor: its expression, and the original.
        self.names: dict[int, str] = {}
        self.tensors: dict[int, tl.tensor] = {}

    def copy(self, argument: Any, name: str) -> Any:
        """Return a copy for the language.

        An argument that is passed twice gets two copies, because later calls may pass two different ones.
        """
        if isinstance(argument, tl.tensor):
            if not isinstance(argument.handle, interpreter.TensorHandle):
                self.recorder.repeatable = False
                return argument
            handle = type(argument.handle)(argument.handle.data, argument.handle.dtype)
            copy = tl.tensor(handle, argument.type)
            self.define(handle, f"{name}.handle")
            self.names[id(copy)], self.tensors[id(copy)] = name, argument
            self.recorder.values.append(copy)
            return copy
        if type(argument) is int and self.numbers:
            number = _Number(argument)
            self.define(number, name)
            return number
        return argument

    def define(self, value: Any, text: str) -> None:
        target = f"value_{self.recorder.add(value).number}"
        self.writer.lines.append((target, f"{target} = {text}"))


def _record(name: str, function: Callable, arguments: tuple, options: dict[str, Any]) -> tuple[Any, Callable | None]:
    """Call a function of the language. Return its result, and a function that replays the call, or None."""
    recorder = _Recorder(interpreter.interpreter_builder)
    writer = _Writer(recorder)
    received = _Received(recorder, writer, name in ARITHMETIC)
    copies = [received.copy(x, f"arguments[{i}]") for i, x in enumerate(arguments)]
    named = {key: received.copy(x, f"options[{key!r}]") for key, x in options.items()}
    with _running(name):
        result = function(*copies, **named, _semantic=TritonSemantic(recorder))
    replay = None
    with contextlib.suppress(Unrepeatable):
        if recorder.repeatable and recorder.uses_all_numbers():
            for step in recorder.steps:
                writer.step(step)
            replay = writer.function(writer.result(result, received.names))
    return received.tensors.get(id(result), result), replay


# The functions of the language that are running now.
_RUNNING: list[str] = []


def truth(tensor: tl.tensor) -> bool:
    """Return ``bool(tensor)``: a number is true unless it is 0, and a block always.

    Within the language's functions a number is always true: there ``if other`` tests whether an argument was given.
    """
    if _RUNNING or math.prod(shape_of(tensor.handle)) != 1:
        return True
    if type(tensor.handle) is Batch:
        tensor = tl.tensor(Batch(tensor.handle.data != 0, tl.int1), tl.int1)
    return bool(number_of(tensor.handle))


def transpose(tensor: tl.tensor) -> tl.tensor:
    """Return ``tensor.T``: the axes in reverse order."""
    order = list(reversed(range(len(tensor.shape))))
    handle = interpreter.interpreter_builder.create_trans(tensor.handle, order)
    return tl.tensor(handle, tl.block_type(tensor.dtype, [tensor.shape[axis] for axis in order]))


@contextlib.contextmanager
def _running(name: str) -> Iterator[None]:
    _RUNNING.append(name)
    try:
        yield
    finally:
        _RUNNING.pop()


def record_once(name: str, function: Callable) -> Callable:
    """Return a function of the language that is recorded once for each combination of its arguments' types."""
    kinds = _KINDS_OF_OPERANDS if name in ARITHMETIC else _KINDS
    recordings: dict[Hashable, Callable] = {}

    def unrecorded(arguments: tuple, options: dict[str, Any]) -> Any:
        with _running(name):
            return function(*arguments, **options, _semantic=interpreter.interpreter_semantic)

    def call(*arguments: Any, **options: Any) -> Any:
        if "_semantic" in options:
            return function(*arguments, **options)  # called by another function of the language
        try:
            key: Any = tuple([kinds[type(x)](x) for x in arguments])
            if options:
                key = key, *options, *[kinds[type(x)](x) for x in options.values()]
        except Unrepeatable:
            return unrecorded(arguments, options)
        replay = recordings.get(key)
        if replay is not None:
            return replay(arguments, options)
        if len(recordings) >= RECORDINGS:
            recordings.clear()
        result, replay = _record(name, function, arguments, options)
        recordings[key] = replay or unrecorded
        return result

    return call


def remember_shapes() -> None:
    """Cache the attributes that tensors and their types derive from their shapes."""
    type_attributes: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    tensor_attributes: dict[tuple[int, ...], dict[str, Any]] = {}
    shipped_type, shipped_tensor = tl.block_type.__init__, tl.tensor.__init__

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        derived = type_attributes.get(key)
        if derived is None:
            shipped_type(self, element_ty, shape)
            type_attributes[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.__dict__.update(derived, element_ty=element_ty)

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else ()
        derived = tensor_attributes.get(key)
        if derived is None:
            shipped_tensor(self, handle, type)
            names = ("handle", "type", "dtype")
            tensor_attributes[key] = {name: value for name, value in vars(self).items() if name not in names}
        else:
            self.__dict__.update(derived, handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__ = new_type
    tl.tensor.__init__ = new_tensor
