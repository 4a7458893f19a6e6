"""Planted faults in the losses by DIoU and CIoU: in small Triton and CUDA C++ kernels, and in torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.impls.ciou_loss.torch_eager import angle, pairwise_ciou
from fourfold.impls.diou_loss.torch_eager import pairwise_diou
from fourfold.impls.giou.arguments import check_giou_loss, check_giou_loss_ragged
from fourfold.impls.giou.torch_eager import clamped, pairwise_giou
from fourfold.impls.giou_loss.torch_eager import padded_loss
from fourfold.impls.giou_loss_ragged.torch_eager import ragged_loss
from fourfold.properties import ciou_loss, ciou_loss_ragged, diou_loss, diou_loss_ragged, giou_loss, giou_loss_ragged
from triton.language.extra import libdevice

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.declaration.reductions import law_of
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .planted import GRADIENT, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .planted_triton import greatest, least, load_box
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
Pairwise = Callable[[Tensor, Tensor, float], Tensor]
RIGHT: dict[str, Pairwise] = {"diou": pairwise_diou, "ciou": pairwise_ciou}
RECORDS = {
    module.operation.name: module.operation for module in (diou_loss, ciou_loss, diou_loss_ragged, ciou_loss_ragged)
}
BLOCK = 64


def in_total(pairwise: Pairwise, pred: Tensor, target: Tensor, *offsets: Tensor, eps: float) -> Tensor:
    """The mean loss by a measure, of ragged boxes if there are offsets."""
    if offsets:
        return ragged_loss(pred, target, offsets[0], eps, pairwise)
    return padded_loss(in_compute_dtype(pred), in_compute_dtype(target), eps, pairwise).to(pred.dtype)


def wired(
    operation: str,
    pairwise: Pairwise | None = None,
    of_gradient: Pairwise | None = None,
    total: Callable[..., Tensor] = in_total,
    total_of_gradient: Callable[..., Tensor] = in_total,
    change: Callable[..., Tensor] = lambda gradient: gradient,
) -> Implementation:
    """Make one of the losses.

    Args:
        operation: its name.
        pairwise: the score, in place of the right one.
        of_gradient: the score that is differentiated.
        total: makes the loss of a score, as `in_total` does.
        total_of_gradient: makes the loss that is differentiated.
        change: is made to the gradient of pred.
    """
    right, ragged = RIGHT[operation.partition("_")[0]], operation.endswith("_ragged")

    def forward(*tensors: Tensor, eps: float) -> Tensor:
        return total(pairwise or right, *tensors, eps=eps)

    def backward(grad: Tensor, _: Tensor, pred: Tensor, target: Tensor, *offsets: Tensor, eps: float) -> tuple:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (pred, target)]
            output = total_of_gradient(of_gradient or right, *leaves, *offsets, eps=eps)
            of_pred, of_target = torch.autograd.grad(output, leaves, grad)
        return change(of_pred), of_target, *[None] * len(offsets)

    names = ("pred", "target", "offsets") if ragged else ("pred", "target")
    check = check_giou_loss_ragged if ragged else check_giou_loss
    return differentiable(names, forward, backward, check, eps=1e-5)


@triton.jit
def pairs_kernel(
    a_ptr, b_ptr, scores_ptr, n, eps: tl.float64, ASPECT: tl.constexpr, FAULT: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns BLOCK consecutive pairs.
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n
    eps = tl.full((), eps, C)
    ax1, ay1, ax2, ay2 = load_box(a_ptr, rows, 4, 1, mask, "", C)
    bx1, by1, bx2, by2 = load_box(b_ptr, rows, 4, 1, mask, "", C)
    width = greatest(least(ax2, bx2, "") - greatest(ax1, bx1, ""), 0.0, "")
    height = greatest(least(ay2, by2, "") - greatest(ay1, by1, ""), 0.0, "")
    areas = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)
    iou = width * height / greatest(areas - width * height, eps, "")
    x, y = 0.5 * (ax1 + ax2) - 0.5 * (bx1 + bx2), 0.5 * (ay1 + ay2) - 0.5 * (by1 + by2)
    if FAULT == "centres_not_halved":
        x, y = 2.0 * x, 2.0 * y
    hull_width = greatest(ax2, bx2, "") - least(ax1, bx1, "")
    hull_height = greatest(ay2, by2, "") - least(ay1, by1, "")
    distance, diagonal = x * x + y * y, hull_width * hull_width + hull_height * hull_height
    if FAULT == "diagonal_not_squared":
        diagonal = tl.sqrt(diagonal)
    if FAULT == "area_in_place_of_the_diagonal":
        diagonal = hull_width * hull_height
    if FAULT != "eps_of_the_union_alone":
        diagonal = greatest(diagonal, eps, "")
    score = iou - distance / diagonal
    if ASPECT:
        a_height, b_height = greatest(ay2 - ay1, eps, ""), greatest(by2 - by1, eps, "")
        if FAULT == "heights_as_they_are":
            a_height, b_height = ay2 - ay1, by2 - by1
        angle = libdevice.atan((ax2 - ax1) / a_height) - libdevice.atan((bx2 - bx1) / b_height)
        if FAULT == "ratios_in_place_of_angles":
            angle = (ax2 - ax1) / a_height - (bx2 - bx1) / b_height
        v = angle * angle * 0.4052847345693511
        if FAULT == "pi_of_three_digits":
            v = angle * angle * (4.0 / (3.14 * 3.14))
        alpha = v / greatest(1.0 - iou + v, eps, "")
        if FAULT == "alpha_only_where_boxes_overlap_by_half":
            alpha = tl.where(iou >= 0.5, alpha, 0.0)
        score -= alpha * v
    tl.store(scores_ptr + rows, score, mask=mask)


def in_triton(operation: str, fault: str = "") -> Implementation:
    """Return one of the losses, whose scores are a Triton kernel's, with a fault."""

    def pairwise(a: Tensor, b: Tensor, eps: float) -> Tensor:
        scores = torch.empty(a.shape[:-1], dtype=a.dtype, device=a.device)
        if n := scores.numel():
            with triton_launch.on(a.device):
                pairs_kernel[(triton.cdiv(n, BLOCK),)](
                    a.contiguous(), b.contiguous(), scores, n, eps, ASPECT=operation.startswith("ciou"), FAULT=fault,
                    C=triton_launch.COMPUTE[a.dtype], BLOCK=BLOCK,
                )  # fmt: skip
        return scores

    return wired(operation, pairwise)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "pairs_kernel")


