"""Refusals: exceptions by which an implementation rejects an input that it does not support.

A refusal is not a wrong result. It is counted, with its reason. A fault before an exception is not a refusal: an access
outside of the tensors, a race, an error that leaves a GPU unusable.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fourfold.compat.test_runners import PASSING_OVER
from fourfold.operations.blame import Blame, mark, recorded_blame, statement

# Messages of CUDA errors after which the process cannot run anything on the GPU.
_LOST_CONTEXT = re.compile(r"illegal (memory access|address|instruction)|misaligned address|launch failure|device-side")
_NO_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|active drivers|No CUDA GPUs|is_cuda|must be (a )?CUDA", re.I
)
# Exceptions by which a test runner or a check skips a case, besides those of `PASSING_OVER`.
_PASS_OVER_CLASSES = {
    "unittest.case.SkipTest",
    *(f"fourfold.operations.outcomes.{name}" for name in ("Refused", "Unclaimed", "Unsuitable", "Unsupported")),
    "fourfold.checks.search.Unreachable",
}
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


class Fault(Exception):
    """An exception for behaviour that is wrong for every input, an access outside of the tensors for example."""


class OutOfTime(Exception):
    """An exception for a call that took too long and was ended."""


class Escape(AssertionError):
    """An error for a call that raised an order to end the process, or to skip the test or the case."""


def is_order(error: BaseException) -> bool:
    """Return whether an exception is an order to end, like SystemExit, or to skip a test or case, like pytest.skip."""
    kind = type(error)
    return (
        not isinstance(error, Exception)
        or any(base.__module__.partition(".")[0] in PASSING_OVER for base in kind.__mro__)
        or f"{kind.__module__}.{kind.__name__}" in _PASS_OVER_CLASSES
    )


def escape_of(error: BaseException) -> Escape:
    """Return the failure to report in place of an order."""
    message = f": {error}" if str(error) else ""
    return Escape(f"the call raised {type(error).__name__}{message}").with_traceback(error.__traceback__)


@contextlib.contextmanager
def blame_definition() -> Iterator[None]:
    """Mark exceptions raised inside as exceptions of the definition, the reference for kernels."""
    try:
        yield
    except Exception as error:
        mark(error, Blame.DEFINITION)
        raise


def is_refusal(error: BaseException) -> bool:
    """Return whether an exception is a refusal by the implementation, and reports no fault."""
    return recorded_blame(error) is Blame.REFUSAL and not is_fault(error) and not has_lost_device(error)


def is_rejection(error: BaseException) -> bool:
    """Return whether an exception rejects bad input: a refusal, or an exception that Python itself raises."""
    return is_refusal(error) or (
        recorded_blame(error) is Blame.BUG and not is_fault(error) and not has_lost_device(error)
    )


def has_lost_device(error: BaseException) -> bool:
    """Return whether an exception makes the GPU unusable for this process, like an illegal memory access."""
    return any(_LOST_CONTEXT.search(str(cause)) for cause in chain(error))


def is_fault(error: BaseException) -> bool:
    """Return whether an exception reports a fault, or wraps one that does."""
    return any(isinstance(cause, Fault) for cause in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes or, without a cause, the exceptions in whose handling it was raised."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def reason(error: BaseException) -> str:
    """Return the message of a refusal in one line; for a chain of causes, the message of the innermost exception."""
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    line = next((line.strip() for line in str(innermost).splitlines() if line.strip()), "") or statement(innermost)
    kind = type(innermost).__name__
    text = f"{kind}: {line}" if line else kind
    return f"{text} (it asks for a GPU, and there is none here)" if _NO_GPU.search(text) else text


@dataclass
class Refusals:
    """The numbers of refused cases by reason. Reasons that differ only in numbers count as the same."""

    counts: Counter[str] = field(default_factory=Counter)
    _spelled: dict[str, str] = field(default_factory=dict)

    def add(self, error: BaseException) -> None:
        """Count a refusal."""
        text = reason(error)
        self.counts[self._spelled.setdefault(_NUMBER.sub("N", text), text)] += 1

    @property
    def total(self) -> int:
        """Return the number of refused cases."""
        return sum(self.counts.values())
