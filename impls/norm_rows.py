"""Norms of rows in CUDA C++, with norm_rows.cuh: rms_norm and layer_norm, also of a sum.

Rows that fit in the registers of a block, or of the blocks of a cluster, or in shared memory are read once, longer or
strided rows twice.
"""

import enum
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import available_shared_memory, cdiv, has_clusters, multiprocessors
from fourfold.backends.strides import Rows, as_rows

from .staged_rows import CLUSTERS, Staging, staging

WARP = 32
MOST_THREADS = 512
# Threads of a block of several rows, forward and backward: the latter the same as in norm_rows.cuh.
TOGETHER, TOGETHER_BACKWARD = 128, 256
# Threads of a block that walks down columns, and blocks of a multiprocessor for these.
COLUMN_THREADS, BLOCKS = 128, 8
# Backward, further blocks of the same launch sum the columns of so few rows, or of twice as many narrow ones: SUMMED
# columns a block, as in norm_rows.cuh. On the CPU fewer rows are few, so that both ways run.
FEW_ROWS, NARROW, FEW_ROWS_ON_CPU, SUMMED = 64, 256, 8, 8
# Backward, the most vectors of a row in shared memory that a thread computes, by the bytes of a number, without a mean
# and with one. They are limited by the registers for weight and the sums of the parameters' gradients.
STAGED = {False: {2: 4, 4: 4, 8: 4}, True: {2: 2, 4: 4, 8: 4}}
# The least bytes of such a row, without a mean and with one: shorter ones are faster in registers. On the CPU rows of a
# page are staged, too.
STAGED_BYTES, STAGED_BYTES_ON_CPU = (4096, 32784), 4096
# Forward, where the blocks of a cluster share a row: the vectors of a thread, and, without a mean and with one, the
# threads of a block that leave registers for other blocks of the multiprocessor, and the most that have any.
SHARED_VECTORS, SHARED_THREADS, MOST_SHARED_THREADS = 8, (256, 512), (384, 512)


class Layout(enum.Enum):
    """How the columns of rows lie in memory."""

    WHOLE = "in whole vectors of 16 bytes"
    ADJACENT = "adjacent, but a row may begin or end between two multiples of 16 bytes"
    STRIDED = "apart"


class Held(NamedTuple):
    """A variant of the kernel that holds rows in registers backward.

    Attributes:
        width: columns of a vector.
        vectors: vectors of a row that a thread holds.
        way: how a block walks through rows, as norm_rows.cuh names it; the first variant also has SEVERAL.
        threads: most threads of a row.
        resident: threads of a multiprocessor, which must all have registers at once: the last blocks would come too
            late, and each block adds a row of partial sums.
    """

    width: int
    vectors: int
    way: str = "ONE"
    threads: int = MOST_THREADS
    resident: int = 512


def held_rows(layout: Layout, itemsize: int, mean: bool) -> tuple[Held, ...]:
    """Return the variants for a layout and the bytes of a number, those for short rows first."""
    width = 16 // itemsize
    if layout is Layout.STRIDED:
        return ()
    if layout is Layout.ADJACENT:
        return (Held(1, 8), Held(1, 12), Held(1, 16)) if itemsize < 8 else (Held(1, 8),)
    if not mean:
        return (Held(width, 2 if itemsize == 2 else 4),)
    few = Held(width, 2) if itemsize == 2 else Held(width, 2, threads=256, resident=768)
    return few, Held(width, 4, "ONE" if itemsize == 4 else "SHARED")


def forward_vectors(layout: Layout, itemsize: int, mean: bool, added: bool) -> tuple[int, ...]:
    """Return how many vectors a thread holds in the forward kernels for a layout, those for short rows first.

    A thread with few vectors lets more blocks share a multiprocessor. Only layer_norm is slower with them.
    """
    if layout is Layout.STRIDED:
        return (4,)
    if layout is Layout.ADJACENT:
        return (8, 16) if (added and itemsize < 8) or (itemsize == 4 and not mean) else (16,)
    return (2, 4, SHARED_VECTORS)


