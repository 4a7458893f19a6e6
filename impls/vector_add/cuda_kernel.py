"""vector_add in CUDA C++."""

from pathlib import Path

import torch

from impls.cuda_launch import CPP_TYPES, CudaKernel
from impls.vector_add.arguments import check_vector_add
from impls.vector_add.layout import walk
from impls.vector_add.operators import define_vector_add

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
VECTORS = 4

# By dtype; True where all begin at multiples of 16 bytes.
FLAT = {
    (dtype, aligned): CudaKernel(SOURCE, f"vector_add_kernel<{name}, {16 // dtype.itemsize if aligned else 1}>")
    for dtype, name in CPP_TYPES.items()
    for aligned in (True, False)
}
# By dtype; True where 32 bits do to count elements.
STRIDED = {
    (dtype, small): CudaKernel(SOURCE, f"vector_add_strided_kernel<{name}, {'unsigned' if small else 'long long'}>")
    for dtype, name in CPP_TYPES.items()
    for small in (True, False)
}
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
    x, y, (_, middle, inner), x_strides, y_strides = walk(x, y, output)
    kernel = STRIDED[x.dtype, n < 2**32]
    kernel.launch(-(-n // (BLOCK * VECTORS)), BLOCK, x, y, output, n, middle, inner, *x_strides, *y_strides)
    return output


vector_add_operator = define_vector_add("cuda", _forward)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, element by element: see `impls.vector_add.torch_eager.vector_add`."""
    check_vector_add(x, y)
    return vector_add_operator(x, y)
