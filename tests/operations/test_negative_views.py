"""A tensor with the negative bit, which holds the negatives of its values, is read as what it is."""

import pytest
import torch

from impls.backends import BACKENDS
from properties.case import Case
from properties.checks import Search, Subject
from properties.comparison import compare, expectation
from properties.operation import evaluate_tensors, reference, reference_gradients


def negative_view(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As the imaginary part of a complex conjugate is."""
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


# A kernel that is given an address reads the negatives, unless torch's dispatcher has been asked first.
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
            search.saw(compare(dtype.array(result.resolve_neg()), expectation(expected[name], dtype), dtype, name))

    search.examples = min(search.examples, 3)
    search.for_all(f"negative views {subject} {gradients}", operation.smooth(dtype), body)
