"""The record of nms: which boxes are kept. Where rounding may decide, either decision is right, with what follows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import nms as oracle

from fourfold.declaration.library import Declared
from fourfold.inputs.arrays import sprinkle_special_values
from fourfold.numerics.bounded import Bounded, NoRule, OneOf, lift
from fourfold.numerics.dtypes import DType, dtype_of
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Law, Relation, what_must_be_moved
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, whole

from .boxes import PAIRS, box_pairs

Array = np.ndarray

# ---- the right results


def suppressions(
    boxes: Bounded, scores: Bounded, iou_threshold: float, idxs: Array | None
) -> tuple[Array, list[Array], list[Array]]:
    """Return the box of each rank, and the ranks that each suppresses if it is kept: for certain, and at most.

    The rank of a box is the place of its score, from the highest on. Where the lists differ, rounding decides.
    """
    if boxes.error.any() or scores.error.any():
        raise NoRule("which boxes are kept depends on numbers that are rounded")
    order = oracle.order(scores.value)
    ranked, classes, later = boxes[order], np.zeros_like(order) if idxs is None else idxs[order], []
    # All other pairs have a quotient of 0 or NaN, which is above no threshold, in any arithmetic.
    finite = np.where(np.isfinite(ranked.value).all(-1, keepdims=True), ranked.value, np.nan)
    for rank in range(len(order)):
        intersection, _ = oracle.intersection_and_union(finite[rank], finite[rank + 1 :])
        later.append(rank + 1 + np.flatnonzero((intersection > 0) & (classes[rank + 1 :] == classes[rank])))
    first, second = np.repeat(np.arange(len(order)), [*map(len, later)]), np.concatenate([order[:0], *later])
    certain, possible = _above(ranked[first], ranked[second], iou_threshold)

    def by_first(chosen: Array) -> list[Array]:
        return np.split(second[chosen], np.searchsorted(first[chosen], np.arange(1, len(order))))

    return order, by_first(certain), by_first(possible)


def _above(boxes1: Bounded, boxes2: Bounded, iou_threshold: float) -> tuple[Array, Array]:
    """Return where intersection over union is above the threshold for certain, and where it may be."""
    intersection, union = oracle.intersection_and_union(boxes1, boxes2)
    quotient, limit = intersection / union, lift(float(iou_threshold), boxes1.arithmetic)
    with np.errstate(all="ignore"):
        # Of areas that no correct kernel rounds, the quotient by a power of 2 is not rounded either.
        exact = abs(np.frexp(union.value)[0]) == 0.5
        for area in (intersection, union):
            exact = exact & area.terms.exact(area.arithmetic)
        error = np.where(exact, 0, quotient.error) + limit.error
        possible = (quotient.value + error > limit.value) | ~np.isfinite(error)
        return quotient.value - error > limit.value, possible


def forward(boxes: Any, scores: Any, iou_threshold: float, idxs: Array | None = None) -> Any:
    """Return the oracle's choice, or any other one that is right, of any length."""
    if not isinstance(boxes, Bounded):
        return oracle.forward(boxes, scores, iou_threshold, idxs)
    order, certain, possible = suppressions(boxes, scores, iou_threshold, idxs)

    def nearest(actual: Array) -> Array:
        """Return the only consistent choice that is as `actual` where rounding decides, given the boxes before."""
        chosen, kept = np.isin(order, actual), []
        gone, may_be_gone = np.zeros((2, len(order)), bool)
        for rank in range(len(order)):
            if not gone[rank] and (chosen[rank] or not may_be_gone[rank]):
                kept.append(rank)
                gone[certain[rank]] = may_be_gone[possible[rank]] = True
        return order[kept].astype(actual.dtype)

    kept = oracle.forward(boxes.value, scores.value, iou_threshold, idxs)
    return OneOf(kept.astype(boxes.value.dtype), boxes.arithmetic, nearest, any_length=True)


# ---- cases


