"""The record of giou_loss_ragged: mean GIoU loss over a batch whose target boxes are concatenated."""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from fourfold.oracles import giou_loss_ragged as oracle
from hypothesis import strategies as st

from fourfold.declaration.drawing import reverse_offsets
from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, cotangent, layouts_for, sprinkle_special_values
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Law, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly

from . import giou_loss
from .boxes import PAIRS, batches, box_counts, box_pairs, pairs, pairs_without_ties
from .giou import EPS


def pack_boxes(
    pred: np.ndarray, target: np.ndarray, counts: np.ndarray, offset_dtype: type = np.int64
) -> dict[str, np.ndarray]:
    """Make the inputs of the ragged loss of padded boxes ``[batch, max_boxes, 4]`` and each sample's box count."""
    valid = np.arange(target.shape[1]) < counts[:, None]
    offsets: np.ndarray = np.concatenate([[0], np.cumsum(counts)]).astype(offset_dtype)
    return {"pred": pred, "target": target[valid], "offsets": offsets}


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw ragged batches: box counts from none to thousands, and int32 or int64 offsets."""
    batch, max_boxes = draw(batches(elements // 4))
    flat_pred, flat_target = draw(pairs(dtype, batch * max_boxes))
    pred, target = flat_pred.reshape(batch, max_boxes, 4), flat_target.reshape(batch, max_boxes, 4)
    rng = draw(GENERATORS)
    special = draw(st.sampled_from((*["none"] * 5, "past_the_boxes", "anywhere", "anywhere")))
    if special == "anywhere":
        share = draw(st.sampled_from((0.2, 0.05)))
        pred, target = sprinkle_special_values(rng, pred, share), sprinkle_special_values(rng, target, share)
    inputs = pack_boxes(pred, target, draw(box_counts(batch, max_boxes)), draw(st.sampled_from((np.int32, np.int64))))
    if special == "past_the_boxes":  # the values of pred past a sample's boxes must not matter
        past = np.arange(max_boxes) >= np.diff(inputs["offsets"])[:, None]
        inputs["pred"] = np.where(past[..., None], np.array(np.nan, dtype=pred.dtype), pred)
    return Case(
        inputs=inputs,
        grad_output=cotangent(rng, (), dtype),
        parameters={"eps": draw(st.sampled_from(EPS))},
        layouts=draw(layouts_for("pred", "target", "offsets")),
    )


@st.composite
def smooth(draw: st.DrawFn, dtype: DType, pairs_of: Callable[..., tuple] = pairs_without_ties) -> Case:
    """Return a batch of two, up to three boxes each, without ties."""
    rng = draw(GENERATORS)
    pred, target = (boxes.reshape(2, 3, 4) for boxes in pairs_of(rng, 6, dtype))
    return Case(pack_boxes(pred, target, rng.integers(0, 4, 2)), cotangent(rng, (), dtype), {"eps": 1e-5})


def example(
    counts: list[int],
    max_boxes: int,
    offset_dtype: type = np.int64,
    layouts: Mapping[str, str] | None = None,
    cotangent: float = -1.25,
) -> Callable[[DType], Case]:
    """Return a named case of boxes of every kind, with `counts` of them in the samples."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(5)
        batch = len(counts)
        pred, target = (boxes.reshape(batch, max_boxes, 4) for boxes in box_pairs(rng, batch * max_boxes, PAIRS, dtype))
        inputs = pack_boxes(pred, target, np.array(counts, dtype=np.int64), offset_dtype)
        return Case(inputs, np.array(cotangent, dtype=dtype.numpy), {"eps": 1e-5}, layouts or {})

    return make


def articles_batch(dtype: DType) -> Case:
    """Return a batch as in the articles: floor(|N(0, 3)|) faces per image."""
    counts = np.clip(np.floor(np.abs(np.random.default_rng(3).normal(0, 3, 300))), 0, 9).astype(int)
    return example(counts.tolist(), 9, np.int32)(dtype)


def negative_y2_counts(dtype: DType) -> Case:
    """Put a target box below 0: it counts like any other, because a ragged batch has no padding."""
    boxes = np.array([[[-4, -4, -1, -1]], [[-3, -2, 0, 0]]], dtype=dtype.numpy)
    return Case(
        pack_boxes(boxes, boxes[::-1].copy(), np.array([1, 1])), np.array(0.5, dtype=dtype.numpy), {"eps": 1e-5}
    )


