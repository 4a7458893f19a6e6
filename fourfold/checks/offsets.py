"""The check that offsets may be too large for 32 bits."""

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import case_tensors, compare_results, expected_results, named_results
from fourfold.checks.search import Search, Subject, need
from fourfold.instruments import sparse_memory
from fourfold.instruments.gpu_locks import room
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Unclaimed, Unsupported


@allow_storage_accuracy
def offsets_may_pass_32_bits(subject: Subject, search: Search) -> None:
    """Check tensors, the cotangent included, whose elements lie 2^31 or more apart along any axis, one at a time.

    Raises:
        NotReached: the device lacks the memory, or the range of addresses.
        Unsupported: the implementation claims contiguous tensors only, or its module gives a reason why it does not
            support such offsets.
    """
    if subject.claims.contiguous:
        raise Unclaimed("elements that lie apart")
    if subject.offsets_in_32_bits:
        raise Unsupported(subject.offsets_in_32_bits)

    def body(case: Case) -> None:
        small = case_tensors(subject, case)
        places = [(name, axis) for name, tensor in small.items() for axis in sparse_memory.axes(tensor)]
        need(places)
        expected, agreements = expected_results(subject, case), []
        for far, axis in places:

            def place(name: str, tensor: torch.Tensor, far: str = far, axis: int = axis) -> torch.Tensor:
                return sparse_memory.spread(tensor, axis) if name == far else tensor

            with room(subject.device, sparse_memory.room_needed(2 * sparse_memory.SIDE, small[far])):
                output, gradients, tensors = subject.evaluate(case, place=place)
                context = f"with axis {axis} of {far} 2^31 elements long: "
                agreements += compare_results(subject, named_results(output, gradients), expected, tensors, context)
                del output, gradients, tensors  # before another process may take as much
        search.saw(*agreements)

    search.lays_out = True
    extra = subject.operation.examples_for_offsets(subject.dtype, subject.most_named)
    search.cases(subject, "offsets", body, sparse=True, extra=extra)
