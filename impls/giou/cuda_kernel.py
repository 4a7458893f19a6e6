"""giou in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.operators import empty_gradients

from .arguments import check_giou
from .cuda_boxes import BLOCK, PACKED, addressing, blocks_of_pairs, packed
from .operators import GIOU, as_rows

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
    if vectors := packed(boxes1, boxes2):
        where: tuple[int, ...] = (num_rows, *PACKED)
    else:
        boxes1, boxes2 = as_rows(boxes1, boxes2, trailing=1)
        where = addressing(num_rows, boxes1, boxes2)
    FORWARD[dtype, vectors].launch(
        blocks_of_pairs(num_rows, dtype),
        BLOCK,
        boxes1,
        boxes2,
        output,
        num_rows,
        *where,
        eps,
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
    vectors = packed(boxes1, boxes2)
    if vectors and grad_output.is_contiguous():
        where: tuple[int, ...] = (num_rows, 0, 1, *PACKED)
    else:
        boxes1, boxes2 = as_rows(boxes1, boxes2, trailing=1)
        (grad_output,) = as_rows(grad_output, trailing=0)
        where = addressing(num_rows, grad_output, boxes1, boxes2)
    BACKWARD[dtype, vectors].launch(
        blocks_of_pairs(num_rows, dtype),
        BLOCK,
        grad_output,
        boxes1,
        boxes2,
        grad_boxes1 if needs1 else None,
        grad_boxes2 if needs2 else None,
        num_rows,
        *where,
        eps,
    )
    return grad_boxes1, grad_boxes2


giou_operator = GIOU.register("cuda", _forward, _backward)


def giou(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the generalized IoU of paired boxes: see `fourfold.impls.giou.torch_eager.giou`."""
    check_giou(boxes1, boxes2, eps)
    return giou_operator(boxes1, boxes2, eps)
