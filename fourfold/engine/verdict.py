"""The verdict on one implementation: the outcome of each check, and every distinct failure."""

import functools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Self

from fourfold.engine.annotations import lines_in
from fourfold.engine.pages import page
from fourfold.engine.tables import table_lines
from fourfold.instruments.line_coverage import Unexecuted, report_lines
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.boundary import Boundary
from fourfold.operations.claims import EXACT, STORAGE, Claims
from fourfold.operations.outcomes import IN_TABLES, WRONG, Exclusion, Kind, Status

# Failures after which other checks may still find something wrong.
MAY_BE_WRONG = (Kind.UNDECIDED, Kind.IMPRECISE)
# The numbers of `Verdict.reward`, and the most that a speed may add to them and take from them.
REWARDS: Mapping[str, float] = MappingProxyType(
    {
        Kind.RIGHT: 1.0,
        Kind.IMPRECISE: 0.2,
        Kind.WRONG: 0.0,
        Kind.UNDECIDED: 0.0,
        Kind.REFUSED: 0.0,
        Kind.TIMED_OUT: -0.2,
        Kind.CRASHED: -0.2,
        Kind.INVALID: -0.5,
        Kind.TAMPERED: -1.0,
    }
)
MOST_FOR_SPEED, LEAST_FOR_SPEED = 2.0, -0.5
# The version of the JSON of verdicts that docs/verdict.schema.json describes. A new property does not change it.
SCHEMA_VERSION = 1
# The statuses that the counts of a verdict's JSON name although they are 0.
COUNTED = (Status.PASSED, Status.FAILED, Status.UNSUPPORTED)
# The number of refusal reasons, and of warnings, in a text.
SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One failure.

    Attributes:
        message: what was expected and what was found.
        counterexample: the case, as text; None if there is none.
        frames: the stack trace through the author's own code, as Python formats it; "" if there is none.
        cause: a key that failures of one cause share.
        blob: Hypothesis's encoding of the case, for `verify(..., reproduce=blob)`; None for a named example.
        kind: "wrong", "imprecise", "tampered", "undecided" if the definition or the harness failed, or, for a call
            in its own process, "crashed" or "timed out".
        likely_cause: the mistake that explains all results exactly; "" if none is known.
        repeat: the call of `fourfold.verify` that repeats it; "" in a run of pytest, which has a command.
        result: the name of the result whose values are wrong, "output" or "gradient of x"; "" for another failure.
            `Outcome.as_check` leaves it out.
        arguments: the counterexample as tables: see `fourfold.operations.case.tabulate`.
    """

    message: str
    counterexample: str | None = None
    frames: str = ""
    cause: str = ""
    blob: str | None = None
    kind: Kind = Kind.WRONG
    likely_cause: str = ""
    repeat: str = ""
    result: str = field(default="", compare=False)
    arguments: tuple[dict[str, Any], ...] = field(default=(), hash=False)

    def line_of(self, file: str) -> int | None:
        """Return the line of a file at which the failure arose; None if it names none, as for a wrong result."""
        return next(reversed(lines_in(f"{self.frames}\n{self.message}\n{self.cause}", file)), None) if file else None

    def __str__(self) -> str:
        labelled = {"likely cause:": self.likely_cause, "at": self.counterexample, "repeat with": self.repeat}
        parts = [self.message, self.frames, *(f"{label} {text}" for label, text in labelled.items() if text)]
        return "\n".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one check of one dtype.

    Attributes:
        check: its name.
        dtype: the dtype's name.
        outcome: "passed", "failed", "refused" (every case was refused), "not reached" (no case could run here) or
            "unsupported" (the check does not apply).
        reason: why it is refused, not reached or unsupported.
        grade: "exact", "storage" or "wrong".
        worst: the largest error, in units of its bound: above 1 for a wrong result.
        examples: the number of cases that ran.
        refusals: the number of refused cases, by reason.
        seconds: the time that it took.
        failure: the finding of a failed check.
        holds: its claims with the weakest further ones within which it would pass, such as ``finite=True``; "" without
            any.
        remarks: observations beyond its claim.
        exclusion: why it is unsupported, if that decides whether a run passes. `as_check` leaves it out.
        search: further records of its search for the report of a run; None without a search. `as_check` leaves it
            out.
    """

    check: str
    dtype: str
    outcome: Status
    reason: str | None = None
    grade: str = EXACT
    worst: float = 0.0
    examples: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    failure: Finding | None = None
    holds: str = ""
    remarks: tuple[str, ...] = ()
    exclusion: Exclusion | None = field(default=None, compare=False)
    search: dict[str, Any] | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as a mapping of plain values."""
        return json.loads(json.dumps(asdict(self)))

    def as_check(self) -> dict[str, Any]:
        """Return the outcome as an entry of a verdict's checks: see docs/verdict.schema.json."""
        entry: dict[str, Any] = {"check": self.check, "dtype": self.dtype, "outcome": self.outcome}
        if self.outcome in (Status.PASSED, Status.FAILED) or self.examples or self.seconds:
            entry |= {"grade": self.grade, "worst_error_over_bound": self.worst}
            entry |= {"examples": self.examples, "seconds": self.seconds}
        entry |= {name: value for name in ("reason", "refusals", "holds", "remarks") if (value := getattr(self, name))}
        if self.refusals:
            entry["refused_share"] = (refused := sum(self.refusals.values())) / (refused + self.examples)
        if self.failure:
            details = {f.name: getattr(self.failure, f.name) for f in fields(Finding) if f.name != "result"}
            entry |= {name: value for name, value in details.items() if value or name == "message"}
        return entry

    @classmethod
    def of_check(cls, entry: Mapping[str, Any]) -> Self:
        """Return the outcome from the result of `as_check`."""
        values = {**entry, "worst": entry.get("worst_error_over_bound", 0.0)}
        return cls.of({**values, "failure": _fields(Finding, entry) if "message" in entry else None})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the outcome from the result of `as_dict`."""
        failure, exclusion = values.get("failure"), values.get("exclusion")
        if failure:
            failure = Finding(**_fields(Finding, {**failure, "kind": Kind(failure["kind"])}))
        status, exclusion = Status(values["outcome"]), exclusion and Exclusion(exclusion)
        return cls(**_fields(cls, {**values, "outcome": status, "exclusion": exclusion, "failure": failure}))


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of an implementation on one workload, relative to the reference in the same run.

    Attributes:
        workload: its name.
        dtype: the dtype's name.
        direction: "forward", or "both" for forward and backward.
        seconds: the median time of a call.
        reference_seconds: the median time of a call of the reference.
        ratio: the median of the reference's time over the implementation's: above 1 it is faster.
        low, high: the ends of the ratio's 95% interval.
        error: why this is no valid measurement, such as a time that the machine cannot reach; "" for a valid one.
        notes: possible disturbances of the clock, such as throttling.
    """

    workload: str
    dtype: str
    direction: str
    seconds: float
    reference_seconds: float
    ratio: float
    low: float
    high: float
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def certain(self) -> float:
        """Return the certain speed-up: the end of the interval nearer to 1, or 1 if the interval holds 1."""
        if self.error:
            return 1.0
        return min(max(1.0, self.low), self.high)

    def __str__(self) -> str:
        name = f"{self.workload}, {self.dtype}, {self.direction}"
        if self.error:
            return f"{name}: not measured: {self.error}"
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        times = f"{self.seconds * 1e6:.1f} µs, reference {self.reference_seconds * 1e6:.1f} µs"
        return f"{name}: {self.ratio:.2f} times as fast [{self.low:.2f}, {self.high:.2f}]: {times}{notes}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on an implementation.

    Attributes:
        implementation: its name.
        operation: the operation's name.
        device: the device that it ran on.
        claims: its claims, as text.
        outcomes: one for each check and dtype.
        shortcomings: why it did not pass although no check failed.
        warnings: observations that are no failures.
        versions: of Python's packages.
        seed: of the generated cases.
        seconds: the time that it took.
        constants: the constants in the implementation's source that give the sizes of large cases, in a line.
        suggested_claim: claims that exclude every case that failed or, if none failed, was refused, such as
            ``contiguous=True``; "" without any.
        never_executed: lines of the implementation that never ran; None if unknown, as for a wrong implementation.
        left_out: the number of checks that were not made because time ran out.
        speeds: its speeds, if they were requested and it passed.
        file: the path of its file; "" if unknown.
        source: the text of that file; "" if it is unknown or long.
    """

    implementation: str
    operation: str
    device: str
    claims: str
    outcomes: tuple[Outcome, ...]
    shortcomings: tuple[str, ...]
    warnings: tuple[str, ...]
    versions: dict[str, str]
    seed: int
    seconds: float
    constants: str = ""
    suggested_claim: str = ""
    never_executed: tuple[Unexecuted, ...] | None = None
    left_out: int = 0
    speeds: tuple[Speed, ...] = ()
    file: str = ""
    source: str = ""

    @property
    def kind(self) -> Kind:
        """Return the verdict in a word.

        - "right": it passed.
        - "imprecise", "undecided", "wrong", "tampered", "invalid", "crashed" or "timed out": the gravest of its
          failures. "timed out" also if checks were left out, "undecided" also if no case of a check could run.
        - "refused": no check failed, but it accepts too few cases or lacks gradients.
        """
        return kind_of(self.outcomes, self.passed, self.left_out)

    def reward(self, rewards: Mapping[str, float] = REWARDS) -> float:
        """Return a number for a learner.

        The kind of the verdict decides: 1 for "right", 0.2 for "imprecise", 0 for "wrong", "undecided" and "refused",
        -0.2 for "crashed" and "timed out", -0.5 for "invalid" and -1 for "tampered". If speeds were measured, a right
        verdict adds log2 of its speed-up, at least -0.5 and at most 2. The speed-up is the geometric mean of the
        certain ones: see `Speed.certain`. So clock noise adds nothing if an interval holds 1. Refusals without a claim
        reduce the number of a right verdict: it is multiplied by the share of accepted cases.

        Args:
            rewards: other numbers, by kind. A kind that is missing keeps the number above.

        Raises:
            ValueError: a kind is unknown.
        """
        for kind in rewards:
            if kind not in REWARDS:
                raise ValueError(f"rewards: there is no verdict {kind!r}: there are {', '.join(REWARDS)}")
        number = {**REWARDS, **rewards}[self.kind]
        if self.kind != Kind.RIGHT:
            return number
        doublings = [math.log2(speed.certain) for speed in self.speeds]
        for_speed = sum(doublings) / len(doublings) if doublings else 0.0
        return (1 - self.refused_share) * (number + min(max(for_speed, LEAST_FOR_SPEED), MOST_FOR_SPEED))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a verdict that `json` wrote.

        Raises:
            ValueError: the text is no verdict.
        """
        try:
            entry = json.loads(text)
            if entry.get("schema_version") != SCHEMA_VERSION:
                version = entry.get("schema_version")
                raise ValueError(f"this is no verdict: expected schema_version {SCHEMA_VERSION}, found {version}")
            entry["outcomes"] = entry.pop("checks")
            return cls(**_fields(cls, entry, outcomes=Outcome.of_check, never_executed=_to_unexecuted, speeds=_speed))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no verdict: {error}") from error

    @property
    def passed(self) -> bool:
        """Return whether no check failed and enough was verified."""
        return not self.shortcomings and not any(o.outcome == Status.FAILED for o in self.outcomes)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def grade(self) -> str:
        """Return the worst grade of all checks: "exact", "storage" or "wrong"."""
        grades = {o.grade for o in self.outcomes}
        return next((grade for grade in (WRONG, STORAGE) if grade in grades), EXACT)

    @property
    def worst(self) -> float:
        """Return the largest error of all checks, in units of its bound: above 1 for a wrong result."""
        return max((o.worst for o in self.outcomes), default=0.0)

    @property
    def examples(self) -> int:
        """Return the number of cases that ran."""
        return sum(o.examples for o in self.outcomes)

    @property
    def refusals(self) -> Counter[str]:
        """Return the number of refused cases, by reason."""
        return sum((Counter(o.refusals) for o in self.outcomes), Counter())

    @property
    def refused_share(self) -> float:
        """Return the share of refused cases, from 0 to 1."""
        return self.refusals.total() / max(self.examples + self.refusals.total(), 1)

    @property
    def failures(self) -> list[tuple[Outcome, Finding]]:
        """Return every distinct failure, with the first check that found it."""
        first: dict[str, tuple[Outcome, Finding]] = {}
        for outcome in self.outcomes:
            if outcome.failure is not None:
                first.setdefault(outcome.failure.cause, (outcome, outcome.failure))
        return list(first.values())

    @property
    def summary(self) -> str:
        """Return the verdict in one sentence."""
        name = f"{self.implementation} as {self.operation} on {self.device}"
        if self.passed:
            verb = "right" if not self.refusals else "right wherever it accepts"
            condition = f" (claims: {self.claims})" if self.claims else ""
            worst = f"worst error {self.worst:.2f} of its bound, {self.examples} examples"
            return f"{name}: {verb}, {self.grade}; {worst}{condition}"
        failed = sum(o.outcome == Status.FAILED for o in self.outcomes)
        if failed and self.grade == STORAGE:
            return f"{name}: NOT PASSED; right with storage accuracy, which it does not claim"
        if failed:
            distinct = f"{len(self.failures)} distinct failure{'s' * (len(self.failures) != 1)}"
            kind = "CANNOT JUDGE" if self.kind == Kind.UNDECIDED else self.kind.upper()
            return f"{name}: {kind}; {failed} of {len(self.outcomes)} checks failed, {distinct}"
        return f"{name}: NOT PASSED; {'; '.join(self.shortcomings)}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.summary
        yield from self._table()
        yield from refusal_lines(self.refusals, self.examples, self.suggested_claim if self.passed else "")
        yield from holding_lines(self.suggested_claim if not self.passed else "", "accept=True")
        for number, (outcome, failure) in enumerate(self.failures, 1):
            alike = [o for o in self.outcomes if o.failure is not None and o.failure.cause == failure.cause]
            suffix = f" (and {len(alike) - 1} other checks)" if len(alike) > 1 else ""
            yield f"\n{number}. {outcome.check}, {outcome.dtype}{suffix}: {failure}"
        if self.constants:
            yield self.constants
        yield from (f"not passed: {line}" for line in self.shortcomings)
        yield from report_lines(self.never_executed or ())
        yield from (f"speed: {speed}" for speed in self.speeds)
        yield from (f"{o.check}, {o.dtype}: {remark}" for o in self.outcomes for remark in o.remarks)
        yield from (f"warning: {line}" for line in self.warnings[:SHOWN])
        if len(self.warnings) > SHOWN:
            yield f"warning: and {len(self.warnings) - SHOWN} more"

    def _table(self) -> Iterator[str]:
        dtypes = list(dict.fromkeys(o.dtype for o in self.outcomes))
        by_cell = {(o.check, o.dtype): o for o in self.outcomes}
        checks = dict.fromkeys(o.check for o in self.outcomes)
        rows = [[f"  {check}", *(_cell(by_cell.get((check, name))) for name in dtypes)] for check in checks]
        yield from table_lines([["", *dtypes], *rows])
        yield from (
            f"{word}: {reason}" for reason, word in IN_TABLES.items() if reason in {o.reason for o in self.outcomes}
        )

    def json(self) -> str:
        """Return the whole verdict as JSON, as docs/verdict.schema.json describes it."""
        totals = {"grade": self.grade, "worst_error_over_bound": self.worst, "refused_share": self.refused_share}
        attributes = asdict(replace(self, outcomes=()))
        del attributes["outcomes"]
        head = heading(self.outcomes, self.passed, self.left_out) | totals | {"summary": self.summary}
        checks = [outcome.as_check() for outcome in self.outcomes]
        return json.dumps({**head, **attributes, "checks": checks}, indent=1, default=str)

    def html(self, back: str = "") -> str:
        """Return the whole verdict as an HTML page.

        Args:
            back: the address of the page that links to it; "" for none.
        """
        lines = {line: failure.message for _, failure in self.failures if (line := failure.line_of(self.file))}
        return page("engine/verdict.html", back, verdict=self, source=self.source.splitlines(), failing=lines)


