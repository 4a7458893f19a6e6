"""CUDA C++ on the CPU: runs a `.cu` file's kernels, unchanged, on a machine that has no GPU.

The host's C++ compiler compiles the file against `device.h`, and each CUDA thread of a block runs as a fiber, so that
barriers, warp exchanges and atomics are exact. A checked build (the default) looks at every access and raises a
`KernelFault` that names line, block and thread for whatever is out of bounds, racing, divergent or uninitialised. With
FOURFOLD_CUDA_ON_CPU=fast kernels run unchecked, several times faster, and a wrong one can end the process.

A launch that has not ended after FOURFOLD_CUDA_ON_CPU_SECONDS (120) of processor time is a `Deadlock`.

What it cannot do: inline PTX, TMA, wgmma, clusters, cooperative groups, textures, blocks that wait for one another,
and, checked, recursive `__device__` functions. What it cannot see: an access that goes astray into another tensor of
the launch, races on `__device__` variables, overruns of local arrays through a pointer, and reads of global memory that
nothing has written. What it may wrongly report: a write that is ordered, by fences and atomics, after reads of the same
place by several blocks.
"""

from impls.cuda_on_cpu.build import unavailable_reason
from impls.cuda_on_cpu.faults import (
    Deadlock,
    DivergentBarrier,
    DivergentWarp,
    FailedAssertion,
    KernelFault,
    Misaligned,
    OutOfBounds,
    Race,
    UndefinedArithmetic,
    UninitialisedShared,
)
from impls.cuda_on_cpu.launcher import CpuKernel, mode, schedule

__all__ = [
    "CpuKernel",
    "Deadlock",
    "DivergentBarrier",
    "DivergentWarp",
    "FailedAssertion",
    "KernelFault",
    "Misaligned",
    "OutOfBounds",
    "Race",
    "UndefinedArithmetic",
    "UninitialisedShared",
    "mode",
    "schedule",
    "unavailable_reason",
]
