"""What Triton launches share: the launch itself, the device, and the number of programs that fill it."""

import contextlib
import os
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

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

_Scalars = tuple[int | float | bool, ...]
# By what a launch is known again: what Triton made of the kernel, and the kernel's constants.
_compiled: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}
# By a kernel's id: the kernel, that its id may stay its own, and which of its scalars Triton compiles for.
_kernels: dict[int, tuple[Any, tuple[int, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], scalars: _Scalars, **options: Any
) -> None:
    """``kernel[grid](*tensors, *scalars, **options)`` on the tensors' device, for less of the host's time.

    Triton looks up what it has compiled in some 15 us a launch, more than a small loss takes on the device. Here a
    launch is known again by what Triton compiles for: the tensors' dtypes and alignment, which integers are 1 or
    multiples of 16, and the options. One with integers of 64 bits is left to Triton.

    Args:
        kernel: a function under `triton.jit`.
        grid: how many programs, along one to three axes.
        tensors: the kernel's first arguments.
        scalars: those that follow.
        options: the others, which are `tl.constexpr`, and Triton's own, as num_warps.
    """
    device = tensors[0].get_device()
    if device < 0 or INTERPRETED or min(scalars) < -(2**31) or max(scalars) >= 2**31:
        with on(tensors[0].device):
            kernel[grid](*tensors, *scalars, **options)
        return
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, scalars, **options)
        return
    number = id(kernel)
    if number not in _kernels:
        after = enumerate(kernel.params[len(tensors) :][: len(scalars)])
        _kernels[number] = kernel, tuple(i for i, parameter in after if not parameter.do_not_specialize)
    key = (
        number,
        device,
        *[tensor.dtype for tensor in tensors],
        *[tensor.data_ptr() % 16 == 0 for tensor in tensors],
        # 1, 1.0 and True are equal, and different types to Triton.
        *map(type, scalars),
        *[(scalars[i] == 1, scalars[i] % 16 == 0) for i in _kernels[number][1]],
        *options,
        *options.values(),
    )
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[(*grid, 1, 1)[:3]](*tensors, *scalars, *constants, stream=stream)
        return
    compiled = kernel[grid](*tensors, *scalars, **options)
    rest = kernel.params[len(tensors) + len(scalars) :]
    if all(parameter.is_constexpr and parameter.name in options for parameter in rest):
        _compiled[key] = compiled, tuple(options[parameter.name] for parameter in rest)


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
