"""sigmoid_focal_loss in CUDA C++: one pass forward, with a sum for each block where they are reduced, one backward."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel

from ..cuda_elementwise import BLOCK, WIDTHS, blocks, whole
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
REDUCED = 512
FORWARD = CudaKernel.instances(SOURCE, "sigmoid_focal_loss_forward_kernel<{T}, {}>", WIDTHS)
BACKWARD = CudaKernel.instances(SOURCE, "sigmoid_focal_loss_backward_kernel<{T}, {}>", WIDTHS)
REDUCE = {
    dtype: CudaKernel(SOURCE, f"sigmoid_focal_loss_reduce_kernel<{'double' if T == 'double' else 'float'}, {T}>")
    for dtype, T in CPP_TYPES.items()
}
KERNELS = (*FORWARD.values(), *BACKWARD.values(), *REDUCE.values())


def _forward(
    results: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, alpha: float, gamma: float, summed: bool
) -> None:
    tensors = (logits, targets) if summed else (logits, targets, results)
    written = (None, results) if summed else (results, None)
    grid, owned = blocks(*tensors)
    arguments = (logits.numel(), owned, logits, targets, *written, alpha, gamma)
    FORWARD[logits.dtype, whole(*tensors)].launch(grid, BLOCK, *arguments)


def _reduce(output: torch.Tensor, sums: torch.Tensor, divisor: int) -> None:
    REDUCE[output.dtype].launch(1, REDUCED, sums, output, sums.numel(), divisor)


def _backward(
    grad_logits: torch.Tensor, grad_output: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, *scalars: float
) -> None:
    each = grad_output.shape == logits.shape
    tensors = (logits, targets, grad_logits, *((grad_output,) if each else ()))
    grid, owned = blocks(*tensors)
    arguments = (logits.numel(), owned, each, logits, targets, grad_output, grad_logits, *scalars)
    BACKWARD[logits.dtype, whole(*tensors)].launch(grid, BLOCK, *arguments)


sigmoid_focal_loss = register("cuda", lambda *tensors: blocks(*tensors)[0], _forward, _reduce, _backward)
