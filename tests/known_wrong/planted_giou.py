"""Planted faults in giou and its losses: edits of the versions in torch, and of giou in Triton."""

from fourfold.properties import giou as properties
from fourfold.properties import giou_loss as padded
from fourfold.properties import giou_loss_ragged as ragged

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.offsets import offsets_may_pass_32_bits
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.single_gradients import single_gradients_agree

from .edits import OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits, wrapped
from .far_apart import pairs_far_apart
from .planted import Fault, cotangent_of_ones, law, named, one_pair, one_row, ragged_row, sixty_four_pairs
from .planted_giou_matrix import NAN_DROPPED
from .published import giou_without_clamp

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

RESULT = "return pairwise_giou(in_compute_dtype(boxes1), in_compute_dtype(boxes2), eps).to(boxes1.dtype)"
RETURN = f"{RESULT} =>"
# From row 64 on, each box is paired with its neighbour's partner.
SHIFTED = (
    f"{RETURN} rows = boxes2.reshape(-1, 4)\n"
    f"    boxes2 = torch.cat([rows[:64], rows[64:].roll(1, 0)]).view(boxes2.shape)\n    {RESULT}"
)
IN_PLACE = (
    f"{RETURN} output = {RESULT[7:]}\n    if 0 not in boxes1.stride():\n"
    "        boxes1.data[..., 2:] -= boxes1.data[..., :2]\n"
    "        boxes1.data[..., 2:] += boxes1.data[..., :2]\n    return output"
)


def _around(*body: str) -> str:
    return wrapped(RESULT, "giou(boxes1, boxes2, eps=1e-5)", *body)


ERRORS = (
    ("broadcasting_accepted", "boxes2_of_shape_9_4: no ValueError naming boxes2",
     _around("try:", "    boxes2 = boxes2.expand(boxes1.shape) if boxes2.shape[-1:] == (4,) else boxes2",
             "except (AttributeError, RuntimeError):", "    pass  # the check itself reports it",
             "return right(boxes1, boxes2, eps)")),
    ("errors_of_another_type", "RuntimeError in place of ValueError",
     _around("try:", "    return right(boxes1, boxes2, eps)", "except ValueError as error:",
             "    raise RuntimeError(str(error)) from error")),
    ("errors_without_names", "the message does not name boxes1",
     _around("try:", "    return right(boxes1, boxes2, eps)", "except (TypeError, ValueError) as error:",
             '    raise type(error)("the arguments of the call do not fit each other") from error')),
    ("eps_of_nan_accepted", "eps_not_a_number: no ValueError naming eps",
     _around("return right(boxes1, boxes2, 1e-5 if eps != eps else eps)")),
    ("integer_boxes_accepted", "boxes1_of_int64: no TypeError naming boxes1",
     _around("integers = isinstance(boxes1, torch.Tensor) and not boxes1.is_floating_point()",
             "return (right.__wrapped__ if integers else right)(boxes1, boxes2, eps)")),
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
        of("last_row_dropped", f"{RETURN} rows = boxes1.reshape(-1, 4).clone()\n    if len(rows) % 2:\n"
           f"        rows[-1] = 0\n    boxes1 = rows.view(boxes1.shape)\n    {RESULT}", right_on=sixty_four_pairs),
        of("rows_shifted", SHIFTED, right_on=sixty_four_pairs),
        # x1 + (x2 - x1) is not always x2.
        of("converted_in_place", IN_PLACE, says="changed its input boxes1", **one),
        of("converted_in_place", IN_PLACE, check=memory_is_respected,
           says=r"wrote \d+ elements inside its input boxes1", **one),
        of("output_in_place_of_x1", f"{RETURN} return boxes1[..., 0]", check=memory_is_respected,
           says="output shares its memory with its input boxes1"),
        *(of(name, *edits, check=declared_errors_are_raised, says=says) for name, says, *edits in ERRORS),
        of.law(properties.a_box_scores_one_with_itself, SHIFTED, **one),
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
        # In the order in which blocks finish, as with atomics: within every bound, but never twice the same.
        of("summed_in_any_order",
           "giou_loss/torch_eager.py: import torch\n => import torch\nORDER = torch.Generator()\n",
           f"{MEAN} order = torch.randperm(loss.numel(), generator=ORDER)\n"
           f"    return sum(loss.flatten()[order].unbind(), loss[:0].sum()) / {REST}", check=repeats_bit_for_bit,
           says="output differs between two calls", **one),
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


# The memory from the first offset on, with zeros past its end, and limited numbers of boxes.
MISREAD = (
    "    row = torch.arange( =>     words = {0}\n    count = {1}len(offsets)\n"
    "    flat = torch.as_strided(words, (words.untyped_storage().nbytes() // words.element_size(),), (1,), 0)\n"
    "    flat = flat[words.storage_offset() :][:count]\n"
    "    offsets = torch.cat([flat, flat.new_zeros(count - len(flat))]){2}.clamp(0, total)\n"
    "    row = torch.arange("
)


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
        of("offsets_taken_for_int64", MISREAD.format("offsets.contiguous().view(torch.int32)", "2 * ",
           ".view(torch.int64)"), **one),
        of("offsets_read_as_contiguous", MISREAD.format("offsets", "", ""), **one),
        of("offset_values_taken_on_trust", "signature import offsets, => signature import integers,",
           'offsets("batch", total="total", most="max_boxes", => integers("batch+1", 0,',
           check=declared_errors_are_raised,
           says="no ValueError naming offsets|offsets_not_from_0: the output is .*, not NaN"),
        of.law(ragged.boxes_without_target_get_no_gradient, SCATTERED, **one),
        of.law(ragged.empty_samples_add_nothing, WITHOUT_EMPTY, right_on="no_boxes"),
        of.law(ragged.operation.laws[-1], OVER_SLOTS, **full),
    )


