"""A `__global__` function as a candidate: ``softmax.cu:softmax_kernel<<<rows, 256, cols * 4>>>(x, y, rows, cols)``.

The launch is written as in CUDA C++. Grid, block and shared memory are expressions over the sizes of the operation.
The arguments may be omitted if the names of the kernel's parameters identify them.
"""

import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from fourfold.backends.cuda.compile import CudaError
from fourfold.backends.cuda.declarations import DeclaredParameter
from fourfold.backends.cuda.emulator import unavailable_reason
from fourfold.backends.cuda.functions import KernelInstances
from fourfold.candidates.load.cuda_launches import OF_OUTPUT, OUTPUT, Launch, LaunchedKernel, LaunchPlan
from fourfold.candidates.load.expressions import ExpressionError, evaluate
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations import axes
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Unsupported
from fourfold.operations.record import Operation

_OF_INPUT = ("x", "in", "inp", "input", "src", "a")
# Other names for sizes, in lower case.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "rows": ("rows", "n_rows", "num_rows", "nrows", "batch", "batch_size", "num_boxes"),
    "cols": ("cols", "n_cols", "num_cols", "ncols", "columns", "c", "d", "dim", "hidden", "hidden_size", "row_size"),
    "numel": ("numel", "n_elements", "num_elements", "size", "total", "length", "len"),
    "eps": ("eps", "epsilon"),
}


class NotTaken(Unsupported):
    """A case sets a parameter that the kernel lacks to a value other than its default: a refusal."""


