"""The exceptions that stand for what a kernel did wrong on the CPU."""

from __future__ import annotations

from impls.cuda_compile import CudaError

Index = tuple[int, int, int]


class KernelFault(CudaError):
    """A kernel did something undefined, and was stopped there.

    Attributes:
        kernel: its name.
        file, line: the place in the kernel's source; None where it is not known.
        block, thread: blockIdx and threadIdx of the thread that did it.
    """

    def __init__(self, kernel: str, file: str | None, line: int | None, block: Index, thread: Index, what: str) -> None:
        self.kernel, self.file, self.line, self.block, self.thread, self.what = kernel, file, line, block, thread, what
        place = f" ({file.rpartition('/')[2]}:{line})" if file else ""
        super().__init__(f"{kernel}{place}, block {_spelled(block)}, thread {_spelled(thread)}: {what}")

    def __reduce__(self) -> tuple[type[KernelFault], tuple[object, ...]]:
        return type(self), (self.kernel, self.file, self.line, self.block, self.thread, self.what)


class OutOfBounds(KernelFault):
    """An access outside every tensor and shared array of the launch, or a write through a pointer to const."""


class Race(KernelFault):
    """Two threads' accesses to one place, a write among them, that no barrier, fence or atomic orders."""


class DivergentBarrier(KernelFault):
    """Not all threads of a block reach the same __syncthreads."""


class DivergentWarp(KernelFault):
    """Lanes meet in a shuffle, vote, __syncwarp or wmma that does not suit them all."""


class UninitialisedShared(KernelFault):
    """A read of shared memory that nothing in the block has written."""


class Deadlock(KernelFault):
    """All threads wait for something that never comes, or the launch does not end within its time limit."""


class Misaligned(KernelFault):
    """An access at an address that is no multiple of what its type needs."""


class UndefinedArithmetic(KernelFault):
    """Signed overflow, division by zero, too large a shift, or a float that its integer type cannot hold."""


class FailedAssertion(KernelFault):
    """An assert in the kernel does not hold, or __trap() was called."""


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


def _spelled(index: Index) -> str:
    return "({},{},{})".format(*index)
