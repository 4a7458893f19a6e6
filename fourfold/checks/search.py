"""The arguments of a check: a subject, and a search for cases on which the subject is wrong."""

import contextlib
import itertools
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from fourfold.candidates.integrity.escapes import held
from fourfold.checks.database import Filed
from fourfold.checks.threshold_cases import cases_past_comparisons
from fourfold.inputs.combinations import combined
from fourfold.inputs.large_cases import LargeCases
from fourfold.inputs.special_values import cases_with_special_values
from fourfold.instruments.evaluation import by_the_implementation, evaluate_tensors
from fourfold.instruments.gpu_memory_lock import wait_for_others
from fourfold.instruments.sparse_memory import others_hold_the_memory
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DType
from fourfold.operations.blame import Blame, marked
from fourfold.operations.boundary import LAYOUTS, Boundary, traits_of
from fourfold.operations.case import Case, RecentCases
from fourfold.operations.claims import EXACT, NO_CLAIMS, Claims
from fourfold.operations.not_reached import NotReached, Unreached
from fourfold.operations.outcomes import (
    FORWARD_ONLY,
    NO_GRADIENTS,
    UNCLAIMED,
    Failure,
    Refused,
    Unsuitable,
    Unsupported,
    Vacuous,
)
from fourfold.operations.record import Operation
from fourfold.operations.refusals import Refusals, chain, is_refusal, reason

# Limits of a brief search: named examples (the smallest ones) and their elements, generated cases and their elements.
BRIEF_NAMED, BRIEF_NAMED_ELEMENTS, BRIEF_GENERATED, BRIEF_ELEMENTS = 3, 1024, 3, 64
# Named examples of a kind, where a few are enough.
FEW_NAMED = 6
# Generated cases that are to be found for an implementation that has refused every named example.
AFTER_REFUSALS = 5
# Generated cases that it may refuse for each of them before it is asked no more. Hypothesis would try hundreds.
REFUSED_TRIES = 10
# How often a case is run again, after others have left it some of a GPU's memory.
AGAIN = 3
# A search of which no case could have failed draws more, up to this many times the cases that were wanted. Of few cases
# all may be empty by chance, and hardly of many.
MORE_CASES = 8
# After a failure, search again with at most this many elements. Hypothesis draws them one by one, so they shrink
# quickly to small whole numbers.
FEW_ELEMENTS = 8
SEED = secrets.randbits(32)  # one for this process
# Cases of this library's own implementations, which other checks and backends use again: the oracle is asked once.
shared = RecentCases(2_000_000)
# What the output is called among the results of a call.
OUTPUT = "output"


def need(condition: Any) -> None:
    """Leave a case out that a check has no use for.

    Raises:
        Unsuitable: the condition does not hold.
    """
    if not condition:
        raise Unsuitable


class _PassedOverEnough(BaseException):
    """Ends a search that can use no case. Hypothesis would go on to draw cases, ten for each that it wants."""


def _run_with_room(body: Callable[[Case], None], case: Case) -> None:
    """Run `body` on a case; run it again where other processes held a GPU's memory, and have released some.

    Raises:
        NotReached: they have not, or the case could not be run for another reason.
    """
    for attempts_left in reversed(range(1 + AGAIN)):
        try:
            with held():
                body(case)
            return
        except Exception as error:
            for cause in chain(error):
                if isinstance(cause, NotReached) and cause.is_of_this_package:
                    raise cause from None
            lacking = others_hold_the_memory(error)
            if lacking is None:
                raise
            if not attempts_left:
                raise lacking from error
        wait_for_others()  # here, where no frame of the error holds memory any more


