"""The messages between the judge and a candidate's process, and the tensors in them.

Both sides hold the same storages, by number. A storage has the same bytes on both sides whenever a message has arrived:
each side sends those that changed. So strides, gaps, redzones and aliases are the same on both sides, and later writes
of one side do not change the other's memory.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fourfold.backends.python_source import SizeComparison
from fourfold.compat import torch_internals
from fourfold.processes.messages import Malformed

# The most outputs of a call.
MOST_RESULTS = 64


class Unsendable(TypeError):
    """A value cannot be sent to another process."""


# ---- memory


def contents(storage: torch.UntypedStorage) -> bytes:
    """Return the bytes of a storage, without calling an operator of torch, which a mode would see."""
    size = storage.nbytes()
    return ctypes.string_at(storage.data_ptr(), size) if size else b""


def overwrite(storage: torch.UntypedStorage, content: bytes) -> None:
    """Overwrite a storage."""
    if content:
        ctypes.memmove(storage.data_ptr(), content, len(content))


def changed_storages(storages: Iterable[tuple[int, torch.UntypedStorage]], last: dict[int, bytes]) -> dict[int, bytes]:
    """Return the storages that differ from the other side's copies, and update the record of those copies.

    Args:
        storages: by number.
        last: the contents on the other side, by number.
    """
    new = {}
    for number, storage in storages:
        content = contents(storage)
        if last.get(number) != content:
            new[number] = last[number] = content
    return new


# ---- values

# The kinds of tensors other than leaves of autograd's graph: made for inference, a view, the result of an operation.
INFERENCE, VIEW, RESULT = "for inference", "view", "result"


class AsResult(torch.autograd.Function):
    """An autograd function that makes a tensor the result of an operation, in its own memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, passed in a list to hide it from autograd."""
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[None, None]:
        """Return nothing: the gradient is requested at the tensor itself."""
        return None, None


def origin_of(tensor: torch.Tensor) -> str:
    """Return how an argument tensor was made; "" for a leaf."""
    if tensor.is_inference():
        return INFERENCE
    if tensor.is_leaf:
        return ""
    return VIEW if torch_internals.shares_a_base(tensor) else RESULT


@dataclass(frozen=True)
class TensorLayout:
    """A tensor in the memory of a numbered storage; the offset is in elements."""

    storage: int
    dtype: str
    shape: list[int]
    strides: list[int]
    offset: int


@dataclass(frozen=True)
class TensorArgument:
    """A tensor as an argument.

    Attributes:
        layout: its memory.
        needs_gradient: whether its gradient is required.
        origin: how it was made, as `origin_of` says.
        object: the number of the judge's tensor object; 0 for a tensor within a list.
        written: how often autograd saw the judge write into it.
    """

    layout: TensorLayout
    needs_gradient: bool = False
    origin: str = ""
    object: int = 0
    written: int = 0


@dataclass(frozen=True)
class ArrayArgument:
    """A NumPy array, in the memory of a storage."""

    layout: TensorLayout


@dataclass(frozen=True)
class MetaArgument:
    """A tensor without memory."""

    layout: TensorLayout


@dataclass(frozen=True)
class DtypeArgument:
    """A dtype of torch."""

    name: str


@dataclass(frozen=True)
class SequenceArgument:
    """A list or a tuple."""

    values: list["Value"]
    is_tuple: bool


@dataclass(frozen=True)
class MappingArgument:
    """A dictionary."""

    items: list[tuple[str, "Value"]]


@dataclass(frozen=True)
class SameArgument:
    """The same object as another argument of the call."""

    name: str


_Object = TensorArgument | ArrayArgument | MetaArgument | DtypeArgument | SequenceArgument | MappingArgument
Value = bool | int | float | str | _Object | SameArgument | None
Arguments = list[tuple[str, Value]]


@dataclass(frozen=True)
class TensorResult:
    """A tensor that a candidate returned."""

    layout: TensorLayout
    requires_gradient: bool


@dataclass(frozen=True)
class OtherResult:
    """A result that is no tensor on the CPU: its type."""

    type: str


Result = TensorResult | OtherResult


# ---- requests to the process that forks candidates


@dataclass(frozen=True)
class StartCandidate:
    """Fork a candidate's process with a working folder and a limit of memory in bytes; carry a descriptor.

    A plain one shows what a user's own process shows, and has no limit of memory.
    """

    folder: str
    most_bytes: int
    plain: bool


@dataclass(frozen=True)
class ForkFirst:
    """Fork the process that forks candidates, for another judge; carry a descriptor."""


@dataclass(frozen=True)
class EndCandidate:
    """End a candidate's process, which has some seconds to end by itself."""

    process: int
    seconds: float