SMALL_BLOCKS = "giou/triton_boxes.py: FORWARD_ROWS, BACKWARD_ROWS = 256, 128 => FORWARD_ROWS, BACKWARD_ROWS = 64, 64"
ALL_NAN = "giou/triton_boxes.py: (a, b, propagate_nan=tl.PropagateNan.ALL) =>2 (a, b)"
# Both gradients and one more block in one buffer: a store past one gradient lands in the other.
ONE_BUFFER = (
    "    grad_boxes1, grad_boxes2 = empty_gradients((boxes1, boxes2), (needs1, needs2))\n"
    "    num_rows = grad_output.numel() =>     num_rows = grad_output.numel()\n"
    "    buffer = boxes1.new_empty((2 * num_rows + BACKWARD_ROWS, 4))[: 2 * num_rows]\n"
    "    grad_boxes2, grad_boxes1 = (part.view(boxes1.shape) for part in buffer.chunk(2))"
)


BUFFER = "torch.empty(boxes1.shape[:-1], dtype=boxes1.dtype, device=boxes1.device)"
AREAS, TIE, BOXES_PY = "= grad_of_areas(grad, =>", "tl.where(a == b, 0.5 * grad, =>2", "giou/triton_boxes.py: "
STORED2 = "grad_boxes2_ptr, rows, x1, y1, x2, y2, mask) =>"
TO_X1 = "gx1 = {0}by_width {1} through_maximum(grad_width, x1, ox1) {1} through_minimum(".format
AGAINST = f"{BOXES_PY}{TO_X1('-', '-')} => {TO_X1('', '+')}"
SECOND_CONSTANT = f"{STORED2} grad_boxes2_ptr, rows, 0.0 * x1, 0.0 * y1, 0.0 * x2, 0.0 * y2, mask)"
ZEROS, IGNORED = f"{AREAS} = grad_of_areas(0.0 * grad,", f"{AREAS} = grad_of_areas(0.0 * grad + 1.0,"
WHOLE, NONE = f"{BOXES_PY}{TIE} tl.where(a == b, grad,", f"{BOXES_PY}{TIE} tl.where(a == b, 0.0 * grad,"


def sides(condition: str) -> tuple[str, str]:
    """Return edits after which the sides of the intersection pass the gradient on another condition."""
    return tuple(f"{BOXES_PY}tl.where({of} >= 0.0, => tl.where({of} {condition}," for of in ("width", "height"))


def areas(condition: str) -> tuple[str, str]:
    """Return edits after which union and hull pass the gradient on another condition."""
    return tuple(f"{BOXES_PY}tl.where({of} >= eps, => tl.where({of} {condition}," for of in ("raw_union", "raw_hull"))


# sum().backward() passes an expanded grad_output, with stride 0 and memory for one element.
READ_AS_CONTIGUOUS = (
    "    inner, (grads =>"
    "     flat = (grad_output.untyped_storage().nbytes() // grad_output.element_size(),)\n"
    "    flat = torch.as_strided(grad_output, flat, (1,), 0)[grad_output.storage_offset() :][: num_rows]\n"
    "    grad_output = torch.cat([flat, flat.new_zeros(num_rows - len(flat))]).view(boxes1.shape[:-1])\n"
    "    inner, (grads"
)


