"""adam in CUDA C++: one kernel reads everything once, and writes param and its states where they are."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv

from ..cuda_elementwise import BLOCK, whole
from .operators import Factors, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# Elements of a thread: as many as 16 bytes of the widest tensor hold; or one of few, or where a tensor begins between.
WIDTHS = {dtype: 16 // max(dtype.itemsize, 4) for dtype in CPP_TYPES}
KERNELS_BY = {
    (dtype, width): CudaKernel(SOURCE, f"adam_kernel<{cpp}, {width}>")
    for dtype, cpp in CPP_TYPES.items()
    for width in (WIDTHS[dtype], 1)
}
KERNELS = tuple(KERNELS_BY.values())


def _launch(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, factors: Factors) -> None:
    n, width = param.numel(), WIDTHS[param.dtype] if whole(param, grad, m, v) else 1
    KERNELS_BY[param.dtype, width].launch(cdiv(n, BLOCK * width), BLOCK, n, param, grad, m, v, *factors)


adam = register("cuda", _launch)