OfFirst = StartCandidate | ForkFirst | EndCandidate


@dataclass(frozen=True)
class CandidateStarted:
    """The answer to `StartCandidate` and `ForkFirst`."""

    process: int


@dataclass(frozen=True)
class CandidateEnded:
    """The answer to `EndCandidate`: the exit code if the process ended by itself, and the end of its output."""

    code: int | None
    printed: str


# ---- requests to a candidate's process


@dataclass(frozen=True)
class Conditions:
    """The conditions of a call in the judge's process, other than its arguments.

    Attributes:
        autocast: the dtype of autocast; None if it is off.
        poison: the kind of redzones of an `Arena`; None without one.
        fallbacks: whether torch's operators are watched.
        undefined_lanes_are_zero: a setting of Triton's interpreter; None if the judge has not imported it.
        order: the order of blocks and threads of emulated CUDA kernels; None for the usual one.
    """

    grad: bool
    inference: bool
    default_dtype: str
    autocast: str | None
    poison: float | None
    fallbacks: bool
    undefined_lanes_are_zero: bool | None
    order: str | int | None


@dataclass(frozen=True)
class LoadFunction:
    """Import a candidate.

    Attributes:
        place: the absolute path of a Python file, or the name of a module.
        lists: the operation's arguments that are lists of tensors.
        parameters: the operation's arguments, each with its default in a list, which is empty without one.
        state: a file that describes an ``nn.Module``; None for a function.
        folder: the working folder of the import.
        path: Python's search path.
    """

    place: str
    function: str
    operation: str
    lists: list[str]
    parameters: list[tuple[str, list[Value]]]
    state: str | None
    folder: str
    path: list[str]
    threads: int


@dataclass(frozen=True)
class LoadKernel:
    """Compile and load a kernel of a `.cu` file, with some environment variables."""

    plan: dict[str, Any]
    traced: bool
    variables: dict[str, str]
    threads: int


@dataclass(frozen=True)
class CallFunction:
    """Call the candidate."""

    arguments: Arguments
    conditions: Conditions


@dataclass(frozen=True)
class Backward:
    """Return the gradients of a call.

    Attributes:
        call: its number.
        inputs: the names of the inputs whose gradients are required.
        cotangents: of its outputs.
        written: how often the judge has written each input and output, by its name or number.
        another_thread: whether the backward pass runs in another thread than the call.
    """

    call: int
    inputs: list[str]
    cotangents: list[TensorLayout | None]
    written: dict[str, int]
    another_thread: bool
    conditions: Conditions


@dataclass(frozen=True)
class ThreadCall:
    """The calls of one thread."""

    arguments: Arguments
    cotangent: TensorLayout
    inputs: list[str]


@dataclass(frozen=True)
class CallAtOnce:
    """Call from several threads at once.

    Attributes:
        calls: of each thread.
        functions: the budget of a thread's calls.
        output: the names of the outputs, and the index of the wanted one; None if there is only one.
        patience: seconds without progress after which a thread never returns.
    """

    calls: list[ThreadCall]
    functions: float
    output: tuple[list[str], int] | None
    patience: float
    conditions: Conditions


@dataclass(frozen=True)
class CompareSizes:
    """Call the candidate, and return both sides of comparisons in its source."""

    arguments: Arguments
    comparisons: list[SizeComparison]


@dataclass(frozen=True)
class WatchLines:
    """Record executed lines from now on: by file, the first line of the statement at each line."""

    statements: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class ReadLines:
    """Return the executed lines."""


