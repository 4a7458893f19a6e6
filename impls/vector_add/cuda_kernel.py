"""vector_add in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.strides import walk

from .arguments import check_vector_add
from .operators import VECTOR_ADD

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
VECTORS = 4

# By dtype; True where all begin at multiples of 16 bytes.
FLAT = CudaKernel.for_each_dtype(SOURCE, "vector_add_kernel<{T}, {}>", {True: "{W}", False: "1"})
# By dtype; True where 32 bits do to count elements.
STRIDED = CudaKernel.for_each_dtype(
    SOURCE, "vector_add_strided_kernel<{T}, {}>", {True: "unsigned", False: "long long"}
)
KERNELS = (*FLAT.values(), *STRIDED.values())


def _forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(x)
    n = output.numel()
    if n == 0:
        return output
    if x.stride() == y.stride() == output.stride():
        aligned = (x.data_ptr() | y.data_ptr() | output.data_ptr()) % 16 == 0
        per_block = BLOCK * VECTORS * (16 // x.element_size() if aligned else 1)
        FLAT[x.dtype, aligned].launch(-(-n // per_block), BLOCK, x, y, output, n)
        return output
    (x, y), (_, middle, inner), strides = walk(output, x, y)
    STRIDED[x.dtype, n < 2**32].launch(-(-n // (BLOCK * VECTORS)), BLOCK, x, y, output, n, middle, inner, *strides)
    return output


vector_add_operator = VECTOR_ADD.register("cuda", _forward)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, elementwise: see `fourfold.impls.vector_add.torch_eager.vector_add`."""
    check_vector_add(x, y)
    return vector_add_operator(x, y)
