"""topk in CUDA C++: a warp or block collects the few numbers of its row that may be results, and sorts them.

For a large k, the key of the k-th is found byte by byte, and the chosen numbers are ordered by counting.
"""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import FEW_ELEMENTS, cdiv, multiprocessors, next_power_of_2, reciprocal
from fourfold.backends.strides import Rows

from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK, WARP, MOST_THREADS = 256, 32, 1024
# Of a row that a warp owns: the most numbers that are wanted, and of rows too few to keep all multiprocessors busy.
MOST_OF_WARP, SHORT_ROW, MANY_ROWS = 16, 2048, 8
MOST_SORTED = 512  # of a row, by the block that chose them
ZEROED = 2  # vectors of the gradient that a thread writes, where k is small
MOST_PLACES = 2**32 - 1  # of a row that such a block chooses from
WARP_OWNED, FEW, SELECT, ORDER, BACKWARD = (
    {dtype: CudaKernel(SOURCE, f"topk_{name}_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
    for name in ("warp", "few", "select", "order", "backward")
)
KERNELS = (*WARP_OWNED.values(), *FEW.values(), *SELECT.values(), *ORDER.values(), *BACKWARD.values())


def _has_whole_vectors(rows: Rows, n: int) -> bool:
    """Return whether all rows lie in whole vectors of 16 bytes, whose numbers are of type int."""
    size = rows.tensor.element_size()
    steps = n, rows.outer_stride, rows.inner_stride
    aligned = rows.tensor.data_ptr() % 16 == 0 and not any(step * size % 16 for step in steps)
    return rows.column_stride == 1 and aligned and n < 2**31


def _launch(
    values: torch.Tensor, indices: torch.Tensor, rows: Rows, sizes: tuple[int, int, int], largest: bool
) -> None:
    (num_rows, n, inner), k, dtype = sizes, values.shape[-1], values.dtype
    scalars = (inner, *rows[1:], k, largest)
    busy = n <= SHORT_ROW or num_rows >= MANY_ROWS * multiprocessors(values.device)
    if k <= MOST_OF_WARP and busy and _has_whole_vectors(rows, n):
        WARP_OWNED[dtype].launch(num_rows, WARP, rows.tensor, values, indices, n, inner, *rows[1:3], k, largest)
        return
    if k <= MOST_SORTED and n < MOST_PLACES:
        # About 16 numbers fall to a thread, and to twice as many threads as are wanted.
        threads = min(max(next_power_of_2(cdiv(n, 16)), next_power_of_2(2 * k), WARP), MOST_THREADS)
        FEW[dtype].launch(num_rows, threads, rows.tensor, values, indices, n, *scalars)
        return
    chosen = torch.empty_like(indices)
    SELECT[dtype].launch(num_rows, BLOCK, rows.tensor, chosen, n, *scalars)
    elements = num_rows * k
    ORDER[dtype].launch(cdiv(elements, BLOCK), BLOCK, rows.tensor, chosen, values, indices, elements, *scalars)


def _launch_backward(grad_x: torch.Tensor, grad_values: torch.Tensor, indices: torch.Tensor) -> None:
    elements, n, k = grad_x.numel(), grad_x.shape[-1], indices.shape[-1]
    block = BLOCK if elements >= FEW_ELEMENTS[grad_x.device.type] else WARP
    # Each block reads all k places of its rows. Together they read no more of them than the rows have numbers.
    vectors = max(block * ZEROED, cdiv(k * grad_x.element_size(), 16))
    width = 16 // grad_x.element_size() * vectors
    sizes = elements, n, k, reciprocal(n), reciprocal(k), width
    BACKWARD[grad_x.dtype].launch(cdiv(elements, width), block, grad_values, indices, grad_x, *sizes)


topk = register("cuda", _launch, _launch_backward)
