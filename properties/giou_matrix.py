"""The record of giou_matrix: generalized intersection over union of each box with each other."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import giou_matrix as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, cotangent, layouts_for, repeat_first, sizes, sprinkle_special_values
from fourfold.numerics.bounded import contract_of, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import between, only
from fourfold.operations.workloads import Make, tiled, whole

from .boxes import PAIRS, box_pairs, pairs
from .giou import EPS

MODES = ("giou", "iou")


def backward(grad_output: Any, boxes_a: Any, boxes_b: Any, **parameters: Any) -> tuple[Any, Any]:
    """Return the oracle's gradients. Somebody else's are unspecified where a pair has a box that is not finite.

    torch sums over pairs before the last step, and there infinities of both signs may meet.
    """
    of_a, of_b = oracle.backward(grad_output, boxes_a, boxes_b, **parameters)
    if not contract_of(of_a).nonfinite:
        return of_a, of_b
    a, b = (~np.isfinite(boxes.value).all(-1, keepdims=True) for boxes in (boxes_a, boxes_b))
    return unspecified_where(of_a, a | b.any()), unspecified_where(of_b, b | a.any())


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw many boxes with few or few with many. Those of the same number lie as giou's pairs do."""
    many = draw(sizes(elements // 4))
    few = draw(sizes(elements // max(many, 4)))
    n, m = (few, many) if draw(st.booleans()) else (many, few)
    boxes1, boxes2 = draw(pairs(dtype, max(n, m)))
    a, b, rng = boxes1[:n], boxes2[:m], draw(GENERATORS)
    if draw(st.integers(0, 7)) == 7:
        a, b = sprinkle_special_values(rng, a, 0.05), sprinkle_special_values(rng, b, 0.05)
    grad_output, layouts = cotangent(rng, (n, m), dtype), draw(layouts_for("boxes_a", "boxes_b", "grad_output"))
    a, b = (repeat_first(x) if layouts[name] == "expanded" else x for name, x in (("boxes_a", a), ("boxes_b", b)))
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output)
    parameters = {"mode": draw(st.sampled_from(MODES)), "eps": draw(st.sampled_from(EPS))}
    return Case({"boxes_a": a, "boxes_b": b}, grad_output, parameters, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw up to two boxes with two, all of whose edges are apart."""
    rng, n = draw(GENERATORS), draw(st.integers(1, 2))
    x, y = (np.sort(rng.permutation(16)[:8].reshape(4, 2)) / 4 + rng.uniform(0, 1 / 8, (4, 2)) for _ in range(2))
    boxes = np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], -1).astype(dtype.numpy)
    parameters = {"mode": draw(st.sampled_from(MODES)), "eps": 1e-5}
    return Case({"boxes_a": boxes[:n], "boxes_b": boxes[2:]}, cotangent(rng, (n, 2), dtype), parameters)


def example(a: Any, b: Any, mode: str = "giou", eps: float = 1e-5, **layouts: str) -> Callable[[DType], Case]:
    """Return a named case of given boxes, with a cotangent from -1.5 to 2."""

    def make(dtype: DType) -> Case:
        boxes = {"boxes_a": np.array(a, dtype.numpy), "boxes_b": np.array(b, dtype.numpy)}
        shape = len(a), len(b)
        grad_output = np.linspace(-1.5, 2, shape[0] * shape[1]).reshape(shape).astype(dtype.numpy)
        return Case(boxes, grad_output, {"mode": mode, "eps": eps}, layouts)

    return make


def random_case(n: int, m: int, mode: str = "giou", kinds: tuple[str, ...] = PAIRS, **layouts: str) -> Any:
    """Return a named case of random boxes."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(35)
        a, b = box_pairs(rng, max(n, m), kinds, dtype)
        inputs = {"boxes_a": a[:n], "boxes_b": b[:m]}
        return Case(inputs, cotangent(rng, (n, m), dtype), {"mode": mode, "eps": 1e-5}, layouts)

    return make


# Of every kind: apart, touching, nested, identical, inverted, a point and a line.
FIVE = [[0.0, 0, 1, 1], [1, 1, 4, 2], [0, 0, 4, 4], [4, 4, 1, 1], [3, 3, 3, 3]]
SIX = [*FIVE, [2, 0, 3, 1]]
SPECIAL = [[np.nan, 0, 1, 1], [0, -np.inf, 2, 2], [0, 0, np.inf, 3], [1, 1, 2, 2]]


def infinite_cotangent(mode: str) -> Callable[[DType], Case]:
    """Return a case where I / U, divided by U again, is 0, and the cotangent is infinite."""

    def make(dtype: DType) -> Case:
        with np.errstate(over="ignore"):  # of float16
            case = example([[0, 0, 1, 1]], [[0, 0, 3e18, 3e18]], mode)(dtype)
        return replace(case, grad_output=np.full_like(case.grad_output, np.inf))

    return make


examples: Mapping[str, Callable[[DType], Case]] = {
    f"{name}_{mode}": make
    for mode in MODES
    for name, make in {
        "every_kind": example(FIVE, SIX, mode),
        "areas_at_and_below_eps": example(FIVE, SIX, mode, 1.0),
        "not_finite": example(SPECIAL, SIX, mode),
        "infinite_cotangent": infinite_cotangent(mode),
        "one_with_one": example(FIVE[:1], SIX[1:2], mode),
        "as_many_of_both": random_case(33, 33, mode),
        "no_rows": example(np.zeros((0, 4)), SIX, mode),
        # Their gradients are sums over nothing.
        "no_columns": example(FIVE, np.zeros((0, 4)), mode),
        # Tiles and the remainder; tiles' sums that are added several at once, and scores that threads take turns at.
        "tiles": random_case(66, 158, mode),
        "many_rows": random_case(1300, 5, mode),
        "many_columns": random_case(2, 1300, mode),
        "misaligned": random_case(9, 40, mode, boxes_a="misaligned", boxes_b="misaligned", grad_output="misaligned"),
        "transposed": random_case(40, 9, mode, boxes_a="transposed", grad_output="transposed"),
        "cut_from_rows_of_five": random_case(7, 33, mode, boxes_a="cut_from_wider", boxes_b="sliced_columns"),
        "cotangent_strided": random_case(7, 33, mode, grad_output="sliced_columns"),
    }.items()
}


def exchanged_boxes_transpose_the_matrix(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The scores of b and a are the transposed scores of a and b, and the gradients change places."""
    turned = Case({"boxes_a": case["boxes_b"], "boxes_b": case["boxes_a"]}, case.grad_output.T, case.parameters)
    here, there = evaluate(case), evaluate(turned)
    yield Relation(here.output, there.output.T)
    yield Relation(here.gradients["boxes_a"], there.gradients["boxes_b"])
    yield Relation(here.gradients["boxes_b"], there.gradients["boxes_a"])


def each_pair_scores_as_giou(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The scores are giou of the pairs one by one."""
    if case.parameters["mode"] != "giou":
        return
    shape = (*case.grad_output.shape, 4)
    boxes = np.broadcast_to(case["boxes_a"][:, None], shape), np.broadcast_to(case["boxes_b"][None], shape)
    alone = Case(dict(zip(("boxes1", "boxes2"), boxes)), case.grad_output, {"eps": case.parameters["eps"]})
    yield Relation(evaluate(case).output, evaluate(alone, "giou").output)


def never_above_intersection_over_union(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """-1 <= giou <= iou, and 0 <= iou <= 1, of boxes that are not inverted."""

    def proper(boxes: np.ndarray) -> np.ndarray:
        wide: np.ndarray = boxes.astype(dtype.wide)
        return np.isfinite(wide).all(-1) & (wide[:, 2:] >= wide[:, :2]).all(-1)

    where = proper(case["boxes_a"])[:, None] & proper(case["boxes_b"])
    giou, iou = (only(where, evaluate(case.with_parameters(mode=mode)).output) for mode in MODES)
    yield between(giou, -1, 1)
    yield between(iou, 0, 1)
    yield between(giou - iou, -np.inf, 0)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads boxes and writes scores. Backward reads the cotangent, and reads boxes and writes gradients."""
    boxes, scores = case["boxes_a"].nbytes + case["boxes_b"].nbytes, case.grad_output
    return Cost(boxes + scores.nbytes, 31 * scores.size), Cost(2 * boxes + scores.nbytes, 95 * scores.size)


ARGUMENTS = arguments_of("giou_matrix")
ORDINARY = ("overlapping", "disjoint_along_both", "nested")
workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {
        "small": whole(random_case(100, 300, kinds=ORDINARY)),
        "ragged": whole(random_case(33, 1037, kinds=ORDINARY)),
    },
    "cuda": {
        "small": whole(random_case(300, 900, kinds=ORDINARY)),
        # The predictions and the objects of an image.
        "few": whole(random_case(300, 100, kinds=ORDINARY)),
        "many": tiled(random_case(128, 1024, kinds=ORDINARY), 128, "boxes_a"),
        "large": tiled(random_case(128, 1000, kinds=ORDINARY), 512, "boxes_a"),
        "iou": tiled(random_case(128, 1000, "iou", ORDINARY), 512, "boxes_a"),
        # Anchors with the objects of an image.
        "ragged": tiled(random_case(1024, 37, kinds=ORDINARY), 128, "boxes_a"),
    },
}

operation = Operation(
    name="giou_matrix",
    forward=oracle.forward,
    backward=backward,
    differentiable=("boxes_a", "boxes_b"),
    cases=cases,
    examples=examples,
    smooth=smooth,
    batched={"boxes_a": 1},
    laws=(
        exchanged_boxes_transpose_the_matrix,
        each_pair_scores_as_giou,
        never_above_intersection_over_union,
    ),
    errors=ARGUMENTS.errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    sized=Sized(
        {"n": 3, "m": 2},
        lambda sizes: random_case(sizes["n"], sizes["m"]),
        largest=lambda sizes: sizes["n"] * sizes["m"],
    ),
    source="Rezatofighi et al., Generalized Intersection over Union, CVPR 2019",
)
