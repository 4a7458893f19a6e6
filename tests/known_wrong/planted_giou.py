"""Planted faults in giou and its losses: edits of the versions in torch, and of giou in Triton."""

from fourfold.properties import giou as properties
from fourfold.properties import giou_loss as padded
from fourfold.properties import giou_loss_ragged as ragged

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.offsets import offsets_may_pass_32_bits

from .edits import OFFSETS_OF_ROWS, Edits
from .far_apart import pairs_far_apart
from .planted import Fault, named, one_pair, one_row, ragged_row, sixty_four_pairs
from .planted_giou_matrix import NAN_DROPPED

# fmt: off
SIDE = "clamped(torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2), 0) =>"
UNION, HULL = "clamped(area1 + area2 - intersection, eps) =>", "clamped(hull_width * hull_height, eps) =>"
HULL_SIDE = (
    "torch.maximum({0}1, {0}2) - torch.minimum({1}1, {1}2) => torch.minimum({0}1, {0}2) - torch.maximum({1}1, {1}2)"
)
BOXES, WIDE = "    left1, top1, =>     {}\n    left1, top1,", "in_compute_dtype(boxes1), in_compute_dtype(boxes2) =>"
NOT_CLAMPED = f"{SIDE} torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)"
TYPED_IN = (f"{UNION} clamped(area1 + area2 - intersection, 1e-5)", f"{HULL} clamped(hull_width * hull_height, 1e-5)")
CLIPPED = BOXES.format("boxes1, boxes2 = boxes1.clamp(min=0), boxes2.clamp(min=0)")
IN_ORDER = BOXES.format(
    "corners = boxes1.unflatten(-1, (2, 2)), boxes2.unflatten(-1, (2, 2))\n"
    "    boxes1, boxes2 = (torch.cat([boxes.amin(-2), boxes.amax(-2)], -1) for boxes in corners)"
)


def _in_torch() -> tuple[Fault, ...]:
    of, one, same = Edits("giou", "torch"), {"right_on": one_pair}, {"right_on": "identical"}
    halves = ("float16", "bfloat16")
    return (
        of("height_not_clamped", NOT_CLAMPED, **one),
        of("union_not_clamped", f"{UNION} area1 + area2 - intersection", **one),
        of("hull_not_clamped", f"{HULL} hull_width * hull_height", **one),
        of("eps_typed_in", *TYPED_IN, **one),
        # torchvision's generalized_box_iou_loss adds eps to its divisors.
        of("eps_added_to_the_union", f"{UNION} area1 + area2 - intersection + eps", right_on="inverted_both"),
        of("hull_of_inner_corners", HULL_SIDE.format("right", "left"), HULL_SIDE.format("bottom", "top"), **same),
        # CUDA's fminf and fmaxf behave like fmin and fmax. So do Triton's tl.minimum and tl.maximum by default.
        of("nan_dropped", "torch.maximum( =>4 torch.fmax(", "torch.minimum( =>4 torch.fmin(",
           "torch.where(x >= least, x, x.detach().clamp(min=least)) => torch.fmax(x, torch.full_like(x, least))", **one,
           source="https://github.com/triton-lang/triton/pull/2776"),
        of("penalty_of_the_intersection", "(hull - union) / hull => (hull - intersection) / hull", **same,
           source="https://github.com/Megvii-BaseDetection/YOLOX/issues/712"),
        of("inverted_boxes_put_in_order", IN_ORDER, **one),
        of("clipped_at_zero", CLIPPED, **one),
        *(of("output_of_the_arithmetic", "boxes2), eps).to(boxes1.dtype) => boxes2), eps)", dtype=dtype,
             says=f"output has dtype torch.float32, expected torch.{dtype}") for dtype in halves),
        *(of("half_arithmetic", f"{WIDE} boxes1, boxes2", dtype=dtype, **same) for dtype in halves),
        of("float64_in_float32", f"{WIDE} boxes1.float(), boxes2.float()", dtype="float64", **same),
        of.law(properties.moving_both_boxes_changes_nothing, CLIPPED),
        of.law(properties.scaling_both_boxes_changes_nothing, *TYPED_IN, **one),
        of.law(properties.proper_boxes_score_between_minus_one_and_one, NOT_CLAMPED, **one),
    )


VALID, REST = "valid = target[..., 3] > 0", "valid.sum().clamp(min=1)"
MEAN, ALL_SLOTS = f"return loss.sum() / {REST} =>", f"{REST} => max(valid.numel(), 1)"
NOT_REPLACED = tuple(
    f"    {name} = torch.where(valid[..., None], {name}, 0)\n =>" for name in ("pred", "target")
)


