"""The arguments of a check: a subject, and a search for cases that it gets wrong."""

import contextlib
import functools
import inspect
import itertools
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.candidates.process.client import UntrustedFunction
from fourfold.checks.database import Filed
from fourfold.checks.given_case import smaller_cases, with_cotangent
from fourfold.checks.threshold_cases import cases_past_comparisons
from fourfold.compat.hypothesis_internals import shrinking_at_most
from fourfold.inputs.combinations import combined_cases
from fourfold.inputs.large_cases import LargeCases
from fourfold.inputs.special_values import cases_with_special_values
from fourfold.instruments.evaluation import blame_implementation, evaluate_tensors
from fourfold.instruments.gpu_locks import wait_for_others
from fourfold.instruments.sparse_memory import others_hold_the_memory
from fourfold.instruments.tampering import preserve_random_state
from fourfold.numerics.bounded import HangsOnRounding
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DType
from fourfold.operations.blame import Blame, recorded_blame
from fourfold.operations.boundary import LAYOUTS, Boundary, traits_of
from fourfold.operations.case import Case, RecentCases
from fourfold.operations.claims import EXACT, NO_CLAIMS, Claims
from fourfold.operations.not_reached import NotReached, Unreached
from fourfold.operations.outcomes import (
    Exclusion,
    Failure,
    Refused,
    Status,
    Unclaimed,
    Unsuitable,
    Unsupported,
    Vacuous,
)
from fourfold.operations.outputs import READS_BACK, pack_lists, read_back
from fourfold.operations.record import Operation
from fourfold.operations.refusals import Refusals, chain, is_refusal, reason

# Limits of a brief search: the number and elements of named examples, and those of generated cases.
BRIEF_NAMED, BRIEF_NAMED_ELEMENTS, BRIEF_GENERATED, BRIEF_ELEMENTS = 3, 1024, 3, 64
# The number of named examples of a kind, if a few are enough.
FEW_NAMED = 6
# The most elements of a named example of a foreign implementation, for each dtype but the first. Sizes hardly depend on
# the dtype, and Triton's compiler takes seconds for a longer row in one block.
LONG = 16_384
# The number of generated cases for an implementation that refused every named example.
AFTER_REFUSALS = 5
# While no result could have failed, the search stops after this many refusals per wanted case. Hypothesis would try
# hundreds.
REFUSED_TRIES = 10
# The large cases that are tried of an implementation that has refused every other one with elements.
REFUSED_LARGE = 50
# Retries of a case after other processes released GPU memory.
AGAIN = 3
# A search without a case that could have failed draws more cases, up to this many times the wanted number. A few cases
# may all be empty by chance; many hardly ever are.
MORE_CASES = 8
# After a failure, search again with at most this many elements. Hypothesis draws them one by one, so that they
# shrink quickly to small whole numbers.
FEW_ELEMENTS = 8
# A failing case is made smaller at most this many times. Drawing a case takes longer than a call, and most of the 500
# times that Hypothesis allows make numbers rounder.
SHRINKS = 20
# The same for a given case, which costs nothing to draw.
SHRINKS_OF_GIVEN = 200
Example = TypeVar("Example")
SEED = secrets.randbits(32)  # one for this process
# Cases of this library's own implementations. Checks and backends share them, so that the oracle computes each once.
shared = RecentCases(500_000)
# Named examples, which many checks take. The oracle's results for longer ones take too much memory.
kept_examples = RecentCases(4_000_000, limit=1 << 15)
# The output's name among the results of a call.
OUTPUT = "output"
# The beginning of the note of an exception for a named example.
NAMED = "Named example"
# The beginning of a gradient's name, before that of its input.
GRADIENT_OF = "gradient of "


def need(condition: Any) -> None:
    """Skip a case that a check cannot use.

    Raises:
        Unsuitable: the condition does not hold.
    """
    if not condition:
        raise Unsuitable


