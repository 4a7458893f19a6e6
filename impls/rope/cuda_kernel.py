"""rope in CUDA C++."""

from pathlib import Path

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, reciprocal

from .operators import Turn, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 128  # the most threads of a block, the same as in cuda_kernel.cu
MOST_TOKENS = 64  # of a block, which is what a GPU allows along z
# By whether all lies in whole vectors of 16 bytes, and whether pairs are neighbours.
OPTIONS = {(True, True): "{W}, true", (True, False): "{W}, false", (False, True): "1, true", (False, False): "1, false"}
KERNELS_BY = CudaKernel.instances(SOURCE, "rope_kernel<{T}, {}>", OPTIONS)
KERNELS = tuple(KERNELS_BY.values())


def _launch(turn: Turn) -> None:
    tokens, seq, _, heads, dim, half, _ = turn.sizes
    *rows, step, cos_row, cos_step, sin_row, sin_step, _ = turn.strides
    x, cos, sin, _, output = turn.tensors
    width = 16 // x.element_size()
    vectors = step == cos_step == sin_step == 1 and not any(n % width for n in (dim, half, *rows, cos_row, sin_row))
    vectors = vectors and not any(tensor.data_ptr() % 16 for tensor in (x, cos, sin, output))
    across = min(cdiv(dim - half, width if vectors else 1), BLOCK)
    down = cdiv(heads, cdiv(heads, BLOCK // across))
    deep = min(BLOCK // (across * down), MOST_TOKENS)
    kernel = KERNELS_BY[x.dtype, (vectors, turn.interleaved)]
    numbers = (*turn.sizes, *turn.strides, reciprocal(seq), turn.back)
    kernel.launch(cdiv(tokens, deep), (across, down, deep), *turn.tensors, *numbers)


rope = register("cuda", _launch)