class CudaCandidate:
    """A kernel of a `.cu` file, callable as an operation: forward only.

    Args:
        launch: its launch.
        operation: the operation that it claims to implement.
        reference: a function of the operation's arguments, which gives the result's shape.
        here: whether it runs in this process; if not, nothing is compiled, and another process runs its `plan`.

    Raises:
        FileNotFoundError: the file does not exist.
        LookupError: the file has no such kernel.
        ValueError: an expression, or an argument, cannot be understood.
        CudaError: the file does not compile for the device of this run, or the compiler is missing.
    """

    def __init__(self, launch: Launch, operation: Operation, reference: Callable[..., Any], here: bool = True) -> None:
        self.launch, self.operation, self.reference = launch, operation, reference
        self.signature = inspect.signature(reference)
        self.kernels = KernelInstances(Path(launch.file).resolve(), launch.name)
        self.inputs = tuple(next(iter(operation.examples.values()))(DTYPES["float32"]).inputs)
        self.numbers = tuple(name for name in self.signature.parameters if name not in self.inputs)
        self._axes = axes.parse(operation.axes.get(self.inputs[0], axes.LEADING))
        self.args = launch.args if launch.args is not None else self._match_parameters()
        parameters = [p.name or f"argument {place}" for place, p in enumerate(self.kernels.declared.parameters)]
        if len(self.args) != len(parameters):
            problem = f"{self.kernels.declared.name} takes {len(parameters)} arguments ({', '.join(parameters)})"
            raise ValueError(f"{problem}, but {len(self.args)} are given: {', '.join(self.args)}")
        words = {word for text in self.args for word in re.findall(r"[A-Za-z_]\w*", text)}
        self.taken = tuple(name for name in self.numbers if name in words)
        self.plan = LaunchPlan(
            file=str(self.kernels.source),
            name=launch.name,
            grid=launch.grid,
            block=launch.block,
            shared=launch.shared,
            args=self.args,
            inputs=self.inputs,
            numbers=self.numbers,
            axes=dict(operation.axes),
        )
        self._launched = LaunchedKernel(self.plan, self.kernels)
        self._try()
        if here:
            on_cpu = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
            self.kernels.compile_for("cpu" if on_cpu else "cuda")

    def __str__(self) -> str:
        return f"{self.launch.file}:{self.launch.launched}"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Launch the kernel on contiguous, aligned tensors; return a new tensor."""
        return self._launched(*self.prepare(*args, **kwargs))

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the arguments of a call by name, and a tensor without memory that resembles its result.

        Raises:
            NotTaken: the kernel does not take one of the numbers.
            Exception: the reference's own, for arguments that it refuses.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        self._check_devices(arguments)
        expected = _result_on_meta(self.reference, arguments)
        self._check_numbers(arguments)
        return arguments, expected

    def unsupported(self, dtype: str, device: str) -> str | None:
        """Return why the kernel has no instance for a dtype or cannot run on a device, or None if it can."""
        if device == "cpu" and (reason := unavailable_reason()):
            return reason
        return self.kernels.unsupported(getattr(torch, dtype))

    def narrow(self, operation: Operation) -> Operation:
        """Return the operation with the parameters that the kernel does not take at their defaults."""
        defaults = {name: self.signature.parameters[name].default for name in self.numbers if name not in self.taken}
        if not defaults:
            return operation

        def default(case: Case) -> Case:
            return case.with_parameters(**{name: defaults[name] for name in defaults if name in case.parameters})

        def example(make: Callable[[DType], Case]) -> Callable[[DType], Case]:
            return lambda dtype: default(make(dtype))

        sized = operation.sized
        return replace(
            operation,
            cases=lambda dtype, elements: operation.cases(dtype, elements).map(default),
            smooth=lambda dtype: operation.smooth(dtype).map(default),
            examples={name: example(make) for name, make in operation.examples.items()},
            sized=sized and replace(sized, make=lambda sizes: example(sized.make(sizes))),
        )

    def _check_devices(self, arguments: Mapping[str, Any]) -> None:
        tensors = {name: arguments[name] for name in self.inputs if isinstance(arguments[name], torch.Tensor)}
        for name, tensor in tensors.items():
            first = next(iter(tensors))
            if tensor.device != tensors[first].device:
                device = tensors[first].device
                raise ValueError(f"{name} must be on the device of {first}, {device}, not on {tensor.device}")

    def _check_numbers(self, arguments: Mapping[str, Any]) -> None:
        for name in self.numbers:
            default = self.signature.parameters[name].default
            if name not in self.taken and arguments[name] != default:
                raise NotTaken(f"{self.kernels.name} does not take {name}, which is {default!r} for it")

    def _try(self) -> None:
        """Evaluate each expression for one case, to find invalid expressions before the first check."""
        case = next(iter(self.operation.examples.values()))(DTYPES["float32"])
        tensors = case.tensors(DTYPES["float32"], "cpu")
        defaults = {name: parameter.default for name, parameter in self.signature.parameters.items()}
        names = self.plan.names(tensors, {**defaults, **case.parameters}, torch.empty(case.grad_output.shape))
        # The many names of the output would not help in a message.
        values = {name: value for name, value in names.items() if name == OUTPUT or value is not names[OUTPUT]}
        args = [self._evaluate_option("--args", text, names, values) for text in self.args]
        of_kernel = self._launched.numbers_of(args)
        names, values = {**names, **of_kernel}, {**values, **of_kernel}
        options = {"--grid": self.launch.grid, "--block": self.launch.block, "--shared": self.launch.shared}
        for option, text in options.items():
            value = self._evaluate_option(option, text, names, values)
            sizes = value if isinstance(value, tuple) and option != "--shared" else (value,)
            if not all(type(size) is int for size in sizes) or len(sizes) > 3:
                raise ValueError(f"{option} {text!r} is {value!r}, and must be one integer or up to three")

    @staticmethod
    def _evaluate_option(option: str, text: str, names: Mapping[str, Any], described: Mapping[str, Any]) -> Any:
        try:
            return evaluate(text, names)
        except ExpressionError:
            try:
                evaluate(text, described)
            except ExpressionError as error:
                raise ValueError(f"{option} {text!r}: {error}") from None
            raise

    # ---- arguments by the names of the kernel's parameters

    def _match_parameters(self) -> tuple[str, ...]:
        parameters = self.kernels.declared.parameters
        pointers = self._pointers([p for p in parameters if p.is_pointer])
        return tuple(pointers[p] if p.is_pointer else self._size(p, parameters) for p in parameters)

    def _pointers(self, pointers: Sequence[DeclaredParameter]) -> dict[DeclaredParameter, str]:
        """Match a tensor to each pointer: by name, or by elimination if one tensor and one pointer are left."""
        matches: dict[DeclaredParameter, str] = {}
        for p in pointers:
            if _stem(p.name) in self.inputs and _stem(p.name) not in matches.values():
                matches[p] = _stem(p.name)
        unmatched = [name for name in self.inputs if name not in matches.values()]
        const = [p for p in pointers if p not in matches and not p.is_output]
        outputs = [p for p in pointers if p not in matches and p.is_output]
        if len(const) == len(unmatched):
            # In the operation's order, like the arguments of a Python candidate with other names.
            matches |= dict(zip(const, unmatched))
        elif not const and len(unmatched) == 1:
            matches |= {p: unmatched[0] for p in outputs if _stem(p.name) in _OF_INPUT}
        outputs = [p for p in outputs if p not in matches]
        if len(outputs) > 1:
            outputs = [p for p in outputs if _stem(p.name) in OF_OUTPUT]
        if len(outputs) == 1:
            matches[outputs[0]] = OUTPUT
        unknown = [p.name for p in pointers if p not in matches]
        if unknown or set(matches.values()) != {*self.inputs, OUTPUT} or len(matches) != len(set(matches.values())):
            self._unclear(unknown[0] if unknown else pointers[0].name if pointers else "no pointer")
        return matches

    def _size(self, parameter: DeclaredParameter, parameters: Sequence[DeclaredParameter]) -> str:
        """Return the size or the number that a kernel parameter stands for."""
        name = parameter.name.lower()
        sizes = {*self._all_axes()}
        if len(self._axes) > 1 and "..." in self._axes:
            sizes.add("rows")
        sizes |= {"numel", *self.numbers}
        possible = [size for size in sizes if name == size or name in _ALIASES.get(size, ())]
        if not possible and name in ("n", "m"):
            names = {p.name.lower() for p in parameters}
            possible = list(self._rows_or_cols(name, names, sizes))
        if len(possible) != 1:
            self._unclear(parameter.name)
        return possible[0]

    @staticmethod
    def _rows_or_cols(name: str, names: set[str], sizes: set[str]) -> Iterator[str]:
        """Yield the meaning of `n` or `m` if no axis has this name: m by n, or n by the columns' other name."""
        if "cols" not in sizes:
            if name == "n":
                yield "numel"
        elif {"n", "m"} <= names:
            yield "cols" if name == "n" else "rows"
        elif names & set(_ALIASES["cols"]):
            yield "rows"
        elif names & set(_ALIASES["rows"]):
            yield "cols"

    def _all_axes(self) -> Iterator[str]:
        for name in self.inputs:
            yield from axes.names(axes.parse(self.operation.axes.get(name, "")))

    def _unclear(self, name: str) -> NoReturn:
        kernel = self.kernels.declared
        parameters = ", ".join(p.name or p.type for p in kernel.parameters)
        names = [*self.inputs, OUTPUT, *dict.fromkeys(axis for axis in self._all_axes() if axis.isidentifier())]
        names += ["rows"] * ("..." in self._axes and len(self._axes) > 1) + ["numel", *self.numbers]
        raise ValueError(
            f"{name} of {kernel.name}({parameters}) is ambiguous:"
            f" give --args, in the order of the parameters, from {', '.join(names)}"
        )


