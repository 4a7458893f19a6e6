"""Known calls repeat the recorded call, tested with a GPU that is simulated in the CPU's memory."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fourfold.impls.adam.cuda_kernel import SOURCE
from fourfold.impls.adam.operators import Factors, factors_of, register
from triton.tools.tensor_descriptor import TensorDescriptor

from fourfold.backends import known_calls, launch_records
from fourfold.backends.cuda import launch as cuda_launch
from fourfold.backends.cuda.parameters import KernelParameter, LoadedKernel
from fourfold.backends.operators import Operator, bypass_dispatcher, define
from fourfold.backends.signature import flag, number, signature, signature_of, tensor
from fourfold.backends.triton import launch as triton_launch
from fourfold.compat import torch_internals, triton_internals

DECIDED = 2  # how many calls of a kind run the implementation: the first, and the recorded one


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every tensor as one on GPU 0."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_internals, "current_stream", lambda device: 7)
    empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch_internals, "empty_on_current_gpu", empty)


def numbers(address: int, count: int) -> "ctypes.Array[ctypes.c_float]":
    return (ctypes.c_float * count).from_address(address)


class Operation:
    """An operation that scales x by a kernel that gets addresses, like a launch on a GPU."""

    def __init__(self, also: Callable[[torch.Tensor, torch.Tensor], None] = lambda x, output: None) -> None:
        self.decided = self.launched = 0
        self._also = also
        self.usable = True
        self.call = known_calls.Repeater(self.run, (0,), lambda: self.usable)

    def _launch(self, source: int, target: int, count: int, factor: float) -> None:
        self.launched += 1
        for i in range(count):
            numbers(target, count)[i] = factor * numbers(source, count)[i]

    def run(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        self.decided += 1
        output = torch.empty(x.shape, dtype=x.dtype)
        self._launch(x.data_ptr(), output.data_ptr(), x.numel(), factor)
        if (recorder := known_calls.recorder()) is not None:
            recorder.record_launch(self._again(x.data_ptr(), output.data_ptr(), x.numel(), factor))
        self._also(x, output)
        return output

    def _again(
        self, source: int, target: int, count: int, factor: float
    ) -> Callable[[known_calls.CallPlaces], known_calls.Launch]:
        def again(call_places: known_calls.CallPlaces) -> known_calls.Launch:
            places = call_places.find_address(source), call_places.find_address(target)

            def launch(addresses: Sequence[int], stream: int) -> None:
                assert stream == 7
                self._launch(addresses[places[0]], addresses[places[1]], count, factor)

            return launch

        return again


def calls(operation: Operation, *arguments: tuple[torch.Tensor, float]) -> int:
    """Return the number of calls that ran the implementation. Each result is checked."""
    before, launched = operation.decided, operation.launched
    for x, factor in arguments:
        assert torch.equal(operation.call(x, factor), x * factor)
    assert operation.launched == launched + len(arguments)
    return operation.decided - before


def test_the_third_call_of_a_kind_repeats_the_launches_on_its_own_tensors() -> None:
    assert calls(Operation(), *[(torch.randn(4, 3), 2.0) for _ in range(6)]) == DECIDED


@pytest.mark.parametrize(
    "other",
    [
        (torch.randn(3, 4), 2.0),
        (torch.randn(4, 3).t().contiguous().t(), 2.0),
        (torch.randn(4, 3), 3.0),
        (torch.randn(13)[1:].view(4, 3), 2.0),
    ],
    ids=["shape", "strides", "number", "alignment"],
)
def test_a_call_of_another_kind_decides_anew(other: tuple[torch.Tensor, float]) -> None:
    operation = Operation()
    calls(operation, *[(torch.randn(4, 3), 2.0)] * 3)
    before = operation.decided
    operation.call(*other)
    assert operation.decided == before + 1


@pytest.mark.parametrize(
    "also",
    [
        lambda x, output: output.add_(0),
        lambda x, output: x.clone(),
        lambda x, output: known_calls.recorder() and known_calls.recorder().refuse(),
    ],
    ids=["written", "copied", "refused"],
)
def test_a_call_that_does_more_than_launch_is_never_repeated(also: Callable) -> None:
    assert calls(Operation(also), *[(torch.randn(4, 3), 2.0) for _ in range(5)]) == 5


def test_views_and_dtypes_do_not_keep_a_call_from_being_repeated() -> None:
    for also in (lambda x, output: x.t(), lambda x, output: torch.promote_types(x.dtype, torch.float64)):
        assert calls(Operation(also), *[(torch.randn(4, 3), 2.0) for _ in range(5)]) == DECIDED


def test_kinds_whose_first_tensors_have_one_shape_take_turns() -> None:
    operation, factors = Operation(), (2.0, 3.0, 0.0, -0.0)
    assert calls(operation, *[(torch.randn(4, 3), factor) for _ in range(4) for factor in factors]) == 4 * DECIDED


def test_a_negative_zero_is_of_another_kind_than_a_zero() -> None:
    operation = Operation()
    for factor in (0.0, 0.0, 0.0, -0.0):
        decided = operation.decided
        result = operation.call(torch.ones(4, 3), factor)
        assert torch.signbit(result).all() == (str(factor) == "-0.0")
    assert operation.decided == decided + 1 == DECIDED + 1


def test_no_call_is_repeated_where_configurations_are_forced() -> None:
    operation = Operation()
    calls(operation, *[(torch.randn(4, 3), 2.0)] * 3)
    operation.usable = False
    assert calls(operation, (torch.randn(4, 3), 2.0)) == 1


def test_no_call_is_repeated_where_another_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation()
    calls(operation, *[(torch.randn(4, 3), 2.0)] * 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert calls(operation, (torch.randn(4, 3), 2.0)) == 1


def test_one_tensor_given_twice_does_not_stand_for_two() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape)
        values = [a + b for a, b in zip(numbers(x.data_ptr(), 3), numbers(y.data_ptr(), 3))]
        numbers(output.data_ptr(), 3)[:] = values
        if (recorder := known_calls.recorder()) is not None:
            recorder.record_launch(lambda places: again(*[places.find_address(z.data_ptr()) for z in (x, y, output)]))
        return output

    def again(x: int, y: int, output: int) -> known_calls.Launch:
        def launch(addresses: Sequence[int], stream: int) -> None:
            values = [a + b for a, b in zip(numbers(addresses[x], 3), numbers(addresses[y], 3))]
            numbers(addresses[output], 3)[:] = values

        return launch

    call = known_calls.Repeater(add, (0, 1), lambda: True)
    same = torch.randn(3)
    call(same, same)
    call(same, same)
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(call(x, y), x + y)
    assert torch.equal(call(x, y), x + y)


def test_what_is_provided_is_asked_for_anew() -> None:
    counters = [torch.zeros(1), torch.zeros(1)]

    def count(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(1)
        recorder = known_calls.recorder()
        if recorder is not None:
            recorder.provide(counters[0], lambda: counters[1])
            recorder.record_launch(lambda places: bump(places.find_address(counters[0].data_ptr())))
        return output

    def bump(place: int) -> known_calls.Launch:
        def launch(addresses: Sequence[int], stream: int) -> None:
            numbers(addresses[place], 1)[0] += 1

        return launch

    call = known_calls.Repeater(count, (0,), lambda: True)
    for _ in range(4):
        call(torch.ones(2))
    assert [c.item() for c in counters] == [0, 2]


CHECKED: list[float] = []


@signature(lambda x, factor: CHECKED.append(factor), x=tensor("..."), factor=number(2.0))
def known_scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


OPERATION = Operation()
SCALE = signature_of(known_scale).checked(
    Operator(
        schema="known_scale(Tensor x, float factor) -> Tensor output",
        fake=lambda x, factor: torch.empty_like(x),
        saves=("factor",),
        gradients={"x": "grad_output"},
        repeats=True,
    ).register("cpu", OPERATION.run, lambda grad_output, factor: grad_output * factor)
)


@pytest.mark.parametrize("grad", [False, True], ids=["no_gradient", "gradient"])
def test_a_known_call_is_not_checked_again(grad: bool) -> None:
    shape = (4, 3 + grad)
    checked, decided = [], OPERATION.decided
    for factor in (2.0, 2.0, 2.0, 3.0, 2.0):
        CHECKED.clear()
        x = torch.randn(shape, requires_grad=grad)
        output = SCALE(x, factor)
        assert torch.equal(output, x * factor)
        assert output.requires_grad == grad
        if grad:
            (gradient,) = torch.autograd.grad(output.sum(), x)
            assert torch.equal(gradient, torch.full(shape, factor))
        checked.append(bool(CHECKED))
    assert checked == [True, True, False, True, False]
    assert OPERATION.decided == decided + DECIDED + 1


class Watch(torch_internals.dispatch_mode()):  # type: ignore[misc]
    """A mode that sees each operator."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["mode", "negative", "vmap", "record"])