def kind_of(outcomes: Collection[Outcome], passed: bool, left_out: int = 0) -> Kind:
    """Return the verdict in a word: see `Verdict.kind`.

    Args:
        outcomes: of all checks.
        passed: whether the implementation passed.
        left_out: the number of checks that were not made because time ran out.
    """
    if passed:
        return Kind.RIGHT
    kinds = {o.failure.kind for o in outcomes if o.failure is not None}
    gravest = next((kind for kind in reversed(Kind) if kind in kinds), None)
    if gravest or left_out:
        return gravest or Kind.TIMED_OUT
    return Kind.UNDECIDED if any(o.outcome == Status.UNREACHED for o in outcomes) else Kind.REFUSED


def heading(outcomes: Collection[Outcome], passed: bool, left_out: int = 0) -> dict[str, Any]:
    """Return the first properties of a verdict's JSON; the arguments are those of `kind_of`."""
    counts = Counter(o.outcome for o in outcomes)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind_of(outcomes, passed, left_out),
        "passed": passed,
        "counts": {status: counts[status] for status in Status if counts[status] or status in COUNTED},
    }


def suggestion(outcomes: Iterable[Outcome], boundary: Boundary, passed: bool) -> str:
    """Return `Verdict.suggested_claim` from the outcomes, and the boundary of the refused cases."""
    if passed:
        return boundary.claim()
    outcomes = list(outcomes)
    claims = [o.holds for o in outcomes if o.holds] or [boundary.claim()]
    union = functools.reduce(Claims.join, map(Claims.parse, claims))
    if union.dtypes:  # of the dtypes that were checked
        union = replace(union, dtypes=tuple(dict.fromkeys(o.dtype for o in outcomes if o.dtype in union.dtypes)))
        if not union.dtypes:
            return ""
    failed = [o for o in outcomes if o.outcome is Status.FAILED and o.dtype in (union.dtypes or DTYPES)]
    return str(union) if all(o.holds for o in failed) else ""


