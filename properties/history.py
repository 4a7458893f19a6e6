"""The checks that results depend on the values of the inputs at the call, and on nothing before it or beside it."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import torch

from properties.case import Case
from properties.comparison import Agreement, Disagreement, compare, expectation
from properties.dtypes import DType, differing
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
    storage_of,
)

# How long a thread that a call has left behind may go on before its results are looked at again.
SECONDS_FOR_STRAY_THREADS = 0.5
# What the caller writes into a result that it has no use for any more.
OVERWRITTEN = 7.0
# How long a GPU's stream is kept busy before inputs are written on it: longer than the host takes to launch a call.
CYCLES_BEFORE_INPUTS = 100_000_000


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


def _tells_apart(expected: dict[str, Bounded], former: dict[str, Bounded], dtype: DType) -> bool:
    """Whether each of the former results is rejected in place of the expected one."""
    for name, result in expected.items():
        try:
            compare(former[name].value, expectation(result, dtype), dtype)
        except Disagreement:
            continue
        return False
    return True


def _lie_alike(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether the one's values can be written into the others: numbers that were not alike may be, halved."""
    return all(tensor.stride() == others[name].stride() for name, tensor in some.items())


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
        for name, count in zip(results, differing((results[name].detach(), copies[name]) for name in results)):
            if count:
                by = f", by {', '.join(thread.name for thread in stray)}" if stray else ""
                raise Failure(f"{subject}: {when}: {name} changed after the call had returned{by}")
        try:
            compare_results(subject, results, expected, inputs, f"{when}: ")
        except Failure:
            for name, result in results.items():
                if result.numel() and (result == OVERWRITTEN).all():
                    raise Failure(f"{subject}: {when}: {name} is what was written into a former result") from None
            raise
        self._former_results_stand(when)
        lent = {storage_of(tensor) for tensor in given.values()}  # a gradient may be the cotangent itself
        own = {name: result.detach() for name, result in results.items() if storage_of(result) not in lent}
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
            return named_results(output, {})
        gradients = torch.autograd.grad(output, [tensors[name] for name in names], given["grad_output"])
        return named_results(output, dict(zip(names, gradients)))

    def _former_results_stand(self, when: str) -> None:
        kept = [(made, name, results[name], copies[name]) for made, results, copies in self._kept for name in results]
        for (made, name, _, _), count in zip(kept, differing((result, copy) for _, _, result, copy in kept)):
            if count:
                raise Failure(f"{self.subject}: {name} of the call {made} was changed by the call {when}")


def history_does_not_matter(subject: Subject, search: Search) -> None:
    """A result is that of the values which the inputs hold at the call, and belongs to the caller.

    Whatever was called before, on the same tensors or on others at the same place; whatever the caller has done to
    former results. They, in turn, stay as they are, and are complete when the call returns.
    """

    def body(case: Case) -> None:
        other = _changed(case, subject.dtype)
        expected, expected_of_other = expected_results(subject, case), expected_results(subject, other)
        # Else a former result in place of the right one would not show.
        hypothesis.assume(_tells_apart(expected_of_other, expected, subject.dtype))
        for gradients in (False, True)[: 1 + subject.differentiable]:
            history = _History(subject, case.parameters, gradients)
            given, values = given_tensors(subject, case), given_tensors(subject, other)
            hypothesis.assume(_lie_alike(given, values))
            first = history.call("on new tensors", given, expected)
            for name, tensor in given.items():
                _write(tensor, values[name])
            history.call("after other values were written into its inputs", given, expected_of_other)
            history.overwrite_last()
            history.call("after its last results were overwritten", given, expected_of_other)
            values = given_tensors(subject, case)
            for name, tensor in given.items():
                _write(tensor, values[name])
            views = {name: tensor.detach() for name, tensor in given.items()}
            history.call("on new tensors at the place of former ones", views, expected)
            for tensor in given.values():
                _once(tensor.data).zero_()
            when = "on the values of an earlier call at another place"
            again = history.call(when, given_tensors(subject, case), expected)
            for name, count in zip(again, differing((again[name], first[name]) for name in again)):
                if count:
                    raise Failure(f"{subject}: {when}: {name} is not the same bit for bit\nwith {describe(given)}")
        search.saw(*(Agreement(0.0, result.value.size, 0) for result in expected.values()))

    search.cases(subject, "history", body, few=True)


def late_inputs_are_waited_for(subject: Subject, search: Search) -> None:
    """On a GPU, a call on a stream reads what that stream has written before, however late."""

    def body(case: Case) -> None:
        other = _changed(case, subject.dtype)
        expected, names = expected_results(subject, case), subject.operation.differentiable
        hypothesis.assume(_tells_apart(expected, expected_results(subject, other), subject.dtype))
        given, values = given_tensors(subject, other), given_tensors(subject, case)
        hypothesis.assume(_lie_alike(given, values))
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
        when = "on a stream whose inputs come late: "
        search.saw(*compare_results(subject, dict(zip(expected, results)), expected, tensors, when))

    search.cases(subject, "late inputs", body, few=True)
