"""A declaration gives a complete record: cases with consistent sizes, of all sizes and layouts, and the named ones."""

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from declared_operations import DECLARED, IGNORED, attention, embedding, masked_softmax, ragged_mean, rms_norm
from drawing import collect
from hypothesis import strategies as st
from one_run import one_run
from samples import sampled
from subjects import subject_of

import fourfold
from fourfold import lengths, offsets, operation, tensor, values
from fourfold.checks import impostors
from fourfold.checks.backward import backward_agrees
from fourfold.checks.batches import the_batch_does_not_matter
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.history import history_does_not_matter
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import together
from fourfold.checks.records import operations
from fourfold.checks.saved_tensors import backward_is_of_the_call
from fourfold.checks.search import Search, Subject
from fourfold.checks.single_gradients import single_gradients_agree
from fourfold.declaration.definition import DefinedOperation
from fourfold.inputs.combinations import combined_cases
from fourfold.inputs.extents import Extent, extent
from fourfold.inputs.large_cases import LargeCases
from fourfold.numerics.bounded import OPEN
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations import axes as notation
from fourfold.operations.case import Case, is_floating
from fourfold.operations.claims import NO_CLAIMS
from fourfold.operations.layouts import LAYOUTS
from fourfold.operations.outcomes import Failure, Unsupported
from fourfold.operations.record import sizes_of
from fourfold.performance.calls import Call, References, worst_error

FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]
DRAWS, ELEMENTS, FEW = 300, 2048, 8
X = tensor("... cols")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: small calls on many threads take longer, and much longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@one_run
def cases_of(name: str) -> list[Case]:
    return collect(DECLARED[name].cases(FLOAT32, ELEMENTS), DRAWS)


@one_run
def small_cases_of(name: str) -> list[Case]:
    return collect(DECLARED[name].cases(FLOAT32, FEW), 100)


@functools.cache
def named(name: str) -> dict[str, Case]:
    return {each: make(FLOAT32) for each, make in DECLARED[name].examples.items()}


def all_cases(made: DefinedOperation, elements: int, count: int = 100) -> list[Case]:
    return [*collect(made.cases(FLOAT32, elements), count), *(make(FLOAT32) for make in made.examples.values())]


def subject(made: DefinedOperation, implementation: Callable[..., Any], dtype: str = "float32") -> Subject:
    return subject_of(made, implementation, DTYPES[dtype].with_contract(OPEN))


# ---- drawn cases


SAMPLED = pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm", "ragged_mean"))


@pytest.mark.full(but=1)
@SAMPLED
def test_sizes_agree_in_every_case(name: str) -> None:
    made = DECLARED[name]
    for case in [*cases_of(name), *named(name).values(), *small_cases_of(name)]:
        sizes_of(made, case)  # raises where they do not
        assert case.grad_output.shape == made(**case.tensors(FLOAT32, "cpu"), **case.parameters).shape


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm", "ragged_mean"))
def test_each_axis_is_empty_of_one_and_longer_than_a_block(name: str) -> None:
    made = DECLARED[name]
    seen = [sizes_of(made, case) for case in (*cases_of(name), *named(name).values())]
    for axis in seen[0]:
        found = {sizes[axis] for sizes in seen}
        assert found >= ({8, 128} if axis == "dim" and name == "attention" else {1, 127, 129, 1025, 4101}), axis
        assert (0 in found) == (axis not in ("classes", "keys") and (name, axis) != ("attention", "dim")), axis
    sizes = [size for case in cases_of(name) for size in sizes_of(made, case).values()]
    assert {0, 1} <= {*sizes, *(size for case in small_cases_of(name) for size in sizes_of(made, case).values())}
    # Attention has four axes and dim is at least 8, within ELEMENTS. The draws depend on Hypothesis's version.
    assert max(sizes) >= (129 if name == "attention" else 513)
    assert len(set(sizes)) > 20


@pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm", "ragged_mean"))
def test_inputs_stay_within_the_elements_asked_for(name: str) -> None:
    for elements, cases in ((FEW, small_cases_of(name)), (ELEMENTS, cases_of(name))):
        for case in cases:
            # An axis has its least size, 8 of attention's, even where it is too long. Offsets are longer by one.
            assert max(array.size for array in case.inputs.values()) <= max(elements, 24) + 1
            assert case.grad_output.size <= 16 * max(elements, 64)


@pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm"))
def test_every_tensor_comes_in_every_layout(name: str) -> None:
    for each in (*DECLARED[name].axes, "grad_output"):
        assert {case.layouts.get(each, "contiguous") for case in named(name).values()} == set(LAYOUTS), each
        found = [case for case in (*cases_of(name), *small_cases_of(name)) if each in case.layouts]
        assert len({case.layouts[each] for case in found}) >= len(LAYOUTS) - 1, each
        if name == "cross_entropy" and each == "grad_output":  # it has no axes
            continue
        repeats = [case for case in found if case.layouts[each] == "expanded"]
        strides = [case.tensor(each, FLOAT32, "cpu").stride() for case in repeats]
        # An input that may be None is drawn expanded so seldom that it is left to the test below.
        assert any(0 in stride for stride in strides) or each in ("counts", "starts", "bias"), each


def test_an_expanded_tensor_holds_the_same_along_an_axis() -> None:
    for name, made in DECLARED.items():
        case = named(name)["all_expanded"]
        for each in made.axes.keys() - {"counts", "starts"}:
            assert 0 in case.tensor(each, FLOAT32, "cpu").stride(), (name, each)


def test_an_input_by_which_torch_cannot_differentiate_has_no_gradient() -> None:
    @operation(x=tensor("batch c"), mean=tensor("c"), var=tensor("c", kind="positive"), sizes={"batch": (1, None)})
    def normalize(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, var)

    @operation(x=tensor("n"), y=tensor("n"))
    def count(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x // y

    @operation(x=tensor("n"), y=tensor("n"))
    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.detach()

    assert (normalize.differentiable, count.differentiable, multiply.differentiable) == (("x",), (), ("x", "y"))


@pytest.mark.full
def test_leading_axes_are_none_to_three_and_alike() -> None:
    for name, least in (("rms_norm", 1), ("masked_softmax", 1), ("embedding", 0)):
        first = next(iter(DECLARED[name].axes))
        assert {case[first].ndim - least for case in (*cases_of(name), *small_cases_of(name))} == {0, 1, 2, 3}
        assert {case[first].ndim - least for case in named(name).values()} == {0, 1, 2, 3}
    assert all(case["x"].shape == case["mask"].shape for case in cases_of("masked_softmax"))


@pytest.mark.full
def test_integers_keep_to_their_range_and_reach_its_ends() -> None:
    least, largest, ignored = 0, 0, 0
    for case in (*cases_of("cross_entropy"), *named("cross_entropy").values()):
        target, classes = case["target"], case["logits"].shape[1]
        assert ((target == IGNORED) | ((target >= 0) & (target < classes))).all()
        least += int((target == 0).sum())
        largest += int((target == classes - 1).sum())
        ignored += int((target == IGNORED).any() and not (target == IGNORED).all())
    assert min(least, largest, ignored) > 10
    assert {case["target"].dtype.name for case in cases_of("cross_entropy")} == {"int64", "int32"}
    assert (named("cross_entropy")["target_all_-100"]["target"] == IGNORED).all()
    assert 0 < (named("cross_entropy")["rows_1025"]["target"] == IGNORED).mean() < 0.5
    for case in (*cases_of("embedding"), *small_cases_of("embedding")):
        assert ((case["ids"] >= 0) & (case["ids"] < case["table"].shape[0])).all()
    assert any(np.unique(case["ids"]).size < case["ids"].size / 2 for case in cases_of("embedding"))


def test_masks_are_full_empty_and_in_between() -> None:
    shares = {float(case["mask"].mean()) for case in cases_of("masked_softmax") if case["mask"].size > 20}
    assert {0.0, 1.0} <= shares
    assert any(0.02 < share < 0.3 for share in shares)
    assert any(0.7 < share < 0.98 for share in shares)
    assert all(case["mask"].dtype == bool for case in cases_of("masked_softmax"))
    assert 0.3 < named("masked_softmax")["ordinary"]["mask"].mean() < 0.7


@pytest.mark.full
def test_lengths_and_offsets_are_of_the_same_samples() -> None:
    cases = [*cases_of("ragged_mean"), *named("ragged_mean").values(), *small_cases_of("ragged_mean")]
    for case in cases:
        assert case["counts"].sum() == len(case["x"])
        assert case["starts"][0] == 0
        assert (np.diff(case["starts"]) == case["counts"]).all()
        assert (case["counts"] >= 0).all()
    assert {case["starts"].dtype.name for case in cases} == {"int64", "int32"}
    several = [case["counts"] for case in cases if len(case["counts"]) > 2 and len(case["x"])]
    assert any((counts == 0).any() for counts in several)
    assert any((counts > 0).sum() == 1 for counts in several)
    more = collect(DECLARED["ragged_mean"].cases(FLOAT32, ELEMENTS), 2 * DRAWS)
    counts_of = [*several, *(case["counts"] for case in more)]
    many = [counts for counts in counts_of if len(counts) > 4 and counts.sum() > 2 * len(counts)]
    assert any((counts == 0).mean() > 1 / 2 and (counts > 0).sum() > 1 for counts in many)
    assert any((counts > 0).all() for counts in several)
    assert len(named("ragged_mean")["ordinary"]["x"]) > 2 * len(named("ragged_mean")["ordinary"]["counts"])
    assert named("ragged_mean")["empty_samples_at_both_ends"]["counts"].tolist() == [0, 0, 3, 0, 2, 0]


def test_no_sample_has_more_rows_than_there_are_slots() -> None:
    counts = lengths("batch", total="rows", most="slots")

    @operation(padded=tensor("batch slots"), counts=counts, flat=tensor("rows"), tried=False)
    def filled(padded: torch.Tensor, counts: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        taken = torch.arange(padded.shape[1]) < counts.unsqueeze(-1)
        return padded.masked_scatter(taken, flat)

    cases = all_cases(filled, 256)
    for case in cases:
        assert (case["counts"] <= case["padded"].shape[1]).all()
        assert case["counts"].sum() == len(case["flat"])
    assert any(len(case["flat"]) > 20 for case in cases)


def test_an_input_that_may_be_none_sometimes_is() -> None:
    for cases in (cases_of("masked_softmax"), list(named("masked_softmax").values())):
        absent = [case for case in cases if "bias" not in case.inputs]
        assert 0 < len(absent) < len(cases) / 2
        assert all(case.parameters["bias"] is None for case in absent)
        assert all("bias" not in case.parameters for case in cases if "bias" in case.inputs)
    assert masked_softmax.differentiable == ("x", "bias")
    absent_case = named("masked_softmax")["without_bias"]
    assert masked_softmax.differentiable_in(absent_case) == ("x",)
    assert not any(error.name == "bias_is_none" for error in masked_softmax.errors)
    assert any(error.name == "x_is_none" for error in masked_softmax.errors)
    assert not any(error.name == "mask_of_bool" for error in masked_softmax.errors)


def test_parameters_are_drawn_and_named_cases_take_the_default() -> None:
    assert {case.parameters["eps"] for case in cases_of("rms_norm")} == {1e-6, 1e-5}
    assert named("rms_norm")["ordinary"].parameters == {"eps": 1e-6}
    assert named("rms_norm")["eps_1e-05"].parameters == {"eps": 1e-5}

    @operation(x=X, low=st.floats(-1, 0), high=values(2.0, 3.0))
    def clipped(x: torch.Tensor, high: float, low: float = -0.5, unused: float = 7.0) -> torch.Tensor:
        return x.clamp(low, high)

    assert clipped.examples["ordinary"](FLOAT32).parameters == {"high": 2.0, "low": -0.5}
    assert len({case.parameters["low"] for case in collect(clipped.cases(FLOAT32, 8), 50)}) > 5


def test_sizes_are_multiples_ranges_lists_and_numbers() -> None:
    dims = {sizes_of(attention, case)["dim"] for case in (*cases_of("attention"), *named("attention").values())}
    assert dims <= set(range(8, 129, 8))
    assert len(dims) > 2
    for given, size, nearest in (
        ((1, None), 0, 1),
        ((1, 64), 100, 64),
        (range(8, 129, 8), 31, 24),
        ([16, 64, 32], 40, 32),
        ([16, 64], 3, 16),
        (7, 100, 7),
    ):
        assert extent("cols", given).nearest(size) == nearest
    for bad in ((3, 1), (-1, 2), [], "8", 1.5, range(0), (1, 2, 3)):
        with pytest.raises(ValueError, match="sizes of cols must be"):
            extent("cols", bad)
    assert extent("cols", (0, 9)).not_empty() == Extent(1, 9)


def test_an_operation_may_be_drawn_on_fewer_sizes() -> None:
    for limits, cols in (({"cols": 64}, range(0, 1 << 20, 64)), ({"cols": (3, 100)}, range(3, 101))):
        fewer = rms_norm.of_sizes(limits)
        sizes = {sizes_of(fewer, case)["cols"] for case in all_cases(fewer, ELEMENTS)}
        assert sizes <= set(cols)
        assert len(sizes) > 4
        assert max(sizes) in (4096, 100)
        assert all(sizes_of(fewer, case)["cols"] in cols for case in collect(fewer.smooth(FLOAT64), 10))
    assert attention.of_sizes({"dim": (30, 70)}).declaration.allowed["dim"] == Extent(32, 70, 8)
    assert attention.of_sizes({"dim": 12}).declaration.allowed["dim"] == Extent(24, 128, 24)
    assert Extent(choices=(1, 4, 6, 12)).within(4) == Extent(choices=(4, 12))
    assert Extent(choices=(1, 4, 6, 12)).within((5, 6)) == Extent(choices=(6,))
    assert Extent(1, None, 2).within(4) is None
    for limits in ({"dim": (129, 200)}, {"rows": 4}):
        with pytest.raises(ValueError, match="attention has none within"):
            attention.of_sizes(limits)
    by_hand = operations()["matmul"]
    assert by_hand.of_sizes({"k": 64}) is by_hand


def test_an_axis_that_the_definition_does_not_take_empty_is_never_empty() -> None:
    @operation(x=X)
    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1)

    cases = all_cases(largest, 256)
    assert all(case["x"].shape[-1] for case in cases)
    assert any(not case["x"].size for case in cases)


def test_intermediate_results_are_not_much_larger_than_the_inputs() -> None:
    sizes = []

    @operation(x=tensor("n d"), y=tensor("m d"))
    def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        between = (x.unsqueeze(1) - y).square()
        sizes.append(between.numel())
        return between.sum(-1)

    for case in collect(distances.cases(FLOAT32, ELEMENTS), 60):
        sizes.clear()
        distances(**case.tensors(FLOAT32, "cpu"))
        assert sizes[0] <= 16 * ELEMENTS
    sizes.clear()

    @operation(x=tensor("n"))
    def each_with_each(x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) * x).sum(0)

    lengths_of_x = {make(FLOAT32)["x"].size for make in each_with_each.examples.values()}
    assert {127, 128, 129} <= lengths_of_x
    assert max(lengths_of_x) ** 2 <= 1 << 18


