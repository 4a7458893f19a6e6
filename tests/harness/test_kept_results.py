"""All laws of a subject run on the same cases and share its results: it is called once for each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fourfold.properties import vector_add
from subjects import subject_of

from fourfold.checks.laws import MOST_KEPT, law_holds
from fourfold.checks.search import Search, Subject, kept_examples
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case, RecentCases
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Evaluate, Relation

FLOAT32 = DTYPES["float32"]


class Counted:
    """An implementation of x + y that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + y


def subject(implementation: Any) -> Subject:
    return subject_of(replace(vector_add.operation, examples={}), implementation)


def output_is_itself(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    yield Relation(evaluate(case).output, evaluate(case).output)


def gradients_are_the_cotangent(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    gradients = evaluate(case).gradients
    yield Relation(gradients["x"], gradients["y"])


def negated_inputs_give_the_negated_sum(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    negated = evaluate(case.with_inputs(x=-case["x"], y=-case["y"])).output
    yield Relation(evaluate(case).output, -negated)


def test_the_next_law_asks_only_for_what_is_new() -> None:
    counted = Counted()
    asked = []
    for law in (output_is_itself, output_is_itself, gradients_are_the_cotangent, negated_inputs_give_the_negated_sum):
        before = counted.calls
        search = Search(examples=10)
        law_holds(law, subject(counted), search)
        assert search.ran == 10
        asked.append(counted.calls - before)
    assert asked == [10, 0, 10, 10]


@pytest.mark.parametrize("search", [Search(examples=10, keeps=False), Search(examples=MOST_KEPT + 1)])
def test_nothing_is_kept_where_it_is_not_to_be(search: Search) -> None:
    counted = Counted()
    for times in (1, 2):
        law_holds(output_is_itself, subject(counted), search)
        # Two calls for each case.
        assert counted.calls == 2 * times * search.examples


def test_what_one_implementation_gave_is_not_anothers() -> None:
    def negative(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).abs().neg()

    law_holds(negated_inputs_give_the_negated_sum, subject(Counted()), Search(examples=10))
    with pytest.raises(Failure, match="negated_inputs"):
        law_holds(negated_inputs_give_the_negated_sum, subject(negative), Search(examples=10))


def test_only_cases_that_are_alike_in_everything_are_taken_for_one() -> None:
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    case = Case({"x": x, "y": y}, y, {"eps": 1.0})
    recent = RecentCases(100)
    assert recent.same(case) is case
    assert recent.same(Case({"x": x.copy(), "y": y.copy()}, y.copy(), {"eps": 1.0})) is case
    for other in (
        case.with_inputs(x=x.reshape(3, 2)),
        case.with_inputs(x=x.view(np.int32)),
        case.with_inputs(x=y, y=x),
        case.with_parameters(eps=1),
        replace(case, grad_output=-y),
        replace(case, layouts={"x": "transposed"}),
    ):
        assert recent.same(other) is other


def test_the_oldest_cases_are_forgotten_first_and_large_ones_at_once() -> None:
    cases = [Case({"x": np.full(40, number, np.float32)}, np.zeros(40, np.float32)) for number in range(3)]
    recent = RecentCases(100)
    first, second, third = map(recent.same, cases)
    assert recent.same(replace(third)) is third
    assert recent.same(replace(second)) is second
    assert recent.same(replace(first)) is not first
    large = Case({"x": np.zeros(101, np.float32)}, np.zeros(1, np.float32))
    assert recent.same(large) is large
    assert recent.same(replace(large)) is not large


@pytest.mark.parametrize(
    ("fields", "kept"), [({}, True), ({"foreign": True}, False), ({"foreign": True, "elsewhere": True}, True)]
)
def test_named_examples_are_kept_unless_the_kernel_runs_in_this_process(fields: dict[str, bool], kept: bool) -> None:
    named = subject_of(vector_add.operation, Counted(), **fields)
    first, second = dict(named.named_examples()), dict(named.named_examples())
    of_float64 = dict(replace(named, dtype=DTYPES["float64"]).named_examples())
    for name, case in first.items():
        assert (second[name] is case) == (kept and case.elements <= kept_examples.most)
        assert (second[name].grad_output is case.grad_output) == kept
        assert second[name].digest == case.digest
        assert of_float64[name]["x"].dtype == np.float64


def test_searches_that_are_alike_draw_the_same_cases_and_others_do_not() -> None:
    def drawn(**options: Any) -> list[bytes]:
        found: list[bytes] = []
        search = Search(examples=10, **options)
        search.cases(
            subject(Counted()), "check", lambda case: (found.append(case["x"].tobytes()), saw(search)), stream="laws"
        )
        return found

    def saw(search: Search) -> None:
        search.ran, search.substantial, search.largest = search.ran + 1, 1, 2

    assert drawn() == drawn()
    assert drawn(seed=1) != drawn(seed=2)
