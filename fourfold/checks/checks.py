"""The checks that every implementation of an operation must pass. Each takes a subject, and a search to record in.

A check raises `Failure` where the implementation is wrong. Errors of the implementation itself pass through unchanged.
"""

import contextlib
import re
import sys

import numpy as np
import torch
from torch.autograd.gradcheck import GradcheckError

from fourfold import backends
from fourfold.checks import arena, batches, dispatch, history, laws, search
from fourfold.checks.arena import POISONS, Arena
from fourfold.checks.batches import many_samples_are_alike, the_batch_does_not_matter
from fourfold.checks.dispatch import Fallbacks
from fourfold.checks.escapes import held
from fourfold.checks.grades import graded
from fourfold.checks.history import history_does_not_matter, late_inputs_are_waited_for
from fourfold.checks.laws import hold, law_holds
from fourfold.checks.search import (
    UNCLAIMED,
    Failure,
    Search,
    Subject,
    Unsupported,
    compare_results,
    describe,
    expected_gradients,
    expected_results,
    given_tensors,
    named_results,
    need,
    storage_of,
)
from fourfold.compat import torch_internals
from fourfold.core import (
    comparison,
    dtypes,
    far_apart,
    operation,
    running_error,
    running_error_arrays,
    running_error_rules,
    tampering,
)
from fourfold.core.case import Case
from fourfold.core.comparison import Agreement
from fourfold.core.dtypes import differing
from fourfold.core.operation import gradients_of, reference
from fourfold.core.refusals import by_the_implementation, is_fault, is_refusal, reason

__all__ = [
    "Failure",
    "Search",
    "Subject",
    "Unsupported",
    "backward_agrees",
    "backward_is_of_the_call",
    "declared_errors_are_raised",
    "forward_agrees",
    "gradcheck",
    "history_does_not_matter",
    "hold",
    "late_inputs_are_waited_for",
    "law_holds",
    "many_samples_are_alike",
    "memory_is_respected",
    "nothing_is_left_to_torch",
    "offsets_may_pass_32_bits",
    "repeats_bit_for_bit",
    "single_gradients_agree",
    "the_batch_does_not_matter",
]


@graded
def forward_agrees(subject: Subject, search: Search) -> None:
    """The output agrees with the oracle's within its running error, and the inputs do not change."""

    def body(case: Case) -> None:
        output, _, tensors = subject.evaluate(case, gradients=False)
        expected = reference(subject.operation, case, subject.dtype)
        agreements = compare_results(subject, {"output": output}, {"output": expected}, tensors)
        _unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.cases(subject, "forward", body)


