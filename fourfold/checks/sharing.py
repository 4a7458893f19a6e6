"""The check that inputs may share memory: lie in one storage, overlap, or be the same tensor."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import (
    case_tensors,
    compare_results,
    expected_gradients,
    inputs_are_unchanged,
    named_results,
)
from fourfold.checks.search import GRADIENT_OF, OUTPUT, Search, Subject
from fourfold.inputs.combinations import make_case
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.bounded import Bounded, stored
from fourfold.operations.axes import LEADING
from fourfold.operations.case import Case, is_floating
from fourfold.operations.outputs import list_of
from fourfold.operations.record import reference

# The size of all axes, so that inputs have equal shapes if they can, and two leading axes with as many rows.
SIDE, SQUARE = 16, (4, 4)
# Tensors begin at a multiple of this many bytes for a kernel that claims aligned tensors.
ALIGNED = 16


@dataclass(frozen=True)
class Arrangement:
    """Tensors of a case that share memory.

    Attributes:
        description: the arrangement in words, for messages.
        case: the case.
        tensors: the tensors that share memory, by name; the others are separate as usual.
        twice: the names of two inputs that are the same tensor, if any.
    """

    description: str
    case: Case
    tensors: Mapping[str, torch.Tensor]
    twice: tuple[str, str] | None = None


@allow_storage_accuracy
def inputs_may_share_memory(subject: Subject, search: Search) -> None:
    """Check the results for inputs that lie in one storage, that overlap, and that are the same tensor.

    The gradient of a tensor passed twice is the sum of both gradients. The call must not write to its inputs.
    """
    search.lays_out = True
    for arrangement in _arrangements(subject):
        if subject.claims.outside(subject.operation, arrangement.case, subject.dtype) is None:
            check = _check_repeated_tensor if arrangement.twice else _check_shared_memory
            name = arrangement.description.replace(" ", "_")
            search.run_named_case(name, arrangement.case, functools.partial(check, subject, search, arrangement))
    if not search.brief:
        search.require_evidence(subject, "sharing")


def _expected_results(subject: Subject, case: Case, gradients: bool) -> dict[str, Bounded]:
    expected = {OUTPUT: reference(subject.operation, case, subject.dtype)}
    if gradients:
        expected |= expected_gradients(subject, case)
    return expected


def _check_shared_memory(subject: Subject, search: Search, arrangement: Arrangement, case: Case) -> None:
    output, gradients, tensors = subject.evaluate(case, place=lambda name, t: arrangement.tensors.get(name, t))
    expected = _expected_results(subject, case, bool(gradients))
    search.saw(
        *compare_results(
            subject, named_results(output, gradients), expected, tensors, f"where {arrangement.description}, "
        )
    )
    inputs_are_unchanged(subject, case, tensors)


def _check_repeated_tensor(subject: Subject, search: Search, arrangement: Arrangement, case: Case) -> None:
    assert arrangement.twice is not None
    first, second = arrangement.twice
    differentiable = subject.differentiable and {first, second} <= {*subject.operation.differentiable_in(case)}
    tensors = case.tensors(subject.dtype, subject.device)
    tensors[second] = tensors[first].requires_grad_(differentiable)
    output = subject.call(**tensors, **case.parameters)
    expected = _expected_results(subject, case, differentiable)
    results, expected_results = {OUTPUT: output.detach()}, {OUTPUT: expected[OUTPUT]}
    if differentiable:
        cotangent = case.tensor("grad_output", subject.dtype, subject.device)
        (results[f"{GRADIENT_OF}{first}"],) = gradients_of(output, [tensors[first]], cotangent)
        gradients = [stored(expected[f"{GRADIENT_OF}{name}"]) for name in (first, second)]
        expected_results[f"{GRADIENT_OF}{first}"] = gradients[0] + gradients[1]
    search.saw(*compare_results(subject, results, expected_results, tensors, f"where {arrangement.description}, "))
    inputs_are_unchanged(subject, case, tensors)


# ---- arrangements of tensors in shared memory


def _arrangements(subject: Subject) -> Iterator[Arrangement]:
    for case in subject.small_example().values():
        plain = replace(case, layouts={})
        yield Arrangement("all tensors lie in one storage", plain, _pack_into_storage(subject, plain))
    for case in _square_cases(subject):
        for first, second in _pairs_of_equal_shape(subject, case):
            yield from _pair_arrangements(subject, case, first, second)


def _pack_into_storage(subject: Subject, case: Case) -> dict[str, torch.Tensor]:
    """Return the tensors of a case one after another in memory, without gaps unless a claim needs alignment."""
    views, offset = {}, 0
    tensors = {name: tensor for name, tensor in case_tensors(subject, case).items() if tensor.is_floating_point()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.dtype == subject.dtype.torch}
    holder = torch.full(
        (sum(tensor.numel() + ALIGNED for tensor in tensors.values()) + 1,),
        torch.nan,
        dtype=subject.dtype.torch,
        device=subject.device,
    )
    for name, tensor in tensors.items():
        views[name] = holder[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        step = ALIGNED // tensor.element_size() if subject.claims.aligned else 1
        offset = -(-(offset + tensor.numel()) // step) * step
    return views


def _square_cases(subject: Subject) -> Iterator[Case]:
    """Yield a case whose axes all have the same size, and one with two leading axes of equal size."""
    sized = subject.operation.sized
    if sized is None or not sized.allows(sizes := dict.fromkeys(sized.axes, SIDE)):
        return
    yield sized.make(sizes)(subject.dtype)
    if LEADING in sizes and not subject.claims.contiguous:
        case = make_case(subject.operation, subject.dtype, sizes, SQUARE)
        if case is not None:
            yield case


def _pairs_of_equal_shape(subject: Subject, case: Case) -> list[tuple[str, str]]:
    # A call may not be given a tensor twice that it writes into.
    excluded = {*subject.operation.ordinary, *subject.operation.mutates}
    free = [name for name, array in case.inputs.items() if is_floating(array) and not {name, list_of(name)} & excluded]
    pairs = itertools.combinations(free, 2)
    return [(a, b) for a, b in pairs if _are_exchangeable(case[a], case[b]) and case[a].ndim]


def _are_exchangeable(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _pair_arrangements(subject: Subject, case: Case, first: str, second: str) -> Iterator[Arrangement]:
    """Yield two inputs as one tensor, as overlapping tensors, and as a tensor and its transpose."""
    dtype, device = subject.dtype, subject.device
    equal = case.with_inputs(**{second: case[first]})
    yield Arrangement(f"{first} and {second} are one tensor", equal, {}, (first, second))
    base = dtype.tensor(np.concatenate([case[first], case[second][:1]]), device)
    views = {first: base[:-1], second: base[1:]}
    offset = base.stride(0) * base.element_size()
    if not (subject.claims.aligned and offset % ALIGNED):
        overlapping = case.with_inputs(**{second: np.concatenate([case[first], case[second][:1]])[1:]})
        yield Arrangement(f"{first} and {second} overlap", overlapping, views)
    if case[first].ndim > 1 and case[first].shape[0] == case[first].shape[1] and not subject.claims.contiguous:
        base = dtype.tensor(case[first], device)
        views = {first: base, second: base.transpose(0, 1)}
        transposed = case.with_inputs(**{second: np.swapaxes(case[first], 0, 1).copy()})
        yield Arrangement(f"{second} is {first} transposed", transposed, views)
