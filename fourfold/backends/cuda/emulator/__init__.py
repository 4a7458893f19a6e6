"""CUDA C++ on the CPU: run the unchanged kernels of a `.cu` file on a machine without a GPU.

The host's C++ compiler compiles the file against `device.h`. Each CUDA thread of a block runs as a fiber, so barriers,
warp exchanges and atomics are exact. A checked build (the default) checks every access. It raises a `KernelFault`
with the line, block and thread of an access that is out of bounds, racing, divergent or uninitialised. With
FOURFOLD_CUDA_ON_CPU=fast, kernels run unchecked and several times faster, and a faulty one can crash the process.
A launch that takes more than FOURFOLD_CUDA_ON_CPU_SECONDS (default 120) of processor time raises a `Deadlock`.

Supported are, of cooperative groups, a block and tiles of up to 32 threads; of CUB, the reductions over a block and a
warp; and the inline PTX for mbarriers, the copy engine (TMA) and wgmma, if a file contains no other. Unsupported: other
inline PTX, clusters, textures, blocks that wait for one another, and in checked builds recursive `__device__`
functions. Not detected: an access that hits another tensor of the launch by mistake, races on `__device__` variables,
overruns of local arrays by a pointer that moves, and reads of uninitialised global memory. Possible false alarm: a
write that fences and atomics order after reads of its place by several blocks.
"""

from fourfold.backends.cuda.emulator.build import unavailable_reason as unavailable_reason
from fourfold.backends.cuda.emulator.faults import Deadlock as Deadlock
from fourfold.backends.cuda.emulator.faults import DivergentBarrier as DivergentBarrier
from fourfold.backends.cuda.emulator.faults import DivergentWarp as DivergentWarp
from fourfold.backends.cuda.emulator.faults import FailedAssertion as FailedAssertion
from fourfold.backends.cuda.emulator.faults import KernelFault as KernelFault
from fourfold.backends.cuda.emulator.faults import Misaligned as Misaligned
from fourfold.backends.cuda.emulator.faults import OutOfBounds as OutOfBounds
from fourfold.backends.cuda.emulator.faults import Race as Race
from fourfold.backends.cuda.emulator.faults import UndefinedArithmetic as UndefinedArithmetic
from fourfold.backends.cuda.emulator.faults import UninitialisedShared as UninitialisedShared
from fourfold.backends.cuda.emulator.launcher import CpuKernel as CpuKernel
from fourfold.backends.cuda.emulator.launcher import mode as mode
from fourfold.backends.cuda.emulator.launcher import order as order
from fourfold.backends.cuda.emulator.launcher import schedule as schedule
