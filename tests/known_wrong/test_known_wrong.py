"""The intended check rejects each known wrong implementation, and all checks accept the right ones."""

import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import pathlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from triton import TritonError

from fourfold import backends
from fourfold.backends.cuda import compile as cuda_compile
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda import launch as cuda_launch
from fourfold.checks import many_calls
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.records import operations
from fourfold.checks.search import Search, Subject
from fourfold.inputs.constants import constants_of
from fourfold.inputs.large_cases import LargeCases
from fourfold.instruments import tampering
from fourfold.instruments.redzones import POISONS, Arena
from fourfold.numerics.bounded import OPEN, Bounded
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.outputs import READS_BACK, alone, read_back
from fourfold.operations.record import Operation

from . import published
from .controls import CONTROLS, Control
from .edits import EditError, apply_edit, changed_texts, edited
from .generic import faults_of
from .planted import Check, Fault

EXAMPLES = 50
OPERATIONS = operations()
# Collect the faults of every module in this folder: an operation adds its faults with a file.
FAULTS = tuple(
    fault
    for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)])
    if module.name.startswith("planted")
    for fault in getattr(importlib.import_module(f".{module.name}", __package__), "FAULTS", ())
)


# Every operation has generic faults, even without planted ones.
GENERIC = tuple(fault for operation in OPERATIONS.values() for fault in faults_of(operation))


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """Use the same cases every time and do not shrink, because only the rejection matters."""
    current = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile(
        "without_shrinking",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("without_shrinking")
    yield
    hypothesis.settings.load_profile(current)


def subject(
    operation: str | Operation,
    implementation: Callable,
    device: str,
    dtype: str = "float32",
    documented: bool = False,
    output: str = "",
    **changes: object,
) -> Subject:
    """Return an implementation as a candidate under test. The other operations that laws use are right."""
    record = OPERATIONS[operation] if isinstance(operation, str) else operation
    if record.mutates and not getattr(implementation, READS_BACK, False):
        implementation = read_back(implementation, record.mutates, ())
    if output:
        names = tuple(record.outputs)
        record, implementation = record.outputs[output], alone(implementation, names, names.index(output))
    return Subject(
        operation=dataclasses.replace(record, **changes),
        backend="candidate",
        dtype=DTYPES[dtype] if documented else DTYPES[dtype].with_contract(OPEN),
        device=device,
        implementation=implementation,
        sibling=lambda name: (OPERATIONS[name], backends.load(name, "torch")),
    )


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def name_of(check: Check) -> str:
    return check.args[0].__name__ if isinstance(check, functools.partial) else check.__name__


def described(fault: Fault) -> str:
    return f"{fault.name}-{fault.language}-{fault.operation}-{name_of(fault.check)}-{fault.dtype}"


def of_each(*faults: Fault, compiled: int = 0) -> pytest.MarkDecorator:
    """Return a mark for one test for each fault. The default profile runs `compiled` of those in CUDA C++ unless it is
    0."""
    few = {"cuda": [pytest.mark.full(but=compiled)]} if compiled else {}
    return pytest.mark.parametrize(
        "fault", [pytest.param(fault, id=described(fault), marks=few.get(fault.language, ())) for fault in faults]
    )


@pytest.fixture
def compiled_alone() -> Iterator[None]:
    """Compile each CUDA kernel when it is launched: an edited source launches few of its kernels."""
    with cuda_launch.compiling_only(()):
        yield


@pytest.mark.full(but=85)
@pytest.mark.usefixtures("without_shrinking", "compiled_alone")
@of_each(*FAULTS, *GENERIC, compiled=5)
def test_planted_fault_is_rejected_by_its_check_and_right_elsewhere(
    fault: Fault, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.only_on not in ("", device):
        pytest.skip(f"it shows on {fault.only_on} alone")
    changes = {"examples": fault.examples} if fault.examples else {}
    record = fault.record or fault.operation
    given = subject(record, fault.make(), device, fault.dtype, fault.documented, fault.output, **changes)
    if fault.seen_by:
        given = with_large_cases(given)
    with (
        all_calls(monkeypatch),
        Arena(POISONS[0]) if fault.poisoned else contextlib.nullcontext(),
        restored_cases() if fault.raises is tampering.Tampered else contextlib.nullcontext(),
        pytest.raises(fault.raises, match=fault.says) as caught,
    ):
        fault.check(given, Search(examples=fault.search))
    print(notes(caught.value))
    if fault.right_on:
        is_right_on_a_case(fault, device)


@contextlib.contextmanager
def restored_cases() -> Iterator[None]:
    """Restore the inputs of all live cases at the end, which later tests of this process may need."""
    cases = [each for each in gc.get_objects() if type(each) is Case]
    copies = [(x, x.copy()) for case in cases for x in case.inputs.values() if isinstance(x, np.ndarray)]
    yield
    for x, copy in copies:
        if x.flags.writeable:
            x[...] = copy


@contextlib.contextmanager
def all_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow many calls of an interpreted kernel, too."""
    with monkeypatch.context() as patch:
        patch.setattr(many_calls, "FUNCTIONS", {"cpu": math.inf, "cuda": math.inf})
        yield


def is_right_on_a_case(fault: Fault, device: str) -> None:
    """Guard against a check that rejects everything."""
    assert fault.right_on is not None
    make = fault.right_on if callable(fault.right_on) else OPERATIONS[fault.operation].examples[fault.right_on]
    case = make(DTYPES[fault.dtype])
    search = Search(examples=1)
    record = fault.record or fault.operation
    changes = {"examples": {}, "cases": lambda *_: st.just(case), "output": fault.output}
    fault.check(subject(record, fault.make(), device, fault.dtype, **changes), search)
    assert search.substantial


def with_large_cases(given: Subject) -> Subject:
    large = LargeCases(given.operation, given.claims, given.dtype, constants_of(given.implementation))
    return dataclasses.replace(given, large=large)


@pytest.fixture
def without_generated_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop generated cases, which may show a fault by chance: Hypothesis draws numbers of the faults' sources."""
    monkeypatch.setattr(Search, "for_all", lambda *_, **__: None)


@pytest.mark.usefixtures("without_generated_cases")
@of_each(*(fault for fault in FAULTS if fault.seen_by in ("large", "comparisons")))
def test_fault_of_a_size_is_seen_by_large_cases_alone(fault: Fault, device: str) -> None:
    fault.check(subject(fault.operation, fault.make(), device, fault.dtype), Search(examples=EXAMPLES))


@pytest.mark.full(but=10)
@pytest.mark.usefixtures("without_generated_cases")
@of_each(*(fault for fault in FAULTS if fault.seen_by not in ("", "large")))
def test_fault_is_seen_by_what_it_names_alone(fault: Fault, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = with_large_cases(subject(fault.record or fault.operation, fault.make(), device, fault.dtype))
    assert given.large is not None
    if fault.seen_by == "settled":
        monkeypatch.setattr(Bounded, "settled", property(lambda self: self.error))
    elif fault.seen_by == "comparisons":
        constants = dataclasses.replace(given.large.constants, comparisons=())
        given = dataclasses.replace(given, large=dataclasses.replace(given.large, constants=constants))
    else:
        given = dataclasses.replace(given, large=dataclasses.replace(given.large, every_nth=0))
    fault.check(given, Search(examples=EXAMPLES))


@pytest.mark.full(but=2)
@pytest.mark.usefixtures("without_shrinking")
@of_each(*[fault for fault in FAULTS if fault.documented and fault.check is backward_agrees][2:])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_derivative_at_a_clamps_limit_is_right_for_a_candidate(fault: Fault, dtype: str, device: str) -> None:
    backward_agrees(subject(fault.operation, fault.make(), device, dtype), Search(examples=EXAMPLES))


@pytest.mark.full(but=6)
@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("check", [forward_agrees, backward_agrees], ids=name_of)
@pytest.mark.parametrize(
    ("control", "dtype"),
    [
        pytest.param(
            control,
            dtype,
            id=f"{control.name}-{control.operation}-{dtype}",
            marks=() if dtype == control.dtypes[-1] and place % 3 == 0 else pytest.mark.full,
        )
        for place, control in enumerate(CONTROLS)
        for dtype in control.dtypes
    ],
)
def test_control_passes(control: Control, dtype: str, check: Check, device: str) -> None:
    operation, _, output = control.operation.partition(".")
    record = OPERATIONS[operation].outputs[output] if output else OPERATIONS[operation]
    if check is backward_agrees and not record.differentiable:
        return
    examples = {
        name: make
        for name, make in record.examples.items()
        if control.elements is None or sum(a.size for a in make(DTYPES[dtype]).inputs.values()) <= control.elements
    }
    search = Search(examples=control.examples, elements=control.elements or Search.elements)
    check(subject(operation, control.make(), device, dtype, output=output, examples=examples), search)
    assert search.ran >= control.examples + len(examples)


def test_every_check_rejects_a_fault() -> None:
    rejecting = {name_of(fault.check) for fault in FAULTS}
    of_checks = {
        name
        for module in tampering.watched_modules()
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__annotations__", {}).get("search") is Search
        # tests/harness/test_tuning.py has wrong configurations.
        and name not in ("law_holds", "configuration_agrees", "agrees_if_forced")
        and not name.startswith("_")
    }
    assert of_checks >= {"forward_agrees", "backward_agrees"}
    assert rejecting >= of_checks


@pytest.mark.full
@pytest.mark.parametrize("name", [source.name for source in sorted(pathlib.Path(__file__).parent.glob("*.cu"))])
def test_known_wrong_kernels_are_wrong_on_a_gpu_too_and_do_not_merely_fail_to_compile(name: str) -> None:
    source = pathlib.Path(__file__).parent / name
    kernels = cuda_launch.known_kernels(source)
    assert kernels
    assert set(cuda_compile.compile_ahead_of_time(source, sorted(kernels), "sm_90a")) == kernels


LANGUAGES = ("torch", "triton", "cuda")
LEAST = 3  # the minimum number of faults of an operation in each language


def lacking(operation: Operation, faults: Sequence[Fault]) -> str:
    """Return which faults an operation still lacks, as a request to its author; "" if it has enough."""
    caught = [fault for fault in faults if fault.operation == operation.name]
    written = [fault.language for fault in caught]
    few = [f"{LEAST - written.count(of)} more in {of}" for of in LANGUAGES if written.count(of) < LEAST]
    rejecting = {name_of(fault.check) for fault in caught}
    each = operation.outputs.values() or [operation]
    laws = [law.__name__ for of in each for law in of.laws if law.__name__ not in rejecting]
    if not few and not laws:
        return ""
    wanted = [f"faults, {', '.join(few)}"] if few else []
    wanted += [f"for each of these laws one that it rejects: {', '.join(laws)}"] if laws else []
    return (
        f"{operation.name} lacks planted faults: its checks are not known to reject what is wrong. "
        f"Add tests/known_wrong/planted_{operation.name}.py with a tuple FAULTS, which is found by itself; "
        f"planted_cumsum.py is the shortest to start from. Wanted are {'; and '.join(wanted)}."
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_has_planted_faults_in_every_language_and_for_every_law(name: str) -> None:
    if missing := lacking(OPERATIONS[name], FAULTS):
        pytest.fail(missing, pytrace=False)


def test_an_operation_without_faults_is_told_which_file_to_add() -> None:
    softmax = OPERATIONS["softmax"]
    swish = dataclasses.replace(softmax, name="swish", laws=softmax.laws[:1])
    missing = lacking(swish, FAULTS)
    assert "Add tests/known_wrong/planted_swish.py" in missing
    assert "3 more in torch, 3 more in triton, 3 more in cuda; and for each of these laws" in missing
    assert softmax.laws[0].__name__ in missing
    of_triton = [fault for fault in FAULTS if fault.operation == "softmax" and fault.language == "triton"]
    assert "Wanted are faults, 3 more in torch, 3 more in cuda." in lacking(
        dataclasses.replace(softmax, laws=()), of_triton
    )


def test_known_wrong_implementations_are_many() -> None:
    assert len({(fault.name, fault.operation, fault.language) for fault in FAULTS}) >= 250


def test_faults_are_told_apart_by_their_names() -> None:
    names = [described(fault) for fault in (*FAULTS, *GENERIC)]
    assert len(set(names)) == len(names)


def test_every_edit_fits_the_text_of_today() -> None:
    made = [fault.make for fault in FAULTS if isinstance(fault.make, functools.partial)]
    edits = [make.args for make in made if make.func is edited]
    assert all(changed_texts(*each) for each in edits)
    assert len(edits) > 400


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("total + y => total - y", "must be found 1 times, not none"),
        ("x => y", r"must be found 1 times, not 2 in one, 1 in other"),
        ("x =>2 y", "must be found 2 times, not 2 in one, 1 in other"),
        ("x + y", "has no arrow"),
    ],
)
def test_an_edit_that_does_not_fit_the_text_is_an_error(edit: str, says: str) -> None:
    with pytest.raises(EditError, match=says):
        apply_edit({"one": "x + x", "other": "x - y"}, edit)
    assert apply_edit({"one": "x + x", "other": "y"}, "x =>2 y") == {"one": "y + y"}


# ---- published kernels

DISJOINT = "apart_along_both_axes"
PUBLISHED_WITHOUT_CLAMP = {
    "padded": ("giou_loss", published.padded_loss),
    "cuda_multiplied": ("giou_loss", published.cuda_loss("multiplied")),
    "cuda_skipping": ("giou_loss", published.cuda_loss("skipping")),
    "triton": ("giou_loss", published.triton_loss()),
    "pairwise": ("giou", published.giou_without_clamp),
}


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("name", PUBLISHED_WITHOUT_CLAMP)
def test_intersection_without_clamp_is_rejected_for_boxes_disjoint_along_both_axes(name: str, device: str) -> None:
    operation, implementation = PUBLISHED_WITHOUT_CLAMP[name]
    with pytest.raises(Failure, match=r"output.* is ") as caught:
        forward_agrees(subject(operation, implementation, device), Search(examples=EXAMPLES))
    assert DISJOINT in notes(caught.value)
    print(notes(caught.value))


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        ("giou", published.giou_without_clamp),
        ("giou_loss", published.padded_loss),
        ("giou_loss_ragged", published.concatenated_loss),
    ],
)
def test_generated_cases_alone_reject_the_missing_clamp(operation: str, implementation: Callable, device: str) -> None:
    with pytest.raises(Failure, match=r"output.* is .*expected"):
        forward_agrees(subject(operation, implementation, device, examples={}), Search(examples=EXAMPLES))


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("version", ["multiplied", "skipping"])
def test_validity_by_y2_not_0_is_rejected_for_negative_y2(version: str, device: str) -> None:
    implementation = published.cuda_loss(version, clamp=True)
    with pytest.raises(Failure, match=r"output\[\] is ") as caught:
        forward_agrees(subject("giou_loss", implementation, device), Search(examples=EXAMPLES))
    assert "Named example negative_y2_is_padding" in notes(caught.value)
    # A y2 of NaN is rejected too: it is not 0 either, and nothing is negative here.
    nan_y2 = {"nan_y2_is_padding": OPERATIONS["giou_loss"].examples["nan_y2_is_padding"]}
    with pytest.raises(Failure, match=r"output\[\] is "):
        forward_agrees(subject("giou_loss", implementation, device, examples=nan_y2), Search(examples=EXAMPLES))


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("version", ["multiplied", "skipping"])
def test_256_threads_whatever_the_box_count_read_out_of_bounds(version: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("it shows on the CPU alone")
    implementation = published.cuda_loss(version, clamp=True, any_box_count=False)
    with pytest.raises(cuda_on_cpu.OutOfBounds, match=r"published\.cu:\d+\).*read of 4 bytes"):
        forward_agrees(subject("giou_loss", implementation, device), Search(examples=EXAMPLES))


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_kernel_for_float32_alone_is_rejected_for_other_types(dtype: str, device: str) -> None:
    implementation = published.cuda_loss("skipping", clamp=True)
    with pytest.raises(Failure, match=f"output has dtype torch.float32, expected torch.{dtype}"):
        forward_agrees(subject("giou_loss", implementation, device, dtype), Search(examples=EXAMPLES))


@pytest.mark.usefixtures("without_shrinking")
def test_block_as_long_as_the_box_count_is_rejected_where_that_is_no_power_of_two(device: str) -> None:
    # The interpreter wraps the ValueError of tl.arange. The compiler wraps it with its place in the source.
    with pytest.raises(TritonError, match="power of 2") as caught:
        forward_agrees(subject("giou_loss", published.triton_loss(clamp=True), device), Search(examples=EXAMPLES))
    assert "Named example one_valid_row_after_padding" in notes(caught.value)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize(
    "implementation",
    [published.triton_loss(clamp=True), published.cuda_loss("skipping", clamp=True)],
    ids=["triton", "cuda"],
)
def test_kernel_without_a_gradient_is_rejected_by_backward(implementation: Callable, device: str) -> None:
    with pytest.raises(Failure, match="gradient of"):
        backward_agrees(subject("giou_loss", implementation, device), Search(examples=EXAMPLES))


# ---- errors that only some devices raise


@pytest.mark.parametrize(("value", "accepted"), [(torch.nan, True), (0.5, False)], ids=["nan", "a_number"])
def test_bad_input_gives_nan_where_a_device_cannot_raise(value: float, accepted: bool, device: str) -> None:
    errors = [dataclasses.replace(e, devices=()) for e in OPERATIONS["giou_loss_ragged"].errors if len(e.devices) == 1]

    def implementation(**arguments: Any) -> torch.Tensor:
        return torch.tensor(value, device=device)

    given = subject("giou_loss_ragged", implementation, device, errors=tuple(errors))
    with contextlib.nullcontext() if accepted else pytest.raises(Failure, match=r"the output is .*, not NaN"):
        declared_errors_are_raised(given, Search(examples=1))
    assert errors


# ---- the counterexample


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param("giou", published.giou_without_clamp, marks=pytest.mark.full),
        ("giou_loss", published.padded_loss),
    ],
)
def test_check_shows_one_pair_of_boxes_with_small_whole_numbers(
    operation: str, implementation: Callable, device: str, record_property: Callable
) -> None:
    current = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("shrinking", derandomize=True, database=None)
    hypothesis.settings.load_profile("shrinking")
    try:
        with pytest.raises(Failure) as caught:
            forward_agrees(subject(operation, implementation, device, examples={}), Search(examples=EXAMPLES))
    finally:
        hypothesis.settings.load_profile(current)
    shown = re.search(r"Case\((.*?), eps=", notes(caught.value))
    assert shown is not None
    record_property("counterexample", shown[1])
    numbers = [float(number) for number in re.findall(r"nan|-?inf|-?\d+\.\d+", shown[1])]
    assert len(numbers) == 8
    # The implementation is wrong for non-finite boxes too, so only finite numbers must be small.
    assert all(number in range(4) for number in numbers if np.isfinite(number))
