"""giou_matrix in CUDA C++: one launch forward; one backward, and one for each gradient that adds the tiles' sums."""

from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv, multiprocessors, reciprocal

from ..giou.cuda_boxes import BLOCK
from .operators import WARP, leaves_lanes_idle, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
TILE = 64, 128  # rows and columns of a tile, at most; as many columns as in cuda_kernel.cu
# Blocks of a multiprocessor without tiles, at most. On the CPU they are few, so that a thread has several scores.
RESIDENT = {"cuda": 8, "cpu": 1}
MODES = {True: "true", False: "false"}  # whether the smallest enclosing box counts
FORWARD = CudaKernel.instances(SOURCE, "giou_matrix_forward_kernel<{T}, {}>", MODES)
PAIRS = CudaKernel.instances(SOURCE, "giou_matrix_pairs_kernel<{T}, {}>", MODES)
BACKWARD = CudaKernel.instances(SOURCE, "giou_matrix_backward_kernel<{T}, {}>", MODES)
REDUCE = {
    dtype: CudaKernel(SOURCE, f"giou_matrix_reduce_kernel<{'double' if T == 'double' else 'float'}, {T}>")
    for dtype, T in CPP_TYPES.items()
}
KERNELS = (*FORWARD.values(), *PAIRS.values(), *BACKWARD.values(), *REDUCE.values())


def tile_of(boxes_a: torch.Tensor, boxes_b: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns of a tile. Fewer rows where a multiprocessor would have no tile."""
    rows, columns = TILE
    across = cdiv(len(boxes_b), columns)
    while rows > BLOCK // WARP and cdiv(len(boxes_a), rows) * across < 2 * multiprocessors(boxes_a.device):
        rows //= 2
    return rows, columns


def _forward(scores: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tiles: Any, enclosed: bool, eps: float) -> None:
    n, m = scores.shape
    if leaves_lanes_idle(m):
        blocks = min(cdiv(n * m, BLOCK), RESIDENT[a.device.type] * multiprocessors(a.device))
        apart = divmod(blocks * BLOCK, m)
        PAIRS[a.dtype, enclosed].launch(blocks, BLOCK, a, b, scores, n, m, reciprocal(m), *apart, eps)
        return
    blocks, rows = tiles[0] * tiles[1], tile_of(a, b)[0]
    FORWARD[a.dtype, enclosed].launch(blocks, BLOCK, a, b, scores, *scores.shape, eps, rows)


def _backward(
    grad_output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sums_a: Any, sums_b: Any, tiles: Any, *how: Any
) -> None:
    enclosed, eps = how
    numbers = (*grad_output.shape, *grad_output.stride(), eps, tile_of(a, b)[0])
    BACKWARD[a.dtype, enclosed].launch(tiles[0] * tiles[1], BLOCK, grad_output, a, b, sums_a, sums_b, *numbers)


def _reduce(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    n = gradient.numel()
    REDUCE[gradient.dtype].launch(cdiv(n, WARP), BLOCK, sums, gradient, sums.shape[0], n)


giou_matrix = register("cuda", tile_of, _forward, _backward, _reduce)