@dataclass(frozen=True)
class ForgetLines:
    """Count statements as not executed until they run again: their first lines, by file."""

    lines: dict[str, list[int]]


@dataclass(frozen=True)
class ReadKernelLines:
    """Return the executed lines of a `.cu` file."""


@dataclass(frozen=True)
class CountTensors:
    """Return the number of living tensors: see `fourfold.instruments.costs.living_tensors`."""

    keep_garbage: bool


@dataclass(frozen=True)
class AskCompiler:
    """Return what Triton's compiler says of the kernels that ran: see `fourfold.backends.triton.front_end`."""


@dataclass(frozen=True)
class Request:
    """A request to a candidate's process, with what changed since the last one.

    Attributes:
        number: its number, which the answer repeats.
        ask: the request itself.
        forgotten, forgotten_calls, forgotten_objects: the numbers of storages, calls and tensors that are gone.
        shared: the numbers and sizes of new storages in shared memory, whose descriptors come along.
    """

    number: int
    ask: (
        LoadFunction
        | LoadKernel
        | CallFunction
        | Backward
        | CallAtOnce
        | CompareSizes
        | WatchLines
        | ReadLines
        | ForgetLines
        | ReadKernelLines
        | CountTensors
        | AskCompiler
    )
    forgotten: list[int] = field(default_factory=list)
    forgotten_calls: list[int] = field(default_factory=list)
    forgotten_objects: list[int] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)


# ---- answers


@dataclass(frozen=True)
class Cause:
    """One exception of a chain.

    Attributes:
        bases: the names of its builtin bases.
        words: its message.
        fault: whether it is a `Fault`.
        caused: whether the next exception of the chain is its cause, rather than its context.
        line: the line of a kernel that it names.
    """

    type: str
    bases: list[str]
    words: str
    fault: bool
    caused: bool
    line: int | None


@dataclass(frozen=True)
class Raised:
    """The candidate raised an exception.

    Attributes:
        causes: the exception and its causes.
        frames: the file, the line, the function and the text of each frame of the candidate's own code.
        blame: the value of a `Blame`.
        escape: whether it orders the process to end.
        tampered: whether it is `Tampered`.
    """

    causes: list[Cause]
    frames: list[tuple[str, int, str, str]]
    blame: str
    escape: bool
    tampered: bool


@dataclass(frozen=True)
class Missing:
    """The answer to `LoadFunction` if the module lacks the function."""


@dataclass(frozen=True)
class Uncallable:
    """The candidate cannot be called, or does not compile."""

    reason: str


@dataclass(frozen=True)
class FunctionLoaded:
    """The candidate is imported: its claims, and its file."""

    claims: dict[str, Any]
    file: str


@dataclass(frozen=True)
class KernelLoaded:
    """The kernel is compiled: the reasons of refused dtypes, by name."""

    refused: dict[str, str]


@dataclass(frozen=True)
class Called:
    """The outputs of a call, and what its modes saw."""

    outputs: list[Result]
    several: bool
    trespasses: list[str]
    fallbacks: list[str]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a call, and what its modes saw."""

    gradients: list[Result | None]
    trespasses: list[str]
    fallbacks: list[str]


@dataclass(frozen=True)
class CalledAtOnce:
    """The results of each call of each thread: output, gradients, and output under `no_grad`."""

    count: int
    results: list[list[list[Result]]]


@dataclass(frozen=True)
class NeverReturned:
    """A thread has not ended."""

    reason: str


@dataclass(frozen=True)
class SizesCompared:
    """Both sides of comparisons, by number."""

    sides: list[tuple[int, float, float]]


@dataclass(frozen=True)
class LinesRead:
    """The first lines of executed statements by file, and whether some may be missing."""

    lines: dict[str, list[int]]
    blind: bool


@dataclass(frozen=True)
class KernelLinesRead:
    """The lines of a `.cu` file: file, line, function, whether it ran, whether the function was called."""

    lines: list[tuple[str, int, str, bool, bool]]


@dataclass(frozen=True)
class CompilerAnswered:
    """What Triton's compiler says: see `fourfold.backends.triton.front_end.CompilerAnswer`."""

    accepted: int
    refused: list[tuple[str, str, str, int, str]]
    unknown: list[str]


