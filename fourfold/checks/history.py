"""The checks that results depend only on the values of the inputs at the call, not on other calls."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fourfold.checks.grades import allow_storage_accuracy
from fourfold.checks.results import (
    case_tensors,
    compare_results,
    expected_results,
    named_results,
    require_same_bits,
    storage_of,
)
from fourfold.checks.search import OUTPUT, Search, Subject, need
from fourfold.compat import python_internals, torch_internals
from fourfold.instruments.evaluation import gradients_of
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Agreement, Disagreement, compare, expectation
from fourfold.numerics.dtypes import differing
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import reference

# The time to wait for a thread that a call left running, before its results are compared again.
SECONDS_FOR_STRAY_THREADS = 0.5
# The number that the caller writes into a result after use.
OVERWRITTEN = 7.0
# GPU cycles that keep a stream busy before inputs are written on it: longer than the host takes to launch a call.
CYCLES_BEFORE_INPUTS = 100_000_000


def change_values(subject: Subject, case: Case) -> Case:
    """Return a case of the same shapes and layouts with other numbers that the operation accepts.

    Integers stay the same if the operation's record has no alternatives, or if the result's shape depends on them.
    Numbers are scaled. Where that does not change a result, such as a normalized row, they are drawn again.
    """
    other = subject.operation.redraw_numbers(case)
    if not distinguishes(subject, expected_results(subject, other), expected_results(subject, case)):
        other = subject.operation.redraw_numbers(case, scaled_alone=False)
    if integers := subject.operation.other_integers(case):
        shifted = replace(other, inputs={**other.inputs, **integers})
        result, former = (reference(subject.operation, c, subject.dtype) for c in (shifted, case))
        if result.shape == case.grad_output.shape and (
            subject.operation.differentiable or distinguishes(subject, {OUTPUT: result}, {OUTPUT: former})
        ):
            return shifted
    return other


def distinguishes(subject: Subject, expected: dict[str, Bounded], former: dict[str, Bounded]) -> bool:
    """Return whether the comparison rejects each former result in place of the expected one."""
    for name, result in expected.items():
        dtype = subject.dtype_of(name)
        try:
            compare(former[name].value, expectation(result, dtype), dtype)
        except Disagreement:
            continue
        return False
    return True


def _lie_alike(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors of the same name have the same strides, so that values can be copied between them.

    Strides may differ: halved numbers may become equal, and the layout "expanded" then gives them stride 0.
    """
    return all(tensor.stride() == second[name].stride() for name, tensor in first.items())


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the writable part of a tensor: only the first element along an axis of stride 0."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _write(target: torch.Tensor, values: torch.Tensor) -> None:
    # Write to the address, as another kernel would. Autograd's version counter does not notice it.
    _writable(target.data).copy_(_writable(values))


def _own_threads() -> set[threading.Thread]:
    # Skip dummy threads: they are autograd's, which Python lists only while they run Python.
    return {thread for thread in threading.enumerate() if not python_internals.is_foreign(thread)}


class _History:
    """A sequence of calls and their results, which later calls must not change."""

    def __init__(self, subject: Subject, parameters: Mapping[str, Any], gradients: bool) -> None:
        self.subject, self.parameters, self.gradients = subject, parameters, gradients
        self._former: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def call(
        self, context: str, tensors: dict[str, torch.Tensor], expected: dict[str, Bounded]
    ) -> dict[str, torch.Tensor]:
        """Call the implementation on tensors that include `grad_output`, check the results and return copies."""
        subject, threads = self.subject, _own_threads()
        results = self._results(tensors)
        copies = {name: result.detach().clone() for name, result in results.items()}
        stray = _own_threads() - threads
        for thread in stray:
            thread.join(SECONDS_FOR_STRAY_THREADS)
        if subject.device == "cuda":
            torch.cuda.synchronize()
        inputs = {name: tensor for name, tensor in tensors.items() if name != "grad_output"}
        for name, count in zip(results, differing((results[name].detach(), copies[name]) for name in results)):
            if count:
                culprit = f", by {', '.join(thread.name for thread in stray)}" if stray else ""
                raise Failure(f"{subject}: {context}: {name} changed after the call had returned{culprit}", name)
        try:
            compare_results(subject, results, expected, inputs, f"{context}: ")
        except Failure:
            for name, result in results.items():
                if result.numel() and (result == OVERWRITTEN).all():
                    raise Failure(
                        f"{subject}: {context}: {name} is what was written into a former result", name
                    ) from None
            raise
        self._former_results_stand(context)
        inputs_memory = {storage_of(tensor) for tensor in tensors.values()}  # a gradient may be the cotangent itself
        new_results = {name: r.detach() for name, r in results.items() if storage_of(r) not in inputs_memory}
        self._former.append((context, new_results, copies))
        return copies

    def overwrite_last(self) -> None:
        """Overwrite the results of the last call. The caller may do so, because it owns them."""
        for result in self._former.pop()[1].values():
            _writable(result).fill_(OVERWRITTEN)

    def _results(self, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor for name, tensor in arguments.items() if name != "grad_output"}
        names = [name for name in self.subject.operation.differentiable if self.gradients and name in arguments]
        for name in names:
            tensors[name].requires_grad_()
        with torch.set_grad_enabled(bool(names)):
            output = self.subject.call(**tensors, **self.parameters)
        if not names:
            return named_results(output, {})
        gradients = gradients_of(output, [tensors[name] for name in names], arguments["grad_output"])
        return named_results(output, dict(zip(names, gradients)))

    def _former_results_stand(self, context: str) -> None:
        former = [
            (call, name, results[name], copies[name]) for call, results, copies in self._former for name in results
        ]
        for (call, name, _, _), count in zip(former, differing((result, copy) for _, _, result, copy in former)):
            if count:
                raise Failure(f"{self.subject}: {name} of the call {call} was changed by the call {context}", name)


