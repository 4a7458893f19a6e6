"""The launch of a `__global__` function on the tensors of a call: ``softmax_kernel<<<rows, 256>>>(x, y, cols)``.

The process of an untrusted candidate imports this module, and no operation, oracle or check.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.declarations import split
from fourfold.backends.cuda.functions import KernelInstances, plain
from fourfold.backends.cuda.parameters import short
from fourfold.candidates.load.expressions import evaluate
from fourfold.operations import axes

OUTPUT = "out"
# The name of the argument that describes the result, next to the operation's arguments. No operation uses it.
RESULT = "the result"
OF_OUTPUT = ("out", "output", "o", "y", "result", "res", "dst", "c", "z", "out_ptr")
_TARGET = re.compile(r"(?P<file>.*?\.cuh?):(?P<name>[\w:]+(?:<[^<].*?>)?)(?:<<<(?P<sizes>.*)>>>(?:\((?P<args>.*)\))?)?")


@dataclass(frozen=True)
class Launch:
    """The text of a launch.

    Attributes:
        file: the `.cu` file.
        name: the kernel, a C++ name expression.
        grid, block, shared: expressions; "" if not given.
        args: an expression for each of the kernel's parameters; None if they are matched by name.
    """

    file: str
    name: str
    grid: str = ""
    block: str = ""
    shared: str = "0"
    args: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> "Launch | None":
        """Parse ``FILE.cu:KERNEL<<<GRID, BLOCK, SHARED>>>(ARGUMENTS)``; return None for a text without a `.cu` file.

        Raises:
            ValueError: grid and block are missing.
        """
        match = _TARGET.fullmatch(text.strip())
        if match is None:
            return None
        sizes = split(match["sizes"] or "")
        if not 2 <= len(sizes) <= 3:
            example = f"{match['file']}:{match['name']}<<<GRID, BLOCK>>>"
            raise ValueError(f"{text!r} does not say how the kernel is launched: write {example}, as <<<rows, 256>>>")
        args = None if match["args"] is None else tuple(split(match["args"]))
        grid, block, shared = [*sizes, "0"][:3]
        return cls(match["file"], match["name"], grid, block, shared, args)

    @property
    def launched(self) -> str:
        """Return the text without the file, as `parse` reads it."""
        shared = "" if self.shared == "0" else f", {self.shared}"
        args = "" if self.args is None else f"({', '.join(self.args)})"
        return f"{self.name}<<<{self.grid}, {self.block}{shared}>>>{args}"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch with the facts of the operation that it needs, to be sent to the process of an untrusted kernel.

    Attributes:
        file: the `.cu` file, as an absolute path.
        name: the kernel.
        grid, block, shared: expressions.
        args: an expression for each of the kernel's parameters.
        inputs: the names of the tensors.
        numbers: those of the other arguments.
        axes: the notation of each input's axes, by name.
    """

    file: str
    name: str
    grid: str
    block: str
    shared: str
    args: tuple[str, ...]
    inputs: tuple[str, ...]
    numbers: tuple[str, ...]
    axes: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON for `of`."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "LaunchPlan":
        """Build a plan from the result of `to_json`."""
        lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})

    def names(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], out: torch.Tensor
    ) -> dict[str, Any]:
        """Return the values of all names that expressions may use."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes, _ = axes.sizes({name: axes.parse(text) for name, text in self.axes.items()}, shapes)
        leading = sizes.pop(axes.LEADING, None)
        if leading is not None and len(self.axes_of_first) > 1:
            sizes["rows"] = math.prod(leading)
        sizes["numel"] = next(iter(tensors.values())).numel()
        return {
            **sizes,
            **{name: values[name] for name in self.numbers},
            **tensors,
            OUTPUT: out,
            **self._name_outputs(out),
        }

    @property
    def axes_of_first(self) -> tuple[str, ...]:
        """Return the names of the first input's axes."""
        return axes.parse(self.axes.get(self.inputs[0], axes.LEADING))

    def _name_outputs(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output under its names in the launch, except names of inputs and numbers."""
        return {name: out for name in OF_OUTPUT if name not in self.inputs and name not in self.numbers}


class LaunchedKernel:
    """A kernel as a function of an operation's arguments and of a tensor that resembles its result.

    Args:
        plan: its launch.
        kernels: its instances.
    """

    def __init__(self, plan: LaunchPlan, kernels: KernelInstances) -> None:
        self.plan, self.kernels = plan, kernels

    def __call__(self, arguments: Mapping[str, Any], template: torch.Tensor) -> torch.Tensor:
        """Launch the kernel on contiguous, aligned tensors; return a new tensor.

        Args:
            arguments: the operation's arguments by name.
            template: a tensor without memory, of the result's shape and dtype.
        """
        tensors = {name: plain(arguments[name]) for name in self.plan.inputs}
        first = next(iter(tensors.values()))
        out = torch.empty(template.shape, dtype=template.dtype, device=first.device)
        names = self.plan.names(tensors, arguments, out)
        kernel_args = tuple(evaluate(text, names) for text in self.plan.args)
        self.kernels.check(first.dtype, kernel_args)
        names |= self.numbers_of(kernel_args)
        sizes = (self.plan.grid, self.plan.block, self.plan.shared)
        grid, block, shared = (evaluate(text, names) for text in sizes)
        self.kernels.of(first.dtype).launch(grid, block, *kernel_args, shared_bytes=shared)
        return out

    def numbers_of(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return the passed numbers by the names of the kernel's parameters."""
        parameters = self.kernels.declared.parameters
        return {p.name: value for p, value in zip(parameters, args) if p.name and not isinstance(value, torch.Tensor)}


def compile_launch(fields: Mapping[str, Any]) -> tuple[Callable[..., torch.Tensor], dict[str, str]]:
    """Return a function of an operation's arguments that launches a kernel on the CPU, compiled from a plan as JSON.

    Returns:
        The function, and by name the dtypes for which the kernel does not compile, each with the reason.

    Raises:
        OSError, LookupError, ValueError, CudaError: see `KernelInstances` and `KernelInstances.compile_for`.
    """
    plan = LaunchPlan.of(fields)
    kernels = KernelInstances(Path(plan.file), plan.name)
    kernels.compile_for("cpu")
    kernel = LaunchedKernel(plan, kernels)

    def launch(**arguments: Any) -> torch.Tensor:
        template = arguments.pop(RESULT)
        return kernel(arguments, template)

    return launch, {short(dtype): reason for dtype, reason in kernels.refusals.items()}
