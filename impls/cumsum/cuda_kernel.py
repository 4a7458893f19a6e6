"""cumsum in CUDA C++: rows are read once, in tiles, and each tile passes its sum to the next."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, resident
from fourfold.backends.strides import as_rows

from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
# The most threads of a segment, by whether it has LONG tiles of the larger number.
MOST_THREADS = {False: 128, True: 256}
MOST_ALONG_Y = 65535
# Tiles that a block has in flight, by whether a segment has LONG of them.
TILES, LONG = {False: 1, True: 4}, 8
KINDS = {(long, given): f"{tiles}, {given:d}" for long, tiles in TILES.items() for given in (False, True)}
BY_DTYPE = CudaKernel.instances(SOURCE, "cumsum_kernel<{T}, {}>", KINDS)
KERNELS = tuple(BY_DTYPE.values())


def _launch(
    output: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor | None, exclusive: bool, reverse: bool
) -> None:
    n, segments = x.shape[-1], 1 if offsets is None else len(offsets) - 1
    num_rows, (inner, (rows,)) = x.numel() // n, as_rows(x)
    # The threads of a row depend on its length alone, so that a row's sums do not depend on the other rows.
    length, width = cdiv(n, segments), 16 // x.element_size()
    long = length >= LONG * MOST_THREADS[True] * width
    threads = min(cdiv(length, WARP * width) * WARP, MOST_THREADS[long])
    together = 4 if threads == WARP else 1
    blocks = cdiv(num_rows, together)
    along_y = min(segments, max(resident(x.device, 2048 // (threads * together)) // blocks, 1), MOST_ALONG_Y)
    step, wide = (1, True) if offsets is None else (offsets.stride(0), offsets.dtype == torch.int64)
    kernel = BY_DTYPE[x.dtype, (long, offsets is not None)]
    first = (num_rows, rows.tensor, inner, rows.outer_stride, n, reverse, exclusive, wide)
    rest = (rows.column_stride, output, rows.inner_stride, offsets, segments, step)
    kernel.launch((blocks, along_y), (threads, together), *first, *rest)


cumsum = register("cuda", _launch)
