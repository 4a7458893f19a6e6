"""topk in CUDA C++: in each row the key of the k-th is found byte by byte; what is chosen is ordered by counting."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import Rows

from .arguments import check_topk
from .operators import register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
BLOCK, WARP = 256, 32
SHORT = 64  # columns of a row that is ordered as a whole
SELECT, ORDER, BACKWARD = (
    {dtype: CudaKernel(SOURCE, f"topk_{name}_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
    for name in ("select", "order", "backward")
)
KERNELS = (*SELECT.values(), *ORDER.values(), *BACKWARD.values())


def _launch(
    values: torch.Tensor,
    indices: torch.Tensor,
    chosen: torch.Tensor,
    rows: Rows,
    sizes: tuple[int, int, int],
    largest: bool,
) -> None:
    (num_rows, n, inner), k = sizes, values.shape[-1]
    scalars = (inner, *rows[1:], k, largest)
    if n > SHORT:
        threads = min(max(next_power_of_2(n) // 8, WARP), BLOCK)
        SELECT[values.dtype].launch(num_rows, threads, rows.tensor, chosen, n, *scalars)
    places, count = (chosen, k) if n > SHORT else (None, n)
    elements = num_rows * count
    ORDER[values.dtype].launch(
        cdiv(elements, BLOCK), BLOCK, rows.tensor, places, values, indices, elements, count, *scalars
    )


def _launch_backward(grad_x: torch.Tensor, grad_values: torch.Tensor, indices: torch.Tensor) -> None:
    elements, n, k = indices.numel(), grad_x.shape[-1], indices.shape[-1]
    BACKWARD[grad_x.dtype].launch(cdiv(elements, BLOCK), BLOCK, grad_values, indices, grad_x, elements, n, k)


topk_operator = register("cuda", _launch, _launch_backward)


def topk(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest, or smallest, numbers along the last axis: see `fourfold.impls.topk.torch_eager.topk`."""
    check_topk(x, k, largest)
    return topk_operator(x, k, largest)
