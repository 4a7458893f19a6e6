"""Refusals: an implementation may say loudly that it does not take an input, by an exception of its own.

A refusal is no wrong result. It is counted, with its reason. What an implementation does wrong on the way to an
exception is no refusal: an access outside of its tensors, a race, an error that leaves a GPU unusable.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fourfold.compat.test_runners import PASSING_OVER
from fourfold.operations.blame import Blame, mark, marked, statement

# Messages of CUDA errors after which nothing can be run in the process.
_LOST_CONTEXT = re.compile(r"illegal (memory access|address|instruction)|misaligned address|launch failure|device-side")
_NO_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|active drivers|No CUDA GPUs|is_cuda|must be (a )?CUDA", re.I
)
# Exceptions by which a test runner or a check passes over a case, beside those of `PASSING_OVER`.
_PASS_OVER_CLASSES = {
    "unittest.case.SkipTest",
    "fourfold.operations.outcomes.Unsuitable",
    "fourfold.operations.outcomes.Unsupported",
    "fourfold.operations.outcomes.Refused",
}
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


class Fault(Exception):
    """A kernel did what is wrong for every input, such as an access outside of its tensors."""


class OutOfTime(Exception):
    """A call that took too long, and was ended."""


class Escape(AssertionError):
    """A call raised an order: to end the process, or to pass over the test or the case."""


def is_order(error: BaseException) -> bool:
    """Whether an exception is an order to end, as SystemExit, or to pass over a test or a case, as pytest's skip."""
    kind = type(error)
    return (
        not isinstance(error, Exception)
        or any(base.__module__.partition(".")[0] in PASSING_OVER for base in kind.__mro__)
        or f"{kind.__module__}.{kind.__name__}" in _PASS_OVER_CLASSES
    )


def escape_of(error: BaseException) -> Escape:
    """The failure that an order stands for."""
    said = f": {error}" if str(error) else ""
    return Escape(f"the call raised {type(error).__name__}{said}").with_traceback(error.__traceback__)


@contextlib.contextmanager
def by_the_definition() -> Iterator[None]:
    """Mark exceptions that are raised inside as those of the definition that kernels are compared with."""
    try:
        yield
    except Exception as error:
        mark(error, Blame.DEFINITION)
        raise


def is_refusal(error: BaseException) -> bool:
    """Whether an exception is a refusal of the implementation's, and reports no fault."""
    return marked(error) is Blame.REFUSAL and not is_fault(error) and not has_lost_device(error)


def is_rejection(error: BaseException) -> bool:
    """Whether an exception keeps a call with bad input from giving a result: a refusal, or what Python raises there."""
    return is_refusal(error) or (marked(error) is Blame.BUG and not is_fault(error) and not has_lost_device(error))


def has_lost_device(error: BaseException) -> bool:
    """Whether an exception says that the process can use its GPU no more, as after an illegal memory access."""
    return any(_LOST_CONTEXT.search(str(cause)) for cause in chain(error))


def is_fault(error: BaseException) -> bool:
    """Whether an exception reports a fault, or wraps one that does."""
    return any(isinstance(cause, Fault) for cause in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from, or that were being handled when it was raised."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def reason(error: BaseException) -> str:
    """What a refusal says, in one line; of an exception that wraps another, what the innermost says."""
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    line = next((line.strip() for line in str(innermost).splitlines() if line.strip()), "") or statement(innermost)
    kind = type(innermost).__name__
    said = f"{kind}: {line}" if line else kind
    return f"{said} (it asks for a GPU, and there is none here)" if _NO_GPU.search(said) else said


@dataclass
class Refusals:
    """How many cases were refused, by reason. Reasons that differ in numbers alone are one."""

    counts: Counter[str] = field(default_factory=Counter)
    _spelled: dict[str, str] = field(default_factory=dict)

    def add(self, error: BaseException) -> None:
        """Count a refusal."""
        said = reason(error)
        self.counts[self._spelled.setdefault(_NUMBER.sub("N", said), said)] += 1

    @property
    def total(self) -> int:
        """The number of refused cases."""
        return sum(self.counts.values())
