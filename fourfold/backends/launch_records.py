"""Records of launches: the compiled code, configuration and arguments of a call's launches.

Recording is off by default.

with recording(lambda tensor: None) as record:
    call()
record.launches
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fourfold.backends.cuda.machine_code import allocation, code_sha256
from fourfold.compat import torch_internals

# Addresses differ from run to run, but not modulo this many bytes: torch's allocator aligns to it.
ALIGNMENT = 512


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        name: its readable name.
        mangled: its name in the compiled file.
        arch: the architecture that it is compiled for, such as "sm_90a".
        cubin: the compiled file that is launched.
    """

    name: str
    mangled: str
    arch: str
    cubin: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """The hash of the machine code: see `code_sha256`."""
        return _sha256(self.cubin, self.mangled)

    @property
    def identity(self) -> str:
        """The hash of the machine code, of the registers of a thread and of the cluster that the source fixes."""
        return hashlib.sha256(f"{self.sha256} {allocation(self.cubin, self.mangled)}".encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _sha256(cubin: bytes, mangled: str) -> str:
    return code_sha256(cubin, mangled)


@dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        code: the launched kernel.
        configuration: grid, block, shared memory and all other launch options, in words.
        arguments: the tensors' forms, and the numbers.
    """

    code: Code
    configuration: str
    arguments: tuple[str, ...]


class LaunchRecord:
    """The launches and operators of a call on a GPU, in order.

    Args:
        tensor_name: the name of a tensor of the caller's, None for one that the call makes.
    """

    def __init__(self, tensor_name: Callable[[torch.Tensor], str | None]) -> None:
        self.events: list[Launched | str] = []
        self.unknown = ""
        self._tensor_name = tensor_name
        self._described: dict[int, tuple[Any, str]] = {}

    @property
    def launches(self) -> list[Launched]:
        """The launches of our kernels."""
        return [event for event in self.events if isinstance(event, Launched)]

    @property
    def others(self) -> list[str]:
        """The operators of torch that may launch kernels of their own."""
        return [event for event in self.events if isinstance(event, str)]

    def record_launch(self, code: Code, configuration: str, arguments: Sequence[Any]) -> None:
        """Record a launch."""
        if not torch_internals.calls_are_watched():
            self.refuse(f"{code.name} was launched where torch's operators are not seen")
        self.events.append(Launched(code, configuration, self.forms(arguments)))

    def record_operator(self, operator: Any, arguments: Sequence[Any]) -> None:
        """Record an operator of torch that may have launched kernels."""
        self.events.append(f"{operator}({', '.join(self.forms(arguments))})")

    def refuse(self, why: str) -> None:
        """Mark the record as incomplete, because of an action that it cannot represent."""
        self.unknown = self.unknown or why

    def describe(self, argument: Any, text: str) -> None:
        """Add a description to an argument's form. The argument is kept alive, so that its id stays unique."""
        self._described[id(argument)] = argument, text

    def forms(self, arguments: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments' forms, without addresses: equal forms and numbers mean equal work of a kernel."""
        first: dict[int, int] = {}
        return tuple(self._form(argument, place, first) for place, argument in enumerate(arguments))

    def _form(self, argument: Any, place: int, first: dict[int, int]) -> str:
        if id(argument) in self._described:
            return self._described[id(argument)][1]
        if isinstance(argument, torch.Tensor):
            address = argument.data_ptr()
            first_place = first.setdefault(address, place)
            also = f", as argument {first_place}" if first_place != place else ""
            return (
                f"{self._tensor_name(argument) or 'made'}: {argument.dtype}{list(argument.shape)}"
                f" strides {list(argument.stride())} at {address % ALIGNMENT}{also}"
            )
        if isinstance(argument, list | tuple):
            return f"[{', '.join(self._form(part, place, first) for part in argument)}]"
        if argument is None or isinstance(
            argument, bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
        ):
            return repr(argument)
        self.refuse(f"an argument is a {type(argument).__name__}")
        return type(argument).__name__


# The current record, or None. Autograd's threads write to it as well. Launches read the variable directly, because a
# function that returned it would take longer.
current: LaunchRecord | None = None


@contextlib.contextmanager
def recording(tensor_name: Callable[[torch.Tensor], str | None]) -> Iterator[LaunchRecord]:
    """Record all launches of this process, which makes one call at a time within it.

    Args:
        tensor_name: returns the name of a caller's tensor, or None for a tensor that the call makes.
    """
    global current
    before, current = current, LaunchRecord(tensor_name)
    try:
        yield current
    finally:
        current = before
