"""The checks that omitted parameters take the definition's defaults, and that parameters may have unusual values."""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from fourfold import backends
from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.history import distinguishes
from fourfold.checks.results import compare_results, expected_results, named_results
from fourfold.checks.search import Search, Subject, need
from fourfold.inputs.arrays import GENERATORS
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Unsupported
from fourfold.operations.record import Operation, reference

# Draw parameters from the numbers whose third power, and its reciprocal, the arithmetic can represent.
POWER = 3
_EMPTY = inspect.Parameter.empty


def defaults_of(operation: Operation) -> dict[str, Any]:
    """Return the default parameters of an operation's definition, or of the torch function of a handwritten record.

    An input that may be None is no parameter: cases omit it anyway.
    """
    definition = getattr(operation, "definition", None)
    if definition is None:
        try:
            definition = backends.load(operation.name, "torch")
        except (ImportError, KeyError, AttributeError):
            return {}
    parameters = inspect.signature(definition).parameters
    declaration = getattr(operation, "declaration", None)
    names = parameters if declaration is None else declaration.parameters
    names = [name for name in names if name not in operation.axes]
    return {name: parameters[name].default for name in names if parameters[name].default is not _EMPTY}


def _own_arguments(implementation: Callable[..., Any], operation: Operation) -> dict[str, inspect.Parameter]:
    """Return an implementation's arguments by the operation's names; none if its signature does not list them.

    If the names differ, arguments are matched by position.
    """
    function = getattr(implementation, "__wrapped__", implementation)
    function = function.forward if isinstance(function, torch.nn.Module) else implementation
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # the function is not written in Python
        return {}
    names = list(_arguments(operation))
    if set(names) <= parameters.keys():
        return {name: parameters[name] for name in names}
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return {}
    return dict(zip(names, parameters.values()))


def _own_defaults(implementation: Callable[..., Any], operation: Operation) -> dict[str, Any]:
    """Return the defaults in an implementation's signature, by the operation's names."""
    arguments = _own_arguments(implementation, operation)
    return {name: p.default for name, p in arguments.items() if p.default is not _EMPTY}


def _arguments(operation: Operation) -> Mapping[str, inspect.Parameter]:
    definition = getattr(operation, "definition", None) or backends.load(operation.name, "torch")
    return inspect.signature(definition).parameters


@allow_storage_accuracy
def defaults_are_the_definitions(subject: Subject, search: Search) -> None:
    """Check that an omitted parameter, alone or with all others, has the definition's default.

    A default that is written differently is no failure by itself: None may stand for the number. The results of the
    call decide, on cases that distinguish the two defaults.
    """
    defaults = defaults_of(subject.operation)
    if not defaults:
        raise Unsupported(f"{subject.operation.name} has no parameter with a default")
    actual = _own_defaults(subject.implementation, subject.operation)
    names = _passed_parameters(subject, defaults)
    for left_out in [[name] for name in names] + [names][: len(names) > 1]:
        differing = {
            name: actual[name]
            for name in left_out
            if name in actual and not equal_defaults(actual[name], defaults[name])
            for name in left_out
            if name in actual and not equal_defaults(actual[name], defaults[name])
        }
        _leave_out(subject, search, left_out, defaults, differing)


def _passed_parameters(subject: Subject, defaults: Mapping[str, Any]) -> list[str]:
    """Return the parameters that have a default and that cases pass."""
    for make in subject.operation.examples.values():
        parameters = make(subject.dtype).parameters
        return [name for name in defaults if name in parameters]
    return list(defaults)


def equal_defaults(first: Any, second: Any) -> bool:
    """Return whether two defaults are the same plain value, or tuples of such; other objects are never equal."""
    if type(first) is type(second) is tuple:
        return len(first) == len(second) and all(map(equal_defaults, first, second))
    try:
        return type(first) in (int, float, bool, str, type(None)) and bool(first == second)
    except (TypeError, ValueError):
        return False


def _leave_out(
    subject: Subject, search: Search, left_out: list[str], defaults: Mapping[str, Any], differing: Mapping[str, Any]
) -> None:
    """Check calls without some parameters, on cases that distinguish differing defaults, if there are any."""
    names = " and ".join(left_out)
    differences = "".join(
        f": its default is {value!r}, the definition's is {defaults[name]!r}" for name, value in differing.items()
    )

    def body(case: Case) -> None:
        case = case.with_parameters(**{name: defaults[name] for name in left_out})
        need(subject.operation.allows(case))
        expected = reference(subject.operation, case, subject.dtype)
        if differing:
            need(_matters(subject, case, differing))
        parameters = {name: value for name, value in case.parameters.items() if name not in left_out}
        tensors = case.tensors(subject.dtype, subject.device)
        output = subject.call(**tensors, **parameters)
        context = f"with {names} left out{differences}: "
        search.saw(*compare_results(subject, {"output": output}, {"output": expected}, tensors, context))

    ran = search.ran
    with contextlib.suppress(Unsatisfiable):
        search.cases(subject, f"defaults of {names}", body, sparse=True, extra=subject.small_example())
    if differing and search.ran == ran:
        search.warnings.append(f"{names}{differences}, and no case showed a difference")


def _matters(subject: Subject, case: Case, differing: Mapping[str, Any]) -> bool:
    """Return whether the two defaults give distinguishable results. If that is unknown, return True."""
    variant = case.with_parameters(**differing)
    try:
        former = {"output": reference(subject.operation, variant, subject.dtype)}
    except Exception:  # the definition does not accept the value, None for example
        return True
    return distinguishes(subject, {"output": reference(subject.operation, case, subject.dtype)}, former)


@allow_storage_accuracy
def parameters_may_be_far_from_the_usual(subject: Subject, search: Search) -> None:
    """Check the results for parameters anywhere in their range, drawn log-uniformly.

    Only numbers whose third power and its reciprocal the arithmetic can represent are drawn, so that products and
    quotients of a few of them neither overflow nor underflow.
    """
    ranges = subject.operation.ranges
    if not ranges:
        raise Unsupported(f"{subject.operation.name} declares no range of a parameter")

    def cases(dtype: DType, elements: int) -> st.SearchStrategy[Case]:
        numbers = st.fixed_dictionaries({name: _numbers(dtype, *ends) for name, ends in ranges.items()})
        pairs = st.tuples(subject.operation.cases(dtype, elements), numbers)
        return pairs.map(lambda pair: pair[0].with_parameters(**pair[1]))

    def body(case: Case) -> None:
        output, gradients, tensors = subject.evaluate(case)
        numbers = ", ".join(f"{name}={case.parameters[name]!r}" for name in ranges)
        context, results = f"with {numbers}: ", named_results(output, gradients)
        search.saw(*compare_results(subject, results, expected_results(subject, case), tensors, context))

    far = replace(subject, operation=replace(subject.operation, cases=cases))
    search.cases(far, "parameters", body, special=False, named=False)


def _numbers(dtype: DType, low: float, high: float) -> st.SearchStrategy[float]:
    """Return a strategy for numbers in a range, log-uniform, of both signs if the range includes both."""
    arithmetic = dtype.arithmetic
    low_power, high_power = (math.log2(end) / POWER for end in (arithmetic.smallest_normal, arithmetic.largest))
    # Hypothesis's own floating-point numbers are mostly simple ones.
    powers = GENERATORS.map(lambda rng: float(2.0 ** rng.uniform(low_power, high_power)))
    signed = st.builds(lambda number, sign: sign * number, powers, st.sampled_from((1.0, -1.0) if low < 0 else (1.0,)))
    return signed.filter(lambda number: low < number < high)
