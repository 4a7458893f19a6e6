"""The checks that an implementation of any operation is put through, and which of them concern a dtype and a device."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis.errors import Unsatisfiable

from fourfold.checks import (
    backward,
    bad_input,
    batches,
    configurations,
    fallback,
    forward,
    gradcheck,
    grades,
    graph,
    history,
    interleaving,
    laws,
    many_calls,
    memory,
    modes,
    offsets,
    outputs,
    parameters,
    repeatability,
    results,
    saved_tensors,
    search,
    sharing,
    single_gradients,
    threads,
)
from fourfold.checks.search import Search, Subject
from fourfold.instruments import evaluation, operator_watch, redzones, tampering
from fourfold.numerics import bounded, compare, dtypes
from fourfold.numerics.steps import along_axes, elementwise
from fourfold.operations import outcomes, record
from fourfold.operations.claims import Claims
from fourfold.operations.outcomes import Unsupported
from fourfold.operations.record import Operation

FORWARD = "forward"
# Most checks depend little on the dtype: a plain run makes them of this library's own implementations in this one.
PLAIN = ("float32",)
# Results and gradients are compared in a type of 16 bits too. Gradcheck sees what is particular to float64.
COMPARED = ("float16", "float32")
# Between the name of a check and that of an output, where there are several.
OF = " of output "
# In place of an output's name: all of them in a row.
ALL = "all outputs"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim that an implementation is held to.

    Attributes:
        name: as users see it.
        run: raises where the claim does not hold.
        dtypes: the dtypes that it looks at, if any of them is claimed; else the first that is. Empty for all.
        plain: in which dtypes the default profile makes it of this library's own implementations; empty for all.
        all_nightly: whether tests that are marked with the check look at other dtypes too: where none of `dtypes` is
            selected, and under the nightly profile.
        only: the one dtype that it can be made in; None for any.
        devices: where it can be made.
        gradients: whether it is about gradients.
        batched: whether it is about operations that have batches.
        examples: at most so many generated cases; None for as many as asked for.
        concerns: whether it has something to say of an operation.
    """

    name: str
    run: Callable[..., None]
    dtypes: Collection[str] = ()
    plain: Collection[str] = PLAIN
    all_nightly: bool = False
    only: str | None = None
    devices: Collection[str] = ("cpu", "cuda")
    gradients: bool = False
    batched: bool = False
    examples: int | None = None
    concerns: Callable[[Operation], bool] = lambda operation: True

    def applies_to(self, operation: Operation) -> bool:
        """Whether it concerns an operation; one of gradients says nothing of what has none."""
        return self.concerns(operation) and bool(operation.differentiable or not self.gradients)

    def of(self, dtypes: Sequence[str]) -> list[str]:
        """Which of the claimed dtypes it looks at."""
        if self.only is not None:
            return [name for name in dtypes if name == self.only]
        if not self.dtypes:
            return list(dtypes)
        return [name for name in dtypes if name in self.dtypes] or list(dtypes[:1])

    def judge(self, subject: Subject, search: Search) -> None:
        """Run it within its limits.

        Raises:
            Unsupported: it cannot be made for the subject here; the message says why.
        """
        if self.examples is not None:
            search.examples = min(search.examples, self.examples)
        try:
            self.run(subject, search)
        except Unsatisfiable as error:
            raise Unsupported("no case that was drawn is of use to this check") from error


BACKWARD = Check(name="backward", run=backward.backward_agrees, plain=COMPARED, gradients=True)
STANDARD = (
    Check(name=FORWARD, run=forward.forward_agrees, plain=COMPARED),
    BACKWARD,
    # The gradients that are asked for decide which work is left out, in the same way for every dtype.
    Check(
        name="single gradients",
        run=single_gradients.single_gradients_agree,
        dtypes=("float16", "float32"),
        all_nightly=True,
        gradients=True,
    ),
    # What is saved does not depend on the numbers: a few cases of one dtype show it.
    Check(
        name="saved tensors", run=saved_tensors.backward_is_of_the_call, dtypes=("float32",), gradients=True, examples=3
    ),
    # Nor do the calls around a call, or its place in the graph.
    Check(name="interleaving", run=interleaving.backward_passes_may_interleave, dtypes=("float32",), gradients=True),
    # Nor does where tensors lie beside one another.
    Check(name="sharing", run=sharing.inputs_may_share_memory, dtypes=("float32",)),
    Check(name="graph", run=graph.place_in_the_graph_does_not_matter, dtypes=("float32",), gradients=True),
    Check(name="gradcheck", run=gradcheck.gradcheck, only="float64", plain=(), gradients=True),
    # Reads and writes depend on the width of an element, and on whether it is converted.
    Check(name="memory", run=memory.memory_is_respected, dtypes=("float16", "float32"), all_nightly=True),
    # The order of a sum is the same in every dtype.
    Check(name="repeatability", run=repeatability.repeats_bit_for_bit, dtypes=("float16", "float32"), all_nightly=True),
    Check(name="history", run=history.history_does_not_matter),
    Check(name="many calls", run=many_calls.each_of_many_calls_is_alike, dtypes=("float32",)),
    Check(name="late inputs", run=history.late_inputs_are_waited_for, devices=("cuda",)),
    # What a wrapper does in a mode, and with what threads share, does not depend on the dtype.
    Check(name="modes", run=modes.modes_do_not_matter, dtypes=("float32",), examples=12),
    Check(name="autocast", run=modes.autocast_changes_precision_alone, only="float32", examples=12),
    Check(name="threads", run=threads.threads_do_not_matter, dtypes=("float32",)),
    Check(
        name="defaults",
        run=parameters.defaults_are_the_definitions,
        dtypes=("float32",),
        concerns=lambda operation: bool(parameters.defaults_of(operation)),
    ),
    Check(
        name="parameters",
        run=parameters.parameters_may_be_far_from_the_usual,
        dtypes=("float32",),
        all_nightly=True,
        examples=12,
        concerns=lambda operation: bool(operation.ranges),
    ),
    Check(name="batch", run=batches.the_batch_does_not_matter, batched=True),
    # Offsets are computed alike for all dtypes.
    Check(name="offsets", run=offsets.offsets_may_pass_32_bits, dtypes=("float16", "float32")),
)
# A law relates formulas, so one dtype is enough. For the numbers of each dtype the oracle is stricter.
LAW = Check(name="law", run=laws.law_holds, dtypes=("float32",), all_nightly=True)
# The named examples reach every configuration; a few generated cases beside them are enough. Both half types are
# handled alike.
CONFIGURATION = Check(
    name="configuration",
    run=configurations.configuration_agrees,
    dtypes=("float16", "float32", "float64"),
    all_nightly=True,
    examples=5,
)
# Made where it is asked for: a candidate may leave to torch what it likes.
# The operators that are called depend on shapes and layouts more than on values: a few cases show them.
FALLBACK = Check(name="fallback", run=fallback.nothing_is_left_to_torch, dtypes=("bfloat16", "float32"), examples=10)
# Of several outputs of one call, and in one dtype: what must be the same of all was chosen before any is rounded.
TOGETHER = Check(
    name="outputs together",
    run=outputs.outputs_fit,
    dtypes=("float16", "float32"),
    all_nightly=True,
    concerns=lambda operation: operation.admissible is not None,
)
# Arguments are checked before anything that depends on the dtype. This check is the last one: on a GPU a kernel that
# does not notice bad input may leave the device unusable.
BAD_INPUT = Check(name="bad input", run=bad_input.declared_errors_are_raised, dtypes=("float32",))