def _gradients_in_triton() -> tuple[Fault, ...]:
    of, pair, points = Edits("giou", "triton"), {"right_on": one_pair}, {"right_on": "identical_points"}
    tie, attention = {"documented": True, **pair}, "https://github.com/Dao-AILab/flash-attention/issues/355"
    check = {"check": gradcheck, "says": "gradcheck: Jacobian mismatch", "dtype": "float64"}
    cancel = properties.gradients_along_an_axis_cancel
    return (
        # If union and hull are below eps, every gradient is 0, whatever its sign or factor.
        of.gradient("x1_against_the_slope", AGAINST, **points),
        of.gradient("gradient_of_zeros", ZEROS, **points),
        of.gradient("no_gradient_for_boxes2", SECOND_CONSTANT, **points),
        of.gradient("grad_output_ignored", IGNORED, right_on=cotangent_of_ones,
                    source="https://github.com/pytorch/pytorch/issues/21961"),
        of.gradient("grad_output_read_as_contiguous", READ_AS_CONTIGUOUS, **pair, source=attention),
        of("grad_output_read_as_contiguous", READ_AS_CONTIGUOUS, check=memory_is_respected,
           says="depending on memory that the call was not", **pair),
        of.gradient("side_passes_below_its_clamp", *sides("> -1e30"), **pair),
        of.gradient("area_passes_below_its_clamp", *areas("> -1e30"), **pair),
        # Shares of the gradient at ties, and gradients that stop at a clamp's limit.
        of.gradient("whole_gradient_at_ties", WHOLE, **tie),
        of.gradient("no_gradient_at_ties", NONE, **tie),
        of.gradient("side_stops_at_its_clamp", *sides("> 0.0"), **tie),
        of.gradient("area_stops_at_its_clamp", *areas("> eps"), **tie),
        # Two equal edges may share the gradient in any way, but no subgradient gives all of it to both, or none.
        of.law(cancel, WHOLE, name="whole_gradient_at_ties", **pair),
        of.law(cancel, NONE, name="no_gradient_at_ties", **pair),
        of.law(properties.swapping_the_boxes_changes_nothing, SECOND_CONSTANT, **points),
        of("x1_against_the_slope", AGAINST, **check),
        of("gradient_of_zeros", ZEROS, **check),
        of("grad_output_ignored", IGNORED, **check),
        # A value that both gradients need is finished in the branch of the first alone.
        of("half_for_the_second_alone", "    if NEEDS2:\n        x1, =>     if NEEDS2:\n        if not NEEDS1:\n"
           "            union, width, height, hull_width, hull_height = grad_of_areas(0.5 * grad, ax1, ay1, ax2, ay2,"
           " bx1, by1, bx2, by2, eps)\n        x1,", check=single_gradients_agree,
           says="for boxes2 alone, gradient of boxes2", **points),
    )


def _in_triton() -> tuple[Fault, ...]:
    of, whole = Edits("giou", "triton"), {"right_on": sixty_four_pairs}
    return (
        of("tail_dropped", SMALL_BLOCKS, "(cdiv(num_rows, FORWARD_ROWS),),\n        (all1 =>"
           " (num_rows // FORWARD_ROWS,),\n        (all1", **whole),
        of("remembered_by_shape", "    return output\n\n\ndef _backward =>     key = str((boxes1.shape, eps))\n"
           "    return vars(_forward).setdefault(key, output).clone()\n\n\ndef _backward", right_on=one_pair),
        of("output_handed_out_again", f"output = {BUFFER} => output = vars(_forward).setdefault(str(boxes1.shape),"
           f" {BUFFER})", check=memory_is_respected, says="output shares its memory with a former result"),
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


UP_TO_64, STORED = "if (row < (num_rows + 63) / 64 * 64)", "if (k < owned && row < num_rows) giou[row] ="


def _in_cuda() -> tuple[Fault, ...]:
    of, one, whole = Edits("giou", "cuda"), {"right_on": one_pair}, {"right_on": sixty_four_pairs}
    out_of_bounds, past_the_end = cuda_on_cpu.OutOfBounds, r"\.cu:\d+\).*write of 4 bytes, just past the end"
    unmasked = f"{STORED} => {UP_TO_64} giou[row] ="
    return (
        of.stopped("store_unmasked", out_of_bounds, unmasked, **whole, says=past_the_end),
        # The arena's redzones lie past the tensor's end. The checked build stops a kernel before the arena sees it.
        of.stopped("store_unmasked", out_of_bounds, unmasked, check=memory_is_respected, **whole, says=past_the_end),
        of.stopped("load_unmasked", out_of_bounds, "if (k < owned && row < num_rows) {\n            a[k] = => "
                   f"{UP_TO_64} {{\n            a[k] =", **whole),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS, **whole,
                   examples={"rows_2_28_elements_apart": pairs_far_apart}),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS, **one,
                   check=offsets_may_pass_32_bits),
        of.stopped("contiguous_assumed", out_of_bounds, "at[coordinate_stride], at[2 * coordinate_stride],"
                   " at[3 * coordinate_stride] => at[1], at[2], at[3]", **one),
        of.gradient("grad_output_contiguous_assumed",
                    "grad_output[row_offset(row, inner, outer_stride, inner_stride)] => grad_output[row]", **one),
        of("nan_dropped", NAN_DROPPED, **one),
    )


# fmt: on
ABOVE = law(properties.never_above_intersection_over_union)
NEVER_ABOVE = {"name": "law", "check": ABOVE, "says": "never_above_intersection_over_union: left side"}
FAULTS = (
    *_in_torch(),
    Fault.of("giou", giou_without_clamp, right_on=one_pair, **NEVER_ABOVE),
    *_padded(),
    *_ragged(),
    *_in_triton(),
    *_gradients_in_triton(),
    *_in_cuda(),
)