def in_cuda(operation: str, fault: str = "RIGHT") -> Implementation:
    """Return one of the losses for float32, whose scores are a CUDA kernel's, with a fault."""

    def pairwise(a: Tensor, b: Tensor, eps: float) -> Tensor:
        scores = torch.empty(a.shape[:-1], device=a.device)
        if n := scores.numel():
            aspect = operation.startswith("ciou")
            arguments = (a.contiguous(), b.contiguous(), scores, n, aspect, eps)
            KERNELS.launch("pairs_kernel", fault, -(-n // BLOCK), BLOCK, *arguments)
        return scores

    return wired(operation, pairwise)


# ---- scores


def by_parts(a: Tensor, b: Tensor, eps: float, of: Callable[..., Tensor]) -> Tensor:
    """I / U less what `of` makes of the offsets of the centres and the hull's sides, ``[..., 2]`` each."""
    apart = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    return pairwise_giou(a, b, eps, enclosed=False) - of(apart, hull, eps)


def penalty(apart: Tensor, hull: Tensor, eps: float) -> Tensor:
    return apart.square().sum(-1) / clamped(hull.square().sum(-1), eps)


def in_torchvisions_steps(a: Tensor, b: Tensor, eps: float, aspect: bool) -> Tensor:
    """The right score: torchvision's steps in their order, with this library's clamps where that adds eps."""
    x1, y1, x2, y2 = a.unbind(-1)
    x1g, y1g, x2g, y2g = b.unbind(-1)
    iou = pairwise_giou(a, b, eps, enclosed=False)
    enclosing = torch.min(x1, x1g), torch.min(y1, y1g), torch.max(x2, x2g), torch.max(y2, y2g)
    diagonal = (enclosing[2] - enclosing[0]) ** 2 + (enclosing[3] - enclosing[1]) ** 2
    x, y, xg, yg = (x2 + x1) / 2, (y1 + y2) / 2, (x1g + x2g) / 2, (y1g + y2g) / 2
    score = iou - ((x - xg) ** 2 + (y - yg) ** 2) / clamped(diagonal, eps)
    if not aspect:
        return score
    v = (4 / (torch.pi**2)) * torch.pow(
        torch.atan((x2g - x1g) / clamped(y2g - y1g, eps)) - torch.atan((x2 - x1) / clamped(y2 - y1, eps)), 2
    )
    with torch.no_grad():
        alpha = v / (1 - iou + v).clamp(min=eps)
    return score - alpha * v


def as_torchvision(operation: str) -> Implementation:
    """Return one of the losses in torchvision's steps, differentiated by autograd."""
    pairwise = functools.partial(in_torchvisions_steps, aspect=operation.startswith("ciou"))
    return wired(operation, pairwise, pairwise)


def each_distance_by_all_diagonals(apart: Tensor, hull: Tensor, eps: float) -> Tensor:
    """Divide ``[n, 1]`` by ``[n]``, and take the mean of all: as losses do that are right for one box."""
    distance, diagonal = apart.square().sum(-1, keepdim=True), hull.square().sum(-1).clamp(min=eps)
    return (distance / diagonal.unsqueeze(-2)).mean(-1)


def in_half(apart: Tensor, hull: Tensor, eps: float) -> Tensor:
    """Take the squares in float16, where those of 256 pixels are infinite."""
    apart, hull = apart.half(), hull.half()
    return (apart.square().sum(-1) / hull.square().sum(-1)).to(torch.float32).nan_to_num(nan=0.0)


def centres_not_halved(apart: Tensor, hull: Tensor, eps: float) -> Tensor:
    return penalty(2 * apart, hull, eps)


def x_alone(apart: Tensor, hull: Tensor, eps: float) -> Tensor:
    return penalty(apart[..., :1], hull, eps)


def sides_count_too(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Compute EIoU, which takes the sides' differences beside the distance of the centres."""
    sides_apart = (a[..., 2:] - a[..., :2]) - (b[..., 2:] - b[..., :2])
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    return pairwise_diou(a, b, eps) - penalty(sides_apart, hull, eps)


def aspect_by(weigh: Callable[..., Tensor]) -> Pairwise:
    """CIoU whose last term is made of I / U, v and eps."""

    def score(a: Tensor, b: Tensor, eps: float) -> Tensor:
        v = 4 / torch.pi**2 * (angle(a, eps) - angle(b, eps)).square()
        return pairwise_diou(a, b, eps) - weigh(pairwise_giou(a, b, eps, enclosed=False), v, eps)

    return score


def alpha_in_the_graph(iou: Tensor, v: Tensor, eps: float) -> Tensor:
    return v * v / (1 - iou + v).clamp(min=eps)


def aspect_held_constant(iou: Tensor, v: Tensor, eps: float) -> Tensor:
    return (v * v / (1 - iou + v).clamp(min=eps)).detach()


def term_of_another_sign(iou: Tensor, v: Tensor, eps: float) -> Tensor:
    return -v * v / (1 - iou + v).clamp(min=eps)


# ---- means


def over_all_rows(pairwise: Pairwise, pred: Tensor, target: Tensor, eps: float) -> Tensor:
    """Count the rows of padding too."""
    share = (target[..., 3] > 0).sum().clamp(min=1) / max(target[..., 3].numel(), 1)
    return (in_total(pairwise, pred, target, eps=eps) * share).to(pred.dtype)


def masked_by_a_product(pairwise: Pairwise, pred: Tensor, target: Tensor, eps: float) -> Tensor:
    valid = (target[..., 3] > 0).to(pred.dtype)
    return ((1 - pairwise(pred, target, eps)) * valid).sum() / valid.sum().clamp(min=1)


def last_row_of_a_sample_left_out(pairwise: Pairwise, pred: Tensor, target: Tensor, eps: float) -> Tensor:
    rows = slice(None, -1 if pred.shape[1] > 1 else None)
    return in_total(pairwise, pred[:, rows], target[:, rows], eps=eps)


def places_one_too_far(pairwise: Pairwise, pred: Tensor, target: Tensor, offsets: Tensor, eps: float) -> Tensor:
    """Take the box of pred that follows, but for the last: offsets that begin at 1."""
    return in_total(pairwise, torch.cat([pred[:, 1:], pred[:, -1:]], 1), target, offsets, eps=eps)


def over_the_samples(pairwise: Pairwise, pred: Tensor, target: Tensor, offsets: Tensor, eps: float) -> Tensor:
    """Divide by the number of samples, as a loss by images does, and not by that of the boxes."""
    return in_total(pairwise, pred, target, offsets, eps=eps) * len(target) / max(len(pred), 1)


def one_row_too_many(pairwise: Pairwise, pred: Tensor, target: Tensor, *offsets: Tensor, eps: float) -> Tensor:
    """Divide by one row more than there are."""
    rows = len(target) if offsets else int((target[..., 3] > 0).sum())
    return in_total(pairwise, pred, target, *offsets, eps=eps) * (rows / (rows + 1))


def to_the_next_box(gradient: Tensor) -> Tensor:
    return gradient.roll(1, 1)


# ---- the faults


def identical(dtype: DType) -> Case:
    """Return two samples of the same two boxes as targets, ragged."""
    boxes = np.tile(np.array([[0, 0, 1, 1], [1, 0, 3, 2]], dtype=dtype.numpy), (2, 1, 1))
    inputs = giou_loss_ragged.ragged(boxes, boxes, np.array([2, 2]))
    return Case(inputs, np.array(0.5, dtype=dtype.numpy), {"eps": 1e-5})


def _of_torch(
    operation: str, name: str, check: Check = forward_agrees, says: str = r"output.*is .*expected", **more: Any
) -> Fault:
    fields = {key: more.pop(key) for key in ("dtype", "examples", "right_on", "search", "source") if key in more}
    return Fault(
        name=name,
        operation=operation,
        make=functools.partial(wired, operation, **more),
        check=check,
        says=says,
        **{"right_on": identical if operation.endswith("_ragged") else "identical_boxes", **fields},
    )


def _of(operation: str) -> tuple[Fault, ...]:
    """The faults of one loss."""
    ragged, ciou = operation.endswith("_ragged"), operation.startswith("ciou")
    of_triton, of_cuda = kernel_faults(
        operation,
        functools.partial(in_triton, operation),
        functools.partial(in_cuda, operation),
        right_on=identical if ragged else "identical_boxes",
        says=r"output.*is .*expected",
    )
    of_torch = functools.partial(_of_torch, operation)
    gradient = {"check": backward_agrees, "says": GRADIENT}
    parts = {
        part.__name__: functools.partial(by_parts, of=part)
        for part in (each_distance_by_all_diagonals, in_half, centres_not_halved, x_alone)
    }
    found = [
        of_torch("each_distance_by_all_diagonals", pairwise=parts["each_distance_by_all_diagonals"]),
        of_triton("centres_not_halved"),
        of_triton("diagonal_not_squared"),
        of_triton("area_in_place_of_the_diagonal"),
        of_triton("eps_of_the_union_alone"),
        of_cuda("store_past_the_end", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("centres_not_halved"),
        of_cuda("diagonal_not_squared"),
        of_cuda("corners_in_place_of_centres"),
        of_torch(
            "one_row_too_many", law(law_of(RECORDS[operation])), "left side", total=one_row_too_many, right_on=None
        ),
    ]
    if ciou:
        found += [
            of_torch("alpha_in_the_graph", of_gradient=aspect_by(alpha_in_the_graph), **gradient),
            of_torch("aspect_held_constant", of_gradient=aspect_by(aspect_held_constant), **gradient),
            of_triton("heights_as_they_are"),
            of_triton("ratios_in_place_of_angles"),
            of_triton("pi_of_three_digits"),
            of_triton("alpha_only_where_boxes_overlap_by_half"),
            of_cuda("angles_added"),
            of_cuda("polynomial_of_three_terms"),
        ]
    if ragged:
        return (
            *found,
            of_torch("places_one_too_far", total=places_one_too_far, right_on=None),
            of_torch("gradient_to_the_next_box", change=to_the_next_box, right_on=None, **gradient),
            *(
                of_torch(f"{name}_by_law", law(which), "left side", right_on=None, **how)
                for name, which, how in zip(
                    ("gradient_to_the_next_box", "over_the_samples", "centres_not_halved"),
                    RECORDS[operation].laws,
                    (
                        {"change": to_the_next_box},
                        {"total": over_the_samples},
                        {"pairwise": parts["centres_not_halved"]},
                    ),
                    strict=True,
                )
            ),
        )
    masked = {"examples": named(diou_loss, "nan_in_padding_rows")}
    by_law: dict[str, tuple[Any, dict[str, Any]]] = {
        "masked_by_a_product": (
            giou_loss.padding_rows_get_no_gradient,
            {"total_of_gradient": masked_by_a_product, **masked},
        ),
        "over_all_rows": (giou_loss.padding_rows_add_nothing, {"total": over_all_rows}),
        "last_row_left_out": (
            giou_loss.the_order_of_samples_does_not_matter,
            {"total": last_row_of_a_sample_left_out},
        ),
        "sides_count_too": (diou_loss.LAWS[0], {"pairwise": sides_count_too}),
        "centres_not_halved": (diou_loss.LAWS[1], {"pairwise": parts["centres_not_halved"]}),
        "x_alone": (diou_loss.LAWS[2], {"pairwise": parts["x_alone"]}),
    }
    if ciou:
        by_law["term_of_another_sign"] = ciou_loss.never_below_diou_loss, {"pairwise": aspect_by(term_of_another_sign)}
    return (
        *found,
        of_torch("squares_in_half", pairwise=parts["in_half"], examples=named(diou_loss, "far_from_zero")),
        of_torch("mean_over_padding", total=over_all_rows),
        *(
            of_torch(f"{name}_by_law", law(which), "left side", **{"right_on": None, **how})
            for name, (which, how) in by_law.items()
        ),
    )


FAULTS = tuple(fault for name in RECORDS for fault in _of(name))