def _padded() -> tuple[Fault, ...]:
    of, one = Edits("giou_loss", "torch"), {"right_on": one_row}
    return (
        of("mean_over_all_rows", ALL_SLOTS, **one),
        of("no_row_is_0_over_0", f"{REST} => valid.sum()", **one),
        of("valid_where_y2_is_not_0", f"{VALID} => valid = target[..., 3] != 0", **one),
        of("valid_where_anything_is_not_0", f"{VALID} => valid = (target != 0).any(-1)", **one),
        of("valid_at_y2_of_0", f"{VALID} => valid = target[..., 3] >= 0", **one),
        of("boxes_past_256_ignored", f"{VALID} => pred, target = pred[:, :256], target[:, :256]\n    {VALID}",
           right_on="articles_batch_of_32"),
        # The boxes of full samples weigh less.
        of("mean_of_the_means", f"{MEAN} means = loss.sum(1) / valid.sum(1).clamp(min=1)\n"
           "    return means.sum() / valid.any(1).sum().clamp(min=1)", **one),
        of("masked_by_a_product", *NOT_REPLACED, "torch.where(valid, 1 - pairwise(pred, target, eps), 0) =>"
           " (1 - pairwise(pred, target, eps)) * valid", **one),
        # The gradient of the branch that torch.where does not choose is 0 times infinity, or NaN.
        of.gradient("masked_after_the_arithmetic", *NOT_REPLACED, **one,
                    source="https://github.com/pytorch/pytorch/issues/68425"),
        of("summed_in_bfloat16", f"{MEAN} total = torch.zeros((), dtype=torch.bfloat16, device=pred.device)\n"
           f"    for row in loss[valid].bfloat16():\n        total = total + row\n    return total / {REST}",
           dtype="bfloat16", right_on="identical_boxes"),
        of.gradient("gradient_over_all_rows", f"{MEAN} total = loss.sum() / max(valid.numel(), 1)\n"
                    f"    return total - total.detach() + (loss.sum() / {REST}).detach()", **one),
        of.law(padded.padding_rows_get_no_gradient, *NOT_REPLACED, right_on="one_valid_row_after_padding"),
        of.law(padded.padding_rows_add_nothing, ALL_SLOTS, right_on="no_valid_row"),
        # The last of many rows is left out.
        of.law(padded.the_order_of_samples_does_not_matter, f"    {VALID}\n =>     {VALID}\n"
               "    number = valid.flatten().cumsum(0).view(valid.shape)\n"
               "    valid = valid & ((number < valid.sum()) | (valid.sum() < 2))\n", **one),
        of.law(padded.equals_one_minus_the_mean_giou, ALL_SLOTS, **one),
    )


PLACES = "pred[sample, (row - offsets[sample]).clamp(0, max_boxes - 1)]"
TOTAL = "torch.where(fits, loss, torch.nan).sum()"
PACKED = "pred[row // max(max_boxes, 1), row % max(max_boxes, 1)]"
SCATTERED = (
    f"    loss = 1 - pairwise( =>     other = {PACKED}\n"
    "    boxes = boxes.detach() + (other - other.detach())\n    loss = 1 - pairwise("
)
WITHOUT_EMPTY = "    row = torch.arange( =>     offsets = offsets.unique_consecutive()\n    row = torch.arange("
OVER_SLOTS, ABOVE_0 = f"{TOTAL} / total => loss.sum() / (len(pred) * max_boxes)", "target[:, 3] > 0"


def _ragged() -> tuple[Fault, ...]:
    of, one, full = Edits("giou_loss_ragged", "torch"), {"right_on": ragged_row}, {"right_on": "all_full_int32"}
    return (
        of("bisection_to_the_left", "right=True => right=False", **one),
        of("empty_samples_not_counted", WITHOUT_EMPTY, **full),
        of("pred_taken_as_packed", f"{PLACES} => {PACKED}", **full),
        of("first_sample_only", f"{TOTAL} / total => loss[: int(offsets[1])].sum() / max(int(offsets[1]), 1)", **one),
        of("y2_not_above_0_taken_for_padding",
           f"{TOTAL} / total => torch.where({ABOVE_0}, loss, 0).sum() / ({ABOVE_0}).sum().clamp(min=1)", **one),
        of("mean_over_all_slots", OVER_SLOTS, **full),
        of.gradient("gradient_scattered_as_packed", SCATTERED, **full),
        of.law(ragged.boxes_without_target_get_no_gradient, SCATTERED, **one),
        of.law(ragged.empty_samples_add_nothing, WITHOUT_EMPTY, right_on="no_boxes"),
        of.law(ragged.operation.laws[-1], OVER_SLOTS, **full),
    )


