"""giou in small Triton kernels, correct if FAULT is empty, else with one mistake."""

import torch
import triton
import triton.language as tl

from fourfold.backends.triton import launch as triton_launch

from .steps import Implementation, wire

BLOCK_ROWS = 64


@triton.jit
def least(a, b, FAULT: tl.constexpr):
    if FAULT == "nan_dropped":
        return tl.minimum(a, b)
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest(a, b, FAULT: tl.constexpr):
    if FAULT == "nan_dropped":
        return tl.maximum(a, b)
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_box(ptr, rows, stride, step, mask, FAULT: tl.constexpr, COMPUTE: tl.constexpr):
    at = rows.to(tl.int64) * stride
    if FAULT == "offsets_in_32_bits":
        at = rows * stride
    if FAULT == "contiguous_assumed":
        at = rows.to(tl.int64) * 4
        step = 1
    x1 = tl.load(ptr + at, mask=mask, other=0.0).to(COMPUTE)
    y1 = tl.load(ptr + at + step, mask=mask, other=0.0).to(COMPUTE)
    x2 = tl.load(ptr + at + step + step, mask=mask, other=0.0).to(COMPUTE)
    y2 = tl.load(ptr + at + step + step + step, mask=mask, other=0.0).to(COMPUTE)
    return x1, y1, x2, y2


