"""Definitions that return integers or booleans: places, counts, masks. Right kernels pass, wrong ones are rejected."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fourfold
from fourfold import Claims, operation, result, tensor, values
from fourfold.engine.verdict import Verdict
from fourfold.numerics.bounded import OPEN, Bounded
from fourfold.numerics.compare import Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES, INTEGERS
from fourfold.numerics.torch_adapter.evaluate import forward_of
from fourfold.numerics.torch_adapter.ranking import Ranking

FLOAT32 = DTYPES["float32"].with_contract(OPEN)
BINS = 16


def checked(kernel: Callable[..., Any], record: Any, *only: str, **claims: Any) -> Verdict:
    return fourfold.verify(
        kernel,
        record,
        device="cpu",
        dtypes=["float32"],
        examples=4,
        seed=0,
        only=only or ("forward",),
        claims=Claims(**claims),
    )


# ---- places


@operation(x=tensor("rows cols"), sizes={"cols": (1, 300), "rows": (0, 64)})
def place_of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


@triton.jit
def argmax_kernel(x_ptr, place_ptr, cols, stride, PADDING: tl.constexpr, BLOCK: tl.constexpr):
    """A program finds the largest number of one row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < cols, other=PADDING)
    tl.store(place_ptr + row, tl.argmax(x, axis=0, tie_break_left=True))


