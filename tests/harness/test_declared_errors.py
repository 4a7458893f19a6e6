"""The derived errors of an operation cover every kind of bad input, and reject no good input."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fourfold.properties import vector_add
from samples import sampled
from subjects import subject_of

from fourfold import backends
from fourfold.backends.arguments import check_floating, check_same
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.records import operations
from fourfold.checks.search import Search, Subject
from fourfold.declaration.library import arguments_of
from fourfold.operations.arguments import integers, not_negative, one_of, positive, tensor
from fourfold.operations.declared_errors import Arguments, ArgumentsOf
from fourfold.operations.outcomes import Failure

OPERATIONS = operations()


def subject(implementation: Callable[..., torch.Tensor], arguments: Arguments) -> Subject:
    return subject_of(replace(vector_add.operation, errors=arguments.errors), implementation)


def complaint(implementation: Callable[..., torch.Tensor], arguments: Arguments) -> str:
    """Return the first bad input that the check reports for an implementation."""
    with pytest.raises(Failure) as caught:
        declared_errors_are_raised(subject(implementation, arguments), Search(examples=1))
    return str(caught.value)


@pytest.mark.parametrize("backend", sampled(backends.BACKENDS, "torch", "triton"))
@pytest.mark.parametrize("name", sampled(OPERATIONS, "vector_add", "matmul", "giou_loss_ragged"))
def test_the_call_that_is_changed_for_the_worse_is_right(name: str, backend: str) -> None:
    arguments = getattr(importlib.import_module(f"properties.{name}"), "ARGUMENTS", None) or arguments_of(name)
    output = backends.load(name, backend)(**arguments.good)
    returned = getattr(torch, OPERATIONS[name].returns or "float32")
    assert (output[0] if isinstance(output, tuple) else output).dtype == returned


@pytest.mark.parametrize("name", OPERATIONS)
def test_errors_are_told_apart_by_their_names(name: str) -> None:
    names = [error.name for error in OPERATIONS[name].errors]
    assert len(set(names)) == len(names)


def test_an_optional_tensor_may_be_none_and_an_axis_may_have_a_size_of_its_own() -> None:
    given = Arguments({"cols": 20}, x=tensor("rows cols"), at=integers("rows", 1, optional=True))
    assert given.good["x"].shape == (3, 20)
    names = {error.name for error in given.errors}
    assert {"x_is_none", "at_is_number"} <= names
    assert "at_is_none" not in names


# ---- each kind of error: the check finds a sum that accepts one kind of bad input


PAIR = Arguments(x=tensor("... cols"), y=tensor("... cols"))


def right(x: Any, y: Any) -> torch.Tensor:
    check_floating("x", x)
    if not x.ndim:
        raise ValueError("x must have a last axis, not none")
    check_same("y", y, "x", x)
    return x + y


def alike(x: Any, y: Any, **is_so: Any) -> bool:
    """Return whether both are tensors and x has these attributes."""
    both = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return both and all(getattr(x, name) == value for name, value in is_so.items())


# By the bad input that the implementation accepts: how it converts the arguments.
FORGIVING: dict[str, Callable[[Any, Any], tuple]] = {
    "y_is_number": lambda x, y: (x, torch.full_like(x, y) if isinstance(y, float) else y),
    "x_is_list": lambda x, y: (torch.tensor(x) if isinstance(x, list) else x, y),
    "x_is_array": lambda x, y: (torch.from_numpy(x) if isinstance(x, np.ndarray) else x, y),
    "x_is_none": lambda x, y: (torch.zeros_like(y) if x is None else x, y),
    "x_of_complex64": lambda x, y: (x.real if alike(x, y, dtype=torch.complex64) else x, y),
    "y_of_bool": lambda x, y: (x, y.to(x.dtype) if alike(y, x, dtype=torch.bool) else y),
    "all_of_integers": lambda x, y: (
        (x.float(), y.float()) if alike(x, y, dtype=torch.int64) and y.dtype == torch.int64 else (x, y)
    ),
    "y_of_float16_among_float32": lambda x, y: (x, y.float() if alike(y, x, dtype=torch.float16) else y),
    "y_of_float64_among_float32": lambda x, y: (x, y.float() if alike(y, x, dtype=torch.float64) else y),
    "y_of_float32_among_float16": lambda x, y: (x, y.half() if alike(x, y, dtype=torch.float16) else y),
    "y_on_another_device": lambda x, y: (x, torch.ones_like(x) if alike(y, x, is_meta=True) else y),
    "x_and_y_of_shape_no_axis": lambda x, y: (x[None], y[None]) if alike(x, y, ndim=0) and y.ndim == 0 else (x, y),
    "y_of_shape_9_2": lambda x, y: (x, y.expand(x.shape) if alike(y, x, ndim=2) and y.shape == x.shape[1:] else y),
    "y_of_shape_8_9_1": lambda x, y: (x, y.expand(x.shape) if alike(y, x, ndim=3) and y.shape[2] == 1 else y),
}


@pytest.mark.parametrize("taken", FORGIVING)
def test_bad_input_that_is_taken_is_found_out(taken: str) -> None:
    found = complaint(lambda x, y: right(*FORGIVING[taken](x, y)), PAIR)
    assert re.search(rf": {taken}: no (Type|Value)Error naming", found), found


def test_a_message_that_names_no_argument_is_found_out() -> None:
    def blaming_nobody(x: Any, y: Any) -> torch.Tensor:
        try:
            return right(x, y)
        except TypeError:
            raise TypeError("expected tensors") from None  # the word "expected" contains the name x

    assert "x_is_number: the message does not name x: expected tensors" in complaint(blaming_nobody, PAIR)


def test_input_that_is_bad_in_no_way_is_not_asked_for() -> None:
    search = Search(examples=1)
    declared_errors_are_raised(subject(right, PAIR), search)
    assert search.ran == len(PAIR.errors) > 30


# ---- shapes


def shapes_of(arguments: Arguments) -> dict[str, set[tuple]]:
    """Return the bad shapes of each tensor, from the errors that change only that tensor."""
    found: dict[str, set[tuple]] = {}
    for error in arguments.errors:
        made = error.arguments("cpu")
        changed = [
            name
            for name, value in made.items()
            if isinstance(value, torch.Tensor) and value.shape != arguments.good[name].shape
        ]
        if len(changed) == 1:
            found.setdefault(changed[0], set()).add(tuple(made[changed[0]].shape))
    return found


def test_shapes_that_agree_with_the_axes_are_not_wrong() -> None:
    found = shapes_of(Arguments(pred=tensor("batch boxes 4"), target=tensor("total 4"), offsets=integers("batch+1", 0)))
    assert found["target"] >= {(5, 3), (5, 5), (5,), (1, 5, 4), (2, 3, 4), ()}
    assert not any(len(shape) == 2 and shape[1] == 4 for shape in found["target"])
    assert not any(len(shape) == 3 and shape[2] == 4 for shape in found["pred"])
    assert found["offsets"] >= {(2,), (4,), (1,), (1, 3), ()}


def test_of_two_shapes_that_do_not_fit_the_later_is_wrong() -> None:
    found = shapes_of(Arguments(a=tensor("m k"), b=tensor("k n")))
    assert {len(shape) for shape in found["a"]} == {0, 1, 3}
    assert found["b"] >= {(4, 5), (2, 5), (1, 5), (5, 3), (3,), (5,), (1, 3, 5), (2, 3)}
    assert (3, 6) not in found["b"]


def test_a_tensor_of_a_dtype_of_its_own_has_no_other() -> None:
    arguments = Arguments(x=tensor("m k", dtype=torch.float8_e4m3fn), scale=tensor("m", dtype=torch.float32))
    assert {name: value.dtype for name, value in arguments.good.items()} == {
        "x": torch.float8_e4m3fn,
        "scale": torch.float32,
    }
    others = {error.name: error.arguments("cpu") for error in arguments.errors if error.raises is TypeError}
    assert {each["x"].dtype for name, each in others.items() if name.startswith("x_of_")} >= {
        torch.float8_e5m2,
        torch.uint8,
        torch.float16,
        torch.float32,
    }
    assert {"scale_of_float16", "scale_of_float64", "x_is_array"} <= others.keys()
    assert not others.keys() & {"x_of_float8_e4m3fn", "scale_of_float32", "scale_of_float16_among_float32"}


def test_no_shape_is_wrong_where_nothing_is_known_of_the_axes() -> None:
    call = {"x": torch.ones(2, 3), "rows": torch.tensor([0, 2]), "eps": 0.5}
    arguments = ArgumentsOf(call)
    assert not shapes_of(arguments)
    names = {error.name for error in arguments.errors}
    assert names >= {"x_is_list", "x_of_int64", "rows_of_float32", "rows_on_another_device"}
    assert "rows_of_int64" not in names
    assert all(error.arguments("cpu")["eps"] == 0.5 for error in arguments.errors)


# ---- parameters


def test_parameters_out_of_range_and_of_another_type() -> None:
    arguments = Arguments(x=tensor("..."), eps=positive(0.5), slope=not_negative(0.25), kind=one_of("leaky", "plain"))
    values: dict[str, list] = {"eps": [], "slope": [], "kind": []}
    for error in arguments.errors:
        made = error.arguments("cpu")
        for name in values:
            if made[name] != arguments.good[name]:
                values[name].append((made[name], error.raises))
    assert [repr(value) for value, raises in values["eps"] if raises is ValueError] == [
        "0.0",
        "-0.5",
        "nan",
        "inf",
        "-inf",
    ]
    assert [repr(value) for value, raises in values["slope"] if raises is ValueError] == ["-0.25", "nan", "inf", "-inf"]
    assert {repr(value) for value, raises in values["eps"] if raises is TypeError} == {"'0.5'", "None"}
    assert values["kind"] == [("no_such_choice", ValueError), (1, TypeError), (None, TypeError)]


def test_a_number_check_names_the_argument_whatever_is_given() -> None:
    for value in ("1", None, [1.0]):
        with pytest.raises(TypeError, match="eps must be a number"):
            positive(0.5).check("eps", value)