def areas_equal_to_eps(dtype: DType) -> Case:
    """Return a box whose hull with the target equals eps, and boxes apart whose union does."""
    pairs = [[[0, 0, 0.5, 0.5]], [[0, 0, 0.25, 0.5]]], [[[0, 0, 0.5, 0.5]], [[0.5, 0, 0.75, 0.5]]]
    pred, target = (np.array(boxes, dtype=dtype.numpy) for boxes in pairs)
    return Case(pack_boxes(pred, target, np.array([1, 1])), np.array(1.5, dtype=dtype.numpy), {"eps": 0.25})


def not_finite_where_it_counts(dtype: DType) -> Case:
    """Put NaN into one sample's box and infinity into another's. The NaN past their boxes must not matter."""
    pred = np.full((3, 2, 4), np.nan)
    pred[:, 0] = [[0, 0, 1, 1], [0, 0, np.inf, 1], [0, np.nan, 2, 2]]
    target = np.tile([0.0, 0.0, 2.0, 1.0], (3, 2, 1))
    inputs = pack_boxes(pred.astype(dtype.numpy), target.astype(dtype.numpy), np.array([1, 1, 1]))
    return Case(inputs, np.array(1.5, dtype=dtype.numpy), {"eps": 1e-5})


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_batch": example([], 5),
    "no_boxes": example([0, 0, 0], 5),
    "max_boxes_of_zero": example([0, 0], 0),
    "one_box": example([1], 1),
    "empty_samples_at_both_ends": example([0, 0, 3, 0, 2, 0], 4),
    "one_full_among_empty": example([0] * 20 + [700] + [0] * 20, 700),
    "all_full_int32": example([7] * 9, 7, np.int32),
    "one_sample_of_thousands": example([5001], 5001, np.int32),
    "many_samples_of_one": example([1] * 600, 1),
    "full_one_row_before_a_block_ends": example([0, 127], 127),
    "whole_blocks_without_boxes": example([3, 0, 64, 1, 0], 64),
    "offsets_strided_over_several_samples": example([2, 0, 3, 1], 3, layouts={"offsets": "sliced_columns"}),
    "one_box_after_an_empty_sample": example([0, 1], 64, layouts={"offsets": "sliced_columns"}),
    # More boxes than all programs take at once. A program starts its next block at the last sample of the block before.
    "many_samples_in_each_block": example([3, 0, 5, 1, 4] * 250, 5, layouts={"offsets": "sliced_columns"}),
    "few_boxes_in_many_slots": example([0, 130, 2, 0, 257], 300, layouts={"offsets": "sliced_columns"}),
    "pred_and_target_strided": example([2, 0, 3, 1], 3, np.int32, {"pred": "transposed", "target": "axes_reversed"}),
    "articles_batch": articles_batch,
    "not_finite_where_it_counts": not_finite_where_it_counts,
    "infinite_cotangent_of_rows_without_boxes": example([1, 0], 3, cotangent=np.inf),
    "negative_y2_counts": negative_y2_counts,
    "areas_equal_to_eps": areas_equal_to_eps,
}