# ---- numbers


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm", "ragged_mean"))
def test_special_values_occur(name: str) -> None:
    for cases in (cases_of(name), list(named(name).values())):
        arrays = [array for case in cases for array in case.inputs.values() if is_floating(array)]
        assert any(np.isnan(array).any() for array in arrays)
        assert any(np.isinf(array).any() for array in arrays)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("positive", lambda array: (array > 0).all() and np.isfinite(array).all()),
        ("unit", lambda array: ((array >= 0) & (array <= 1)).all()),
        ("probabilities", lambda array: np.allclose(array.sum(-1), 1, atol=1e-2) and (array >= 0).all()),
    ],
)
def test_numbers_keep_to_the_range_of_their_kind(kind: str, holds: Callable[[np.ndarray], bool]) -> None:
    @operation(x=tensor("rows cols", kind=kind), y=tensor("rows cols"), sizes={"cols": (1, None)})
    def weighted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    assert weighted.ordinary == ("x",)
    for dtype in (DTYPES["float16"], FLOAT32):
        seen = [*collect(weighted.cases(dtype, 64), 60), *collect(weighted.smooth(dtype), 20)]
        for case in (*seen, *(make(dtype) for make in weighted.examples.values())):
            if case["x"].size and case.layouts.get("x") != "expanded":
                assert holds(case["x"].astype(np.float64))
    searched: list[Case] = []
    search = Search(examples=40)

    def body(case: Case) -> None:
        searched.append(case)
        search.saw(Agreement(0.0, 2, 0))

    search.cases(subject(weighted, weighted), "values", body)
    assert all(np.isfinite(case["x"]).all() for case in searched)
    assert any(not np.isfinite(case["y"]).all() for case in searched)


