"""Planted faults in giou_matrix: in small kernels of Triton and CUDA C++, and in torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.giou.triton_boxes import giou_of, maximum
from fourfold.impls.giou_matrix.torch_eager import check_giou_matrix
from fourfold.impls.giou_matrix.torch_eager import giou_matrix as right
from fourfold.properties import giou_matrix as properties
from fourfold.properties.giou_matrix import random_case

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.repeatability import repeats_bit_for_bit

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law
from .planted_cuda import Planted
from .steps import Implementation, differentiable

Tensor = torch.Tensor
BLOCK = 256
NAMES = ("boxes_a", "boxes_b")
DEFAULTS = {"mode": "giou", "eps": 1e-5}


def right_gradients(grad: Tensor, _: Tensor, boxes_a: Tensor, boxes_b: Tensor, **parameters: Any) -> tuple:
    with torch.enable_grad():
        leaves = [boxes.detach().requires_grad_() for boxes in (boxes_a, boxes_b)]
        return torch.autograd.grad(right(*leaves, **parameters), leaves, grad)


def wired(forward: Callable[..., Tensor], gradients: Callable[..., tuple] = right_gradients) -> Implementation:
    return differentiable(NAMES, forward, gradients, check_giou_matrix, **DEFAULTS)


@triton.jit
def giou_matrix_kernel(
    a_ptr,
    b_ptr,
    scores_ptr,
    n,
    m,
    a_stride,
    b_stride,
    eps: tl.float64,
    FAULT: tl.constexpr,
    ENCLOSED: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK consecutive pairs.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n * m
    row, column = at // m, at % m
    if FAULT == "offsets_in_32_bits":
        row = row.to(tl.int32)
    if FAULT == "contiguous_assumed":
        a_stride, b_stride = 4, 4
    a, b = a_ptr + row * a_stride, b_ptr + column * b_stride
    ax1, ay1 = tl.load(a, mask=mask, other=0.0).to(C), tl.load(a + 1, mask=mask, other=0.0).to(C)
    ax2, ay2 = tl.load(a + 2, mask=mask, other=0.0).to(C), tl.load(a + 3, mask=mask, other=0.0).to(C)
    bx1, by1 = tl.load(b, mask=mask, other=0.0).to(C), tl.load(b + 1, mask=mask, other=0.0).to(C)
    bx2, by2 = tl.load(b + 2, mask=mask, other=0.0).to(C), tl.load(b + 3, mask=mask, other=0.0).to(C)
    if FAULT == "corners_put_in_order":
        ax1, ax2 = tl.minimum(ax1, ax2), tl.maximum(ax1, ax2)
    eps = tl.full((), eps, C)
    if FAULT == "eps_of_float32":
        eps = tl.full((), 1e-5, C)
    if FAULT == "mode_ignored":
        score = giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, True)
    else:
        score = giou_of(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, eps, ENCLOSED)
    if FAULT == "negative_scores_clamped":
        score = maximum(score, 0.0)
    tl.store(scores_ptr + at, score.to(scores_ptr.dtype.element_ty), mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return giou_matrix in Triton for any dtype, with a fault."""

    def forward(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
        a, b = (boxes if boxes.stride(1) == 1 else boxes.contiguous() for boxes in (boxes_a, boxes_b))
        scores = torch.empty((len(a), len(b)), dtype=a.dtype, device=a.device)
        if count := scores.numel():
            with triton_launch.on(a.device):
                giou_matrix_kernel[(triton.cdiv(count, BLOCK),)](
                    *(a, b, scores, *scores.shape, a.stride(0), b.stride(0), eps),
                    FAULT=fault,
                    ENCLOSED=mode == "giou",
                    C=triton_launch.COMPUTE[a.dtype],
                    BLOCK=BLOCK,
                )
        return scores

    return wired(forward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "giou_matrix_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return giou_matrix in CUDA C++ for float32, with a fault."""

    def forward(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
        a, b = boxes_a if boxes_a.stride(1) == 1 else boxes_a.contiguous(), boxes_b.contiguous()
        scores = torch.empty((len(a), len(b)), dtype=a.dtype, device=a.device)
        if count := scores.numel():
            arguments = (a, b, scores, *scores.shape, a.stride(0), mode == "giou", eps)
            KERNELS.launch("giou_matrix_kernel", fault, -(-count // BLOCK), BLOCK, *arguments)
        return scores

    return wired(forward)


def in_the_boxes_dtype(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
    """Areas of a half type overflow at 256 by 256 pixels."""
    low = torch.maximum(boxes_a[:, None, :2], boxes_b[:, :2])
    sides = (torch.minimum(boxes_a[:, None, 2:], boxes_b[:, 2:]) - low).clamp(min=0)
    inner = sides[..., 0] * sides[..., 1]
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (boxes_a, boxes_b)]
    union = (areas[0][:, None] + areas[1] - inner).clamp(min=eps)
    hull = torch.maximum(boxes_a[:, None, 2:], boxes_b[:, 2:]) - torch.minimum(boxes_a[:, None, :2], boxes_b[:, :2])
    hull = (hull[..., 0] * hull[..., 1]).clamp(min=eps)
    return inner / union - ((hull - union) / hull if mode == "giou" else 0)


def area_of_a_twice(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
    """Divide by the area of the first box, as a coverage."""
    scores = right(boxes_a, boxes_b, mode, eps)
    iou = right(boxes_a, boxes_b, "iou", eps)
    area = ((boxes_a[:, 2] - boxes_a[:, 0]) * (boxes_a[:, 3] - boxes_a[:, 1])).clamp(min=eps)[:, None]
    other = (boxes_b[:, 2] - boxes_b[:, 0]) * (boxes_b[:, 3] - boxes_b[:, 1])
    return scores - iou + iou * (area + other) / (1 + iou) / area


def pairs_of_one_list_with_itself(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
    """Take the upper triangle for the whole matrix where both have as many boxes."""
    scores = right(boxes_a, boxes_b, mode, eps)
    return scores.triu() + scores.triu(1).T if len(boxes_a) == len(boxes_b) else scores


def hull_left_out_of_the_negative(boxes_a: Tensor, boxes_b: Tensor, mode: str, eps: float) -> Tensor:
    """Add the penalty in place of taking it off."""
    scores, iou = right(boxes_a, boxes_b, "giou", eps), right(boxes_a, boxes_b, "iou", eps)
    return 2 * iou - scores if mode == "giou" else iou


def first_tile_alone(grad: Tensor, _: Tensor, boxes_a: Tensor, boxes_b: Tensor, **parameters: Any) -> tuple:
    """Sum over the first 32 columns alone, as a kernel does that writes a tile's sum over those of others."""
    of_a, _ = right_gradients(grad[:, :32], _, boxes_a, boxes_b[:32], **parameters)
    return of_a, right_gradients(grad, _, boxes_a, boxes_b, **parameters)[1]


def mean_over_pairs(grad: Tensor, _: Tensor, boxes_a: Tensor, boxes_b: Tensor, **parameters: Any) -> tuple:
    of_a, of_b = right_gradients(grad, _, boxes_a, boxes_b, **parameters)
    return of_a / max(len(boxes_b), 1), of_b / max(len(boxes_a), 1)


def gradients_change_places(grad: Tensor, _: Tensor, boxes_a: Tensor, boxes_b: Tensor, **parameters: Any) -> tuple:
    of_a, of_b = right_gradients(grad, _, boxes_a, boxes_b, **parameters)
    return (of_b, of_a) if of_a.shape == of_b.shape else (of_a, of_b)


def gradients_by_atomics(grad: Tensor, _: Tensor, boxes_a: Tensor, boxes_b: Tensor, **parameters: Any) -> tuple:
    """Add the rows in an order that changes from call to call, as atomics do."""
    order = torch.randperm(len(boxes_a), generator=torch.Generator().manual_seed(next(_calls)), device="cpu")
    order = order.to(grad.device)
    of_a, _ = right_gradients(grad, _, boxes_a, boxes_b, **parameters)
    return of_a, right_gradients(grad[order], _, boxes_a[order], boxes_b, **parameters)[1]


_calls = iter(range(1 << 62))


def _of_torch(
    mistake: Callable[..., Any], check: Check = forward_agrees, says: str = OUTPUT, dtype: str = "float32"
) -> Fault:
    of_gradients = check in (backward_agrees, repeats_bit_for_bit)
    return Fault(
        name=mistake.__name__,
        operation="giou_matrix",
        make=lambda: wired(right, mistake) if of_gradients else wired(mistake),
        check=check,
        says=says,
        right_on=None,
        dtype=dtype,
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("giou_matrix", in_triton, in_cuda, right_on=None)
    return (
        of_triton("offsets_in_32_bits", examples=far_apart(random_case(9, 2))),
        of_triton("contiguous_assumed", right_on="tiles_giou"),
        of_triton("corners_put_in_order"),
        of_triton("eps_of_float32", right_on="tiles_giou"),
        of_triton("mode_ignored", right_on="tiles_giou"),
        of_triton("negative_scores_clamped"),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN, right_on="one_with_one_giou"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(random_case(9, 2))),
        of_cuda("rows_as_long_as_columns", cuda_on_cpu.Race, right_on="as_many_of_both_giou"),
        of_cuda("nan_dropped"),
        of_cuda("sides_not_clamped"),
        of_cuda("plus_one"),
        _of_torch(in_the_boxes_dtype, dtype="float16"),
        _of_torch(first_tile_alone, backward_agrees, GRADIENT),
        _of_torch(mean_over_pairs, backward_agrees, GRADIENT),
        _of_torch(gradients_change_places, backward_agrees, GRADIENT),
        _of_torch(gradients_by_atomics, repeats_bit_for_bit, "differ"),
        _of_torch(area_of_a_twice, law(properties.exchanged_boxes_transpose_the_matrix), "left side"),
        _of_torch(pairs_of_one_list_with_itself, law(properties.each_pair_scores_as_giou), "left side"),
        _of_torch(hull_left_out_of_the_negative, law(properties.never_above_intersection_over_union), "left side"),
    )


FAULTS = _faults()
