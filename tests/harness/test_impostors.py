"""The harness rejects a specification that accepts impostors, and a search that checked no element."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from subjects import subject_of

from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.history import history_does_not_matter
from fourfold.checks.impostors import accepted_impostors
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.records import operations
from fourfold.checks.repeatability import repeats_bit_for_bit
from fourfold.checks.search import Search, Subject
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Operation

OPERATIONS = operations()
FLOAT32 = DTYPES["float32"]
SOFTMAX, VECTOR_ADD = OPERATIONS["softmax"], OPERATIONS["vector_add"]


ORDINARY = [SOFTMAX.examples[name](FLOAT32) for name in ("ordinary", "many_short_rows")]


def loosen(function: Callable, by: float) -> Callable:
    """Return an oracle with its bound widened by `by`."""

    def of(*arrays: Any, **named: Any) -> Any:
        result = function(*arrays, **named)
        several = result if isinstance(result, tuple) else (result,)
        loose = tuple(Bounded(r.value, r.error + by, r.arithmetic) for r in several)
        return loose if isinstance(result, tuple) else loose[0]

    return of


def impostors_of(found: list) -> set[tuple[str, str]]:
    return {(one.result, one.impostor) for one in found}


def test_the_bounds_as_they_are_reject_every_impostor() -> None:
    assert not accepted_impostors(SOFTMAX, FLOAT32, ORDINARY)


@pytest.mark.parametrize(("which", "result"), [("forward", "output"), ("backward", "gradient of x")])
def test_a_bound_that_is_too_loose_is_found_out(which: str, result: str) -> None:
    loose = replace(SOFTMAX, **{which: loosen(getattr(SOFTMAX, which), 1e3)})
    found = accepted_impostors(loose, FLOAT32, ORDINARY)
    assert impostors_of(found) >= {(result, name) for name in ("all zero", "its mean everywhere", "rolled by one")}
    assert {one.result for one in found} == {result}
    assert str(found[0]).startswith("the specification of softmax for float32 is at fault: it takes ")


def test_cases_of_nothing_but_zeros_are_found_out() -> None:
    zeros = np.zeros((3, 4), np.float32)
    tame = [Case({"x": zeros, "y": zeros}, zeros + 2 * n) for n in range(1, 4)]
    found = impostors_of(accepted_impostors(VECTOR_ADD, FLOAT32, tame))
    # All outputs are 0, so these impostors pass; "all NaN" does not. A gradient of 0 does not: grad_output is not 0.
    wanted = {"all zero", "its mean everywhere", "rolled by one", "negated", "a copy of x", "a copy of y"}
    assert {impostor for result, impostor in found if result == "output"} == wanted
    assert ("gradient of x", "all zero") not in found


@pytest.mark.parametrize("none", [[], ["no_rows", "no_cols"]], ids=["no_cases", "empty_cases"])
def test_a_record_of_nothing_is_found_out(none: list[str]) -> None:
    found = accepted_impostors(SOFTMAX, FLOAT32, [SOFTMAX.examples[name](FLOAT32) for name in none])
    assert impostors_of(found) == {(r, i) for r in ("output", "gradient of x") for i in ("all zero", "all NaN")}
    assert "no case has a result, output" in str(found[0])


# ---- searches


def subject(operation: Operation, **changes: Any) -> Subject:
    return subject_of(replace(operation, **changes), backend="torch")


def drawn(make: Callable[[int], Case]) -> Callable:
    return lambda dtype, elements: st.integers(1, 1000).map(make)


def test_a_search_among_empty_cases_is_no_verification() -> None:
    empty = Case({"x": np.zeros((0, 3), np.float32)}, np.zeros((0, 3), np.float32))
    given = subject(SOFTMAX, examples={}, cases=drawn(lambda n: empty))
    with pytest.raises(Failure, match="none of them could have failed"):
        forward_agrees(given, Search(examples=5))


def test_a_search_whose_first_cases_are_all_empty_draws_more() -> None:
    empty, full = (Case({"x": array}, array) for array in (np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32)))
    draws, search = itertools.count(), Search(examples=3)
    cases = drawn(lambda n: empty if next(draws) < 5 else full)
    forward_agrees(subject(SOFTMAX, examples={}, cases=cases), search)
    assert search.substantial
    assert search.ran < 5 + 2 * search.examples


def test_a_search_among_single_numbers_is_no_verification_where_there_may_be_more() -> None:
    one = drawn(lambda n: Case(dict.fromkeys("xy", np.full(1, n, np.float32)), np.full(1, n, np.float32)))
    single = {"one_element": VECTOR_ADD.examples["one_element"]}
    with pytest.raises(Failure, match="no result had more than one element, as those of vector_add may"):
        history_does_not_matter(subject(VECTOR_ADD, cases=one), Search(examples=5))
    # These checks also run the named examples: larger ones first, then none that is larger than one element, so that
    # the search cannot see more.
    for check in (
        forward_agrees,
        backward_agrees,
        memory_is_respected,
        repeats_bit_for_bit,
    ):
        check(subject(VECTOR_ADD, cases=one), Search(examples=5))
        check(subject(VECTOR_ADD, cases=one, examples=single), Search(examples=5))


def test_a_search_for_errors_of_which_none_is_declared_is_no_verification() -> None:
    with pytest.raises(Failure, match="no error is declared"):
        declared_errors_are_raised(subject(SOFTMAX, errors=()), Search(examples=5))


def test_a_loss_is_one_number_and_may_be() -> None:
    loss = OPERATIONS["giou_loss"]
    search = Search(examples=5)
    forward_agrees(subject(loss), search)
    assert search.largest == 1