@triton.jit
def score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, FAULT: tl.constexpr):
    width = greatest(least(ax2, bx2, FAULT) - greatest(ax1, bx1, FAULT), 0.0, FAULT)
    height = greatest(least(ay2, by2, FAULT) - greatest(ay1, by1, FAULT), 0.0, FAULT)
    intersection = width * height
    union = greatest((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - intersection, eps, FAULT)
    hull_width = greatest(ax2, bx2, FAULT) - least(ax1, bx1, FAULT)
    hull_height = greatest(ay2, by2, FAULT) - least(ay1, by1, FAULT)
    hull = greatest(hull_width * hull_height, eps, FAULT)
    return intersection / union - (hull - union) / hull


@triton.jit
def giou_forward_kernel(
    boxes1_ptr,  # [n, 4], strided
    boxes2_ptr,  # [n, 4], strided
    giou_ptr,  # [n]
    n,
    stride1,
    step1,
    stride2,
    step2,
    eps,
    FAULT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive pairs.
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = rows < n
    eps = tl.full((), eps, COMPUTE)
    ax1, ay1, ax2, ay2 = load_box(boxes1_ptr, rows, stride1, step1, mask, FAULT, COMPUTE)
    bx1, by1, bx2, by2 = load_box(boxes2_ptr, rows, stride2, step2, mask, FAULT, COMPUTE)
    score = score_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, FAULT).to(giou_ptr.dtype.element_ty)
    if FAULT == "store_unmasked":
        tl.store(giou_ptr + rows, score)
    else:
        tl.store(giou_ptr + rows, score, mask=mask)


@triton.jit
def lesser(grad, mine, other):
    return tl.where(mine == other, 0.5 * grad, tl.where(mine > other, 0.0, grad))


@triton.jit
def greater(grad, mine, other):
    return tl.where(mine == other, 0.5 * grad, tl.where(mine < other, 0.0, grad))


@triton.jit
def store_gradient(
    ptr, rows, x1, y1, x2, y2, ox1, oy1, ox2, oy2,
    unite, width, height, hull_width, hull_height, mask, FAULT: tl.constexpr,
):  # fmt: skip
    at = ptr + rows.to(tl.int64) * 4
    if FAULT == "store_unmasked":
        mask = rows >= 0
    by_width, by_height = unite * (y2 - y1), unite * (x2 - x1)
    element: tl.constexpr = ptr.dtype.element_ty
    tl.store(at, (-by_width - greater(width, x1, ox1) - lesser(hull_width, x1, ox1)).to(element), mask=mask)
    tl.store(at + 1, (-by_height - greater(height, y1, oy1) - lesser(hull_height, y1, oy1)).to(element), mask=mask)
    tl.store(at + 2, (by_width + lesser(width, x2, ox2) + greater(hull_width, x2, ox2)).to(element), mask=mask)
    tl.store(at + 3, (by_height + lesser(height, y2, oy2) + greater(hull_height, y2, oy2)).to(element), mask=mask)


@triton.jit
def giou_backward_kernel(
    grad_output_ptr,  # [n], strided
    boxes1_ptr,  # [n, 4], strided
    boxes2_ptr,  # [n, 4], strided
    grad_boxes1_ptr,  # [n, 4]
    grad_boxes2_ptr,  # [n, 4]
    n,
    grad_stride,
    stride1,
    step1,
    stride2,
    step2,
    eps,
    FAULT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # One program owns BLOCK_ROWS consecutive pairs.
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = rows < n
    eps = tl.full((), eps, COMPUTE)
    grad = tl.load(grad_output_ptr + rows.to(tl.int64) * grad_stride, mask=mask, other=0.0).to(COMPUTE)
    ax1, ay1, ax2, ay2 = load_box(boxes1_ptr, rows, stride1, step1, mask, "", COMPUTE)
    bx1, by1, bx2, by2 = load_box(boxes2_ptr, rows, stride2, step2, mask, "", COMPUTE)
    width = least(ax2, bx2, "") - greatest(ax1, bx1, "")
    height = least(ay2, by2, "") - greatest(ay1, by1, "")
    over_width, over_height = greatest(width, 0.0, ""), greatest(height, 0.0, "")
    intersection = over_width * over_height
    raw_union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - intersection
    hull_width = greatest(ax2, bx2, "") - least(ax1, bx1, "")
    hull_height = greatest(ay2, by2, "") - least(ay1, by1, "")
    raw_hull = hull_width * hull_height
    union, hull = greatest(raw_union, eps, ""), greatest(raw_hull, eps, "")
    unite = tl.where(raw_union >= eps, grad / hull - grad * (intersection / union) / union, 0.0)
    enclose = tl.where(raw_hull >= eps, grad * ((hull - union) / hull) / hull - grad / hull, 0.0)
    intersect = grad / union - unite
    by_width = tl.where(width >= 0.0, intersect * over_height, 0.0)
    by_height = tl.where(height >= 0.0, intersect * over_width, 0.0)
    by_hull_width, by_hull_height = enclose * hull_height, enclose * hull_width
    store_gradient(
        grad_boxes2_ptr, rows, bx1, by1, bx2, by2, ax1, ay1, ax2, ay2,
        unite, by_width, by_height, by_hull_width, by_hull_height, mask, FAULT,
    )  # fmt: skip
    store_gradient(
        grad_boxes1_ptr, rows, ax1, ay1, ax2, ay2, bx1, by1, bx2, by2,
        unite, by_width, by_height, by_hull_width, by_hull_height, mask, FAULT,
    )  # fmt: skip


def giou(forward_fault: str = "", backward_fault: str = "") -> Implementation:
    """Return giou for boxes of any dtype, with a fault."""

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        rows1, rows2 = boxes1.reshape(-1, 4), boxes2.reshape(-1, 4)
        output = torch.zeros(boxes1.shape[:-1], dtype=boxes1.dtype, device=boxes1.device)
        n = output.numel()
        # The fault launches only whole blocks, which is right if the number of pairs is a multiple of the block.
        blocks = n // BLOCK_ROWS if forward_fault == "tail_dropped" else triton.cdiv(n, BLOCK_ROWS)
        if blocks:
            with triton_launch.on(boxes1.device):
                giou_forward_kernel[(blocks,)](
                    rows1,
                    rows2,
                    output,
                    n,
                    *rows1.stride(),
                    *rows2.stride(),
                    eps,
                    FAULT=forward_fault,
                    COMPUTE=tl.float64 if boxes1.dtype == torch.float64 else tl.float32,
                    BLOCK_ROWS=BLOCK_ROWS,
                )
        return output

    def backward(grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> tuple:
        grads, rows1, rows2 = grad_output.reshape(-1), boxes1.reshape(-1, 4), boxes2.reshape(-1, 4)
        n = grads.numel()
        # Allocate both gradients and one more block together: a store past the first gradient lands in the second.
        buffer = torch.empty((2 * n + BLOCK_ROWS, 4), dtype=boxes1.dtype, device=boxes1.device)
        grad_boxes1, grad_boxes2 = buffer[:n], buffer[n : 2 * n]
        if n:
            with triton_launch.on(boxes1.device):
                giou_backward_kernel[(triton.cdiv(n, BLOCK_ROWS),)](
                    grads,
                    rows1,
                    rows2,
                    grad_boxes1,
                    grad_boxes2,
                    n,
                    *grads.stride(),
                    *rows1.stride(),
                    *rows2.stride(),
                    eps,
                    FAULT=backward_fault,
                    COMPUTE=tl.float64 if boxes1.dtype == torch.float64 else tl.float32,
                    BLOCK_ROWS=BLOCK_ROWS,
                )
        return grad_boxes1.view(boxes1.shape), grad_boxes2.view(boxes2.shape)

    return wire("giou", forward, backward)