def boxes_without_target_get_no_gradient(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of pred is exactly 0 past each sample's number of boxes."""
    gradient = evaluate(case).gradients["pred"]
    past = np.arange(case["pred"].shape[1]) >= np.diff(case["offsets"])[:, None]
    yield equals_exactly(gradient[past], 0)


def empty_samples_add_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """An empty sample before all others, and one after them, leave loss and gradients unchanged."""
    strange = np.full((1, *case["pred"].shape[1:]), np.nan).astype(dtype.numpy)
    offsets = case["offsets"]
    wider = case.with_inputs(
        pred=np.concatenate([strange, case["pred"], strange]),
        offsets=np.concatenate([offsets[:1], offsets, offsets[-1:]]),
    )
    here, there = evaluate(case), evaluate(wider)
    yield Relation(here.output, there.output)
    yield Relation(here.gradients["pred"], there.gradients["pred"][1:-1])
    yield Relation(here.gradients["target"], there.gradients["target"])


def equals(padded_loss: str) -> Law:
    """Return the law that says which operation gives the same for the padded batch."""

    def equals_the_padded_loss(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        """Where every target box has a positive y2, padding the batch gives the same loss and gradients."""
        if not (case["target"][:, 3].astype(np.float64) > 0).all():
            return
        sample, place = oracle.rows_of(case["offsets"])
        target = np.zeros(case["pred"].shape, dtype=dtype.numpy)
        target[sample, place] = case["target"]
        padded = Case({"pred": case["pred"], "target": target}, case.grad_output, {"eps": case.parameters["eps"]})
        here, there = evaluate(case), evaluate(padded, operation=padded_loss)
        yield Relation(here.output, there.output)
        yield Relation(here.gradients["pred"], there.gradients["pred"])
        yield Relation(here.gradients["target"], there.gradients["target"][sample, place])

    return equals_the_padded_loss


def samples_in_reverse(case: Case) -> dict[str, np.ndarray]:
    """Return the offsets of samples that have as many boxes as the case's, in reverse order."""
    return {"offsets": reverse_offsets(case["offsets"])}


ARGUMENTS = arguments_of("giou_loss_ragged")


errors = (
    *ARGUMENTS.errors,
    ARGUMENTS.wrong("more_boxes_than_slots", ValueError, "offsets", {"target": torch.ones(7, 4)}),
)


def cost_of(flops: int, flops_of_backward: int) -> Callable[[Case], tuple[Cost, Cost]]:
    """Return the cost of a call from the operations of a target box, forward and backward."""

    def cost(case: Case) -> tuple[Cost, Cost]:
        """Forward reads the boxes that count and the offsets. Backward reads them again, and writes both gradients."""
        total, itemsize = case["target"].shape[0], case["target"].dtype.itemsize
        forward = Cost(8 * total * itemsize + case["offsets"].nbytes, flops * total)
        return forward, Cost(forward.bytes + (case["pred"].size + 4 * total) * itemsize, flops_of_backward * total)

    return cost


def article_batch(batch: int, max_boxes: int) -> Callable[[DType], Case]:
    """Return a batch of `giou_loss.article_boxes`."""

    def make(dtype: DType) -> Case:
        boxes = pack_boxes(*giou_loss.article_boxes(batch, max_boxes, dtype))
        return Case(boxes, np.array(0.75, dtype=dtype.numpy), {"eps": 1e-5})

    return make


def uneven_batch(batch: int, max_boxes: int) -> Callable[[DType], Case]:
    """Return a batch in which every second sample is full and the others lack one box each."""
    return example([max_boxes - place % 2 for place in range(batch)], max_boxes)


workloads = giou_loss.article_workloads(article_batch)


def record(padded: Operation, oracle: ModuleType, *, flops: tuple[int, int], source: str, **changes: Any) -> Operation:
    """Return the record of the mean of one measure's losses over ragged boxes, whatever the measure.

    Args:
        padded: the record of the loss over padded boxes.
        oracle: this operation's module.
        flops: operations of a target box, forward and backward.
        source: where the measure is defined.
        changes: fields that are not those of giou_loss_ragged.
    """
    fields: dict[str, Any] = {"examples": examples, "smooth": smooth, **changes}
    return Operation(
        name=f"{padded.name}_ragged",
        forward=oracle.forward,
        backward=oracle.backward,
        differentiable=("pred", "target"),
        cases=cases,
        # No input is batched, as in giou_loss: the mean depends on all samples.
        batched={},
        laws=(boxes_without_target_get_no_gradient, empty_samples_add_nothing, equals(padded.name)),
        errors=errors,
        cost=cost_of(*flops),
        workloads=workloads,
        axes=ARGUMENTS.axes,
        ranges=ARGUMENTS.ranges,
        other_integers=samples_in_reverse,
        sized=Sized({"batch": 2, "max_boxes": 2}, lambda sizes: uneven_batch(sizes["batch"], sizes["max_boxes"])),
        reduction="mean over batch, total",
        source=source,
        **fields,
    )


operation = record(
    giou_loss.operation,
    oracle,
    flops=(33, 95),
    source="Accelerating AI/ML Model Training with Custom Operators, 2024: the ragged loss, with Rezatofighi's clamp",
)