def draws(strategy: st.SearchStrategy[Example], count: int, seed: int) -> list[Example]:
    """Return about `count` draws of one search: the same for a seed and a version of Hypothesis."""
    examples: list[Example] = []

    # Use only the generate phase: the first draws of a search must be as varied as its later ones.
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def keep(example: Example) -> None:
        examples.append(example)

    if count:
        with preserve_random_state():
            keep()
    return examples


def generated_cases(strategy: st.SearchStrategy[Case], count: int, seed: int) -> dict[str, Case]:
    """Return the draws of a search by name."""
    return {f"generated {number}": case for number, case in enumerate(draws(strategy, count, seed))}


class _SkippedEnough(BaseException):
    """Signal to end a search that finds no usable case. Hypothesis would draw ten cases for each wanted one."""


def _run_with_room(body: Callable[[Case], None], case: Case) -> None:
    """Run `body` on a case, and retry while other processes hold the GPU's memory.

    Raises:
        NotReached: the memory is still lacking after the last retry, or the case cannot run for another reason.
    """
    for attempts_left in reversed(range(1 + AGAIN)):
        try:
            with convert_escapes():
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
        wait_for_others()  # outside of the handler, so that no frame of the error holds memory


class Unreachable(Unsupported):
    """The search reached no case that could have failed."""

    status = Status.UNREACHED


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The implementation to verify: one implementation of one operation, for one dtype on one device."""

    operation: Operation
    backend: str
    dtype: DType
    device: str
    implementation: Callable[..., torch.Tensor]
    # Returns the same backend's implementation of another operation, for laws that relate two operations.
    sibling: Callable[[str], tuple[Operation, Callable[..., torch.Tensor]]]
    differentiable: bool = True  # whether the implementation claims to have gradients
    # Its other claims; the operation's cases lie within them.
    claims: Claims = NO_CLAIMS
    # Whether it is somebody else's. It may then have storage accuracy, and any gradient where an input is NaN.
    foreign: bool = False
    elsewhere: bool = False  # whether it runs in a process of its own
    # Whether bad input must raise the operation's declared errors. Otherwise a result for bad input is a warning.
    strict_errors: bool = True
    # Why the bits of a sample's result may depend on the rest of the batch; None if it claims that they do not.
    depends_on_batch: str | None = "nothing is claimed of it"
    large: LargeCases | None = None  # further cases for the checks of forward and backward
    offsets_in_32_bits: str | None = None  # why it does not support offsets of 2^31 and more

    def __post_init__(self) -> None:
        # The instance is frozen, so plain assignment fails.
        mutates, lists = self.operation.mutates, self.operation.lists
        if lists:
            object.__setattr__(self, "implementation", _pack_once(self.implementation, lists))
        if mutates and not getattr(self.implementation, READS_BACK, False):
            outputs = tuple(name for name in self.operation.outputs if name not in mutates)
            results = {name: self.operation.outputs.get(name, self.operation) for name in mutates if name in lists}
            dtypes = tuple((name, output.result_dtype(self.dtype).torch) for name, output in results.items())
            arguments = self.implementation, mutates, outputs, dtypes, self.device
            object.__setattr__(self, "implementation", _read_back(*arguments))

    def __str__(self) -> str:
        return f"{self.operation.name} · {self.backend} · {self.dtype} · {self.device}"

    def dtype_of(self, result: str) -> DType:
        """Return the required dtype of a result. The record may declare the output's; gradients have their input's."""
        if result == OUTPUT:
            return self.operation.result_dtype(self.dtype)
        return self.operation.input_dtype(result.removeprefix(GRADIENT_OF), self.dtype)

    def within(self, claims: Claims) -> "Subject":
        """Return the subject with further claims, and with the cases that lie within them."""
        operation, claims = claims.restrict(self.operation), self.claims.join(claims)
        large = self.large and replace(self.large, operation=claims.restrict(self.large.operation), claims=claims)
        differentiable = self.differentiable and claims.gradients
        return replace(self, operation=operation, claims=claims, large=large, differentiable=differentiable)

    def call(self, **arguments: Any) -> torch.Tensor:
        """Call the implementation, and mark its exceptions as its own."""
        with blame_implementation():
            return self.implementation(**arguments)

    def evaluate(
        self,
        case: Case,
        gradients: bool = True,
        place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
        watch: AbstractContextManager | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Call the implementation; return its output, its gradients if it has any, and the tensors of the call."""
        with_gradients = gradients and self.differentiable
        return evaluate_tensors(
            self.implementation, self.operation, case, self.dtype, self.device, with_gradients, place, watch
        )

    @property
    def process(self) -> UntrustedFunction | None:
        """Return the implementation that runs in a process of its own, or None if it runs in this one."""
        function = inspect.unwrap(self.implementation)
        return function if isinstance(function, UntrustedFunction) else None

    @property
    def most_named(self) -> float:
        """Return the most elements of a named example: limited for the later dtypes of a foreign implementation."""
        return LONG if self.foreign and self.large is not None and not self.large.is_first else math.inf

    def named_examples(self) -> Iterator[tuple[str, Case]]:
        """Yield the named examples. Each check takes the same ones, unless the implementation could change them."""
        is_shared = not self.foreign or self.elsewhere
        for name, make in self.operation.examples.items():
            yield name, kept_examples.get_or_make(make, self.dtype) if is_shared else make(self.dtype)

    def filled_examples(self) -> dict[str, Case]:
        """Return the named examples with nonempty results: small ones before large, degenerate ones last."""
        filled = [(name, case) for name, case in self.named_examples() if case.grad_output.size]
        return dict(sorted(filled, key=lambda pair: _order(pair[1])))

    def small_example(self) -> dict[str, Case]:
        """Return the first of `filled_examples`, by name, or an empty dictionary."""
        return dict(itertools.islice(self.filled_examples().items(), 1))

    def examples_of_integers(self) -> dict[str, Case]:
        """Return a few small named examples for whose integers the record has alternatives; empty if it has none."""

        def has_others(case: Case) -> bool:
            others = self.operation.other_integers(case)
            return any(not np.array_equal(array, case[name]) for name, array in others.items())

        pairs = [(name, case) for name, case in self.named_examples() if case.grad_output.size and has_others(case)]
        return dict(sorted(pairs, key=lambda pair: pair[1].elements)[:FEW_NAMED])

    def needs_gradients(self) -> None:
        """Require that the implementation has gradients.

        Raises:
            Unsupported: it has none, or claims none, or the operation has none.
        """
        if not self.claims.gradients:
            raise Unclaimed("gradients")
        if not self.differentiable:
            raise Unsupported("forward only: its output has no gradient where its inputs do", Exclusion.FORWARD_ONLY)
        if not self.operation.differentiable:
            raise Unsupported(f"{self.operation.name} has no gradients", Exclusion.NO_GRADIENTS)


