"""Results whose length the data decide."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from samples import sampled

from fourfold import verify
from fourfold.checks.records import operations
from fourfold.engine.cells import Selection
from fourfold.numerics.bounded import Bounded, NoRule, OneOf
from fourfold.numerics.compare import Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES, INTEGERS
from fourfold.operations.case import Case
from fourfold.operations.record import reference
from fourfold.operations.workloads import Workload
from fourfold.performance.calls import Call, worst_error
from fourfold.performance.measurement import measurements

NMS, FLOAT32, INT64 = operations()["nms"], DTYPES["float32"], INTEGERS["int64"]
# The quotient of the first two is 0.3, which float32 and float64 round to different sides of their 0.3. The third
# overlaps the second by more, and does not overlap the first.
NEAR = [[0, 0, 13, 1], [7, 0, 20, 1], [13, 0, 26, 1]]


def case_of(boxes: list[list[float]], iou_threshold: float) -> Case:
    scores = np.linspace(1, 0.5, len(boxes)).astype(np.float32)
    return Case({"boxes": np.float32(boxes), "scores": scores}, np.zeros(1), {"iou_threshold": iou_threshold})


def worst(case: Case, kept: list[float]) -> float:
    return compare(np.float64(kept), expectation(reference(NMS, case, FLOAT32), INT64), INT64).worst


@pytest.mark.parametrize("kept", [[0, 1], [0, 2]])
def test_where_rounding_decides_either_decision_is_right_with_what_follows(kept: list[float]) -> None:
    assert worst(case_of(NEAR, 0.3), kept) == 0


@pytest.mark.parametrize(
    "kept", [[], [0], [1], [2], [0, 1, 2], [0, 2, 1], [1, 2], [0, 1, 1], [0, 5], [0, np.nan], [0.5]]
)
def test_what_no_choice_of_rounding_gives_is_wrong(kept: list[float]) -> None:
    with pytest.raises(Disagreement):
        worst(case_of(NEAR, 0.3), kept)


@pytest.mark.parametrize(("threshold", "kept"), [(0.299, [0, 2]), (0.301, [0, 1])])
def test_where_rounding_does_not_decide_one_decision_is_right(threshold: float, kept: list[float]) -> None:
    case = case_of(NEAR, threshold)
    assert worst(case, kept) == 0
    with pytest.raises(Disagreement):
        worst(case, [0, 3 - kept[1]])


def test_a_quotient_that_no_kernel_rounds_is_not_above_its_equal() -> None:
    case = case_of([[0, 0, 3, 4], [1, 0, 4, 4]], 0.5)
    assert worst(case, [0, 1]) == 0
    with pytest.raises(
        Disagreement, match=r"output has shape \[1\], expected \[2\]: at \[1\] is the end, expected 1.0"
    ):
        worst(case, [0])


def test_of_lengths_that_differ_the_first_difference_is_told() -> None:
    with pytest.raises(Disagreement, match=r"shape \[3\], expected \[2\]: at \[2\] is 2.0, expected the end"):
        worst(case_of(NEAR, 0.301), [0, 1, 2])


def test_another_shape_is_wrong() -> None:
    expected = expectation(reference(NMS, case_of(NEAR, 0.301), FLOAT32), INT64)
    with pytest.raises(Disagreement, match=r"shape \[1, 2\], expected \[2\]"):
        compare(np.float64([[0, 1]]), expected, INT64)


def test_one_length_is_right_unless_the_reference_says_otherwise() -> None:
    one = OneOf(np.arange(2.0), FLOAT32.arithmetic, lambda actual: actual)
    assert one.matching_length(np.arange(3.0)) is one
    with pytest.raises(Disagreement, match="shape"):
        compare(np.arange(3.0), one, INT64)
    any_length = OneOf(np.arange(2.0), FLOAT32.arithmetic, lambda actual: actual, any_length=True)
    assert any_length.within(np.zeros(2)).any_length
    assert compare(np.arange(3.0), any_length, INT64).elements == 3


def test_numbers_that_are_rounded_decide_nothing() -> None:
    """Autocast may round scores, and then another order is right: only the results without autocast are compared."""
    boxes = Bounded(np.float64(NEAR), np.full((3, 4), 1e-3), FLOAT32.arithmetic)
    with pytest.raises(NoRule, match="numbers that are rounded"):
        NMS.forward(boxes, Bounded.exact(np.arange(3.0), FLOAT32.arithmetic), 0.3)


def one_after_another(
    boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each box in turn, with a division where the kernels have a product."""
    if boxes.shape != (len(scores), 4) or (idxs is not None and idxs.shape != scores.shape):
        raise ValueError("boxes must be [n, 4], and scores and idxs [n]")
    wide = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    left, kept = scores.sort(descending=True, stable=True).indices, []
    while len(left):
        first, rest = left[0], left[1:]
        kept.append(first)
        low, high = torch.maximum(wide[first, :2], wide[rest, :2]), torch.minimum(wide[first, 2:], wide[rest, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        areas = (wide[:, 2] - wide[:, 0]) * (wide[:, 3] - wide[:, 1])
        gone = shared / (areas[first] + areas[rest] - shared) > iou_threshold
        left = rest[~gone if idxs is None else ~gone | (idxs[rest] != idxs[first])]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.int64, device=boxes.device)


@pytest.mark.full
@pytest.mark.parametrize("dtype", sampled(["float16", "float32"], "float32"))
def test_a_right_function_passes_every_check(dtype: str) -> None:
    verdict = verify(one_after_another, "nms", dtypes=[dtype], examples=4, seed=0, device="cpu")
    assert verdict.passed, verdict
    checks = {outcome.check for outcome in verdict.outcomes if outcome.outcome == "passed"}
    assert {"forward", "memory", "history", "many calls", "law: kept boxes are kept again"} <= checks


def without_the_last(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def nms(
        boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, idxs: torch.Tensor | None = None
    ) -> torch.Tensor:
        return right(boxes, scores, iou_threshold, idxs)[:-1]

    return nms


def test_a_result_that_is_too_short_fails() -> None:
    verdict = verify(without_the_last(one_after_another), "nms", dtypes=["float32"], only=["forward"], device="cpu")
    assert not verdict.passed
    assert "is the end, expected" in str(verdict)


def test_a_benchmark_compares_all_of_a_result() -> None:
    """A prefix of a result is wrong."""
    case = case_of(NEAR, 0.301)
    workload, expected = Workload(case=case, part=case), {"output": reference(NMS, case, FLOAT32)}
    assert worst_error({"output": torch.tensor([0, 1])}, expected, workload, FLOAT32, NMS.returns) == 0
    with pytest.raises(Disagreement, match=r"expected the end"):
        worst_error({"output": torch.tensor([0, 1, 2])}, expected, workload, FLOAT32, NMS.returns)
    with pytest.raises(Disagreement, match=r"has dtype torch.int32, expected torch.int64"):
        worst_error({"output": torch.tensor([0, 1], dtype=torch.int32)}, expected, workload, FLOAT32, NMS.returns)


def test_what_has_no_gradient_is_timed_forward_alone() -> None:
    selection = Selection.of(operations(), [], ["nms"], ["triton"], ["float32"])
    found = {each.direction for each in measurements(selection, "cpu", ["float32"], with_peers=False)}
    assert found == {"forward"}


def test_results_of_integers_are_overwritten_between_timed_calls() -> None:
    case = case_of(NEAR, 0.301)
    call = Call(one_after_another, NMS, Workload(case=case, part=case), FLOAT32, "cpu", "forward")
    call.run(1)
    result = call.results["output"]
    call.poison()
    assert result.tolist() == [-1, -1]
