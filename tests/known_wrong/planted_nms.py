"""Planted faults in nms: edits of its versions in torch, Triton and CUDA C++."""

import functools

from fourfold.properties import nms as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu

from .edits import Edits
from .planted import Fault, named

OTHER = r"output( has shape|\[).*expected"
GITHUB = "https://github.com"
PIXEL = {"source": f"{GITHUB}/facebookresearch/maskrcnn-benchmark/issues/1020"}
LIMIT = {
    "source": f"{GITHUB}/tensorflow/tensorflow/pull/32568",
    "examples": named(properties, "equal_to_the_threshold"),
}
CHAIN = {
    "source": f"{GITHUB}/shouxieai/tensorRT_Pro/issues/85",
    "examples": named(properties, "a_suppressed_box_suppresses_none"),
}
BLOCKS = {"source": f"{GITHUB}/jeetkanjani7/Parallel_NMS/issues/1", "right_on": "identical"}
HALF_TYPE = {"source": f"{GITHUB}/pytorch/vision/issues/3371", "dtype": "float16", "right_on": "identical"}
# fmt: off
UNITED = "united = (x2 - x1) * (y2 - y1) + other_area - intersection =>"
SIDE = "{0} = tl.minimum({1}2, other_{1}2) - tl.maximum({1}1, other_{1}1) =>"
WIDTH, HEIGHT = SIDE.format("width", "x"), SIDE.format("height", "y")
AREA = "other_area = (other_x2 - other_x1) * (other_y2 - other_y1) =>"
HALF = "tl.float16).to(COMPUTE)"


def _triton_faults() -> tuple[Fault, ...]:
    of, one = functools.partial(Edits("nms", "triton"), says=OTHER), {"right_on": "one_element"}
    return (
        of("at_the_threshold_too", "intersection > threshold * united => intersection >= threshold * united", **LIMIT,
           **one),
        of("a_pixel_more", f"{WIDTH} width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1) + 1",
           f"{HEIGHT} height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1) + 1",
           f"{AREA} other_area = (other_x2 - other_x1 + 1) * (other_y2 - other_y1 + 1)",
           f"{UNITED} united = (x2 - x1 + 1) * (y2 - y1 + 1) + other_area - intersection",
           examples=named(properties, "a_third_of_their_union"), **PIXEL, **one),
        of("suppressed_boxes_suppress", "((own & former) == 0) => (own == 0)", **CHAIN, **one),
        of("areas_in_float16", f"{UNITED} united = ((x2 - x1) * (y2 - y1)).to({HALF} + other_area.to({HALF}"
           " - intersection", examples=named(properties, "areas_past_float16"), **HALF_TYPE),
        of("the_first_block_alone", "above &= row[:, None] < column[None, :] =>"
           " above &= (row[:, None] < column[None, :]) & (column[None, :] < 64)",
           examples=named(properties, "one_more_than_two_blocks"), **BLOCKS),
        of("sides_not_clamped", "tl.maximum(width, 0.0) * tl.maximum(height, 0.0) => width * height", **one),
        of("over_the_smaller_area", f"{UNITED} united = tl.minimum((x2 - x1) * (y2 - y1), other_area)", **one),
        of("classes_ignored", "iou_threshold), HAS_IDXS=has_idxs => iou_threshold), HAS_IDXS=False",
           examples=named(properties, "of_two_classes"), **one),
    )


SORTED, CLASSES = "torch.sort(scores.detach(), stable=True, =>", "None if idxs is None else idxs[order]) =>"
KEPT, BEFORE = "return order[kept] =>", "above &= places < places[rows, None] =>"


