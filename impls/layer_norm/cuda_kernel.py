"""layer_norm in CUDA C++: rows that fit in registers or shared memory are read once, longer or strided rows twice."""

from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import available_shared_memory, multiprocessors
from fourfold.backends.strides import Rows, as_rows

from ..staged_rows import staging
from .operators import Needs, register_layer_norm, statistics_dtype

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
MOST_THREADS = 512
# Threads of a block of rows that share warps.
TOGETHER = 128
# Shared memory of a warp by which its lanes exchange vectors that are shifted into place.
EXCHANGED_BYTES = 33 * 16
# Columns of a row that is too short for its vectors to be shifted into place backward.
SINGLES_BACKWARD = 1024
# The most vectors of a row in shared memory that a thread computes, by the bytes of a number. They are limited by the
# registers for weight, bias and their sums. Forward, rows of half types are faster from a cache.
STAGED, STAGED_BACKWARD = {4: 8, 8: 8}, {2: 2, 4: 4, 8: 4}
# The most bytes of a row that is faster in registers. On the CPU rows of more than a page are staged, too.
MOST_BYTES, MOST_BYTES_BACKWARD = {"cuda": 65536, "cpu": 4096}, {"cuda": 32768, "cpu": 4096}
# By dtype and kernel. Some variants exist for float32 only.
KERNEL = {
    (dtype, kernel): CudaKernel(SOURCE, f"layer_norm_{kernel.format(T=name, W=16 // dtype.itemsize)}")
    for dtype, name in CPP_TYPES.items()
    for kernel in (
        "forward_kernel<{T}, {W}, 4>",
        "forward_kernel<{T}, {W}, 8>",
        "forward_kernel<{T}, 1, 8>",
        "forward_kernel<{T}, 1, 4, true>",
        "forward_kernel<{T}, {W}, 4, false, true>",
        "forward_kernel<{T}, {W}, 8, false, true>",
        "backward_kernel<{T}, {W}, 2, false>",
        *(["backward_kernel<{T}, {W}, 4, false>"] if dtype == torch.float32 else []),
        "backward_kernel<{T}, {W}, 4, true>",
        "backward_kernel<{T}, 1, 8, false>",
        "backward_kernel<{T}, {W}, 3, false, true>",
        *(["backward_kernel<{T}, {W}, 4, false, true>"] if dtype == torch.float32 else []),
        *([f"forward_staged_kernel<{{T}}, {STAGED[dtype.itemsize]}>"] if dtype.itemsize in STAGED else []),
        f"backward_staged_kernel<{{T}}, {STAGED_BACKWARD[dtype.itemsize]}>",
        "backward_means_kernel<{T}, {W}>",
        "backward_means_kernel<{T}, 1>",
        "backward_columns_kernel<{T}, {W}>",
        "backward_columns_kernel<{T}, 1>",
        "sum_partials_kernel<{T}>",
    )
}
KERNELS = tuple(KERNEL.values())


class Plan(NamedTuple):
    """How the blocks of a launch divide the rows.

    Attributes:
        vectors: vectors of a row that a thread holds, or 0 if backward reads a row twice.
        threads: threads per row, a multiple of a warp or, forward, a power of two of its lanes.
        rows: rows per block.
        blocks: blocks per multiprocessor, backward.
        shared: whether backward keeps the sums of weight's and bias's gradients in shared memory.
    """

    vectors: int
    threads: int
    rows: int = 1
    blocks: int = 0
    shared: bool = False


class Access(NamedTuple):
    """How a thread accesses the columns of its inputs.

    Attributes:
        width: elements per vector: 16 bytes' worth if neighbouring columns are adjacent in memory, else 1.
        strided: whether they are not.
        shifted: whether a row may begin or end between two multiples of 16 bytes, so that vectors are shifted into
            place.
    """

    width: int
    strided: bool = False
    shifted: bool = False

    @property
    def whole(self) -> bool:
        """Whether rows lie in whole vectors."""
        return self.width > 1 and not self.strided and not self.shifted


