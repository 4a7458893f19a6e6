"""The functions that verify one implementation in this process: `verify`, `assert_correct` and, for pytest, `suite`."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fourfold.api.progress import display
from fourfold.checks import catalogue
from fourfold.checks.catalogue import FORWARD, Check
from fourfold.checks.search import Search
from fourfold.engine.verdict import Verdict, holding_lines, refusal_lines
from fourfold.engine.verification import CheckPlan, Trial, _warn_of_refusals, verify_trial
from fourfold.numerics.dtypes import Dtypes
from fourfold.operations.claims import Claims
from fourfold.operations.limits import CALL_SECONDS, COMPILE_SECONDS, EXAMPLES
from fourfold.operations.outcomes import NOT_MADE, WRONG, Exclusion, Status
from fourfold.operations.record import Operation

# Options of a suite that do not configure its searches.
GIVEN = ("claims", "device", "refusals", "strict_errors", "compile_seconds")


def verify(
    implementation: Callable[..., torch.Tensor] | str,
    operation: Operation | str,
    *,
    claims: Claims | None = None,
    device: str = "auto",
    dtypes: Dtypes = (),
    only: str | Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int | None = None,
    reproduce: str | None = None,
    refusals: bool = True,
    strict_errors: bool = False,
    untrusted: bool = False,
    call_seconds: float = CALL_SECONDS,
    compile_seconds: float = COMPILE_SECONDS,
    first_failure: bool = False,
    seconds: float = math.inf,
    forbid_fallback: bool = False,
    accept: bool = False,
) -> Verdict:
    """Run every check of an operation on an implementation.

    Args:
        implementation: a function, an ``autograd.Function`` or an ``nn.Module``, which takes the operation's arguments
            by their names or in their order and returns a new tensor, or changes the arguments that the operation
            mutates. An untrusted one may be given as "FILE_OR_MODULE:FUNCTION", and is then never imported in this
            process.
        operation: the operation that it must compute: a record, see `fourfold.operation`, or the name of a known one.
        claims: its claims; by default those of the decorator `fourfold.claims`.
        device: "cpu", "cuda", or "auto" for a GPU if there is one. After a verification on the CPU, all Triton kernels
            of the process are interpreted.
        dtypes: the dtypes to check, or their names; all claimed ones if empty.
        only: the names of the checks to make; all if empty. "forward" makes the check of each output.
        examples: the number of generated cases that each check runs.
        seed: of the generated cases; random by default.
        reproduce: the ``blob`` of a finding: only this case runs.
        refusals: whether an exception of the implementation's own is a refusal of that case instead of a failure.
        strict_errors: whether bad input must raise the operation's declared errors.
        untrusted: whether it runs in its own process, where it cannot change the code that judges it. CPU only.
        call_seconds: the time limit of a call of an untrusted implementation.
        compile_seconds: the processor time that Triton's compiler may take for a kernel. A case with a kernel that
            takes longer is not reached.
        first_failure: whether to stop after the first check that fails.
        seconds: the time after which no further check begins. If this leaves out checks, the verdict does not pass.
        forbid_fallback: whether to check that torch is used only for memory, and not to compute.
        accept: whether to verify it again, within the verdict's `suggested_claim`, if it does not pass but has one. The
            verdict then states these claims. All checks are made, whatever `first_failure` says.

    Returns:
        the verdict. A wrong implementation raises nothing here: see `assert_correct`.

    Raises:
        ValueError: an argument is not as described above. The message names it.
        TypeError: `claims` is no `Claims`.
        CannotBeCalled: the implementation cannot be called with the operation's arguments.
        CannotBeImported: it is untrusted, and the file has no such function.
    """
    options = {name: value for name, value in locals().items() if name not in ("implementation", "operation")}
    only = (only,) if isinstance(only, str) else only
    own_process = call_seconds if untrusted else None
    plan = CheckPlan(
        dtypes=dtypes,
        only=only,
        examples=examples,
        seed=seed,
        reproduce=reproduce,
        first_failure=first_failure and not accept,
        seconds=seconds,
        forbid_fallback=forbid_fallback,
    )
    with Trial.of(
        implementation, operation, claims, device, refusals, strict_errors, own_process, compile_seconds
    ) as trial:
        pairs = [(check.name, dtype) for check, dtype in trial.plan_checks(dtypes, only, forbid_fallback)]
        with display(pairs) as tell:
            verdict = verify_trial(trial, replace(plan, on_check=tell))
        if verdict.passed or not accept or verdict.suggested_claim in ("", verdict.claims):
            return verdict
    options["claims"] = Claims.parse(verdict.suggested_claim)
    forward_only = {o.check for o in verdict.outcomes if o.exclusion is Exclusion.FORWARD_ONLY}
    kinds = {catalogue.parts_of(name)[0] for name in forward_only}
    options["only"] = [name for name in only if name not in forward_only | kinds]
    return verify(implementation, operation, **options)


def assert_correct(implementation: Callable[..., torch.Tensor], operation: Operation | str, **options: Any) -> None:
    """Verify an implementation, and raise an exception if it does not pass.

    Args:
        implementation: see `verify`.
        operation: see `verify`.
        **options: those of `verify`.

    Raises:
        AssertionError: it does not pass. The message is the verdict's text.
    """
    __tracebackhide__ = True
    verdict = verify(implementation, operation, **options)
    if not verdict.passed:
        raise AssertionError(str(verdict))


def suite(implementation: Callable[..., torch.Tensor], operation: Operation | str, **options: Any) -> type:
    """Return a test class for pytest, with one test for each check and one case for each dtype.

    Assign it to a name that begins with Test: ``TestSoftmax = fourfold.suite(my_softmax, "softmax")``.

    Args:
        implementation: see `verify`.
        operation: see `verify`.
        **options: those of `verify`.

    Raises:
        ValueError: an option is not as `verify` describes.
    """
    trial_options = {name: options.pop(name) for name in GIVEN if name in options}
    dtypes, only = options.pop("dtypes", ()), options.pop("only", ())
    trial = Trial.of(
        implementation,
        operation,
        **{"claims": None, "device": "auto", "refusals": True, "strict_errors": False, **trial_options},
    )
    search = Search(**{"examples": EXAMPLES, **options})
    planned: dict[str, list[str]] = {}
    checks_by_name = {}
    findings = _Findings()
    for check, dtype in trial.plan_checks(dtypes, only):
        planned.setdefault(check.name, []).append(dtype)
        checks_by_name[check.name] = check
    tests = {
        _test_name(name): _test(trial, checks_by_name[name], names, search, findings) for name, names in planned.items()
    }
    source = inspect.currentframe()
    module = source.f_back.f_globals.get("__name__", __name__) if source and source.f_back else __name__
    return type("TestSuite", (), {**tests, "__doc__": f"{trial.name} as {trial.operation.name}", "__module__": module})


@dataclass
class _Findings:
    """What the tests of a suite have found.

    Attributes:
        wrong: the dtypes and outputs whose forward result is wrong.
        causes: the first test with each cause of a failure, by dtype and cause.
    """

    wrong: set[tuple[str, str]] = field(default_factory=set)
    causes: dict[tuple[str, str], str] = field(default_factory=dict)


def _test_name(check: str) -> str:
    return f"test_{check.replace(': ', '_').replace(' ', '_')}"


def _test(
    trial: "Trial", check: Check, dtypes: Sequence[str], search: Search, findings: _Findings
) -> Callable[..., None]:
    """Return one test of a suite."""
    refused_all: set[str] = set()
    kind, output = catalogue.parts_of(check.name)

    def test(self: Any, dtype: str) -> None:
        key, name = (dtype, output), f"{trial.name} as {trial.operation.name}, {dtype}"
        if key in findings.wrong and trial.device == "cuda" and kind != FORWARD:
            pytest.skip(NOT_MADE)
        copy = replace(search, brief=key in findings.wrong and kind != FORWARD)
        with trial.settings():
            outcome = trial.outcome(check, dtype, copy)
        if outcome.failure is not None:
            if kind == FORWARD and outcome.grade == WRONG:
                findings.wrong.add(key)
            test_id = f"{_test_name(check.name)}[{dtype}]"
            first = findings.causes.setdefault((dtype, outcome.failure.cause or test_id), test_id)
            if first != test_id:
                pytest.fail(f"{name}: same cause as {first}: {outcome.failure.message.splitlines()[0]}", pytrace=False)
            lines = [f"{name}: {outcome.failure}", *holding_lines(outcome.holds)]
            pytest.fail("\n".join(lines), pytrace=False)
        if outcome.outcome == Status.REFUSED and kind == FORWARD:
            refused_all.add(dtype)
            if refused_all == {*dtypes}:
                pytest.fail(f"{name}: nothing was verified: {outcome.reason}", pytrace=False)
        if outcome.refusals:
            summary = "; ".join(refusal_lines(Counter(outcome.refusals), outcome.examples, copy.boundary.claim()))
            _warn_of_refusals(trial, f"{name}, {check.name}: {summary}")
        if outcome.reason:
            pytest.skip(outcome.reason)

    test.__doc__ = check.run.__doc__ or check.name
    test = pytest.mark.parametrize("dtype", dtypes)(test)
    return pytest.mark.decisive(test) if kind == FORWARD else test
