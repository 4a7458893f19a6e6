"""rms_norm in CUDA C++: rows that fit in registers are read once, longer rows twice."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors
from fourfold.backends.strides import Rows, as_rows

from .arguments import check_rms_norm
from .operators import register_rms_norm

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
MOST_THREADS = 512
# Threads of a block that walks down columns, and the blocks of a multiprocessor backward.
COLUMN_THREADS = 128
BLOCKS = 8

FORWARD, FORWARD_STRIDED, BACKWARD, PRODUCTS, COLUMNS, SUMS = (
    {
        dtype: CudaKernel(SOURCE, f"rms_norm_{name}".format(T=cpp, W=16 // dtype.itemsize))
        for dtype, cpp in CPP_TYPES.items()
    }
    for name in (
        "forward_kernel<{T}, {W}>",
        "forward_kernel<{T}, 1>",
        "backward_kernel<{T}>",
        "backward_products_kernel<{T}>",
        "backward_columns_kernel<{T}>",
        "sum_partials_kernel<{T}>",
    )
)
KERNELS = tuple(
    kernel for by in (FORWARD, FORWARD_STRIDED, BACKWARD, PRODUCTS, COLUMNS, SUMS) for kernel in by.values()
)


def threads_of_row(cols: int, each: int) -> tuple[int, int]:
    """Threads of a row, a multiple of a warp, each with so many columns of it if possible; and rows of a block."""
    threads = min(cdiv(cols, each * WARP) * WARP, MOST_THREADS)
    return threads, 4 if threads == WARP else 1


def in_vectors(cols: int, weight: torch.Tensor, rows: list[Rows]) -> bool:
    """Whether all rows, and weight, lie in whole vectors of 16 bytes."""
    size = weight.element_size()
    if any(row.column_stride != 1 for row in rows) or (cols > 1 and weight.stride(0) != 1):
        return False
    steps = [cols, *(stride for row in rows for stride in (row.outer_stride, row.inner_stride))]
    starts = [tensor.data_ptr() for tensor in (weight, *(row.tensor for row in rows))]
    return not any(start % 16 for start in starts) and not any(step * size % 16 for step in steps)


def launch_forward(output: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Write output and rstd. The rows must not be empty."""
    cols, num_rows = x.shape[-1], rstd.shape[0]
    inner, (rows,) = as_rows(x)
    vectors = in_vectors(cols, weight, [rows])
    threads, together = threads_of_row(cols, 4 * (16 // x.element_size() if vectors else 1))
    kernel = (FORWARD if vectors else FORWARD_STRIDED)[x.dtype]
    sizes = (num_rows, cols, inner, *rows[1:], weight.stride(0))
    kernel.launch(cdiv(num_rows, together), (threads, together), rows.tensor, weight, output, rstd, *sizes, eps)


def launch_backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    """Write the gradients that are needed. The rows must not be empty."""
    dtype, cols, num_rows = x.dtype, x.shape[-1], rstd.shape[0]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    inputs = (grad_rows.tensor, rows.tensor, weight, rstd)
    # As many vectors, each of 16 bytes, as the kernel holds.
    each = (2 if dtype.itemsize == 2 else 4) * (16 // dtype.itemsize)
    held = cols <= each * MOST_THREADS and in_vectors(cols, weight, [grad_rows, rows])
    threads, together = threads_of_row(cols, each if held else 4)
    most = multiprocessors(x.device) * max(MOST_THREADS * 2 // threads if held else BLOCKS, 1)
    column_blocks = cdiv(cols, COLUMN_THREADS)
    partials = min(num_rows, most) if held else min(cdiv(num_rows, 4), max(1, most // column_blocks))
    partial = None if grad_weight is None else rstd.new_empty((partials, cols))
    if held:
        strides = (*grad_rows[1:3], *rows[1:3])
        BACKWARD[dtype].launch(partials, threads, *inputs, grad_x, partial, num_rows, cols, inner, *strides)
    else:
        sizes = (num_rows, cols, inner, *grad_rows[1:], *rows[1:], weight.stride(0))
        products = None if grad_x is None else torch.empty_like(rstd)
        if products is not None:
            PRODUCTS[dtype].launch(cdiv(num_rows, together), (threads, together), *inputs, products, *sizes)
        COLUMNS[dtype].launch((column_blocks, partials), COLUMN_THREADS, *inputs, products, grad_x, partial, *sizes)
    if grad_weight is not None:
        SUMS[dtype].launch(cdiv(cols, WARP), (WARP, min(partials, 32)), partial, grad_weight, partials, cols)


rms_norm_operator = register_rms_norm("cuda", launch_forward, launch_backward)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: see `fourfold.impls.rms_norm.torch_eager.rms_norm`."""
    check_rms_norm(x, weight, eps)
    return rms_norm_operator(x, weight, eps)[0]