def test_a_known_call_that_must_be_seen_is_not_repeated(how: str) -> None:
    x = torch.randn(5, 2)
    for _ in range(DECIDED + 1):
        SCALE(x, 2.0)
    decided = OPERATION.decided
    SCALE(x, 2.0)
    assert OPERATION.decided == decided
    if how == "mode":
        with Watch():
            output = SCALE(x, 2.0)
    elif how == "negative":
        output = -SCALE(torch._neg_view(x), 2.0)
    elif how == "vmap":
        output = torch.vmap(lambda row: SCALE(row, 2.0))(x.expand(1, 5, 2))[0]
    else:
        with launch_records.recording(lambda tensor: None):
            output = SCALE(x, 2.0)
    assert torch.equal(output, 2 * x)
    assert OPERATION.decided == decided + 1


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
def test_an_operator_without_gradients_is_repeated_unless_one_is_needed() -> None:
    operation = Operation()
    schema = "known_constant(Tensor x, float factor) -> Tensor"
    operator = define(schema, operation.run, lambda x, factor: torch.empty_like(x), repeats=True)
    call = signature_of(known_scale).checked(bypass_dispatcher(operator))
    for grad, decided in ((False, 1), (False, 2), (False, 2), (True, 3), (True, 4), (True, 5), (False, 5)):
        x = torch.ones(3, requires_grad=grad)
        assert torch.equal(call(x, 2.0), 2 * x)
        assert operation.decided == decided


