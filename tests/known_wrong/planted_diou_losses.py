"""Planted faults in the losses by DIoU and CIoU: edits of their versions in torch, Triton and CUDA C++."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from fourfold.impls.giou.torch_eager import clamped, in_compute_dtype, pairwise_giou
from fourfold.impls.giou_loss.torch_eager import padded, padded_loss
from fourfold.impls.giou_loss_ragged.torch_eager import ragged, ragged_loss
from fourfold.properties import ciou_loss, ciou_loss_ragged, diou_loss, diou_loss_ragged, giou_loss, giou_loss_ragged

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.declaration.reductions import law_of
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .planted import Fault, Implementation, named

Tensor = torch.Tensor
Pairwise = Callable[[Tensor, Tensor, float], Tensor]
RECORDS = {
    module.operation.name: module.operation for module in (diou_loss, ciou_loss, diou_loss_ragged, ciou_loss_ragged)
}


def of_pairwise(operation: str, pairwise: Pairwise) -> Implementation:
    """Return one of the losses, computed from a score of pairs."""

    @ragged
    def by_offsets(pred: Tensor, target: Tensor, offsets: Tensor, eps: float = 1e-5) -> Tensor:
        return ragged_loss(pred, target, offsets, eps, pairwise)

    @padded
    def by_rows(pred: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
        return padded_loss(in_compute_dtype(pred), in_compute_dtype(target), eps, pairwise).to(pred.dtype)

    return by_offsets if operation.endswith("_ragged") else by_rows


def in_torchvisions_steps(a: Tensor, b: Tensor, eps: float, aspect: bool) -> Tensor:
    """Compute the right score by torchvision's steps, with this library's clamps where torchvision adds eps."""
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
    return of_pairwise(operation, pairwise)


def identical(dtype: DType) -> Case:
    """Return two samples of the same two boxes as targets, ragged."""
    boxes = np.tile(np.array([[0, 0, 1, 1], [1, 0, 3, 2]], dtype=dtype.numpy), (2, 1, 1))
    inputs = giou_loss_ragged.pack_boxes(boxes, boxes, np.array([2, 2]))
    return Case(inputs, np.array(0.5, dtype=dtype.numpy), {"eps": 1e-5})


# fmt: off
DISTANCE = "diou_loss/torch_eager.py: apart.square().sum(-1) / diagonal =>"
NOT_HALVED = "diou_loss/torch_eager.py: (first - second).sum(-2) / 2 => (first - second).sum(-2)"
ASPECT = "ciou_loss/torch_eager.py: - alpha * v =>"
PADDED, RAGGED = "giou_loss/torch_eager.py: ", "giou_loss_ragged/torch_eager.py: "
VALID, COUNT = "    valid = target[..., 3] > 0\n =>", "valid.sum().clamp(min=1) =>"
OVER_ALL_ROWS, MEAN = f"{PADDED}{COUNT} max(valid.numel(), 1)", f"{RAGGED}torch.nan).sum() / total) =>"
TO_THE_NEXT_BOX = (
    f"{RAGGED}    loss = 1 - pairwise( =>     other = pred[sample, (row - offsets[sample] + 1) % max_boxes]\n"
    "    boxes = boxes.detach() + (other - other.detach())\n    loss = 1 - pairwise("
)
BOXES = "giou/triton_boxes.py: "
CENTRES = "0.5 * ((ax1 - bx1) + (ax2 - bx2)), 0.5 * ((ay1 - by1) + (ay2 - by2)) =>"
DIAGONAL = f"{BOXES}maximum(hull_width * hull_width + hull_height * hull_height, eps) =>"
ANGLE = f"{BOXES}libdevice.atan((x2 - x1) / maximum(y2 - y1, eps)) =>"


CENTRE_X = "giou/measures.cuh: : x(C(0.5) * ((a.x1 - b.x1) + (a.x2 - b.x2))), =>"
POLYNOMIAL = (
    "giou/measures.cuh: return atan(quotient(box.x2 - box.x1, maximum(box.y2 - box.y1, eps))); =>"
    " const C ratio = quotient(box.x2 - box.x1, maximum(box.y2 - box.y1, eps));\n"
    "        const C x = fabs(ratio) > 1 ? 1 / ratio : ratio;\n"
    "        const C angle = x * (1 - x * x * (C(0.3333333) - C(0.2) * x * x));\n"
    "        return fabs(ratio) > 1 ? copysign(C(1.5707963), ratio) - angle : angle;"
)


def _of(operation: str) -> tuple[Fault, ...]:
    """Return the faults of one loss."""
    ragged, ciou, record = operation.endswith("_ragged"), operation.startswith("ciou"), RECORDS[operation]
    torchs, tritons = Edits(operation, "torch"), Edits(operation, "triton")
    same = {"right_on": identical if ragged else "identical_boxes"}
    out = {"says": r"output.*is .*expected", **same}
    of_torch, of_triton = functools.partial(torchs, **out), functools.partial(tritons, **out)
    cudas = Edits(operation, "cuda")
    of_cuda = functools.partial(cudas, **out)
    found = [
        # [n, 1] divided by [n], and the mean of all, as in losses that are right for one box.
        of_torch("each_distance_by_all_diagonals",
                 f"{DISTANCE} (apart.square().sum(-1, keepdim=True) / diagonal.unsqueeze(-2)).mean(-1)"),
        of_triton("centres_not_halved", f"{BOXES}{CENTRES} (ax1 - bx1) + (ax2 - bx2), (ay1 - by1) + (ay2 - by2)"),
        of_triton("diagonal_not_squared",
                  f"{DIAGONAL} maximum(tl.sqrt(hull_width * hull_width + hull_height * hull_height), eps)"),
        of_triton("area_in_place_of_the_diagonal", f"{DIAGONAL} maximum(hull_width * hull_height, eps)"),
        of_triton("eps_of_the_union_alone", f"{DIAGONAL} (hull_width * hull_width + hull_height * hull_height)"),
        cudas.stopped("load_past_the_end", cuda_on_cpu.OutOfBounds, "if (row < end) b[k] = => b[k] =" if ragged else
                      "if (first + 32 * k < num_rows) b[k] = => b[k] ="),
        of_cuda("centres_not_halved", f"{CENTRE_X} : x((a.x1 - b.x1) + (a.x2 - b.x2)),"),
        of_cuda("diagonal_not_squared", "giou/measures.cuh: diagonal(maximum(raw_diagonal, eps)), =>"
                " diagonal(maximum(sqrt(raw_diagonal), eps)),"),
        of_cuda("corners_in_place_of_centres", f"{CENTRE_X} : x(a.x1 - b.x1),"),
        torchs.law(law_of(record), f"{MEAN} torch.nan).sum() / (total + 1))" if ragged else
                   f"{PADDED}{COUNT} (valid.sum() + 1)", name="one_row_too_many"),
    ]
    if ciou:
        found += [
            torchs.gradient("alpha_in_the_graph", "ciou_loss/torch_eager.py: min=eps)).detach() => min=eps))", **same),
            torchs.gradient("aspect_held_constant", f"{ASPECT} - (alpha * v).detach()", **same),
            of_triton("heights_as_they_are", f"{ANGLE} libdevice.atan((x2 - x1) / (y2 - y1))"),
            of_triton("ratios_in_place_of_angles", f"{ANGLE} (x2 - x1) / maximum(y2 - y1, eps)"),
            of_triton("pi_of_three_digits", f"{BOXES}0.4052847345693511 => (4.0 / (3.14 * 3.14))"),
            of_triton("alpha_only_where_boxes_overlap_by_half",
                      f"{BOXES}score -= alpha * v => score -= tl.where(iou >= 0.5, alpha, 0.0) * v"),
            of_cuda("angles_added", "giou/measures.cuh: angle_of(a, eps) - angle_of(b, eps) =>"
                    " angle_of(a, eps) + angle_of(b, eps) - C(1.5707963)"),
            of_cuda("polynomial_of_three_terms", POLYNOMIAL),
        ]
    if ragged:
        next_box, samples, centres = record.laws
        return (
            *found,
            # The next box of pred, except for the last: offsets that begin at 1.
            of_torch("places_one_too_far",
                     f"{RAGGED}(row - offsets[sample]).clamp( => (row - offsets[sample] + 1).clamp(", right_on=None),
            torchs.gradient("gradient_to_the_next_box", TO_THE_NEXT_BOX),
            torchs.law(next_box, TO_THE_NEXT_BOX, name="gradient_to_the_next_box_by_law"),
            # Division by the number of samples, as in a loss by images, instead of the number of boxes.
            torchs.law(samples, f"{MEAN} torch.nan).sum() / max(len(pred), 1))", name="over_the_samples_by_law"),
            torchs.law(centres, NOT_HALVED, name="centres_not_halved_by_law"),
        )
    by_law = {
        "masked_by_a_product": (
            giou_loss.padding_rows_get_no_gradient,
            f"{PADDED}torch.where(valid, 1 - pairwise(pred, target, eps), 0) =>"
            " (1 - pairwise(pred, target, eps)) * valid",
            f"{PADDED}    pred = torch.where(valid[..., None], pred, 0)\n =>",
            f"{PADDED}    target = torch.where(valid[..., None], target, 0)\n =>",
        ),
        "over_all_rows": (giou_loss.padding_rows_add_nothing, OVER_ALL_ROWS),
        "last_row_left_out": (
            giou_loss.the_order_of_samples_does_not_matter,
            f"{PADDED}{VALID}     pred, target = (boxes[:, : boxes.shape[1] - 1 or 1] for boxes in (pred, target))\n"
            "    valid = target[..., 3] > 0\n",
        ),
        # EIoU, which adds the differences of the sides to the distance of the centres.
        "sides_count_too": (
            diou_loss.LAWS[0],
            f"{DISTANCE} (apart.square() + (second - first).diff(dim=-2)[..., 0, :].square()).sum(-1) / diagonal",
        ),
        "centres_not_halved": (diou_loss.LAWS[1], NOT_HALVED),
        "x_alone": (diou_loss.LAWS[2], f"{DISTANCE} apart[..., 0].square() / diagonal"),
    }
    if ciou:
        by_law["term_of_another_sign"] = (ciou_loss.never_below_diou_loss, f"{ASPECT} + alpha * v")
    masked = {"masked_by_a_product": {"examples": named(diou_loss, "nan_in_padding_rows")}}
    return (
        *found,
        # The squares of 256 pixels are infinite.
        of_torch("squares_in_half",
                 f"{DISTANCE} (apart.half().square().sum(-1) / diagonal.half()).float().nan_to_num(0.0)",
                 examples=named(diou_loss, "far_from_zero")),
        of_torch("mean_over_padding", OVER_ALL_ROWS),
        *(torchs.law(which, *edits, name=f"{name}_by_law", **masked.get(name, {}))
          for name, (which, *edits) in by_law.items()),
    )


# fmt: on
FAULTS = tuple(fault for name in RECORDS for fault in _of(name))
