"""giou_loss_ragged in CUDA C++: only the boxes that exist are read."""

from pathlib import Path

import torch

from impls import workspace
from impls.cuda_launch import CPP_TYPES, CudaKernel
from impls.giou.arguments import check_giou_loss_ragged
from impls.giou.cuda_boxes import BLOCK, packed
from impls.giou.operators import gradient_buffers
from impls.giou_loss_ragged.operators import define_giou_loss_ragged
from impls.launch import cdiv, first_probe, resident

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# As many as fit at once; the last one sums the partial results of all.
BLOCKS_PER_MULTIPROCESSOR = 3
# Rows of a lane in backward, one after another, where all would not fit at once.
MOST_ROUNDS = 8
# By dtype, and whether the boxes are packed.
FORWARD, BACKWARD = (
    {
        (dtype, packed): CudaKernel(SOURCE, f"giou_loss_ragged_{which}_kernel<{name}, {packed}>")
        for dtype, name in CPP_TYPES.items()
        for packed in (0, 1)
    }
    for which in ("forward", "backward")
)
KERNELS = (*FORWARD.values(), *BACKWARD.values())


def _forward(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float) -> torch.Tensor:
    dtype, device, total, (batch, max_boxes, _) = pred.dtype, pred.device, target.shape[0], pred.shape
    loss = torch.empty((), dtype=dtype, device=device)
    if total == 0:
        return loss.zero_()
    blocks = min(cdiv(max(total, batch), BLOCK), resident(device, BLOCKS_PER_MULTIPROCESSOR))
    FORWARD[dtype, packed(pred, target)].launch(
        blocks,
        BLOCK,
        pred,
        target,
        offsets,
        loss,
        torch.empty(2 * blocks, dtype=torch.float64, device=device) if blocks > 1 else None,
        workspace.counter(device) if blocks > 1 else None,
        total,
        batch,
        max_boxes,
        *pred.stride(),
        *target.stride(),
        offsets.stride(0),
        offsets.dtype == torch.int64,
        first_probe(batch, 32),
        eps,
    )
    return loss


def _backward(
    grad_output: torch.Tensor,
    pred: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor,
    eps: float,
    needs_pred: bool,
    needs_target: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_pred, grad_target = gradient_buffers(pred, target, needs_pred, needs_target)
    total, (batch, max_boxes, _) = target.shape[0], pred.shape
    if total == 0:
        return grad_pred.zero_(), grad_target
    num_rows, at_once = batch * max_boxes, BLOCK * resident(pred.device, BLOCKS_PER_MULTIPROCESSOR)
    rounds = min(cdiv(num_rows, at_once), MOST_ROUNDS)
    BACKWARD[pred.dtype, packed(pred, target)].launch(
        cdiv(num_rows, BLOCK * rounds),
        BLOCK,
        grad_output,
        pred,
        target,
        offsets,
        grad_pred if needs_pred else None,
        grad_target if needs_target else None,
        total,
        batch,
        max_boxes,
        *pred.stride(),
        *target.stride(),
        offsets.stride(0),
        offsets.dtype == torch.int64,
        # The product with a row, over 2^63, is the row's sample or one less (as in Granlund, Montgomery 1994).
        (2**63 - 1) // max_boxes,
        rounds,
        eps,
    )
    return grad_pred, grad_target


giou_loss_ragged_operator = define_giou_loss_ragged("cuda", _forward, _backward)


def giou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Mean GIoU loss over a ragged batch: see `impls.giou_loss_ragged.torch_eager.giou_loss_ragged`."""
    check_giou_loss_ragged(pred, target, offsets, eps)
    return giou_loss_ragged_operator(pred, target, offsets, eps)
