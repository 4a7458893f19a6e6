"""nms in CUDA C++: boxes are put in order, compared 64 with 64, and walked over by one block."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv

from .operators import BLOCK, Work, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
ORDERED, SHARES = 32, 8  # the same as in cuda_kernel.cu
MOST_WALKERS = 1024
ORDER = {dtype: CudaKernel(SOURCE, f"nms_order_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
MASK = {dtype: CudaKernel(SOURCE, f"nms_mask_kernel<{CPP_TYPES[dtype]}>") for dtype in (torch.float32, torch.float64)}
WALK = CudaKernel(SOURCE, "nms_walk_kernel")
KERNELS = (*ORDER.values(), *MASK.values(), WALK)


def _launch(
    work: Work, boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None
) -> None:
    n, blocks = boxes.shape[0], work.words.shape[0]
    idx_stride, wide, classes = 0, True, None
    if idxs is not None:
        idx_stride, wide, classes = idxs.stride(0), idxs.dtype == torch.int64, work.classes
    scalars = n, *boxes.stride(), scores.stride(0), idx_stride, wide
    tensors = boxes, scores, idxs, work.order, work.boxes, classes
    ORDER[boxes.dtype].launch(cdiv(n, ORDERED), ORDERED * SHARES, *tensors, *scalars)
    MASK[work.boxes.dtype].launch(blocks * blocks, BLOCK, work.boxes, classes, work.mask, n, blocks, iou_threshold)
    walkers = min(32 * cdiv(blocks, 2), MOST_WALKERS)
    WALK.launch(1, walkers, work.mask, work.order, work.words, work.kept, n, blocks)


nms = register("cuda", _launch)
