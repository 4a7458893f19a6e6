"""The checks: what every implementation of an operation is put through. Each takes a subject and says what it saw.

A check raises `Failure` where the implementation is wrong; what it raises itself goes through unchanged.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from impls import backends
from properties.arena import POISONS, Arena
from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dispatch import Fallbacks
from properties.dtypes import DType, bits
from properties.operation import Evaluate, Law, Operation, Result, evaluate_tensors, reference, reference_gradients
from properties.running_error import Bounded

# What fails is looked for once more in cases of at most this many elements, which are drawn one by one and so shrink,
# in little time, to small whole numbers.
FEW_ELEMENTS = 8


class Failure(AssertionError):
    """An implementation failed a check."""


class Unsupported(Exception):
    """A check is not one that an implementation can be put through; says why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is being verified: one implementation of one operation, for one dtype on one device."""

    operation: Operation
    backend: str
    dtype: DType
    device: str
    implementation: Callable[..., torch.Tensor]
    # The same backend's implementation of another operation, for laws that relate two.
    sibling: Callable[[str], tuple[Operation, Callable[..., torch.Tensor]]]
    differentiable: bool = True  # whether it claims to have gradients

    def __str__(self) -> str:
        return f"{self.operation.name} · {self.backend} · {self.dtype} · {self.device}"

    def needs_gradients(self) -> None:
        """What follows is about gradients.

        Raises:
            Unsupported: the implementation has none.
        """
        if not self.differentiable:
            raise Unsupported("forward only: its output has no gradient where its inputs do")


@dataclass(kw_only=True)
class Search:
    """How hard to look, and what was seen on the way."""

    examples: int
    elements: int = 2048
    blob: str | None = None  # repeats one generated case
    note: Callable[[Case], None] = lambda case: None  # told of each case before it is run
    worst: float = 0.0
    ran: int = 0
    substantial: int = 0  # examples in which at least one element was held to a finite bound
    started: float = field(default_factory=time.perf_counter)

    def saw(self, *agreements: Agreement) -> None:
        """Count an example."""
        self.ran += 1
        self.substantial += any(a.elements > a.unspecified for a in agreements)
        self.worst = max([self.worst, *(a.worst for a in agreements)])

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.perf_counter() - self.started

    def for_all(
        self, name: str, strategy: st.SearchStrategy[Case], body: Callable[[Case], None], shrink: bool = True
    ) -> None:
        """Run `body` on generated cases; on failure Hypothesis shrinks the case, if it may, and shows it."""

        def holds(case: Case) -> None:
            self.note(case)
            body(case)

        # Hypothesis files what it learns, failures above all, under the name of the function.
        holds.__name__ = holds.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        # There is but one argument, of which nothing is left to explain.
        without = {hypothesis.Phase.explain} if shrink else {hypothesis.Phase.explain, hypothesis.Phase.shrink}
        settings = hypothesis.settings(
            max_examples=self.examples,
            phases=tuple(phase for phase in hypothesis.settings().phases if phase not in without),
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
        )
        test = settings(hypothesis.given(strategy)(holds))
        if self.blob:
            test = hypothesis.reproduce_failure(hypothesis.__version__, self.blob.encode())(test)
        test()

    def cases(self, subject: Subject, check: str, body: Callable[[Case], None]) -> None:
        """The named examples of the subject's operation, then generated cases."""
        if not self.blob:
            for name, make in subject.operation.examples.items():
                case = make(subject.dtype)
                self.note(case)
                try:
                    body(case)
                except Exception as error:
                    error.add_note(f"Named example {name}: {case!r}")
                    raise

        def among(elements: int, shrink: bool = True) -> None:
            name = f"{check} {subject} {elements}"
            self.for_all(name, subject.operation.cases(subject.dtype, elements), body, shrink)

        if self.blob:
            # It does not say for which of the two it was made.
            try:
                among(FEW_ELEMENTS)
            except hypothesis.errors.DidNotReproduce:
                among(self.elements)
            return
        try:
            among(self.elements, shrink=False)
        except Exception:
            if hypothesis.Phase.shrink in hypothesis.settings().phases:
                for elements in (FEW_ELEMENTS, self.elements):
                    try:
                        among(elements)
                    except Exception as smaller:
                        raise smaller from None
            raise
        if not self.substantial:
            raise Failure(f"{subject}: {check} ran {self.ran} examples, and none of them could have failed")


def describe(tensors: dict[str, torch.Tensor]) -> str:
    """Shapes and strides, for messages."""
    return ", ".join(f"{name}{list(t.shape)} strides {list(t.stride())}" for name, t in tensors.items())


