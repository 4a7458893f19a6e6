"""The record of nms: which boxes are kept. Where rounding may decide, either decision is right, with what follows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fourfold.oracles import nms as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, layouts_for, repeat_first, sizes, sprinkle_special_values
from fourfold.numerics.bounded import Bounded, NoRule, OneOf, lift
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, whole

# ---- the right results

ROWS = 512  # boxes that are compared with others at a time


class Decisions:
    """Which boxes suppress which, where they are kept themselves: for certain, or if rounding so decides.

    Boxes are known by their rank: the place of their score, from the highest on.

    Attributes:
        order: the index of the box of each rank.
        certain: whether a decision does not depend on rounding, of each pair of `first` and `second`.
        first, second: ranks of pairs that may suppress, by rising `first`, which is the smaller one.
    """

    def __init__(self, boxes: Bounded, scores: Bounded, iou_threshold: float, idxs: np.ndarray | None) -> None:
        if boxes.error.any() or scores.error.any():
            raise NoRule("which boxes are kept depends on numbers that are rounded")
        self.order = oracle.order(scores.value)
        ranked = boxes[self.order]
        classes = np.zeros(len(self.order), np.int64) if idxs is None else idxs[self.order]
        first, second = _overlapping(ranked.value, classes)
        certain, possible = _above(ranked[first], ranked[second], iou_threshold)
        self.first, self.second, self.certain = first[possible], second[possible], certain[possible]
        self._begins = np.searchsorted(self.first, np.arange(len(self.order) + 1))

    def nearest(self, actual: np.ndarray) -> np.ndarray:
        """Return the boxes that are kept, by index: as `actual` has it where rounding decides, given those kept before.

        So there is one consistent choice for everything that may be returned, and it is right only if it is that.
        """
        asked = actual[np.isin(actual, self.order)].astype(np.int64)
        chosen = np.zeros(len(self.order), bool)
        chosen[np.argsort(self.order)[asked]] = True
        gone, may_be_gone = np.zeros((2, len(self.order)), bool)
        kept = []
        for rank, begin, end in zip(range(len(self.order)), self._begins, self._begins[1:]):
            if not gone[rank] and (chosen[rank] or not may_be_gone[rank]):
                kept.append(rank)
                may_be_gone[self.second[begin:end]] = True
                gone[self.second[begin:end][self.certain[begin:end]]] = True
        return self.order[kept].astype(actual.dtype)


def _overlapping(ranked: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of finite boxes of one class that intersect, ordered by the rank of the first, then the second.

    All others have a quotient of 0 or NaN, which is above no threshold, in any arithmetic.
    """
    pairs, finite = [np.zeros((2, 0), np.int64)], np.isfinite(ranked).all(-1)
    for of_class in np.unique(classes):
        members = np.flatnonzero((classes == of_class) & finite)
        for begin in range(0, len(members), ROWS):
            one, other = members[begin : begin + ROWS], members[begin:]
            overlap = one[:, None] < other
            for low, high in ((0, 2), (1, 3)):
                least = np.maximum(ranked[one, None, low], ranked[other, low])
                overlap &= least < np.minimum(ranked[one, None, high], ranked[other, high])
            first, second = np.nonzero(overlap)
            pairs.append(np.stack([one[first], other[second]]))
    first, second = np.concatenate(pairs, axis=1)
    in_order = np.lexsort((second, first))
    return first[in_order], second[in_order]


def _above(boxes1: Bounded, boxes2: Bounded, iou_threshold: float) -> tuple[np.ndarray, np.ndarray]:
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


def forward(boxes: Any, scores: Any, iou_threshold: float, idxs: np.ndarray | None = None) -> Any:
    """Return the oracle's choice, or any other one that is right, of any length."""
    if not isinstance(boxes, Bounded):
        return oracle.forward(boxes, scores, iou_threshold, idxs)
    decisions = Decisions(boxes, scores, iou_threshold, idxs)
    kept = oracle.forward(boxes.value, scores.value, iou_threshold, idxs)
    return OneOf(kept.astype(boxes.value.dtype), boxes.arithmetic, decisions.nearest, any_length=True)


# ---- cases

