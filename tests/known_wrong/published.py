"""Published GIoU kernels that are wrong, rewritten with their mistakes.

Sources: Accelerating AI/ML Model Training with Custom Operators (2024): the losses in torch, and the CUDA kernels; its
second part, Unleashing the Power of Triton (2024): the Triton kernel. Both use the mean of giou as the loss. Here the
loss is the mean of 1 - giou, and eps is an argument of the losses in torch. Only unintended mistakes are left to find.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.triton import launch as triton_launch

Loss = Callable[..., torch.Tensor]
BOXES_PER_SAMPLE = 256  # the number for which the articles launch their kernels


def giou_without_clamp(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Compute GIoU without clamping the intersection's sides: two negative sides give a positive area."""
    area1 = (boxes1[..., 2] - boxes1[..., 0]) * (boxes1[..., 3] - boxes1[..., 1])
    area2 = (boxes2[..., 2] - boxes2[..., 0]) * (boxes2[..., 3] - boxes2[..., 1])
    overlap = torch.minimum(boxes1[..., 2:], boxes2[..., 2:]) - torch.maximum(boxes1[..., :2], boxes2[..., :2])
    intersection = overlap[..., 0] * overlap[..., 1]
    union = area1 + area2 - intersection
    extent = torch.maximum(boxes1[..., 2:], boxes2[..., 2:]) - torch.minimum(boxes1[..., :2], boxes2[..., :2])
    hull = (extent[..., 0] * extent[..., 1]).clamp(min=eps)
    return intersection / union.clamp(min=eps) - (hull - union) / hull


def padded_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Compute the loss of all rows at once, with rows of padding multiplied by 0."""
    valid = (target[..., 3] > 0).to(pred.dtype)
    loss = (1 - giou_without_clamp(pred, target, eps)) * valid
    return loss.sum() / valid.sum().clamp(min=1)


def concatenated_loss(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Concatenate the samples' boxes and make one call."""
    counts = offsets.diff().tolist()
    # Without samples there is nothing to concatenate.
    taken = torch.cat([sample[:count] for sample, count in zip(pred, counts)]) if counts else target
    return (1 - giou_without_clamp(taken, target, eps)).sum() / max(sum(counts), 1)


def _mean(scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Take the mean in torch of the scores that a kernel stores; they are 0 in rows of padding."""
    return (valid.sum() - scores.sum()) / valid.sum().clamp(min=1)


CUDA_SOURCE = Path(__file__).parent / "published.cu"
CUDA_KERNELS = {
    (version, clamp): CudaKernel(CUDA_SOURCE, f"giou_{version}_kernel<{str(clamp).lower()}>")
    for version in ("multiplied", "skipping")
    for clamp in (False, True)
}


def cuda_loss(version: str, clamp: bool = False, any_box_count: bool = True) -> Loss:
    """Return a loss with the CUDA kernel, launched with one block per sample.

    Args:
        version: "multiplied" or "skipping".
        clamp: whether to clamp the intersection, which the article does not.
        any_box_count: whether a block has one thread for each box, instead of always 256.
    """

    def loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        pred, target = pred.float().contiguous(), target.float().contiguous()
        scores = torch.empty(pred.shape[:2], device=pred.device)
        valid = torch.empty(pred.shape[:2], dtype=torch.bool, device=pred.device)
        if scores.numel():
            threads = pred.shape[1] if any_box_count else BOXES_PER_SAMPLE
            CUDA_KERNELS[version, clamp].launch(pred.shape[0], threads, pred, target, scores, valid)
        return _mean(scores, valid)

    return loss


@triton.jit
def giou_kernel(
    pred_ptr,  # [batch, BLOCK_BOXES, 4]
    target_ptr,  # [batch, BLOCK_BOXES, 4]
    giou_ptr,  # [batch, BLOCK_BOXES]
    valid_ptr,  # [batch, BLOCK_BOXES]
    CLAMP: tl.constexpr,
    BLOCK_BOXES: tl.constexpr,
):
    # One program owns one sample, with all of its boxes in one block.
    rows = tl.program_id(0) * BLOCK_BOXES + tl.arange(0, BLOCK_BOXES)
    ax1, ay1 = tl.load(pred_ptr + 4 * rows), tl.load(pred_ptr + 4 * rows + 1)
    ax2, ay2 = tl.load(pred_ptr + 4 * rows + 2), tl.load(pred_ptr + 4 * rows + 3)
    bx1, by1 = tl.load(target_ptr + 4 * rows), tl.load(target_ptr + 4 * rows + 1)
    bx2, by2 = tl.load(target_ptr + 4 * rows + 2), tl.load(target_ptr + 4 * rows + 3)
    eps = 1e-5
    width = tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1)
    height = tl.minimum(ay2, by2) - tl.maximum(ay1, by1)
    if CLAMP:
        width, height = tl.maximum(width, 0.0), tl.maximum(height, 0.0)
    intersection = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - intersection
    hull = (tl.maximum(ax2, bx2) - tl.minimum(ax1, bx1)) * (tl.maximum(ay2, by2) - tl.minimum(ay1, by1))
    score = intersection / tl.maximum(union, eps) - (hull - union) / tl.maximum(hull, eps)
    tl.store(giou_ptr + rows, tl.where(by2 > 0, score, 0))
    tl.store(valid_ptr + rows, by2 > 0)


def triton_loss(clamp: bool = False, native: bool = False) -> Loss:
    """Return a loss with the Triton kernel, whose block size is the number of boxes per sample; forward only.

    Args:
        clamp: whether to clamp the intersection, which the article does not.
        native: whether to compute in half types directly, without the conversion to float32.
    """

    def loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        if not native:
            pred, target = pred.float(), target.float()
        pred, target = pred.contiguous(), target.contiguous()
        scores = torch.empty(pred.shape[:2], device=pred.device)
        valid = torch.empty(pred.shape[:2], dtype=torch.bool, device=pred.device)
        if scores.numel():
            with triton_launch.current_device(pred.device):
                giou_kernel[(pred.shape[0],)](pred, target, scores, valid, CLAMP=clamp, BLOCK_BOXES=pred.shape[1])
        return _mean(scores, valid)

    return loss
