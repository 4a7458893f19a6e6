"""adam in CUDA C++: one kernel reads everything once, and writes param and its states where they are."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, resident

from ..cuda_elementwise import aligned
from .arguments import check_adam
from .operators import Factors, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK = 256
# Elements of a thread, in whole vectors of 16 bytes of each tensor; or one, where a tensor begins between two.
RUNS = {dtype: max(16 // dtype.itemsize, 4) for dtype in CPP_TYPES}
KERNELS_BY = {
    (dtype, whole): CudaKernel(SOURCE, f"adam_kernel<{cpp}, {RUNS[dtype] if whole else 1}>")
    for dtype, cpp in CPP_TYPES.items()
    for whole in (True, False)
}
KERNELS = tuple(KERNELS_BY.values())


def _launch(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, factors: Factors) -> None:
    n, whole = param.numel(), aligned(param, grad, m, v)
    blocks = min(cdiv(n, BLOCK * (RUNS[param.dtype] if whole else 1)), resident(param.device, 32))
    KERNELS_BY[param.dtype, whole].launch(blocks, BLOCK, param, grad, m, v, n, *factors)


adam_operator = register("cuda", _launch)


def adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take one step of Adam in place: see `fourfold.impls.adam.torch_eager.adam`."""
    check_adam(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step)
    return adam_operator(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step)
