"""The checks: what every implementation of an operation is put through. Each takes a subject and says what it saw.

A check raises `Failure` where the implementation is wrong; what it raises itself goes through unchanged.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from impls import backends
from properties import far_apart
from properties.arena import POISONS, Arena
from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dispatch import Fallbacks
from properties.dtypes import DType, bits
from properties.operation import Evaluate, Law, Operation, Result, evaluate_tensors, reference, reference_gradients
from properties.running_error import Bounded
from properties.special_values import with_special_values

# What fails is looked for once more in cases of at most this many elements, which are drawn one by one and so shrink,
# in little time, to small whole numbers.
FEW_ELEMENTS = 8
# How long a thread that a call has left behind may go on before its results are looked at again.
SECONDS_FOR_STRAY_THREADS = 0.5
# What the caller writes into a result that it has no use for any more.
OVERWRITTEN = 7.0
# How long a GPU's stream is kept busy before inputs are written on it: longer than the host takes to launch a call.
CYCLES_BEFORE_INPUTS = 100_000_000


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
    # Why the bits of a sample's result may depend on the batch around it; None where they are claimed not to.
    depends_on_batch: str | None = "nothing is claimed of it"

    def __str__(self) -> str:
        return f"{self.operation.name} · {self.backend} · {self.dtype} · {self.device}"

    def evaluate(
        self,
        case: Case,
        gradients: bool = True,
        place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Call the implementation; gives its output, its gradients, if it has any, and what it was called with."""
        wanted = gradients and self.differentiable
        return evaluate_tensors(self.implementation, self.operation, case, self.dtype, self.device, wanted, place)

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
    largest: int = 0  # elements of the largest result
    started: float = field(default_factory=time.perf_counter)

    def saw(self, *agreements: Agreement) -> None:
        """Count an example."""
        self.ran += 1
        self.substantial += any(a.elements > a.unspecified for a in agreements)
        self.largest = max([self.largest, *(a.elements for a in agreements)])
        self.worst = max([self.worst, *(a.worst for a in agreements)])

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.perf_counter() - self.started

    def for_all(
        self,
        name: str,
        strategy: st.SearchStrategy[Case],
        body: Callable[[Case], None],
        shrink: bool = True,
        examples: int | None = None,
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
            max_examples=examples or self.examples,
            phases=tuple(phase for phase in hypothesis.settings().phases if phase not in without),
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            # What a check cannot use it leaves out, which is cheap beside a call.
            suppress_health_check=[
                hypothesis.HealthCheck.too_slow,
                hypothesis.HealthCheck.data_too_large,
                hypothesis.HealthCheck.filter_too_much,
            ],
        )
        test = settings(hypothesis.given(strategy)(holds))
        if self.blob:
            test = hypothesis.reproduce_failure(hypothesis.__version__, self.blob.encode())(test)
        test()

    def cases(
        self, subject: Subject, check: str, body: Callable[[Case], None], few: bool = False, special: bool = True
    ) -> None:
        """The named examples of the subject's operation, then generated cases, some of which get special values.

        Few are an eighth as many, none large and none of them named: for what a call does always or never, whatever it
        is given, by checks that call often.
        """
        examples = min(self.examples, max(3, self.examples // 8)) if few else self.examples
        if not self.blob and not few:
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
            strategy = subject.operation.cases(subject.dtype, elements)
            if special:
                strategy = with_special_values(subject.dtype, strategy)
            self.for_all(name, strategy, body, shrink, examples)

        most = self.elements // 4 if few else self.elements
        if self.blob:
            # It does not say for which of the two it was made.
            try:
                among(FEW_ELEMENTS)
            except hypothesis.errors.DidNotReproduce:
                among(most)
            return
        try:
            among(most, shrink=False)
        except Exception:
            if hypothesis.Phase.shrink in hypothesis.settings().phases:
                for elements in (FEW_ELEMENTS, most):
                    try:
                        among(elements)
                    except Exception as smaller:
                        raise smaller from None
            raise
        self.must_have_seen_something(subject, check)

    def must_have_seen_something(self, subject: Subject, check: str) -> None:
        """A search among nothing, or among single numbers alone, is no verification.

        Raises:
            Failure: no example could have failed; or each result had one element at most, where the named examples of
                the operation say that its output may have more.
        """
        seen = f"{subject}: {check} ran {self.ran} examples, and"
        if not self.substantial:
            raise Failure(f"{seen} none of them could have failed")
        examples = subject.operation.examples.values()
        if self.largest <= 1 and any(make(subject.dtype).grad_output.size > 1 for make in examples):
            raise Failure(f"{seen} no result had more than one element, as those of {subject.operation.name} may")


def describe(tensors: dict[str, torch.Tensor]) -> str:
    """Shapes and strides, for messages."""
    return ", ".join(f"{name}{list(t.shape)} strides {list(t.stride())}" for name, t in tensors.items())


def _compare(
    subject: Subject, actual: torch.Tensor, expected: Bounded, what: str, tensors: dict[str, torch.Tensor]
) -> Agreement:
    problem = None
    if not isinstance(actual, torch.Tensor):
        problem = f"{what} is a {type(actual).__name__}, not a tensor"
    elif type(actual) is not torch.Tensor:
        # It may compute when it is looked at, or hide from autograd and torch.compile what it does.
        problem = f"{what} is a {type(actual).__name__}, a kind of tensor of its own"
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
        output, _, tensors = subject.evaluate(case, gradients=False)
        expected = reference(subject.operation, case, subject.dtype)
        agreement = _compare(subject, output, expected, "output", tensors)
        _unchanged(subject, case, tensors)
        search.saw(agreement)

    search.cases(subject, "forward", body)


def backward_agrees(subject: Subject, search: Search) -> None:
    """The gradients under a random cotangent are the oracle's, within its running error, and so is the output.

    Where gradients are wanted, another kernel may compute it.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        output, gradients, tensors = subject.evaluate(case)
        expected = reference_gradients(subject.operation, case, subject.dtype)
        agreements = [
            _compare(subject, gradients[name], expected[name], f"gradient of {name}", tensors) for name in expected
        ]
        of_output = reference(subject.operation, case, subject.dtype)
        agreements.append(_compare(subject, output, of_output, "output where gradients are wanted", tensors))
        _unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.cases(subject, "backward", body)


def single_gradients_agree(subject: Subject, search: Search) -> None:
    """The gradient of each input alone, the others constant, is the oracle's too; of three, also those of two of them.

    Not bit for bit the one taken together with the others': a kernel that leaves out half of the work is another
    kernel, whose compiler fuses other multiplications and additions.
    """
    subject.needs_gradients()
    names = subject.operation.differentiable

    def body(case: Case) -> None:
        expected = reference_gradients(subject.operation, case, subject.dtype)
        some: list[tuple[str, ...]] = [(name,) for name in names]
        if len(names) > 2:
            # In turn: all but one, as of parameters where the input is data.
            some.append(tuple(name for name in names if name != names[search.ran % len(names)]))
        agreements = []
        for wanted in some:
            tensors = case.tensors(subject.dtype, subject.device)
            for name in wanted:
                tensors[name].requires_grad_()
            output = subject.implementation(**tensors, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            gradients = torch.autograd.grad(output, [tensors[name] for name in wanted], grad_output)
            for name, gradient in zip(wanted, gradients):
                others = [other for other in wanted if other != name]
                what = f"gradient of {name} {f'with {others[0]} alone' if others else 'alone'}"
                agreements.append(_compare(subject, gradient, expected[name], what, tensors))
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
        search.saw(Agreement(0.0, weights.numel(), 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)
    search.must_have_seen_something(subject, "gradcheck")


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

    # Laws say for themselves of what numbers they speak, and their strategies hold those.
    search.cases(subject, law.__name__, body, special=False)


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
    if not search.ran:
        raise Failure(f"{subject}: no error is declared, so none was looked for")


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """Twice the same call gives the same bits: no atomics on floating-point numbers, no reading of leftovers."""

    def body(case: Case) -> None:
        runs = []
        for order in (contextlib.nullcontext(), backends.other_order(subject.device)):
            with order:
                output, gradients, tensors = subject.evaluate(case)
            runs.append((output.detach().clone(), {name: g.clone() for name, g in gradients.items()}))
        (output, gradients), (again, gradients_again) = runs
        if not torch.equal(bits(output), bits(again)):
            raise Failure(f"{subject}: the output differs between two calls\nwith {describe(tensors)}")
        for name, gradient in gradients.items():
            if not torch.equal(bits(gradient), bits(gradients_again[name])):
                raise Failure(f"{subject}: the gradient of {name} differs between two calls\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in (output, *gradients.values())))

    search.cases(subject, "repeats", body)


def _changed(case: Case, dtype: DType) -> Case:
    """A case of the same shapes, layouts and integers, each floating-point input scaled by a number of its own.

    Powers of two, so that rows that count go on counting and boxes remain what they are.
    """
    inputs, factor = {}, 0.5
    for name, array in case.inputs.items():
        floating = not np.issubdtype(array.dtype, np.integer)
        inputs[name] = (array.astype(dtype.wide) * factor).astype(dtype.numpy) if floating else array
        factor = factor / 2 if floating else factor
    return replace(case, inputs=inputs, grad_output=(case.grad_output.astype(dtype.wide) * -0.5).astype(dtype.numpy))


def _expected(subject: Subject, case: Case) -> dict[str, Bounded]:
    gradients = reference_gradients(subject.operation, case, subject.dtype)
    output = {"output": reference(subject.operation, case, subject.dtype)}
    return output | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def _tells_apart(expected: dict[str, Bounded], former: dict[str, Bounded], dtype: DType) -> bool:
    """Whether each of the former results is rejected in place of the expected one."""
    for name, result in expected.items():
        try:
            compare(former[name].value, expectation(result, dtype), dtype)
        except Disagreement:
            continue
        return False
    return True


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor may be written: along a stride of 0 the first alone."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _write(to: torch.Tensor, values: torch.Tensor) -> None:
    # As another kernel would, by the address: no version of the tensor counts it.
    _once(to.data).copy_(_once(values))


def _own_threads() -> set[threading.Thread]:
    # Autograd's threads are Python's only for as long as they run Python.
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


class _History:
    """Calls on tensors that are kept, and what they gave: results must not change when later calls are made."""

    def __init__(self, subject: Subject, parameters: Mapping[str, Any], gradients: bool) -> None:
        self.subject, self.parameters, self.gradients = subject, parameters, gradients
        self._kept: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def call(self, when: str, given: dict[str, torch.Tensor], expected: dict[str, Bounded]) -> dict[str, torch.Tensor]:
        """Call on the given tensors, `grad_output` among them; gives a copy of the results, which are the expected."""
        subject, before = self.subject, _own_threads()
        results = self._results(given)
        copies = {name: result.detach().clone() for name, result in results.items()}
        stray = _own_threads() - before
        for thread in stray:
            thread.join(SECONDS_FOR_STRAY_THREADS)
        if subject.device == "cuda":
            torch.cuda.synchronize()
        inputs = {name: tensor for name, tensor in given.items() if name != "grad_output"}
        for name, result in results.items():
            if not torch.equal(bits(result.detach()), bits(copies[name])):
                by = f", by {', '.join(thread.name for thread in stray)}" if stray else ""
                raise Failure(f"{subject}: {when}: {name} changed after the call had returned{by}")
            try:
                _compare(subject, result, expected[name], f"{when}: {name}", inputs)
            except Failure:
                if result.numel() and (result == OVERWRITTEN).all():
                    raise Failure(f"{subject}: {when}: {name} is what was written into a former result") from None
                raise
        self._former_results_stand(when)
        lent = {_storage(tensor) for tensor in given.values()}  # a gradient may be the cotangent itself
        own = {name: result.detach() for name, result in results.items() if _storage(result) not in lent}
        self._kept.append((when, own, copies))
        return copies

    def overwrite_last(self) -> None:
        """Write into the results of the last call, as their owner may."""
        for result in self._kept.pop()[1].values():
            _once(result).fill_(OVERWRITTEN)

    def _results(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor for name, tensor in given.items() if name != "grad_output"}
        names = self.subject.operation.differentiable if self.gradients else ()
        for name in names:
            tensors[name].requires_grad_()
        output = self.subject.implementation(**tensors, **self.parameters)
        if not names:
            return {"output": output}
        gradients = torch.autograd.grad(output, [tensors[name] for name in names], given["grad_output"])
        return {"output": output, **{f"gradient of {name}": g for name, g in zip(names, gradients)}}

    def _former_results_stand(self, when: str) -> None:
        for made, results, copies in self._kept:
            for name, result in results.items():
                if not torch.equal(bits(result), bits(copies[name])):
                    raise Failure(f"{self.subject}: {name} of the call {made} was changed by the call {when}")


def _given(subject: Subject, case: Case) -> dict[str, torch.Tensor]:
    grad_output = {"grad_output": case.tensor("grad_output", subject.dtype, subject.device)}
    return case.tensors(subject.dtype, subject.device) | grad_output


def history_does_not_matter(subject: Subject, search: Search) -> None:
    """A result is that of the values which the inputs hold at the call, and belongs to the caller.

    Whatever was called before, on the same tensors or on others at the same place; whatever the caller has done to
    former results. They, in turn, stay as they are, and are complete when the call returns.
    """

    def body(case: Case) -> None:
        other = _changed(case, subject.dtype)
        expected, expected_of_other = _expected(subject, case), _expected(subject, other)
        # Else a former result in place of the right one would not show.
        hypothesis.assume(_tells_apart(expected_of_other, expected, subject.dtype))
        for gradients in (False, True)[: 1 + subject.differentiable]:
            history = _History(subject, case.parameters, gradients)
            given = _given(subject, case)
            first = history.call("on new tensors", given, expected)
            values = _given(subject, other)
            for name, tensor in given.items():
                _write(tensor, values[name])
            history.call("after other values were written into its inputs", given, expected_of_other)
            history.overwrite_last()
            history.call("after its last results were overwritten", given, expected_of_other)
            values = _given(subject, case)
            for name, tensor in given.items():
                _write(tensor, values[name])
            views = {name: tensor.detach() for name, tensor in given.items()}
            history.call("on new tensors at the place of former ones", views, expected)
            for tensor in given.values():
                _once(tensor.data).zero_()
            when = "on the values of an earlier call at another place"
            again = history.call(when, _given(subject, case), expected)
            for name, result in again.items():
                if not torch.equal(bits(result), bits(first[name])):
                    raise Failure(f"{subject}: {when}: {name} is not the same bit for bit\nwith {describe(given)}")
        search.saw(*(Agreement(0.0, result.value.size, 0) for result in expected.values()))

    search.cases(subject, "history", body, few=True)


def late_inputs_are_waited_for(subject: Subject, search: Search) -> None:
    """On a GPU, a call on a stream reads what that stream has written before, however late."""

    def body(case: Case) -> None:
        other = _changed(case, subject.dtype)
        expected, names = _expected(subject, case), subject.operation.differentiable
        hypothesis.assume(_tells_apart(expected, _expected(subject, other), subject.dtype))
        given, values = _given(subject, other), _given(subject, case)
        for name in names if subject.differentiable else ():
            given[name].requires_grad_()
        tensors = {name: tensor for name, tensor in given.items() if name != "grad_output"}

        def call() -> list[torch.Tensor]:
            results = [subject.implementation(**tensors, **case.parameters)]
            if subject.differentiable:
                results += torch.autograd.grad(results[0], [tensors[name] for name in names], given["grad_output"])
            return [result.detach().clone() for result in results]

        call()  # compiles, measures and allocates, which may wait for the device
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES_BEFORE_INPUTS)
            for name, tensor in given.items():
                _write(tensor, values[name])
            results = call()
        torch.cuda.synchronize()
        agreements = [
            _compare(subject, result, expected[name], f"on a stream whose inputs come late: {name}", tensors)
            for name, result in zip(expected, results)
        ]
        search.saw(*agreements)

    search.cases(subject, "late inputs", body, few=True)


def _samples(operation: Operation, case: Case) -> int:
    """How many samples a case has side by side; 1 where its first axis is no batch."""
    if not all(case[name].ndim > axes for name, axes in operation.batched.items()):
        return 1
    return case.grad_output.shape[0]


def _part(operation: Operation, case: Case, samples: slice) -> Case:
    inputs = {name: array[samples] if name in operation.batched else array for name, array in case.inputs.items()}
    return replace(case, inputs=inputs, grad_output=case.grad_output[samples])


def the_batch_does_not_matter(subject: Subject, search: Search) -> None:
    """A sample gives the same among others as among fewer: bit for bit where that is claimed, else within its bound."""
    operation = subject.operation

    def evaluate(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        output, gradients, tensors = subject.evaluate(case)
        of_batch = {f"gradient of {name}": gradients[name] for name in operation.batched if name in gradients}
        return {"output": output.detach(), **of_batch}, tensors

    def body(case: Case) -> None:
        count = _samples(operation, case)
        hypothesis.assume(count > 1 and case.grad_output.size)
        # A part of a transposed batch may be contiguous, and be read by another kernel.
        case = replace(case, layouts={})
        whole, tensors = evaluate(case)
        agreements = []
        # Some from the middle, so that they stand elsewhere in their blocks; and the last alone.
        for samples in (slice(count // 3, count // 3 + (count + 1) // 2), slice(count - 1, count)):
            part = _part(operation, case, samples)
            expected = _expected(subject, part) if subject.depends_on_batch else {}
            for name, alone in evaluate(part)[0].items():
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

    search.cases(subject, "batch", body, few=True)


def offsets_may_pass_32_bits(subject: Subject, search: Search) -> None:
    """Each tensor in turn, the cotangent too, may have elements 2^31 and more apart, along any axis.

    Raises:
        NoRoom: the device has no such range of addresses.
    """

    def body(case: Case) -> None:
        given = _given(subject, case)
        places = [(name, axis) for name, tensor in given.items() for axis in far_apart.axes(tensor)]
        hypothesis.assume(places)
        expected, agreements = _expected(subject, case), []
        for far, axis in places:

            def place(name: str, tensor: torch.Tensor, far: str = far, axis: int = axis) -> torch.Tensor:
                return far_apart.laid_out(tensor, axis) if name == far else tensor

            output, gradients, tensors = subject.evaluate(case, place=place)
            results = {"output": output, **{f"gradient of {name}": g for name, g in gradients.items()}}
            for name, result in results.items():
                what = f"with axis {axis} of {far} 2^31 elements long: {name}"
                agreements.append(_compare(subject, result, expected[name], what, tensors))
        search.saw(*agreements)

    search.cases(subject, "offsets", body, few=True)


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
        given = _given(subject, case)
        repeated = {*operation.batched, "grad_output"}
        needed = sum(t.nbytes for name, t in given.items() if name in repeated) * 4 * repetitions
        if subject.device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
            raise far_apart.NoRoom(f"it takes {needed >> 30} GiB")

        def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name not in repeated:
                return tensor
            return tensor.repeat(repetitions, *[1] * (tensor.ndim - 1))

        output, gradients, tensors = subject.evaluate(case, place=place)
        expected, agreements = _expected(subject, case), []
        of_batch = {f"gradient of {name}": gradients[name] for name in operation.batched if name in gradients}
        for name, result in {"output": output.detach(), **of_batch}.items():
            first = result[:count]
            agreements.append(_compare(subject, first, expected[name], f"the first {count} samples: {name}", tensors))
            error = expectation(expected[name], subject.dtype).error
            allowed = torch.from_numpy((2 * error * (subject.depends_on_batch is not None)).astype(np.float64))
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


def backward_is_of_the_call(subject: Subject, search: Search) -> None:
    """What is written into inputs or output between a call and its backward pass raises, or does not matter."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        expected = reference_gradients(subject.operation, case, subject.dtype)
        agreements = [Agreement(0.0, 1, 0)]
        for written in (*subject.operation.differentiable, "the output"):
            tensors = case.tensors(subject.dtype, subject.device)
            leaves = [tensors[name].requires_grad_() for name in subject.operation.differentiable]
            output = subject.implementation(**tensors, **case.parameters)
            with torch.no_grad():
                (output if written == "the output" else tensors[written]).mul_(-2)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            try:
                gradients = torch.autograd.grad(output, leaves, grad_output)
            except RuntimeError as error:
                if "inplace operation" in str(error):
                    continue
                raise
            for name, gradient in zip(expected, gradients):
                what = f"after {written} was written into, gradient of {name}"
                agreements.append(_compare(subject, gradient, expected[name], what, tensors))
        search.saw(*agreements)

    search.for_all(f"backward is of the call {subject}", subject.operation.smooth(subject.dtype), body)


def memory_is_respected(subject: Subject, search: Search) -> None:
    """Only the given tensors are read, only the results written: these in full, and in memory of their own."""

    def body(case: Case) -> None:
        runs: list[dict[str, torch.Tensor]] = []
        for poison in POISONS:
            with Arena(poison) as arena:
                output, gradients, tensors = subject.evaluate(case, place=arena.place)
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
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in runs[0].values()))

    search.cases(subject, "memory", body)


def nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    """torch is used for memory alone: what computes is the implementation's own."""

    def body(case: Case) -> None:
        with Fallbacks() as fallbacks:
            subject.evaluate(case)
        if fallbacks.found:
            raise Failure(f"{subject}: the call leaves to torch what it is to compute: {', '.join(fallbacks.found)}")
        search.saw(Agreement(0.0, case.grad_output.size, 0))

    search.cases(subject, "fallback", body)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
