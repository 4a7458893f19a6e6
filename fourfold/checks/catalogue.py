"""The catalogue of checks for any operation, with the dtypes and devices of each check."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis.errors import Unsatisfiable

from fourfold.checks import (
    backward,
    bad_input,
    batches,
    compiler,
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
from fourfold.operations.outcomes import Exclusion, Unsupported
from fourfold.operations.record import Operation

FORWARD = "forward"
# Most checks depend little on the dtype. The default profile checks the library's own implementations in this one only.
PLAIN = ("float32",)
# Results and gradients are compared in a 16-bit type, too. Gradcheck covers what is particular to float64.
COMPARED = ("float16", "float32")
# Separates the name of a check from the name of one of several outputs.
OF = " of output "
# Stands for an output's name: all outputs in a row.
ALL = "all outputs"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of one claim about an implementation.

    Attributes:
        name: the name in messages and options.
        run: the function that raises an error if the claim does not hold.
        dtypes: the dtypes to check, if any of them is claimed; otherwise the first claimed dtype. Empty for all.
        plain: the dtypes of this library's own implementations under the default profile; empty for all.
        everywhere: whether the default profile checks all of this library's own backends in the dtypes `PLAIN`;
            otherwise it checks one backend of some of the operations, chosen by the names of the test and of the
            operation.
        all_nightly: whether tests that are marked with the check use other dtypes, too: if none of `dtypes` is
            selected, and under the nightly profile.
        only: the only dtype that the check supports; None for any.
        devices: the devices that the check supports.
        gradients: whether it checks gradients.
        batched: whether it applies only to operations that have batches.
        examples: the most generated cases; None for no limit of its own.
        concerns: returns whether the check applies to an operation.
    """

    name: str
    run: Callable[..., None]
    dtypes: Collection[str] = ()
    plain: Collection[str] = PLAIN
    everywhere: bool = False
    all_nightly: bool = False
    only: str | None = None
    devices: Collection[str] = ("cpu", "cuda")
    gradients: bool = False
    batched: bool = False
    examples: int | None = None
    concerns: Callable[[Operation], bool] = lambda operation: True

    def applies_to(self, operation: Operation) -> bool:
        """Return whether the check applies to an operation. A check of gradients requires that it has some."""
        return self.concerns(operation) and bool(operation.differentiable or not self.gradients)

    def of(self, dtypes: Sequence[str]) -> list[str]:
        """Return the claimed dtypes that the check uses."""
        if self.only is not None:
            return [name for name in dtypes if name == self.only]
        if not self.dtypes:
            return list(dtypes)
        return [name for name in dtypes if name in self.dtypes] or list(dtypes[:1])

    def judge(self, subject: Subject, search: Search) -> None:
        """Run the check within its limits.

        Raises:
            Unsupported: the check cannot run for the subject here; the message gives the reason.
        """
        if self.examples is not None:
            search.examples = min(search.examples, self.examples)
        try:
            self.run(subject, search)
        except Unsatisfiable as error:
            raise Unsupported("no case that was drawn is of use to this check", Exclusion.NO_CASE) from error


