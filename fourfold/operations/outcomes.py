"""The outcomes of a check: its status, the kind of a failure, and the exceptions that end a check."""

from enum import StrEnum

from fourfold.operations.refusals import Refusals

# The reasons of the other checks if an implementation is known to be wrong.
BRIEFLY = "looked at briefly, by a few small cases: it is wrong already"
NOT_MADE = "left out: it is wrong already"
# What a table shows of such a check in place of its status.
IN_TABLES = {BRIEFLY: "brief", NOT_MADE: "not made"}
# The grade of a wrong implementation, besides the accuracies that one may claim.
WRONG = "wrong"


class Status(StrEnum):
    """The status of a check."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"  # the implementation refused every case
    UNREACHED = "not reached"  # no case could run here
    UNSUPPORTED = "unsupported"  # the check does not apply


class Kind(StrEnum):
    """The kind of a verdict or of a failure, the gravest last."""

    RIGHT = "right"
    REFUSED = "refused"
    IMPRECISE = "imprecise"
    UNDECIDED = "undecided"  # no verdict: the definition raises or has no bound, or the harness has a lack or a bug
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    INVALID = "invalid"
    TAMPERED = "tampered"


class Exclusion(StrEnum):
    """The reasons why a check does not apply that decide whether a run passes."""

    UNCLAIMED = "unclaimed"  # the implementation's claims exclude it
    FORWARD_ONLY = "forward only"  # the implementation's output has no gradient where its inputs do
    NO_GRADIENTS = "no gradients"  # the operation has none
    CELL = "cell"  # nothing of this dtype and backend can run here
    NO_COMPILER = "no compiler"  # Triton's compiler has nothing to say about the implementation
    NO_CASE = "no case"  # no case of the operation is of use to the check
    DTYPE = "dtype"  # the implementation's claims exclude this dtype


class Failure(AssertionError):
    """A failure of an implementation in a check.

    Attributes:
        result: the name of the wrong result, "output" or "gradient of x"; "" if the failure is of no result.
        worst: the largest error, in units of its bound; 0 if no errors were compared.
    """

    def __init__(self, message: str, result: str = "", worst: float = 0.0) -> None:
        super().__init__(message)
        self.result, self.worst = result, worst


class Vacuous(Failure):
    """A failure of a search whose examples could not have failed, because all bounds are infinite for example."""


class Unsupported(Exception):
    """An exception for a check that does not apply to an implementation; the message gives the reason."""

    status = Status.UNSUPPORTED

    def __init__(self, reason: str, exclusion: Exclusion | None = None) -> None:
        super().__init__(reason)
        self.exclusion = exclusion


class Unclaimed(Unsupported):
    """An exception for a check of something that an implementation does not claim."""

    def __init__(self, limit: str, exclusion: Exclusion = Exclusion.UNCLAIMED) -> None:
        super().__init__(f"not claimed: {limit}", exclusion)


class Unsuitable(Exception):
    """An exception for a case that a check cannot use."""


class Refused(Unsupported):
    """An exception for an implementation that refused every case of a check."""

    status = Status.REFUSED

    def __init__(self, refusals: Refusals) -> None:
        (reason, _), *_ = refusals.counts.most_common()
        super().__init__(f"refused all {refusals.total} cases: {reason}")
