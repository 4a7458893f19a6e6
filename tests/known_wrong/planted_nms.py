"""Planted faults in nms: edits of its version in Triton, a small CUDA C++ kernel, and in torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fourfold.impls.nms import torch_eager
from fourfold.impls.nms.arguments import check_nms
from fourfold.properties import nms as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import cdiv
from fourfold.checks.forward import forward_agrees

from .edits import Edits
from .planted import Check, Fault, cuda_fault, law, named
from .planted_cuda import Planted
from .steps import Implementation

Tensor = torch.Tensor
# Of boxes in the order of their scores, their classes and the threshold: whether each is kept.
Walk = Callable[[Tensor, Tensor, float], Tensor]
OTHER = r"output( has shape|\[).*expected"
BLOCK = 64


def of_walk(walk: Walk, sort: Callable[[Tensor], Tensor] | None = None) -> Implementation:
    """nms of a function that walks over boxes in the order of their scores."""

    def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, idxs: Tensor | None = None) -> Tensor:
        check_nms(boxes, scores, iou_threshold, idxs)
        order = (sort or in_order)(scores)
        classes = torch.zeros_like(order) if idxs is None else idxs.long()[order]
        return order[walk(boxes[order].contiguous(), classes, iou_threshold)] if len(order) else order

    return nms


def in_order(scores: Tensor) -> Tensor:
    return scores.sort(stable=True, descending=True).indices


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "nms_mask_kernel", "nms_walk_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return nms in CUDA C++ for float32, with a fault."""

    def walk(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
        n, blocks = len(boxes), cdiv(len(boxes), BLOCK)
        mask, gone = (torch.zeros(*shape, dtype=torch.int64, device=boxes.device) for shape in ((n, blocks), (blocks,)))
        kept = torch.empty(n, dtype=torch.bool, device=boxes.device)
        KERNELS.launch("nms_mask_kernel", fault, (blocks, blocks), BLOCK, boxes, classes, mask, n, threshold)
        KERNELS.launch("nms_walk_kernel", fault, 1, 1, mask, gone, kept, n, blocks)
        return kept

    return of_walk(walk)


def right(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Whether each box is kept."""
    kept = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    falling = torch.arange(len(boxes), 0, -1, device=boxes.device).to(torch.float64)
    kept[torch_eager.nms(boxes.double(), falling, threshold, classes)] = True
    return kept


def shifted_by_class(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Classes are told apart by where their boxes lie, as a shift by class puts them."""
    shift = classes.to(boxes.dtype) * (boxes.amax() + 1)
    return right(boxes + shift[:, None], torch.zeros_like(classes), threshold)


def clipped_to_an_image(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    return right(boxes.clamp(0, 16), classes, threshold)


def from_the_lowest_score(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    return right(boxes.flip(0), classes.flip(0), threshold).flip(0)


def first_block_suppresses(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Only the boxes of the first block suppress, among them and after them."""
    kept = right(boxes[:BLOCK], classes[:BLOCK], threshold)
    if len(boxes) <= BLOCK:
        return kept
    first, kinds = boxes[:BLOCK][kept], classes[:BLOCK][kept]
    rest = [
        right(torch.cat([first, one]), torch.cat([kinds, kind]), threshold)[-1]
        for one, kind in zip(boxes[BLOCK:].split(1), classes[BLOCK:].split(1))
    ]
    return torch.cat([kept, torch.stack(rest)])


def classes_ignored(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    return right(boxes, torch.zeros_like(classes), threshold)


def later_of_equal_scores_first(scores: Tensor) -> Tensor:
    return len(scores) - 1 - scores.flip(0).sort(stable=True, descending=True).indices


def nan_is_the_lowest(scores: Tensor) -> Tensor:
    return in_order(scores.nan_to_num(-torch.inf, torch.inf, -torch.inf))


def of_result(change: Callable[[Tensor, Tensor], Tensor]) -> Implementation:
    """nms whose result is changed, which a function of it and of the scores does."""

    def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, idxs: Tensor | None = None) -> Tensor:
        return change(torch_eager.nms(boxes, scores, iou_threshold, idxs), scores)

    return nms


def places_in_order(kept: Tensor, scores: Tensor) -> Tensor:
    """Places among the boxes in order of their scores, in place of indices."""
    return torch.argsort(in_order(scores))[kept]


def as_many_as_boxes(kept: Tensor, scores: Tensor) -> Tensor:
    """As many as there are boxes, of which the last ones are -1."""
    return torch.cat([kept, kept.new_full((len(scores) - len(kept),), -1)])


def _of_torch(name: str, make: Callable[[], Implementation], **more: Any) -> Fault:
    given = {"check": forward_agrees, "says": OTHER, "right_on": "one_box", **more}
    return Fault(name=name, operation="nms", make=make, **given)


def _of_law(name: str, which: Any, walk: Walk, example: str, **more: Any) -> Fault:
    check: Check = law(which)
    examples = named(properties, example)
    return _of_torch(name, functools.partial(of_walk, walk), check=check, says="left side", examples=examples, **more)


# fmt: off
UNITED = "united = (x2 - x1) * (y2 - y1) + other_area - intersection =>"
SIDE = "{0} = tl.minimum({1}2, other_{1}2) - tl.maximum({1}1, other_{1}1) =>"
WIDTH, HEIGHT = SIDE.format("width", "x"), SIDE.format("height", "y")
AREA = "other_area = (other_x2 - other_x1) * (other_y2 - other_y1) =>"
HALF = "tl.float16).to(COMPUTE)"


def _of_triton(of: Callable, limit: dict, pixel: dict, chain: dict, half: dict, blocks: dict) -> tuple[Fault, ...]:
    one = {"right_on": "one_box"}
    return (
        of("at_the_threshold_too", "intersection > threshold * united => intersection >= threshold * united", **limit,
           **one),
        of("a_pixel_more", f"{WIDTH} width = tl.minimum(x2, other_x2) - tl.maximum(x1, other_x1) + 1",
           f"{HEIGHT} height = tl.minimum(y2, other_y2) - tl.maximum(y1, other_y1) + 1",
           f"{AREA} other_area = (other_x2 - other_x1 + 1) * (other_y2 - other_y1 + 1)",
           f"{UNITED} united = (x2 - x1 + 1) * (y2 - y1 + 1) + other_area - intersection",
           examples=named(properties, "a_third_of_their_union"), **pixel, **one),
        of("suppressed_boxes_suppress", "((own & former) == 0) => (own == 0)", **chain, **one),
        of("areas_in_float16", f"{UNITED} united = ((x2 - x1) * (y2 - y1)).to({HALF} + other_area.to({HALF}"
           " - intersection", examples=named(properties, "areas_past_float16"), **half),
        of("the_first_block_alone", "above &= row[:, None] < column[None, :] =>"
           " above &= (row[:, None] < column[None, :]) & (column[None, :] < 64)",
           examples=named(properties, "one_more_than_two_blocks"), **blocks),
        of("sides_not_clamped", "tl.maximum(width, 0.0) * tl.maximum(height, 0.0) => width * height", **one),
        of("over_the_smaller_area", f"{UNITED} united = tl.minimum((x2 - x1) * (y2 - y1), other_area)", **one),
        of("classes_ignored", "HAS_IDXS=has_idxs,\n        BLOCK= => HAS_IDXS=False,\n        BLOCK=",
           examples=named(properties, "of_two_classes"), **one),
    )


# fmt: on
def _faults() -> tuple[Fault, ...]:
    of_triton = functools.partial(Edits("nms", "triton"), says=OTHER)
    of_cuda = functools.partial(cuda_fault, "nms", in_cuda, right_on="one_box")
    github = "https://github.com"
    pixel = {"source": f"{github}/facebookresearch/maskrcnn-benchmark/issues/1020"}
    limit = {
        "source": f"{github}/tensorflow/tensorflow/pull/32568",
        "examples": named(properties, "equal_to_the_threshold"),
    }
    chain = {
        "source": f"{github}/shouxieai/tensorRT_Pro/issues/85",
        "examples": named(properties, "a_suppressed_box_suppresses_none"),
    }
    blocks = {"source": f"{github}/jeetkanjani7/Parallel_NMS/issues/1", "right_on": "identical"}
    half = {"source": f"{github}/pytorch/vision/issues/3371", "dtype": "float16", "right_on": "identical"}
    sorted_places = f"{github}/xlite-dev/LeetCUDA/issues/517"
    ties, offset = f"{github}/pytorch/vision/issues/2157", f"{github}/MultimediaTechLab/YOLO/pull/234"
    return (
        *_of_triton(of_triton, limit, pixel, chain, half, blocks),
        of_cuda("at_the_threshold_too", **limit, says=OTHER),
        of_cuda("a_pixel_more", examples=named(properties, "a_third_of_their_union"), **pixel, says=OTHER),
        of_cuda("suppressed_boxes_suppress", **chain, says=OTHER),
        of_cuda("bits_of_an_int", cuda_on_cpu.UndefinedArithmetic, examples=named(properties, "one_more_than_a_block")),
        of_cuda("last_block_dropped", examples=named(properties, "kept_boxes_in_every_block"), **blocks, says=OTHER),
        of_cuda(
            "words_of_the_first_block", examples=named(properties, "kept_boxes_in_every_block"), **blocks, says=OTHER
        ),
        of_cuda("classes_of_32_bits", examples=named(properties, "classes_below_0_and_large"), says=OTHER),
        of_cuda("barrier_missing", cuda_on_cpu.Race, examples=named(properties, "a_chain_over_blocks"), right_on=None),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        _of_torch("shifted_by_class", lambda: of_walk(shifted_by_class), dtype="float16", source=offset),
        _of_torch("later_of_equal_scores_first", lambda: of_walk(right, later_of_equal_scores_first), source=ties),
        _of_torch(
            "nan_is_the_lowest",
            lambda: of_walk(right, nan_is_the_lowest),
            examples=named(properties, "scores_not_finite"),
        ),
        _of_torch("places_in_order", lambda: of_result(places_in_order), source=sorted_places),
        _of_torch("in_order_of_indices", lambda: of_result(lambda kept, _: kept.sort().values)),
        _of_torch("as_many_as_boxes", lambda: of_result(as_many_as_boxes)),
        _of_torch(
            "indices_of_32_bits",
            lambda: of_result(lambda kept, _: kept.int()),
            says="has dtype torch.int32",
            right_on=None,
        ),
        _of_law(
            "first_block_suppresses",
            properties.kept_boxes_are_kept_again,
            first_block_suppresses,
            "a_chain_over_blocks",
        ),
        _of_law("clipped_to_an_image", properties.moved_boxes_are_kept_alike, clipped_to_an_image, "identical"),
        _of_law(
            "from_the_lowest_score",
            properties.boxes_of_lower_rank_change_nothing,
            from_the_lowest_score,
            "a_chain_over_blocks",
        ),
        _of_law(
            "classes_ignored",
            properties.classes_do_not_see_one_another,
            classes_ignored,
            "of_two_classes",
            right_on="one_box_of_a_class",
        ),
    )


FAULTS = _faults()