def _order(case: Case) -> tuple[bool, bool, int]:
    """Return the key that sorts cases by their elements, but those last in which many a mistake changes nothing.

    Softmax, for example, is 1 along an axis of 1, and its gradient 0.
    """
    arrays = (case.grad_output, *case.inputs.values())
    degenerate = any(1 in array.shape for array in arrays[:2]) or not all(array.size for array in arrays)
    degenerate = degenerate or not all(np.isfinite(array).all() for array in arrays)
    return case.grad_output.size == 1, degenerate, case.elements


@functools.lru_cache(maxsize=16)
def _read_back(
    implementation: Callable,
    mutates: tuple[str, ...],
    outputs: tuple[str, ...],
    lists: tuple[tuple[str, torch.dtype], ...],
    device: str,
) -> Callable:
    """Return the same function for the same one that works in place, so that caches keyed by it find its results."""
    empty = {name: torch.empty(0, dtype=dtype, device=device) for name, dtype in lists}
    return read_back(implementation, mutates, outputs, empty)


@functools.lru_cache(maxsize=16)
def _pack_once(implementation: Callable, lists: tuple[str, ...]) -> Callable:
    """Return the same function for the same one that takes lists."""
    return pack_lists(implementation, lists)


@dataclass(kw_only=True)
class Search:
    """The limits and the findings of a search for failing cases."""

    examples: int
    elements: int = 2048
    # Hypothesis's blob of the one generated case to repeat, after its limit of elements and a hyphen: "8-AXic...".
    blob: str | None = None
    case: Case | None = None  # the only case to run, which is made smaller if it fails
    limit: int = 0  # the limit of elements of the last generated cases
    # Whether the implementation is known to be wrong. A few small cases then show further failures, without shrinking.
    brief: bool = False
    # Whether to look for a small case after a failure, and to keep the case for the next run.
    shrinks: bool = True
    # Whether an implementation that claims finite numbers gets the special values that are finite.
    finite_specials: bool = False
    # Whether a check may reuse the subject's earlier results for an equal case.
    keeps: bool = True
    # Without a seed the cases are random, and the next run tries a failure first.
    seed: int | None = field(default_factory=lambda: 0 if hypothesis.settings().derandomize else None)
    # Whether to take equal cases from `shared`. A kernel that changes its inputs must not reach other checks' cases.
    shares: bool = False
    note: Callable[[Case | None], None] = lambda case: None  # called with each case before it runs, None for no case
    worst: float = 0.0
    ran: int = 0
    substantial: int = 0  # examples with a finite bound for at least one element
    largest: int = 0  # elements of the largest result
    start: float = field(default_factory=time.perf_counter)
    # The cases that the implementation refused; None if it may refuse none.
    refusals: Refusals | None = None
    # The traits that separate the refused cases from the accepted ones.
    boundary: Boundary = field(default_factory=Boundary)
    # The cases that could not be run here.
    unreached: Unreached = field(default_factory=Unreached)
    # Defects that are no failures: a bad input that gives a result, say.
    warnings: list[str] = field(default_factory=list)
    # Findings of a check besides its claim: the excluded rate of wrong calls, say.
    remarks: list[str] = field(default_factory=list)
    grade: str = EXACT
    constants: str = ""  # the source's constants that give the large cases their sizes, in a line
    subject: Subject | None = None  # the subject of the current cases
    lays_out: bool = False  # whether the check replaces the layouts of its cases
    takes_cotangent: bool = True  # whether the check computes gradients
    failing: Case | None = None  # the last case that failed
    # Whether to look for claims within which a failed check holds. If one check finds none, others need not look.
    seeks_claims: bool = True
    other_claims: Claims | None = None  # the claims that other checks need, which are tried first
    holds: Claims | None = None  # these claims, if there are any
    # After a failure: the first wrong result of the failing case, and the mistake that explains the results exactly.
    wrong_result: str = ""
    likely_cause: str = ""

    def saw(self, *agreements: Agreement) -> None:
        """Count an example, and record the errors and sizes of its comparisons."""
        self.ran += 1
        self.substantial += any(a.elements > a.unspecified for a in agreements)
        self.largest = max([self.largest, *(a.elements for a in agreements)])
        self.worst = max([self.worst, *(a.worst for a in agreements)])

    @property
    def seconds(self) -> float:
        """Return the seconds since the search began."""
        return time.perf_counter() - self.start

    def for_all(
        self,
        name: str,
        strategy: st.SearchStrategy[Case],
        body: Callable[[Case], None],
        shrink: bool = True,
        examples: int | None = None,
        seed: str | None = None,
    ) -> None:
        """Run `body` on generated cases. On failure Hypothesis shrinks the case, if `shrink` is set, and reports it.

        Searches with the same seed and strategy draw the same cases.
        """

        skipped, limit = self._num_skipped(), REFUSED_TRIES * (examples or self.examples)
        passing: list[Case] = []

        def holds(case: Case) -> None:
            if not self.substantial and self._num_skipped() - skipped >= limit:
                raise _SkippedEnough
            self.note(case)
            if not self._run_case(body, case):
                hypothesis.reject()
            if self.blob:
                passing.append(case)

        # Hypothesis reports a failure under the function's name.
        holds.__name__ = holds.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        database = hypothesis.settings().database if self.shrinks else None
        # The explain phase finds the arguments that matter, and there is only one.
        omitted = {hypothesis.Phase.explain} if shrink else {hypothesis.Phase.explain, hypothesis.Phase.shrink}
        settings = hypothesis.settings(
            max_examples=examples or self.examples,
            phases=tuple(phase for phase in hypothesis.settings().phases if phase not in omitted),
            deadline=None,
            database=None if database is None else Filed(database, name),
            print_blob=True,
            report_multiple_bugs=False,
            # A check rejects the cases that it cannot use. That is cheap compared with a call.
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
            blob = self.blob.rpartition("-")[2].encode()
            test = hypothesis.reproduce_failure(hypothesis.__version__, blob)(test)
        try:
            with shrinking_at_most(SHRINKS if self.case is None else SHRINKS_OF_GIVEN):
                test()
        except _SkippedEnough:
            return
        except hypothesis.errors.DidNotReproduce:
            if not passing:
                raise
            self.remarks.append(f"the case to reproduce passes now: {self.describe(passing[0])}")
        except hypothesis.errors.FlakyFailure as error:
            # A failure that does not come again, or comes otherwise, such as a race between threads, is a failure.
            errors = [e for e in error.exceptions if not isinstance(e, hypothesis.errors.HypothesisException)]
            raise next((e for e in errors if isinstance(e, Failure)), errors[0] if errors else error) from None
        except hypothesis.errors.Unsatisfiable:
            if not self._num_skipped():
                raise

    def _num_skipped(self) -> int:
        """Return the number of cases refused or not reached so far."""
        return self.unreached.total + (self.refusals.total if self.refusals is not None else 0)

    def _run_case(self, body: Callable[[Case], None], case: Case) -> bool:
        """Run `body` on a case; return whether the case was usable: suitable, reached and not refused.

        Raises:
            NotReached: no other case can be reached either.
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
            if recorded_blame(error) is Blame.LACK:
                self.unreached.add(f"not seen, as it is interpreted or emulated here: {reason(error)}", case)
            elif isinstance(error, HangsOnRounding) and recorded_blame(error) is Blame.DEFINITION:
                self.unreached.add(f"not reached: {error}", case)
            elif self.refusals is not None and is_refusal(error):
                self.refusals.add(error)
                self._note_boundary(case, refused=True)
            else:
                self.failing = case
                raise
            return False
        self._note_boundary(case, refused=False)
        return True

    def _note_boundary(self, case: Case, refused: bool) -> None:
        if self.refusals is not None:
            operation, dtype = (None, None) if self.subject is None else (self.subject.operation, self.subject.dtype)
            traits = traits_of(operation, case, dtype)
            self.boundary.add(
                {name: trait for name, trait in traits.items() if not (self.lays_out and name in LAYOUTS)}, refused
            )

    def run_named_case(self, name: str, case: Case, body: Callable[[Case], None]) -> bool:
        """Run `body` on a named case; return whether the case was usable: suitable, reached and not refused."""
        self.note(case)
        try:
            return self._run_case(body, case)
        except Exception as error:
            error.add_note(f"{NAMED} {name}: {self.describe(case)}")
            raise

    def describe(self, case: Case) -> str:
        """Return a case as text, without a cotangent that the check does not use."""
        return case.describe(cotangent=self.takes_cotangent)

    def cases(
        self,
        subject: Subject,
        check: str,
        body: Callable[[Case], None],
        *,
        sparse: bool = False,
        special: bool = True,
        named: bool = True,
        extra: Mapping[str, Case] = MappingProxyType({}),
        stream: str | None = None,
        large: bool = False,
        dear: bool = False,
        most_named: float = math.inf,
        laid_out: bool = True,
    ) -> None:
        """Run `body` on the operation's named examples, then on generated cases, some of them with special values.

        With a seed all backends get the same cases, so that the oracle computes each once.

        Args:
            subject: the implementation to verify.
            check: the check's name.
            body: the check of one case.
            sparse: run an eighth of the generated cases, none of them large, and only the named cases in `extra`. This
                is for checks that call often, and for behaviour that depends little on the case.
            special: put special values into some generated cases.
            named: run the operation's named examples.
            extra: further named cases.
            stream: checks with the same `stream` draw the same cases, with or without a seed.
            large: run the large cases after the named ones.
            dear: let one of the large cases take seconds.
            most_named: the most elements of a named example; larger ones are skipped.
            laid_out: run the named examples with strided or misaligned tensors.
        """
        self.subject = subject
        if self.case is not None:
            self._run_given(subject, check, self.case, body)
            return
        examples = min(self.examples, max(3, self.examples // 8)) if sparse else self.examples
        if self.brief:
            examples = min(examples, BRIEF_GENERATED)

        def first() -> None:
            named_cases = self._named_cases(subject, named and not sparse, extra, most_named, laid_out)
            for name, case in named_cases:
                self.run_named_case(name, case, body)
            skipped = self._num_skipped()
            for name, case in self._large(subject, dear) if large else ():
                self.run_named_case(name, case, body)
                if not self.substantial and self._num_skipped() - skipped >= REFUSED_LARGE:
                    break

        def draw(elements: int, shrink: bool = True) -> None:
            self.limit = elements
            name = f"{check} {subject} {elements}"
            strategy = subject.operation.cases(subject.dtype, elements)
            if special and (self.finite_specials or not subject.claims.finite):
                strategy = cases_with_special_values(subject.dtype, strategy, subject.operation.ordinary)
                strategy = subject.claims.filter_cases(strategy, subject.operation, subject.dtype)
            seed_text, seed = f"{stream or check} {subject.operation.name} {subject.dtype} {elements}", self.seed
            if stream and seed is None:
                seed = SEED
            count = min(examples, AFTER_REFUSALS) if self._num_skipped() and not self.substantial else examples
            self.for_all(name, strategy, body, shrink, count, None if seed is None else f"{seed} {seed_text}")

        size = self.elements // 4 if sparse else self.elements
        if self.brief:
            size = min(size, BRIEF_ELEMENTS)
        if self.blob:
            of_blob = self.blob.rpartition("-")[0]
            draw(int(of_blob) if of_blob.isdigit() else size)
            return
        with contextlib.suppress(NotReached):  # already counted, and true of all other cases
            self._run_and_shrink(first, draw, size, FEW_ELEMENTS)
            self._run_and_shrink(functools.partial(draw, size, shrink=False), draw, size, 0)
            limit = MORE_CASES * examples
            while not self.brief and examples < limit and not self._num_skipped() and self._missing_evidence(subject):
                examples *= 2
                self._run_and_shrink(functools.partial(draw, size, shrink=False), draw, size, 0)
        if not self.brief:
            self.require_evidence(subject, check)

    def _run_given(self, subject: Subject, check: str, case: Case, body: Callable[[Case], None]) -> None:
        """Run `body` on the given case; on failure search for a smaller case like it that fails."""
        case = with_cotangent(subject.operation, case, subject.dtype)
        try:
            self.run_named_case("given", case, body)
        except Exception:
            if not (hypothesis.Phase.shrink in hypothesis.settings().phases and self.shrinks and not self.brief):
                raise
            try:
                smaller_ones = smaller_cases(subject.operation, case, subject.dtype)
                self.for_all(f"{check} {subject} given", smaller_ones, body)
            except (hypothesis.errors.Unsatisfiable, NotReached):
                pass
            except Exception as smaller:
                raise smaller from None
            raise
        if not self.substantial and self._num_skipped():
            self.require_evidence(subject, check)

    def _run_and_shrink(self, attempt: Callable[[], None], draw: Callable[..., None], size: int, small: int) -> None:
        """Run `attempt`. If a case of more than `small` elements fails, `draw` a small case that fails."""
        try:
            attempt()
        except hypothesis.errors.Unsatisfiable:
            raise  # no case was usable: there is nothing to shrink
        except Exception:
            shrinks = hypothesis.Phase.shrink in hypothesis.settings().phases and self.shrinks and not self.brief
            if shrinks and self.failing is not None and self.failing.elements > small:
                # Claimed sizes may leave no case of few elements, which takes long to find out.
                has_sizes = self.subject is not None and self.subject.claims.sizes
                for elements in (size,) if has_sizes else (FEW_ELEMENTS, size):
                    try:
                        draw(elements)
                    except (hypothesis.errors.Unsatisfiable, NotReached):
                        continue  # the check cannot use such small cases
                    except Exception as smaller:
                        raise smaller from None
            raise

    def _named_cases(
        self, subject: Subject, named: bool, extra: Mapping[str, Case], limit: float, laid_out: bool
    ) -> Iterable[tuple[str, Case]]:
        """Return the operation's examples, if `named`, and the cases in `extra`; only small ones for a brief search.

        On a GPU they are sorted by size. The search then learns which size is too large for the compiler before it
        compiles more cases of that size.
        """
        limit = min(limit, subject.most_named)
        cases_by_name = subject.named_examples() if named else ()
        fitting = (pair for pair in cases_by_name if pair[1].elements <= limit and (laid_out or not pair[1].layouts))
        cases = itertools.chain(fitting, extra.items())
        if not self.brief:
            return cases if subject.device == "cpu" else sorted(cases, key=lambda pair: pair[1].elements)

        small = (pair for pair in cases if pair[1].grad_output.size and pair[1].elements <= BRIEF_NAMED_ELEMENTS)
        return sorted(small, key=lambda pair: _order(pair[1]))[:BRIEF_NAMED]

    def _large(self, subject: Subject, dear: bool) -> Iterator[tuple[str, Case]]:
        """Yield large cases, whose sizes follow from the source; none if brief, or if all other cases were refused."""
        if subject.large is None or self.brief or (self._num_skipped() and not self.ran):
            return
        self.constants = subject.large.constants_line(self.examples)
        yield from subject.large.cases(self.examples, dear)
        yield from cases_past_comparisons(subject.large, subject.implementation, subject.device)
        for combination in combined_cases(subject.large):
            yield combination.name, combination.case

    def require_evidence(self, subject: Subject, check: str) -> None:
        """Raise an error for a search that verified nothing: it saw no result, or only single numbers.

        Raises:
            Refused: the implementation refused every case, or every case that could have failed.
            Unreachable: no case that could have failed was reached.
            Vacuous: no example could have failed.
            Failure: no result had more than one element, although a named example's output has more.
        """
        if self.refusals is not None and self.refusals.total and not self.substantial:
            raise Refused(self.refusals)
        if self.unreached.total and not self.substantial:
            raise Unreachable("; ".join(self.unreached.lines()))
        if unseen := self._missing_evidence(subject):
            kind = Failure if self.substantial else Vacuous
            raise kind(f"{subject}: {check} ran {self.ran} examples, and {unseen}")

    def _missing_evidence(self, subject: Subject) -> str:
        """Return, in words, what the search lacks to verify anything; an empty string if it lacks nothing."""
        if not self.substantial:
            return "none of them could have failed: no bound says anything"
        if self.largest <= 1 and any(case.grad_output.size > 1 for _, case in subject.named_examples()):
            return f"no result had more than one element, as those of {subject.operation.name} may"
        return ""
