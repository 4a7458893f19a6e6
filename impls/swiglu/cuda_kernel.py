"""swiglu in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel

from ..elementwise import BLOCK, WIDTHS, aligned, blocks
from .arguments import check_swiglu
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
FORWARD = CudaKernel.for_each_dtype(SOURCE, "swiglu_forward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.for_each_dtype(SOURCE, "swiglu_backward_kernel<{T}, {}>", WIDTHS)
KERNELS = (*FORWARD.values(), *BACKWARD.values())


def _launch(tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> None:
    x, kernels = tensors[0], BACKWARD if needs else FORWARD
    kernels[x.dtype, aligned(*tensors)].launch(blocks(*tensors), BLOCK, *tensors, x.numel(), *needs)


swiglu_operator = register("cuda", _launch)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise: see `fourfold.impls.swiglu.torch_eager.swiglu`."""
    check_swiglu(gate, up)
    return swiglu_operator(gate, up)