def by_triton(padding: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def place(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        places = torch.empty(len(x), dtype=torch.int64)
        if len(x):
            block = triton.next_power_of_2(x.shape[1])
            argmax_kernel[(len(x),)](x, places, x.shape[1], x.shape[1], padding, block)
        return places

    return place


def test_right_places_pass_every_check() -> None:
    verdict = fourfold.verify(
        lambda x: x.argmax(-1), place_of_the_largest, device="cpu", dtypes=["float32"], examples=4, seed=0
    )
    assert verdict.passed, verdict
    made = {outcome.check for outcome in verdict.outcomes if outcome.outcome == "passed"}
    wanted = {"forward", "memory", "history", "many calls", "modes", "autocast", "threads", "offsets", "repeatability"}
    assert wanted <= made
    assert checked(by_triton(-np.inf), place_of_the_largest, "forward", "memory", "offsets", finite=True).passed


def test_a_call_with_other_numbers_has_other_places() -> None:
    case = place_of_the_largest.examples["ordinary"](FLOAT32)
    other = place_of_the_largest.redraw_numbers(case)
    assert (case["x"].argmax(-1) != other["x"].argmax(-1)).any()


@operation(
    x=tensor("rows cols"),
    sizes={"cols": (3, 40), "rows": (0, 16)},
    returns={"numbers": None, "places": None},
)
def three_largest(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.topk(3, -1))


def of_equal_ones_the_last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, places = x.flip(-1).sort(dim=-1, descending=True, stable=True)
    return numbers[:, :3].contiguous(), (x.shape[-1] - 1 - places[:, :3]).contiguous()


def test_several_outputs_may_hold_places() -> None:
    checks = ["forward of output numbers", "backward of output numbers", "forward of output places"]
    assert three_largest.outputs["places"].returns == "int64"
    for right in (three_largest.definition, of_equal_ones_the_last):
        assert checked(right, three_largest, *checks).passed
    twice = lambda x: (x.topk(3, -1)[0], x.topk(1, -1)[1].expand(-1, 3).contiguous())  # noqa: E731
    verdict = checked(twice, three_largest, *checks)
    assert [o.check for o in verdict.outcomes if o.failure] == ["forward of output places"]


# ---- counts and masks


@operation(ids=tensor("n", dtype=["int64", "int32"], high=BINS), sizes={"n": (0, 300)})
def counts(ids: torch.Tensor) -> torch.Tensor:
    return torch.bincount(ids, minlength=BINS)


@triton.jit
def count_kernel(ids_ptr, counts_ptr, n, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """A program counts the ids of one bin."""
    of, found = tl.program_id(0), tl.zeros((), tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < n, other=FIRST)
        found += tl.sum((ids == of).to(tl.int64), axis=0)
    tl.store(counts_ptr + of, found)


def counted(padding: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def count(ids: torch.Tensor) -> torch.Tensor:
        found = torch.empty(BINS, dtype=torch.int64)
        count_kernel[(BINS,)](ids.contiguous(), found, len(ids), padding, 64)
        return found

    return count


def test_right_counts_pass() -> None:
    added = lambda ids: torch.zeros(BINS, dtype=torch.int64).index_add_(0, ids, torch.ones_like(ids).long())  # noqa: E731
    for right in (added, counted(-1)):
        verdict = checked(right, counts, "forward", "memory", "history", "threads")
        assert verdict.passed, verdict
        assert {outcome.outcome for outcome in verdict.outcomes} == {"passed"}


WRONG = r"output\[\d+\] is \d+"


@pytest.mark.full(but=4)
@pytest.mark.parametrize(
    ("of", "wrong", "reason"),
    [
        # Padding that is chosen, the last of equal numbers, another dtype, another number.
        (place_of_the_largest, by_triton(0.0), WRONG),
        (place_of_the_largest, lambda x: x.shape[-1] - 1 - x.flip(-1).argmax(-1), WRONG),
        (place_of_the_largest, lambda x: x.argmax(-1).int(), "has dtype torch.int32, expected torch.int64"),
        (place_of_the_largest, lambda x: x.argmin(-1), WRONG),
        # The lanes of padding, a counter of 7 bits, the last bin in another one, each bin in the next.
        (counts, counted(0), WRONG),
        (counts, lambda ids: torch.bincount(ids, minlength=BINS).clamp(max=127), WRONG),
        (counts, lambda ids: torch.bincount(ids.clamp(max=BINS - 2), minlength=BINS), WRONG),
        (counts, lambda ids: torch.bincount(ids, minlength=BINS).roll(1), WRONG),
    ],
)
def test_wrong_places_and_counts_are_rejected(of: Any, wrong: Callable[..., Any], reason: str) -> None:
    verdict = checked(wrong, of, "forward", finite=of is place_of_the_largest)
    assert not verdict.passed
    assert re.search(reason, str(verdict))


@operation(
    x=tensor("rows 3"),
    threshold=values(0.5, 0.0),
    sizes={"rows": (0, 64)},
    examples={"at_the_threshold": {"x": [[0.25, 0.125, 0.125]], "threshold": 0.5}},
)
def rows_above(x: torch.Tensor, threshold: float = 0.5) -> torch.Tensor:
    return x[:, 0] + x[:, 1] + x[:, 2] > threshold


def test_a_comparison_that_rounding_decides_has_either_answer_and_others_have_one() -> None:
    backwards = lambda x, threshold: x[:, 0] + (x[:, 1] + x[:, 2]) > threshold  # noqa: E731
    for right in (rows_above.definition, backwards, lambda x, threshold: x.sum(-1) > threshold):
        assert checked(right, rows_above, "forward", finite=True, largest=1e30).passed
    for wrong in (
        lambda x, threshold: x.sum(-1) >= threshold,  # equal numbers that are exact
        lambda x, threshold: x[:, :-1].sum(-1) > threshold,
        lambda x, threshold: ~(x.sum(-1) > threshold),
        lambda x, threshold: (x.sum(-1) > threshold).to(torch.uint8),
    ):
        assert not checked(wrong, rows_above, "forward", finite=True, largest=1e30).passed


@operation(ids=tensor("n", dtype="int64", high=1 << 62))
def hashes(ids: torch.Tensor) -> torch.Tensor:
    return (ids * 6364136223846793005 + 1442695040888963407) ^ (ids >> 7)


def test_integers_are_compared_in_all_their_digits() -> None:
    assert checked(hashes.definition, hashes).passed
    assert not checked(lambda ids: hashes(ids) ^ 1, hashes).passed


# ---- what rounding may change


def admits(definition: Callable[..., torch.Tensor], x: Any, given: Any) -> bool:
    """Return whether a definition's result for exact numbers admits the given one."""
    exact = x if isinstance(x, np.ndarray) else Bounded.exact(np.array(x, np.float64), FLOAT32.arithmetic)
    expected = expectation(forward_of(definition)(x=exact), INTEGERS["int64"])
    try:
        compare(np.array(given, np.float64), expected, INTEGERS["int64"])
    except Disagreement:
        return False
    return True


ROW = [[3.0, 5.0, 5.0, 1.0, 5.0]]
ODD = [[1.0, np.nan, 2.0, np.nan]]
IDS = np.array([2, 1, 2, 0, 1])


def nothing(x: torch.Tensor) -> torch.Tensor:
    """Return 0, with the error of the sum of three numbers."""
    return x + x + x - 3 * x


@pytest.mark.parametrize(
    ("definition", "x", "right", "wrong"),
    [
        (lambda x: x.argmax(-1), ROW, [[1]], [[2], [4], [0], [-1], [5]]),
        (lambda x: x.argmin(-1), ODD, [[1]], [[0], [3]]),
        (lambda x: x.argsort(-1), ROW, [[[3, 0, 1, 2, 4]], [[3, 0, 4, 2, 1]]], [[[3, 0, 4, 2, 4]], [[0, 3, 1, 2, 4]]]),
        (lambda x: x.argsort(dim=-1, stable=True), ROW, [[[3, 0, 1, 2, 4]]], [[[3, 0, 4, 2, 1]]]),
        (lambda x: x.argsort(-1)[:, :3].int(), ROW, [[[3, 0, 4]], [[3, 0, 1]]], [[[3, 4, 0]], [[3, 0, 3]]]),
        (lambda x: x.argsort(-1).flip(-1), ROW, [[[4, 2, 1, 0, 3]], [[1, 2, 4, 0, 3]]], [[[4, 2, 4, 0, 3]]]),
        (
            lambda x: x.argsort(-1).T,
            [[1.0, 1.0, 2.0], [4.0, 3.0, 5.0], [6.0, 7.0, 8.0]],
            [[[0, 1, 0], [1, 0, 1], [2, 2, 2]], [[1, 1, 0], [0, 0, 1], [2, 2, 2]]],
            [[[0, 0, 0], [1, 1, 1], [2, 2, 2]]],
        ),
        (lambda x: x.argsort(-1, descending=True), ODD, [[[1, 3, 2, 0]], [[3, 1, 2, 0]]], [[[2, 1, 3, 0]]]),
        (lambda x: x.topk(2, -1).indices, ROW, [[[1, 2]], [[4, 1]]], [[[1, 0]], [[1, 1]], [[1, 5]]]),
        (lambda x: x.topk(4, -1, sorted=False).indices, ROW, [[[0, 1, 2, 4]], [[4, 2, 1, 0]]], [[[3, 1, 2, 4]]]),
        (lambda x: x.kthvalue(3, -1).indices, ROW, [[1], [2], [4]], [[0], [3]]),
        (lambda x: x.median(-1).indices, ODD, [[1], [3]], [[0], [2]]),
        (lambda x: x.cummax(-1).indices, ROW, [[[0, 1, 1, 1, 1]], [[0, 1, 2, 1, 4]]], [[[0, 2, 2, 2, 4]]]),
        (lambda x: torch.argsort(x), IDS, [[3, 1, 4, 0, 2], [3, 4, 1, 2, 0]], [[3, 4, 0, 1, 2]]),
        (lambda x: torch.argsort(x, stable=True), IDS, [[3, 1, 4, 0, 2]], [[3, 4, 1, 2, 0]]),
        (lambda x: x.softmax(-1).argmax(-1), [[0.1, 0.1 + 1e-9, 0.0]], [[0], [1]], [[2]]),
        (lambda x: nothing(x) > 0, [[1 / 3, 0.0]], [[[0, 0]], [[1, 0]]], [[[0, 1]]]),
        (lambda x: (nothing(x) > 0).sum(-1) * 4 + 1, [[1 / 3, 1 / 3, 0.0]], [[1], [5], [9]], [[13], [0]]),
        (lambda x: (x * 3).round().to(torch.int8), [1 / 6, 2.0], [[0, 6], [1, 6]], [[2, 6], [0, 7]]),
        (lambda x: (x * 3).round().to(torch.int8), [100.0, np.nan], [[0, 0], [44, -128]], []),
        (lambda x: (x * 3 + 0.5).int() & 3, [1 / 6, 2.0], [[0, 2], [1, 2]], [[2, 2], [0, 3]]),
        (lambda x: x.isnan(), [np.nan, 1.0], [[1, 0]], [[0, 0]]),
        (lambda x: x.gather(-1, x.argsort(-1)[:, 1:3]).int(), ROW, [[[3, 5]]], [[[5, 5]]]),
    ],
)
def test_what_rounding_or_a_tie_decides_may_have_either_value(
    definition: Callable[..., torch.Tensor], x: Any, right: list[Any], wrong: list[Any]
) -> None:
    for given in right:
        assert admits(definition, x, given), given
    for given in wrong:
        assert not admits(definition, x, given), given


def test_a_number_without_a_bound_may_be_the_smallest_one() -> None:
    ranking = Ranking((np.array([[1.0, 2.0, 3.0]]), np.array([[0.0, np.inf, 0.0]])), nan_first=True, stable=True)
    row = np.array([0])
    assert ranking.nearest(np.array([1.0]), np.array([0.0]), row, row).tolist() == [1.0]
    assert ranking.nearest(np.array([0.0]), np.array([1.0]), row, row).tolist() == [0.0]
    assert ranking.nearest(np.array([2.0]), np.array([0.0]), row, row).tolist() == [0.0]


# ---- mistakes


def test_the_dtype_of_integers_may_be_declared() -> None:
    @operation(x=tensor("n"), sizes={"n": (1, 64)}, returns="int32")
    def place(x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)

    assert checked(lambda x: x.argmax(-1).int(), place, finite=True).passed
    assert "has dtype torch.int64, expected torch.int32" in str(checked(lambda x: x.argmax(-1), place, finite=True))
    assert not result("int32").gradient
