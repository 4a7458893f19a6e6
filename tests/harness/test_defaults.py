"""A record with only the required fields verifies an operation as a complete record does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawing import collect
from fourfold.properties import layer_norm, vector_add
from subjects import subject_of

from fourfold.backends.arguments import check_floating, check_same
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.saved_tensors import backward_is_of_the_call
from fourfold.checks.search import Search, Subject
from fourfold.declaration.defaults import complete
from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case
from fourfold.operations.layouts import LAYOUTS
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import FOLLOWS, Cost, Operation, what_must_be_moved
from fourfold.operations.workloads import Tiled
from fourfold.performance.calls import DIRECTIONS, Call, References, worst_error

FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]
FACTORS = Elementwise(x="normal", y="normal")
LEAST = Operation(
    name="product",
    forward=lambda x, y: x * y,
    backward=lambda grad_output, x, y: (grad_output * y, grad_output * x),
    differentiable=("x", "y"),
    cases=FACTORS.cases,
    examples=FACTORS.examples,
    source="torch.mul",
)
PRODUCT = complete(LEAST)


def product(x: Any, y: Any) -> torch.Tensor:
    check_floating("x", x)
    check_same("y", y, "x", x)
    return x * y


def half_of_one_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * (y + y.detach()) / 2


def subject(implementation: Callable[..., torch.Tensor], dtype: str = "float32", **changes: Any) -> Subject:
    return subject_of(replace(PRODUCT, **changes), implementation, dtype)


@pytest.mark.parametrize(
    "check",
    [
        forward_agrees,
        backward_agrees,
        backward_is_of_the_call,
        memory_is_respected,
        declared_errors_are_raised,
    ],
)
def test_what_is_right_passes(check: Callable[[Subject, Search], None]) -> None:
    check(subject(product), Search(examples=5))


def test_numerical_derivatives_accept_what_is_right_and_nothing_else() -> None:
    search = Search(examples=10)
    gradcheck(subject(product, "float64"), search)
    assert search.largest > 1
    with pytest.raises(Failure, match="gradcheck"):
        gradcheck(subject(half_of_one_gradient, "float64"), Search(examples=10))


def test_smooth_cases_hold_ordinary_numbers_in_every_input() -> None:
    drawn = collect(complete(replace(layer_norm.operation, smooth=FOLLOWS, ordinary=())).smooth(FLOAT64), 50)
    for case in drawn:
        for array in (*case.inputs.values(), case.grad_output):
            assert array.size
            assert np.isfinite(array).all()
            assert abs(array).max() < 100
        assert set(case.parameters) == {"eps"}
        assert not case.layouts
    assert len({case["x"].shape for case in drawn}) > 3


def test_errors_hold_for_any_shapes() -> None:
    names = {error.name for error in PRODUCT.errors}
    assert names >= {"x_is_list", "y_is_none", "x_of_int64", "y_of_float64_among_float32", "y_on_another_device"}
    assert not any("shape" in name for name in names)
    numbers = next(error for error in PRODUCT.errors if error.name == "x_is_list").arguments("cpu")
    assert numbers["y"].numel() > 0
    with pytest.raises(Failure, match="y_of_float16_among_float32: no TypeError naming y"):
        declared_errors_are_raised(
            subject(lambda x, y: product(x, y.float() if getattr(y, "dtype", None) == torch.float16 else y)),
            Search(examples=1),
        )


def test_a_record_without_examples_has_no_errors_to_look_for() -> None:
    assert complete(replace(PRODUCT, examples={}, errors=FOLLOWS)).errors == ()


def test_cost_is_what_comes_in_and_goes_out() -> None:
    case = FACTORS.random(10, 7)(FLOAT32)
    assert PRODUCT.cost(case) == (Cost(3 * 70 * 4, 70), Cost(0, 0))
    assert vector_add.operation.cost is what_must_be_moved


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["small", "ragged"])
def test_workloads_are_the_largest_examples_and_hold_a_call_to_the_oracle(name: str, direction: str) -> None:
    workload = PRODUCT.workloads["cpu"][name](FLOAT32)
    assert workload.case["x"].shape == {"small": (2, 4, 2048), "ragged": (3 * 4096 + 5,)}[name]
    call = Call(product, PRODUCT, workload, FLOAT32, "cpu", direction)
    call.run(1)
    assert worst_error(call.results, References().of(PRODUCT, "", workload, FLOAT32), workload, FLOAT32) <= 1


def test_workloads_are_neither_strided_nor_of_strange_numbers() -> None:
    strange = {"strided": FACTORS.random(300, 301, x="transposed"), "infinite": infinite}
    workloads = complete(replace(PRODUCT, examples={**FACTORS.examples, **strange}, workloads=FOLLOWS)).workloads
    assert workloads["cpu"]["small"](FLOAT32).case["x"].shape == (2, 4, 2048)


def infinite(dtype: DType) -> Case:
    case = FACTORS.random(300, 300)(dtype)
    return case.with_inputs(x=np.full_like(case["x"], np.inf))


def test_samples_are_repeated_until_they_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.declaration.defaults.MANY_ELEMENTS", 1 << 18)
    assert set(PRODUCT.workloads["cuda"]) == {"small", "ragged"}  # the record does not declare a batch axis
    batched = complete(replace(PRODUCT, batched=FACTORS.batched, workloads=FOLLOWS))
    large = batched.workloads["cuda"]["large"](FLOAT32)
    assert (large.case["x"].shape, large.part["x"].shape) == ((16, 4, 2048), (2, 4, 2048))


# ---- the cases of elementwise operations


@pytest.mark.parametrize("names", [["x"], ["x", "y"], ["x", "y", "z"]], ids=len)
def test_named_cases_of_elementwise_operations_are_all_different(names: list[str]) -> None:
    cases = Elementwise(**dict.fromkeys(names, "normal"))
    made = {name: make(FLOAT32) for name, make in cases.examples.items()}
    for case in made.values():
        assert list(case.inputs) == names
        assert {array.shape for array in case.inputs.values()} == {case.grad_output.shape}
        case.tensors(FLOAT32, "cpu")
    alike = {(case["x"].shape, tuple(sorted(case.layouts.items()))) for case in made.values()}
    assert len(alike) == len(made)
    laid_out = {layout for case in made.values() for name, layout in case.layouts.items() if name != "grad_output"}
    assert laid_out >= set(LAYOUTS) - {"contiguous", *({"sliced_rows"} if names == ["x"] else set())}
    assert {case.layouts.get("grad_output") for case in made.values()} >= {"misaligned", "transposed", "expanded"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_meet_each_other(dtype: str) -> None:
    case = FACTORS.special_numbers(DTYPES[dtype])
    pairs = {(repr(float(x)), repr(float(y))) for x, y in zip(case["x"], case["y"])}
    assert len(pairs) == 100
    assert {("inf", "-inf"), ("nan", "0.0"), ("-0.0", "-0.0")} <= pairs


def test_elementwise_workloads_repeat_every_input() -> None:
    large = Elementwise(x="normal").workloads["cuda"]["large"]
    assert isinstance(large, Tiled)
    assert (large.times, large.names) == (1024, ("x",))
