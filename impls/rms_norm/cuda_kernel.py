"""rms_norm in CUDA C++: rows that fit in registers or in shared memory are read once, longer rows twice."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors
from fourfold.backends.strides import Rows, as_rows

from ..staged_rows import staging
from .operators import register_rms_norm

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
MOST_THREADS = 512
# Shared memory of a warp by which its lanes exchange vectors that are shifted into place.
EXCHANGED_BYTES = 33 * 16
# Threads of a block of several rows, of one that walks down columns, and blocks of a multiprocessor for these.
TOGETHER = 256
COLUMN_THREADS = 128
BLOCKS = 8
# Vectors of a row that a thread holds forward, by whether they are shifted into place: the same as in cuda_kernel.cu.
KEPT = {False: 4, True: 8}
# Vectors of 16 bytes of a row that a thread holds backward, by the bytes of a number: so many as leave registers to
# compute with.
HELD = {2: 2, 4: 4, 8: 4}
# Vectors of a row in shared memory that a thread computes, forward and backward.
STAGED, STAGED_BACKWARD = 8, 4
# The least bytes of such a row: forward, shorter rows are faster in registers. On the CPU shorter rows are staged.
STAGED_BYTES, STAGED_BYTES_BACKWARD = {"cuda": 65536, "cpu": 4096}, 4096
# The same of a row whose vectors are shifted into place: a warp shifts and exchanges for three as it does for two.
HELD_SHIFTED = {2: 3, 4: 4, 8: 4}
# Columns that it holds of a row that does not lie in whole vectors.
HELD_SINGLE = 8
# Threads of such a row. Longer rows are read in vectors, which are shifted into place.
SINGLE_THREADS = 128
# Threads of a multiprocessor backward, which must all have registers at once: the last blocks would come too late, and
# each block adds a row of partial sums.
RESIDENT = 512

ByDType = Mapping[torch.dtype, CudaKernel]


class Kernels(NamedTuple):
    """The kernels of an operation, each by dtype: for rows in whole vectors by default.

    Attributes:
        forward: for rows of any length.
        forward_shifted: of rows that begin between two vectors.
        forward_strided: of all others.
        forward_staged: of rows that the copy engine brings to shared memory.
        one: backward, of rows that a block holds one at a time.
        several: of short rows.
        one_shifted: of rows that begin between two vectors.
        staged: of rows that the copy engine brings to shared memory.
        one_single: of rows that are held in single columns.
        several_single: of short ones of these.
        products: of all other rows, their means of grad_normal * normal.
        columns: of these rows, the gradients.
        sums: of partial sums.
    """

    forward: ByDType
    forward_shifted: ByDType
    forward_strided: ByDType
    forward_staged: ByDType
    one: ByDType
    several: ByDType
    staged: ByDType
    one_shifted: ByDType
    one_single: ByDType
    several_single: ByDType
    products: ByDType
    columns: ByDType
    sums: ByDType

    @property
    def all(self) -> tuple[CudaKernel, ...]:
        """The configurations of both directions."""
        return tuple(kernel for by in self for kernel in by.values())


def instances(name: str) -> ByDType:
    """Return a template's instances by dtype: {T} is the element type; {W}, {H}, {M}, {S} are a thread's shares."""
    return {
        dtype: CudaKernel(
            SOURCE,
            name.format(
                T=cpp,
                W=16 // dtype.itemsize,
                H=HELD[dtype.itemsize],
                M=HELD_SHIFTED[dtype.itemsize],
                S=HELD_SINGLE,
            ),
        )
        for dtype, cpp in CPP_TYPES.items()
    }


def kernels_of(forward: str, added: bool) -> Kernels:
    """Return the kernels of an operation.

    Args:
        forward: the name of the template that normalizes.
        added: whether a gradient is added to that through the norm.
    """
    aligned, last = (", false, true", ", true") if added else ("", "")
    return Kernels(
        forward=instances(f"{forward}<{{T}}, {{W}}>"),
        forward_shifted=instances(f"{forward}<{{T}}, {{W}}, true>"),
        forward_strided=instances(f"{forward}<{{T}}, 1>"),
        forward_staged=instances(f"{forward.replace('_kernel', '_staged_kernel')}<{{T}}, {STAGED}>"),
        one=instances(f"rms_norm_backward_kernel<{{T}}, {{W}}, {{H}}, ONE{aligned}>"),
        several=instances(f"rms_norm_backward_kernel<{{T}}, {{W}}, {{H}}, SEVERAL{aligned}>"),
        staged=instances(f"rms_norm_backward_staged_kernel<{{T}}, {STAGED_BACKWARD}{last}>"),
        one_shifted=instances(f"rms_norm_backward_kernel<{{T}}, {{W}}, {{M}}, ONE, true{last}>"),
        one_single=instances(f"rms_norm_backward_kernel<{{T}}, 1, {{S}}, ONE{aligned}>"),
        several_single=instances(f"rms_norm_backward_kernel<{{T}}, 1, {{S}}, SEVERAL{aligned}>"),
        products=instances("rms_norm_backward_products_kernel<{T}>"),
        columns=instances(f"rms_norm_backward_columns_kernel<{{T}}{last}>"),
        sums=instances("rms_norm_sum_partials_kernel<{T}>"),
    )


OWN = kernels_of("rms_norm_forward_kernel", added=False)
KERNELS = OWN.all


def threads_of_row(cols: int, each: int) -> tuple[int, int]:
    """Return the threads of a row, each with `each` columns of it if possible, and the rows of a block.

    Rows of at most a warp share a block of TOGETHER threads: each has a power of two of lanes.
    """
    threads = cdiv(cols, each)
    if threads <= WARP:
        threads = 1 << (threads - 1).bit_length()
        return threads, TOGETHER // threads
    return min(cdiv(threads, WARP) * WARP, MOST_THREADS), 1


def adjacent(cols: int, weight: torch.Tensor, rows: list[Rows]) -> bool:
    """Return whether the columns of each row, and weight's numbers, are adjacent in memory."""
    return all(row.column_stride == 1 for row in rows) and (cols <= 1 or weight.stride(0) == 1)


