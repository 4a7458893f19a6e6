"""Combined cases have every pair of choices; results that are rounded once, or summed exactly, have narrow bounds."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from declared_operations import DECLARED
from samples import sampled

import fourfold
from fourfold import Claims, tensor
from fourfold.checks.records import operations
from fourfold.inputs import hard_numbers
from fourfold.inputs.combinations import LONG, Combined, combined_cases
from fourfold.inputs.covering import covering
from fourfold.inputs.large_cases import LargeCases
from fourfold.numerics.bounded import OPEN, Bounded, stored
from fourfold.numerics.compare import expectation
from fourfold.numerics.dtypes import DTYPES, QUANTISED
from fourfold.operations.case import Case
from fourfold.operations.claims import NO_CLAIMS
from fourfold.operations.layouts import COMPOSED
from fourfold.operations.record import Operation, reference

OWN = operations()
EVERY: dict[str, Operation] = {**OWN, **{f"declared_{name}": of for name, of in DECLARED.items()}}
FLOAT32 = DTYPES["float32"]


def cases_of(operation: Operation, claims: Claims = NO_CLAIMS, dtype: str = "float32") -> list[Combined]:
    return list(combined_cases(LargeCases(claims.restrict(operation), claims, DTYPES[dtype])))


@pytest.mark.parametrize("levels", [(2, 2), (7, 9, 4, 6, 6), (1, 3, 1, 2), (5, 13, 4, 1, 6)])
def test_every_pair_of_choices_comes_in_some_row_of_few(levels: tuple[int, ...]) -> None:
    rows = covering(levels)
    for f, g in itertools.combinations(range(len(levels)), 2):
        assert {(row[f], row[g]) for row in rows} == set(itertools.product(range(levels[f]), range(levels[g])))
    largest = sorted(levels)[-2:]
    assert len(rows) <= 1.7 * largest[0] * largest[1]
    assert rows[0] == (0,) * len(levels)


@pytest.mark.parametrize("name", sampled(EVERY, "softmax", "matmul", "giou_loss_ragged", "declared_attention"))
def test_combined_cases_are_cases_of_the_operation(name: str) -> None:
    operation = EVERY[name]
    found = cases_of(operation)
    assert len({each.name for each in found}) == len(found) >= 40
    for each in found:
        case = each.case
        shape = reference(operation, case, FLOAT32.with_contract(OPEN)).shape
        assert shape == case.grad_output.shape or operation.length_varies, each.name
        for tensor_name in [*case.inputs, "grad_output"]:
            case.tensor(tensor_name, FLOAT32, "cpu")
    assert {each.mode for each in found} == set(range(6))
    assert {change.__name__ for change in hard_numbers.CHANGES} == {each.name.split("_")[-2] for each in found}
    for axis in operation.sized.axes if operation.sized else ():
        spoken = "rows" if axis == "..." else axis
        if operation.sized and LargeCases(operation, NO_CLAIMS, FLOAT32).allows(
            {**operation.sized.axes, axis: LONG[0]}
        ):
            is_told = any(each.name.startswith(f"{spoken}_{LONG[0]}") for each in found)
            assert is_told or name in ("declared_attention", "nms")  # they cost the square of it


@pytest.mark.full(but=8)
@pytest.mark.parametrize("name", OWN)
def test_every_tensor_is_alone_misaligned_and_has_composed_layouts(name: str) -> None:
    found = [each.case.layouts for each in cases_of(OWN[name])]
    tensors = {tensor_name for layouts in found for tensor_name in layouts}
    composed = {each: {layouts.get(each) for layouts in found} & {*COMPOSED} for each in tensors}
    assert tensors >= {"grad_output"}
    assert all({each: "misaligned"} in found for each in tensors)
    for each, of in composed.items():
        # A tensor that is changed in place is not expanded. One that may be None is given in few cases.
        given = sum(each in layouts for layouts in found)
        assert len(of) >= min(7 if each in OWN[name].mutates else 8, given - 1), (each, of)
    assert len(set().union(*composed.values())) >= len(COMPOSED) - 1


def test_parameters_of_named_examples_come_with_every_size() -> None:
    found = [(each.name.rsplit("_", 2)[0], each.case.parameters["activation"]) for each in cases_of(OWN["matmul"])]
    for activation in ("none", "relu", "leaky_relu"):
        assert {size for size, given in found if given == activation} >= {"vectors", "odd", "k_2064", "k_2051"}


def test_elementwise_and_row_wise_operations_get_six_axes_and_more() -> None:
    for name in ("vector_add", "softmax", "giou", "declared_rms_norm"):
        assert any(each.case.grad_output.ndim >= 6 for each in cases_of(EVERY[name])), name


def test_combined_cases_lie_within_claims() -> None:
    claims = Claims(contiguous=True, finite=True, sizes={"cols": (8, 1024)})
    found = cases_of(OWN["softmax"], claims)
    assert found
    for each in found:
        assert not each.case.layouts
        assert np.isfinite(each.case["x"].astype(np.float64)).all()
        assert 8 <= each.case["x"].shape[-1] <= 1024
    assert len(cases_of(OWN["softmax"], dtype="bfloat16")) < len(cases_of(OWN["softmax"])) / 3
    alone = Claims(dtypes=("bfloat16",))
    assert len(cases_of(OWN["softmax"], alone, "bfloat16")) == len(cases_of(OWN["softmax"]))
    assert 0 < len(cases_of(OWN["softmax"], alone, "float16")) < len(cases_of(OWN["softmax"])) / 3


def test_long_rows_hold_special_values_at_their_ends_and_amid_them() -> None:
    rows = np.concatenate(
        [e.case["x"] for e in cases_of(OWN["softmax"]) if e.name.startswith(f"cols_{LONG[0]}_special")]
    )
    assert np.isnan(rows[:, -1]).any()
    assert np.isnan(rows[:, LONG[0] // 2]).any()
    assert np.isposinf(rows[:, LONG[0] // 2]).any()
    assert (np.isneginf(rows[:, : LONG[0] // 2]).all(-1) & np.isfinite(rows[:, -1])).any()
    assert np.isneginf(rows).all(-1).any()
    assert np.isfinite(rows).all(-1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_sum_exactly_and_fill_the_digits(dtype: str) -> None:
    of = DTYPES[dtype]
    numbers = hard_numbers.summable(np.random.default_rng(0), (2064,), of, 2064).astype(of.numpy)
    wide = numbers.astype(of.wide)
    assert (wide == hard_numbers.summable(np.random.default_rng(0), (2064,), of, 2064)).all()
    assert wide.sum() * of.arithmetic.roundoff <= 1
    if of.arithmetic.storage is None:
        half = {"float32": np.float16, "float64": np.float32}[dtype]
        rounded = wide.astype(half).astype(of.wide)
        assert (rounded != wide).all()
        assert dtype == "float64" or (rounded < wide).all()


@fourfold.operation(x=tensor("... cols"), alpha=tensor("one"), weight=tensor("cols"), sizes={"one": 1})
def dynamic_tanh(x, alpha, weight):
    return torch.tanh(alpha * x) * weight


@pytest.mark.parametrize("change", hard_numbers.CHANGES, ids=lambda change: change.__name__)
def test_hard_numbers_of_a_quantised_input_are_of_its_own_range(change: hard_numbers.Change) -> None:
    of_its_own = QUANTISED["float8_e4m3fn"].numpy
    rng = np.random.default_rng(1)
    x, scale = rng.normal(0, 2, (12, 40)).astype(of_its_own), np.ones((12, 1), np.float32)
    case = Case({"x": x, "scale": scale}, np.zeros((12, 40), np.float32))
    for turn in range(12):
        changed = change(np.random.default_rng(turn), case, DTYPES["float32"], ["x", "scale"], turn)["x"]
        assert changed.dtype == of_its_own
        # Numbers beyond the range are NaN, and would spoil each sum.
        numbers = changed.astype(np.float64)
        assert np.isfinite(numbers).mean() > 0.4
        assert change is hard_numbers.special or np.isfinite(numbers).all()


def test_axes_of_one_size_keep_it() -> None:
    found = cases_of(dynamic_tanh)
    assert {each.case["alpha"].shape for each in found} == {(1,)}
    assert {"vectors", "odd", f"cols_{LONG[0]}", "six_axes"} <= {each.name.rsplit("_", 2)[0] for each in found}


# ---- bounds of results


def exactly(numbers: Any, dtype: str = "float32") -> Bounded:
    of = DTYPES[dtype]
    return Bounded.exact(np.asarray(numbers, of.wide), of.arithmetic)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_sum_difference_or_product_of_inputs_is_rounded_once(dtype: str) -> None:
    of, rng = DTYPES[dtype], np.random.default_rng(1)
    x, y = (rng.normal(0, 2, 4000).astype(of.numpy).astype(of.wide) for _ in range(2))
    y *= of.wide(2) ** rng.integers(-4, 4, 4000)
    a, b = exactly(x, dtype), exactly(y, dtype)
    compute = np.float32 if of.arithmetic.storage else of.numpy.type
    for result, right in ((a + b, np.add), (a - b, np.subtract), (a * b, np.multiply)):
        bound = expectation(result, of).error
        assert (bound <= 1.02 * of.roundoff * abs(result.value) + of.smallest_normal).all()
        rounded = right(x.astype(compute), y.astype(compute)).astype(of.numpy).astype(of.wide)
        assert (abs(rounded - result.value) <= bound).all()
        # Values that follow from it may be computed by other steps.
        assert (result.error >= 3 * of.arithmetic.roundoff * abs(result.value)).all()


def test_a_sum_of_what_was_rounded_is_not_rounded_once() -> None:
    a, b = exactly([1.125], "bfloat16"), exactly([2.25], "bfloat16")
    for result in ((a + b) + a, (a + b) * b, a * 0.1, stored(a * b)):
        assert result.settled == result.error


def test_an_exact_sum_has_a_bound_that_does_not_grow_with_its_terms() -> None:
    numbers = hard_numbers.summable(np.random.default_rng(2), (3, 2064), FLOAT32, 2064)
    few = np.where(np.arange(2064) % 40 == 0, 1.0, 0.0)
    for result in (exactly(numbers).sum(-1), exactly(numbers) @ exactly(few[:, None]), exactly(numbers) @ exactly(few)):
        assert (result.settled <= 4.1 * FLOAT32.roundoff * result.value).all()
        assert (result.error >= 2000 * FLOAT32.roundoff * result.value).all()


@pytest.mark.parametrize("spoilt", [0.1, 2.0**-9, 2.0**30, np.inf, np.nan])
def test_a_sum_that_is_not_exact_keeps_the_bound_of_any_sum(spoilt: float) -> None:
    numbers = hard_numbers.summable(np.random.default_rng(2), (2064,), FLOAT32, 2064)
    numbers[77] = FLOAT32.numpy.type(spoilt)
    for result in (exactly(numbers).sum(), exactly(numbers[None]) @ exactly(np.ones((2064, 1)))):
        assert np.array_equal(result.settled, result.error)


# ---- operations that are declared


@fourfold.operation(x=tensor("... cols"))
def row_sum(x):
    return x.sum(-1)


@fourfold.operation(x=tensor("..."), y=tensor("..."))
def product(x, y):
    return x * y


def test_definitions_in_torch_have_the_narrow_bounds_too() -> None:
    whole = [e for e in cases_of(row_sum) if "precise" in e.name and e.name.startswith("cols_2064")]
    settled = [reference(row_sum, each.case, FLOAT32) for each in whole]
    assert any((of.settled < of.error / 100).any() for of in settled)
    of = reference(product, cases_of(product)[0].case, FLOAT32)
    assert (of.settled < of.error).any()