class Unreachable(Unsupported):
    """No case of a check that could have failed was reached."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is being verified: one implementation of one operation, for one dtype on one device."""

    operation: Operation
    backend: str
    dtype: DType
    device: str
    implementation: Callable[..., torch.Tensor]
    # The same backend's implementation of another operation, for laws that relate two.
    sibling: Callable[[str], tuple[Operation, Callable[..., torch.Tensor]]]
    differentiable: bool = True  # whether the implementation claims to have gradients
    # What it claims beyond that; the operation's cases lie within.
    claims: Claims = NO_CLAIMS
    # Whether it is somebody else's: it may then have storage accuracy, and any gradient where an input is NaN.
    foreign: bool = False
    elsewhere: bool = False  # whether it runs in a process of its own
    # Whether bad input must raise the operation's declared errors; else what gives a result is a warning.
    strict_errors: bool = True
    # Why the bits of a sample's result may depend on the batch around it; None if it claims that they do not.
    depends_on_batch: str | None = "nothing is claimed of it"
    large: LargeCases | None = None  # what forward and backward are checked on besides the named examples
    offsets_in_32_bits: str | None = None  # why it does not support offsets of 2^31 and more

    def __str__(self) -> str:
        return f"{self.operation.name} · {self.backend} · {self.dtype} · {self.device}"

    def dtype_of(self, result: str) -> DType:
        """The dtype that a result must have: the output's may be declared, gradients have that of their inputs."""
        return self.operation.result_dtype(self.dtype) if result == OUTPUT else self.dtype

    def call(self, **arguments: Any) -> torch.Tensor:
        """Call the implementation, whose exceptions are marked as its own."""
        with by_the_implementation():
            return self.implementation(**arguments)

    def evaluate(
        self,
        case: Case,
        gradients: bool = True,
        place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
        watch: AbstractContextManager | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Call the implementation; return its output, its gradients if it has any, and the tensors of the call."""
        wanted = gradients and self.differentiable
        return evaluate_tensors(
            self.implementation, self.operation, case, self.dtype, self.device, wanted, place, watch
        )

    def filled_examples(self) -> dict[str, Case]:
        """The named examples whose result has any number: small ones first, those with several before the others."""
        made = ((name, make(self.dtype)) for name, make in self.operation.examples.items())
        filled = [(name, case) for name, case in made if case.grad_output.size]
        return dict(sorted(filled, key=lambda pair: (pair[1].grad_output.size == 1, pair[1].elements)))

    def small_example(self) -> dict[str, Case]:
        """The first of `filled_examples`; none without any."""
        return dict(itertools.islice(self.filled_examples().items(), 1))

    def examples_of_integers(self) -> dict[str, Case]:
        """A few small named examples beside whose integers the record knows of others; none if it knows of none."""

        def has_others(case: Case) -> bool:
            others = self.operation.other_integers(case)
            return any(not np.array_equal(array, case[name]) for name, array in others.items())

        made = ((name, make(self.dtype)) for name, make in self.operation.examples.items())
        found = [(name, case) for name, case in made if case.grad_output.size and has_others(case)]
        return dict(sorted(found, key=lambda pair: pair[1].elements)[:FEW_NAMED])

    def needs_gradients(self) -> None:
        """Require that the implementation has gradients.

        Raises:
            Unsupported: it has none, or claims none, or the operation has none.
        """
        if not self.claims.gradients:
            raise Unsupported(f"{UNCLAIMED} gradients")
        if not self.differentiable:
            raise Unsupported(FORWARD_ONLY)
        if not self.operation.differentiable:
            raise Unsupported(f"{self.operation.name} {NO_GRADIENTS}")


@dataclass(kw_only=True)
class Search:
    """The limits of a search for failing cases, and a record of what it has seen."""

    examples: int
    elements: int = 2048
    blob: str | None = None  # Hypothesis's blob of the one generated case to repeat
    # Whether the implementation is known to be wrong. A few small cases then show what else is, without shrinking.
    brief: bool = False
    # Whether a check may reuse the results that the subject gave for an equal case before.
    keeps: bool = True
    # Without a seed cases are random, and a failure is tried first by the next run.
    seed: int | None = field(default_factory=lambda: 0 if hypothesis.settings().derandomize else None)
    # Whether equal cases are `shared`: a kernel that changes what it is given must not reach others.
    shares: bool = False
    note: Callable[[Case], None] = lambda case: None  # called with each case before it runs
    worst: float = 0.0
    ran: int = 0
    substantial: int = 0  # examples in which at least one element was held to a finite bound
    largest: int = 0  # elements of the largest result
    started: float = field(default_factory=time.perf_counter)
    # The cases that the implementation refused, where it may.
    refusals: Refusals | None = None
    # What tells the refused cases from those that the implementation takes.
    boundary: Boundary = field(default_factory=Boundary)
    # The cases that could not be run here.
    unreached: Unreached = field(default_factory=Unreached)
    # What is wrong, and no failure: a bad input that gives a result, say.
    warnings: list[str] = field(default_factory=list)
    # What a check has found out beside its claim: which rate of wrong calls is excluded, say.
    remarks: list[str] = field(default_factory=list)
    grade: str = EXACT
    constants: str = ""  # those of the source that large cases come from, in a line
    subject: Subject | None = None  # whose cases are run
    lays_out: bool = False  # whether the check lays tensors out in another way than their cases say

    def saw(self, *agreements: Agreement) -> None:
        """Count an example, and record the errors and sizes of its comparisons."""
        self.ran += 1
        self.substantial += any(a.elements > a.unspecified for a in agreements)
        self.largest = max([self.largest, *(a.elements for a in agreements)])
        self.worst = max([self.worst, *(a.worst for a in agreements)])

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.started

    def for_all(
        self,
        name: str,
        strategy: st.SearchStrategy[Case],
        body: Callable[[Case], None],
        shrink: bool = True,
        examples: int | None = None,
        seed: str | None = None,
    ) -> None:
        """Run `body` on generated cases. On failure Hypothesis shrinks the case, if `shrink` is set, and shows it.

        Searches with the same seed and strategy draw the same cases.
        """

        before, limit = self._passed_over(), REFUSED_TRIES * (examples or self.examples)

        def holds(case: Case) -> None:
            if not self.ran and self._passed_over() - before >= limit:
                raise _PassedOverEnough
            self.note(case)
            if not self._ran(body, case):
                hypothesis.reject()

        # Hypothesis shows the name of the function where it tells of a failure.
        holds.__name__ = holds.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        database = hypothesis.settings().database
        # The explain phase tells which arguments matter, and there is only one.
        without = {hypothesis.Phase.explain} if shrink else {hypothesis.Phase.explain, hypothesis.Phase.shrink}
        settings = hypothesis.settings(
            max_examples=examples or self.examples,
            phases=tuple(phase for phase in hypothesis.settings().phases if phase not in without),
            deadline=None,
            database=None if database is None else Filed(database, name),
            print_blob=True,
            report_multiple_bugs=False,
            # A check rejects cases that it cannot use, which is cheap compared with a call.
            suppress_health_check=[
                hypothesis.HealthCheck.too_slow,
                hypothesis.HealthCheck.data_too_large,
                hypothesis.HealthCheck.filter_too_much,
            ],
        )
        test = settings(hypothesis.given(strategy)(holds))
        if seed is None and self.seed is not None:
            seed = f"{self.seed} {name}"
        if seed is not None:
            test = hypothesis.seed(seed)(test)
        if self.blob:
            test = hypothesis.reproduce_failure(hypothesis.__version__, self.blob.encode())(test)
        try:
            test()
        except _PassedOverEnough:
            return
        except hypothesis.errors.Unsatisfiable:
            if not self._passed_over():
                raise

    def _passed_over(self) -> int:
        """How many cases were refused or not reached so far."""
        return self.unreached.total + (self.refusals.total if self.refusals is not None else 0)

    def _ran(self, body: Callable[[Case], None], case: Case) -> bool:
        """Run `body` on a case; gives whether it was of use: suitable, reached, and not refused.

        Raises:
            NotReached: no other case would be reached either.
        """
        try:
            _run_with_room(body, shared.same(case) if self.shares else case)
        except Unsuitable:
            return False
        except NotReached as error:
            self.unreached.add(str(error), case)
            if error.lasts:
                raise
            return False
        except Exception as error:
            if isinstance(error, Failure):
                self.worst = max(self.worst, min(error.worst, sys.float_info.max))  # JSON has no infinity
            if marked(error) is Blame.LACK:
                self.unreached.add(f"not seen, as it is interpreted or emulated here: {reason(error)}", case)
            elif self.refusals is not None and is_refusal(error):
                self.refusals.add(error)
                self._note_boundary(case, refused=True)
            else:
                raise
            return False
        self._note_boundary(case, refused=False)
        return True

    def _note_boundary(self, case: Case, refused: bool) -> None:
        if self.refusals is not None:
            operation, dtype = (None, None) if self.subject is None else (self.subject.operation, self.subject.dtype)
            traits = traits_of(operation, case, dtype)
            self.boundary.add(
                {name: of for name, of in traits.items() if not (self.lays_out and name in LAYOUTS)}, refused
            )

    def one(self, name: str, case: Case, body: Callable[[Case], None]) -> bool:
        """Run `body` on a named case; gives whether it was of use: suitable, reached, and not refused."""
        self.note(case)
        try:
            return self._ran(body, case)
        except Exception as error:
            error.add_note(f"Named example {name}: {case!r}")
            raise

    def cases(
        self,
        subject: Subject,
        check: str,
        body: Callable[[Case], None],
        *,
        few: bool = False,
        special: bool = True,
        named: bool = True,
        also: Mapping[str, Case] = MappingProxyType({}),
        alike: str | None = None,
        large: bool = False,
        dear: bool = False,
        most_named: float = math.inf,
    ) -> None:
        """Run `body` on the operation's named examples, then on generated cases, some of them with special values.

        With `few` there are an eighth as many cases, none of them large, and no named ones but those of `also`. This is
        for checks that call often, and for behaviour that depends little on the case. With a seed all backends get the
        same cases, so that the oracle is asked once; checks with the same `alike` always do. With `large` the large
        cases follow the named ones, and with `dear` one of them may take seconds. Named examples of more elements than
        `most_named` are left out.
        """
        self.subject = subject
        examples = min(self.examples, max(3, self.examples // 8)) if few else self.examples
        if self.brief:
            examples = min(examples, BRIEF_GENERATED)

        def first() -> None:
            named_cases = self._named(subject, named and not few, also, most_named)
            for name, case in itertools.chain(named_cases, self._large(subject, dear) if large else ()):
                self.one(name, case, body)

        def among(elements: int, shrink: bool = True) -> None:
            name = f"{check} {subject} {elements}"
            strategy = subject.operation.cases(subject.dtype, elements)
            if special and not subject.claims.finite:
                strategy = cases_with_special_values(subject.dtype, strategy, subject.operation.ordinary)
            drawn, seed = f"{alike or check} {subject.operation.name} {subject.dtype} {elements}", self.seed
            if alike and seed is None:
                seed = SEED
            wanted = min(examples, AFTER_REFUSALS) if self._passed_over() and not self.ran else examples
            self.for_all(name, strategy, body, shrink, wanted, None if seed is None else f"{seed} {drawn}")

        most = self.elements // 4 if few else self.elements
        if self.brief:
            most = min(most, BRIEF_ELEMENTS)
        if self.blob:
            # The blob does not tell which of the two numbers of elements it was made for.
            try:
                among(FEW_ELEMENTS)
            except hypothesis.errors.DidNotReproduce:
                among(most)
            return
        with contextlib.suppress(NotReached):  # which is counted, and lasts
            first()
            self._shrunk(among, most)
            limit = MORE_CASES * examples
            while not self.brief and examples < limit and not self._passed_over() and self._unseen(subject):
                examples *= 2
                self._shrunk(among, most)
        if not self.brief:
            self.must_have_seen_something(subject, check)

    def _shrunk(self, among: Callable[..., None], most: int) -> None:
        """Search `among` cases of at most so many elements. After a failure search again, for a case that is small."""
        try:
            among(most, shrink=False)
        except hypothesis.errors.Unsatisfiable:
            raise  # no case was of use, and there is nothing to shrink
        except Exception:
            if hypothesis.Phase.shrink in hypothesis.settings().phases and not self.brief:
                for elements in (FEW_ELEMENTS, most):
                    try:
                        among(elements)
                    except (hypothesis.errors.Unsatisfiable, NotReached):
                        continue  # the check can use no case of so few elements
                    except Exception as smaller:
                        raise smaller from None
            raise

    def _named(
        self, subject: Subject, named: bool, also: Mapping[str, Case], most: float
    ) -> Iterable[tuple[str, Case]]:
        """The operation's examples, if `named`, and those of `also`. A brief search gets only small ones of them.

        On a GPU they come in the order of their sizes: what is too large for the compiler is then known before more of
        that size is compiled.
        """
        makers = subject.operation.examples if named else {}
        made = ((name, make(subject.dtype)) for name, make in makers.items())
        cases = itertools.chain((pair for pair in made if pair[1].elements <= most), also.items())
        if not self.brief:
            return cases if subject.device == "cpu" else sorted(cases, key=lambda pair: pair[1].elements)

        small = (pair for pair in cases if pair[1].grad_output.size and pair[1].elements <= BRIEF_NAMED_ELEMENTS)
        return sorted(small, key=lambda pair: pair[1].elements)[:BRIEF_NAMED]

    def _large(self, subject: Subject, dear: bool) -> Iterator[tuple[str, Case]]:
        """Large cases, of sizes that the implementation's source asks for; none if brief, or all else was refused."""
        if subject.large is None or self.brief or (self._passed_over() and not self.ran):
            return
        self.constants = subject.large.told(self.examples)
        yield from subject.large.cases(self.examples, dear)
        yield from cases_past_comparisons(subject.large, subject.implementation, subject.device)
        for combination in combined(subject.large):
            yield combination.name, combination.case

    def must_have_seen_something(self, subject: Subject, check: str) -> None:
        """Fail a search that verifies nothing because it saw nothing, or only single numbers.

        Raises:
            Refused: the implementation refused every case, or every one that could have failed.
            Unreachable: no case that could have failed was reached.
            Vacuous: no example could have failed.
            Failure: no result had more than one element although the output of a named example has.
        """
        if self.refusals is not None and self.refusals.total and not self.substantial:
            raise Refused(self.refusals)
        if self.unreached.total and not self.substantial:
            raise Unreachable("; ".join(self.unreached.lines()))
        if unseen := self._unseen(subject):
            kind = Failure if self.substantial else Vacuous
            raise kind(f"{subject}: {check} ran {self.ran} examples, and {unseen}")

    def _unseen(self, subject: Subject) -> str:
        """What a search must have seen to verify anything and has not, in words; empty if there is nothing."""
        if not self.substantial:
            return "none of them could have failed: no bound says anything"
        examples = subject.operation.examples.values()
        if self.largest <= 1 and any(make(subject.dtype).grad_output.size > 1 for make in examples):
            return f"no result had more than one element, as those of {subject.operation.name} may"
        return ""