def _threads(vectors: int, each: int) -> int:
    return min(-(-vectors // (each * WARP)) * WARP, MOST_THREADS)


def forward_plan(cols: int, access: Access) -> Plan:
    """Choose how forward walks through rows of `cols` columns, at least 1."""
    vectors = -(-cols // access.width)
    # Few bytes per thread let more blocks share a multiprocessor. But in long rows, many warps wait for one another.
    few = access.strided or (access.width > 1 and vectors <= 8 * WARP)
    each = 4 if few else 8
    lanes = 1 << (-(-vectors // each) - 1).bit_length()
    if lanes < WARP and not access.shifted:
        return Plan(each, lanes, rows=TOGETHER // lanes)
    threads = _threads(vectors, each)
    return Plan(each, threads, rows=4 if threads == WARP else 1)


def backward_plan(cols: int, dtype: torch.dtype, access: Access, shared_memory: int) -> Plan:
    """Choose how backward walks through rows of `cols` columns, at least 1."""
    vectors = -(-cols // access.width)
    # As many blocks as there are registers for. A block that had to wait for another's end would come too late.
    if access.shifted:
        each = 4 if dtype == torch.float32 and vectors > 3 * MOST_THREADS else 3
        threads = _threads(vectors, each)
        return Plan(each, threads, blocks=MOST_THREADS // threads)
    if access.width == 1:
        threads = _threads(vectors, 8)
        if not access.strided and vectors <= 8 * threads:
            return Plan(8, threads, blocks=min(MOST_THREADS // threads, 16))
    elif vectors <= 2 * (512 if dtype.itemsize == 2 else 256):
        threads = _threads(vectors, 2)
        return Plan(2, threads, blocks=min((512 if dtype.itemsize == 2 else 768) // threads, 16))
    elif dtype == torch.float32 and vectors <= 4 * MOST_THREADS:
        threads = _threads(vectors, 4)
        return Plan(4, threads, blocks=MOST_THREADS // threads)
    else:
        threads = _threads(vectors, 4)
        needed = sum_bytes(4, threads, dtype)
        if vectors <= 4 * threads and needed <= shared_memory:
            return Plan(4, threads, blocks=min(MOST_THREADS // threads, shared_memory // needed), shared=True)
    threads = _threads(vectors, 4)
    return Plan(0, threads, rows=4 if threads == WARP else 1, blocks=8)


def sum_bytes(vectors: int, threads: int, dtype: torch.dtype) -> int:
    """Return bytes of shared memory for two sums of each column."""
    return 2 * vectors * threads * (16 // dtype.itemsize) * statistics_dtype(dtype).itemsize


def backward_access(cols: int, dtype: torch.dtype, access: Access) -> Access:
    """Return how backward accesses the columns of rows that forward accesses like this.

    Vectors are shifted into place where rows are long enough for it to pay, and a block holds a row of them.
    """
    most = (4 if dtype == torch.float32 else 3) * MOST_THREADS * access.width
    shifts = SINGLES_BACKWARD < cols <= most
    return access if not access.shifted or shifts else Access(1)


def access_to(cols: int, parameters: tuple[torch.Tensor, ...], rows: list[Rows]) -> Access:
    """Choose the widest access that the layout of all inputs allows."""
    if any(row.column_stride != 1 for row in rows) or (cols > 1 and any(p.stride(0) != 1 for p in parameters)):
        return Access(1, strided=True)
    width = 16 // parameters[0].element_size()
    starts = [tensor.data_ptr() for tensor in (*parameters, *(row.tensor for row in rows))]
    steps = [cols, *(stride for row in rows for stride in (row.outer_stride, row.inner_stride))]
    shifted = any(s % 16 for s in starts) or any(s % width for s in steps)
    # The number of a vector that is shifted is an int.
    return Access(1) if shifted and cols >= 2**31 else Access(width, shifted=shifted)


def launch_forward(
    output: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    plan: Plan | None = None,
) -> None:
    """Write output, mean and rstd. The rows must not be empty."""
    cols, num_rows = x.shape[-1], mean.shape[0]
    inner, (rows,) = as_rows(x)
    access = access_to(cols, (weight, bias), [rows])
    each = STAGED.get(x.element_size())
    if plan is None and each and access.whole and cols * x.element_size() > MOST_BYTES[x.device.type]:
        staged = staging(cols, x.element_size(), 1, x.device, each)
        if staged is not None:
            kernel = KERNEL[x.dtype, f"forward_staged_kernel<{{T}}, {each}>"]
            arguments = (rows.tensor, weight, bias, output, mean, rstd, num_rows, cols, inner, *rows[1:3], eps)
            staged.launch(kernel, staged.groups(kernel, x.device, num_rows), arguments)
            return
    plan = plan or forward_plan(cols, access)
    ending = ", false, true" if access.shifted else ", true" if access.strided else ""
    kind = f"{'{W}' if access.width > 1 else 1}, {plan.vectors}{ending}"
    KERNEL[x.dtype, f"forward_kernel<{{T}}, {kind}>"].launch(
        -(-num_rows // plan.rows),
        (plan.threads, plan.rows),
        rows.tensor,
        weight,
        bias,
        output,
        mean,
        rstd,
        num_rows,
        cols,
        inner,
        *rows[1:],
        weight.stride(0),
        bias.stride(0),
        eps,
        shared_bytes=plan.threads // WARP * plan.rows * EXCHANGED_BYTES if access.shifted else 0,
    )


def launch_backward(
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    needs: Needs,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    """Write the gradients that are needed. The rows must not be empty."""
    dtype, cols, num_rows = x.dtype, x.shape[-1], mean.shape[0]
    inner, (grad_rows, rows) = as_rows(grad_output, x)
    access = backward_access(cols, dtype, access_to(cols, (weight,), [grad_rows, rows]))
    kind = "{W}" if access.width > 1 else "1"
    inputs = (grad_rows.tensor, rows.tensor, weight, mean, rstd)
    staged = None
    if plan is None and access.whole and cols * dtype.itemsize > MOST_BYTES_BACKWARD[x.device.type]:
        each = STAGED_BACKWARD[dtype.itemsize]
        staged = staging(cols, dtype.itemsize, 2, x.device, each, sums=True)
        kernel = KERNEL[dtype, f"backward_staged_kernel<{{T}}, {each}>"]
    plan = plan or backward_plan(cols, dtype, access, available_shared_memory(x.device))
    most = plan.blocks * multiprocessors(x.device)
    if staged is not None:
        partials = staged.groups(kernel, x.device, num_rows)
    elif plan.vectors:
        partials = min(num_rows, most)
    else:
        threads = min(plan.threads, 128)
        column_blocks = -(-cols // (threads * access.width))
        partials = min(-(-num_rows // 4), max(1, most // column_blocks))
    partial = mean.new_empty((2, partials, cols)) if needs.parameters else None
    steps = (num_rows, cols, inner, *grad_rows[1:3], *rows[1:3])
    if staged is not None:
        staged.launch(kernel, partials, (*inputs, grad_x if needs.x else None, partial, *steps))
    elif plan.vectors:
        shared_bytes = sum_bytes(plan.vectors, plan.threads, dtype) if plan.shared else 0
        if access.shifted:
            shared_bytes = plan.threads // WARP * EXCHANGED_BYTES
        ending = f"{str(plan.shared).lower()}{', true' if access.shifted else ''}"
        KERNEL[dtype, f"backward_kernel<{{T}}, {kind}, {plan.vectors}, {ending}>"].launch(
            partials,
            plan.threads,
            *inputs,
            grad_x if needs.x else None,
            partial,
            *steps,
            shared_bytes=shared_bytes,
        )
    else:
        means = mean.new_empty((2, num_rows)) if needs.x else None
        sizes = (num_rows, cols, inner, *grad_rows[1:], *rows[1:], weight.stride(0))
        if needs.x:
            KERNEL[dtype, f"backward_means_kernel<{{T}}, {kind}>"].launch(
                -(-num_rows // plan.rows), (plan.threads, plan.rows), *inputs, means, *sizes
            )
        KERNEL[dtype, f"backward_columns_kernel<{{T}}, {kind}>"].launch(
            (column_blocks, partials), threads, *inputs, means, grad_x if needs.x else None, partial, *sizes
        )
    if needs.parameters:
        KERNEL[dtype, "sum_partials_kernel<{T}>"].launch(
            -(-cols // WARP),
            (WARP, min(partials, 32)),
            partial,
            grad_weight if needs.weight else None,
            grad_bias if needs.bias else None,
            partials,
            cols,
        )


layer_norm = register_layer_norm("cuda", launch_forward, launch_backward)
