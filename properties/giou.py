"""The record of giou: generalized intersection over union of paired boxes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from fourfold.oracles import giou as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, cotangent, layouts_for, sizes, sprinkle_special_values
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import between, equal_where, equals, only
from fourfold.operations.workloads import Make, tiled, whole

from .boxes import PAIRS, box_pairs, explicit_pairs, pairs, pairs_without_ties

EPS = (1e-5, 1e-7, 0.25)


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw pairs of boxes with zero to three leading axes."""
    most = elements // 4
    some = explicit_pairs(dtype, 1, most) if 0 < most <= 2 else sizes(most).flatmap(partial(pairs, dtype))
    boxes1, boxes2 = draw(some)
    count = len(boxes1)
    rng = draw(GENERATORS)
    if draw(st.sampled_from((False, False, False, True))):
        share = draw(st.sampled_from((0.2, 0.05)))
        boxes1, boxes2 = sprinkle_special_values(rng, boxes1, share), sprinkle_special_values(rng, boxes2, share)
    divisors: list[int] = [d for d in (2, 3, 5, 7) if count % d == 0] if count else [0, 2]
    leading: tuple[int, ...] = (count,)
    if count == 1 and draw(st.booleans()):
        leading = ()
    elif draw(st.booleans()) and divisors:
        d = draw(st.sampled_from(divisors))
        leading = draw(st.sampled_from([(d, count // max(d, 1)), (count // max(d, 1), d), (1, d, count // max(d, 1))]))
    grad_output = cotangent(rng, leading, dtype)
    layouts = draw(layouts_for("boxes1", "boxes2", "grad_output"))
    if "expanded" in layouts.values() and leading:
        # One box against many, as broadcasting makes it, and one cotangent for all, as sum().backward() makes it.
        boxes1 = np.broadcast_to(boxes1[:1], boxes1.shape).copy()
        grad_output = np.broadcast_to(grad_output.reshape(-1)[:1], (grad_output.size,)).reshape(leading).copy()
    return Case(
        inputs={"boxes1": boxes1.reshape(*leading, 4), "boxes2": boxes2.reshape(*leading, 4)},
        grad_output=grad_output,
        parameters={"eps": draw(st.sampled_from(EPS))},
        layouts=layouts,
    )


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw one to three pairs of boxes without ties."""
    rng = draw(GENERATORS)
    boxes1, boxes2 = pairs_without_ties(rng, draw(st.integers(1, 3)), dtype)
    return Case({"boxes1": boxes1, "boxes2": boxes2}, cotangent(rng, boxes1.shape[:-1], dtype), {"eps": 1e-5})


def example(
    boxes1: Any, boxes2: Any, eps: float = 1e-5, layouts: Mapping[str, str] | None = None, last: float = 2
) -> Callable[[DType], Case]:
    """Return a named case of given boxes, with a cotangent from -1.5 to `last`."""

    def make(dtype: DType) -> Case:
        first, second = np.array(boxes1, dtype=dtype.numpy), np.array(boxes2, dtype=dtype.numpy)
        grad_output = np.asarray(np.linspace(-1.5, last, first.size // 4).reshape(first.shape[:-1])).astype(dtype.numpy)
        return Case({"boxes1": first, "boxes2": second}, grad_output, {"eps": eps}, layouts or {})

    return make


def pairs_of_every_kind(count: int) -> Callable[[DType], Case]:
    """Return a named case of random boxes."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(20)
        boxes1, boxes2 = box_pairs(rng, count, PAIRS, dtype)
        return Case({"boxes1": boxes1, "boxes2": boxes2}, cotangent(rng, (count,), dtype), {"eps": 1e-5})

    return make


def nowhere_finite(dtype: DType) -> Case:
    """Make each coordinate in turn NaN, inf and -inf."""
    base = np.array([1.0, 2.0, 5.0, 7.0])
    rows = np.tile(base, (24, 1))
    for i, special in enumerate((np.nan, np.inf, -np.inf)):
        for coordinate in range(4):
            rows[4 * i + coordinate, coordinate] = special
            rows[12 + 4 * i + coordinate, coordinate] = special
    other = np.tile([2.0, 1.0, 4.0, 9.0], (24, 1))
    other[12:] = rows[12:]
    grad_output = np.linspace(-2, 3, 24).astype(dtype.numpy)
    return Case({"boxes1": rows.astype(dtype.numpy), "boxes2": other.astype(dtype.numpy)}, grad_output, {"eps": 1e-5})


def small_and_apart_under_a_huge_cotangent(dtype: DType) -> Case:
    """Let the cotangent divided by the union overflow; boxes that lie apart do not use it: no gradient overflows."""
    boxes1, boxes2 = np.array([[0, 0, 0.25, 0.5]], dtype.numpy), np.array([[2, 1, 2.25, 1.25]], dtype.numpy)
    grad_output = np.array([dtype.largest / 4]).astype(dtype.numpy)
    return Case({"boxes1": boxes1, "boxes2": boxes2}, grad_output, {"eps": 1e-5})


UNIT = [0.0, 0.0, 1.0, 1.0]
PREDICTED: list[list[float]] = [UNIT, [1, 1, 4, 2], [0.5, 2, 3, 5], [2, 0, 3, 1], [1, 1, 2, 6], [-2, -1, 1, 2]]
WANTED: list[list[float]] = [[0, 0, 2, 2], UNIT, [1, 1, 3, 4], [0, 1, 2, 3], [1, 2, 4, 5], [-1, -1, 0, 1]]
examples: Mapping[str, Callable[[DType], Case]] = {
    # The published kernels lack the clamp: two negative sides of boxes apart along both axes make a positive overlap.
    "apart_along_both_axes": example([UNIT], [[2, 2, 3, 3]]),
    "apart_along_one_axis": example([UNIT], [[2, 0, 3, 1]]),
    "touching_in_a_corner": example([UNIT], [[1, 1, 2, 2]]),
    "identical": example([[1, 2, 4, 8]], [[1, 2, 4, 8]]),
    "nested_sharing_an_edge": example([[0, 0, 4, 4]], [[0, 1, 2, 3]]),
    "identical_points": example([[3, 3, 3, 3]], [[3, 3, 3, 3]]),
    "point_in_a_box": example([[3, 3, 3, 3]], [[0, 0, 8, 8]]),
    "area_equal_to_eps": example([[0, 0, 0.5, 0.5]], [[0, 0, 0.5, 0.5]], eps=0.25),
    "union_of_boxes_apart_equal_to_eps": example([[0, 0, 0.25, 0.5]], [[0.5, 0, 0.75, 0.5]], eps=0.25),
    # No half type represents this eps.
    "area_below_eps": example([[0, 0, 0.25, 0.5]], [[0, 0.25, 0.5, 0.5]], eps=0.3),
    "union_below_eps_and_hull_above": example([[0, 0, 0.25, 0.25]], [[2, 1, 2.25, 1.25]], eps=0.25),
    "inverted_both": example([[4, 4, 1, 1]], [[3, 3, 2, 2]]),
    "inverted_one": example([[4, 4, 1, 1]], [[0, 0, 8, 8]]),
    "coordinates_past_256": example([[300, 300, 900, 1200]], [[280, 420, 1000, 1100]]),
    "left_of_and_below_zero": example([[-9, -7, -4, -2]], [[-6, -8, 1, -3]]),
    "small_and_apart_under_a_huge_cotangent": small_and_apart_under_a_huge_cotangent,
    "no_boxes": example(np.zeros((0, 4)), np.zeros((0, 4))),
    "no_boxes_in_two_images": example(np.zeros((2, 0, 4)), np.zeros((2, 0, 4))),
    "one_pair_without_leading_axes": example(UNIT, [0.5, 0.5, 2, 2]),
    "coordinates_strided": example(
        [UNIT, [1, 1, 4, 2]], [[0, 0, 2, 2], UNIT], layouts={"boxes1": "axes_reversed", "boxes2": "sliced_columns"}
    ),
    # A row of a detector's output holds a score as well. Boxes sliced from it are neither contiguous nor aligned.
    "cut_from_rows_of_five": example(PREDICTED, WANTED, layouts={"boxes1": "cut_from_wider", "boxes2": "misaligned"}),
    # No view can merge the two leading axes into one.
    "images_transposed": example(
        np.reshape(PREDICTED, (2, 3, 4)),
        np.reshape(WANTED, (2, 3, 4)),
        layouts={"boxes1": "transposed", "grad_output": "transposed"},
    ),
    "images_of_both_in_another_order": example(
        np.reshape(PREDICTED, (3, 2, 4)),
        np.reshape(WANTED, (3, 2, 4)),
        layouts={"boxes1": "axes_reversed", "boxes2": "transposed"},
    ),
    "grad_output_strided": example(PREDICTED, WANTED, layouts={"grad_output": "sliced_rows"}),
    # As sum().backward() makes it: https://github.com/Dao-AILab/flash-attention/issues/355
    "grad_output_expanded": example(PREDICTED, WANTED, layouts={"grad_output": "expanded"}, last=-1.5),
    "one_box_against_many": example([[1, 1, 4, 3]] * 6, WANTED, layouts={"boxes1": "expanded"}),
    "every_kind_mixed": pairs_of_every_kind(1037),
    "not_finite": nowhere_finite,
}


def proper(case: Case, dtype: DType) -> np.ndarray:
    """Return where both boxes are finite and not inverted."""
    boxes: np.ndarray = np.stack([case["boxes1"], case["boxes2"]]).astype(dtype.wide)
    return np.all(
        np.isfinite(boxes).all(-1) & (boxes[..., 2] >= boxes[..., 0]) & (boxes[..., 3] >= boxes[..., 1]), axis=0
    )


def swapping_the_boxes_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """giou(a, b) = giou(b, a), and the gradients change places."""
    here, there = evaluate(case), evaluate(case.with_inputs(boxes1=case["boxes2"], boxes2=case["boxes1"]))
    yield Relation(here.output, there.output)
    yield Relation(here.gradients["boxes1"], there.gradients["boxes2"])


def moving_both_boxes_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """giou(a + t, b + t) = giou(a, b), where adding t is exact."""
    step: np.ndarray = np.array([4, -2, 4, -2], dtype=dtype.wide)
    moved, exact = {}, np.True_
    for name in ("boxes1", "boxes2"):
        with np.errstate(invalid="ignore", over="ignore"):
            there = (case[name].astype(dtype.wide) + step).astype(dtype.numpy)
            exact = exact & (there.astype(dtype.wide) - step == case[name].astype(dtype.wide)).all(-1)
        moved[name] = there
    here, there_result = evaluate(case), evaluate(case.with_inputs(**moved))
    yield equal_where(exact, here.output, there_result.output)


def scaling_both_boxes_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """giou(2a, 2b) with 4 eps = giou(a, b) with eps."""
    doubled, exact = {}, np.True_
    for name in ("boxes1", "boxes2"):
        with np.errstate(over="ignore"):
            there = (case[name].astype(dtype.wide) * 2).astype(dtype.numpy)
        exact = exact & (np.isfinite(there) | ~np.isfinite(case[name])).all(-1)
        doubled[name] = there
    scaled = case.with_inputs(**doubled).with_parameters(eps=4 * case.parameters["eps"])
    here, there_result = evaluate(case), evaluate(scaled)
    yield equal_where(exact, here.output, there_result.output)


def proper_boxes_score_between_minus_one_and_one(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """-1 <= giou <= 1 where no box is inverted."""
    output = only(proper(case, dtype), evaluate(case).output)
    yield between(output, -1, 1)


def never_above_intersection_over_union(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """giou <= iou where no box is inverted."""
    output = only(proper(case, dtype), evaluate(case).output)
    boxes: list[np.ndarray] = [case[name].astype(dtype.wide) for name in ("boxes1", "boxes2")]
    with np.errstate(all="ignore"):
        _, _, intersection, union, *_ = oracle.intersection_union_hull(*boxes)
        iou = intersection / np.maximum(union, case.parameters["eps"])
    # No kernel can avoid the rounding of the largest score.
    yield between(output, -np.inf, np.where(proper(case, dtype), iou, 0))


def a_box_scores_one_with_itself(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """giou(a, a) = 1 where the area is at least 2 eps."""
    boxes: np.ndarray = case["boxes1"].astype(dtype.wide)
    with np.errstate(all="ignore"):
        area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
        sized = proper(case, dtype) & (area >= 2 * case.parameters["eps"])
    result = evaluate(case.with_inputs(boxes2=case["boxes1"]))
    output = only(sized, result.output)
    yield equals(output, np.where(sized, 1, 0))


def gradients_along_an_axis_cancel(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of a pair's x coordinates sum to 0, and so do those of y: moving both boxes changes nothing.

    This holds for every choice of derivatives at ties. A choice at most doubles a term of the documented one, and so
    the bound is doubled.
    """
    of_pair = [evaluate(case, documented=True).gradients[name] for name in ("boxes1", "boxes2")]
    with np.errstate(invalid="ignore"):
        value = sum(gradient.value[..., :2] + gradient.value[..., 2:] for gradient in of_pair)
        error = 2 * sum(gradient.error[..., :2] + gradient.error[..., 2:] for gradient in of_pair)
    known = np.isfinite(value) & np.isfinite(error)
    total = only(known, Bounded(value, error, of_pair[0].arithmetic))
    yield equals(total, 0)


ARGUMENTS = arguments_of("giou")


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads both boxes and writes a score. Backward reads boxes and cotangent, and writes both gradients."""
    boxes = case["boxes1"]
    count, itemsize = boxes.size // 4, boxes.dtype.itemsize
    return Cost(9 * count * itemsize, 31 * count), Cost(17 * count * itemsize, 95 * count)


def overlapping(count: int) -> Callable[[DType], Case]:
    """Return a case of `count` pairs of boxes of ordinary kinds."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(21)
        boxes1, boxes2 = box_pairs(rng, count, ("overlapping", "disjoint_along_both", "nested"), dtype)
        return Case({"boxes1": boxes1, "boxes2": boxes2}, cotangent(rng, (count,), dtype), {"eps": 1e-5})

    return make


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(overlapping(2048)), "ragged": whole(overlapping(1037))},
    "cuda": {
        "small": whole(overlapping(4096)),
        "large": tiled(overlapping(1 << 16), 256, "boxes1", "boxes2"),
        "ragged": tiled(overlapping(1037), 1024, "boxes1", "boxes2"),
    },
}

operation = Operation(
    name="giou",
    forward=oracle.forward,
    backward=oracle.backward,
    differentiable=("boxes1", "boxes2"),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"boxes1": 1, "boxes2": 1},
    laws=(
        swapping_the_boxes_changes_nothing,
        moving_both_boxes_changes_nothing,
        scaling_both_boxes_changes_nothing,
        proper_boxes_score_between_minus_one_and_one,
        never_above_intersection_over_union,
        a_box_scores_one_with_itself,
        gradients_along_an_axis_cancel,
    ),
    errors=ARGUMENTS.errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    sized=Sized({"...": 1}, lambda sizes: pairs_of_every_kind(sizes["..."])),
    source="Rezatofighi et al., Generalized Intersection over Union, CVPR 2019",
)
