"""Defaults for the fields of an operation's record, which follow from its cases and its named examples."""

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
# The elements of an input in a smooth case. Numerical differentiation calls the operation once for each element.
FEW_ELEMENTS = 6
# The approximate number of elements of all inputs in a workload that fills a GPU.
MANY_ELEMENTS = 1 << 28
# The elements of a declared operation's workloads: small, ragged and, on a GPU, large. More would fill its L2 cache
# often, but the oracle evaluates all of them.
FILLED = {"cpu": (1 << 14, 1 << 14), "cuda": (1 << 14, 1 << 20, 1 << 23)}


def complete(operation: Operation) -> Operation:
    """Return a record with its missing fields: smooth cases, declared errors, workloads and the reduction's law."""
    changes: dict[str, Any] = {}
    if operation.smooth is FOLLOWS:
        changes["smooth"] = smooth(operation.cases, operation.ordinary)
    if operation.errors is FOLLOWS:
        changes["errors"] = errors(operation.examples, operation.dtypes)
    if operation.reduction:
        law = law_of(operation)
        if law.__name__ not in [known.__name__ for known in operation.laws]:
            changes["laws"] = (*operation.laws, law)
    if operation.workloads is FOLLOWS:
        changes["workloads"] = workloads(operation)
    return replace(operation, **changes) if changes else operation


def smooth(cases: Cases, ordinary: Collection[str] = ()) -> Callable[[DType], st.SearchStrategy[Case]]:
    """Return the smooth cases of an operation that is differentiable everywhere: few elements and ordinary numbers.

    Inputs named in `ordinary` are limited to a range, so they keep their own numbers.
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
        grad_output = case.grad_output
        return Case(inputs, cotangent(rng, grad_output.shape, DTYPES[grad_output.dtype.name]), case.parameters)

    return strategy


def errors(examples: Examples, dtypes: Collection[str] = ()) -> tuple[DeclaredError, ...]:
    """Return the errors of the first named example with elements. They hold for arguments of any shapes.

    Args:
        examples: the named examples.
        dtypes: the floating-point inputs whose dtype is not the tested one.
    """
    dtype = DTYPES["float32"]
    for make in examples.values():
        case = make(dtype)
        if _has_elements(case):
            return ArgumentsOf({**case.tensors(dtype, "cpu"), **case.parameters}, dtypes).errors
    return ()


def workloads(operation: Operation) -> Mapping[str, Mapping[str, Make]]:
    """Return the workloads: a small one, one with an odd last axis, and one on a GPU that its memory limits.

    The axes of a declared operation get equal sizes, which fill a number of elements; the oracle evaluates them all.
    Other operations take their largest examples. If an operation declares batches, a batch that fills a GPU repeats one
    of them.
    """
    examples, sized = operation.examples, operation.sized
    filling = sized.filling if sized else None

    def example(ragged: bool, dtype: DType) -> Case:
        return _largest(examples, ragged, dtype)

    def large(dtype: DType) -> Workload:
        case = example(False, dtype)
        times = max(MANY_ELEMENTS // max(case.elements, 1), 4)
        return tiled(lambda dtype: case, 1 << (times.bit_length() - 1), *operation.batched)(dtype)

    def filled_workload(elements: int, odd: bool = False) -> Make:
        assert sized is not None
        assert filling is not None
        return whole(lambda dtype: sized.make(filling(elements, odd))(dtype))

    if filling is None:
        small, ragged = (whole(functools.partial(example, odd)) for odd in (False, True))
        workloads_by_device = {device: {"small": small, "ragged": ragged} for device in ("cpu", "cuda")}
    else:
        sides = {"small": False, "ragged": True, "large": False}
        workloads_by_device = {
            device: {name: filled_workload(elements, odd) for (name, odd), elements in zip(sides.items(), counts)}
            for device, counts in FILLED.items()
        }
    if operation.batched:
        workloads_by_device["cuda"]["large"] = large
    return workloads_by_device


def _largest(examples: Examples, ragged: bool, dtype: DType) -> Case:
    """Return the largest contiguous example of finite numbers; for `ragged`, with an odd last axis if there is one."""
    cases = [make(dtype) for make in examples.values()]
    plain = [case for case in cases if not case.layouts and all(_is_finite(a) for a in case.inputs.values())]
    odd = [case for case in plain if any(array.ndim and array.shape[-1] % 2 for array in case.inputs.values())]
    return max((odd if ragged else plain) or plain or cases, key=lambda case: case.elements)


def _has_elements(case: Case) -> bool:
    return all(array.size for array in (*case.inputs.values(), case.grad_output))


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())