THRESHOLDS = (0.5, 0.0, 0.25, 0.3, 0.7, 1.0)
KINDS = ("clusters", "whole", "alike", "apart", "flat", "inverted", "far", "huge", "tiny")


def boxes_of(rng: np.random.Generator, n: int, kind: str, dtype: DType) -> np.ndarray:
    """Return boxes ``[n, 4]`` of a kind, rounded; most of them overlap some others."""
    objects = max(n // 6, 1)
    corner = rng.uniform(-8, 8, (objects, 2))
    whole = np.concatenate([corner, corner + rng.uniform(1, 4, (objects, 2))], -1)
    boxes: np.ndarray = whole[rng.integers(objects, size=n)]
    if kind in ("clusters", "far", "huge", "tiny"):
        boxes = boxes + rng.normal(0, 0.25, (n, 4))
    elif kind == "whole":  # whose quotients are often equal to a threshold
        whole_corner = rng.integers(0, 6, (n, 2))
        boxes = np.concatenate([whole_corner, whole_corner + rng.integers(1, 5, (n, 2))], -1).astype(np.float64)
    elif kind == "apart":
        boxes = boxes + 32.0 * np.arange(n)[:, None]
    elif kind in ("flat", "inverted"):
        some = rng.random(n) < 0.5
        boxes[some] = boxes[some][:, [0, 1, 0, 3] if kind == "flat" else [2, 1, 0, 3]]
    if kind == "far":  # where a coordinate has few digits left for a shift
        boxes = boxes + min(0.5 / dtype.roundoff, 4096.0)
    if kind == "huge":  # the areas are finite in the arithmetic, and past the largest number of a half type
        boxes = boxes * min(dtype.largest / 64, float(np.sqrt(dtype.arithmetic.largest)) / 64)
    if kind == "tiny":
        boxes = boxes * max(dtype.smallest_subnormal * 64, float(np.sqrt(dtype.arithmetic.smallest_normal)) / 64)
    return boxes.astype(dtype.numpy)


def scores_of(rng: np.random.Generator, n: int, kind: str, dtype: DType) -> np.ndarray:
    """Return scores ``[n]``: "any" from 0 to 1, "few" different ones, "one" of all boxes, or of "both" signs."""
    if kind == "few":
        return (rng.integers(0, 4, n) / 4).astype(dtype.numpy)
    if kind == "one":
        return np.full(n, 0.5).astype(dtype.numpy)
    return (rng.uniform(0, 1, n) if kind == "any" else rng.normal(0, 2, n)).astype(dtype.numpy)


def case_of(
    boxes: np.ndarray,
    scores: np.ndarray,
    iou_threshold: float = 0.5,
    idxs: np.ndarray | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Case:
    """Return a case, whose unused cotangent has the shape of the oracle's result."""
    wide: Any = np.longdouble if boxes.dtype == np.float64 else np.float64
    kept = oracle.forward(boxes.astype(wide), scores.astype(wide), iou_threshold, idxs)
    inputs = {"boxes": boxes, "scores": scores} | ({} if idxs is None else {"idxs": idxs})
    return Case(inputs, np.zeros(kept.shape, boxes.dtype), {"iou_threshold": iou_threshold}, layouts or {})


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw boxes of one kind or of two, scores with and without ties, and none, few or many classes."""
    # Pairs of boxes take time: two blocks of them at most. Named examples have more.
    n, rng = draw(sizes(max(elements // 16, min(elements // 5, 8)))), draw(GENERATORS)
    kinds = draw(st.sampled_from(KINDS)), draw(st.sampled_from(KINDS))
    boxes = np.where(rng.random((n, 1)) < 0.7, *(boxes_of(rng, n, kind, dtype) for kind in kinds))
    scores = scores_of(rng, n, draw(st.sampled_from(("any", "few", "one", "both"))), dtype)
    classes = draw(st.sampled_from((0, 0, 1, 3, 80)))
    idxs = rng.integers(0, classes, n) if classes else None
    if idxs is not None and draw(st.booleans()):
        idxs = idxs.astype(np.int32)
    if draw(st.integers(0, 3)) == 3:
        boxes, scores = (sprinkle_special_values(rng, given, 0.1) for given in (boxes, scores))
    layouts = draw(layouts_for("boxes", "scores", *([] if idxs is None else ["idxs"])))
    boxes, scores = (
        repeat_first(x) if layouts[k] == "expanded" else x for k, x in (("boxes", boxes), ("scores", scores))
    )
    if idxs is not None and layouts["idxs"] == "expanded":
        idxs = repeat_first(idxs)
    return case_of(boxes, scores, draw(st.sampled_from(THRESHOLDS)), idxs, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw two to five boxes around a place, so that some suppress others."""
    rng, n = draw(GENERATORS), draw(st.integers(2, 5))
    corner = rng.uniform(0, 1, (n, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, 2, (n, 2))], -1).astype(dtype.numpy)
    return case_of(boxes, rng.permutation(np.linspace(-1, 1, n)).astype(dtype.numpy), 0.3)


def example(
    boxes: Any, scores: Any = None, iou_threshold: float = 0.5, idxs: Any = None, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of given boxes and scores, which fall unless given."""

    def make(dtype: DType) -> Case:
        given = np.array(boxes, np.float64).reshape(-1, 4).astype(dtype.numpy)
        of_each = np.linspace(1, 0.5, len(given)) if scores is None else np.array(scores, np.float64)
        return case_of(
            given, of_each.astype(dtype.numpy), iou_threshold, None if idxs is None else idxs.copy(), layouts
        )

    return make


def random_case(
    n: int, kind: str = "clusters", score: str = "any", iou_threshold: float = 0.5, classes: int = 0, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of random boxes."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(91)
        boxes, scores = boxes_of(rng, n, kind, dtype), scores_of(rng, n, score, dtype)
        return case_of(boxes, scores, iou_threshold, rng.integers(0, classes, n) if classes else None, layouts)

    return make


def detections(n: int, objects: int, classes: int = 0) -> Callable[[DType], Case]:
    """Return a named case as from a detector: boxes of some pixels around objects, with scores that objects share."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(17)
        corner, size = rng.uniform(0, 900, (objects, 2)), rng.uniform(16, 128, (objects, 2))
        of = rng.integers(objects, size=n)
        boxes = np.concatenate([corner, corner + size], -1)[of] + rng.normal(0, 3, (n, 4))
        scores = np.clip(rng.uniform(0, 0.8, objects)[of] + rng.uniform(0, 0.2, n), 0, 1)
        idxs = rng.integers(0, classes, objects)[of] if classes else None
        return case_of(boxes.astype(dtype.numpy), scores.astype(dtype.numpy), 0.5, idxs)

    return make


HALF = [[0.0, 0, 3, 4], [1, 0, 4, 4]]  # their intersection is exactly half of their union
# The first suppresses the second, which overlaps the third by as much.
CHAIN = [[0.0, 0, 4, 1], [1, 0, 5, 1], [2, 0, 6, 1], [3, 0, 7, 1], [4, 0, 8, 1]]
SPECIAL = [[np.nan, 0, 4, 4], [0, 0, np.inf, 4], [-np.inf, 0, 4, 4], [0, 0, 4, 4], [0, 0, 4, np.nan], [0, 0, 4, 3]]
examples: Mapping[str, Callable[[DType], Case]] = {
    "a_suppressed_box_suppresses_none": example(CHAIN),
    "no_boxes": example([]),
    "no_boxes_of_no_class": example([], idxs=np.zeros(0, np.int64)),
    "one_box": example(HALF[:1]),
    "one_box_of_a_class": example(HALF[:1], idxs=np.array([3])),
    "equal_to_the_threshold": example(HALF),
    "just_above_the_threshold": example(HALF, iou_threshold=0.5 - 2**-20),
    "nested_equal_to_the_threshold": example([[0, 0, 4, 4], [0, 0, 4, 2], [0, 0, 2, 2]]),
    "touching_with_a_threshold_of_0": example([[0, 0, 2, 2], [2, 0, 4, 2], [0, 2, 2, 4], [1, 1, 3, 3]], None, 0.0),
    "identical": example([[1, 2, 5, 4]] * 5),
    "identical_with_a_threshold_of_1": example([[0, 0, 4, 4]] * 3, None, 1.0),
    # Sorting by the score alone may put boxes of equal scores in any order, above 16 of them most often.
    "of_one_score": random_case(90, score="one"),
    "of_few_scores": random_case(200, "alike", "few"),
    "scores_rise": example(CHAIN, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "negative_scores": random_case(70, score="both"),
    "zeros_of_both_signs": example(CHAIN[:4], [-0.0, 0.0, -0.0, 0.0]),
    "scores_not_finite": example(CHAIN, [0.5, np.nan, np.inf, -np.inf, np.nan]),
    "boxes_not_finite": example(SPECIAL),
    "points_and_lines": example([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 4, 1], [0, 0, 4, 4], [1, 1, 1, 4], [1, 1, 4, 1]]),
    "inverted": example([[4, 4, 0, 0], [0, 0, 4, 4], [4, 0, 0, 4], [4, 4, 0, 0], [0, 0, 4, 3]]),
    "below_0": example([[-4, -4, -1, -1], [-4, -4, -1, -2], [-2, -2, 1, 1]]),
    # A third of their union, and half of it if each side were a pixel longer.
    "a_third_of_their_union": example(
        [[0, 0, 2, 2], [1, 0, 3, 2], [0.25, 0, 0.5, 0.25], [0.375, 0, 0.625, 0.25]], None, 0.4
    ),
    # Areas past the largest float16, whose quotients are ordinary.
    "areas_past_float16": example([[0, 0, 400, 300], [0, 0, 400, 280], [8, 8, 500, 1000], [8, 8, 500, 960]]),
    "one_more_than_a_block": random_case(65),
    "one_more_than_two_blocks": random_case(129, "whole"),
    # Each box is above the threshold with its neighbours alone: every second one is kept, on all sides of blocks' ends.
    "a_chain_over_blocks": example([[place, 0, place + 4, 1] for place in range(131)], iou_threshold=0.5),
    "kept_boxes_in_every_block": example(
        [[8 * (place % 70), 0, 8 * (place % 70) + 4, 4] for place in range(330)], iou_threshold=0.5
    ),
    "more_words_than_are_looked_at_together": detections(580, 20),
    "of_two_classes": example([[0, 0, 4, 4]] * 4, idxs=np.array([7, 1, 7, 1])),
    "of_many_classes": random_case(150, "alike", "few", classes=80),
    "classes_below_0_and_large": example([[0, 0, 4, 4]] * 6, idxs=np.array([-1, 2**40, -1, 0, 2**40 + 2**32, 2**32])),
    "classes_of_32_bits": example([[0, 0, 4, 4]] * 6, idxs=np.array([0, -3, 0, 1, -3, 1], np.int32)),
    # A shift by a multiple of the largest coordinate leaves too few digits of the others.
    "far_boxes_of_many_classes": random_case(120, "far", classes=80),
    "huge": random_case(40, "huge"),
    "tiny": random_case(40, "tiny"),
    "misaligned": random_case(70, boxes="misaligned", scores="misaligned"),
    "transposed": random_case(70, boxes="transposed", scores="sliced_columns"),
    "cut_from_rows_of_five": random_case(
        130, classes=3, boxes="cut_from_wider", scores="sliced_columns", idxs="sliced_columns"
    ),
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
        if Decisions(boxes, scores, threshold, case.inputs.get("idxs")).certain.all():
            return (
                case if threshold == case.parameters["iou_threshold"] else case.with_parameters(iou_threshold=threshold)
            )
    return None


def select_boxes(case: Case, places: np.ndarray) -> Case:
    """Return the case of some of the boxes."""
    inputs = {name: array[places] for name, array in case.inputs.items()}
    return case_of(**inputs, iou_threshold=case.parameters["iou_threshold"])


def count_kept(evaluate: Evaluate, case: Case) -> Bounded:
    """Count how often each box is kept."""
    found = evaluate(case).output
    counts = np.count_nonzero(found.value == np.arange(len(case["boxes"]))[:, None], axis=-1)
    return Bounded.exact(counts.astype(np.float64), found.arithmetic)


def kept_boxes_are_kept_again(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """No kept box suppresses another: a call with only the kept boxes keeps all of them."""
    if here := decided_case(case, dtype):
        kept = np.flatnonzero(count_kept(evaluate, here).value)
        yield equals_exactly(count_kept(evaluate, select_boxes(here, kept)), 1)


def moved_boxes_are_kept_alike(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Moving boxes by 16 keeps the same ones, if they are rounded to small whole numbers: areas are exact."""
    boxes: np.ndarray = np.clip(np.rint(case["boxes"].astype(dtype.wide)), -16, 16)
    here, there = (case.with_inputs(boxes=(boxes + shift).astype(dtype.numpy)) for shift in (0, 16))
    yield equals_exactly(count_kept(evaluate, there), count_kept(evaluate, here).value)


def boxes_of_lower_rank_change_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The half of the boxes with the highest scores is kept as if the others were absent."""
    if here := decided_case(case, dtype):
        places = np.sort(oracle.order(case["scores"].astype(dtype.wide))[: (len(case["boxes"]) + 1) // 2])
        yield equals_exactly(count_kept(evaluate, select_boxes(here, places)), count_kept(evaluate, here).value[places])


def classes_do_not_see_one_another(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The boxes of a class are kept as if the other classes were absent; two classes at most are tried."""
    if "idxs" not in case.inputs:
        case = case.with_inputs(idxs=np.arange(len(case["boxes"])) % 2)
    if here := decided_case(case, dtype):
        known, counts = np.unique(here["idxs"], return_counts=True)
        for of_class in known[np.argsort(-counts, kind="stable")][:2]:
            places = np.flatnonzero(here["idxs"] == of_class)
            yield equals_exactly(
                count_kept(evaluate, select_boxes(here, places)), count_kept(evaluate, here).value[places]
            )


LAWS = (
    kept_boxes_are_kept_again,
    moved_boxes_are_kept_alike,
    boxes_of_lower_rank_change_nothing,
    classes_do_not_see_one_another,
)
for _law in LAWS:
    _law.most_named = 1000  # type: ignore[attr-defined]  # a law calls several times, and pairs of boxes take time

# ---- the record

ARGUMENTS = arguments_of("nms")


def cost(case: Case) -> tuple[Cost, Cost]:
    """Inputs are read and indices written; each pair of boxes of a class is compared, by 14 operations."""
    n, idxs = len(case["boxes"]), case.inputs.get("idxs")
    counts = np.array([n]) if idxs is None else np.unique(idxs, return_counts=True)[1]
    pairs = int((counts * (counts - 1) // 2).sum())
    moved = sum(array.nbytes for array in case.inputs.values()) + case.grad_output.nbytes
    return Cost(moved, 14 * pairs), Cost(0, 0)


def other_numbers(case: Case) -> dict[str, np.ndarray]:
    """Return the negated scores, by which the boxes come in another order."""
    return {"scores": -case["scores"]}


def other_classes(case: Case) -> dict[str, np.ndarray]:
    """Return the classes of other boxes."""
    return {"idxs": np.roll(case["idxs"], 1)} if "idxs" in case.inputs else {}


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(detections(300, 30)), "ragged": whole(detections(1001, 60, 20))},
    "cuda": {
        "small": whole(detections(1000, 50)),
        "large": whole(detections(4096, 200)),
        "classes": whole(detections(20000, 800, 80)),
        "ragged": whole(detections(4999, 700)),
    },
}

operation = Operation(
    name="nms",
    forward=forward,
    backward=lambda *_, **__: (),
    differentiable=(),
    cases=cases,
    examples=examples,
    smooth=smooth,
    laws=LAWS,
    errors=ARGUMENTS.errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    returns="int64",
    length_varies=True,
    other_integers=other_classes,
    other_numbers=other_numbers,
    # Kernels look at pairs of boxes.
    sized=Sized(
        {"n": 5},
        lambda sizes: detections(sizes["n"], max(sizes["n"] // 50, 1)),
        largest=lambda sizes: sizes["n"] ** 2 / 2,
    ),
    source="torchvision.ops.nms and torchvision.ops.batched_nms",
)