def _unchanged(subject: Subject, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    fresh = (subject.dtype.tensor(case.inputs[name], subject.device) for name in tensors)
    counts = differing(zip((tensor.detach() for tensor in tensors.values()), fresh))
    for name, count in zip(tensors, counts):
        if count:
            raise Failure(f"{subject}: the call changed its input {name}\nwith {describe(tensors)}")


@graded
def backward_agrees(subject: Subject, search: Search) -> None:
    """The gradients under a random cotangent agree with the oracle's within its running error, and so does the output.

    The output is compared here too, because another kernel may compute it when gradients are wanted.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        output, gradients, tensors = subject.evaluate(case)
        agreements = compare_results(
            subject,
            named_results(output, gradients),
            expected_results(subject, case),
            tensors,
            when="where gradients are wanted, ",
        )
        _unchanged(subject, case, tensors)
        search.saw(*agreements)

    search.cases(subject, "backward", body)


@graded
def single_gradients_agree(subject: Subject, search: Search) -> None:
    """The gradient of each input alone agrees with the oracle's; of three inputs, also the gradients of two of them.

    It need not equal the gradient taken together with the others bit for bit. A kernel that leaves out half of the
    work is compiled anew, and the compiler may fuse other multiplications and additions.
    """
    subject.needs_gradients()

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        expected = expected_gradients(subject, case)
        some: list[tuple[str, ...]] = [(name,) for name in names]
        if len(names) > 2:
            # All but one, each left out in turn, as where the input is data and only parameters are trained.
            some.append(tuple(name for name in names if name != names[search.ran % len(names)]))
        agreements: list[Agreement] = []
        for wanted in some:
            tensors = case.tensors(subject.dtype, subject.device)
            for name in wanted:
                tensors[name].requires_grad_()
            output = subject.call(**tensors, **case.parameters)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            gradients = gradients_of(output, [tensors[name] for name in wanted], grad_output)
            when = f"for {' and '.join(wanted)} alone, gradient of "
            agreements += compare_results(subject, dict(zip(wanted, gradients)), expected, tensors, when)
        search.saw(*agreements)

    search.cases(subject, "single gradients", body)


@graded
def backward_is_of_the_call(subject: Subject, search: Search) -> None:
    """A write to an input or the output between a call and its backward pass raises, or leaves the gradients right."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        expected = expected_gradients(subject, case)
        agreements = [Agreement(0.0, 1, 0)]
        names = subject.operation.differentiable_in(case)
        for written in (*names, "the output"):
            tensors = case.tensors(subject.dtype, subject.device)
            leaves = [tensors[name].requires_grad_() for name in names]
            output = subject.call(**tensors, **case.parameters)
            with torch.no_grad():
                (output if written == "the output" else tensors[written]).mul_(-2)
            grad_output = case.tensor("grad_output", subject.dtype, subject.device)
            try:
                gradients = gradients_of(output, leaves, grad_output)
            except RuntimeError as error:
                if torch_internals.says_written_into(error):
                    continue
                raise
            when = f"after {written} was written into, gradient of "
            agreements += compare_results(subject, dict(zip(expected, gradients)), expected, tensors, when)
        search.saw(*agreements)

    search.for_all(f"backward is of the call {subject}", subject.operation.smooth(subject.dtype), body)


def gradcheck(subject: Subject, search: Search) -> None:
    """The implementation passes torch.autograd.gradcheck, in float64, away from ties."""
    subject.needs_gradients()

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        constants = {
            name: tensor for name, tensor in case.tensors(subject.dtype, subject.device).items() if name not in names
        }
        points = [case.tensor(name, subject.dtype, subject.device).requires_grad_() for name in names]
        weights = case.tensor("grad_output", subject.dtype, subject.device)

        def weighted(*tensors: torch.Tensor) -> torch.Tensor:
            output = subject.call(**dict(zip(names, tensors)), **constants, **case.parameters)
            return output * weights

        try:
            # The whole Jacobian for the first case, then its product with random vectors, at the cost of two calls.
            with by_the_implementation():
                torch.autograd.gradcheck(weighted, points, fast_mode=search.ran > 0)
        except GradcheckError as error:
            raise Failure(f"{subject}: gradcheck: {error}") from error
        search.saw(Agreement(0.0, weights.numel(), 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)
    search.must_have_seen_something(subject, "gradcheck")


def declared_errors_are_raised(subject: Subject, search: Search) -> None:
    """Bad input raises the declared error, which names the argument. Where a device cannot raise, the output is NaN.

    Of somebody else's implementation nothing is demanded: bad input that gives a result is a warning.
    """
    if subject.foreign:
        _bad_input_is_noticed(subject, search)
        return
    for declared in subject.operation.errors:
        arguments = declared.arguments(subject.device)
        try:
            with held():
                output = subject.call(**arguments)
        except declared.raises as error:
            if not re.search(rf"\b{re.escape(declared.names)}\b", str(error)):
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


def _bad_input_is_noticed(subject: Subject, search: Search) -> None:
    """Bad input raises some error. A warning names those that give a result instead."""
    accepted = []
    for declared in subject.operation.errors:
        arguments = declared.arguments(subject.device)
        try:
            with held():
                subject.call(**arguments)
        except Exception as error:
            if not is_refusal(error):
                if not is_fault(error):
                    raise
                search.warnings.append(f"bad input is not noticed: {declared.name}: {reason(error)}")
        else:
            accepted.append(declared.name)
        search.saw(Agreement(0.0, 1, 0))
    if accepted:
        search.warnings.append(f"bad input gives a result: {', '.join(accepted)}")


def repeats_bit_for_bit(subject: Subject, search: Search) -> None:
    """The same call made twice gives the same bits: no floating-point atomics, no reads of uninitialised memory."""

    def body(case: Case) -> None:
        runs = []
        for order in (contextlib.nullcontext(), backends.other_order(subject.device)):
            with order:
                output, gradients, tensors = subject.evaluate(case)
            runs.append((output.detach().clone(), {name: g.clone() for name, g in gradients.items()}))
        (output, gradients), (again, gradients_again) = runs
        first, second = named_results(output, gradients), named_results(again, gradients_again)
        for name, count in zip(first, differing(zip(first.values(), second.values()))):
            if count:
                raise Failure(f"{subject}: the {name} differs between two calls\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in first.values()))

    # Few cases are enough if threads only run in one order. Two calls then differ only by the memory that they read,
    # and `memory_is_respected` sees more of that.
    if not subject.claims.deterministic:
        raise Unsupported(f"{UNCLAIMED} the same bits twice")
    search.cases(subject, "repeats", body, few=backends.has_one_order(subject.backend, subject.device))


def memory_is_respected(subject: Subject, search: Search) -> None:
    """A call reads only the given tensors and writes only the results, in full and in memory of their own."""

    def body(case: Case) -> None:
        runs: list[dict[str, torch.Tensor]] = []
        for poison in POISONS:
            with Arena(poison) as arena:
                output, gradients, tensors = subject.evaluate(case, place=arena.place)
            for trespass in arena.trespasses():
                raise Failure(f"{subject}: the call {trespass}\nwith {describe(tensors)}")
            results = named_results(output, gradients)
            lent = {storage_of(tensor): f"its input {name}" for name, tensor in tensors.items()}
            lent |= {storage_of(former): "a former result" for run in runs for former in run.values()}
            for name, result in results.items():
                if result.numel() and storage_of(result) in lent:
                    raise Failure(f"{subject}: {name} shares its memory with {lent[storage_of(result)]}")
            runs.append({name: result.detach() for name, result in results.items()})
        held = [subject.dtype.arrays(run) for run in runs]
        for name in runs[0]:
            first, second = (run[name] for run in held)
            differs = np.argwhere((first != second) & ~(np.isnan(first) & np.isnan(second)))
            if len(differs):
                at = tuple(int(i) for i in differs[0])
                why = f"is {first[at]} or {second[at]}, depending on memory that the call was not given"
                if np.isnan(first[at]) and second[at] == POISONS[1]:
                    why = "was never written, or comes from memory that the call was not given"
                raise Failure(f"{subject}: {name}{list(at)} {why}\nwith {describe(tensors)}")
        search.saw(*(Agreement(0.0, result.numel(), 0) for result in runs[0].values()))

    search.cases(subject, "memory", body)


@graded
def offsets_may_pass_32_bits(subject: Subject, search: Search) -> None:
    """Each tensor in turn, the cotangent included, may have elements that lie 2^31 or more apart along any axis.

    Raises:
        NoRoom: the device lacks the memory, or the range of addresses.
        Unsupported: the implementation's module says why it does not support such offsets.
    """
    if subject.claims.contiguous:
        raise Unsupported(f"{UNCLAIMED} elements that lie apart")
    if subject.offsets_in_32_bits:
        raise Unsupported(subject.offsets_in_32_bits)

    def body(case: Case) -> None:
        given = given_tensors(subject, case)
        places = [(name, axis) for name, tensor in given.items() for axis in far_apart.axes(tensor)]
        need(places)
        expected, agreements = expected_results(subject, case), []
        for far, axis in places:

            def place(name: str, tensor: torch.Tensor, far: str = far, axis: int = axis) -> torch.Tensor:
                return far_apart.laid_out(tensor, axis) if name == far else tensor

            output, gradients, tensors = subject.evaluate(case, place=place)
            when = f"with axis {axis} of {far} 2^31 elements long: "
            agreements += compare_results(subject, named_results(output, gradients), expected, tensors, when)
        search.saw(*agreements)

    search.cases(subject, "offsets", body, few=True, also=subject.operation.examples_for_offsets(subject.dtype))


def nothing_is_left_to_torch(subject: Subject, search: Search) -> None:
    """The implementation uses torch for memory alone, and computes everything itself."""

    def body(case: Case) -> None:
        fallbacks = Fallbacks()
        subject.evaluate(case, watch=fallbacks)
        if fallbacks.found:
            raise Failure(f"{subject}: the call leaves to torch what it is to compute: {', '.join(fallbacks.found)}")
        search.saw(Agreement(0.0, case.grad_output.size, 0))

    search.cases(subject, "fallback", body)


# A kernel that replaces what judges it, to be called right, is found out.
for _judge in (
    arena,
    batches,
    comparison,
    dispatch,
    dtypes,
    history,
    laws,
    operation,
    running_error,
    running_error_arrays,
    running_error_rules,
    search,
    sys.modules[__name__],
):
    tampering.watch(_judge)
