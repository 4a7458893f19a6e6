"""How a check may end: the words of a verdict, and the exceptions by which a check ends."""

from fourfold.operations.refusals import Refusals

# How the reasons begin for which a check says nothing of an implementation, and need not.
REFUSED_ALL, UNCLAIMED = "refused all", "not claimed:"
# Why a candidate is not put through a check of gradients.
FORWARD_ONLY = "forward only: its output has no gradient where its inputs do"
# How the reason ends for which no operation's candidate is.
NO_GRADIENTS = "has no gradients"
# Why other checks say nothing of what is known to be wrong.
BRIEFLY = "looked at briefly, by a few small cases: it is wrong already"
NOT_MADE = "not made: it is wrong already"
PASSED, FAILED, REFUSED, UNREACHED, UNSUPPORTED = "passed", "failed", "refused", "not reached", "unsupported"
WRONG = "wrong"
# What a failure may be besides wrong.
IMPRECISE, CRASHED, TIMED_OUT, TAMPERED = "imprecise", "crashed", "timed out", "tampered"
RIGHT, INVALID = "right", "invalid"
# The definition raises, has no bound, or the harness lacks or breaks something: nothing is said of the implementation.
UNDECIDED = "undecided"


class Failure(AssertionError):
    """An implementation failed a check.

    Attributes:
        worst: the largest error, in units of its bound; 0 where none was compared.
    """

    def __init__(self, message: str, worst: float = 0.0) -> None:
        super().__init__(message)
        self.worst = worst


class Vacuous(Failure):
    """No example of a search could have failed, as where all bounds are infinite."""


class Unsupported(Exception):
    """A check does not apply to an implementation; the message says why."""


class Unsuitable(Exception):
    """A check has no use for a case."""


class Refused(Unsupported):
    """An implementation refused every case of a check."""

    def __init__(self, refusals: Refusals) -> None:
        (reason, _), *_ = refusals.counts.most_common()
        super().__init__(f"{REFUSED_ALL} {refusals.total} cases: {reason}")