def has_whole_vectors(cols: int, weight: torch.Tensor, rows: list[Rows]) -> bool:
    """Return whether all rows, and weight, lie in whole vectors of 16 bytes."""
    if not adjacent(cols, weight, rows):
        return False
    size = weight.element_size()
    steps = [cols, *(stride for row in rows for stride in (row.outer_stride, row.inner_stride))]
    starts = [tensor.data_ptr() for tensor in (weight, *(row.tensor for row in rows))]
    return not any(start % 16 for start in starts) and not any(step * size % 16 for step in steps)


def backward_kernel(
    kernels: Kernels, cols: int, dtype: torch.dtype, weight: torch.Tensor, rows: list[Rows]
) -> tuple[ByDType | None, int]:
    """Return the kernel that holds rows in registers, with a thread's columns of a row; None if there is none.

    Args:
        kernels: of the operation.
        cols: of a row.
        dtype: of the numbers.
        weight: the weight.
        rows: of the cotangent, of x, and of a gradient that is added.
    """
    size = dtype.itemsize
    width = 16 // size
    if has_whole_vectors(cols, weight, rows):
        if cols <= HELD[size] * width * MOST_THREADS:
            return kernels.one, HELD[size] * width
    elif adjacent(cols, weight, rows):
        if cols <= HELD_SINGLE * SINGLE_THREADS:
            return kernels.one_single, HELD_SINGLE
        if cols <= HELD_SHIFTED[size] * width * MOST_THREADS:
            return kernels.one_shifted, HELD_SHIFTED[size] * width
    return None, 0