def holding_lines(claim: str, accept: str = "") -> Iterator[str]:
    """Yield a line with the claims within which a failed implementation is right, if there are any.

    Args:
        claim: see `Verdict.suggested_claim`.
        accept: the option that accepts it, if there is one.
    """
    if claim:
        accepting = f"; {accept} accepts it" if accept else ""
        yield f"right for {Claims.parse(claim).describe()}: claim `{claim}`{accepting}"


def refusal_lines(refusals: Counter[str], examples: int, claim: str) -> Iterator[str]:
    """Yield the share of refused cases with the claim that excludes them, and then each reason.

    Args:
        refusals: the number of refused cases, by reason.
        examples: the number of cases that ran.
        claim: a claim that excludes every refused case; "" without one.
    """
    if not refusals:
        return
    total = examples + refusals.total()
    claimed = f": the claim `{claim}` leaves out all of them" if claim else ""
    yield f"refused {refusals.total() / total:.0%} of the cases{claimed}"
    for reason, count in refusals.most_common(SHOWN):
        yield f"refused {count} of {total} cases: {reason}"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.failure is not None and outcome.failure.kind not in (Kind.WRONG, Kind.IMPRECISE, Kind.INVALID):
        return outcome.failure.kind.upper()
    if outcome.outcome is Status.FAILED:
        return "FAILED" if outcome.grade == WRONG else "STORAGE"
    if outcome.outcome is not Status.PASSED:
        return IN_TABLES.get(outcome.reason or "", outcome.outcome)
    storage = " storage" if outcome.grade == STORAGE else ""
    return f"{outcome.worst:.2f} {outcome.examples:>4}{storage}"


def _fields(kind: type, entries: Mapping[str, Any], **makers: Any) -> dict[str, Any]:
    """Return a dataclass's arguments from JSON: lists become tuples, and `makers` convert their entries."""
    arguments = {field.name: entries[field.name] for field in fields(kind) if field.name in entries}
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = tuple(makers[name](item) for item in value) if name in makers else tuple(value)
    return arguments


def _to_unexecuted(entry: Mapping[str, Any]) -> Unexecuted:
    return Unexecuted(**_fields(Unexecuted, entry))


def _speed(entry: Mapping[str, Any]) -> Speed:
    return Speed(**_fields(Speed, entry))
