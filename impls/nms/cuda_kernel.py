"""nms in CUDA C++: boxes are put in order, compared 64 with 64, and walked over by one block."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv

from .arguments import check_nms
from .operators import BLOCK, Work, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
ORDERED, SHARES = 32, 8  # the same as in cuda_kernel.cu
WALKERS = 512
ORDER = {dtype: CudaKernel(SOURCE, f"nms_order_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
MASK = {dtype: CudaKernel(SOURCE, f"nms_mask_kernel<{CPP_TYPES[dtype]}>") for dtype in (torch.float32, torch.float64)}
WALK = CudaKernel(SOURCE, "nms_walk_kernel")
KERNELS = (*ORDER.values(), *MASK.values(), WALK)


def _launch(
    work: Work, boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None
) -> None:
    n, blocks = boxes.shape[0], work.words.shape[0]
    idx_stride, wide = (0, True) if idxs is None else (idxs.stride(0), idxs.dtype == torch.int64)
    strides = (*boxes.stride(), scores.stride(0), idx_stride, wide)
    classes = None if idxs is None else work.classes
    ORDER[boxes.dtype].launch(
        cdiv(n, ORDERED), ORDERED * SHARES, boxes, scores, idxs, work.order, work.boxes, classes, n, *strides
    )
    MASK[work.boxes.dtype].launch(blocks * blocks, BLOCK, work.boxes, classes, work.mask, n, blocks, iou_threshold)
    WALK.launch(1, WALKERS, work.mask, work.order, work.words, work.kept, n, blocks)


nms_operator = register("cuda", _launch)


def nms(
    boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply non-maximum suppression: see `fourfold.impls.nms.torch_eager.nms`."""
    check_nms(boxes, scores, iou_threshold, idxs)
    return nms_operator(boxes, scores, iou_threshold, idxs)
