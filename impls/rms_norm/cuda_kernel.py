"""rms_norm in CUDA C++: rows that fit in registers are read once, longer rows twice."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors, shared_memory
from fourfold.backends.strides import Rows, as_rows

from .arguments import check_rms_norm
from .operators import register_rms_norm

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
MOST_THREADS = 512
# Threads of a block of several rows, of one that walks down columns, and blocks of a multiprocessor for these.
TOGETHER = 256
COLUMN_THREADS = 128
BLOCKS = 8
# Vectors of 16 bytes of a row that a thread holds backward, by the bytes of a number: so many as leave registers to
# compute with, and with the sums of its columns in shared memory.
HELD, HELD_LONG = {2: 2, 4: 4, 8: 4}, {2: 4, 4: 8, 8: 8}
# Threads of a multiprocessor backward: with one row a block, and with several, which must all have registers at once.
OF_ONE, OF_SEVERAL = 1024, {2: 768, 4: 512, 8: 512}

FORWARD, FORWARD_STRIDED, ONE, SEVERAL, LONG, PRODUCTS, COLUMNS, SUMS = (
    {
        dtype: CudaKernel(
            SOURCE,
            f"rms_norm_{name}".format(
                T=cpp, W=16 // dtype.itemsize, H=HELD[dtype.itemsize], L=HELD_LONG[dtype.itemsize]
            ),
        )
        for dtype, cpp in CPP_TYPES.items()
    }
    for name in (
        "forward_kernel<{T}, {W}>",
        "forward_kernel<{T}, 1>",
        "backward_kernel<{T}, {H}, ONE>",
        "backward_kernel<{T}, {H}, SEVERAL>",
        "backward_kernel<{T}, {L}, LONG>",
        "backward_products_kernel<{T}>",
        "backward_columns_kernel<{T}>",
        "sum_partials_kernel<{T}>",
    )
)
KERNELS = tuple(
    kernel for by in (FORWARD, FORWARD_STRIDED, ONE, SEVERAL, LONG, PRODUCTS, COLUMNS, SUMS) for kernel in by.values()
)


def threads_of_row(cols: int, each: int) -> tuple[int, int]:
    """Threads of a row, each with so many columns of it if possible, and rows of a block.

    Rows of at most a warp share a block of TOGETHER threads: each has a power of two of lanes.
    """
    threads = cdiv(cols, each)
    if threads <= WARP:
        threads = 1 << (threads - 1).bit_length()
        return threads, TOGETHER // threads
    return min(cdiv(threads, WARP) * WARP, MOST_THREADS), 1


def vectors_held(cols: int, size: int, bytes_of_sum: int, most_shared: int) -> tuple[int, bool]:
    """Vectors of a row that a thread holds backward, 0 if it is too long; and whether its sums lie in shared memory.

    Args:
        cols: of a row.
        size: of a number, in bytes.
        bytes_of_sum: of a number that is summed up.
        most_shared: bytes of shared memory that a block may have.
    """
    for vectors, in_shared in ((HELD[size], False), (HELD_LONG[size], True)):
        columns = vectors * (16 // size) * MOST_THREADS
        if cols <= columns and (not in_shared or columns * bytes_of_sum <= most_shared):
            return vectors, in_shared
    return 0, False


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
    bytes_of_sum = rstd.element_size()
    vectors, in_shared = 0, False
    if in_vectors(cols, weight, [grad_rows, rows]):
        vectors, in_shared = vectors_held(cols, dtype.itemsize, bytes_of_sum, shared_memory(x.device))
    each = vectors * (16 // dtype.itemsize) or 4
    threads, together = threads_of_row(cols, each)
    if vectors:
        kernel, resident = (LONG, MOST_THREADS) if in_shared else (ONE, OF_ONE)
        if together > 1:
            kernel, resident = SEVERAL, OF_SEVERAL[dtype.itemsize]
        blocks = max(resident // (threads * together), 1)
        partials = min(cdiv(num_rows, together), multiprocessors(x.device) * blocks)
    else:
        column_blocks = cdiv(cols, COLUMN_THREADS)
        partials = min(cdiv(num_rows, 4), max(1, multiprocessors(x.device) * BLOCKS // column_blocks))
    partial = None if grad_weight is None else rstd.new_empty((partials, cols))
    if vectors:
        kernel[dtype].launch(
            partials,
            (threads, together),
            *inputs,
            grad_x,
            partial,
            *(num_rows, cols, inner, *grad_rows[1:3], *rows[1:3]),
            shared_bytes=each * threads * bytes_of_sum if in_shared else 0,
        )
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
