"""Verification of one implementation in this process, behind `verify`, `assert_correct` and pytest's `suite`."""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import math
import secrets
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from fourfold import backends
from fourfold.backends.triton import compilation, takeover
from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.candidates.integrity.watch import PackageWatch
from fourfold.candidates.load.calling import as_operation
from fourfold.candidates.process.client import UntrustedFunction
from fourfold.checks import catalogue
from fourfold.checks.catalogue import BACKWARD, FORWARD, Check
from fourfold.checks.forward import forward_agrees
from fourfold.checks.history import late_inputs_are_waited_for
from fourfold.checks.outputs import requires_gradient, together
from fourfold.checks.records import operation_named, operations, reference_of
from fourfold.checks.search import Search, Subject
from fourfold.declaration import defaults
from fourfold.engine.exact_math import computing_exactly
from fourfold.engine.run import claims_needed, run, seeks_claims
from fourfold.engine.shortcomings import join_names
from fourfold.engine.verdict import MAY_BE_WRONG, Outcome, Verdict, suggestion
from fourfold.inputs.constants import Constants, constants_of, file_constants
from fourfold.inputs.large_cases import LargeCases
from fourfold.instruments.line_coverage import Executed, watch, watch_remote
from fourfold.numerics.bounded import OPEN
from fourfold.numerics.dtypes import DTYPES, Dtypes, select_dtypes
from fourfold.operations.boundary import Boundary
from fourfold.operations.claims import Claims, claims_of
from fourfold.operations.limits import COMPILE_SECONDS, EXAMPLES
from fourfold.operations.not_reached import NotReached, Unreached
from fourfold.operations.outcomes import NOT_MADE, WRONG, Exclusion, Failure, Status
from fourfold.operations.record import Operation
from fourfold.operations.refusals import Refusals
from fourfold.operations.registry import did_you_mean

# The number of cases tried outside of the claims.
OUTSIDE = 12
# The size of a file whose text a verdict holds.
SOURCE_BYTES = 100_000
ACCEPT = "Claims(gradients=False) accepts a forward pass alone"


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """The checks to run on an implementation, and how to run them: see the arguments of `verify`.

    Attributes:
        brief: whether each check takes only a few small cases. A check that then finds nothing counts as unsupported.
        on_check: called with the name and the dtype of each check before it runs.
    """

    dtypes: Dtypes = ()
    only: str | Collection[str] = ()
    examples: int = EXAMPLES
    seed: int | None = None
    reproduce: str | None = None
    first_failure: bool = False
    seconds: float = math.inf
    forbid_fallback: bool = False
    brief: bool = False
    on_check: Callable[[str, str], object] = lambda check, dtype: None

    @property
    def whole(self) -> bool:
        """Return whether the plan leaves out no check, dtype or case."""
        return not (self.dtypes or self.only or self.reproduce or self.examples < EXAMPLES)


def verify_trial(trial: "Trial", plan: CheckPlan) -> Verdict:
    """Return the verdict on an implementation, with the lines that never ran if the plan is whole."""
    if not plan.whole:
        return _run_checks(trial, plan)
    if isinstance(trial.implementation, UntrustedFunction):
        recording = watch_remote(trial.implementation, trial.device)
    else:
        recording = watch(trial.original, trial.device)
    with recording as executed:
        return _add_unexecuted_lines(_run_checks(trial, plan), executed)


def _add_unexecuted_lines(verdict: Verdict, executed: Executed) -> Verdict:
    """Add to a passed verdict the lines that never ran, and warnings about lines that could not be watched."""
    if not verdict.passed:
        return verdict
    executed.gather()
    executed.add(executed.report())
    warnings = (*verdict.warnings, *executed.unseen)
    return replace(verdict, never_executed=tuple(executed.never()), warnings=warnings)