def _stem(name: str) -> str:
    """Return a pointer's name without affixes that mark a pointer or the device."""
    return re.sub(r"^(?:d|dev|g|p|ptr)_|_(?:ptr|d|dev|gpu|data)$", "", name.lower())


def _result_on_meta(reference: Callable[..., Any], arguments: Mapping[str, Any]) -> torch.Tensor:
    """Call a function on tensors without contents, which checks the arguments and gives the result's shape and dtype.

    It runs in its own thread, so that watches on torch's operators in the caller's thread see only the candidate's.
    """
    outcomes: list[Any] = []

    def call() -> None:
        try:
            outcomes.append(reference(**{name: _meta_tensor(value) for name, value in arguments.items()}))
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    return outcomes[0]


def _meta_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


_loaded: dict[tuple[Any, ...], CudaCandidate] = {}


def load(
    target: str,
    operation: Operation,
    reference: Callable[..., Any],
    here: bool = True,
) -> CudaCandidate:
    """Load the candidate that a command-line text names, once; compile it if it runs in this process.

    Args:
        target: ``FILE.cu:KERNEL<<<GRID, BLOCK>>>``.
        operation: the operation that it computes.
        reference: the operation as a function of torch.
        here: whether it runs in this process.

    Raises:
        Exception: see `Launch.parse` and `CudaCandidate`.
    """
    key = target, operation.name, reference, here
    if key not in _loaded:
        launch = Launch.parse(target)
        if launch is None:
            raise CudaError(f"{target} is no kernel of a .cu file")
        _loaded[key] = CudaCandidate(launch, operation, reference, here)
    return _loaded[key]
