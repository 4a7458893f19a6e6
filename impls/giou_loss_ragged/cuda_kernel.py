"""giou_loss_ragged in CUDA C++: reads only the boxes that exist."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.backends import workspace
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv, first_probe, resident
from fourfold.backends.operators import empty_gradients

from ..giou.cuda_boxes import BLOCK, looped_rows, packed
from .operators import register_loss
from .torch_eager import giou_loss_ragged as definition

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# As many blocks as fit at once. The last one to finish sums the partial results of all.
BLOCKS_PER_MULTIPROCESSOR = 3
# The most rows that a lane takes in turn in backward, if not all rows fit at once.
MOST_ROUNDS = 32
# By dtype, and whether the boxes are packed.
Kernels = dict[tuple[torch.dtype, Any], CudaKernel]
NAME, PACKINGS = "giou_loss_ragged_{}_kernel<{{T}}, {{}}{}>", {False: "0", True: "1"}


def _forward(
    kernels: Kernels, pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float
) -> torch.Tensor:
    dtype, device, total, (batch, max_boxes, _) = pred.dtype, pred.device, target.shape[0], pred.shape
    loss = torch.empty((), dtype=dtype, device=device)
    if total == 0:
        return loss.zero_()
    blocks = min(cdiv(max(total, batch), BLOCK), resident(device, BLOCKS_PER_MULTIPROCESSOR))
    rows = looped_rows(dtype)
    run = 32 * rows * cdiv(total, blocks * BLOCK * rows)
    kernels[dtype, packed(pred, target)].launch(
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
        run,
        eps,
    )
    return loss


def _backward(
    kernels: Kernels,
    grad_output: torch.Tensor,
    pred: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor,
    eps: float,
    needs_pred: bool,
    needs_target: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_pred, grad_target = empty_gradients((pred, target), (needs_pred, needs_target))
    total, (batch, max_boxes, _) = target.shape[0], pred.shape
    if total == 0:
        return grad_pred.zero_(), grad_target
    num_rows, at_once = batch * max_boxes, BLOCK * resident(pred.device, BLOCKS_PER_MULTIPROCESSOR)
    rounds = min(cdiv(num_rows, at_once), MOST_ROUNDS)
    kernels[pred.dtype, packed(pred, target)].launch(
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
        # A row times this, divided by 2^63, is the row's sample or one less (as in Granlund, Montgomery 1994).
        (2**63 - 1) // max_boxes,
        rounds,
        eps,
    )
    return grad_pred, grad_target


def register(definition: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[CudaKernel, ...]]:
    """Register the loss by a measure of a pair, "giou", "diou" or "ciou"; return it and its kernels."""
    measure = definition.__name__.partition("_")[0]
    option = "" if measure == "giou" else f", {measure.upper()}"
    forward, backward = (
        CudaKernel.instances(SOURCE, NAME.format(which, option), PACKINGS) for which in ("forward", "backward")
    )
    launches = functools.partial(_forward, forward), functools.partial(_backward, backward)
    return register_loss(definition, "cuda", *launches), (*forward.values(), *backward.values())


giou_loss_ragged, KERNELS = register(definition)
