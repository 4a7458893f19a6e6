"""The diagnosis of a failure: the result that is wrong, and the mistake that explains it exactly.

A mistake is named only if in each wrong call all elements of the wrong result agree, within their bounds, with what a
kernel with this mistake returns.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.checks.parameters import defaults_of
from fourfold.checks.results import case_tensors, expected_results, named_results
from fourfold.checks.search import Search, Subject
from fourfold.instruments.tampering import preserve_random_state
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES, DType, round_to_tf32
from fourfold.operations.case import Case, is_floating
from fourfold.operations.not_reached import NotReached

# The fewest elements that must be explained by a rounding: one number has few digits by chance.
ROUNDED_ELEMENTS = 4
# A few named examples, with the parameters and layouts of the failing case, are diagnosed in its place if they are
# wrong, too. It is often too small to tell mistakes apart.
EXAMPLES, ELEMENTS, MOST_ELEMENTS = 4, 16, 4096
# The cause of a product in TF32.
IN_TF32 = "float32 inputs are rounded to TF32, as tl.dot does unless it has input_precision='ieee'"


def diagnose(search: Search) -> None:
    """Set `Search.wrong_result` of a failed search, and `Search.likely_cause` unless the search is brief."""
    subject, case = search.subject, search.failing
    if subject is None or case is None:
        return
    with contextlib.suppress(Exception, NotReached), convert_escapes(), preserve_random_state():
        first = _Call(subject, case)
        search.wrong_result = first.wrong_result
        if search.brief:  # the first failure has been diagnosed
            return
        larger = (large for large in subject.filled_examples().values() if ELEMENTS <= large.elements <= MOST_ELEMENTS)
        cases = (replace(large, parameters=case.parameters, layouts=case.layouts) for large in larger)
        failing = [call for c in itertools.islice(cases, EXAMPLES) if (call := _Call(subject, c)).wrong_result] or [
            first
        ]
        causes = set.intersection(*({*call.mistakes()} for call in failing)) if failing[0].distinguishes else set()
        search.likely_cause = min(causes, default="")


class _Call:
    """The results of one call, by name."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        output, gradients, _ = subject.evaluate(case)
        self.results = {
            name: subject.dtype_of(name).array(tensor) for name, tensor in named_results(output, gradients).items()
        }
        self.expected = expected_results(subject, case)
        self.wrong_result = next((name for name in self.results if not self._agrees(name, self.expected)), "")

    @property
    def distinguishes(self) -> bool:
        """Return whether the wrong result has enough elements that no other mistake gives the same by chance."""
        return self.results[self.wrong_result].size > 1

    def mistakes(self) -> Iterator[str]:
        """Yield the mistakes that explain the wrong result."""
        yield from self._roundings()
        yield from (words for words, variant in self._other_calls() if self._is_of(variant))

    def _agrees(self, name: str, expected: Mapping[str, Bounded], rounded: DType | None = None) -> bool:
        """Return whether a result agrees with an expected one, rounded to another dtype as well if there is one."""
        dtype = self.subject.dtype_of(name)
        bounded = expectation(expected[name], dtype)
        try:
            compare(self.results[name], bounded if rounded is None else expectation(bounded, rounded), dtype, name)
        except Disagreement:
            return False
        return True

    def _is_of(self, case: Case) -> bool:
        """Return whether the wrong result is that of another case, and the bounds say something."""
        expected = expected_results(self.subject, case)
        return bool(np.isfinite(expected[self.wrong_result].error).all()) and self._agrees(self.wrong_result, expected)

    def _roundings(self) -> Iterator[str]:
        """Yield the narrower dtype through which the wrong result is rounded."""
        result, expected = self.results[self.wrong_result], np.asarray(self.expected[self.wrong_result].value)
        usual = self.subject.dtype_of(self.wrong_result)
        for dtype in (DTYPES[name] for name in ("float32", "bfloat16", "float16")):
            with np.errstate(all="ignore"):
                has_few_digits = result.astype(dtype.numpy).astype(result.dtype) == result
                needs_more = expected.astype(dtype.numpy).astype(expected.dtype) != expected
            certain = dtype.roundoff > usual.roundoff and needs_more.sum() >= ROUNDED_ELEMENTS and has_few_digits.all()
            if certain and self._agrees(self.wrong_result, self.expected, dtype):
                yield f"{self.wrong_result} is rounded through {dtype}"

    def _other_calls(self) -> Iterator[tuple[str, Case]]:
        """Yield mistakes in words, and the case that a kernel with this mistake computes."""
        case, dtype = self.case, self.subject.dtype
        for name, tensor in case_tensors(self.subject, case).items():
            array = case.grad_output if name == "grad_output" else case[name]
            if not tensor.is_contiguous() and (read := _contiguous_elements(tensor)) is not None:
                yield f"{name} is read as if it were contiguous", _replace_values(case, name, dtype.array(read), array)
        for name, array in case.inputs.items():
            if array.ndim > 1 and array.shape[-1] == array.shape[-2] and is_floating(array):
                yield f"{name} is transposed", _replace_values(case, name, array.swapaxes(-1, -2), array)
        single = {name: array for name, array in case.inputs.items() if array.dtype == np.float32}
        for nearest in (True, False):
            in_tf32 = {name: round_to_tf32(array, nearest) for name, array in single.items()}
            if any((in_tf32[name] != array).any() for name, array in single.items()):
                yield IN_TF32, case.with_inputs(**in_tf32)
        defaults = defaults_of(self.subject.operation)
        for name, value in case.parameters.items():
            if name in defaults and defaults[name] != value:
                variant = case.with_parameters(**{name: defaults[name]})
                if self.subject.operation.allows(variant):
                    yield f"{name} is ignored: its default is {defaults[name]!r}", variant
            for rounded in (np.float32, np.float16) if isinstance(value, float) else ():
                if float(rounded(value)) != value:
                    variant = case.with_parameters(**{name: float(rounded(value))})
                    yield f"{name} is rounded to {np.dtype(rounded)}", variant


def _replace_values(case: Case, name: str, values: np.ndarray, template: np.ndarray) -> Case:
    """Return a case with other values of an input, or of the cotangent, in the same dtype."""
    values = values.astype(template.dtype)
    if name == "grad_output":
        return Case(case.inputs, values, case.parameters)
    return case.with_inputs(**{name: values})


def _contiguous_elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements that follow a tensor's first one in memory, in its shape; None if the memory ends before."""
    available = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if available < tensor.numel() or not tensor.numel():
        return None
    return tensor.as_strided([tensor.numel()], [1], tensor.storage_offset()).view(tensor.shape)