def named(name: str) -> Check:
    """The check of a name; "law" is that of every law, and takes it as its first argument, as "configuration" does one.

    Raises:
        ValueError: there is none.
    """
    known = {check.name: check for check in (*STANDARD, LAW, CONFIGURATION, TOGETHER, BAD_INPUT)}
    if name not in known:
        raise ValueError(f"there is no check {name!r}: there are {', '.join(known)}")
    return known[name]


def checks_of(operation: Operation, device: str, claims: Claims) -> list[Check]:
    """The checks that concern an operation on a device, and what an implementation claims.

    Of several outputs each has its own, named "forward of output y", and there is one of all gradients together. Where
    the record says what outputs have to do with one another, a check of that follows.
    """
    if operation.outputs:
        return list(_of_outputs(operation, device, claims))
    of_laws = (
        replace(LAW, name=f"law: {law.__name__.replace('_', ' ')}", run=functools.partial(LAW.run, law))
        for law in operation.laws
    )
    return [
        check
        for check in (*STANDARD, *of_laws, BAD_INPUT)
        if device in check.devices
        and check.applies_to(operation)
        and (claims.gradients or not check.gradients)
        and (operation.batched or not check.batched)
        and (check is not BAD_INPUT or operation.errors)
    ]


def fallback_of(operation: Operation) -> Check:
    """The check that torch computes nothing, for an operation."""
    if not operation.outputs:
        return FALLBACK
    return replace(FALLBACK, run=outputs.of_one(FALLBACK.run, next(iter(operation.outputs))))


def _of_outputs(operation: Operation, device: str, claims: Claims) -> Iterator[Check]:
    for name, of in operation.outputs.items():
        for check in checks_of(of, device, claims):
            if check is not BAD_INPUT:
                yield replace(check, name=f"{check.name}{OF}{name}", run=outputs.of_one(check.run, name))
    if claims.gradients and ALL in outputs_for(BACKWARD, operation):
        yield replace(BACKWARD, name=f"{BACKWARD.name} of {ALL}", run=outputs.of_all(BACKWARD.run))
    if TOGETHER.concerns(operation):
        yield TOGETHER
    (first,) = outputs_for(BAD_INPUT, operation)
    if operation.outputs[first].errors:
        yield replace(BAD_INPUT, run=outputs.of_one(BAD_INPUT.run, first))


def outputs_for(check: Check | None, operation: Operation) -> list[str]:
    """The outputs that a check, or a test of something else, is made of one by one, by name.

    "" stands for the one output that there is, or for what all together are. Bad input is given once.
    """
    if not operation.outputs or check is TOGETHER:
        return [""]
    if check is BAD_INPUT:
        return list(operation.outputs)[:1]
    gradients = check is not None and check.gradients
    found = [name for name, of in operation.outputs.items() if of.differentiable or not gradients]
    return [*found, ALL] if check is BACKWARD and len(found) > 1 else found


def parts_of(name: str) -> tuple[str, str]:
    """The name of a check without that of an output, and the output's name: empty where there is one output."""
    check, _, output = name.partition(OF)
    return check, output


# A kernel that replaces what judges it, to be called right, is found out.
for _judge in (
    *(
        redzones,
        backward,
        bad_input,
        batches,
        operator_watch,
        fallback,
        forward,
        gradcheck,
        grades,
        history,
        laws,
        memory,
    ),
    *(offsets, repeatability, results, saved_tensors, search, single_gradients, graph, interleaving, many_calls, modes),
    *(configurations, outputs, parameters, sharing, threads),
    *(compare, dtypes, record, evaluation, outcomes, bounded, along_axes, elementwise),
):
    tampering.watch(_judge)
