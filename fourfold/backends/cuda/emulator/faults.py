"""The exceptions for the faults of a kernel on the CPU."""

from __future__ import annotations

from fourfold.backends.cuda.compile import CudaError
from fourfold.operations.refusals import Fault

Index = tuple[int, int, int]


class KernelFault(CudaError, Fault):
    """A kernel did something undefined, and the launch was stopped at that point.

    Attributes:
        kernel: its name.
        file, line: the place in the kernel's source, or None if it is unknown.
        block, thread: blockIdx and threadIdx of the faulty thread.
    """

    def __init__(self, kernel: str, file: str | None, line: int | None, block: Index, thread: Index, what: str) -> None:
        self.kernel, self.file, self.line, self.block, self.thread, self.what = kernel, file, line, block, thread, what
        place = f" ({file.rpartition('/')[2]}:{line})" if file else ""
        super().__init__(f"{kernel}{place}, block {_format_index(block)}, thread {_format_index(thread)}: {what}")

    def __reduce__(self) -> tuple[type[KernelFault], tuple[object, ...]]:
        return type(self), (self.kernel, self.file, self.line, self.block, self.thread, self.what)


class OutOfBounds(KernelFault):
    """An access outside every tensor and shared array of the launch, or a write through a pointer to const."""


class Race(KernelFault):
    """Two threads access one place, at least one of them writes, and no barrier, fence or atomic orders them."""


class DivergentBarrier(KernelFault):
    """The threads of a block do not all reach the same __syncthreads."""


class DivergentWarp(KernelFault):
    """Lanes meet in a shuffle, vote, __syncwarp or wmma with masks or operations that do not fit together."""


class UninitialisedShared(KernelFault):
    """A read of shared memory that no thread of the block has written."""


class Deadlock(KernelFault):
    """All threads wait for an event that never comes, or the launch exceeds its time limit."""


class Misaligned(KernelFault):
    """An access at an address that is not a multiple of the alignment of its type."""


class UndefinedArithmetic(KernelFault):
    """Signed overflow, division by zero, too large a shift, or a float outside the range of its target integer type."""


class FailedAssertion(KernelFault):
    """An assert in the kernel fails, or the kernel calls __trap()."""


# In the order of FaultKind in runtime.h, from 1.
FAULTS: tuple[type[KernelFault], ...] = (
    OutOfBounds,
    Race,
    DivergentBarrier,
    DivergentWarp,
    UninitialisedShared,
    Deadlock,
    Misaligned,
    UndefinedArithmetic,
    FailedAssertion,
)


def _format_index(index: Index) -> str:
    return "({},{},{})".format(*index)
