"""Impostors: meaningless results that the comparison must reject.

If the bounds are too loose, or the cases too simple, every test passes and verifies nothing. So each result of an
operation is replaced by typical results of broken kernels, and at least one case of the record must reject each.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Disagreement, compare, expectation
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case, is_floating
from fourfold.operations.record import Operation, reference, reference_gradients

# Returns an impostor's values for a case and its expected result; None if the impostor does not have that shape.
Impostor = Callable[[Case, Bounded], np.ndarray | None]


def all_zero(case: Case, expected: Bounded) -> np.ndarray:
    """Return zeros, like a gradient that was not computed, or a kernel that was not launched."""
    return np.zeros_like(expected.value)


def all_nan(case: Case, expected: Bounded) -> np.ndarray:
    """Return NaN everywhere, like a kernel that read poison."""
    return np.full_like(expected.value, np.nan)


def the_mean_everywhere(case: Case, expected: Bounded) -> np.ndarray | None:
    """Return a constant of the right magnitude; None if the result has a single element or no finite one."""
    finite = expected.value[np.isfinite(expected.value)]
    return np.full_like(expected.value, finite.mean()) if finite.size and expected.value.size > 1 else None


def rolled_by_one(case: Case, expected: Bounded) -> np.ndarray | None:
    """Return every number in its neighbour's place; None for a single number."""
    return np.roll(expected.value.reshape(-1), 1).reshape(expected.shape) if expected.value.size > 1 else None


def negate(case: Case, expected: Bounded) -> np.ndarray:
    """Return the right numbers with the wrong sign."""
    return -expected.value


def copy_of(name: str) -> Impostor:
    """Return an impostor that returns an input unchanged."""

    def impostor(case: Case, expected: Bounded) -> np.ndarray | None:
        array = case.inputs.get(name)
        if array is None or array.shape != expected.shape or not is_floating(array):
            return None
        return array.astype(expected.value.dtype)

    return impostor


IMPOSTORS: dict[str, Impostor | None] = {
    "all zero": all_zero,
    "all NaN": all_nan,
    "its mean everywhere": the_mean_everywhere,
    "rolled by one": rolled_by_one,
    "negated": negate,
}
# The result of an earlier case of the same shape, if its numbers differ.
ANOTHER_CASE = "another case's"


@dataclass(frozen=True)
class Accepted:
    """An impostor that no case rejects."""

    operation: str
    dtype: str
    result: str
    impostor: str
    num_cases: int

    def __str__(self) -> str:
        problem = f"the specification of {self.operation} for {self.dtype} is at fault"
        if not self.num_cases:
            return f"{problem}: no case has a result, {self.result}, for which {self.impostor} could be taken"
        return f"{problem}: it takes {self.impostor} for the {self.result} in each of {self.num_cases} cases"


def results_of(operation: Operation, case: Case, dtype: DType) -> Iterator[tuple[str, Bounded]]:
    """Yield the oracle's output and gradients for a case, by name, with their full bounds."""
    yield "output", expectation(reference(operation, case, dtype), operation.result_dtype(dtype))
    for name, gradient in reference_gradients(operation, case, dtype).items():
        yield f"gradient of {name}", expectation(gradient, dtype)


def accepted_impostors(operation: Operation, dtype: DType, cases: Iterable[Case]) -> list[Accepted]:
    """Return the impostors that pass for a result of the operation in all of the cases.

    Args:
        operation: the operation whose bounds are tested.
        dtype: the dtype of the cases.
        cases: several of each shape, because another case's result must have the same shape.

    Returns:
        The impostors that no case rejects. Zeros and NaN are among them if no case could try them, because every
        record must have such a case.
    """
    counts: dict[tuple[str, str], int] = {}
    rejected: set[tuple[str, str]] = set()
    former: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    copies: dict[str, Impostor | None] = {f"a copy of {name}": copy_of(name) for name in operation.differentiable}
    for case in cases:
        for name, expected in results_of(operation, case, dtype):
            if not expected.value.size:
                continue
            stale = former.get((name, expected.shape))
            former[name, expected.shape] = expected.value
            for impostor, make in (IMPOSTORS | copies | {ANOTHER_CASE: None}).items():
                key = name, impostor
                if key in rejected:
                    continue
                values = make(case, expected) if make else stale
                if values is None or (values is stale and np.array_equal(stale, expected.value, equal_nan=True)):
                    continue
                counts[key] = counts.get(key, 0) + 1
                try:
                    compare(values, expected, operation.result_dtype(dtype) if name == "output" else dtype)
                except Disagreement:
                    rejected.add(key)
    names = ["output", *(f"gradient of {name}" for name in operation.differentiable)]
    possible = [(name, impostor) for name in names for impostor in ("all zero", "all NaN")]
    pairs = dict.fromkeys([*possible, *counts])
    return [
        Accepted(operation.name, dtype.name, name, impostor, counts.get((name, impostor), 0))
        for name, impostor in pairs
        if (name, impostor) not in rejected
    ]