def test_a_call_that_cannot_be_repeated_is_not_checked_again_either() -> None:
    operation = Operation(lambda x, output: x.clone())
    operator = define("known_copy(Tensor x, float factor) -> Tensor", operation.run, lambda x, factor: x, repeats=True)
    call, checked = signature_of(known_scale).checked(bypass_dispatcher(operator)), []
    for _ in range(4):
        CHECKED.clear()
        call(torch.ones(3), 2.0)
        checked.append(bool(CHECKED))
    assert checked == [True, True, False, False]
    assert operation.decided == 4


def test_a_call_whose_tensors_require_gradients_is_of_another_kind() -> None:
    x = torch.randn(7)
    for _ in range(DECIDED + 1):
        SCALE(x, 2.0)
    CHECKED.clear()
    SCALE(x.requires_grad_(), 2.0)
    assert CHECKED


def test_a_wrong_call_is_refused_although_others_are_known() -> None:
    for _ in range(DECIDED + 1):
        SCALE(torch.ones(6), 2.0)
    with pytest.raises(TypeError, match="x must be float16"):
        SCALE(torch.ones(6, dtype=torch.int32), 2.0)
    with pytest.raises(TypeError, match="x must be a tensor"):
        SCALE([1.0], 2.0)


@signature(x=tensor("..."), y=tensor("..."), again=flag())
def known_sum(x: torch.Tensor, y: torch.Tensor, again: bool = False) -> torch.Tensor:
    return x + y


