"""The checks that the samples of a batch do not affect one another, in batches of any size."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import case_tensors, compare_results, describe, expected_results, named_results
from fourfold.checks.search import Search, Subject, need
from fourfold.instruments.gpu_locks import room
from fourfold.numerics.bounded import Bounded, OneOf
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import bits
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import Operation

# Named examples whose result has at most this many elements are also split into parts.
NAMED_ELEMENTS = 512
# The fewest elements of a sample's result, if samples of several elements make up a very large result. A sum over two
# billion samples would take a program of one tile a minute.
LEAST_OF_A_SAMPLE = 32
# About this many repetitions are compared with the oracle's results if several results of a sample are right.
SOME_REPETITIONS = 1000


def _is_batch(operation: Operation, case: Case) -> bool:
    """Return whether the result, and each input that may have samples, has an axis for them."""
    arrays = ((case[name], axes) for name, axes in operation.batched.items() if name in case.inputs)
    return case.grad_output.ndim > 0 and all(array.ndim > axes for array, axes in arrays)


def _samples(operation: Operation, case: Case) -> int:
    """Return the number of samples: 1 if the first axis is not a batch, or if the result is one number for all."""
    if not _is_batch(operation, case):
        return 1
    return case.grad_output.shape[0]


def _select(operation: Operation, case: Case, samples: slice) -> Case:
    inputs = {name: array[samples] if name in operation.batched else array for name, array in case.inputs.items()}
    return replace(case, inputs=inputs, grad_output=case.grad_output[samples])


def _evaluate(
    subject: Subject, case: Case, place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the output and the gradients that have a batch, by name, and the tensors of the call."""
    output, gradients, tensors = subject.evaluate(case, place=place)
    batched = {name: gradients[name] for name in subject.operation.batched if name in gradients}
    return named_results(output.detach(), batched), tensors


@allow_storage_accuracy
def the_batch_does_not_matter(subject: Subject, search: Search) -> None:
    """Check that a sample has the same results in a batch and in a part of it: the same bits, or within its bounds.

    The same bits are required of an implementation that claims them.
    """
    operation = subject.operation

    def body(case: Case) -> None:
        count = _samples(operation, case)
        need(count > 1 and case.grad_output.size)
        # Make all tensors contiguous. A part of a transposed batch may be contiguous, and another kernel would read it.
        case = replace(case, layouts={})
        of_batch, tensors = _evaluate(subject, case)
        agreements = []
        # Some samples from the middle, which then have another place in their blocks, and the last sample alone.
        for samples in (slice(count // 3, count // 3 + (count + 1) // 2), slice(count - 1, count)):
            part = _select(operation, case, samples)
            expected = expected_results(subject, part) if subject.depends_on_batch else {}
            for name, alone in _evaluate(subject, part)[0].items():
                in_batch = of_batch[name][samples]
                description = f"{name} of samples {samples.start} to {samples.stop - 1} among all {count}"
                if expected:
                    dtype = subject.dtype_of(name)
                    bound = expectation(expected[name], dtype)
                    if not isinstance(bound, OneOf):  # each call may choose another of several right results
                        bound = Bounded(subject.dtype.array(alone), 2 * bound.error, bound.arithmetic)
                    try:
                        agreements.append(compare(dtype.array(in_batch), bound, dtype, description))
                    except Disagreement as disagreement:
                        raise Failure(f"{subject}: {disagreement}\nwith {describe(tensors)}", name) from None
                else:
                    # Sums and products do not define the sign and the payload of a NaN.
                    differs = (bits(in_batch) != bits(alone)) & ~(in_batch.isnan() & alone.isnan())
                    if differs.any():
                        problem = f"{int(differs.sum())} of {differs.numel()} elements differ from those of them alone"
                        claim = "the backend's module has no depends_on_batch, and so claims the same bits"
                        raise Failure(f"{subject}: {description}: {problem}; {claim}\nwith {describe(tensors)}", name)
                    agreements.append(Agreement(0.0, in_batch.numel(), 0))
        search.saw(*agreements)

    batches = {name: case for name, case in subject.named_examples() if _samples(operation, case) > 1}
    small = {name: case for name, case in batches.items() if 0 < case.grad_output.size <= NAMED_ELEMENTS}
    # Some bugs show only with samples of very different values, which few generated cases have.
    search.cases(subject, "batch", body, sparse=True, extra=small)


def many_samples_are_alike(subject: Subject, search: Search, samples: int = 0, results: int = 0) -> None:
    """Check that each repetition of a small batch gives the same results: no grid or index overflows.

    Args:
        subject: an implementation of an operation that has batches.
        search: the limits of the search.
        samples: the least number of samples.
        results: the least number of elements of the output.

    Raises:
        NotReached: the device lacks the memory.
    """
    operation = subject.operation

    def body(case: Case) -> None:
        count = _samples(operation, case)
        need(_is_batch(operation, case) and count and case.grad_output.size)
        if results and case.grad_output.ndim > 1:
            need(case.grad_output.size >= count * LEAST_OF_A_SAMPLE)
        case = replace(case, layouts={})
        repetitions = 1 + max(samples // count, results // case.grad_output.size)
        inputs = case_tensors(subject, case)
        repeated = {*operation.batched, "grad_output"}
        memory = sum(t.nbytes for name, t in inputs.items() if name in repeated) * 4 * repetitions

        def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat(repetitions, *[1] * (tensor.ndim - 1)) if name in repeated else tensor

        expected, agreements = expected_results(subject, case), []
        with room(subject.device, memory):
            outputs, tensors = _evaluate(subject, case, place)
            for name in list(outputs):
                result = outputs.pop(name)
                if result.numel():
                    first, context = {name: result[:count]}, f"the first {count} samples: "
                    agreements += compare_results(subject, first, expected, tensors, context)
                    _require_repetition(subject, name, result, count, expected[name], describe(tensors))
            del result, tensors  # before another process may take as much
        search.saw(*agreements)

    search.cases(subject, "many samples", body, sparse=True)


def _require_repetition(
    subject: Subject, name: str, result: torch.Tensor, count: int, expected: Bounded, described: str
) -> None:
    """Require that a result of repeated samples repeats the result of the first `count` samples.

    In a batch of another size a sum may have another order, unless the implementation claims the same bits. If
    several results are right, a repetition may have any of them.

    Raises:
        Failure: a repetition differs. The message names the samples.
    """
    first, start = result[:count], 0
    if isinstance(expected, OneOf) and subject.depends_on_batch is not None:
        dtype = subject.dtype_of(name)
        for low in range(count, len(result), max(len(result) // SOME_REPETITIONS // count, 1) * count):
            samples = f"{name} of samples {low} to {low + count - 1}"
            compare(dtype.array(result[low : low + count]), expectation(expected, dtype), dtype, samples)
        return
    error = expectation(expected, subject.dtype_of(name)).error
    tolerance = (
        torch.zeros(()) if subject.depends_on_batch is None else torch.from_numpy(np.asarray(2 * error, np.float64))
    ).to(result.device)
    # Compare in pieces, because the comparison takes more memory than the results.
    for piece in result.split(count * max(1, (1 << 22) // max(first.numel(), 1))):
        rows = piece.view(-1, *first.shape)
        equal = (rows == first) | (rows.isnan() & first.isnan())
        equal |= (rows.double() - first.double()).abs() <= tolerance
        if not equal.all():
            low = start + int(equal.flatten(1).all(1).logical_not().nonzero()[0]) * count
            problem = f"{name} of samples {low} to {low + count - 1} is not that of the first {count}, their equals"
            raise Failure(f"{subject}: {problem}\nwith {described}", name)
        start += len(piece)
