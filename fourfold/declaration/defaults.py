"""What an operation's record need not say: it follows from the cases and the named examples that it has."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fourfold.declaration.reductions import law_of
from fourfold.inputs.arrays import GENERATORS, cotangent, values
from fourfold.numerics.dtypes import DTYPES, DType, dtype_of
from fourfold.operations.case import Case, is_floating
from fourfold.operations.declared_errors import ArgumentsOf, DeclaredError
from fourfold.operations.record import FOLLOWS, Operation
from fourfold.operations.workloads import Make, Workload, tiled, whole

Cases = Callable[[DType, int], st.SearchStrategy[Case]]
Examples = Mapping[str, Callable[[DType], Case]]
# Elements of an input of a case that is differentiated numerically, once for each of them.
FEW_ELEMENTS = 6
# Elements of the inputs of a workload that fills a GPU, about.
MANY_ELEMENTS = 1 << 28


def completed(operation: Operation) -> Operation:
    """A record with what it leaves out: smooth cases, declared errors, workloads and the law of its reduction."""
    changes: dict[str, Any] = {}
    if operation.smooth is FOLLOWS:
        changes["smooth"] = smooth(operation.cases, operation.ordinary)
    if operation.errors is FOLLOWS:
        changes["errors"] = errors(operation.examples)
    if operation.reduction:
        law = law_of(operation)
        if law.__name__ not in [each.__name__ for each in operation.laws]:
            changes["laws"] = (*operation.laws, law)
    if operation.workloads is FOLLOWS:
        changes["workloads"] = workloads(operation.examples, operation.batched)
    return replace(operation, **changes) if changes else operation


def smooth(cases: Cases, ordinary: Collection[str] = ()) -> Callable[[DType], st.SearchStrategy[Case]]:
    """Of an operation that may be differentiated everywhere: its cases of few elements, holding ordinary numbers.

    Inputs named in `ordinary` keep to a range, and so their own numbers.
    """

    @st.composite
    def strategy(draw: st.DrawFn, dtype: DType) -> Case:
        case, rng = draw(cases(dtype, FEW_ELEMENTS).filter(_has_elements)), draw(GENERATORS)
        inputs = {
            name: values(rng, array.shape, dtype_of(array.dtype), "normal")
            if is_floating(array) and name not in ordinary
            else array
            for name, array in case.inputs.items()
        }
        given = case.grad_output
        return Case(inputs, cotangent(rng, given.shape, DTYPES[given.dtype.name]), case.parameters)

    return strategy


def errors(examples: Examples) -> tuple[DeclaredError, ...]:
    """Those of the first named example that has elements, which hold for arguments of any shapes."""
    dtype = DTYPES["float32"]
    for make in examples.values():
        case = make(dtype)
        if _has_elements(case):
            return ArgumentsOf({**case.tensors(dtype, "cpu"), **case.parameters}).errors
    return ()


def workloads(examples: Examples, batched: Mapping[str, int]) -> Mapping[str, Mapping[str, Make]]:
    """The largest named example, the largest whose last axis is odd, and, of samples, so many that they fill a GPU."""

    def example(ragged: bool, dtype: DType) -> Case:
        return _largest(examples, ragged, dtype)

    def large(dtype: DType) -> Workload:
        case = example(False, dtype)
        times = max(MANY_ELEMENTS // max(case.elements, 1), 4)
        return tiled(lambda dtype: case, 1 << (times.bit_length() - 1), *batched)(dtype)

    small, ragged = (whole(functools.partial(example, odd)) for odd in (False, True))
    on_both = {"small": small, "ragged": ragged}
    return {"cpu": on_both, "cuda": {**on_both, "large": large} if batched else on_both}


def _largest(examples: Examples, ragged: bool, dtype: DType) -> Case:
    """That has the most elements among the examples of finite numbers one after another; if there is one, ragged."""
    cases = [make(dtype) for make in examples.values()]
    plain = [case for case in cases if not case.layouts and all(_is_finite(a) for a in case.inputs.values())]
    odd = [case for case in plain if any(array.ndim and array.shape[-1] % 2 for array in case.inputs.values())]
    return max((odd if ragged else plain) or plain or cases, key=lambda case: case.elements)


def _has_elements(case: Case) -> bool:
    return all(array.size for array in (*case.inputs.values(), case.grad_output))


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())