def _run_checks(trial: "Trial", plan: CheckPlan) -> Verdict:
    start, seed = time.perf_counter(), secrets.randbits(32) if plan.seed is None else plan.seed
    search = Search(examples=plan.examples, seed=seed, blob=plan.reproduce)
    constants = ""
    outcomes, warnings, boundary = list[Outcome](), list[str](), Boundary()
    wrong, refused = set[tuple[str, str]](), dict[tuple[str, str], Outcome]()
    pending = trial.plan_checks(plan.dtypes, plan.only, plan.forbid_fallback)
    failed = stopped = False
    with trial.settings():
        while pending and not stopped and time.perf_counter() - start <= plan.seconds:
            check, dtype = pending.pop(0)
            kind, output = catalogue.parts_of(check.name)
            key = dtype, output
            if key in refused:
                outcomes.append(replace(refused[key], check=check.name, refusals={}, seconds=0.0))
                continue
            if key in wrong and trial.device == "cuda":
                outcomes.append(Outcome(check=check.name, dtype=dtype, outcome=Status.UNSUPPORTED, reason=NOT_MADE))
                continue
            plan.on_check(check.name, dtype)
            failures = [o for o in outcomes if o.failure]
            search_of_check = replace(
                search,
                brief=plan.brief or key in wrong,
                shrinks=all(o.check != check.name for o in failures),  # once for all dtypes
                seeks_claims=not plan.first_failure and seeks_claims(failures),
                other_claims=claims_needed(failures),
            )
            outcome = trial.outcome(check, dtype, search_of_check)
            constants = constants or search_of_check.constants
            boundary.update(search_of_check.boundary)
            outcomes.append(outcome)
            failed = failed or outcome.outcome == Status.FAILED
            stopped = plan.first_failure and outcome.failure is not None and outcome.failure.kind not in MAY_BE_WRONG
            warnings += [warning for warning in search_of_check.warnings if warning not in warnings]
            if kind == FORWARD and outcome.outcome == Status.FAILED and outcome.grade == WRONG:
                wrong.add(key)
            if kind == FORWARD and outcome.outcome == Status.REFUSED:
                refused[key] = outcome
        if not failed and not plan.only and not pending:
            warnings += trial.silently_wrong_outside_of_the_claims(seed)
            warnings += trial.silently_wrong_on_another_stream(seed)
    shortcomings = list(_shortcomings(outcomes, trial.claims))
    if not trial.refusals and not shortcomings:
        shortcomings += dict.fromkeys(o.reason or "" for o in outcomes if o.outcome == Status.REFUSED)
    if pending and not failed:
        names = dict.fromkeys(check.name for check, _ in pending)
        shortcomings.insert(0, f"{len(pending)} checks were not made within {plan.seconds:g} s: {join_names(names)}")
    return Verdict(
        implementation=trial.name,
        operation=trial.operation.name,
        device=torch.cuda.get_device_name() if trial.device == "cuda" else "cpu",
        claims=str(trial.claims),
        outcomes=tuple(outcomes),
        shortcomings=tuple(shortcomings),
        warnings=tuple(warnings),
        versions={name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy", "hypothesis")},
        seed=seed,
        seconds=time.perf_counter() - start,
        constants=constants,
        suggested_claim=suggestion(outcomes, boundary, not failed and not shortcomings),
        left_out=0 if failed else len(pending),
        file=str(trial.origin),
        source=source_of(trial.origin),
    )


def source_of(file: Path) -> str:
    """Return the text of a file for the page of a verdict; "" if it cannot be read or is long."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if file.is_file() and file.stat().st_size <= SOURCE_BYTES:
            return file.read_text(encoding="utf-8")
    return ""


class RefusedCases(UserWarning):
    """A kernel of a suite refused cases that its claims do not exclude."""


def _warn_of_refusals(trial: "Trial", message: str) -> None:
    """Issue a warning at the kernel's location, because this module's own warnings are errors in CI."""
    code = getattr(inspect.unwrap(trial.original), "__code__", None) if callable(trial.original) else None
    warnings.warn_explicit(message, RefusedCases, str(trial.origin), getattr(code, "co_firstlineno", 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One implementation as one operation on one device."""

    name: str
    original: Any
    implementation: Callable[..., torch.Tensor]
    operation: Operation
    unrestricted: Operation
    claims: Claims
    device: str
    refusals: bool
    strict_errors: bool
    origin: Path
    constants: Constants
    compile_seconds: float

    @classmethod
    def of(
        cls,
        implementation: Any,
        operation: Operation | str,
        claims: Claims | None,
        device: str,
        refusals: bool,
        strict_errors: bool,
        call_seconds: float | None = None,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> "Trial":
        """Build the trial of an implementation, in its own process if `call_seconds` is given: see `verify`."""
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f'device must be "auto", "cpu" or "cuda", not {device!r}')
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError('device="cuda": torch finds no GPU')
        if device == "auto":
            # Once Triton interprets its kernels, they cannot run on a GPU.
            device = "cuda" if torch.cuda.is_available() and not takeover.is_interpreting() else "cpu"
        if device == "cpu" and call_seconds is None:
            takeover.interpret_kernels()
        record = defaults.complete(operation) if isinstance(operation, Operation) else operation_named(operation)
        if call_seconds is not None:
            implementation = isolate(implementation, record, device, call_seconds)
        claims = claims_of(implementation, claims)
        function = as_operation(implementation, signature_of(record), record.name)
        return cls(
            name=getattr(implementation, "__name__", type(implementation).__name__),
            original=implementation,
            implementation=function,
            operation=claims.restrict(record),
            unrestricted=record,
            claims=claims,
            device=device,
            refusals=refusals,
            strict_errors=strict_errors,
            origin=_find_file(implementation),
            constants=_find_constants(implementation),
            compile_seconds=compile_seconds,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception_info: object) -> None:
        if isinstance(self.implementation, UntrustedFunction):
            self.implementation.end()

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Make torch's matrix products as exact as the bounds demand; on the CPU, use one thread.

        Threads that wait for one another are slower than one thread on small arrays.
        """
        threads = torch.get_num_threads()
        try:
            if self.device == "cpu":
                torch.set_num_threads(1)
            self._fill_undefined_lanes(self.claims.undefined_lanes_are_zero)
            with computing_exactly(), compilation.limit_compilation(self.device, self.compile_seconds):
                yield
        finally:
            self._fill_undefined_lanes(False)
            torch.set_num_threads(threads)

    def _fill_undefined_lanes(self, are_zero: bool) -> None:
        if self.device == "cpu":
            memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
            memory.undefined_lanes_are_zero(are_zero)

    def plan_checks(
        self, dtypes: Dtypes, only: str | Collection[str], forbid_fallback: bool = False
    ) -> list[tuple[Check, str]]:
        """Return the checks to make with their dtypes, the decisive check first."""
        claimed = select_dtypes(dtypes, DTYPES) or self.claims.dtypes or DTYPES
        checks = catalogue.checks_of(self.operation, self.device, self.claims)
        if forbid_fallback:
            checks.append(catalogue.fallback_of(self.operation))
        only = (only,) if isinstance(only, str) else only
        names = dict.fromkeys(name for check in checks for name in (catalogue.parts_of(check.name)[0], check.name))
        for name in only:
            if name not in names:
                close = did_you_mean(name, names) if isinstance(name, str) else ""
                raise ValueError(f"only: there is no check {name!r}: there are {', '.join(names)}{close}")
        selected = [c for c in checks if not only or {c.name, catalogue.parts_of(c.name)[0]} & {*only}]
        return [
            (check, dtype) for check in selected for dtype in check.of([name for name in DTYPES if name in claimed])
        ]

    def subject(self, dtype: str, gradients: bool = True) -> Subject:
        """Return the subject that a check takes; it is called to learn of its gradients if the check takes any."""

        def sibling(name: str) -> tuple[Operation, Callable[..., torch.Tensor]]:
            return operations()[name], backends.load(name, "torch")

        return Subject(
            operation=self.operation,
            backend=self.name,
            dtype=DTYPES[dtype].with_contract(OPEN),
            device=self.device,
            implementation=self.implementation,
            sibling=sibling,
            differentiable=gradients and self.has_gradients(dtype),
            claims=self.claims,
            foreign=True,
            elsewhere=isinstance(self.implementation, UntrustedFunction),
            strict_errors=self.strict_errors,
            large=LargeCases(self.operation, self.claims, DTYPES[dtype].with_contract(OPEN), self.constants),
        )

    def outcome(self, check: Check, dtype: str, search: Search) -> Outcome:
        """Run one check; return its outcome."""
        search.refusals, search.unreached = Refusals() if self.refusals else None, Unreached()
        search.boundary = Boundary()
        search.warnings, search.remarks = [], []
        search.start = time.perf_counter()
        last: list[str] = [""]
        search.note = lambda case: last.__setitem__(0, "" if case is None else repr(case))
        changes = self.watch.begin(search)
        gradients = catalogue.asks_for_gradients(check.name)
        outcome = run(
            check, dtype, lambda: self.subject(dtype, gradients), search, self.origin, changes, lambda: last[0]
        )
        if outcome.failure is None:
            return outcome
        return replace(
            outcome, failure=replace(outcome.failure, repeat=self.repeat(check, dtype, outcome.failure.blob))
        )

    def repeat(self, check: Check, dtype: str, blob: str | None) -> str:
        """Return the call that runs a failed check again, and only the case of a blob if there is one."""
        name, kernel = self.operation.name, self.name
        options: dict[str, Any] = {"only": [check.name], "dtypes": [dtype], "device": self.device}
        if isinstance(self.implementation, UntrustedFunction):
            kernel, options["untrusted"] = repr(f"{self.implementation.file}:{self.implementation.function}"), True
        if not self.refusals:
            options["refusals"] = False
        if self.strict_errors:
            options["strict_errors"] = True
        if catalogue.parts_of(check.name)[0] == catalogue.FALLBACK.name:
            options["forbid_fallback"] = True
        if blob:
            options["reproduce"] = blob
        arguments = [f"{option}={value!r}" for option, value in options.items()]
        if str(self.claims):
            arguments.insert(0, f"claims=fourfold.Claims({self.claims})")
        return f"fourfold.verify({', '.join([kernel, repr(name) if self.is_registered() else name, *arguments])})"

    @functools.cached_property
    def watch(self) -> PackageWatch:
        """Return the watch over the program that judges, which begins with the first check."""
        return PackageWatch(self.origin, self.operation)

    @functools.lru_cache  # noqa: B019 - a trial is short-lived
    def is_registered(self) -> bool:
        """Return whether a call can name the operation in a string."""
        return self.operation.name in operations()

    @functools.lru_cache  # noqa: B019 - a trial is short-lived
    def has_gradients(self, dtype: str) -> bool:
        """Return whether gradients are claimed, and the output requires one if the inputs do."""
        if not self.claims.gradients or not self.operation.differentiable:
            return False
        return requires_gradient(self.implementation, self.operation, DTYPES[dtype], self.device)

    def silently_wrong_outside_of_the_claims(self, seed: int) -> list[str]:
        """Return a warning if a case outside of the claims gives a wrong result and no exception."""
        claims, record, dtype = self.claims, self.unrestricted, self._probe_dtype
        subject = replace(self.subject(dtype), operation=record, claims=Claims(accuracy=claims.accuracy))

        def outside(_: Any, elements: int) -> Any:
            return record.cases(DTYPES[dtype], elements).filter(
                lambda case: claims.excludes(record, case, DTYPES[dtype])
            )

        if claims.restrict(record) is record:
            return []
        search = Search(examples=OUTSIDE, elements=256, seed=seed, refusals=Refusals())
        probe = together(replace(subject, operation=replace(record, cases=outside, examples={})))
        failure = _failure_of(forward_agrees, probe, search)
        if failure is None or search.failing is None:
            return []
        return [f"outside of its claims it gives a wrong result, and no error: {search.describe(search.failing)}"]

    def silently_wrong_on_another_stream(self, seed: int) -> list[str]:
        """Return a warning if only the default stream is claimed and a call on another one gives a wrong result."""
        if self.claims.streams or self.device != "cuda":
            return []
        subject = replace(self.subject(self._probe_dtype), claims=replace(self.claims, streams=True))
        search = Search(examples=1, elements=256, seed=seed)
        if _failure_of(late_inputs_are_waited_for, together(subject), search) is None:
            return []
        return ["on any but the default stream it reads its inputs too early, and gives a wrong result"]

    @property
    def _probe_dtype(self) -> str:
        """Return the dtype for cases outside of the claims."""
        return next(name for name in ("float32", *DTYPES) if name in (self.claims.dtypes or DTYPES))


def _failure_of(check: Callable[[Subject, Search], None], subject: Subject, search: Search) -> Failure | None:
    """Return a subject's failure of a check, or None if it passes or raises another exception."""
    with contextlib.suppress(Exception, NotReached):
        try:
            with convert_escapes():
                check(subject, search)
        except Failure as failure:
            return failure
    return None


def _shortcomings(outcomes: Sequence[Outcome], claims: Claims) -> Iterator[str]:
    """Yield why an implementation does not pass although no check failed."""
    if any(o.outcome == Status.FAILED for o in outcomes):
        return
    parts = list(dict.fromkeys(catalogue.parts_of(o.check)[1] for o in outcomes))
    for output in [output for output in parts if output] or parts:
        of_output = [o for o in outcomes if catalogue.parts_of(o.check)[1] == output]
        for shortcoming in _output_shortcomings(of_output, claims):
            yield f"{output}: {shortcoming}" if output else shortcoming


def _output_shortcomings(outcomes: Sequence[Outcome], claims: Claims) -> Iterator[str]:
    """Yield the shortcomings of the outcomes for one output."""
    decisive = [o for o in outcomes if catalogue.parts_of(o.check)[0] == FORWARD] or list(outcomes)
    if not any(o.outcome == Status.PASSED for o in decisive):
        reasons = dict.fromkeys(o.reason or "" for o in decisive)
        yield f"nothing was verified: {'; '.join(reasons) or 'no check was planned'}"
    elif claims.gradients and any(o.exclusion is Exclusion.FORWARD_ONLY for o in outcomes):
        yield f"its output has no gradient where its inputs do; {ACCEPT}"
    else:
        backward = [o for o in outcomes if catalogue.parts_of(o.check)[0] == BACKWARD.name]
        if backward and not any(o.outcome == Status.PASSED for o in backward):
            yield f"no gradient was verified: {backward[0].reason}; {ACCEPT}"


def signature_of(operation: Operation) -> inspect.Signature:
    """Return the signature of an operation."""
    return inspect.signature(reference_of(operation))


def isolate(implementation: Any, record: Operation, device: str, call_seconds: float) -> UntrustedFunction:
    """Return an implementation that runs in its own process."""
    if isinstance(implementation, UntrustedFunction):
        return implementation
    if device != "cpu":
        raise ValueError('untrusted=True needs device="cpu": memory of a GPU is not shared with another process yet')
    if isinstance(implementation, str):
        place, _, function = implementation.rpartition(":")
    else:
        place, function = str(_find_file(implementation)), getattr(implementation, "__qualname__", "<locals>")
    if not place or not all(name.isidentifier() for name in function.split(".")):
        raise ValueError(
            f"untrusted=True needs a function that a file or a module defines by a name, not {implementation!r}"
        )
    if place.endswith(".py"):
        place = str(Path(place).resolve())
    return UntrustedFunction(place, function, signature_of(record), record.name, call_seconds, lists=record.lists)


def _find_constants(implementation: Any) -> Constants:
    if isinstance(implementation, UntrustedFunction):
        return file_constants(implementation.file, implementation.function)
    return constants_of(implementation)


def _find_file(implementation: Any) -> Path:
    if isinstance(implementation, UntrustedFunction):
        return implementation.file
    if isinstance(implementation, Operation):  # a declaration is called as its definition
        implementation = reference_of(implementation)
    target = inspect.unwrap(implementation) if callable(implementation) else implementation
    for candidate in (target, type(target)):
        with contextlib.suppress(TypeError, OSError):
            return Path(inspect.getfile(candidate)).resolve()
    return Path("/dev/null")