def test_a_closed_range_has_its_ends_where_the_definition_is_finite() -> None:
    @operation(x=tensor("rows", kind="unit", gradient=False))
    def quarters(x: torch.Tensor) -> torch.Tensor:
        return torch.bincount((4 * x).floor().clamp(max=3).long(), minlength=4)

    def without_last(x: torch.Tensor) -> torch.Tensor:
        return torch.bincount((4 * x).floor().long(), minlength=5)[:4]

    @operation(x=tensor("rows cols", kind="probabilities"))
    def entropies(x: torch.Tensor) -> torch.Tensor:
        return torch.special.xlogy(x, x).sum(-1)

    @operation(x=tensor("rows", kind="unit"))
    def information(x: torch.Tensor) -> torch.Tensor:
        return x * x.log()

    verdict = fourfold.verify(without_last, quarters, device="cpu", dtypes=["float32"], only="forward", examples=5)
    assert not verdict.passed
    rows = entropies.examples["ends"](FLOAT32)["x"]
    assert (rows.max(-1) == 1).all()
    assert (rows.sum(-1) == 1).all()
    assert "ends" not in information.examples


def test_a_tensor_may_be_made_by_a_function() -> None:
    def ascending(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        return np.sort(rng.normal(0, 1, shape), axis=-1)

    @operation(x=tensor("... cols", make=ascending))
    def differences(x: torch.Tensor) -> torch.Tensor:
        return x.diff(dim=-1)

    cases = all_cases(differences, 64, 40)
    assert all((np.diff(case["x"]) >= 0).all() for case in cases)
    assert all(case["x"].dtype == np.float32 for case in cases)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", DECLARED)
def test_smooth_cases_are_small_and_their_outputs_finite(name: str) -> None:
    made = DECLARED[name]
    cases = collect(made.smooth(FLOAT64), 40)
    for case in cases:
        assert all(array.size for array in (*case.inputs.values(), case.grad_output))
        assert max(array.size for array in case.inputs.values()) <= (64 if name == "attention" else 7)
        assert made(**case.tensors(FLOAT64, "cpu"), **case.parameters).isfinite().all()
    assert len({case.grad_output.shape for case in cases}) > 2 or name == "cross_entropy"


# ---- the record


def test_the_operation_is_the_definition_too() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    assert torch.equal(rms_norm(x, weight), expected)
    assert torch.equal(rms_norm(x, weight=weight, eps=1e-6), expected)
    assert re.fullmatch(r".*declared_operations\.py:\d+", rms_norm.source)
    assert list(inspect.signature(rms_norm).parameters) == ["x", "weight", "eps"]
    assert rms_norm.axes == {"x": "... cols", "weight": "cols"}
    assert (rms_norm.name, rms_norm.differentiable) == ("rms_norm", ("x", "weight"))
    assert embedding.differentiable == ("table",)


def test_fields_may_be_given_and_examples_are_added() -> None:
    def forward(x: Any) -> Any:
        return 2 * x

    @operation(
        x=X,
        name="double",
        source="arithmetic",
        batched={"x": 1},
        forward=forward,
        backward=lambda grad_output, x: (2 * grad_output,),
        examples={
            "two": {"x": [[1.0, 2.0]]},
            "ordinary": lambda dtype: Case({"x": np.ones(2, dtype.numpy)}, np.ones(2)),
        },
    )
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x + x

    assert (doubled.name, doubled.source, doubled.batched, doubled.forward) == (
        "double",
        "arithmetic",
        {"x": 1},
        forward,
    )
    assert doubled.examples["two"](FLOAT32).grad_output.tolist() == [[-1.5, 2.0]]
    assert doubled.examples["ordinary"](FLOAT32)["x"].tolist() == [1.0, 1.0]
    assert "cols_1025" in doubled.examples
    search = Search(examples=10)
    backward_agrees(subject(doubled, doubled), search)
    assert search.substantial > 30


def test_a_strategy_of_cases_takes_the_place_of_what_the_notation_says() -> None:
    @st.composite
    def cases(draw: st.DrawFn, dtype: Any, elements: int) -> Case:
        size = draw(st.integers(1, 3))
        return Case({"x": np.eye(size, dtype=dtype.numpy)}, np.ones((size, size), dtype.numpy))

    @operation(x=tensor("n n"), cases=cases, examples={"two": {"x": [[1.0, 0.0], [0.0, 1.0]]}}, tried=False)
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)

    assert list(inverse.examples) == ["two"]
    assert {case["x"].shape for case in collect(inverse.cases(FLOAT32, 64), 20)} == {(1, 1), (2, 2), (3, 3)}


