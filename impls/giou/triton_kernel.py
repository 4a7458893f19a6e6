"""giou in Triton."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv
from fourfold.backends.operators import empty_gradients
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import as_rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import row_offsets
from .operators import GIOU
from .torch_eager import giou as definition
from .triton_boxes import (
    BACKWARD_ROWS,
    FORWARD_ROWS,
    giou_of,
    grad_of_areas,
    grad_of_box,
    load_boxes,
    packed,
    store_boxes,
)

# Do not specialize on these: packed boxes do not use them, and for other boxes the gain is not worth a compilation.
STRIDES = [
    "inner",
    "boxes1_outer_stride",
    "boxes1_inner_stride",
    "boxes1_coordinate_stride",
    "boxes2_outer_stride",
    "boxes2_inner_stride",
    "boxes2_coordinate_stride",
]


@triton.jit(do_not_specialize=STRIDES)
def giou_forward_kernel(
    boxes1_ptr,  # [outer, inner, 4], strided
    boxes2_ptr,  # [outer, inner, 4], strided
    giou_ptr,  # [outer * inner]
    num_rows,
    inner,
    boxes1_outer_stride,
    boxes1_inner_stride,
    boxes1_coordinate_stride,
    boxes2_outer_stride,
    boxes2_inner_stride,
    boxes2_coordinate_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    PACKED1: tl.constexpr,
    PACKED2: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive pairs.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = rows < num_rows
    eps = tl.full((), eps, COMPUTE)
    at1 = rows if PACKED1 else row_offsets(rows, inner, boxes1_outer_stride, boxes1_inner_stride)
    at2 = rows if PACKED2 else row_offsets(rows, inner, boxes2_outer_stride, boxes2_inner_stride)
    ax1, ay1, ax2, ay2 = load_boxes(boxes1_ptr, rows, at1, boxes1_coordinate_stride, mask, COMPUTE, PACKED1)
    bx1, by1, bx2, by2 = load_boxes(boxes2_ptr, rows, at2, boxes2_coordinate_stride, mask, COMPUTE, PACKED2)
    score = giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps)
    tl.store(giou_ptr + rows.to(tl.int64), score.to(giou_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=STRIDES)
def giou_backward_kernel(
    grad_output_ptr,  # [outer, inner], strided
    boxes1_ptr,  # [outer, inner, 4], strided
    boxes2_ptr,  # [outer, inner, 4], strided
    grad_boxes1_ptr,  # [outer * inner, 4]
    grad_boxes2_ptr,  # [outer * inner, 4]
    num_rows,
    inner,
    grad_output_outer_stride,
    grad_output_inner_stride,
    boxes1_outer_stride,
    boxes1_inner_stride,
    boxes1_coordinate_stride,
    boxes2_outer_stride,
    boxes2_inner_stride,
    boxes2_coordinate_stride,
    eps: tl.float64,  # else Triton rounds it to float32
    NEEDS1: tl.constexpr,
    NEEDS2: tl.constexpr,
    PACKED1: tl.constexpr,
    PACKED2: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive pairs.
    rows = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = rows < num_rows
    eps = tl.full((), eps, COMPUTE)
    at = row_offsets(rows, inner, grad_output_outer_stride, grad_output_inner_stride)
    at1 = rows if PACKED1 else row_offsets(rows, inner, boxes1_outer_stride, boxes1_inner_stride)
    at2 = rows if PACKED2 else row_offsets(rows, inner, boxes2_outer_stride, boxes2_inner_stride)
    grad = tl.load(grad_output_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    ax1, ay1, ax2, ay2 = load_boxes(boxes1_ptr, rows, at1, boxes1_coordinate_stride, mask, COMPUTE, PACKED1)
    bx1, by1, bx2, by2 = load_boxes(boxes2_ptr, rows, at2, boxes2_coordinate_stride, mask, COMPUTE, PACKED2)
    union, width, height, hull_width, hull_height = grad_of_areas(grad, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps)
    if NEEDS1:
        x1, y1, x2, y2 = grad_of_box(
            ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, union, width, height, hull_width, hull_height
        )
        store_boxes(grad_boxes1_ptr, rows, x1, y1, x2, y2, mask)
    if NEEDS2:
        x1, y1, x2, y2 = grad_of_box(
            bx1, by1, bx2, by2, ax1, ay1, ax2, ay2, union, width, height, hull_width, hull_height
        )
        store_boxes(grad_boxes2_ptr, rows, x1, y1, x2, y2, mask)


def _forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
    output = torch.empty(boxes1.shape[:-1], dtype=boxes1.dtype, device=boxes1.device)
    num_rows = output.numel()
    if num_rows == 0:
        return output
    inner, (all1, all2) = as_rows(boxes1, boxes2)
    triton_launch.launch(
        giou_forward_kernel,
        (cdiv(num_rows, FORWARD_ROWS),),
        (all1.tensor, all2.tensor, output),
        (num_rows, inner, *all1[1:], *all2[1:], eps),
        PACKED1=packed(boxes1),
        PACKED2=packed(boxes2),
        COMPUTE=triton_launch.COMPUTE[boxes1.dtype],
        INDEX=triton_launch.index_type(num_rows + FORWARD_ROWS),
        BLOCK_ROWS=FORWARD_ROWS,
    )
    return output


def _backward(
    grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float, needs1: bool, needs2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_boxes1, grad_boxes2 = empty_gradients((boxes1, boxes2), (needs1, needs2))
    num_rows = grad_output.numel()
    if num_rows == 0:
        return grad_boxes1, grad_boxes2
    inner, (grads, all1, all2) = as_rows(grad_output.unsqueeze(-1), boxes1, boxes2)
    triton_launch.launch(
        giou_backward_kernel,
        (cdiv(num_rows, BACKWARD_ROWS),),
        (grads.tensor, all1.tensor, all2.tensor, grad_boxes1, grad_boxes2),
        (num_rows, inner, *grads[1:3], *all1[1:], *all2[1:], eps),
        NEEDS1=needs1,
        NEEDS2=needs2,
        PACKED1=packed(boxes1),
        PACKED2=packed(boxes2),
        COMPUTE=triton_launch.COMPUTE[boxes1.dtype],
        INDEX=triton_launch.index_type(num_rows + BACKWARD_ROWS),
        BLOCK_ROWS=BACKWARD_ROWS,
    )
    return grad_boxes1, grad_boxes2


giou = signature_of(definition).checked(GIOU.register("triton", _forward, _backward))
