"""giou_matrix in CUDA C++: one launch forward; one backward, and one for each gradient that adds the tiles' sums."""

from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors

from ..giou.cuda_boxes import BLOCK
from .operators import register
from .torch_eager import check_giou_matrix

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
TILE = 64, 128  # rows and columns of a block, the same as in cuda_kernel.cu
WARP = 32
MODES = {True: "true", False: "false"}  # whether the smallest enclosing box counts
FORWARD = CudaKernel.instances(SOURCE, "giou_matrix_forward_kernel<{T}, {}>", MODES)
BACKWARD = CudaKernel.instances(SOURCE, "giou_matrix_backward_kernel<{T}, {}>", MODES)
REDUCE = {
    dtype: CudaKernel(SOURCE, f"giou_matrix_reduce_kernel<{'double' if T == 'double' else 'float'}, {T}>")
    for dtype, T in CPP_TYPES.items()
}
KERNELS = (*FORWARD.values(), *BACKWARD.values(), *REDUCE.values())


def rows_of_block(n: int, across: int, processors: int) -> int:
    """Return the rows of a forward block: fewer than a tile's where tiles would leave multiprocessors without a block.

    Args:
        n: rows of the matrix.
        across: tiles along its columns.
        processors: multiprocessors of the device.
    """
    rows = TILE[0]
    while rows > BLOCK // WARP and cdiv(n, rows) * across < 2 * processors:
        rows //= 2
    return rows


def _forward(scores: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tiles: Any, enclosed: bool, eps: float) -> None:
    rows = rows_of_block(scores.shape[0], tiles[1], multiprocessors(a.device))
    blocks = cdiv(scores.shape[0], rows) * tiles[1]
    FORWARD[a.dtype, enclosed].launch(blocks, BLOCK, a, b, scores, *scores.shape, eps, rows)


def _backward(
    grad_output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sums_a: Any, sums_b: Any, tiles: Any, *how: Any
) -> None:
    enclosed, eps = how
    numbers = (*grad_output.shape, *grad_output.stride(), eps)
    BACKWARD[a.dtype, enclosed].launch(tiles[0] * tiles[1], BLOCK, grad_output, a, b, sums_a, sums_b, *numbers)


def _reduce(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    n = gradient.numel()
    REDUCE[gradient.dtype].launch(cdiv(n, WARP), BLOCK, sums, gradient, sums.shape[0], n)


giou_matrix_operator = register("cuda", TILE, _forward, _backward, _reduce)


def giou_matrix(boxes_a: torch.Tensor, boxes_b: torch.Tensor, mode: str = "giou", eps: float = 1e-5) -> torch.Tensor:
    """Return the generalized IoU of each pair: see `fourfold.impls.giou_matrix.torch_eager.giou_matrix`."""
    check_giou_matrix(boxes_a, boxes_b, mode, eps)
    return giou_matrix_operator(boxes_a, boxes_b, mode, eps)
