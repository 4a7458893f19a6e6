"""A tensor with torch's negative bit, whose memory holds its negated values, is read correctly."""

import pytest
import torch

from fourfold.backends import BACKENDS
from fourfold.checks.search import Search, Subject
from fourfold.compat import torch_internals
from fourfold.instruments.evaluation import evaluate_tensors
from fourfold.numerics.compare import compare, expectation
from fourfold.operations.case import Case
from fourfold.operations.record import reference, reference_gradients


def negative_view(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the negative bit set, as in the imaginary part of a complex conjugate."""
    negates = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # torch negates no float8
    return torch_internals.negated_view(-tensor) if negates else tensor


# A kernel that gets an address reads the negated values, unless torch's dispatcher has resolved the bit before.
@pytest.mark.only(backends=BACKENDS, dtypes=["float32"])
@pytest.mark.parametrize("gradients", [False, True], ids=["output", "gradients"])
def test_tensors_with_the_negative_bit_are_read_as_their_values(
    subject: Subject, search: Search, gradients: bool
) -> None:
    operation, dtype = subject.operation, subject.dtype

    def body(case: Case) -> None:
        output, found, _ = evaluate_tensors(
            subject.implementation, operation, case, dtype, subject.device, gradients, negative_view
        )
        expected = {"output": reference(operation, case, dtype)}
        if gradients:
            expected |= reference_gradients(operation, case, dtype)
        for name, result in {"output": output, **found}.items():
            kind = subject.dtype_of(name)
            search.saw(compare(dtype.array(result.resolve_neg()), expectation(expected[name], kind), kind, name))

    search.examples = min(search.examples, 3)
    search.for_all(f"negative views {subject} {gradients}", operation.smooth(dtype), body)