def _torch_faults() -> tuple[Fault, ...]:
    edits, one = Edits("nms", "torch"), {"right_on": "one_element"}
    of = functools.partial(edits, says=OTHER, **one)
    law = functools.partial(edits.law, says="left side", **one)
    over_blocks, two_classes = (named(properties, name) for name in ("a_chain_over_blocks", "of_two_classes"))
    return (
        # Shift the boxes of each class away from the others instead of comparing classes.
        of("shifted_by_class", "boxes.detach()[order] => (boxes if idxs is None or not len(idxs) else boxes"
           " + (idxs.to(boxes.dtype) * (boxes.amax() + 1))[:, None]).detach()[order]", f"{CLASSES} None)",
           dtype="float16", source=f"{GITHUB}/MultimediaTechLab/YOLO/pull/234"),
        of("later_of_equal_scores_first",
           f"{SORTED} len(scores) - 1 - torch.sort(scores.detach().flip(0), stable=True,",
           source=f"{GITHUB}/pytorch/vision/issues/2157"),
        of("nan_is_the_lowest",
           f"{SORTED} torch.sort(scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), stable=True,",
           examples=named(properties, "scores_not_finite")),
        # Ranks by score instead of indices.
        of("places_in_order", f"{KEPT} return kept.nonzero()[:, 0]", source=f"{GITHUB}/xlite-dev/LeetCUDA/issues/517"),
        of("in_order_of_indices", f"{KEPT} return order[kept].sort().values"),
        of("as_many_as_boxes", f"{KEPT} return torch.cat([order[kept], order[~kept] * 0 - 1])"),
        edits("indices_of_32_bits", f"{KEPT} return order[kept].int()", says="has dtype torch.int32"),
        law(properties.kept_boxes_are_kept_again, f"{BEFORE} above &= (places < places[rows, None]) & (places < 64)",
            name="first_block_suppresses", examples=over_blocks),
        law(properties.moved_boxes_are_kept_alike, "boxes.detach()[order] => boxes.detach().clamp(0, 16)[order]",
            name="clipped_to_an_image", examples=named(properties, "identical")),
        law(properties.boxes_of_lower_rank_change_nothing, f"{BEFORE} above &= places > places[rows, None]",
            name="from_the_lowest_score", examples=over_blocks),
        edits.law(properties.classes_do_not_see_one_another, f"{CLASSES} None)", name="classes_ignored",
                  says="left side", examples=two_classes, right_on="one_element"),
    )


SIDES = (
    "const C width = fmin(a.x2, b.x2) - fmax(a.x1, b.x1), height = fmin(a.y2, b.y2) - fmax(a.y1, b.y1); =>"
    " const C width = fmin(a.x2, b.x2) - fmax(a.x1, b.x1) + 1, height = fmin(a.y2, b.y2) - fmax(a.y1, b.y1) + 1;"
)
EVERY_BLOCK = {"examples": named(properties, "kept_boxes_in_every_block")}


def _cuda_faults() -> tuple[Fault, ...]:
    edits, one = Edits("nms", "cuda"), {"right_on": "one_element"}
    of = functools.partial(edits, says=OTHER)
    return (
        of("at_the_threshold_too", "intersection > threshold * united; => intersection >= threshold * united;", **LIMIT,
           **one),
        of("a_pixel_more", SIDES, "return (box.x2 - box.x1) * (box.y2 - box.y1); =>"
           " return (box.x2 - box.x1 + 1) * (box.y2 - box.y1 + 1);",
           examples=named(properties, "a_third_of_their_union"), **PIXEL, **one),
        of("suppressed_boxes_suppress", "suppressed_by(former, lane) => suppressed_by(left, lane)", **CHAIN, **one),
        edits.stopped("bits_of_an_int", cuda_on_cpu.UndefinedArithmetic, "word |= Word(1) << c; => word |= 1 << c;",
                      examples=named(properties, "one_more_than_a_block"), **one),
        of("last_block_dropped", "block < blocks; block++ => block < max(blocks - 1, 1ll); block++", **EVERY_BLOCK,
           **BLOCKS),
        of("words_of_the_second_block", "if (next < blocks) => if (next < min(blocks, 2ll))", **EVERY_BLOCK, **BLOCKS),
        of("words_of_each_warp", "columns < blocks; columns += => columns < 0; columns +=", **EVERY_BLOCK, **BLOCKS),
        of("classes_of_32_bits", "kinds[c] == kind => int(kinds[c]) == int(kind)",
           examples=named(properties, "classes_below_0_and_large"), **one),
        edits.stopped("barrier_missing", cuda_on_cpu.Race,
                      "count += __popcll(now);\n        __syncthreads(); => count += __popcll(now);",
                      examples=named(properties, "a_chain_over_blocks")),
        edits.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "    if (own >= n) return;\n =>"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
