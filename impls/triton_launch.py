"""What Triton launches share: the grid, the device, and the number of programs that fill it."""

import contextlib
import os
from contextlib import AbstractContextManager

import torch
import triton.language as tl

from impls.launch import multiprocessors as multiprocessors

# What half types are computed in, and summed in between programs.
COMPUTE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
# The same in Triton's types.
COMPUTE = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