def test_drawn_numbers_are_those_that_a_kernel_can_take() -> None:
    """0 times infinity, where a kernel has 1e-60 in float32, is not 1e-60 times infinity."""
    numbers = st.sampled_from([0.5, -1e-60, 1e-39, 1e60, float("inf"), 3])

    @operation(x=X, slope=numbers)
    def scaled(x: torch.Tensor, slope: float = 0.5) -> torch.Tensor:
        return x * slope

    slopes = {case.parameters["slope"] for case in collect(scaled.cases(FLOAT32, 8), 60)}
    assert slopes == {0.5, 0.0, float("inf"), 3}


@pytest.mark.parametrize("name", DECLARED)
def test_named_cases_of_few_elements_come_first(name: str) -> None:
    made = named(name)
    sizes = [sum(array.size for array in case.inputs.values()) for case in list(made.values())[1:]]
    assert sizes == sorted(sizes)
    assert next(iter(made)) == "ordinary"
    assert made["ordinary"].grad_output.size
    alike = {repr(case) for case in made.values()}
    assert len(alike) > 0.9 * len(made)


# ---- mistakes in a declaration


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: operation(x=X)(lambda x, y: x), TypeError, "argument y is not declared, and has no default"),
        (lambda: operation(x=X, y=X)(lambda x: x), TypeError, "no argument y, which is declared"),
        (lambda: operation(x=X)(lambda *x: x), TypeError, "argument x cannot be given by its name"),
        (lambda: operation(x=X, y=1e-5)(lambda x, y: x), TypeError, "y must be tensor"),
        (lambda: operation(eps=values(1.0))(lambda eps: eps), TypeError, "none of its arguments is declared"),
        (lambda: operation(x=X, p=st.floats(0, 1))(lambda x, p: x), TypeError, "p needs a default or values"),
        (lambda: operation(x=X, axes={})(lambda x: x), TypeError, "axes follows from the declarations"),
        (lambda: operation(x=X, sizes={"rows": 3})(lambda x: x), ValueError, "sizes: no tensor .* an axis 'rows'"),
        (
            lambda: operation(x=X)(lambda x: x + 1j),
            ValueError,
            "must return one tensor of real numbers, not torch.complex64",
        ),
        (lambda: operation(x=X)(lambda x: x @ x), ValueError, r"<lambda>\(x\[2, 3\]\): RuntimeError: .*mat1"),
        (
            lambda: operation(x=X, w=tensor("cols", optional=True))(lambda x, w: x * w),
            ValueError,
            r"w=None\): TypeError",
        ),
        (
            lambda: operation(x=X, i=tensor("cols", dtype="int64", high="vocab"))(lambda x, i: x),
            ValueError,
            "high of i: no tensor .* an axis 'vocab'",
        ),
        (
            lambda: operation(x=X, examples={"e": {"y": 1}})(lambda x: x).examples["e"](FLOAT32),
            ValueError,
            "no argument y",
        ),
        (lambda: operation(x=X, examples={"e": {}})(lambda x: x).examples["e"](FLOAT32), ValueError, "must give x"),
        (lambda: tensor("... rows ..."), ValueError, r"\.\.\. may stand there once"),
        (lambda: tensor(4), TypeError, "axes must be a string"),  # type: ignore[arg-type]
        (lambda: tensor("n", dtype=4), TypeError, "dtype: expected a dtype"),  # type: ignore[arg-type]
        (lambda: tensor("n", kind="even"), ValueError, "kind must be among"),
        (lambda: tensor("n", dtype="int64", high=3, kind="unit"), ValueError, "kind is for"),
        (lambda: values(), ValueError, "at least one value"),
        (lambda: lengths("a b", total="c"), ValueError, "axis must be the name of one axis"),
        (lambda: offsets("a", total="4"), ValueError, "total must be the name of one axis"),
        (lambda: lengths("a", total="c", dtype="bool"), ValueError, "dtype must be int64 or int32"),
    ],
)
def test_a_mistake_is_told_by_name(declare: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        declare()


def test_every_example_of_the_page_works() -> None:
    page = Path(__file__).parents[2] / "docs" / "declaring.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    made = [each for each in names.values() if isinstance(each, DefinedOperation)]
    assert len(made) >= 9
    for each in made:
        if each.mutates:  # a definition works out of place: it is no implementation
            continue
        search, given = Search(examples=3, brief=True), together(subject(each, each.definition))
        (backward_agrees if given.operation.differentiable else forward_agrees)(given, search)
        assert search.substantial, each.name


# ---- axes


def test_the_notation_gives_shapes_and_recognizes_them() -> None:
    axes = notation.parse("batch+1 ... 4 cols")
    sizes = {"batch": 2, "cols": 7}
    assert notation.shape(axes, sizes, (5, 6)) == (3, 5, 6, 4, 7)
    known: dict[str, Any] = {}
    assert notation.fits(axes, (3, 5, 6, 4, 7), known)
    assert known == {"batch": 2, "cols": 7, "...": (5, 6)}
    for wrong in ((3, 5, 6, 4, 8), (4, 5, 6, 4, 7), (3, 5, 6, 5, 7), (3, 5, 4, 7), (3, 4), (3, 5, 6, 4)):
        assert not notation.fits(axes, wrong, dict(known)), wrong


@pytest.mark.parametrize("name", operations())
def test_the_axes_of_every_record_are_known(name: str) -> None:
    record = operations()[name]
    for make in record.examples.values():
        case = make(FLOAT32)
        assert record.axes.keys() >= case.inputs.keys() >= {*record.differentiable}
        sizes = sizes_of(record, case)
        if name in ("softmax", "layer_norm"):
            assert sizes == {"cols": case["x"].shape[-1]}
        if name == "giou_loss_ragged":
            assert sizes["batch"] == len(case["offsets"]) - 1


def test_sizes_that_do_not_agree_are_told() -> None:
    case = Case({"x": np.ones((2, 3)), "weight": np.ones(4)}, np.ones((2, 3)))
    with pytest.raises(ValueError, match="weight has shape"):
        sizes_of(rms_norm, case)


# ---- with the reference that follows from the definition


@operation(x=tensor("..."), scale=tensor(""), batched={"x": 0})
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@operation(matrix=tensor("4 4"), vector=tensor("4"))
def of_fixed_size(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return matrix @ vector


@operation(x=tensor("rows cols"), kept=tensor("rows", dtype="bool"), factor=tensor("rows cols", gradient=False))
def rows_of_a_number_that_depends(x: torch.Tensor, kept: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x * factor)[kept]


@operation(steps=tensor("n", dtype="int64", low=-3, high=4), size=tensor("n", gradient=False))
def without_gradients(steps: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return steps.to(size.dtype) * size


@pytest.mark.parametrize("made", [scaled, of_fixed_size, rows_of_a_number_that_depends], ids=lambda made: made.name)
@pytest.mark.parametrize("check", [backward_agrees, single_gradients_agree, gradcheck])
def test_tensors_without_axes_of_fixed_size_and_of_a_number_of_rows_that_depends(
    made: DefinedOperation, check: Callable[[Subject, Search], None]
) -> None:
    check(subject(made, made.definition, "float64"), Search(examples=8))


def test_an_operation_without_gradients_has_no_checks_of_them() -> None:
    assert without_gradients.differentiable == ()
    only = subject(without_gradients, without_gradients.definition)
    for check in (forward_agrees, memory_is_respected, history_does_not_matter):
        check(only, Search(examples=8))
    for check in (backward_agrees, single_gradients_agree, gradcheck):
        with pytest.raises(Unsupported, match="without_gradients has no gradients"):
            check(only, Search(examples=8))


def test_a_batch_that_is_given_is_checked() -> None:
    def of_the_batch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale + (0.0 if x.ndim == 0 else 1e-3 * len(x))

    the_batch_does_not_matter(subject(scaled, scaled.definition), Search(examples=8))
    with pytest.raises(Failure, match="among all"):
        the_batch_does_not_matter(subject(scaled, of_the_batch), Search(examples=8))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_workloads_follow(direction: str) -> None:
    for make in rms_norm.workloads["cpu"].values():
        workload = make(FLOAT32)
        assert workload.case["x"].size > 8000
        call = Call(rms_norm, rms_norm, workload, FLOAT32, "cpu", direction)
        call.run(1)
        assert worst_error(call.results, References().of(rms_norm, "", workload, FLOAT32), workload, FLOAT32) <= 1


@pytest.mark.full(but=6)
@pytest.mark.parametrize(
    ("check", "dtype"),
    [
        (forward_agrees, "float32"),
        (backward_agrees, "float32"),
        (single_gradients_agree, "float32"),
        (backward_is_of_the_call, "float32"),
        (memory_is_respected, "float32"),
        (history_does_not_matter, "float32"),
        (gradcheck, "float64"),
    ],
)
@pytest.mark.parametrize("name", sampled(DECLARED, "rms_norm", "ragged_mean"))
def test_the_definition_itself_passes(name: str, check: Callable[[Subject, Search], None], dtype: str) -> None:
    search = Search(examples=8)
    check(subject(DECLARED[name], DECLARED[name].definition, dtype), search)
    assert search.substantial


def cross_entropy_of_all(logits: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(logits, target.long(), reduction="sum", ignore_index=IGNORED)
    return losses if reduction == "sum" else losses / len(target)


# The operation, the mistake and the kernel.
WRONG: list[tuple[str, str, Callable[..., torch.Tensor]]] = [
    ("rms_norm", "no eps", lambda x, weight, eps=1e-6: x * x.square().mean(-1, keepdim=True).rsqrt() * weight),
    ("rms_norm", "no weight", lambda x, weight, eps=1e-6: rms_norm(x, torch.ones_like(weight), eps) + 0 * weight),
    (
        "rms_norm",
        "one column less",
        lambda x, weight, eps=1e-6: x * (x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps).rsqrt() * weight,
    ),
    ("attention", "one block", lambda q, k, v: attention(q, k[:, :, :1024], v[:, :, :1024])),
    ("masked_softmax", "no bias", lambda x, mask, bias=None: masked_softmax(x, mask)),
    ("cross_entropy", "mean of all", cross_entropy_of_all),
    ("embedding", "sorted", lambda ids, table: table[ids.flatten().sort().values].view(*ids.shape, table.shape[1])),
    ("ragged_mean", "full samples", lambda x, counts, starts: ragged_mean(x, counts.clamp(min=1), starts)),
    ("matmul", "one block", lambda a, b: a[:, :1024] @ b[:1024]),
]


@pytest.mark.full(but=3)
@pytest.mark.parametrize(("name", "mistake", "wrong"), WRONG, ids=[f"{name}: {mistake}" for name, mistake, _ in WRONG])
def test_a_wrong_kernel_is_rejected(name: str, mistake: str, wrong: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(Failure, match=r"output\[.*\] is"):
        forward_agrees(subject(DECLARED[name], wrong), Search(examples=8))


def test_a_gradient_is_asked_for_where_an_optional_input_is_there_only() -> None:
    def forgetful(x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return masked_softmax(x, mask, bias if bias is None else (bias + bias.detach()) / 2)

    with pytest.raises(Failure, match="gradient of bias"):
        backward_agrees(subject(masked_softmax, forgetful), Search(examples=8))


def test_what_says_nothing_does_not_pass() -> None:
    cases = list(named("masked_softmax").values())
    assert not impostors.accepted_impostors(
        masked_softmax, FLOAT32, [case for case in cases if case.grad_output.size < 2000]
    )


# ---- the package


def test_public_names_are_imported_when_they_are_asked_for() -> None:
    code = "import sys, fourfold; assert 'torch' not in sys.modules and 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("operation", "tensor", "values", "lengths", "offsets"):
        assert callable(getattr(fourfold, name))
        assert name in dir(fourfold)
    with pytest.raises(AttributeError, match="has no attribute 'operating'"):
        _ = fourfold.operating


# ---- history: other numbers that are declared


def log_probabilities(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return rows whose exponentials sum to 1."""
    drawn = rng.normal(0, 2, shape)
    return np.asarray(drawn - np.log(np.exp(drawn).sum(-1, keepdims=True)))


@operation(
    x=tensor("rows cols", make=log_probabilities),
    target=tensor("rows cols", kind="probabilities"),
    sizes={"cols": (1, 40), "rows": (0, 20)},
)
def kl_divergence(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.where(target > 0, target * (target.clamp(min=1e-30).log() - x), 0.0).sum(-1)


@operation(
    x=tensor("rows cols"),
    index=tensor("picks", dtype=["int64", "int32"], high="rows", also=[-1]),
    counts=lengths("batch", total="picks"),
    sizes={"cols": (1, 20), "rows": (1, 20), "picks": (0, 20)},
)
def picked_rows(x: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    taken = x[index.clamp(min=0).long()]
    return torch.where((index == -1)[:, None], 0.0, taken) + 0 * counts.sum()


@pytest.mark.full
def test_probabilities_sum_to_one_in_every_layout() -> None:
    of_all_pairs = [each.case for each in combined_cases(LargeCases(kl_divergence, NO_CLAIMS, FLOAT32))]
    seen = set()
    for case in (*all_cases(kl_divergence, ELEMENTS, DRAWS), *of_all_pairs):
        seen.add(case.layouts.get("target", "contiguous"))
        for name in ("x", "target"):
            array = case.tensor(name, FLOAT32, "cpu").double().numpy()
            sums = (np.exp(array) if name == "x" else array).sum(-1)
            assert np.allclose(sums, 1, atol=1e-5, rtol=0), case
    assert len(seen) > len(LAYOUTS)
    assert of_all_pairs


def histories(made: DefinedOperation, implementation: Callable[..., Any]) -> Search:
    search = Search(examples=32)
    history_does_not_matter(subject(made, implementation), search)
    return search


def test_other_numbers_of_an_index_without_axes_are_a_tensor_too() -> None:
    case = Case({"ids": np.array(1), "table": np.ones((3, 2), np.float32)}, np.ones(2, np.float32))
    one = replace(embedding, cases=lambda dtype, elements: st.just(case), examples={})
    assert histories(one, embedding.definition).substantial


def test_other_calls_have_numbers_that_are_declared() -> None:
    """A kernel gets probabilities that sum to 1, and integers in their range, whatever is written between calls."""
    seen = []

    def watching(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        parts = (x.detach().double().exp(), target.detach().double())
        seen.extend(float((part.sum(-1) - 1).abs().max()) for part in parts if part.numel())
        return kl_divergence(x, target)

    search = histories(kl_divergence, watching)
    assert search.substantial
    assert len(seen) > 50
    assert max(seen) < 1e-5

    ranges = set()

    def of_rows(x: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert int(counts.sum()) == len(index)
        assert bool(((index >= -1) & (index < len(x))).all())
        ranges.update(index.tolist())
        return picked_rows(x, index, counts)

    assert histories(picked_rows, of_rows).substantial
    assert {-1, 0, 1} <= ranges


def test_integers_of_an_earlier_call_are_found() -> None:
    kept: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def with_former_index(x: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        key = (index.data_ptr(), len(index), len(x))
        # Keep the tensor as well, so that no other one gets its memory.
        _, former = kept.setdefault(key, (index, index.clone()))
        return picked_rows(x, former, counts)

    with pytest.raises(Failure, match="after other values were written into its inputs"):
        histories(picked_rows, with_former_index)


@pytest.mark.full
def test_other_numbers_keep_the_layout_and_the_shape_of_the_output() -> None:
    for name in DECLARED:
        for case in cases_of(name)[:30]:
            other = DECLARED[name].redraw_numbers(case)
            assert other.layouts == case.layouts
            assert {n: (a.shape, a.dtype) for n, a in other.inputs.items()} == {
                n: (a.shape, a.dtype) for n, a in case.inputs.items()
            }
            out = DECLARED[name](**other.tensors(FLOAT32, "cpu"), **other.parameters)
            assert tuple(out.shape) == case.grad_output.shape