def layout_of(cols: int, parameters: Sequence[torch.Tensor], rows: Sequence[Rows]) -> Layout:
    """Return how the columns of all rows lie, and the numbers of parameters."""
    if any(row.column_stride != 1 for row in rows) or (cols > 1 and any(p.stride(0) != 1 for p in parameters)):
        return Layout.STRIDED
    width = 16 // parameters[0].element_size()
    starts = [tensor.data_ptr() for tensor in (*parameters, *(row.tensor for row in rows))]
    steps = [cols, *(stride for row in rows for stride in (row.outer_stride, row.inner_stride))]
    return Layout.ADJACENT if any(s % 16 for s in starts) or any(s % width for s in steps) else Layout.WHOLE


def threads_of_row(cols: int, each: int, together: int, most: int = MOST_THREADS) -> tuple[int, int]:
    """Return the threads of a row, each with `each` columns of it if possible, and the rows of a block.

    Rows of at most a warp share a block of `together` threads: each has a power of two of lanes.
    """
    threads = cdiv(cols, each)
    if threads <= WARP:
        threads = 1 << (threads - 1).bit_length()
        return threads, together // threads
    return min(cdiv(threads, WARP) * WARP, most), 1


class Plan(NamedTuple):
    """How blocks divide the rows that a kernel holds in registers.

    Attributes:
        kind: the template arguments of the kernel, after the type.
        threads: threads of a row.
        together: rows of a block.
        shared_bytes: shared memory of a block.
        resident: blocks of a multiprocessor, backward.
        sharing: blocks that share a row, forward.
    """

    kind: tuple[object, ...]
    threads: int
    together: int
    shared_bytes: int = 0
    resident: int = 0
    sharing: int = 1