def test_arguments_of_other_types_are_refused_although_calls_with_equal_ones_are_known() -> None:
    def run(x: torch.Tensor, y: torch.Tensor, again: bool) -> torch.Tensor:
        return torch.empty(x.shape)

    schema = "known_sum(Tensor x, Tensor y, bool again) -> Tensor"
    operator = define(schema, run, lambda x, y, again: torch.empty_like(x), repeats=True)
    call = signature_of(known_sum).checked(bypass_dispatcher(operator))
    x = torch.ones(6)
    for _ in range(DECIDED + 1):
        call(x, x.clone(), True)
    shaped = SimpleNamespace(shape=[6])
    for wrong in ((x, [1.0] * 6, True), (x, None, True), (x, x.clone(), 1), (None, x, True), (shaped, x, True)):
        with pytest.raises(TypeError, match="must be"):
            call(*wrong)


# ---- the scratch, which holds what nobody gets


@signature(x=tensor("..."))
def known_norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum()


class Norm:
    """An operation of several results, whose kernel gets their addresses and those of temporary tensors.

    Args:
        name: of the operator, all of whose results have gradients.
        public: the index of the results that callers get.
    """

    def __init__(self, name: str, public: int | slice | None) -> None:
        self.allocated: list[torch.Tensor] = []
        self.passed: list[tuple[int, ...]] = []
        schema = f"{name}(Tensor x) -> (Tensor output, Tensor sum, Tensor twice, Tensor none)"
        names = dict.fromkeys(("saves", "cotangents"), ("output", "sum", "twice"))
        operator = Operator(
            schema=schema, fake=self._empty, gradients={"x": "output"}, repeats=True, public=public, **names
        )
        backward = lambda grad, more, others, output, sum, twice: grad / sum  # noqa: E731
        forward = lambda x: self.run(x)  # noqa: E731
        self.call = signature_of(known_norm).checked(operator.register("cpu", forward, backward))

    def _empty(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(x), torch.empty(1), torch.empty(200), torch.empty(0)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (output, total, twice, none), temporary = self._empty(x), (torch.empty(130), torch.empty((0, 3)))
        tensors = x, temporary[0], twice, output, total, none, temporary[1]
        if (recorder := known_calls.recorder()) is not None:
            recorder.record_launch(lambda places: self._again([places.find_address(t.data_ptr()) for t in tensors]))
        self._launch(*[tensor.data_ptr() for tensor in tensors])
        return output, total, twice, none

    def _again(self, places: list[int]) -> known_calls.Launch:
        def launch(values: Sequence[int], stream: int) -> None:
            given = tuple(values[place] for place in places)
            self.passed.append(given)
            self._launch(*given)

        return launch

    def _launch(self, x: int, temporary: int, twice: int, output: int, total: int, *empty: int) -> None:
        assert empty == (0, 0)
        numbers(temporary, 130)[:] = [7.0] * 130
        numbers(twice, 200)[:] = [2.0] * 200
        numbers(total, 1)[0] = sum(numbers(x, 3))
        numbers(output, 3)[:] = [value / numbers(total, 1)[0] for value in numbers(x, 3)]
        assert list(numbers(temporary, 130)) == [7.0] * 130
        assert list(numbers(twice, 200)) == [2.0] * 200

    def repeated(self, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> tuple[Any, list[torch.Tensor], list[int]]:
        """Return the results of a repeated call, what it allocates, and the addresses that its kernel gets.

        They are those of temporary, twice, output and total.
        """
        for _ in range(DECIDED):
            self.call(x)
        made, empty = [], torch_internals.empty_on_current_gpu
        keep = lambda *form: made.append(empty(*form)) or made[-1]  # noqa: E731
        monkeypatch.setattr(torch_internals, "empty_on_current_gpu", keep)
        results = self.call(x)
        ((_, *addresses, _, _),) = self.passed
        return results, made, addresses


X = torch.tensor([1.0, 2.0, 5.0])


def allocated_bytes(made: list[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in made]


def test_results_that_nobody_gets_share_an_allocation_with_temporary_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    result, made, addresses = Norm("known_norm_first", 0).repeated(monkeypatch, X)
    assert torch.equal(result, X / 8)
    assert allocated_bytes(made) == [12, 512 + 1024 + 1024]
    temporary, twice, output, total = addresses
    assert output == result.data_ptr() == made[0].data_ptr()
    assert sorted(address - made[1].data_ptr() for address in (temporary, twice, total)) == [0, 512, 512 + 1024]


def test_each_of_several_public_results_is_a_tensor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (output, total), made, addresses = Norm("known_norm_two", slice(2)).repeated(monkeypatch, X)
    assert torch.equal(output, X / 8)
    assert torch.equal(total, torch.tensor([8.0]))
    assert allocated_bytes(made) == [12, 4, 1024 + 1024]
    assert addresses[2:] == [output.data_ptr(), total.data_ptr()]
    assert sorted(address - made[2].data_ptr() for address in addresses[:2]) == [0, 1024]


def test_temporary_tensors_share_an_allocation_where_all_results_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    (output, total, twice, none), made, addresses = Norm("known_norm_all", None).repeated(monkeypatch, X)
    assert torch.equal(output, X / 8)
    assert torch.equal(twice, torch.full((200,), 2.0))
    assert none.shape == (0,)
    assert allocated_bytes(made) == [12, 4, 800, 0, 1024]
    assert addresses == [made[4].data_ptr(), twice.data_ptr(), output.data_ptr(), total.data_ptr()]


def test_saved_results_are_tensors_of_their_own_where_a_gradient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = Norm("known_norm_saved", 0), X.clone().requires_grad_()
    result, made, (_, twice, output, total) = norm.repeated(monkeypatch, x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, torch.full((3,), 1 / 8))
    assert [output, total, twice] == [tensor.data_ptr() for tensor in made[:3]]
    assert allocated_bytes(made) == [12, 4, 800, 0, 1024]
    with torch.no_grad():
        assert torch.equal(norm.call(x), X / 8)
    assert allocated_bytes(made[5:]) == [12, 512 + 1024 + 1024]


def test_public_results_of_a_call_that_is_never_repeated() -> None:
    norm = Norm("known_norm_copied", 0)
    run = norm.run
    norm.run = lambda x: run(x.clone())
    for _ in range(DECIDED + 2):
        assert torch.equal(norm.call(X), X / 8)
    assert not norm.passed


def test_tensors_without_elements_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = known_calls.Repeater(lambda x: (torch.empty((0, 3)), torch.empty(2))[1], (0,), lambda: True), []
    empty = torch_internals.empty_on_current_gpu
    monkeypatch.setattr(torch_internals, "empty_on_current_gpu", lambda *form: made.append(form) or empty(*form))
    for _ in range(DECIDED + 1):
        assert call(X).shape == (2,)
    assert made == [((2,), (1,), torch.float32)]


def test_a_call_that_returns_a_part_of_an_argument_is_never_repeated() -> None:
    call = known_calls.Repeater(lambda x: x[1:], (0,), lambda: True)
    for _ in range(DECIDED + 2):
        assert torch.equal(call(X), X[1:])


# ---- numbers in which calls of a kind may differ


class Varying(Operation):
    """An operation whose calls of a kind may differ in the factor."""

    def __init__(self, passed: Callable[[float], float] = lambda factor: factor) -> None:
        super().__init__()
        self._passed = passed
        self.call = known_calls.Repeater(self.run, (0,), lambda: True, numbers=(1,))

    def run(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return super().run(x, self._passed(factor))

    def _again(
        self, source: int, target: int, count: int, factor: float
    ) -> Callable[[known_calls.CallPlaces], known_calls.Launch]:
        place = known_calls.recorder().place_of_number(factor)

        def again(call_places: known_calls.CallPlaces) -> known_calls.Launch:
            places = call_places.find_address(source), call_places.find_address(target)

            def launch(values: Sequence[float], stream: int) -> None:
                self._launch(values[places[0]], values[places[1]], count, factor if place is None else values[place])

            return launch

        return again


def test_calls_of_a_kind_may_differ_in_the_numbers_that_kernels_get() -> None:
    assert calls(Varying(), *[(torch.randn(4, 3), factor) for factor in (2.0, 2.0, 3.0, 0.0, -1.0)]) == DECIDED


def test_an_integer_in_place_of_such_a_number_is_of_another_kind() -> None:
    assert calls(Varying(), *[(torch.randn(4, 3), factor) for factor in (2.0, 2.0, 3.0, 3)]) == DECIDED + 1


def test_an_integer_in_place_of_such_a_number_is_passed_again() -> None:
    assert calls(Varying(), *[(torch.randn(4, 3), 3) for _ in range(4)]) == DECIDED


def test_a_number_that_the_implementation_computes_with_keeps_a_call_from_being_repeated() -> None:
    doubled = Varying(lambda factor: 2 * factor)
    for factor in (2.0, 2.0, 3.0, 4.0):
        assert torch.equal(doubled.call(torch.ones(3), factor), torch.full((3,), 2 * factor))
    assert doubled.decided == 4


def launched_again(monkeypatch: pytest.MonkeyPatch, launch: Callable[[float], None]) -> None:
    """Record a launch that gets the number 2.0, and launch it again with 0.25 and the same tensors."""
    factor = float("2")
    recorder = known_calls.CallRecorder([TENSOR, factor], [factor])
    monkeypatch.setattr(known_calls, "recorder", lambda: recorder)
    launch(factor)
    recorder.repeatable_actions(None).repeat([TENSOR.data_ptr(), 0.25])


TENSOR = torch.ones(3)


@pytest.fixture
def launched_by_triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return a list of the arguments of Triton's repeated launches. Every launch is a known one."""
    passed: list[tuple] = []
    relauncher = lambda compiled, grid: lambda given, stream: passed.append((stream, *given))  # noqa: E731
    monkeypatch.setattr(triton_internals, "relauncher", relauncher)
    monkeypatch.setattr(triton_internals, "entry_of", lambda compiled: None)
    monkeypatch.setattr(triton_internals, "shape_of", lambda compiled: triton_internals.Shape(64, 128, 1, (), "sm_90"))
    monkeypatch.setattr(triton_internals, "launch_compiled", lambda compiled, grid, given, stream: None)
    monkeypatch.setattr(triton_launch, "launch_key", lambda *given: "key")
    monkeypatch.setattr(triton_launch, "_LEFT_TO_TRITON", False)
    monkeypatch.setitem(triton_launch._compiled, "key", (None, (8,)))
    return passed


def test_triton_launches_again_with_the_numbers_of_a_call(
    monkeypatch: pytest.MonkeyPatch, launched_by_triton: list[tuple]
) -> None:
    launched_again(monkeypatch, lambda factor: triton_launch.launch(None, (1,), (TENSOR,), (3, factor, 2.0), BLOCK=8))
    assert launched_by_triton == [(7, TENSOR.data_ptr(), 3, 0.25, 2.0, 8)]


@pytest.fixture
def launched_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return a list of what torch's launcher gets: the kernel's part, then the arguments and the stream."""
    passed: list[tuple] = []
    launcher = lambda *kernel: lambda *given: passed.append((*kernel, *given))  # noqa: E731
    monkeypatch.setattr(torch_internals, "launcher", launcher)
    return passed


def test_torch_launches_triton_kernels_again_unless_a_hook_sees_launches(
    monkeypatch: pytest.MonkeyPatch, launched_by_triton: list[tuple], launched_by_torch: list[tuple]
) -> None:
    entry, hooked = triton_internals.EntryPoint(99, (0, 2, 3), "OffOO"), []
    monkeypatch.setattr(triton_internals, "entry_of", lambda compiled: entry)
    monkeypatch.setattr(triton_internals, "hook_check", lambda: lambda: bool(hooked))
    launch = lambda factor: triton_launch.launch(None, (5,), (TENSOR,), (3, factor, 2.0), BLOCK=8)  # noqa: E731
    launched_again(monkeypatch, launch)
    assert launched_by_torch == [(99, (5, 1, 1), (64, 1, 1), 128, "OffOO", (TENSOR.data_ptr(), 0.25, 2.0, 0, 0), 7)]
    assert not launched_by_triton
    hooked.append(True)
    launched_again(monkeypatch, launch)
    assert launched_by_triton == [(7, TENSOR.data_ptr(), 3, 0.25, 2.0, 8)]
    assert len(launched_by_torch) == 1


def test_triton_launches_again_with_descriptors_of_the_tensors_of_a_call(launched_by_triton: list[tuple]) -> None:
    def copy_rows(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        given = TensorDescriptor.from_tensor(x, [4, 8]), TensorDescriptor.from_tensor(output, [2, 8], padding="nan")
        triton_launch.launch(None, (1,), given, (3,), BLOCK=8)
        return output

    repeated, tensors = known_calls.Repeater(copy_rows, (0,), lambda: True), torch.randn(4, 8, 16)
    outputs = [repeated(x) for x in tensors]
    kept = weakref.ref(outputs[1])
    assert len(launched_by_triton) == 4 - DECIDED
    for x, output, (stream, source, target, *others) in zip(tensors[2:], outputs[2:], launched_by_triton):
        assert (stream, others) == (7, [3, 8])
        assert [source.base.data_ptr(), target.base.data_ptr()] == [x.data_ptr(), output.data_ptr()]
        assert [*source.shape, *source.strides] == [8, 16, 16, 1]
        assert (source.block_shape, source.padding) == ([4, 8], "zero")
        assert (target.block_shape, target.padding) == ([2, 8], "nan")
    del outputs
    assert kept() is None, "the recorded call's tensor is kept alive"


def test_calls_under_another_setting_are_of_another_kind() -> None:
    setting, seen = ["ieee"], []
    repeated = known_calls.Repeater(lambda x: seen.append(setting[0]), (0,), lambda: True, setting=lambda: setting[0])
    for name in ("ieee", "ieee", "ieee", "tf32", "tf32", "tf32", "ieee"):
        setting[0] = name
        repeated(torch.ones(3))
    assert seen == ["ieee", "ieee", "tf32", "tf32"]


@pytest.fixture
def scale_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple]]:
    """Return a function that launches a kernel, launches it again, and returns what cuda-core gets.

    It takes the cluster, and the launched kernel's arguments as a function of a number that a later call replaces.
    """

    def launches(cluster: tuple[int, ...] | None, arguments: Callable[[float], tuple]) -> list[tuple]:
        passed: list[tuple] = []
        core = SimpleNamespace(launch=lambda stream, config, handle, *values: passed.append(values))
        config = SimpleNamespace(cluster=cluster, grid=(4, 2, 1), block=(96, 1, 1), shmem_size=256)
        types = ("float*", 8), ("float", 4), ("double", 8), ("unsigned long", 8)
        parameters = [KernelParameter.from_type(*spelling) for spelling in types]
        scale = LoadedKernel("scale", parameters, None)
        loaded = SimpleNamespace(
            conversions={},
            check=lambda given: (1, 3),
            convert=scale.convert,
            handle=SimpleNamespace(handle=99),
            allowed_shared_bytes=0,
            parameters=parameters,
        )
        monkeypatch.setattr(cuda_launch, "_core", lambda: core)
        monkeypatch.setattr(cuda_launch, "_stream", lambda device, stream: stream)
        monkeypatch.setattr(cuda_launch, "_config", lambda *given: config)
        kernel = cuda_launch.CudaKernel(SOURCE, "adam_kernel<float, 4>")
        monkeypatch.setattr(kernel, "_gpu_kernel", lambda device: loaded)
        launched_again(monkeypatch, lambda factor: kernel.launch(1, 32, *arguments(factor)))
        return passed

    return launches


SECOND = 2**64 - 1


def test_cuda_launches_again_with_the_converted_numbers_of_a_call(
    scale_kernel: Callable[..., list[tuple]], launched_by_torch: list[tuple]
) -> None:
    passed = scale_kernel((2, 1, 1), lambda factor: (TENSOR, factor, factor, SECOND))
    assert passed == [(TENSOR.data_ptr(), 2.0, 2.0, SECOND), (TENSOR.data_ptr(), 0.25, 0.25, SECOND)]
    assert [type(value) for value in passed[1]] == [int, np.float32, float, np.uint64]
    assert not launched_by_torch  # a launcher without clusters


@pytest.mark.parametrize(
    ("spelling", "size", "letter"),
    [
        *[("float const*", 8, "O"), ("float", 4, "f"), ("double", 8, "d"), ("bool", 1, "B"), ("__half", 2, "H")],
        *[("short", 2, "h"), ("int", 4, "i"), ("long", 8, "l"), ("unsigned short", 2, "H"), ("unsigned int", 4, "I")],
        *[("unsigned long", 8, "K"), ("__nv_bfloat16", 2, "H"), ("TensorMap", 128, None), ("Plan", 8, None)],
    ],
)
def test_letters_of_the_types_that_torch_passes(spelling: str, size: int, letter: str | None) -> None:
    assert KernelParameter.from_type(spelling, size).type_letter == letter


def test_torch_launches_cuda_kernels_again(
    scale_kernel: Callable[..., list[tuple]], launched_by_torch: list[tuple]
) -> None:
    assert len(scale_kernel(None, lambda factor: (TENSOR, factor, factor, SECOND))) == 1
    ((*form, arguments, stream),) = launched_by_torch
    assert form == [99, (4, 2, 1), (96, 1, 1), 256, "OfdK"]
    assert arguments == (TENSOR.data_ptr(), 0.25, 0.25, SECOND)
    assert type(arguments[3]) is int
    assert stream == 7


def test_a_known_step_of_adam_is_checked_counted_and_made_with_its_own_numbers() -> None:
    def again(
        call_places: known_calls.CallPlaces, tensors: tuple[torch.Tensor, ...], places: list
    ) -> known_calls.Launch:
        indices = [call_places.find_address(tensor.data_ptr()) for tensor in tensors]

        def launch(values: Sequence[float], stream: int) -> None:
            update(*[numbers(values[i], 3) for i in indices], *[values[place] for place in places])

        return launch

    def update(param, grad, m, v, *factors: float) -> None:  # type: ignore[no-untyped-def]
        for i in range(3):
            param[i] = factors[0] * param[i] - factors[1] * grad[i]
            m[i] += factors[4]

    def launch(*given) -> None:  # type: ignore[no-untyped-def]
        *tensors, factors = given
        recorder = known_calls.recorder()
        if recorder is None:
            decided.append(factors)
        else:
            places = [recorder.place_of_number(factor) for factor in factors]
            recorder.record_launch(lambda call_places: again(call_places, tensors, places))
        update(*[numbers(tensor.data_ptr(), 3) for tensor in tensors], *factors)

    decided: list[Factors] = []
    adam = register("known", launch)
    param, m, v = (torch.ones(3) for _ in range(3))
    expected, mean = torch.ones(3), torch.ones(3)
    for step in (1, 1, 1, 2, 2, 3):
        given, grad = [tensor.clone() for tensor in (param, m, v)], torch.randn(3)
        versions = [tensor._version for tensor in given]
        assert adam(given[0], grad, *given[1:], lr=0.5, beta1=0.25, step=step) == tuple(given)
        assert [tensor._version for tensor in given] == [version + 1 for version in versions]
        param, m, v = given
        factors = factors_of(0.5, 0.25, 0.999, 1e-8, 0.0, step)
        expected, mean = factors.kept * expected - factors.rate * grad, mean + 0.25
        assert torch.allclose(param, expected)
        assert torch.equal(m, mean)
    assert len(decided) == 1  # the first one: the second was recorded
    for numbers_of_call, error in (({"step": 0}, ValueError), ({"lr": -1.0}, ValueError), ({"step": True}, TypeError)):
        with pytest.raises(error):
            adam(param, param.clone(), m, v, **numbers_of_call)
