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
from fourfold.backends.strides import as_rows

from ..giou.cuda_boxes import BLOCK, blocks_of_pairs, packed
from .operators import num_saved, register_loss
from .torch_eager import giou_loss as definition

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
    inner, (all_pred, all_target) = as_rows(pred, target)
    kernels[dtype, packed(pred, target)].launch(
        blocks,
        BLOCK,
        all_pred.tensor,
        all_target.tensor,
        loss,
        saved,
        torch.empty(2 * blocks, dtype=torch.float64, device=device) if blocks > 1 else None,
        workspace.counter(device) if blocks > 1 else None,
        num_rows,
        inner,
        *all_pred[1:],
        *all_target[1:],
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
    inner, (all_pred, all_target) = as_rows(pred, target)
    blocks, owned = blocks_of_pairs(num_rows, pred)
    kernels[pred.dtype, packed(pred, target)].launch(
        blocks,
        BLOCK,
        num_rows,
        owned,
        grad_output,
        all_pred.tensor,
        all_target.tensor,
        saved,
        grad_pred if needs_pred else None,
        grad_target if needs_target else None,
        inner,
        *all_pred[1:],
        *all_target[1:],
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


giou_loss, KERNELS = register(definition)