def forward_plan(cols: int, layout: Layout, itemsize: int, mean: bool, added: bool, most_blocks: int) -> Plan:
    """Choose how forward walks through rows of `cols` columns, which up to `most_blocks` blocks may share."""
    if cols <= 8 * WARP and layout is Layout.ADJACENT:
        layout = Layout.STRIDED  # several rows share a warp
    width = 16 // itemsize if layout is Layout.WHOLE else 1
    variants = forward_vectors(layout, itemsize, mean, added)
    most: dict[int, int] = {}
    if layout is Layout.WHOLE:
        variants = variants[:-1]  # without that of rows that blocks share
        # Two sums over several warps take longer than more vectors a thread, unless there is a residual to wait for.
        most = {2: WARP, 4: MOST_THREADS // 2} if mean and not added else {}
    fitting = (each for each in variants if cols <= each * width * most.get(each, MOST_THREADS))
    each = next(fitting, None)
    if each is None and layout is Layout.WHOLE:
        numbers = [blocks for blocks in (1, *CLUSTERS) if blocks <= most_blocks]
        for threads in (MOST_THREADS,) if added else (SHARED_THREADS[mean], MOST_SHARED_THREADS[mean]):
            for blocks in numbers:
                if cols <= SHARED_VECTORS * width * threads * blocks:
                    of_block = cdiv(cols, blocks * SHARED_VECTORS * width * WARP) * WARP
                    return Plan((width, SHARED_VECTORS, False), of_block, 1, sharing=blocks)
    each = each or variants[-1]
    return Plan((width, each, layout is Layout.ADJACENT), *threads_of_row(cols, each * width, TOGETHER))


def backward_plan(x: torch.Tensor, num_rows: int, layout: Layout, mean: bool) -> Plan | None:
    """Choose how backward walks through the rows of x; None if no kernel holds them."""
    cols, itemsize, device = x.shape[-1], x.element_size(), x.device
    for width, vectors, way, most, resident in held_rows(layout, itemsize, mean):
        if cols > most * vectors * width:
            continue
        threads, together = threads_of_row(cols, vectors * width, TOGETHER_BACKWARD, most)
        if together > 1 and 2 * cdiv(num_rows, together) < multiprocessors(device):
            threads, together = WARP, TOGETHER_BACKWARD // WARP  # else most multiprocessors would have no row
        blocks, shared_bytes = max(resident // (threads * together), 1), 0
        if way == "SHARED":  # two sums of each column, in the compute dtype
            shared_bytes = 2 * vectors * width * threads * max(itemsize, 4)
            blocks = min(blocks, available_shared_memory(device) // shared_bytes)
        kind = (width, vectors, "SEVERAL" if together > 1 else way)
        return Plan(kind, threads, together, shared_bytes, blocks) if blocks else None
    return None


class Norm:
    """The kernels of one norm.

    Attributes:
        mean: whether a row's mean is subtracted, and a bias added.
        added: whether a residual is added forward, and a gradient backward.
        kernels: the kernels by name, of all dtypes.
    """

    def __init__(self, module: str, *, mean: bool = False, added: bool = False) -> None:
        """Take the path of an operation's module, beside which a `.cu` file includes norm_rows.cuh."""
        self.mean, self.added = mean, added
        source = pathlib.Path(module).with_suffix(".cu")
        self.kernels = {name: CudaKernel(source, name) for dtype in CPP_TYPES for name in self._names(dtype)}

    def _names(self, dtype: torch.dtype) -> Iterator[str]:
        size, mean, last = dtype.itemsize, self.mean, (self.mean, self.added)
        width = 16 // size
        for layout in Layout:
            for each in forward_vectors(layout, size, mean, self.added):
                kind = (width if layout is Layout.WHOLE else 1, each, layout is Layout.ADJACENT)
                yield _name(dtype, "norm_forward_kernel", *kind, *last)
        variants = {(held, held.way) for layout in Layout for held in held_rows(layout, size, mean)}
        variants |= {(held, "SEVERAL") for layout in Layout for held in held_rows(layout, size, mean)[:1]}
        for added in {False, self.added}:
            for held, way in variants:
                yield _name(dtype, "norm_backward_kernel", held.width, held.vectors, way, mean, added)
            yield _name(dtype, "norm_backward_staged_kernel", STAGED[mean][size], mean, added)
            for columns in (width, 1):
                yield _name(dtype, "norm_backward_columns_kernel", columns, mean, added)
        for columns in (width, 1):
            yield _name(dtype, "norm_backward_means_kernel", columns, mean)
        yield _name(dtype, "norm_sum_partials_kernel")

    def _kernel(self, dtype: torch.dtype, kernel: str, *arguments: object) -> CudaKernel:
        return self.kernels[_name(dtype, kernel, *arguments)]

    def forward(
        self,
        output: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Write output, mean, rstd and sums, x + residual. The rows must not be empty."""
        dtype, cols, num_rows, size = x.dtype, x.shape[-1], rstd.shape[0], x.element_size()
        inner, rows = as_rows(x) if residual is None else as_rows(x, residual)
        layout = layout_of(cols, [weight] if bias is None else [weight, bias], rows)
        first, second = rows[0], rows[-1]
        tensors_of_sum = (None if residual is None else second.tensor, sums)
        kind = (self.mean, self.added)
        plan = forward_plan(cols, layout, size, *kind, CLUSTERS[-1] if has_clusters(x.device) else 1)
        self._kernel(dtype, "norm_forward_kernel", *plan.kind, *kind).launch(
            cdiv(num_rows, plan.together) * plan.sharing,
            (plan.threads, plan.together),
            num_rows,
            cols,
            inner,
            first.outer_stride,
            first.tensor,
            weight,
            bias,
            output,
            eps,
            mean,
            rstd,
            *tensors_of_sum,
            second.outer_stride,
            first.inner_stride,
            second.inner_stride,
            first.column_stride,
            second.column_stride,
            weight.stride(0),
            0 if bias is None else bias.stride(0),
            shared_bytes=plan.shared_bytes,
            cluster=plan.sharing if plan.sharing > 1 else None,
        )

    def backward(
        self,
        grad_x: torch.Tensor | None,
        grad_weight: torch.Tensor | None,
        grad_bias: torch.Tensor | None,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> None:
        """Write the gradients that are needed. The rows must not be empty.

        Where `added` is given, contiguous, it is added to the gradient of x.
        """
        dtype, cols, num_rows, size = x.dtype, x.shape[-1], rstd.shape[0], x.element_size()
        inner, (grads, rows) = as_rows(grad_output, x)
        walked = [grads, rows] if added is None else [grads, rows, Rows(added, cols, 0, 1)]
        layout = layout_of(cols, [weight], walked)
        inputs, kind = (grads.tensor, rows.tensor, weight, mean, rstd), (self.mean, added is not None)
        sizes = (num_rows, cols, inner, *grads[1:3], *rows[1:3])

        def partial_sums(partials: int) -> torch.Tensor | None:
            unneeded = grad_weight is None and grad_bias is None
            return None if unneeded else rstd.new_empty((1 + self.mean, partials, cols))

        each = STAGED[self.mean][size]
        staged: Staging | None = None
        least = STAGED_BYTES[self.mean] if x.is_cuda else STAGED_BYTES_ON_CPU
        if layout is Layout.WHOLE and cols * size >= least:
            staged = staging(cols, size, len(walked), x.device, each)
        plan = backward_plan(x, num_rows, layout, self.mean) if staged is None else None
        if staged is not None:
            kernel = self._kernel(dtype, "norm_backward_staged_kernel", each, *kind)
            partials = staged.groups(kernel, x.device, num_rows)
            partial = partial_sums(partials)
            staged.launch(kernel, partials, (*inputs, added, grad_x, partial, *sizes))
        elif plan is not None:
            partials = blocks = min(cdiv(num_rows, plan.together), multiprocessors(x.device) * plan.resident)
            partial, block = partial_sums(partials), (plan.threads, plan.together)
            direct: tuple[torch.Tensor | None, ...] = (None, None)
            few = (2 * FEW_ROWS if cols <= NARROW else FEW_ROWS) if x.is_cuda else FEW_ROWS_ON_CPU
            if partial is not None and num_rows <= few:
                partial, direct, blocks = None, (grad_weight, grad_bias), partials + cdiv(cols, SUMMED)
            kernel = self._kernel(dtype, "norm_backward_kernel", *plan.kind, *kind)
            first = (partials, num_rows, cols, inner, grads.outer_stride, rows.outer_stride)
            results = (added, grad_x, *direct, partial, grads.inner_stride, rows.inner_stride)
            kernel.launch(blocks, block, *first, *inputs, *results, shared_bytes=plan.shared_bytes)
        else:
            width = 16 // size if layout is Layout.WHOLE else 1
            threads, together = threads_of_row(cols, 4 * width, TOGETHER)
            strides = (*grads[1:], *rows[1:], weight.stride(0))
            means = None if grad_x is None else rstd.new_empty((2, num_rows))
            if means is not None:
                kernel = self._kernel(dtype, "norm_backward_means_kernel", width, self.mean)
                kernel.launch(
                    cdiv(num_rows, together), (threads, together), *inputs, means, num_rows, cols, inner, *strides
                )
            threads = min(max(threads, WARP), COLUMN_THREADS)
            column_blocks = cdiv(cols, threads * width)
            partials = min(cdiv(num_rows, 4), max(1, multiprocessors(x.device) * BLOCKS // column_blocks))
            partial = partial_sums(partials)
            kernel = self._kernel(dtype, "norm_backward_columns_kernel", width, *kind)
            grid = (column_blocks, partials)
            kernel.launch(grid, threads, *inputs, means, added, grad_x, partial, num_rows, cols, inner, *strides)
        if partial is not None:
            grid, block = (cdiv(cols, WARP), 1 + self.mean), (WARP, min(partials, 32))
            self._kernel(dtype, "norm_sum_partials_kernel").launch(
                grid, block, partial, grad_weight, grad_bias, partials, cols
            )


def _name(dtype: torch.dtype, kernel: str, *arguments: object) -> str:
    """Return the name of a kernel of norm_rows.cuh."""
    spelled = (str(each).lower() if isinstance(each, bool) else str(each) for each in arguments)
    return f"{kernel}<{', '.join((CPP_TYPES[dtype], *spelled))}>"
