"""vector_add in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from impls import triton_launch
from impls.launch import cdiv
from impls.vector_add.arguments import check_vector_add
from impls.vector_add.layout import walk
from impls.vector_add.operators import define_vector_add

# Less than of contiguous tensors: addresses take registers.
STRIDED_BLOCK = 1024


class Plan(NamedTuple):
    """How many elements a program adds, and with how many warps."""

    block: int
    num_warps: int


def plan(itemsize: int) -> Plan:
    """Four 16-byte loads a thread of each input: enough bytes in flight to fill the memory's pipeline."""
    return Plan(block=8192 // itemsize, num_warps=4)


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


def launch(x: torch.Tensor, y: torch.Tensor, output: torch.Tensor, plan: Plan) -> None:
    """Add x and y into an output that `torch.empty_like` made of x."""
    n = output.numel()
    compute = triton_launch.COMPUTE[x.dtype]
    index = triton_launch.index_type(n + max(plan.block, STRIDED_BLOCK))
    if x.stride() == y.stride() == output.stride():
        triton_launch.launch(
            vector_add_kernel,
            (cdiv(n, plan.block),),
            (x, y, output),
            (n,),
            COMPUTE=compute,
            INDEX=index,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
        return
    x, y, (_, middle, inner), x_strides, y_strides = walk(x, y, output)
    triton_launch.launch(
        vector_add_strided_kernel,
        (cdiv(n, STRIDED_BLOCK),),
        (x, y, output),
        (n, middle, inner, *x_strides, *y_strides),
        COMPUTE=compute,
        INDEX=index,
        BLOCK=STRIDED_BLOCK,
    )


def _forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(x)
    if output.numel():
        launch(x, y, output, plan(x.element_size()))
    return output


vector_add_operator = define_vector_add("triton", _forward)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, element by element: see `impls.vector_add.torch_eager.vector_add`."""
    check_vector_add(x, y)
    return vector_add_operator(x, y)