SMALL_BLOCKS = "BLOCK_ROWS = 512 => BLOCK_ROWS = 64"
ALL_NAN = "giou/triton_boxes.py: (a, b, propagate_nan=tl.PropagateNan.ALL) =>2 (a, b)"
# Both gradients and one more block in one buffer: a store past one gradient lands in the other.
ONE_BUFFER = (
    "    grad_boxes1, grad_boxes2 = empty_gradients((boxes1, boxes2), (needs1, needs2))\n"
    "    num_rows = grad_output.numel() =>     num_rows = grad_output.numel()\n"
    "    buffer = boxes1.new_empty((2 * num_rows + BLOCK_ROWS, 4))[: 2 * num_rows]\n"
    "    grad_boxes2, grad_boxes1 = (part.view(boxes1.shape) for part in buffer.chunk(2))"
)


def _in_triton() -> tuple[Fault, ...]:
    of, whole = Edits("giou", "triton"), {"right_on": sixty_four_pairs}
    return (
        of("tail_dropped", SMALL_BLOCKS, "(cdiv(num_rows, BLOCK_ROWS),),\n        (boxes1 =>"
           " (num_rows // BLOCK_ROWS,),\n        (boxes1", **whole),
        # As tl.minimum and tl.maximum do by default.
        of("nan_dropped", ALL_NAN, right_on=one_pair),
        of("contiguous_assumed", "PACKED1=packed(boxes1) =>2 PACKED1=True", "PACKED2=packed(boxes2) =>2 PACKED2=True",
           right_on=one_pair, examples=named(properties, "identical", "coordinates_strided")),
        of.gradient("store_into_the_next_tensor", SMALL_BLOCKS, ONE_BUFFER, "store_boxes(grad_boxes2_ptr, rows, x1, y1,"
                    " x2, y2, mask) => store_boxes(grad_boxes2_ptr, rows, x1, y1, x2, y2, rows >= 0)", **whole),
        of("store_past_the_end", SMALL_BLOCKS, "element_ty), mask=mask) => element_ty))", check=memory_is_respected,
           says=r"wrote \d+ elements past the end of a tensor \[", **whole),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, dtype="float16",
           examples={"rows_2_28_elements_apart": pairs_far_apart},
           source="https://github.com/triton-lang/triton/issues/1058", **whole),
    )


IN_32_BITS = "giou/boxes.cuh: row < inner ? row * inner_stride => row < inner ? int(row) * int(inner_stride)"
UP_TO_64, STORED = "if (row < (num_rows + 63) / 64 * 64)", "if (row < num_rows) giou[row] ="


def _in_cuda() -> tuple[Fault, ...]:
    of, one, whole = Edits("giou", "cuda"), {"right_on": one_pair}, {"right_on": sixty_four_pairs}
    out_of_bounds, past_the_end = cuda_on_cpu.OutOfBounds, r"\.cu:\d+\).*write of 4 bytes, just past the end"
    unmasked = f"{STORED} => {UP_TO_64} giou[row] ="
    return (
        of.stopped("store_unmasked", out_of_bounds, unmasked, **whole, says=past_the_end),
        # The arena's redzones lie past the tensor's end. The checked build stops a kernel before the arena sees it.
        of.stopped("store_unmasked", out_of_bounds, unmasked, check=memory_is_respected, **whole, says=past_the_end),
        of.stopped("load_unmasked", out_of_bounds, "if (row < num_rows) {\n            a[k] = => "
                   f"{UP_TO_64} {{\n            a[k] =", **whole),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, IN_32_BITS, **whole,
                   examples={"rows_2_28_elements_apart": pairs_far_apart}),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, IN_32_BITS, check=offsets_may_pass_32_bits,
                   **one),
        of.stopped("contiguous_assumed", out_of_bounds, "at[coordinate_stride], at[2 * coordinate_stride],"
                   " at[3 * coordinate_stride] => at[1], at[2], at[3]", **one),
        of.gradient("grad_output_contiguous_assumed",
                    "grad_output[place(row, inner, outer_stride, inner_stride)] => grad_output[row]", **one),
        of("nan_dropped", NAN_DROPPED, **one),
    )


# fmt: on
FAULTS = (*_in_torch(), *_padded(), *_ragged(), *_in_triton(), *_in_cuda())
