"""The record of diou_loss: mean DIoU loss over the valid rows of a padded batch."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from fourfold.oracles import diou_loss as oracle

from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Relation
from fourfold.operations.relations import equals

from . import giou_loss
from .giou_loss import UNIT, example, valid_rows

LINES = [[0, 1, 4, 1], [2, 0, 2, 3]]
examples: Mapping[str, Callable[[DType], Case]] = {
    **{name: make for name, make in giou_loss.examples.items() if name != "articles_batch_of_13"},
    "one_centre_and_other_sides": example([[[0, 1, 4, 3], [1, 0, 3, 4]]], [[[1, 0, 3, 4], [0, 1, 4, 3]]]),
    "points_and_lines": example(
        [[[3, 3, 3, 3], [3, 3, 3, 3], *LINES, UNIT]], [[[3, 3, 3, 3], *LINES, *LINES[:1], UNIT]]
    ),
    "inverted": example([[[4, 4, 1, 1], [4, 1, 0, 3], UNIT]], [[[3, 3, 2, 2], [0, 0, 8, 8], [0, 3, 2, 1]]]),
    "diagonal_equal_to_eps": example([[[0, 0, 0.5, 1]]], [[[0.5, 1, 0.5, 1]]], eps=1.25),
    "heights_equal_to_eps": example(
        [[[0, 0, 1, 0.25], [0, 0, 0.25, 0.25]]], [[[1, 0.5, 3, 0.75], [0.125, 0, 0.25, 0.125]]], eps=0.25
    ),
    # Around 0, where the centres have fewer digits to lose than the differences of the corners.
    "one_centre_near_zero": example(
        [[[-1.1398697, -2.2312558, 1.1235247, 2.2389002]]], [[[-0.019489482, -0.018528586, 0.0031444621, 0.026172975]]]
    ),
    # The cotangent times a side overflows, but not the gradient.
    "large_sides": example([[[0, 0, 3e18, 1e18]]], [[[0, 0, 1e18, 3e18]]], cotangent=-3e38),
    "far_from_zero": example([[[200, 300, 220, 310]]], [[[202, 296, 226, 308]]]),
}


def sides_of(case: Case, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Return a width and a height for each row, at least 4 eps, whose multiples every dtype has exactly."""
    boxes: np.ndarray = case["pred"].astype(dtype.wide)
    least = max(4 * case.parameters["eps"], 1 / 8)
    known = np.where(np.isfinite(boxes), np.abs(boxes), 1.0)
    width, height = np.moveaxis(np.rint(np.clip(known[..., 2:], least, 4) * 8) / 8, -1, 0)
    return width, height


def upright(x: np.ndarray, y: np.ndarray, width: np.ndarray, height: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the boxes of these lower corners and sides."""
    return np.stack([x + 0 * width, y + 0 * height, x + width, y + height], axis=-1).astype(dtype.numpy)


def boxes_around_one_centre_lose_as_much_as_in_giou_loss(
    evaluate: Evaluate, case: Case, dtype: DType
) -> Iterator[Relation]:
    """Where a box is in the middle of one twice as wide and twice as high, DIoU and CIoU are I / U, as GIoU is."""
    width, height = sides_of(case, dtype)
    inner = upright(-width / 2, -height / 2, width, height, dtype)
    around = case.with_inputs(pred=inner, target=upright(-width, -height, 2 * width, 2 * height, dtype))
    yield Relation(evaluate(around).output, evaluate(around, operation="giou_loss").output)


def equal_boxes_apart_lose_by_their_distance(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Beside a box of width w and height h, one that lies w away along x loses 1 + 4 w^2 / (9 w^2 + h^2)."""
    width, height = sides_of(case, dtype)
    zero = np.zeros_like(width)
    apart = case.with_inputs(
        pred=upright(zero, zero, width, height, dtype), target=upright(2 * width, zero, width, height, dtype)
    )
    losses = 1 + 4 * width**2 / (9 * width**2 + height**2)
    yield equals(evaluate(apart).output, losses.mean() if losses.size else np.zeros(()))


def x_and_y_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Boxes with x and y exchanged lose as much, and their gradients are exchanged, where no side is below eps."""
    least = 4 * case.parameters["eps"]
    kept, inputs = valid_rows(case), {}
    with np.errstate(all="ignore"):
        for name in ("pred", "target"):
            wide: np.ndarray = case[name].astype(dtype.wide)
            kept = kept & np.isfinite(wide).all(-1) & ((wide[..., 2:] - wide[..., :2]) >= least).all(-1)
    kept = kept & (case["target"][..., 2].astype(dtype.wide) > 0)
    for name in ("pred", "target"):
        inputs[name] = np.where(kept[..., None], case[name], np.array(UNIT, dtype=dtype.numpy))
    turn = [1, 0, 3, 2]
    here = evaluate(case.with_inputs(**inputs))
    there = evaluate(case.with_inputs(**{name: array[..., turn].copy() for name, array in inputs.items()}))
    yield Relation(here.output, there.output)
    for name, gradient in here.gradients.items():
        yield Relation(gradient, there.gradients[name][..., turn])


LAWS = (
    boxes_around_one_centre_lose_as_much_as_in_giou_loss,
    equal_boxes_apart_lose_by_their_distance,
    x_and_y_may_change_places,
)
operation = giou_loss.record(
    "diou_loss",
    oracle,
    *LAWS,
    flops=(36, 100),
    source="Zheng et al., Distance-IoU Loss, AAAI 2020",
    examples=examples,
)
