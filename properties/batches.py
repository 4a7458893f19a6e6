"""The checks that samples of a batch do not see one another, however many they are."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import numpy as np
import torch

from properties import far_apart
from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dtypes import bits
from properties.operation import Operation
from properties.running_error import Bounded
from properties.search import (
    Failure,
    Search,
    Subject,
    compare_results,
    describe,
    expected_results,
    given_tensors,
    named_results,
)

# Of a result, for which a batch is tried in parts, too, among the named examples.
NAMED_ELEMENTS = 512


def _samples(operation: Operation, case: Case) -> int:
    """How many samples a case has side by side; 1 where its first axis is no batch."""
    if not all(case[name].ndim > axes for name, axes in operation.batched.items()):
        return 1
    return case.grad_output.shape[0]


def _part(operation: Operation, case: Case, samples: slice) -> Case:
    inputs = {name: array[samples] if name in operation.batched else array for name, array in case.inputs.items()}
    return replace(case, inputs=inputs, grad_output=case.grad_output[samples])


def _evaluate(
    subject: Subject, case: Case, place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The output and the gradients that have a batch, by name; and what the call was given."""
    output, gradients, tensors = subject.evaluate(case, place=place)
    batched = {name: gradients[name] for name in subject.operation.batched if name in gradients}
    return named_results(output.detach(), batched), tensors


def the_batch_does_not_matter(subject: Subject, search: Search) -> None:
    """A sample gives the same among others as among fewer: bit for bit where that is claimed, else within its bound."""
    operation = subject.operation

    def body(case: Case) -> None:
        count = _samples(operation, case)
        hypothesis.assume(count > 1 and case.grad_output.size)
        # A part of a transposed batch may be contiguous, and be read by another kernel.
        case = replace(case, layouts={})
        whole, tensors = _evaluate(subject, case)
        agreements = []
        # Some from the middle, so that they stand elsewhere in their blocks; and the last alone.
        for samples in (slice(count // 3, count // 3 + (count + 1) // 2), slice(count - 1, count)):
            part = _part(operation, case, samples)
            expected = expected_results(subject, part) if subject.depends_on_batch else {}
            for name, alone in _evaluate(subject, part)[0].items():
                among = whole[name][samples]
                what = f"{name} of samples {samples.start} to {samples.stop - 1} among all {count}"
                if expected:
                    within = expectation(expected[name], subject.dtype)
                    within = Bounded(subject.dtype.array(alone), 2 * within.error, within.arithmetic)
                    try:
                        agreements.append(compare(subject.dtype.array(among), within, subject.dtype, what))
                    except Disagreement as disagreement:
                        raise Failure(f"{subject}: {disagreement}\nwith {describe(tensors)}") from None
                else:
                    # Of which sign and payload a NaN is, no sum or product says.
                    differs = (bits(among) != bits(alone)) & ~(among.isnan() & alone.isnan())
                    if differs.any():
                        wrong = f"{int(differs.sum())} of {differs.numel()} elements differ from those of them alone"
                        claim = "the backend's module has no depends_on_batch, and so claims the same bits"
                        raise Failure(f"{subject}: {what}: {wrong}; {claim}\nwith {describe(tensors)}")
                    agreements.append(Agreement(0.0, among.numel(), 0))
        search.saw(*agreements)

    made = {name: make(subject.dtype) for name, make in operation.examples.items()}
    batches = {name: case for name, case in made.items() if _samples(operation, case) > 1}
    small = {name: case for name, case in batches.items() if 0 < case.grad_output.size <= NAMED_ELEMENTS}
    # Of generated cases few have samples that are far apart, as those of some bugs are.
    search.cases(subject, "batch", body, few=True, also=small)


def many_samples_are_alike(subject: Subject, search: Search, samples: int = 0, results: int = 0) -> None:
    """A small batch, repeated, gives the same again and again: no grid, and no index of a result, is too large.

    Args:
        subject: of an operation that has batches.
        search: how hard to look.
        samples: how many there are at the least.
        results: how many elements the output has at the least.

    Raises:
        NoRoom: the device has not the memory.
    """
    operation = subject.operation

    def body(case: Case) -> None:
        count = _samples(operation, case)
        whole = all(case[name].ndim > axes for name, axes in operation.batched.items())
        hypothesis.assume(whole and count and case.grad_output.size)
        case = replace(case, layouts={})
        repetitions = 1 + max(samples // count, results // case.grad_output.size)
        given = given_tensors(subject, case)
        repeated = {*operation.batched, "grad_output"}
        needed = sum(t.nbytes for name, t in given.items() if name in repeated) * 4 * repetitions
        if subject.device == "cuda":
            far_apart.wait_for_room(torch.device("cuda", torch.cuda.current_device()), needed)

        def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name not in repeated:
                return tensor
            return tensor.repeat(repetitions, *[1] * (tensor.ndim - 1))

        found, tensors = _evaluate(subject, case, place)
        expected, agreements = expected_results(subject, case), []
        for name, result in found.items():
            first = result[:count]
            if not result.numel():
                continue
            agreements += compare_results(subject, {name: first}, expected, tensors, f"the first {count} samples: ")
            error = expectation(expected[name], subject.dtype).error
            # A sum of other lengths beside it may be of another order; what claims the same bits may not.
            allowed = (
                torch.zeros(())
                if subject.depends_on_batch is None
                else torch.from_numpy(np.asarray(2 * error, np.float64))
            )
            start = 0
            # In pieces: what is compared takes more room than what is computed.
            for piece in result.split(count * max(1, (1 << 22) // max(first.numel(), 1))):
                rows = piece.view(-1, *first.shape)
                alike = (rows == first) | (rows.isnan() & first.isnan())
                alike |= (rows.double() - first.double()).abs() <= allowed.to(rows.device)
                if not alike.all():
                    at = start + int(alike.flatten(1).all(1).logical_not().nonzero()[0]) * count
                    what = f"{name} of samples {at} to {at + count - 1} is not that of the first {count}, their equals"
                    raise Failure(f"{subject}: {what}\nwith {describe(tensors)}")
                start += len(piece)
        search.saw(*agreements)

    search.cases(subject, "many samples", body, few=True)
