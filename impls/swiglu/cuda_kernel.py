"""swiglu in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel

from .arguments import check_swiglu
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK, VECTORS = 256, 2  # threads of a block, and vectors of each as in elementwise.cuh
WIDTHS = {True: "{W}", False: "1"}  # whether all tensors begin at multiples of 16 bytes
FORWARD = CudaKernel.for_each_dtype(SOURCE, "swiglu_forward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.for_each_dtype(SOURCE, "swiglu_backward_kernel<{T}, {}>", WIDTHS)
KERNELS = (*FORWARD.values(), *BACKWARD.values())


def _launch(tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> None:
    x, kernels = tensors[0], BACKWARD if needs else FORWARD
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    per_block = BLOCK * VECTORS * (16 // x.element_size() if aligned else 1)
    kernels[x.dtype, aligned].launch(-(-x.numel() // per_block), BLOCK, *tensors, x.numel(), *needs)


swiglu_operator = register("cuda", _launch)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise: see `fourfold.impls.swiglu.torch_eager.swiglu`."""
    check_swiglu(gate, up)
    return swiglu_operator(gate, up)
