"""vector_add in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.strides import walk
from fourfold.backends.triton import launch as triton_launch

from .arguments import check_vector_add
from .operators import VECTOR_ADD


@triton.jit
def vector_add_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    output_ptr,  # [n]
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask).to(COMPUTE)
    y = tl.load(y_ptr + at, mask=mask).to(COMPUTE)
    tl.store(output_ptr + at, (x + y).to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def vector_add_strided_kernel(
    x_ptr,  # [outer, middle, inner], strided
    y_ptr,  # [outer, middle, inner], strided
    output_ptr,  # [outer * middle * inner]
    n,
    middle,
    inner,
    x_outer_stride,
    x_middle_stride,
    x_inner_stride,
    y_outer_stride,
    y_middle_stride,
    y_inner_stride,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive elements of the output.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    row = at // inner
    column = (at - row * inner).to(tl.int64)
    plane = row // middle
    row = (row - plane * middle).to(tl.int64)
    plane = plane.to(tl.int64)
    x_at = plane * x_outer_stride + row * x_middle_stride + column * x_inner_stride
    y_at = plane * y_outer_stride + row * y_middle_stride + column * y_inner_stride
    x = tl.load(x_ptr + x_at, mask=mask).to(COMPUTE)
    y = tl.load(y_ptr + y_at, mask=mask).to(COMPUTE)
    tl.store(output_ptr + at, (x + y).to(output_ptr.dtype.element_ty), mask=mask)


def _forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(x)
    n = output.numel()
    if n == 0:
        return output
    flat = x.stride() == y.stride() == output.stride()
    # Four 16-byte loads a thread of each input fill the memory's pipeline; where there are strides, addresses take
    # registers.
    block = 8192 // x.element_size() if flat else 1024
    compute, index = triton_launch.COMPUTE[x.dtype], triton_launch.index_type(n + block)
    kernel: Any = vector_add_kernel
    sizes: tuple[int, ...] = (n,)
    if not flat:
        (x, y), (_, middle, inner), strides = walk(output, x, y)
        kernel, sizes = vector_add_strided_kernel, (n, middle, inner, *strides)
    grid = (cdiv(n, block),)
    triton_launch.launch(kernel, grid, (x, y, output), sizes, COMPUTE=compute, INDEX=index, BLOCK=block)
    return output


vector_add_operator = VECTOR_ADD.register("triton", _forward)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, elementwise: see `fourfold.impls.vector_add.torch_eager.vector_add`."""
    check_vector_add(x, y)
    return vector_add_operator(x, y)