def boxes_around(rng: np.random.Generator, n: int, dtype: DType, *kinds: str, origin: float = 0.0) -> Array:
    """Return boxes of pairs of some kinds; several of them lie about each place."""
    apart = np.concatenate(box_pairs(rng, n // 6 + 1, kinds, dtype, origin)).astype(np.float64)
    boxes: Array = apart[rng.integers(len(apart), size=n)]
    moved = boxes + rng.normal(0, 0.1, (n, 4)) * np.tile(abs(boxes[:, 2:] - boxes[:, :2]), 2)
    return np.where(rng.random((n, 1)) < 0.5, moved, boxes)


def make_boxes(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return boxes of pairs of one kind or of all, on both sides of 0 or above it."""
    kinds, origin = rng.choice(PAIRS, 1) if rng.random() < 0.5 else PAIRS, float(rng.choice([0, -6]))
    boxes = boxes_around(rng, shape[0], dtype_of(dtype), *kinds, origin=origin)
    # Quotients of whole numbers are often equal to a threshold.
    return _seldom_special(rng, np.rint(boxes) if rng.random() < 0.25 else boxes, dtype)


def make_scores(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return scores of one sign or of both, all different, a few different ones, or one of all boxes."""
    steps = rng.choice([4096, 4096, 4, 1])
    return _seldom_special(rng, np.floor(rng.uniform(rng.choice([0, -1]), 1, shape) * steps) / steps, dtype)


def make_classes(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return one class or a few."""
    return rng.integers(0, rng.choice([1, 2, 5]), shape).astype(dtype)


def _seldom_special(rng: np.random.Generator, array: Array, dtype: np.dtype) -> Array:
    rounded = array.astype(dtype)
    return sprinkle_special_values(rng, rounded, 0.1) if rng.random() < 0.2 else rounded


NMS = Declared("nms", boxes=make_boxes, scores=make_scores, idxs=make_classes)


def example(boxes: Any, scores: Any = None, **arguments: Any) -> Callable[[DType], Case]:
    """Return a named case of given boxes, with scores that fall and without classes unless given."""
    falling = np.linspace(1, 0.5, len(boxes)) if scores is None else scores
    return NMS.example(boxes=boxes, scores=falling, **{"idxs": None, **arguments})


def around(n: int, kind: str = "overlapping", far: bool = False, **arguments: Any) -> Callable[[DType], Case]:
    """Return a named case of random boxes of pairs of a kind, far from the origin if asked for; of one class."""

    def boxes(rng: np.random.Generator, dtype: DType) -> Array:
        return boxes_around(rng, n, dtype, kind, origin=min(0.5 / dtype.roundoff, 4096.0) if far else 0.0)

    return NMS.example(boxes=boxes, **{"idxs": None, **arguments})


def detections(n: int, objects: int, classes: int = 0) -> Callable[[DType], Case]:
    """Return a named case as from a detector: boxes of some pixels around objects, with scores that objects share."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(17)
        corner, of = rng.uniform(0, 900, (objects, 2)), rng.integers(objects, size=n)
        boxes = np.concatenate([corner, corner + rng.uniform(16, 128, (objects, 2))], -1)[of]
        scores = rng.uniform(0, 0.8, objects)[of] + rng.uniform(0, 0.2, n)
        idxs = rng.integers(0, classes, objects)[of] if classes else None
        return example(boxes + rng.normal(0, 3, (n, 4)), scores, idxs=idxs)(dtype)

    return make


HALF = [[0, 0, 3, 4], [1, 0, 4, 4]]  # their intersection is exactly half of their union
# The first suppresses the second, which overlaps the third by as much.
CHAIN = [[0, 0, 4, 1], [1, 0, 5, 1], [2, 0, 6, 1], [3, 0, 7, 1], [4, 0, 8, 1]]
SPECIAL = [[np.nan, 0, 4, 4], [0, 0, np.inf, 4], [-np.inf, 0, 4, 4], [0, 0, 4, 4], [0, 0, 4, np.nan], [0, 0, 4, 3]]
ALIKE = [[0, 0, 4, 4]] * 6
examples: Mapping[str, Callable[[DType], Case]] = {
    "a_suppressed_box_suppresses_none": example(CHAIN),
    "equal_to_the_threshold": example(HALF),
    "just_above_the_threshold": example(HALF, iou_threshold=0.5 - 2**-20),
    "nested_equal_to_the_threshold": example([[0, 0, 4, 4], [0, 0, 4, 2], [0, 0, 2, 2]]),
    "touching_with_a_threshold_of_0": example(
        [[0, 0, 2, 2], [2, 0, 4, 2], [0, 2, 2, 4], [1, 1, 3, 3]], iou_threshold=0.0
    ),
    "identical": NMS.example(boxes=([[1, 2, 5, 4]] * 5, "expanded"), scores=np.arange(5), idxs=None),
    "identical_with_a_threshold_of_1": example(ALIKE, iou_threshold=1.0),
    # Sorting by the score alone may put boxes of equal scores in any order, above 16 of them most often.
    "of_one_score": around(90, scores=np.full(90, 0.5)),
    "of_few_scores": around(200, "identical", scores=np.arange(200) % 4),
    "scores_rise": example(CHAIN, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "negative_scores": around(70, scores=np.linspace(-2, 1, 70)),
    "zeros_of_both_signs": example(CHAIN[:4], [-0.0, 0.0, -0.0, 0.0]),
    "scores_not_finite": example(CHAIN, [0.5, np.nan, np.inf, -np.inf, np.nan]),
    "boxes_not_finite": example(SPECIAL),
    "points_and_lines": example([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 4, 1], [0, 0, 4, 4], [1, 1, 1, 4], [1, 1, 4, 1]]),
    "inverted": example([[4, 4, 0, 0], [0, 0, 4, 4], [4, 0, 0, 4], [4, 4, 0, 0], [0, 0, 4, 3]]),
    "below_0": example([[-4, -4, -1, -1], [-4, -4, -1, -2], [-2, -2, 1, 1]]),
    # A third of their union, and half of it if each side were a pixel longer.
    "a_third_of_their_union": example(
        [[0, 0, 2, 2], [1, 0, 3, 2], [0.25, 0, 0.5, 0.25], [0.375, 0, 0.625, 0.25]], iou_threshold=0.4
    ),
    # Areas past the largest float16, whose quotients are ordinary.
    "areas_past_float16": example([[0, 0, 400, 300], [0, 0, 400, 280], [8, 8, 500, 1000], [8, 8, 500, 960]]),
    "one_more_than_a_block": around(65),
    "one_more_than_two_blocks": around(129, "pixels"),
    # Each box is above the threshold with its neighbours alone: every second one is kept, on all sides of blocks' ends.
    "a_chain_over_blocks": example([[place, 0, place + 4, 1] for place in range(131)]),
    "kept_boxes_in_every_block": example([[8 * (place % 70), 0, 8 * (place % 70) + 4, 4] for place in range(330)]),
    "more_words_than_are_looked_at_together": detections(580, 20),
    "of_two_classes": example(ALIKE[:4], idxs=np.array([7, 1, 7, 1])),
    "of_many_classes": around(150, "identical", idxs=np.arange(150) % 80),
    "classes_below_0_and_large": example(ALIKE, idxs=np.array([-1, 2**40, -1, 0, 2**40 + 2**32, 2**32])),
    "classes_of_32_bits": example(ALIKE, idxs=np.array([0, -3, 0, 1, -3, 1], np.int32)),
    # A shift by a multiple of the largest coordinate leaves too few digits of the others.
    "far_boxes_of_many_classes": around(120, far=True, idxs=np.arange(120) % 12),
    "huge": around(40, "huge"),
    "tiny": around(40, "tiny"),
}

# ---- laws

# That few quotients of simple numbers are equal to.
OTHER_THRESHOLDS = (0.43271, 0.31597, 0.66913, 0.21739)


def decided_case(case: Case, dtype: DType) -> Case | None:
    """Return the case with its threshold, or another, for which no decision depends on rounding; None if none does.

    Calls on some of the boxes then decide alike.
    """
    boxes, scores = (Bounded.exact(case[name].astype(dtype.wide), dtype.arithmetic) for name in ("boxes", "scores"))
    for threshold in (case.parameters["iou_threshold"], *OTHER_THRESHOLDS):
        _, certain, possible = suppressions(boxes, scores, threshold, case.inputs.get("idxs"))
        if sum(map(len, certain)) == sum(map(len, possible)):
            return case.with_parameters(iou_threshold=threshold)
    return None


def count_kept(evaluate: Evaluate, case: Case) -> Bounded:
    """Count how often each box is kept."""
    found = evaluate(case).output
    counts = np.count_nonzero(found.value == np.arange(len(case["boxes"]))[:, None], axis=-1)
    return Bounded.exact(counts.astype(np.float64), found.arithmetic)


def kept_alike_alone(name: str, places: Callable[[Case, Array, DType], Array]) -> Law:
    """Return the law that some boxes are kept as if the others were absent.

    Args:
        name: the law's name.
        places: returns their places in a case, of which it takes how often each box is kept.
    """

    def relations(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        if here := decided_case(case, dtype):
            kept = count_kept(evaluate, here).value
            some = places(here, kept, dtype)
            alone = here.with_inputs(**{name: array[some] for name, array in here.inputs.items()})
            yield equals_exactly(count_kept(evaluate, alone), kept[some])

    relations.__name__ = name
    return relations


def highest_half(case: Case, kept: Array, dtype: DType) -> Array:
    """Return the places of the half of the boxes with the highest scores."""
    return np.sort(oracle.order(case["scores"].astype(dtype.wide))[: (len(kept) + 1) // 2])


def largest_class(case: Case, kept: Array, dtype: DType) -> Array:
    """Return the places of the boxes of the class with the most of them."""
    _, of_each, counts = np.unique(case.inputs.get("idxs", 0 * kept), return_inverse=True, return_counts=True)
    return np.flatnonzero(of_each == np.argmax(counts)) if kept.size else kept.astype(int)


def moved_boxes_are_kept_alike(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Moving boxes by 16 keeps the same ones, if they are rounded to small whole numbers: areas are exact."""
    boxes: Array = np.clip(np.rint(case["boxes"].astype(dtype.wide)), -16, 16)
    here, there = (case.with_inputs(boxes=(boxes + shift).astype(dtype.numpy)) for shift in (0, 16))
    yield equals_exactly(count_kept(evaluate, there), count_kept(evaluate, here).value)


# No kept box suppresses another, a box none of a higher score, and none of another class.
kept_boxes_are_kept_again = kept_alike_alone("kept_boxes_are_kept_again", lambda case, kept, _: np.flatnonzero(kept))
boxes_of_lower_rank_change_nothing = kept_alike_alone("boxes_of_lower_rank_change_nothing", highest_half)
classes_do_not_see_one_another = kept_alike_alone("classes_do_not_see_one_another", largest_class)
LAWS = (
    kept_boxes_are_kept_again,
    moved_boxes_are_kept_alike,
    boxes_of_lower_rank_change_nothing,
    classes_do_not_see_one_another,
)
for _law in LAWS:
    _law.most_named = 1000  # type: ignore[attr-defined]  # a law calls several times, and pairs of boxes take time

# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Inputs are read and indices written; each pair of boxes of a class is compared, by 14 operations."""
    counts = np.unique(case.inputs.get("idxs", np.zeros(len(case["boxes"]))), return_counts=True)[1]
    moved, nothing = what_must_be_moved(case)
    return replace(moved, flops=14 * int((counts * (counts - 1) // 2).sum())), nothing


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(detections(300, 30)), "ragged": whole(detections(1001, 60, 20))},
    "cuda": {
        "small": whole(detections(1000, 50)),
        "large": whole(detections(4096, 200)),
        "classes": whole(detections(20000, 800, 80)),
        "ragged": whole(detections(4999, 700)),
    },
}

operation = NMS.operation(
    oracle, forward=forward, examples=examples, laws=LAWS, cost=cost, workloads=workloads, length_varies=True
)
