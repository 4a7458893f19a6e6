"""The record of giou_loss: mean GIoU loss over the valid rows of a padded batch."""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from fourfold.oracles import giou_loss as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, cotangent, layouts_for, sprinkle_special_values
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Law, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, tiled, whole

from .boxes import PAIRS, batches, box_counts, box_pairs, pairs, pairs_without_ties
from .giou import EPS, nowhere_finite


def pad_targets(pred: np.ndarray, target: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Set the rows of `target` past each sample's count to 0; return `pred` and `target` ``[batch, max_boxes, 4]``."""
    padding = np.arange(target.shape[1]) >= counts[:, None]
    return pred, np.where(padding[..., None], np.zeros((), target.dtype), target)


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw padded batches of any box count, with trailing or scattered padding, which sometimes holds garbage."""
    batch, max_boxes = draw(batches(elements // 4))
    flat_pred, flat_target = draw(pairs(dtype, batch * max_boxes))
    pred, target = flat_pred.reshape(batch, max_boxes, 4), flat_target.reshape(batch, max_boxes, 4)
    rng = draw(GENERATORS)
    if draw(st.booleans()):
        pred, target = pad_targets(pred, target, draw(box_counts(batch, max_boxes)))
    else:
        scattered = rng.random((batch, max_boxes, 1)) < draw(st.sampled_from((0.0, 0.5, 0.1)))
        target = np.where(scattered, np.zeros((), target.dtype), target)
    special = draw(st.sampled_from((*["none"] * 5, "in_padding", "anywhere")))
    if special == "anywhere":
        share = draw(st.sampled_from((0.2, 0.05)))
        pred, target = sprinkle_special_values(rng, pred, share), sprinkle_special_values(rng, target, share)
    elif special == "in_padding":  # what padding rows hold must not matter
        padding = ~(target[..., 3].astype(np.float64) > 0)[..., None]
        pred = np.where(padding, sprinkle_special_values(rng, pred, 0.5), pred)
        ends = np.where(
            padding[..., 0], rng.choice(np.array([0.0, -3.0, np.nan, -np.inf]), padding.shape[:-1]), target[..., 3]
        )
        target = np.concatenate([target[..., :3], ends[..., None].astype(target.dtype)], -1)
    return Case(
        inputs={"pred": pred, "target": target},
        grad_output=cotangent(rng, (), dtype),
        parameters={"eps": draw(st.sampled_from(EPS))},
        layouts=draw(layouts_for("pred", "target")),
    )


@st.composite
def smooth(draw: st.DrawFn, dtype: DType, pairs_of: Callable[..., tuple] = pairs_without_ties) -> Case:
    """Return a batch of two, three rows each, some of them padding, without ties."""
    rng = draw(GENERATORS)
    pred, target = (boxes.reshape(2, 3, 4) for boxes in pairs_of(rng, 6, dtype))
    padding = np.arange(3) >= rng.integers(0, 4, 2)[:, None]
    target[padding] = -1  # not 0, past which a row becomes valid
    return Case({"pred": pred, "target": target}, cotangent(rng, (), dtype), {"eps": 1e-5})


def example(
    pred: Any, target: Any, eps: float = 1e-5, layouts: Mapping[str, str] | None = None, cotangent: float = -1.75
) -> Callable[[DType], Case]:
    """Return a named case of given boxes."""

    def make(dtype: DType) -> Case:
        with np.errstate(over="ignore"):  # of the half types
            inputs = {"pred": np.asarray(pred, dtype=dtype.numpy), "target": np.asarray(target, dtype=dtype.numpy)}
            return Case(inputs, np.array(cotangent, dtype=dtype.numpy), {"eps": eps}, layouts or {})

    return make


def article_boxes(batch: int, max_boxes: int, dtype: DType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes and their counts as in the articles: floor(|N(0, 3)|) faces per image, at most max_boxes."""
    rng = np.random.default_rng(3)
    counts = np.clip(np.floor(np.abs(rng.normal(0, 3, batch))).astype(int), 0, max_boxes)
    pred, target = box_pairs(rng, batch * max_boxes, ("pixels",), dtype)
    return pred.reshape(batch, max_boxes, 4), target.reshape(batch, max_boxes, 4), counts


def article_batch(batch: int, max_boxes: int) -> Callable[[DType], Case]:
    """Return a batch of `article_boxes`, padded."""

    def make(dtype: DType) -> Case:
        pred, target = pad_targets(*article_boxes(batch, max_boxes, dtype))
        return Case({"pred": pred, "target": target}, np.array(0.75, dtype=dtype.numpy), {"eps": 1e-5})

    return make


def thousands_in_one_sample(dtype: DType) -> Case:
    """Put 5001 valid boxes into one image: the sum is so long that a half-precision accumulator stops growing."""
    rng = np.random.default_rng(4)
    pred, target = box_pairs(rng, 5001, PAIRS, dtype)
    target = np.where(target[:, 3:] > 0, target, np.array([0, 0, 2, 2], dtype=target.dtype))
    return Case({"pred": pred[None], "target": target[None]}, np.array(1.25, dtype=dtype.numpy), {"eps": 1e-5})


def last_of(slots: int) -> Callable[[DType], Case]:
    """Return a sample of `slots` rows; only the last row holds a box."""

    def make(dtype: DType) -> Case:
        boxes = np.zeros((2, 1, slots, 4), dtype=dtype.numpy)
        boxes[0, 0, :, 2:], boxes[1, 0, -1] = 1, [0, 0, 2, 4]
        return Case({"pred": boxes[0], "target": boxes[1]}, np.array(-0.5, dtype=dtype.numpy), {"eps": 1e-5})

    return make


def least_y2_is_valid(dtype: DType) -> Case:
    """Set y2 to the smallest subnormal number, which is above 0 even if hardware flushes subnormal numbers."""
    pred = np.array([[[0, -1, 1, 1], [0, 0, 2, 2]]], dtype=dtype.numpy)
    target = np.array([[[0, -2, 1, dtype.smallest_subnormal], [0, 0, 1, 1]]]).astype(dtype.numpy)
    return Case({"pred": pred, "target": target}, np.array(0.75, dtype=dtype.numpy), {"eps": 1e-5})


def each_coordinate_in_turn_not_finite(dtype: DType) -> Case:
    """Make each coordinate in turn not finite: the loss is NaN, and the gradient of a row shows which one it was."""
    case = nowhere_finite(dtype)
    pred, target = np.stack([case["boxes1"], case["boxes2"][::-1]]), np.stack([case["boxes2"], case["boxes1"][::-1]])
    return Case({"pred": pred, "target": target}, np.array(1.25, dtype=dtype.numpy), {"eps": 1e-5})


UNIT = [0.0, 0.0, 1.0, 1.0]
PADDING = [0.0, 0.0, 0.0, 0.0]
examples: Mapping[str, Callable[[DType], Case]] = {
    "one_pair_apart_along_both_axes": example([[UNIT]], [[[2, 2, 3, 3]]]),
    "identical_boxes": example([[UNIT]], [[UNIT]]),
    "no_valid_row": example([[UNIT, UNIT]], [[PADDING, PADDING]]),
    # A padding row has a gradient of 0, not of 0 * inf.
    "infinite_cotangent_of_no_valid_row": example([[UNIT, UNIT]], [[PADDING, PADDING]], cotangent=np.inf),
    "no_batch": example(np.zeros((0, 7, 4)), np.zeros((0, 7, 4))),
    "no_boxes": example(np.zeros((3, 0, 4)), np.zeros((3, 0, 4))),
    "negative_y2_is_padding": example([[UNIT, [0, 0, 2, 2]]], [[[-3, -3, -1, -1], UNIT]]),
    "nan_y2_is_padding": example([[UNIT, [0, 0, 2, 2]]], [[[0, 0, 1, np.nan], UNIT]]),
    "nan_in_padding_rows": example([[[np.nan] * 4, [0, 0, 2, 2]]], [[PADDING, UNIT]]),
    "nan_in_a_valid_row": example([[[np.nan, 0, 1, 1], [0, 0, 2, 2]]], [[UNIT, UNIT]]),
    "one_valid_row_after_padding": example([[UNIT, UNIT, [0, 0, 2, 2]]], [[PADDING, PADDING, UNIT]]),
    "each_coordinate_in_turn_not_finite": each_coordinate_in_turn_not_finite,
    "infinity_in_padding_rows": example([[[np.inf] * 4, [0, 0, 2, 2]]], [[[np.inf, 0, -np.inf, 0], UNIT]]),
    "infinite_y2_is_valid": example([[UNIT, [0, 0, 2, 2]]], [[[0, 0, 1, np.inf], UNIT]]),
    "least_y2_is_valid": least_y2_is_valid,
    "areas_equal_to_eps": example(
        [[[0, 0, 0.5, 0.5], [0, 0, 0.25, 0.5]]], [[[0, 0, 0.5, 0.5], [0.5, 0, 0.75, 0.5]]], eps=0.25
    ),
    "area_below_eps": example([[[0, 0, 0.25, 0.5], UNIT]], [[[0, 0.25, 0.5, 0.5], [0, 0, 2, 2]]], eps=0.25),
    "samples_and_boxes_strided": example(
        [[UNIT, [1, 1, 4, 2], [0, 2, 3, 5]], [[2, 0, 3, 1], [1, 1, 2, 6], UNIT]],
        [[[0, 0, 2, 2], PADDING, [1, 1, 3, 4]], [[0, 1, 2, 3], PADDING, [0, 0, 1, 4]]],
        layouts={"pred": "transposed", "target": "sliced_rows"},
    ),
    # More rows than a warp, and than a block of 256 threads, reads at once.
    "last_of_33": last_of(33),
    "last_of_300": last_of(300),
    "articles_batch_of_32": article_batch(32, 17),
    "articles_batch_of_13": article_batch(13, 100),
    "thousands_in_one_sample": thousands_in_one_sample,
}


def valid_rows(case: Case) -> np.ndarray:
    """Return which rows are valid: those whose target has a positive y2."""
    return case["target"][..., 3].astype(np.float64) > 0


def padding_rows_get_no_gradient(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of pred and target are exactly 0 where target[..., 3] is not positive."""
    result = evaluate(case)
    for gradient in result.gradients.values():
        of_padding = gradient[~valid_rows(case)]
        yield equals_exactly(of_padding, 0)


def padding_rows_add_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Three more rows of padding, with infinity in pred, leave loss and gradients unchanged."""
    batch = case["pred"].shape[0]
    more = np.full((batch, 3, 4), np.inf).astype(dtype.numpy)
    none = np.zeros((batch, 3, 4), dtype=dtype.numpy)
    wider = case.with_inputs(
        pred=np.concatenate([case["pred"], more], 1), target=np.concatenate([case["target"], none], 1)
    )
    here, there = evaluate(case), evaluate(wider)
    yield Relation(here.output, there.output)
    for name, gradient in here.gradients.items():
        yield Relation(gradient, there.gradients[name][:, : case["pred"].shape[1]])


def the_order_of_samples_does_not_matter(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Reversing the batch and the rows reverses the gradients and does not change the loss."""
    reverse = (slice(None, None, -1), slice(None, None, -1))
    here = evaluate(case)
    there = evaluate(case.with_inputs(pred=case["pred"][reverse].copy(), target=case["target"][reverse].copy()))
    yield Relation(here.output, there.output)
    for name, gradient in here.gradients.items():
        yield Relation(gradient, there.gradients[name][reverse])


def equals_one_minus_the_mean_giou(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The loss is the mean of 1 - giou over the concatenated valid rows."""
    valid = valid_rows(case)
    count = int(valid.sum())
    boxes = {"boxes1": case["pred"][valid], "boxes2": case["target"][valid]}
    scores = evaluate(
        Case(boxes, np.ones(count, dtype=dtype.numpy), {"eps": case.parameters["eps"]}), operation="giou"
    ).output
    loss = total(1.0 - scores) / max(count, 1)
    yield Relation(evaluate(case).output, loss)


ARGUMENTS = arguments_of("giou_loss")


def cost_of(flops: int, flops_of_backward: int) -> Callable[[Case], tuple[Cost, Cost]]:
    """Return the cost of a call from the operations of a valid row, forward and backward."""

    def cost(case: Case) -> tuple[Cost, Cost]:
        """Forward reads target and pred's valid rows. Backward reads the valid rows, and writes both gradients."""
        rows, valid, itemsize = case["target"].size // 4, int(valid_rows(case).sum()), case["target"].dtype.itemsize
        forward = Cost(4 * (rows + valid) * itemsize, flops * valid)
        return forward, Cost(4 * (2 * valid + 2 * rows) * itemsize, flops_of_backward * valid)

    return cost


def full_batch(batch: int, max_boxes: int) -> Callable[[DType], Case]:
    """Return a batch without padding."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(3)
        pred, target = (b.reshape(batch, max_boxes, 4) for b in box_pairs(rng, batch * max_boxes, ("pixels",), dtype))
        return Case({"pred": pred, "target": target}, np.array(0.75, dtype=dtype.numpy), {"eps": 1e-5})

    return make


def article_workloads(batch: Callable[[int, int], Callable[[DType], Case]], **more: Make) -> dict[str, dict[str, Make]]:
    """Return the workloads of batches as in the articles, and more on a GPU."""
    return {
        "cpu": {"small": whole(batch(16, 64)), "ragged": whole(batch(13, 37))},
        "cuda": {
            "small": whole(batch(32, 256)),
            "article": whole(batch(1024, 256)),
            "large": tiled(batch(1024, 256), 64, "pred", "target"),
            **more,
            "ragged": tiled(batch(1021, 255), 4, "pred", "target"),
        },
    }


workloads = article_workloads(article_batch, dense=tiled(full_batch(1024, 256), 64, "pred", "target"))


def record(name: str, oracle: ModuleType, *laws: Law, flops: tuple[int, int], source: str, **changes: Any) -> Operation:
    """Return the record of the mean of one measure's losses over the valid rows, whatever the measure.

    Args:
        name: the operation's.
        oracle: its module.
        laws: that this measure has beside those of padding.
        flops: operations of a valid row, forward and backward.
        source: where the measure is defined.
        changes: fields that are not those of giou_loss.
    """
    fields: dict[str, Any] = {"examples": examples, "smooth": smooth, **changes}
    return Operation(
        name=name,
        forward=oracle.forward,
        backward=oracle.backward,
        differentiable=("pred", "target"),
        cases=cases,
        # No input is batched: the number of valid rows in all samples is part of the loss and of each gradient.
        batched={},
        laws=(
            padding_rows_get_no_gradient,
            padding_rows_add_nothing,
            the_order_of_samples_does_not_matter,
            *laws,
        ),
        errors=ARGUMENTS.errors,
        cost=cost_of(*flops),
        workloads=workloads,
        axes=ARGUMENTS.axes,
        ranges=ARGUMENTS.ranges,
        sized=Sized({"batch": 2, "max_boxes": 2}, lambda sizes: full_batch(sizes["batch"], sizes["max_boxes"])),
        reduction="mean over batch",
        source=source,
        **fields,
    )


operation = record(
    "giou_loss",
    oracle,
    equals_one_minus_the_mean_giou,
    flops=(33, 95),
    source="Accelerating AI/ML Model Training with Custom Operators, 2024: the padded loss, with Rezatofighi's clamp",
)