BACKWARD = Check(name="backward", run=backward.backward_agrees, plain=COMPARED, everywhere=True, gradients=True)
# A kernel is compiled in the same way for both half types.
COMPILER = Check(name="compiler", run=compiler.compiler_accepts, dtypes=("float16", "float32"), devices=("cpu",))
STANDARD = (
    Check(name=FORWARD, run=forward.forward_agrees, plain=COMPARED, everywhere=True),
    BACKWARD,
    COMPILER,
    # The requested gradients decide which work a kernel skips, in the same way for every dtype.
    Check(
        name="single gradients",
        run=single_gradients.single_gradients_agree,
        dtypes=("float16", "float32"),
        all_nightly=True,
        gradients=True,
    ),
    # The saved tensors do not depend on the numbers, so a few cases of one dtype are enough.
    Check(
        name="saved tensors", run=saved_tensors.backward_is_of_the_call, dtypes=("float32",), gradients=True, examples=3
    ),
    # The calls around a call, and its place in the graph, do not depend on the numbers either.
    Check(name="interleaving", run=interleaving.backward_passes_may_interleave, dtypes=("float32",), gradients=True),
    # Neither does the tensors' position in memory.
    Check(name="sharing", run=sharing.inputs_may_share_memory, dtypes=("float32",)),
    Check(name="graph", run=graph.place_in_the_graph_does_not_matter, dtypes=("float32",), gradients=True),
    Check(name="gradcheck", run=gradcheck.gradcheck, only="float64", plain=(), gradients=True),
    # Reads and writes depend on an element's width, and on whether it is converted.
    Check(name="memory", run=memory.memory_is_respected, dtypes=("float16", "float32"), all_nightly=True),
    # The order of a sum is the same in every dtype.
    Check(name="repeatability", run=repeatability.repeats_bit_for_bit, dtypes=("float16", "float32"), all_nightly=True),
    Check(name="history", run=history.history_does_not_matter),
    Check(name="many calls", run=many_calls.each_of_many_calls_is_alike, dtypes=("float32",)),
    Check(name="late inputs", run=history.late_inputs_are_waited_for, devices=("cuda",)),
    # A kernel for inference may round otherwise in a half type.
    Check(name="modes", run=modes.modes_do_not_matter, dtypes=("float16", "bfloat16", "float32"), examples=12),
    Check(name="autocast", run=modes.autocast_changes_precision_alone, only="float32", examples=12),
    # The state that threads share does not depend on the dtype.
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
# A law relates formulas, so one dtype is enough. The oracle checks the numbers of each dtype more strictly.
LAW = Check(name="law", run=laws.law_holds, dtypes=("float32",), all_nightly=True)
# The named examples reach every configuration, so a few generated cases are enough. Kernels treat both half types
# alike.
CONFIGURATION = Check(
    name="configuration",
    everywhere=True,
    run=configurations.configuration_agrees,
    dtypes=("float16", "float32", "float64"),
    all_nightly=True,
    examples=5,
)
# Runs only on request, because a candidate may leave any work to torch.
# The operators called depend on shapes and layouts more than on values, so a few cases are enough.
FALLBACK = Check(name="fallback", run=fallback.nothing_is_left_to_torch, dtypes=("bfloat16", "float32"), examples=10)
# Relates the outputs of one call. One dtype is enough: a kernel makes their common choices before it rounds any.
TOGETHER = Check(
    name="outputs together",
    run=outputs.outputs_fit,
    dtypes=("float16", "float32"),
    all_nightly=True,
    concerns=lambda operation: operation.admissible is not None,
)
# A wrapper checks its arguments before anything that depends on the dtype. This check runs last: on a GPU a kernel that
# does not notice bad input may leave the device unusable.
BAD_INPUT = Check(name="bad input", run=bad_input.declared_errors_are_raised, dtypes=("float32",))


def check_named(name: str) -> Check:
    """Return the check of a name. Those of "law" and "configuration" take the law or configuration as first argument.

    Raises:
        ValueError: no check has the name.
    """
    checks = {check.name: check for check in (*STANDARD, LAW, CONFIGURATION, TOGETHER, BAD_INPUT)}
    if name not in checks:
        raise ValueError(f"there is no check {name!r}: there are {', '.join(checks)}")
    return checks[name]


def checks_of(operation: Operation, device: str, claims: Claims) -> list[Check]:
    """Return the checks of an operation on a device, for an implementation's claims.

    Each of several outputs has its own checks, named "forward of output y", and another check takes all gradients
    together. If the record relates the outputs to one another, a check of that relation follows.
    """
    if operation.outputs:
        return list(_output_checks(operation, device, claims))
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
    """Return the check that torch computes nothing, for an operation."""
    if not operation.outputs:
        return FALLBACK
    return replace(FALLBACK, run=outputs.check_of_output(FALLBACK.run, next(iter(operation.outputs))))


def _output_checks(operation: Operation, device: str, claims: Claims) -> Iterator[Check]:
    for name, output in operation.outputs.items():
        for check in checks_of(output, device, claims):
            if check is not BAD_INPUT and name in outputs_for(check, operation):
                yield replace(check, name=f"{check.name}{OF}{name}", run=outputs.check_of_output(check.run, name))
    if claims.gradients and ALL in outputs_for(BACKWARD, operation):
        yield replace(BACKWARD, name=f"{BACKWARD.name} of {ALL}", run=outputs.check_of_joined_outputs(BACKWARD.run))
    if TOGETHER.concerns(operation):
        yield TOGETHER
    (first,) = outputs_for(BAD_INPUT, operation)
    if operation.outputs[first].errors:
        yield replace(BAD_INPUT, run=outputs.check_of_output(BAD_INPUT.run, first))


def outputs_for(check: Check | None, operation: Operation) -> list[str]:
    """Return the names of the outputs that a check, or another test, takes one by one.

    "" stands for the only output, or for all outputs together. The checks of bad input and of the compiler run for one
    output only.
    """
    if not operation.outputs or check is TOGETHER:
        return [""]
    if check in (BAD_INPUT, COMPILER):
        return list(operation.outputs)[:1]
    gradients = check is not None and check.gradients
    names = [name for name, output in operation.outputs.items() if output.differentiable or not gradients]
    return [*names, ALL] if check is BACKWARD and len(names) > 1 else names


# The checks of a case from a file: those that run any case alone.
OF_A_CASE = (FORWARD, BACKWARD.name, "single gradients", "memory", "repeatability")


def parts_of(name: str) -> tuple[str, str]:
    """Split a name into the name of the check and the name of the output, which is empty for an only output."""
    check, _, output = name.partition(OF)
    return check, output


def asks_for_gradients(name: str) -> bool:
    """Return whether an implementation is called before a check, to learn whether its output has a gradient.

    The forward check comes first, takes no gradients, and must compare the implementation's first call.
    """
    return parts_of(name)[0] != FORWARD


# Detect a kernel that replaces the code that judges it.
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
    *(compiler, configurations, outputs, parameters, sharing, threads),
    *(compare, dtypes, record, evaluation, outcomes, bounded, along_axes, elementwise),
):
    tampering.watch(_judge)
