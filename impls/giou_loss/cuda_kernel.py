"""giou_loss in CUDA C++: one launch forward, one launch backward."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.backends import workspace
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, resident
from fourfold.backends.operators import empty_gradients

from ..giou.arguments import check_giou_loss
from ..giou.cuda_boxes import BLOCK, PACKED, addressing, blocks_of_pairs, packed
from .operators import num_saved, operator_of

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# As many blocks as fit at once. The last one to finish sums the partial results of all.
BLOCKS_PER_MULTIPROCESSOR = 4
# By dtype, and whether the boxes are packed.
Kernels = dict[tuple[torch.dtype, Any], CudaKernel]
NAME, PACKINGS = "giou_loss_{}_kernel<{{T}}, {{}}{}>", {False: "0", True: "1"}


def _forward(
    kernels: Kernels, pred: torch.Tensor, target: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, device, num_rows = pred.dtype, pred.device, pred.shape[0] * pred.shape[1]
    loss = torch.empty((), dtype=dtype, device=device)
    saved = torch.empty(num_saved(num_rows), dtype=torch.int32, device=device)
    if num_rows == 0:
        return loss.zero_(), saved.zero_()
    blocks = min(cdiv(num_rows, BLOCK), resident(device, BLOCKS_PER_MULTIPROCESSOR))
    vectors = packed(pred, target)
    kernels[dtype, vectors].launch(
        blocks,
        BLOCK,
        pred,
        target,
        loss,
        saved,
        torch.empty(2 * blocks, dtype=torch.float64, device=device) if blocks > 1 else None,
        workspace.counter(device) if blocks > 1 else None,
        num_rows,
        *((num_rows, *PACKED) if vectors else addressing(num_rows, pred, target)),
        eps,
    )
    return loss, saved


def _backward(
    kernels: Kernels,
    grad_output: torch.Tensor,
    pred: torch.Tensor,
    target: torch.Tensor,
    saved: torch.Tensor,
    eps: float,
    needs_pred: bool,
    needs_target: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_pred, grad_target = empty_gradients((pred, target), (needs_pred, needs_target))
    num_rows = pred.shape[0] * pred.shape[1]
    if num_rows == 0:
        return grad_pred, grad_target
    vectors = packed(pred, target)
    kernels[pred.dtype, vectors].launch(
        blocks_of_pairs(num_rows, pred.dtype),
        BLOCK,
        grad_output,
        pred,
        target,
        saved,
        grad_pred if needs_pred else None,
        grad_target if needs_target else None,
        num_rows,
        *((num_rows, *PACKED) if vectors else addressing(num_rows, pred, target)),
        eps,
    )
    return grad_pred, grad_target


def register(measure: str) -> tuple[Callable[..., Any], tuple[CudaKernel, ...]]:
    """Register the loss by a measure of a pair, "giou", "diou" or "ciou"; return it and its kernels."""
    option = "" if measure == "giou" else f", {measure.upper()}"
    forward, backward = (
        CudaKernel.instances(SOURCE, NAME.format(which, option), PACKINGS) for which in ("forward", "backward")
    )
    launches = functools.partial(_forward, forward), functools.partial(_backward, backward)
    return operator_of(measure).register("cuda", *launches), (*forward.values(), *backward.values())


giou_loss_operator, KERNELS = register("giou")


def giou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean GIoU loss of a padded batch: see `fourfold.impls.giou_loss.torch_eager.giou_loss`."""
    check_giou_loss(pred, target, eps)
    return giou_loss_operator(pred, target, eps)[0]