@allow_storage_accuracy
def history_does_not_matter(subject: Subject, search: Search) -> None:
    """Check that a result depends only on the values of the inputs at the call, and belongs to the caller.

    A result must not depend on earlier calls on the same tensors, on other tensors at the same address, or on the
    caller's writes to earlier results. It must be complete when its call returns, and later calls must not change it.
    The calls are made under `no_grad`, and again with gradients.
    """

    def body(case: Case) -> None:
        other = change_values(subject, case)
        expected, expected_of_other = expected_results(subject, case), expected_results(subject, other)
        # Otherwise the comparison would accept a former result in place of the right one.
        need(distinguishes(subject, expected_of_other, expected))
        for gradients in (False, True)[: 1 + subject.differentiable]:
            history = _History(subject, case.parameters, gradients)
            tensors, values = case_tensors(subject, case), case_tensors(subject, other)
            need(_lie_alike(tensors, values))
            first = history.call("on new tensors", tensors, expected)
            for name, tensor in tensors.items():
                _write(tensor, values[name])
            history.call("after other values were written into its inputs", tensors, expected_of_other)
            history.overwrite_last()
            history.call("after its last results were overwritten", tensors, expected_of_other)
            values = case_tensors(subject, case)
            for name, tensor in tensors.items():
                _write(tensor, values[name])
            views = {name: tensor.detach() for name, tensor in tensors.items()}
            history.call("on new tensors at the place of former ones", views, expected)
            for tensor in tensors.values():
                _writable(tensor.data).zero_()
            context = "on the values of an earlier call at another place"
            repeated = history.call(context, case_tensors(subject, case), expected)
            if subject.claims.deterministic:
                require_same_bits(subject, repeated, first, tensors, f"{context}: ")
        search.saw(*(Agreement(0.0, result.value.size, 0) for result in expected.values()))

    search.cases(subject, "history", body, sparse=True, extra=subject.examples_of_integers())


@allow_storage_accuracy
def late_inputs_are_waited_for(subject: Subject, search: Search) -> None:
    """Check that a call on a GPU stream reads the values that earlier work on that stream writes, however late.

    The stream is a new one, or the default stream if the implementation claims no other streams.
    """

    def body(case: Case) -> None:
        other = change_values(subject, case)
        expected, names = expected_results(subject, case), subject.operation.differentiable_in(case)
        need(distinguishes(subject, expected, expected_results(subject, other)))
        arguments, values = case_tensors(subject, other), case_tensors(subject, case)
        need(_lie_alike(arguments, values))
        for name in names if subject.differentiable else ():
            arguments[name].requires_grad_()
        tensors = {name: tensor for name, tensor in arguments.items() if name != "grad_output"}

        def call() -> list[torch.Tensor]:
            results = [subject.call(**tensors, **case.parameters)]
            if subject.differentiable and names:
                results += gradients_of(results[0], [tensors[name] for name in names], arguments["grad_output"])
            return [result.detach().clone() for result in results]

        call()  # the first call compiles, tunes and allocates, which may wait for the device
        torch.cuda.synchronize()
        stream = torch.cuda.Stream() if subject.claims.streams else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            torch_internals.keep_stream_busy(CYCLES_BEFORE_INPUTS)
            for name, tensor in arguments.items():
                _write(tensor, values[name])
            results = call()
        torch.cuda.synchronize()
        context = "on a stream whose inputs come late (a kernel must be launched on torch's current stream): "
        search.saw(*compare_results(subject, dict(zip(expected, results)), expected, tensors, context))

    search.cases(subject, "late inputs", body, sparse=True)
