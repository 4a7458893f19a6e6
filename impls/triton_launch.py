"""What Triton launches share: the grid, the device, and the number of programs that fill it."""

import contextlib
import functools
import os
from contextlib import AbstractContextManager

import torch
import triton.language as tl

# What half types are computed in, and summed in between programs.
COMPUTE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; on the CPU 3, so that loops over tiles and reductions over programs run."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> AbstractContextManager:
    """Makes a tensor's device the current one, on which Triton launches; free of cost where it is already."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def index_type(rows: int) -> tl.dtype:
    """The integer type in which row numbers up to `rows` are counted; offsets in elements always take 64 bits."""
    return tl.int32 if rows < 2**31 else tl.int64


if INTERPRETED:
    from impls import triton_interpreter

    triton_interpreter.install()
