"""Every implementation works with torch.library, torch.compile and CUDA graphs as torch's own operations do."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from fourfold.checks.outputs import together
from fourfold.checks.records import operations
from fourfold.checks.search import Subject
from fourfold.compat import torch_internals
from fourfold.engine.cells import Cell
from fourfold.instruments.evaluation import evaluate_tensors
from fourfold.numerics.dtypes import DTYPES, bits
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Unsupported

# Candidates are left out: one may be any Python code, which these tools need not take.
OWN = ["torch", "triton", "cuda"]
# Tracing only sees that the output has the dtype of the inputs: one half type and one other are enough.
TRACED = ["bfloat16", "float32"]


# What torch.library.opcheck does by default.
OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALIKE: dict[str, list[Case]] = {}


# So many alike are looked for, in so many searches: what one draws depends on Hypothesis and on the repository.
ENOUGH, SEARCHES = 8, 8


def generate_cases(operation: str, dtype: str, seed: int) -> list[Case]:
    """Return what one search draws, of an operation or, as "operation.output", of one of its outputs."""
    cases: list[Case] = []
    name, _, output = operation.partition(".")
    record = operations()[name].outputs.get(output, operations()[name])

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=100, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(record.cases(DTYPES[dtype], 256))
    def draw(case: Case) -> None:
        cases.append(case)

    draw()
    return cases


@functools.cache
def drawn(operation: str, dtype: str) -> list[Case]:
    """Return generated cases that differ in sizes and nothing else.

    None of the sizes is 1, unless there are no such cases, as where a tensor has one number for each block of another.
    Then the same sizes are 1 in all of them.
    """
    groups: dict[Any, list[Case]] = defaultdict(list)
    with_ones: dict[Any, list[Case]] = defaultdict(list)
    for seed in range(1, SEARCHES + 1):
        for case in generate_cases(operation, dtype, seed):
            # torch.compile may recompile for other constants, ranks and integer types, and for sizes of 0 and 1. For
            # opcheck NaN does not equal NaN.
            sizes = [size for array in case.inputs.values() for size in array.shape]
            strided = set(case.layouts.values()) - {"contiguous"}
            finite = all(np.isfinite(array.astype(np.float64)).all() for array in case.inputs.values())
            if min(sizes, default=0) > 0 and not strided and finite:
                kinds = tuple((array.ndim, str(array.dtype)) for array in case.inputs.values())
                ones = tuple(size == 1 for size in sizes)
                (with_ones if any(ones) else groups)[kinds, ones, repr(case.parameters)].append(case)
        if any(len(group) >= ENOUGH for group in (groups or with_ones).values()):
            break
    return max(groups.values() or with_ones.values(), key=len)


def alike(subject: Subject, most: int = 4) -> list[Case]:
    """Return some of the drawn cases with finite results, so that one compiled function must serve them all."""
    if str(subject) not in ALIKE:
        cases = drawn(subject.operation.name, subject.dtype.name)
        finite = (case for case in cases if all(tensor.isfinite().all() for tensor in outcome(subject, case)))
        ALIKE[str(subject)] = list(itertools.islice(finite, most))
    group = ALIKE[str(subject)]
    assert len({case.grad_output.shape for case in group} | {repr(case.inputs) for case in group}) >= 2
    return group


def outcome(subject: Subject, case: Case, implementation: Callable | None = None) -> list[torch.Tensor]:
    """Return the output and the gradients of the subject, or of an implementation that was made from it."""
    output, gradients, _ = evaluate_tensors(
        implementation or subject.implementation, subject.operation, case, subject.dtype, subject.device
    )
    return [output.detach(), *gradients.values()]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [a.shape for a in actual] == [e.shape for e in expected]
    assert all(torch.equal(bits(a), bits(e)) for a, e in zip(actual, expected))


def compiled(subject: Subject, dynamic: bool) -> Callable:
    torch.compiler.reset()
    # On the CPU inductor would spend the time on code generation. Tracing, fake tensors and autograd are the same
    # without it.
    backend = "inductor" if subject.device == "cuda" else "aot_eager"
    return torch.compile(subject.implementation, fullgraph=True, dynamic=dynamic, backend=backend)


@pytest.mark.only(backends=["triton", "cuda"], dtypes=TRACED, whole=True)
def test_operator_passes_opcheck(subject: Subject, cell: Cell) -> None:
    operator = getattr(torch.ops.fourfold, f"{cell.operation}_{cell.backend}").default
    case = alike(together(subject))[-1]
    tensors = case.tensors(subject.dtype, subject.device)
    for name in subject.operation.differentiable:
        tensors[name].requires_grad_()
    arguments = {**tensors, **case.parameters}
    # An input that a case leaves out is None.
    given = tuple(map(arguments.get, torch_internals.argument_names(operator)))
    if any(tensor.is_floating_point() and tensor.dtype.itemsize == 1 for tensor in tensors.values()):
        # torch multiplies no float8 numbers to tell whether they are close. The check of memory tells it by their bits.
        torch.library.opcheck(operator, given, test_utils=[test for test in OPCHECK if test != "test_schema"])
    else:
        torch.library.opcheck(operator, given)


@pytest.mark.only(backends=["triton", "cuda"], dtypes=TRACED)
def test_compiled_for_one_shape_gives_the_same_bits(subject: Subject) -> None:
    case = alike(subject)[-1]
    assert_same(outcome(subject, case, compiled(subject, dynamic=False)), outcome(subject, case))


@pytest.mark.only(backends=["triton", "cuda"], dtypes=TRACED)
def test_compiled_once_serves_every_shape(subject: Subject) -> None:
    function, cases = compiled(subject, dynamic=True), alike(subject)
    # Otherwise sizes that happen to be equal in the first case are taken to be equal in all.
    with torch_internals.sizes_are_their_own():
        outcome(subject, cases[0], function)
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in cases:
            assert_same(outcome(subject, case, function), outcome(subject, case))


@pytest.mark.only(backends=OWN, devices=["cuda"])
def test_captured_in_a_graph_gives_the_same_bits(subject: Subject) -> None:
    """Capture refuses calls that wait for the device or allocate outside of torch's pool. Replay reads new values."""
    if subject.operation.length_varies:
        raise Unsupported(f"the length of what {subject.operation.name} returns is not known before its call has run")
    case = alike(subject)[-1]
    names = subject.operation.differentiable
    tensors = case.tensors(subject.dtype, subject.device)
    for name in names:
        tensors[name].requires_grad_()
    grad_output = case.tensor("grad_output", subject.dtype, subject.device)

    def step() -> list[torch.Tensor]:
        output = subject.implementation(**tensors, **case.parameters)
        gradients = torch.autograd.grad(output, [tensors[name] for name in names], grad_output) if names else ()
        return [output.detach(), *gradients]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for name in names:
                tensors[name].mul_(scale)
        expected = [tensor.clone() for tensor in step()]
        for tensor in captured:
            if tensor.data_ptr() != grad_output.data_ptr():  # a gradient may be the cotangent itself, as that of a sum
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        for _ in range(2):
            graph.replay()
        assert_same(captured, expected)
