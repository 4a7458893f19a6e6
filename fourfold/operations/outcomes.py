"""The outcomes of a check: the words of a verdict, and the exceptions that end a check."""

from fourfold.operations.refusals import Refusals

# The prefixes of reasons for which a check rightly has no result for an implementation.
REFUSED_ALL, UNCLAIMED = "refused all", "not claimed:"
# The reason to skip the checks of gradients for a candidate.
FORWARD_ONLY = "forward only: its output has no gradient where its inputs do"
# The end of the reason to skip them for all candidates of an operation.
NO_GRADIENTS = "has no gradients"
# The reasons of the other checks if an implementation is known to be wrong.
BRIEFLY = "looked at briefly, by a few small cases: it is wrong already"
NOT_MADE = "not made: it is wrong already"
PASSED, FAILED, REFUSED, UNREACHED, UNSUPPORTED = "passed", "failed", "refused", "not reached", "unsupported"
WRONG = "wrong"
# The kinds of failures besides wrong.
IMPRECISE, CRASHED, TIMED_OUT, TAMPERED = "imprecise", "crashed", "timed out", "tampered"
RIGHT, INVALID = "right", "invalid"
# No verdict on the implementation: the definition raises or has no bound, or the harness has a lack or a bug.
UNDECIDED = "undecided"


class Failure(AssertionError):
    """A failure of an implementation in a check.

    Attributes:
        worst: the largest error, in units of its bound; 0 if no errors were compared.
    """

    def __init__(self, message: str, worst: float = 0.0) -> None:
        super().__init__(message)
        self.worst = worst


class Vacuous(Failure):
    """A failure of a search whose examples could not have failed, because all bounds are infinite for example."""


class Unsupported(Exception):
    """An exception for a check that does not apply to an implementation; the message gives the reason."""


class Unsuitable(Exception):
    """An exception for a case that a check cannot use."""


class Refused(Unsupported):
    """An exception for an implementation that refused every case of a check."""

    def __init__(self, refusals: Refusals) -> None:
        (reason, _), *_ = refusals.counts.most_common()
        super().__init__(f"{REFUSED_ALL} {refusals.total} cases: {reason}")