@dataclass(frozen=True)
class TensorsCounted:
    """The number of living tensors."""

    count: int


@dataclass(frozen=True)
class Done:
    """The answer to a request without a result."""


ANSWERS = (
    Raised
    | Missing
    | Uncallable
    | FunctionLoaded
    | KernelLoaded
    | Called
    | Gradients
    | CalledAtOnce
    | NeverReturned
    | SizesCompared
    | LinesRead
    | KernelLinesRead
    | TensorsCounted
    | CompilerAnswered
    | Done
)


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    number: int
    result: ANSWERS


# ---- tensors as messages, and back


def layout_of(tensor: torch.Tensor, number: int) -> TensorLayout:
    """Return the layout of a tensor, given the number of its storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorLayout(number, dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())


def as_tensor(layout: TensorLayout, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the tensor with a layout.

    Raises:
        Malformed: the storage does not exist, or is too short for the shape.
    """
    shape, strides, offset, dtype = layout.shape, layout.strides, layout.offset, dtype_of(layout.dtype)
    if len(shape) != len(strides) or len(shape) > 64 or min([offset, *shape, *strides]) < 0:
        raise Malformed(f"a tensor of shape {shape}, strides {strides} and offset {offset!r}")
    storage = storages.get(layout.storage)
    if storage is None:
        raise Malformed(f"a tensor of the unknown storage {layout.storage}")
    reach = 0 if 0 in shape else 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if reach * dtype.itemsize > storage.nbytes():
        raise Malformed(f"a tensor {shape} with strides {strides} in a storage of {storage.nbytes()} bytes")
    with torch.no_grad():
        return torch.empty(0, dtype=dtype).set_(storage, 0 if 0 in shape else offset, shape, strides)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name.

    Raises:
        Malformed: the name is not one of a dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise Malformed(f"there is no dtype {name!r}")
    return dtype


def decode_argument(message: Value, storages: Mapping[int, torch.UntypedStorage]) -> Any:
    """Return the argument that `encode_argument` encoded."""
    match message:
        case TensorArgument():
            with torch.inference_mode(message.origin == INFERENCE):
                tensor = as_tensor(message.layout, storages).requires_grad_(message.needs_gradient)
            if message.origin == VIEW:
                return tensor.view_as(tensor)
            is_result = message.origin == RESULT
            return AsResult.apply(torch.zeros((), requires_grad=True), [tensor.detach()]) if is_result else tensor
        case ArrayArgument():
            return as_tensor(message.layout, storages).numpy()
        case MetaArgument(layout):
            return torch.empty_strided(layout.shape, layout.strides, dtype=dtype_of(layout.dtype), device="meta")
        case DtypeArgument():
            return dtype_of(message.name)
        case MappingArgument():
            return {key: decode_argument(value, storages) for key, value in message.items}
        case SequenceArgument():
            values = [decode_argument(value, storages) for value in message.values]
            return tuple(values) if message.is_tuple else values
    return message


def encode_argument(value: Any, number_of: Callable[[torch.Tensor], int]) -> Value:
    """Return an argument of a call as a message.

    Args:
        value: a tensor, an array, a number, a string, None, a dtype, or a list, tuple or dictionary of these.
        number_of: returns the number of a tensor's storage.

    Raises:
        Unsendable: the value has another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return MetaArgument(layout_of(value, 0))
        if type(value) is torch.Tensor and value.layout == torch.strided and value.is_cpu and not value.is_neg():
            return TensorArgument(layout_of(value, number_of(value)))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.array(value, order="C"))
        return ArrayArgument(layout_of(tensor, number_of(tensor)))
    if isinstance(value, torch.dtype):
        return DtypeArgument(str(value).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return SequenceArgument([encode_argument(item, number_of) for item in value], isinstance(value, tuple))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return MappingArgument([(key, encode_argument(item, number_of)) for key, item in value.items()])
    raise Unsendable(f"a {type(value).__name__} cannot be sent to the process of a candidate")
