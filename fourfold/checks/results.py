"""The results of a call: their names, their expected values and the comparison."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fourfold.checks.search import GRADIENT_OF, OUTPUT, Subject
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import DType, differing, host_copies
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import reference, reference_gradients


def describe(tensors: dict[str, torch.Tensor]) -> str:
    """Return the shapes and strides of tensors, for messages."""
    return ", ".join(f"{name}{list(t.shape)} strides {list(t.stride())}" for name, t in tensors.items())


def compare_results(
    subject: Subject,
    results: Mapping[str, torch.Tensor],
    expected: Mapping[str, Bounded],
    tensors: dict[str, torch.Tensor],
    context: str = "",
) -> list[Agreement]:
    """Compare results with the expected ones.

    Raises:
        Failure: a result is not a plain tensor of its dtype on the subject's device, or disagrees. The message names
            the result, `context` it was wrong, and the strides of the call's tensors.
    """
    descriptions = {name: f"{context}{name}" for name in results}

    def failure(problem: object, name: str, worst: float = 0.0) -> Failure:
        unwritten = _unwritten(subject, results, tensors)
        return Failure(f"{subject}: {problem}{unwritten}\nwith {describe(tensors)}", name, worst)

    for name, result in results.items():
        if problem := _problem(subject, result, subject.dtype_of(name), descriptions[name]):
            raise failure(problem, name)
    agreements = []
    for name, tensor in zip(results, host_copies(*results.values())):
        dtype = subject.dtype_of(name)
        try:
            agreements.append(
                compare(dtype.array(tensor), expectation(expected[name], dtype), dtype, descriptions[name])
            )
        except Disagreement as disagreement:
            raise failure(disagreement, name, disagreement.worst) from None
    return agreements


def _unwritten(subject: Subject, results: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the note that a call has not written into an argument that it must change, or an empty string."""
    name = subject.operation.changed
    if name not in tensors or OUTPUT not in results or differing([(results[OUTPUT], tensors[name])])[0]:
        return ""
    return f"; the call has written nothing new into {name}"


def _problem(subject: Subject, actual: torch.Tensor, dtype: DType, name: str) -> str | None:
    problem = None
    if not isinstance(actual, torch.Tensor):
        problem = f"{name} is a {type(actual).__name__}, not a tensor"
    elif type(actual) is not torch.Tensor:
        # A subclass may compute when it is read, or hide its work from autograd and torch.compile.
        problem = f"{name} is a {type(actual).__name__}, a kind of tensor of its own"
    elif actual.dtype != dtype.torch:
        problem = f"{name} has dtype {actual.dtype}, expected {dtype.torch}"
    elif actual.device.type != subject.device:
        problem = f"{name} is on {actual.device}, expected on {subject.device}"
    return problem


def inputs_are_unchanged(subject: Subject, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """Require that a call has not changed its inputs.

    Raises:
        Failure: an input has changed. The message names it.
    """
    fresh = (subject.dtype.tensor(case.inputs[name], subject.device) for name in tensors)
    counts = differing(zip((tensor.detach() for tensor in tensors.values()), fresh))
    for name, count in zip(tensors, counts):
        if count:
            raise Failure(f"{subject}: the call changed its input {name}\nwith {describe(tensors)}")


def require_same_bits(
    subject: Subject,
    results: Mapping[str, torch.Tensor],
    former: Mapping[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    context: str = "",
    problem: str = "is not the same bit for bit",
) -> None:
    """Require that results have the bits of those of another call.

    Raises:
        Failure: one has not. The message names the result, `context` and the `problem`.
    """
    for name, count in zip(results, differing((results[name], former[name]) for name in results)):
        if count:
            raise Failure(f"{subject}: {context}{name} {problem}\nwith {describe(tensors)}", name)


def case_tensors(subject: Subject, case: Case) -> dict[str, torch.Tensor]:
    """Return the inputs of a case and its "grad_output", by name."""
    grad_output = {"grad_output": case.tensor("grad_output", subject.dtype, subject.device)}
    return case.tensors(subject.dtype, subject.device) | grad_output


def named_gradients(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Return gradients by the names of results, "gradient of ...", from gradients by the names of their inputs."""
    return {f"{GRADIENT_OF}{name}": gradient for name, gradient in gradients.items()}


def named_results(output: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the results of a call by name: "output", and "gradient of ..." for each input that has one."""
    return {OUTPUT: output, **named_gradients(gradients)}


def expected_gradients(subject: Subject, case: Case) -> dict[str, Bounded]:
    """Return the oracle's gradients, as `named_results` names them, with their running error.

    They are unbounded for a foreign subject where an input is NaN.
    """
    gradients = reference_gradients(subject.operation, case, subject.dtype)
    if subject.foreign:
        gradients = {name: _free_at_nan(gradient, case.inputs[name]) for name, gradient in gradients.items()}
    return named_gradients(gradients)


def _free_at_nan(gradient: Bounded, array: np.ndarray) -> Bounded:
    undefined = np.isnan(array.astype(np.float64))
    if not undefined.any():
        return gradient
    return gradient.within(np.where(undefined, np.inf, gradient.error))


def expected_results(subject: Subject, case: Case) -> dict[str, Bounded]:
    """Return the oracle's value for each of the `named_results`, with its running error."""
    gradients = expected_gradients(subject, case) if subject.differentiable else {}
    return {OUTPUT: reference(subject.operation, case, subject.dtype), **gradients}


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which is the same for all tensors that share it."""
    return tensor.untyped_storage().data_ptr()
