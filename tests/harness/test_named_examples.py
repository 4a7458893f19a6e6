"""A named example is described by its deviations from the ordinary case, for users' declarations and for records."""

import numpy as np
import pytest
import torch
from subjects import subject_of

import fourfold
from fourfold import example
from fourfold.declaration.library import Declared
from fourfold.numerics.dtypes import DTYPES

FLOAT32 = DTYPES["float32"]


@fourfold.operation(
    x=fourfold.tensor("... cols", kind=("normal", "masked")),
    weight=fourfold.tensor("cols", optional=True),
    scale=fourfold.values(1.0, 2.0),
    examples={
        "long": example(2, 3, cols=70, x="transposed", scale=2.0),
        "numbers": example(
            x=[[1.0, 2.0]], weight=lambda rng, dtype: [dtype.largest, 0], grad_output=(-1.5, "expanded")
        ),
        "masked": example(50, cols=40, x=("masked", "misaligned"), weight=None),
    },
)
def scaled(x: torch.Tensor, weight: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """Return x * weight * scale."""
    return x * scale if weight is None else x * weight * scale


def test_sizes_layouts_and_parameters_are_those_of_the_example() -> None:
    case = scaled.examples["long"](FLOAT32)
    assert (case["x"].shape, case["weight"].shape, case.grad_output.shape) == ((2, 3, 70), (70,), (2, 3, 70))
    assert (case.layouts, case.parameters) == ({"x": "transposed"}, {"scale": 2.0})


def test_numbers_decide_the_sizes() -> None:
    case = scaled.examples["numbers"](FLOAT32)
    assert case["x"].tolist() == [[1.0, 2.0]]
    assert case["weight"].tolist() == [FLOAT32.largest, 0]
    assert case.grad_output.tolist() == [[-1.5, -1.5]]
    assert case.layouts == {"grad_output": "expanded"}


def test_the_masked_kind_has_minus_infinity_beside_finite_numbers() -> None:
    x = scaled.examples["masked"](FLOAT32)["x"]
    assert 0 < np.isneginf(x).mean() < 1
    assert np.isfinite(x[~np.isneginf(x)]).all()
    assert "weight" not in scaled.examples["masked"](FLOAT32).inputs


@pytest.mark.parametrize(
    ("given", "said"), [({"y": "transposed"}, "'y'"), ({"x": [1.0], "weight": [1.0, 2.0]}, "weight")]
)
def test_what_does_not_fit_the_declaration_is_named(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        example(**given).of(scaled.declaration)(FLOAT32)


def test_a_record_takes_cases_and_errors_from_the_signature() -> None:
    declared = Declared("softmax")
    assert declared.example(2, cols=5)(FLOAT32)["x"].shape == (2, 5)
    assert {"x_is_list", "x_of_shape_no_axis"} <= {error.name for error in declared.arguments.errors}


def test_a_record_has_its_own_functions_that_make_tensors() -> None:
    declared = Declared("rms_norm", weight=lambda rng, shape, dtype: np.full(shape, 3))
    assert set(declared.example(2, cols=5)(FLOAT32)["weight"]) == {3}


@fourfold.operation(
    x=fourfold.tensor("n"),
    classes=fourfold.tensor("n", dtype=("int64", "int32"), high=9),
    out_dtype=fourfold.values(torch.float32, torch.float16),
    examples={name: example(x=[1.5], classes=np.ones(1, name)) for name in ("int32", "int64", "int16")},
    tried=False,
)
def of_classes(x: torch.Tensor, classes: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return x * classes, in a dtype."""
    return (x * classes).to(out_dtype)


def test_integers_of_an_example_keep_a_dtype_that_is_declared() -> None:
    dtypes = {name: of_classes.examples[name](FLOAT32)["classes"].dtype.name for name in ("int32", "int64", "int16")}
    assert (dtypes["int32"], dtypes["int64"]) == ("int32", "int64")
    assert dtypes["int16"] in ("int32", "int64")


@pytest.mark.parametrize("tested", ["float16", "bfloat16"])
def test_a_parameter_that_may_be_the_tested_dtype_is(tested: str) -> None:
    expected = torch.float16 if tested == "float16" else torch.float32
    assert {make(DTYPES[tested]).parameters["out_dtype"] for make in of_classes.examples.values()} == {expected}


@pytest.mark.parametrize("operation", ["softmax", "matmul", "attention", "giou_loss", "cross_entropy"])
def test_brief_checks_run_a_named_example_that_shows_mistakes(operation: str) -> None:
    (case,) = subject_of(operation, lambda **_: None).small_example().values()
    assert min(next(iter(case.inputs.values())).shape) > 1
    assert all(array.size for array in case.inputs.values())
    assert all(np.isfinite(array).all() for array in case.inputs.values())
