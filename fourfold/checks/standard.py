"""The checks that an implementation of any operation is put through, and which of them concern a dtype and a device."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hypothesis.errors import Unsatisfiable

from fourfold.checks import (
    arena,
    backward,
    bad_input,
    batches,
    dispatch,
    fallback,
    forward,
    gradcheck,
    grades,
    history,
    laws,
    memory,
    offsets,
    repeatability,
    results,
    saved_tensors,
    search,
    single_gradients,
)
from fourfold.checks.search import Search, Subject, Unsupported
from fourfold.core import (
    comparison,
    dtypes,
    operation,
    running_error,
    running_error_arrays,
    running_error_rules,
    tampering,
)
from fourfold.core.claims import Claims
from fourfold.core.far_apart import NoRoom
from fourfold.core.operation import Operation

FORWARD = "forward"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim that an implementation is held to.

    Attributes:
        name: as users see it.
        run: raises where the claim does not hold.
        dtypes: the dtypes that it looks at, if any of them is claimed; else the first that is. Empty for all.
        only: the one dtype that it can be made in; None for any.
        devices: where it can be made.
        gradients: whether it is about gradients.
        examples: at most so many generated cases; None for as many as asked for.
    """

    name: str
    run: Callable[[Subject, Search], None]
    dtypes: Collection[str] = ()
    only: str | None = None
    devices: Collection[str] = ("cpu", "cuda")
    gradients: bool = False
    examples: int | None = None

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
        except NoRoom as error:
            raise Unsupported(str(error)) from error
        except Unsatisfiable as error:
            raise Unsupported("no case that was drawn is of use to this check") from error


STANDARD = (
    Check(name=FORWARD, run=forward.forward_agrees),
    Check(name="backward", run=backward.backward_agrees, gradients=True),
    Check(
        name="single gradients",
        run=single_gradients.single_gradients_agree,
        dtypes=("float16", "float32"),
        gradients=True,
    ),
    Check(
        name="saved tensors", run=saved_tensors.backward_is_of_the_call, dtypes=("float32",), gradients=True, examples=3
    ),
    Check(name="gradcheck", run=gradcheck.gradcheck, only="float64", gradients=True),
    Check(name="memory", run=memory.memory_is_respected, dtypes=("float16", "float32")),
    Check(name="repeatability", run=repeatability.repeats_bit_for_bit, dtypes=("float16", "float32")),
    Check(name="history", run=history.history_does_not_matter),
    Check(name="late inputs", run=history.late_inputs_are_waited_for, devices=("cuda",)),
    Check(name="batch", run=batches.the_batch_does_not_matter),
    Check(name="offsets", run=offsets.offsets_may_pass_32_bits, dtypes=("float16", "float32")),
)
# The last one: on a GPU a kernel that does not notice bad input may leave the device unusable.
BAD_INPUT = Check(name="bad input", run=bad_input.declared_errors_are_raised, dtypes=("float32",))


def checks_of(operation: Operation, device: str, claims: Claims) -> list[Check]:
    """The checks that concern an operation on a device, and what an implementation claims."""
    of_laws = (
        Check(
            name=f"law: {law.__name__.replace('_', ' ')}",
            run=functools.partial(laws.law_holds, law),
            dtypes=("float32",),
        )
        for law in operation.laws
    )
    return [
        check
        for check in (*STANDARD, *of_laws, BAD_INPUT)
        if device in check.devices
        and ((claims.gradients and operation.differentiable) or not check.gradients)
        and (check.name != "batch" or operation.batched)
        and (check is not BAD_INPUT or operation.errors)
    ]


# A kernel that replaces what judges it, to be called right, is found out.
for _judge in (
    *(arena, backward, bad_input, batches, dispatch, fallback, forward, gradcheck, grades, history, laws, memory),
    *(offsets, repeatability, results, saved_tensors, search, single_gradients),
    *(comparison, dtypes, operation, running_error, running_error_arrays, running_error_rules),
):
    tampering.watch(_judge)
