"""Layouts keep every bit and have the promised strides; a case's repr is enough to build the case again."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fourfold.checks.records import operations
from fourfold.numerics.dtypes import DTYPES, QUANTISED, bits, dtype_of
from fourfold.operations.case import SHOWN_ELEMENTS, Case, show
from fourfold.operations.layouts import COMPOSED, INTEGER_POISON, LAYOUTS

SHAPES = [(), (1,), (5,), (0,), (4, 4), (3, 4), (1, 4), (0, 4), (2, 3, 4), (3, 0, 4), (2, 1, 3, 4)]
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]

EVERY = {**LAYOUTS, **COMPOSED}


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return distinct numbers, with special values among them if the dtype has any."""
    numbers = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    if dtype.is_floating_point:
        numbers = numbers / 8
        special = torch.tensor([torch.inf, -torch.inf, -0.0], dtype=torch.float64)[: numbers.numel() // 4]
        numbers.view(-1)[: len(special)] = special
    return numbers.to(dtype)


def gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of the storage that are not elements of the tensor."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    places = torch.arange(storage.numel()).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    outside = torch.ones(storage.numel(), dtype=torch.bool)
    outside[places.reshape(-1)] = False
    return storage[outside]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", EVERY)
def test_every_layout_keeps_every_bit_and_poisons_its_gaps(layout: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        given = values(shape, dtype)
        laid_out = EVERY[layout](given)
        assert laid_out.dtype == dtype
        assert laid_out.shape == given.shape
        if dtype.is_floating_point:
            assert torch.equal(bits(laid_out), bits(given)), shape
        else:
            assert torch.equal(laid_out, given), shape
        unused = gaps(laid_out)
        assert torch.all(unused.isnan() if dtype.is_floating_point else unused == INTEGER_POISON), shape


@pytest.mark.parametrize("layout", EVERY)
def test_no_layout_changes_or_shares_what_it_is_given(layout: str) -> None:
    for given in (values((3, 4), torch.float32), torch.ones(3, 4)):
        before = given.clone()
        laid_out = EVERY[layout](given)
        assert torch.equal(given, before)
        if layout not in ("axes_reversed", "transposed"):
            assert laid_out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_misaligned_begins_one_element_late(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        laid_out = LAYOUTS["misaligned"](values(shape, dtype))
        assert laid_out.is_contiguous()
        assert laid_out.storage_offset() == 1
        # An empty tensor has no address.
        assert not laid_out.numel() or laid_out.data_ptr() % 16 == laid_out.element_size()
        assert gaps(laid_out).numel() == 2


@pytest.mark.parametrize(
    ("layout", "shape", "stride", "start", "between"),
    [
        ("contiguous", (2, 3, 4), (12, 4, 1), 0, 0),
        # The first two axes are swapped in memory, or the first axis is the last.
        ("transposed", (2, 3, 4), (4, 8, 1), 0, 0),
        ("transposed", (3, 4), (1, 3), 0, 0),
        ("transposed", (5,), (1,), 0, 0),
        ("axes_reversed", (2, 3, 4), (1, 2, 6), 0, 0),
        ("axes_reversed", (3, 4), (1, 3), 0, 0),
        # A row lies between two, two elements between neighbours, and rows are of odd length.
        ("sliced_rows", (2, 3, 4), (24, 4, 1), 12, 3 * 12),
        ("sliced_rows", (5,), (2,), 1, 6),
        ("sliced_columns", (2, 3, 4), (36, 12, 3), 0, 2 * 24),
        ("cut_from_wider", (2, 3, 4), (15, 5, 1), 0, 6),
    ],
)
def test_a_layout_has_its_strides_and_gaps(
    layout: str, shape: tuple[int, ...], stride: tuple[int, ...], start: int, between: int
) -> None:
    given = values(shape, torch.float32)
    for tensor in (given, given.mT.contiguous().mT if given.ndim > 1 else given):
        laid_out = LAYOUTS[layout](tensor)
        assert (laid_out.stride(), laid_out.storage_offset()) == (stride, start)
        assert gaps(laid_out).numel() == between


def test_expanded_has_stride_zero_where_all_is_the_same() -> None:
    rows = torch.arange(4.0).expand(3, 4).contiguous()
    assert LAYOUTS["expanded"](rows).stride() == (0, 1)
    assert LAYOUTS["expanded"](rows.T.contiguous()).stride()[1] == 0
    assert LAYOUTS["expanded"](torch.stack([rows, rows + 1])).stride()[1] == 0
    assert LAYOUTS["expanded"](torch.full((5,), -1.0)).stride() == (0,)
    for dtype in TYPES:
        assert LAYOUTS["expanded"](rows.to(dtype)).stride() == (0, 1)
        assert torch.equal(LAYOUTS["expanded"](rows.to(dtype)), rows.to(dtype))


def test_expanded_has_stride_zero_along_every_axis_where_all_is_the_same() -> None:
    assert LAYOUTS["expanded"](torch.full((2, 3, 4), 7.0)).stride() == (0, 0, 0)
    assert LAYOUTS["expanded"](torch.arange(4.0).expand(2, 3, 4).contiguous()).stride() == (0, 0, 1)


def test_expanded_is_contiguous_where_nothing_is_the_same() -> None:
    for given in (values((3, 4), torch.float32), torch.ones(1, 1), torch.ones(())):
        assert LAYOUTS["expanded"](given).is_contiguous()


def test_expanded_tells_the_zeros_apart() -> None:
    given = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    assert torch.equal(bits(LAYOUTS["expanded"](given)), bits(given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_flow_to_a_leaf_of_any_layout(layout: str) -> None:
    leaf = LAYOUTS[layout](values((2, 3, 4), torch.float32)).requires_grad_()
    (gradient,) = torch.autograd.grad(leaf.abs().sum(), leaf)
    assert gradient.shape == leaf.shape


NAMESPACE: dict[str, Any] = {
    "Case": lambda **parts: parts,
    "array": lambda numbers, dtype: np.array(numbers, dtype=dtype),
    "zeros": lambda shape, dtype: np.zeros(shape, dtype=dtype),
    "nan": np.nan,
    "inf": np.inf,
    "bfloat16": ml_dtypes.bfloat16,
    "torch": torch,
    **{name: each.numpy for name, each in QUANTISED.items()},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int32", "int64")},
}


def read_back(text: str) -> dict[str, Any]:
    return eval(text, {"__builtins__": {}}, NAMESPACE)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    # NaN reads back as NaN, but its payload may differ.
    assert np.array_equal(np.isnan(actual.astype(np.float64)), np.isnan(expected.astype(np.float64)))
    number = ~np.isnan(expected.astype(np.float64))
    assert actual[number].tobytes() == expected[number].tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_small_case_reads_back_bit_for_bit(dtype: str) -> None:
    kind = DTYPES[dtype]
    rng = np.random.default_rng(5)
    strange = np.array([np.nan, np.inf, -np.inf, -0.0, kind.smallest_subnormal, kind.largest, 1 / 3, -1e-3])
    case = Case(
        inputs={
            "pred": rng.normal(0, 100, (2, 2, 4)).astype(kind.numpy),
            "target": strange.reshape(2, 4).astype(kind.numpy),
            "offsets": np.array([0, 1, 2], dtype=np.int32),
            "empty": np.zeros((0, 4), dtype=kind.numpy),
        },
        grad_output=np.array(-1.75, dtype=kind.numpy),
        parameters={"eps": 1e-5, "activation": "none"},
        layouts={"pred": "transposed", "target": "contiguous"},
    )
    parts = read_back(repr(case))
    for name, array in (*case.inputs.items(), ("grad_output", case.grad_output)):
        assert_same_bits(parts.pop(name), array)
    assert parts == {"eps": 1e-5, "activation": "none", "layouts": {"pred": "transposed"}}


@pytest.mark.parametrize("name", operations())
def test_small_named_examples_read_back(name: str) -> None:
    operation = operations()[name]
    small = 0
    for make in operation.examples.values():
        case = make(DTYPES["float32"])
        if max(array.size for array in (*case.inputs.values(), case.grad_output)) <= SHOWN_ELEMENTS:
            parts = read_back(repr(case))
            for key, array in case.inputs.items():
                assert_same_bits(parts[key], array)
            small += 1
    assert small


def test_a_large_array_is_shown_by_shape_and_range() -> None:
    large = np.linspace(-2, 5, 4 * SHOWN_ELEMENTS).astype(np.float32).reshape(-1, 4)
    assert show(large) == f"<float32[{SHOWN_ELEMENTS}, 4], -2 to 5>"
    large[3, 1], large[4, 0] = np.nan, np.inf
    assert show(large) == f"<float32[{SHOWN_ELEMENTS}, 4], -2 to 5, 2 not finite>"
    large[:] = np.nan
    assert "nothing finite" in show(large)
    assert show(np.full(1000, 3, dtype=ml_dtypes.bfloat16)) == "<bfloat16[1000], 3 to 3>"
    assert show(np.arange(1000, dtype=np.int32)) == "<int32[1000], 0 to 999>"


def test_the_longest_array_shown_in_full_reads_back() -> None:
    full = np.random.default_rng(6).normal(0, 1, SHOWN_ELEMENTS).astype(np.float32)
    assert_same_bits(read_back(show(full)), full)
    assert show(np.append(full, full[:1])).startswith("<")


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0, 4)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_scalars_and_empty_arrays_become_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    kind = DTYPES[dtype]
    case = Case({"x": np.full(shape, 0.5, dtype=kind.numpy)}, np.full(shape, 2.0, dtype=kind.numpy))
    for layout in LAYOUTS:
        laid_out = Case(case.inputs, case.grad_output, layouts={"x": layout, "grad_output": layout})
        for name in ("x", "grad_output"):
            tensor = laid_out.tensor(name, kind, "cpu")
            assert tensor.shape == shape
            assert tensor.dtype == kind.torch
            given = case.grad_output if name == "grad_output" else case["x"]
            assert_same_bits(kind.array(tensor).astype(kind.numpy), given)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tensors_hold_the_numbers_of_the_case_in_its_layouts(dtype: str) -> None:
    kind = DTYPES[dtype]
    x = np.random.default_rng(7).normal(0, 1, (3, 4)).astype(kind.numpy)
    x[0] = [kind.largest, -kind.largest, kind.smallest_subnormal, -np.inf]
    offsets = np.array([0, 2, 3], dtype=np.int64)
    case = Case({"x": x, "offsets": offsets}, x[:, 0], layouts={"x": "axes_reversed", "grad_output": "sliced_columns"})
    tensors = case.tensors(kind, "cpu")
    assert tensors["x"].stride() == (1, 3)
    assert tensors["offsets"].dtype == torch.int64
    assert case.tensor("grad_output", kind, "cpu").stride() == (3,)
    assert_same_bits(kind.array(tensors["x"]).astype(kind.numpy), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", list(QUANTISED))
def test_quantised_inputs_keep_every_bit_whatever_dtype_is_tested(dtype: str, layout: str) -> None:
    every: np.ndarray = np.arange(256, dtype=np.uint8).view(QUANTISED[dtype].numpy).reshape(16, 16)
    case = Case({"x": every}, np.zeros(1), layouts={"x": layout})
    tensor = case.tensor("x", DTYPES["bfloat16"], "cpu")
    assert tensor.dtype == QUANTISED[dtype].torch == dtype_of(every.dtype).torch
    assert torch.equal(bits(tensor), torch.from_numpy(every.view(np.int8)))
    exact = DTYPES["bfloat16"].array(tensor)
    assert np.array_equal(exact, every.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_kernel_that_writes_into_its_input_leaves_the_case_alone(dtype: str, layout: str) -> None:
    kind = DTYPES[dtype]
    for shape in ((5,), (3, 4), (1, 4)):
        x = np.ones(shape, dtype=kind.numpy)
        Case({"x": x}, x, layouts={"x": layout}).tensor("x", kind, "cpu").zero_()
        assert (x == 1).all()


def replaced_inputs(case: Case) -> Case:
    return case.with_inputs(x=np.zeros(3, dtype=np.float32))


def replaced_parameters(case: Case) -> Case:
    return case.with_parameters(eps=0.5)


@pytest.mark.parametrize("replace", [replaced_inputs, replaced_parameters])
def test_replacing_leaves_the_case_and_all_else_as_it_was(replace: Callable[[Case], Case]) -> None:
    x, y = np.ones(3, dtype=np.float32), np.full(3, 2, dtype=np.float32)
    case = Case({"x": x, "y": y}, x, {"eps": 1e-5}, {"x": "misaligned", "y": "sliced_rows"})
    other = replace(case)
    assert case["x"] is x
    assert case.parameters == {"eps": 1e-5}
    assert case.layouts == {"x": "misaligned", "y": "sliced_rows"}
    assert other["y"] is y
    assert other.grad_output is x
    assert other.layouts["y"] == "sliced_rows"
    if replace is replaced_inputs:
        assert other["x"].tolist() == [0, 0, 0]
        assert "x" not in other.layouts
    else:
        assert other.parameters == {"eps": 0.5}
        assert other.layouts == case.layouts


@pytest.mark.parametrize("name", operations())
def test_an_example_is_made_anew_by_each_call(name: str) -> None:
    # Writing into the arrays of one case must not change those of another.
    for example, make in operations()[name].examples.items():
        made, again = make(DTYPES["float32"]), make(DTYPES["float32"])
        shared = [key for key, array in made.inputs.items() if np.shares_memory(array, again.inputs[key])]
        assert not shared, f"{example} shares {shared}"