def _compare(
    subject: Subject, actual: torch.Tensor, expected: Bounded, what: str, tensors: dict[str, torch.Tensor]
) -> Agreement:
    problem = None
    if not isinstance(actual, torch.Tensor):
        problem = f"{what} is a {type(actual).__name__}, not a tensor"
    elif actual.dtype != subject.dtype.torch:
        problem = f"{what} has dtype {actual.dtype}, expected {subject.dtype.torch}"
    elif actual.device.type != subject.device:
        problem = f"{what} is on {actual.device}, expected on {subject.device}"
    if problem is None:
        try:
            return compare(subject.dtype.array(actual), expectation(expected, subject.dtype), subject.dtype, what)
        except Disagreement as disagreement:
            problem = str(disagreement)
    raise Failure(f"{subject}: {problem}\nwith {describe(tensors)}")


def _unchanged(subject: Subject, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        given = case.inputs[name]
        now = tensor.detach()
        fresh = subject.dtype.tensor(given, subject.device)
        if not torch.equal(bits(now), bits(fresh)):
            raise Failure(f"{subject}: the call changed its input {name}\nwith {describe(tensors)}")


def forward_agrees(subject: Subject, search: Search) -> None:
    """The output is the oracle's, within its running error; inputs stay as they were."""

    def body(case: Case) -> None:
        output, _, tensors = evaluate_tensors(
            subject.implementation, subject.operation, case, subject.dtype, subject.device, gradients=False
        )
        expected = reference(subject.operation, case, subject.dtype)
        agreement = _compare(subject, output, expected, "output", tensors)
        _unchanged(subject, case, tensors)
        search.saw(agreement)

    search.cases(subject, "forward", body)


def backward_agrees(subject: Subject, search: Search) -> None:
    """The gradients under a random cotangent are the oracle's, within its running error."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        _, gradients, tensors = evaluate_tensors(
            subject.implementation, subject.operation, case, subject.dtype, subject.device
        )
        expected = reference_gradients(subject.operation, case, subject.dtype)
        agreements = [
            _compare(subject, gradients[name], expected[name], f"gradient of {name}", tensors) for name in expected
        ]
        _unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.cases(subject, "backward", body)


def single_gradients_agree(subject: Subject, search: Search) -> None:
    """The gradient of each input alone, the others constant, is the oracle's too.

    Not bit for bit the one taken together with the others': a kernel that leaves out half of the work is another
    kernel, whose compiler fuses other multiplications and additions.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        expected = reference_gradients(subject.operation, case, subject.dtype)
        agreements = []
        for name in subject.operation.differentiable:
            tensors = case.tensors(subject.dtype, subject.device)
            tensors[name].requires_grad_()
            output = subject.implementation(**tensors, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            (gradient,) = torch.autograd.grad(output, tensors[name], grad_output)
            agreements.append(_compare(subject, gradient, expected[name], f"gradient of {name} alone", tensors))
        search.saw(*agreements)

    search.cases(subject, "single gradients", body)


def gradcheck(subject: Subject, search: Search) -> None:
    """torch.autograd.gradcheck of the implementation itself, in float64, away from ties."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        names = subject.operation.differentiable
        constants = {
            name: tensor for name, tensor in case.tensors(subject.dtype, subject.device).items() if name not in names
        }
        points = [case.tensor(name, subject.dtype, subject.device).requires_grad_() for name in names]
        weights = case.tensor("grad_output", subject.dtype, subject.device)

        def weighted(*tensors: torch.Tensor) -> torch.Tensor:
            output = subject.implementation(**dict(zip(names, tensors)), **constants, **case.parameters)
            return output * weights

        try:
            # The whole Jacobian once; then its product with random vectors, which costs as much as two calls.
            torch.autograd.gradcheck(weighted, points, fast_mode=search.ran > 0)
        except GradcheckError as error:
            raise Failure(f"{subject}: gradcheck: {error}") from error
        search.saw(Agreement(0.0, 1, 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)


def law_holds(law: Law, subject: Subject, search: Search) -> None:
    """One law of the operation, on the implementation's own results."""

    with_gradients = False  # whether the law has asked for them: then one call gives both

    def evaluate(case: Case, operation: str | None = None) -> Result:
        record, implementation = subject.operation, subject.implementation
        if operation is not None:
            record, implementation = subject.sibling(operation)

        def bounded(actual: torch.Tensor, expected: Bounded) -> Bounded:
            error = expectation(expected, subject.dtype).error
            return Bounded(subject.dtype.array(actual), error, subject.dtype.arithmetic)

        @functools.cache
        def results(gradients: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            return evaluate_tensors(implementation, record, case, subject.dtype, subject.device, gradients)

        def output() -> Bounded:
            actual, _, _ = results(with_gradients)
            return bounded(actual, reference(record, case, subject.dtype))

        def gradients() -> dict[str, Bounded]:
            nonlocal with_gradients
            subject.needs_gradients()
            with_gradients = True
            _, actual, _ = results(True)
            expected = reference_gradients(record, case, subject.dtype)
            return {name: bounded(actual[name], expected[name]) for name in expected}

        return Result(output, gradients)

    def body(case: Case) -> None:
        try:
            search.saw(*hold(law, evaluate, case, subject.dtype))
        except Disagreement as disagreement:
            raise Failure(f"{subject}: {law.__name__}: {disagreement}") from None

    search.cases(subject, law.__name__, body)


def hold(law: Law, evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Agreement]:
    """Compare both sides of each relation of a law, within the sum of their bounds."""
    for relation in law(evaluate, case, dtype):
        within = Bounded(relation.expected.value, relation.actual.error + relation.expected.error, dtype.arithmetic)
        yield compare(relation.actual.value, within, dtype, "left side")


def declared_errors_are_raised(subject: Subject, search: Search) -> None:
    """Bad input raises the declared error, which names the argument; where it cannot be known, the output is NaN."""
    for declared in subject.operation.errors:
        arguments = declared.arguments(subject.device)
        try:
            output = subject.implementation(**arguments)
        except declared.raises as error:
            if declared.names not in str(error):
                raise Failure(
                    f"{subject}: {declared.name}: the message does not name {declared.names}: {error}"
                ) from error
        except Exception as error:
            raise Failure(
                f"{subject}: {declared.name}: {type(error).__name__} in place of {declared.raises.__name__}: {error}"
            ) from error
        else:
            if subject.device in declared.devices:
                missing = f"no {declared.raises.__name__} naming {declared.names} was raised"
                raise Failure(f"{subject}: {declared.name}: {missing}")
            if not output.isnan().all():
                raise Failure(f"{subject}: {declared.name}: the output is {output}, not NaN")
        search.saw(Agreement(0.0, 1, 0))


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """Twice the same call gives the same bits: no atomics on floating-point numbers, no reading of leftovers."""

    def body(case: Case) -> None:
        runs = []
        for order in (contextlib.nullcontext(), backends.other_order(subject.device)):
            with order:
                output, gradients, tensors = evaluate_tensors(
                    subject.implementation,
                    subject.operation,
                    case,
                    subject.dtype,
                    subject.device,
                    gradients=subject.differentiable,
                )
            runs.append((output.detach().clone(), {name: g.clone() for name, g in gradients.items()}))
        (output, gradients), (again, gradients_again) = runs
        if not torch.equal(bits(output), bits(again)):
            raise Failure(f"{subject}: the output differs between two calls\nwith {describe(tensors)}")
        for name, gradient in gradients.items():
            if not torch.equal(bits(gradient), bits(gradients_again[name])):
                raise Failure(f"{subject}: the gradient of {name} differs between two calls\nwith {describe(tensors)}")
        search.saw(Agreement(0.0, 1, 0))

    search.cases(subject, "repeats", body)


def memory_is_respected(subject: Subject, search: Search) -> None:
    """Only the given tensors are read, only the results written: these in full, and in memory of their own."""

    def body(case: Case) -> None:
        runs: list[dict[str, torch.Tensor]] = []
        for poison in POISONS:
            with Arena(poison) as arena:
                output, gradients, tensors = evaluate_tensors(
                    subject.implementation,
                    subject.operation,
                    case,
                    subject.dtype,
                    subject.device,
                    gradients=subject.differentiable,
                    place=arena.place,
                )
            for trespass in arena.trespasses():
                raise Failure(f"{subject}: the call {trespass}\nwith {describe(tensors)}")
            results = {"output": output, **{f"gradient of {name}": g for name, g in gradients.items()}}
            lent = {_storage(tensor): f"its input {name}" for name, tensor in tensors.items()}
            lent |= {_storage(former): "a former result" for run in runs for former in run.values()}
            for name, result in results.items():
                if result.numel() and _storage(result) in lent:
                    raise Failure(f"{subject}: {name} shares its memory with {lent[_storage(result)]}")
            runs.append({name: result.detach() for name, result in results.items()})
        for name in runs[0]:
            first, second = (subject.dtype.array(run[name]) for run in runs)
            differs = np.argwhere((first != second) & ~(np.isnan(first) & np.isnan(second)))
            if len(differs):
                at = tuple(int(i) for i in differs[0])
                why = f"is {first[at]} or {second[at]}, depending on memory that the call was not given"
                if np.isnan(first[at]) and second[at] == POISONS[1]:
                    why = "was never written, or comes from memory that the call was not given"
                raise Failure(f"{subject}: {name}{list(at)} {why}\nwith {describe(tensors)}")
        search.saw(Agreement(0.0, sum(result.numel() for result in runs[0].values()), 0))

    search.cases(subject, "memory", body)


def nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    """torch is used for memory alone: what computes is the implementation's own."""

    def body(case: Case) -> None:
        with Fallbacks() as fallbacks:
            evaluate_tensors(
                subject.implementation,
                subject.operation,
                case,
                subject.dtype,
                subject.device,
                gradients=subject.differentiable,
            )
        if fallbacks.found:
            raise Failure(f"{subject}: the call leaves to torch what it is to compute: {', '.join(fallbacks.found)}")
        search.saw(Agreement(0.0, case.grad_output.size, 0))

    search.cases(subject, "fallback", body)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