def launch_forward(
    output: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    kernels: Kernels = OWN,
) -> None:
    """Write output and rstd. The rows must not be empty.

    Where there is a residual, it is added to x, the sums are written, and `kernels` are those that do so.
    """
    cols, num_rows = x.shape[-1], rstd.shape[0]
    inner, given = as_rows(x) if residual is None else as_rows(x, residual)
    inputs = (given[0].tensor, weight, output, rstd, *(() if residual is None else (given[1].tensor, sums)))
    width = 16 // x.element_size()
    vectors = has_whole_vectors(cols, weight, given)
    # Vectors are shifted into place by whole warps, and the number of one is an int.
    shifted = not vectors and adjacent(cols, weight, given) and WARP * width <= cols < 2**31
    if vectors and cols * x.element_size() >= STAGED_BYTES[x.device.type]:
        staged = staging(cols, x.element_size(), len(given), x.device, STAGED)
        if staged is not None:
            kernel, steps = kernels.forward_staged[x.dtype], (step for rows in given for step in rows[1:3])
            groups = staged.groups(kernel, x.device, num_rows)
            staged.launch(kernel, groups, (*inputs, num_rows, cols, inner, *steps, eps))
            return
    threads, together = threads_of_row(cols, KEPT[shifted] * (width if vectors or shifted else 1))
    shared = 0
    if shifted:
        threads = max(threads, WARP)
        together = TOGETHER // WARP if threads == WARP else 1
        shared = threads * together // WARP * EXCHANGED_BYTES
    kernel = (kernels.forward if vectors else kernels.forward_shifted if shifted else kernels.forward_strided)[x.dtype]
    sizes = (num_rows, cols, inner, *(stride for rows in given for stride in rows[1:]), weight.stride(0))
    kernel.launch(cdiv(num_rows, together), (threads, together), *inputs, *sizes, eps, shared_bytes=shared)


def launch_backward(
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    added: torch.Tensor | None = None,
    kernels: Kernels = OWN,
) -> None:
    """Write the gradients that are needed. The rows must not be empty.

    Where `added` is given, contiguous, it is added to the gradient of x, and `kernels` are those that do so.
    """
    dtype, cols, num_rows = x.dtype, x.shape[-1], rstd.shape[0]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    inputs = (grad_rows.tensor, rows.tensor, weight, rstd)
    walked = [grad_rows, rows] if added is None else [grad_rows, rows, Rows(added, 0, cols, 1)]
    staged = None
    if has_whole_vectors(cols, weight, walked) and cols * x.element_size() >= STAGED_BYTES_BACKWARD:
        staged = staging(cols, x.element_size(), len(walked), x.device, STAGED_BACKWARD, sums=True)
    kernel, each = backward_kernel(kernels, cols, dtype, weight, walked)
    shared, together = 0, 1
    if staged is not None:
        partials = staged.groups(kernels.staged[dtype], x.device, num_rows)
    elif kernel is None:
        threads, together = threads_of_row(cols, 4)
        column_blocks = cdiv(cols, COLUMN_THREADS)
        partials = min(cdiv(num_rows, 4), max(1, multiprocessors(x.device) * BLOCKS // column_blocks))
    else:
        if kernel is kernels.one_shifted:
            threads = cdiv(cols, each * WARP) * WARP
            shared = threads // WARP * EXCHANGED_BYTES
        else:
            threads, together = threads_of_row(cols, each)
        if together > 1:
            kernel = kernels.several_single if kernel is kernels.one_single else kernels.several
        blocks = max(RESIDENT // (threads * together), 1)
        partials = min(cdiv(num_rows, together), multiprocessors(x.device) * blocks)
    partial = None if grad_weight is None else rstd.new_empty((partials, cols))
    rest = (grad_x, partial, num_rows, cols, inner, *grad_rows[1:3], *rows[1:3], added)
    if staged is not None:
        staged.launch(kernels.staged[dtype], partials, (*inputs, *rest))
    elif kernel is not None:
        kernel[dtype].launch(partials, (threads, together), *inputs, *rest, shared_bytes=shared)
    else:
        sizes = (num_rows, cols, inner, *grad_rows[1:], *rows[1:], weight.stride(0))
        products = None if grad_x is None else torch.empty_like(rstd)
        if products is not None:
            kernels.products[dtype].launch(cdiv(num_rows, together), (threads, together), *inputs, products, *sizes)
        grid = (column_blocks, partials)
        kernels.columns[dtype].launch(grid, COLUMN_THREADS, *inputs, products, grad_x, partial, *sizes, added)
    if grad_weight is not None:
        kernels.sums[dtype].launch(cdiv(cols, WARP), (WARP, min(partials, 32)), partial, grad_weight, partials, cols)


rms_norm = register_rms_norm("cuda", launch_forward, launch_backward)
