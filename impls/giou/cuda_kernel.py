"""giou in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.operators import empty_gradients
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import as_rows

from .cuda_boxes import BLOCK, blocks_of_pairs, packed
from .operators import GIOU
from .torch_eager import giou as definition

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# By dtype, and whether the boxes are packed.
FORWARD = CudaKernel.instances(SOURCE, "giou_forward_kernel<{T}, {}>", {False: "0", True: "1"})
BACKWARD = CudaKernel.instances(SOURCE, "giou_backward_kernel<{T}, {}>", {False: "0", True: "1"})
KERNELS = (*FORWARD.values(), *BACKWARD.values())


def _forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = boxes1.dtype
    output = torch.empty(boxes1.shape[:-1], dtype=dtype, device=boxes1.device)
    num_rows = output.numel()
    if num_rows == 0:
        return output
    inner, (all1, all2) = as_rows(boxes1, boxes2)
    blocks, owned = blocks_of_pairs(num_rows, boxes1)
    FORWARD[dtype, packed(boxes1, boxes2)].launch(
        blocks,
        BLOCK,
        num_rows,
        owned,
        all1.tensor,
        all2.tensor,
        eps,
        output,
        inner,
        *all1[1:],
        *all2[1:],
    )
    return output


def _backward(
    grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float, needs1: bool, needs2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = boxes1.dtype
    grad_boxes1, grad_boxes2 = empty_gradients((boxes1, boxes2), (needs1, needs2))
    num_rows = grad_output.numel()
    if num_rows == 0:
        return grad_boxes1, grad_boxes2
    inner, (grads, all1, all2) = as_rows(grad_output.unsqueeze(-1), boxes1, boxes2)
    blocks, owned = blocks_of_pairs(num_rows, boxes1)
    BACKWARD[dtype, packed(boxes1, boxes2)].launch(
        blocks,
        BLOCK,
        num_rows,
        owned,
        grads.tensor,
        all1.tensor,
        all2.tensor,
        grad_boxes1 if needs1 else None,
        grad_boxes2 if needs2 else None,
        inner,
        *grads[1:3],
        *all1[1:],
        *all2[1:],
        eps,
    )
    return grad_boxes1, grad_boxes2


giou = signature_of(definition).checked(GIOU.register("cuda", _forward, _backward))
