"""The checks that torch's modes change no result, except that autocast may change the precision."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import (
    compare_results,
    describe,
    expected_results,
    named_gradients,
    named_results,
    require_same_bits,
)
from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.inputs.combinations import combined_cases
from fourfold.instruments.evaluation import gradients_of
from fourfold.instruments.hide_test_runner import out_of_sight
from fourfold.instruments.tampering import default_dtype
from fourfold.numerics.bounded import Bounded, HangsOnRounding, NoRule, stored
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case, is_floating
from fourfold.operations.outcomes import Failure, Unclaimed
from fourfold.operations.record import reference

# The dtypes of autocast.
AUTOCAST = "bfloat16", "float16"
# The modes with another default dtype.
OTHER_DEFAULTS = tuple(f"where torch's default dtype is {name}" for name in ("bfloat16", "float64"))
# By name: the call's context, whether the inputs require gradients, and whether they are created in the context.
MODES: dict[str, tuple[Callable[[], AbstractContextManager] | None, bool, bool]] = {
    "where gradients are recorded": (None, True, False),
    "under no_grad": (torch.no_grad, False, False),
    "under no_grad, of inputs that require gradients": (torch.no_grad, True, False),
    "under inference_mode": (torch.inference_mode, False, False),
    "under inference_mode, of inputs that require gradients": (torch.inference_mode, True, False),
    "under inference_mode, of inputs made there": (torch.inference_mode, False, True),
    OTHER_DEFAULTS[0]: (functools.partial(default_dtype, torch.bfloat16), False, False),
    OTHER_DEFAULTS[1]: (functools.partial(default_dtype, torch.float64), False, False),
}
# The modes of foreign implementations: a kernel must give the same results in a program that is not a test.
OUT_OF_SIGHT = "where pytest and the interpreter are not to be seen"
MODES_OF_OTHERS = {OUT_OF_SIGHT: (out_of_sight, False, False), **MODES}
# The number of modes for each case, in turn.
MODES_A_CASE = 4


@allow_storage_accuracy
def modes_do_not_matter(subject: Subject, search: Search) -> None:
    """Check the output with gradients recorded, under `no_grad`, under `inference_mode` and for other default dtypes.

    If gradients are not recorded, the output must not require them. The call must leave the modes unchanged. This
    library's own implementations must give the same bits in every mode. A foreign implementation may compute
    differently if gradients are required.
    """

    # A separate process shows neither pytest nor the interpreter.
    available = MODES_OF_OTHERS if subject.foreign and not subject.elsewhere else MODES
    # A kernel for float32 alone may create its results in the default dtype.
    in_default = set(subject.claims.dtypes) == {"float32"}
    modes = [
        mode
        for mode, (_, needs_gradients, _) in available.items()
        if (subject.differentiable or not needs_gradients) and not (in_default and mode in OTHER_DEFAULTS)
    ]
    turns = itertools.cycle(modes)

    of_combined: dict[Case, str] = {}
    combinations = {}
    for combined in combined_cases(subject.large) if subject.large is not None and not search.brief else ():
        combinations[combined.name] = combined.case
        of_combined[combined.case] = modes[combined.mode % len(modes)]

    def body(case: Case) -> None:
        expected = {"output": reference(subject.operation, case, subject.dtype)}
        agreements: list[Agreement] = []
        outputs: list[torch.Tensor] = []
        for name in [of_combined[case]] if case in of_combined else itertools.islice(turns, MODES_A_CASE):
            output, tensors = _call_in_mode(subject, case, name)
            agreements += compare_results(subject, {"output": output.detach()}, expected, tensors, f"{name}: ")
            outputs.append(output.detach())
            if not subject.foreign and subject.claims.deterministic:
                require_same_bits(subject, {OUTPUT: outputs[-1]}, {OUTPUT: outputs[0]}, tensors, f"{name}: ")
        search.saw(*agreements)

    extra = subject.small_example() | combinations
    search.cases(subject, "modes", body, named=False, extra=extra)


def _call_in_mode(subject: Subject, case: Case, mode_name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mode, needs_gradients, is_inside = MODES_OF_OTHERS[mode_name]
    tensors = {} if is_inside else case.tensors(subject.dtype, subject.device)
    for name in subject.operation.differentiable_in(case) if needs_gradients else ():
        tensors[name].requires_grad_()
    outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with mode() if mode is not None else contextlib.nullcontext():
        tensors = tensors or case.tensors(subject.dtype, subject.device)
        inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        output = subject.call(**tensors, **case.parameters)
        at_end = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if at_end != inside or outside != (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
        raise Failure(f"{subject}: {mode_name}: the call has changed whether gradients are recorded")
    if mode in (torch.no_grad, torch.inference_mode) and isinstance(output, torch.Tensor) and output.requires_grad:
        raise Failure(f"{subject}: {mode_name}: the output requires a gradient", OUTPUT)
    return output, tensors


def autocast_changes_precision_alone(subject: Subject, search: Search) -> None:
    """Check the results under `torch.autocast`: right as without it, or with each step rounded to autocast's dtype.

    Under autocast torch casts the inputs of matrix products to that dtype, and runs some functions in float32. The
    output may have either dtype. The backward pass runs outside of autocast, as torch's documentation recommends.

    Raises:
        Unsupported: the implementation does not claim to support autocast.
    """
    if not subject.claims.autocast:
        raise Unclaimed("calls under autocast")

    def body(case: Case) -> None:
        search.saw(*(agreement for dtype in AUTOCAST for agreement in _cast(subject, case, DTYPES[dtype])))

    search.cases(subject, "autocast", body, special=False, named=False, extra=subject.small_example())


def _cast(subject: Subject, case: Case, target: DType) -> list[Agreement]:
    """Return the agreements of a call under autocast to a dtype."""
    tensors = case.tensors(subject.dtype, subject.device)
    names = subject.operation.differentiable_in(case) if subject.differentiable else ()
    for name in names:
        tensors[name].requires_grad_()
    with torch.autocast(subject.device, dtype=target.torch):
        output = subject.call(**tensors, **case.parameters)
    gradients: dict[str, torch.Tensor] = {}
    if names:
        grad_output = case.tensor("grad_output", subject.dtype, subject.device).to(output.dtype)
        gradients = dict(zip(names, gradients_of(output, [tensors[name] for name in names], grad_output)))
    results = named_results(output.detach(), gradients)
    try:
        return compare_results(subject, results, expected_results(subject, case), tensors)
    except Failure as failure:
        return _compare_cast_results(subject, case, target, results, tensors, failure)


def _compare_cast_results(
    subject: Subject,
    case: Case,
    target: DType,
    results: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    failure: Failure,
) -> list[Agreement]:
    """Compare results that are wrong without autocast with the oracle's results if every step is rounded."""
    dtypes = (subject.dtype, target, *map(subject.dtype_of, [OUTPUT, *subject.operation.differentiable]))
    admitted = {dtype.torch: dtype for dtype in dtypes}
    for result in results.values():
        if type(result) is not torch.Tensor or result.dtype not in admitted or result.device.type != subject.device:
            raise failure
    try:
        expected = _round_each_step(subject, case, target)
    except (NoRule, HangsOnRounding):
        # The reference needs the exact value of a number that rounding may change, such as the index of a row.
        raise failure from None
    agreements = []
    for name, result in results.items():
        dtype = admitted[result.dtype]
        try:
            array: np.ndarray = dtype.array(result).astype(np.promote_types(dtype.wide, subject.dtype.wide))
            expected_result = expectation(expected[name], dtype)
            agreements.append(compare(array, expected_result, dtype, f"under autocast to {target}: {name}"))
        except Disagreement as disagreement:
            raise Failure(f"{subject}: {disagreement}\nwith {describe(tensors)}", name) from None
    return agreements


def _round_each_step(subject: Subject, case: Case, target: DType) -> dict[str, Bounded]:
    """Return the oracle's results if inputs, cotangent and each step are rounded to autocast's dtype."""
    operation, storage = subject.operation, target.arithmetic.storage
    arithmetic = replace(subject.dtype.arithmetic, storage=storage, rounds_each_step=True)

    def rounded(array: np.ndarray) -> Bounded:
        wide: np.ndarray = array.astype(subject.dtype.wide)
        return stored(Bounded(wide, np.zeros_like(wide), arithmetic))

    inputs = {name: rounded(array) if is_floating(array) else array for name, array in case.inputs.items()}
    arguments = {**inputs, **case.parameters}
    expected = {"output": operation.forward(**arguments)}
    gradients = operation.backward(rounded(case.grad_output), **arguments)
    by_input = dict(zip(operation.differentiable, gradients, strict=True))
    return expected | named_gradients({name: by_input[name] for name in operation.differentiable_in(case)})
